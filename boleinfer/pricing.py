"""Measures what steps of a loaded model cost, by rows, requests and context, or finds it measured before.

Measured are steps as the engine runs them: made-up requests whose past is not read from a prompt, each with a tree of
random tokens. On a GPU a captured step has one of few sizes, so these are what the table is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import boleinfer
from boleinfer import device, nvrtc, provenance
from boleinfer.costs import CostFiles, CostTable
from boleinfer.cuda_executor import LARGEST_CAPTURED, ONE, SMALLEST
from boleinfer.executor import Executor
from boleinfer.forest import Tree
from boleinfer.memory_plan import Options, envelopes
from boleinfer.params import SamplingParams
from boleinfer.request import Request
from boleinfer.sampling import Sampler
from boleinfer.scheduler import Work, grow
from boleinfer.state import KVLayer

LIMIT_S = 6.0  # for all of it; sizes for which there is no time are not used then
ROUNDS = 4
CELL_S = 0.01  # of measured steps at a time on a GPU, where that is more than one
CONTEXTS = 256, 4096
MOST_REPEATS = 12


def price(executor: Executor, o: Options, fresh: bool = False) -> CostTable | None:
    """The table of a model and its options, measured unless it was, or `fresh`. No request may run meanwhile.

    None where memory is poisoned: that is for tests, and has no speed."""
    if o.poison:
        return None
    files, what = CostFiles(nvrtc.default_cache().folder.parent / "costs"), key(executor, o)
    table = None if fresh else files.get(what)
    if table is None:
        table = measure(executor, o)
        files.put(what, table)
    return table


def file(executor: Executor, o: Options) -> Path:
    """Where that table is kept."""
    return CostFiles(nvrtc.default_cache().folder.parent / "costs").file(key(executor, o))


def key(executor: Executor, o: Options) -> dict[str, Any]:
    """All that decides what steps cost: the model's shapes and types, options, sources, the machine."""
    weights = {name: (type(w).__name__, *getattr(w, "shape", ())) for name, w in executor.model.weights.items()}
    return {
        "boleinfer": boleinfer.__version__,
        "sources": provenance.sources_hash(),
        "model": repr(executor.model.config),
        "weights": sorted({kind for kind, *_ in weights.values()}),
        "dtype": executor.state.dtype.name,
        "options": repr(o),
        "drafts": list(executor.depths),
        "machine": provenance.gpu_machine() if executor.state.gpu else provenance.cpu_machine(),
    }


def measure(executor: Executor, o: Options, limit_s: float = LIMIT_S) -> CostTable:
    """Steps of all sizes, for few and many requests with little and much behind them.

    Each is measured several times, in rounds, and the least counts: other programs disturb none of them every time."""
    gpu = executor.state.gpu
    most = min(o.max_rows, LARGEST_CAPTURED, o.max_batch * (1 + o.draft_nodes))
    sizes = _doubling(most)
    if gpu:  # what a lone row takes is known from `single`
        sizes = [n for n in envelopes(o.max_rows)[1:] or [ONE] if n < 2 * most and n <= LARGEST_CAPTURED]
    batches = sorted({1, min(SMALLEST, o.max_batch), o.max_batch} if gpu else {1, o.max_batch})
    room = o.context - MOST_REPEATS * (2 + max(executor.depths, default=0))
    contexts = sorted({max(0, min(T, room)) for T in CONTEXTS})
    short, longer = contexts[0], contexts[1:]
    if gpu:  # a past that nobody wrote must not be NaN
        for layer in [*executor.state.layers, executor.state.mtp]:
            for array in () if layer is None else (layer.k, layer.v) if isinstance(layer, KVLayer) else layer.ring:
                device.fill(array, 0)
    executor.capture()
    ways = range(1, 1 + len(executor.depths))
    scene = _Scene(executor, o)
    try:
        drafts = {  # beside the same step that does not draft, of trees in both
            (way, B): _Cell(next((n for n in sizes if n > max(B, SMALLEST)), sizes[-1]), B, short, way)
            for way in ways
            for B in batches
        }
        others = [_Cell(B, B, short) for B in batches] + list(drafts.values())
        least = scene.rounds([*(_Cell(size, B, short) for size in sizes for B in batches), *others], 0.75 * limit_s)
        sizes = [n for n in sizes if all(_Cell(n, B, short) in least for B in batches)]
        ends = sizes[0], sizes[-1]
        least |= scene.rounds([_Cell(size, B, T) for T in longer for size in ends for B in batches], limit_s / 4)
    finally:
        scene.end()

    def grown(size: int, B: int, T: int) -> float:
        """Seconds that a longer past adds."""
        base = least[_Cell(size, B, short)]
        return max(0.0, least.get(_Cell(size, B, T), base) - base)

    seconds = np.zeros((len(sizes), len(batches), len(contexts)))
    for (i, n), (j, B), (k, T) in product(enumerate(sizes), enumerate(batches), enumerate(contexts)):
        few, many = (grown(size, B, T) for size in ends)  # to rows between these in proportion
        part = (n - ends[0]) / max(1, ends[1] - ends[0])
        seconds[i, j, k] = least[_Cell(n, B, short)] + few + part * (many - few)
    single = np.asarray(
        [[least.get(_Cell(B, B, short), np.inf) + grown(ends[0], B, T) for T in contexts] for B in batches]
    )
    known = gpu and bool(np.isfinite(single).all())
    added = {}
    for way in ways:
        pairs = [(drafts[way, B], drafts[way, B]._replace(way=0)) for B in batches]
        if all(cell in least for pair in pairs for cell in pair):
            added[way] = np.asarray([max(0.0, least[with_draft] - least[without]) for with_draft, without in pairs])
    return CostTable(tuple(sizes), tuple(batches), tuple(contexts), seconds, gpu, added, single if known else None)


class _Cell(NamedTuple):
    """A kind of step: rows, or as many as there can be, requests, tokens behind each, and the GPU's way to draft."""

    rows: int
    batch: int
    context: int
    way: int = 0


class _Scene:
    """Made-up requests, and steps of them."""

    def __init__(self, executor: Executor, o: Options) -> None:
        self._executor, self._nodes, self._rng = executor, 1 + o.draft_nodes, np.random.default_rng(0)
        self._vocab = executor.model.config.vocab_size
        params, allowed = SamplingParams(temperature=0, ignore_eos=True), np.ones(self._vocab, bool)
        self._requests = []
        for _ in range(o.max_batch):
            sampler = Sampler(params, 0, 0, [0], frozenset(), allowed)
            request = Request([0], params, sampler, o.context, frozenset())
            request.place = executor.state.take(o.context + o.scratch)
            executor.admit(request)
            self._requests.append(request)

    def rounds(self, cells: Sequence[_Cell], limit_s: float) -> dict[_Cell, float]:
        """The least seconds of each, of those that there is time for and those of the fewest rows.

        Half the time is for the rounds after the first."""
        least: dict[_Cell, float] = {}
        began = time.perf_counter()
        for _ in range(ROUNDS):
            for cell in cells:
                spent, needed = time.perf_counter() - began, cell not in least and cell.rows == cells[0].rows
                if needed or spent < (limit_s / 2 if cell in least else limit_s):
                    least[cell] = min(self.step_s(*cell), least.get(cell, np.inf))
        return least

    def step_s(self, rows: int, batch: int, context: int, way: int) -> float:
        """Seconds of such a step."""
        requests = self._requests[: min(batch, rows)]
        rows = min(rows, len(requests) * self._nodes)
        works = []
        for i, request in enumerate(requests):
            request.tokens = [0] * (context + 1)
            request.committed = context
            n = rows // len(requests) + (i < rows % len(requests))
            parents = [int(self._rng.integers(max(-1, j - 8), j)) for j in range(n - 1)]
            draft = Tree.of(self._rng.integers(0, self._vocab, n - 1).tolist(), parents)
            works.append(Work(request, grow([0], draft), 1, complete=True, decodes=True))
        with np.errstate(all="ignore"):  # what nobody wrote may be anything
            return self._executor.time(works, way, CELL_S, MOST_REPEATS)

    def end(self) -> None:
        """Gives the places back."""
        for request in self._requests:
            self._executor.state.give_back(request.home)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    sizes: Sequence[int] = [1 << i for i in range(most.bit_length())]
    return sorted({*(n for n in sizes if n <= most), most})
