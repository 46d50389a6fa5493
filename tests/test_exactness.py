"""What comes out of the engine, counted: every drafter against the exact probability of every text.

The model has no weights (tests/exact.py), so all texts of N tokens can be enumerated; the engine, its scheduler, its
drafters, the acceptance walk and the commits are the real ones. Seeds are fixed, so no result changes by chance. The
p-values of a right walk are spread over 0 .. 1, the smallest of some 80 near 1e-2; a mistake gives one far below LEAST.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from boleinfer import sampling
from boleinfer.draft import NAMES
from boleinfer.draft.base import Limits
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.forest import Tree
from boleinfer.request import Request
from boleinfer.sampling import SamplingParams, TokenHistory
from tests.exact import VOCAB, TokenModel, p_value, plain, request, texts
from tests.running import engine_of, finish

LEAST = 1e-4  # p-value
SEEDS = 500  # texts drawn for each choice of parameters
N = 4  # tokens of a text: the prompt's step gives the first, a draft up to three more
PROMPT = [1] * 5  # penalties meet it and find the other ids new; looking up finds something
MODEL = TokenModel(seed=1)

VALUES = {
    "temperature": 1.7,
    "top_k": 3,
    "top_p": 0.8,
    "min_p": 0.15,
    "repetition_penalty": 1.8,
    "presence_penalty": 1.0,
    "frequency_penalty": -0.7,
    "logit_bias": {1: -1.0, 2: 1.5, 3: 9.0},  # 3 is no token
    "min_tokens": 2,
    "stop_token_ids": (4,),
    "ignore_eos": True,
}
CHOICES = [{name: VALUES[name] for name in names} for n in range(3) for names in itertools.combinations(VALUES, n)]


# ---- drafters: each is told the request and what plain decoding will say ---------------------------------------------


def oracle(made: Request, right: Sequence[int]) -> Tree:
    """The truth, as a chain."""
    return Tree.chain(right[:3])


def adversary(made: Request, right: Sequence[int]) -> Tree:
    """Everything but the truth, two levels of it."""
    wrong = [t for t in range(VOCAB) if t not in right[:1]]
    return Tree.of(wrong + list(range(VOCAB)) * len(wrong), [-1] * len(wrong) + _each(range(len(wrong)), VOCAB))


def everything(made: Request, right: Sequence[int]) -> Tree:
    """Every text of two tokens: both are always accepted."""
    return Tree.of(list(range(VOCAB)) * (1 + VOCAB), [-1] * VOCAB + _each(range(VOCAB), VOCAB))


def likely(made: Request, right: Sequence[int]) -> Tree:
    """The two likeliest tokens after each node, three deep."""
    token: list[int] = []
    text = {-1: made.tokens}
    for node in range(-1, 6):
        for t in np.argsort(-MODEL.after(text[node]), kind="stable")[:2].tolist():
            text[len(token)] = [*text[node], t]
            token.append(t)
    return Tree.of(token, [-1, -1, *_each(range(6), 2)])


def partial(made: Request, right: Sequence[int]) -> Tree:
    """The truth where it is an even id, a lie where it is odd: the drawn token decides whether it was drafted."""
    return Tree.chain([t if t % 2 == 0 else (t + 1) % VOCAB for t in right[:3]])


def _each(values: Sequence[int], times: int) -> list[int]:
    return [v for v in values for _ in range(times)]


SCRIPTS = {script.__name__: script for script in (oracle, adversary, everything, likely, partial)}
DRAFTS = [*SCRIPTS, *(name for name in NAMES if name != "mtp")]


def drawn(
    params: SamplingParams, draft: str, answers: dict[int, list[int]], max_batch: int = 8, max_rows: int = 512
) -> list[Request]:
    """A finished request for each seed. answers: plain decoding's, by seed"""

    def script(made: Request) -> Tree:
        return SCRIPTS[draft](made, answers[made.sampler.seed][len(made.generated) :])

    requests = [request(PROMPT, params, seed, N) for seed in answers]
    limits = Limits(nodes=40, depth=5)
    drafter = ScriptedDrafter(script) if draft in SCRIPTS else draft
    finish(engine_of(MODEL, drafter, max_batch, max_rows, max_rows, limits, limit=len(PROMPT) + N), requests)
    return requests


def answers_of(params: SamplingParams, number: int = 0) -> dict[int, list[int]]:
    """Plain decoding's, by seed; each number has SEEDS seeds of its own."""
    seeds = range(number * SEEDS, (number + 1) * SEEDS)
    return {seed: plain(MODEL, request(PROMPT, params, seed, N)) for seed in seeds}


# ---- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_every_text_comes_with_its_probability(number):
    """All parameters alone and in pairs, the drafters in turn."""
    params, draft = SamplingParams(**CHOICES[number]), DRAFTS[number % len(DRAFTS)]
    expected, answers = texts(MODEL, PROMPT, params, N), answers_of(params, number)
    np.testing.assert_allclose(sum(expected.values()), 1)
    got = [made.generated for made in drawn(params, draft, answers)]
    assert p_value(got, expected) > LEAST, f"{CHOICES[number]} with {draft}"
    assert got == list(answers.values())  # and every seed gives plain decoding's text


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_drafter_with_all_parameters_together(draft):
    params = SamplingParams(**VALUES | {"ignore_eos": False, "top_k": 4, "min_p": 0.02})
    answers = answers_of(params)
    requests = drawn(params, draft, answers)
    assert p_value([made.generated for made in requests], texts(MODEL, PROMPT, params, N)) > LEAST
    accepted, depth = (
        sum(r.stats.accepted for r in requests),
        {n for r in requests for n, k in enumerate(r.stats.histogram) if k},
    )
    assert draft != "adversary" or accepted == 0
    assert draft not in ("oracle", "everything") or 2 in depth
    assert draft not in ("likely", "partial") or depth >= {0, 1, 2}


def credulous(tree, logits, sampler, root=0):
    """A walk that is wrong: it takes a drafted token where the model gives it at least half the chance of its own."""
    nodes, tokens = sampling.accept(tree, logits, sampler, root)
    guesses = tree.token[tree.parent == root].tolist()
    p = dict(zip(*sampler.distribution(logits(root))))
    if len(tokens) == 1 and guesses and p.get(guesses[0], 0) >= p[tokens[0]] / 2:
        return nodes, guesses[:1]
    return nodes, tokens


@pytest.mark.parametrize("draft", ["likely", "oracle", "adversary"])
def test_a_walk_that_is_wrong_is_found(draft, monkeypatch):
    """The count has the power to see what a plausible mistake does, but where the drafts are always right."""
    monkeypatch.setattr("boleinfer.executor.accept", credulous)
    params = SamplingParams()
    got = [made.generated for made in drawn(params, draft, answers_of(params))]
    p = p_value(got, texts(MODEL, PROMPT, params, N))
    assert p > LEAST if draft == "oracle" else p < 1e-12


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_that_forgets_the_path_is_found(name, monkeypatch):
    """Within one step, the tokens of the path so far count."""
    after = TokenHistory.after
    params = SamplingParams(**{name: 3 * VALUES[name]})
    answers = answers_of(params)
    monkeypatch.setattr(TokenHistory, "after", lambda self, path: after(self, ()))
    got = [made.generated for made in drawn(params, "everything", answers)]
    assert p_value(got, texts(MODEL, PROMPT, params, N)) < 1e-6 and got != list(answers.values())


# ---- the seed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch,max_rows", [(1, 512), (3, 45), (8, 512), (5, 9)])
@pytest.mark.parametrize("draft", ["none", *DRAFTS])
def test_a_seed_gives_one_text_and_its_logprobs_in_any_company(draft, max_batch, max_rows):
    """Alone and in batches, with too few rows for prompts or drafts; logprobs are plain decoding's to the bit."""
    mixed = [SamplingParams(**choice, logprobs=i % 3) for i, choice in enumerate(CHOICES)]
    alone = [request(PROMPT, params, seed, N) for seed, params in enumerate(mixed)]
    answers = dict(enumerate(plain(MODEL, made) for made in alone))

    def script(made: Request) -> Tree:
        return SCRIPTS[draft](made, answers[made.sampler.seed][len(made.generated) :])

    requests = [request(PROMPT, params, seed, N) for seed, params in enumerate(mixed)]
    drafter = ScriptedDrafter(script) if draft in SCRIPTS else draft
    limits = Limits(nodes=40, depth=5)
    finish(engine_of(MODEL, drafter, max_batch, max_rows, max_rows, limits, limit=len(PROMPT) + N), requests)
    for want, got in zip(alone, requests):
        assert (got.generated, got.finish_reason, got.stop_reason) == (
            want.generated,
            want.finish_reason,
            want.stop_reason,
        )
        assert [list(entry.items()) for entry in got.logprobs] == [list(entry.items()) for entry in want.logprobs]
