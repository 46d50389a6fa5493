"""One launch for a row a request has the bits of the two ops and writes the same pages, emulated and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boleinfer import device
from boleinfer.attention_core import attention_core
from boleinfer.ops import attention, relative_error
from tests.ops.test_attention_gpu import Scene


def run(scene, sizes, half, single, columns=None):
    """The rows' output, the pages behind it and before, and the definition's output; columns: of the page table."""
    rng, (Hq, Hkv, Dh), T = np.random.default_rng(0), sizes, scene.forest.committed
    used = [b for b, place in enumerate(scene.place) if len(place)]
    qgkv = np.full((scene.R, (2 * Hq + 2 * Hkv) * Dh), np.nan, scene.q.dtype)
    qgkv[scene.flat] = rng.standard_normal((len(scene.flat), qgkv.shape[1]))
    norms = [rng.uniform(-0.5, 0.5, Dh).astype(np.float32) for _ in "qk"]
    angle = np.full((scene.R, half), np.nan)
    angle[scene.flat] = rng.uniform(0, 6, (len(scene.flat), half))
    turn = [f(angle).astype(np.float32) for f in (np.cos, np.sin)]
    scene.order = np.random.default_rng(1)
    k, v, table = scene.pages(scene.place)
    for b in used:
        for pages in (k, v):
            pages[table[b, T[b] // scene.P], T[b] % scene.P] = np.nan
    slot = np.full(scene.R, -1, np.int32)
    slot[scene.flat] = [T[b] for b in used]
    forest = replace(scene.device_forest(), kv_slot=device.upload(slot), single=single)
    arguments = (
        [device.upload(x) for x in (qgkv, *norms)],
        [device.upload(x) for x in (*turn, k, v, table[:, :columns].copy())],
    )
    out = attention_core(*arguments[0], 1e-6, *arguments[1], forest, sizes)
    wide = [x.astype(np.float64) for x in (qgkv[scene.flat], *norms)], [x[scene.flat].astype(float) for x in turn]
    pages = [x.astype(np.float64) for x in (k, v)]
    expected = attention_core(*wide[0], 1e-6, *wide[1], *pages, table, scene.forest, sizes) if columns is None else None
    return device.download(out)[scene.flat], [device.download(x) for x in arguments[1][2:4]], [k, v], expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes, half", [((8, 2, 64), 16), ((2, 2, 64), 32), ((8, 1, 128), 64), ((8, 2, 256), 32)])
def test_one_launch_has_the_bits_of_two(gpu, sizes, half, seed):
    rng = np.random.default_rng(seed)
    trees = [[-1] * int(n) for n in (1, *rng.integers(0, 2, 3))]
    T = rng.choice([0, 1, 8, 63, 64, 65, 127, 150, 300, 2047 if gpu == "cuda" else 200], len(trees))
    scene = Scene(rng, trees, T, int(rng.choice([8, 16, 64])), *sizes, "bf16", behind=(0, 1, 2, 60)[seed])
    one, own_pages, _, expected = run(scene, sizes, half, True)
    two, pages, _, _ = run(scene, sizes, half, False)
    assert relative_error(one, expected) <= 1e-2
    assert one.tobytes() == two.tobytes()
    assert [x.tobytes() for x in own_pages] == [x.tobytes() for x in pages]


@pytest.mark.parametrize("requests", [33, 70, 128])
def test_many_requests(gpu, requests):
    rng = np.random.default_rng(requests)
    trees = [[-1] * int(n) for n in rng.integers(0, 2, requests)]
    scene = Scene(rng, trees, rng.integers(0, 40, requests), 8, 2, 1, 64, "bf16")
    one, own_pages, _, expected = run(scene, (2, 1, 64), 16, True)
    two, pages, _, _ = run(scene, (2, 1, 64), 16, False)
    assert relative_error(one, expected) <= 1e-2
    assert one.tobytes() == two.tobytes()
    assert [x.tobytes() for x in own_pages] == [x.tobytes() for x in pages]


def test_a_row_without_a_page_writes_nothing(gpu):
    scene = Scene(np.random.default_rng(0), [[-1]], [16], 16, 2, 1, 64, "bf16")
    _, after, before, _ = run(scene, (2, 1, 64), 16, True, columns=1)
    assert [x.tobytes() for x in after] == [x.tobytes() for x in before]


def test_what_the_kernel_does_not_take(gpu):
    for sizes, half, P in (((2, 1, 64), 4, 16), ((2, 1, 64), 8, 7), ((9, 1, 64), 8, 16), ((2, 1, 32), 8, 16)):
        scene = Scene(np.random.default_rng(0), [[-1]], [9], P, *sizes, "bf16")
        k, _, table = (device.upload(x) for x in scene.pages(scene.place))
        assert not attention.takes_inputs(device.upload(scene.q), k, table, half)
        out, _, _, expected = run(scene, sizes, half, True)
        assert relative_error(out, expected) <= 1e-2
