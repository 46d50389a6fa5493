"""What the MTP layer begins with: tokens and the hidden rows they pair with, normed, and angles. Knows no other op."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.config import RopeConfig
from boleinfer.device import Array
from boleinfer.ops import Case


def mtp_inputs(
    token: Array,
    table: Array,
    wa: Array,
    hidden: Array,
    wb: Array,
    position: Array,
    inv_freq: Array,
    factor: float,
    eps: float,
    source: Array | None = None,
) -> tuple[Array, Array, Array]:
    """x = norm(table[token]) beside norm(hidden[source]), norm(y) = y / sqrt(mean y^2 + eps) * (1 + w); cos and sin of
    position * inv_freq, both times `factor`.

    token, position: int [R], int32 on the GPU; source: the same, rows of hidden; None: each row its own
    table: [vocab, D], in NumPy perhaps panels of it; hidden: [n, D] of its type; wa, wb: [D], deltas to 1
    inv_freq: float64 [rotary/2]; -> x [R, 2 D], cos, sin [R, rotary/2], on the GPU in float32
    Bytes: 4 D numbers a row. On the GPU a token or a source outside its table gives NaN.
    Equations: transformers' MtpModel; ops/embedding.py says why angles are formed in float64.
    """
    if device.on_gpu(token):
        return _launch(token, table, wa, hidden, wb, position, inv_freq, factor, eps, source)
    e = table[token] if table.ndim == 2 else table[np.divmod(token, table.shape[1])]
    h = hidden if source is None else hidden[source]
    normed = [
        y / np.sqrt(np.einsum("rd,rd->r", y, y)[:, None] / y.shape[1] + eps) * (1 + w) for y, w in ((e, wa), (h, wb))
    ]
    angle = position[:, None] * np.asarray(inv_freq, np.float64)
    return np.concatenate(normed, axis=1), *((factor * f(angle)).astype(wa.dtype) for f in (np.cos, np.sin))


def _launch(
    token: Array,
    table: Array,
    wa: Array,
    hidden: Array,
    wb: Array,
    position: Array,
    inv_freq: Array,
    factor: float,
    eps: float,
    source: Array | None,
) -> tuple[Array, Array, Array]:
    R, (Vocab, D), Half = len(token), table.shape, len(inv_freq)
    x = device.empty((R, 2 * D), hidden.dtype)
    cos, sin = (device.empty((R, Half), np.float32) for _ in "cs")
    if R:
        args = {"token": token, "table": table, "wa": wa, "hidden": hidden, "source": source, "wb": wb}
        args |= {"position": position, "inv_freq": inv_freq, "out": x, "cosine": cos, "sine": sin}
        args |= {"Vocab": Vocab, "Rows": len(hidden), "D": D, "Half": Half, "eps": eps, "factor": factor}
        block = min(1024, -(-D * x.itemsize // 512) * 32)  # 16 bytes a thread
        constants = {"Act": device.c_type(x), "Freq": device.c_type(inv_freq)}
        kernels.launch("mtp_inputs.cu", "mtp_inputs", (R, 3), block, args, constants=constants)
    return x, cos, sin


def _case(R: int, vocab: int, rows: int, D: int, rotary: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "token": rng.integers(0, vocab, R, np.int32),
            "table": rng.standard_normal((vocab, D)),
            "wa": 0.2 * rng.standard_normal(D),
            "hidden": 3 * rng.standard_normal((rows or R, D)),
            "wb": 0.2 * rng.standard_normal(D),
            "position": rng.integers(0, 1_010_000, R, np.int32),
            "inv_freq": RopeConfig("default", 1e7, rotary).inv_freq(),
            "factor": 1.25,
            "eps": 1e-6,
            "source": rng.integers(0, rows, R, np.int32) if rows else None,
        }

    return Case(f"R={R} of {rows or R} D={D} rotary={rotary}", build, wide=("wa", "wb", "inv_freq"))


CASES = {
    "mtp_inputs": [
        _case(*s)
        for s in [(1, 1, 0, 1, 2), (3, 7, 5, 63, 16), (65, 9, 2, 65, 64), (8, 40, 8, 1024, 64), (4, 8, 0, 4096, 64)]
    ]
}
