"""How memory is laid out and handed out: buffers, matrix panels, page and slot numbers. Knows nothing of their use."""

from __future__ import annotations

import math

import numpy as np


class OutOfPlaces(RuntimeError):
    """An allocator was asked for more than it has free."""


class Allocator:
    """Hands out the numbers 0 .. size-1, each to one holder at a time; runs of consecutive numbers where it can."""

    def __init__(self, what: str, size: int):
        self.what = what
        self.size = size
        self._free = np.ones(size, bool)

    @property
    def free(self) -> int:
        """How many numbers are free."""
        return int(self._free.sum())

    def take(self, n: int) -> np.ndarray:
        """int32 [n], increasing: the first run of n free numbers, or the n lowest free ones if there is no such run.

        Raises OutOfPlaces, changing nothing, when fewer than n are free."""
        places = np.flatnonzero(self._free)
        if len(places) < n:
            raise OutOfPlaces(f"{n} {self.what} were asked for and {len(places)} of {self.size} are free")
        if 0 < n < len(places):
            run = np.flatnonzero(places[n - 1 :] - places[: len(places) - n + 1] == n - 1)
            first = int(run[0]) if run.size else 0
            places = places[first : first + n]
        taken = places[:n].astype(np.int32)
        self._free[taken] = False
        return taken

    def give_back(self, places: np.ndarray) -> None:
        """Frees numbers; one that is free already is an error of the program (RuntimeError), and frees nothing."""
        if self._free[places].any() or len(np.unique(places)) != len(places):
            raise RuntimeError(
                f"{self.what} {np.asarray(places).tolist()} were given back, but some of them are free already"
            )
        self._free[places] = True


PANEL = 64  # output rows of a panel
_PANEL_WEIGHTS = 125_000  # of one panel at most: eight rows through it stay within BLAS's path for small products


def panels(rows: int, width: int) -> int:
    """How many panels a matrix [rows, width] is kept in on the CPU; 0 where it stays in one piece.

    A panel is PANEL rows, column-major and on its own in memory; the matrix is their stack [panels, PANEL, width].
    Panels are read in one stream and are small enough for BLAS to multiply without packing them first, which at 2 to
    16 input rows more than halves the time (measured in ops/linear.py). Convolution taps, narrower than a panel, stay
    in one piece."""
    return rows // PANEL if rows % PANEL == 0 and PANEL <= width <= _PANEL_WEIGHTS // PANEL else 0


def buffer(shape: tuple[int, ...], dtype: np.typing.DTypeLike = np.float32, poison: bool = False) -> np.ndarray:
    """An array on a cache line that promises nothing about its contents: untouched memory, or NaN when poisoned."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(dtype).reshape(shape)
    if poison:
        array[...] = np.nan
    return array
