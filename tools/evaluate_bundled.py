"""Measure the bundled model on held-out packages: bits per byte, loss by position, MTP acceptance, and samples.

    python tools/evaluate_bundled.py models/bole-coder-16m encoded --out evaluation.json

Runs the shipped weights in bfloat16 on a GPU (float32 elsewhere).  Acceptance at depth d is the share of drafts of
depth d that equal the trunk's own greedy choice, given that the drafts before it in the same chain did.
"""

import argparse
import json
import math
from pathlib import Path

import bundled_model as bm
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n",
    'def read_csv(path, delimiter=","):\n    """Read a comma-separated file and return',
    "import numpy as np\n\ndef ",
    "# file: mypackage/utils.py\n",
    "def test_",
    "async def fetch(session, url):\n",
)
DEPTHS = 4


def windows(ids, length, stride, batch):
    """Batches of (window, first scored target): every target is scored once, most with length - stride of context."""
    rows, lows = [], []
    for start in range(0, max(1, len(ids) - 1), stride):
        rows.append(ids[start : start + length + 1])
        lows.append(0 if start == 0 else length - stride)
        if start + length + 1 >= len(ids):
            break
    for i in range(0, len(rows), batch):
        size = max(len(row) for row in rows[i : i + batch])
        yield (
            torch.stack([F.pad(row, (0, size - len(row)), value=-1) for row in rows[i : i + batch]]),
            lows[i : i + batch],
        )


def token_losses(model, ids):
    """Nats of each next token [B, T - 1]; where a target is -1 (padding) zero."""
    h = model.hidden(ids[:, :-1].clamp(min=0))
    out = []
    for row, target in zip(h, ids[:, 1:], strict=True):
        logits = model.logits(row).float()
        out.append(F.cross_entropy(logits, target, ignore_index=-1, reduction="none"))
    return torch.stack(out)


def bits_per_byte(model, ids, size, length=2048, batch=16):
    total, count = 0.0, 0
    for rows, lows in windows(ids, length, length // 2, batch):
        losses = token_losses(model, rows)
        for loss, low, row in zip(losses, lows, rows, strict=True):
            total += loss[low:].double().sum().item()
            count += int((row[1 + low :] >= 0).sum())
    return {
        "bits_per_byte": total / math.log(2) / size,
        "nats_per_token": total / count,
        "tokens": count,
        "bytes": size,
    }


def by_position(model, ids, length=4096, bins=8, rows=32):
    """Mean nats per token in each of `bins` equal parts of long windows."""
    starts = torch.linspace(0, len(ids) - length - 2, rows).long().tolist()
    parts = [
        token_losses(model, torch.stack([ids[s : s + length + 1] for s in starts[i : i + 8]]))
        for i in range(0, rows, 8)
    ]
    return torch.cat(parts).mean(0).view(bins, -1).mean(1).tolist()


def acceptance(model, rows, low=0):
    """Acceptance per depth over windows [B, T] whose tokens are given; positions before `low` are not counted."""
    alike, overlap = [], []
    for row in rows.split(4):
        h = model.hidden(row)
        logits = model.logits(h)
        choice = logits.argmax(-1)
        p = row.shape[1] - DEPTHS - 1
        hits, shared = [], []
        for s, y in enumerate(model.draft(h[:, :p], row, DEPTHS), 1):
            drafts = model.logits(y)
            hits.append(drafts.argmax(-1) == choice[:, s : s + p])
            shared.append(torch.minimum(drafts.float().softmax(-1), logits[:, s : s + p].float().softmax(-1)).sum(-1))
        alike.append(torch.stack(hits, -1)[:, low:].flatten(0, 1))
        overlap.append(torch.stack(shared, -1)[:, low:].flatten(0, 1))
    alike, overlap = torch.cat(alike), torch.cat(overlap)
    chain = alike.cumprod(-1).bool()
    before = torch.cat([torch.ones_like(chain[:, :1]), chain[:, :-1]], -1)
    return {
        "given_the_text": alike.float().mean(0).tolist(),
        "given_the_chain": [(chain[:, d].sum() / before[:, d].sum()).item() for d in range(DEPTHS)],
        "tokens_per_pass": [1 + chain[:, :k].float().sum(-1).mean().item() for k in range(1, DEPTHS + 1)],
        "sampling_overlap": overlap.mean(0).tolist(),
        "positions": len(alike),
    }


def generate(model, prompts, new, temperature=0.0, seed=0):
    """Continue prompts (lists of ids) by `new` tokens without a cache: the whole window is run again for each token."""
    lengths = torch.tensor([len(p) for p in prompts], device=model.device)
    width = -(-(int(lengths.max()) + new) // 64) * 64
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=model.device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    gen = torch.Generator(model.device).manual_seed(seed)
    at = torch.arange(len(prompts), device=model.device)
    for i in range(new):
        logits = model.logits(model.hidden(ids)[at, lengths + i - 1]).float()
        if temperature:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=gen)[:, 0]
        else:
            token = logits.argmax(-1)
        ids[at, lengths + i] = token
    return [row[: n + new] for row, n in zip(ids, lengths.tolist(), strict=True)]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("encoded", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, where it is not in the model's folder")
    parser.add_argument("--new", type=int, default=256, help="greedy tokens per prompt for the acceptance there")
    parser.add_argument("--prompts", type=int, default=48, help="greedy prompts per package")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = bm.Model(bm.load(args.model, device), torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(args.tokenizer or args.model / "tokenizer.json"))
    sizes = json.loads((args.encoded / "counts.json").read_text())["heldout"]
    result = {"dtype": str(model.dtype), "packages": {}}
    everything, all_bits, all_bytes = [], 0.0, 0
    for name in sorted(sizes):
        ids = torch.from_numpy(np.fromfile(args.encoded / f"{name}.bin", dtype=np.uint16).astype(np.int64)).to(device)
        row = bits_per_byte(model, ids, sizes[name]["bytes"])
        all_bits, all_bytes = all_bits + row["bits_per_byte"] * row["bytes"], all_bytes + row["bytes"]
        row["nats_by_position_of_4096"] = by_position(model, ids)
        starts = torch.linspace(0, len(ids) - 1026, 48).long().tolist()
        rows = torch.stack([ids[s : s + 1024] for s in starts])
        row["acceptance_teacher_forced"] = acceptance(model, rows)
        starts = torch.linspace(0, len(ids) - 1026, args.prompts).long().tolist()
        prompts = [ids[s : s + 128].tolist() for s in starts]
        texts = torch.stack(generate(model, prompts, args.new))
        row["acceptance_greedy"] = acceptance(model, texts, low=127)
        everything.append(texts)
        result["packages"][name] = row
        print(name, json.dumps(row), flush=True)
    result["bits_per_byte_all"] = all_bits / all_bytes
    texts = torch.cat(everything)
    result["acceptance_greedy_all"] = acceptance(model, texts, low=127)
    tail = texts[:, 128:]
    result["greedy_distinct_4grams"] = float(
        np.mean([len(set(zip(*(r[i:] for i in range(4)), strict=False))) / (len(r) - 3) for r in tail.tolist()])
    )
    print(
        "all",
        result["bits_per_byte_all"],
        json.dumps(result["acceptance_greedy_all"]),
        result["greedy_distinct_4grams"],
    )
    ids = [tokenizer.encode(p, add_special_tokens=False).ids for p in PROMPTS]
    result["samples"] = []
    for temperature in (0.0, 0.6):
        for prompt, row in zip(PROMPTS, generate(model, ids, 160, temperature), strict=True):
            text = tokenizer.decode(row.tolist(), skip_special_tokens=False).split("<|endoftext|>")[0]
            result["samples"].append({"prompt": prompt, "temperature": temperature, "text": text})
            print(f"--- T={temperature}\n{text}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
