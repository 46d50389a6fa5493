"""A drafter that knows the text to come and is right as often as a stated profile says: for measuring speed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from boleinfer.draft.base import EMPTY, Committed, Limits
from boleinfer.forest import Tree
from boleinfer.request import Request

DEEPEST = 8


@dataclass(frozen=True)
class Profile:
    """How likely the token of each rank is the right one, where all before it on the path were: the same at any depth.

    ranks: falling; their sum is how often any of them is right
    source: where it is from
    """

    name: str
    ranks: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class Shape:
    """A tree of `depth` levels: `top_k` children of each of the `width` likeliest nodes of the level above.

    known: how often the right token is among those that the drafter looks at"""

    top_k: int
    width: int
    depth: int
    known: float = 1.0


@dataclass(frozen=True)
class Template:
    """The nodes of a shape, the likeliest `most` of them, whatever their tokens are: parents, probabilities, ranks."""

    parent: np.ndarray
    prob: np.ndarray
    rank: np.ndarray
    depth: np.ndarray

    @classmethod
    @cache
    def of(cls, profile: Profile, shape: Shape, most: int) -> Template:
        ranks = [shape.known * p for p in profile.ranks[: shape.top_k]]
        parent, prob, rank, depth = [-1] * len(ranks), list(ranks), list(range(len(ranks))), [0] * len(ranks)
        level = list(range(len(ranks)))
        for d in range(1, shape.depth):
            likeliest = sorted(level, key=lambda n: -prob[n])[: shape.width]
            level = []
            for above in likeliest:
                for r, p in enumerate(ranks):
                    level.append(len(parent))
                    parent.append(above)
                    prob.append(prob[above] * p)
                    rank.append(r)
                    depth.append(d)
        tree = Tree.of(range(len(parent)), parent, prob).best(most)
        chosen = tree.token
        return cls(tree.parent, tree.prob, np.asarray(rank)[chosen], np.asarray(depth)[chosen])

    @property
    def tokens_per_step(self) -> float:
        """What a step gives on average, the model's own token included."""
        return 1 + float(self.prob.sum())


def scaled(ranks: Sequence[float], tokens: float, shape: Shape, most: int) -> tuple[float, ...]:
    """Ranks in the given proportions with which a tree of `most` nodes of that shape gives so many tokens a step."""
    low, high = 0.0, 1.0 / sum(ranks)
    for _ in range(40):
        middle = (low + high) / 2
        made = tuple(middle * r for r in ranks)
        found = Template.of.__wrapped__(Template, Profile("", made, ""), shape, most).tokens_per_step
        low, high = (middle, high) if found < tokens else (low, middle)
    return tuple(low * r for r in ranks)


class ProfileDrafter:
    """Trees of a profile. What is right is drawn once for each position, so that it does not depend on the company.

    answers: by request number (Request.sampler's choice) all its tokens, prompt included
    shape:   that of the next trees; None: nothing is drafted
    honest:  False makes every token wrong, with the same probabilities
    seed:    of what is drawn
    """

    reads_text = False  # as the drafts that it stands for, which the GPU makes

    def __init__(
        self,
        profile: Profile,
        answers: Sequence[Sequence[int]],
        shape: Callable[[], Shape | None],
        vocab: int,
        honest: bool = True,
        seed: int = 0,
    ):
        self._profile, self._shape, self._vocab, self._honest = profile, shape, vocab, honest
        self._answers = [np.asarray(a, np.int64) for a in answers]
        longest = max(map(len, self._answers))
        # for each request, position and depth the number that decides which rank the right token has
        self._drawn = np.random.default_rng(seed).random((len(self._answers), longest, DEEPEST))
        self._number: dict[Request, int] = {}
        self._made: dict[tuple[int, int, Shape, Limits], Tree] = {}

    def number(self, requests: Sequence[Request]) -> None:
        """Says whose answers these are, in order."""
        self._number = {r: i for i, r in enumerate(requests)}

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        shape = self._shape()
        if shape is None:
            return [EMPTY for _ in requests]
        return [self._tree(self._number[r], len(r.tokens), shape, lim) for r, lim in zip(requests, limits)]

    def prepare(self, start: int, count: int, shapes: Sequence[Shape], limits: Limits) -> None:
        """Makes the trees of `count` places from `start` on: the time it takes is no part of what they stand for."""
        for i, known, shape in product(range(len(self._answers)), range(start, start + count), shapes):
            if known < len(self._answers[i]):
                self._tree(i, known, shape, limits)

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def _tree(self, i: int, known: int, shape: Shape, limits: Limits) -> Tree:
        key = i, known, shape, limits
        if key not in self._made:
            self._made[key] = self._grown(*key)
        return self._made[key]

    def _grown(self, i: int, known: int, shape: Shape, limits: Limits) -> Tree:
        t = Template.of(self._profile, shape, limits.nodes)
        ahead = self._answers[i][known : known + shape.depth]
        depth = min(len(ahead), limits.depth)
        if not depth:
            return EMPTY
        padded = np.resize(ahead, shape.depth)
        token = (padded[t.depth] + 1 + t.rank) % self._vocab
        tree = Tree(token.astype(np.int32), t.parent, t.prob)
        at, right = -1, np.searchsorted(shape.known * np.cumsum(self._profile.ranks), self._drawn[i, known])
        for d in range(depth if self._honest else 0):
            children = np.flatnonzero((t.parent == at) & (t.rank == right[d]))
            if not len(children):
                break
            at = int(children[0])
            tree.token[at] = padded[d]
        return tree if depth == shape.depth else tree.keep(np.flatnonzero(t.depth < depth))
