"""One launch of a mixture of experts behind its norm has the bits of the ops one by one, emulated and on a GPU."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from boleinfer import device, kernels, moe_core
from boleinfer.device import Fp8
from boleinfer.ops import moe, relative_error
from boleinfer.residual import Residual
from tests.ops.test_moe_gpu import layer, shared_expert, upload

EPS = 1e-6


def arguments(R, D, E, F, kind, unused=()):
    """stream, added, norm; router, gate_up, down; the shared expert: on the host. Rows `unused` are NaN."""
    rng = np.random.default_rng(R)
    (_, *experts), _ = layer(0, D, E, F, kind)
    stream, added = (rng.standard_normal((2, R, D)) * 2).astype(device.dtype("bf16"))
    stream[list(unused)] = np.nan
    return (stream, added, (rng.standard_normal(D) / 5).astype(np.float32)), experts, shared_expert(D, F, kind)[0]


def run(rows, experts, A, shared, norm_topk=True, alone=True):
    """What it gives, and the stream, on the host; alone: whether in one launch."""
    stream, added, norm = map(device.upload, rows)
    found, honest = [], kernels.launch
    launched = mock.patch.object(kernels, "launch", lambda *a, **k: (found.append(a[1]), honest(*a, **k)))
    refused = mock.patch.object(moe_core, "FEW_ROWS", moe_core.FEW_ROWS if alone else 0)
    with launched, refused:
        given = Residual(stream, added, norm, EPS), *map(upload, experts), A, norm_topk, upload(shared)
        out, h = moe_core.moe_core(*given)
    if device.on_gpu(stream):
        assert (found == ["few"]) == alone
    return device.download(out).astype(np.float32), device.download(h).astype(np.float32)


def same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b))


SIZES = [(1, 256, 4, 256, 2), (7, 512, 9, 256, 3), (8, 256, 40, 512, 8), (3, 768, 33, 768, 4), (2, 2304, 300, 256, 10)]
SIZES += [(2, 2304, 12, 256, 10), (2, 256, 300, 256, 10)]  # of the largest: long rows; more than eight experts a lane


@pytest.fixture(autouse=True)
def here(gpu):
    if not kernels.runs_here(moe_core.FILE):
        pytest.skip("one launch is for sm_90 and later")


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R,D,E,F,A", SIZES)
def test_it_has_the_bits_of_the_ops(gpu, kind, R, D, E, F, A):
    emulated, numbers = gpu != "cuda", D * E * F
    if emulated and (numbers > 1e7 and gpu != "forward" or numbers > 1e8 and kind == "fp8"):
        pytest.skip("takes many seconds on the emulator: there in one order only, and the largest in one type")
    given = arguments(R, D, E, F, kind, unused=[2] if R > 2 else ())
    for norm_topk in (True,) if emulated and numbers > 1e7 else (True, False):
        few = run(*given[:2], A, given[2], norm_topk)
        assert same(few, run(*given[:2], A, given[2], norm_topk, alone=False))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_it_is_near_the_definition(kind):
    (stream, added, norm), experts, shared = arguments(5, 512, 9, 256, kind)
    out, h = run((stream, added, norm), experts, 3, shared)
    _, wide = layer(0, 512, 9, 256, kind)
    x = h.astype(np.float64)
    assert np.array_equal(h, (stream.astype(np.float32) + added.astype(np.float32)).astype(stream.dtype))
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + norm)
    expected = moe.moe(x, *wide[1:], 3, True, shared_expert(512, 256, kind)[1])
    assert relative_error(out.astype(np.float64), expected) < 1e-2


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_row_has_the_same_bits_in_any_company(kind):
    (stream, added, norm), experts, shared = arguments(20, 512, 12, 256, kind, unused=[4, 9])
    many = run((stream, added, norm), experts, 3, shared, alone=False)
    for rows in (slice(0, 1), slice(7, 8), slice(2, 10), slice(12, 15)):
        few = run((stream[rows], added[rows], norm), experts, 3, shared)
        assert same(few, [a[rows] for a in many])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_nobody_chose_is_not_read(kind):
    rows, experts, shared = arguments(3, 256, 20, 256, kind, unused=[1])
    first = run(rows, experts, 2, shared)
    router, gate_up, down = experts
    h = first[1]
    x = h / np.sqrt((h * h).mean(-1, keepdims=True) + EPS) * (1 + rows[2])
    _, chosen = moe.route(x[[0, 2]], router.astype(np.float32), 4, True)  # two more than they take
    idle = np.setdiff1d(np.arange(20), chosen)
    assert len(idle)
    for weights in (gate_up, down):
        (weights.scale if isinstance(weights, Fp8) else weights)[idle] = np.nan
    assert same(run(rows, experts, 2, shared), first)


def test_rows_that_choose_alike(gpu):
    (stream, added, norm), experts, shared = arguments(8, 256, 33, 256, "bf16")
    stream[:], added[:] = stream[3], added[3]
    experts[0][5] = experts[0][7]  # a tie
    out, _ = run((stream, added, norm), experts, 4, shared)
    assert (out == out[0]).all()
    assert same([out], run((stream, added, norm), experts, 4, shared, alone=False)[:1])


def test_other_sizes_and_types_go_through_the_ops(gpu):
    rows, experts, shared = arguments(9, 256, 4, 256, "bf16")
    assert same(run(rows, experts, 2, shared, alone=False), run(rows, experts, 2, shared, alone=False))
    for R, D, F in ((9, 256, 256), (2, 320, 256), (2, 256, 320)):
        rows, experts, shared = arguments(R, D, 4, F, "bf16")
        r = Residual(*map(device.upload, rows), EPS)
        assert not moe_core._places(r, *map(upload, experts[1:]), 2, upload(shared))
