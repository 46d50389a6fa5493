"""Rows of a table: the embedding of token ids, hidden states by row number. Knows nothing of what follows."""

from __future__ import annotations

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.ops import Case


def embedding(ids: Array, table: Array, dtype: np.dtype | None = None) -> Array:
    """The rows of `table` at `ids`, copied: ids int32 [R], table [vocab, D] or its panels [vocab/n, n, D] -> [R, D].

    Raises ValueError naming the first id outside 0 .. vocab-1 (NumPy alone would count a negative one from the end).
    On the GPU such an id gives a row of NaN, the table has no panels, and the result is of `dtype` (None: the table's).
    """
    if device.on_gpu(table):
        R, vocab, D = len(ids), len(table), table.shape[-1]
        out = device.empty((R, D), table.dtype if dtype is None else dtype)
        block = min(256, -(-D // 256) * 32)  # 8 numbers a thread
        if R:
            args = {"ids": ids, "table": table, "out": out, "Vocab": vocab, "D": D}
            constants = {"Wt": device.c_type(table), "Act": device.c_type(out)}
            kernels.launch("embedding.cu", "embedding", R, block, args, constants=constants)
        return out
    vocab = len(table) if table.ndim == 2 else len(table) * table.shape[1]
    bad = (ids < 0) | (ids >= vocab)
    if bad.any():
        raise ValueError(f"token id {ids[bad][0]} at row {np.flatnonzero(bad)[0]} is outside 0 .. {vocab - 1}")
    return table[ids] if table.ndim == 2 else table[np.divmod(ids, table.shape[1])]


def _case(R: int, shape: tuple[int, ...]) -> Case:
    vocab = int(np.prod(shape[:-1]))
    return Case(
        f"R={R} table={shape}",
        lambda rng: {"ids": rng.integers(0, vocab, R, np.int32), "table": rng.standard_normal(shape)},
        bound=0.0,
        gpu=len(shape) == 2,
    )


CASES = {
    "embedding": [
        _case(R, shape) for R, shape in [(1, (1, 1)), (3, (63, 65)), (65, (7, 63)), (16, (8192, 384)), (9, (5, 32, 7))]
    ]
}
