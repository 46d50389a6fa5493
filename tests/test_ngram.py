"""Prompt and output lookup: what is proposed, and that it only ever reads what is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.draft.base import Limits
from boleinfer.draft.ngram import LONGEST, MATCHES, SHORTEST, NgramDrafter
from boleinfer.sampling import SamplingParams
from tests.running import request_of

LIMITS = Limits(nodes=20, depth=6)


def propose(tokens: list[int], limits: Limits = LIMITS):
    return NgramDrafter().propose([request_of(tokens, SamplingParams())], [limits])[0]


def test_continues_a_repetition():
    tree = propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert tree.token.tolist() == [4, 5, 6, 7, 8, 1] and tree.is_chain
    assert (np.diff(tree.prob) < 0).all() and 0 < tree.prob[-1] < 1


def test_several_continuations_make_a_tree():
    tree = propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 5, 1, 2])
    assert set(tree.token[tree.parent == -1].tolist()) == {3, 4}
    after = tree.token[np.isin(tree.parent, np.flatnonzero((tree.parent == -1) & (tree.token == 3)))]
    assert set(after.tolist()) == {9, 5}


def test_longer_matches_are_trusted_more():
    tokens = [7, 8, 9, 1, 2, 3, *range(20, 30), 5, 1, 2, 4, *range(40, 50), 7, 8, 9, 1, 2]
    roots = propose(tokens)
    prob = {int(t): float(p) for t, p, q in zip(roots.token, roots.prob, roots.parent) if q == -1}
    assert prob[3] > prob[4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 8))
def test_every_path_follows_an_earlier_match(tokens, depth, nodes):
    drafter, request = NgramDrafter(), request_of(tokens[:1], SamplingParams())
    for end in range(1, len(tokens) + 1):  # incremental and at once give the same
        request.tokens = tokens[:end]
        tree = drafter.propose([request], [Limits(nodes=nodes, depth=depth)])[0]
    once = propose(tokens, Limits(nodes=nodes, depth=depth))
    assert tree.token.tolist() == once.token.tolist() and tree.parent.tolist() == once.parent.tolist()
    assert len(tree) <= nodes and (not len(tree) or tree.depth.max() < depth)
    tail = tokens[-SHORTEST:]
    for n in range(len(tree)):
        path = [*tail, *tree.token[tree.path(n)].tolist()]
        assert any(tokens[i : i + len(path)] == path for i in range(len(tokens)))
    assert 0 < SHORTEST <= LONGEST and MATCHES > 0


def test_trust_is_learned():
    rng = np.random.default_rng(0)
    right = [1, 2, 3, 4] * 50
    wrong = [t for _ in range(50) for t in (1, 2, int(rng.integers(100, 400)))]
    assert propose([*right, 1, 2]).prob[0] > 0.9
    assert propose([*wrong, 1, 2]).prob[0] < 0.2


def test_an_ended_request_is_forgotten():
    drafter, request = NgramDrafter(), request_of([1, 2, 3], SamplingParams())
    drafter.propose([request], [LIMITS])
    drafter.forget(request)
    drafter.forget(request)
    assert not drafter._indexes
