"""Votes on tokens become the rates at which tokens come, whoever is for, against, silent or not asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.draft.calibration import Calibration

SAID = st.lists(
    st.none()
    | st.dictionaries(st.integers(0, 5), st.floats(0, 1), max_size=4).map(
        lambda d: {t: p / max(1.0, sum(d.values())) for t, p in d.items()}
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(st.tuples(SAID, st.integers(0, 5)), min_size=1, max_size=20))
def test_probabilities_are_probabilities_whatever_was_said_and_came(sightings):
    calibration = Calibration()
    for said, came in sightings:
        votes = calibration.votes(said)
        assert set(votes) == {t for s in said if s for t in s}
        prob = calibration.likely(votes)
        assert all(0 < p < 1 + 1e-9 for p in prob.values()) and sum(prob.values()) <= 1 + 1e-9
        for token, vote in votes.items():
            calibration.learn(vote, token == came)


def test_a_patterns_letters_say_who_said_what():
    votes = Calibration().votes([{1: 0.5, 2: 0.3}, {1: 0.9}, {}, None])
    assert {token: pattern for token, (pattern, _) in votes.items()} == {1: "ffs-", 2: "fas-"}
    assert votes[1][1] == pytest.approx([0, np.log(9), 0, 0])
    assert votes[2][1] == pytest.approx([np.log(0.3 / 0.7), np.log(0.1 / 0.9), 0, 0])


def test_one_voice_is_believed_at_first():
    prob = Calibration().likely(Calibration().votes([{1: 0.7, 2: 0.1}]))
    assert prob == pytest.approx({1: 0.7, 2: 0.1})


@pytest.mark.parametrize("claimed, true", [(0.9, 0.3), (0.3, 0.9), (0.99, 0.9), (0.02, 0.5)])
def test_a_bragger_is_found_out(claimed, true):
    rng, calibration = np.random.default_rng(0), Calibration()
    votes = calibration.votes([{1: claimed}])
    for _ in range(1000):
        calibration.learn(votes[1], bool(rng.random() < true))
    assert calibration.likely(votes)[1] == pytest.approx(true, abs=0.12)


def test_agreement_and_dissent_are_learned_apart():
    """Two drafters, each right four times in ten alone: right when they agree, hardly ever when the other objects."""
    calibration = Calibration()
    together, apart = calibration.votes([{1: 0.6}, {1: 0.6}]), calibration.votes([{1: 0.6}, {2: 0.6}])
    alone = calibration.votes([{1: 0.6}, {}])
    for n in range(500):
        calibration.learn(together[1], n % 20 > 0)
        calibration.learn(apart[1], n % 20 == 0)
        calibration.learn(alone[1], n % 5 < 2)
    assert calibration.likely(together)[1] > 0.85
    assert calibration.likely(apart)[1] < 0.15
    assert 0.3 < calibration.likely(alone)[1] < 0.5


def test_what_was_learned_fades():
    calibration = Calibration()
    vote = calibration.votes([{1: 0.5}])
    for right in (True, False):
        for _ in range(3000):
            calibration.learn(vote[1], right)
        p = calibration.likely(vote)[1]
        assert p > 0.95 if right else p < 0.05
