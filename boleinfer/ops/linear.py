"""The dense products of a layer and the gated unit between them. Knows nothing of what the rows mean."""

from __future__ import annotations

import numpy as np

from boleinfer.ops import Case, sigmoid, silu

__all__ = ["CASES", "linear", "sigmoid", "silu", "swiglu"]

VECTOR_ROWS = 6  # of a matrix in one piece: up to here one matrix-vector product a row beats one matrix product
SMALL = 1_000_000  # multiply-adds up to which OpenBLAS multiplies without packing its operands first


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x w^T.

    x: [R, Din]; w: [Dout, Din], quickest column-major, or its panels [Dout/n, n, Din] (memory.panels)
    -> [R, Dout] in the type of x and w. Bytes: w once.
    A matrix product packs w before it multiplies, which costs more than the product itself when there are few rows.
    A panel with few rows is small enough to be multiplied as it lies, and panel after panel is one stream of memory.
    Milliseconds for 55 MB of float32 weights, one core of a server CPU, NumPy 2.4 with OpenBLAS 0.3.31:

        rows                       1     2     4     8    16    32
        panels                   2.5   2.5   2.4   3.5   5.6  10.1
        row by row               3.1   4.3   5.8   8.8  14.0  26.2
        one matrix product       3.2   6.3   7.4   8.4  10.8  15.3
    """
    R, dtype = x.shape[0], np.result_type(x, w)
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


def _panel_case(R: int, Din: int, panels: int, n: int) -> Case:
    return Case(
        f"R={R} Din={Din} Dout={panels}x{n}",
        lambda rng: {
            "x": rng.standard_normal((R, Din)),
            "w": (rng.standard_normal((panels, Din, n)) / np.sqrt(Din)).swapaxes(1, 2),
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
    ]
    + [_panel_case(*sizes) for sizes in [(1, 3, 5, 7), (3, 63, 1, 64), (65, 65, 3, 64), (8, 1536, 16, 64)]],
    "swiglu": [_swiglu_case(R, F) for R, F in [(1, 1), (3, 63), (65, 65), (16, 3584)]],
}
