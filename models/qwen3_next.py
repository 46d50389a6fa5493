"""Qwen3-Next (`qwen3_next`): mixture of experts whose DeltaNet projections are grouped per key head. Knows no files."""

from __future__ import annotations

import numpy as np

from boleinfer import layers
from boleinfer.config import ModelConfig
from boleinfer.decoder import Decoder
from boleinfer.plans import Part, Shapes, Target, moe_ffn, text_model


def plan(config: ModelConfig, tensors: Shapes) -> list[Target]:
    """How checkpoint tensors (bare name -> shape) become this family's arrays."""
    return text_model(config, tensors, grouped_projections, moe_ffn)


def build(config: ModelConfig, weights: layers.Weights) -> Decoder:
    """The model over its loaded arrays."""
    return Decoder(config, weights, layers.moe_ffn)


def grouped_projections(config: ModelConfig, tensors: Shapes, at: str) -> list[Target]:
    """in_proj_qkvz and in_proj_ba, stored group by group (one group per key head), reordered kind by kind."""
    D, Hk, Hv = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    K, values = config.linear_key_head_dim, Hv // Hk * config.linear_value_head_dim
    qkvz = ungrouped_rows(Hk, (K, K, values, values))
    ba = ungrouped_rows(Hk, (Hv // Hk, Hv // Hk))
    return [
        Target(f"{at}.in_proj_qkvz", (len(qkvz), D), (Part(f"{at}.in_proj_qkvz.weight", (len(qkvz), D), qkvz),)),
        Target(f"{at}.in_proj_ba", (len(ba), D), (Part(f"{at}.in_proj_ba.weight", (len(ba), D), ba),)),
    ]


def ungrouped_rows(groups: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Rows stored as [groups, sum(sizes)], reordered so that each kind's rows of all groups come together: int64."""
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    return np.concatenate([kind.ravel() for kind in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])
