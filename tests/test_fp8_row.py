"""The FP8 product of one row on sm_90a, split and normed in the same launch: the bits of several launches."""

import numpy as np
import pytest

from boleinfer import device, hopper_fp8, kernels
from boleinfer.device import Fp8, Split
from boleinfer.residual import Residual, norm_gated_linear, norm_linear, norm_linear_pair, normed

BF16 = device.dtype("bf16")


@pytest.fixture(autouse=True)
def needs_the_kernel(gpu, monkeypatch):
    if not kernels.runs_here(hopper_fp8.ROW_FILE):
        pytest.skip("for sm_90a")
    if gpu != "cuda":
        monkeypatch.setattr(device, "multiprocessors", lambda: 3)


def fp8(Dout, Din, seed=0):
    rng = np.random.default_rng(seed)
    bits = (40 * rng.standard_normal((Dout, Din)) / Din**0.5).astype(device.dtype("fp8")).view(np.uint8)
    scale = np.exp(rng.standard_normal((-(-Dout // 128), -(-Din // 128)))).astype(np.float32)
    return Fp8(device.upload(bits), device.upload(scale))


def normal(*shape, seed=0):
    return device.upload((np.random.default_rng(seed).standard_normal(shape)).astype(BF16))


def both(x, w, width, dtype, gated=False, w_more=None):
    """What product_of_row and product of the split row give."""
    found = []
    split = hopper_fp8.split_rows(x)._replace(rows=x)
    for product, row in ((hopper_fp8.product_of_row, x), (hopper_fp8.product, split)):
        out = device.empty((1, width), dtype)
        more = None if w_more is None else device.empty((1, len(w_more)), np.float32)
        product(row, w, out, gated=gated, w_more=w_more, more=more)
        found.append([device.download(a) for a in (out, more) if a is not None])
    return zip(*found)


@pytest.mark.parametrize(
    "Din,Dout,features,More",
    [
        (4096, 40, 16, 5),  # low tiles: two ranges in a place
        (2304, 200, 32, 3),  # whose numbers of chunks differ
        (656, 72, 24, 0),  # ranges without chunks, a short last chunk
        (1024, 300, 104, 9),  # tiles across blocks of scales
        (16, 8, 8, 1),
        (5136, 520, 136, 70),  # two warpgroups, three times eight numbers a thread
        (12416, 96, 32, 0),
    ],
)
def test_the_bits_of_linear_fp8(gpu, Din, Dout, features, More, monkeypatch):
    monkeypatch.setattr(hopper_fp8, "tile", lambda *_: features)
    x, w, w_more = normal(1, Din), fp8(Dout, Din), normal(More, Din, seed=1) if More else None
    for under_way in (1, 1 << 20):
        monkeypatch.setattr(hopper_fp8, "UNDER_WAY", under_way)
        for dtype in (BF16, np.float32):
            for got, expected in both(x, w, Dout, dtype, w_more=w_more):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("Din,F,features", [(2048, 200, 96), (1024, 40, 8), (1040, 280, 136), (640, 48, 16)])
def test_the_bits_of_linear_fp8_gated(Din, F, features, monkeypatch):
    monkeypatch.setattr(hopper_fp8, "tile", lambda *_: features)
    for got, expected in both(normal(1, Din), fp8(2 * F, Din), F, BF16, gated=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("D", [256, 1280, 4096, 5120])
def test_norm_and_split_inside(D, monkeypatch):
    monkeypatch.setattr(hopper_fp8, "EVEN", 0 if D < 4096 else 2)
    h, x = (5 * device.download(normal(1, D)).astype(np.float32)).astype(BF16), normal(1, D, seed=1)
    norm = device.upload((0.2 * np.random.default_rng(2).standard_normal(D)).astype(np.float32))
    w, more = fp8(80, D), normal(6, D, seed=3)

    def residual():
        return Residual(device.upload(h), x, norm, 1e-6)

    y, stream = normed(residual())
    split = hopper_fp8.split_rows(y)._replace(rows=y)
    plain, gated, pair = device.empty((1, 80), BF16), device.empty((1, 40), BF16), device.empty((1, 6), np.float32)
    hopper_fp8.product(split, w, plain)
    hopper_fp8.product(split, w, gated, gated=True)
    hopper_fp8.product(split, w, plain, w_more=more, more=pair)
    launched, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a[1]), launch(*a, **k)))
    found = [norm_linear(residual(), w), norm_gated_linear(residual(), w), norm_linear_pair(residual(), w, more)]
    assert launched == ["linear_fp8_row"] * 3
    for out, expected in zip((found[0][0], found[1][0], *found[2][0]), (plain, gated, plain, pair)):
        np.testing.assert_array_equal(device.download(out), device.download(expected))
    for _, own in found:
        np.testing.assert_array_equal(device.download(own), device.download(stream))


def test_a_row_that_is_not_finite_gives_nan():
    x = device.download(normal(1, 512))
    x[0, 300] = np.inf
    out = device.empty((1, 40), BF16)
    hopper_fp8.product_of_row(device.upload(x), fp8(40, 512), out)
    assert np.isnan(device.download(out).astype(np.float32)).all()


def test_what_it_does_not_take(monkeypatch):
    assert hopper_fp8.takes_row(1, 4096) and not hopper_fp8.takes_row(2, 4096)
    assert not hopper_fp8.takes_row(1, 4104) and not hopper_fp8.takes_row(1, hopper_fp8.MOST_WIDE + 16)
    monkeypatch.setattr(Split, "empty", lambda *_: pytest.fail("split"))
    out = device.empty((1, 40), BF16)
    hopper_fp8.product_of_row(normal(1, 512), fp8(40, 512), out)
