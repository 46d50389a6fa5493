"""The norms against plain loops in float64 and against HF transformers in float32."""

import math

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from boleinfer.ops import norms

SHAPES = [(1, 1), (3, 63), (65, 5), (2, 3, 128), (0, 7)]


def loop_rms(x, eps):
    out = np.empty(x.shape)
    for i in np.ndindex(x.shape[:-1]):
        scale = math.sqrt(math.fsum(v * v for v in x[i].tolist()) / x.shape[-1] + eps)
        out[i] = [v / scale for v in x[i].tolist()]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_norms_equal_loops(shape, eps):
    rng = np.random.default_rng(len(shape))
    x, z = rng.standard_normal(shape), 5 * rng.standard_normal(shape)
    w = rng.standard_normal(shape[-1])
    gate = np.asarray([v / (1 + math.exp(-v)) for v in z.ravel().tolist()]).reshape(shape)
    np.testing.assert_allclose(norms.rms_norm(x, w, eps), loop_rms(x, eps) * (1 + w), rtol=1e-13)
    np.testing.assert_allclose(norms.gated_rms_norm(x, z, w, eps), w * loop_rms(x, eps) * gate, rtol=1e-13)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_norms_equal_hf(scale):
    rng = np.random.default_rng(3)
    x = (scale * rng.standard_normal((5, 4, 128))).astype(np.float32)
    z, w = rng.standard_normal((5, 4, 128)).astype(np.float32), rng.standard_normal(128).astype(np.float32)
    plain, gated = hf.Qwen3NextRMSNorm(128, 1e-6), hf.Qwen3NextRMSNormGated(128, 1e-6)
    with torch.no_grad():
        plain.weight.copy_(torch.from_numpy(w))
        gated.weight.copy_(torch.from_numpy(w))
        expected = plain(torch.from_numpy(x)).numpy()
        expected_gated = gated(torch.from_numpy(x), torch.from_numpy(z)).numpy()
    np.testing.assert_allclose(norms.rms_norm(x, w, 1e-6), expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(norms.gated_rms_norm(x, z, w, 1e-6), expected_gated, rtol=2e-6, atol=1e-6)


def test_f01_the_weight_is_a_delta_in_ordinary_norms_and_a_gain_in_the_gated_one():
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    zero, small = np.zeros(16, np.float32), np.full(16, 1e-3, np.float32)
    plain = norms.rms_norm(x, zero, 1e-6)
    np.testing.assert_allclose((plain**2).mean(-1), 1, rtol=1e-4)  # a delta of zero is the gain 1
    np.testing.assert_allclose(norms.rms_norm(x, small, 1e-6) / plain, 1.001, rtol=1e-6)
    assert (norms.gated_rms_norm(x, x, zero, 1e-6) == 0).all()  # a gain of zero is zero


def test_float32_stays_float32_and_arguments_stay_untouched():
    x = np.ones((2, 8), np.float32)
    kept = x.copy()
    for out in (norms.rms_norm(x, x[0], 1e-6), norms.gated_rms_norm(x, x, x[0], 1e-6)):
        assert out.dtype == np.float32 and out.base is not x
    np.testing.assert_array_equal(x, kept)


def test_zero_rows_and_extreme_gates_stay_finite():
    zero = np.zeros((1, 8), np.float32)
    w = np.ones(8, np.float32)
    assert (norms.rms_norm(zero, w, 1e-6) == 0).all()
    gate = np.asarray([[-1e30, -200, -90, 0, 90, 200, 1e30, 1]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        out = norms.gated_rms_norm(np.ones((1, 8), np.float32), gate, w, 1e-6)
    assert np.isfinite(out).all() and (out[0, :2] == 0).all() and out[0, 6] > 1e29


def test_a_nan_row_spoils_only_itself():
    x = np.ones((3, 4), np.float32)
    x[1] = np.nan
    for out in (norms.rms_norm(x, x[0], 1e-6), norms.gated_rms_norm(x, x, x[0], 1e-6)):
        assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_residual_is_added_in_place_before_the_norm(dtype):
    rng = np.random.default_rng(6)
    h, x = rng.standard_normal((2, 5, 24)).astype(dtype)
    w, kept = rng.standard_normal(24).astype(dtype), h + x
    out = norms.add_rms_norm(h, x, w, 1e-6)
    assert out.dtype == dtype and np.array_equal(h, kept)
    assert np.array_equal(out, norms.rms_norm(kept, w, 1e-6))
