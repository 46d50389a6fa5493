"""What a drafter is: it watches what was committed and proposes a tree for what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """

    nodes: int = 16
    depth: int = 8
    min_prob: float = 0.0

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

    reads_text: whether a proposal needs the tokens of the step before (else it is the same every time)
    """

    reads_text: bool

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        """A tree for each request: drafted nodes only, its roots candidates for the first unknown token."""
        ...

    def observe(self, news: Sequence[Committed]) -> None:
        """Called after each commit with what was committed, for requests that go on."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended; called once, also for requests never observed."""
        ...


EMPTY = Tree.chain([])
