"""Rows of the embedding table: copies, and a clear refusal of ids outside it."""

import numpy as np
import pytest

from boleinfer.ops.embedding import embedding


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_copied(dtype):
    table = np.asfortranarray(np.arange(12, dtype=dtype).reshape(4, 3))
    out = embedding(np.asarray([3, 0, 3], np.int32), table)
    assert out.dtype == dtype and out.tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    out[:] = -1
    assert table.min() == 0
    assert embedding(np.zeros(0, np.int32), table).shape == (0, 3)


@pytest.mark.parametrize("bad", [-1, -4, 4, 2**31 - 1])
def test_ids_outside_the_table_are_refused(bad):
    with pytest.raises(ValueError, match=rf"token id {bad} at row 1 is outside 0 \.\. 3"):
        embedding(np.asarray([0, bad, 99], np.int32), np.zeros((4, 3), np.float32))
