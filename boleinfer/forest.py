"""The forest of one step: which token is whose child, in flat NumPy arrays. Knows nothing of models, states or devices.

One step verifies a tree of tokens for every request of the batch. Plain decoding is a tree of one node, a drafted
chain is a path, a prefill chunk is a long path. The nodes of all trees lie in one list of R rows, trees one after
another; inside a tree a parent comes before its children but need not be adjacent to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Tree:
    """The tokens one request asks to verify, as a tree (or several trees side by side: `parent` may hold many -1).

    token:  int32 [N]
    parent: int32 [N], index of the parent inside this tree, -1 at a root; parent[n] < n
    prob:   float32 [N], estimated probability that the path to this node is accepted (1 at a root)
    """

    token: np.ndarray
    parent: np.ndarray
    prob: np.ndarray

    @classmethod
    def chain(cls, tokens: Sequence[int] | np.ndarray) -> Tree:
        """A path: each token is the child of the one before it."""
        n = len(tokens)
        return cls(np.asarray(tokens, np.int32), np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32))

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], probs: Sequence[float] | None = None) -> Tree:
        """A tree from plain lists; raises ValueError where a parent does not come before its child."""
        tree = cls(
            np.asarray(tokens, np.int32),
            np.asarray(parents, np.int32),
            np.ones(len(tokens), np.float32) if probs is None else np.asarray(probs, np.float32),
        )
        if not len(tree.token) == len(tree.parent) == len(tree.prob):
            raise ValueError(
                f"a tree needs as many parents and probabilities as tokens: "
                f"got {len(tree.token)} tokens, {len(tree.parent)} parents, {len(tree.prob)} probabilities"
            )
        bad = np.flatnonzero((tree.parent >= np.arange(len(tree))) | (tree.parent < -1))
        if bad.size:
            raise ValueError(
                f"node {bad[0]} of the tree has parent {tree.parent[bad[0]]}; a parent must come before it"
            )
        return tree

    def __len__(self) -> int:
        return len(self.token)

    @cached_property
    def is_chain(self) -> bool:
        """True when every node is the only child of the node before it (plain decoding, prefill, chain drafts)."""
        return bool((self.parent == np.arange(-1, len(self) - 1)).all())

    @cached_property
    def depth(self) -> np.ndarray:
        """int32 [N], 0 at a root."""
        if self.is_chain:
            return np.arange(len(self), dtype=np.int32)
        depth = np.zeros(len(self), np.int32)
        for n, p in enumerate(self.parent.tolist()):
            if p >= 0:
                depth[n] = depth[p] + 1
        return depth

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [N, N]: entry [n, a] is True when a is n itself or lies on the path from the root to n."""
        if self.is_chain:
            return np.tri(len(self), dtype=bool)
        mask = np.eye(len(self), dtype=bool)
        for n, p in enumerate(self.parent.tolist()):
            if p >= 0:
                mask[n] |= mask[p]
        return mask

    def path(self, node: int) -> np.ndarray:
        """int32: the nodes from the root to `node`, both included."""
        nodes = [node]
        while (node := int(self.parent[node])) >= 0:
            nodes.append(node)
        return np.asarray(nodes[::-1], np.int32)

    def best(self, n: int) -> Tree:
        """The subtree of the `n` likeliest nodes; closed under parents because a path never gains probability."""
        if n >= len(self):
            return self
        order = np.argsort(-np.minimum.accumulate(self.prob) if self.is_chain else -self.prob, kind="stable")
        return self.keep(np.sort(order[:n]))

    def keep(self, nodes: np.ndarray) -> Tree:
        """The subtree of `nodes` (increasing, closed under parents)."""
        renumber = np.full(len(self) + 1, -1, np.int32)  # the extra last entry serves parent -1
        renumber[nodes] = np.arange(len(nodes), dtype=np.int32)
        return Tree(self.token[nodes], renumber[self.parent[nodes]], self.prob[nodes])

    def along(self, tokens: Sequence[int]) -> np.ndarray:
        """int32: the path that these tokens lead down from a root, as far as the tree goes."""
        children = {(p, t): n for n, (p, t) in enumerate(zip(self.parent.tolist(), self.token.tolist()))}
        nodes: list[int] = []
        for token in tokens:
            node = children.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return np.asarray(nodes, np.int32)


@dataclass(frozen=True)
class Forest:
    """The trees of a batch, one a request, as flat rows.

    trees:     the trees, in batch order; B of them
    committed: int64 [B], tokens of each request that the states already hold (T)
    """

    trees: tuple[Tree, ...]
    committed: np.ndarray

    @classmethod
    def of(cls, trees: Sequence[Tree], committed: Sequence[int] | np.ndarray) -> Forest:
        if len(trees) != len(committed):
            raise ValueError(f"{len(trees)} trees need as many committed lengths, got {len(committed)}")
        return cls(tuple(trees), np.asarray(committed, np.int64))

    def __len__(self) -> int:
        return int(self.start[-1])

    @cached_property
    def start(self) -> np.ndarray:
        """int32 [B+1]: the rows of request b are start[b] .. start[b+1]-1."""
        start = np.zeros(len(self.trees) + 1, np.int32)
        np.cumsum([len(t) for t in self.trees], out=start[1:])
        return start

    @cached_property
    def token(self) -> np.ndarray:
        """int32 [R]."""
        return _concat([t.token for t in self.trees])

    @cached_property
    def depth(self) -> np.ndarray:
        """int32 [R]."""
        return _concat([t.depth for t in self.trees])

    @cached_property
    def parent(self) -> np.ndarray:
        """int32 [R]: row of the parent, -1 at a root."""
        return _concat([np.where(t.parent < 0, -1, t.parent + s) for t, s in zip(self.trees, self.start)])

    @cached_property
    def request(self) -> np.ndarray:
        """int32 [R]: index of the request in the batch."""
        return np.repeat(np.arange(len(self.trees), dtype=np.int32), np.diff(self.start))

    @cached_property
    def position(self) -> np.ndarray:
        """int64 [R]: the rotary position, committed length plus depth (never the row number)."""
        if len(self.trees) == 1:
            return self.committed[0] + self.trees[0].depth
        return self.committed[self.request] + self.depth

    def rows(self, b: int) -> slice:
        """The rows of request b."""
        return slice(int(self.start[b]), int(self.start[b + 1]))

    @cached_property
    def kv_slot(self) -> np.ndarray:
        """int64 [R]: where a row's KV lies in its request: committed length plus the row's index in the tree."""
        return (self.committed - self.start[:-1])[self.request] + np.arange(len(self))

    def conv_sources(self, W: int) -> list[slice | np.ndarray]:
        """For each of W taps, oldest first: what the R rows read of [windows of B requests, W-1 rows each | R rows].

        A step back from a row is its parent, from a root the newest row of the request's window. A slice where the
        rows read are consecutive (one chain), so that reading them copies nothing; else int64 [R].
        """
        if W not in self._conv_sources:
            offset = len(self.trees) * (W - 1)
            oldest_first = np.arange(offset) - 1
            newest = self.request.astype(np.int64) * (W - 1) + W - 2
            back = np.concatenate((oldest_first, np.where(self.parent < 0, newest, self.parent + offset)))
            source = [np.arange(offset, offset + len(self))]
            for _ in range(W - 1):
                source.append(back[source[-1]])
            self._conv_sources[W] = [_as_slice(s) for s in reversed(source)]
        return self._conv_sources[W]

    @cached_property
    def _conv_sources(self) -> dict[int, list[slice | np.ndarray]]:
        return {}


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _as_slice(index: np.ndarray) -> slice | np.ndarray:
    if (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[0]) + len(index)) if len(index) else slice(0, 0)
    return index
