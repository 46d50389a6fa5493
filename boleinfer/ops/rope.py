"""Rotary positions: the table of a step's angles, and turning the heads by it. Knows nothing of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer.config import RopeConfig
from boleinfer.ops import Case


def rope_table(position: np.ndarray, config: RopeConfig, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * inv_freq, both times the attention factor (1 without YaRN).

    position: int64 [R]; -> cos, sin [R, rotary/2] in `dtype`. The angles are formed in float64: as a float32 product
    they would be off by 0.004 rad at position 100,000. Source: RopeConfig.
    """
    angle = position[:, None] * config.inv_freq()  # [R, rotary/2]
    factor = config.attention_factor
    return (factor * np.cos(angle)).astype(dtype), (factor * np.sin(angle)).astype(dtype)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turns the pair (i, i + rotary/2) of each head by the angle i of its row; later dimensions pass unchanged.

    x: [R, H, Dh]; cos, sin: [R, rotary/2]; -> a new [R, H, Dh] in the type of x.
    Source: Su et al. 2021, in the halves order of GPT-NeoX, as in HF transformers' Qwen models.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [R, 1, rotary/2]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    return out


def _case(R: int, H: int, Dh: int, rotary: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        config = RopeConfig("default", 1e7, rotary)
        cos, sin = rope_table(rng.integers(0, 262_144, R), config, np.float64)
        return {"x": rng.standard_normal((R, H, Dh)), "cos": cos, "sin": sin}

    return Case(f"R={R} H={H} Dh={Dh} rotary={rotary}", build)


CASES = {
    "rope": [_case(*s) for s in [(1, 1, 2, 2), (3, 5, 63, 16), (65, 2, 65, 64), (1, 8, 256, 64), (16, 16, 256, 64)]]
}
