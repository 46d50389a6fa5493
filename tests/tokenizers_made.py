"""Small byte-level BPE tokenizers in the json shape of Qwen's, for tests."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")  # added tokens that are not special
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)


@lru_cache(maxsize=4)
def _trained(vocab: int) -> str:
    """tokenizer.json of `vocab` ids, the last of them the added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = vocab - len(SPECIAL) - len(PLAIN)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = [Path(__file__).read_text(encoding="utf-8"), "日本語 日本 café naïve < <| |> 👩"] * 20
    corpus += [f"word{i} stem{i % 7}ing {i * i}" for i in range(500)]
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == size
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in PLAIN])
    return tokenizer.to_str()


def make_tokenizer(
    folder: Path,
    vocab: int = 512,
    sparse: int | None = None,
    template: str | None = None,
    setting: Any = None,
    eos_token: Any = SPECIAL[2],
) -> Path:
    """tokenizer.json and tokenizer_config.json; `sparse` adds <|far|> at that id, `template` is chat_template.jinja's
    text, `setting` is tokenizer_config.json's chat_template."""
    raw = json.loads(_trained(vocab))
    if sparse is not None:
        far = {"id": sparse, "content": "<|far|>", "single_word": False, "lstrip": False, "rstrip": False}
        raw["added_tokens"].append(far | {"normalized": False, "special": True})
        raw["model"]["vocab"] |= {t["content"]: t["id"] for t in raw["added_tokens"]}  # else they are renumbered
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "pad_token": SPECIAL[0]}
    config |= {"clean_up_tokenization_spaces": False} | ({"chat_template": setting} if setting is not None else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def added_ids(folder: Path) -> dict[str, int]:
    """{content: id} of the added tokens."""
    return {t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
