"""Drafts that the GPU made by itself at the end of the last step. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from boleinfer.draft.base import EMPTY, Committed, Drafter, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request


@dataclass(frozen=True)
class Drafted(Committed):
    """News of a request for which the GPU has drafted what comes next.

    draft: its tree, the likelier nodes first"""

    draft: Tree


class DeviceDrafter:
    """The GPU's own tree for every request; none where the last step made none."""

    def __init__(self) -> None:
        self.own: Drafter | None = self
        self._own: dict[Request, Tree] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [self._own.get(r, EMPTY).best(lim.nodes) for r, lim in zip(requests, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        self._own.update((n.request, n.draft if isinstance(n, Drafted) else EMPTY) for n in news)

    def forget(self, request: Request) -> None:
        self._own.pop(request, None)
