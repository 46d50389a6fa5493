"""The gated delta rule on the emulator and on a real GPU: forests in envelopes, poison, commits step after step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boleinfer import device
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest
from boleinfer.kernels import KernelError
from boleinfer.ops import gdn as ops
from boleinfer.ops.embedding import embedding
from boleinfer.ops.gdn import gdn, tree
from boleinfer.ops.gdn_commit import commit
from boleinfer.ring import Ring, fold
from tests import strategies as some

BOUND = {"float": (1e-5, 1e-5), "bf16": (8e-3, 1e-4)}  # of o, and of u and the state


def near(out, ref, bound, what):
    error = np.abs(np.asarray(out, np.float64) - ref).max(initial=0) / max(1.0, np.abs(ref).max(initial=0))
    assert error <= bound, f"{what}: {error:.1e} off"


def begin_pass():
    """What was written before is there: gdn may read states before its own wait."""
    embedding(device.upload(np.zeros(1, np.int32)), device.upload(np.ones((1, 8), np.float32)))


class Envelope:
    """A forest with unused rows among, between and behind its own."""

    def __init__(self, rng, trees, holes=True, committed=None):
        committed = [0] * len(trees) if committed is None else committed
        self.forest = Forest.of([some.tree_of(p) for p in trees], committed)
        spare = [int(rng.choice([0, 0, 1, 4])) * holes for _ in trees]
        spans = [len(p) + n for p, n in zip(trees, spare)]
        in_order = [t.is_chain and rng.random() < 0.5 for t in self.forest.trees]
        places = [  # holes lie behind a chain, or among the rows
            np.arange(len(p)) if straight else np.sort(rng.permutation(span)[: len(p)])
            for p, span, straight in zip(trees, spans, in_order)
        ]
        self.start = np.cumsum([0, *spans]).astype(np.int32)
        self.flat = np.concatenate([s + p for s, p in zip(self.start, places)]).astype(np.int32)
        self.R = int(self.start[-1]) + int(rng.integers(0, 3)) * holes
        self.request, self.parent = np.full(self.R, -1, np.int32), np.full(self.R, -2, np.int32)
        self.bits, self.chain = np.full((self.R, 4), 0xFFFFFFFF, np.uint32), np.zeros(len(trees), np.int32)
        for b, (nodes, place) in enumerate(zip(self.forest.trees, places)):
            at = self.start[b] + place
            self.request[at] = b
            self.parent[at] = np.where(nodes.parent < 0, -1, at[nodes.parent] if len(at) else -1)
            self.chain[b] = nodes.is_chain and (len(place) > 128 or rng.random() < 0.7 or len(nodes) > 64)
            if not self.chain[b]:
                seen = np.zeros((len(at), 128), bool)
                seen[:, place] = nodes.ancestors
                self.bits[at] = np.packbits(seen, axis=1, bitorder="little").view("<u4")

    def upload(self):
        nothing = np.full(self.R, -1, np.int32)
        arrays = dict.fromkeys(("token", "depth", "position", "kv_slot"), nothing)
        arrays |= {"request": self.request, "parent": self.parent, "ancestors": self.bits, "chain": self.chain}
        arrays |= {"start": self.start, "committed": self.forest.committed.astype(np.int32)}
        return DeviceForest(**{name: device.upload(array) for name, array in arrays.items()})

    def rows(self, array):
        """The array's rows at their places, NaN between them, on the GPU."""
        wide = np.full((self.R, *array.shape[1:]), np.nan, array.dtype)
        wide[self.flat] = array
        return device.upload(wide)

    def paths(self, nodes):
        """Accepted nodes of each tree as Paths."""
        row = np.full(self.R, -1, np.int32)
        for b, path in enumerate(nodes):
            own = self.flat[self.forest.rows(b)]
            row[self.start[b] : self.start[b] + len(path)] = own[path]
        return Paths(device.upload(row), device.upload(np.asarray([len(p) for p in nodes], np.int32)))


class Memory:
    """States of B requests on the GPU and, in float64, what they have to be; all else is NaN."""

    def __init__(self, rng, act, B, C, Hk, Hv, K, V):
        self.act, self.C, self.sizes, slots = act, C, (Hk, Hv, K, V), B + 2
        self.slot = some.some_slots(rng, B, slots)
        S = np.full((slots, Hv, K, V), np.nan, np.float32)
        S[self.slot] = rng.standard_normal((B, Hv, K, V))
        self.states = list(S[self.slot].astype(np.float64))
        shapes = ((Hk, K), device.dtype(act)), ((Hv, V), np.float32), ((Hv,), np.float32)
        k, u, g = (device.upload(np.full((slots, C, *shape), np.nan).astype(dtype)) for shape, dtype in shapes)
        self.S, self.ring, self.committed = device.upload(S), Ring(k, u, g), C * rng.integers(0, 5, B)
        self.device_slot = device.upload(self.slot)
        window = np.full((slots, 4, 2 * Hk * K + Hv * V), np.nan, np.float32)
        window[self.slot] = rng.standard_normal((B, *window.shape[1:]))
        self.windows = window.astype(device.dtype(act))
        self.window = device.upload(self.windows)

    def bytes(self):
        return b"".join(device.download(x).tobytes() for x in (self.window, self.S, *self.ring))

    def rows(self, rng, R, hard):
        """q, k, v of the activations' type, g and beta float32."""
        rows = ops._rows(rng, max(R, 1), *self.sizes, hard)
        types = dict.fromkeys("qkv", device.dtype(self.act))
        return [rows[n][:R].astype(types.get(n, np.float32)) for n in ("q", "k", "v", "g", "beta")]

    def step(self, rng, envelope, hard=False):
        """One step: outputs and factors are right, nothing is written by gdn, and commits are right."""
        envelope.forest = Forest.of(envelope.forest.trees, self.committed.copy())
        forest, on = envelope.forest, envelope.upload()
        rows = self.rows(rng, len(forest), hard)
        q, k, v, g, beta = (envelope.rows(x) for x in rows)
        before = self.bytes()
        begin_pass()
        o, u = gdn(q, k, v, g, beta, self.S, self.ring, self.device_slot, on)
        assert self.bytes() == before, "gdn changed the state"
        self.compare(envelope, rows, device.download(o)[envelope.flat], device.download(u)[envelope.flat])
        nodes = [t.path(int(rng.integers(len(t)))) if len(t) and rng.random() < 0.9 else [] for t in forest.trees]
        for b, t in enumerate(forest.trees):
            if t.is_chain and len(t) and rng.random() < 0.5:
                nodes[b] = t.path(len(t) - 1)
        x = rng.standard_normal((len(forest), self.windows.shape[2])).astype(self.windows.dtype)
        self.commit(envelope, on, [x, *rows], (envelope.rows(x), k, u, g), nodes)

    def compare(self, envelope, rows, o, u):
        self.u = np.zeros(u.shape)
        for b, nodes in enumerate(envelope.forest.trees):
            here = envelope.forest.rows(b)
            if len(nodes):
                wide = [x[here].astype(np.float64) for x in rows]
                k, v, g = (x[:0] for x in wide[1:4])
                o_ref, self.u[here] = tree(*wide, self.states[b], k, v, g, nodes.ancestors)
                near(o[here], o_ref, BOUND[self.act][0], f"o of request {b}")
                near(u[here], self.u[here], BOUND[self.act][1], f"u of request {b}")

    def commit(self, envelope, forest, rows, factors, nodes):
        paths = envelope.paths(nodes)
        self.commit_on_device(factors, forest, paths)
        S, ring = device.download(self.S), Ring(*(device.download(x).astype(np.float64) for x in self.ring))
        for b, (s, path) in enumerate(zip(self.slot, nodes)):
            for i in path[-4:]:
                position = self.committed[b] + envelope.forest.trees[b].depth[i]
                self.windows[s, position % 4] = rows[0][envelope.forest.start[b] + i]
            self.committed[b] += len(path)
            at = np.asarray(path, int) + envelope.forest.start[b]
            k, g = (rows[i][at].astype(np.float64) for i in (2, 4))
            self.states[b] = fold(self.states[b], k, self.u[at], g)
            state = fold(S[s].astype(np.float64), *ring.filled(s, self.committed[b]))
            near(state, self.states[b], BOUND[self.act][1], f"state of {b}")
        assert device.download(self.window).tobytes() == self.windows.tobytes()
        others = np.setdiff1d(np.arange(len(S)), self.slot)
        assert np.isnan(S[others]).all() and all(np.isnan(x[others]).all() for x in ring)

    def commit_on_device(self, factors, forest, paths):
        """As the only layer."""
        ring = Ring(*(x[None] for x in self.ring))
        of_layers = [[x] for x in factors]
        commit(self.window[None], self.S[None], ring, *of_layers, self.device_slot, forest, paths)


def random_tree(rng, largest):
    """Parents: nothing, one node, a chain, a long chain, or a ragged tree with any number of roots."""
    kind = rng.choice(["none", "one", "chain", "long", "tree"], p=[0.1, 0.2, 0.2, 0.1, 0.4])
    n = int(rng.integers(1, largest + 1))
    if kind == "tree":
        return [int(rng.integers(-1, i)) for i in range(n)]
    return some.chain({"none": 0, "one": 1, "chain": n, "long": int(rng.integers(60, 140))}[kind])


def fuzz_gdn(seed: int) -> None:
    """Three steps of a few requests, any trees, any ring, any decay, any paths; AssertionError where one is wrong."""
    rng = np.random.default_rng(seed)
    B, Hk, C = int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.choice([1, 2, 5, 16, 20, 33, 64]))
    memory = Memory(rng, str(rng.choice(["float", "bf16"])), B, C, Hk, Hk * int(rng.integers(1, 4)), 16, 16)
    for _ in range(3):
        trees = [random_tree(rng, int(rng.choice([4, 20, 40]))) for _ in range(B)]
        if any(trees):
            memory.step(rng, Envelope(rng, trees), hard=rng.random() < 0.5)


@pytest.mark.parametrize("block", range(4))
def test_random_forests(gpu, block):
    for seed in range(10 * block, 10 * block + 10):
        try:
            fuzz_gdn(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("act", BOUND)
@pytest.mark.parametrize("K,V", [(16, 64), (32, 16), (64, 32), (128, 128)])
def test_every_width(gpu, act, K, V):
    rng = np.random.default_rng(K + V)
    memory = Memory(rng, act, 2, 8, 1, 2, K, V)
    for _ in range(2):
        memory.step(rng, Envelope(rng, [some.binary(21), some.chain(70)]), hard=True)


@pytest.mark.parametrize("act", BOUND)
def test_the_largest_tree_and_the_fullest_ring(gpu, act):
    rng = np.random.default_rng(0)
    memory = Memory(rng, act, 1, 64, 1, 1, 16, 16)
    for _ in range(2):
        trees = [[int(rng.integers(max(-1, i - 3), i)) for i in range(128)]]
        memory.step(rng, Envelope(rng, trees, holes=False))


@pytest.mark.parametrize("act", BOUND)
@pytest.mark.parametrize("decay", [0, -1e-6, -6, -88, -104, -1e4, -np.inf])
def test_gate_extremes(gpu, act, decay):
    rng = np.random.default_rng(0)
    memory = Memory(rng, act, 3, 32, 1, 2, 16, 16)
    original = memory.rows

    def rows(*args):
        q, k, v, g, beta = original(*args)
        g[rng.random(g.shape) < 0.3] = decay
        return [q, k, v, g, np.ones_like(beta)]

    memory.rows = rows
    for _ in range(3):
        memory.step(rng, Envelope(rng, [some.chain(100), some.binary(20), [-1]]))


@pytest.mark.parametrize("act", BOUND)
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_identical_keys_without_decay_lose_no_digits(gpu, act, beta):
    rng = np.random.default_rng(1)
    memory = Memory(rng, act, 2, 32, 1, 1, 16, 16)
    key = np.zeros((1, 1, 16))
    key[..., :4] = 0.5  # of length 1 in bf16 as well

    def rows(rng, R, hard):
        q, k, v, g, b = Memory.rows(memory, rng, R, hard)
        return [q, np.broadcast_to(key, k.shape).astype(k.dtype), v, 0 * g, np.full_like(b, beta)]

    memory.rows = rows
    for _ in range(2):
        memory.step(rng, Envelope(rng, [some.chain(64), [*some.chain(40), *[39] * 20]]))


@pytest.mark.parametrize("gates", ["none", "mild", "extreme"])
@pytest.mark.parametrize("alike", [False, True])
def test_the_committed_state_after_many_tokens(gpu, gates, alike):
    """Random trees, random accepted paths, beta near 1: no further from the float64 recurrence than 2e-5."""
    rng = np.random.default_rng(7)
    memory, accepted = Memory(rng, "bf16", 1, 32, 1, 1, 32, 32), []
    commit_nodes = memory.commit

    def rows(rng, R, hard):
        q, k, v, g, beta = Memory.rows(memory, rng, R, hard)
        keys = 1 + 0.03 * rng.standard_normal(k.shape) if alike else rng.standard_normal(k.shape)
        k = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(k.dtype)
        chosen = {"none": [0], "mild": [0, -0.01, -0.1], "extreme": [0, -1e-6, -1, -88, -1e4, -np.inf]}[gates]
        return [q, k, v, rng.choice(chosen, g.shape).astype(np.float32), (1 - beta / 100).astype(np.float32)]

    def commit_and_count(envelope, on, rows, factors, nodes):
        accepted.extend(nodes[0])
        commit_nodes(envelope, on, rows, factors, nodes)

    memory.rows, memory.commit = rows, commit_and_count
    while len(accepted) < (8192 if gpu == "cuda" else 1000):
        memory.step(rng, Envelope(rng, [[int(rng.integers(max(-1, i - 3), i)) for i in range(40)]]))
    S, ring = device.download(memory.S), Ring(*(device.download(x).astype(np.float64) for x in memory.ring))
    state = fold(S[memory.slot[0]].astype(np.float64), *ring.filled(memory.slot[0], memory.committed[0]))
    error = np.linalg.norm(state - memory.states[0]) / np.linalg.norm(memory.states[0])
    assert error < 2e-5, f"{error:.1e} after {len(accepted)} tokens"


@pytest.mark.parametrize("act", BOUND)
def test_a_tree_does_not_depend_on_its_company(gpu, act):
    rng = np.random.default_rng(2)
    memory = Memory(rng, act, 3, 16, 1, 2, 32, 32)
    memory.step(rng, Envelope(rng, [some.chain(9), some.chain(3), some.chain(20)]))
    trees = [some.binary(30), some.chain(70), [-1]]
    together = Envelope(rng, trees, False, memory.committed)
    rows = memory.rows(rng, len(together.forest), False)
    state = memory.S, memory.ring
    begin_pass()
    o, u = gdn(*(together.rows(x) for x in rows), *state, memory.device_slot, together.upload())
    for b, parents in enumerate(trees):
        alone, here = Envelope(rng, [parents], False, memory.committed[b : b + 1]), together.forest.rows(b)
        alone.chain[0], alone.bits[:] = together.chain[b], together.bits[here]
        slot = device.upload(memory.slot[b : b + 1])
        o_alone, u_alone = gdn(*(alone.rows(x[here]) for x in rows), *state, slot, alone.upload())
        assert device.download(o)[here].tobytes() == device.download(o_alone).tobytes()
        assert device.download(u)[here].tobytes() == device.download(u_alone).tobytes()


@pytest.mark.parametrize("act", BOUND)
def test_the_width_of_a_tile_changes_no_bit(gpu, act, monkeypatch):
    rng = np.random.default_rng(5)
    memory = Memory(rng, act, 3, 40, 1, 2, 32, 64)
    for _ in range(3):
        memory.step(rng, Envelope(rng, [some.chain(9), some.chain(3), some.binary(20)]))
    envelope = Envelope(rng, [some.binary(30), some.chain(70), [-1]], False, memory.committed)
    rows, results = [envelope.rows(x) for x in memory.rows(rng, len(envelope.forest), False)], []
    begin_pass()
    for width, warps, panel in ((16, 4, 16), (32, 6, 16), (32, 8, 64), (64, 12, 16)):
        constants = {"Act": act, "K": 32, "V": 64, "Vt": width, "Warps": warps, "Panel": panel}
        grid = 64 // width * 2 * 2
        monkeypatch.setattr(ops, "_tiles", lambda *_, c=constants, g=grid: (c, g, 32 * c["Warps"]))
        out = gdn(*rows, memory.S, memory.ring, memory.device_slot, envelope.upload())
        results.append([device.download(x).tobytes() for x in out])
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(
    "trees,sizes",
    [
        ([some.chain(9), [-1], [], some.binary(16), [-1, -1]], (1, 3, 16, 16)),
        ([some.binary(12), some.chain(3)], (2, 4, 64, 64)),
        ([some.binary(16), some.chain(16)], (1, 1, 128, 128)),
        ([some.binary(17), [-1], some.chain(32)], (1, 2, 32, 32)),
        ([some.binary(50), some.chain(60), some.chain(3), [-1], some.binary(33)], (1, 2, 16, 16)),
        ([some.binary(64), some.binary(17)], (1, 1, 128, 128)),
    ],
)
def test_small_trees_have_the_bits_of_large_ones(gpu, monkeypatch, trees, sizes, kind):
    rng = np.random.default_rng(len(trees[0]))
    memory = Memory(rng, "bf16", len(trees), 32, *sizes)
    for _ in range(2):
        memory.step(rng, Envelope(rng, [some.chain(9) for _ in trees]))
    envelope = Envelope(rng, trees, False, memory.committed)
    rows = [envelope.rows(x) for x in memory.rows(rng, len(envelope.forest), hard=True)]
    begin_pass()
    forest, found = replace(envelope.upload(), most=max(map(len, trees))), []
    for small in ({rows: (kinds[kind % len(kinds)],) for rows, kinds in ops.SMALL.items()}, {}):
        monkeypatch.setattr(ops, "SMALL", small)
        out = gdn(*rows, memory.S, memory.ring, memory.device_slot, forest)
        found.append([device.download(x).tobytes() for x in out])
    assert found[0] == found[1]


def test_what_the_kernels_do_not_take_is_refused(gpu):
    rng = np.random.default_rng(3)
    for C, K, V in [(65, 16, 16), (8, 48, 16), (8, 16, 256)]:
        memory, envelope = Memory(rng, "float", 1, C, 1, 1, K, V), Envelope(rng, [[-1]])
        with pytest.raises(KernelError, match=f"K={K}, V={V}, a ring of {C}; the GPU takes"):
            memory.step(rng, envelope)


@pytest.mark.parametrize("act", BOUND)
def test_a_fold_does_not_depend_on_its_company(gpu, act):
    """Rings that are not full pieces, paths longer than a ring: the same states alone and among others."""
    rng = np.random.default_rng(8)
    memory, before, after = Memory(rng, act, 3, 40, 1, 2, 128, 32), (13, 20, 7), (39, 70, 40)

    def committed(lengths, past, company):
        """States behind chains of so many rows, all of them accepted of some requests."""
        envelope = Envelope(rng, [some.chain(n) for n in lengths], committed=np.asarray(past))
        _, k, v, g, _ = memory.rows(np.random.default_rng(9), len(envelope.forest), False)
        x = np.ones((len(k), memory.windows.shape[2])).astype(memory.windows.dtype)
        rows = [envelope.rows(a) for a in (x, k, v.astype(np.float32), g)]
        paths = [np.arange(n) if b in company else [] for b, n in enumerate(lengths)]
        begin_pass()
        memory.commit_on_device(rows, envelope.upload(), envelope.paths(paths))
        return [device.download(memory.S)[s].tobytes() for s in memory.slot]

    unfolded = committed(before, (0, 0, 0), range(3))
    arrays = memory.S, memory.window, *memory.ring
    values = [device.download(x).copy() for x in arrays]
    together = committed(after, before, range(3))
    for b in range(3):
        for array, value in zip(arrays, values):
            device.write(array, value)
        alone = committed(after, before, [b])
        assert alone == [*unfolded[:b], together[b], *unfolded[b + 1 :]] and alone[b] != unfolded[b]


def test_nothing_accepted_writes_nothing(gpu):
    rng = np.random.default_rng(4)
    memory = Memory(rng, "bf16", 2, 4, 1, 1, 16, 16)
    memory.step(rng, Envelope(rng, [some.chain(3), some.chain(9)]))
    envelope, before = Envelope(rng, [some.chain(70), some.chain(2)], committed=memory.committed), memory.bytes()
    rows = memory.rows(rng, 72, False)
    k, u, g = (envelope.rows(x) for x in (rows[1], rows[2].astype(np.float32), rows[3]))
    paths = envelope.paths([[], []])
    x = device.upload(np.full((envelope.R, 48), np.nan).astype(k.dtype))
    memory.commit_on_device((x, k, u, g), envelope.upload(), paths)
    assert memory.bytes() == before
