"""The residual stream before a part of a layer, and the products that read its norm. Knows no part."""

from __future__ import annotations

from typing import Any, NamedTuple

from boleinfer.device import Array, Fp8
from boleinfer.ops.linear import gated_linear, linear, linear_pair
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
    x, stream = normed(r)
    return linear(x, w, dtype), stream


def norm_gated_linear(r: Residual, w: Array | Fp8) -> tuple[Array, Array]:
    """gated_linear(x, w) [R, F] and the sum."""
    x, stream = normed(r)
    return gated_linear(x, w), stream


def norm_linear_pair(r: Residual, w: Array | Fp8, more: Array | Fp8) -> tuple[tuple[Array, Array], Array]:
    """linear_pair(x, w, more) and the sum."""
    x, stream = normed(r)
    return linear_pair(x, w, more), stream
