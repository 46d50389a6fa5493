"""The residual stream before a part of a layer, and the products that read its norm. Knows no part."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from boleinfer import device, hopper_fp8, kernels, whole
from boleinfer.device import Array, Fp8, Split
from boleinfer.ops.linear import gated_linear, linear, linear_pair, splits
from boleinfer.ops.norms import add_rms_norm, rms_norm


class Residual(NamedTuple):
    """What a part of a layer reads: x = rms_norm(stream + added, norm, eps).

    stream: [R, D]; added: [R, D], what the part before gave, or None for nothing; norm: [D]
    All functions here return the sum too, the stream from there on; it may be `stream` itself, written to.
    """

    stream: Array
    added: Array | None
    norm: Array
    eps: float


def normed(r: Residual) -> tuple[Array, Array]:
    """x [R, D] and the sum."""
    if r.added is None:
        return rms_norm(r.stream, r.norm, r.eps), r.stream
    return add_rms_norm(r.stream, r.added, r.norm, r.eps), r.stream


def norm_linear(r: Residual, w: Array | Fp8, dtype: Any = None) -> tuple[Array, Array]:
    """linear(x, w, dtype) [R, Dout] and the sum."""
    if (x := _in_one_launch(r, w)) is not None:
        out = device.empty((len(r.stream), _features(w)), r.stream.dtype if dtype is None else dtype)
        _product(x, w, out)
        return out, x.sum
    y, stream = _normed_for(w, r)
    return linear(y, w, dtype), stream


def norm_gated_linear(r: Residual, w: Array | Fp8) -> tuple[Array, Array]:
    """gated_linear(x, w) [R, F] and the sum."""
    if (x := _in_one_launch(r, w)) is not None:
        out = device.empty((len(r.stream), _features(w) // 2), r.stream.dtype)
        _product(x, w, out, gated=True)
        return out, x.sum
    y, stream = _normed_for(w, r)
    return gated_linear(y, w), stream


def norm_linear_pair(r: Residual, w: Array | Fp8, more: Array | Fp8) -> tuple[tuple[Array, Array], Array]:
    """linear_pair(x, w, more) and the sum."""
    if (x := _in_one_launch(r, w, more)) is not None:
        R = len(r.stream)
        out, second = device.empty((R, _features(w)), r.stream.dtype), device.empty((R, len(more)), np.float32)
        _product(x, w, out, w_more=more, more=second)
        return (out, second), x.sum
    y, stream = _normed_for(w, r, rows=True)
    return linear_pair(y, w, more), stream


def _in_one_launch(r: Residual, w: Array | Fp8, more: Array | Fp8 | None = None) -> whole.Norm | None:
    """What a product makes x of, where it is quicker than two launches; the same bits."""
    R, D = r.stream.shape
    plain = [m for m in (w, more) if m is not None and not isinstance(m, Fp8)]
    bf16 = device.on_gpu(r.stream) and all(device.c_type(m) == "bf16" for m in (r.stream, *plain))
    if not bf16 or R != 1 or isinstance(more, Fp8):
        return None
    if isinstance(w, Fp8):
        fits = r.added is not None and D % WARP_WIDTH == 0 and D <= hopper_fp8.MOST_NORMED
        takes = fits and hopper_fp8.takes_row(R, D)
    else:
        takes = D <= whole.MOST_NORMED and whole.takes(R, D)
    if not takes:
        return None
    total = r.stream if r.added is None else device.empty((R, D), r.stream.dtype)
    return whole.Norm(r.stream, r.added, r.norm, r.eps, total)


def _features(w: Array | Fp8) -> int:
    return len(w.bits) if isinstance(w, Fp8) else len(w)


def _product(x: whole.Norm, w: Array | Fp8, out: Array, **more: Any) -> None:
    """The product of the type of w."""
    if isinstance(w, Fp8):
        hopper_fp8.product_of_row(x, w, out, **more)
    else:
        whole.product(x, w, out, **more)


WARP_WIDTH, MOST_WIDTH = 256, 8192  # numbers of a warp, and of a block, that norms a row


def _normed_for(w: Array | Fp8, r: Residual, rows: bool = False) -> tuple[Array | Split, Array]:
    """x as the product with w reads it, and the sum: of FP8 w split_rows(x), made in one launch, with x if `rows`."""
    (R, D), fits = r.stream.shape, r.stream.shape[1] % WARP_WIDTH == 0 and r.stream.shape[1] <= MOST_WIDTH
    if not (fits and splits(r.stream, w)):
        return normed(r)
    x = Split.empty(R, D, device.empty((R, D), r.stream.dtype) if rows else None)
    args = {"h": r.stream, "x": r.added, "w": r.norm, "out": x.rows, "parts": x.parts, "inverse": x.inverse}
    args |= {"R": R, "D": D, "Pad": x.inverse.shape[1], "eps": r.eps}
    kernels.launch("split_rows.cu", "norm_rows", R, D // 8, args)
    return x, r.stream
