"""`boleinfer bench tree`: what it costs to verify trees, in GDN and in attention, beside floors and other kernels."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from boleinfer import bench_peers, bench_tables, device, timing
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest, upload
from boleinfer.forest import Forest, Tree
from boleinfer.gdn_core import gdn_core
from boleinfer.ops import relative_error
from boleinfer.ops.attention import tree_attention
from boleinfer.ops.embedding import embedding
from boleinfer.ops.gdn import gdn
from boleinfer.provenance import gpu_provenance
from boleinfer.random_weights import normal
from boleinfer.results import output_file, write
from boleinfer.ring import Ring

Arrays = dict[str, Any]
HK, WIDTH, TAPS = 16, 128, 4  # key heads; K = V; W
VALUE_HEADS, REQUESTS = (32, 48, 64), (1, 8, 32, 128)
TREES, CHAINS = (1, 8, 16, 32, 64), (4, 8, 16)
RING, FILLED = 32, 16
CHECKED = 4  # requests of a batch that are compared with the definition, at most
EPS = 1e-6

HEADS, PAGE = ((16, 4, 256), (24, 4, 256)), 16  # Hq, Hkv, Dh
NODES, CONTEXTS, BATCHES = (1, 16, 64), (1024, 4096, 8192, 32768, 131072), (1, 8, 32)


class Kernel(NamedTuple):
    """A kernel alone and its sizes, which tell one case from the others."""

    op: str
    Hv: int
    B: int
    N: int


class Case(NamedTuple):
    """What is timed: `op` is tree, chain, token, or one of them with what stands before and behind it in a layer."""

    op: str
    Hv: int
    trees: list[Tree]
    ring: int = RING
    filled: int = FILLED

    @property
    def N(self) -> int:
        """Nodes of each request's tree."""
        return len(self.trees[0])

    @property
    def kernel(self) -> Kernel:
        """What of it is the kernel alone."""
        return Kernel(self.op.split()[0], self.Hv, len(self.trees), self.N)

    def asked(self) -> Arrays:
        """As bench_peers takes it."""
        sizes = {"Hk": HK, "Hv": self.Hv, "width": WIDTH, "ring": self.ring, "filled": self.filled}
        return {"op": self.kernel.op, **sizes, "parents": [tree.parent.tolist() for tree in self.trees]}


def bench_tree(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    quick = bool(args.only or args.requests or args.value_heads)
    output = output_file(args, "gdn_tree.json", quick)
    origin = gpu_provenance()
    record: dict[str, Any] = {
        "what": "each call in one graph with others that have arrays of their own; floor: bytes at read_gb_s",
        **{key: value for key, value in origin.items() if key != "sources_sha256"},
        "source_hash": origin["sources_sha256"],
        "sizes": {"Hk": HK, "K": WIDTH, "V": WIDTH, "C": RING},
        "read_gb_s": timing.read_gb_s(),
        "rows": [],
    }
    kinds = args.only or ("gdn", "attention")
    cases = list(gdn_cases(args.value_heads or VALUE_HEADS, args.requests or REQUESTS)) if "gdn" in kinds else []
    record["rows"] = [gdn_row(case, record["read_gb_s"]) for case in cases]
    print(f"gdn: {len(cases)} measured", file=sys.stderr)
    write(record, output, note=False)
    if "attention" in kinds:
        record["rows"] += list(attention_rows(record["read_gb_s"], args.requests or BATCHES))
    if args.peers:
        write(record, output, note=False)
        add_peers(args.peers, cases, record["rows"])
    print(bench_tables.tree(record))
    write(record, output)
    return 0


def add_peers(folder: str, cases: Sequence[Case], rows: Sequence[Arrays]) -> None:
    """Adds the other kernel's time to each row; one with front and back gets that of the kernel alone, all there is.

    rows: first those of the cases, in their order"""
    device.memory()  # theirs need it
    kernels = {case.kernel: case.asked() for case in cases}
    bench_peers.compiled(folder, list(kernels.values()))
    found = dict(zip(kernels, bench_peers.measured(folder, list(kernels.values()))))
    for case, row in zip(cases, rows):
        row |= found[case.kernel]
    failed = {kernel: peer["peer_error"] for kernel, peer in found.items() if "peer_error" in peer}
    for kernel, problem in failed.items():
        print(f"the other kernel failed: {kernel}: {problem}", file=sys.stderr)
    print(f"other kernels: {len(found) - len(failed)} measured", file=sys.stderr)


def timed(sizes: Arrays, calls: Sequence[Callable[[], object]], nbytes: int, read_gb_s: float) -> Arrays:
    """One row of the results: sizes, microseconds, and those that memory needs for so many bytes."""
    us, floor_us = timing.calls_us(calls), nbytes / read_gb_s / 1e3
    return {**sizes, "us": us, "floor_us": floor_us, "share": floor_us / us}


# ---- the gated delta rule --------------------------------------------------------------------------------------------


def gdn_cases(value_heads: tuple[int, ...], requests: tuple[int, ...]) -> Iterator[Case]:
    """Random trees and chains for the kernel alone, then plain decoding and trees as a layer has them."""
    for Hv, B in itertools.product(value_heads, requests):
        rng = np.random.default_rng(B)
        trees = {n: [random_tree(n, rng) for _ in range(B)] for n in TREES}
        yield from (Case("tree", Hv, trees[n]) for n in TREES)
        yield from (Case("chain", Hv, [Tree.chain([0] * n)] * B) for n in CHAINS)
        yield Case("token with front and back", Hv, trees[1])
        yield from (Case("tree with front and back", Hv, trees[n]) for n in TREES)


def random_tree(nodes: int, rng: np.random.Generator) -> Tree:
    """Each node below any one before it."""
    return Tree.of([0] * nodes, [-1, *(int(rng.integers(n)) for n in range(1, nodes))])


def core(
    qkvz: Array, ba: Array, taps: Array, A_log: Array, dt_bias: Array, norm: Array, window: Array, S: Array,
    ring: Ring, slot: Array, forest: Forest | DeviceForest,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The gated output and u, both [R, Hv, V]; None: u lies in the ring."""
    sizes = HK, WIDTH, len(A_log), WIDTH
    y, factors = gdn_core(qkvz, ba, taps, A_log, dt_bias, norm, EPS, window, S, ring, slot, forest, sizes)
    return y, factors and factors[1]


def gdn_row(case: Case, read_gb_s: float) -> Arrays:
    """A case's time, and the relative errors of o and u against float64."""
    device.memory()  # what earlier cases held is given back
    Hv, B, N = case.Hv, len(case.trees), case.N
    whole = case.op.endswith("back")
    op, rows_of, fixed = (core, rows_of_core, weights(Hv)) if whole else (gdn, rows_of_gdn, {})
    rows = [rows_of(Hv, B * N, 0)]
    n = timing.copies(4 * B * Hv * WIDTH * WIDTH + size(rows[0], case), least=2, most=64)
    rows += [rows_of(Hv, B * N, i) for i in range(1, n)]
    held, forest = memory(case, n * B, whole), upload(Forest.of(case.trees, [case.filled] * B))
    calls = []
    for i in range(n):
        slot = device.upload(np.arange(i * B, (i + 1) * B, dtype=np.int32))
        calls.append(functools.partial(op, **rows[i], **fixed, **held, slot=slot, forest=forest))
    embedding(device.upload(np.zeros(1, np.int32)), device.upload(np.ones((1, 8), np.float32)))  # begins a pass
    o, u = calls[0]()
    found = o, held["ring"].u[:B, case.filled] if u is None else u
    written = sum(out.nbytes for out in found)
    nbytes = size(rows[0], case) + size(fixed, case) + size(held, case) // n + written
    error, error_u = errors(case, op, rows[0], fixed, held, found)
    made = timed({"op": case.op, "Hv": Hv, "B": B, "N": N, "ring": case.filled}, calls, nbytes, read_gb_s)
    return made | {"rel_err": error, "rel_err_u": error_u}


def rows_of_gdn(Hv: int, R: int, stream: int) -> Arrays:
    """q, k, v, g and beta of R rows; keys of about unit length, decays from hardly any to e^-2.7."""
    rng = np.random.default_rng(stream)
    g, beta = -np.exp(rng.uniform(-6, 1, (R, Hv))), rng.uniform(0, 1, (R, Hv))
    shapes = {"q": (R, HK, WIDTH), "k": (R, HK, WIDTH), "v": (R, Hv, WIDTH)}
    scales = {"q": 1 / WIDTH, "k": WIDTH**-0.5, "v": 1.0}
    made = {name: random(shape, scales[name], 3 * stream + i) for i, (name, shape) in enumerate(shapes.items())}
    return made | {"g": device.upload(g.astype(np.float32)), "beta": device.upload(beta.astype(np.float32))}


def rows_of_core(Hv: int, R: int, stream: int) -> Arrays:
    """What the two products before the recurrence give for R rows."""
    qkvz = random((R, 2 * HK * WIDTH + 2 * Hv * WIDTH), 1.0, 2 * stream)
    return {"qkvz": qkvz, "ba": random((R, 2 * Hv), 1.0, 2 * stream + 1, np.float32)}


def weights(Hv: int) -> Arrays:
    """The small weights of a GDN layer, in the ranges of a trained one."""
    rng, channels = np.random.default_rng(1), 2 * HK * WIDTH + Hv * WIDTH
    made = {
        "taps": rng.normal(0, 0.5, (channels, TAPS)),
        "A_log": np.log(rng.uniform(1e-3, 1, Hv)),
        "dt_bias": rng.standard_normal(Hv),
        "norm": np.ones(WIDTH),
    }
    return {name: device.upload(array.astype(np.float32)) for name, array in made.items()}


def memory(case: Case, slots: int, window: bool) -> Arrays:
    """Checkpoints, rings filled as the case says and perhaps convolution windows of so many requests."""
    rng, V, Hv, C = np.random.default_rng(2), WIDTH, case.Hv, case.ring
    ring = Ring(
        random((slots, C, HK, WIDTH), WIDTH**-0.5, 1),
        random((slots, C, Hv, V), 0.1, 2, np.float32),
        device.upload(-np.exp(rng.uniform(-6, 1, (slots, C, Hv))).astype(np.float32)),
    )
    held = {"S": random((slots, Hv, WIDTH, V), 0.1, 3, np.float32), "ring": ring}
    return held | ({"window": random((slots, TAPS, 2 * HK * WIDTH + Hv * V), 1.0, 4)} if window else {})


def size(arrays: Arrays, case: Case) -> int:
    """Bytes that have to be read of them: of a ring what is filled, of a window all but the row's own place."""
    ring = sum(a.nbytes * case.filled // case.ring for a in arrays["ring"]) if "ring" in arrays else 0
    window = arrays["window"].nbytes * (TAPS - 1) // TAPS if "window" in arrays else 0
    return ring + window + sum(a.nbytes for name, a in arrays.items() if name not in ("ring", "window"))


def errors(case: Case, op: Callable, rows: Arrays, fixed: Arrays, held: Arrays, found: Any) -> list[float]:
    """Relative errors of o and u of some requests of the call on slots 0 .. B-1, against float64."""
    B = len(case.trees)
    chosen = sorted({int(b) for b in np.linspace(0, B - 1, min(B, CHECKED))})

    def of_rows(array: Array) -> np.ndarray:
        return np.concatenate([device.download(array[b * case.N : (b + 1) * case.N]) for b in chosen])

    def of_slots(array: Array) -> np.ndarray:
        return np.concatenate([device.download(array[b : b + 1]) for b in chosen])

    arguments: Arrays = {name: of_rows(a) for name, a in rows.items()}
    arguments |= {name: device.download(a) for name, a in fixed.items()}
    arguments |= {n: Ring(*map(of_slots, a)) if n == "ring" else of_slots(a) for n, a in held.items()}
    arguments = {name: as_double(value) for name, value in arguments.items()}
    trees = [case.trees[b] for b in chosen]
    wanted = op(**arguments, slot=np.arange(len(chosen)), forest=Forest.of(trees, [case.filled] * len(trees)))
    return [relative_error(as_double(of_rows(out)), ref) for out, ref in zip(found, wanted)]


def as_double(value: Any) -> Any:
    """Floating-point arrays in float64, bf16 among them."""
    if isinstance(value, Ring):
        return Ring(*map(as_double, value))
    return value if value.dtype.kind == "i" else value.astype(np.float64)


def random(shape: tuple[int, ...], scale: float, stream: int, dtype: Any = None) -> Array:
    """Normal numbers on the GPU, bf16 unless said otherwise; other streams give other numbers."""
    return normal(shape, device.dtype("bf16") if dtype is None else np.dtype(dtype), 0, stream, scale)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_rows(read_gb_s: float, requests: tuple[int, ...]) -> Iterator[Arrays]:
    """Every batch, context and tree whose keys and values fit into half of the GPU's memory."""
    rng = np.random.default_rng(0)
    for heads, B, T in itertools.product(HEADS, requests, CONTEXTS):
        free, _ = device.memory()
        if 4 * B * (T + max(NODES)) * heads[1] * heads[2] > free // 4:
            continue
        for N in NODES:
            yield attention_row(heads, T, [random_tree(N, rng) for _ in range(B)], read_gb_s)
        print(f"attention: {heads} heads, {B} requests of {T}", file=sys.stderr)


def attention_row(heads: tuple[int, int, int], T: int, trees: list[Tree], read_gb_s: float) -> Arrays:
    """A tree of each request behind T tokens; bytes: keys and values, q, gate and the result once."""
    (Hq, Hkv, Dh), B, N = heads, len(trees), len(trees[0])
    M = -(-(T + N) // PAGE)  # pages of a request
    nbytes = 4 * B * (T + N) * Hkv * Dh
    n = timing.copies(nbytes, least=2, most=64)
    k, v = (random((n * B * M, PAGE, Hkv, Dh), 1.0, i) for i in range(2))
    q, gate = (random((B * N, Hq, Dh), 1.0, 2 + i) for i in range(2))
    forest = upload(Forest.of(trees, [T] * B))
    pages = np.arange(n * B * M, dtype=np.int32).reshape(n, B, M)
    calls = [
        functools.partial(tree_attention, q, gate, k, v, device.upload(table), forest, Dh**-0.5) for table in pages
    ]
    sizes = {"op": "attention", "heads": [Hq, Hkv, Dh], "B": B, "T": T, "N": N}
    return timed(sizes, calls, nbytes + 6 * B * N * Hq * Dh, read_gb_s)
