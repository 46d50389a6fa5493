"""The head that drafts look at on the GPU: rows of the frequent ids and of those that texts here use. Knows no model.

Reading the whole head is most of a level of a draft. Ids of a byte-pair vocabulary come in the order of frequency.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from boleinfer import device
from boleinfer.device import Array
from boleinfer.ops.embedding import embedding

MORE = 2048  # rows for ids of prompts and answers; the oldest make room for new ones


def rows_of(first: int) -> int:
    """Rows of a head in which so many ids are always there."""
    return first + MORE


class DraftHead:
    """Some rows of a head [vocab, D].

    first: the ids that are always there
    rows: [first + MORE, D]; ids: int32 [first + MORE], the id of each row, -1 where the row is 0 and stands for none
    """

    def __init__(self, head: Array, first: int) -> None:
        self._head, self._first = head, first
        self.rows = device.empty((rows_of(first), head.shape[1]), head.dtype)
        device.fill(self.rows, 0)
        device.write(self.rows[:first], head[:first])
        self.ids = device.upload(np.append(np.arange(first), np.full(MORE, -1)).astype(np.int32))
        self._place: dict[int, int] = {}  # of an id among those that came later
        self._next = 0

    def add(self, tokens: Iterable[int]) -> None:
        """Queues that the rows of these ids are there."""
        new = [t for t in dict.fromkeys(tokens) if t >= self._first and t not in self._place][-MORE:]
        while new:
            now, new = new[: MORE - self._next], new[MORE - self._next :]
            a = self._first + self._next
            ids = np.asarray(now, np.int32)
            device.write(self.ids[a : a + len(now)], ids)
            device.write(self.rows[a : a + len(now)], embedding(device.upload(ids), self._head))
            places = range(self._next, self._next + len(now))
            self._place = {t: p for t, p in self._place.items() if p not in places} | dict(zip(now, places))
            self._next = places.stop % MORE
