"""Stored tensors to GPU arrays: from the memory-mapped files through pinned staging buffers. Knows no model.

Matrices become activations' type, row-major; FP8 matrices stay FP8 with their scales where every fused or permuted part
keeps whole blocks of 128 rows, and are dequantised here where one does not. Vectors and convolution taps are float32.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer import device
from boleinfer.checkpoint import Checkpoint, Stored
from boleinfer.config import ModelConfig
from boleinfer.device import Array, Fp8
from boleinfer.plans import Part, Target
from boleinfer.weights import BLOCK, Plan, dequantise, float32, match, scale_names, tie

COPIERS = 16  # threads that read pages of the files and fill staging buffers, at most: one a core
STAGING = 2 << 20  # bytes of a buffer, of which a thread has two: pinning takes 0.7 ms a MB


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
    source = _Source(checkpoint, names, act)
    total, done = sum(sizes_of(targets, names, checkpoint.tensors, act).values()), 0
    arrays: dict[str, Any] = {}
    with _Copiers(total) as copiers:
        for target in targets:
            arrays[target.name] = source.place(target, copiers)
        for nbytes in copiers.finish():
            done += nbytes
            if progress is not None and done < total:
                progress(done, total)
    if progress is not None:
        progress(total, total)
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
        n = math.prod(t.shape)
        if stays_fp8(t, names, stored, act):
            *lead, rows, width = t.shape
            found[t.name] = n + 4 * math.prod(lead) * -(-rows // BLOCK) * -(-width // BLOCK)
        else:
            found[t.name] = n * kind(t.name, t.shape, act).itemsize
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


class _Source:
    """The rows of each target, in the type that it has on the GPU."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], act: np.dtype):
        self._checkpoint, self._names, self._act = checkpoint, names, act

    def place(self, target: Target, copiers: _Copiers) -> Array | Fp8:
        """The target's array, whose contents the copiers are yet to bring."""
        fp8 = stays_fp8(target, self._names, self._checkpoint.tensors, self._act)
        dtype = device.dtype("fp8") if fp8 else kind(target.name, target.shape, self._act)
        array = device.empty(target.shape, dtype)
        rows, first = array.reshape(-1, target.shape[-1]), 0
        for part in target.parts:
            data = self._checkpoint.view(self._names[part.tensor])
            if data.dtype == np.uint8 and not fp8:
                data = dequantise(data, self._scale(part))
            data = data.reshape(-1, target.shape[-1])
            copiers.copy(data, part.rows, rows[first : first + len(data)])
            first += len(data)
        return Fp8(array, self._scales(target)) if fp8 else array

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


class _Copiers:
    """Threads that convert rows into pinned buffers and queue their copies; they end with the `with` block.

    nbytes: what they will copy in all; little needs few of them, and pinned memory takes long to get
    """

    def __init__(self, nbytes: int) -> None:
        threads = max(1, min(COPIERS, os.cpu_count() or 1, nbytes // STAGING))
        self._pool = ThreadPoolExecutor(threads)
        self._staging = [device.Staging(STAGING) for _ in range(2 * threads)]
        self._free = deque(self._staging)
        self._pending: list[Future[int]] = []

    def __enter__(self) -> _Copiers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for staging in self._staging:
            staging.wait()

    def copy(self, data: np.ndarray, order: np.ndarray | None, out: Array) -> None:
        """Queues out[i] = data[order[i]] (order None: as they lie); both [n, width]."""
        step = max(1, STAGING // max(1, data.shape[1] * out.dtype.itemsize))
        for a in range(0, len(data), step):
            rows = slice(a, min(a + step, len(data)))
            self._pending.append(self._pool.submit(self._one, data, rows if order is None else order[rows], out[rows]))

    def finish(self) -> Iterator[int]:
        """Waits for every copy queued; gives the bytes of each. Raises what a copy raised."""
        for future in self._pending:
            yield future.result()

    def _one(self, data: np.ndarray, rows: slice | np.ndarray, out: Array) -> int:
        staging = self._free.popleft()  # the one that was used longest ago; there are more than threads
        try:
            view = staging.view(out.shape, out.dtype)
            _convert(data[rows], view)
            staging.copy_to(out)
        finally:
            self._free.append(staging)
        return int(out.nbytes)


def _convert(rows: np.ndarray, out: np.ndarray) -> None:
    """Stored rows (uint16 holds BF16 bits, uint8 FP8 bits) in the type of `out`."""
    same_bits = (rows.dtype, out.dtype.itemsize) in ((np.uint16, 2), (np.uint8, 1))
    if same_bits:
        out.view(rows.dtype)[...] = rows
    else:
        out[...] = float32(rows)


def _equal(a: Array, b: Array) -> bool:
    return np.array_equal(device.download(a), device.download(b))
