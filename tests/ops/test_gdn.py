"""The gated delta rule on a forest against loops in float64: any forest, any ring, folded at any time, any decay."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from boleinfer.forest import Forest
from boleinfer.ops.gdn import chunked, gdn, recurrent, tree
from boleinfer.ops.gdn_commit import commit_factors
from boleinfer.ring import Ring, fold
from tests import strategies as some


def step(S, q, k, v, g, beta):
    """One token, loops over value heads, float64: o, u [Hv, V] and the state after it."""
    Hv = len(v)
    S, o, u = np.array(S, np.float64), np.empty(v.shape), np.empty(v.shape)
    for h in range(Hv):
        key, query = (np.asarray(x[h // (Hv // len(k))], np.float64) for x in (k, q))
        S[h] *= math.exp(g[h])
        u[h] = float(beta[h]) * (v[h] - key @ S[h])
        S[h] += np.outer(key, u[h])
        o[h] = query @ S[h]
    return o, u, S


def walk(nodes, rows, S):
    """`step` from parent to child over a whole tree: o, u [N, Hv, V], and the state after each node."""
    o, u, states = [], [], []
    for n, p in enumerate(nodes.parent.tolist()):
        o_n, u_n, S_n = step(S if p < 0 else states[p], *(x[n] for x in rows))
        o.append(o_n)
        u.append(u_n)
        states.append(S_n)
    return np.asarray(o), np.asarray(u), states


def random_rows(rng, R, Hk, Hv, K, V, dtype, alike=False):
    """q, k, v, g, beta; with `alike` the keys nearly coincide, the hardest case for the triangular system."""
    k = rng.standard_normal((R, Hk, K))
    if alike:
        k = k[:1] + 1e-3 * k
    g = rng.choice([0, -1e-6, -0.1, -1, -6, -88, -1e4, -np.inf], (R, Hv)) * rng.uniform(0.5, 1, (R, Hv))
    beta = rng.choice([0, 0.5, 1, 2], (R, Hv)) * rng.uniform(0.5, 1, (R, Hv))
    rows = some.unit(rng.standard_normal((R, Hk, K))) * K**-0.5, some.unit(k), rng.standard_normal((R, Hv, V)), g, beta
    return tuple(x.astype(dtype) for x in rows)


def empty_ring(slots, C, Hk, Hv, K, V, dtype):
    """A ring whose every entry is poison."""
    k, u, g = (np.full((slots, C, *shape), np.nan, dtype) for shape in ((Hk, K), (Hv, V), (Hv,)))
    return Ring(k, u, g)


def current(S, ring, slot, committed):
    """The state after the ring's entries, when so many tokens are committed."""
    return fold(S[slot], *ring.filled(slot, committed))


def bytes_of(S, ring):
    return b"".join(x.tobytes() for x in (S, *ring))


@settings(max_examples=150)
@given(data=st.data(), seed=some.seeds, dtype=some.dtypes, Hk=st.integers(1, 3), ratio=st.integers(1, 3))
def test_nodes_equal_their_root_path_and_commits_equal_feeding_it(data, seed, dtype, Hk, ratio):
    rng = np.random.default_rng(seed)
    B, C = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    K, V = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 5]))
    alike, slots, Hv = data.draw(st.booleans()), B + 2, Hk * ratio
    slot = some.some_slots(rng, B, slots)
    S = np.full((slots, Hv, K, V), np.nan, dtype)
    S[slot] = rng.standard_normal((B, Hv, K, V))
    ring = empty_ring(slots, C, Hk, Hv, K, V, dtype)
    states, committed = [S[s].astype(np.float64) for s in slot], C * rng.integers(0, 5, B)
    for _ in range(4):
        forest = Forest.of([data.draw(some.trees(10, max_chunk=70)) for _ in range(B)], committed)
        q, k, v, g, beta = rows = random_rows(rng, len(forest), Hk, Hv, K, V, dtype, alike)
        before = bytes_of(S, ring)
        o, u = gdn(*rows, S, ring, slot, forest)
        assert bytes_of(S, ring) == before and o.dtype == u.dtype == dtype
        walks = [walk(t, [x[forest.rows(b)] for x in rows], states[b]) for b, t in enumerate(forest.trees)]
        for b, (o_ref, u_ref, _) in enumerate(walks):
            some.assert_near(o[forest.rows(b)], o_ref, f"o of request {b}")
            some.assert_near(u[forest.rows(b)], u_ref, f"u of request {b}")
        paths = data.draw(some.accepted(forest))
        commit_factors(S, ring, k, u, g, slot, committed, paths)
        committed = committed + [len(path) for path in paths]
        for b, (s, path) in enumerate(zip(slot, paths)):
            if len(path):
                states[b] = walks[b][2][path[-1] - forest.start[b]]
            some.assert_near(current(S, ring, s, committed[b]), states[b], f"state of request {b}")
            for x in ring:
                x[s, committed[b] % C :] = np.nan  # scratch
        others = np.setdiff1d(np.arange(slots), slot)
        assert np.isnan(S[others]).all() and all(np.isnan(x[others]).all() for x in ring)


@settings(max_examples=100)
@given(forest=some.forests(max_nodes=9), seed=some.seeds, dtype=some.dtypes)
def test_a_node_equals_the_definition_run_over_its_root_path(forest, seed, dtype):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, len(forest), 2, 4, 5, 3, dtype)
    B = len(forest.trees)
    S, slot = rng.standard_normal((B, 4, 5, 3)).astype(dtype), np.arange(B)[::-1]
    ring = Ring(*(x.reshape(B, 3, *x.shape[1:]) for x in random_rows(rng, B * 3, 2, 4, 5, 3, dtype)[1:4]))
    o, u = gdn(*rows, S, ring, slot, forest)
    for b, nodes in enumerate(forest.trees):
        for n in range(len(nodes)):
            path = forest.start[b] + nodes.path(n)
            o_path, u_path, _ = recurrent(*(x[path] for x in rows), current(S, ring, slot[b], forest.committed[b]))
            some.assert_near(o[path[-1]], o_path[-1])
            some.assert_near(u[path[-1]], u_path[-1])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("T", [0, 1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_recurrent_and_chunked_equal_loops(T, ratio, dtype):
    rng = np.random.default_rng(T)
    rows = random_rows(rng, T, 2, 2 * ratio, 7, 5, dtype)
    S = rng.standard_normal((2 * ratio, 7, 5)).astype(dtype)
    nodes = some.tree_of(some.chain(T))
    o, u, states = walk(nodes, rows, S)
    for result in (recurrent(*rows, S), chunked(*rows, S), chunked(*rows, S, chunk=5)):
        for out, ref in zip(result, (o, u, states[-1] if T else S)):
            assert out.dtype == dtype
            some.assert_near(out, np.reshape(ref, out.shape))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("N", [65, 100, 193])
def test_large_trees_that_are_no_chains(N, dtype):
    rng = np.random.default_rng(N)
    ragged = [int(rng.integers(max(-1, n - 9), n)) for n in range(N)]
    rows = random_rows(rng, 3 * N, 2, 4, 6, 5, dtype, alike=True)
    S, ring, slot = rng.standard_normal((3, 4, 6, 5)).astype(dtype), empty_ring(3, 1, 2, 4, 6, 5, dtype), [2, 0, 1]
    forest = Forest.of([some.tree_of(p) for p in (ragged, some.binary(N), [*some.chain(N - 1), N - 3])], [0] * 3)
    o, u = gdn(*rows, S, ring, slot, forest)
    for b, nodes in enumerate(forest.trees):
        o_ref, u_ref, _ = walk(nodes, [x[forest.rows(b)] for x in rows], S[slot[b]])
        some.assert_near(o[forest.rows(b)], o_ref)
        some.assert_near(u[forest.rows(b)], u_ref)


@given(cuts=st.lists(st.integers(0, 12), max_size=8), C=st.integers(1, 9))
def test_checkpoint_and_ring_depend_on_the_tokens_alone_not_on_the_steps_that_brought_them(cuts, C):
    """The checkpoint has all before the last multiple of C, to the bit where nothing is rounded."""
    T = sum(cuts)
    k, u, g = np.arange(1.0, T + 1).reshape(T, 1, 1), np.ones((T, 1, 1)), np.zeros((T, 1))
    S, ring, first = np.zeros((1, 1, 1, 1)), empty_ring(1, C, 1, 1, 1, 1, np.float64), 0
    for m in cuts:
        commit_factors(S, ring, k, u, g, [0], [first], [np.arange(first, first + m)])
        first += m
    assert S.item() == k[: T - T % C].sum() and (ring.filled(0, T)[0] == k[T - T % C :]).all()


@pytest.mark.parametrize("T", [64, 65, 256])
@pytest.mark.parametrize("pattern", ["all", "alternating", "one chunk", "one token"])
@pytest.mark.parametrize("decay", [0, -1e-6, -0.1, -6, -20, -88, -104, -1e4, -np.inf])
def test_f18_gate_extremes(decay, pattern, T):
    rng = np.random.default_rng(T)
    Hk, Hv, K, V = 1, 2, 4, 3
    where = {"all": slice(None), "alternating": slice(1, None, 2), "one chunk": slice(0, 64), "one token": 40}[pattern]
    g = np.full((T, Hv), -0.3)
    g[where] = decay
    for strength in (0, 1):
        q, k, v, _, _ = random_rows(rng, T, Hk, Hv, K, V, np.float64)
        S = rng.standard_normal((Hv, K, V))
        rows64 = q, k, v, g, np.full((T, Hv), float(strength))
        o, u, states = walk(some.tree_of(some.chain(T)), rows64, S)
        for dtype in (np.float64, np.float32):
            rows, start = [x.astype(dtype) for x in rows64], S.astype(dtype)
            ring = Ring(*(x[None, :21] for x in (rows[1], u.astype(dtype), rows[3])))
            rest = Forest.of([some.tree_of(some.chain(T - 20))], [20])
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                results = [recurrent(*rows, start), chunked(*rows, start), chunked(*rows, start, 16)]
                warm = gdn(*(x[20:] for x in rows), start[None], ring, [0], rest)
            for result in results:
                for out, ref in zip(result, (o, u, states[-1])):
                    some.assert_near(out, ref)
            for out, ref in zip(warm, (o[20:], u[20:])):
                some.assert_near(out, ref)


@pytest.mark.parametrize("decay", [-800.0, -1e4, -np.inf])
def test_f18_a_decay_of_zero_is_a_full_reset(decay):
    rng = np.random.default_rng(0)
    q, k, v, g, beta = random_rows(rng, 40, 2, 4, 8, 8, np.float32)
    g[:] = -0.01
    g[17] = decay
    S = (1e3 * rng.standard_normal((1, 4, 8, 8))).astype(np.float32)
    ring = Ring(k[None, :10], v[None, :10] * 1e3, g[None, :10])
    forest = Forest.of([some.tree_of(some.chain(40))], [9])
    o, u = gdn(q, k, v, g, beta, S, ring, [0], forest)
    fresh = recurrent(q[17:], k[17:], v[17:], g[17:], beta[17:], np.zeros((4, 8, 8), np.float32))
    some.assert_near(o[17:], fresh[0])
    some.assert_near(fold(S[0], k, u, g), fresh[2])


@pytest.mark.parametrize("piece", [1, 7, 512, 4096])
def test_f18_a_tiny_decay_keeps_memory_over_4096_tokens(piece):
    T, K, V, C = 4096, 4, 3, 32
    rng = np.random.default_rng(0)
    S = rng.standard_normal((1, 1, K, V)).astype(np.float32)
    kept = S[0].astype(np.float64) * math.exp(-1e-6 * T)
    ring = empty_ring(1, C, 1, 1, K, V, np.float32)
    q, k, v, _, _ = random_rows(rng, piece, 1, 1, K, V, np.float32)
    g, beta = np.full((piece, 1), -1e-6, np.float32), np.zeros((piece, 1), np.float32)
    for first in range(0, T, piece):
        path = np.arange(min(piece, T - first))
        forest = Forest.of([some.tree_of(some.chain(piece))], [first])
        _, u = gdn(q, k, v, g, beta, S, ring, [0], forest)
        commit_factors(S, ring, k, u, g, [0], [first], [path])
    some.assert_near(current(S, ring, 0, T), kept)


def test_f27_error_stays_flat_over_8192_tokens_and_other_layers_are_untouched():
    rng = np.random.default_rng(0)
    Hk, Hv, K, V, C, layers, slots = 1, 2, 16, 16, 16, 3, 4
    S = rng.standard_normal((layers, slots, Hv, K, V)).astype(np.float32)
    rings = [empty_ring(slots, C, Hk, Hv, K, V, np.float32) for _ in range(layers)]
    kept, ring, slot = S.copy(), rings[1], np.asarray([2])
    rings_kept = [bytes_of(S[:0], rings[i]) for i in (0, 2)]
    exact, errors = S[1, 2].astype(np.float64), []
    for first in range(0, 8192, 4):
        q, k, v, g, beta = random_rows(rng, 4, Hk, Hv, K, V, np.float32)
        g, beta = -rng.uniform(0, 2e-3, g.shape).astype(np.float32), rng.uniform(0, 1, g.shape).astype(np.float32)
        forest = Forest.of([some.tree_of(some.chain(4))], [first])
        _, u = gdn(q, k, v, g, beta, S[1], ring, slot, forest)
        commit_factors(S[1], ring, k, u, g, slot, [first], [np.arange(4)])
        exact = recurrent(*(x.astype(np.float64) for x in (q, k, v, g, beta)), exact)[2]
        if first % 1024 == 1020:
            errors.append(np.linalg.norm(current(S[1], ring, 2, first + 4) - exact) / np.linalg.norm(exact))
    assert max(errors) < 1e-6 and np.mean(errors[4:]) < 2 * np.mean(errors[:4])
    kept[1, 2] = S[1, 2]
    assert S.tobytes() == kept.tobytes()
    assert rings_kept == [bytes_of(S[:0], rings[i]) for i in (0, 2)]


def test_f16_f17_a_commit_changes_no_other_slot():
    rng = np.random.default_rng(1)
    Hk, Hv, K, V, C, slots = 2, 4, 3, 5, 4, 8
    S = rng.standard_normal((slots, Hv, K, V)).astype(np.float32)
    filled = [x.reshape(slots, C, *x.shape[1:]) for x in random_rows(rng, slots * C, Hk, Hv, K, V, np.float32)[1:4]]
    ring = Ring(*filled)
    _, k, u, g, _ = random_rows(rng, 20, Hk, Hv, K, V, np.float32)
    before = [x.copy() for x in (S, *ring)]
    slot, committed = (
        np.asarray([7, 0, 3, 1]),
        [7, 0, 6, 3],
    )  # all but full, empty, half, all but full: nothing accepted
    paths = [np.asarray([0, 3]), np.arange(5, 15), np.asarray([16, 18]), np.asarray([], np.int32)]
    commit_factors(S, ring, k, u, g, slot, committed, paths)
    for s in range(slots):
        same = all(x[s].tobytes() == y[s].tobytes() for x, y in zip((S, *ring), before))
        assert same == (s not in (7, 0, 3))


def test_a_reused_slot_does_not_see_what_its_last_owner_left():
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 6, 1, 2, 4, 4, np.float32)
    forest = Forest.of([some.tree_of([-1, 0, 0, 1, 3, 2])], [0])
    fresh = gdn(*rows, np.zeros((1, 2, 4, 4), np.float32), empty_ring(1, 5, 1, 2, 4, 4, np.float32), [0], forest)
    S = np.full((3, 2, 4, 4), np.nan, np.float32)
    S[1] = 0
    used = gdn(*rows, S, empty_ring(3, 5, 1, 2, 4, 4, np.float32), [1], forest)
    for a, b in zip(fresh, used):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("N", [1, 16, 17, 48, 64])
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_identical_keys_without_decay_lose_no_digits(N, beta):
    """The system's matrix is then beta everywhere below the diagonal: a power series in it would lose all digits."""
    rng = np.random.default_rng(N)
    Hk, Hv, K, V = 1, 1, 8, 8
    q, k, v, g, b = random_rows(rng, N, Hk, Hv, K, V, np.float32)
    k[:], g[:], b[:] = k[0], 0, beta
    S = rng.standard_normal((Hv, K, V)).astype(np.float32)
    args = (S, k[:0], v[:0], g[:0], np.tri(N, dtype=bool))
    o, u = tree(q, k, v, g, b, *args)
    o_ref, u_ref, _ = walk(some.tree_of(some.chain(N)), (q, k, v, g, b), S)
    some.assert_near(o, o_ref)
    some.assert_near(u, u_ref)


@pytest.mark.parametrize("T,ratio", [(1, 2), (7, 1), (65, 3), (130, 2)])
def test_all_forms_equal_hf(T, ratio):
    rng = np.random.default_rng(T)
    Hk, K, V = 2, 16, 8
    q, k, v, g, beta = random_rows(rng, T, Hk, Hk * ratio, K, V, np.float32)
    g, beta = np.maximum(g, -20), np.minimum(beta, 1)
    S = rng.standard_normal((Hk * ratio, K, V)).astype(np.float32)
    heads = [np.repeat(x, ratio, axis=1) for x in (q * K**0.5, k)]  # HF scales q itself and wants heads in equal number
    args = [torch.from_numpy(x)[None] for x in (*heads, v, g, beta)]
    ring = empty_ring(1, 1, Hk, Hk * ratio, K, V, np.float32)
    forest = Forest.of([some.tree_of(some.chain(T))], [0])
    ours = [recurrent(q, k, v, g, beta, S), chunked(q, k, v, g, beta, S)]
    o, u = gdn(q, k, v, g, beta, S[None], ring, [0], forest)
    ours.append((o, u, fold(S, k, u, g)))
    for rule in (hf.torch_recurrent_gated_delta_rule, hf.torch_chunk_gated_delta_rule):
        o_hf, S_hf = rule(*args, initial_state=torch.from_numpy(S)[None], output_final_state=True)
        for o, _, S_new in ours:
            some.assert_near(o, o_hf[0].numpy())
            some.assert_near(S_new, S_hf[0].numpy())
