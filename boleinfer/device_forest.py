"""The forest of a step on the GPU: the arrays of forest.Forest in envelopes of fixed size. Knows no op and no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from boleinfer import device
from boleinfer.device import Array
from boleinfer.forest import Forest

WORDS = 4
TREE_ROWS = 32 * WORDS  # rows of a tree that is no chain, at most


@dataclass(frozen=True)
class DeviceForest:
    """int32 arrays on the GPU, for up to R rows and B requests; names as in Forest.

    token, depth, position, kv_slot: [R]
    parent:    [R], flat row of the parent, -1 at a root, -2 at an unused row
    request:   [R], -1 at an unused row
    ancestors: uint32 [R, WORDS], bit a of a row is set when row start + a of its request is an ancestor or itself;
               undefined where chain is set, and beyond TREE_ROWS
    chain:     [B], 1 where the request's rows are one path in order
    start:     [B+1], first rows; an unused request is empty
    committed: [B], tokens that the states hold
    single:    whether it is known, when a step is queued, that no request has more than one row
    most:      rows of a request, at most, where it is known then
    """

    token: Array
    parent: Array
    depth: Array
    request: Array
    position: Array
    kv_slot: Array
    ancestors: Array
    chain: Array
    start: Array
    committed: Array
    single: bool = False
    most: int | None = None

    def __len__(self) -> int:
        return len(self.token)


class Paths(NamedTuple):
    """Accepted rows: request b's are row[start[b] + i], i < count[b]. int32 [R] and [B] on the GPU."""

    row: Array
    count: Array


def upload(forest: Forest) -> DeviceForest:
    """A host forest on the GPU, its envelope exactly filled. Raises ValueError for a tree above TREE_ROWS."""
    R = len(forest)
    bits = np.zeros((R, WORDS), np.uint32)
    for b, tree in enumerate(forest.trees):
        if tree.is_chain:
            continue
        if len(tree) > TREE_ROWS:
            raise ValueError(f"tree {b} has {len(tree)} rows; the GPU takes {TREE_ROWS} in a tree that is no chain")
        padded = np.zeros((len(tree), TREE_ROWS), bool)
        padded[:, : len(tree)] = tree.ancestors
        bits[forest.rows(b)] = np.packbits(padded, axis=1, bitorder="little").view("<u4")

    def ints(array: np.ndarray) -> Array:
        return device.upload(np.ascontiguousarray(array, np.int32))

    return DeviceForest(
        token=ints(forest.token),
        parent=ints(forest.parent),
        depth=ints(forest.depth),
        request=ints(forest.request),
        position=ints(forest.position),
        kv_slot=ints(forest.kv_slot),
        ancestors=device.upload(bits),
        chain=ints(np.asarray([t.is_chain for t in forest.trees])),
        start=ints(forest.start),
        committed=ints(forest.committed),
        single=all(len(t) <= 1 for t in forest.trees),
        most=max(map(len, forest.trees), default=0),
    )


def upload_paths(forest: Forest, paths: Sequence[np.ndarray]) -> Paths:
    """Accepted flat rows of each request on the GPU."""
    row = np.full(len(forest), -1, np.int32)
    for start, path in zip(forest.start, paths):
        row[start : start + len(path)] = path
    return Paths(device.upload(row), device.upload(np.asarray([len(p) for p in paths], np.int32)))
