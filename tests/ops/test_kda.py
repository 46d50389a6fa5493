"""Kimi Delta Attention on trees against loops in float64: any tree, ring and decay of the channels; where it is gdn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.ops import gdn, kda
from tests import strategies as some

HARSH = [0, -1e-6, -0.1, -1, -6, -88, -1e4, -np.inf]


def step(S, q, k, v, g, beta):
    """One token, loops over value heads and channels, float64: o, u [Hv, V] and the state after it."""
    S, o, u = np.array(S, np.float64), np.empty(v.shape), np.empty(v.shape)
    for h in range(len(v)):
        key, query = (x[h // (len(v) // len(k))] for x in (k, q))
        for j in range(len(key)):
            S[h, j] *= math.exp(g[h, j])
        u[h] = beta[h] * (v[h] - key @ S[h])
        S[h] += np.outer(key, u[h])
        o[h] = query @ S[h]
    return o, u, S


def walk(nodes, rows, S):
    """`step` from parent to child over a whole tree: o, u [N, Hv, V], and the state after each node."""
    rows = [x.astype(np.float64) for x in rows]
    o, u, states = [], [], []
    for n, p in enumerate(nodes.parent.tolist()):
        o_n, u_n, S_n = step(S if p < 0 else states[p], *(x[n] for x in rows))
        o.append(o_n)
        u.append(u_n)
        states.append(S_n)
    return np.asarray(o), np.asarray(u), states


def random_rows(rng, R, Hk, Hv, K, V, dtype=np.float64, alike=False, decays=HARSH):
    """q, k, v, g, beta; every channel of every row has a decay of its own."""
    k = rng.standard_normal((R, Hk, K))
    if alike:
        k = k[:1] + 1e-3 * k
    g = rng.choice(decays, (R, Hv, K)) * rng.uniform(0.5, 1, (R, Hv, K))
    beta = rng.choice([0, 0.5, 1, 2], (R, Hv)) * rng.uniform(0.5, 1, (R, Hv))
    rows = some.unit(rng.standard_normal((R, Hk, K))) * K**-0.5, some.unit(k), rng.standard_normal((R, Hv, V)), g, beta
    return tuple(x.astype(dtype) for x in rows)


@settings(max_examples=150)
@given(data=st.data(), seed=some.seeds, dtype=some.dtypes, Hk=st.integers(1, 2), ratio=st.integers(1, 3))
def test_nodes_equal_the_recurrence_behind_any_ring(data, seed, dtype, Hk, ratio):
    rng, Hv = np.random.default_rng(seed), Hk * ratio
    K, V, c = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 5])), data.draw(st.integers(0, 9))
    nodes, alike = data.draw(some.trees(14, max_chunk=20)), data.draw(st.booleans())
    S = rng.standard_normal((Hv, K, V)).astype(dtype)
    past = random_rows(rng, c, Hk, Hv, K, V, dtype, alike)
    _, ring_u, _ = kda.recurrent(*past, S)
    ring = past[1], ring_u, past[3]
    rows = random_rows(rng, len(nodes), Hk, Hv, K, V, dtype, alike)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        o, u = kda.tree(*rows, S, *ring, nodes.ancestors)
    assert o.dtype == u.dtype == dtype
    behind = walk(some.tree_of(some.chain(c)), past, S)[2][-1] if c else S
    o_ref, u_ref, states = walk(nodes, rows, behind)
    some.assert_near(o, o_ref)
    some.assert_near(u, u_ref)
    path = nodes.path(len(nodes) - 1)
    kept = [np.concatenate((old, x[path])) for old, x in zip(ring, (rows[1], u, rows[3]))]
    some.assert_near(kda.fold(S, *kept), states[-1])


@pytest.mark.parametrize("decay", HARSH)
@pytest.mark.parametrize("N", [1, 65, 200])
def test_chains_of_one_decay(N, decay):
    """One channel decays so in every row, the others hardly at all."""
    rng = np.random.default_rng(N)
    q, k, v, g, beta = rows = random_rows(rng, N, 1, 2, 6, 5, decays=[-1e-3])
    g[:, :, 0] = decay
    S, none = rng.standard_normal((2, 6, 5)), (k[:0], v[:0], g[:0])
    nodes = some.tree_of(some.chain(N))
    o, u = kda.tree(*rows, S, *none, nodes.ancestors)
    for found in ((o, u, kda.fold(S, k, u, g)), kda.recurrent(*rows, S)):
        o_ref, u_ref, states = walk(nodes, rows, S)
        for out, ref in zip(found, (o_ref, u_ref, states[-1])):
            some.assert_near(out, ref)


@pytest.mark.parametrize("N", [1, 17, 64])
def test_equal_decays_of_all_channels_are_gdn(N):
    rng = np.random.default_rng(N)
    q, k, v, g, beta = random_rows(rng, N + 5, 2, 4, 6, 5)
    S, nodes = rng.standard_normal((4, 6, 5)), some.tree_of([int(rng.integers(-1, n)) for n in range(N)])
    wide = np.repeat(g[:, :, :1], 6, axis=2)
    ring = k[N:], v[N:]
    ours = kda.tree(q[:N], k[:N], v[:N], wide[:N], beta[:N], S, *ring, wide[N:], nodes.ancestors)
    theirs = gdn.tree(q[:N], k[:N], v[:N], g[:N, :, 0], beta[:N], S, *ring, g[N:, :, 0], nodes.ancestors)
    for a, b in zip(ours, theirs):
        some.assert_near(a, b)


@settings(max_examples=200)
@given(parents=some.parents(40))
def test_every_pair_is_between_once(parents):
    nodes = some.tree_of(parents)
    seen = np.zeros_like(nodes.ancestors, int)
    for c, below, above in kda.between(nodes.ancestors):
        assert nodes.ancestors[c, above].all() and nodes.ancestors[below, c].all()
        seen[below[:, None], above] += 1
    strict = nodes.ancestors & ~np.eye(len(nodes), dtype=bool)
    assert (seen[strict] == 1).all() and not seen[~nodes.ancestors].any()


def test_a_chain_is_halved():
    """So that N nodes are scaled N log N times, not once for each pair."""
    rows = sum(len(below) + len(above) for _, below, above in kda.between(some.tree_of(some.chain(64)).ancestors))
    assert rows <= 64 * 7
