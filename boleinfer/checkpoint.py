"""The safetensors files of one folder as named, typed, memory-mapped tensors. Knows nothing of what a name means.

The format (huggingface/safetensors): 8 bytes header length, a JSON header {name: {dtype, shape, data_offsets}}, then
the data. Only this format is ever opened: a pickle could run code. Headers are checked before data is handed out.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_VIEW = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
}  # the types that weights may have, as NumPy sees them
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class WeightsError(ValueError):
    """Weight files that are missing, broken, or do not fit the model; the text lists every problem found."""


class Stored(NamedTuple):
    """What a header says of one tensor: safetensors' dtype name and the shape."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of a model folder. `tensors` maps stored names to dtype and shape; `view(name)` maps the data.

    Raises WeightsError when a file is missing, cut short, or inconsistent, and when a name occurs twice.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        files, listed = _files_of(self.folder)
        self.tensors: dict[str, Stored] = {}
        self._data: dict[str, tuple[memoryview, int]] = {}
        self._file: dict[str, Path] = {}
        self._handle: dict[Path, int] = {}
        for file in files:
            self._open(file)
        wrong = [n for n, f in listed.items() if n not in self._file or self._file[n].name != f]
        if wrong:
            raise WeightsError(
                f"{self.folder / INDEX} places {len(wrong)} tensors in files that do not hold them, "
                f"for example {wrong[0]} in {listed[wrong[0]]}; fetch the model again"
            )

    def view(self, name: str) -> np.ndarray:
        """The tensor's data without a copy: float32, float16, uint16 holding BF16 bits, or uint8 holding F8_E4M3 bits.

        Raises WeightsError for any other stored type.
        """
        dtype, shape = self.tensors[name]
        if dtype not in _VIEW:
            raise WeightsError(f"{name} is stored as {dtype}, which is not supported (supported: {', '.join(_VIEW)})")
        data, start = self._data[name]
        return np.frombuffer(data, _VIEW[dtype], count=math.prod(shape), offset=start).reshape(shape)

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the tensor's bytes from `at` on, past the mapping: nothing has to be mapped.

        Raises WeightsError when the file has become too short."""
        data, start = self._data[name]
        rest, at, file = out.reshape(-1).view(np.uint8), start + at, self._file[name]
        if not hasattr(os, "preadv"):
            rest[...] = np.frombuffer(data, np.uint8, rest.size, at)
            return
        while rest.size:
            n = os.preadv(self._handle[file], [rest.data], at)
            if not n:
                raise WeightsError(f"{file} was cut short while it was read; fetch it again")
            rest, at = rest[n:], at + n

    def _open(self, file: Path) -> None:
        try:
            with file.open("rb") as handle:
                data = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
                self._handle[file] = os.dup(handle.fileno())
            weakref.finalize(self, os.close, self._handle[file])
        except FileNotFoundError:
            link = " (a link whose target is gone)" if file.is_symlink() else ""
            raise WeightsError(f"{file} does not exist{link}; fetch the model again") from None
        except ValueError:  # mmap refuses an empty file
            raise WeightsError(f"{file} is empty; fetch the model again") from None
        except OSError as error:
            raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
        header, first = _read_header(file, data)
        for name, entry in header.items():
            if name in self.tensors:
                raise WeightsError(f"{name} is stored twice: in {self._file[name].name} and in {file.name}")
            self.tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]))
            self._data[name] = data, first + entry["data_offsets"][0]
            self._file[name] = file


def _read_header(file: Path, data: memoryview) -> tuple[dict[str, Any], int]:
    """The checked header of one file and the byte at which the data begins."""
    length = int.from_bytes(data[:8], "little")
    first = 8 + length
    if len(data) < 8 or first > len(data):
        raise WeightsError(
            f"{file} is not a complete safetensors file: it has {len(data)} bytes, "
            f"its header alone should end at {first}; fetch it again"
        )
    try:
        header = json.loads(bytes(data[8:first]), object_pairs_hook=_no_twins)
        header.pop("__metadata__", None)
        ends = [0] + [_end_of(name, entry) for name, entry in header.items()]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise WeightsError(f"the header of {file} is broken ({error}); fetch it again") from None
    if first + max(ends) != len(data):
        state = "cut short" if first + max(ends) > len(data) else "longer than its header says"
        raise WeightsError(f"{file} is {state}: expected {first + max(ends)} bytes, found {len(data)}; fetch it again")
    return header, first


def _end_of(name: str, entry: Mapping[str, Any]) -> int:
    """The end offset of one tensor; raises ValueError when its offsets, dtype and shape disagree."""
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(isinstance(n, int) and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"{name} has offsets {start}, {end} and shape {shape}")
    item = _ITEM_BYTES.get(entry["dtype"])
    if start > end or (item is not None and end - start != math.prod(shape) * item):
        raise ValueError(f"{name} takes {end - start} bytes, {entry['dtype']} {shape} does not")
    return end


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} occurs twice")
    return result


def _files_of(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files of a model folder, and the index's {tensor: file name} (empty without an index).

    An index wins; then model.safetensors; then every *.safetensors file in the folder.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder")
    if (folder / INDEX).is_file():
        listed = _read_index(folder / INDEX)
        names = sorted(set(listed.values()))
        absent = [n for n in names if not (folder / n).exists()]
        if absent:
            raise WeightsError(f"{folder / INDEX} names files that are not there: {', '.join(absent)}; fetch them")
        return [folder / n for n in names], listed
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
        why = (
            f"; {pickles[0]} is a pickle, which can run code when opened and is never read. "
            "Convert it to safetensors or choose a release that has them"
            if pickles
            else "; expected model.safetensors or shards with an index"
        )
        raise WeightsError(f"{folder} holds no .safetensors file{why}")
    _check_shards(folder, files)
    return files, {}


def _read_index(file: Path) -> dict[str, str]:
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name for name in listed.values()):
            raise ValueError("a file name in it has a folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is not a valid index ({error!r}); fetch it again") from None
    if not listed:
        raise WeightsError(f"{file} lists no tensor; fetch it again")
    return dict(listed)


def _check_shards(folder: Path, files: list[Path]) -> None:
    """Shards that count themselves (model-00002-of-00005) must all be there."""
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match:
            stem, digits, total = match.groups()
            names = [f"{stem}-{i:0{len(digits)}d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
            absent = [n for n in names if not (folder / n).exists()]
            if absent:
                raise WeightsError(f"{folder} lacks the shards {', '.join(absent)}; fetch them")
