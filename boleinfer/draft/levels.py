"""Trees grown with a model level by level: a pass over the likeliest nodes of a level gives the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from boleinfer.draft.base import Limits
from boleinfer.forest import Tree

BROUGHT = 0.5  # tokens by a pass over a node that is right: not every child is, and all have to be verified, too
REMEMBERED = 8  # passes, the quickest of which says what one costs: the others met something else on the machine


class Growing:
    """The tree of one request while it grows: all candidates, and which of them were looked at in a pass.

    looked, above: those candidates, in the order of their passes, and for each the place of its parent among them
    """

    def __init__(self) -> None:
        self.token: list[int] = []
        self.parent: list[int] = []
        self.prob: list[float] = []
        self.looked: list[int] = []
        self.above: list[int] = []
        self._level = 0  # the first candidate of the deepest level

    def add(self, parents: Sequence[int], tokens: np.ndarray, probs: np.ndarray) -> None:
        """A level: the children of each parent (-1: roots), both [parents, top_k]."""
        self._level = len(self.token)
        for parent, children, shares in zip(parents, tokens.tolist(), probs.tolist()):
            likely = self.prob[parent] if parent >= 0 else 1.0
            self.token += children
            self.parent += [parent] * len(children)
            self.prob += [likely * share for share in shares]

    def choose(self, most: int, least: float) -> list[int]:
        """The likeliest candidates of the deepest level, to be looked at next: `most` of them, none below `least`."""
        level = range(self._level, len(self.token))
        chosen = [n for n in sorted(level, key=lambda n: -self.prob[n])[: max(0, most)] if self.prob[n] >= least]
        places = {n: i for i, n in enumerate(self.looked)}
        self.above += [places.get(self.parent[n], -1) for n in chosen]
        self.looked += chosen
        return chosen

    def passes(self, known: Sequence[int] = ()) -> Tree:
        """The tree of the candidates that were looked at, below a chain of known tokens."""
        tokens, m = [self.token[n] for n in self.looked], len(known)
        return Tree.of([*known, *tokens], [*range(-1, m - 1), *(m - 1 if a < 0 else m + a for a in self.above)])

    def tree(self, limits: Limits) -> Tree:
        """The likeliest candidates."""
        return limits.trim(Tree.of(self.token, self.parent, self.prob))


Look = Callable[[list[Growing], list[list[int]]], np.ndarray]


@dataclass
class Levels:
    """How trees grow.

    top_k: children of a node; width: nodes of a level that are looked at, none less likely than `worth`; depth: levels
    """

    top_k: int = 3
    width: int = 1
    depth: int = 8
    worth: float = 0.0

    def __post_init__(self) -> None:
        for name in ("top_k", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a drafted tree: at least 1 is needed")
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def grow(self, limits: Sequence[Limits], look: Look) -> list[Tree]:
        """A tree for each of the limits; each looks at `Limits.nodes` nodes at most.

        look: given the growing trees and of each some nodes (-1: the last known token), the logits [n, vocab] of what
              follows these nodes, tree by tree
        """
        growing = [Growing() for _ in limits]
        chosen = [[-1] if lim.depth > 0 and lim.nodes > 0 else [] for lim in limits]
        for level in range(1, self.depth + 1):
            if not any(chosen) or (level > 1 and not self._pays(growing, chosen, limits)):
                break
            began = perf_counter()
            ids, prob = top(look(growing, chosen), self.top_k)
            if level > 1:
                self._seconds.append(perf_counter() - began)
            ends = np.cumsum([len(nodes) for nodes in chosen])[:-1]
            for g, nodes, t, p in zip(growing, chosen, np.split(ids, ends), np.split(prob, ends)):
                g.add(nodes, t, p)
            chosen = [
                g.choose(min(self.width, lim.nodes - len(g.looked)), max(self.worth, lim.min_prob))
                if level < lim.depth
                else []
                for g, lim in zip(growing, limits)
            ]
        return [g.tree(lim) for g, lim in zip(growing, limits)]

    def _pays(self, growing: list[Growing], chosen: list[list[int]], limits: Sequence[Limits]) -> bool:
        """Whether a pass brings more tokens than its time does otherwise."""
        likely = sum(g.prob[n] for g, nodes in zip(growing, chosen) for n in nodes)
        return not self._seconds or BROUGHT * likely > limits[0].pace * min(self._seconds)


def top(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest tokens of each row, int64 [n, k], in any order, and their probabilities; logits: [n, vocab]."""
    k = min(k, logits.shape[1])
    ids = np.argpartition(logits, -k, axis=1)[:, -k:]
    peak = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - peak).sum(axis=1, keepdims=True)
    return ids, np.exp(np.take_along_axis(logits, ids, axis=1) - peak) / total
