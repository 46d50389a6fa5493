"""One step on NumPy: forward, acceptance and commit of a list of works. Knows no queue and no drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from boleinfer.costs import CostTable
from boleinfer.decoder import Decoder
from boleinfer.draft.base import Committed
from boleinfer.draft.device import Drafted
from boleinfer.forest import Forest, Tree
from boleinfer.request import Request
from boleinfer.sampling import BrokenLogits, Sampler, accept
from boleinfer.scheduler import Work
from boleinfer.state import Place, State


@dataclass(frozen=True)
class Outcome:
    """What a step gave one request.

    committed: rows of its tree that became part of the state
    tokens:    sampled along the accepted path; the last one is no row yet. Empty while a prompt goes on
    drafted:   rows that were guesses
    logprobs:  one entry a token when the request asked for them
    hidden:    the committed rows after the final norm, [m, D]; None where the drafter runs beside the model
    draft:     the tree that the GPU drafted for the next step; None where it does not draft
    error:     why the request cannot go on
    """

    committed: int
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    logprobs: list[dict[int, float] | None] = field(default_factory=list)
    hidden: np.ndarray | None = None
    draft: Tree | None = None
    error: str | None = None

    def news(self, request: Request) -> Committed:
        """The same for the drafter, before the request counts it as committed."""
        if self.draft is not None:
            return Drafted(request, request.committed, self.hidden, self.draft)
        return Committed(request, request.committed, self.hidden)


class Executor(Protocol):
    """Runs the steps of an engine; the only one who touches the model and writes the state.

    price:  measures what steps cost, or finds it measured unless `fresh=True`; no request may run meanwhile
    depths: tokens of a path in each way in which it drafts by itself, numbered from 1
    most_drafted: guesses of a step at most
    """

    model: Decoder
    state: State
    price: Callable[..., CostTable | None]
    depths: Sequence[int]
    most_drafted: int

    def check(self, sampler: Sampler) -> None:
        """Raises ValueError for parameters that it cannot sample by."""
        ...

    def admit(self, request: Request) -> None:
        """The request has got its place and takes part from now on."""
        ...

    def start(self, works: Sequence[Work], way: int = 0) -> Callable[[], list[Outcome]]:
        """Starts a step; what it returns waits for it and tells what it gave each work's request.

        way: how to draft for the next step by itself; 0: not
        Where it raises, requests are what they were, or failed if that cannot be."""
        ...

    def may_repeat(self, works: Sequence[Work]) -> bool:
        """Whether the same works may be started again before it is known what the first time gave."""
        ...

    def capture(self) -> None:
        """Makes ready what small steps need, in every way to draft, instead of each when it is first needed."""
        ...

    def time(self, works: Sequence[Work], way: int, about_s: float, most: int) -> float:
        """Seconds of a step of such works, of a few: of about so many seconds in all, and at most so many steps."""
        ...

    def logits(self, tokens: Sequence[int], start: int, place: Place) -> np.ndarray:
        """Commits tokens start .. of a sequence that lives alone in `place`: float32 [n, vocab], a row a token."""
        ...


class HostExecutor:
    """Steps on NumPy, by the definitions."""

    def __init__(self, model: Decoder, state: State):
        self.model, self.state = model, state
        self.price: Callable[..., CostTable | None] = lambda fresh=False: None
        self.depths: Sequence[int] = ()
        self.most_drafted = 1 << 16

    def check(self, sampler: Sampler) -> None:
        pass

    def admit(self, request: Request) -> None:
        pass

    def start(self, works: Sequence[Work], way: int = 0) -> Callable[[], list[Outcome]]:
        forest = Forest.of([w.tree for w in works], [w.request.committed for w in works])
        batch = self.state.batch(forest, [w.request.home for w in works])
        hidden, pending = self.model.forward(batch, self.state)  # [R, D]
        rows = [np.arange(s + w.known - 1, s + len(w.tree)) for s, w in zip(forest.start, works) if w.complete]
        logits = iter(np.split(self._logits(hidden, rows), np.cumsum([len(r) for r in rows])[:-1]) if rows else ())
        results = [_accept(w, next(logits) if w.complete else None) for w in works]
        paths = [path + start for (path, _), start in zip(results, forest.start)]  # flat rows
        self.state.commit(batch, pending, paths)
        outcomes = [replace(outcome, hidden=hidden[path]) for (_, outcome), path in zip(results, paths)]
        return lambda: outcomes

    def may_repeat(self, works: Sequence[Work]) -> bool:
        return False

    def capture(self) -> None:
        pass

    def time(self, works: Sequence[Work], way: int, about_s: float, most: int) -> float:
        seconds: list[float] = []
        while len(seconds) < 2 or (sum(seconds) < about_s and len(seconds) < most):
            began = time.perf_counter()
            self.start(works, way)()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def logits(self, tokens: Sequence[int], start: int, place: Place) -> np.ndarray:
        batch = self.state.batch(Forest.of([Tree.chain(tokens)], [start]), [place])
        hidden, pending = self.model.forward(batch, self.state)
        self.state.commit(batch, pending, [np.arange(len(hidden))])
        return self.model.logits(hidden)

    def _logits(self, hidden: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Logits of the rows after which a token may be sampled."""
        wanted = np.concatenate(rows)
        return self.model.logits(hidden if len(wanted) == len(hidden) else hidden[wanted])


def _accept(work: Work, logits: np.ndarray | None) -> tuple[np.ndarray, Outcome]:
    """Samples the target along the tree, from the last known token on: nodes to commit, and what came out.

    logits: [1 + drafted, vocab], from the last known node on (None: the prompt goes on, nothing is sampled)."""
    sampler, root = work.request.sampler, work.known - 1
    known = np.arange(work.known)
    if logits is None:
        return known, Outcome(len(known))
    try:
        nodes, tokens = accept(work.tree, lambda node: logits[node - root], sampler, root)
    except BrokenLogits as broken:
        return known[:0], Outcome(0, error=str(broken))
    logprobs = [sampler.logprobs(logits[node - root], token) for node, token in zip(nodes, tokens)]
    path = np.concatenate([known[:-1], nodes])
    return path, Outcome(len(path), tokens, work.drafted, logprobs)
