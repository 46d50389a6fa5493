"""The operations of the model families: one file a family, each with its NumPy definition and its CASES.

Here is only what all families share: two activations, what a case is, and how far two results are apart. Each file
ends with `CASES: dict[str, list[Case]]`, keyed by the name of the function. This file knows no op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), any shape; 0 and 1 where e^-x passes the range of the type."""
    e = _one_plus_exp_minus(x)
    return np.divide(1, e, out=e)


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e^-x), any shape; -0 where e^-x passes the range of the type."""
    e = _one_plus_exp_minus(x)
    return np.divide(x, e, out=e)


def _one_plus_exp_minus(x: np.ndarray) -> np.ndarray:
    """One new array and no other temporary: fresh pages cost more than the arithmetic."""
    e = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):
        np.exp(e, out=e)
    e += 1
    return e


class Case(NamedTuple):
    """One set of arguments to run an op on.

    label:   sizes in words, such as "R=65 D=2048"
    build:   random generator -> keyword arguments of the op; its floating-point arrays are float64
    outputs: names of the arguments that the op changes in place (empty: only what it returns counts)
    bound:   largest relative error that float32 may show against float64, and bound_bf16 with bf16 activations
    wide:    arguments that stay float32 beside bf16 activations; "ring.u" is a member of one
    gpu:     False where the kernel does not support these sizes and says so
    """

    label: str
    build: Callable[[np.random.Generator], dict[str, Any]]
    outputs: tuple[str, ...] = ()
    bound: float = 1e-5
    bound_bf16: float = 8e-3
    wide: tuple[str, ...] = ()
    gpu: bool = True


def cast(value: Any, dtype: Any) -> Any:
    """A copy of `value`, each floating-point array as `dtype` (memory order kept); enters dicts, lists and tuples."""
    if isinstance(value, np.ndarray):
        return value.astype(dtype if value.dtype.kind == "f" else value.dtype, order="K", copy=True)
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(v, dtype) for v in value))
    if type(value) in (tuple, list):
        return type(value)(cast(v, dtype) for v in value)
    return value


def relative_error(out: Any, ref: Any) -> float:
    """||out - ref|| / ||ref|| in float64, the largest over a tuple's members; inf where only one of them is finite."""
    if isinstance(ref, (tuple, list)):
        if len(out) != len(ref):
            raise ValueError(f"expected {len(ref)} results to compare, found {len(out)}")
        return max((relative_error(o, r) for o, r in zip(out, ref)), default=0.0)
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    if out.shape != ref.shape:
        raise ValueError(f"expected a result of shape {ref.shape}, found {out.shape}")
    same = (out == ref) | (np.isnan(out) & np.isnan(ref))  # equal infinities would give NaN when subtracted
    if same.all():
        return 0.0
    if not np.isfinite(out[~same]).all() or not np.isfinite(ref[~same]).all():
        return float("inf")
    norm = float(np.linalg.norm(ref[np.isfinite(ref)]))
    error = float(np.linalg.norm(out[~same] - ref[~same]))
    return error / norm if norm else float("inf")


def run_case(op: Callable[..., Any], case: Case, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    """What `op` gives on the case in `dtype`: its result (or results), then the arguments it changed.

    The inputs are rounded to float32 first whatever `dtype`, so that two runs differ by the arithmetic alone.
    """
    arguments = cast(cast(case.build(np.random.default_rng(seed)), np.float32), dtype)
    result = op(**arguments)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return results + tuple(arguments[name] for name in case.outputs)


def case_error(op: Callable[..., Any], case: Case, seed: int = 0) -> float:
    """Relative error of the op in float32 against the same op in float64."""
    return relative_error(run_case(op, case, np.float32, seed), run_case(op, case, np.float64, seed))
