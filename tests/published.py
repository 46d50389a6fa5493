"""The published models as config.json contents, and the names, shapes and types of their files, for tests of loading.

Written from the releases' documentation, independently of the loading plans. `stored(config, ...)` lists the text and
MTP tensors of a checkpoint of any size of these families.
"""

from __future__ import annotations

import math

from boleinfer.checkpoint import Stored
from boleinfer.config import ModelConfig

COMMON = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "use_cache": True,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def _next(theta: int) -> dict:
    return COMMON | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": None,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }


def _text(D: int, layers: int, heads: tuple[int, int], Hv: int, tie: bool, **ffn: int) -> dict:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return COMMON | {
        "model_type": "qwen3_5_moe_text" if "num_experts" in ffn else "qwen3_5_text",
        "hidden_size": D,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_value_heads": Hv,
        "vocab_size": 248320,
        "tie_word_embeddings": tie,
        "layer_types": kinds * (layers // 4),
        "full_attention_interval": 4,
        "rope_parameters": ROPE,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
        **ffn,
    }


def _wrapped(text: dict) -> dict:
    moe = "num_experts" in text
    return {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": text["model_type"].replace("text", "vision"), "depth": 27, "hidden_size": 1152},
        "image_token_id": 248056,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _moe(E: int, top: int, F: int) -> dict:
    return {
        "num_experts": E,
        "num_experts_per_tok": top,
        "moe_intermediate_size": F,
        "shared_expert_intermediate_size": F,
    }


_FLAT = {"architectures": ["Qwen3_5MoeForCausalLM"]}
PUBLISHED: dict[str, dict] = {
    "Qwen3-Next-80B-A3B": _next(10000000),
    "Qwen3-Coder-Next": _next(5000000),
    "Qwen3.5-0.8B": _wrapped(_text(1024, 24, (8, 2), 16, True, intermediate_size=3584)),
    "Qwen3.5-2B": _wrapped(_text(2048, 24, (8, 2), 16, True, intermediate_size=6144)),
    "Qwen3.5-4B": _wrapped(_text(2560, 32, (16, 4), 32, True, intermediate_size=9216)),
    "Qwen3.5-9B": _wrapped(_text(4096, 32, (16, 4), 32, False, intermediate_size=12288)),
    "Qwen3.5-27B": _wrapped(_text(5120, 64, (24, 4), 48, False, intermediate_size=17408)),
    "Qwen3.5-35B-A3B": _wrapped(_text(2048, 40, (16, 2), 32, False, **_moe(256, 8, 512))),
    "Qwen3.5-122B-A10B": _wrapped(_text(3072, 48, (32, 2), 64, False, **_moe(256, 8, 1024))),
    "Qwen3.5-397B-A17B": _wrapped(_text(4096, 60, (32, 2), 64, False, **_moe(512, 10, 1024))),
    "Qwen3.8-2.4T-A95B": _FLAT | _text(8192, 92, (64, 4), 128, False, **_moe(512, 10, 2048)),
}


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
