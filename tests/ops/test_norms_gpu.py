"""Norms and table rows on the GPU, emulated and real: views, odd addresses, company, rows that are NaN."""

import numpy as np
import pytest

from boleinfer import device
from boleinfer.kernels import KernelError
from boleinfer.ops.embedding import embedding
from boleinfer.ops.norms import add_rms_norm, gated_rms_norm, rms_norm

ACTS = [("bf16", 4e-3), ("float", 1e-6)]


def numbers(seed, shape, act="float"):
    return np.random.default_rng(seed).standard_normal(shape).astype(device.dtype(act))


def near(out, expected, bound):
    out = device.download(out).astype(np.float64)
    assert out.shape == expected.shape
    assert np.linalg.norm(out - expected) <= bound * np.linalg.norm(expected)


def shifted(array, by):
    """On the GPU, `by` numbers behind a multiple of 16 bytes."""
    flat = device.upload(np.concatenate((np.zeros(by, array.dtype), array.ravel())))
    return flat[by:].reshape(array.shape)


@pytest.mark.parametrize("act,bound", ACTS)
@pytest.mark.parametrize("Hv,V,skip,behind", [(3, 64, 128, 0), (2, 128, 8, 24), (5, 63, 7, 2), (1, 64, 3, 0)])
def test_z_is_columns_of_a_wider_matrix(gpu, act, bound, Hv, V, skip, behind):
    R = 9
    wide, o, w = numbers(0, (R, skip + Hv * V + behind), act), numbers(1, (R, Hv, V), act), numbers(2, V)
    z = wide[:, skip : skip + Hv * V].reshape(R, Hv, V)
    expected = gated_rms_norm(o.astype(np.float64), z.astype(np.float64), w.astype(np.float64), 1e-6)
    view = device.upload(wide)[:, skip : skip + Hv * V].reshape(R, Hv, V)
    assert view.strides[0] == wide.strides[0]
    near(gated_rms_norm(device.upload(o), view, device.upload(w), 1e-6), expected, bound)


def test_gates_of_any_size_are_finite(gpu):
    z = np.asarray([-3e38, -1e4, -100, -88, -87, -20, -1e-30, 0, 1e-30, 20, 88, 3e8], np.float32)
    o, w = np.ones((1, 1, len(z)), np.float32), np.ones(len(z), np.float32)
    out = gated_rms_norm(device.upload(o), device.upload(z.reshape(o.shape)), device.upload(w), 0.0)
    expected = gated_rms_norm(o.astype(np.float64), z.astype(np.float64).reshape(o.shape), w.astype(np.float64), 0.0)
    np.testing.assert_allclose(device.download(out), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("act,bound", ACTS)
@pytest.mark.parametrize("D", [1, 37, 128, 2056])
def test_addresses_that_are_no_multiple_of_16(gpu, act, bound, D):
    x, h, w = numbers(0, (5, D), act), numbers(1, (5, D), act), numbers(2, D)
    wide = [a.astype(np.float64) for a in (x, h, w)]
    on = device.upload(w)
    near(rms_norm(shifted(x, 1), on, 1e-6), rms_norm(wide[0], wide[2], 1e-6), bound)
    changed = shifted(h, 1)
    out = add_rms_norm(changed, device.upload(x), on, 1e-6)
    summed = (h.astype(np.float32) + x.astype(np.float32)).astype(h.dtype)
    assert np.array_equal(device.download(changed), summed)
    near(out, rms_norm(summed.astype(np.float64), wide[2], 1e-6), bound)


@pytest.mark.parametrize("act", ["bf16", "float"])
def test_a_row_has_the_same_bits_in_any_company_and_a_nan_row_spoils_only_itself(gpu, act):
    R, D = 7, 256
    x, h, w = numbers(0, (R, D), act), numbers(1, (R, D), act), device.upload(numbers(2, D))
    x[2] = np.nan

    def all_of(rows):
        a, b = x[rows], h[rows]
        heads = (len(a), 2, D // 2)
        return [
            device.download(out)
            for out in (
                rms_norm(device.upload(a), w, 1e-6),
                add_rms_norm(device.upload(a), device.upload(b), w, 1e-6),
                gated_rms_norm(device.upload(a.reshape(heads)), device.upload(b.reshape(heads)), w[: D // 2], 1e-6),
            )
        ]

    many = all_of(slice(None))
    for row in range(R):
        for out, one in zip(many, all_of(slice(row, row + 1))):
            assert out[row].tobytes() == one[0].tobytes()
    for out in many:
        broken = np.isnan(out.astype(np.float32)).reshape(R, -1)
        assert broken[2, :D].all() and not np.delete(broken, 2, 0).any()


@pytest.mark.parametrize("act", ["bf16", "float"])
@pytest.mark.parametrize("dtype", [None, "bf16", "float"])
def test_rows_of_a_table(gpu, act, dtype):
    table = numbers(0, (11, 40), act)
    ids = np.asarray([3, 0, -1, 10, 11, 3, 2**31 - 1, -(2**31)], np.int32)
    out = device.download(embedding(device.upload(ids), device.upload(table), dtype and device.dtype(dtype)))
    assert out.dtype == (device.dtype(dtype) if dtype else table.dtype)
    valid = (ids >= 0) & (ids < 11)
    assert np.array_equal(out[valid], table[ids[valid]].astype(out.dtype))
    assert np.isnan(out[~valid].astype(np.float32)).all()


def test_no_row_is_no_launch(gpu):
    none, w = device.upload(np.zeros((0, 8), np.float32)), device.upload(np.zeros(8, np.float32))
    heads = none.reshape(0, 2, 4)
    for out in (rms_norm(none, w, 1e-6), add_rms_norm(none, none, w, 1e-6)):
        assert len(out) == 0
    assert gated_rms_norm(heads, heads, w[:4], 1e-6).shape == (0, 2, 4)
    assert embedding(device.upload(np.zeros(0, np.int32)), device.upload(np.ones((3, 8), np.float32))).shape == (0, 8)


def test_wrong_sizes_are_refused(gpu):
    x, w = device.upload(numbers(0, (3, 8))), device.upload(numbers(0, 7))
    with pytest.raises(KernelError, match="w is"):
        rms_norm(x, w, 1e-6)
    with pytest.raises(KernelError, match="x is"):
        add_rms_norm(x, x[:2], device.upload(numbers(0, 8)), 1e-6)
