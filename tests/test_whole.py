"""Products of up to 8 rows on sm_90a: the bits of linear_hopper whatever the tile, the norm in the same launch."""

import numpy as np
import pytest

from boleinfer import device, hopper, kernels, residual, whole
from boleinfer.residual import Residual, norm_gated_linear, norm_linear, norm_linear_pair
from boleinfer.whole import Tile, tile

BF16 = device.dtype("bf16")
PUBLISHED = [  # features, k, halves: of the 0.8B, 4B, 9B, 27B and 35B-A3B sizes
    *[((8192, 32), 1024, 1), ((1024,), 2048, 1), ((3584,), 1024, 2), ((1024,), 3584, 1), ((5120,), 1024, 1)],
    *[((12288, 64), 2560, 1), ((2560,), 4096, 1), ((9216,), 2560, 2), ((2560,), 9216, 1), ((10240,), 2560, 1)],
    *[((12288, 64), 4096, 1), ((4096,), 4096, 1), ((12288,), 4096, 2), ((4096,), 12288, 1), ((10240,), 4096, 1)],
    *[((16384, 96), 5120, 1), ((5120,), 6144, 1), ((17408,), 5120, 2), ((5120,), 17408, 1)],
    *[((12288, 64), 2048, 1), ((2048,), 4096, 1), ((9216,), 2048, 1)],
]


@pytest.fixture(autouse=True)
def needs_the_kernel(gpu, monkeypatch):
    if not kernels.runs_here(whole.FILE):
        pytest.skip("for sm_90a")
    if gpu != "cuda":
        monkeypatch.setattr(device, "multiprocessors", lambda: 3)


def normal(*shape, seed=0):
    return device.upload((np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5).astype(BF16))


def rows(R, Din):
    """x [R, Din] in front of rows that are NaN."""
    x = np.random.default_rng(R).standard_normal((9, Din)).astype(BF16)
    x[R:] = np.nan
    return device.upload(x)[:R]


def both(x, w, shape, dtype, gated=False, w_more=None):
    """What whole.product and hopper.product give, and how many numbers differ."""
    found = []
    for product in (whole.product, hopper.product):
        out = device.empty(shape, dtype)
        more = None if w_more is None else device.empty((len(x), len(w_more)), np.float32)
        product(x, w, out, gated=gated, w_more=w_more, more=more)
        found.append([device.download(a) for a in (out, more) if a is not None])
    return zip(*found)


@pytest.mark.parametrize("R", [1, 3, 8])
@pytest.mark.parametrize(
    "Din,Dout,own",
    [
        (512, 48, Tile(24, 1, 0)),
        (64, 40, Tile(8, 1, 2)),  # ranges without chunks
        (512, 40, Tile(8, 1, 8)),  # more places than there are chunks
        (1152, 136, Tile(40, 1, 3)),
        (1152, 64, Tile(8, 3, 2)),  # a run that the last range does not fill
        (1024, 128, Tile(64, 2, 0)),
        (2048, 40, Tile(16, 4, 0)),
        (1536, 24, Tile(8, 1, 0)),
        (1152, 16, Tile(8, 3, 0)),
    ],
)
def test_the_bits_of_linear_hopper(R, Din, Dout, own, monkeypatch):
    monkeypatch.setattr(whole, "tile", lambda *_: own)
    monkeypatch.setattr(whole, "UNDER_WAY", 1)
    monkeypatch.setattr(whole, "UNDER_WAY_OF_ONE", 1)
    x, w, w_more = rows(R, Din), normal(Dout, Din), normal(5, Din, seed=1)
    for dtype in (BF16, np.float32):
        for got, expected in both(x, w, (R, Dout), dtype, w_more=w_more if own.places else None):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("R", [1, 7])
@pytest.mark.parametrize(
    "Din,F,own", [(512, 72, Tile(24, 1, 0)), (576, 104, Tile(8, 1, 2)), (1024, 40, Tile(32, 1, 3))]
)
def test_the_bits_of_linear_hopper_gated(R, Din, F, own, monkeypatch):
    monkeypatch.setattr(whole, "tile", lambda *_: own)
    for got, expected in both(rows(R, Din), normal(2 * F, Din), (R, F), BF16, gated=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("D", [64, 320, 1024, 2560, 8192])
def test_norm_and_product_in_one_launch(D, adds, monkeypatch):
    """The bits of two launches, in the product and in the stream, which is a new array; the old one stays as it was."""
    launched, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a[1]), launch(*a, **k)))
    stream, added = (np.random.default_rng(i).standard_normal((1, D)).astype(BF16) for i in range(2))
    gain = device.upload((0.2 * np.random.default_rng(2).standard_normal(D)).astype(np.float32))
    w, more = normal(48, D), normal(3, D, seed=1)
    calls = [lambda r: norm_linear(r, w, np.float32), lambda r: norm_gated_linear(r, w)]
    for call in [*calls, lambda r: norm_linear_pair(r, w, more)]:
        found = []
        for one in (True, False):
            with monkeypatch.context() as m:
                if not one:
                    m.setattr(residual, "_in_one_launch", lambda *_: None)
                launched.clear()
                before = device.upload(stream.copy())
                out, after = call(Residual(before, device.upload(added) if adds else None, gain, 1e-6))
                assert len(launched) == (1 if one else 2)
                if one:
                    np.testing.assert_array_equal(device.download(before), stream)
                outs = out if isinstance(out, tuple) else (out,)
                found.append([device.download(a) for a in (*outs, after)])
        for got, expected in zip(*found):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("widths,Din,halves", PUBLISHED)
def test_a_block_has_little_more_than_its_share(widths, Din, halves, rows):
    if rows * Din > 8 * whole.MOST_WIDE:
        pytest.skip("for linear_hopper")
    t = tile(widths, Din // 64, halves, rows, rows == 1 and Din <= whole.MOST_NORMED, 132)
    rounds = -(-sum(-(-width // t.features) for width in widths) // 132)
    assert rounds * t.features <= max(1.25 * sum(widths) / 132, 16)
    assert t.features * halves <= whole.MOST_TALL and (t.places or rounds == 1) and t.features % 8 == 0
    assert t.places != 1 and (halves == 1 or t.run == 1)


def test_wide_rows_are_for_linear_hopper():
    assert whole.takes(1, 12288) and whole.takes(8, 4096)
    assert not whole.takes(2, 12288) and not whole.takes(9, 64) and not whole.takes(1, 72)
