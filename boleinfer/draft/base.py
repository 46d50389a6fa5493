"""What a drafter is: it watches what was committed and proposes a tree for what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

import numpy as np

from boleinfer.device import Array
from boleinfer.forest import Tree
from boleinfer.request import Request


@dataclass(frozen=True)
class Limits:
    """Bounds of one proposal.

    nodes:    drafted tokens of a tree at most
    depth:    tokens of one path at most
    min_prob: likelihood of acceptance below which a node is not worth its row
    pace:     tokens a second that all requests together get now: what takes longer than the tokens that it may bring
              does not pay (0: time does not matter)
    """

    nodes: int = 16
    depth: int = 8
    min_prob: float = 0.0
    pace: float = 0.0

    def trim(self, tree: Tree) -> Tree:
        """The likeliest nodes that the bounds allow (depth is the drafter's own affair: it would not look further)."""
        return tree.keep(np.flatnonzero(tree.prob >= self.min_prob)).best(self.nodes)


@dataclass(frozen=True)
class Committed:
    """News of one request: rows start .. start+m-1 are committed, and the tokens up to position start+m (the one just
    sampled, or the next of the prompt) are known.

    hidden: the target's own hidden rows [m, D]; None where the drafts are made on the GPU"""

    request: Request
    start: int
    hidden: Array


class Drafter(Protocol):
    """Proposals change only the speed: whatever is proposed, the same tokens come out.

    own: what of it proposes the GPU's own drafts, for which no token of the step before has to be read; None: nothing
    """

    @property
    def own(self) -> Drafter | None: ...

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        """A tree for each request: drafted nodes only, its roots candidates for the first unknown token."""
        ...

    def observe(self, news: Sequence[Committed]) -> None:
        """Called after each commit with what was committed, for requests that go on."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended; called once, also for requests never observed."""
        ...


class Guide(Protocol):
    """What follows one request's text, place by place; what a place is, is the guide's own affair."""

    def children(self, at: Any) -> Mapping[int, float]:
        """Tokens that may come next, and how likely each is; none where the guide knows nothing."""
        ...

    def after(self, at: Any, token: int) -> Any:
        """The place one token further."""
        ...


def grow(guide: Guide, at: Any, limits: Limits) -> Tree:
    """The tree of the likeliest nodes that a guide leads to, best first."""
    token: list[int] = []
    parent: list[int] = []
    prob: list[float] = []
    found: list[tuple[float, int, int, int, int, Any]] = []  # heap of nodes that may come next, the likeliest first
    order = count()

    def look(node: int, at: Any, likely: float, depth: int) -> None:
        if depth < limits.depth:
            for t, p in guide.children(at).items():
                heappush(found, (-likely * p, next(order), node, depth, t, at))

    look(-1, at, 1.0, 0)
    while found and len(token) < limits.nodes and -found[0][0] >= limits.min_prob:
        falling, _, above, depth, t, at = heappop(found)
        token.append(t)
        parent.append(above)
        prob.append(-falling)
        look(len(token) - 1, guide.after(at, t), -falling, depth + 1)
    return Tree.of(token, parent, prob)


EMPTY = Tree.chain([])
