"""Allocators that never leak, and a state whose places share nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from boleinfer.memory import Allocator, OutOfPlaces, buffer
from boleinfer.state import State
from tests.running import load


class Allocating(RuleBasedStateMachine):
    """Against a set of free numbers."""

    def __init__(self):
        super().__init__()
        self.allocator, self.free, self.held = Allocator("things", 20), set(range(20)), []

    @rule(n=st.integers(0, 12))
    def take(self, n):
        if n > len(self.free):
            with pytest.raises(OutOfPlaces, match=f"{n} things were asked for and {len(self.free)} of 20 are free"):
                self.allocator.take(n)
            return
        taken = self.allocator.take(n)
        assert len(taken) == n and set(taken.tolist()) <= self.free and (np.diff(taken) > 0).all()
        runs = [s for s in range(20) if set(range(s, s + n)) <= self.free]
        if runs and n:
            assert taken.tolist() == list(range(runs[0], runs[0] + n))
        self.free -= set(taken.tolist())
        self.held.append(taken)

    @rule(i=st.integers(0, 99))
    def give_back(self, i):
        if self.held:
            places = self.held.pop(i % len(self.held))
            self.allocator.give_back(places)
            self.free |= set(places.tolist())
            if len(places):
                with pytest.raises(RuntimeError, match="free already"):
                    self.allocator.give_back(places)

    @invariant()
    def counts(self):
        assert self.allocator.free == len(self.free)


TestAllocating = Allocating.TestCase


def test_poisoned_buffers():
    assert np.isnan(buffer((3, 4), np.float32, poison=True)).all()
    assert buffer((3, 4)).shape == (3, 4)


def test_f50_a_place_that_cannot_be_had_takes_nothing(oracle):
    config = load(oracle("qwen3_5").folder).config
    state = State(config, slots=2, pages=5, page_size=16)
    with pytest.raises(OutOfPlaces, match="6 KV pages were asked for and 5 of 5 are free"):
        state.take(81)
    first = state.take(1)
    second = state.take(33)
    with pytest.raises(OutOfPlaces, match="all 2 state slots are taken"):
        state.take(1)
    assert {*first.pages.tolist()}.isdisjoint(second.pages.tolist()) and first.slot != second.slot
    state.give_back(first)
    state.give_back(second)
    assert (state.slots.free, state.pages.free) == (2, 5)
    with pytest.raises(RuntimeError, match="free already"):
        state.give_back(second)
