"""Watches an engine answer one request: each step's drafts, tokens, budget and times. Changes nothing of what it does.

Every step passes through the engine's scheduler, budget and executor; here something stands in for each of them that
notes what passes and hands it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from boleinfer.draft.base import EMPTY, Drafter
from boleinfer.executor import HostExecutor, Outcome
from boleinfer.forest import Tree
from boleinfer.llm import LLM
from boleinfer.scheduler import Work


@dataclass
class StepSeen:
    """One step of the watched request.

    committed: tokens that the state held; known: the rows that were no guesses
    decodes:   whether it read no prompt
    offered:   all that was proposed; named: for each node the drafters that proposed it, and how likely each found it
               given the node above
    kept:      bool [nodes offered], those that were verified
    accepted:  the same for those that were right
    tokens:    that came out
    worth:     expected tokens, and seconds, of a step with 0, 1, .. of the likeliest nodes; None without known costs
    seconds:   by phase. propose: the drafters and the budget; forward, accept, commit: on NumPy; step: all three on a
               GPU, and the next draft, which are one graph; rest: taking in the tokens
    """

    committed: int
    known: list[int]
    decodes: bool
    offered: Tree
    named: list[dict[str, float]]
    kept: np.ndarray
    accepted: np.ndarray
    tokens: list[int]
    worth: tuple[np.ndarray, np.ndarray] | None
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def watched(llm: LLM) -> Iterator[list[StepSeen]]:
    """The steps of what runs inside, as they end; one request at a time."""
    engine = llm.engine
    watch = _Engine(engine)
    stand_ins: list[tuple[Any, str, Any]] = [
        (llm, "engine", watch),
        (engine, "scheduler", _Scheduler(engine.scheduler, watch)),
        (engine, "executor", _Executor(engine.executor, watch)),
    ]
    if isinstance(engine.executor, HostExecutor):
        stand_ins += [
            (engine.executor, "model", _Model(engine.executor.model, watch.clock)),
            (engine.executor, "state", _State(engine.executor.state, watch.clock)),
        ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for place in stand_ins:
            setattr(*place)
        yield watch.steps
    finally:
        for place in before:
            setattr(*place)


class _Clock:
    """Seconds by phase; what passes in an inner phase does not count in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._inner.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took - self._inner.pop()
            self._inner[-1] += took


class _StandIn:
    """Answers for an object with all that the object has."""

    def __init__(self, own: Any):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _Engine(_StandIn):
    """clock: of the step that runs; steps: those that ended"""

    def __init__(self, own: Any):
        super().__init__(own)
        self.clock, self.steps = _Clock(), list[StepSeen]()
        self.offered, self.worth = EMPTY, None

    def step(self) -> Any:
        ended = len(self.steps)
        self.clock.seconds = {}
        with self.clock("rest"):
            result = self._own.step()
        for step in self.steps[ended:]:
            step.seconds = self.clock.seconds
        return result


class _Scheduler(_StandIn):
    def __init__(self, own: Any, watch: _Engine):
        super().__init__(own)
        self._watch = watch

    def plan(self, drafter: Drafter, budget: Any, way: int) -> list[Work]:
        watch = self._watch
        watch.offered, watch.worth = EMPTY, None
        with watch.clock("propose"):
            return self._own.plan(drafter, _Budget(budget, watch), way)


class _Budget(_StandIn):
    def __init__(self, own: Any, watch: _Engine):
        super().__init__(own)
        self._watch = watch

    def share(self, trees: Sequence[Tree], way: int, context: float, most: int) -> list[Tree]:
        if trees:
            self._watch.offered, self._watch.worth = trees[0], self._own.worth(trees, way, context, most)
        return self._own.share(trees, way, context, most)


class _Executor(_StandIn):
    def __init__(self, own: Any, watch: _Engine):
        super().__init__(own)
        self._watch, self._phase = watch, "accept" if isinstance(own, HostExecutor) else "step"

    def may_repeat(self, works: Sequence[Work]) -> bool:
        """Never: each step is looked at before the next one starts."""
        return False

    def price(self, *fresh: bool) -> Any:
        """Measuring what steps cost is no part of one."""
        seconds = dict(self._watch.clock.seconds)
        with self._watch.clock("price"):
            costs = self._own.price(*fresh)
        self._watch.clock.seconds = seconds
        return costs

    def start(self, works: Sequence[Work], *way: int) -> Callable[[], list[Outcome]]:
        work, committed = works[0], works[0].request.committed
        named = _named(self._watch.drafter, work, self._watch.offered)
        with self._watch.clock(self._phase):
            wait = self._own.start(works, *way)

        def outcomes() -> list[Outcome]:
            with self._watch.clock(self._phase):
                found = wait()
            self._watch.steps.append(_seen(work, committed, found[0], self._watch, named))
            return found

        return outcomes


class _Model(_StandIn):
    def __init__(self, own: Any, clock: _Clock):
        super().__init__(own)
        self._clock = clock

    def forward(self, *args: Any) -> Any:
        with self._clock("forward"):
            return self._own.forward(*args)

    def logits(self, *args: Any) -> Any:
        with self._clock("forward"):
            return self._own.logits(*args)


class _State(_StandIn):
    def __init__(self, own: Any, clock: _Clock):
        super().__init__(own)
        self._clock = clock

    def commit(self, *args: Any) -> None:
        with self._clock("commit"):
            self._own.commit(*args)


def _named(drafter: Any, work: Work, offered: Tree) -> list[dict[str, float]]:
    """Who proposed each node, as the drafter says of its parts; one that says nothing of them has proposed it all."""
    said = drafter.said(work.request) if hasattr(drafter, "said") else {}
    tokens, parents, probs = (array.tolist() for array in (offered.token, offered.parent, offered.prob))
    places: list[dict[str, Any]] = []  # of each node, where it is in each guide
    found = []
    for token, above, prob in zip(tokens, parents, probs):
        at = {name: place for name, (_, place) in said.items()} if above < 0 else places[above]
        chances = {name: guide.children(at[name]).get(token) for name, (guide, _) in said.items()}
        by = {_shown(name): float(chance) for name, chance in chances.items() if chance is not None}
        whole = type(drafter).__name__.removesuffix("Drafter").lower()
        found.append(by or {_shown(whole): prob / probs[above] if above >= 0 else prob})
        places.append({name: guide.after(at[name], token) for name, (guide, _) in said.items()})
    return found


def _shown(name: str) -> str:
    """What the GPU drafts by itself comes from the MTP layer."""
    return "mtp" if name == "device" else name


def _seen(work: Work, committed: int, outcome: Outcome, watch: _Engine, named: list[dict[str, float]]) -> StepSeen:
    """What a step was, once its tokens are known: which of the offered nodes were verified, and which were right."""
    offered = watch.offered
    place = {key: n for n, key in enumerate(zip(offered.parent.tolist(), offered.token.tolist()))}
    kept, accepted = np.zeros(len(offered), bool), np.zeros(len(offered), bool)
    at: dict[int, int] = {-1: -1}  # node of the verified draft -> the same among what was offered
    for n, (parent, token) in enumerate(zip(work.draft.parent.tolist(), work.draft.token.tolist())):
        at[n] = place[at[parent], token]
        kept[at[n]] = True
    node: int | None = -1
    for token in outcome.tokens:
        node = place.get((node, token))
        if node is None or not kept[node]:
            break
        accepted[node] = True
    known = work.tree.token[: work.known].tolist()
    return StepSeen(committed, known, work.decodes, offered, named, kept, accepted, outcome.tokens, watch.worth)
