"""Paged attention on a forest: every node equals plain attention over its root path, whatever lies in unused slots."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.forest import Forest
from boleinfer.ops import attention
from boleinfer.ops.attention import move_kv, tree_attention
from boleinfer.ops.attention_inputs import write_kv
from tests import strategies as some


def plain_attention(q, keys, values, scale):
    """softmax(scale q k^T) v of one row q [Hq, Dh] over T rows [Hkv, Dh]; loops over heads, float64."""
    out = np.empty(q.shape)
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    for h in range(len(q)):
        kv = h // (len(q) // keys.shape[1])
        scores = [scale * math.fsum((row * q[h]).tolist()) for row in keys[:, kv]]
        weights = np.exp(np.asarray(scores) - max(scores))
        out[h] = weights @ values[:, kv] / weights.sum()
    return out


class Pool:
    """Pages full of poison, and the true KV of each request beside them."""

    def __init__(self, rng, lengths, room, P, Hkv, Dh, dtype, scattered=True):
        """room: slots each request has pages for"""
        B, M = len(lengths), -(-room // P)
        ids = np.arange(3, 3 + B * M)
        self.table = (rng.permutation(ids) if scattered else ids).reshape(B, M).astype(np.int32)
        self.k, self.v = (np.full((B * M + 5, P, Hkv, Dh), np.nan, dtype) for _ in "kv")
        self.past = [rng.standard_normal((2, T, Hkv, Dh)).astype(dtype) for T in lengths]
        for b, past in enumerate(self.past):
            self.put(b, 0, past)

    def put(self, b, first, kv):
        P = self.k.shape[1]
        for i in range(kv.shape[1]):
            page, offset = self.table[b, (first + i) // P], (first + i) % P
            self.k[page, offset], self.v[page, offset] = kv[:, i]

    def get(self, b, slots):
        slots, P = np.asarray(slots, int), self.k.shape[1]
        return np.stack([pages[self.table[b, slots // P], slots % P] for pages in (self.k, self.v)])


def check_nodes(out, q, gate, k, v, pool, forest, scale):
    for b, tree in enumerate(forest.trees):
        for n in range(len(tree)):
            path = forest.start[b] + tree.path(n)
            keys, values = (np.concatenate((past, new[path])) for past, new in zip(pool.past[b], (k, v)))
            expected = plain_attention(q[path[-1]], keys, values, scale) / (
                1 + np.exp(-gate[path[-1]].astype(np.float64))
            )
            some.assert_near(out[path[-1]], expected, f"request {b} node {n}")


def random_rows(rng, R, Hq, Hkv, Dh, dtype):
    """q, gate, k, v."""
    return tuple(rng.standard_normal((R, H, Dh)).astype(dtype) for H in (Hq, Hq, Hkv, Hkv))


@settings(max_examples=80)
@given(data=st.data(), seed=some.seeds, dtype=some.dtypes, Hkv=st.integers(1, 2), ratio=st.integers(1, 3))
def test_nodes_equal_their_root_path_and_commits_equal_feeding_it(data, seed, dtype, Hkv, ratio):
    rng = np.random.default_rng(seed)
    B, Dh = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3, 8]))
    lengths = [data.draw(st.integers(0, 40)) for _ in range(B)]
    pool = Pool(rng, lengths, 130, data.draw(st.integers(1, 17)), Hkv, Dh, dtype, data.draw(st.booleans()))
    for _ in range(3):
        forest = Forest.of([data.draw(some.trees(9, max_chunk=30)) for _ in range(B)], [p.shape[1] for p in pool.past])
        q, gate, k, v = random_rows(rng, len(forest), Hkv * ratio, Hkv, Dh, dtype)
        write_kv(k, v, pool.k, pool.v, pool.table, forest)
        before = pool.k.tobytes() + pool.v.tobytes()
        out = tree_attention(q, gate, pool.k, pool.v, pool.table, forest, 0.7)
        assert before == pool.k.tobytes() + pool.v.tobytes() and out.dtype == dtype
        check_nodes(out, q, gate, k, v, pool, forest, 0.7)
        paths = data.draw(some.accepted(forest))
        move_kv(pool.k[None], pool.v[None], pool.table, forest, paths)
        for b, path in enumerate(paths):
            T, N, m = int(forest.committed[b]), len(forest.trees[b]), len(path)
            pool.past[b] = np.concatenate((pool.past[b], np.stack((k[path], v[path]))), axis=1)
            np.testing.assert_array_equal(pool.get(b, range(T + m)), pool.past[b])
            pool.put(b, T + m, np.full((2, N - m, Hkv, Dh), np.nan))  # nothing may need the rejected rows
    unowned = np.setdiff1d(np.arange(len(pool.k)), pool.table)
    assert np.isnan(pool.k[unowned]).all() and np.isnan(pool.v[unowned]).all()


@settings(max_examples=60)
@given(data=st.data(), seed=some.seeds, forest=some.forests(max_nodes=12))
def test_a_tree_grown_level_by_level_equals_the_whole_tree(data, seed, forest):
    rng = np.random.default_rng(seed)
    pool = Pool(rng, forest.committed, 60, 4, 1, 4, np.float64)
    q, gate, k, v = random_rows(rng, len(forest), 2, 1, 4, np.float64)
    out = np.empty_like(q)
    for depth in range(forest.depth.max() + 1):  # deeper rows are still poison
        rows = np.flatnonzero(forest.depth == depth)
        write_kv(k[rows], v[rows], pool.k, pool.v, pool.table, forest, rows)
        out[rows] = tree_attention(q[rows], gate[rows], pool.k, pool.v, pool.table, forest, 0.5, rows)
    check_nodes(out, q, gate, k, v, pool, forest, 0.5)
    whole = tree_attention(q, gate, pool.k, pool.v, pool.table, forest, 0.5)
    np.testing.assert_allclose(out, whole, atol=1e-13)


@pytest.mark.parametrize("N", [1, 30, 65])
def test_blocks_of_query_rows_change_nothing(N, monkeypatch):
    rng = np.random.default_rng(N)
    forest = Forest.of([some.tree_of(some.chain(N)), some.tree_of(some.binary(21))], [13, 0])
    pool = Pool(rng, forest.committed, 90, 8, 2, 4, np.float64)
    q, gate, k, v = random_rows(rng, len(forest), 4, 2, 4, np.float64)
    write_kv(k, v, pool.k, pool.v, pool.table, forest)
    whole = tree_attention(q, gate, pool.k, pool.v, pool.table, forest, 0.5)
    monkeypatch.setattr(attention, "SCORES", 1)
    np.testing.assert_allclose(tree_attention(q, gate, pool.k, pool.v, pool.table, forest, 0.5), whole, atol=1e-14)
    check_nodes(whole, q, gate, k, v, pool, forest, 0.5)


RAGGED = [-1] + [max(0, n - 1 - (n * 7) % 11) for n in range(1, 64)]


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize(
    "parents",
    [some.chain(8), some.star(8), some.two_chains(9), some.binary(31), RAGGED],
    ids=["chain", "star", "two chains", "binary", "ragged"],
)
def test_f30_no_shortcut_in_the_tree_mask(parents, T):
    rng = np.random.default_rng(T)
    forest = Forest.of([some.tree_of(parents)], [T])
    pool = Pool(rng, [T], T + 64, 16, 1, 4, np.float32)
    q, gate, k, v = random_rows(rng, len(forest), 2, 1, 4, np.float32)
    write_kv(k, v, pool.k, pool.v, pool.table, forest)
    check_nodes(tree_attention(q, gate, pool.k, pool.v, pool.table, forest, 0.5), q, gate, k, v, pool, forest, 0.5)
    np.testing.assert_array_equal(forest.position, T + forest.depth)


@pytest.mark.parametrize("path", [(0, 5, 6), (0, 1, 2), (0, 3, 7), (3,), (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("T", [0, 13, 14, 15, 16])
def test_f32_accepted_rows_are_compacted_across_page_edges(path, T):
    rng = np.random.default_rng(T)
    pool = Pool(rng, [T, 20], 40, 16, 2, 3, np.float32)
    tree_rows = rng.standard_normal((2, 8, 2, 3)).astype(np.float32)
    pool.put(0, T, tree_rows)
    others = np.setdiff1d(np.arange(len(pool.k)), pool.table[0])
    kept = pool.k[others].tobytes() + pool.v[others].tobytes()
    forest = Forest.of([some.tree_of(some.roots(8)), some.tree_of([-1])], [T, 20])
    move_kv(pool.k[None], pool.v[None], pool.table, forest, [np.asarray(path), np.zeros(0, int)])
    np.testing.assert_array_equal(pool.get(0, range(T)), pool.past[0])
    np.testing.assert_array_equal(pool.get(0, range(T, T + len(path))), tree_rows[:, list(path)])
    assert pool.k[others].tobytes() + pool.v[others].tobytes() == kept


def test_f17_writing_touches_only_the_slots_of_its_rows():
    rng = np.random.default_rng(0)
    forest = Forest.of([some.tree_of([-1, 0, 0]), some.tree_of([-1])], [15, 3])
    pool = Pool(rng, forest.committed, 32, 16, 1, 2, np.float32)
    pool.k[:], pool.v[:] = rng.standard_normal((2, *pool.k.shape))
    kept = pool.k.copy()
    _, _, k, v = random_rows(rng, 4, 1, 1, 2, np.float32)
    write_kv(k, v, pool.k, pool.v, pool.table, forest)
    written = {(int(p), int(o)) for p, o in np.argwhere((pool.k != kept).any((2, 3)))}
    table = pool.table.tolist()
    assert written == {(table[0][0], 15), (table[0][1], 0), (table[0][1], 1), (table[1][0], 3)}


def test_a_row_without_a_page_is_refused_before_anything_is_written():
    forest = Forest.of([some.tree_of(some.chain(3))], [3])
    k = np.ones((3, 1, 2), np.float32)
    for table in ([[2, -1]], [[2]]):
        pages = np.zeros((4, 4, 1, 2), np.float32)
        with pytest.raises(IndexError):
            write_kv(k, k, pages, pages, np.asarray(table, np.int32), forest)
        assert not pages.any()


def test_f29_a_pool_above_2_31_elements():
    P, Hkv, Dh = 16, 2, 256
    pages = 2**31 // (P * Hkv * Dh) + 8
    rng = np.random.default_rng(0)
    try:
        big = [np.zeros((pages, P, Hkv, Dh), np.float16) for _ in "kv"]  # untouched pages cost no memory
    except MemoryError:
        pytest.skip("no room for the addresses of two pools of 4 GB")
    small = [np.zeros((6, P, Hkv, Dh), np.float16) for _ in "kv"]
    forest = Forest.of([some.tree_of(some.chain(20)), some.tree_of(some.chain(40))], [0, 0])
    q, gate, k, v = random_rows(rng, 60, 2, Hkv, Dh, np.float16)
    low, outs = np.asarray([[5, 0, 0], [1, 3, 2]], np.int32), []
    low[0, 1] = 4
    for (k_pages, v_pages), table in ((small, low), (big, pages - 6 + low)):
        write_kv(k, v, k_pages, v_pages, table, forest)
        move_kv(k_pages[None], v_pages[None], table, forest, [np.zeros(0, int), np.asarray([30, 35])])
        outs.append(tree_attention(q, gate, k_pages, v_pages, table, forest, 0.1))
    np.testing.assert_array_equal(*outs)
    assert np.abs(outs[0]).max() > 0


def test_large_scores_do_not_overflow():
    q, gate = np.full((1, 1, 4), 1e3, np.float32), np.zeros((1, 1, 4), np.float32)
    pages = np.asarray([[1.0], [-1.0], [2.0]], np.float32).reshape(1, 3, 1, 1) * np.full(4, 1e3, np.float32)
    with np.errstate(over="raise", invalid="raise"):
        out = tree_attention(
            q, gate, pages, pages, np.zeros((1, 1), np.int32), Forest.of([some.tree_of([-1])], [2]), 1.0
        )
    np.testing.assert_array_equal(out, np.full((1, 1, 4), 1e3))
