"""Hidden rows on the GPU that the MTP layer has not taken in yet: a ring for each slot. Knows no model.

The layer's keys and values of a token are needed when it drafts next, so plain steps keep a row of 2 D bytes instead of
reading the layer's weights, and many rows are taken in at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_step import Step
from boleinfer.ops.embedding import embedding

RING = 256  # rows of a slot
MOST_WAITING = 96  # rows from which on they have to be taken in; a captured step may add 128, and one may be under way


class Waiting:
    """rows: [slots, RING, D], the hidden row of position p at p % RING."""

    def __init__(self, slots: int, D: int, act: np.typing.DTypeLike) -> None:
        self.rows = device.empty((slots, RING, D), act)

    def keep(self, hidden: Array, step: Step) -> None:
        """Queues that the step's accepted rows of `hidden` [R, D] are kept; after device_step.accept."""
        forest = step.forest
        args = {
            "hidden": hidden,
            **step.paths._asdict(),
            "request": forest.request,
            "start": forest.start,
            "slot": step.slot,
            "committed": forest.committed,
            "kept": self.rows,
            "Ring": RING,
            "D": hidden.shape[1],
        }
        constants = {"Act": device.c_type(hidden)}
        kernels.launch("keep_hidden.cu", "keep_hidden", len(hidden), 256, args, constants=constants)

    def rows_of(self, slots: Sequence[int], positions: Sequence[range]) -> Array:
        """The rows that were kept of each slot's positions, slot by slot: [n, D]."""
        places = [s * RING + np.arange(p.start, p.stop) % RING for s, p in zip(slots, positions)]
        rows = self.rows.reshape(-1, self.rows.shape[-1])
        return embedding(device.upload(np.concatenate(places).astype(np.int32)), rows)
