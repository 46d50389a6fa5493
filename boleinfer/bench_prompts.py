"""`boleinfer bench prompts`: from a prompt to its first token, by how long it is, for one request on the GPU."""

from __future__ import annotations

import argparse
import gc
import sys
from statistics import median
from typing import Any

from boleinfer import bench_tables, timing
from boleinfer.bench_gpu import drop, product_tflop_s, read_prompts, step_flop, weight_bytes
from boleinfer.llm import LLM
from boleinfer.provenance import gpu_provenance
from boleinfer.results import output_file, write

SIZES = ("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b")
LENGTHS = (100, 200, 500, 1000, 2000, 8000)  # tokens of a prompt
BEFORE, TIMES = 2, 5  # readings that launch a step's kernels and capture them, and those of which the median counts


def bench_prompts(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when a prompt's first token was not the same each time."""
    sizes, lengths = args.random_weights or SIZES, args.lengths or LENGTHS
    output = output_file(args, "prompts.json", quick=bool(args.random_weights or args.lengths))
    record: dict[str, Any] = {"what": "one request's first token, random weights, nothing drafted"}
    record |= {**gpu_provenance(), "read_gb_s": timing.read_gb_s(), "product_tflop_s": product_tflop_s(), "rows": []}
    for size in sizes:
        llm = LLM(device="cuda", random_weights=size, draft="none", max_model_len=max(lengths) + 8)
        for length in lengths:
            found = first_token(llm, length)
            floor_ms = floor(llm, length, record["read_gb_s"], record["product_tflop_s"])
            record["rows"].append({"shape": size, **found, "floor_ms": floor_ms, "share": floor_ms / found["ms"]})
        print(f"{size}: {len(lengths)} prompts", file=sys.stderr)
        write(record, output, note=False)
        del llm
        gc.collect()
    print(bench_tables.prompts(record))
    write(record, output)
    return 0 if all(row["same_tokens"] for row in record["rows"]) else 1


def first_token(llm: LLM, length: int) -> dict[str, Any]:
    """Milliseconds until a random prompt of so many tokens has its first token: of the first reading, whose steps may
    have to be compiled, and are launched one by one; and of those behind it, which replay graphs."""
    tokens, ms = [], []
    for _ in range(BEFORE + TIMES):
        requests, seconds = read_prompts(llm, 1, length)
        tokens.append(requests[0].generated[0])
        ms.append(1e3 * seconds)
        drop(llm, requests)
    typical = median(ms[BEFORE:])
    return {
        "prompt": length,
        "first_ms": ms[0],
        "ms": typical,
        "tokens_per_s": 1e3 * length / typical,
        "same_tokens": len(set(tokens)) == 1,
    }


def floor(llm: LLM, length: int, read_gb_s: float, tflop_s: float) -> float:
    """Milliseconds that the steps of a prompt take if products with weights are all they do: each reads the matrices
    that it needs once, and multiplies every row with them, but with the head one; whichever takes longer."""
    most, head = llm.engine.scheduler.max_rows, llm.config.vocab_size * llm.config.hidden_size
    ms = 0.0
    for begin in range(0, length, most):
        rows = min(most, length - begin)
        flop = step_flop(llm, rows) - 2 * (rows - 1) * head
        ms += max(weight_bytes(llm, rows) / read_gb_s / 1e6, flop / tflop_s / 1e9)
    return ms
