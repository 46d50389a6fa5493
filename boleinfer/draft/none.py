"""No drafting: plain decoding, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from boleinfer.draft.base import EMPTY, Committed, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request


class NoDrafter:
    """Proposes nothing."""

    reads_text = False

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [EMPTY for _ in requests]

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
