"""Drafts that the GPU made by itself at the end of the last step, or looked-up ones that are surer. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer.draft.base import Limits
from boleinfer.draft.ngram import NgramDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.forest import Tree
from boleinfer.request import Request

OWN = -2  # token of the first node that only the GPU knows; the next ones count down


def own_draft(nodes: int) -> Tree:
    """A tree that stands for the likeliest `nodes` nodes of what the GPU drafted; its tokens are OWN, OWN - 1, ..."""
    n = np.arange(nodes, dtype=np.int32)
    return Tree(OWN - n, np.full(nodes, -1, np.int32), 0.5 ** (1 + n.astype(np.float32)))


def is_own(tree: Tree) -> bool:
    """Whether a draft stands for the GPU's."""
    return len(tree) > 0 and int(tree.token[-1]) <= OWN


class DeviceDrafter(NoDrafter):
    """The GPU's own tree for every request, or the looked-up one where its first token is at least `sure`.

    lookup: None never looks up
    """

    def __init__(self, lookup: NgramDrafter | None = None, sure: float = 0.5):
        self._lookup, self._sure = lookup, sure
        self.reads_text = lookup is not None

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        own = [own_draft(lim.nodes) for lim in limits]
        if self._lookup is None:
            return own
        found = self._lookup.propose(requests, limits)
        return [f if f.prob.max(initial=0.0) >= self._sure else o for f, o in zip(found, own)]

    def forget(self, request: Request) -> None:
        if self._lookup is not None:
            self._lookup.forget(request)
