"""The routed experts against loops in float64 and against HF's sparse block, ties and repeated experts included."""

import numpy as np
import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from boleinfer.ops.moe import add_shared, moe, route

SIZES = [(0, 4, 3, 2, 1), (1, 1, 1, 1, 1), (1, 16, 8, 5, 3), (9, 7, 4, 3, 4), (40, 12, 32, 3, 8)]


def weights(rng, D, E, F):
    return (
        rng.standard_normal((E, D)),
        rng.standard_normal((E, 2 * F, D)) / np.sqrt(D),
        rng.standard_normal((E, D, F)) / np.sqrt(F),
    )


def loop_moe(x, router, gate_up, down, top_k, norm_topk):
    out = np.zeros(x.shape)
    F = down.shape[-1]
    for r, row in enumerate(x):
        scores = router @ row
        p = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        best = sorted(range(len(p)), key=lambda e: (-p[e], e))[:top_k]
        whole = sum(p[e] for e in best) if norm_topk else 1.0
        for e in best:
            gate, up = gate_up[e, :F] @ row, gate_up[e, F:] @ row
            out[r] += p[e] / whole * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("R,D,E,F,top_k", SIZES)
def test_moe_equals_loops(R, D, E, F, top_k, norm_topk):
    rng = np.random.default_rng(R)
    x, arrays = rng.standard_normal((R, D)), weights(rng, D, E, F)
    expected = loop_moe(x, *arrays, top_k, norm_topk)
    np.testing.assert_allclose(moe(x, *arrays, top_k, norm_topk), expected, atol=1e-12)
    single = [a.astype(np.float32) for a in (x, *arrays)]
    out = moe(*single, top_k, norm_topk)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, loop_moe(*[a.astype(np.float64) for a in single], top_k, norm_topk), atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next raw", "qwen3_5_moe"])
def test_moe_equals_hf(family):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 5}
    if family == "qwen3_5_moe":
        block = Qwen3_5MoeSparseMoeBlock(Qwen3_5MoeTextConfig(shared_expert_intermediate_size=8, **sizes))
    else:
        config = Qwen3NextConfig(shared_expert_intermediate_size=8, norm_topk_prob=family == "qwen3_next", **sizes)
        block = Qwen3NextSparseMoeBlock(config)
    torch.manual_seed(0)
    x = torch.randn(21, 64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.3)
        _, score, expert = block.gate(x)
        expected = block.experts(x, expert, score).numpy()
    router, experts = block.gate.weight.detach().numpy(), block.experts
    arrays = router, experts.gate_up_proj.detach().numpy(), experts.down_proj.detach().numpy()
    norm_topk = family != "qwen3_next raw"
    ours, chosen = route(x.numpy(), router, 5, norm_topk)
    np.testing.assert_array_equal(np.sort(chosen), np.sort(expert.numpy()))
    np.testing.assert_allclose(ours, score.numpy(), atol=1e-6)
    np.testing.assert_allclose(moe(x.numpy(), *arrays, 5, norm_topk), expected, atol=1e-5)


def test_equal_experts_go_to_the_lowest_index():
    x = np.ones((3, 4), np.float32)
    weight, expert = route(x, np.zeros((7, 4), np.float32), 3, True)
    assert expert.tolist() == [[0, 1, 2]] * 3
    np.testing.assert_allclose(weight, 1 / 3)
    weight, _ = route(x, np.zeros((7, 4), np.float32), 3, False)
    np.testing.assert_allclose(weight, 1 / 7)  # a share of all experts, not of the chosen ones


def test_extreme_router_scores_stay_finite():
    router = np.asarray([[1e4], [-1e4], [9e3], [0.0]], np.float32)
    weight, expert = route(np.ones((1, 1), np.float32), router, 2, True)
    assert expert.tolist() == [[0, 2]] and weight.tolist() == [[1.0, 0.0]]


def test_each_chosen_expert_is_read_once_and_no_other():
    class Counting(np.ndarray):
        def __getitem__(self, key):
            read.append(key)
            return np.asarray(self)[key]

    rng = np.random.default_rng(4)
    x, (router, gate_up, down) = rng.standard_normal((50, 6)), weights(rng, 6, 12, 3)
    router[[2, 5]] -= 100 * x.mean(0)  # rarely chosen
    _, expert = route(x, router, 3, True)
    for counted in ("gate_up", "down"):
        read: list[int] = []
        arrays = {"gate_up": gate_up, "down": down}
        arrays[counted] = arrays[counted].view(Counting)
        moe(x, router, **arrays, top_k=3, norm_topk=True)
        assert read == np.unique(expert).tolist()


def test_rows_do_not_touch_one_another():
    rng = np.random.default_rng(5)
    x, arrays = rng.standard_normal((6, 8)), weights(rng, 8, 5, 4)
    alone = np.concatenate([moe(row[None], *arrays, 2, True) for row in x])
    np.testing.assert_allclose(moe(x, *arrays, 2, True), alone, atol=1e-13)
    x[2] = np.nan
    out = moe(x, *arrays, 2, True)
    assert np.isnan(out[2]).all()
    np.testing.assert_allclose(np.delete(out, 2, 0), np.delete(alone, 2, 0), atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_shared_expert_is_scaled_by_a_gate_of_each_row(dtype):
    rng = np.random.default_rng(6)
    (routed, shared), gate = rng.standard_normal((2, 4, 7)).astype(dtype), np.asarray([[-1e4], [-1], [0], [50]], dtype)
    kept = routed.copy()
    out = add_shared(routed, gate, shared)
    assert out.dtype == dtype and np.array_equal(routed, kept)
    np.testing.assert_allclose(out, routed + np.asarray([[0], [1 / (1 + np.e)], [0.5], [1]]) * shared, rtol=1e-6)
