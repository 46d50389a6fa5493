"""Tables of what is computed here and what is not: families, their names, and config values. Holds no code."""

from __future__ import annotations

from typing import Any

SUPPORTED = {
    "qwen3_next": "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    "qwen3_5_text": "Qwen3.5 / 3.6 / 3.8 dense: 0.8B, 2B, 4B, 9B, 27B",
    "qwen3_5_moe_text": "Qwen3.5 / 3.6 / 3.8 mixture of experts: 35B-A3B, 122B-A10B, 397B-A17B, 2.4T-A95B",
}
TEXT_TYPE = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
}
ARCHITECTURE_TYPE = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
OTHER_HYBRIDS = {
    "qwen4_exp": "Qwen3.8-Flash-Next: hyper-connections, n-gram embeddings and sparse attention",
    "kimi_linear": "Kimi-Linear: per-channel decay and latent attention",
    "olmo_hybrid": "OLMo-Hybrid: gated delta rule with negative eigenvalues",
    "bailing_moe_v2_5": "Ring / Ling 2.5: lightning attention and latent attention",
    "bailing_hybrid": "Ling 3.0: per-channel decay and latent attention",
    "glm5_next": "GLM-5.3-Flash: per-channel decay and latent attention",
    "nemotron_h": "Nemotron-H: Mamba-2 blocks",
    "granitemoehybrid": "Granite 4 hybrid: Mamba-2 blocks",
    "falcon_h1": "Falcon-H1: Mamba-2 in parallel with attention",
    "lfm2": "LFM2: gated short convolutions",
    "lfm2_moe": "LFM2-MoE: gated short convolutions",
    "lfm3": "LFM3: gated short convolutions",
    "minimax": "MiniMax-Text: lightning attention",
    "lara_mini": "Lara-4-Mini: gated delta rule with another mixture of experts",
    "bamba": "Bamba: Mamba-2 blocks",
    "zamba2": "Zamba2: Mamba-2 blocks",
    "jamba": "Jamba: Mamba blocks",
    "recurrent_gemma": "RecurrentGemma: real-gated linear recurrence",
}
# key -> the values that mean what this program computes; anything else (except null) is refused
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "output_gate_type": ("silu", "swish"),
    "attn_output_gate": (True,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "swiglu_limit": (),
    "no_rope_layers": ([],),
    "rope_interleave": (False,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "linear_allow_neg_eigval": (False,),
    "layer_scale": (False,),
    "hc_count": (0, 1),
    "ple_layer_ids": ([],),
    "index_topk": (0,),
    "mtp_use_dedicated_embeddings": (False,),
}
