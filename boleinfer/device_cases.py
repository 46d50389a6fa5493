"""An op's CASES on the GPU: arguments rounded and copied there, results back, beside the float64 definition.

Knows no op. What a case is stands in ops/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from boleinfer import device, device_forest
from boleinfer.forest import Forest
from boleinfer.ops import Case, cast

DTYPES = {"float32": "float", "bf16": "bf16"}
"""Type of activations -> its C name."""


def rounded(case: Case, act: str, seed: int = 0) -> dict[str, Any]:
    """The case's arguments, each number one that its type on the GPU holds; arrays are float32.

    act: "float32" or "bf16"; the arguments in case.wide are float32 beside either
    """
    return _rounded(cast(case.build(np.random.default_rng(seed)), np.float32), act, case.wide)


def _rounded(value: Any, act: str, wide: Sequence[str], name: str = "") -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value if name in wide else value.astype(_act(act)).astype(value.dtype, order="K")
    return _map(lambda member, path: _rounded(member, act, wide, path), value, name)


def to_device(arguments: dict[str, Any], act: str, wide: Sequence[str]) -> dict[str, Any]:
    """Copies on the GPU in the types of kernels: activations, float32 for `wide`, int32; forests and paths too."""

    def copied(value: Any, name: str) -> Any:
        if isinstance(value, Forest):
            return device_forest.upload(value)
        if name == "paths":
            return device_forest.upload_paths(arguments["forest"], value)
        if isinstance(value, np.ndarray):
            floating, signed = value.dtype.kind == "f", value.dtype.kind == "i"
            dtype = (np.float32 if name in wide else _act(act)) if floating else np.int32 if signed else value.dtype
            return device.upload(np.ascontiguousarray(value, dtype))
        return _map(copied, value, name)

    return {name: copied(value, name) for name, value in arguments.items()}


def to_host(value: Any) -> Any:
    """The same with every GPU array as a NumPy array."""
    return _map(lambda member, _: to_host(member), value) if _members(value) else _host(value)


def run_on_device(op: Callable[..., Any], case: Case, act: str, seed: int = 0) -> tuple[Any, ...]:
    """As ops.run_case, on the GPU, with results in host memory. Raises what the op raises."""
    arguments = to_device(rounded(case, act, seed), act, case.wide)
    result = op(**arguments)
    return to_host(_results(result) + tuple(arguments[name] for name in case.outputs))


def reference(op: Callable[..., Any], case: Case, act: str, seed: int = 0) -> tuple[Any, ...]:
    """As ops.run_case in float64, on the numbers that `run_on_device` gives the kernel."""
    arguments = cast(rounded(case, act, seed), np.float64)
    result = op(**arguments)
    return _results(result) + tuple(arguments[name] for name in case.outputs)


def bound(case: Case, act: str) -> float:
    """The largest error that is right."""
    return case.bound_bf16 if act == "bf16" else case.bound


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results in host memory are the same to the bit."""
    if members := _members(a):
        return all(same_bits(x, y) for x, y in zip(members.values(), _members(b).values()))
    return not isinstance(a, np.ndarray) or a.tobytes() == b.tobytes()


def _results(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _act(act: str) -> np.dtype:
    return device.dtype(DTYPES[act])


def _host(value: Any) -> Any:
    return device.download(value) if hasattr(value, "get") and hasattr(value, "dtype") else value


def _members(value: Any) -> dict[Any, Any]:
    """What a dict, tuple or list holds; {} for all else."""
    if isinstance(value, dict):
        return value
    if names := getattr(value, "_fields", ()):
        return dict(zip(names, value))
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else {}


def _map(function: Callable[[Any, str], Any], value: Any, name: str = "") -> Any:
    """`function(member, path)` on what a dict, tuple or list holds; all else as it is. Paths are dotted names."""
    members = _members(value)
    if not members:
        return value
    done = {key: function(m, f"{name}.{key}" if name else str(key)) for key, m in members.items()}
    if isinstance(value, dict):
        return done
    return type(value)(*done.values()) if hasattr(value, "_fields") else type(value)(done.values())
