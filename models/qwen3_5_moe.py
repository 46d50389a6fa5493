"""Qwen3.5 mixture of experts (`qwen3_5_moe_text`): Qwen3.5's mixers with routed experts. Knows no files."""

from __future__ import annotations

from boleinfer import layers
from boleinfer.config import ModelConfig
from boleinfer.decoder import Decoder
from boleinfer.plans import Shapes, Target, moe_ffn, separate_projections, text_model


def plan(config: ModelConfig, tensors: Shapes) -> list[Target]:
    """How checkpoint tensors (bare name -> shape) become this family's arrays."""
    return text_model(config, tensors, separate_projections, moe_ffn)


def build(config: ModelConfig, weights: layers.Weights) -> Decoder:
    """The model over its loaded arrays."""
    return Decoder(config, weights, layers.moe_ffn)
