"""`boleinfer bench decode` and `bench verify`: whole steps of published shapes, random weights, on the current GPU.

Requests are driven by hand through the engine, so that prompts, steps and replays are timed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from boleinfer import bench_graphs, bench_roofline, bench_tables, device, timing
from boleinfer.cuda_executor import CudaExecutor
from boleinfer.device import Fp8
from boleinfer.draft.base import Drafter
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.forest import Tree
from boleinfer.graphs import Eager, Graphs
from boleinfer.heard import hear
from boleinfer.llm import LLM
from boleinfer.memory_plan import FLOAT, Memory, envelopes
from boleinfer.ops.linear import linear
from boleinfer.params import SamplingParams
from boleinfer.provenance import gpu_provenance
from boleinfer.random_weights import normal
from boleinfer.request import Request
from boleinfer.results import output_file, write
from boleinfer.sampling import Sampler
from boleinfer.state import GDNLayer

DECODE: dict[str, tuple[int, ...]] = {  # published size: requests at once
    **{f"qwen3.5-{n}b": (1,) for n in ("0.8", "2", "4", "27")},
    "qwen3.5-9b": (1, 8, 32, 128),
    **dict.fromkeys(("qwen3.5-9b-fp8", "qwen3.5-27b-fp8"), (1,)),
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3-next-80b-a3b-fp8"), (1, 8)),
}
GRAPHS_OF = "qwen3.5-27b"  # whose graphs are weighed
VERIFY_SIZES = ("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b")
VERIFY_ROWS = (1, 8, 16, 32, 64, 128)
STEPS, WARM, COMPARED = 64, 8, 16  # timed steps, steps before them, tokens compared with launching one by one
COMPARED_PROMPT = 64  # tokens of the prompts before those
HEARD = 8  # requests of which the logits are compared as well
REPLAYS = 32  # of a graph between two events: as many as a ring of 32 needs to be folded once
ROUNDS = 3
PROMPT = 1024
PRODUCT = (4096, 4096, 12288)  # R, Din, Dout of the product that shows what arithmetic gives


def bench_decode(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when a graph gave other tokens or logits than its kernels launched one by one."""
    quick = bool(args.random_weights or args.batch)
    output = output_file(args, "decode.json", quick)
    record = _record("plain decoding, random weights; a step as the engine runs it, and its graph alone")
    record["product_tflop_s"] = product_tflop_s()
    for size in args.random_weights or DECODE:
        batches = args.batch or DECODE.get(size, (1,))
        llm = load(size, args.prompt, max_batch=max(8, *batches))
        for batch in batches:
            record["rows"].append(decode_row(llm, size, batch, args.prompt, record["read_gb_s"]))
            print(f"{size} at batch {batch}: {record['rows'][-1]['ms']:.2f} ms", file=sys.stderr)
            write(record, output, note=False)
        del llm
        gc.collect()
    if not quick:
        record["graphs"] = bench_graphs.weighed(GRAPHS_OF)
    print(bench_tables.decode(record))
    write(record, output)
    if args.roofline:
        plot = (output or Path("decode.json")).with_suffix(".svg")
        plot.write_text(bench_roofline.plot(record), encoding="utf-8")
        print(f"written to {plot}", file=sys.stderr)
    return 0 if all(row["same_tokens"] and row["same_logits"] for row in record["rows"]) else 1


def bench_verify(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    sizes, counts = args.random_weights or VERIFY_SIZES, args.rows or VERIFY_ROWS
    output = output_file(args, "verify.json", quick=bool(args.random_weights or args.rows))
    record = _record("one request's tree of so many nodes, none accepted, against a step of one row")
    for size in sizes:
        record["rows"] += verify_rows(size, counts, args.prompt)
        print(f"{size}: {len(counts)} sizes of trees", file=sys.stderr)
        write(record, output, note=False)
        gc.collect()
    print(bench_tables.verify(record))
    write(record, output)
    return 0


def _record(what: str) -> dict[str, Any]:
    return {"what": what, **gpu_provenance(), "read_gb_s": timing.read_gb_s(), "rows": []}


def load(size: str, prompt: int, max_batch: int = 8, draft: str | Drafter = "none", draft_nodes: int = 8) -> LLM:
    """A published size with random weights, and room for everything that is done here to a request."""
    room = prompt + 4 * (WARM + STEPS + ROUNDS * REPLAYS)
    return LLM(
        device="cuda",
        random_weights=size,
        draft=draft,
        draft_nodes=draft_nodes,
        max_batch=max_batch,
        max_model_len=room,
    )


# ---- driving the engine ----------------------------------------------------------------------------------------------


def read_prompts(llm: LLM, count: int, length: int, seed: int = 0) -> tuple[list[Request], float]:
    """Greedy requests with random prompts that go on as long as there is room; seconds until each has a token."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    allowed = llm.tokenizer.valid_ids(llm.config.vocab_size)
    requests = []
    for tokens in rng.integers(0, llm.config.vocab_size, (count, length)).tolist():
        sampler = Sampler(params, seed, 0, tokens, frozenset(), allowed)
        requests.append(Request(tokens, params, sampler, llm.max_model_len, frozenset()))
    began = time.perf_counter()
    for request in requests:
        llm.engine.add(request)
    while any(not request.stats.generated_tokens for request in requests):
        llm.engine.step()
    return requests, time.perf_counter() - began


def step_s(llm: LLM, steps: int) -> list[float]:
    """Wall seconds of each of the next steps."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def drop(llm: LLM, requests: Sequence[Request]) -> None:
    """Ends the requests."""
    for request in requests:
        llm.engine.drop(request)


def graph_ms(llm: LLM, rows: int, repeats: int = REPLAYS) -> float:
    """Milliseconds of the GPU for the last step again, which had so many rows; its requests may only be dropped then,
    or go on decoding: the GPU has tokens of which the host does not know."""
    executor = executor_of(llm)
    with executor.runner.on():
        return timing.event_ms(lambda: executor.repeat(rows), repeats, ROUNDS)


@contextlib.contextmanager
def one_by_one(llm: LLM) -> Iterator[None]:
    """Inside it the kernels of a step are launched from Python."""
    executor = executor_of(llm)
    kept, executor.runner = executor.runner, Eager()
    try:
        yield
    finally:
        executor.runner = kept


def executor_of(llm: LLM) -> CudaExecutor:
    """The executor of a model that was loaded on the GPU."""
    return cast(CudaExecutor, llm.engine.executor)


# ---- rows of the results ---------------------------------------------------------------------------------------------


def decode_row(llm: LLM, size: str, batch: int, prompt: int, read_gb_s: float) -> dict[str, Any]:
    """One batch of one shape."""
    requests, _ = read_prompts(llm, batch, prompt)
    step_s(llm, WARM)
    runner = executor_of(llm).runner
    replays = runner.replays if isinstance(runner, Graphs) else 0
    ms = 1e3 * median(step_s(llm, STEPS))
    captured = isinstance(runner, Graphs) and runner.replays == replays + STEPS
    context = float(np.mean([r.committed for r in requests])) - STEPS / 2
    alone_ms = graph_ms(llm, batch)
    drop(llm, requests)
    short = min(prompt, COMPARED_PROMPT)
    answers = first_answers(llm, batch, short)
    with one_by_one(llm):
        again = first_answers(llm, batch, short)
        launches = launches_of_a_step(llm, batch, short)
    nbytes = step_bytes(llm, batch, context)
    floor_ms = nbytes / read_gb_s / 1e6
    return {
        "shape": size.removesuffix("-fp8"),
        "dtype": "fp8" if size.endswith("-fp8") else "bfloat16",  # of the matrices
        "batch": batch,
        "rows": next(rows for rows in envelopes(llm.engine.scheduler.max_rows) if rows >= batch),
        "context": context,
        "ms": ms,
        "graph_ms": alone_ms,
        "floor_ms": floor_ms,
        "share": floor_ms / ms,
        "graph_share": floor_ms / alone_ms,
        "read_bytes": nbytes,
        "flop": step_flop(llm, batch),
        "launches": launches,
        "captured": captured,
        "same_tokens": again[0] == answers[0],
        "same_logits": np.array_equal(again[1], answers[1]),
    }


def first_answers(llm: LLM, batch: int, prompt: int) -> tuple[list[list[int]], np.ndarray]:
    """The first tokens of some requests, and of the first of them the logits from the second one on,
    [requests, tokens, vocab]."""
    requests, _ = read_prompts(llm, batch, prompt)
    heard = hear(requests[:HEARD])
    while any(len(r.generated) < COMPARED for r in requests):
        llm.engine.step()
    drop(llm, requests)
    return [r.generated[:COMPARED] for r in requests], np.stack([rows[: COMPARED - 1] for rows in heard])


def launches_of_a_step(llm: LLM, batch: int, prompt: int) -> int:
    """Kernels that a step of so many requests launches, outside a graph."""
    requests, _ = read_prompts(llm, batch, prompt)
    step_s(llm, 2)  # from then on a call queues one step
    with timing.recorded() as launches:
        llm.engine.step()
    drop(llm, requests)
    return len(launches)


def verify_rows(size: str, counts: Sequence[int], prompt: int) -> list[dict[str, Any]]:
    """One shape: trees of each number of nodes, the root included."""
    rng = np.random.default_rng(1)
    trees = {n: random_tree(n - 1, rng) for n in counts}
    nodes = counts[0]

    def tree_of(request: Request) -> Tree:
        return trees[nodes]

    llm = load(size, prompt, 1, ScriptedDrafter(tree_of), max(1, max(counts) - 1))
    requests, _ = read_prompts(llm, 1, prompt)
    found: list[dict[str, Any]] = []
    for nodes in counts:
        step_s(llm, 3)
        ms = 1e3 * median(step_s(llm, STEPS // 4))
        alone_ms = graph_ms(llm, nodes, REPLAYS // 2)
        found.append({"shape": size, "rows": nodes, "ms": ms, "graph_ms": alone_ms})
    drop(llm, requests)
    for row in found:
        row["relative"] = row["graph_ms"] / found[0]["graph_ms"]
        row["relative_wall"] = row["ms"] / found[0]["ms"]
    return found


def random_tree(nodes: int, rng: np.random.Generator) -> Tree:
    """Random tokens, each below one of the eight before it, the first ones below the root too."""
    parents = [int(rng.integers(max(-1, i - 8), i)) for i in range(nodes)]
    return Tree.of(rng.integers(0, 1000, nodes).tolist(), parents)


def step_bytes(llm: LLM, batch: int, context: float) -> int:
    """Bytes that a step of one row a request has to read, each once: weights; states, windows but for the row's own
    place, rings half full, keys and values."""
    c, state = llm.config, llm.engine.state
    memory = Memory.of(c, False, state.dtype.itemsize, FLOAT)
    ring = memory.ring * (next(m.ring.g.shape[1] for m in state.layers if isinstance(m, GDNLayer)) - 1) / 2
    window = memory.conv * (1 - 1 / c.linear_conv_kernel_dim)
    return round(weight_bytes(llm, batch) + batch * (memory.state + window + ring + memory.kv * context))


def weight_bytes(llm: LLM, rows: int) -> float:
    """Bytes of weights that a step of so many rows reads.

    Without the embedding table (a tied one is the head) and the MTP layer, FP8 ones with their scales, of experts those
    that so many independent rows choose."""
    c = llm.config
    chosen = 1 - (1 - c.num_experts_per_tok / max(1, c.num_experts)) ** rows
    return sum(
        (chosen if expert else 1) * (w.bits.nbytes + w.scale.nbytes if isinstance(w, Fp8) else w.nbytes)
        for w, expert in _read_weights(llm)
    )


def step_flop(llm: LLM, batch: int) -> int:
    """Multiplications and additions of such a step's products with weights."""
    c = llm.config
    part = c.num_experts_per_tok / max(1, c.num_experts)
    weights = sum(
        (part if expert else 1) * (w.bits.size if isinstance(w, Fp8) else w.size) for w, expert in _read_weights(llm)
    )
    return round(2 * batch * weights)


def _read_weights(llm: LLM) -> Iterator[tuple[Any, bool]]:
    """Every weight that plain decoding reads, and whether only what the router chooses of it."""
    for name, w in llm.model.weights.items():
        if name != "embed_tokens" and not name.startswith("mtp."):
            yield w, ".experts." in name


def product_tflop_s() -> float:
    """Multiplications and additions in a second, in units of 10^12, of a large bf16 product."""
    R, Din, Dout = PRODUCT
    bf16 = device.dtype("bf16")
    x, w = normal((R, Din), bf16, 0, 0, 1.0), normal((Dout, Din), bf16, 0, 1, Din**-0.5)
    return 2 * R * Din * Dout / timing.calls_us([functools.partial(linear, x, w)] * 4) / 1e6
