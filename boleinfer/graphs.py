"""Runs a step's kernels: launched one by one, or once captured and then replayed as one graph. Knows no kernel.

All steps share one stream and one memory pool. A step's arrays are freed while it is captured, so their memory serves
the next kernels of the same graph and of all other graphs: on one stream they never run at the same time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from boleinfer import device, kernels

T = TypeVar("T")


class Eager:
    """Launches everything each time; for debugging, and where there is no graph to capture."""

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside it arrays come from the step's memory and kernels go to its stream."""
        yield

    def wait(self) -> None:
        """Until all steps so far are done."""

    def reserve(self, nbytes: int) -> None:
        """Makes sure that steps have so much memory, now instead of one by one. Raises MemoryError."""

    def rehearse(self, key: Hashable, step: Callable[[], object], later: Sequence[Callable[[], object]] = ()) -> None:
        """Runs a step that changes nothing (its batch is empty), as kernels.rehearse does, and captures it."""

    def run(self, key: Hashable, step: Callable[[], T], again: bool = False) -> T:
        """Runs the step; returns what it gives: arrays that may be read until the next step.

        again: it need not be rehearsed: it is captured when it runs for the second time"""
        return step()


class Graphs:
    """Captures each key's step at its rehearsal, or when it comes again, and replays it from then on: no launch from
    Python, no allocation.

    captures, replays: steps that were captured, and that ran as a graph, so far
    """

    def __init__(self) -> None:
        cupy = device.cupy()
        self._cupy = cupy
        self.stream = cupy.cuda.Stream()  # in order with what runs on the default stream, such as clearing a slot
        self._pool = cupy.cuda.MemoryPool()
        self._graphs: dict[Hashable, tuple[Any, object] | None] = {}
        self._launched: set[Hashable] = set()  # kernel by kernel, once
        self.captures = self.replays = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """As Eager.on."""
        with self.stream, self._cupy.cuda.using_allocator(self._pool.malloc):
            yield

    def wait(self) -> None:
        """As Eager.wait."""
        self.stream.synchronize()

    @property
    def pool_bytes(self) -> int:
        """Device memory that the steps hold beside weights and state."""
        return int(self._pool.total_bytes())

    def reserve(self, nbytes: int) -> None:
        """As Eager.reserve: one piece that all steps share, whatever their order.

        Steps of growing size would each ask for more, and a pool that the driver refuses gives back what graphs use."""
        with self.on():
            device.empty((nbytes,), np.uint8)

    def rehearse(self, key: Hashable, step: Callable[[], object], later: Sequence[Callable[[], object]] = ()) -> None:
        """As Eager.rehearse. A step that cannot be captured is launched kernel by kernel from then on: a warning."""
        with self.on():
            kernels.rehearse(step, later)  # the pool is large enough then, too
            self.stream.synchronize()
            self._capture(key, step)

    def run(self, key: Hashable, step: Callable[[], T], again: bool = False) -> T:
        """As Eager.run: replays the key's graph where it has one."""
        with self.on():
            if again and key in self._launched and key not in self._graphs:
                self._capture(key, step)
            captured = self._graphs.get(key)
            if captured is None:
                self._launched.add(key)
                return step()
            graph, kept = captured
            graph.launch(self.stream)
            self.replays += 1
            return cast(T, kept)

    def _capture(self, key: Hashable, step: Callable[[], object]) -> None:
        """Makes the key's graph of a step whose kernels are there and for which the pool is large enough."""
        self.stream.begin_capture()
        problem, kept = None, None
        try:
            kept = step()  # arrays that are read after the graph has run
        except Exception as error:
            problem = error
        try:
            graph = self.stream.end_capture()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            problem = problem or error
        if problem is not None:
            warnings.warn(f"step {key} cannot be captured and runs kernel by kernel: {problem}", stacklevel=3)
        self.captures += 1
        self._graphs[key] = None if problem is not None else (graph, kept)
