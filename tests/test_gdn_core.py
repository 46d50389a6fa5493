"""One launch for few rows a request has the bits of the three ops and changes nothing committed; emulated, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boleinfer import device, device_forest, gdn_few, kernels
from boleinfer import gdn_core as gdn_core_file
from boleinfer.forest import Forest, Tree
from boleinfer.gdn_core import gdn_core
from boleinfer.kernels import KernelError
from boleinfer.ops import relative_error
from boleinfer.ops.gdn_commit import commit
from boleinfer.ring import Ring
from tests import strategies as some
from tests.ops.test_gdn_gpu import Envelope, begin_pass

ACTS = {"bf16": 6e-2, "float": 1e-5}  # what bf16 loses between the ops counts too, in hard cases


def arguments(rng, rows, sizes, C=32, W=4, act="bf16", hard=False):
    """Host arguments; rows: how many each request has, all in one chain. What nobody owns or has written is NaN."""
    (Hk, K, Hv, V), B, slots, R = sizes, len(rows), len(rows) + 2, max(1, sum(rows))
    slot, channels = rng.permutation(slots)[:B].astype(np.int32), 2 * Hk * K + Hv * V
    committed = rng.integers(0, 4 * C, B)
    committed[0] = 3 * C - 1  # the ring has room for one more
    length = np.zeros(slots, np.int32)
    length[slot] = committed % C
    narrow = device.dtype(act)

    def owned(shape, dtype, scale=1.0, filled=False):
        array = np.full((slots, *shape), np.nan)
        array[slot] = scale * rng.standard_normal((B, *shape))
        if filled:
            array[np.arange(C) >= length[:, None]] = np.nan
        return array.astype(dtype)

    ring_g = -np.exp(rng.uniform(-8, 3, (slots, C, Hv))) * (rng.random((slots, C, Hv)) < 0.8)
    if hard:
        ring_g = rng.choice([0, -1e-6, -88, -1e4, -np.inf], ring_g.shape, p=[0.5, 0.3, 0.1, 0.05, 0.05])
    ring_g[np.arange(C) >= length[:, None]] = np.nan
    keys = owned((C, Hk, K), narrow, K**-0.5, filled=True)
    ring = Ring(keys, owned((C, Hv, V), np.float32, 0.3, filled=True), ring_g.astype(np.float32))
    window = owned((W, channels), narrow)
    window[slot, committed % W] = np.nan
    return {
        "qkvz": rng.standard_normal((R, channels + Hv * V)).astype(narrow),
        "ba": rng.normal(0, 8 if hard else 2, (R, 2 * Hv)).astype(np.float32),
        "taps": (rng.standard_normal((channels, W)) / 2).astype(np.float32),
        "A_log": rng.normal(0, 2, Hv).astype(np.float32),
        "dt_bias": rng.standard_normal(Hv).astype(np.float32),
        "norm": (1 + 0.2 * rng.standard_normal(V)).astype(np.float32),
        "eps": 1e-6,
        "window": window,
        "S": owned((Hv, K, V), np.float32),
        "ring": ring,
        "slot": slot,
        "forest": Forest.of([Tree.chain([0] * n) for n in rows], committed),
        "sizes": sizes,
    }


def uploaded(given):
    def upload(value):
        if isinstance(value, Forest):
            return device_forest.upload(value)
        if isinstance(value, Ring):
            return Ring(*map(device.upload, value))
        return device.upload(value) if isinstance(value, np.ndarray) else value

    return {name: upload(value) for name, value in given.items()}


def wide(value):
    if isinstance(value, Ring):
        return Ring(*map(wide, value))
    floats = isinstance(value, np.ndarray) and value.dtype.kind not in "iub"
    return value.astype(np.float64) if floats else value


def memory_of(on, given, scratch=False):
    """Bytes of all memory; scratch: but the places of the next token of requests with a row."""
    window, S, *ring = (device.download(a) for a in (on["window"], on["S"], *on["ring"]))
    if scratch:
        for s, T, tree in zip(given["slot"], given["forest"].committed, given["forest"].trees):
            if len(tree):
                window[s, T % window.shape[1]] = np.nan
                for array in ring:
                    array[s, T % array.shape[1]] = np.nan
    return b"".join(a.tobytes() for a in (window, S, *ring))


def in_place(on, given):
    """Inputs, k, u and g of single rows, from where the rows belong once they are committed."""
    forest = given["forest"]
    used = np.diff(forest.start) > 0
    slot, T = given["slot"][used], forest.committed[used]
    window, *ring = (device.download(a) for a in (on["window"], *on["ring"]))
    return window[slot, T % window.shape[1]], *(array[slot, T % array.shape[1]] for array in ring)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "rows,sizes,C,W",
    [
        ([1], (1, 16, 1, 16), 5, 4),
        ([1, 1, 0], (2, 16, 4, 64), 32, 3),
        ([0, 1, 1], (1, 64, 3, 16), 64, 4),
        ([1, 1], (1, 32, 2, 32), 33, 2),
        ([1, 1, 1, 0, 0], (2, 128, 4, 128), 32, 4),
        ([1, 1], (1, 128, 3, 128), 64, 4),
    ],
)
@pytest.mark.parametrize("hard", [False, True])
def test_one_launch_has_the_bits_of_three(gpu, act, rows, sizes, C, W, hard):
    given = arguments(np.random.default_rng(len(rows) + C), rows, sizes, C, W, act, hard)
    on = uploaded(given)
    assert on["forest"].single
    before = memory_of(on, given)
    y, factors = gdn_core(**on | {"forest": replace(on["forest"], single=False)})
    assert memory_of(on, given) == before
    three = [device.download(a) for a in (y, *factors)]
    for _ in range(2):  # a step may come again before it is committed
        begin_pass()
        y, nothing = gdn_core(**on)
        assert nothing is None and memory_of(on, given, scratch=True) == before
        x, *factors = in_place(on, given)
        assert x.tobytes() == given["qkvz"][:, : x.shape[1]].tobytes()
        one = [device.download(y), *factors]
        for name, a, b in zip(("y", "k", "u", "g"), one, three):
            assert a.tobytes() == b.tobytes(), f"{name} differs"
    expected = gdn_core(**{name: wide(value) for name, value in given.items()})
    assert relative_error([wide(a) for a in one], [expected[0], *expected[1]]) <= ACTS[act]


@pytest.mark.parametrize("act", ["bf16", "float"])
def test_single_rows_are_committed_where_they_lie(gpu, act):
    """The memory of a commit of rows that were kept apart, to the bit; nothing accepted changes nothing."""
    sizes = Hk, K, Hv, V = 1, 16, 2, 32
    given = arguments(np.random.default_rng(3), [1, 1, 0, 1, 1], sizes, 5, 4, act)
    given["forest"].committed[3] = 9
    given["ring"] = Ring(*(np.nan_to_num(a) for a in given["ring"]))
    forest, kept = given["forest"], (True, False, True, True, False)
    paths = [forest.start[b] + np.arange(n * kept[b]) for b, n in enumerate(np.diff(forest.start))]
    accepted, found = device_forest.upload_paths(forest, paths), []
    for single in (True, False):
        on = uploaded(given)
        on["forest"] = replace(on["forest"], single=single)
        _, factors = gdn_core(**on)
        rows = [on["qkvz"][:, : 2 * Hk * K + Hv * V], *factors] if factors else ()
        one_layer = on["window"][None], on["S"][None], Ring(*(a[None] for a in on["ring"]))
        commit(*one_layer, *([[row] for row in rows] or [[]] * 4), on["slot"], on["forest"], accepted)
        found.append([device.download(a) for a in (on["window"], on["S"], *on["ring"])])
    for s, T, path in zip(given["slot"], forest.committed, paths):
        T += len(path)
        valid = (T - np.arange(1, 4)) % 4, slice(None), *[slice(T % 5)] * 3  # of window, S and ring
        for one, other, part in zip(*found, valid):
            assert one[s][part].tobytes() == other[s][part].tobytes()


def tree_of(rng, n):
    """Parents of a random tree, perhaps with several roots."""
    return [int(rng.integers(-1 if rng.random() < 0.1 else min(0, i - 1), i)) for i in range(n)]


@pytest.mark.parametrize(
    "rows,sizes,C",
    [
        ([9, 1, 0, 16, 2], (1, 16, 3, 16), 5),
        ([3, 12], (2, 64, 4, 64), 32),
        ([16, 1], (2, 128, 4, 128), 32),
    ],
)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("kind", gdn_few.BLOCKS)
def test_few_rows_are_one_launch_with_the_bits_of_three(gpu, monkeypatch, rows, sizes, C, hard, kind):
    rng = np.random.default_rng(sum(rows) + C)
    monkeypatch.setattr(gdn_few, "BLOCKS", (kind,))
    for chains in (False, True):
        trees = [some.chain(n) if chains else tree_of(rng, n) for n in rows]
        given = arguments(rng, rows, sizes, C, hard=hard)
        envelope = Envelope(rng, trees, max(rows) < gdn_few.ROWS, given["forest"].committed)
        given["forest"] = envelope.forest
        spread = {name: envelope.rows(given[name]) for name in ("qkvz", "ba")}
        forest = replace(envelope.upload(), most=int(np.diff(envelope.start).max()))
        on = uploaded(given) | spread | {"forest": forest}
        before = memory_of(on, given)
        begin_pass()
        one = gdn_core(**on)
        with monkeypatch.context() as patch:
            patch.setattr(gdn_few, "takes", lambda *_: False)
            three = gdn_core(**on)
        assert memory_of(on, given) == before
        one, three = ([device.download(a)[envelope.flat] for a in (y, *kug)] for y, kug in (one, three))
        for name, a, b in zip(("y", "k", "u", "g"), one, three):
            assert a.tobytes() == b.tobytes(), f"{name} differs"
        expected = gdn_core(**{name: wide(value) for name, value in given.items()})
        assert relative_error([wide(a) for a in one], [expected[0], *expected[1]]) <= ACTS["bf16"]


@pytest.mark.parametrize(
    "act,sizes,W", [("bf16", (2, 128, 4, 128), 4), ("float", (2, 16, 2, 64), 3), ("bf16", (1, 64, 3, 16), 4)]
)
def test_blocks_that_stay_have_the_bits_of_blocks_for_each_head(gpu, monkeypatch, act, sizes, W):
    rng, heads = np.random.default_rng(1), gdn_core_file.BLOCKS * device.multiprocessors()
    rows = [int(n) for n in rng.random(3 * heads // sizes[2]) < 0.8]
    given, used, found = arguments(rng, rows, sizes, 32, W, act), [], []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda file, *a, **k: (used.append(file), launch(file, *a, **k)))
    for _ in range(2):
        on = uploaded(given)
        y, _ = gdn_core(**on)
        found.append((device.download(y)[: sum(rows)].tobytes(), memory_of(on, given)))
        monkeypatch.setattr(kernels, "runs_here", lambda file: False)
    assert used == [gdn_core_file.MANY, gdn_core_file.FEW] and found[0] == found[1]


def test_nobody_takes_part(gpu):
    given = arguments(np.random.default_rng(0), [0, 0], (1, 16, 1, 16))
    y, *_ = gdn_core(**uploaded(given))
    assert y.shape == (1, 1, 16)


def test_what_the_kernel_does_not_take_is_refused(gpu):
    for C, K, V in [(65, 16, 16), (8, 48, 16), (8, 16, 24)]:
        given = arguments(np.random.default_rng(0), [1], (1, K, 1, V), C)
        with pytest.raises(KernelError, match=f"K={K}, V={V}, a ring of {C}; the GPU takes"):
            gdn_core(**uploaded(given))
