"""Drafts that the GPU made by itself at the end of the last step, with looked-up ones grafted on. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from boleinfer.draft.base import EMPTY, Committed, Limits
from boleinfer.draft.ngram import NgramDrafter
from boleinfer.forest import Tree
from boleinfer.request import Request


@dataclass(frozen=True)
class Drafted(Committed):
    """News of a request for which the GPU has drafted what comes next.

    draft: its tree, the likelier nodes first"""

    draft: Tree


class DeviceDrafter:
    """The GPU's own tree for every request, joined with the looked-up one.

    lookup: None never looks up
    """

    def __init__(self, lookup: NgramDrafter | None = None):
        self._lookup = lookup
        self._own: dict[Request, Tree] = {}
        self.reads_text = lookup is not None

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        own = [self._own.get(r, EMPTY).best(lim.nodes) for r, lim in zip(requests, limits)]
        if self._lookup is None:
            return own
        found = self._lookup.propose(requests, limits)
        return [(f.graft(o) if len(f) else o).best(lim.nodes) for f, o, lim in zip(found, own, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        self._own.update((n.request, n.draft) for n in news if isinstance(n, Drafted))
        if self._lookup is not None:
            self._lookup.observe(news)

    def forget(self, request: Request) -> None:
        self._own.pop(request, None)
        if self._lookup is not None:
            self._lookup.forget(request)
