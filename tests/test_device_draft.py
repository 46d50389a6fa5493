"""The MTP draft tree on the GPU, emulated and real, against the drafter on the host, both over a scripted model."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import device
from boleinfer.device_draft import Drafts, candidates, grow, keep
from boleinfer.device_step import Part, Results, Slots, Step, StepInputs, plant
from boleinfer.draft import levels as level_by_level
from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.levels import Levels
from boleinfer.draft.mtp import MTPDrafter
from boleinfer.forest import Forest, Tree
from boleinfer.scheduler import grow as grow_tree

SLOTS, L, VOCAB = 9, 40, 40


def on_host(arrays: object, *names: str) -> list[np.ndarray]:
    return [device.download(getattr(arrays, name)) for name in names]


def likeliest(logits: np.ndarray, top_k: int, rows: np.ndarray | None = None, names: np.ndarray | None = None):
    """Ids and probabilities, [n, top_k], of the children of as many roots; -1 and -1: none."""
    n, (rows, names) = len(logits), (None if a is None else device.upload(a) for a in (rows, names))
    slots, inputs, drafts = Slots(n, 1, L), StepInputs(n, n, n), Drafts(n, top_k, 1, 1)
    for s in range(n):
        slots.admit(s, np.zeros(0, np.int32), 5)
    inputs.fill([Part(s, draft_nodes=L, draft_depth=L) for s in range(n)])
    inputs.send()
    grow(drafts, 0, candidates(device.upload(logits), top_k, rows, names), inputs, slots)
    return on_host(drafts, "candidate_token", "candidate_prob")


@pytest.mark.parametrize("vocab", [3, 64, 1001, 4100, 70001])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_candidates_are_the_likeliest_tokens(gpu, vocab, top_k):
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((8, vocab)).astype(np.float32) * 3
    logits[1] = rng.integers(-2, 2, vocab)  # equal ones
    logits[2, vocab // 2] = np.nan
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    logits[4, -1] = -7.0
    logits[5] = -np.inf
    logits[7] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    ids, prob = likeliest(logits, top_k, np.asarray([0, 1, 2, 3, 4, 5, -1, 7], np.int32))
    for r in (0, 1, 4, 7):
        order = np.argsort(-logits[r], kind="stable")[:top_k]
        order = order[logits[r][order] > -np.inf]
        x = logits[r].astype(np.float64)
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        assert ids[r].tolist() == [*order, *[-1] * (top_k - len(order))]
        np.testing.assert_allclose(prob[r, : len(order)], p[order], rtol=1e-5)
    for r in (2, 3, 5, 6):
        assert (ids[r] == -1).all() and (prob[r] == -1).all()
    assert np.array_equal(likeliest(logits[:1], top_k)[1][0], prob[0]), "a row does not depend on its company"


def test_columns_may_have_names(gpu):
    names = np.asarray([10, 3, 77, -1, 2], np.int32)
    ids, prob = likeliest(np.asarray([[1, 9, 3, 7, 5]], np.float32), 3, None, names)
    assert ids.tolist() == [[3, -1, 2]] and prob[0, 0] > prob[0, 2] > 0 > prob[0, 1]


class Model:
    """An MTP layer whose output is a number of the path, and logits drawn from that number; remembers its passes.

    flat: all logits are equal, so that all nodes of a level are equally likely
    """

    has_mtp = True

    def __init__(self, flat: bool) -> None:
        self.flat = flat
        self.passes: list[dict[str, list]] = []

    def next(self, hidden: np.ndarray, token: np.ndarray) -> np.ndarray:
        return (hidden * 31 + token[:, None] * 7 + 1) % 65521

    def mtp(self, token, hidden, position, forest, state, rows=None):
        rows = np.arange(len(forest)) if rows is None else rows
        masks = np.concatenate([np.pad(t.ancestors, ((0, 0), (0, 128 - len(t)))) for t in forest.trees])  # [R, 128]
        names = ("request", "depth", "position", "kv_slot")
        kept = {name: getattr(forest, name)[rows].tolist() for name in names}
        assert kept["position"] == position.tolist()
        self.passes.append({"token": token.tolist(), "ancestors": masks[rows].tolist(), **kept})
        return self.next(hidden, token)

    def mtp_memory(self, token, hidden, position, forest, state) -> None:
        """Nothing: what this layer gives depends on no earlier row."""

    def logits(self, y: np.ndarray) -> np.ndarray:
        scale = 0 if self.flat else 3
        rows = [scale * np.random.default_rng(int(v)).standard_normal(VOCAB) for v in y[:, 0]]
        return np.asarray(rows, np.float32).reshape(-1, VOCAB)


class State:
    """Batches that are the forest alone."""

    mtp = object()

    def batch(self, forest: Forest, places: object) -> Forest:
        return forest


class Text:
    """The part of a request that the drafter reads."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.committed, self.home = tokens, len(tokens) - 1, None
        self.prompt_length = len(tokens)


def ordered_top(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """levels.top with children in the order of their logits and ids."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    prob = np.exp(logits - logits.max(axis=1, keepdims=True))
    return ids, np.take_along_axis(prob / prob.sum(axis=1, keepdims=True), ids, axis=1)


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    monkeypatch.setattr(level_by_level, "top", ordered_top)


class Scene:
    """Some requests, and the tree that the drafter on the host makes for each; three more requests are unused."""

    B = 4

    def __init__(self, rng: np.random.Generator, flat: bool, top_k: int, width: int, depth: int, worth: float) -> None:
        B, self.model, least = self.B, Model(flat), float(rng.choice([0.0, 0.05])) * (not flat)
        self.limits = [Limits(int(rng.integers(0, L)), int(rng.integers(0, 8)), least) for _ in range(B)]
        texts = [Text(rng.integers(0, VOCAB, rng.integers(2, 30)).tolist()) for _ in range(B)]
        worth = max(worth, least)
        drafter = MTPDrafter(self.model, State(), Levels(top_k, width, depth, worth))
        drafter.observe([Committed(t, 0, rng.integers(0, 65521, (t.committed, 1)).astype(float)) for t in texts])
        self.trees = drafter.propose(texts, self.limits)
        self.last = np.stack([drafter._last[t] for t in texts])
        self.slot = rng.permutation(SLOTS)[:B].tolist()
        self.slots, self.inputs = Slots(SLOTS, 2, L), StepInputs(B * (L + 2), B + 3, B * (L + 2))
        for s, text in zip(self.slot, texts):
            self.slots.admit(s, np.zeros(0, np.int32), text.committed)
        self.send([Part(s, draft_nodes=lim.nodes, draft_depth=lim.depth) for s, lim in zip(self.slot, self.limits)])
        self.drafts = Drafts(B + 3, top_k, width, depth, worth, least)
        self.results = Results(B + 3, L)

    def send(self, parts: list[Part]) -> None:
        self.inputs.fill(parts)
        self.inputs.send()

    def draft(self, levels: int) -> list[dict[str, list]]:
        """Draws up the drafts as the head of device_draft.py says; what each pass of the MTP layer ran."""
        drafts, rows, passes = self.drafts, np.asarray([0] * self.B + [-1] * 3, np.int32), []
        hidden = np.full((len(rows), 1), np.nan)
        hidden[: self.B] = self.last
        for level in range(levels + 1):
            logits = np.full((len(rows), VOCAB), np.nan, np.float32)
            logits[rows >= 0] = self.model.logits(hidden[rows >= 0])
            found = candidates(device.upload(logits), drafts.top_k, device.upload(rows))
            grow(drafts, level, found, self.inputs, self.slots)
            if level < drafts.levels:
                rows, hidden, kept = self._pass(hidden)
                passes.append(kept)
        keep(drafts, self.inputs, self.slots, self.results)
        return passes

    def _pass(self, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, list]]:
        token, rows, source, position = on_host(self.drafts, "token", "row", "source", "position")
        used = rows >= 0
        assert (token[~used] == -1).all() and (source[~used] == -1).all() and (position[~used] == 0).all()
        y = np.full((len(rows), 1), np.nan)
        y[used] = self.model.next(hidden[source[used]], token[used])
        names = ("request", "depth", "position", "kv_slot", "token", "ancestors")
        forest = dict(zip(names, on_host(self.drafts.forest, *names)))
        assert (position[used] == forest["position"][rows[used]]).all()
        kept = {name: array[rows[used]] for name, array in forest.items()}
        kept["ancestors"] = np.unpackbits(kept["ancestors"].view(np.uint8), axis=1, bitorder="little").astype(bool)
        return rows, y, {name: array.tolist() for name, array in kept.items()}

    def told(self) -> list[Tree]:
        """The drafts that the host is told of."""
        device.fill(self.results.count, 0)
        return [e.draft for e in self.results.fetch(self.B, drafts=True)()]

    def kept(self) -> list[Tree]:
        """The drafts in the slots."""
        token, parent, prob, count = on_host(self.slots, "draft_token", "draft_parent", "draft_prob", "draft_count")
        return [Tree.of(token[s, : count[s]], parent[s, : count[s]], prob[s, : count[s]]) for s in self.slot]


def paths_of(tree: Tree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.token[tree.path(n)].tolist()): float(tree.prob[n]) for n in range(len(tree))}


SHAPES = [  # flat, top_k, width, depth, worth
    (False, 2, 1, 6, 0.1),
    (False, 1, 1, 4, 0.0),
    (False, 3, 2, 5, 0.02),
    (False, 8, 4, 4, 0.0),
    (False, 4, 3, 1, 0.5),
    (True, 3, 2, 5, 0.0),
    (True, 2, 4, 4, 0.0),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_drafter(gpu, seed, shape):
    rng = np.random.default_rng(seed)
    scene = Scene(rng, *shape)
    drafts, B = scene.drafts, scene.B
    passes = scene.draft(drafts.levels)
    assert [p for p in passes if p["token"]] == scene.model.passes[1:]
    span = drafts.width * drafts.levels
    assert on_host(drafts.forest, "start")[0].tolist() == [min(b, B) * span for b in range(B + 4)]
    request, parent = on_host(drafts.forest, "request", "parent")
    assert not span or ((request < 0) == (parent == -2)).all()
    for tree, told, expected in zip(scene.kept(), scene.told(), scene.trees):
        assert paths_of(tree) == pytest.approx(paths_of(expected), rel=1e-4) and len(tree) == len(expected)
        assert paths_of(told) == paths_of(tree)
    others = np.setdiff1d(np.arange(SLOTS), scene.slot)
    assert all((array[others] == -1).all() for array in on_host(scene.slots, "draft_token", "draft_parent"))


@pytest.mark.parametrize("seed", range(3))
def test_the_next_step_takes_the_likeliest_nodes_of_a_draft(gpu, seed):
    rng = np.random.default_rng(seed)
    scene = Scene(rng, False, 3, 2, 5, 0.0)
    scene.draft(scene.drafts.levels)
    asked = [int(rng.integers(0, L)) for _ in scene.slot]
    scene.send([Part(s, [5], n) for s, n in zip(scene.slot, asked)])
    step = Step(scene.inputs, scene.slots)
    plant(scene.inputs, scene.slots, step)
    token, request, parent = on_host(step.forest, "token", "request", "parent")
    for b, (n, expected) in enumerate(zip(asked, scene.trees)):
        mine = np.flatnonzero(request == b)
        tree = Tree.of(token[mine], np.where(parent[mine] < 0, -1, parent[mine] - mine[0]))
        assert paths_of(tree).keys() == paths_of(grow_tree([5], expected.best(n))).keys()


def test_levels_may_be_left_out(gpu):
    scene = Scene(np.random.default_rng(0), False, 3, 2, 5, 0.0)
    scene.draft(scene.drafts.levels)
    scene.draft(0)
    for tree, lim in zip(scene.kept(), scene.limits):
        assert (tree.parent == -1).all() and len(tree) == (min(3, lim.nodes) if lim.depth else 0)


def test_drafts_beyond_what_the_kernels_hold_are_refused(gpu):
    for settings in ({"top_k": 9}, {"width": 33, "depth": 5, "top_k": 1}, {"width": 16, "depth": 6, "top_k": 8}):
        with pytest.raises(ValueError, match="the GPU takes"):
            Drafts(2, **settings)
