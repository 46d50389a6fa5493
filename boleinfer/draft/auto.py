"""The default: the n-gram tree, and the MTP layer's grafted on it where looking up is not sure enough."""

from __future__ import annotations

from collections.abc import Sequence

from boleinfer.draft.base import Committed, Drafter, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request


class GraftedDrafter:
    """Two drafters' trees in one, shared prefixes joined, the likeliest nodes kept.

    cheap:  always asked
    costly: asked only where the cheap one's likeliest first token is less likely than `sure`
    """

    reads_text = True

    def __init__(self, cheap: Drafter, costly: Drafter, sure: float = 0.5):
        self._cheap, self._costly, self._sure = cheap, costly, sure

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        trees = self._cheap.propose(requests, limits)
        unsure = [i for i, tree in enumerate(trees) if tree.prob.max(initial=0.0) < self._sure]
        if unsure:
            more = self._costly.propose([requests[i] for i in unsure], [limits[i] for i in unsure])
            for i, tree in zip(unsure, more):
                trees[i] = limits[i].trim(trees[i].graft(tree))
        return trees

    def observe(self, news: Sequence[Committed]) -> None:
        self._cheap.observe(news)
        self._costly.observe(news)

    def forget(self, request: Request) -> None:
        self._cheap.forget(request)
        self._costly.forget(request)
