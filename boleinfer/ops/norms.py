"""Normalisations over the last axis: root mean square, and the gated one inside GDN. Knows nothing of layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.ops import Case, silu


def rms_norm(x: Array, w: Array, eps: float) -> Array:
    """x / sqrt(mean x^2 + eps) * (1 + w): the block, q, k, final and MTP norms, whose weight is stored as a delta.

    x: [..., D]; w: [D]; -> [..., D] in the type of x. 1 + w is formed in the type of w: keep it in float32.
    Source: Zhang and Sennrich 2019, with the zero-centred weight of Qwen3NextRMSNorm in HF transformers.
    """
    if not device.on_gpu(x):
        return x / np.sqrt(_mean_square(x) + eps) * (1 + w)
    out, D = device.empty(x.shape, x.dtype), x.shape[-1]
    rows = {"x": x.reshape(-1, D), "out": out.reshape(-1, D)}
    _launch_rows("rms_norm", x.size // D, x, {**rows, "w": w, "D": D, "eps": eps})
    return out


def add_rms_norm(h: Array, x: Array, w: Array, eps: float) -> Array:
    """h += x in place, the residual stream; then rms_norm(h, w, eps), which is returned.

    h, x: [R, D]; w: [D]; -> [R, D] in the type of h, to which h is rounded before it is normed.
    """
    if not device.on_gpu(h):
        h += x
        return rms_norm(h, w, eps)
    out = device.empty(h.shape, h.dtype)
    _launch_rows("add_rms_norm", len(h), h, {"h": h, "x": x, "w": w, "out": out, "D": h.shape[1], "eps": eps})
    return out


def _launch_rows(name: str, grid: int, x: Array, args: dict[str, Any]) -> None:
    """A kernel of rms_norm.cu: a block for each row of x, as many threads as the row has groups of 16 bytes."""
    threads = -(-x.shape[-1] * x.itemsize // 16)
    block = min(1024, -(-threads // 32) * 32)
    if x.size:
        kernels.launch("rms_norm.cu", name, grid, block, args, constants={"Act": device.c_type(x)})


def gated_rms_norm(o: Array, z: Array, w: Array, eps: float) -> Array:
    """w * o / sqrt(mean o^2 + eps) * silu(z): the norm of GDN's output, whose weight is a plain gain.

    o, z: [..., V], on the GPU [R, Hv, V], z perhaps columns of a wider matrix; w: [V]; -> [..., V] in the type of o.
    Source: Qwen3NextRMSNormGated in HF transformers.
    """
    if not device.on_gpu(o):
        return o / np.sqrt(_mean_square(o) + eps) * w * silu(z)
    (R, Hv, V), lanes = o.shape, min(32, 1 << max(0, -(-o.shape[2] // 4) - 1).bit_length())
    out, ldz = device.empty(o.shape, o.dtype), z.strides[0] // z.itemsize
    if R:
        args = {"o": o, "z": z, "w": w, "out": out, "R": R, "Hv": Hv, "Ldz": ldz, "eps": eps}
        heads = 1 if R * Hv <= 4096 else 2  # of a group of lanes
        grid, constants = -(-R * Hv * lanes // (heads * 128)), {"V": V, "Act": device.c_type(o), "Heads": heads}
        kernels.launch("gated_rms_norm.cu", "gated_rms_norm", grid, 128, args, constants=constants)
    return out


def _mean_square(x: np.ndarray) -> np.ndarray:
    return np.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]  # [..., 1]


def _rms_case(R: int, D: int) -> Case:
    return Case(
        f"R={R} D={D}",
        lambda rng: {"x": rng.standard_normal((R, D)), "w": 0.2 * rng.standard_normal(D), "eps": 1e-6},
        wide=("w",),
    )


def _add_case(R: int, D: int) -> Case:
    return Case(
        f"R={R} D={D}",
        lambda rng: {
            "h": 5 * rng.standard_normal((R, D)),
            "x": rng.standard_normal((R, D)),
            "w": 0.2 * rng.standard_normal(D),
            "eps": 1e-6,
        },
        outputs=("h",),
        wide=("w",),
    )


def _gated_case(R: int, Hv: int, V: int) -> Case:
    return Case(
        f"R={R} Hv={Hv} V={V}",
        lambda rng: {
            "o": rng.standard_normal((R, Hv, V)),
            "z": 3 * rng.standard_normal((R, Hv, V)),
            "w": 1 + 0.2 * rng.standard_normal(V),
            "eps": 1e-6,
        },
        wide=("w",),
    )


_ROWS = [(1, 1), (3, 63), (65, 65), (1, 1024), (16, 2048), (64, 5120), (7, 8192)]

CASES = {
    "rms_norm": [_rms_case(*sizes) for sizes in _ROWS],
    "add_rms_norm": [_add_case(*sizes) for sizes in _ROWS],
    "gated_rms_norm": [_gated_case(R, Hv, V) for R, Hv, V in [(1, 1, 3), (3, 5, 63), (65, 2, 65), (16, 32, 128)]],
}
