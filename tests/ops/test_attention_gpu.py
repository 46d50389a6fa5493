"""Attention's kernels on the emulator and on a real GPU: envelopes with unused rows, poison, company, large pools."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from boleinfer import device, kernels
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest, Tree
from boleinfer.kernels import KernelError, ToolchainError
from boleinfer.ops import attention, relative_error
from boleinfer.ops.attention import move_kv, splits_of, tree_attention
from boleinfer.ops.embedding import embedding
from tests import strategies as some

BOUND = {"bf16": 8e-3, "float": 1e-5}


class Scene:
    """Trees behind committed tokens, their KV, and the same in a device's envelope with unused rows in between.

    place: where in its request's span each row lies, per request; spans: rows of each span, `behind` more at the end
    """

    def __init__(self, rng, trees, committed, P, Hq, Hkv, Dh, act, place=None, spans=None, behind=0):
        self.forest, self.act, self.scale = Forest.of([some.tree_of(p) for p in trees], committed), act, Dh**-0.5
        self.place = place or [np.arange(len(p)) for p in trees]
        self.spans = spans or [len(p) for p in trees]
        self.P, self.start = P, np.cumsum([0, *self.spans])
        self.flat = np.concatenate([s + p for s, p in zip(self.start, self.place)]).astype(np.int32)
        self.R, R, dtype = int(self.start[-1]) + behind, len(self.forest), device.dtype(act)
        self.q, self.gate = (rng.standard_normal((R, Hq, Dh)).astype(dtype) for _ in "qg")
        self.past = [rng.standard_normal((2, T, Hkv, Dh)).astype(dtype) for T in committed]
        self.kv = rng.standard_normal((2, R, Hkv, Dh)).astype(dtype)
        self.order = rng

    def pages(self, place):
        """k_pages, v_pages, page_table: NaN in every slot but those of committed tokens and of rows."""
        length = [past.shape[1] + int(max(p, default=-1)) + 1 for past, p in zip(self.past, place)]
        M = max(1, -(-max(length) // self.P))
        ids = iter(self.order.permutation(sum(-(-n // self.P) for n in length) + 2))
        table = np.full((len(length), M), -1, np.int32)
        pages = np.full((2, table.size + 2, self.P, *self.kv.shape[2:]), np.nan, self.kv.dtype)
        for b, (past, p) in enumerate(zip(self.past, place)):
            table[b, : -(-length[b] // self.P)] = [next(ids) for _ in range(-(-length[b] // self.P))]
            slots = np.concatenate((np.arange(past.shape[1]), past.shape[1] + np.asarray(p, int)))
            rows = np.concatenate((past, self.kv[:, self.forest.rows(b)]), axis=1)
            pages[:, table[b, slots // self.P], slots % self.P] = rows
        return *pages, table

    def expected(self):
        """The definition in float64, of the rows alone."""
        k, v, table = self.pages([np.arange(len(p)) for p in self.place])
        wide = (x.astype(np.float64) for x in (self.q, self.gate, k, v))
        return tree_attention(*wide, table, self.forest, self.scale)

    def device_forest(self):
        row = {name: np.full(self.R, fill, np.int32) for name, fill in (("request", -1), ("parent", -2))}
        bits = np.full((self.R, 4), 0xFFFFFFFF, np.uint32)
        chain = np.zeros(len(self.place), np.int32)
        for b, (tree, place) in enumerate(zip(self.forest.trees, self.place)):
            at = self.start[b] + place
            row["request"][at] = b
            chain[b] = tree.is_chain and (place == np.arange(len(place))).all()
            if not chain[b]:
                seen = np.zeros((len(at), 128), bool)
                seen[:, place] = tree.ancestors
                bits[at] = np.packbits(seen, axis=1, bitorder="little").view("<u4")
        nothing = np.zeros(self.R, np.int32)  # attention reads none of these
        names = ("token", "depth", "position", "kv_slot")
        start, committed = self.start.astype(np.int32), self.forest.committed.astype(np.int32)
        arrays = dict.fromkeys(names, nothing) | row
        arrays |= {"ancestors": bits, "chain": chain, "start": start, "committed": committed}
        return DeviceForest(**{name: device.upload(array) for name, array in arrays.items()})

    def on_device(self):
        """Arguments of tree_attention up to `scale`; the gate is a part of wider rows, unused rows are NaN."""
        (_, Hq, Dh), dtype = self.q.shape, self.q.dtype
        q, wide = np.full((self.R, Hq, Dh), np.nan, dtype), np.full((self.R, (Hq + 2) * Dh), np.nan, dtype)
        q[self.flat], wide[self.flat, Dh:-Dh] = self.q, self.gate.reshape(len(self.q), -1)
        gate = device.upload(wide)[:, Dh:-Dh].reshape(self.R, Hq, Dh)
        pages = [device.upload(x) for x in self.pages(self.place)]
        return [device.upload(q), gate, *pages, self.device_forest(), self.scale]

    def run(self, rows=None):
        """What the GPU gives for the rows in use, or for some of them (-1: none)."""
        arguments = self.on_device()
        if rows is None:
            return device.download(tree_attention(*arguments))[self.flat]
        q, gate = (np.full((len(rows), *self.q.shape[1:]), np.nan, self.q.dtype) for _ in "qg")
        q[rows >= 0], gate[rows >= 0] = self.q[rows[rows >= 0]], self.gate[rows[rows >= 0]]
        flat = np.where(rows < 0, -1, self.flat[rows]).astype(np.int32)
        arguments[:2] = device.upload(q), device.upload(gate)
        return device.download(tree_attention(*arguments, device.upload(flat)))

    def check(self, out):
        expected = self.expected()
        assert relative_error(out, expected) <= BOUND[self.act]
        for n in range(len(out)):
            assert relative_error(out[n], expected[n]) <= 3 * BOUND[self.act], f"row {n}"


def random_scene(rng, act=None, largest=24, Dh=None):
    """A few requests of every kind, some without rows, with unused rows among and behind them."""
    trees, place, spans = [], [], []
    for _ in range(int(rng.integers(1, 5))):
        n = int(rng.choice([0, 1, 1, 2, int(rng.integers(1, largest + 1))]))
        chain, spare = rng.random() < 0.4, int(rng.choice([0, 0, 1, 5]))
        trees.append(some.chain(n) if chain else [int(rng.integers(-1, i)) for i in range(n)])
        spans.append(n + spare)
        place.append(np.arange(n) if chain else np.sort(rng.permutation(n + spare)[:n]))
    if not any(trees):
        trees[0], place[0], spans[0] = [-1], np.arange(1), 1
    committed = [int(rng.choice([0, 1, 15, 16, 17, 63, 64, int(rng.integers(0, 80)), 300])) for _ in trees]
    Hkv, ratio = int(rng.integers(1, 3)), int(rng.integers(1, 9))
    shape = int(rng.choice([1, 7, 16, 64])), Hkv * ratio, Hkv, Dh or int(rng.choice([32, 32, 64, 128]))
    behind = int(rng.integers(0, 4))
    return Scene(rng, trees, committed, *shape, act or str(rng.choice(["bf16", "float"])), place, spans, behind)


def fuzz_attention(seed: int) -> None:
    """One random forest through tree_attention and move_kv on the current device; AssertionError where it is wrong."""
    rng = np.random.default_rng(seed)
    scene = random_scene(rng)
    whole = scene.run()
    scene.check(whole)
    rows = rng.permutation(len(whole))[:5]
    rows[rng.random(len(rows)) < 0.2] = -1
    some_rows = scene.run(rows)
    assert some_rows[rows >= 0].tobytes() == whole[rows[rows >= 0]].tobytes(), "bits differ with `rows`"
    check_move(rng, scene)


def check_move(rng, scene):
    k, v, table = scene.pages(scene.place)
    T, P = scene.forest.committed, scene.P
    paths = []
    for tree, place in zip(scene.forest.trees, scene.place):
        node = int(rng.integers(-1, len(tree)))
        paths.append(place[tree.path(node)] if node >= 0 else np.zeros(0, int))
    row, count = np.full(scene.R, -1, np.int32), np.asarray([len(p) for p in paths], np.int32)
    expected = [k.copy(), v.copy()]
    for b, path in enumerate(paths):
        row[scene.start[b] : scene.start[b] + len(path)] = scene.start[b] + path
        for i, p in enumerate(path):
            source, target = int(T[b] + p), int(T[b] + i)
            for new, old in zip(expected, (k, v)):
                new[table[b, target // P], target % P] = old[table[b, source // P], source % P]
    pages = [device.upload(x) for x in (k, v)]
    given = Paths(device.upload(row), device.upload(count))
    move_kv(*(x[None] for x in pages), device.upload(table), scene.device_forest(), given)
    assert [device.download(x).tobytes() for x in pages] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("seed", range(12))
def test_random_forests(gpu, seed):
    fuzz_attention(seed)


@pytest.mark.parametrize("act", BOUND)
@pytest.mark.parametrize("n", [1, 2, 16, 17, 64, 65, 128])
def test_trees_of_every_size(gpu, act, n):
    rng = np.random.default_rng(n)
    parents = [int(rng.integers(max(-1, i - 5), i)) for i in range(n)]
    scene = Scene(rng, [parents], [63], 16, 5, 1, 32, act)
    scene.check(scene.run())


@pytest.mark.parametrize("requests", [33, 150, 300])
@pytest.mark.parametrize("Dh", [32, 64])
def test_many_requests(gpu, Dh, requests):
    rng = np.random.default_rng(requests)
    trees = [some.chain(int(n)) for n in rng.choice([0, 1, 1, 3], requests)]
    scene = Scene(rng, trees, rng.integers(0, 40, requests), 8, 2, 1, Dh, "bf16")
    whole = scene.run()
    scene.check(whole)
    rows = rng.permutation(len(whole))
    rows[::7] = -1
    assert scene.run(rows)[rows >= 0].tobytes() == whole[rows[rows >= 0]].tobytes(), "bits differ with `rows`"


@pytest.mark.parametrize("act, Dh", [("float", 32), ("bf16", 32), ("bf16", 64)])
def test_a_row_has_the_same_bits_in_any_company(gpu, act, Dh, monkeypatch):
    rng = np.random.default_rng(0)
    T = [2000, 20, 4500, 2000]  # some of the first request's rows are on either side of slot 2048
    scene = Scene(rng, [some.chain(128), some.binary(31), [-1], some.chain(1)], T, 16, 4, 2, Dh, act)
    scene.past[3], scene.kv[:, -1], scene.q[-1], scene.gate[-1] = (
        scene.past[0],
        scene.kv[:, 0],
        scene.q[0],
        scene.gate[0],
    )
    out = scene.run()
    scene.check(out)
    assert out[-1].tobytes() == out[0].tobytes(), "a decoding row and the first of 128"
    monkeypatch.setattr(attention, "_SIDE_ROWS", 1)  # splits in order instead of side by side
    assert scene.run().tobytes() == out.tobytes()
    monkeypatch.undo()
    for b, rows in enumerate(map(scene.forest.rows, range(4))):
        alone = Scene(rng, [scene.forest.trees[b].parent.tolist()], [T[b]], 7 if Dh == 32 else 8, 4, 2, Dh, act)
        alone.past, alone.kv = [scene.past[b]], scene.kv[:, rows]
        alone.q, alone.gate = scene.q[rows], scene.gate[rows]
        assert alone.run().tobytes() == out[rows].tobytes(), f"request {b} alone"


@pytest.mark.parametrize("act", BOUND)
def test_long_contexts_have_splits_of_growing_size(gpu, act):
    lengths = [4095, 4096, 4353, 17000, 140000] if gpu == "cuda" else [4095, 4353]
    trees = [some.binary(3), *[[-1]] * (len(lengths) - 1)]
    scene = Scene(np.random.default_rng(0), trees, lengths, 64, 2, 1, 32, act)
    scene.check(scene.run())


def test_the_number_of_splits():
    ends = {0: 1, 1: 1, 64: 1, 65: 2, 2048: 32, 2049: 33, 2176: 33, 2177: 34, 4096: 48, 4097: 49, 131072: 128}
    assert {n: splits_of(n) for n in ends} == ends


def test_a_broken_row_breaks_no_other_request(gpu):
    rng = np.random.default_rng(3)
    scene = Scene(rng, [some.binary(9), some.chain(4)], [20, 30], 16, 4, 2, 64, "bf16")
    whole = scene.run()
    scene.past[0][:, 3] = np.nan
    out = scene.run()
    assert np.isnan(out[:9].astype(np.float32)).all() and out[9:].tobytes() == whole[9:].tobytes()


def test_large_scores(gpu):
    scene = Scene(np.random.default_rng(0), [some.chain(3)], [40], 16, 2, 1, 32, "float")
    scene.q *= 1e4
    out = scene.run()
    assert np.isfinite(out).all() and relative_error(out, scene.expected()) < 1e-2  # rounding of scores of 1e4


@pytest.mark.parametrize("shape", [(2, 1, 65), (3, 2, 64), (2, 1, 16)])
def test_refused_sizes(gpu, shape):
    scene = Scene(np.random.default_rng(0), [[-1]], [3], 4, *shape, "bf16")
    with pytest.raises(KernelError, match="the GPU takes widths 32, 64"):
        tree_attention(*scene.on_device())


@pytest.mark.gpu
class TestOnAGpu:
    """What the emulator cannot show."""

    @pytest.fixture(autouse=True)
    def cupy(self):
        try:
            kernels.open_gpu()
        except ToolchainError as error:
            pytest.skip(f"the kernels were NOT run: {error}")
        return pytest.importorskip("cupy")

    @pytest.mark.parametrize("act", BOUND)
    @pytest.mark.parametrize("Dh", attention.WIDTHS)
    def test_larger_forests(self, act, Dh):
        rng = np.random.default_rng(Dh)
        for ratio in (1, 4, 6, 8):
            trees = [some.chain(700), some.binary(128), *[some.star(9)] * 6, [-1], some.roots(33)]
            scene = Scene(rng, trees, rng.integers(0, 1500, len(trees)), 64, 2 * ratio, 2, Dh, act)
            scene.check(scene.run())

    def test_a_captured_launch_follows_its_arrays(self, cupy):
        rng = np.random.default_rng(0)
        first, second = (
            Scene(rng, trees, T, 16, 8, 2, 64, "bf16", None, [20, 20], 4)
            for trees, T in (([some.chain(3), some.binary(20)], [60, 50]), ([some.star(20), [-1]], [60, 40]))
        )
        arguments, later = first.on_device(), second.on_device()
        ids, table = device.upload(np.zeros(1, np.int32)), device.upload(np.ones((1, 8), np.float32))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, warnings.catch_warnings():
            warnings.simplefilter("error")
            embedding(ids, table)  # as every pass begins: what attention reads early was written before it
            tree_attention(*arguments)
            stream.synchronize()
            stream.begin_capture()
            embedding(ids, table)
            out = tree_attention(*arguments)
            graph = stream.end_capture()
            for old, new in zip([*arguments[:5], *vars(arguments[5]).values()], [*later[:5], *vars(later[5]).values()]):
                if isinstance(old, cupy.ndarray):
                    old[...] = new
            graph.launch(stream)
            stream.synchronize()
        second.check(device.download(out)[second.flat])

    def test_a_pool_above_2_31_elements(self, cupy):
        rng = np.random.default_rng(0)
        scene = Scene(rng, [some.binary(20), some.chain(40)], [100, 30], 16, 4, 2, 256, "bf16")
        arguments = scene.on_device()
        expected = device.download(tree_attention(*arguments))
        k, v, table = arguments[2:5]
        pages = 2**31 // k[0].size + len(k) + 1
        try:
            big = [cupy.empty((pages, *k.shape[1:]), k.dtype) for _ in "kv"]
        except cupy.cuda.memory.OutOfMemoryError:
            pytest.skip("no room for two pools of 4 GB")
        for large, small in zip(big, (k, v)):
            large[-len(k) :] = small
        high = cupy.where(table < 0, table, table + pages - len(k)).astype(np.int32)
        cupy.cuda.get_current_stream().synchronize()
        out = device.download(tree_attention(*arguments[:2], *big, high, *arguments[5:]))
        assert out.tobytes() == expected.tobytes()
        row = np.full(scene.R, -1, np.int32)
        row[:3] = [0, 2, 6]
        paths = Paths(device.upload(row), device.upload(np.asarray([3, 0], np.int32)))
        move_kv(*(x[None] for x in big), high, arguments[5], paths)
        move_kv(k[None], v[None], table, arguments[5], paths)
        assert device.download(big[0][-len(k) :]).tobytes() == device.download(k).tobytes()


def test_scenes_are_what_they_say():
    scene = Scene(np.random.default_rng(0), [[-1, 0]], [3], 2, 1, 1, 32, "float", [np.asarray([0, 2])], [4], 1)
    k, _, table = scene.pages(scene.place)
    assert scene.R == 5 and scene.flat.tolist() == [0, 2] and table.shape == (1, 3)
    assert np.isnan(k[table[0, 2], 0]).all() and not np.isnan(k[table[0, 2], 1]).any()
    assert isinstance(scene.forest.trees[0], Tree)
