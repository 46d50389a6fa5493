"""The inputs of a pass, of GDN and of attention on the GPU, emulated and real, against the definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boleinfer import device, device_forest, kernels
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest
from boleinfer.kernels import KernelError, ToolchainError
from boleinfer.ops import attention_inputs, embedding, gdn_commit, gdn_inputs, relative_error
from boleinfer.ring import Ring
from tests import strategies as some


@pytest.fixture
def cuda():
    try:
        kernels.open_gpu()
    except ToolchainError as error:
        pytest.skip(f"the kernels were NOT run: {error}")


ACTS = ["bf16", "float"]
OPS = {
    "gdn_inputs": gdn_inputs,
    "attention_inputs": attention_inputs,
    "token_inputs": embedding,
}
CASES = [(name, case) for name, file in OPS.items() for case in file.CASES[name]]


def commit_windows(x, window, slot, forest, paths):
    """Commits the inputs x of a layer whose states and other factors are all zero, with a ring of two entries."""
    zeros = [np.zeros(shape, np.float32) for shape in ((2, 1, 16), (2, 1, 16), (2, 1))]
    R, slots = len(x), len(window)
    factors = [np.zeros((R, *z.shape[1:]), z.dtype) for z in zeros]
    ring = [np.zeros((1, slots, *z.shape), z.dtype) for z in zeros]
    ring[0], factors[0] = (a.astype(x.dtype) for a in (ring[0], factors[0]))
    on = Ring(*map(device.upload, ring))
    S = device.upload(np.zeros((1, slots, 1, 16, 16), np.float32))
    gdn_commit.commit(window[None], S, on, [x], *([device.upload(f)] for f in factors), slot, forest, paths)


def rounded(arguments, act, wide=()):
    """The arguments with floating arrays in the type that the GPU takes."""
    narrow = device.dtype(act)
    return {
        name: value.astype(np.float32 if name in wide else narrow)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f"
        else value
        for name, value in arguments.items()
    }


def uploaded(arguments):
    """The same on the GPU."""
    forest = arguments.get("forest")

    def upload(name, value):
        if isinstance(value, Forest):
            return device_forest.upload(value)
        if name == "paths":
            return device_forest.upload_paths(forest, value)
        return device.upload(value) if isinstance(value, np.ndarray) else value

    return {name: upload(name, value) for name, value in arguments.items()}


def wide64(value):
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind not in "iub" else value


def downloaded(result):
    """Results on the host, in float64."""
    return tuple(wide64(device.download(array)) for array in (result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name,case", CASES, ids=[f"{name} {case.label}" for name, case in CASES])
def test_cases(gpu, act, name, case):
    if gpu == "random" and len(case.build(np.random.default_rng(0)).get("forest", [])) > 100:
        pytest.skip("one order is enough for many rows")
    op, given = getattr(OPS[name], name), rounded(case.build(np.random.default_rng(0)), act, case.wide)
    exact = {k: wide64(v) for k, v in given.items()}
    on = uploaded(given)
    result, expected = op(**on), op(**exact)
    found = [] if result is None else [*downloaded(result)]
    expected = [] if expected is None else [*expected] if isinstance(expected, tuple) else [expected]
    found += [wide64(device.download(on[k])) for k in case.outputs]
    expected += [exact[k] for k in case.outputs]
    assert relative_error(found, expected) <= (case.bound_bf16 if act == "bf16" else 1e-6)
    assert all(np.array_equal(np.isnan(a), np.isnan(b)) for a, b in zip(found, expected))


def scattered(forest: Forest, rows: np.ndarray, size: int) -> DeviceForest:
    """The forest with its rows at `rows` (increasing) of an envelope of `size` rows; `start` has no meaning then."""
    on = device_forest.upload(forest)

    def spread(array, unused):
        values = device.download(array)
        out = np.full((size, *values.shape[1:]), unused, values.dtype)
        out[rows] = values
        return out

    parent = spread(on.parent, -2)
    parent[rows] = np.where(forest.parent < 0, -1, rows[forest.parent])
    arrays = {"token": 0, "depth": 0, "request": -1, "position": 0, "kv_slot": 2**30, "ancestors": 0}
    spreads = {name: device.upload(spread(getattr(on, name), unused)) for name, unused in arrays.items()}
    return replace(on, parent=device.upload(parent), **spreads)


@pytest.mark.parametrize("act", ACTS)
def test_rows_without_a_request_change_nothing_and_no_row_depends_on_its_company(gpu, act):
    rng = np.random.default_rng(1)
    case = gdn_inputs._inputs_case([some.binary(9), some.chain(5)], 2, 16, 3, 24, 4)
    given = rounded(case.build(rng), act, case.wide)
    forest = given["forest"]
    rows = np.sort(rng.permutation(40)[: len(forest)])
    alone = downloaded(gdn_inputs.gdn_inputs(**uploaded(given)))
    spread = dict(given)
    for name in ("qkvz", "ba"):
        spread[name] = np.full((40, given[name].shape[1]), np.nan, given[name].dtype)
        spread[name][rows] = given[name]
    spread = uploaded(spread) | {"forest": scattered(forest, rows, 40)}
    for out, expected in zip(downloaded(gdn_inputs.gdn_inputs(**spread)), alone):
        assert np.array_equal(out[rows], expected)

    case = attention_inputs._case([some.binary(9), some.chain(5)], [17, 3], 8, 4, 2, 32, 16)
    given = rounded(case.build(rng), act, case.wide)
    forest = given["forest"]
    on = uploaded(given)
    (q,) = downloaded(attention_inputs.attention_inputs(**on))
    spread = dict(given)
    for name in ("qkv", "cos", "sin"):
        spread[name] = np.full((40, given[name].shape[1]), np.nan, given[name].dtype)
        spread[name][rows] = given[name]
    spread = uploaded(spread) | {"forest": scattered(forest, rows, 40)}
    (out,) = downloaded(attention_inputs.attention_inputs(**spread))
    assert np.array_equal(out[rows], q)
    for name in ("k_pages", "v_pages"):
        assert device.download(on[name]).tobytes() == device.download(spread[name]).tobytes()


@pytest.mark.parametrize("act", ACTS)
def test_one_row_has_the_bits_that_it_has_among_many(gpu, act):
    rng = np.random.default_rng(2)
    case = gdn_inputs._inputs_case([[-1] * 80], 2, 64, 2, 128, 4)
    given = rounded(case.build(rng), act, case.wide)
    many = downloaded(gdn_inputs.gdn_inputs(**uploaded(given)))
    one = {**given, "qkvz": given["qkvz"][7:8], "ba": given["ba"][7:8]}
    one["forest"] = Forest.of([some.tree_of([-1])], [7])
    for out, expected in zip(downloaded(gdn_inputs.gdn_inputs(**uploaded(one))), many):
        assert np.array_equal(out[0], expected[7])


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("offset", [1, 8])
def test_addresses_that_are_no_multiple_of_16(gpu, act, offset):
    rng = np.random.default_rng(3)

    def shifted(array):
        flat = device.upload(np.concatenate((np.zeros(offset, array.dtype), array.ravel())))
        return flat[offset:].reshape(array.shape)

    case = gdn_inputs._inputs_case([some.binary(5)], 1, 32, 2, 64, 4)
    given = rounded(case.build(rng), act, case.wide)
    on = uploaded(given)
    expected = downloaded(gdn_inputs.gdn_inputs(**on))
    on["qkvz"], on["window"] = shifted(given["qkvz"]), shifted(given["window"])
    assert relative_error(downloaded(gdn_inputs.gdn_inputs(**on)), expected) < (1e-3 if act == "bf16" else 1e-6)

    case = attention_inputs._case([some.binary(5)], [3], 8, 2, 1, 64, 32)
    given = rounded(case.build(rng), act, case.wide)
    on = uploaded(given)
    expected = downloaded(attention_inputs.attention_inputs(**on))
    on["qkv"], on["cos"] = shifted(given["qkv"]), shifted(given["cos"])
    assert relative_error(downloaded(attention_inputs.attention_inputs(**on)), expected) < 1e-3


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("Cc,Ldx", [(24, 40), (24, 24), (8192, 12288)])
def test_the_window_takes_rows_of_a_wider_matrix(gpu, act, Cc, Ldx):
    rng = np.random.default_rng(4)
    forest = Forest.of(
        [some.tree_of(p) for p in [some.binary(9), [-1], some.chain(2), some.chain(3), some.chain(20)]], [7, 0, 5, 1, 6]
    )
    slot = rng.permutation(7)[:5].astype(np.int32)
    x, window = (rng.standard_normal(shape).astype(device.dtype(act)) for shape in ((len(forest), Ldx), (7, 4, Cc)))
    nodes = [t.path(len(t) - 1)[: len(t) * (b != 2)] for b, t in enumerate(forest.trees)]
    paths = [path + start for path, start in zip(nodes, forest.start)]
    expected = window.copy()
    gdn_commit.commit_window(x[:, :Cc], expected, slot, forest.committed, paths)
    on_x, on_window, on_slot, on = (*map(device.upload, (x, window, slot)), device_forest.upload(forest))
    accepted = device_forest.upload_paths(forest, paths)
    commit_windows(on_x[:, :Cc], on_window, on_slot, on, accepted)
    assert device.download(on_window).tobytes() == expected.tobytes()
    none = Paths(accepted.row, device.upload(np.zeros(5, np.int32)))
    commit_windows(on_x[:, :Cc], on_window, on_slot, on, none)
    assert device.download(on_window).tobytes() == expected.tobytes()
    with pytest.raises(KernelError, match="strides"):
        commit_windows(device.upload(x[:, :-1])[:, :Cc], on_window, on_slot, on, accepted)


def test_gates_of_extreme_inputs_are_finite(gpu):
    case = gdn_inputs._inputs_case([[-1] * 2], 1, 8, 8, 8, 4)
    given = rounded(case.build(np.random.default_rng(5)), "float")
    ends = np.asarray([-3e38, -1e4, -100, -20, 20, 100, 1e4, 3e38], np.float32)
    given["ba"] = np.tile(ends, (2, 2))
    given["A_log"], given["dt_bias"] = np.zeros(8, np.float32), np.zeros(8, np.float32)
    *_, g, beta = downloaded(gdn_inputs.gdn_inputs(**uploaded(given)))
    np.testing.assert_allclose(g[0], -np.logaddexp(0, ends.astype(np.float64)), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(beta[0], [0, 0, 0, 2.061153622e-9, 1, 1, 1, 1], rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("act", ACTS)
def test_a_row_without_a_page_or_a_row_number_writes_nothing(gpu, act):
    case = attention_inputs._case([some.chain(6), [-1]], [6, 2], 4, 2, 1, 16, 8)
    given = rounded(case.build(np.random.default_rng(6)), act, case.wide)
    whole = uploaded(given)
    (q,) = downloaded(attention_inputs.attention_inputs(**whole))
    table = given[
        "page_table"
    ].copy()  # request 0 has slots 6 .. 11: rows 0 and 1 in its second page, the others in the third
    lost, kept = table[0, 2], table[0, 1]
    table[0, 2] = -1
    on = uploaded({**given, "page_table": table})
    attention_inputs.attention_inputs(**on)
    for name in ("k_pages", "v_pages"):
        pages, all_pages = (wide64(device.download(x[name])) for x in (on, whole))
        assert np.isnan(pages[lost]).all() and np.array_equal(pages[kept], all_pages[kept], equal_nan=True)
    narrow = uploaded({**given, "page_table": np.ascontiguousarray(given["page_table"][:, :2])})
    attention_inputs.attention_inputs(**narrow)
    assert np.isnan(wide64(device.download(narrow["k_pages"])[lost])).all()

    rows = np.asarray([-1, 6, -1, 1], np.int32)
    part = {name: given[name][np.maximum(rows, 0)] for name in ("qkv", "cos", "sin")}
    on = uploaded({**given, **part, "rows": rows})
    (out,) = downloaded(attention_inputs.attention_inputs(**on))
    assert np.array_equal(out[[1, 3]], q[[6, 1]])
    pages, all_pages = (wide64(device.download(x["k_pages"])) for x in (on, whole))
    written = ~np.isnan(pages)
    assert written.sum() == 2 * 16 and np.array_equal(pages[written], all_pages[written])


def test_no_row_is_no_launch(gpu):
    case = attention_inputs._case([[-1]], [0], 4, 2, 1, 16, 8)
    given = case.build(np.random.default_rng(0))
    given |= {name: given[name][:0] for name in ("qkv", "cos", "sin")} | {"rows": np.zeros(0, np.int32)}
    assert attention_inputs.attention_inputs(**uploaded(rounded(given, "bf16", case.wide))).shape == (0, 2, 16)
    none, table = device.upload(np.zeros(0, np.int32)), device.upload(np.ones((3, 8), np.float32))
    found = embedding.token_inputs(none, table, none, device.upload(np.ones(4)), 1.0)
    assert [a.shape for a in found] == [(0, 8), (0, 4), (0, 4)]


def test_frequencies_in_float64_are_used_as_such(gpu):
    position, inv_freq = np.asarray([1, 262_143, 1_010_000], np.int32), 1e7 ** (-np.arange(32) / 32)
    given = np.zeros(3, np.int32), np.ones((1, 8), np.float32), position, inv_freq
    found = embedding.token_inputs(*map(device.upload, given), 1.5)[1:]
    for out, expected in zip(downloaded(found), embedding.rotary_angles(position, inv_freq, 1.5, np.float64)):
        np.testing.assert_allclose(out, expected, rtol=0, atol=1.5e-7)


def test_wrong_sizes_are_refused(gpu):
    case = gdn_inputs._inputs_case([[-1]], 1, 8, 2, 8, 4)
    on = uploaded(rounded(case.build(np.random.default_rng(0)), "bf16", case.wide))
    with pytest.raises(KernelError, match="taps is"):
        gdn_inputs.gdn_inputs(**{**on, "taps": on["taps"][:-1]})
    with pytest.raises(KernelError, match="k_norm|q_norm"):
        case = attention_inputs._case([[-1]], [0], 4, 2, 1, 16, 8)
        on = uploaded(rounded(case.build(np.random.default_rng(0)), "bf16", case.wide))
        attention_inputs.attention_inputs(**{**on, "q_norm": on["q_norm"][:8]})


# ---- sizes that only a GPU holds -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_pools_above_2_31_elements(cuda):
    Hq, Hkv, Dh, P = 16, 4, 256, 16
    pages = 2**31 // (P * Hkv * Dh) + 9
    case = attention_inputs._case([some.chain(20), some.chain(40)], [0, 7], P, Hq, Hkv, Dh, 64)
    given = rounded(case.build(np.random.default_rng(0)), "bf16", case.wide)
    small = uploaded(given)
    (q,) = downloaded(attention_inputs.attention_inputs(**small))
    shift = pages - len(given["k_pages"])
    big = {name: device.empty((pages, P, Hkv, Dh), device.dtype("bf16")) for name in ("k_pages", "v_pages")}
    for pool in big.values():
        pool.data.memset(0xFF, pool.nbytes)
    table = np.where(given["page_table"] < 0, -1, given["page_table"] + shift).astype(np.int32)
    on = uploaded({k: v for k, v in given.items() if k not in big} | {"page_table": table}) | big
    (out,) = downloaded(attention_inputs.attention_inputs(**on))
    assert np.array_equal(out, q)
    for name, pool in big.items():
        assert np.array_equal(
            wide64(device.download(pool[shift:])), wide64(device.download(small[name])), equal_nan=True
        )
        assert np.isnan(wide64(device.download(pool[: len(given["k_pages"])]))).all()


@pytest.mark.gpu
def test_a_matrix_above_2_31_elements(cuda):
    R, (Hk, K, Hv, V), W = 2**18, (16, 128, 32, 128), 4
    case = gdn_inputs._inputs_case([some.chain(20)], Hk, K, Hv, V, W)
    given = rounded(case.build(np.random.default_rng(0)), "bf16", case.wide)
    small = downloaded(gdn_inputs.gdn_inputs(**uploaded(given)))
    forest = Forest.of([some.tree_of(some.chain(R))], [0])
    on = uploaded({k: v for k, v in given.items() if k not in ("qkvz", "ba")} | {"forest": forest})
    for name in ("qkvz", "ba"):
        on[name] = device.empty((R, given[name].shape[1]), given[name].dtype)
        on[name].data.memset(0, on[name].nbytes)
        on[name][R - 20 :].set(given[name])
    out = gdn_inputs.gdn_inputs(**on)
    for found, expected in zip(downloaded(tuple(x[R - 20 + W :] for x in out)), small):
        assert np.array_equal(found, expected[W:])
