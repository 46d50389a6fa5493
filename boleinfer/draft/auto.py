"""The default: the n-gram tree, and the MTP layer's grafted on it where the checkpoint has one."""

from __future__ import annotations

from collections.abc import Sequence

from boleinfer.draft.base import Committed, Drafter, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request


class GraftedDrafter:
    """Several drafters' trees in one, shared prefixes joined, the likeliest nodes kept."""

    def __init__(self, drafters: Sequence[Drafter]):
        self._drafters = tuple(drafters)

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        first, *others = [d.propose(requests, limits) for d in self._drafters]
        for trees in others:
            first = [a.graft(b) for a, b in zip(first, trees)]
        return [lim.trim(tree) for tree, lim in zip(first, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        for d in self._drafters:
            d.observe(news)

    def forget(self, request: Request) -> None:
        for d in self._drafters:
            d.forget(request)
