"""Looking up what followed: counts against counting by hand, trees that are valid, memory that is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.draft.base import Limits
from boleinfer.draft.suffix import DOUBT, LONGEST, ORDERS, WIDEST, EarlierDrafter, Run, SuffixDrafter, SuffixTrie
from boleinfer.sampling import SamplingParams
from tests.running import request_of

LIMITS = Limits(nodes=20, depth=6)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def propose(tokens: list[int], limits: Limits = LIMITS):
    return SuffixDrafter().propose([request_of(tokens, SamplingParams())], [limits])[0]


def entries(trie: SuffixTrie) -> int:
    """What the trie holds in all."""

    def below(run: Run) -> int:
        return sum(1 + (0 if isinstance(n, int) else below(n)) for n in run.next.values())

    return below(trie._root)


def by_hand(tokens: list[int]) -> dict[int, float]:
    """The definition of `children` at the end of a text, by counting."""
    followers = []  # of the last 1, 2, ... tokens: what came after them, in order
    for n in range(1, LONGEST + 1):
        end = tokens[len(tokens) - n :] if n <= len(tokens) else None
        places = [i for i in range(n, len(tokens)) if tokens[i - n : i] == end]
        if not places:
            break
        followers.append([tokens[i] for i in places])
    considered = followers[-ORDERS:]
    named: dict[int, float] = {}
    for came in reversed(considered):
        latest = list(dict.fromkeys(reversed(came)))[:WIDEST]
        named |= dict.fromkeys(t for t in latest if t not in named)
        if len(named) >= WIDEST:
            break
    prob = dict.fromkeys(named, 0.0)
    for came in considered:
        prob = {t: (came.count(t) + DOUBT * p) / (len(came) + DOUBT) for t, p in prob.items()}
    return prob


@given(TEXTS)
def test_children_are_what_counting_gives(tokens):
    trie = SuffixTrie()
    for cut in range(0, len(tokens), 7):  # however the text arrives
        trie.extend(tokens[cut : cut + 7])
    want = {t: p for t, p in by_hand(tokens).items() if p >= 0.02}
    assert trie.children(trie.ending) == pytest.approx(want)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=5))
def test_a_path_is_read_as_if_it_had_been_written(tokens, path):
    """The runs that a path ends with are those of the text: the path itself is no text yet."""
    trie = SuffixTrie()
    trie.extend(tokens)
    at = trie.ending
    for token in path:
        at = trie.after(at, token)
    whole = [*tokens, *path]
    lengths = [n for n in range(1, LONGEST + 1) if n <= len(whole) and _stands(tokens, whole[len(whole) - n :])]
    if path:
        assert len(at) == len(lengths)
    for run, n in zip(at, lengths):
        if isinstance(run, int):
            assert tokens[run + 1 - n : run + 1] == whole[len(whole) - n :]
        else:
            assert run.count == sum(tokens[i : i + n] == whole[len(whole) - n :] for i in range(len(tokens)))


def _stands(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))


@given(TEXTS, st.integers(0, 5), st.integers(0, 8), st.sampled_from([0.0, 0.1, 0.5]))
def test_trees_are_valid_and_within_their_limits(tokens, depth, nodes, least):
    tree = propose(tokens, Limits(nodes=nodes, depth=depth, min_prob=least))
    assert len(tree) <= nodes and (not len(tree) or tree.depth.max() < depth)
    assert ((tree.prob > 0) & (tree.prob <= 1)).all() and (tree.prob >= np.float32(least)).all()
    inner = tree.parent >= 0
    assert (tree.parent < np.arange(len(tree))).all()
    assert (tree.prob[inner] <= tree.prob[tree.parent[inner]]).all()
    assert (np.diff(tree.prob) <= 0).all(), "the likeliest come first"
    assert len({*zip(tree.parent.tolist(), tree.token.tolist())}) == len(tree), "siblings differ"
    assert set(tree.token.tolist()) <= set(tokens)


def test_continues_a_repetition():
    tree = propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert tree.token[:6].tolist() == [4, 5, 6, 7, 8, 1] and tree.parent[:6].tolist() == [-1, 0, 1, 2, 3, 4]


def test_several_continuations_make_a_tree():
    tree = propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 5, 1, 2])
    assert set(tree.token[tree.parent == -1].tolist()) == {3, 4}
    after = tree.token[np.isin(tree.parent, np.flatnonzero((tree.parent == -1) & (tree.token == 3)))]
    assert set(after.tolist()) == {9, 5}


def test_longer_matches_and_larger_counts_are_trusted_more():
    tokens = [7, 8, 9, 1, 2, 3, *range(20, 30), 5, 1, 2, 4, *range(40, 50), 7, 8, 9, 1, 2]
    prob = {int(t): float(p) for t, p, above in zip(*_parts(propose(tokens))) if above == -1}
    assert prob[3] > prob[4]
    often = [1, 2, 3, *range(20, 25), 1, 2, 3, *range(30, 35), 1, 2, 4, *range(40, 45), 1, 2]
    prob = {int(t): float(p) for t, p, above in zip(*_parts(propose(often))) if above == -1}
    assert prob[3] > prob[4]


def _parts(tree):
    return tree.token, tree.prob, tree.parent


@pytest.mark.parametrize("period", [1, 3, 50, 10**9])
def test_memory_a_token_is_bounded(period):
    rng = np.random.default_rng(0)
    text = [int(t) for t in (np.arange(4000) if period > 4000 else np.tile(rng.integers(0, 99, period), 4000))[:4000]]
    trie = SuffixTrie()
    trie.extend(text[:2000])
    half = entries(trie)
    trie.extend(text[2000:])
    assert entries(trie) - half <= 2000 * (LONGEST + 1)
    if period <= 50:
        assert entries(trie) == half <= (LONGEST + 2) * period, "a repetition adds nothing"
    if period > 4000:
        assert entries(trie) == 4000, "a token that repeats nothing adds one entry"


def test_an_ended_request_is_forgotten():
    drafter, request = SuffixDrafter(), request_of([1, 2, 3], SamplingParams())
    drafter.propose([request], [LIMITS])
    drafter.forget(request)
    drafter.forget(request)
    assert not drafter._tries


def test_earlier_answers_are_looked_up_and_do_not_run_into_each_other():
    drafter = EarlierDrafter(1000)
    for prompt, answer in (([50, 51], [1, 2, 3]), ([60], [4, 5, 6])):
        request = request_of(prompt, SamplingParams())
        request.tokens += answer
        drafter.propose([request], [LIMITS])
        drafter.forget(request)
    for text, following in (([9, 51], [1, 2, 3]), ([9, 60, 4], [5, 6]), ([2, 3], []), ([77], []), ([2], [3])):
        tree = drafter.propose([request_of(text, SamplingParams())], [LIMITS])[0]
        assert tree.token.tolist() == following and tree.is_chain


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), max_size=12), st.integers(1, 60))
def test_of_earlier_answers_only_so_much_is_kept(answers, most):
    drafter = EarlierDrafter(most)
    for answer in answers:
        request = request_of([7], SamplingParams())
        waiting = request_of([7, *answer[:2]], SamplingParams())
        drafter.propose([waiting], [LIMITS])  # its place is still good after what it refers to was dropped
        request.tokens += answer
        drafter.forget(request)
        assert len(drafter._trie.text) <= most + max(most // 2, 1) + 1
        tree = drafter.propose([waiting], [LIMITS])[0]
        assert (tree.token >= 0).all()
        drafter.forget(waiting)
