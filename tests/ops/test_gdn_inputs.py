"""What GDN reads, on a forest: every node equals a plain run over its root path, commits equal feeding the path."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from boleinfer.forest import Forest
from boleinfer.ops.gdn_commit import commit_window
from boleinfer.ops.gdn_inputs import causal_conv, gates, gdn_inputs, l2_norm
from tests import strategies as some


def plain_run(history, w):
    """silu of the correlation at the last of the inputs [T, Cc], zeros before the first; loops in float64."""
    Cc, W = w.shape
    out = []
    for c in range(Cc):
        y = math.fsum(float(w[c, W - 1 - i]) * float(history[-1 - i][c]) for i in range(min(W, len(history))))
        out.append(y / (1 + math.exp(-y)))
    return np.asarray(out)


def window_of(history, W, Cc):
    """The last W inputs, that of position p at place p % W; zeros where there are fewer."""
    window = np.zeros((W, Cc))
    for p, x in enumerate(history):
        window[p % W] = x
    return window


@settings(max_examples=200)
@given(data=st.data(), seed=some.seeds, dtype=some.dtypes, W=st.integers(1, 5), Cc=st.sampled_from([1, 3, 8]))
def test_nodes_equal_their_root_path_and_commits_equal_feeding_it(data, seed, dtype, W, Cc):
    rng = np.random.default_rng(seed)
    B = data.draw(st.integers(1, 4))
    slots = B + 2
    slot = some.some_slots(rng, B, slots)
    w = rng.standard_normal((Cc, W)).astype(dtype)
    histories = [list(rng.standard_normal((data.draw(st.integers(0, 6)), Cc)).astype(dtype)) for _ in range(B)]
    window = np.full((slots, W, Cc), np.nan, dtype)  # the slots of nobody stay poisoned
    for s, history in zip(slot, histories):
        window[s] = window_of(history, W, Cc)
    for _ in range(3):
        forest = Forest.of([data.draw(some.trees(8, max_chunk=20)) for _ in range(B)], [len(h) for h in histories])
        x = rng.standard_normal((len(forest), Cc)).astype(dtype)
        before = window.tobytes()
        y = causal_conv(x, w, window, slot, forest)
        assert window.tobytes() == before and y.dtype == dtype
        for b, tree in enumerate(forest.trees):
            for n in range(len(tree)):
                path = forest.start[b] + tree.path(n)
                some.assert_near(y[path[-1]], plain_run([*histories[b], *x[path]], w), f"request {b} node {n}")
        paths = data.draw(some.accepted(forest))
        commit_window(x, window, slot, forest.committed, paths)
        for b, path in enumerate(paths):
            histories[b] += list(x[path])
            np.testing.assert_array_equal(window[slot[b]], window_of(histories[b], W, Cc))
        assert np.isnan(np.delete(window, slot, axis=0)).all()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("piece", [1, 2, 5])
def test_f06_prompts_shorter_than_the_window(prompt, piece):
    rng = np.random.default_rng(prompt)
    W, Cc, T = 4, 5, prompt + 8
    x, w = rng.standard_normal((T, Cc)), rng.standard_normal((Cc, W))
    window, slot = np.zeros((1, W, Cc)), np.zeros(1, np.int32)
    cuts = [*range(0, prompt, piece), *range(prompt, T)]  # the prompt in pieces, then token by token
    for first, last in zip(cuts, [*cuts[1:], T]):
        forest = Forest.of([some.tree_of(some.chain(last - first))], [first])
        y = causal_conv(x[first:last], w, window, slot, forest)
        for n in range(first, last):
            some.assert_near(y[n - first], plain_run(x[: n + 1], w))
        commit_window(x[first:last], window, slot, [first], [np.arange(last - first)])
        np.testing.assert_array_equal(window[0], window_of(x[:last], W, Cc))


def test_f17_a_commit_touches_only_its_own_slots():
    rng = np.random.default_rng(0)
    window = rng.standard_normal((9, 4, 4)).astype(np.float32)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    kept = window.copy()
    paths = [np.asarray([0, 2]), np.asarray([], np.int32), np.asarray([5])]
    commit_window(x, window, np.asarray([8, 0, 4]), np.asarray([3, 1, 6]), paths)
    changed = [s for s in range(9) if window[s].tobytes() != kept[s].tobytes()]
    assert changed == [4, 8]


def test_extreme_inputs_stay_finite_in_float32():
    x = np.asarray([[-1e30, -200, -88.8, -20, 0, 88.8, 1e30]], np.float32)
    forest = Forest.of([some.tree_of([-1])], [0])
    with np.errstate(over="raise", invalid="raise"):
        y = causal_conv(x, np.ones((7, 1), np.float32), np.zeros((1, 1, 7), np.float32), np.zeros(1, int), forest)
    np.testing.assert_allclose(y, np.maximum(x, 0), atol=1e-7 * 20, rtol=1e-6)


@pytest.mark.parametrize("T", [1, 2, 4, 33])
def test_a_chain_equals_torch(T):
    rng = np.random.default_rng(T)
    x, w = rng.standard_normal((T, 6)).astype(np.float32), rng.standard_normal((6, 4)).astype(np.float32)
    window = rng.standard_normal((1, 4, 6)).astype(np.float32)
    inputs = torch.from_numpy(np.concatenate((window[0, :3], x)).T.copy())[None]  # [1, Cc, 3 + T]
    expected = torch.nn.functional.silu(torch.conv1d(inputs, torch.from_numpy(w)[:, None], groups=6))[0].T.numpy()
    y = causal_conv(x, w, window, np.zeros(1, int), Forest.of([some.tree_of(some.chain(T))], [3]))
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_f18_gates_of_extreme_inputs(dtype):
    a = np.asarray([[-100, -1, 0, 1, 20, 20.5, 100]], dtype)
    for A_log in (-10.0, 0.0, 10.0):
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            g, beta = gates(a, 10 * a, np.full(7, A_log, dtype), np.zeros(7, dtype))
        softplus = [max(x, 0) + math.log1p(math.exp(-abs(x))) for x in a[0].tolist()]
        np.testing.assert_allclose(
            g[0], [-math.exp(A_log) * s for s in softplus], rtol=3e-6 * (dtype == np.float32) + 1e-13, atol=1e-40
        )
        assert (np.exp(g) >= 0).all() and (np.exp(g) <= 1).all() and g.dtype == beta.dtype == dtype
        np.testing.assert_allclose(beta[0], [0.5 + math.tanh(5 * x) / 2 for x in a[0].tolist()], atol=1e-6)


def test_f19_decay_parameters_of_either_sign_and_of_bf16_storage():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 3, (2, 50, 8)).astype(np.float32)
    A_log, dt_bias = rng.normal(0, 2, (2, 8)).astype(np.float32)
    stored = [(x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (A_log, dt_bias)]  # what BF16 can hold
    for A, dt in ((A_log, dt_bias), stored):
        g, _ = gates(a, b, A, dt)
        exact = -np.exp(A.astype(np.float64)) * np.log1p(np.exp(a.astype(np.float64) + dt))
        np.testing.assert_allclose(g, exact, rtol=1e-6)
        assert (g <= 0).all() and ((np.exp(g) > 0) | (exact < -80)).all()
    assert np.abs(gates(a, b, A_log, dt_bias)[0] / gates(a, b, *stored)[0] - 1).max() > 1e-3  # narrowing would show


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (65, 5), (2, 3, 128), (0, 7)])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_the_l2_norm_equals_a_loop_and_hf(shape, eps):
    x = np.random.default_rng(len(shape)).standard_normal(shape)
    out = l2_norm(x, eps)
    for i in np.ndindex(shape[:-1]):
        scale = math.sqrt(math.fsum(v * v for v in x[i].tolist()) + eps)
        np.testing.assert_allclose(out[i], [v / scale for v in x[i].tolist()], rtol=1e-13)
    narrow = x.astype(np.float32)
    expected = hf.l2norm(torch.from_numpy(narrow), eps=eps).numpy()
    np.testing.assert_allclose(l2_norm(narrow, eps), expected, rtol=2e-6, atol=1e-7)
    assert l2_norm(narrow).dtype == np.float32


def test_l2_of_zeros_is_zero_and_of_nan_nan():
    x = np.ones((3, 4), np.float32)
    x[1], x[2] = np.nan, 0
    out = l2_norm(x)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all() and (out[2] == 0).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gdn_inputs_are_its_four_parts(dtype):
    rng = np.random.default_rng(0)
    (Hk, K, Hv, V), W, forest = (2, 3, 4, 5), 4, Forest.of([some.tree_of(some.binary(6)), some.tree_of([-1])], [5, 0])
    R, HkK, Cc = len(forest), Hk * K, 2 * Hk * K + Hv * V
    qkvz, ba = rng.standard_normal((R, Cc + Hv * V)).astype(dtype), rng.standard_normal((R, 2 * Hv)).astype(dtype)
    taps, A_log, dt_bias = (rng.standard_normal(shape).astype(dtype) for shape in ((Cc, W), Hv, Hv))
    window, slot = rng.standard_normal((3, W, Cc)).astype(dtype), np.asarray([2, 0])
    q, k, v, g, beta = gdn_inputs(qkvz, ba, taps, A_log, dt_bias, window, slot, forest, (Hk, K, Hv, V))
    y = causal_conv(qkvz[:, :Cc], taps, window, slot, forest)
    some.assert_near(q, l2_norm(y[:, :HkK].reshape(R, Hk, K)) / math.sqrt(K))
    some.assert_near(k, l2_norm(y[:, HkK : 2 * HkK].reshape(R, Hk, K)))
    np.testing.assert_array_equal(v, y[:, 2 * HkK :].reshape(R, Hv, V))
    np.testing.assert_array_equal((g, beta), gates(ba[:, Hv:], ba[:, :Hv], A_log, dt_bias))
    assert {out.dtype for out in (q, k, v, g, beta)} == {np.dtype(dtype)}
