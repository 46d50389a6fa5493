"""Norms that leave rows as FP8 products read them, in one launch, with the bits of two."""

import numpy as np
import pytest

from boleinfer import device, kernels
from boleinfer.device import Fp8, Split
from boleinfer.ops.linear import gated_linear, linear, linear_pair
from boleinfer.residual import Residual, norm_gated_linear, norm_linear, norm_linear_pair, normed


def made(R, D, added, seed=0):
    rng = np.random.default_rng(seed)
    bf16 = device.dtype("bf16")
    h, x = ((rng.standard_normal((R, D)) * scale).astype(bf16) for scale in (5, 1))
    norm = device.upload((0.2 * rng.standard_normal(D)).astype(np.float32))
    bits = rng.integers(0, 126, (80, D)).astype(np.uint8)
    w = Fp8(device.upload(bits), device.upload(rng.random((1, -(-D // 128)), np.float32)))
    more = device.upload(rng.standard_normal((6, D)).astype(bf16))

    def residual():
        return Residual(device.upload(h), device.upload(x) if added else None, norm, 1e-6)

    return residual, w, more


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("R,D", [(1, 256), (3, 1280), (9, 512), (130, 256), (2, 384)])
def test_norm_and_split_in_one_launch(gpu, R, D, added, monkeypatch):
    residual, w, more = made(R, D, added)
    x, stream = normed(residual())
    wanted = [linear(x, w), gated_linear(x, w), *linear_pair(x, w, more), stream, stream, stream]
    launched, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a[1]), launch(*a, **k)))
    plain, first = norm_linear(residual(), w)
    gated, second = norm_gated_linear(residual(), w)
    pair, third = norm_linear_pair(residual(), w, more)
    for out, right in zip((plain, gated, *pair, first, second, third), wanted):
        np.testing.assert_array_equal(device.download(out), device.download(right))
    assert launched.count("norm_rows") == (3 if D % 256 == 0 and R > 1 else 0)
    assert launched.count("split_rows") == (0 if D % 256 == 0 else 3)
    assert launched.count("linear_fp8_row") == (3 if R == 1 else 0)


def test_a_row_that_is_not_finite_spoils_only_itself(gpu):
    residual, w, _ = made(3, 256, True)
    clean, _ = norm_linear(residual(), w)
    r = residual()
    h = device.download(r.stream)
    h[1, 7] = np.inf
    out, _ = norm_linear(r._replace(stream=device.upload(h)), w)
    assert np.isnan(device.download(out)[1].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(device.download(out), 1, 0), np.delete(device.download(clean), 1, 0))


def test_without_the_kernel_of_hopper_nothing_is_split(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "runs_here", lambda file: False)
    monkeypatch.setattr(Split, "empty", lambda *_: pytest.fail("split"))
    residual, w, _ = made(2, 256, True)
    out, _ = norm_linear(residual(), w)
    np.testing.assert_array_equal(device.download(out), device.download(linear(normed(residual())[0], w)))
