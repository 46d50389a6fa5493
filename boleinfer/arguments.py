"""Checks a launch's arguments against a kernel's declaration and makes the values that are passed. Knows no CUDA.

Arrays are seen through `Arrays` alone, so that CuPy's and, in tests, NumPy's are checked by the same lines.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from boleinfer.declaration import MOST_EACH, TYPES, Constant, Dim, KernelError, KernelFile, Parameter

MOST_BOX_ROWS, TENSOR_MAP_BYTES = 256, 128  # of what load_tile of cuda/tma.cuh copies, and of what it takes


class Arrays(Protocol):
    """What has to be known of a device's arrays."""

    def is_array(self, value: Any) -> bool: ...

    def device_of(self, array: Any) -> int: ...

    def address(self, array: Any) -> int: ...

    def tensor_map(self, array: Any, box: tuple[int, ...]) -> np.generic: ...


def check_constants(source: KernelFile, constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """The compile-time constants in the order of the file's `// sizes:`. Raises KernelError where they differ."""
    declared = source.sizes[0]
    if set(declared) != set(constants):
        wants = ", ".join(declared) or "none"
        raise KernelError(
            f"{source.path.name}: its compile-time constants are {wants} (`// sizes:` in the file), "
            f"the launch gives {', '.join(constants) or 'none'}"
        )
    plain = {name: _plain(constants[name]) for name in declared}
    for name, value in plain.items():
        kind = type(declared[name])
        if type(value) is not kind or (kind is str and value not in TYPES):
            types = ", ".join(t for t in TYPES if " " not in t)
            expected = {str: f"a type ({types})", bool: "True or False", int: "an integer"}[kind]
            raise KernelError(f"{source.path.name}: the constant {name} must be {expected}; the launch gives {value!r}")
    return plain


def check_arguments(
    source: KernelFile,
    name: str,
    args: Mapping[str, Any],
    dims: Mapping[str, int],
    constants: Mapping[str, Constant],
    arrays: Arrays,
    device: int,
) -> list[np.generic]:
    """The values to pass, in the kernel's order: scalars in the declared type, arrays as 64-bit addresses or structs.

    Checks names, types, dtypes, shapes, strides, alignment, device, and that an array which is written overlaps no
    other one declared __restrict__. Raises KernelError for the first thing that differs.
    """
    kernel = source.kernels.get(name)
    if kernel is None:
        raise KernelError(f"{source.path.name} has no kernel {name!r}; it has {', '.join(source.kernels)}")
    check = _Check(source.path.name, name, arrays, device, constants)
    declared = [p.name for p in kernel]
    missing, unknown = [n for n in declared if n not in args], [n for n in args if n not in declared]
    if missing or unknown:
        differences = (("missing", missing), ("unknown", unknown))
        problems = "; ".join(f"{what}: {', '.join(names)}" for what, names in differences if names)
        raise KernelError(f"{check.where}: {problems}. Its parameters are {', '.join(declared)}; give each of them")
    for constant, value in constants.items():
        if constant[0].isupper() and type(value) is int:
            check.bind(constant, value, "the constants")
    for letter, value in dims.items():
        check.bind(letter, operator.index(value), "dims")
    values = [check.scalar(p, args[p.name]) if p.shape is None else _null(p) for p in kernel]
    given = [(i, p, args[p.name]) for i, p in enumerate(kernel) if p.shape is not None]
    listed = [(i, p, a) for i, p, value in given for a in (check.each(p, value) if p.each else [value])]
    present = [(i, p, a) for i, p, a in listed if check.is_present(p, a)]
    addresses: dict[int, list[np.generic]] = {}
    for i, parameter, array in present:
        addresses.setdefault(i, []).append(check.array(parameter, array))
    for i, found in addresses.items():
        values[i] = _struct(found) if kernel[i].each else found[0]
    for i, parameter, array in present:
        check.layout(parameter, array)
        if parameter.box is not None:
            values[i] = check.tensor_map(parameter, array)
    check.overlaps([(p, a) for _, p, a in present])
    return values


class _Check:
    """The sizes bound so far and the wording of what is wrong, for one launch."""

    def __init__(self, file: str, name: str, arrays: Arrays, device: int, constants: Mapping[str, Constant]) -> None:
        self.where = f"{file}: {name}"
        self.arrays, self.device, self.constants = arrays, device, constants
        self.sizes: dict[str, int] = {}
        self.sources: dict[str, str] = {}  # where each size is from

    def fail(self, parameter: Parameter, arrived: str, remedy: str) -> KernelError:
        return KernelError(f"{self.where}: {parameter.name} is {arrived}, declared `{parameter.text}`; {remedy}")

    def bind(self, letter: str, value: int, source: str) -> None:
        known, first = self.sizes.setdefault(letter, value), self.sources.setdefault(letter, source)
        if known != value:
            raise KernelError(f"{self.where}: {letter} is {known} by {first} and {value} by {source}; make them agree")

    def scalar(self, parameter: Parameter, value: Any) -> np.generic:
        """The value in its declared type; a capital integer parameter binds the size of its name."""
        dtype = np.dtype(TYPES[parameter.type])
        if self.arrays.is_array(value) or isinstance(value, np.ndarray):
            raise self.fail(parameter, "an array", "pass a Python number")
        result = _number(value, dtype)
        if result is None:
            expected = {"f": "a finite number in its range", "b": "True or False"}
            remedy = f"pass {expected.get(dtype.kind, 'an integer in its range')}"
            raise self.fail(parameter, f"{value!r} ({type(value).__name__})", remedy)
        if parameter.name[0].isupper() and dtype.kind in "iu":
            self.bind(parameter.name, int(result), f"the argument {parameter.name}")
        return result

    def is_present(self, parameter: Parameter, value: Any) -> bool:
        """Whether a pointer has an array; None is right only where the declaration says `or null`."""
        if value is None and parameter.optional and not parameter.each:
            return False
        if self.arrays.is_array(value):
            return True
        if isinstance(value, np.ndarray):
            raise self.fail(parameter, "a NumPy array", "copy it to the GPU (cupy.asarray) and pass that")
        remedy = "pass an array on the GPU" + (" or None" if parameter.optional else "")
        raise self.fail(parameter, "None" if value is None else f"a {type(value).__name__}", remedy)

    def each(self, parameter: Parameter, value: Any) -> list[Any]:
        """The arrays of an Each, which may be None as a whole where the declaration says `or null`."""
        if value is None and parameter.optional:
            return []
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MOST_EACH:
            arrived = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise self.fail(parameter, arrived, f"pass a list of 1 to {MOST_EACH} arrays")
        return list(value)

    def array(self, parameter: Parameter, array: Any) -> np.generic:
        """The array's address, once its dtype, device and number of axes are right; bare letters of its shape bind."""
        assert parameter.shape is not None
        declared = str(self.constants.get(parameter.type, parameter.type))
        dtype, found = TYPES[declared], array.dtype.name
        if found != dtype:
            bits = (declared, found) == ("bf16", "uint16")
            remedy = f"pass {dtype}" + (f": array.view(ml_dtypes.{dtype}) if these are its bits" if bits else "")
            raise self.fail(parameter, _describe(array), remedy)
        if array.ndim != len(parameter.shape):
            raise self.fail(parameter, _describe(array), f"pass an array of {len(parameter.shape)} axes (reshape it)")
        if self.arrays.device_of(array) != self.device:
            where = f"on device {self.arrays.device_of(array)}"
            raise self.fail(parameter, where, f"the current device is {self.device}: copy it, or change the device")
        address = self.arrays.address(array)
        if address % parameter.aligned:
            remedy = f"its address must be a multiple of {parameter.aligned}: pass a copy"
            raise self.fail(parameter, f"a view at address {address:#x}", remedy)
        for axis, (dim, extent) in enumerate(zip(parameter.shape, array.shape)):
            if dim.letter and dim.letter not in self.sizes:
                self.bind(dim.letter, extent, f"axis {axis} of {parameter.name}")
        return np.uint64(address)

    def layout(self, parameter: Parameter, array: Any) -> None:
        """Compares shape and strides with the declared ones, all letters being bound."""
        assert parameter.shape is not None
        expected = tuple(self._value(parameter, dim) for dim in parameter.shape)
        if array.shape != expected:
            raise self.fail(parameter, _describe(array), f"expected {list(expected)}{self._sources(parameter)}")
        if parameter.strides is None:
            if not array.flags.c_contiguous:
                found = f"{_describe(array)} but not C-contiguous"
                raise self.fail(parameter, found, "pass a contiguous copy, or declare its strides")
            return
        item = array.dtype.itemsize
        steps = [self._value(parameter, dim) for dim in parameter.strides]
        wrong = [n > 1 and s != step * item for n, s, step in zip(array.shape, array.strides, steps)]
        if any(wrong):
            found = f"of strides {[s // item for s in array.strides]} (elements)"
            raise self.fail(parameter, found, f"expected {steps}{self._sources(parameter)}")

    def tensor_map(self, parameter: Parameter, array: Any) -> np.generic:
        """The TensorMap of an array whose layout is right, once it is one that cuda/tma.cuh can read."""
        assert parameter.box is not None
        box, address = tuple(self._value(parameter, dim) for dim in parameter.box), self.arrays.address(array)
        for rows in box:
            if not 1 <= rows <= MOST_BOX_ROWS:
                remedy = f"1 to {MOST_BOX_ROWS} are possible: change the constants"
                raise self.fail(parameter, f"read in boxes of {rows} rows", remedy)
        for pitch in pitches(array):
            if address % 16 or pitch % 16:
                found = f"at address {address:#x} with rows {pitch} bytes apart"
                raise self.fail(parameter, found, "both must be multiples of 16: pass a copy, or use another kernel")
        return self.arrays.tensor_map(array, box)

    def _value(self, parameter: Parameter, dim: Dim) -> int:
        try:
            return dim.value(self.sizes)
        except KeyError as unknown:
            raise KernelError(
                f"{self.where}: nothing says what {unknown.args[0]} is in `{parameter.text}`; give it in dims"
            ) from None
        except ZeroDivisionError:
            raise KernelError(f"{self.where}: {dim.text} in `{parameter.text}` divides by zero") from None

    def _sources(self, parameter: Parameter) -> str:
        letters = [n for dim in (*(parameter.shape or ()), *(parameter.strides or ())) for n in dim.names()]
        known = [f"{n} = {self.sizes[n]} by {self.sources[n]}" for n in dict.fromkeys(letters) if n in self.sizes]
        return f" ({', '.join(known)})" if known else ""

    def overlaps(self, given: list[tuple[Parameter, Any]]) -> None:
        """Refuses a written array that shares memory with another one, where both are declared __restrict__."""
        spans = [(self.arrays.address(a), a.nbytes, p) for p, a in given if p.restrict and p.strides is None]
        for (start, nbytes, first), (other, other_nbytes, second) in itertools.combinations(spans, 2):
            shared = start < other + other_nbytes and other < start + nbytes
            if shared and (first.writes or second.writes):
                remedy = "both are declared __restrict__ and one is written: pass separate arrays"
                raise self.fail(second, f"in the same memory as {first.name}", remedy)


def pitches(array: Any) -> list[int]:
    """Bytes from one number to the next on each axis but the last; of a row where there is only one."""
    row_bytes = array.shape[-1] * array.dtype.itemsize
    return [step if extent > 1 else row_bytes for extent, step in zip(array.shape[:-1], array.strides)]


def _number(value: Any, dtype: np.dtype) -> np.generic | None:
    """`value` in `dtype`, or None when it is another kind of number or outside the range; floats may round."""
    if dtype.kind == "b":
        return np.bool_(value) if isinstance(value, (bool, np.bool_)) else None
    if isinstance(value, (bool, np.bool_)):
        return None
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not isinstance(value, (int, np.integer)) or not limits.min <= int(value) <= limits.max:
            return None
        return dtype.type(int(value))
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        with np.errstate(over="ignore"):
            result = dtype.type(float(value))
    except OverflowError:
        return None
    return result if np.isfinite(result) else None


def _null(parameter: Parameter) -> np.generic:
    if parameter.each:
        return _struct([])
    return np.uint64(0) if parameter.box is None else np.void(bytes(TENSOR_MAP_BYTES))


def _struct(addresses: list[np.generic]) -> np.generic:
    """The bytes of an Each; null behind its arrays."""
    words = np.zeros(MOST_EACH, np.uint64)
    words[: len(addresses)] = addresses
    return words.view(f"V{words.nbytes}")[0]


def _plain(value: Any) -> Constant:
    return value.item() if isinstance(value, np.generic) else value


def _describe(array: Any) -> str:
    return f"{array.dtype.name} {list(array.shape)}"
