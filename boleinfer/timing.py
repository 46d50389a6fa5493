"""Time on the GPU: between events, of calls captured in a graph, and what memory gives at most. Knows no model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.graphs import Graphs

PAST_L2 = 256 << 20  # bytes of arrays to go round among, so that none is in cache any more when its turn comes
LONGEST_ROUND_MS = 20.0
ROUNDS = 5
READINGS = 100  # of which the quickest says what memory gives


class Launch(NamedTuple):
    """The arguments of one kernels.launch; its arrays stay as they are while it is kept."""

    file: str
    name: str
    args: dict[str, Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]

    def again(self) -> None:
        """Queues it once more."""
        positional, named = self.given
        kernels.launch(*positional, **named)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects every kernel that is launched inside it."""
    found: list[Launch] = []
    honest = kernels.launch

    def launch(file: Any, name: str, grid: Any, block: Any, args: Any, *more: Any, **named: Any) -> None:
        honest(file, name, grid, block, args, *more, **named)
        found.append(Launch(str(file), name, dict(args), ((file, name, grid, block, args, *more), named)))

    kernels.launch = launch
    try:
        yield found
    finally:
        kernels.launch = honest


def event_ms(run: Callable[[], object], repeats: int = 1, rounds: int = ROUNDS) -> float:
    """Milliseconds of the GPU from the start of `run` to its end, on the current stream.

    Several times `repeats` runs between two events; the median."""
    cuda = device.cupy().cuda
    found = []
    for _ in range(rounds):
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        found.append(float(cuda.get_elapsed_time(begin, end)) / repeats)
    return median(found)


def calls_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of the calls, an average: all of them in one graph, which is replayed.

    Calls that cannot be captured are made one by one, and a warning says so. Each call should have arrays of its own,
    PAST_L2 bytes together."""
    graphs = Graphs()

    def all_calls() -> None:
        for call in calls:
            call()

    def replay() -> None:
        graphs.run(0, all_calls)

    graphs.rehearse(0, all_calls)
    with graphs.on():
        once = event_ms(replay, rounds=2)
        repeats = max(1, min(20, int(LONGEST_ROUND_MS / max(once, 1e-3))))
        return 1e3 * event_ms(replay, repeats) / len(calls)


def copies(nbytes: int, least: int = 8, most: int = 256) -> int:
    """How many calls, each on so many bytes of its own, leave none of them in cache."""
    return max(least, min(most, -(-PAST_L2 // max(1, nbytes))))


def read_gb_s(nbytes: int = 1 << 32) -> float:
    """GB/s of a kernel that reads a buffer of so many bytes and does nothing else, the best of many: a floor is what
    nothing falls below, and a few readings by a new process were up to 4 % slower than memory is."""
    blocks = 16 * device.multiprocessors()  # two waves of eight
    x = device.buffer((nbytes // 4,), np.uint32, poison=True)
    out = device.empty((8 * blocks,), np.uint32)
    args = {"x": x, "out": out, "Groups": nbytes // 16}

    def read() -> None:
        kernels.launch("read_bandwidth.cu", "read_bandwidth", blocks, 256, args)

    return nbytes / min(event_ms(read, repeats=4, rounds=1) for _ in range(READINGS)) / 1e6
