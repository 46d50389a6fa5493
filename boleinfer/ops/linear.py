"""The dense products of a layer and the gated unit between them. Knows nothing of what the rows mean."""

from __future__ import annotations

import numpy as np

from boleinfer.ops import Case, sigmoid, silu

__all__ = ["CASES", "linear", "sigmoid", "silu", "swiglu"]

VECTOR_ROWS = 6  # up to here one matrix-vector product a row beats one matrix product


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x w^T.

    x: [R, Din]; w: [Dout, Din], quickest column-major; -> [R, Dout] in the type of x and w.
    Bytes: w once (plus, from two rows on, once from cache for each row).
    A matrix product packs w before it multiplies, which costs more than the product itself when there are few rows.
    Measured on 2 cores of a server CPU with 101 MB of float32 weights, NumPy 2.4 with OpenBLAS, in ms: matrix product
    4.4, 9.0, 8.0, 8.0, 9.0, 9.7, 8.8 at 1, 2, 3, 4, 5, 6, 8 rows; row by row 4.3, 5.8, 6.9, 7.3, 8.4, 9.0, 11.3.
    Row by row also gives each row of a small tree the very bits that it has when it is decoded alone.
    """
    R = x.shape[0]
    if R > VECTOR_ROWS:
        return x @ w.T
    out = np.empty((R, w.shape[0]), np.result_type(x, w))
    for r in range(R):
        np.dot(x[r], w.T, out=out[r])
    return out


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up with gate and up side by side: [R, 2F] -> [R, F]. Source: Shazeer 2020, "GLU variants"."""
    F = gate_up.shape[-1] // 2
    return silu(gate_up[..., :F]) * gate_up[..., F:]


def _linear_case(R: int, Din: int, Dout: int) -> Case:
    return Case(
        f"R={R} Din={Din} Dout={Dout}",
        lambda rng: {
            "x": rng.standard_normal((R, Din)),
            "w": np.asfortranarray(rng.standard_normal((Dout, Din)) / np.sqrt(Din)),
        },
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
        ]
    ],
    "swiglu": [_swiglu_case(R, F) for R, F in [(1, 1), (3, 63), (65, 65), (16, 3584)]],
}
