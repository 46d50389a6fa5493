"""`boleinfer bench kernels`: ops at the shapes of published models, beside cuBLAS and the time that memory needs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from boleinfer import bench_tables, device, timing
from boleinfer.bench_gpu import random_tree
from boleinfer.device import Array
from boleinfer.device_forest import upload
from boleinfer.forest import Forest, Tree
from boleinfer.ops import linear as products
from boleinfer.ops.attention import tree_attention
from boleinfer.ops.gdn import Ring, gdn
from boleinfer.ops.linear import linear, swiglu
from boleinfer.ops.norms import add_rms_norm, gated_rms_norm
from boleinfer.provenance import gpu_provenance
from boleinfer.random_weights import normal
from boleinfer.results import output_file, write
from boleinfer.scheduler import grow

Call = Callable[[], object]
LINEAR = ((4096, 4096), (12288, 4096), (4096, 12288), (24576, 4096), (5120, 17408), (7168, 1024), (1024, 1024),
          (248320, 4096))  # fmt: skip
LINEAR_ROWS = (1, 8, 16, 32, 64, 128, 256)
SMALL_ROWS = (1, 16, 64, 128)
CONTEXTS, NODES, REQUESTS, CHAINS = (1024, 8192, 32768), (1, 16, 64), (1, 8, 32), (2048, 8192)
D, F = 4096, 12288  # of the 9B shape, as all sizes below
HEADS, PAGE = (16, 4, 256), 16
GDN, RING = (16, 32, 128, 128), 32  # Hk, Hv, K, V; the ring half full


def bench_kernels(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    kinds: dict[str, Callable[[float], Iterator[dict[str, Any]]]] = {
        "linear": linear_rows,
        "small": small_rows,
        "attention": attention_rows,
        "gdn": gdn_rows,
    }
    output = output_file(args, "kernels.json", quick=bool(args.only))
    record: dict[str, Any] = {
        "what": "ops in graphs, each call with arrays of its own that are in no cache; floor: bytes at read_gb_s",
        **gpu_provenance(),
        "read_gb_s": timing.read_gb_s(),
    }
    for kind in args.only or kinds:
        record[kind] = list(kinds[kind](record["read_gb_s"]))
        print(f"{kind}: {len(record[kind])} measured", file=sys.stderr)
        write(record, output, note=False)
    print(bench_tables.kernels(record))
    write(record, output)
    return 0


def row(sizes: dict[str, int | str], us: float, nbytes: int, read_gb_s: float) -> dict[str, Any]:
    """One measurement: its sizes, its time, and how that compares with moving so many bytes."""
    floor_us = nbytes / read_gb_s / 1e3
    return {**sizes, "us": us, "floor_us": floor_us, "share": floor_us / us}


def random(*shape: int, scale: float = 1.0) -> Array:
    """A bf16 array of normal numbers on the GPU."""
    return normal(shape, device.dtype("bf16"), 0, 0, scale)


def linear_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """linear and cuBLAS with each matrix and number of rows; bytes: the matrix, x and the result once."""
    for Dout, Din in LINEAR:
        n = timing.copies(2 * Dout * Din, least=2)
        matrices = random(n, Dout, Din, scale=Din**-0.5)
        many = [matrices[i % n] for i in range(max(n, 16))]
        for R in LINEAR_ROWS:
            x = random(R, Din)
            out = device.empty((R, Dout), x.dtype)
            with own_products():
                us = timing.calls_us([functools.partial(linear, x, w) for w in many])
            made = row({"Dout": Dout, "Din": Din, "R": R}, us, 2 * (Dout * Din + R * (Din + Dout)), read_gb_s)
            if products.has_cublas():
                made["cublas_us"] = timing.calls_us([functools.partial(products.gemm, x, w, out) for w in many])
            yield made


@contextlib.contextmanager
def own_products() -> Iterator[None]:
    """Inside it linear never asks cuBLAS, which it does for many rows where nothing is captured."""
    honest = products.blas
    products.blas = lambda x, w, out: False
    try:
        yield
    finally:
        products.blas = honest


def small_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """What stands between the products, at the 9B shape; bytes: inputs and outputs once."""
    Hv, V = GDN[1], GDN[3]
    w, gain = (device.upload(np.ones(n, np.float32)) for n in (D, V))
    for R in SMALL_ROWS:
        wide, h, y, o = random(R, 2 * F), random(R, D), random(R, D), random(R, Hv, V)
        calls: dict[str, tuple[Call, int]] = {
            "swiglu": (functools.partial(swiglu, wide), 6 * R * F),
            "add_rms_norm": (functools.partial(add_rms_norm, h, y, w, 1e-6), 8 * R * D),
            "gated_rms_norm": (functools.partial(gated_rms_norm, o, o, gain, 1e-6), 6 * R * Hv * V),
        }
        for op, (call, nbytes) in calls.items():
            yield row({"op": op, "R": R}, timing.calls_us([call] * 64), nbytes, read_gb_s)


def attention_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """Trees over a context, then prompts; bytes: keys and values, q, gate and the result once."""
    for T in CONTEXTS:
        for N in NODES:
            yield attention_row(T, tree_of(N), read_gb_s)
    for N in CHAINS:
        yield attention_row(0, Tree.chain([0] * N), read_gb_s)


def attention_row(T: int, tree: Tree, read_gb_s: float) -> dict[str, Any]:
    """One tree of one request behind T tokens."""
    (Hq, Hkv, Dh), N = HEADS, len(tree)
    M = -(-(T + N) // PAGE)
    nbytes = 4 * (T + N) * Hkv * Dh
    n = timing.copies(nbytes, least=4)
    k, v = (random(n * M, PAGE, Hkv, Dh) for _ in range(2))
    q, gate, forest = random(N, Hq, Dh), random(N, Hq, Dh), upload(Forest.of([tree], [T]))
    tables = [device.upload(np.arange(i * M, (i + 1) * M, dtype=np.int32)[None]) for i in range(n)]
    calls = [functools.partial(tree_attention, q, gate, k, v, table, forest, Dh**-0.5) for table in tables]
    us = timing.calls_us(calls)
    return row({"T": T, "N": N}, us, nbytes + 6 * N * Hq * Dh, read_gb_s)


def gdn_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """Trees of several requests, then prompts; bytes: state, half a ring, inputs and outputs once."""
    for B in REQUESTS:
        for N in NODES:
            yield gdn_row([tree_of(N)] * B, read_gb_s)
    for N in CHAINS:
        yield gdn_row([Tree.chain([0] * N)], read_gb_s)


def gdn_row(trees: Sequence[Tree], read_gb_s: float) -> dict[str, Any]:
    """One tree of each request, all alike."""
    (Hk, Hv, K, V), B, N = GDN, len(trees), len(trees[0])
    R, filled = B * N, RING // 2
    state = B * (4 * Hv * K * V + filled * (2 * Hk * K + 4 * Hv * (V + 1)))
    n = timing.copies(state, least=4, most=64)
    S = normal((n * B, Hv, K, V), np.dtype(np.float32), 0, 0, 0.1)
    ring_k = random(n * B, RING, Hk, K, scale=K**-0.5)
    ring_u = normal((n * B, RING, Hv, V), np.dtype(np.float32), 0, 0, 0.1)
    ring_g = device.upload(np.full((n * B, RING, Hv), -0.1, np.float32))
    ring = Ring(ring_k, ring_u, ring_g, device.upload(np.full(n * B, filled, np.int32)))
    q, k, v = random(R, Hk, K, scale=1 / K), random(R, Hk, K, scale=K**-0.5), random(R, Hv, V)
    g, beta = (device.upload(np.full((R, Hv), x, np.float32)) for x in (-0.1, 0.5))
    forest = upload(Forest.of(trees, [RING] * B))
    slots = [device.upload(np.arange(i * B, (i + 1) * B, dtype=np.int32)) for i in range(n)]
    us = timing.calls_us([functools.partial(gdn, q, k, v, g, beta, S, ring, slot, forest) for slot in slots])
    rows = R * (4 * Hk * K + 8 * Hv * V + 8 * Hv)  # q, k, v and o in bf16; u, g and beta in float32
    return row({"B": B, "N": N}, us, state + rows, read_gb_s)


def tree_of(nodes: int) -> Tree:
    """A random tree of so many nodes, the root included."""
    return grow([0], random_tree(nodes - 1, np.random.default_rng(nodes)))
