"""The budget in worlds whose costs and texts are known: the best rows, never slower, back when texts change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boleinfer.budget import Budget, share
from boleinfer.costs import CostTable
from boleinfer.forest import Tree
from boleinfer.ways import PLAIN, StepNews, Way

ON_GPU = [PLAIN, Way(False, 1, 4), Way(False, 2, 8)]
ON_HOST = [PLAIN, Way(True, 0, 8)]
ON_ASKED = [PLAIN, Way(True, 0, 8), Way(True, 1, 4), Way(True, 2, 8)]
ON_BOTH = [*ON_GPU, *ON_ASKED[1:]]


def gpu_table(level_s: float = 0.6e-3) -> CostTable:
    """A step of a 9B model on an H200, about: ms by envelope; a level of a draft takes `level_s`."""
    rows, batch = (8, 16, 32, 64, 128), (1, 8, 32)
    ms = np.asarray([5.0, 5.2, 5.6, 6.4, 8.5])
    seconds = 1e-3 * np.stack([ms, ms + 0.5, ms + 2], axis=1)[:, :, None]
    return CostTable(rows, batch, (1000,), seconds, True, {w: np.full(3, level_s * d) for w, d in ((1, 4), (2, 8))})


def small_table() -> CostTable:
    """A small model on a GPU."""
    seconds, drafts = np.asarray([[[0.2e-3]], [[0.3e-3]]]), {1: np.full(1, 1e-4), 2: np.full(1, 2e-4)}
    return CostTable((8, 64), (1,), (1000,), seconds, True, drafts)


def host_table() -> CostTable:
    rows = (1, 2, 4, 8, 16, 32, 64)
    one = 1e-3 * np.asarray([4.0, 4.2, 4.5, 5.0, 7.0, 11.0, 20.0])
    return CostTable(rows, (1, 32), (100,), np.stack([one, one], axis=1)[:, :, None])


@dataclass
class World:
    """Requests whose guesses are right with one probability; steps take what the table says, and a bit."""

    costs: CostTable
    ways: list[Way]
    batch: int
    rate: float
    draft_s: float = 0.0
    claimed: float | None = None
    slow: float = 1.1
    wait_s: float = 0.0  # what else a step whose drafter was asked keeps the GPU waiting

    def __post_init__(self) -> None:
        self.budget = Budget(self.ways, self.costs)
        self.rng = np.random.default_rng(0)
        self.before = 0
        self.used: list[int] = []

    def chain(self, depth: int) -> Tree:
        tree = Tree.chain([0] * depth)
        tree.prob[:] = np.cumprod(np.full(depth, self.rate if self.claimed is None else self.claimed))
        return tree

    def run(self, steps: int) -> tuple[float, int]:
        """Seconds and tokens."""
        seconds, tokens = 0.0, 0
        for _ in range(steps):
            way = self.budget.choose(self.batch, 1000)
            gpu = self.ways[way].variant > 0
            drawn = self.before if gpu else way
            depth = self.ways[drawn].depth if way else 0
            trees = self.budget.share([self.chain(depth)] * self.batch, way, 1000, 1000)
            right = [int(np.cumprod(self.rng.random(len(t)) < self.rate).sum()) for t in trees]
            rows = self.batch + sum(map(len, trees))
            took = self.slow * float(self.costs.step_s(np.asarray([rows]), self.batch, 1000)[0])
            took += self.costs.draft_s(self.ways[way].variant, self.batch)
            took += self.wait_s if self.ways[way].asks else 0.0
            drafted = self.draft_s if self.ways[way].asks else 0.0
            self.budget.learn(StepNews(way, drawn, self.batch, 1000, rows, trees, right, took + drafted, drafted))
            self.before = way
            self.used.append(way)
            seconds += took + drafted
            tokens += self.batch + sum(right)
        return seconds, tokens

    def speed(self, steps: int) -> float:
        """Against plain decoding."""
        seconds, tokens = self.run(steps)
        plain = self.slow * float(self.costs.step_s(np.asarray([self.batch]), self.batch, 1000)[0])
        return tokens / seconds * plain / self.batch


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("claimed", [0.95, 0.5])
def test_never_slower_when_nothing_is_right(batch, claimed):
    for world in (
        World(gpu_table(), ON_GPU, batch, 0.0, claimed=claimed),
        World(host_table(), ON_HOST, batch, 0.0, draft_s=2e-3, claimed=claimed),
    ):
        assert world.speed(512) >= 0.98
        assert world.speed(2000) >= 0.99


@pytest.mark.parametrize("claimed", [0.88, 0.5])
def test_cheap_drafts_that_are_never_right_are_left_for_good(claimed):
    """A large model: a draft costs a tenth of a step, so little speaks against one more."""
    ms = np.asarray([11.9, 12.1, 12.8, 14.7, 20.0])
    drafts = {1: np.full(1, 0.9e-3), 2: np.full(1, 1.8e-3)}
    table = CostTable((8, 16, 32, 64, 128), (1,), (1000,), 1e-3 * ms[:, None, None], True, drafts)
    world = World(table, ON_GPU, 1, 0.0, claimed=claimed)
    assert world.speed(512) >= 0.985
    assert sum(way > 0 for way in world.used) <= 40


@pytest.mark.parametrize("rate,level_s", [(0.5, 0.15e-3), (0.9, 0.15e-3), (0.9, 0.6e-3)])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_nearly_as_fast_as_the_best_way(rate, batch, level_s):
    costs = gpu_table(level_s)
    alone = [World(costs, [PLAIN], batch, rate).speed(300)]
    for way in ON_GPU[1:]:
        world = World(costs, [PLAIN, way], batch, rate)
        world.budget.choose = lambda *_: 1  # always
        alone.append(world.speed(300))
    world = World(costs, ON_GPU, batch, rate)
    world.run(200)
    assert world.speed(1500) >= 0.9 * max(alone)


@pytest.mark.parametrize("rate,better", [(0.95, 2), (0.4, 1)])
@pytest.mark.parametrize("way", [1, 2])
def test_what_one_way_claims_tells_of_the_others(rate, better, way):
    """Few levels or many: known from the first drafts on, whichever way made them."""
    world = World(gpu_table(0.15e-3), ON_GPU, 1, rate)
    world.budget.choose = lambda *_: way
    world.run(4)
    assert world.budget.speed(better, 1, 1000) > 1.03 * world.budget.speed(3 - better, 1, 1000)


@pytest.mark.parametrize("draft_s", [0.5e-3, 1.5e-3, 5e-3])
def test_a_host_that_drafts_longer_than_steps_take_is_left_at_once(draft_s):
    """A small model: all ways ask the same slow drafter, and what one of them took tells of the others."""
    world = World(small_table(), ON_ASKED, 1, 0.8, draft_s=draft_s)
    world.run(100)
    assert sum(way > 0 for way in world.used) <= 12


@pytest.mark.parametrize("wait_s", [1.5e-3, 3e-3, 10e-3])
def test_steps_that_all_are_outliers_are_not(wait_s):
    """A small model: what the host does between two steps is several times a step, whatever the table says."""
    world = World(small_table(), ON_ASKED, 1, 0.8, wait_s=wait_s)
    world.run(400)
    assert sum(way > 0 for way in world.used) <= 60
    assert sum(way > 0 for way in world.used[100:]) <= 20


@pytest.mark.parametrize("draft_s,wait_s", [(0.5e-3, 1e-3), (2e-3, 0.0)])
def test_a_slow_host_leaves_the_gpu_its_own_drafts(draft_s, wait_s):
    """A small model: the GPU's drafts alone are several times as fast as those that the host has to look at."""
    alone = World(small_table(), [PLAIN, ON_GPU[1]], 1, 0.8)
    world = World(small_table(), ON_BOTH, 1, 0.8, draft_s=draft_s, wait_s=wait_s)
    assert world.speed(800) >= 0.85 * alone.speed(800)
    assert all(way in (1, 2) for way in world.used[:63])


def test_asking_is_taken_where_the_host_finds_more():
    """A text that repeats itself, beside an MTP layer that knows little."""

    class Repeats(World):
        def chain(self, depth: int) -> Tree:
            self.rate = 0.95 if self.ways[self.budget.choose(1, 1000)].asks else 0.3
            return super().chain(depth)

    world = Repeats(gpu_table(0.15e-3), ON_BOTH, 1, 0.95, draft_s=0.3e-3)
    world.run(400)
    assert sum(world.ways[way].asks for way in world.used[200:]) > 150


@pytest.mark.parametrize("step_ms,waits", [(4.0, False), (0.2, True)])
def test_a_try_that_is_due_waits_between_brief_steps_only(step_ms, waits):
    """To weigh it takes the host a tenth of a brief step."""
    ms = step_ms * np.asarray([1.0, 1.1, 1.5])
    table = CostTable((1, 8, 64), (1,), (100,), 1e-3 * ms[:, None, None])
    world = World(table, ON_HOST, 1, 0.0, draft_s=0.05e-3 * step_ms, claimed=0.3)
    world.run(37)
    assert world.used[-1] == 0
    world.budget._records[1].due = world.budget._records[1].since
    world.run(16)
    assert world.used[38:].index(1) == (10 if waits else 0)  # behind the 48th step, or the next


def test_back_when_the_text_changes():
    world = World(gpu_table(), ON_GPU, 1, 0.0, claimed=0.8)
    world.run(1000)
    assert world.used[-100:].count(0) > 90
    world.rate = 0.9
    world.run(2500)
    assert 0 not in world.used[-100:]
    world.rate = 0.0
    world.run(90)
    assert world.budget.choose(1, 1000) == 0


def test_a_new_request_is_a_reason_to_try():
    world = World(gpu_table(), ON_GPU, 1, 0.0, claimed=0.8)
    world.run(3000)
    del world.used[:]
    world.run(1000)
    while world.budget._records[1].since < 400:
        world.run(1)
    world.budget._records[1].due, world.budget._records[2].due = 1000, 1000
    del world.used[:]
    world.budget.welcome()
    world.run(10)
    assert world.used.count(1) > 0


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=12), min_size=1, max_size=5), st.booleans(), st.integers(0, 90))
def test_rows_are_those_of_the_rule(probs, stairs, most):
    """Against all numbers of rows, tried one after another."""
    trees = [Tree.of([0] * len(p), [-1] * len(p), sorted(p, reverse=True)) for p in probs]
    rows = (1, 4, 8, 16, 64)
    costs = CostTable(rows, (1,), (0,), np.asarray([1.0, 1.1, 1.3, 2.0, 6.0])[:, None, None], stairs)
    budget = Budget(ON_HOST, costs)
    got = sum(map(len, budget.share(trees, 1, 0, most)))
    B, ranked = len(trees), np.sort(np.concatenate([t.prob for t in trees]))[::-1]
    can = range(min(most, 64 - B, len(ranked)) + 1)
    worth = [(B + ranked[:n].sum()) / costs.step_s(np.asarray([B + n]), B, 0)[0] for n in can]
    assert worth[got] == pytest.approx(max(worth), rel=1e-6)


def test_without_a_table_everything_is_drafted_and_verified():
    budget = Budget(ON_GPU)
    assert budget.choose(1, 0) == 1
    trees = [Tree.of([1, 2], [-1, -1], [0.01, 0.001])] * 3
    assert budget.share(trees, 1, 0, 100) == trees
    assert Budget([PLAIN]).choose(1, 0) == 0


def test_likely_requests_get_more_rows():
    sure, unsure = Tree.of([1, 2, 3], [-1, 0, 1], [0.9, 0.8, 0.7]), Tree.of([1, 2, 3], [-1, 0, 1], [0.5, 0.2, 0.1])
    assert [len(t) for t in share([unsure, sure, unsure], 5)] == [1, 3, 1]
