"""Drafts from the request's own prompt and output: what followed the last tokens when they stood there before.

Costs no forward pass. The longest earlier matches propose their continuations, merged into one tree; how far a match of
a given length can be trusted is counted as the text goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from boleinfer.draft.base import EMPTY, Committed, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request

SHORTEST, LONGEST = 2, 12  # tokens of a match that count
MATCHES = 4  # earlier places looked at


class _Index:
    """Where each run of SHORTEST tokens of one request ended, and how often matches of each length were right."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._known = 0
        # hits and tries by match length; the prior says 0.3 for a match of 2 tokens, 0.85 for one of 12
        self._hits = [8 * (0.3 + 0.55 * n / LONGEST) for n in range(LONGEST + 1)]
        self._tries = [8.0] * (LONGEST + 1)

    def extend(self, tokens: list[int]) -> None:
        """Takes the tokens that are new since the last call, each judging the match before it."""
        for end in range(max(self._known, SHORTEST), len(tokens)):
            found = self.matches(tokens, end)
            if found:
                length, at = found[0]
                self._tries[length] += 1
                self._hits[length] += tokens[at] == tokens[end]
            ends = self._ends.setdefault(tuple(tokens[end - SHORTEST : end]), [])
            ends.append(end)
            del ends[:-MATCHES]
        self._known = len(tokens)

    def matches(self, tokens: list[int], end: int) -> list[tuple[int, int]]:
        """Earlier places that read like the end of tokens[:end]: (length, where it goes on), longest first."""
        found = []
        for at in self._ends.get(tuple(tokens[end - SHORTEST : end]), ()) if end >= SHORTEST else ():
            length = SHORTEST
            while length < min(LONGEST, at) and tokens[at - length - 1] == tokens[end - length - 1]:
                length += 1
            found.append((length, at))
        return sorted(found, reverse=True)

    def trust(self, length: int) -> float:
        """Share of matches of this length whose next token was right."""
        length = min(length, LONGEST)
        return self._hits[length] / self._tries[length]


class NgramDrafter:
    """Prompt and output lookup, one index a request; constant memory a token."""

    reads_text = True

    def __init__(self) -> None:
        self._indexes: dict[Request, _Index] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [self._propose(r, lim) for r, lim in zip(requests, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)

    def _propose(self, request: Request, limits: Limits) -> Tree:
        tokens = request.tokens
        index = self._indexes.setdefault(request, _Index())
        index.extend(tokens)
        tree = EMPTY
        for length, at in index.matches(tokens, len(tokens)):
            chain = Tree.chain(tokens[at : at + limits.depth])
            for n in range(len(chain)):
                chain.prob[n] = (chain.prob[n - 1] if n else 1.0) * index.trust(length + n)
            tree = tree.graft(chain)
        return limits.trim(tree)
