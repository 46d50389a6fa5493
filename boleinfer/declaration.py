"""Reads what the text of a .cu file declares: kernels, their parameters, test sizes. Knows no CUDA, no array.

A kernel is written with one parameter a line, and a comment that states each array's shape:

    extern "C" __global__ void scale(
        const Act* __restrict__ x,  // [R, 2*D] aligned 16; of both halves
        const float* __restrict__ bias,  // [D] or null
        Act* __restrict__ out,  // [R, D] strides [2*D, 1]
        const __grid_constant__ Each<const Act> k,  // [R, D] of each layer
        const __grid_constant__ TensorMap<const Act> v,  // [R, D] strides [2*D, 1] box [16]
        int D,
        float factor)  // free text

Capital names are sizes: a bare one is bound by the array, an expression (+ - * / % and parentheses, / rounds down) is
computed. Without `strides` (in elements) an array is C-contiguous. `Each` (common.cuh) is up to MOST_EACH arrays that
are alike, such as one of each layer. A `TensorMap` (tma.cuh) describes a matrix, or rows on up to three axes, that is
read in boxes of so many rows, 128 bytes wide. The file's leading comment may hold:

    // sizes: K=64,128 Act=bf16 | K=3 Act=float     what to compile in tests: sets of compile-time constants
    // arch: 90a                                    runs on these architectures only (default: on all)
    // spills: why registers spill to memory        allows spills in `boleinfer kernels`
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

Constant = int | bool | str  # the value of a compile-time constant: a number, a truth value, or a type by name

TYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp8": "uint8",
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
}
"""C type -> dtype of the array; bfloat16 is that of ml_dtypes. CuPy has no 8-bit floats: uint8 holds their bits."""
SCALARS = {c for c in TYPES if c.split()[-1] in ("bool", "int", "unsigned", "long", "float", "double")}

MOST_EACH = 96  # arrays in an Each of common.cuh

_KERNEL = re.compile(r'^[ \t]*extern "C" __global__ void\b[^;{\n]*?\b(?P<name>[A-Za-z_]\w*)\([ \t]*$', re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PARAMETER = re.compile(
    r"(?P<const>const\s+)?(?P<type>\w+(?:\s+\w+)*?)"
    r"\s*(?:(?P<star>\*)\s*(?P<restrict>__restrict__\s+)?|\s)(?P<name>[A-Za-z_]\w*)"
)
_BY_VALUE = re.compile(
    r"const\s+__grid_constant__\s+(?P<how>Each|TensorMap)<(?P<array>[^<>*]+)>\s+(?P<name>[A-Za-z_]\w*)"
)
_SIZE = r"\b[A-Z]\w*"
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class KernelError(RuntimeError):
    """A kernel cannot be read, compiled or launched as asked; the message says what was declared and what arrived."""


@dataclass(frozen=True)
class Dim:
    """One extent or stride: its text, parsed; `letter` is the name when it is a bare one."""

    text: str
    tree: ast.expr

    @property
    def letter(self) -> str:
        return self.tree.id if isinstance(self.tree, ast.Name) else ""

    def names(self) -> list[str]:
        return re.findall(_SIZE, self.text)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Raises KeyError for a size that is not known, ZeroDivisionError for a division by zero."""
        return _evaluate(self.tree, sizes)


@dataclass(frozen=True)
class Parameter:
    """One parameter: an array when `shape` is not None, a scalar else.

    type:    its C type without const and *, or the name of a type constant
    aligned: its address is a multiple of this many bytes
    each:    it is an Each of arrays, passed as a list of them
    box:     it is a TensorMap, of which so many rows are read at once, on each axis but the last
    text:    the line as written, for messages
    """

    name: str
    type: str
    shape: tuple[Dim, ...] | None
    strides: tuple[Dim, ...] | None
    writes: bool
    restrict: bool
    optional: bool
    aligned: int
    line: int
    text: str
    each: bool = False
    box: tuple[Dim, ...] | None = None

    @property
    def by_value(self) -> bool:
        """Whether a struct is passed, not an address or a number."""
        return self.each or self.box is not None


@dataclass(frozen=True, eq=False)
class KernelFile:
    """A .cu file: its kernels by name, the sets of constants it is tested with, its architectures, why it may spill.

    early: kernels that call after_previous() (common.cuh) and may be launched before the previous one is done
    """

    path: Path
    text: str
    kernels: Mapping[str, tuple[Parameter, ...]]
    early: frozenset[str]
    sizes: tuple[Mapping[str, Constant], ...]
    archs: tuple[str, ...]
    spills: str

    def target(self, arch: str) -> str | None:
        """The architecture to compile for on a device of `arch`: "90" may give "90a"; None when it cannot run there."""
        if not self.archs:
            return arch
        return next((a for a in self.archs if a.rstrip("af") == arch.rstrip("af")), None)


def read(path: Path) -> KernelFile:
    """Parse a .cu file. Raises KernelError, with the line, for what it cannot understand or find."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"{path}: the kernel file cannot be read ({error}); reinstall boleinfer") from error
    return parse(text, path)


def parse(text: str, path: Path) -> KernelFile:
    """Parse the text of a .cu file; `path` is for messages. Raises KernelError as `read` does."""
    header = _header(text)
    sizes = _sizes(header.get("sizes", []), path)
    types = {name for chosen in sizes for name, value in chosen.items() if isinstance(value, str)}
    kernels = {}
    for match in _KERNEL.finditer(text):
        kernels[match["name"]] = _parameters(text, match.end(), path, {*TYPES, *types})
    found = len(re.findall(r"\b__global__\b", _COMMENT.sub("", text)))
    if not kernels or found != len(kernels):
        raise KernelError(
            f'{path.name}: {found} kernels, of which {len(kernels)} begin with `extern "C" __global__ void name(` '
            "on one line under a name of its own; write each so, with one parameter a line after it"
        )
    archs = tuple(re.split(r"[,\s]+", " ".join(header.get("arch", [])).strip())) if "arch" in header else ()
    if bad := [a for a in archs if not re.fullmatch(r"\d+[af]?", a)]:
        raise KernelError(f"{path.name}: `// arch:` names {bad[0]!r}; write it like 90 or 90a")
    return KernelFile(path, text, kernels, _early(text), sizes, archs, " ".join(header.get("spills", [])))


def _early(text: str) -> frozenset[str]:
    """The kernels whose text, up to the next kernel, calls after_previous() or says in which function it does."""
    starts = [(match["name"], match.start()) for match in _KERNEL.finditer(text)]
    ends = [start for _, start in starts[1:]] + [len(text)]
    call = re.compile(r"\bafter_(all_)?previous\(\)")
    return frozenset(name for (name, start), end in zip(starts, ends) if call.search(text, start, end))


def constant(text: str) -> Constant:
    """The value of a constant as written: 128, true, bf16. Raises ValueError when it is none of these."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if text in ("true", "false"):
        return text == "true"
    if text in TYPES:
        return text
    raise ValueError(text)


# ---- the leading comment ---------------------------------------------------------------------------------------------


def _header(text: str) -> dict[str, list[str]]:
    """The `// key: value` lines above the first line that is no comment: {key: values}."""
    found: dict[str, list[str]] = {}
    for line in itertools.takewhile(lambda s: s.startswith("//") or not s.strip(), text.splitlines()):
        if match := re.match(r"//\s*(sizes|arch|spills):\s*(.*?)\s*$", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def _sizes(lines: list[str], path: Path) -> tuple[Mapping[str, Constant], ...]:
    """`K=64,128 Act=bf16 | K=3 Act=float` -> one mapping a combination; every set has the same names."""
    sets: list[Mapping[str, Constant]] = []
    for alternatives in (part.split() for line in lines for part in line.split("|")):
        choices = []
        for item in alternatives:
            name, _, values = item.partition("=")
            try:
                choices.append([(name, constant(value)) for value in values.split(",")])
            except ValueError as error:
                raise KernelError(
                    f"{path.name}: `// sizes:` says {item!r}, but {str(error)!r} is no number, true, false or type "
                    f"(types: {', '.join(t for t in TYPES if ' ' not in t)})"
                ) from None
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise KernelError(f"{path.name}: `// sizes:` says {item!r}; write it like K=64,128 or Act=bf16")
        sets += [dict(chosen) for chosen in itertools.product(*choices)]
    kinds = {tuple(sorted((name, isinstance(value, str)) for name, value in chosen.items())) for chosen in sets}
    if len(kinds) > 1:
        raise KernelError(f"{path.name}: the sets of `// sizes:` differ in their names; give every set all of them")
    return tuple(sets) or ({},)


# ---- parameters ------------------------------------------------------------------------------------------------------


def _parameters(text: str, start: int, path: Path, types: set[str]) -> tuple[Parameter, ...]:
    """The parameters from the line after `name(` up to the closing parenthesis."""
    first = text.count("\n", 0, start) + 2
    found: list[Parameter] = []
    previous = ""  # the line of the last parameter, when no comma follows it
    for line, raw in enumerate(text[start:].splitlines()[1:], first):
        code, _, comment = (part.strip() for part in raw.partition("//"))
        last = re.search(r"\)\s*\{?$", code)
        code = code[: last.start()].strip() if last else code
        if code:
            if previous:
                _refuse(path, found[-1].line, previous, "neither a comma nor the closing parenthesis follows")
            found.append(_parameter(code.removesuffix(","), comment, raw, line, path, types))
            previous = "" if code.endswith(",") else raw
        if last:
            if len({p.name for p in found}) < len(found):
                _refuse(path, line, raw, "two parameters of this kernel have the same name")
            return tuple(found)
    _refuse(path, first - 1, text[:start].splitlines()[-1], "the parameter list has no end")


def _parameter(code: str, comment: str, raw: str, line: int, path: Path, types: set[str]) -> Parameter:
    struct = _BY_VALUE.fullmatch(code.strip())
    match = _PARAMETER.fullmatch(f"{struct['array']}* {struct['name']}" if struct else code.strip())
    if match is None:
        _refuse(path, line, raw, "write it like `const float* __restrict__ x,  // [R, D]` or `int D,`")
    kind, array = " ".join(match["type"].split()), match["star"] is not None
    if kind not in (allowed := types if array else SCALARS):
        what = "of an array" if array else "passed by value"
        _refuse(path, line, raw, f"{kind!r} is no type {what}; there are {', '.join(sorted(allowed))}")
    shape = re.match(r"\[([^\]]*)\]", comment) if array else None
    if array and shape is None:
        _refuse(path, line, raw, "an array's comment begins with its shape, such as // [R, D]")
    strides = re.search(r"\bstrides \[([^\]]*)\]", comment) if array else None
    box = re.search(r"\bbox \[([^\]]+)\]", comment) if struct and struct["how"] == "TensorMap" else None
    aligned = re.search(r"\baligned (\d+)\b", comment) if array else None
    parameter = Parameter(
        name=match["name"],
        type=kind,
        shape=_dims(shape[1], raw, line, path) if shape else None,
        strides=_dims(strides[1], raw, line, path) if strides else None,
        writes=array and not match["const"],
        restrict=match["restrict"] is not None,
        optional=array and re.search(r"\bor null\b", comment) is not None,
        aligned=int(aligned[1]) if aligned else 1,
        line=line,
        text=" ".join(raw.split()),
        each=struct is not None and struct["how"] == "Each",
        box=_dims(box[1], raw, line, path) if box else None,
    )
    if parameter.strides is not None and len(parameter.strides) != len(parameter.shape or ()):
        _refuse(path, line, raw, "shape and strides differ in length")
    axes, boxed = len(parameter.shape or ()), len(parameter.box or ()) + 1
    if struct and struct["how"] == "TensorMap" and (parameter.writes or axes not in (2, 3, 4) or axes != boxed):
        example = "// [R, D] box [64] or // [B, R, D] box [2, 64]"
        _refuse(path, line, raw, f"a TensorMap is of a const array of two to four axes, such as {example}")
    return parameter


def _dims(text: str, raw: str, line: int, path: Path) -> tuple[Dim, ...]:
    dims = []
    for part in text.split(",") if text.strip() else []:
        try:
            tree = ast.parse(part.strip(), mode="eval").body
            for node in ast.walk(tree):
                _check_node(node)
        except (SyntaxError, ValueError):
            _refuse(path, line, raw, f"{part.strip()!r} is no size: use numbers, capital names, + - * / % ( )")
        dims.append(Dim(part.strip(), tree))
    return tuple(dims)


def _check_node(node: ast.AST) -> None:
    right = (
        (isinstance(node, ast.Name) and re.fullmatch(_SIZE, node.id))
        or (isinstance(node, ast.Constant) and type(node.value) is int)
        or (isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS)
        or isinstance(node, (ast.operator, ast.Load))
    )
    if not right:
        raise ValueError(ast.dump(node))


def _evaluate(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](_evaluate(tree.left, sizes), _evaluate(tree.right, sizes))
    assert isinstance(tree, ast.Constant) and isinstance(tree.value, int)
    return tree.value


def _refuse(path: Path, line: int, raw: str, why: str) -> NoReturn:
    raise KernelError(f"{path.name}:{line}: cannot read the parameter line `{' '.join(raw.split())}`: {why}")
