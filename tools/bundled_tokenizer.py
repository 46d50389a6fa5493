"""Train the bundled model's tokenizer (byte-level BPE in Qwen's json shape), then encode the corpus with it.

    python tools/bundled_tokenizer.py corpus models/bole-coder-16m encoded

Ids run from the most used token to the least (special tokens last), so the rows of a draft head over the n most
frequent tokens are the first n rows of the embedding.  `encoded` gets train.bin (uint16, little endian), one
PACKAGE.bin for each held-out package, and counts.json.
"""

import argparse
import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

EOT, START, END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 8192
TRAIN_BYTES = 60_000_000
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)


def documents(path):
    return [doc for doc in path.read_text(encoding="utf-8").split(EOT) if doc]


def dressed(vocab, merges):
    """A tokenizer with these ids and merges, and Qwen's normaliser, pre-tokeniser and decoder."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges) if vocab else models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    return tokenizer


def train(docs):
    """Byte-level BPE over a sample of the documents, with the ids as the trainer gives them."""
    sample, size = [], 0
    for doc in docs:
        sample.append(doc)
        size += len(doc)
        if size > TRAIN_BYTES:
            break
    tokenizer = dressed({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer, docs, eot):
    """One flat array: every document's ids, each followed by the end-of-text id."""
    parts = []
    for i in range(0, len(docs), 256):
        for encoding in tokenizer.encode_batch_fast(docs[i : i + 256], add_special_tokens=False):
            parts.append(np.array(encoding.ids + [eot], dtype=np.uint16))
    return np.concatenate(parts)


def renumbered(tokenizer, counts):
    """The same tokenizer with its ids in order of falling use, and the map from the old ids."""
    model = json.loads(tokenizer.to_str())["model"]
    size = len(model["vocab"])
    order = sorted(range(size), key=lambda i: (-counts[i], i))
    new_id = np.empty(VOCAB, dtype=np.uint16)
    new_id[order] = np.arange(size)
    new_id[size:] = np.arange(size, VOCAB)
    vocab = {token: int(new_id[i]) for token, i in model["vocab"].items()}
    result = dressed(vocab, [tuple(pair) for pair in model["merges"]])
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return result, new_id


def save(tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    assert sorted(ids.values()) == list(range(VOCAB - len(SPECIALS), VOCAB)), ids
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for t, i in ids.items()
        },
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOT,
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": EOT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    generation = {
        "do_sample": True,
        "eos_token_id": [ids[END], ids[EOT]],
        "pad_token_id": ids[EOT],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("encoded", type=Path)
    args = parser.parse_args()
    docs = [doc for path in sorted((args.corpus / "train").glob("*.txt")) for doc in documents(path)]
    shuffled = list(docs)
    random.Random(0).shuffle(shuffled)
    raw = train(shuffled)
    eot = VOCAB - len(SPECIALS)
    print("trained on a sample; encoding with", multiprocessing.cpu_count(), "cores", flush=True)
    ids = encode(raw, docs, eot)
    counts = np.bincount(ids, minlength=VOCAB)
    tokenizer, new_id = renumbered(raw, counts)
    save(tokenizer, args.model)
    ids = new_id[ids]
    for doc in shuffled[:50]:
        got = tokenizer.encode(doc, add_special_tokens=False).ids
        assert got == [int(new_id[i]) for i in raw.encode(doc).ids]
        assert tokenizer.decode(got, skip_special_tokens=False) == doc
    args.encoded.mkdir(parents=True, exist_ok=True)
    ids.tofile(args.encoded / "train.bin")
    counts = np.bincount(ids, minlength=VOCAB)
    info = {
        "train_tokens": len(ids),
        "train_bytes": sum(len(doc.encode()) + len(EOT) for doc in docs),
        "counts": counts.tolist(),
        "coverage": {},
        "heldout": {},
    }
    for path in sorted((args.corpus / "heldout").glob("*.txt")):
        held = documents(path)
        held_ids = encode(tokenizer, held, eot)
        held_ids.tofile(args.encoded / f"{path.stem}.bin")
        info["heldout"][path.stem] = {
            "tokens": len(held_ids),
            "bytes": sum(len(doc.encode()) for doc in held),
            "documents": len(held),
        }
        info["coverage"][path.stem] = {n: float((held_ids < n).mean()) for n in (1024, 2048, 3072, 4096)}
    info["coverage"]["train"] = {n: float(counts[:n].sum() / counts.sum()) for n in (1024, 2048, 3072, 4096)}
    (args.encoded / "counts.json").write_text(json.dumps(info))
    del info["counts"]
    print(json.dumps(info, indent=1))


if __name__ == "__main__":
    main()
