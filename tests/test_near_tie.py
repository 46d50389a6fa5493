"""How far logits have to move for another token: against moving them, with every id kept and with ids cut away."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.near_tie import _kept, first_difference, gap, spread
from boleinfer.sampling import Sampler, SamplingParams


def sampler(**params):
    return Sampler(SamplingParams(**params), 7, 0, [1, 2], [], np.ones(6, bool))


def test_the_gap_of_a_greedy_token():
    logits = np.asarray([0, 3, 1, 2.5, 0, 0], np.float32)
    assert gap(logits, sampler(temperature=0), 1) == 0
    assert gap(logits, sampler(temperature=0), 3) == 0.5
    assert gap(logits, sampler(temperature=0, logit_bias={3: 1}), 1) == 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_moving_the_logits_by_half_the_gap_makes_it_the_token(temperature):
    s, rng = sampler(temperature=temperature), np.random.default_rng(0)
    for _ in range(50):
        logits = rng.normal(0, 2, 6)
        drawn = s.sample(logits)
        assert gap(logits, s, drawn) == 0
        for other in {drawn - 1, drawn + 1} & set(range(6)):
            d, sign = gap(logits, s, other) / 2, 1 if other < drawn else -1
            low = np.arange(6) <= min(drawn, other)  # ids below the boundary between the two
            for share, reached in ((1.001, True), (0.999, False)):
                moved = logits + sign * d * share * np.where(low, 1, -1)
                assert (s.sample(moved) != drawn) == reached


CUTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 6]),
        "top_p": st.sampled_from([0, 0.5, 0.9, 1]),
        "min_p": st.sampled_from([0, 0.2, 1]),
    }
)


@settings(max_examples=300)
@given(CUTS, st.integers(0, 10**6), st.floats(0, 0.3))
def test_no_smaller_move_gives_another_token(params, seed, size):
    """Whatever token comes out once every logit has moved by at most `size`, its gap is at most twice that."""
    s, rng = sampler(**params), np.random.default_rng(seed)
    logits = rng.normal(0, 2, 6)
    sets = [sorted(ids.tolist()) for _, ids in _kept(logits, s.params)]
    assert sets[0] == s.distribution(logits)[0].tolist() and gap(logits, s, s.sample(logits)) == 0
    moved = logits + rng.choice([-size, size], 6)
    if s.distribution(moved)[0].tolist() in sets:  # else two ids or more went or came
        assert gap(logits, s, s.sample(moved)) <= 2 * size + 1e-9


def test_a_token_is_let_in_when_the_cut_moves():
    logits = np.log([0.4, 0.35, 0.24, 0.01, 1e-9, 1e-9])
    u = 0.99  # of the ids that are kept, the last is drawn
    for params, token, least in (
        ({"top_k": 2}, 2, np.log(0.35 / 0.24)),
        ({"min_p": 0.65}, 2, np.log(0.65 * 0.4 / 0.24)),
        ({"top_p": 0.745}, 2, np.log(0.75 / 0.25) - np.log(0.745 / 0.255)),
    ):
        s = sampler(**params)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("boleinfer.near_tie.uniform", lambda *_: u)
            np.testing.assert_allclose(gap(logits, s, token), least, rtol=1e-6)
            assert gap(logits, s, 4) == np.inf


def test_first_difference_and_spread():
    assert first_difference([1, 2], [1, 2, 3]) is None and first_difference([1, 2], [1, 3]) == 1
    assert spread(np.asarray([1.0, 3.0, -np.inf])) == 1
