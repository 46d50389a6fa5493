"""No drafting: plain decoding, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from boleinfer.draft.base import EMPTY, Committed, Drafter, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request


class NoDrafter:
    """Proposes nothing."""

    own: Drafter | None = None

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [EMPTY for _ in requests]

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
