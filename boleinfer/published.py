"""The published models as config.json contents, for random weights and memory plans without files.

Written from the releases' documentation. `published(name)` finds one without regard to case.
"""

from __future__ import annotations

from boleinfer.config import ConfigError, ModelConfig, read_config

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


def published(name: str) -> ModelConfig:
    """The configuration of a published size, such as "qwen3.5-9b". Raises ConfigError for another name, listing all."""
    for known, content in PUBLISHED.items():
        if known.lower() == name.lower():
            return read_config(content)
    raise ConfigError(f"no published model is called {name!r}; there are {', '.join(PUBLISHED)}")
