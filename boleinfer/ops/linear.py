"""The dense products of a layer and the gated unit between them. Knows nothing of what the rows mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import cublas, device, hopper, hopper_fp8, kernels, whole
from boleinfer.device import Array, Fp8, Split
from boleinfer.hopper_fp8 import split_rows, splits
from boleinfer.ops import Case, sigmoid, silu

__all__ = [
    "CASES",
    "gated_linear",
    "head",
    "linear",
    "linear_pair",
    "sigmoid",
    "silu",
    "split_rows",
    "splits",
    "swiglu",
]

VECTOR_ROWS = 6  # of a matrix in one piece: up to here one matrix-vector product a row beats one matrix product
SMALL = 1_000_000  # multiply-adds up to which OpenBLAS multiplies without packing its operands first


def linear(x: Array | Split, w: Array | Fp8, dtype: Any = None) -> Array:
    """x w^T.

    x: [R, Din]; w: [Dout, Din], quickest column-major, or its panels [Dout/n, n, Din] (memory.panels)
    -> [R, Dout] in the type of x and w. Bytes: w once.
    On the GPU x may be a view of some columns, w is [Dout, Din] by rows or Fp8, the result of `dtype` (x's when None);
    of x split (`splits`) the same, with the same bits.
    Up to 128 rows of bf16, and with any of float32, a row's bits do not depend on the rows beside it.
    A matrix product packs w before it multiplies, which costs more than the product itself when there are few rows.
    A panel with few rows is small enough to be multiplied as it lies, and panel after panel is one stream of memory.
    Milliseconds for 55 MB of float32 weights, one core of a server CPU, NumPy 2.4 with OpenBLAS 0.3.31:

        rows                       1     2     4     8    16    32
        panels                   2.5   2.5   2.4   3.5   5.6  10.1
        row by row               3.1   4.3   5.8   8.8  14.0  26.2
        one matrix product       3.2   6.3   7.4   8.4  10.8  15.3
    """
    if device.on_gpu(x):
        return _linear_gpu(x, w, dtype)
    assert not isinstance(x, Split)
    R, dtype = x.shape[0], np.result_type(x, w)
    assert not isinstance(w, Fp8)
    if w.ndim == 3:
        return _by_panels(x, w, dtype)
    if R > VECTOR_ROWS:
        return x @ w.T
    out = np.empty((R, w.shape[0]), dtype)
    for r in range(R):
        np.dot(x[r], w.T, out=out[r])
    return out


def _by_panels(x: np.ndarray, w: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x [R, Din] times panels w [panels, n, Din]; an odd last row is doubled, since BLAS takes rows two at a time."""
    R, (panels, n, Din) = len(x), w.shape
    if R % 2:
        x = np.concatenate((x, x[-1:]))
    out = np.empty((len(x), panels * n), dtype)
    by_panel = out.reshape(-1, panels, n).swapaxes(0, 1)  # [panels, R, n]
    rows = max(2, SMALL // (n * Din) // 2 * 2)
    for r in range(0, len(x), rows):
        np.matmul(x[r : r + rows], w.swapaxes(1, 2), out=by_panel[:, r : r + rows])
    return out[:R]


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up with gate and up side by side: [R, 2F] -> [R, F]. Source: Shazeer 2020, "GLU variants"."""
    R, F = gate_up.shape[0], gate_up.shape[-1] // 2
    if device.on_gpu(gate_up):
        out = device.empty((R, F), gate_up.dtype)
        if out.size:
            args = {"gate_up": gate_up, "out": out, "R": R, "F": F}
            kernels.launch(
                "swiglu.cu", "swiglu", (-(-F // 2048), min(R, 65535)), 256, args, constants={"Act": device.c_type(out)}
            )
        return out
    return silu(gate_up[..., :F]) * gate_up[..., F:]


def gated_linear(x: Array | Split, w: Array | Fp8) -> Array:
    """swiglu(x w^T): x [R, Din], w [2F, Din] of gate, then up -> [R, F]. On the GPU in one launch for few rows."""
    if device.on_gpu(x):
        return _linear_gpu(x, w, gated=True)
    return swiglu(linear(x, w))


def linear_pair(x: Array | Split, w: Array | Fp8, more: Array | Fp8) -> tuple[Array, Array]:
    """linear(x, w), and linear(x, more) in float32 at least: on the GPU in one launch where that is possible.

    x split has to bring its rows."""
    if not device.on_gpu(x):
        return linear(x, w), linear(x, more)
    rows: Any = x.rows if isinstance(x, Split) else x
    bits = w.bits if isinstance(w, Fp8) else w
    bf16 = all(not isinstance(m, Fp8) and device.c_type(m) == "bf16" for m in (rows, more))
    fits = bf16 and device.c_type(bits) != "float" and _whole_words(rows, bits) and kernels.runs_here(hopper.FILE)
    if isinstance(w, Fp8):
        fits = fits and rows.flags.c_contiguous and hopper_fp8.takes_few(len(rows), len(bits))
    if not (fits and 0 < len(rows) <= SOME_ROWS):
        return linear(x, w), linear(rows, more, np.float32)
    out, second = device.empty((len(rows), len(bits)), rows.dtype), device.empty((len(rows), len(more)), np.float32)
    _on_hopper(x, w, out, w_more=more, more=second)
    return out, second


def head(x: Array, w: Array | Fp8, use: Array, allowed: Array | None, largest: Array) -> tuple[Array, Array | None]:
    """linear(x, w) in float32 at least, of which only what is read has to be there; and the largest number of a row.

    use:     int32 [R], 0: nobody reads the row, 1: all of it is read, 2: its largest number alone
    allowed: uint8 [Dout], 0 at features that are never the largest; None: all may be
    largest: uint64 [R], zeros; gets `largest_of` each row with use = 2
    Returns the rows [R, Dout], and `largest` or, where all rows are there whatever their use, None and zeros in it."""
    if not device.on_gpu(x):
        rows = linear(x, w)
        largest[use == 2] = [largest_of(row, allowed) for row in rows[use == 2]]
        return rows, largest
    bits = w.bits if isinstance(w, Fp8) else w
    if not (device.c_type(x) == "bf16" and len(x) and _whole_words(x, bits) and kernels.runs_here(hopper.FILE)):
        return linear(x, w, np.float32), None
    out = device.empty((len(x), len(bits)), np.float32)
    _on_hopper(x, w, out, use=use, allowed=allowed, largest=largest)
    return out, largest


def largest_of(row: np.ndarray, allowed: np.ndarray | None = None) -> int:
    """The largest number of a row of float32 and its place, as one integer; 0 where none is allowed.

    32 bits that order as numbers do, NaN before all, then the complement of the place: of equal numbers the first is
    the largest."""
    places = np.arange(len(row)) if allowed is None else np.flatnonzero(allowed)
    if not len(places):
        return 0
    place = int(places[row[places].argmax()])  # a NaN counts as largest
    bits = int(np.float32(row[place] + 0.0).view(np.uint32))
    rising = 0xFFFFFFFF if np.isnan(row[place]) else bits ^ (0xFFFFFFFF if bits >> 31 else 1 << 31)
    return rising << 32 | 0xFFFFFFFF - place


# ---- on the GPU ------------------------------------------------------------------------------------------------------

FEW_ROWS, SOME_ROWS = 8, 128  # up to which linear_few and linear_rows are used; at most 8 and 512
FEW_FEATURES = 256  # up to which linear_few is used for some rows, too: its blocks are smaller
RING = 192 * 1024  # bytes of linear_few's ring, at most: of weights under way in a multiprocessor
STAGED = 96 * 1024  # bytes of x that linear_few keeps in shared memory, at most
LARGE = 32768  # features from which k is not cut; a constant, since a row's bits depend on it


def _linear_gpu(x: Array | Split, w: Array | Fp8, dtype: Any = None, gated: bool = False) -> Array:
    """The kernel by architecture, types, alignment and number of rows; nothing else decides. Gated: swiglu of it.

    The kernels read w before the kernels queued earlier are done: whatever makes weights is waited for once, at load.
    """
    if isinstance(w, Fp8) and (isinstance(x, Split) or (splits(x, w) and _whole_words(x, w.bits))):
        return _of_split(x if isinstance(x, Split) else split_rows(x), w, dtype, gated)
    assert not isinstance(x, Split)
    bits, scale = (w.bits, w.scale) if isinstance(w, Fp8) else (w, None)
    (R, Din), Dout, dtype = x.shape, bits.shape[0], x.dtype if dtype is None else dtype
    plain = device.c_type(x) != "bf16" or device.c_type(bits) == "float" or not _whole_words(x, bits)
    on_hopper = not plain and kernels.runs_here(hopper.FILE)
    many, few = R > SOME_ROWS, R <= FEW_ROWS or (R <= SOME_ROWS and Dout <= FEW_FEATURES)
    one_launch = on_hopper or (few and not plain and Dout % 16 == 0)
    if gated and not one_launch:
        return swiglu(_linear_gpu(x, w, dtype))
    out = device.empty((R, Dout // 2 if gated else Dout), dtype)
    if not out.size or (many and not plain and scale is None and not gated and blas(x, bits, out)):
        return out
    if on_hopper:
        _on_hopper(x, w, out, gated=gated)
        return out
    Ldx = x.strides[0] // x.itemsize if R > 1 else Din
    args = {"x": x, "w": bits, "scale": scale, "out": out, "R": R, "Ldx": Ldx, "Din": Din, "Dout": Dout}
    types = {"Wt": device.c_type(bits), "Out": device.c_type(out)}
    if plain:
        grid = -(-R // 32), min(-(-Dout // 32), 65535)
        kernels.launch("linear_any.cu", "linear_any", grid, 256, args, constants={"Act": device.c_type(x), **types})
    elif few:
        _few_rows(args, types, gated)
    elif not many:
        _some_rows(args, types)
    else:
        _many_rows(args, types)
    return out


def _of_split(x: Split, w: Fp8, dtype: Any, gated: bool = False) -> Array:
    """_linear_gpu, where x is split."""
    R, Dout = len(x.parts) // 2, len(w.bits)
    if gated and R > SOME_ROWS:
        return swiglu(_of_split(x, w, dtype))
    out = device.empty((R, Dout // 2 if gated else Dout), device.dtype("bf16") if dtype is None else dtype)
    if out.size:
        _on_hopper(x, w, out, gated=gated)
    return out


def _on_hopper(x: Array | Split, w: Array | Fp8, out: Array, **more: Any) -> None:
    """The product of many rows, or of few, unless only the largest is asked for, by what gives the same bits."""
    few = "largest" not in more
    if isinstance(w, Fp8):
        if few and not isinstance(x, Split) and hopper_fp8.takes_row(*x.shape):
            hopper_fp8.product_of_row(x, w, out, **more)
            return
        split = x if isinstance(x, Split) else split_rows(x)._replace(rows=x)
        if few and hopper_fp8.takes_few(len(out), len(w.bits), more.get("gated", False)):
            hopper_fp8.product(split, w, out, **more)
        else:
            hopper_fp8.product_of_many(split, w, out, **more)
        return
    assert not isinstance(x, Split)
    if few and whole.takes(*x.shape):
        whole.product(x, w, out, **more)
    else:
        hopper.product(x, w, out, **more)


def _whole_words(x: Array, w: Array) -> bool:
    """Whether rows of x and of w are whole 16-byte words."""
    apart = len(x) < 2 or x.strides[0] % 16 == 0
    return apart and x.shape[1] % 8 == 0 and x.shape[1] * w.itemsize % 16 == 0


def _groups(Dout: int) -> int:
    """Groups that the ranges of k form (cuda/linear.cuh): of the sizes alone, so that a row's bits are, too."""
    return 1 if Dout >= LARGE else 4


def _few_rows(args: dict[str, Any], types: dict[str, str], gated: bool) -> None:
    """linear_few: a tile of 16 or 8 features at a time, by how evenly multiprocessors share them."""
    R, Din, Dout, itemsize = args["R"], args["Din"], args["Dout"], args["w"].itemsize
    tall = -(-R // 8)  # blocks of rows
    processors = max(1, device.multiprocessors() // tall)
    rounds = {features: -(-Dout // (features * processors)) for features in (16, 8)}
    features = 8 if 8 * rounds[8] < 0.95 * 16 * rounds[16] else 16
    chunk = 16 * 512 * itemsize * features // 8  # bytes of w
    x_bytes = 16 * min(R, 8) * (-(-Din // 64) * 8 + (4 if itemsize == 2 else 1))  # as staged_words
    room = device.shared_bytes() - 16384  # the sums
    staged = x_bytes <= min(STAGED, room - 2 * chunk)
    room -= x_bytes if staged else 0
    needed = rounds[features] * -(-Din // 1024)  # chunks of a warp
    depth = next((n for n in (12, 8, 6, 4, 3) if n * chunk <= min(room, RING) and n < 2 * needed), 2)
    tile = {"Features": features, "Depth": depth, "Splits": _groups(Dout), "Staged": staged, "Gated": int(gated)}
    kernels.launch(
        "linear_few.cu",
        "linear_few",
        (min(processors, -(-Dout // features)), tall),
        512,
        args,
        shared=depth * chunk + (x_bytes if staged else 0),
        constants={**types, **tile},
    )


def _some_rows(args: dict[str, Any], types: dict[str, str]) -> None:
    """linear_rows: as many warps as share the features evenly among multiprocessors."""
    R, Dout, itemsize, splits = args["R"], args["Dout"], args["w"].itemsize, _groups(args["Dout"])
    tiles = next(n for n in (2, 4, 8, 16) if 8 * n >= R)
    slabs = 1 if tiles == 16 else 2
    processors, room = device.multiprocessors(), device.shared_bytes() - 1024

    def places(warps: int) -> int:
        return room // (warps * slabs * 1024 * itemsize + tiles * 1024)

    def features_each(warps: int) -> int:
        return -(-splits * -(-Dout // (16 * slabs * warps)) // processors) * 16 * slabs * warps

    warps = min((n for n in (8, 7, 6, 5, 4) if places(n) >= 3 or n == 4), key=features_each)
    blocks_of_features = -(-Dout // (16 * slabs * warps))
    depth = next(n for n in (12, 10, 8, 6, 5, 4, 3, 2) if n <= places(warps) or n == 2)
    more: dict[str, Any] = {"sums": None, "tickets": None, "Splits": splits, "Sums": 0, "Tickets": device.COUNTERS}
    if splits > 1:
        more["Sums"] = splits * blocks_of_features * slabs * tiles * 128 * warps
        more |= {"sums": device.empty(more["Sums"], np.float32), "tickets": device.counters(blocks_of_features)}
    kernels.launch(
        "linear_rows.cu",
        "linear_rows",
        min(processors, splits * blocks_of_features),
        32 * warps,
        {**args, **more},
        shared=depth * (warps * slabs * 1024 * itemsize + tiles * 1024),
        constants={**types, "Tiles": tiles, "Slabs": slabs, "Depth": depth},
    )


def most_sums(R: int, widest: int) -> int:
    """Float32 numbers that a product keeps beside its result, at most, for R rows or fewer of so many features."""
    rows = min(SOME_ROWS, 1 << max(4, (R - 1).bit_length()))
    return max(4 * (min(widest, LARGE) + 256) * rows, hopper.most_sums(R, widest))


def _many_rows(args: dict[str, Any], types: dict[str, str]) -> None:
    """linear_tiles: the products that cuBLAS does not do, or is not there for."""
    blocks = -(-args["Dout"] // 128) * -(-args["R"] // 128)
    stages = 4
    shared = stages * 128 * 32 * (2 + args["w"].itemsize)
    constants: dict[str, int | str] = {**types, "Stages": stages}
    kernels.launch("linear_tiles.cu", "linear_tiles", blocks, 256, args, shared=shared, constants=constants)


def blas(x: Array, w: Array, out: Array) -> bool:
    """out = x w^T through cuBLAS, where it is installed; says whether it was done."""
    if isinstance(x, np.ndarray) or (library := cublas.library()) is None:
        return False
    if w.shape[1:] != x.shape[1:] or not w.flags.c_contiguous or x.strides[1] != x.itemsize:
        return False  # the kernel refuses it and says why
    library.product(x, w, out)
    return True


def _linear_case(R: int, Din: int, Dout: int) -> Case:
    return Case(
        f"R={R} Din={Din} Dout={Dout}",
        lambda rng: {
            "x": rng.standard_normal((R, Din)),
            "w": np.asfortranarray(rng.standard_normal((Dout, Din)) / np.sqrt(Din)),
        },
    )


def _pair_case(R: int, Din: int, Dout: int, More: int) -> Case:
    return Case(
        f"R={R} Din={Din} Dout={Dout}+{More}",
        lambda rng: {
            "x": rng.standard_normal((R, Din)),
            "w": np.asfortranarray(rng.standard_normal((Dout, Din)) / np.sqrt(Din)),
            "more": np.asfortranarray(rng.standard_normal((More, Din)) / np.sqrt(Din)),
        },
    )


def _panel_case(R: int, Din: int, panels: int, n: int) -> Case:
    return Case(
        f"R={R} Din={Din} Dout={panels}x{n}",
        lambda rng: {
            "x": rng.standard_normal((R, Din)),
            "w": (rng.standard_normal((panels, Din, n)) / np.sqrt(Din)).swapaxes(1, 2),
        },
        gpu=False,
    )


def _swiglu_case(R: int, F: int) -> Case:
    return Case(f"R={R} F={F}", lambda rng: {"gate_up": 4 * rng.standard_normal((R, 2 * F))})


CASES = {
    "linear": [
        _linear_case(R, Din, Dout)
        for R, Din, Dout in [
            (1, 1, 1),
            (3, 63, 65),
            (6, 65, 63),
            (7, 65, 63),
            (65, 3, 1),
            (1, 1024, 3584),
            (8, 2048, 4096),
            (16, 2048, 1024),
            (3, 24, 40),  # from here on: every kernel of the GPU, with partial tiles
            (8, 1032, 17),
            (9, 1032, 130),
            (17, 264, 257),
            (64, 520, 48),
            (128, 136, 300),
            (129, 136, 150),
            (200, 72, 129),
            (128, 2048, 4096),
            (300, 2048, 2048),
        ]
    ]
    + [_panel_case(*sizes) for sizes in [(1, 3, 5, 7), (3, 63, 1, 64), (65, 65, 3, 64), (8, 1536, 16, 64)]],
    "gated_linear": [
        _linear_case(R, Din, Dout)._replace(bound_bf16=1.3e-2)  # three roundings, the gate's up to 1.3 times as large
        for R, Din, Dout in [
            (1, 1, 2),
            (3, 63, 66),
            (3, 24, 48),
            (8, 1032, 272),
            (5, 136, 4400),
            (9, 1032, 288),
            (129, 136, 160),
            (1, 1024, 7168),
            (8, 2048, 1024),
        ]
    ]
    + [_panel_case(*sizes) for sizes in [(3, 63, 2, 64), (8, 512, 16, 64)]],
    "linear_pair": [
        _pair_case(*sizes)
        for sizes in [
            (1, 1, 1, 1),
            (3, 63, 65, 2),
            (7, 264, 130, 64),
            (65, 136, 72, 65),
            (129, 40, 24, 8),
            (8, 1024, 8192, 32),
        ]
    ],
    "swiglu": [_swiglu_case(R, F) for R, F in [(1, 1), (3, 63), (65, 65), (16, 3584)]],
}
