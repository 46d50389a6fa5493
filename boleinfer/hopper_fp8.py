"""Products with FP8 weights on sm_90a: rows split into E4M3 numbers, the product of few (cuda/linear_fp8.cu), of more
(cuda/linear_fp8_many.cu), and of one row, which it splits itself (cuda/linear_fp8_row.cu)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from boleinfer import device, hopper, kernels
from boleinfer.device import Array, Fp8, Split
from boleinfer.hopper import RANGES, Cut
from boleinfer.whole import Norm

FILE, ROW_FILE, MANY_FILE = "linear_fp8.cu", "linear_fp8_row.cu", "linear_fp8_many.cu"
MOST_ROWS, MOST_OF_MORE = 16, 128  # rows of few; rows of w in a tile up to which more than eight are quicker so
MOST_FEATURES, MOST_TALL = 256, 272  # of a tile; rows of w in it
RING = 200 * 1024  # bytes
MOST_PLACES = 64
SCALED = 128  # neighbours that share a scale
MOST_WIDE, MOST_NORMED = 20480, 8192  # k of one row, and of one that is normed
UNDER_WAY = 64 * 1024  # bytes of its product's w on their way before x is there
EVEN = 0.9  # share of the places that four warpgroups may leave of those that two have
SHARED = 225 * 1024  # bytes of shared memory of a block
LOW = 32  # rows of w in a tile up to which two ranges share a place
# What many rows cost, in bytes of w that a multiprocessor could read meanwhile at its share of the bandwidth
INTAKE = 1.6  # how much faster it gets w, and hi and lo of x, out of L2
TO_END, TO_JOIN, OF_SUMS = 25_000, 140_000, 0.15  # a tile's end, joining parts, a byte of their sums, written or read
MOST_DEPTH = 24  # places of their ring


def tile(width: int, slabs: int, processors: int) -> int:
    """Features of a tile, of `width`, so that rounds are few and full; slabs: 2 where each feature takes two rows."""
    rounds = 1
    while True:
        features = -(-width // (processors * rounds * 8)) * 8
        if features <= MOST_FEATURES and slabs * features <= MOST_TALL:
            return features
        rounds += 1


def _beside(features: int, slabs: int, sums: int, Din: int) -> int:
    """Bytes of shared memory for so many sums of each row of w in a tile, and its scales."""
    blocks = (features + SCALED - 2) // SCALED + 1
    return 4 * slabs * (sums * features + blocks * -(-Din // SCALED))


def takes_few(R: int, Dout: int, gated: bool = False) -> bool:
    """Whether `product` can be called with R rows and w [Dout, ...]."""
    slabs = 1 + gated
    return R <= 8 or (R <= MOST_ROWS and slabs * tile(Dout // slabs, slabs, device.multiprocessors()) <= MOST_OF_MORE)


def product(
    x: Split, w: Fp8, out: Array, gated: bool = False, w_more: Array | None = None, more: Array | None = None
) -> None:
    """out = x w^T; gated: of its halves silu(gate) * up.

    w_more: bf16 [More, Din], and more = x w_more^T in float32, in the same launch, for which x has its rows
    Rows of x and of w are whole 16-byte words at multiples of 16 bytes. Raises KernelError for what does not fit."""
    (R, Din), Dout, slabs = (len(x.parts) // 2, x.parts.shape[1]), len(w.bits), 1 + gated
    More, processors = 0 if w_more is None else len(w_more), device.multiprocessors()
    features = tile(Dout // slabs, slabs, processors)
    groups = 4 if slabs * features <= 64 else 2
    rows = 8 if R <= 8 else 16
    place, kept = 128 * (slabs * features + 2 * rows) + 4 * rows, RANGES - RANGES // groups + 1
    beside = _beside(features, slabs, kept * R, Din)
    depth = max(2, min((RING - beside) // place // groups, MOST_PLACES // groups, -(-Din // 128 // groups)))
    tiles = -(-Dout // slabs // features) + -(-More // (-(-features // 16) * 8))
    sizes = {"R": R, "Pad": x.inverse.shape[1], "Din": Din, "Dout": Dout, "More": More, "Depth": depth}
    shape: dict[str, int | str] = {"Rows": rows, "Features": features, "Groups": groups}
    args = {"w": w.bits, "w_more": w_more, "x": x.parts, "x_more": None if w_more is None else x.rows}
    args |= {"inverse": x.inverse, "scale": w.scale, "out": out, "more": more, **sizes}
    kernels.launch(
        FILE,
        "linear_fp8",
        min(processors, tiles),
        192 * groups,
        args,
        shared=1024 + groups * depth * place + max(beside, 8192 - place),
        constants={"Out": device.c_type(out), **shape, "Gated": int(gated)},
    )


def takes_row(R: int, Din: int) -> bool:
    """Whether `product_of_row` can be called with x [R, Din]."""
    return R == 1 and Din <= MOST_WIDE and Din % 16 == 0 and kernels.runs_here(ROW_FILE)


def product_of_row(
    x: Array | Norm, w: Fp8, out: Array, gated: bool = False, w_more: Array | None = None, more: Array | None = None
) -> None:
    """`product` of split_rows(x), of bf16 x [1, Din], in one launch.

    x may be a Norm of at most MOST_NORMED numbers, a multiple of 256, which is computed in the same launch."""
    norm = x if isinstance(x, Norm) else None
    row = x.stream if isinstance(x, Norm) else x
    Din, Dout, slabs, processors = row.shape[1], len(w.bits), 1 + gated, device.multiprocessors()
    More, chunks = 0 if w_more is None else len(w_more), -(-Din // SCALED)
    features = tile(Dout // slabs, slabs, processors)
    tall, together = slabs * features, 2 if slabs * features <= LOW else 1  # ranges that share a place
    place = 128 * (2 * LOW if together == 2 else tall)
    x_bytes = (2 * SCALED * chunks + 128) * (1 + (More > 0))
    beside = 1024 + x_bytes + 4 * chunks + _beside(features, slabs, RANGES, Din)
    places = (SHARED - beside) // place
    groups = 4 if places >= 8 and places // 4 * 4 >= EVEN * (places // 2 * 2) else 2
    each = -(-chunks // RANGES) * (RANGES // groups) // together  # places that a warpgroup fills for a tile
    depth = max(1, min(places // groups, MOST_PLACES // groups, each))
    args: dict[str, Any] = {"w": w.bits, "w_more": w_more, "x": row, "scale": w.scale, "out": out, "more": more}
    args |= {"added": norm and norm.added, "sum": norm and norm.sum, "gain": norm and norm.gain}
    args |= {"eps": norm.eps if norm else 0.0, "Din": Din, "Dout": Dout, "More": More, "Depth": depth}
    args["AtOnce"] = max(1, UNDER_WAY // (groups * place))
    shape: dict[str, int | str] = {
        "Features": features,
        "Groups": groups,
        "Eights": -(-chunks * SCALED // (1024 * groups)),
    }
    kernels.launch(
        ROW_FILE,
        "linear_fp8_row",
        min(processors, -(-Dout // slabs // features) + -(-More // (-(-features // 16) * 8))),
        160 * groups,
        args,
        shared=groups * depth * place + max(beside, 1024 + 64 * 128),
        constants={"Out": device.c_type(out), **shape, "Normed": int(norm is not None), "Gated": int(gated)},
    )


@functools.cache
def cut(width: int, Din: int, rows: int, row_tiles: int, processors: int) -> Cut:
    """How the product of many rows is cut: what should take the least time; the bits do not depend on it.

    width: rows of w; rows: of x in a tile; row_tiles: such tiles, whose k is cut only where they leave blocks idle"""

    def cost(c: Cut) -> float:
        """Bytes that a multiprocessor could read meanwhile at its share of the bandwidth."""
        w, taken = c.features * Din, (c.features + 2 * rows) * Din / INTAKE
        rounds, left = divmod(row_tiles * c.tiles(width), processors)
        at_the_end = max(w * left / processors, max(w / hopper.QUICKEST, taken) / c.parts) if left else 0
        read_and_written = (c.kept() / _ranks(c, rows) + RANGES / c.parts) * c.sum_bytes(rows)
        join = TO_JOIN + OF_SUMS * read_and_written if c.parts > 1 else 0
        return rounds * max(w, taken) + at_the_end + TO_END * (rounds + (left > 0)) + join

    candidates = []
    for features in (192, 128, 64):
        tiles = -(-width // features)
        left = tiles % processors if row_tiles == 1 else tiles
        candidates.append(Cut(features, tiles, 1))
        if left and Din >= SCALED * RANGES:
            each = [parts for parts in (2, 4, 8) if row_tiles * parts * left <= processors]  # has as many ranges
            candidates += [Cut(features, tiles - left, parts) for parts in each]
    return min(candidates, key=cost)


def _ranks(c: Cut, rows: int) -> int:
    """How many parts share the joining, eight rows at least each."""
    return min(c.parts, rows // 8)


def product_of_many(
    x: Split,
    w: Fp8,
    out: Array,
    gated: bool = False,
    use: Array | None = None,
    allowed: Array | None = None,
    largest: Array | None = None,
) -> None:
    """`product` of any number of rows.

    use, allowed, largest: as in linear.head"""
    (R, Din), Dout, halves, chunks = (len(x.parts) // 2, x.parts.shape[1]), len(w.bits), 1 + gated, x.inverse.shape[0]
    processors, together = device.multiprocessors(), device.blocks_together()
    rows = next(n for n in (8, 16, 32, 64) if n >= min(R, 64))
    row_tiles = -(-R // rows)
    c = cut(Dout, Din, rows, row_tiles, processors)
    groups, cut_tiles = c.features // 64, c.tiles(Dout) - c.whole
    place = 128 * (c.features + 2 * rows) + 4 * rows
    each = -(-row_tiles * c.whole // processors) * chunks + -(-chunks // c.parts)  # chunks of a block, about
    ring = hopper.LONG if each * place >= hopper.LONG_FROM else hopper.SHORT
    depth = max(2, min(ring // place, each, MOST_DEPTH))
    sums, tickets = None, None
    if c.parts > 1:
        sums = device.empty(row_tiles * cut_tiles * c.kept() * c.sum_bytes(rows) // 4, np.float32)
        tickets = device.counters(row_tiles * cut_tiles * 4 * groups)
    in_turn = w.bits.reshape(halves, Dout // halves, -1).swapaxes(0, 1)  # [width, halves, Din]: rows of gate and of up
    args = {"w": in_turn, "x": x.parts, "inverse": x.inverse, "scale": w.scale, "sums": sums, "tickets": tickets}
    args |= {"out": out, "use": use, "allowed": allowed, "largest": largest}
    sizes = {"R": R, "Pad": x.inverse.shape[1], "Din": Din, "Width": len(in_turn), "Whole": c.whole, "Parts": c.parts}
    sizes |= {"Ranks": _ranks(c, rows) if together >= processors else 1, "Depth": depth}
    sizes |= {"Sums": 0 if sums is None else sums.size, "Tickets": 0 if tickets is None else tickets.size}
    kernels.launch(
        MANY_FILE,
        "linear_fp8_many",
        min(processors, row_tiles * (c.whole + cut_tiles * c.parts)),
        128 * (groups + 1),
        {**args, **sizes},
        shared=1024 + depth * place,
        constants={"Out": device.c_type(out), "Rows": rows, "Groups": groups, "Gated": int(gated)},
    )


def splits(x: Array, w: Array | Fp8) -> bool:
    """Whether products of rows such as x with w are of split ones."""
    fp8 = isinstance(w, Fp8) and device.on_gpu(x) and device.c_type(x) == "bf16" and len(x) > 0
    return fp8 and w.bits.shape[1] % 16 == 0 and kernels.runs_here(hopper.FILE) and not takes_row(*x.shape)


def split_rows(x: Array) -> Split:
    """x as two E4M3 numbers each: s x = hi + lo / 32, where s is a power of two for each row and 128 neighbours.

    Tensor cores multiply E4M3 weights by such numbers as they lie, where bf16 x would have weights made bf16 first.
    s makes the largest of the 128 at least 128 and less than 256; eight significant bits are four of hi and four of lo,
    so nothing is lost of what is at least 2^-14 of it, and of the rest at most 2^-22 of it.

    x: bf16 [R, Din] -> E4M3 [2 R, Din], hi of all rows and then lo; 1 / s, float32 [ceil(Din / 128), R and a few more],
    NaN where x is not finite. On the GPU E4M3 is uint8."""
    (R, Din), blocks = x.shape, -(-x.shape[1] // SCALED)
    if device.on_gpu(x):
        split = Split.empty(R, Din)
        Ldx = x.strides[0] // x.itemsize if R > 1 else Din
        sizes = {"R": R, "Ldx": Ldx, "Din": Din, "Blocks": blocks, "Pad": split.inverse.shape[1]}
        args = {"x": x, "parts": split.parts, "inverse": split.inverse, **sizes}
        kernels.launch("split_rows.cu", "split_rows", -(-R * blocks * 16 // 256), 256, args)
        return split
    wide, e4m3 = np.zeros((R, blocks, SCALED), np.float32), device.dtype("fp8")
    wide.reshape(R, -1)[:, :Din] = x
    most = abs(wide).max(-1, keepdims=True)
    exponent = np.maximum(np.frexp(most)[1], -118)
    scaled = np.ldexp(wide, 8 - exponent)
    hi = scaled.astype(e4m3)
    lo = ((scaled - hi.astype(np.float32)) * 32).astype(e4m3)
    inverse = np.where(np.isfinite(most), np.ldexp(np.float32(1), exponent - 8), np.nan)[..., 0].T
    return Split(np.concatenate([part.reshape(R, -1)[:, :Din] for part in (hi, lo)]), inverse.astype(np.float32))
