"""`boleinfer bench kernels`: ops at the shapes of published models, beside cuBLAS and the time that memory needs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from boleinfer import bench_tables, bench_tree, cublas, device, timing
from boleinfer.device import Array, Fp8
from boleinfer.forest import Tree
from boleinfer.hopper_fp8 import SCALED
from boleinfer.ops import linear as products
from boleinfer.ops.linear import linear, swiglu
from boleinfer.ops.norms import add_rms_norm, gated_rms_norm
from boleinfer.provenance import gpu_provenance
from boleinfer.random_weights import normal
from boleinfer.results import output_file, write

Call = Callable[[], object]
LINEAR = ((4096, 4096), (12288, 4096), (4096, 12288), (24576, 4096), (5120, 17408), (7168, 1024), (1024, 1024),
          (248320, 4096))  # fmt: skip
LINEAR_ROWS = (1, 8, 16, 32, 64, 128, 256)
SMALL_ROWS = (1, 16, 64, 128)
PROMPTS = (2048, 8192)
D, F, HV, V = 4096, 12288, 32, 128  # of the 9B shape


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
    """linear with each matrix, in bf16 beside cuBLAS and in FP8, and number of rows; bytes: all arrays once."""
    for weights, (Dout, Din) in itertools.product(("bf16", "fp8"), LINEAR):
        nbytes = Dout * Din * (2 if weights == "bf16" else 1)
        n = timing.copies(nbytes, least=2)
        matrices = [matrix(Dout, Din, weights) for _ in range(n)]
        many = [matrices[i % n] for i in range(max(n, 16))]
        for R in LINEAR_ROWS if weights == "bf16" else [R for R in LINEAR_ROWS if R <= products.SOME_ROWS]:
            x = random(R, Din)
            with own_products():
                us = timing.calls_us([functools.partial(linear, x, w) for w in many])
            sizes: dict[str, int | str] = {"weights": weights, "Dout": Dout, "Din": Din, "R": R}
            made = row(sizes, us, nbytes + 2 * R * (Din + Dout), read_gb_s)
            if weights == "bf16" and (library := cublas.library()) is not None:
                out = device.empty((R, Dout), x.dtype)
                made["cublas_us"] = timing.calls_us([functools.partial(library.product, x, w, out) for w in many])
            yield made


def matrix(Dout: int, Din: int, weights: str) -> Array | Fp8:
    """A random matrix, bf16, or FP8 whose scales are 1."""
    if weights == "bf16":
        return random(Dout, Din, scale=Din**-0.5)
    scale = np.ones((-(-Dout // SCALED), -(-Din // SCALED)), np.float32)
    return Fp8(normal((Dout, Din), device.dtype("fp8"), 0, 0, 1.0), device.upload(scale))


@contextlib.contextmanager
def own_products() -> Iterator[None]:
    """Inside it linear never asks cuBLAS, which it does for many rows."""
    honest = products.blas
    products.blas = lambda x, w, out: False
    try:
        yield
    finally:
        products.blas = honest


def small_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """What stands between the products, at the 9B shape; bytes: inputs and outputs once."""
    w, gain = (device.upload(np.ones(n, np.float32)) for n in (D, V))
    for R in SMALL_ROWS:
        wide, h, y, o = random(R, 2 * F), random(R, D), random(R, D), random(R, HV, V)
        calls: dict[str, tuple[Call, int]] = {
            "swiglu": (functools.partial(swiglu, wide), 6 * R * F),
            "add_rms_norm": (functools.partial(add_rms_norm, h, y, w, 1e-6), 8 * R * D),
            "gated_rms_norm": (functools.partial(gated_rms_norm, o, o, gain, 1e-6), 6 * R * HV * V),
        }
        for op, (call, nbytes) in calls.items():
            yield row({"op": op, "R": R}, timing.calls_us([call] * 64), nbytes, read_gb_s)


def attention_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """Prompts; their trees are bench_tree's."""
    for N in PROMPTS:
        yield bench_tree.attention_row(bench_tree.HEADS[0], 0, [Tree.chain([0] * N)], read_gb_s)


def gdn_rows(read_gb_s: float) -> Iterator[dict[str, Any]]:
    """Prompts; their trees are bench_tree's."""
    for N in PROMPTS:
        yield bench_tree.gdn_row(bench_tree.Case("chain", HV, [Tree.chain([0] * N)]), read_gb_s)
