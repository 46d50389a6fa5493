"""`boleinfer bench ring`: what committed factors cost, by the ring's capacity: reading them, and folding them."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np

from boleinfer import bench_tables, bench_tree, device, timing
from boleinfer.bench_gpu import WARM, drop, graph_ms, load, read_prompts, step_s
from boleinfer.bench_tree import Case, gdn_row, random, random_tree
from boleinfer.device import Array
from boleinfer.device_forest import upload, upload_paths
from boleinfer.forest import Forest, Tree
from boleinfer.ops import relative_error
from boleinfer.ops.gdn_commit import commit
from boleinfer.provenance import gpu_provenance
from boleinfer.results import output_file, write
from boleinfer.ring import Ring, fold

SIZE, LAYERS, HV = "qwen3.5-9b", 24, 32  # whose step is the measure, and its GDN layers
CAPACITIES, REQUESTS = (16, 32, 48, 64), (1, 8, 32)
TILE = 16  # entries of a ring that are taken together, so what a fill costs changes only with these
ACCEPTED = ((1, 1), (4, 16))  # tokens that a step commits, and the nodes that it has for it


def bench_ring(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    output = output_file(args, "ring.json", quick=bool(args.requests))
    read_gb_s = timing.read_gb_s()
    record: dict[str, Any] = {
        "what": "a ring of C committed factors: folding it, and reading it until then, beside a plain step",
        **gpu_provenance(),
        "read_gb_s": read_gb_s,
        "sizes": {"layers": LAYERS, "Hk": bench_tree.HK, "Hv": HV, "K": bench_tree.WIDTH, "V": bench_tree.WIDTH},
        "shape": SIZE,
        "rows": [],
    }
    requests = args.requests or REQUESTS
    steps = step_ms(requests, args.prompt)
    for B in requests:
        read = {n: read_us(B, n, read_gb_s) for _, n in ACCEPTED}
        for C in CAPACITIES:
            folded = fold_us(B, C)
            for tokens, nodes in ACCEPTED:
                record["rows"].append(row(B, C, tokens, nodes, read[nodes], folded, steps[B]))
        print(f"{B} requests: done", file=sys.stderr)
        write(record, output, note=False)
    print(bench_tables.ring(record))
    write(record, output)
    return 0


def row(
    B: int, C: int, tokens: int, nodes: int, read: dict[int, float], folded: dict[str, float], step: float
) -> dict[str, Any]:
    """One capacity; microseconds of a step, an average, all GDN layers together.

    Requests reach the ring's end one at a time, so what a fold costs is what one request's adds to a launch in which
    nobody folds, and is paid `tokens` times in C tokens by each."""
    folding = folded["none_us"] + B * tokens / C * (folded["one_us"] - folded["none_us"])
    return {
        **{"B": B, "C": C, "tokens": tokens, "N": nodes, **folded, "step_ms": step},
        "fold_us": folding,
        "read_us": LAYERS * mean(us for fill, us in read.items() if fill < C),
        "share": folding / 1e3 / step,
    }


def step_ms(requests: Sequence[int], prompt: int) -> dict[int, float]:
    """Milliseconds of a plain step's graph, by requests."""
    llm = load(SIZE, prompt, max_batch=max(requests))
    found = {}
    for B in requests:
        running, _ = read_prompts(llm, B, prompt)
        step_s(llm, WARM)
        found[B] = graph_ms(llm, B)
        drop(llm, running)
    del llm
    gc.collect()
    return found


def read_us(B: int, N: int, read_gb_s: float) -> dict[int, float]:
    """Microseconds of the delta rule of one layer, by entries in the ring."""
    rng = np.random.default_rng(B)
    trees = [random_tree(N, rng) for _ in range(B)]
    fills = range(TILE - 1, max(CAPACITIES), TILE)
    return {n: gdn_row(Case("tree", HV, trees, max(CAPACITIES), n), read_gb_s)["us"] for n in fills}


def fold_us(B: int, C: int) -> dict[str, float]:
    """Microseconds of the launch that folds, where of none of B requests, of one, and of all a token fills the ring.

    rel_err: of a folded state against float64"""
    device.memory()  # what was held before is given back
    WIDTH = bench_tree.WIDTH
    n = timing.copies(4 * LAYERS * B * HV * WIDTH * WIDTH, least=1, most=8)
    S, ring = random((LAYERS, n * B, HV, WIDTH, WIDTH), 0.1, 3, np.float32), rings(n * B, C)
    kept = [device.download(a[:1, :1])[0, 0].astype(np.float64) for a in (S, *ring[:3])]
    times = {}
    for name, full in (("all_us", range(B)), ("one_us", range(1)), ("none_us", range(0))):
        committed = np.where(np.isin(np.arange(B), full), C - 1, C)
        launches = [fold_launch(S, ring, np.arange(i * B, (i + 1) * B), committed) for i in range(n)]
        if name == "all_us":
            error = relative_error(device.download(S[:1, :1])[0, 0].astype(np.float64), fold(*kept))
        times[name] = timing.calls_us([launch.again for launch in launches] * max(1, 16 // n))
    return {**times, "rel_err": error}


def rings(slots: int, C: int) -> Ring:
    """Rings of all layers."""
    HK, WIDTH = bench_tree.HK, bench_tree.WIDTH
    g = -np.exp(np.random.default_rng(2).uniform(-6, 1, (LAYERS, slots, C, HV)))
    k = random((LAYERS, slots, C, HK, WIDTH), WIDTH**-0.5, 1)
    u = random((LAYERS, slots, C, HV, WIDTH), 0.1, 2, np.float32)
    return Ring(k, u, device.upload(g.astype(np.float32)))


def fold_launch(S: Array, ring: Ring, slots: np.ndarray, committed: np.ndarray) -> timing.Launch:
    """The launch of a commit of a row of each request behind so many tokens, which is made. The ring has the row."""
    forest = Forest.of([Tree.chain([0])] * len(slots), committed)
    paths, slot = upload_paths(forest, list(np.arange(len(slots))[:, None])), device.upload(slots.astype(np.int32))
    with timing.recorded() as launches:
        commit(None, S, ring, [], [], [], [], slot, upload(forest), paths)
    (folds,) = launches
    return folds
