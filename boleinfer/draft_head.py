"""The head that drafts look at on the GPU: rows of the frequent ids and of those that texts here use. Knows no model.

Reading the whole head is most of a level of a draft. Ids of a byte-pair vocabulary come in the order of frequency.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from boleinfer import device, nibbles
from boleinfer.device import Array, Fp8
from boleinfer.nibbles import Nibbles
from boleinfer.ops.embedding import embedding
from boleinfer.quantise import narrow, nbytes, pays, quantise, scales
from boleinfer.weights import BLOCK

MORE = 2048  # rows for ids of prompts and answers; the oldest make room for new ones


def rows_of(first: int) -> int:
    """Rows of a head in which so many ids are always there."""
    return first + MORE


def bytes_of(first: int, D: int, itemsize: int, at_once: int) -> int:
    """Bytes of a DraftHead, of numbers that took so many bytes before."""
    shape = rows_of(first), D
    if in_nibbles(first, D, itemsize, at_once):
        return nibbles.nbytes(shape) + 4 * rows_of(first)
    return (nbytes(shape) if in_fp8(first, D, itemsize) else itemsize * rows_of(first) * D) + 4 * rows_of(first)


def in_nibbles(first: int, D: int, itemsize: int, at_once: int) -> bool:
    """Whether a DraftHead has four bits a number: where never more rows are multiplied with it than there is a product
    for."""
    shape = rows_of(first), D
    return pays(shape, itemsize) and nibbles.fits(shape) and at_once <= nibbles.MOST_ROWS


def in_fp8(first: int, D: int, itemsize: int) -> bool:
    """Whether another one is in FP8: its later rows then begin a block of their own."""
    return pays((rows_of(first), D), itemsize) and first % BLOCK == 0


class DraftHead:
    """Some rows of a head [vocab, D].

    first: the ids that are always there
    at_once: rows that are multiplied with it at most
    rows: [first + MORE, D], Nibbles or Fp8; ids: int32 [first + MORE], the id of each row, -1 where the row is 0 and
          stands for none
    """

    def __init__(self, head: Array, first: int, at_once: int) -> None:
        self._head, self._first = head, first
        D = head.shape[1]
        self.rows: Array | Fp8 | Nibbles
        if in_nibbles(first, D, head.dtype.itemsize, at_once):
            self.rows = nibbles.zeros((rows_of(first), D))
            nibbles.narrow(head[:first], self.rows, 0)
        elif in_fp8(first, D, head.dtype.itemsize):
            bits = device.empty((rows_of(first), D), np.uint8)
            scale = np.empty((-(-rows_of(first) // BLOCK), -(-D // BLOCK)), np.float32)
            frequent = quantise(head[:first])
            device.write(bits[:first], frequent.bits)
            scale[: first // BLOCK] = device.download(frequent.scale)
            scale[first // BLOCK :] = device.download(scales(head[first:])).max(0)  # fits any row that comes
            self.rows = Fp8(bits, device.upload(scale))
            device.fill(bits[first:], 0)
        else:
            self.rows = device.empty((rows_of(first), D), head.dtype)
            device.write(self.rows[:first], head[:first])
            device.fill(self.rows[first:], 0)
        self.ids = device.upload(np.append(np.arange(first), np.full(MORE, -1)).astype(np.int32))
        self._place: dict[int, int] = {}  # of an id among those that came later
        self._next = 0

    def add(self, tokens: Iterable[int]) -> None:
        """Queues that the rows of these ids are there."""
        new = [t for t in dict.fromkeys(tokens) if t >= self._first and t not in self._place][-MORE:]
        while new:
            now, new = new[: MORE - self._next], new[MORE - self._next :]
            a = self._first + self._next
            ids = device.upload(np.asarray(now, np.int32))
            device.write(self.ids[a : a + len(now)], ids)
            self._put(a, embedding(ids, self._head))
            places = range(self._next, self._next + len(now))
            self._place = {t: p for t, p in self._place.items() if p not in places} | dict(zip(now, places))
            self._next = places.stop % MORE

    def _put(self, a: int, rows: Array) -> None:
        if isinstance(self.rows, Nibbles):
            nibbles.narrow(rows, self.rows, a)
        elif isinstance(self.rows, Fp8):
            narrow(rows, self.rows.scale[-1:], self.rows.bits[a : a + len(rows)])
        else:
            device.write(self.rows[a : a + len(rows)], rows)
