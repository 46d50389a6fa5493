"""Normalisations over the last axis: root mean square, the gated one inside GDN, and L2. Knows nothing of layers."""

from __future__ import annotations

import numpy as np

from boleinfer.ops import Case, silu


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean x^2 + eps) * (1 + w): the block, q, k, final and MTP norms, whose weight is stored as a delta.

    x: [..., D]; w: [D]; -> [..., D] in the type of x. 1 + w is formed in the type of w: keep it in float32.
    Source: Zhang and Sennrich 2019, with the zero-centred weight of Qwen3NextRMSNorm in HF transformers.
    """
    return x / np.sqrt(_mean_square(x) + eps) * (1 + w)


def gated_rms_norm(o: np.ndarray, z: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """w * o / sqrt(mean o^2 + eps) * silu(z): the norm of GDN's output, whose weight is a plain gain.

    o, z: [..., V]; w: [V]; -> [..., V] in the type of o. Source: Qwen3NextRMSNormGated in HF transformers.
    """
    return o / np.sqrt(_mean_square(o) + eps) * w * silu(z)


def l2_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """x / sqrt(sum x^2 + eps): the q and k of GDN. eps is added to the sum, inside the root, as in HF transformers.

    x: [..., K] -> [..., K] in the type of x.
    """
    return x / np.sqrt(_square_sum(x) + eps)


def _square_sum(x: np.ndarray) -> np.ndarray:
    return np.einsum("...d,...d->...", x, x)[..., None]  # [..., 1]


def _mean_square(x: np.ndarray) -> np.ndarray:
    return _square_sum(x) / x.shape[-1]


def _rms_case(R: int, D: int) -> Case:
    return Case(
        f"R={R} D={D}",
        lambda rng: {"x": rng.standard_normal((R, D)), "w": 0.2 * rng.standard_normal(D), "eps": 1e-6},
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
    )


def _l2_case(R: int, H: int, K: int) -> Case:
    return Case(f"R={R} Hk={H} K={K}", lambda rng: {"x": rng.standard_normal((R, H, K))})


CASES = {
    "rms_norm": [_rms_case(R, D) for R, D in [(1, 1), (3, 63), (65, 65), (1, 1024), (16, 2048), (64, 5120), (7, 8192)]],
    "gated_rms_norm": [_gated_case(R, Hv, V) for R, Hv, V in [(1, 1, 3), (3, 5, 63), (65, 2, 65), (16, 32, 128)]],
    "l2_norm": [_l2_case(R, H, K) for R, H, K in [(1, 1, 1), (3, 5, 63), (65, 2, 65), (16, 16, 128)]],
}
