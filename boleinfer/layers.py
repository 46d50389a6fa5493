"""The layers of the Qwen hybrids as equations over ops: gated DeltaNet, gated attention, dense and MoE feed-forward.

Each takes the rows x [R, D] of a forest, its own weights (names without their prefix, see weights) and its memory;
none of them writes what is committed. Equations: transformers' modeling_qwen3_next / modeling_qwen3_5.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from boleinfer.config import ModelConfig
from boleinfer.ops.attention import tree_attention
from boleinfer.ops.attention_inputs import rope, write_kv
from boleinfer.ops.gdn import gdn
from boleinfer.ops.gdn_inputs import causal_conv, gates, l2_norm
from boleinfer.ops.linear import linear, sigmoid, swiglu
from boleinfer.ops.moe import moe
from boleinfer.ops.norms import gated_rms_norm, rms_norm
from boleinfer.state import Batch, Factors, GDNLayer, KVLayer

Weights = Mapping[str, np.ndarray]


def gated_deltanet(
    x: np.ndarray, w: Weights, c: ModelConfig, memory: GDNLayer, batch: Batch
) -> tuple[np.ndarray, Factors]:
    """S_n = e^g S_parent + k u^T, u = beta (v - e^g S_parent^T k), o = S_n^T q, for every node of the forest.

    Returns the layer's output [R, D] and what the rows would add to the memory."""
    Hk, K, Hv, V = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads, c.linear_value_head_dim
    R, HkK, HvV = len(x), Hk * K, Hv * V
    qkvz = linear(x, w["in_proj_qkvz"])  # [R, 2 Hk K + 2 Hv V]
    ba = linear(x, w["in_proj_ba"])  # [R, 2 Hv]
    inputs, z = qkvz[:, : 2 * HkK + HvV], qkvz[:, 2 * HkK + HvV :]

    qkv = causal_conv(inputs, w["conv1d"], memory.window, batch.slot, batch.forest)
    qk = l2_norm(qkv[:, : 2 * HkK].reshape(R, 2 * Hk, K))
    q, k = qk[:, :Hk] * K**-0.5, qk[:, Hk:]  # [R, Hk, K]
    v = qkv[:, 2 * HkK :].reshape(R, Hv, V)
    g, beta = gates(ba[:, Hv:], ba[:, :Hv], w["A_log"], w["dt_bias"])  # [R, Hv]

    o, u = gdn(q, k, v, g, beta, memory.S, memory.ring, batch.slot, batch.forest)  # [R, Hv, V]
    y = gated_rms_norm(o, z.reshape(R, Hv, V), w["norm"], c.rms_norm_eps)
    return linear(y.reshape(R, HvV), w["out_proj"]), Factors(inputs, k, u, g)


def gated_attention(
    x: np.ndarray,
    w: Weights,
    c: ModelConfig,
    memory: KVLayer,
    batch: Batch,
    rotation: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention over the committed past and the node's own path, its output gated: [R, D].

    rotation: cos and sin of the rows' positions; rows: which rows of the forest x holds (None: all of them)."""
    Hq, Hkv, Dh, R = c.num_attention_heads, c.num_key_value_heads, c.head_dim, len(x)
    qgkv = linear(x, w["qgkv_proj"])  # [R, (2 Hq + 2 Hkv) Dh]
    gate = qgkv[:, Hq * Dh : 2 * Hq * Dh]
    q = qgkv[:, : Hq * Dh].reshape(R, Hq, Dh)
    kv = qgkv[:, 2 * Hq * Dh :].reshape(R, 2 * Hkv, Dh)

    q = rope(rms_norm(q, w["q_norm"], c.rms_norm_eps), *rotation)
    k = rope(rms_norm(kv[:, :Hkv], w["k_norm"], c.rms_norm_eps), *rotation)
    write_kv(k, kv[:, Hkv:], memory.k, memory.v, batch.page_table, batch.forest, rows)
    o = tree_attention(q, memory.k, memory.v, batch.page_table, batch.forest, Dh**-0.5, rows)  # [R, Hq, Dh]
    return linear(o.reshape(R, Hq * Dh) * sigmoid(gate), w["o_proj"])


def dense_ffn(x: np.ndarray, w: Weights, c: ModelConfig) -> np.ndarray:
    """down(silu(gate x) * up x): [R, D]."""
    return linear(swiglu(linear(x, w["gate_up_proj"])), w["down_proj"])


def moe_ffn(x: np.ndarray, w: Weights, c: ModelConfig) -> np.ndarray:
    """The chosen experts' weighted sum plus the shared expert, itself gated: [R, D]."""
    routed = moe(
        x, w["gate"], w["experts.gate_up_proj"], w["experts.down_proj"], c.num_experts_per_tok, c.norm_topk_prob
    )
    shared = linear(swiglu(linear(x, w["shared_expert.gate_up_proj"])), w["shared_expert.down_proj"])
    return routed + sigmoid(linear(x, w["shared_expert_gate"])) * shared
