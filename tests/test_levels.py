"""Trees grown level by level: the same as growing them from a table, bounded, and no level that does not pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.draft import levels
from boleinfer.draft.base import Limits
from boleinfer.draft.levels import Levels, top

VOCAB = 6


def table(seed: int):
    """Logits after any path."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *path]).standard_normal(VOCAB) * 2

    return logits


def grow(shape: Levels, limits: list[Limits], seed: int = 0):
    """The trees, and how often each was looked at, the passes in order."""
    passes: list[list[int]] = []

    def look(growing, chosen):
        passes.append([len(nodes) for nodes in chosen])
        rows = []
        for b, (g, nodes) in enumerate(zip(growing, chosen)):
            for n in nodes:
                path = []
                while n >= 0:
                    path.append(g.token[n])
                    n = g.parent[n]
                rows.append(table(seed)((b, *reversed(path))))
            mine = g.passes()  # the looked-at candidates are a tree of their own, in the order of the passes
            assert [g.token[n] for n in g.looked] == mine.token.tolist()
            assert [g.looked.index(g.parent[n]) if g.parent[n] >= 0 else -1 for n in g.looked] == mine.parent.tolist()
        return np.stack(rows)

    return shape.grow(limits, look), passes


@given(
    st.builds(Levels, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)),
    st.lists(st.builds(Limits, st.integers(0, 9), st.integers(0, 6), st.sampled_from([0.0, 0.1])), max_size=4),
    st.integers(0, 99),
)
def test_trees_are_valid_within_limits_and_say_what_the_logits_say(shape, limits, seed):
    trees, passes = grow(shape, limits, seed)
    for b, (tree, lim) in enumerate(zip(trees, limits)):
        assert len(tree) <= lim.nodes and (not len(tree) or tree.depth.max() < min(lim.depth, shape.depth))
        assert sum(p[b] for p in passes) <= 1 + lim.nodes
        assert (tree.parent < np.arange(len(tree))).all() and (tree.prob >= np.float32(lim.min_prob)).all()
        for n in range(len(tree)):
            likely, path = 1.0, tree.token[tree.path(n)].tolist()
            for i, token in enumerate(path):
                x = np.exp(table(seed)((b, *path[:i])))
                likely *= x[token] / x.sum()
            assert tree.prob[n] == pytest.approx(likely, rel=1e-5)
        children = np.bincount(tree.parent + 1, minlength=1)
        assert children.max(initial=0) <= shape.top_k
    assert all(n <= (shape.width if i else 1) for i, p in enumerate(passes) for n in p)


def test_the_likeliest_nodes_are_looked_at():
    (tree,), passes = grow(Levels(2, 2, 3), [Limits(20, 3)])
    assert passes == [[1], [2], [2]]
    second = tree.prob[tree.depth == 1]
    looked = {int(p) for p in tree.parent[tree.depth == 2]}
    assert looked == set((np.flatnonzero(tree.depth == 1)[np.argsort(-second)[:2]]).tolist())


def test_a_level_is_left_out_where_its_time_brings_more_otherwise(monkeypatch):
    clock = iter(np.arange(1000) * 0.5)  # every level seems to take half a second
    monkeypatch.setattr(levels, "perf_counter", lambda: next(clock))
    shape = Levels(2, 1, 6)
    assert len(grow(shape, [Limits(20, 6)])[1]) == 6, "time does not matter"
    assert len(grow(shape, [Limits(20, 6, pace=100.0)])[1]) == 1, "50 tokens a level: nothing is that likely"
    assert 1 < len(grow(shape, [Limits(20, 6, pace=0.1)])[1]) < 6, "a twentieth of a token: while the nodes bring more"
    assert len(grow(Levels(2, 1, 6), [Limits(20, 6, pace=100.0)])[1]) > 1, "unknown: it is tried"


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_top(vocab, k, seed):
    logits = np.random.default_rng(seed).standard_normal((3, vocab)).astype(np.float32)
    ids, prob = top(logits, k)
    assert ids.shape == prob.shape == (3, min(k, vocab))
    whole = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for row, (i, p) in enumerate(zip(ids, prob)):
        assert set(i.tolist()) == set(np.argsort(-whole[row])[: len(i)].tolist())
        np.testing.assert_allclose(p, whole[row, i], rtol=1e-5)


def test_a_shape_must_be_one():
    for name in ("top_k", "width", "depth"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            Levels(**{name: 0})
