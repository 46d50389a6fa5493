"""The head's product as a step reads it: whole rows, largest logits alone, or nothing."""

import math

import numpy as np
import pytest

from boleinfer import device, kernels
from boleinfer.device import Fp8
from boleinfer.ops.linear import head, largest_of, linear

BF16 = device.dtype("bf16")


def test_keys_order_as_numbers_do_and_the_first_of_equal_ones_is_largest():
    numbers = np.asarray([-np.inf, -3.4e38, -1.5, -1e-45, 0.0, 1e-45, 1.0, 3.4e38, np.inf, np.nan], np.float32)
    keys = [largest_of(numbers[: i + 1]) for i in range(len(numbers))]
    assert keys == sorted(keys) and [0xFFFFFFFF - (key & 0xFFFFFFFF) for key in keys] == list(range(len(keys)))
    assert largest_of(np.float32([-0.0, 0.0])) >> 32 == largest_of(np.float32([0.0])) >> 32
    assert largest_of(np.float32([1, 2, 2, 2]), np.asarray([1, 0, 1, 1])) == largest_of(np.float32([1, 0, 2, 2]))
    assert largest_of(np.float32([1]), np.asarray([0])) == 0


@pytest.mark.parametrize("family", ["hopper", "others"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R,Dout", [(1, 17), (8, 700), (13, 700), (64, 400), (128, 1300)])
def test_head(gpu, monkeypatch, family, kind, R, Dout):
    if family == "others":
        monkeypatch.setattr(kernels, "runs_here", lambda file: False)
    rng, Din = np.random.default_rng(R), 272
    x, w = rng.standard_normal((R, Din)).astype(BF16), rng.standard_normal((Dout, Din)) / math.sqrt(Din)
    w[Dout // 2] = w[Dout // 3]  # ties
    x[R // 2, 3] = np.nan
    weights = device.upload(w.astype(BF16))
    if kind == "fp8":
        bits = device.upload(w.astype(device.dtype("fp8")).view(np.uint8))
        weights = Fp8(bits, device.upload(rng.uniform(0.5, 2, (-(-Dout // 128), -(-Din // 128))).astype(np.float32)))
    allowed, use = (rng.random(Dout) < 0.8).astype(np.uint8), rng.integers(0, 3, R).astype(np.int32)
    use[R // 2] = 2
    given = device.upload(x)
    whole = device.download(linear(given, weights, np.float32))
    for some in (allowed, None):
        largest = device.upload(np.zeros(R, np.uint64))
        on = None if some is None else device.upload(some)
        rows, kept = head(given, weights, device.upload(use), on, largest)
        np.testing.assert_array_equal(device.download(rows)[use == 1], whole[use == 1])
        keys = [largest_of(row, some) if u == 2 and kept is not None else 0 for row, u in zip(whole, use)]
        assert device.download(largest).tolist() == keys
        assert (kept is None) == (family == "others")
        if kept is None:
            np.testing.assert_array_equal(device.download(rows), whole)
