"""Loading plans: which checkpoint rows make up each array of a model. Names and shapes only, no data and no files.

Names here are bare: without the prefixes `model.`, `language_model.` that releases differ in. The parts that all
families share live here; what a family does its own way is in models/<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from boleinfer.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]


class Part(NamedTuple):
    """One checkpoint tensor, taken whole, its rows (first axis) in the given order or as stored."""

    tensor: str
    shape: tuple[int, ...]
    rows: np.ndarray | None = None  # int64 [shape[0]], a permutation


class Target(NamedTuple):
    """One array of the model: the rows of its parts one after another, seen as `shape`."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Block = Callable[[ModelConfig, Shapes, str], list[Target]]


def text_model(config: ModelConfig, tensors: Shapes, gdn_inputs: Block, ffn: Block) -> list[Target]:
    """The whole model: `gdn_inputs` gives a linear layer's input projections, `ffn` its feed-forward part.

    A tied model needs one of embed_tokens and lm_head; when it stores both, both are read (see weights.load).
    """
    vocab, D = config.vocab_size, config.hidden_size
    has_head, has_embedding = ("lm_head.weight" in tensors), ("embed_tokens.weight" in tensors)
    embedding = "lm_head" if config.tie_word_embeddings and has_head and not has_embedding else "embed_tokens"
    targets = [whole("embed_tokens", (vocab, D), f"{embedding}.weight"), whole("norm", (D,))]
    if not config.tie_word_embeddings or (has_head and has_embedding):
        targets.append(whole("lm_head", (vocab, D)))
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}"
        mixer = attention(config, at) if kind == "full_attention" else delta_net(config, tensors, at, gdn_inputs)
        targets += layer_norms(config, at) + mixer + ffn(config, tensors, at)
    if config.mtp_num_hidden_layers:
        at = "mtp.layers.0"
        targets += [whole("mtp.fc", (D, 2 * D))]
        targets += [whole(f"mtp.{n}", (D,)) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
        targets += layer_norms(config, at) + attention(config, at) + ffn(config, tensors, at)
    return targets


def whole(name: str, shape: tuple[int, ...], tensor: str | None = None) -> Target:
    """A target that is one tensor as it is stored; the tensor is called `name`.weight unless given."""
    return Target(name, shape, (Part(tensor or f"{name}.weight", shape),))


def rows_of(name: str, width: int, parts: Mapping[str, int]) -> Target:
    """A [sum of rows, width] target made of whole matrices, `parts` mapping each tensor to its number of rows."""
    total = sum(parts.values())
    return Target(name, (total, width), tuple(Part(tensor, (n, width)) for tensor, n in parts.items()))


def layer_norms(config: ModelConfig, at: str) -> list[Target]:
    D = config.hidden_size
    return [whole(f"{at}.input_layernorm", (D,)), whole(f"{at}.post_attention_layernorm", (D,))]


def attention(config: ModelConfig, at: str) -> list[Target]:
    """A gated attention layer. q_proj holds query then gate per head; here come all queries, then all gates, k, v."""
    D, Dh, Hq, Hkv = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    at = f"{at}.self_attn"
    qgkv = (
        Part(f"{at}.q_proj.weight", (2 * Hq * Dh, D), query_gate_rows(Hq, Dh)),
        Part(f"{at}.k_proj.weight", (Hkv * Dh, D)),
        Part(f"{at}.v_proj.weight", (Hkv * Dh, D)),
    )
    return [
        Target(f"{at}.qgkv_proj", (2 * (Hq + Hkv) * Dh, D), qgkv),
        whole(f"{at}.q_norm", (Dh,)),
        whole(f"{at}.k_norm", (Dh,)),
        whole(f"{at}.o_proj", (D, Hq * Dh)),
    ]


def query_gate_rows(Hq: int, Dh: int) -> np.ndarray:
    """Rows of q_proj with all queries first and all gates second: int64 [2 Hq Dh]."""
    return np.arange(2 * Hq * Dh).reshape(Hq, 2, Dh).swapaxes(0, 1).ravel()


def delta_net(config: ModelConfig, tensors: Shapes, at: str, gdn_inputs: Block) -> list[Target]:
    """A Gated DeltaNet layer; `gdn_inputs` gives in_proj_qkvz and in_proj_ba."""
    at = f"{at}.linear_attn"
    Hv, V, W = config.linear_num_value_heads, config.linear_value_head_dim, config.linear_conv_kernel_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + Hv * V
    return [
        *gdn_inputs(config, tensors, at),
        Target(f"{at}.conv1d", (channels, W), (Part(f"{at}.conv1d.weight", (channels, 1, W)),)),
        whole(f"{at}.A_log", (Hv,), f"{at}.A_log"),
        whole(f"{at}.dt_bias", (Hv,), f"{at}.dt_bias"),
        whole(f"{at}.norm", (V,)),
        whole(f"{at}.out_proj", (config.hidden_size, Hv * V)),
    ]


def separate_projections(config: ModelConfig, tensors: Shapes, at: str) -> list[Target]:
    """Qwen3.5: q k v of all heads in one tensor and z, b, a in their own, already in our row order."""
    D, Hv = config.hidden_size, config.linear_num_value_heads
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    values = Hv * config.linear_value_head_dim
    qkvz = {f"{at}.in_proj_qkv.weight": keys + values, f"{at}.in_proj_z.weight": values}
    ba = {f"{at}.in_proj_b.weight": Hv, f"{at}.in_proj_a.weight": Hv}
    return [rows_of(f"{at}.in_proj_qkvz", D, qkvz), rows_of(f"{at}.in_proj_ba", D, ba)]


def dense_ffn(config: ModelConfig, tensors: Shapes, at: str) -> list[Target]:
    return gated_mlp(f"{at}.mlp", config.hidden_size, config.intermediate_size)


def gated_mlp(at: str, D: int, F: int) -> list[Target]:
    """gate_up_proj [2F, D] (gate rows, then up rows) and down_proj [D, F]."""
    gate_up = rows_of(f"{at}.gate_up_proj", D, {f"{at}.gate_proj.weight": F, f"{at}.up_proj.weight": F})
    return [gate_up, whole(f"{at}.down_proj", (D, F))]


def moe_ffn(config: ModelConfig, tensors: Shapes, at: str) -> list[Target]:
    """Router, routed experts (fused 3-D tensors or a matrix per expert, whichever is stored) and the shared expert."""
    D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
    at = f"{at}.mlp"
    experts = f"{at}.experts"
    gate_up = _expert_parts(tensors, experts, "gate_up_proj", (E, 2 * F, D), {"gate_proj": F, "up_proj": F})
    down = _expert_parts(tensors, experts, "down_proj", (E, D, F), {"down_proj": D})
    return [
        whole(f"{at}.gate", (E, D)),
        Target(f"{experts}.gate_up_proj", (E, 2 * F, D), gate_up),
        Target(f"{experts}.down_proj", (E, D, F), down),
        *gated_mlp(f"{at}.shared_expert", D, config.shared_expert_intermediate_size),
        whole(f"{at}.shared_expert_gate", (1, D)),
    ]


def _expert_parts(
    tensors: Shapes, at: str, fused: str, shape: tuple[int, int, int], pieces: Mapping[str, int]
) -> tuple[Part, ...]:
    E, _, width = shape
    each = [(f"{at}.{e}.{piece}.weight", rows) for e in range(E) for piece, rows in pieces.items()]
    if f"{at}.{fused}" in tensors or not any(name in tensors for name, _ in each):
        return (Part(f"{at}.{fused}", shape),)
    return tuple(Part(name, (rows, width)) for name, rows in each)
