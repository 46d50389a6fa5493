"""What the MTP layer begins with, by the kernel: rows that hold nothing are NaN, all others are as they are alone."""

import numpy as np
import pytest

from boleinfer import device
from boleinfer.ops.mtp_inputs import mtp_inputs


@pytest.mark.parametrize("act", ["bf16", "float"])
@pytest.mark.parametrize("D", [8, 63, 1032])
def test_rows_in_any_company(gpu, act, D):
    rng, kind = np.random.default_rng(D), device.dtype(act)
    token, source = np.asarray([3, -1, 10, 0, 11], np.int32), np.asarray([1, 0, -1, 4, 0], np.int32)
    position, inv_freq = np.asarray([0, 7, 300_000, 1, 2], np.int32), rng.uniform(0, 1, 5)
    table, hidden = (rng.standard_normal((n, D)).astype(kind) for n in (11, 5))
    wa, wb = rng.standard_normal((2, D)).astype(np.float32)

    def run(rows):
        arrays = [token[rows], table, wa, hidden, wb, position[rows], inv_freq]
        out = mtp_inputs(*map(device.upload, arrays), 1.5, 1e-6, device.upload(source[rows]))
        return [device.download(a) for a in out]

    x, cos, sin = run(slice(None))
    halves = x.reshape(5, 2, D)
    empty = np.stack([(token < 0) | (token >= 11), source < 0], 1)
    assert np.isnan(halves[empty].astype(np.float32)).all() and np.isfinite(halves[~empty].astype(np.float32)).all()
    for r in range(5):
        assert all(a[0].tobytes() == b[r].tobytes() for a, b in zip(run(slice(r, r + 1)), (x, cos, sin)))
    used = [0, 3]
    wide = [a.astype(np.float64) for a in (table, wa, hidden, wb)]
    want = mtp_inputs(token[used], *wide, position[used], inv_freq, 1.5, 1e-6, source[used])
    np.testing.assert_allclose(x[used].astype(np.float64), want[0], rtol=8e-3 if act == "bf16" else 1e-5)
    np.testing.assert_allclose((cos[used], sin[used]), want[1:], rtol=1e-5, atol=1e-6)
