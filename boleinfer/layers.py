"""The layers of the Qwen hybrids as equations over ops: gated DeltaNet, gated attention, dense and MoE feed-forward.

Each takes the residual stream before it, [R, D] of a forest's rows, its own weights (names without their prefix, see
weights) and its memory, and returns what it adds to the stream, [R, D], and the stream with what was to be added before
(residual.py); none of them writes what is committed. Equations: transformers' modeling_qwen3_next / modeling_qwen3_5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boleinfer.attention_core import attention_core
from boleinfer.config import ModelConfig
from boleinfer.device import Array, Fp8
from boleinfer.gdn_core import gdn_core
from boleinfer.moe_core import moe_core
from boleinfer.ops.attention_inputs import attention_inputs
from boleinfer.ops.embedding import embedding
from boleinfer.ops.linear import linear
from boleinfer.ops.moe import Shared
from boleinfer.residual import Residual, norm_gated_linear, norm_linear, norm_linear_pair
from boleinfer.state import Batch, Factors, GDNLayer, KVLayer

Weights = Mapping[str, Any]  # arrays, and on the GPU FP8 matrices


def gated_deltanet(
    r: Residual, w: Weights, c: ModelConfig, memory: GDNLayer, batch: Batch
) -> tuple[Array, Array, Factors | None]:
    """S_n = e^g S_parent + k u^T, u = beta (v - e^g S_parent^T k), o = S_n^T q, for every node of the forest.

    Returns also what the rows would add to the memory (None: it lies there already, as scratch)."""
    Hk, K, Hv, V = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads, c.linear_value_head_dim
    (qkvz, ba), stream = norm_linear_pair(r, w["in_proj_qkvz"], w["in_proj_ba"])  # [R, 2 Hk K + 2 Hv V], [R, 2 Hv]
    gates, remembered = (w["A_log"], w["dt_bias"]), (memory.window, memory.S, memory.ring)
    y, factors = gdn_core(
        qkvz, ba, w["conv1d"], *gates, w["norm"], c.rms_norm_eps, *remembered, batch.slot, batch.forest, (Hk, K, Hv, V)
    )  # y [R, Hv, V]
    out = linear(y.reshape(len(y), Hv * V), w["out_proj"])
    return out, stream, factors and Factors(qkvz[:, : 2 * Hk * K + Hv * V], *factors)


def gated_attention(
    r: Residual,
    w: Weights,
    c: ModelConfig,
    memory: KVLayer,
    batch: Batch,
    rotation: tuple[Array, Array],
    rows: Array | None = None,
    wanted: Array | None = None,
) -> tuple[Array, Array]:
    """Softmax attention over the committed past and the node's own path, its output gated.

    rotation: cos and sin of the rows' positions; rows: which rows of the forest the stream has (None: all of them)
    wanted: which of the forest's first rows go on, where the stream has these (None: all that it has)"""
    Hq, Hkv, Dh = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    qgkv, stream = norm_linear(r, w["qgkv_proj"])  # [R, (2 Hq + 2 Hkv) Dh]
    pages = memory.k, memory.v, batch.page_table, batch.forest
    norms = w["q_norm"], w["k_norm"], c.rms_norm_eps
    o = attention_core(qgkv, *norms, *rotation, *pages, (Hq, Hkv, Dh), rows, wanted)  # [R, Hq, Dh]
    if wanted is not None:
        stream = embedding(wanted, stream)
    return linear(o.reshape(len(o), Hq * Dh), w["o_proj"]), stream


def remember(
    r: Residual, w: Weights, c: ModelConfig, memory: KVLayer, batch: Batch, rotation: tuple[Array, Array]
) -> None:
    """Writes the keys and values of all rows, as gated_attention does, and computes nothing else of it."""
    Hq, Hkv, Dh = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    kv, _ = norm_linear(r, _features_from(w["qgkv_proj"], 2 * Hq * Dh))  # [R, 2 Hkv Dh]
    pages = memory.k, memory.v, batch.page_table, batch.forest
    attention_inputs(kv, w["q_norm"], w["k_norm"], c.rms_norm_eps, *rotation, *pages, (0, Hkv, Dh))


def dense_ffn(r: Residual, w: Weights, c: ModelConfig) -> tuple[Array, Array]:
    """down(silu(gate x) * up x)."""
    x, stream = norm_gated_linear(r, w["gate_up_proj"])
    return linear(x, w["down_proj"]), stream


def moe_ffn(r: Residual, w: Weights, c: ModelConfig) -> tuple[Array, Array]:
    """The chosen experts' weighted sum plus the shared expert, itself gated."""
    experts = w["experts.gate_up_proj"], w["experts.down_proj"]
    shared = Shared(w["shared_expert_gate"], w["shared_expert.gate_up_proj"], w["shared_expert.down_proj"])
    return moe_core(r, w["gate"], *experts, c.num_experts_per_tok, c.norm_topk_prob, shared)


def _features_from(w: Array | Fp8, first: int) -> Array | Fp8:
    """The part of a matrix that makes the features from `first` on; FP8 ones, and panels, from the first of a block."""
    if not isinstance(w, Fp8) and w.ndim == 3:
        assert first % w.shape[1] == 0, f"a matrix in panels of {w.shape[1]} features; {first} is in the middle of one"
        return w[first // w.shape[1] :]
    if not isinstance(w, Fp8):
        return w[first:]
    assert first % 128 == 0, f"an FP8 matrix is scaled in blocks of 128 features; {first} is in the middle of one"
    return Fp8(w.bits[first:], w.scale[first // 128 :])
