"""Drafts that know the text to come and are right as often as a stated profile says: for measuring speed alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from boleinfer import device, kernels
from boleinfer.device_step import Results, Slots, StepInputs
from boleinfer.forest import Tree

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
    """The nodes of a shape, the likeliest `most` of them and the likelier first, whatever their tokens are."""

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
        order = np.argsort(-tree.prob, kind="stable")
        place = np.append(np.argsort(order), -1)  # the last one: of the root's parent, -1
        chosen = tree.token[order]
        return cls(place[tree.parent[order]], tree.prob[order], np.asarray(rank)[chosen], np.asarray(depth)[chosen])

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


class Guesses:
    """Trees of a profile. What is right is drawn once for each position, so that it does not depend on the company.

    answers: by request all its tokens, prompt included
    honest:  False makes every token wrong, with the same probabilities
    seed:    of what is drawn
    """

    def __init__(
        self, profile: Profile, answers: Sequence[Sequence[int]], vocab: int, honest: bool = True, seed: int = 0
    ):
        self.profile, self._vocab, self._honest = profile, vocab, honest
        self._answers = [np.asarray(a, np.int64) for a in answers]
        longest = max(map(len, self._answers))
        # for each request, position and depth the number that decides which rank the right token has
        self._drawn = np.random.default_rng(seed).random((len(self._answers), longest, DEEPEST))

    def tokens(self, i: int, known: np.ndarray | int, shape: Shape, most: int) -> np.ndarray:
        """int32 [.., nodes], what the nodes of Template.of(profile, shape, most) are behind first tokens of answer i.

        known: how many tokens these are, one number or [..]"""
        t, known = Template.of(self.profile, shape, most), np.asarray(known)
        ahead = self._answers[i].take(known[..., None] + np.arange(shape.depth), mode="wrap")  # [.., depth]
        token = ((ahead[..., t.depth] + 1 + t.rank) % self._vocab).astype(np.int32)
        child = np.full((len(t.parent) + 1, len(self.profile.ranks) + 1), -1)  # by parent and rank; the last: none
        child[t.parent, t.rank] = np.arange(len(t.parent))
        right = np.searchsorted(shape.known * np.cumsum(self.profile.ranks), self._drawn[i, known])  # rank, [.., depth]
        at, goes_on = np.full(known.shape, -1), np.full(known.shape, self._honest)
        for d in range(shape.depth):
            at = child[at, right[..., d]]
            goes_on &= at >= 0
            token[goes_on, at[goes_on]] = ahead[goes_on, d]
        return token


class Oracle:
    """Puts trees in the place of those that the GPU has drafted, at the end of a step, and in what the host is told.

    slots, places: state slots, and places of a text behind which there are trees; most: nodes of a tree
    plans: the ways to draft
    """

    def __init__(self, slots: int, places: int, most: int, plans: Sequence[Hashable]) -> None:
        self._places, self._most = places, most
        self._of = {
            plan: {
                "tokens": device.empty((slots, places, most), np.int32),
                "parents": device.empty((most,), np.int32),
                "probs": device.empty((most,), np.float32),
                "size": device.upload(np.zeros(2, np.int32)),
            }
            for plan in plans
        }

    def silence(self) -> None:
        """From now on nothing is drafted."""
        for arrays in self._of.values():
            device.write(arrays["size"], np.zeros(2, np.int32))

    def tell(self, guesses: Guesses, slots: Sequence[int], first: int, shapes: Sequence[Shape]) -> None:
        """Trees of each plan's shape for the requests in these slots, from `first` known tokens on."""
        for arrays, shape in zip(self._of.values(), shapes):
            t = Template.of(guesses.profile, shape, self._most)
            n = len(t.parent)
            for i, slot in enumerate(slots):
                tokens = np.zeros((self._places, self._most), np.int32)
                tokens[:, :n] = guesses.tokens(i, first + np.arange(self._places), shape, self._most)
                device.write(arrays["tokens"][slot], tokens)
            device.write(arrays["parents"][:n], t.parent.astype(np.int32))
            device.write(arrays["probs"][:n], t.prob.astype(np.float32))
            device.write(arrays["size"], np.asarray([n, first], np.int32))

    def __call__(self, plan: Hashable, requests: int, inputs: StepInputs, slots: Slots, results: Results) -> None:
        """Queues that the drafts of a step's first requests, in the way of that plan, become the trees."""
        on, drafts = inputs.on, ("draft_token", "draft_parent", "draft_prob", "draft_count")
        args = {
            **self._of[plan],
            "slot": on.slot[:requests],
            "limit": on.draft_nodes[:requests],
            "length": slots.length,
            **{name: getattr(slots, name) for name in drafts},
            **{f"told_{name}": getattr(results, name)[:requests] for name in drafts},
            "Places": self._places,
            "N": self._most,
            "L": slots.draft_token.shape[1],
        }
        kernels.launch("overrule.cu", "overrule", requests, 128, args)
