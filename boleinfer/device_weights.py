"""Stored tensors to GPU arrays: from the files through pinned staging buffers. Knows no model.

Matrices become activations' type, row-major; FP8 matrices stay FP8 with their scales where every fused or permuted part
keeps whole blocks of 128 rows, and are dequantised here where one does not. Vectors and convolution taps are float32.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from boleinfer import device
from boleinfer.checkpoint import Checkpoint, Stored
from boleinfer.config import ModelConfig
from boleinfer.device import Array, Fp8
from boleinfer.plans import Part, Target
from boleinfer.quantise import drafts_in_fp8, nbytes, quantise
from boleinfer.weights import BLOCK, Plan, dequantise, float32, match, scale_names, tie

COPIERS = 16  # threads that read the files into staging buffers, at most one a core; more wait for one another
STAGING = 8 << 20  # bytes of a thread's buffer: filling one costs Python 0.17 ms, however small; pinning 0.7 ms a MB


def load(
    folder: str | Path,
    config: ModelConfig,
    plan: Plan,
    act: np.dtype,
    mtp: bool | str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """As weights.load, on the current GPU: {canonical name: array or Fp8}.

    act: type of the matrices that are not FP8, bfloat16 or float32 (then FP8 is dequantised too)
    progress(done, total) is called with bytes on the GPU.
    """
    checkpoint = Checkpoint(folder)
    targets, names = match(config, plan, checkpoint.tensors, mtp)
    total = sum(sizes_of(targets, names, checkpoint.tensors, act).values())
    source = _Source(checkpoint, names, act)
    arrays = {target.name: source.place(target) for target in targets}
    for done in _copied(source.pieces):
        if progress is not None and done < total:
            progress(done, total)
    if progress is not None:
        progress(total, total)
    for name, array in arrays.items():
        if not isinstance(array, Fp8) and drafts_in_fp8(name, array.shape, array.dtype.itemsize):
            arrays[name] = quantise(array)
    tie(arrays, config, _equal)
    return arrays


def sizes(
    folder: str | Path, config: ModelConfig, plan: Plan, act: np.dtype, mtp: bool | str = "auto"
) -> dict[str, int]:
    """Bytes on the GPU of each array that `load` would give, scales included; from the files' headers, with no GPU."""
    checkpoint = Checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `load` says what is missing
        targets, names = match(config, plan, checkpoint.tensors, mtp)
    return sizes_of(targets, names, checkpoint.tensors, act)


def sizes_of(
    targets: Sequence[Target], names: Mapping[str, str], stored: Mapping[str, Stored], act: np.dtype
) -> dict[str, int]:
    """As `sizes`, of what weights.match gave."""
    found = {}
    for t in targets:
        if stays_fp8(t, names, stored, act) or drafts_in_fp8(t.name, t.shape, act.itemsize):
            found[t.name] = nbytes(t.shape)
        else:
            found[t.name] = math.prod(t.shape) * kind(t.name, t.shape, act).itemsize
    return found


def kind(name: str, shape: tuple[int, ...], act: np.dtype) -> np.dtype:
    """The type of an array that is not FP8: float32 for vectors and taps, else that of the activations."""
    return np.dtype(np.float32) if len(shape) == 1 or name.endswith("conv1d") else act


def stays_fp8(target: Target, names: Mapping[str, str], stored: Mapping[str, Stored], act: np.dtype) -> bool:
    """Whether all parts are FP8 and begin, and are permuted, in whole blocks of rows."""
    if act.itemsize == 4 or any(stored[names[p.tensor]].dtype != "F8_E4M3" for p in target.parts):
        return False
    whole = all(p.shape[-2] % BLOCK == 0 for p in target.parts[:-1])
    return whole and all(p.rows is None or _block_rows(p.rows) is not None for p in target.parts)


class _Piece(NamedTuple):
    """Rows of an array that pass through one buffer: `fill` writes them into it."""

    fill: Callable[[np.ndarray], None]
    out: Array


class _Source:
    """The arrays of the targets, and the pieces that their contents come in.

    pieces: in the order of the files
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], act: np.dtype):
        self._checkpoint, self._names, self._act = checkpoint, names, act
        self.pieces: deque[_Piece] = deque()

    def place(self, target: Target) -> Array | Fp8:
        """The target's array, of no contents yet."""
        fp8 = stays_fp8(target, self._names, self._checkpoint.tensors, self._act)
        dtype = device.dtype("fp8") if fp8 else kind(target.name, target.shape, self._act)
        array = device.empty(target.shape, dtype)
        rows, first = array.reshape(-1, target.shape[-1]), 0
        for part in target.parts:
            n = math.prod(part.shape[:-1])
            self._cut(part, not fp8 and self._is_fp8(part), rows[first : first + n])
            first += n
        return Fp8(array, self._scales(target)) if fp8 else array

    def _cut(self, part: Part, widen: bool, out: Array) -> None:
        """Pieces of a part's rows [n, width]; widen: FP8 ones, to be dequantised."""
        name, (n, width) = self._names[part.tensor], out.shape
        fill = partial(self._read, name)
        if widen:
            values = dequantise(self._checkpoint.view(name), self._scale(part)).reshape(n, width)
            fill = partial(_take, values)
        step = max(1, STAGING // max(1, width * out.dtype.itemsize))
        for a in range(0, n, step):
            b = min(a + step, n)
            rows = range(a, b) if part.rows is None else part.rows[a:b]
            self.pieces.append(_Piece(partial(fill, rows), out[a:b]))

    def _read(self, name: str, rows: range | np.ndarray, out: np.ndarray) -> None:
        """Rows of a stored tensor, [len(rows), width], in the type of `out`."""
        stored = self._checkpoint.view(name).dtype  # uint16 holds BF16 bits, uint8 FP8 bits
        same_bits = (stored, out.dtype.itemsize) in ((np.uint16, 2), (np.uint8, 1))
        raw = out.view(stored) if same_bits else np.empty(out.shape, stored)
        apart = [] if isinstance(rows, range) else (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
        for a, b in pairwise([0, *apart, len(rows)]):  # between two, rows lie side by side
            self._checkpoint.read(name, int(rows[a]) * raw[0].nbytes, raw[a:b])
        if not same_bits:
            out[...] = float32(raw)

    def _is_fp8(self, part: Part) -> bool:
        return self._checkpoint.tensors[self._names[part.tensor]].dtype == "F8_E4M3"

    def _scale(self, part: Part) -> np.ndarray:
        name = next(self._names[s] for s in scale_names(part.tensor) if s in self._names)
        return float32(self._checkpoint.view(name))

    def _scales(self, target: Target) -> Array:
        """float32 [..., ceil(rows/128), ceil(width/128)] of all parts, in the order of their rows."""
        *lead, rows, width = target.shape
        scales = []
        for part in target.parts:
            scale = self._scale(part).reshape(-1, -(-width // BLOCK))
            blocks = None if part.rows is None else _block_rows(part.rows)
            scales.append(scale if blocks is None else scale[blocks])
        return device.upload(np.concatenate(scales).reshape(*lead, -(-rows // BLOCK), -1))


def _block_rows(rows: np.ndarray) -> np.ndarray | None:
    """The permutation as one of blocks of 128 rows, or None when it is none."""
    if len(rows) % BLOCK:
        return None
    blocks = rows.reshape(-1, BLOCK)
    inside = blocks - blocks[:, :1] == np.arange(BLOCK)
    return blocks[:, 0] // BLOCK if inside.all() and (blocks[:, 0] % BLOCK == 0).all() else None


def _copied(pieces: deque[_Piece]) -> Iterator[int]:
    """Brings the pieces to the GPU by several threads, and takes them away; now and then the bytes that are there.

    Raises what filling one raised."""
    nbytes = sum(int(piece.out.nbytes) for piece in pieces)
    threads = max(1, min(COPIERS, os.cpu_count() or 1, nbytes // STAGING))  # pinned memory takes long to get
    there = [0] * threads

    def copy(thread: int) -> None:
        buffer = device.Staging(STAGING)
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return buffer.wait()
            piece.fill(buffer.view(piece.out.shape, piece.out.dtype))
            buffer.copy_to(piece.out)
            there[thread] += int(piece.out.nbytes)

    with ThreadPoolExecutor(threads, initializer=device.use, initargs=(device.current(),)) as pool:
        try:
            waiting = {pool.submit(copy, thread) for thread in range(threads)}
            while waiting:
                done, waiting = wait(waiting, timeout=0.05, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                yield sum(there)
        finally:
            pieces.clear()  # after a failure the other threads end, too


def _take(values: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    out[...] = values[rows]


def _equal(a: Array, b: Array) -> bool:
    return np.array_equal(device.download(a), device.download(b))
