"""The product of bf16 on sm_90a (cuda/linear_hopper.cu): how multiprocessors share it, and its launch. Knows no op."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array

FILE = "linear_hopper.cu"
RANGES = 8  # of k, as in the kernel
LONG, SHORT = 200 * 1024, 106 * 1024  # bytes of a ring; two blocks with SHORT ones fit on a multiprocessor
LONG_FROM = 384 * 1024  # bytes that a block reads from which it has a LONG one
MOST_DEPTH = 40  # places of a ring
UNDER_WAY = 80 * 1024  # bytes of a block's w that are on their way at the same time when its ring is filled
MOST_PROCESSORS = 144  # of a GPU of this architecture
WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192)  # rows of w in a tile
MOST_OWN = 112  # of these, of one warpgroup for up to 64 rows of x, whose registers hold two sums
MOST_HALVED = 80  # of one warpgroup that holds four
RUNS = (4, 2, 1)  # tiles of 64 k that come and are multiplied together
TO_MULTIPLY, TO_BEGIN = 19, 23  # rows of w that come while a tile of 64 k is multiplied, and before, once a chunk
QUICKEST = 1.2  # how much faster a multiprocessor reads than at its share of the bandwidth, when others are idle
INTAKE = 2.8  # how much faster it gets w and x together out of L2
# What else costs time, in bytes of w that a multiprocessor could read meanwhile at its share
OF_SUMS = 0.6  # a byte of a half's sum, which passes L2
TO_END, TO_JOIN = 25_000, 75_000  # a tile's end, waiting for the other half


class Cut(NamedTuple):
    """How a product is cut.

    features: rows of w in a tile
    whole:    tiles with all of k
    parts:    into how many parts k of the others is cut; of bf16 it is all of k, or halves in all tiles
    """

    features: int
    whole: int
    parts: int

    def tiles(self, *widths: int) -> int:
        """Of matrices of so many rows each."""
        return sum(-(-width // self.features) for width in widths)

    def kept(self) -> int:
        """Sums of a cut tile: of its first part, and of each range behind it."""
        return RANGES - RANGES // self.parts + 1

    def sum_bytes(self, rows: int) -> int:
        """Of one of these, of so many rows of x."""
        return 4 * self.features * rows

    def groups(self, rows: int) -> int:
        """Warpgroups that share the features."""
        return 1 if rows > 64 or self.features <= MOST_OWN else 2


def run_of(features: int, rows: int, row_bytes: int) -> int:
    """The most tiles of 64 k in a chunk, whole ones in each range: up to 24 KB of w, and a fifth of a ring with x."""
    fits = (n for n in RUNS if n * features <= WIDTHS[-1] and 5 * n * 128 * (features + rows) <= LONG)
    return next((n for n in fits if row_bytes % (n * RANGES * 128) == 0), 1)


@functools.cache
def cut(widths: tuple[int, ...], row_bytes: int, rows: int, processors: int, halves: int = 1) -> Cut:
    """The cut that should take the least time; the bits of the results do not depend on it.

    widths: rows of the matrices; row_bytes: of such a row; rows: of x in a tile; halves: rows of w of each feature
    """

    def cost(c: Cut) -> float:
        """Bytes that a multiprocessor could read meanwhile at its share of the bandwidth."""
        w, chunk = c.features * row_bytes, TO_MULTIPLY + TO_BEGIN / run_of(c.features, rows, row_bytes)
        taken = max((c.features + rows) / INTAKE, chunk) * row_bytes
        rounds, left = divmod(c.tiles(*widths), processors)
        at_the_end = max(w * left / processors, w / c.parts / QUICKEST, taken / c.parts) if left else 0
        join = TO_JOIN + OF_SUMS * c.sum_bytes(rows) if c.parts > 1 else 0
        ends = TO_END * (rounds + (left > 0))
        return rounds * max(w, taken) + at_the_end + ends + join

    candidates = []
    for features in reversed(WIDTHS):
        own = features // Cut(features, 0, 1).groups(rows)
        if own % (8 * halves):
            continue
        tiles = Cut(features, 0, 1).tiles(*widths)
        candidates.append(Cut(features, tiles, 1))
        if own <= MOST_HALVED and 2 * tiles <= processors and row_bytes >= 128 * RANGES:
            candidates.append(Cut(features, 0, 2))
    return min(candidates, key=cost)


def product(
    x: Array,
    w: Array,
    out: Array,
    gated: bool = False,
    w_more: Array | None = None,
    more: Array | None = None,
    use: Array | None = None,
    allowed: Array | None = None,
    largest: Array | None = None,
) -> None:
    """out = x w^T of bf16 x [R, Din] and w [Dout, Din]; gated: of its halves silu(gate) * up.

    w_more: bf16 [More, Din], and more = x w_more^T in float32, in the same launch
    use, allowed, largest: as in linear.head
    Rows of x and of w are whole 16-byte words at multiples of 16 bytes. Raises KernelError for what does not fit."""
    (R, Din), row_bytes, processors = x.shape, w[0].nbytes, device.multiprocessors()
    halves = 1 + gated
    widths = (len(w),) if w_more is None else (len(w), len(w_more))
    rows = next(n for n in (8, 16, 32, 64, 128) if n >= min(R, 128))
    row_tiles = -(-R // rows)
    c = cut(widths, row_bytes, rows, processors, halves)
    if row_tiles > 1:
        c = Cut(c.features, Cut(c.features, 0, 1).tiles(*widths), 1)
    tiles = row_tiles * c.tiles(*widths)
    run = run_of(c.features, rows, row_bytes)
    place, chunks = 128 * run * (c.features + rows), -(-row_bytes // (128 * run))
    each = -(-tiles * c.parts // processors) * -(-chunks // c.parts)  # chunks of a block, about
    ring = LONG if each * place >= LONG_FROM else SHORT
    depth = max(2, min(ring // place, each, MOST_DEPTH))
    warpgroups = c.groups(rows) * -(-rows // 64)
    sums, passed = None, None
    if c.parts > 1:
        sums = device.empty(tiles * c.sum_bytes(max(64, rows)) // 4, np.float32)
        passed = device.counters(tiles * 4 * warpgroups)
    in_turn = w.reshape(halves, len(w) // halves, -1).swapaxes(0, 1)  # [width, halves, Din]: rows of gate and of up
    arrays = {"x": x, "w": in_turn, "w_more": None if w_more is None else w_more[:, None]}
    arrays |= {"sums": sums, "passed": passed, "use": use, "allowed": allowed, "largest": largest}
    sizes = {"R": R, "Ldx": x.strides[0] // x.itemsize if R > 1 else Din, "Din": Din, "Width": len(in_turn)}
    sizes |= {"More": 0 if w_more is None else len(w_more), "Depth": depth}
    sizes["AtOnce"] = max(1, UNDER_WAY // (128 * run * c.features))
    sizes |= {"Sums": 0 if sums is None else sums.size, "Passed": 0 if passed is None else passed.size}
    tile = {"Rows": rows, "Features": c.features, "Groups": c.groups(rows), "Run": run, "Parts": c.parts}
    kernels.launch(
        FILE,
        "linear_hopper",
        2 * tiles if c.parts == 2 else min(processors, tiles),  # a half waits for one of a block before it
        128 * (warpgroups + 1),
        {**arrays, "out": out, "more": more, **sizes},
        shared=1024 + depth * place + max(0, 128 * ((run - 1) * rows + 64) - place),
        constants={"Out": device.c_type(out), **tile, "Gated": int(gated)},
    )


def most_sums(R: int, widest: int) -> int:
    """Float32 numbers that a product keeps beside its result, at most, for R rows or fewer of so many features."""
    rows = min(128, 1 << max(6, (R - 1).bit_length()))
    in_parts = MOST_PROCESSORS // 2 * Cut(WIDTHS[-1], 0, 2).kept() * WIDTHS[-1]
    return min(2 * RANGES * (widest + WIDTHS[-1]), in_parts) * rows
