"""Steady state: after warm-up a step is one replay, without a launch from Python or device memory being asked for."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from boleinfer import device, kernels
from boleinfer.engine import Engine
from boleinfer.graphs import Graphs
from boleinfer.request import Request
from boleinfer.sampling import SamplingParams
from tests.receipt import Report
from tests.receipt.models import CONTEXT, gpu_engine, prompts, tiny
from tests.running import request_of

REPLAYS = 1000


def run(quick: bool = False) -> Report:
    """Graphs against no graphs, counted; then a capture that fails. Needs a real GPU."""
    report = Report()
    steps = 200 if quick else REPLAYS
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder), "qwen3_5", seed=11)
        for act in ("float", "bf16"):
            decoder = model.on(act)
            for draft in ("none", "auto"):
                what = f"{act} draft={draft}"
                eager = gpu_engine(decoder, act, draft, graphs=False, max_batch=4)
                want = workload(eager, steps)
                got = _counted(report, what, gpu_engine(decoder, act, draft, max_batch=4), steps)
                report.expect(got == want, f"{what}: graphs change the tokens")
                report.count("tokens compared with graphs off", sum(map(len, got)))
        _failed_capture(report, model.on("float"), min(steps, 100))
    return report


def workload(
    engine: Engine, steps: int, around: Callable[[int], Any] = lambda step: contextlib.nullcontext()
) -> list[list[int]]:
    """One to four requests, greedy and sampled ones together; what each had generated after so many steps.

    around: a context manager for each step"""
    made: list[Request] = []
    for step in range(steps):
        while sum(not r.finished for r in made) < (4, 1, 3, 2)[step // 25 % 4]:
            request = _request(len(made))
            made.append(request)
            engine.add(request)
        with around(step):
            engine.step()
    return [r.generated for r in made]


def _request(number: int) -> Request:
    prompt = prompts((21, 1, 40, 7))[number % 4]
    some = {"seed": number, "max_tokens": 20 + number % 37, "ignore_eos": True}
    params = (
        SamplingParams(temperature=0, **some),
        SamplingParams(temperature=1.0, **some),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1, **some),
    )[number % 3]
    return request_of(prompt, params, CONTEXT)


def _counted(report: Report, what: str, engine: Engine, steps: int) -> list[list[int]]:
    """The workload on graphs, everything counted that may not happen; between steps other memory comes and goes."""
    executor = engine.executor
    runner = executor.runner
    assert isinstance(runner, Graphs)
    executor.capture()
    seen = _Seen()
    held, replayed = runner.pool_bytes, runner.replays

    @contextlib.contextmanager
    def around(step: int) -> Iterator[None]:
        if step % 50 == 7:
            _stir()
        with seen.watching():
            yield

    got = _in_another_thread(workload, engine, steps, around)
    replays = runner.replays - replayed
    report.count("replays", replays)
    report.expect(steps <= replays <= steps + 1, f"{what}: {replays} replays in {steps} steps")  # one may be under way
    report.expect(seen.launches == 0, f"{what}: {seen.launches} launches from Python")
    report.expect(seen.mallocs == 0, f"{what}: {seen.mallocs} requests for device memory")
    report.expect(runner.pool_bytes == held, f"{what}: the pool grew from {held} to {runner.pool_bytes} bytes")
    return got


class _Seen:
    """Launches from Python and requests for device memory, from CuPy's pools or from the driver, while watching."""

    def __init__(self) -> None:
        self.launches = self.mallocs = 0
        seen = self

        class Hook(device.cupy().cuda.MemoryHook):  # type: ignore[misc, name-defined]
            name = "count"

            def malloc_preprocess(self, **kwargs: Any) -> None:
                seen.mallocs += 1

            def alloc_preprocess(self, **kwargs: Any) -> None:
                seen.mallocs += 1

        self._hook = Hook()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        launch = kernels.launch

        def counted(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            launch(*args, **kwargs)

        with mock.patch.object(kernels, "launch", counted), self._hook:
            yield


def _stir() -> None:
    """Frees what CuPy keeps and overwrites what it gives next: a graph must not read memory that is not its own."""
    cupy = device.cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    for nbytes in (1 << 12, 1 << 20, 1 << 26):
        array = device.empty((nbytes,), np.uint8)
        device.fill(array, device.NAN_BYTE)
        del array
    cupy.cuda.Stream.null.synchronize()


def _in_another_thread(function: Callable[..., Any], *args: Any) -> Any:
    result: list[Any] = []
    problem: list[BaseException] = []

    def body() -> None:
        try:
            result.append(function(*args))
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return result[0]


def _failed_capture(report: Report, decoder: Any, steps: int) -> None:
    """A step that cannot be captured runs kernel by kernel, says so once, and gives the same tokens."""
    launch = kernels.launch
    cupy = device.cupy()

    def refusing(*args: Any, **kwargs: Any) -> None:
        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError("forced to fail")
        launch(*args, **kwargs)

    want = workload(gpu_engine(decoder, graphs=False, max_batch=4), steps)
    engine = gpu_engine(decoder, max_batch=4)
    with mock.patch.object(kernels, "launch", refusing), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = workload(engine, steps)
    said = [str(w.message) for w in caught if "cannot be captured" in str(w.message)]
    kinds = sum(len(frame.ready) for frame in engine.executor._frames.values())
    report.count("captures forced to fail", kinds)
    report.expect(len(said) == kinds, f"{len(said)} warnings of {kinds} steps that could not be captured: {said}")
    report.expect(engine.executor.runner.replays == 0, "a step was replayed whose capture failed")
    report.expect(got == want, "a failed capture changes the tokens")
