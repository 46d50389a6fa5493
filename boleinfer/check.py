"""`boleinfer check`: every op's CASES, on the CPU or the GPU, against the same op in float64. Knows no model."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from boleinfer import device, device_cases, kernels, ops
from boleinfer.declaration import KernelError
from boleinfer.ops import Case, relative_error, run_case
from boleinfer.options import UsageError


class CheckResult(NamedTuple):
    """One case of one op.

    error:   ||out - ref|| / ||ref||, ref in float64; inf where one is not finite or the op failed
    bound:   the largest error that is right
    time_us: one run, microseconds; on the GPU with the launch and the wait
    failure: what the op raised, or what else is wrong; "" when it ran
    """

    op: str
    case: str
    error: float
    bound: float
    time_us: float
    failure: str = ""

    @property
    def right(self) -> bool:
        return self.error <= self.bound


def op_files() -> list[ModuleType]:
    """The modules of boleinfer.ops, by name."""
    return [importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]


def run_checks(names: Sequence[str] = (), on: str = "cpu", dtype: str = "float32") -> Iterator[CheckResult]:
    """Runs the ops whose name, or whose file's name, contains one of `names` (all when there are none), case by case.

    on: "cpu" or "cuda"; dtype: "float32", or "bf16" on the GPU. On the GPU an op is left out that has no kernel, which
    all its cases say (`gpu`).
    Raises UsageError for a name that no op has and for bf16 on the CPU, ToolchainError where there is no GPU.
    """
    table = [
        (file.__name__.rpartition(".")[2], op, getattr(file, op), case)
        for file in op_files()
        for op, cases in file.CASES.items()
        for case in cases
        if on == "cpu" or any(c.gpu for c in cases)
    ]
    for name in names:
        if not any(name in file or name in op for file, op, *_ in table):
            known = ", ".join(dict.fromkeys(op for _, op, *_ in table))
            raise UsageError(f"check: no op is called like {name!r}; there are {known}")
    if on == "cpu" and dtype != "float32":
        raise UsageError(f"check: the CPU computes in float32; for {dtype} add --device cuda")
    chosen = [t for t in table if not names or any(name in t[0] or name in t[1] for name in names)]
    if on == "cpu":
        for _, op, function, case in chosen:
            yield _check(op, function, case)
    else:
        kernels.open_gpu()
        with _poisoned():
            for _, op, function, case in chosen:
                yield _check_on_gpu(op, function, case, dtype)


def check(names: Sequence[str] = (), on: str = "cpu", dtype: str = "float32") -> int:
    """Prints a line a case; 0 when all are right, 1 when one is wrong. Raises as `run_checks` does."""
    results: list[CheckResult] = []
    for result in run_checks(names, on, dtype):
        if not results:
            print(f"{'op':<18}{'case':<52}{'error':>9}{'bound':>9}{'time us':>11}")
        results.append(result)
        verdict = "" if result.right else f"  WRONG {result.failure}"
        numbers = f"{result.error:9.1e}{result.bound:9.0e}{result.time_us:11.0f}"
        print(f"{result.op:<18}{result.case:<52}{numbers}{verdict}", flush=True)
    wrong = sum(not r.right for r in results)
    print(f"{len(results)} cases, {wrong} wrong ({dtype} on {on} against float64, relative error)")
    return 1 if wrong else 0


def _check(name: str, op: Callable[..., Any], case: Case) -> CheckResult:
    timed, took = _timed(op, lambda: None)
    try:
        error = relative_error(run_case(timed, case, np.float32), run_case(op, case, np.float64))
        failure = ""
    except Exception as problem:  # one broken op must not hide what the others give
        error, failure = float("inf"), _said(problem)
    return CheckResult(name, case.label, error, case.bound, took[0] if took else 0.0, failure)


def _check_on_gpu(name: str, op: Callable[..., Any], case: Case, dtype: str) -> CheckResult:
    """Runs it twice: both results have to be the same to the bit. What no kernel supports has to raise KernelError."""
    timed, took = _timed(op, device.cupy().cuda.get_current_stream().synchronize)
    failure = ""
    try:
        first, again = (device_cases.run_on_device(f, case, dtype) for f in (op, timed))
        if not case.gpu:
            error, failure = float("inf"), "the kernel ran; the case says that it cannot"
        elif not device_cases.same_bits(first, again):
            error, failure = float("inf"), "two runs differ"
        else:
            error = relative_error(again, device_cases.reference(op, case, dtype))
    except Exception as problem:
        refused = not case.gpu and isinstance(problem, KernelError)
        error, failure = (0.0, "") if refused else (float("inf"), _said(problem))
    return CheckResult(name, case.label, error, device_cases.bound(case, dtype), took[0] if took else 0.0, failure)


def _timed(op: Callable[..., Any], wait: Callable[[], None]) -> tuple[Callable[..., Any], list[float]]:
    """The op, and the microseconds of each of its runs until `wait` returns."""
    took: list[float] = []

    def timed(**arguments: Any) -> Any:
        start = time.perf_counter()
        result = op(**arguments)
        wait()
        took.append(1e6 * (time.perf_counter() - start))
        return result

    return timed, took


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """New GPU arrays are full of NaN (-1 in integers), so that what a kernel leaves out is seen."""
    cupy = device.cupy()
    pool = cupy.get_default_memory_pool()

    def allocate(nbytes: int) -> Any:
        memory = pool.malloc(nbytes)
        if nbytes:
            memory.memset_async(device.NAN_BYTE, nbytes)
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield
