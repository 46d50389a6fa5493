"""Which requests take part in a step and with how many rows. Moves no data and knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from boleinfer.budget import Budget
from boleinfer.draft.base import EMPTY, Drafter, Limits
from boleinfer.forest import Tree
from boleinfer.memory import OutOfPlaces
from boleinfer.request import Request
from boleinfer.state import State
from boleinfer.ways import Way


@dataclass(frozen=True)
class Work:
    """One request's part of a step: a chain of `known` tokens, and the drafted tree that hangs on its last node.

    complete: the chain ends with the request's last known token, so that a new token can be sampled after it
    decodes:  the step goes on from a sampled token (else it reads the prompt)"""

    request: Request
    tree: Tree
    known: int
    complete: bool
    decodes: bool

    @property
    def drafted(self) -> int:
        """Rows that are guesses."""
        return len(self.tree) - self.known

    @cached_property
    def draft(self) -> Tree:
        """The guesses alone; their roots follow the last known token."""
        t, m = self.tree, self.known
        return Tree(t.token[m:], t.parent[m:] - m, t.prob[m:])  # roots hang on node m - 1


def grow(known: Sequence[int], draft: Tree) -> Tree:
    """The chain of known tokens with the drafted roots as children of its last node."""
    m = len(known)
    tree = Tree.chain([*known, *[0] * len(draft)])
    tree.token[m:], tree.prob[m:] = draft.token, draft.prob
    np.add(draft.parent, m, out=tree.parent[m:])  # -1, a root's, becomes m - 1
    return tree


def mean_length(requests: Sequence[Request]) -> float:
    """Committed tokens of an average one."""
    return sum(r.committed for r in requests) / max(1, len(requests))


class Scheduler:
    """First come, first served; a request is admitted when its longest possible life fits, so nothing is ever evicted.

    max_batch:  requests in a step
    max_rows:   rows in a step (prompts are cut into pieces that fit)
    draft_rows: drafted rows in a step, over the whole batch
    limits:     bounds of one request's drafted tree
    scratch:    places behind the committed tokens that drafting and verification may write
    """

    def __init__(self, state: State, max_batch: int, max_rows: int, draft_rows: int, limits: Limits, scratch: int):
        self._state = state
        self.max_batch, self.max_rows, self.draft_rows = max_batch, max_rows, draft_rows
        self.limits, self.scratch = limits, scratch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def admit(self) -> list[Request]:
        """Gives waiting requests a place, in order, as long as there is room; returns those that got one."""
        admitted = []
        while self.waiting and len(self.running) < self.max_batch:
            try:
                self.waiting[0].place = self._state.take(self.waiting[0].limit + self.scratch)
            except OutOfPlaces:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    @property
    def decoding(self) -> list[Request]:
        """Running requests whose prompt has been read."""
        return [r for r in self.running if r.stats.generated_tokens]

    def plan(self, drafter: Drafter, budget: Budget, way: int) -> list[Work]:
        """The rows of the next step: every decoding request's tree first, then pieces of prompts.

        way: the budget's, in which the step is drafted for"""
        decoding = self.decoding
        rows = self.max_rows - len(decoding)
        limits = [self._limits(r) for r in decoding]
        asked = _asked(drafter, budget.ways[way])
        drafts = [EMPTY for _ in decoding] if asked is None or not decoding else asked.propose(decoding, limits)
        drafts = [tree.best(lim.nodes) for tree, lim in zip(drafts, limits)]  # whatever the drafter thinks of limits
        trees = budget.share(drafts, way, mean_length(decoding), max(0, min(rows, self.draft_rows)))
        works = [Work(r, grow(r.pending, t), 1, complete=True, decodes=True) for r, t in zip(decoding, trees)]
        rows -= sum(w.drafted for w in works)
        for request in self.running:
            if rows > 0 and not request.stats.generated_tokens:
                pending = request.pending
                piece = Tree.chain(pending[:rows])
                works.append(Work(request, piece, len(piece), complete=len(piece) == len(pending), decodes=False))
                rows -= len(piece)
        return works

    def drop(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its place."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.place is not None:
            self._state.give_back(request.place)
            request.place = None

    def _limits(self, request: Request) -> Limits:
        """Nothing is drafted beyond the last token the request may still get."""
        room = request.limit - len(request.tokens) - 1
        depth = max(0, min(self.limits.depth, room))
        if depth == self.limits.depth:
            return self.limits
        return replace(self.limits, depth=depth, nodes=self.limits.nodes if depth else 0)


def _asked(drafter: Drafter, way: Way) -> Drafter | None:
    """Who drafts in a way."""
    if way.asks:
        return drafter
    return drafter.own if way.variant else None
