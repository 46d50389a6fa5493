"""The dense product of up to 8 rows on sm_90a (cuda/linear_whole.cu): its tiles, its launch. Knows no op."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from boleinfer import device, kernels
from boleinfer.device import Array

FILE = "linear_whole.cu"
RANGES, CHUNK = 8, 64  # of k, as in the kernel
MOST_WIDE = 5120  # k of 8 rows of x that have room in shared memory; of one row MOST_WIDE * 8
MOST_NORMED = 8192  # k of a row that is normed
MOST_TALL = 64  # rows of w in a tile, so that registers allow two blocks on a multiprocessor
LEAST = {1: 8, 8: 16}  # features of a tile, by rows of x
LEAST_BOX = 24  # rows of a box from which the copying unit is as quick as memory
ALL, RING = 140 * 1024, 192 * 1024  # bytes of a block's w: all of it at once up to ALL, RING at a time else
UNDER_WAY = 80 * 1024  # bytes of a block's w that are on their way at the same time before x is there
UNDER_WAY_OF_A_TILE = 64 * 1024  # where a block has but one tile, which passes a ring
UNDER_WAY_OF_ONE = 32 * 1024  # where there is one row, and a place for all w
MOST_PLACES, MOST_SHARED = 8, 226 * 1024
ROUND, SHALLOW = 4, 8  # features that could be read instead of a round of tiles, of a place that a ring lacks of four


class Norm(NamedTuple):
    """x as the norm of stream + added, [1, Din] each, with gain [Din]; `sum` gets stream + added.

    added: None where nothing is added; `sum` is then `stream` itself"""

    stream: Array
    added: Array | None
    gain: Array
    eps: float
    sum: Array


class Tile(NamedTuple):
    """Features of a tile; chunks of k that are copied together; places of such runs in a ring, 0: one for each."""

    features: int
    run: int
    places: int


@functools.cache
def tile(widths: tuple[int, ...], chunks: int, halves: int, rows: int, normed: bool, processors: int) -> Tile:
    """The tile that should take the least time; the bits of the results do not depend on it.

    widths: features of the results; halves: rows of w of each feature; rows: of x, 1 or 8"""
    own = -(-chunks // RANGES)  # of a warp

    def made(features: int) -> tuple[int, Tile]:
        """What the tile costs, in features that could be read meanwhile, and the tile."""
        rounds = -(-sum(-(-width // features) for width in widths) // processors)
        chunk = 128 * RANGES * halves * features  # bytes of all warps
        room = MOST_SHARED - _beside(features * halves, chunks, rows, normed)
        if rounds == 1 and own * chunk <= min(ALL, room) and own <= MOST_PLACES:
            return features + ROUND, Tile(features, own if halves * features <= 16 and halves == 1 else 1, 0)
        run = 1 if halves > 1 else min(own, -(-LEAST_BOX // features))
        places = min(RING, room) // (run * chunk)
        lacking = max(0, min(4, rounds * -(-own // run)) - places)
        return rounds * (features + ROUND) + SHALLOW * lacking, Tile(features, run, max(1, places))

    most = MOST_TALL // halves // 8 * 8
    return min((made(features) for features in range(most, LEAST[rows] - 1, -8)), key=lambda found: found[0])[1]


def _beside(tall: int, chunks: int, rows: int, normed: bool) -> int:
    """Bytes of shared memory beside the places of w: x, what the norm needs, the warps' sums."""
    sums = RANGES * rows * (-(-tall // 16) * 16 + 4)
    return 1024 + 128 * chunks * rows + 4 * (sums + (32 if normed else 0))


def takes(R: int, Din: int) -> bool:
    """Whether `product` can be called with x [R, Din]."""
    return R <= 8 and _rows(R) * Din <= 8 * MOST_WIDE and Din % CHUNK == 0 and kernels.runs_here(FILE)


def _rows(R: int) -> int:
    """Rows of x that the kernel has room for."""
    return 1 if R == 1 else 8


def product(
    x: Array | Norm,
    w: Array,
    out: Array,
    gated: bool = False,
    w_more: Array | None = None,
    more: Array | None = None,
) -> None:
    """out = x w^T of bf16 x [R, Din], R up to 8, and w [Dout, Din]; gated: of its halves silu(gate) * up.

    x may be a Norm, which is computed in the same launch
    w_more: [More, Din], and more = x w_more^T in float32, in the same launch
    Rows of x and of w are whole 16-byte words at multiples of 16 bytes. Raises KernelError for what does not fit."""
    norm = x if isinstance(x, Norm) else None
    given = x.stream if isinstance(x, Norm) else x
    (R, Din), Dout, halves, processors = given.shape, len(w), 1 + gated, device.multiprocessors()
    widths = (Dout // halves,) if w_more is None else (Dout // halves, len(w_more))
    rows, chunks = _rows(R), Din // CHUNK
    t = tile(widths, chunks, halves, rows, norm is not None, processors)
    own, tall = -(-chunks // RANGES), halves * t.features
    w_bytes = 128 * RANGES * tall * t.run * (t.places or -(-own // t.run))
    args: dict[str, Any] = {"w": _in_chunks(w), "w_more": None if w_more is None else _in_chunks(w_more), "x": given}
    args |= {"added": norm and norm.added, "sum": norm and norm.sum, "gain": norm and norm.gain}
    args |= {"eps": norm.eps if norm else 0.0, "out": out, "more": more, "R": R, "Dout": Dout}
    args |= {"Ldx": given.strides[0] // given.itemsize if R > 1 else Din, "More": 0 if w_more is None else len(w_more)}
    tiles = sum(-(-width // t.features) for width in widths)
    if t.places:
        under_way = UNDER_WAY_OF_A_TILE if tiles <= processors else UNDER_WAY
    else:
        under_way = UNDER_WAY_OF_ONE if rows == 1 else UNDER_WAY
    at_once = under_way // (128 * tall * t.run)
    args["AtOnce"] = max(RANGES, at_once // RANGES * RANGES) if t.places else max(1, at_once)
    shape: dict[str, int | str] = {"Din": Din, "Rows": rows, "Features": t.features, "Run": t.run, "Places": t.places}
    kernels.launch(
        FILE,
        "linear_whole",
        min(processors, tiles),
        32 * RANGES,
        args,
        shared=w_bytes + _beside(tall, chunks, rows, norm is not None),
        constants={**shape, "Out": device.c_type(out), "Normed": int(norm is not None), "Gated": int(gated)},
    )


def _in_chunks(w: Array) -> Array:
    """w [Dout, Din] as [chunks, Dout, 64]."""
    return w.reshape(len(w), -1, CHUNK).swapaxes(0, 1)
