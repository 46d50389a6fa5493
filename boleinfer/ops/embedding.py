"""Token ids to rows of the embedding table. Knows nothing of what follows."""

from __future__ import annotations

import numpy as np

from boleinfer.ops import Case


def embedding(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The rows of `table` at `ids`, copied: ids int32 [R], table [vocab, D] -> [R, D].

    Raises ValueError naming the first id outside 0 .. vocab-1 (NumPy alone would count a negative one from the end).
    """
    bad = (ids < 0) | (ids >= len(table))
    if bad.any():
        raise ValueError(f"token id {ids[bad][0]} at row {np.flatnonzero(bad)[0]} is outside 0 .. {len(table) - 1}")
    return table[ids]


def _case(R: int, vocab: int, D: int) -> Case:
    return Case(
        f"R={R} vocab={vocab} D={D}",
        lambda rng: {"ids": rng.integers(0, vocab, R, np.int32), "table": rng.standard_normal((vocab, D))},
        bound=0.0,
    )


CASES = {"embedding": [_case(R, n, D) for R, n, D in [(1, 1, 1), (3, 63, 65), (65, 7, 63), (16, 8192, 384)]]}
