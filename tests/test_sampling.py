"""Random numbers, the processed distribution against a slow definition, broken rows, and the walk over trees."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from boleinfer.forest import Tree
from boleinfer.sampling import BrokenLogits, Sampler, SamplingParams, TokenHistory, accept, new_seed, philox, uniform
from tests.exact import slow_distribution

QUICK = settings(max_examples=150)


def make(vocab=8, prompt=(1, 2, 2), ends=(0,), allowed=None, seed=7, choice=0, **params):
    allowed = np.ones(vocab, bool) if allowed is None else allowed
    return Sampler(SamplingParams(**params), seed, choice, prompt, ends, allowed)


# --- random numbers ---------------------------------------------------------------------------------------------------

KNOWN = [  # counter, key, answer: the rows "philox4x32 10" of Random123's kat_vectors
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_known_answers():
    for counter, key, answer in KNOWN:
        assert philox(counter, key) == answer
    for word in range(4):  # the same in arrays; the keys differ, so one key at a time
        for counter, key, answer in KNOWN:
            arrays = tuple(np.full(3, c, np.uint64) for c in counter)
            assert philox(arrays, key)[word].tolist() == [answer[word]] * 3


def test_uniform_of_an_array_is_uniform_of_each():
    position = np.asarray([[0, 1, 2**31], [2**32 - 1, 2**32, 2**40 + 5]])
    for seed in (0, -1, 2**63 - 1, -(2**63), 12345):
        numbers = uniform(seed, 3, position)
        assert numbers.shape == (2, 3) and numbers.dtype == np.float64
        assert numbers.tolist() == [[uniform(seed, 3, int(p)) for p in row] for row in position]
        assert len(set(numbers.ravel().tolist())) == 6


def test_uniform_is_uniform_and_independent_of_its_neighbours():
    position = np.arange(40_000)
    u = uniform(1, 0, position)
    assert u.min() >= 0 and u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-3
    for seed, choice, shift in ((1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 2**32), (1 + 2**32, 0, 0)):
        other = uniform(seed, choice, position + shift)
        table, *_ = np.histogram2d(u, other, bins=10, range=((0, 1), (0, 1)))
        assert chisquare(table.ravel()).pvalue > 1e-3


def test_f53_every_seed_is_its_own_stream_and_repeats():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 42]
    streams = {seed: tuple(uniform(seed, 0, np.arange(20)).tolist()) for seed in seeds}
    assert len(set(streams.values())) == len(seeds)
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5)  # the low 64 bits
    logits = np.zeros(50, np.float32)

    def answer(seed, choice):
        sampler = make(vocab=50, seed=seed, choice=choice)
        for _ in range(10):
            sampler.history.append(sampler.sample(logits))
        return [int(i) for i in sampler.history.after(())[0]]

    assert answer(42, 0) == answer(42, 0) != answer(42, 1) != answer(43, 1)
    assert len({new_seed() for _ in range(100)}) == 100 and all(0 <= new_seed() < 2**63 for _ in range(100))


# --- the distribution -------------------------------------------------------------------------------------------------


VALUES = {
    "temperature": [0, 0.3, 1.0, 2.5],
    "top_k": [0, -1, 1, 2, 5, 100],
    "top_p": [0, 1e-9, 0.31, 0.83, 1],
    "min_p": [0, 0.05, 0.4, 1],
    "repetition_penalty": [1, 1.3, 0.7],
    "presence_penalty": [0, 1.5, -0.5],
    "frequency_penalty": [0, 0.6, -0.4],
    "logit_bias": [None, {0: -100, 3: 2.5}],
    "min_tokens": [0, 4],
    "stop_token_ids": [(), (4, 5)],
    "ignore_eos": [False, True],
}
some_params = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})


@settings(QUICK, max_examples=400)
@given(some_params, st.integers(0, 10**6), st.sampled_from([6, 30, 3000]), st.booleans())
def test_distribution_equals_the_slow_definition(params, seed, vocab, coarse):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(vocab)).astype(np.float32)
    if coarse:  # many exact ties
        logits = np.round(logits)
    logits[rng.random(vocab) < 0.1] = -np.inf
    logits[2] = 1.0
    allowed = rng.random(vocab) < 0.9
    allowed[2] = True
    prompt, output = rng.integers(0, vocab, 5).tolist(), rng.integers(0, vocab, rng.integers(0, 7)).tolist()
    cut = rng.integers(0, len(output) + 1)
    sampler = make(vocab, prompt, (0, 1), allowed, **params)
    for token in output[:cut]:
        sampler.history.append(token)
    ids, p = sampler.distribution(logits, output[cut:])
    expected = slow_distribution(sampler.params, logits, prompt, output, (0, 1), allowed)
    near_edge = {i for i in set(ids.tolist()) ^ set(expected) if max(expected.get(i, 0), p[ids == i].sum()) > 1e-12}
    if near_edge:  # the sums may round to either side of top_p
        assert 0 < params["top_p"] < 1 and len(near_edge) == 1
        return
    assert (np.diff(ids) > 0).all()
    np.testing.assert_allclose(p.sum(), 1)
    np.testing.assert_allclose(p, [expected.get(i, 0) for i in ids.tolist()], rtol=1e-9, atol=1e-12)
    assert sampler.sample(logits, output[cut:]) in expected


@QUICK
@given(st.integers(0, 10**6), st.integers(1, 2000), st.sampled_from([600, 2500, 20_000]))
def test_top_k_keeps_the_k_largest_with_the_lowest_ids(seed, k, vocab):
    logits = np.random.default_rng(seed).integers(-4, 5, vocab).astype(np.float32)
    ids, _ = make(vocab, top_k=k).distribution(logits)
    expected = sorted(range(vocab), key=lambda i: (-logits[i], i))[:k]
    assert ids.tolist() == sorted(expected)


def test_the_drawn_tokens_follow_the_distribution():
    logits = np.asarray([0.3, -1, 2, 0, 1.1, -0.4, 0.9, 1.3], np.float32)
    for params in ({}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 2},
                   {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {3: 1.5}}):  # fmt: skip
        sampler = make(**params)
        sampler.history.append(4)
        ids, p = sampler.distribution(logits)
        drawn = np.zeros(8)
        for sampler.history.length in range(6000):  # each position has its own random number
            drawn[sampler.sample(logits)] += 1
        assert drawn.sum() == drawn[ids].sum()
        assert chisquare(drawn[ids], 6000 * p).pvalue > 1e-3


def test_the_random_number_picks_by_rising_id(monkeypatch):
    sampler = make(vocab=4, temperature=1)
    logits = np.log(np.asarray([0.1, 0.2, 0.3, 0.4]))
    for u, token in ((0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.6001, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr("boleinfer.sampling.uniform", lambda *_, u=u: u)
        assert sampler.sample(logits) == token


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    logits = np.asarray([-np.inf, -1e30, 0, 1, -np.inf, -2e3], np.float32)
    for u in (0.0, 1 - 2**-53, 1.0):  # 1.0: a product that was rounded up
        monkeypatch.setattr("boleinfer.sampling.uniform", lambda *_, u=u: u)
        assert make(vocab=6).sample(logits) == (2 if u == 0 else 3)


# --- limits and broken rows -------------------------------------------------------------------------------------------


def test_f36_temperature_zero_and_tiny_take_the_likeliest_lowest_id_on_ties():
    logits = np.asarray([1, 5, 0, 5, 5], np.float32)
    for temperature in (0, 1e-6, 1e-45, 5e-324):
        assert make(5, temperature=temperature).sample(logits) == 1
        assert make(5, temperature=temperature).sample(np.zeros(5, np.float32)) == 0
        assert make(5, temperature=temperature, logit_bias={1: -1}).sample(logits) == 3
    huge = np.asarray([-3e38, 3e38, 3.1e38, 0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert {make(4, temperature=t).sample(huge) for t in (1e-5, 1e-3, 1, 1e3)} == {2}
        assert make(4, temperature=1e308).distribution(huge)[1].tolist() == [0.25] * 4


def test_f36_limits_of_top_k_top_p_and_min_p():
    logits = np.asarray([0.5, 2, 1, 1.9], np.float32)

    def ids(**params):
        return make(4, **params).distribution(logits)[0].tolist()

    for k in (0, -1, 4, 5, 10**9):
        assert ids(top_k=k) == [0, 1, 2, 3]
    assert ids(top_k=1) == [1]
    assert ids(top_p=1) == [0, 1, 2, 3] and ids(top_p=1.0, temperature=0.01) == [0, 1, 2, 3]
    assert ids(top_p=0) == ids(top_p=1e-9) == ids(min_p=1) == [1]
    assert ids(min_p=0) == [0, 1, 2, 3]
    equal = np.zeros(4, np.float32)
    assert make(4, top_k=2).distribution(equal)[0].tolist() == [0, 1]
    assert make(4, top_p=0.5).distribution(equal)[0].tolist() == [0, 1]
    assert make(4, min_p=1).distribution(equal)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_f36_broken_logits_are_named_and_never_repaired(params):
    sound = np.linspace(-1, 1, 8).astype(np.float32)
    for place, value, word in ((3, np.nan, "NaN"), (3, np.inf, "infinite"), (slice(None), -np.inf, "no token"),
                               (slice(None), np.nan, "NaN")):  # fmt: skip
        logits = sound.copy()
        logits[place] = value
        sampler = make(**params)
        with pytest.raises(BrokenLogits, match=word):
            sampler.sample(logits)
        assert 0 <= sampler.sample(sound) < 8  # the next row is served as before


def test_nothing_left_to_draw_is_an_error_not_a_crash():
    with pytest.raises(BrokenLogits, match="no token"):
        make(2, ends=(0, 1), min_tokens=1).sample(np.zeros(2, np.float32))


def test_f46_padded_rows_are_never_drawn_and_sparse_legal_ids_stay_reachable():
    allowed = np.arange(512) < 480
    allowed[500] = True
    logits = np.zeros(512, np.float32)
    logits[490], logits[500] = 50, 20
    for params in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.1}, {}):
        assert make(512, allowed=allowed, **params).sample(logits) == 500
    biased = make(512, allowed=allowed, logit_bias={490: 1e6, 500: -40, 7: 30}, temperature=0)
    assert biased.sample(logits) == 7
    entries = make(512, allowed=allowed, logprobs=3).logprobs(logits, 500)
    assert list(entries) == [500, 0, 1]
    logits[511] = np.nan  # a padded row holds anything
    assert make(512, allowed=allowed).sample(logits) == 500
    for field in ({"logit_bias": {512: 1.0}}, {"stop_token_ids": [512]}):
        with pytest.raises(ValueError, match=rf"{next(iter(field))} names token id 512; the vocabulary is 0 \.\. 511"):
            make(512, **field)


# --- history and log-probabilities ------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 99), max_size=60), st.lists(st.integers(0, 99)))
def test_history_counts_what_came_out(prompt, output, path):
    history = TokenHistory(prompt)
    for token in output:
        history.append(token)
    before = [a.tolist() for a in history.after(())]
    ids, count = history.after(path)
    assert len(set(ids.tolist())) == len(ids)
    assert {i: c for i, c in zip(ids.tolist(), count.tolist()) if c} == dict(Counter(output + path))
    assert set(ids.tolist()) == set(prompt + output + path)
    assert [a.tolist() for a in history.after(())] == before  # asking changes nothing
    assert (history.length, history.generated) == (len(prompt) + len(output), len(output))


def test_logprobs_are_the_models_own_in_order():
    logits = np.asarray([1, 3, 3, -2, 0], np.float32)
    own = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    sampler = make(5, logprobs=3, temperature=0.1, logit_bias={3: 50}, presence_penalty=2.0)
    entries = sampler.logprobs(logits, 3)
    assert list(entries) == [3, 1, 2, 0]
    np.testing.assert_allclose(list(entries.values()), own[[3, 1, 2, 0]], rtol=1e-6)
    assert list(sampler.logprobs(logits, 2)) == [2, 1, 0]  # no id twice
    assert list(make(5, logprobs=0).logprobs(logits, 4)) == [4]
    assert make(5).logprobs(logits, 4) is None
    assert len(make(5, logprobs=99).logprobs(logits, 4)) == 5
    assert make(2, logprobs=1).logprobs(np.asarray([-np.inf, 0], np.float32), 1) == {1: 0.0}
    assert all(v < 0 for v in entries.values())


# --- the walk over trees ----------------------------------------------------------------------------------------------


class Model:
    """A language model without weights: the logits are random numbers seeded by the tokens before."""

    def __init__(self, seed, vocab=6, scale=2.0, broken_after=None):
        self.seed, self.vocab, self.scale, self.broken_after = seed, vocab, scale, broken_after

    def __call__(self, tokens):
        if len(tokens) == self.broken_after:
            return np.full(self.vocab, np.nan, np.float32)
        rng = np.random.default_rng([self.seed, len(tokens), *tokens[-3:]])
        return (self.scale * rng.standard_normal(self.vocab)).astype(np.float32)


def plain(model, sampler, prompt, length):
    """Token by token, with the history alone."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(sampler.sample(model(tokens)))
        sampler.history.append(tokens[-1])
    return tokens


def random_tree(rng, tokens, truth, vocab, N):
    """A tree of about N nodes: the last token, then known-right and random children, equal siblings joined."""
    token, parent, right = [tokens[-1]], [-1], [0]  # right[i]: the node that ends the first i right tokens
    places = {}
    for _ in range(N - 1):
        node = right[-1] if rng.random() < 0.5 else int(rng.integers(0, len(token)))
        on_truth = node in right and len(tokens) + right.index(node) < len(truth)
        guess = (
            truth[len(tokens) + right.index(node)] if on_truth and rng.random() < 0.6 else int(rng.integers(0, vocab))
        )
        if (node, guess) in places:
            continue
        places[node, guess] = len(token)
        if on_truth and guess == truth[len(tokens) + right.index(node)] and node == right[-1]:
            right.append(len(token))
        token.append(guess)
        parent.append(node)
    return Tree.of(token, parent)


def with_trees(model, sampler, prompt, length, truth, rng, accepted=None):
    """As `plain`, a random tree a step; asks for the logits of walked nodes alone."""
    tokens = list(prompt)
    while len(tokens) < length:
        tree = random_tree(rng, tokens, truth, model.vocab, int(rng.integers(1, 12)))
        asked = []

        def logits(node, tree=tree, asked=asked, tokens=tuple(tokens)):
            asked.append(node)
            return model([*tokens, *tree.token[tree.path(node)[1:]].tolist()])

        nodes, new = accept(tree, logits, sampler)
        assert len(nodes) == len(new) and nodes[0] == 0 and nodes.dtype == np.int32
        assert (tree.parent[nodes[1:]] == nodes[:-1]).all() and tree.token[nodes[1:]].tolist() == new[:-1]
        assert asked[: len(nodes)] == nodes.tolist() and len(asked) <= len(nodes) + 1
        if accepted is not None:
            accepted.append((len(nodes) - 1, int(tree.depth.max())))
        for token in new:
            sampler.history.append(token)
        tokens += new
    return tokens[:length]


def check_same(params, seed, length=20, prompt=(1, 2, 2), ends=(0,), accepted=None):
    rng, model = np.random.default_rng(seed), Model(seed)
    allowed = np.arange(model.vocab) != 5
    truth = plain(model, make(6, prompt, ends, allowed, seed, **params), prompt, length)
    drafted = with_trees(model, make(6, prompt, ends, allowed, seed, **params), prompt, length, truth, rng, accepted)
    assert drafted == truth


def test_a_walk_writes_the_plain_text_for_every_pair_of_parameters():
    accepted: list[tuple[int, int]] = []
    options = {name: [v for v in values if v != getattr(SamplingParams(), name)] for name, values in VALUES.items()}
    options["logit_bias"] = [{1: -3.0, 3: 2.5}]
    options["stop_token_ids"] = [(2, 4)]
    options["min_tokens"] = [9]
    for number, (a, b) in enumerate(itertools.combinations(options, 2)):
        for i in range(3):
            values = {a: options[a][i % len(options[a])], b: options[b][(i + number) % len(options[b])]}
            check_same(values, 1000 * number + i, accepted=accepted)
    kinds = {"none" if not n else "full" if n == depth else "partial" for n, depth in accepted if depth}
    assert kinds == {"none", "partial", "full"}  # else nothing was tested
    assert max(n for n, _ in accepted) >= 4


@settings(QUICK, max_examples=100)
@given(some_params, st.integers(0, 10**6))
def test_a_walk_writes_the_plain_text_for_any_parameters(params, seed):
    check_same({**params, "stop_token_ids": (), "logit_bias": {3: 1.0}}, seed)


def test_walks_draw_from_the_exact_distribution():
    """Two tokens after the prompt, drawn through random trees with 5000 seeds, against their exact probabilities."""
    model, prompt, rng = Model(3, vocab=4, scale=1.0), [1, 2], np.random.default_rng(0)
    params = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5}
    expected = np.zeros((4, 4))
    first = make(4, prompt, **params)
    for a, pa in zip(*first.distribution(model(prompt))):
        for b, pb in zip(*first.distribution(model([*prompt, int(a)]), [int(a)])):
            expected[a, b] = pa * pb
    drawn = np.zeros((4, 4))
    for seed in range(5000):
        a, b = with_trees(model, make(4, prompt, seed=seed, **params), prompt, 4, [*prompt, 0, 1], rng)[2:]
        drawn[a, b] += 1
    possible = expected > 0
    assert drawn[~possible].sum() == 0 and possible.sum() > 6
    assert chisquare(drawn[possible], 5000 * expected[possible]).pvalue > 1e-3


def test_a_walk_begins_at_the_last_known_token():
    """The chain may first read known tokens: nothing is drawn at them."""
    logits = np.full((5, 6), -9.0, np.float32)
    for node, token in ((0, 5), (1, 5), (2, 3), (3, 1), (4, 2)):
        logits[node, token] = 9
    tree = Tree.chain([4, 4, 2, 3, 1])
    nodes, tokens = accept(tree, logits, make(6, [4, 4, 2], temperature=0), root=2)
    assert nodes.tolist() == [2, 3, 4] and tokens == [3, 1, 2]


def test_f36_a_broken_row_below_the_root_ends_the_walk_there_and_fails_as_plain_decoding_does():
    prompt = (1, 2, 2)
    model = Model(5, broken_after=9)
    truth = plain(model, make(6, prompt), prompt, 9)
    for seed in range(20):
        sampler, rng, tokens = make(6, prompt), np.random.default_rng(seed), list(prompt)
        with pytest.raises(BrokenLogits):
            while True:
                tree = random_tree(rng, tokens, [*truth, 0, 0], 6, 12)
                rows = [model(tokens + tree.token[tree.path(n)[1:]].tolist()) for n in range(len(tree))]
                nodes, new = accept(tree, np.asarray(rows), sampler)
                assert len(nodes) == len(new)
                for token in new:
                    sampler.history.append(token)
                tokens += new
        assert tokens == truth
