"""The kernels of linear and swiglu: every path, FP8 weights, views, and rows that must not know of one another."""

import gc
import math
import weakref

import numpy as np
import pytest

from boleinfer import cublas, device, hopper, hopper_fp8, kernels
from boleinfer.declaration import KernelError
from boleinfer.device import Fp8
from boleinfer.graphs import Graphs
from boleinfer.ops import linear as ops_linear
from boleinfer.ops import relative_error
from boleinfer.ops.linear import gated_linear, linear, linear_pair, split_rows, swiglu

BF16 = device.dtype("bf16")
SOME = [1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128]
ROWS = [*SOME, 129, 200]
TENSOR_CORES = 1e-5  # relative error: their sums are float32, but cut off instead of rounded
OF_E4M3 = 5e-4  # where they multiply E4M3 numbers, of whose sums they keep some 14 bits (an H200: 2.3e-4)


@pytest.fixture(params=["hopper", "others"], autouse=True)
def family(request, monkeypatch):
    """The kernel for sm_90a, or those for all other architectures."""
    if request.param == "others":
        monkeypatch.setattr(kernels, "runs_here", lambda file: False)
    return request.param


def made(R, Din, Dout, kind, seed=0):
    """x bf16, the weights on the GPU, and the same weights in float64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((R, Din)).astype(BF16)
    w = rng.standard_normal((Dout, Din)) / math.sqrt(Din)
    if kind != "fp8":
        w = w.astype(device.dtype(kind))
        return x, device.upload(w), w.astype(np.float64)
    bits = (100 * w).astype(device.dtype("fp8"))
    scale = np.exp(rng.standard_normal((-(-Dout // 128), -(-Din // 128)))).astype(np.float32)
    full = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:Dout, :Din]
    return x, Fp8(device.upload(bits), device.upload(scale)), bits.astype(np.float64) * full


def sums_bound(kind, gpu, family):
    """Relative error of float32 results."""
    narrow = kind == "fp8" and gpu == "cuda" and family == "hopper" and kernels.runs_here(hopper.FILE)
    return 1e-6 if kind == "float" else OF_E4M3 if narrow else TENSOR_CORES


def got(x, w, dtype=np.float32):
    return device.download(linear(device.upload(x), w, dtype))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "float"])
@pytest.mark.parametrize("R", ROWS)
def test_every_number_of_rows(gpu, family, R, kind):
    if gpu == "random" and R not in (1, 9, 33, 128, 129):
        pytest.skip("there in one order of threads only")
    x, w, plain = made(R, 1040 if R < 129 else 208, (145, 290)[R % 2], kind, R)
    expected = x.astype(np.float64) @ plain.T
    assert relative_error(got(x, w), expected) < sums_bound(kind, gpu, family)
    assert relative_error(got(x, w, None).astype(np.float64), expected) < 4e-3


@pytest.mark.parametrize("kind", ["bf16", "fp8", "float"])
@pytest.mark.parametrize("Din,Dout", [(16, 1), (48, 16), (272, 33), (1296, 260), (144, 17000)])
def test_a_row_has_the_bits_it_has_alone(gpu, Din, Dout, kind):
    if gpu != "cuda" and (Dout > 9999 and kind != "bf16" or gpu == "random" and Dout > 200 and kind == "fp8"):
        pytest.skip("takes many seconds on the emulator")
    x, w, _ = made(128, Din, Dout, kind)
    together = got(x, w)
    for rows in SOME if Dout < 9999 or gpu == "cuda" else (8, 9):
        np.testing.assert_array_equal(got(x[:rows], w), together[:rows])
    for r in (0, 13, 127):
        np.testing.assert_array_equal(got(x[r : r + 1], w)[0], together[r])


@pytest.mark.parametrize("R", ROWS[::3])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "float"])
def test_a_nan_row_spoils_only_itself(gpu, R, kind):
    x, w, _ = made(R + 1, 272, 40, kind)
    clean = got(x, w)
    x[R // 2] = np.nan
    out = got(x, w)
    assert np.isnan(out[R // 2]).all()
    np.testing.assert_array_equal(np.delete(out, R // 2, 0), np.delete(clean, R // 2, 0))


@pytest.mark.parametrize("R", [1, 5, 20, 130])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "float"])
def test_x_may_be_some_columns_of_a_wider_matrix(gpu, R, kind):
    x, w, _ = made(R, 144, 40, kind)
    wide = np.full((R, 200), np.nan, BF16)
    wide[:, 32:176] = x
    np.testing.assert_array_equal(device.download(linear(device.upload(wide)[:, 32:176], w, np.float32)), got(x, w))


@pytest.mark.parametrize("act,kind", [("float", "float"), ("float", "bf16"), ("float", "fp8"), ("bf16", "float")])
@pytest.mark.parametrize("R,Din,Dout", [(1, 1, 1), (33, 63, 65), (40, 300, 31)])
def test_any_types_and_sizes(gpu, R, Din, Dout, act, kind):
    x, w, plain = made(R, Din, Dout, kind)
    x = x.astype(device.dtype(act))
    out = got(x, w)
    assert relative_error(out, x.astype(np.float64) @ plain.T) < 1e-6
    np.testing.assert_array_equal(got(x[:1], w), out[:1])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_rows_that_are_not_whole_words(gpu, kind):
    for R, Din, Ldx in [(3, 20, 20), (40, 33, 33), (3, 16, 17), (140, 24 if kind == "bf16" else 40, 41)]:
        x, w, plain = made(R, Ldx, 21, kind)
        view, part = device.upload(x)[:, :Din], plain[:, :Din]
        if kind == "bf16":
            w = device.upload(np.ascontiguousarray(part).astype(BF16))
        else:
            w = Fp8(device.upload(np.ascontiguousarray(device.download(w.bits)[:, :Din])), w.scale)
        out = device.download(linear(view, w, np.float32))
        assert relative_error(out, x[:, :Din].astype(np.float64) @ part.T) < 1e-6


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_neither_stages_nor_kernels_change_the_bits(gpu, family, kind, monkeypatch):
    """Devices with less shared memory have fewer stages; which kernel a few rows take is a matter of speed."""
    x, w, _ = made(70, 1040, 300, kind)
    first = got(x, w)
    if family == "hopper":
        for nbytes in (32 * 1024, 200 * 1024):
            monkeypatch.setattr(hopper, "SHORT", nbytes)
            np.testing.assert_array_equal(got(x, w), first)
        monkeypatch.setattr(hopper, "UNDER_WAY", 0)
        np.testing.assert_array_equal(got(x, w), first)
        return
    for nbytes in (99 * 1024, 163 * 1024):
        monkeypatch.setattr(device, "shared_bytes", lambda nbytes=nbytes: nbytes)
        np.testing.assert_array_equal(got(x, w), first)
    monkeypatch.setattr(ops_linear, "FEW_ROWS", 0)
    for rows in (1, 5, 8):
        np.testing.assert_array_equal(got(x[:rows], w), first[:rows])
    monkeypatch.setattr(ops_linear, "FEW_ROWS", 128)
    np.testing.assert_array_equal(got(x, w), first)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R,Din", [(9, 1040), (20, 1040), (72, 1040), (17, 1024), (9, 2048)])
def test_the_cut_of_a_product_does_not_change_the_bits(gpu, family, R, Din, kind, monkeypatch):
    """Tiles of any width, with all of k or in parts; chunks of 64 k or, if narrow, more."""
    of_kind = hopper if kind == "bf16" else hopper_fp8
    if family == "others" or (gpu == "random" and R > 20):
        pytest.skip("one order of threads, and one family of kernels")
    x, w, _ = made(R, Din, 208, kind)
    x = device.upload(x)
    if kind == "bf16":
        plain, gated = [(8, 26, 1), (40, 0, 2), (64, 0, 2)], [(16, 13, 1), (64, 0, 2)]
    else:
        plain, gated = [(64, 4, 1), (128, 1, 2), (192, 0, 8)], [(128, 2, 1), (192, 0, 2)]
    expected = [device.download(op(x, w)) for op in (linear, gated_linear)]
    for op, cuts, bits in zip((linear, gated_linear), (plain, gated), expected):
        for own in cuts:
            monkeypatch.setattr(of_kind, "cut", lambda *_, own=own: hopper.Cut(*own))
            np.testing.assert_array_equal(device.download(op(x, w)), bits, str(own))


@pytest.mark.parametrize("R,Din", [(1, 16), (3, 128), (7, 272), (65, 1040)])
def test_rows_split_into_e4m3(gpu, R, Din):
    rng = np.random.default_rng(R)
    x = (rng.standard_normal((R, Din)) * np.exp(rng.uniform(-60, 60, (R, Din)))).astype(BF16)
    x[R // 2, :5] = 0, -0.0, 1e-38, 3e38, -1e-40
    x[0, -8:] = 0
    parts, inverse = map(device.download, split_rows(device.upload(x))[:2])
    wanted, wanted_inverse, _ = split_rows(x)
    np.testing.assert_array_equal(parts, wanted.view(np.uint8))
    np.testing.assert_array_equal(inverse[:, :R], wanted_inverse)


def test_split_rows_lose_nothing_but_what_is_small():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((9, 300)) * np.exp(rng.uniform(-12, 12, (9, 300)))).astype(BF16)
    parts, inverse, _ = split_rows(x)
    hi, lo = parts.astype(np.float64).reshape(2, 9, 300)
    again = (hi + lo / 32) * np.repeat(inverse.T.astype(np.float64), 128, 1)[:, :300]
    x = x.astype(np.float64)
    most = np.concatenate([np.repeat(abs(x[:, i : i + 128]).max(1, keepdims=True), 128, 1) for i in (0, 128, 256)], 1)
    most = most[:, :300]
    large = abs(x) >= most * 2.0**-14
    np.testing.assert_array_equal(again[large], x[large])
    assert large.any() and not large.all() and (abs(again - x) <= most * 2.0**-22).all()


def test_split_rows_that_are_not_finite_are_nan(gpu):
    x = np.ones((3, 272), BF16)
    x[0, 130], x[1, 5], x[1, 271] = np.nan, np.inf, -np.inf
    for of in (x, device.upload(x)):
        inverse = device.download(split_rows(of).inverse) if of is not x else split_rows(of).inverse
        wanted = [[False, True, False], [True, False, False], [False, True, False]]
        np.testing.assert_array_equal(np.isnan(inverse[:, :3]), wanted)


def test_every_fp8_number_is_exact(gpu):
    bits = np.arange(256, dtype=np.uint8).view(device.dtype("fp8"))
    bits = bits[np.isfinite(bits.astype(np.float32))]
    table = np.zeros((len(bits), 16), bits.dtype)
    table[:, 5] = bits
    w = Fp8(device.upload(table), device.upload(np.full((2, 1), 0.5, np.float32)))
    for R in (1, 9, 129):
        x = np.zeros((R, 16), BF16)
        x[:, 5] = 2
        np.testing.assert_array_equal(got(x, w), np.tile(bits.astype(np.float32), (R, 1)))


def test_the_kernels_for_many_rows_without_cublas(gpu, monkeypatch):
    monkeypatch.setattr(ops_linear, "blas", lambda *_: False)
    for R, Din, Dout in [(129, 40, 129), (1100, 8, 136), (260, 264, 260)]:
        x, w, plain = made(R, Din, Dout, "bf16")
        assert relative_error(got(x, w), x.astype(np.float64) @ plain.T) < TENSOR_CORES


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R", [1, 8, 9, 33, 128, 130])
def test_nothing_that_is_made_outlives_the_call(gpu, R, kind, monkeypatch):
    """A graph that was captured before may have the memory of what an op keeps from the steps' pool."""
    made_here = []

    def watched(make):
        def go(*args):
            made_here.append(make(*args))
            return made_here[-1]

        return go

    x, w, _ = made(R, 272, 272, kind)
    x = device.upload(x)
    device.counters(1)
    for name in ("empty", "upload"):
        monkeypatch.setattr(device, name, watched(getattr(device, name)))
    linear(x, w, np.float32)
    gated_linear(x, w)
    assert made_here
    left = [weakref.ref(array) for array in made_here]
    made_here.clear()
    gc.collect()
    assert not any(ref() is not None for ref in left)


def test_no_rows_and_refusals(gpu):
    x, w, _ = made(3, 16, 8, "bf16")
    assert got(x[:0], w).shape == (0, 8)
    with pytest.raises(KernelError, match="Din"):
        got(x, device.upload(np.zeros((8, 24), BF16)))


@pytest.mark.parametrize("act", ["bf16", "float"])
@pytest.mark.parametrize("R,F", [(1, 8), (3, 63), (5, 2056), (130, 24)])
def test_swiglu(gpu, R, F, act):
    x = (4 * np.random.default_rng(F).standard_normal((R, 2 * F))).astype(device.dtype(act))
    out = device.download(swiglu(device.upload(x)))
    assert out.dtype == x.dtype
    assert relative_error(out.astype(np.float64), swiglu(x.astype(np.float64))) < (4e-3 if act == "bf16" else 1e-6)


def test_gates_of_any_size(gpu):
    gates = np.float32([-np.inf, -1e4, -104, -88.5, -87, -20, -1, -0.0, 0, 1, 20, 88.5, 1e4, np.inf, np.nan])
    x = np.concatenate([gates, np.full(len(gates), 3, np.float32)])[None]
    with np.errstate(invalid="ignore"):
        out, expected = device.download(swiglu(device.upload(x))), swiglu(x)
    assert np.isnan(expected[0, [0, -1]]).all()
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "float"])
@pytest.mark.parametrize("Din,F", [(48, 8), (272, 40), (1296, 136), (1040, 200), (2112, 8), (144, 1096), (72, 31)])
@pytest.mark.parametrize("processors", [3, 132])
def test_the_gated_product_has_the_bits_of_its_parts(gpu, family, Din, F, kind, processors, monkeypatch):
    """One launch (tiles of 16 and of 8 features, few features of many rows) or two; on either side of a scale block.

    On sm_90a it is one launch, whose cut of k may be another one than that of the parts."""
    monkeypatch.setattr(device, "multiprocessors", lambda: processors)
    x, w, plain = made(128, Din, 2 * F, kind)
    given = device.upload(x)
    own_cut = family == "hopper" and kind != "float"
    together = device.download(gated_linear(given, w) if own_cut else swiglu(linear(given, w)))
    assert together.dtype == BF16
    expected = swiglu(x.astype(np.float64) @ plain.T)
    assert relative_error(together.astype(np.float64), expected) < 1.3e-2
    for rows in range(1, 129) if gpu == "cuda" else (1, 2, 5, 7, 8, 9, 17, 128):
        out = device.download(gated_linear(given[:rows], w))
        np.testing.assert_array_equal(out, together[:rows])
        if not own_cut:
            np.testing.assert_array_equal(out, device.download(swiglu(linear(given[:rows], w))))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R", [1, 5, 8, 9])
def test_a_nan_row_of_the_gated_product_spoils_only_itself(gpu, R, kind):
    x, w, _ = made(R, 272, 80, kind)
    clean = device.download(gated_linear(device.upload(x), w))
    x[R // 2] = np.nan
    out = device.download(gated_linear(device.upload(x), w))
    assert np.isnan(out[R // 2].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(out, R // 2, 0), np.delete(clean, R // 2, 0))


def test_the_gated_product_is_one_launch_for_few_rows(gpu, family, monkeypatch):
    launched, launch = [], kernels.launch
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append((a[1], k["constants"])), launch(*a, **k)))
    x, w, _ = made(9, 144, 4208, "bf16")
    for R, Dout, features in [(8, 4208, 16), (1, 512, 8)]:
        gated_linear(device.upload(x[:R]), w[:Dout])
        (name, constants), *more = launched
        assert more == [] and constants["Gated"] == 1
        assert name == ("linear_hopper" if family == "hopper" else "linear_few")
        assert family == "hopper" or constants["Features"] == features
        launched.clear()
    gated_linear(device.upload(x), w)
    assert [name for name, _ in launched] == (["linear_hopper"] if family == "hopper" else ["linear_rows", "swiglu"])
    assert gated_linear(device.upload(x[:0]), w).shape == (0, 2104)


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("fp8", "bf16"), ("bf16", "fp8"), ("float", "bf16")])
@pytest.mark.parametrize("Din,Dout,More", [(272, 40, 1), (1040, 200, 64), (144, 1096, 130)])
def test_two_products_of_the_same_rows(gpu, family, kinds, Din, Dout, More, monkeypatch):
    launched, launch = [], kernels.launch
    x, w, plain = made(128, Din, Dout, kinds[0])
    _, w_more, plain_more = made(1, Din, More, kinds[1], seed=1)
    given = device.upload(x)
    out, more = map(device.download, linear_pair(given, w, w_more))
    assert out.dtype == BF16 and more.dtype == np.float32
    assert relative_error(out.astype(np.float64), x.astype(np.float64) @ plain.T) < 4e-3
    assert relative_error(more, x.astype(np.float64) @ plain_more.T) < sums_bound(kinds[1], gpu, family)
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a[1]), launch(*a, **k)))
    for rows in (1, 8, 9, 40):
        few = map(device.download, linear_pair(given[:rows], w, w_more))
        for got_few, all_rows in zip(few, (out, more)):
            np.testing.assert_array_equal(got_few, all_rows[:rows])
    products = [name for name in launched if name != "split_rows"]
    of_fp8 = sum(2 - hopper_fp8.takes_few(rows, Dout) for rows in (1, 8, 9, 40))
    assert len(products) == {"bf16bf16": 4, "fp8bf16": of_fp8}.get("".join(kinds) if family == "hopper" else "", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R", [1, 8, 16, 64, 128, 512])
def test_real_sizes(gpu, family, R, kind):
    if gpu != "cuda":
        pytest.skip("for a real GPU")
    x, w, plain = made(R, 4096, 4096, kind)
    assert relative_error(got(x, w), x.astype(np.float64) @ plain.T) < sums_bound(kind, gpu, family)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("R", [1, 40, 200])
def test_in_a_captured_graph(gpu, family, R, kind):
    if gpu != "cuda":
        pytest.skip("for a real GPU")
    import cupy

    x, w, plain = made(R, 1040, 145, kind)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given = device.upload(x)
        eager = device.download(linear(given, w, np.float32))
        out = linear(given, w, np.float32)
        del out  # its memory is what the capture takes
        stream.begin_capture()
        out = linear(given, w, np.float32)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        captured = device.download(out)
    if R <= ops_linear.SOME_ROWS:
        np.testing.assert_array_equal(captured, eager)
    assert relative_error(captured, x.astype(np.float64) @ plain.T) < sums_bound(kind, gpu, family)


@pytest.mark.parametrize("dtype", ["bf16", "float"])
def test_cublas_gives_the_same_bits_inside_a_graph(gpu, dtype):
    if gpu != "cuda" or cublas.library() is None:
        pytest.skip("cuBLAS was NOT tried: it needs a GPU, and to be installed")
    for R, Din, Dout in [(256, 512, 384), (1000, 1024, 2048), (2048, 2048, 512)]:
        x, w, plain = made(R, Din, Dout, "bf16")
        rows, graphs = device.upload(np.concatenate([x, x[:, :64]], 1))[:, :Din], Graphs()
        out, found = device.empty((R, Dout), device.dtype(dtype)), []
        for _ in range(3):  # alone, captured, replayed
            device.fill(out, device.NAN_BYTE)
            graphs.run("product", lambda rows=rows, w=w, out=out: ops_linear.blas(rows, w, out), again=True)
            graphs.wait()
            found.append(device.download(out).tobytes())
        assert graphs.replays == 2 and len(set(found)) == 1
        error = relative_error(device.download(out).astype(np.float64), x.astype(np.float64) @ plain.T)
        assert error < (4e-3 if dtype == "bf16" else TENSOR_CORES)


def test_cublas_keeps_a_handle_for_each_stream_that_is_there(gpu):
    if gpu != "cuda" or (library := cublas.library()) is None:
        pytest.skip("cuBLAS was NOT tried: it needs a GPU, and to be installed")
    x, w, plain = made(256, 512, 384, "bf16")
    rows, out = device.upload(x), device.empty((256, 384), device.dtype("bf16"))
    bits, ended = [], [Graphs() for _ in range(3)]
    for graphs in ended:
        graphs.run("product", lambda: ops_linear.blas(rows, w, out))
        graphs.wait()
        bits.append(device.download(out).tobytes())
    streams = [weakref.ref(graphs.stream) for graphs in ended]
    assert all(any(room.stream is of for room in library._rooms.values()) for of in streams)  # its own, not a copy
    del graphs, ended
    gc.collect()
    assert not any(of() for of in streams)
    later = [Graphs() for _ in range(len(library._rooms) + 1)]  # so one at least is at no ended one's address
    for graphs in later:
        graphs.run("product", lambda: ops_linear.blas(rows, w, out))
        graphs.wait()
        bits.append(device.download(out).tobytes())
    assert len(set(bits)) == 1 and not any(room.stream() is None for room in library._rooms.values())
