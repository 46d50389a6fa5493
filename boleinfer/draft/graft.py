"""Several drafters' candidates in one tree, shared prefixes joined, each node as likely as experience says.

What costs nothing is looked up at every node of the tree, also below what others proposed. What costs a pass over a
model is asked where the tokens it may bring are worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any, Protocol

from boleinfer.draft.base import Committed, Drafter, Guide, Limits, grow
from boleinfer.draft.calibration import Calibration, Vote
from boleinfer.forest import Tree
from boleinfer.request import Request

RECENT = 32  # steps over which what a drafter brings and takes is averaged
PACED = 4  # the same of the tokens that a request gets in a step: texts change from line to line
SLEPT = 4  # times an average step, above which a time says more of the machine
HOPED = 1.5  # tokens that a drafter brings to a request that has no other's, until it is known; weighs as one time


class Lookup(Protocol):
    """A drafter that can be asked about any place of a tree, at no cost."""

    def guide(self, request: Request) -> tuple[Guide, Any]:
        """What it knows of a request, and the place where the request stands."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


class TreeGuide:
    """A drafted tree as a guide; a place is a node, -1 before its roots, None outside."""

    def __init__(self, tree: Tree):
        prob, parent = tree.prob.tolist(), tree.parent.tolist()
        self._share = [p / (prob[above] or 1.0) if above >= 0 else p for p, above in zip(prob, parent)]
        self._children: dict[int | None, dict[int, int]] = {}
        for n, (token, above) in enumerate(zip(tree.token.tolist(), parent)):
            self._children.setdefault(above, {})[token] = n

    def children(self, at: int | None) -> dict[int, float]:
        return {token: self._share[n] for token, n in self._children.get(at, {}).items()}

    def after(self, at: int | None, token: int) -> int | None:
        return self._children.get(at, {}).get(token)


class Joined:
    """Guides as one, by a calibration; a place is a place of each. None stands for a drafter that was not asked."""

    def __init__(self, guides: Sequence[Guide | None], calibration: Calibration):
        self._guides, self._calibration = guides, calibration

    def votes(self, at: Sequence[Any]) -> dict[int, Vote]:
        """What the guides say of each token that one of them names."""
        return self._calibration.votes([None if g is None else g.children(a) for g, a in zip(self._guides, at)])

    def children(self, at: Sequence[Any]) -> dict[int, float]:
        return self._calibration.likely(self.votes(at))

    def after(self, at: Sequence[Any], token: int) -> list[Any]:
        return [None if g is None else g.after(a, token) for g, a in zip(self._guides, at)]


@dataclass
class _Asked:
    """What the drafters said of a request whose text had so many tokens, and where it stood in each one's guide."""

    length: int
    guides: list[Guide | None]
    at: list[Any]

    def uncovered(self, calibration: Calibration) -> float:
        """How likely it is that nobody has named the next token."""
        return 1 - sum(Joined(self.guides, calibration).children(self.at).values())


@dataclass
class _Record:
    """Recent sums of one drafter: times it was asked about a request, tokens of it that were right; its calls, and
    their seconds."""

    asked: float = 0.0
    right: float = 0.0
    calls: float = 0.0
    seconds: float = 0.0

    def fade(self) -> None:
        """A step has passed. What a drafter that is not asked was like is forgotten, so that it is tried again."""
        for name in ("asked", "right", "calls", "seconds"):
            setattr(self, name, getattr(self, name) * (1 - 1 / RECENT))

    def pays(self, uncovered: float, pace: float) -> bool:
        """Whether asking brings more tokens than its time does otherwise; uncovered: requests without other drafts."""
        return uncovered * (self.right + HOPED) / (self.asked + 1) > pace * self.seconds / (self.calls + 1)


class GraftedDrafter:
    """One tree of what several drafters propose.

    lookups:  asked about every node
    drafters: asked for a tree where it pays; `always`: every time
    """

    def __init__(self, lookups: Sequence[Lookup], drafters: Sequence[Drafter] = (), always: bool = False):
        self.own = next((d.own for d in drafters if d.own is not None), None)
        self._lookups, self._drafters, self._always = lookups, drafters, always
        self._calibration = Calibration()
        self._records = [_Record() for _ in drafters]
        self._asked: dict[Request, _Asked] = {}
        self._tokens: dict[Request, float] = {}  # that a step gives a request
        self._began = 0.0
        self._step_s = 0.0  # 0 while no step has been timed: all that takes time has to wait

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        self._began = perf_counter()
        self._asked = {}
        if not requests:
            return []
        for r in requests:
            found = [lookup.guide(r) for lookup in self._lookups]
            none = [None] * len(self._drafters)
            self._asked[r] = _Asked(len(r.tokens), [g for g, _ in found] + none, [at for _, at in found] + none)
        pace = sum(self._tokens.get(r, 1.0) for r in requests) / self._step_s if self._step_s else inf
        limits = [replace(lim, pace=pace) for lim in limits]
        for i in range(len(self._drafters)):
            self._ask(i, requests, limits)
        return [
            grow(Joined(asked.guides, self._calibration), asked.at, lim)
            for asked, lim in zip(self._asked.values(), limits)
        ]

    def observe(self, news: Sequence[Committed]) -> None:
        for drafter in self._drafters:
            drafter.observe(news)
        for record in self._records:
            record.fade()
        asked, self._asked = self._asked, {}
        for n in news:
            if n.request in asked:
                self._learn(n.request, asked[n.request])
        if asked and all(n.request in asked for n in news):  # a step that reads no prompt
            seconds = perf_counter() - self._began
            before = self._step_s or seconds
            self._step_s = before + (min(seconds, SLEPT * before) - before) / RECENT

    def forget(self, request: Request) -> None:
        self._asked.pop(request, None)
        self._tokens.pop(request, None)
        for lookup in self._lookups:
            lookup.forget(request)
        for drafter in self._drafters:
            drafter.forget(request)

    def said(self, request: Request) -> dict[str, tuple[Guide, Any]]:
        """Whose guides the request's last tree grew along, and where each began; for those who watch."""
        if (asked := self._asked.get(request)) is None:
            return {}
        names = [_name(part) for part in (*self._lookups, *self._drafters)]
        return {n: (g, at) for n, g, at in zip(names, asked.guides, asked.at) if g is not None}

    def _ask(self, i: int, requests: Sequence[Request], limits: Sequence[Limits]) -> None:
        """Asks a drafter for its trees, if it pays."""
        record, known = self._records[i], self._step_s > 0
        if not self._always:
            uncovered = sum(asked.uncovered(self._calibration) for asked in self._asked.values())
            if not (known and record.pays(uncovered, limits[0].pace)):
                return
        began = perf_counter()
        trees = self._drafters[i].propose(requests, limits)
        seconds = perf_counter() - began
        record.calls += 1
        record.seconds += min(seconds, SLEPT * self._step_s) if known else seconds
        for asked, tree in zip(self._asked.values(), trees):
            asked.guides[len(self._lookups) + i], asked.at[len(self._lookups) + i] = TreeGuide(tree), -1

    def _learn(self, request: Request, asked: _Asked) -> None:
        """Compares what was said with what came."""
        joined, at = Joined(asked.guides, self._calibration), asked.at
        came = request.tokens[asked.length :]
        for token in came:
            for named, vote in joined.votes(at).items():
                self._calibration.learn(vote, named == token)
            at = joined.after(at, token)
        before = self._tokens.get(request, 1.0)
        self._tokens[request] = before + (len(came) - before) / PACED
        for record, guide in zip(self._records, asked.guides[len(self._lookups) :]):
            if guide is not None:
                record.asked += 1
                record.right += _right(guide, came)


def _name(part: object) -> str:
    return type(part).__name__.removesuffix("Drafter").lower()


def _right(guide: Guide, came: Sequence[int]) -> int:
    """How many of the tokens that came a tree's guide leads to."""
    at: Any = -1
    for n, token in enumerate(came):
        at = guide.after(at, token)
        if at is None:
            return n
    return len(came)
