"""A sequence fed in pieces: convolution, GDN and attention together equal the run in one piece, whatever the cut."""

import numpy as np
import pytest

from boleinfer.forest import Forest
from boleinfer.ops.attention import tree_attention
from boleinfer.ops.attention_inputs import write_kv
from boleinfer.ops.gdn import gdn
from boleinfer.ops.gdn_commit import commit_factors, commit_window
from boleinfer.ops.gdn_inputs import causal_conv
from boleinfer.ring import Ring, fold
from tests import strategies as some

Hk, Hv, K, V, W, P, slots = 1, 2, 4, 3, 4, 16, 3
Cc = 2 * Hk * K + Hv * V


class Layers:
    """The memory of one convolution, one GDN and one attention, for the request in slot 1; all else is poison."""

    def __init__(self, T, C, dtype):
        self.window, self.S = np.full((slots, W, Cc), np.nan, dtype), np.full((slots, Hv, K, V), np.nan, dtype)
        self.window[1], self.S[1] = 0, 0
        k, u, g = (np.full((slots, C, *shape), np.nan, dtype) for shape in ((Hk, K), (Hv, V), (Hv,)))
        self.ring = Ring(k, u, g)
        M = -(-T // P)
        self.k, self.v = (np.full((M + 2, P, Hk, K), np.nan, dtype) for _ in "kv")
        self.table = np.random.default_rng(T).permutation(M + 2)[:M][None]
        self.T = 0

    def feed(self, x, w, g, beta):
        """Outputs of both kinds for a piece [n, Cc], which is then committed."""
        n, slot = len(x), np.asarray([1])
        forest = Forest.of([some.tree_of(some.chain(n))], [self.T])
        y = causal_conv(x, w, self.window, slot, forest)
        qk = some.unit(y[:, : 2 * Hk * K].reshape(n, 2 * Hk, K))
        q, k, v = qk[:, :Hk], qk[:, Hk:], y[:, 2 * Hk * K :].reshape(n, Hv, V)
        o, u = gdn(q, k, v, g, beta, self.S, self.ring, slot, forest)
        write_kv(k, q, self.k, self.v, self.table, forest)
        a = tree_attention(qk, qk, self.k, self.v, self.table, forest, 1.0)
        commit_window(x, self.window, slot, [self.T], [np.arange(n)])
        commit_factors(self.S, self.ring, k, u, g, slot, [self.T], [np.arange(n)])
        self.T += n
        return np.concatenate((o.reshape(n, -1), a.reshape(n, -1)), axis=1)

    def memory(self):
        rows = np.arange(self.T)
        kv = [pages[self.table[0, rows // P], rows % P] for pages in (self.k, self.v)]
        return [self.window[1, (self.T - np.arange(1, W)) % W], fold(self.S[1], *self.ring.filled(1, self.T)), *kv]


def run(cuts, T, C, dtype):
    """Outputs [T, ...] and the memory at the end of a fixed random sequence fed in the pieces between the cuts."""
    rng = np.random.default_rng(T)
    x, w = rng.standard_normal((T, Cc)).astype(dtype), rng.standard_normal((Cc, W)).astype(dtype)
    g, beta = -rng.exponential(0.3, (T, Hv)).astype(dtype), rng.uniform(0, 1, (T, Hv)).astype(dtype)
    layers = Layers(T, C, dtype)
    edges = [0, *cuts, T]
    outs = [layers.feed(x[a:b], w, g[a:b], beta[a:b]) for a, b in zip(edges, edges[1:])]
    return np.concatenate(outs), layers.memory()


def assert_same(one, other):
    some.assert_near(one[0], other[0])
    for a, b in zip(one[1], other[1]):
        some.assert_near(a, b)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("T", [63, 64, 65])
def test_f03_cut_anywhere(T, dtype):
    whole = run([], T, 8, dtype)
    for cut in range(1, T):
        assert_same(run([cut], T, 8, dtype), whole)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("T", [63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("C", [1, 5])
def test_f03_equal_pieces_down_to_single_tokens(T, C, dtype):
    whole = run([], T, C, dtype)
    for piece in (1, 2, 3, 4, 63, 64, 65):
        assert_same(run(range(piece, T, piece), T, C, dtype), whole)


def test_f06_the_first_pieces_may_be_shorter_than_the_window():
    for T in range(1, 8):
        whole = run([], T, 4, np.float64)
        assert_same(run(range(1, T), T, 4, np.float64), whole)
        assert_same(run(range(2, T, 2), T, 4, np.float64), whole)
