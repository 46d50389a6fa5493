"""Routing, grouping and the experts on the GPU, emulated and real: ties, NaN, company, FP8, more rows than a pass."""

from unittest import mock

import numpy as np
import pytest

from boleinfer import device
from boleinfer.device import Fp8
from boleinfer.kernels import KernelError
from boleinfer.ops import moe, relative_error

BOUND = {"bf16": 8e-3, "fp8": 8e-3, "float": 1e-5}


def upload(value):
    return type(value)(*map(upload, value)) if isinstance(value, tuple) else device.upload(value)


def quantised(w):
    """Fp8 of float32 [E, Dout, Din] on the host, and what it stands for in float64."""
    E, Dout, Din = w.shape
    scale = np.random.default_rng(Din).uniform(0.5, 2, (E, -(-Dout // 128), -(-Din // 128))).astype(np.float32) / 256
    whole = np.repeat(np.repeat(scale, 128, 1), 128, 2)[:, :Dout, :Din]
    bits = np.clip(w / whole, -448, 448).astype(device.dtype("fp8"))
    return Fp8(bits, scale), bits.astype(np.float64) * whole.astype(np.float64)


def layer(R, D, E, F, kind, seed=0):
    """x, router, gate_up, down for the GPU on the host, and the same in float64; kind: bf16, float or fp8."""
    rng = np.random.default_rng(seed)
    act = device.dtype("float" if kind == "float" else "bf16")
    x, router, gate_up, down = (
        rng.standard_normal(shape, np.float32) / (shape[-1] if w else 1) ** 0.5
        for w, shape in enumerate([(R, D), (E, D), (E, 2 * F, D), (E, D, F)])
    )
    x, router = x.astype(act), router.astype(act)
    if kind == "fp8":
        (gate_up, wide_up), (down, wide_down) = quantised(gate_up), quantised(down)
    else:
        gate_up, down = gate_up.astype(act), down.astype(act)
        wide_up, wide_down = gate_up.astype(np.float64), down.astype(np.float64)
    return [x, router, gate_up, down], [x.astype(np.float64), router.astype(np.float64), wide_up, wide_down]


def shared_expert(D, F, kind, seed=1):
    """The same for a shared expert."""
    (_, gate, gate_up, down), wide = layer(0, D, 1, F, kind, seed)
    parts = (Fp8(w.bits[0], w.scale[0]) if isinstance(w, Fp8) else w[0] for w in (gate_up, down))
    return moe.Shared(gate, *parts), moe.Shared(wide[1], wide[2][0], wide[3][0])


def run(given, A, norm_topk=True, shared=None):
    shared = shared and upload(shared)
    return device.download(moe.moe(*map(upload, given), A, norm_topk, shared)).astype(np.float64)


SIZES = [(1, 128, 4, 128, 2), (3, 256, 6, 144, 3), (40, 272, 3, 48, 2), (9, 72, 5, 40, 2), (100, 64, 1, 16, 1)]
SIZES += [(1, 256, 4, 256, 2), (7, 512, 9, 256, 3), (8, 256, 40, 512, 8)]  # in one launch behind the scores


@pytest.mark.parametrize("kind", BOUND)
@pytest.mark.parametrize("R,D,E,F,A", [*SIZES, (5, 63, 3, 7, 2), (9, 24, 5, 8, 5)])
def test_moe(gpu, kind, R, D, E, F, A):
    given, wide = layer(R, D, E, F, kind)
    assert relative_error(run(given, A), moe.moe(*wide, A, True)) < BOUND[kind]


@pytest.mark.parametrize("D,F", [(1104, 80), (512, 256)])
@pytest.mark.parametrize("kind", BOUND)
def test_a_row_has_the_same_bits_in_any_company(gpu, kind, D, F):
    given, _ = layer(128, D, 4, F, kind)
    x, *weights = given
    shared = shared_expert(D, F, kind)[0] if kind != "float" else None
    many = run(given, 2, shared=shared)
    for rows in (slice(0, 1), slice(7, 8), slice(2, 10), slice(3, 20), slice(40, 80), slice(30, 128), slice(127, 128)):
        assert np.array_equal(run([x[rows], *weights], 2, shared=shared), many[rows])


@pytest.mark.parametrize("kind", BOUND)
def test_pieces_of_many_rows(gpu, kind):
    given, _ = layer(300, 64, 4, 32, kind)
    many = run(given, 2)
    with mock.patch.object(moe, "PIECE", 160):
        assert np.array_equal(run(given, 2), many)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R,D,E,F,A", [*SIZES, (128, 64, 3, 48, 3), (1, 2048, 40, 16, 5)])
def test_the_shared_expert_among_the_others(gpu, kind, R, D, E, F, A):
    given, wide = layer(R, D, E, F, kind)
    shared, wide_shared = shared_expert(D, F, kind)
    (x, _, gate_up, down), on_gpu = map(upload, given), upload(shared)
    joined = moe.joins(x, gate_up, down, on_gpu)
    assert joined == (kind == "bf16" or (D | F) % 16 == 0)
    if joined:
        assert relative_error(run(given, A, shared=shared), moe.moe(*wide, A, True, wide_shared)) < BOUND[kind]
    else:
        with pytest.raises(KernelError, match="joins"):
            run(given, A, shared=shared)


def test_only_an_expert_like_the_others_joins_them(gpu):
    host = layer(3, 64, 2, 32, "bf16")[0]
    x, _, gate_up, down = map(upload, host)
    shared = upload(shared_expert(64, 32, "bf16")[0])
    assert moe.joins(x, gate_up, down, shared)
    assert not moe.joins(x, gate_up, down, upload(shared_expert(64, 16, "bf16")[0]))
    assert not moe.joins(x, gate_up, down, upload(shared_expert(64, 32, "fp8")[0]))
    assert not moe.joins(host[0], gate_up, down, shared)
    assert not moe.joins(upload(layer(129, 64, 1, 8, "bf16")[0][0]), gate_up, down, shared)


@pytest.mark.parametrize("kind", BOUND)
@pytest.mark.parametrize("R,D,F", [(5, 64, 16), (7, 256, 256), (50, 64, 16), (150, 64, 16)])
def test_nan_rows_spoil_only_themselves_and_need_no_expert(gpu, kind, R, D, F):
    given, _ = layer(R, D, 20, F, kind)
    x, router, gate_up, down = given
    unused = np.arange(R) % 3 == 1
    alone = run([x[~unused], router, gate_up, down], 2)
    _, expert = moe.route(device.upload(x[~unused]), device.upload(router), 2, True)
    idle = np.setdiff1d(np.arange(20), device.download(expert))
    for weights in (gate_up, down):  # what nobody chose is not read
        (weights.scale if kind == "fp8" else weights)[idle] = np.nan
    x[unused] = np.nan
    out = run(given, 2)
    assert np.isnan(out[unused]).all() and np.array_equal(out[~unused], alone)


@pytest.mark.parametrize("R", [1, 8, 32, 33, 70])
@pytest.mark.parametrize("E,A", [(1, 1), (7, 3), (40, 10), (256, 8), (512, 10), (33, 32)])
def test_routing_and_grouping(gpu, R, E, A):
    rng = np.random.default_rng(E)
    x, router = rng.standard_normal((R, 24)).astype(np.float32), rng.standard_normal((E, 24)).astype(np.float32)
    router[E // 2] = router[0]  # ties
    x[rng.random(R) < 0.2] = np.nan
    for norm_topk in (True, False):
        groups = moe._route(device.upload(x), device.upload(router), A, norm_topk)
        weight, expert = device.download(groups.weight), device.download(groups.expert)
        expected, chosen = moe.route(x.astype(np.float64), router.astype(np.float64), A, norm_topk)
        assert np.array_equal(expert, chosen)
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
    expert_of, first, order = (device.download(a) for a in groups[2:])
    places = np.flatnonzero(~np.isnan(weight.ravel()))
    expected = places[np.argsort(expert.ravel()[places], kind="stable")]
    assert first[0] == 0 and first[-1] == len(expected) and np.array_equal(order[: first[-1]], expected)
    sizes = np.diff(first)
    assert (np.diff(expert_of[sizes > 0]) > 0).all() and ((expert_of >= 0) & (expert_of < E)).all()
    assert np.array_equal(np.repeat(expert_of, sizes), expert.ravel()[expected])


@pytest.mark.parametrize("E,A", [(8, 8), (40, 9), (300, 32)])
@pytest.mark.parametrize("values", [1, 2, 7])
def test_equal_scores_go_to_lower_experts(gpu, E, A, values):
    rng = np.random.default_rng(E + values)
    x = np.eye(64, dtype=np.float32)[rng.integers(0, 64, 3)]
    router = rng.integers(-values, values, (E, 64)).astype(np.float32)
    _, chosen = moe.route(x, router, A, True)
    _, expert = moe.route(*(device.upload(a.astype(device.dtype("bf16"))) for a in (x, router)), A, True)
    assert np.array_equal(device.download(expert), chosen)


@pytest.mark.parametrize("R", [2, 40])
def test_routing_of_odd_scores(gpu, R):
    inf = np.float32("inf")
    router = np.asarray([[-1e4], [0.0], [1e4], [-0.0], [9e3], [1e4]], np.float32)
    x = np.ones((R, 1), np.float32)
    for value in (1, -1, 0):
        given = value * x
        weight, expert = moe.route(device.upload(given), device.upload(router), 3, True)
        expected, chosen = moe.route(given, router, 3, True)
        assert np.array_equal(device.download(expert), chosen)
        np.testing.assert_allclose(device.download(weight), expected, rtol=1e-6)
    for row in ([inf], [-inf], [np.nan]):
        x[1] = row
        weight, expert = (device.download(a) for a in moe.route(device.upload(x), device.upload(router[2:3]), 1, True))
        assert expert.tolist() == [[0]] * R and np.isnan(weight[1]).all() and (np.delete(weight, 1, 0) == 1).all()


def test_more_rows_than_a_pass_for_one_expert_and_splits_of_them(gpu):
    given, wide = layer(150, 64, 9, 16, "bf16")
    given[0][:] = np.abs(given[0])
    given[1][4] = 9  # everybody's first choice
    wide = [a.astype(np.float64) for a in given]
    assert relative_error(run(given, 2, False), moe.moe(*wide, 2, False)) < BOUND["bf16"]


def test_no_row_is_no_launch(gpu):
    given, _ = layer(0, 16, 3, 8, "bf16")
    assert run(given, 2).shape == (0, 16)
    assert moe.route(*map(device.upload, given[:2]), 2, True)[1].shape == (0, 2)
    none = device.upload(given[0])
    assert moe.add_shared(none, device.upload(np.zeros((0, 1), np.float32)), none).shape == (0, 16)


def test_what_is_not_supported_says_so(gpu):
    given, _ = layer(1, 8, 3, 8, "float")
    with pytest.raises(KernelError, match="4 of 3 experts.*support"):
        run(given, 4)
    router = device.upload(np.zeros((513, 8), np.float32))
    with pytest.raises(KernelError, match="1 of 513 experts.*512"):
        moe.route(device.upload(given[0]), router, 1, True)
    with pytest.raises(KernelError, match="weights is"):
        run([*given[:3], given[3][:, :, :4]], 2)


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", ["cuda"], indirect=True)
def test_experts_above_2_31_elements(gpu):
    E, D, F = 512, 4096, 1024
    (x, router, gate_up, down), _ = layer(3, D, 1, F, "bf16")
    all_up, all_down = (device.empty((E, *w.shape[1:]), w.dtype) for w in (gate_up, down))
    all_up[E - 1].set(gate_up[0])
    all_down[E - 1].set(down[0])
    scores = np.zeros((E, D), x.dtype)
    scores[E - 1] = router[0]
    x[:] = x * np.sign(x.astype(np.float32) @ router[0].astype(np.float32))[:, None].astype(x.dtype)
    out = moe.moe(device.upload(x), device.upload(scores), all_up, all_down, 1, True)
    expected = moe.moe(*(device.upload(a) for a in (x, router, gate_up, down)), 1, True)
    assert device.download(out).tobytes() == device.download(expected).tobytes()
