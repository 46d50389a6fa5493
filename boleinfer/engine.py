"""The loop: plan a forest, run it, accept a path of each tree, commit it. Ids in, ids out; knows no text."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from boleinfer.decoder import Decoder
from boleinfer.draft.base import Committed, Drafter
from boleinfer.forest import Forest
from boleinfer.request import Request
from boleinfer.sampling import BrokenLogits, accept
from boleinfer.scheduler import Scheduler, Work
from boleinfer.state import State


class Engine:
    """Runs requests to their end, all of them together, a step at a time."""

    def __init__(self, model: Decoder, state: State, drafter: Drafter, scheduler: Scheduler):
        self.model, self.state, self.drafter, self.scheduler = model, state, drafter, scheduler

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

        Lengths, pages and slots change only after the forward pass has succeeded."""
        self.scheduler.admit()
        began = time.perf_counter()
        works = self.scheduler.plan(self.drafter)
        if not works:
            return []
        drafted = time.perf_counter()
        forest = Forest.of([w.tree for w in works], [w.request.committed for w in works])
        batch = self.state.batch(forest, [w.request.home for w in works])
        hidden, pending = self.model.forward(batch, self.state)  # [R, D]
        rows = [np.arange(s + w.known - 1, s + len(w.tree)) for s, w in zip(forest.start, works) if w.complete]
        logits = iter(np.split(self._logits(hidden, rows), np.cumsum([len(r) for r in rows])[:-1]) if rows else ())
        paths = [_accept(w, next(logits) if w.complete else None) for w in works]
        self.state.commit(batch, pending, paths)
        news = []
        for work, path, start in zip(works, paths, forest.start):
            request = work.request
            if not request.finished:
                news.append(Committed(request, request.committed, hidden[path + start]))
                request.committed += len(path)
        verified = time.perf_counter()
        self.drafter.observe(news)
        _count_times(works, began, drafted, verified, time.perf_counter())
        for work in works:
            if work.request.finished:
                self.drop(work.request)
        return [w.request for w in works if w.complete]

    def _logits(self, hidden: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Logits of the rows after which a token may be sampled."""
        wanted = np.concatenate(rows)
        return self.model.logits(hidden if len(wanted) == len(hidden) else hidden[wanted])


def _accept(work: Work, logits: np.ndarray | None) -> np.ndarray:
    """Samples the target along the tree, from the last known token on; every sample becomes part of the request.

    logits: [1 + drafted, vocab], from the last known node on (None: the prompt goes on, nothing is sampled).
    Returns the nodes to commit; none for a request that has ended."""
    request, root = work.request, work.known - 1
    known = np.arange(work.known)
    if logits is None:
        return known
    try:
        nodes, tokens = accept(work.tree, lambda node: logits[node - root], request.sampler, root)
    except BrokenLogits as broken:
        request.fail(str(broken))
        return known[:0]
    taken = 0
    for node, token in zip(nodes, tokens):
        request.append(token, request.sampler.logprobs(logits[node - root], token))
        taken += 1
        if request.finished:
            break
    if work.decodes:
        request.stats.count_step(work.drafted, taken - 1)
    return known[:0] if request.finished else np.concatenate([known[:-1], nodes])


def _count_times(works: Sequence[Work], began: float, drafted: float, verified: float, ended: float) -> None:
    """Splits a step's time evenly among its requests; what the drafter does after the commit counts as drafting."""
    share = 1 / len(works)
    for work in works:
        stats = work.request.stats
        if work.decodes:
            stats.decode_s += share * (ended - began)
            stats.draft_s += share * (drafted - began + ended - verified)
            stats.verify_s += share * (verified - drafted)
        else:
            stats.prefill_s += share * (ended - began)
