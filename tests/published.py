"""The names, shapes and types of the published models' files, for tests of loading.

Written from the releases' documentation, independently of the loading plans. `stored(config, ...)` lists the text and
MTP tensors of a checkpoint of any size of these families.
"""

from __future__ import annotations

import math

from boleinfer.checkpoint import Stored
from boleinfer.config import ModelConfig


def stored(
    config: ModelConfig, fused: bool = False, fp8: bool = False, wrapper: str = "", mtp: bool = True
) -> dict[str, Stored]:
    """{stored name: (dtype, shape)} of a checkpoint as released; `wrapper` is "language_model." in multimodal files."""
    c, D = config, config.hidden_size
    found: dict[str, tuple[int, ...]] = {f"model.{wrapper}embed_tokens.weight": (c.vocab_size, D)}
    found[f"model.{wrapper}norm.weight"] = (D,)
    if not c.tie_word_embeddings:
        found["lm_head.weight"] = (c.vocab_size, D)
    for i, kind in enumerate(c.layer_types):
        layer = _attention(c) if kind == "full_attention" else _delta_net(c)
        found |= {f"model.{wrapper}layers.{i}.{n}": s for n, s in (layer | _rest(c, fused)).items()}
    if mtp:
        found |= {f"mtp.layers.0.{n}": s for n, s in (_attention(c) | _rest(c, fused)).items()}
        found |= {f"mtp.{n}.weight": (D,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        found["mtp.fc.weight"] = (D, 2 * D)
    result = {n: Stored("BF16", s) for n, s in found.items()}
    for name, shape in found.items():
        if fp8 and _is_quantised(name):
            result[name] = Stored("F8_E4M3", shape)
            result[f"{name}_scale_inv"] = Stored("BF16", tuple(math.ceil(n / 128) for n in shape))
    return result


def _is_quantised(name: str) -> bool:
    kept = ("embed_tokens", "lm_head", "norm", "conv1d", "in_proj_a.", "in_proj_b.", "in_proj_ba", "mlp.gate.")
    return name.endswith("_proj.weight") or (
        name.endswith((".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_qkvz.weight"))
        and not any(k in name for k in kept)
    )


def _attention(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, Dh, Hq, Hkv = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    return {
        "self_attn.q_proj.weight": (2 * Hq * Dh, D),
        "self_attn.k_proj.weight": (Hkv * Dh, D),
        "self_attn.v_proj.weight": (Hkv * Dh, D),
        "self_attn.o_proj.weight": (D, Hq * Dh),
        "self_attn.q_norm.weight": (Dh,),
        "self_attn.k_norm.weight": (Dh,),
    }


def _delta_net(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, Hv = c.hidden_size, c.linear_num_value_heads
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, Hv * c.linear_value_head_dim
    if c.model_type == "qwen3_next":
        inputs = {"in_proj_qkvz": (2 * keys + 2 * values, D), "in_proj_ba": (2 * Hv, D)}
    else:
        inputs = {"in_proj_qkv": (2 * keys + values, D), "in_proj_z": (values, D)}
        inputs |= {"in_proj_b": (Hv, D), "in_proj_a": (Hv, D)}
    return {f"linear_attn.{n}.weight": s for n, s in inputs.items()} | {
        "linear_attn.conv1d.weight": (2 * keys + values, 1, c.linear_conv_kernel_dim),
        "linear_attn.A_log": (Hv,),
        "linear_attn.dt_bias": (Hv,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (D, values),
    }


def _rest(c: ModelConfig, fused: bool) -> dict[str, tuple[int, ...]]:
    """The norms and the feed-forward part of a layer."""
    D, E, F, Fs = c.hidden_size, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
    found: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if not E:
        return found | _mlp("mlp", D, c.intermediate_size)
    found |= {"mlp.gate.weight": (E, D), "mlp.shared_expert_gate.weight": (1, D)} | _mlp("mlp.shared_expert", D, Fs)
    if fused:
        return found | {"mlp.experts.gate_up_proj": (E, 2 * F, D), "mlp.experts.down_proj": (E, D, F)}
    for e in range(E):
        found |= _mlp(f"mlp.experts.{e}", D, F)
    return found


def _mlp(at: str, D: int, F: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (F, D),
        f"{at}.up_proj.weight": (F, D),
        f"{at}.down_proj.weight": (D, F),
    }
