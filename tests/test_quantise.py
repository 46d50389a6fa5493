"""bf16 matrices made FP8: the numbers, and which matrices."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import device, models, quantise, random_weights
from boleinfer.device import Fp8
from boleinfer.draft_head import DraftHead, bytes_of
from boleinfer.published import published
from boleinfer.weights import dequantise

BF16 = device.dtype("bf16")


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (130, 272), (256, 128)])
def test_numbers(gpu, shape):
    w = np.random.default_rng(0).standard_normal(shape).astype(BF16)
    w[0], w[-1, :3] = 0, (1e-3, -200, 3)
    found, wanted = quantise.quantise(device.upload(w)), quantise.quantise(w)
    assert np.array_equal(device.download(found.scale), wanted.scale)
    assert np.array_equal(device.download(found.bits), wanted.bits)
    wide, near = w.astype(np.float32), dequantise(wanted.bits, wanted.scale)
    largest = np.repeat(np.repeat(wanted.scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
    assert (abs(near - wide) <= abs(wide) / 16 + largest * 2**-10).all()


def test_rows_that_come_later_share_one_scale(gpu):
    w = np.random.default_rng(1).standard_normal((130, 256)).astype(BF16)
    scale = quantise.scales(w).max(0, keepdims=True)
    bits = device.upload(np.zeros((200, 256), np.uint8))
    quantise.narrow(device.upload(w), device.upload(scale), bits[3:133])
    bits = device.download(bits)
    assert np.array_equal(bits[3:133], quantise.narrow(w, scale)) and not bits[:3].any() and not bits[133:].any()


def test_the_head_of_drafts(gpu, monkeypatch):
    monkeypatch.setattr(quantise, "LEAST", 1)
    head = np.random.default_rng(2).standard_normal((700, 32)).astype(BF16)
    head[600] *= 40
    monkeypatch.setattr("boleinfer.draft_head.MORE", 128)
    short = DraftHead(device.upload(head), 256, 9)
    assert isinstance(short.rows, Fp8)
    assert sum(a.nbytes for a in (*short.rows, short.ids)) == bytes_of(256, 32, 2, 9)
    short.add([600, 3, 300])
    ids, rows = device.download(short.ids), dequantise(*map(device.download, short.rows))
    assert ids[:260].tolist() == [*range(256), 600, 300, -1, -1] and not rows[258:].any()
    wide = head.astype(np.float32)[ids[:258]]
    assert (abs(rows[:258] - wide) <= abs(wide) / 16 + abs(wide).max() * 2**-18).all()


def test_what_only_drafts_read_is_fp8():
    for name, count in (("qwen3.5-9b", 5), ("qwen3.5-35b-a3b", 3)):
        config = published(name)
        plan = models.family(config.model_type).plan
        targets = {t.name: t.shape for t in plan(config, {})}
        found = [n for n, shape in targets.items() if quantise.drafts_in_fp8(n, shape, 2)]
        assert len(found) == count and not any(quantise.drafts_in_fp8(n, s, 4) for n, s in targets.items())
        nbytes = random_weights.sizes(config, plan, BF16)
        assert all(nbytes[n] == quantise.nbytes(targets[n]) for n in found)
