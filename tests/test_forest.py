"""The algebra of trees and forests against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.budget import share
from boleinfer.forest import Forest, Tree
from boleinfer.scheduler import grow


@st.composite
def trees(draw, least: int = 0, most: int = 12, one_root: bool = False):
    n = draw(st.integers(least, most))
    parent = [draw(st.integers(0 if one_root and i else -1, i - 1)) for i in range(n)]
    step = [draw(st.floats(0.0625, 1, width=32)) for _ in range(n)]
    prob: list[float] = []
    for p, s in zip(parent, step):
        prob.append((prob[p] if p >= 0 else 1.0) * s)
    token: list[int] = []
    for i, p in enumerate(parent):  # siblings hold different tokens
        token.append(sum(q == p for q in parent[:i]))
    return Tree.of(token, parent, prob)


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """Token path -> probability, for every node."""
    return {tuple(tree.token[tree.path(n)].tolist()): float(tree.prob[n]) for n in range(len(tree))}


@given(trees())
def test_depth_ancestors_and_paths_agree(tree):
    for n in range(len(tree)):
        path = tree.path(n).tolist()
        assert tree.parent[path[0]] == -1 and path[-1] == n
        assert [int(tree.parent[i]) for i in path[1:]] == path[:-1]
        assert tree.depth[n] == len(path) - 1
        assert np.flatnonzero(tree.ancestors[n]).tolist() == sorted(path)
    assert tree.is_chain == (tree.parent.tolist() == list(range(-1, len(tree) - 1)))


@given(trees(), st.integers(0, 14))
def test_best_keeps_the_likeliest_nodes_and_their_parents(tree, n):
    best = tree.best(n)
    assert len(best) == min(n, len(tree))
    kept = paths(best)
    assert kept.items() <= paths(tree).items()
    assert sorted(best.prob.tolist()) == sorted(tree.prob.tolist(), reverse=True)[: len(best)][::-1]


@given(trees(), st.data())
def test_tokens_lead_along_a_path(tree, data):
    if len(tree):
        node = data.draw(st.integers(0, len(tree) - 1))
        tokens = tree.token[tree.path(node)].tolist()
        assert tree.along(tokens).tolist() == tree.path(node).tolist()
        assert tree.along([*tokens, -7, *tokens]).tolist() == tree.path(node).tolist()
    assert not len(tree.along([-7])) and not len(tree.along([]))


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 30))
def test_share_gives_the_batch_its_likeliest_nodes(forest, rows):
    shared = share(forest, rows)
    assert sum(map(len, shared)) <= rows
    for small, tree in zip(shared, forest):
        assert paths(small).items() <= paths(tree).items()
    kept = np.concatenate([t.prob for t in shared])
    everything = np.sort(np.concatenate([t.prob for t in forest]))[::-1]
    if len(everything) <= rows:
        assert len(kept) == len(everything)
    else:  # ties at the bar may leave rows unused, but never a likelier node than one that was kept
        left = everything[len(kept) :]
        assert not len(kept) or kept.min() >= left.max()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), trees())
def test_grow_hangs_the_draft_on_the_last_known_token(known, draft):
    tree = grow(known, draft)
    assert tree.token[: len(known)].tolist() == known and len(tree) == len(known) + len(draft)
    for n in range(len(draft)):
        path = tree.token[tree.path(len(known) + n)].tolist()
        assert path == known + draft.token[draft.path(n)].tolist()


@given(st.lists(trees(most=6), min_size=1, max_size=4), st.data())
def test_forest_rows(many, data):
    committed = [data.draw(st.integers(0, 1000)) for _ in many]
    forest = Forest.of(many, committed)
    assert len(forest) == sum(map(len, many)) == len(forest.token) == len(forest.request)
    for b, tree in enumerate(many):
        rows = forest.rows(b)
        assert (forest.request[rows] == b).all()
        assert forest.position[rows].tolist() == [committed[b] + d for d in tree.depth.tolist()]
        assert [p - rows.start if p >= 0 else -1 for p in forest.parent[rows].tolist()] == tree.parent.tolist()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="node 1 of the tree has parent 1"):
        Tree.of([1, 2], [-1, 1])
    with pytest.raises(ValueError, match="2 tokens, 1 parents"):
        Tree.of([1, 2], [-1])
    with pytest.raises(ValueError, match="2 trees need as many committed lengths, got 1"):
        Forest.of([Tree.chain([1]), Tree.chain([2])], [0])
