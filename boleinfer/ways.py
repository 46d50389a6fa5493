"""How a step may be drafted for, and what the budget is told of one. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from boleinfer.forest import Tree


@dataclass(frozen=True)
class Way:
    """A way to draft.

    asks:    the drafter is asked for trees, for which it reads what the step before gave
    variant: the GPU drafts for the next step, in its way of this number; 0: it does not. Where nobody is asked, its
             drafts are all there is, and steps may begin before the ones before them are read
    depth:   tokens of a path at most
    """

    asks: bool = False
    variant: int = 0
    depth: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU drafts."""
        return self.variant > 0

    @property
    def kind(self) -> tuple[bool, bool]:
        """Who drafts."""
        return self.asks, self.on_gpu


PLAIN = Way()


@dataclass(frozen=True)
class StepNews:
    """What a step of decoding requests alone was, and gave.

    way:      its way; `drawn` the one that made the trees that it verified
    batch, context, rows: requests, their mean length, rows in all
    drafts, accepted: of each request the guesses that were verified, and how many tokens of them were right
    seconds:  of the whole step; draft_s: of it, the host's drafting
    """

    way: int
    drawn: int
    batch: int
    context: float
    rows: int
    drafts: Sequence[Tree]
    accepted: Sequence[int]
    seconds: float
    draft_s: float

    @property
    def expected(self) -> float:
        """Tokens of drafts that should be right by their probabilities."""
        return sum(float(d.prob.sum()) for d in self.drafts)
