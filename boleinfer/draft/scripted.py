"""A drafter that proposes what a function says: for tests and for measuring with a stated acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.none import NoDrafter
from boleinfer.forest import Tree
from boleinfer.request import Request


class ScriptedDrafter(NoDrafter):
    """script(request) gives the tree that follows the request's last known token; `news` keeps what was observed."""

    own = None

    def __init__(self, script: Callable[[Request], Tree]):
        self._script = script
        self.news: list[Committed] = []

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [self._script(r) for r in requests]

    def observe(self, news: Sequence[Committed]) -> None:
        self.news.extend(news)
