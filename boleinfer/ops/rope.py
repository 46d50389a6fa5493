"""The rotary angles of a step's positions, as a table of cosines and sines. Knows nothing of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.config import RopeConfig
from boleinfer.device import Array
from boleinfer.ops import Case


def rope_table(position: Array, inv_freq: Array, factor: float, dtype: Any = np.float32) -> tuple[Array, Array]:
    """cos and sin of position * inv_freq, both times `factor` (the attention factor of YaRN, else 1).

    position: int [R], int32 on the GPU; inv_freq: float64 [rotary/2], see RopeConfig; -> cos, sin [R, rotary/2] in
    `dtype`, on the GPU float32. The angles are formed in float64: as a float32 product they would be off by 0.004 rad
    at position 100,000.
    """
    if device.on_gpu(position):
        return _launch(position, inv_freq, factor)
    angle = position[:, None] * np.asarray(inv_freq, np.float64)  # [R, rotary/2]
    return (factor * np.cos(angle)).astype(dtype), (factor * np.sin(angle)).astype(dtype)


def _launch(position: Array, inv_freq: Array, factor: float) -> tuple[Array, Array]:
    (R,), (Half,), threads = position.shape, inv_freq.shape, 256
    cos, sin = (device.empty((R, Half), np.float32) for _ in "cs")
    if R:
        args = {"position": position, "inv_freq": inv_freq, "cosine": cos, "sine": sin}
        args |= {"R": R, "Half": Half, "factor": factor}
        constants = {"Freq": device.c_type(inv_freq)}
        kernels.launch("rope_table.cu", "rope_table", -(-R * Half // threads), threads, args, constants=constants)
    return cos, sin


def _case(R: int, rotary: int, limit: int, factor: float) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        inv_freq = RopeConfig("default", 1e7, rotary).inv_freq()
        return {"position": rng.integers(0, limit, R, np.int32), "inv_freq": inv_freq, "factor": factor}

    return Case(f"R={R} rotary={rotary} limit={limit}", build, wide=("inv_freq",), bound_bf16=1e-5)


CASES = {
    "rope_table": [
        _case(*s) for s in [(1, 2, 10, 1.0), (3, 16, 262_144, 1.0), (65, 64, 1_010_000, 1.3), (300, 64, 2**31 - 1, 1.0)]
    ]
}
