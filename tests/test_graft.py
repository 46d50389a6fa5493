"""Several drafters in one tree: what is joined, what is learned, and who is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.draft import graft
from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.graft import GraftedDrafter, TreeGuide
from boleinfer.draft.none import NoDrafter
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.draft.suffix import SuffixDrafter
from boleinfer.forest import Tree
from boleinfer.sampling import SamplingParams
from tests.running import request_of

LIMITS = Limits(nodes=30, depth=6)


def request(tokens: list[int]):
    return request_of(tokens, SamplingParams())


@st.composite
def trees(draw):
    """Any valid tree: distinct siblings whose probabilities sum to 1 at most, each no likelier than its parent."""
    parents = [draw(st.integers(-1, n - 1)) for n in range(draw(st.integers(0, 12)))]
    token, prob, taken = [], [], {}
    for p in parents:
        used = taken.setdefault(p, [])
        token.append(draw(st.integers(0, 3)) + 4 * len(used))
        used.append(token[-1])
        prob.append((prob[p] if p >= 0 else 1.0) * draw(st.floats(0, 1)) / 2 ** len(used))
    return Tree.of(token, parents, prob)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.token[tree.path(n)].tolist()) for n in range(len(tree))}


def step(drafter: GraftedDrafter, req, came: list[int], limits: Limits = LIMITS) -> Tree:
    """A proposal, and these tokens after it."""
    tree = drafter.propose([req], [limits])[0]
    req.tokens += came
    drafter.observe([Committed(req, len(req.tokens) - 1 - len(came), np.zeros((len(came), 1)))])
    return tree


@given(trees(), trees(), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 30), st.integers(0, 6))
def test_every_node_of_all_is_in_it_once_as_far_as_limits_allow(one, two, text, nodes, depth):
    scripted = [ScriptedDrafter(lambda r, t=t: t) for t in (one, two)]
    tree = step(GraftedDrafter([], scripted, always=True), request(text), [1], Limits(nodes=24, depth=12))
    assert paths(one) | paths(two) == paths(tree) and len(paths(tree)) == len(tree)
    drafter, req = GraftedDrafter([SuffixDrafter()], scripted, always=True), request(text)
    step(drafter, req, [1, 2])
    small = step(drafter, req, [1], Limits(nodes, depth))
    assert len(small) <= nodes and (not len(small) or small.depth.max() < depth)
    for t in (tree, small):
        assert (t.parent < np.arange(len(t))).all() and ((t.prob >= 0) & (t.prob <= 1)).all()
        inner = t.parent >= 0
        assert (t.prob[inner] <= t.prob[t.parent[inner]]).all()
        for above in {*t.parent.tolist()}:
            share = t.prob[t.parent == above].sum() / (t.prob[above] if above >= 0 else 1)
            assert share <= 1 + 1e-5 or t.prob[t.parent == above].sum() == 0


@given(trees())
def test_a_tree_as_a_guide_leads_where_the_tree_does(tree):
    guide = TreeGuide(tree)
    for n in range(len(tree)):
        at, path = -1, tree.token[tree.path(n)].tolist()
        for token in path:
            assert token in guide.children(at)
            at = guide.after(at, token)
        assert at == n
    assert guide.after(None, 1) is None and guide.children(None) == {}


def test_what_is_looked_up_goes_on_below_what_others_propose():
    text = [1, 2, 3, 4, 5, 6, 20, 21, 22]
    drafter = GraftedDrafter([SuffixDrafter()], [ScriptedDrafter(lambda r: Tree.of([3], [-1], [0.9]))], always=True)
    tree = drafter.propose([request(text)], [LIMITS])[0]
    assert (3, 4, 5, 6, 20) in paths(tree), "3 is the model's, what follows it is the text's"


def test_who_is_right_is_learned():
    right = ScriptedDrafter(lambda r: Tree.of([r.tokens[-1] % 7 + 1], [-1], [0.3]))
    wrong = ScriptedDrafter(lambda r: Tree.of([9], [-1], [0.9]))
    drafter, req = GraftedDrafter([], [wrong, right], always=True), request([1])
    assert step(drafter, req, [2]).token.tolist() == [9, 2]
    for _ in range(60):
        last = step(drafter, req, [req.tokens[-1] % 7 + 1])
    assert last.token[0] == req.tokens[-1] and last.prob[0] > 0.8 and last.prob[1] < 0.1
    assert len(drafter.propose([req], [Limits(nodes=5, depth=3, min_prob=0.1)])[0]) == 1


def test_who_said_what_can_be_read():
    drafter = GraftedDrafter([SuffixDrafter()], [ScriptedDrafter(lambda r: Tree.chain([7]))], always=True)
    req = request([1, 2, 1])
    drafter.propose([req], [LIMITS])
    said = {name: set(guide.children(at)) for name, (guide, at) in drafter.said(req).items()}
    assert said == {"suffix": {2}, "scripted": {7}} and drafter.said(request([1])) == {}


def test_unproposed_steps_ends_and_other_requests_confuse_nothing():
    drafter = GraftedDrafter([SuffixDrafter()], [NoDrafter()])
    first, second = request([1, 2, 1, 2]), request([5])
    drafter.observe([Committed(first, 0, np.zeros((3, 1)))])  # a prompt
    drafter.propose([first, second], [LIMITS] * 2)
    drafter.forget(second)  # ended in this step
    first.tokens.append(1)
    drafter.observe([Committed(first, 4, np.zeros((1, 1)))])
    first.tokens.append(2)
    drafter.observe([Committed(first, 5, np.zeros((1, 1)))])  # nobody proposed
    assert drafter.propose([first], [LIMITS])[0].token[0] == 1
    assert drafter.propose([], []) == []
    for r in (first, second, first):
        drafter.forget(r)
    assert not drafter._asked and not drafter._tokens


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(graft, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("right, takes, asked", [(True, 0.1, "always"), (True, 2.0, "seldom"), (False, 0.5, "seldom")])
def test_a_costly_drafter_is_asked_where_it_pays(monkeypatch, right, takes, asked):
    """A step takes 1 s and gives one token, two with a right draft; the drafter takes `takes`."""
    clock, calls = Clock(monkeypatch), []

    def script(r):
        calls.append(r)
        clock.now += takes
        return Tree.of([5 if right else 9], [-1], [0.9])

    drafter, req = GraftedDrafter([], [ScriptedDrafter(script)]), request([5])
    for _ in range(200):
        tree = drafter.propose([req], [LIMITS])[0]
        clock.now += 1.0
        came = [5, 5] if len(tree) and right else [5]
        req.tokens += came
        drafter.observe([Committed(req, 0, np.zeros((len(came), 1)))])
    assert len(calls) == 199 if asked == "always" else 1 < len(calls) < 60, "not before a step is timed; never for good"


def test_a_costly_drafter_is_not_asked_where_the_text_is_sure(monkeypatch):
    clock, calls = Clock(monkeypatch), []

    def script(r):
        calls.append(r)
        clock.now += 0.3
        return Tree.of([r.tokens[-4]], [-1], [0.9])

    drafter, req = GraftedDrafter([SuffixDrafter()], [ScriptedDrafter(script)]), request([1, 2, 3, 4] * 2)
    for _ in range(100):
        drafter.propose([req], [LIMITS])
        clock.now += 1.0
        req.tokens.append(req.tokens[-4])
        drafter.observe([Committed(req, 0, np.zeros((1, 1)))])
    assert len(calls) < 40 and not any(r is None for r in calls)
    told = len(calls)
    for _ in range(10):  # until the text turns new
        drafter.propose([req], [LIMITS])
        clock.now += 1.0
        req.tokens.append(100 + len(req.tokens))
        drafter.observe([Committed(req, 0, np.zeros((1, 1)))])
    assert len(calls) > told + 5
