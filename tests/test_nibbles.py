"""Matrices of four bits a number: the numbers, their product, and the head that drafts look at."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import device, draft_head, nibbles, quantise
from boleinfer.draft_head import DraftHead, bytes_of
from boleinfer.kernels import KernelError
from boleinfer.nibbles import Nibbles

BF16 = device.dtype("bf16")


def matrix(Dout: int, Din: int, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((Dout, Din)).astype(BF16)
    w[0], w[-1, :3] = 0, (1e-3, -200, 200)
    return w


def empty(Dout: int, Din: int) -> Nibbles:
    return Nibbles(np.zeros((Dout // 32, Din // 128, nibbles.BRICK), np.uint8))


def near(w: np.ndarray) -> np.ndarray:
    """What is kept, 32 numbers at a time."""
    found = np.zeros(w.shape, np.float32)
    for row, numbers in zip(found, w.astype(np.float32)):
        for k in range(0, len(row), 32):
            some = numbers[k : k + 32]
            scale = np.float32(BF16.type(some[abs(some).argmax()] / np.float32(-8)))
            if scale:
                row[k : k + 32] = scale * (np.clip(np.rint(some / scale) + 8, 0, 15) - 8)
    return found


@pytest.mark.parametrize("shape", [(32, 128), (96, 384), (64, 2176)])
def test_numbers(gpu, shape):
    w, there, here = matrix(*shape), nibbles.zeros(shape), empty(*shape)
    nibbles.narrow(device.upload(w), there, 0)
    nibbles.narrow(w, here, 0)
    assert np.array_equal(device.download(there.bricks), here.bricks)
    assert np.array_equal(nibbles.wide(there), near(w)) and there.shape == shape
    assert there.bricks.nbytes == nibbles.nbytes(shape)


def test_some_rows_leave_the_others(gpu):
    w, there = matrix(64, 256), nibbles.zeros((64, 256))
    nibbles.narrow(device.upload(w), there, 0)
    nibbles.narrow(device.upload(w[5:8]), there, 30)
    assert np.array_equal(nibbles.wide(there), near(np.concatenate([w[:30], w[5:8], w[33:]])))


@pytest.mark.parametrize("R", [1, 3, 8])
@pytest.mark.parametrize("shape", [(32, 128), (160, 640), (64, 2176)])
@pytest.mark.parametrize("shared", [None, 99 << 10])
def test_product(gpu, monkeypatch, R, shape, shared):
    """Also where a block has little shared memory, and for rows alone and together the same bits."""
    if shared is not None:
        monkeypatch.setattr(device, "shared_bytes", lambda: shared)
    here, x = empty(*shape), np.random.default_rng(1).standard_normal((R, shape[1])).astype(BF16)
    nibbles.narrow(matrix(*shape), here, 0)
    w = Nibbles(device.upload(here.bricks))
    found = device.download(nibbles.product(device.upload(x), w))
    wanted = x.astype(np.float64) @ nibbles.wide(w).astype(np.float64).T
    assert np.linalg.norm(found - wanted) < 1e-6 * np.linalg.norm(wanted)
    alone = device.download(nibbles.product(device.upload(x[-1:]), w))
    assert np.array_equal(alone[0], found[-1])


def test_no_product_of_many_rows(gpu):
    with pytest.raises(KernelError, match="a product of 9 rows"):
        nibbles.product(device.upload(np.zeros((9, 128), BF16)), nibbles.zeros((32, 128)))


def test_the_head_of_drafts(gpu, monkeypatch):
    monkeypatch.setattr(quantise, "LEAST", 1)
    monkeypatch.setattr(draft_head, "MORE", 32)
    head = matrix(700, 128, 2)
    short = DraftHead(device.upload(head), 256, 8)
    assert isinstance(short.rows, Nibbles)
    assert short.rows.bricks.nbytes + short.ids.nbytes == bytes_of(256, 128, 2, 8)
    short.add([600, 3, 300])
    ids = device.download(short.ids)
    assert ids[:260].tolist() == [*range(256), 600, 300, -1, -1]
    rows = nibbles.wide(short.rows)
    assert np.array_equal(rows[:258], near(head[ids[:258]])) and not rows[258:].any()
