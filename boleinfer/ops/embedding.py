"""Rows of a table: the embedding of token ids, hidden states by row number; and rotary angles. Knows nothing of what
follows."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.config import RopeConfig
from boleinfer.device import Array
from boleinfer.ops import Case


def embedding(ids: Array, table: Array, dtype: np.dtype | None = None) -> Array:
    """The rows of `table` at `ids`, copied: ids int32 [R], table [vocab, D] or its panels [vocab/n, n, D] -> [R, D].

    Raises ValueError naming the first id outside 0 .. vocab-1 (NumPy alone would count a negative one from the end).
    On the GPU such an id gives a row of NaN, the table has no panels, and the result is of `dtype` (None: the table's).
    """
    if device.on_gpu(table):
        return _launch(ids, table, dtype)
    vocab = len(table) if table.ndim == 2 else len(table) * table.shape[1]
    bad = (ids < 0) | (ids >= vocab)
    if bad.any():
        raise ValueError(f"token id {ids[bad][0]} at row {np.flatnonzero(bad)[0]} is outside 0 .. {vocab - 1}")
    return table[ids] if table.ndim == 2 else table[np.divmod(ids, table.shape[1])]


def rotary_angles(position: np.ndarray, inv_freq: np.ndarray, factor: float, dtype: Any = np.float32) -> Any:
    """cos and sin of position * inv_freq, both times `factor` (the attention factor of YaRN, else 1).

    position: int [R]; inv_freq: float64 [rotary/2], see RopeConfig; -> cos, sin [R, rotary/2] in `dtype`. The angles
    are formed in float64: as a float32 product they would be off by 0.004 rad at position 100,000.
    """
    angle = position[:, None] * np.asarray(inv_freq, np.float64)  # [R, rotary/2]
    return (factor * np.cos(angle)).astype(dtype), (factor * np.sin(angle)).astype(dtype)


def token_inputs(
    token: Array, table: Array, position: Array, inv_freq: Array, factor: float, dtype: np.dtype | None = None
) -> tuple[Array, Array, Array]:
    """What a pass over rows begins with, on the GPU in one launch: embedding(token), and rotary_angles(position).

    token, position: int [R], int32 on the GPU; cos, sin: [R, rotary/2], on the GPU float32, else of the table's type;
    all else, and what is raised, as in those."""
    if device.on_gpu(table):
        cos, sin = (device.empty((len(token), len(inv_freq)), np.float32) for _ in "cs")
        angles = {"position": position, "inv_freq": inv_freq, "cosine": cos, "sine": sin, "factor": factor}
        return _launch(token, table, dtype, angles), cos, sin
    return embedding(token, table), *rotary_angles(position, inv_freq, factor, table.dtype)


# ---- the GPU ---------------------------------------------------------------------------------------------------------


def _launch(ids: Array, table: Array, dtype: np.dtype | None, angles: dict[str, Any] | None = None) -> Array:
    """angles: arguments of the kernel; cosine and sine are written."""
    R, vocab, D = len(ids), len(table), table.shape[-1]
    out = device.empty((R, D), table.dtype if dtype is None else dtype)
    block = min(256, -(-D // 256) * 32)  # 8 numbers a thread
    constants = {"Wt": device.c_type(table), "Act": device.c_type(out), "Freq": "double"}
    args = {"ids": ids, "table": table, "out": out, "Vocab": vocab, "D": D, "Half": 0, "factor": 1.0}
    if angles is None:
        args |= dict.fromkeys(("position", "inv_freq", "cosine", "sine"))
    else:
        constants["Freq"] = device.c_type(angles["inv_freq"])
        args |= angles | {"Half": len(angles["inv_freq"])}
    if R:
        grid = (R, 1 if angles is None else 2)
        kernels.launch("embedding.cu", "embedding", grid, block, args, constants=constants)
    return out


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _case(R: int, shape: tuple[int, ...]) -> Case:
    vocab = int(np.prod(shape[:-1]))
    return Case(
        f"R={R} table={shape}",
        lambda rng: {"ids": rng.integers(0, vocab, R, np.int32), "table": rng.standard_normal(shape)},
        bound=0.0,
        gpu=len(shape) == 2,
    )


def _inputs_case(R: int, vocab: int, D: int, rotary: int, limit: int, factor: float) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        return {
            "token": rng.integers(0, vocab, R, np.int32),
            "table": rng.standard_normal((vocab, D)),
            "position": rng.integers(0, limit, R, np.int32),
            "inv_freq": RopeConfig("default", 1e7, rotary).inv_freq(),
            "factor": factor,
        }

    label = f"R={R} D={D} rotary={rotary} limit={limit}"
    return Case(label, build, wide=("inv_freq",), bound_bf16=1e-5)


CASES = {
    "embedding": [
        _case(R, shape) for R, shape in [(1, (1, 1)), (3, (63, 65)), (65, (7, 63)), (16, (8192, 384)), (9, (5, 32, 7))]
    ],
    "token_inputs": [
        _inputs_case(*s)
        for s in [
            (1, 1, 1, 2, 10, 1.0),
            (3, 7, 65, 16, 262_144, 1.0),
            (65, 9, 384, 64, 1_010_000, 1.3),
            (300, 40, 8, 64, 2**31 - 1, 1.0),
        ]
    ],
}
