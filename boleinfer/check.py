"""`boleinfer check`: every op's CASES in float32 against the same op in float64, on this machine. Knows no model."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from boleinfer import ops
from boleinfer.ops import Case, relative_error, run_case
from boleinfer.options import UsageError


class CheckResult(NamedTuple):
    """One case of one op.

    error:   ||float32 - float64|| / ||float64||; inf where one is not finite or the op failed
    bound:   the largest error that is right
    time_us: the float32 run, microseconds
    failure: what the op raised, "" when it ran
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


def run_checks(names: Sequence[str] = ()) -> Iterator[CheckResult]:
    """Runs the ops whose name, or whose file's name, contains one of `names` (all when there are none), case by case.

    Raises UsageError for a name that no op has.
    """
    table = [
        (file.__name__.rpartition(".")[2], op, getattr(file, op), case)
        for file in op_files()
        for op, cases in file.CASES.items()
        for case in cases
    ]
    for name in names:
        if not any(name in file or name in op for file, op, *_ in table):
            known = ", ".join(dict.fromkeys(op for _, op, *_ in table))
            raise UsageError(f"check: no op is called like {name!r}; there are {known}")
    for file, op, function, case in table:
        if not names or any(name in file or name in op for name in names):
            yield _check(op, function, case)


def check(names: Sequence[str] = ()) -> int:
    """Prints a line a case; 0 when all are right, 1 when one is wrong. Raises UsageError as `run_checks` does."""
    results: list[CheckResult] = []
    for result in run_checks(names):
        if not results:
            print(f"{'op':<16}{'case':<44}{'error':>9}{'bound':>9}{'time us':>11}")
        results.append(result)
        verdict = "" if result.right else f"  WRONG {result.failure}"
        numbers = f"{result.error:9.1e}{result.bound:9.0e}{result.time_us:11.0f}"
        print(f"{result.op:<16}{result.case:<44}{numbers}{verdict}", flush=True)
    wrong = sum(not r.right for r in results)
    print(f"{len(results)} cases, {wrong} wrong (float32 against float64, relative error)")
    return 1 if wrong else 0


def _check(name: str, op: Callable[..., Any], case: Case) -> CheckResult:
    took: list[float] = []

    def timed(**arguments: Any) -> Any:
        start = time.perf_counter()
        result = op(**arguments)
        took.append(1e6 * (time.perf_counter() - start))
        return result

    try:
        error = relative_error(run_case(timed, case, np.float32), run_case(op, case, np.float64))
        failure = ""
    except Exception as problem:  # one broken op must not hide what the others give
        error, failure = float("inf"), f"{type(problem).__name__}: {problem}"
    return CheckResult(name, case.label, error, case.bound, took[0] if took else 0.0, failure)
