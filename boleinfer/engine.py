"""The loop: plan a forest, run it, give every request what it got. Ids in, ids out; knows no text and no array."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from boleinfer.budget import Budget
from boleinfer.costs import CostTable
from boleinfer.draft.base import Drafter
from boleinfer.draft.none import NoDrafter
from boleinfer.executor import Executor, Outcome
from boleinfer.forest import Tree
from boleinfer.request import Request
from boleinfer.scheduler import Scheduler, Work, grow, mean_length
from boleinfer.state import State
from boleinfer.ways import PLAIN, StepNews, Way

BLIND = 16  # steps in a row that verify guesses which the host has not read, in as many rows as the first
IDLE, IDLE_S = 0.1, 1e-4  # part of a step, or seconds, for which a caller may keep one waiting, for its time to count


class Engine:
    """Runs requests to their end, all of them together, a step at a time."""

    def __init__(self, executor: Executor, drafter: Drafter, scheduler: Scheduler):
        self.executor, self.drafter, self.scheduler = executor, drafter, scheduler
        scheduler.draft_rows = min(scheduler.draft_rows, executor.most_drafted)
        self._under_way: _Step | None = None
        self._budget: tuple[Drafter, Budget] | None = None
        self._costs: CostTable | None = None
        self._news: tuple[Budget, StepNews] | None = None  # of the step before, for its budget
        self._way = 0  # of the step before
        self._ended = self._tail = 0.0  # when the step before ended, and how much of it came after the results

    @property
    def state(self) -> State:
        """The memory of all requests."""
        return self.executor.state

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def way(self) -> int:
        """The budget's way of the step that was started last."""
        return self._way

    @property
    def budget(self) -> Budget:
        """How much is drafted; a new one when the drafter has changed. Scripted drafts are taken as they are."""
        if self._budget is None or self._budget[0] is not self.drafter:
            costs = None if isinstance(self.drafter, NoDrafter) else self._costs
            self._budget = self.drafter, Budget(self._ways(), costs)
        return self._budget[1]

    def add(self, request: Request) -> None:
        """Queues a request (its prompt and limit have been checked)."""
        self.scheduler.waiting.append(request)

    def drop(self, request: Request, reason: str = "abort") -> None:
        """Ends a request now and frees all it holds; one that has ended already is left as it is."""
        if not request.finished:
            request.finish_reason = reason
        self.scheduler.drop(request)
        self.drafter.forget(request)

    def step(self) -> list[Request]:
        """One forward pass for all running requests; returns those that got tokens or ended.

        Lengths, pages and slots change only after the forward pass has succeeded. Where the executor can go on by
        itself, the next step is running already while the host takes in what this one gave."""
        began = time.perf_counter()
        under_way = self._under_way or self._start()
        self._under_way = None
        if under_way is None:
            return []
        if self._news is not None:  # the executor is at work meanwhile
            budget, of_before = self._news
            self._news = None
            budget.learn(of_before)
        drafted = max(began, under_way.planned)
        if self._goes_on(under_way):
            self._under_way = under_way  # still to be read if the next one cannot be started
            self._under_way = self._run(under_way.works, under_way.way, under_way.ahead + 1)
        works = [(w, o) for w, o in zip(under_way.works, under_way.outcomes()) if not w.request.finished]
        news = []
        for work, outcome in works:
            _take(work, outcome)
            request = work.request
            if not request.finished:
                news.append(outcome.news(request))
                request.committed += outcome.committed
        if self._under_way is not None:
            self._under_way = _told(self._under_way, {w.request: o.draft for w, o in works if o.draft is not None})
        verified = time.perf_counter()
        self.drafter.observe(news)
        ended = time.perf_counter()
        _count_times([w for w, _ in works], began, drafted, verified, ended)
        self._learn(under_way, works, began, drafted, verified, ended)
        for work, _ in works:
            if work.request.finished:
                self.drop(work.request)
        return [w.request for w, _ in works if w.complete]

    def _start(self) -> _Step | None:
        """Admits who fits, plans a step and starts it; None when nobody has anything to do."""
        if self._costs is None and not self.scheduler.running and not isinstance(self.drafter, NoDrafter):
            self._costs, self._budget = self.executor.price(), None
        for request in self.scheduler.admit():
            self.executor.admit(request)
            self.budget.welcome()
        decoding = self.scheduler.decoding
        way = self.budget.choose(len(decoding), mean_length(decoding))
        works = self.scheduler.plan(self.drafter, self.budget, way)
        return self._run(works, way) if works else None

    def _run(self, works: Sequence[Work], way: int, ahead: int = 0) -> _Step:
        variant, planned = self.budget.ways[way].variant, time.perf_counter()
        drawn = self._way if variant else way  # the GPU drafted at the end of the step before
        self._way = way
        if not any(w.complete for w in works):  # nobody samples, so there is nothing to draft for
            variant = 0
        try:
            return _Step(works, self.executor.start(works, variant), way, drawn, planned, ahead)
        except Exception:
            for work in works:
                if work.request.finished:  # a step that failed halfway ends its requests
                    self.drop(work.request)
            raise

    def _goes_on(self, step: _Step) -> bool:
        """Whether the next step is the same as this one, whatever this one gives."""
        works, budget = step.works, self.budget
        alone = len(works) == len(self.scheduler.running) and not self.scheduler.waiting
        if not alone or (way := budget.ways[step.way]).asks or not self.executor.may_repeat(works):
            return False
        if step.ahead == BLIND and any(w.drafted for w in works):
            return False
        if way.variant and not all(w.drafted for w in works):  # a draft may be there by now
            return False
        return budget.choose(len(works), mean_length([w.request for w in works])) == step.way

    def _ways(self) -> list[Way]:
        """The ways to draft that there are: not at all, each of the GPU's own, asking the drafter, and both."""
        if type(self.drafter) is NoDrafter:
            return [PLAIN]
        depth, own = self.scheduler.limits.depth, self.drafter.own
        on_gpu = [(v, min(d, depth)) for v, d in enumerate(self.executor.depths, 1)]
        alone = [Way(False, *way) for way in on_gpu] if own is not None else []
        if alone and own is self.drafter:
            return [PLAIN, *alone]
        return [PLAIN, *alone, *(Way(True, *way) for way in [(0, depth), *on_gpu])]

    def _learn(
        self,
        step: _Step,
        works: Sequence[tuple[Work, Outcome]],
        began: float,
        drafted: float,
        verified: float,
        ended: float,
    ) -> None:
        """What the budget is told, during the next step: what a step of decoding requests alone took and gave."""
        waited, tail = began - self._ended, self._tail
        self._ended, self._tail = ended, ended - verified
        if not works or not all(w.decodes for w, _ in works):
            self._tail = 0.0  # what follows a piece of a prompt is no cost of drafting
            return
        seconds = verified - began + tail
        if step.ahead:  # it ran while the step before was taken in
            seconds = seconds + waited if waited < max(IDLE * seconds, IDLE_S) else math.inf
        step_news = StepNews(
            step.way,
            step.drawn,
            batch=len(works),
            context=mean_length([w.request for w, _ in works]),
            rows=sum(len(w.tree) for w, _ in works),
            drafts=[w.draft for w, _ in works],
            accepted=[max(0, len(o.tokens) - 1) for _, o in works],
            seconds=seconds,
            draft_s=0.0 if step.ahead else drafted - began + tail,
        )
        self._news = self.budget, step_news


@dataclass(frozen=True)
class _Step:
    """A step under way: whose it is, what waits for what it gave, and how it is drafted for.

    way:     the budget's; drawn: the one that made its trees
    planned: when it was started; ahead: how many steps, this one included, were started before the last was read"""

    works: Sequence[Work]
    outcomes: Callable[[], list[Outcome]]
    way: int
    drawn: int
    planned: float
    ahead: int


def _told(step: _Step, drafts: Mapping[Request, Tree]) -> _Step:
    """A step that began before its guesses were read, with these: as many of each request's as it has rows for."""
    works = [
        replace(w, tree=grow(w.request.pending, draft.best(w.drafted)))
        if w.drafted and not w.request.finished and (draft := drafts.get(w.request)) is not None
        else w
        for w in step.works
    ]
    return replace(step, works=works)


def _take(work: Work, outcome: Outcome) -> None:
    """Makes the tokens part of the request, up to the one that ends it."""
    request, taken = work.request, 0
    if outcome.error is not None:
        request.fail(outcome.error)
    for token, logprobs in zip(outcome.tokens, outcome.logprobs):
        request.append(token, logprobs)
        taken += 1
        if request.finished:
            break
    if work.decodes and taken:
        request.stats.count_step(outcome.drafted, taken - 1)


def _count_times(works: Sequence[Work], began: float, drafted: float, verified: float, ended: float) -> None:
    """Splits a step's time evenly among its requests; what the drafter does after the commit counts as drafting."""
    share = 1 / max(1, len(works))
    for work in works:
        stats = work.request.stats
        if work.decodes:
            stats.decode_s += share * (ended - began)
            stats.draft_s += share * (drafted - began + ended - verified)
            stats.verify_s += share * (verified - drafted)
        else:
            stats.prefill_s += share * (ended - began)
