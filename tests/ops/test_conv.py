"""The convolution on a forest: every node equals a plain run over its root path, commits equal feeding the path."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.forest import Forest
from boleinfer.ops.conv import causal_conv, commit_window
from tests import strategies as some


def plain_run(history, w):
    """silu of the correlation at the last of the inputs [T, Cc], zeros before the first; loops in float64."""
    Cc, W = w.shape
    out = []
    for c in range(Cc):
        y = math.fsum(float(w[c, W - 1 - i]) * float(history[-1 - i][c]) for i in range(min(W, len(history))))
        out.append(y / (1 + math.exp(-y)))
    return np.asarray(out)


def window_of(history, kept, Cc):
    """The last `kept` inputs, zeros on the old side where there are fewer."""
    padded = np.concatenate((np.zeros((kept, Cc)), np.reshape(history, (-1, Cc))))
    return padded[len(padded) - kept :]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), seed=some.seeds, dtype=some.dtypes, W=st.integers(1, 5), Cc=st.sampled_from([1, 3, 8]))
def test_nodes_equal_their_root_path_and_commits_equal_feeding_it(data, seed, dtype, W, Cc):
    rng = np.random.default_rng(seed)
    B = data.draw(st.integers(1, 4))
    slots = B + 2
    slot = some.some_slots(rng, B, slots)
    w = rng.standard_normal((Cc, W)).astype(dtype)
    histories = [list(rng.standard_normal((data.draw(st.integers(0, 6)), Cc)).astype(dtype)) for _ in range(B)]
    window = np.full((slots, W - 1, Cc), np.nan, dtype)  # the slots of nobody stay poisoned
    for s, history in zip(slot, histories):
        window[s] = window_of(history, W - 1, Cc)
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
        commit_window(x, window, slot, paths)
        for b, path in enumerate(paths):
            histories[b] += list(x[path])
            np.testing.assert_array_equal(window[slot[b]], window_of(histories[b], W - 1, Cc))
        assert np.isnan(np.delete(window, slot, axis=0)).all()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("piece", [1, 2, 5])
def test_f06_prompts_shorter_than_the_window(prompt, piece):
    rng = np.random.default_rng(prompt)
    W, Cc, T = 4, 5, prompt + 8
    x, w = rng.standard_normal((T, Cc)), rng.standard_normal((Cc, W))
    window, slot = np.zeros((1, W - 1, Cc)), np.zeros(1, np.int32)
    cuts = [*range(0, prompt, piece), *range(prompt, T)]  # the prompt in pieces, then token by token
    for first, last in zip(cuts, [*cuts[1:], T]):
        forest = Forest.of([some.tree_of(some.chain(last - first))], [first])
        y = causal_conv(x[first:last], w, window, slot, forest)
        for n in range(first, last):
            some.assert_near(y[n - first], plain_run(x[: n + 1], w))
        commit_window(x[first:last], window, slot, [np.arange(last - first)])
        np.testing.assert_array_equal(window[0], window_of(x[:last], W - 1, Cc))


def test_f17_a_commit_touches_only_its_own_slots():
    rng = np.random.default_rng(0)
    window = rng.standard_normal((9, 3, 4)).astype(np.float32)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    kept = window.copy()
    commit_window(x, window, np.asarray([8, 0, 4]), [np.asarray([0, 2]), np.asarray([], np.int32), np.asarray([5])])
    changed = [s for s in range(9) if window[s].tobytes() != kept[s].tobytes()]
    assert changed == [4, 8]


def test_extreme_inputs_stay_finite_in_float32():
    x = np.asarray([[-1e30, -200, -88.8, -20, 0, 88.8, 1e30]], np.float32)
    forest = Forest.of([some.tree_of([-1])], [0])
    with np.errstate(over="raise", invalid="raise"):
        y = causal_conv(x, np.ones((7, 1), np.float32), np.zeros((1, 0, 7), np.float32), np.zeros(1, int), forest)
    np.testing.assert_allclose(y, np.maximum(x, 0), atol=1e-7 * 20, rtol=1e-6)


@pytest.mark.parametrize("T", [1, 2, 4, 33])
def test_a_chain_equals_torch(T):
    rng = np.random.default_rng(T)
    x, w = rng.standard_normal((T, 6)).astype(np.float32), rng.standard_normal((6, 4)).astype(np.float32)
    window = rng.standard_normal((1, 3, 6)).astype(np.float32)
    inputs = torch.from_numpy(np.concatenate((window[0], x)).T.copy())[None]  # [1, Cc, 3 + T]
    expected = torch.nn.functional.silu(torch.conv1d(inputs, torch.from_numpy(w)[:, None], groups=6))[0].T.numpy()
    y = causal_conv(x, w, window, np.zeros(1, int), Forest.of([some.tree_of(some.chain(T))], [3]))
    np.testing.assert_allclose(y, expected, atol=1e-6)
