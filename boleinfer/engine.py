"""The loop: plan a forest, run it, give every request what it got. Ids in, ids out; knows no text and no array."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boleinfer.draft.base import Committed, Drafter
from boleinfer.executor import Executor, Outcome
from boleinfer.request import Request
from boleinfer.scheduler import Scheduler, Work
from boleinfer.state import State


class Engine:
    """Runs requests to their end, all of them together, a step at a time."""

    def __init__(self, executor: Executor, drafter: Drafter, scheduler: Scheduler):
        self.executor, self.drafter, self.scheduler = executor, drafter, scheduler
        self._under_way: _Step | None = None

    @property
    def state(self) -> State:
        """The memory of all requests."""
        return self.executor.state

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

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
        drafted = time.perf_counter()
        if self._goes_on(under_way.works):
            self._under_way = _Step(under_way.works, self.executor.start(under_way.works))
        works = [(w, o) for w, o in zip(under_way.works, under_way.outcomes()) if not w.request.finished]
        news = []
        for work, outcome in works:
            _take(work, outcome)
            request = work.request
            if not request.finished:
                news.append(Committed(request, request.committed, outcome.hidden))
                request.committed += outcome.committed
        verified = time.perf_counter()
        self.drafter.observe(news)
        _count_times([w for w, _ in works], began, drafted, verified, time.perf_counter())
        for work, _ in works:
            if work.request.finished:
                self.drop(work.request)
        return [w.request for w, _ in works if w.complete]

    def _start(self) -> _Step | None:
        """Admits who fits, plans a step and starts it; None when nobody has anything to do."""
        for request in self.scheduler.admit():
            self.executor.admit(request)
        works = self.scheduler.plan(self.drafter)
        return _Step(works, self.executor.start(works)) if works else None

    def _goes_on(self, works: Sequence[Work]) -> bool:
        """Whether the next step is the same as this one, whatever this one gives."""
        alone = len(works) == len(self.scheduler.running) and not self.scheduler.waiting
        return alone and not self.drafter.reads_text and self.executor.may_repeat(works)


@dataclass(frozen=True)
class _Step:
    """A step under way: whose it is, and what waits for what it gave."""

    works: Sequence[Work]
    outcomes: Callable[[], list[Outcome]]


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
