"""Random forests for hypothesis, and the arrays that go with them. Knows no op."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from boleinfer.forest import Forest, Tree

Draw = Callable[[st.SearchStrategy], object]
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.float64, np.float32])


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def star(n: int) -> list[int]:
    return [-1] + [0] * (n - 1)


def two_chains(n: int) -> list[int]:
    """Interleaved below one root, so that no parent is adjacent to its child."""
    return [-1, 0, 0][:n] + list(range(1, n - 2))


def binary(n: int) -> list[int]:
    return [(i - 1) // 2 if i else -1 for i in range(n)]


def roots(n: int) -> list[int]:
    return [-1] * n


@st.composite
def parents(draw, max_nodes: int = 12) -> list[int]:
    """Parents of a tree: a regular one, or a ragged one with any number of roots."""
    n = draw(st.integers(1, max_nodes))
    regular = draw(st.sampled_from([None, chain, star, two_chains, binary, roots]))
    return regular(n) if regular else [draw(st.integers(-1, i - 1)) for i in range(n)]


def tree_of(parents: list[int]) -> Tree:
    return Tree.of([0] * len(parents), parents)


@st.composite
def trees(draw, max_nodes: int = 12, max_chunk: int = 0) -> Tree:
    """A tree, a prefill chunk of up to max_chunk tokens, or a tree at the end of such a chunk."""
    kinds = ["tree", "chunk", "both"] if max_chunk else ["tree"]
    kind = draw(st.sampled_from(kinds))
    chunk = draw(st.integers(1, max_chunk)) if kind != "tree" else 0
    branches = draw(parents(max_nodes)) if kind != "chunk" else []
    return tree_of(chain(chunk) + [chunk + p for p in branches])


@st.composite
def forests(draw, max_requests: int = 4, max_nodes: int = 12, max_chunk: int = 0, max_committed: int = 40) -> Forest:
    """A batch of trees and prefill chunks behind committed tokens."""
    B = draw(st.integers(1, max_requests))
    batch = [draw(trees(max_nodes, max_chunk)) for _ in range(B)]
    return Forest.of(batch, [draw(st.integers(0, max_committed)) for _ in range(B)])


@st.composite
def accepted(draw, forest: Forest) -> list[np.ndarray]:
    """A path to accept for each request, as flat rows from a root downwards; sometimes empty."""
    paths = []
    for b, tree in enumerate(forest.trees):
        node = draw(st.integers(-1, len(tree) - 1))
        paths.append(forest.start[b] + tree.path(node) if node >= 0 else np.zeros(0, np.int32))
    return paths


def some_slots(rng: np.random.Generator, B: int, slots: int) -> np.ndarray:
    """B different slots, neither adjacent nor in order."""
    return rng.permutation(slots)[:B].astype(np.int32)


def unit(x: np.ndarray) -> np.ndarray:
    """Vectors of length 1 along the last axis."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def assert_near(out: np.ndarray, ref: np.ndarray, what: str = "") -> None:
    """Within rounding of `out`'s own type, measured against the largest entry of the reference."""
    tolerance = (2e-5 if out.dtype == np.float32 else 1e-11) * max(1.0, float(np.abs(ref).max(initial=0)))
    np.testing.assert_allclose(out, ref, rtol=0, atol=tolerance, err_msg=what)
