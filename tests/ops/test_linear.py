"""The dense product at every number of rows and in every memory order, and the activations at their limits."""

import math

import numpy as np
import pytest

from boleinfer.ops.linear import VECTOR_ROWS, linear, sigmoid, silu, swiglu


def layouts(w):
    yield np.asfortranarray(w)
    yield np.ascontiguousarray(w)
    yield np.repeat(w, 2, 0)[::2]  # rows that do not follow one another
    yield np.repeat(w, 2, 1)[:, ::2]


@pytest.mark.parametrize("R", [0, 1, 2, VECTOR_ROWS, VECTOR_ROWS + 1, 33])
@pytest.mark.parametrize("Din,Dout", [(1, 1), (3, 65), (64, 1), (63, 33)])
def test_linear_equals_loops(R, Din, Dout):
    rng = np.random.default_rng(R)
    x, w = rng.standard_normal((R, Din)), rng.standard_normal((Dout, Din))
    expected = np.asarray([[math.fsum(a * b for a, b in zip(row, out)) for out in w] for row in x]).reshape(R, Dout)
    for weights in layouts(w):
        out = linear(x, weights)
        assert out.shape == (R, Dout) and out.dtype == np.float64
        np.testing.assert_allclose(out, expected, atol=1e-12)
        single = linear(x.astype(np.float32), weights.astype(np.float32))
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, expected, atol=1e-4)


def test_rows_that_are_not_contiguous():
    rng = np.random.default_rng(0)
    wide, w = (
        rng.standard_normal((4, 20)).astype(np.float32),
        np.asfortranarray(rng.standard_normal((5, 7)), np.float32),
    )
    np.testing.assert_allclose(linear(wide[:, 3:10], w), wide[:, 3:10] @ w.T, atol=1e-5)
    np.testing.assert_allclose(linear(wide[::2, :14:2], w), wide[::2, :14:2] @ w.T, atol=1e-5)


def test_a_row_of_a_small_tree_has_the_bits_it_has_alone():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 960)).astype(np.float32)
    w = np.asfortranarray(rng.standard_normal((700, 960)).astype(np.float32))
    together = linear(x, w)
    for r in range(6):
        np.testing.assert_array_equal(linear(x[r : r + 1], w)[0], together[r])


def test_a_nan_row_spoils_only_itself():
    for R in (3, VECTOR_ROWS + 4):
        x, w = np.ones((R, 9), np.float32), np.ones((4, 9), np.float32)
        x[1] = np.nan
        out = linear(x, w)
        assert np.isnan(out[1]).all() and (np.delete(out, 1, 0) == 9).all()


@pytest.mark.parametrize("R,F", [(0, 3), (1, 1), (5, 33)])
def test_swiglu_equals_loops(R, F):
    x = 6 * np.random.default_rng(F).standard_normal((R, 2 * F))
    expected = [[x[r, f] / (1 + math.exp(-x[r, f])) * x[r, F + f] for f in range(F)] for r in range(R)]
    np.testing.assert_allclose(swiglu(x), np.asarray(expected).reshape(R, F), rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activations_keep_their_limits(dtype):
    x = np.asarray([-np.inf, -1e30, -1000, -100, -1, 0, 1, 100, 1000, 1e30, np.inf], dtype)
    with np.errstate(all="raise", under="ignore", invalid="ignore"):
        s, y = sigmoid(x), silu(x[1:])
    assert s.dtype == y.dtype == dtype
    assert s[0] == 0 and s[-1] == 1 and s[5] == 0.5 and (np.diff(s) >= 0).all()
    np.testing.assert_allclose(y[-4:], x[-4:])
    assert np.isfinite(y[:-1]).all() and abs(y[0]) == 0 and y[4] == 0
    np.testing.assert_allclose(s[4], 1 / (1 + math.e), rtol=1e-6)


@pytest.mark.parametrize("K", [64, 320, 1536])
def test_a_row_of_panels_does_not_depend_on_its_company(K):
    """The very bits of a row are those it has alone: a tree's nodes and plain decoding cannot differ here."""
    rng = np.random.default_rng(K)
    x = rng.standard_normal((67, K), np.float32)
    w = rng.standard_normal((5, K, 64), np.float32).swapaxes(1, 2)
    together = linear(x, w)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 40, 66):
        np.testing.assert_array_equal(linear(x[:rows], w), together[:rows])
    np.testing.assert_array_equal(linear(x[13:14], w), together[13:14])
