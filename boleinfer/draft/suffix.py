"""Drafts from text that is there already: what followed the last tokens where they stood before.

Costs no forward pass. All runs of up to LONGEST tokens are kept in a trie with their counts; a tree grows along what
followed the runs that also end the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from boleinfer.draft.base import Committed, Limits, grow
from boleinfer.forest import Tree
from boleinfer.request import Request

LONGEST = 16  # tokens of a run
ORDERS = 5  # runs of a place that are considered, the longest; what a shorter one says counts for next to nothing
WIDEST = 4  # tokens of a place that are considered
DOUBT = 1.0  # what a run's counts are set against: so many sightings of what the run one token shorter says
LEAST = 0.02  # likelihood of a token worth mentioning
END = -1  # stands between two texts


class Run:
    """A run of tokens that was there twice or more.

    count: how often, and followed: how often something came after it
    next:  by the token that came after, the run that is one token longer, or where that token stands if it came after
           only once; the latest is the last
    """

    __slots__ = ("count", "followed", "next")

    def __init__(self, count: int, following: dict[int, Run | int]):
        self.count, self.followed, self.next = count, len(following), following


Runs = Sequence[Run | int]  # what the last 1, 2, ... tokens of a path are in the trie: a run, or where it ends


class SuffixTrie:
    """What followed each run of up to LONGEST tokens of a text that grows; a Guide whose places are Runs.

    A run that was there once is only a place in the text. A token that repeats nothing is one more entry, any other is
    at most LONGEST + 1 of them.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.ending: list[Run] = []  # the Runs at the end of the text
        self._root = Run(0, {})

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        text = self.text
        for token in tokens:
            text.append(token)
            longer = []
            for run in (self._root, *self.ending):
                run.followed += 1
                known = run.next.pop(token, None)
                if known is None:
                    run.next[token] = len(text) - 1
                    continue
                if isinstance(known, int):
                    known = Run(1, {text[known + 1]: known + 1})
                known.count += 1
                run.next[token] = known
                longer.append(known)
            self.ending = longer[:LONGEST]

    def end(self) -> None:
        """What comes next is another text."""
        self.extend([END])
        self.ending = []

    def children(self, at: Runs) -> dict[int, float]:
        """Tokens that followed the longest runs, the latest WIDEST, and how likely each is.

        p_n(t) = (times that t followed the run of n + DOUBT p_{n-1}(t)) / (times that any did + DOUBT), else 0."""
        at = at[-ORDERS:]
        prob: dict[int, float] = {}
        for run in reversed(at):
            for token in self._following(run) if isinstance(run, int) else islice(reversed(run.next), WIDEST):
                prob.setdefault(token, 0.0)
            if len(prob) >= WIDEST:
                break
        prob.pop(END, None)
        for run in at:
            if isinstance(run, int):
                following = self._following(run)
                for token in prob if following else ():
                    prob[token] = ((token in following) + DOUBT * prob[token]) / (1 + DOUBT)
            elif run.followed:
                for token in prob:
                    known = run.next.get(token)
                    times = 0 if known is None else 1 if isinstance(known, int) else known.count
                    prob[token] = (times + DOUBT * prob[token]) / (run.followed + DOUBT)
        return {token: p for token, p in prob.items() if p >= LEAST}

    def after(self, at: Runs, token: int) -> Runs:
        longer: list[Run | int] = []
        for run in (self._root, *at):
            if isinstance(run, int):
                if token in self._following(run):
                    longer.append(run + 1)
            elif (known := run.next.get(token)) is not None:
                longer.append(known)
        return longer[:LONGEST]

    def _following(self, place: int) -> list[int]:
        """The token after a place, if there is one."""
        return self.text[place + 1 : place + 2]


class SuffixDrafter:
    """What followed the last tokens in the request's own prompt and output."""

    own = None

    def __init__(self) -> None:
        self._tries: dict[Request, SuffixTrie] = {}

    def guide(self, request: Request) -> tuple[SuffixTrie, Runs]:
        """What it knows of a request, and where the request stands."""
        trie = self._tries.setdefault(request, SuffixTrie())
        trie.extend(request.tokens[len(trie.text) :])
        return trie, trie.ending

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [grow(*self.guide(r), lim) for r, lim in zip(requests, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._tries.pop(request, None)


class EarlierDrafter:
    """What followed the last tokens in earlier answers, whoever asked for them.

    most: tokens of an answer that are kept, and of them all; when there are more, the older half is dropped
    """

    own = None

    def __init__(self, most: int):
        self._most = most
        self._trie = SuffixTrie()
        self._places: dict[Request, tuple[int, Runs]] = {}  # by how many tokens it takes account of

    def guide(self, request: Request) -> tuple[SuffixTrie, Runs]:
        """What it knows of a request, and where the request stands."""
        tokens = request.tokens
        known, at = self._places.get(request, (0, []))
        for token in tokens[max(known, len(tokens) - LONGEST) :]:
            at = self._trie.after(at, token)
        self._places[request] = len(tokens), at
        return self._trie, at

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        return [grow(*self.guide(r), lim) for r, lim in zip(requests, limits)]

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        """Its answer, with the end of its prompt, is an earlier one from now on."""
        self._places.pop(request, None)
        answer = request.tokens[max(0, request.prompt_length - LONGEST) :][-self._most :]
        text = self._trie.text
        if len(text) + len(answer) > self._most:
            self._trie, self._places = SuffixTrie(), {}
            self._trie.extend(text[len(text) - self._most // 2 :])
        self._trie.extend(answer)
        self._trie.end()
