"""A step's bookkeeping on the GPU, emulated and real, against the definitions on the host."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import device
from boleinfer.device_draft import Drafts, candidates, grow, keep
from boleinfer.device_sampling import SamplingTable
from boleinfer.device_step import Chain, Part, Slots, Step, StepInputs, accept, follow, plant
from boleinfer.forest import Forest, Tree
from boleinfer.ops.embedding import embedding
from boleinfer.sampling import BrokenLogits, Sampler, SamplingParams
from boleinfer.sampling import accept as host_accept
from boleinfer.scheduler import grow as grow_tree

SLOTS, L, M, VOCAB = 9, 40, 5, 3
SEEDS = range(8)


def random_tree(rng: np.random.Generator, n: int, vocab: int = 3) -> Tree:
    """n nodes, a chain one time in three."""
    chain = rng.random() < 1 / 3
    parent = [i - 1 if chain else int(rng.integers(-1, i)) for i in range(n)]
    return Tree.of(rng.integers(0, vocab, n).tolist(), parent)


def random_slots(rng: np.random.Generator) -> tuple[Slots, dict[str, np.ndarray], list[Tree]]:
    """Slots in the middle of their work, a copy of their integers, and the draft of each."""
    slots = Slots(SLOTS, M, L)
    state = {
        "last_token": rng.integers(0, 3, SLOTS, dtype=np.int32),
        "length": rng.integers(0, 50, SLOTS, dtype=np.int32),
        "pages": rng.integers(0, 99, (SLOTS, M), dtype=np.int32),
        "draft_count": rng.integers(0, L + 1, SLOTS, dtype=np.int32),
        "draft_token": np.full((SLOTS, L), -1, np.int32),
        "draft_parent": np.full((SLOTS, L), -1, np.int32),
    }
    drafts = [random_tree(rng, n) for n in state["draft_count"].tolist()]
    for s, tree in enumerate(drafts):
        state["draft_token"][s, : len(tree)], state["draft_parent"][s, : len(tree)] = tree.token, tree.parent
    for name, array in state.items():
        setattr(slots, name, device.upload(array))
    return slots, state, drafts


def random_parts(rng: np.random.Generator, state: dict, drafts: list[Tree]) -> tuple[list[Part], list[Tree], list[int]]:
    """Parts of a step in all their kinds, the tree that each stands for, and the rows that each takes."""
    parts, trees, rows = [], [], []
    for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS)].tolist():
        kind = rng.choice(["piece", "prompt", "plain", "own", "given", "chain"], p=[0.1, 0.1, 0.1, 0.4, 0.15, 0.15])
        known, tokens = None, [int(state["last_token"][slot])]
        if kind in ("piece", "prompt") or rng.random() < 0.3:
            tokens = known = rng.integers(0, 3, rng.choice([1, 2, 31, 300] if kind != "own" else [1, 5])).tolist()
        draft: Tree | int = 0
        tree = Tree.chain([])
        if kind == "own":
            draft = int(rng.integers(0, L + 1))
            tree = drafts[slot].keep(np.arange(min(draft, len(drafts[slot]))))
        elif kind == "chain" or (kind == "given" and len(tokens) < 99):
            n = int(rng.integers(1, L + 1))
            draft = tree = Tree.chain(rng.integers(0, 3, n)) if kind == "chain" else random_tree(rng, n)
        complete = kind != "piece"
        next_token, largest = -1 if complete else int(rng.integers(0, 3)), bool(rng.random() < 0.5)
        parts.append(Part(slot, known, draft, complete, next_token, largest))
        trees.append(grow_tree(tokens, tree))
        rows.append(len(tokens) + (draft if isinstance(draft, int) else len(draft)))
    return parts, trees, rows


class Scene:
    """A random step, planted, with its host forest: `places` are the flat rows on the GPU of the host's rows."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.slots, self.state, drafts = random_slots(rng)
        self.parts, self.trees, rows = random_parts(rng, self.state, drafts)
        B, R = len(self.parts), sum(rows)
        envelope = R + int(rng.choice([0, 1, 70, 3000]))
        self.inputs = StepInputs(envelope, B + int(rng.integers(0, 3)), int(rng.choice([R, envelope])))
        self.step = Step(self.inputs, self.slots)
        self.inputs.fill(self.parts)
        self.inputs.send()
        plant(self.inputs, self.slots, self.step)
        embedding(device.upload(np.zeros(1, np.int32)), device.upload(np.ones((1, 8), np.float32)))  # begins a pass
        self.start = np.cumsum([0, *rows])
        self.forest = Forest.of(self.trees, self.state["length"][[p.slot for p in self.parts]])
        self.places = np.concatenate([s + np.arange(len(t)) for s, t in zip(self.start, self.trees)])

    def root(self, b: int) -> int:
        known = self.parts[b].known
        return 0 if known is None else len(known) - 1

    def drafted(self, b: int) -> range:
        """Its rows from the root on."""
        return range(int(self.start[b]) + self.root(b), int(self.start[b + 1]))


def on_host(arrays: object, *names: str) -> list[np.ndarray]:
    return [device.download(getattr(arrays, name)) for name in names]


def assert_unused(forest: object, places: np.ndarray) -> None:
    """All rows but these are marked as holding nothing."""
    token, parent, request = on_host(forest, "token", "parent", "request")
    rest = np.setdiff1d(np.arange(len(request)), places)
    assert (request[rest] == -1).all() and (parent[rest] == -2).all() and (token[rest] == -1).all()


def ancestor_sets(bits: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]


@pytest.mark.parametrize("seed", SEEDS)
def test_planted_rows_are_those_of_the_forest(gpu, seed):
    scene = Scene(np.random.default_rng(seed))
    forest, on, B = scene.forest, scene.step.forest, len(scene.parts)
    for name in ("token", "depth", "request", "position"):
        (array,) = on_host(on, name)
        assert array[scene.places].tolist() == getattr(forest, name).tolist(), name
    (parent, kv_slot, bits, chain, start, committed) = on_host(
        on, "parent", "kv_slot", "ancestors", "chain", "start", "committed"
    )
    shift = np.append(scene.places, -1)  # host row -> row on the GPU, -1 stays
    assert parent[scene.places].tolist() == shift[forest.parent].tolist()
    assert kv_slot[scene.places].tolist() == forest.kv_slot.tolist()
    assert start.tolist() == [*scene.start, *[scene.start[-1]] * (scene.inputs.requests - B)]
    assert committed[:B].tolist() == forest.committed.tolist()
    assert_unused(on, scene.places)
    sampled = {r: 2 if p.largest else 1 for b, p in enumerate(scene.parts) if p.complete for r in scene.drafted(b)}
    wanted, use = on_host(scene.inputs.on, "wanted", "use")
    assert dict(zip(wanted[wanted >= 0].tolist(), use[wanted >= 0].tolist())) == sampled and not use[wanted < 0].any()
    in_place = len(wanted) == scene.inputs.rows
    assert np.flatnonzero(wanted >= 0).tolist() == (sorted(sampled) if in_place else list(range(len(sampled))))
    for b, tree in enumerate(scene.trees):
        assert chain[b] == tree.is_chain
        if not tree.is_chain:
            found = ancestor_sets(bits[scene.start[b] : scene.start[b] + len(tree)])
            assert found == [np.flatnonzero(row).tolist() for row in tree.ancestors]
    table, root, slot = on_host(scene.step, "page_table", "root", "slot")
    assert slot.tolist() == [p.slot for p in scene.parts] + [-1] * (len(slot) - B)
    assert np.array_equal(table[:B], scene.state["pages"][slot[:B]]) and (table[B:] == -1).all()
    assert root.tolist() == [scene.root(b) for b in range(B)] + [-1] * (len(slot) - B)


class Scripted:
    """A sampler that says what the rows hold; negative ones are broken."""

    def sample(self, row: int, path: object = ()) -> int:
        if row < 0:
            raise BrokenLogits("scripted")
        return row


def histories(rng: np.random.Generator) -> tuple[SamplingTable, list[Sampler]]:
    """The slots' samplers, some with penalties, in the middle of their texts."""
    table, samplers = SamplingTable(SLOTS, VOCAB, np.ones(VOCAB, bool)), []
    for slot in range(SLOTS):
        params = SamplingParams(presence_penalty=0.5) if rng.random() < 0.5 else SamplingParams()
        prompt, output = (rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 3, 2))
        samplers.append(Sampler(params, slot, 0, prompt, (), np.ones(VOCAB, bool)))
        for token in output:
            samplers[-1].history.append(token)
        table.set(slot, samplers[-1], prompt + output)
    return table, samplers


def assert_histories(table: SamplingTable, samplers: list[Sampler]) -> None:
    known, generated, seen = on_host(table, "known", "generated", "seen")
    for slot, sampler in enumerate(samplers):
        assert (known[slot], generated[slot]) == (sampler.history.length, sampler.history.generated)
        if sampler.params.penalises:
            counts = dict(zip(*(array.tolist() for array in sampler.history.after([]))))
            assert seen[slot].tolist() == [counts.get(token, -1) for token in range(VOCAB)]


def walk(scene: Scene, sampled: np.ndarray, b: int) -> tuple[list[int], list[int], int]:
    """The definition's path (flat rows on the GPU), tokens and error of request b."""
    root, start, part = scene.root(b), int(scene.start[b]), scene.parts[b]
    if not part.complete:
        return [start + i for i in range(root + 1)], [], 0
    try:
        nodes, tokens = host_accept(scene.trees[b], lambda n: int(sampled[start + n]), Scripted(), root)
    except BrokenLogits:
        return [], [], int(sampled[start + root])
    return [start + i for i in range(root)] + (start + nodes).tolist(), tokens, 0


@pytest.mark.parametrize("seed", SEEDS)
def test_accepted_paths_and_the_chain_behind_them(gpu, seed):
    rng = np.random.default_rng(100 + seed)
    scene = Scene(rng)
    slots, step, inputs, B = scene.slots, scene.step, scene.inputs, len(scene.parts)
    sampled = np.where(
        rng.random(inputs.rows) < 0.1, -1 - rng.integers(0, 3, inputs.rows), rng.integers(0, 3, inputs.rows)
    )
    for b, tree in enumerate(scene.trees):  # mostly right, so that paths get long
        for n, p in enumerate(tree.parent.tolist()):
            if p >= 0 and rng.random() < 0.6:
                sampled[scene.start[b] + p] = tree.token[n]
    table, samplers = histories(rng)
    accept(device.upload(sampled.astype(np.int32)), inputs, slots, table, step)
    chain = Chain(step)
    follow(inputs, slots, step, chain)
    row, count = on_host(step.paths, "row", "count")
    last_token, length, draft_count = on_host(slots, "last_token", "length", "draft_count")
    last_row, hidden_row = on_host(chain, "last_row", "hidden_row")
    chains, places = [], []
    for b, (part, result) in enumerate(zip(scene.parts, step.results.fetch(B, drafts=False)(), strict=True)):
        path, tokens, error = walk(scene, sampled, b)
        start, tree = int(scene.start[b]), scene.trees[b]
        assert row[start : start + count[b]].tolist() == path and count[b] == len(path)
        assert (result.tokens, result.error) == (tokens, error)
        assert result.drafted == len(tree) - scene.root(b) - 1
        for token in tokens:
            samplers[part.slot].history.append(token)
        assert length[part.slot] == scene.state["length"][part.slot] + len(path) and draft_count[part.slot] == 0
        assert last_token[part.slot] == (tokens[-1] if tokens else scene.state["last_token"][part.slot])
        assert last_row[b] == (start + len(path) - 1 if path else -1)
        text = [int(tree.token[r - start]) for r in path] + (tokens[-1:] if part.complete else [part.next_token])
        chains.append(Tree.chain(text[1:]))
        places += [start + i for i in range(len(path))]
        assert hidden_row[start : start + len(path)].tolist() == path
    assert_histories(table, samplers)
    others = np.setdiff1d(np.arange(SLOTS), [p.slot for p in scene.parts])
    assert np.array_equal(length[others], scene.state["length"][others])
    assert (count[B:] == 0).all() and (last_row[B:] == -1).all()
    assert (np.delete(hidden_row, places) == -1).all()
    expected = Forest.of(chains, scene.forest.committed)
    for name in ("token", "depth", "request", "position", "kv_slot"):
        assert on_host(chain.forest, name)[0][places].tolist() == getattr(expected, name).tolist(), name
    (parent,) = on_host(chain.forest, "parent")
    assert parent[places].tolist() == np.append(places, -1)[expected.parent].tolist()
    assert_unused(chain.forest, np.asarray(places))
    assert (on_host(chain.forest, "chain")[0] == 1).all()


def test_an_empty_step_changes_nothing(gpu):
    slots, state, _ = random_slots(np.random.default_rng(0))
    inputs = StepInputs(7, 3, 7)
    step = Step(inputs, slots)
    drafts = Drafts(3, top_k=2, width=2, depth=3)
    inputs.fill(())
    inputs.send()
    plant(inputs, slots, step)
    table, samplers = histories(np.random.default_rng(0))
    accept(device.upload(np.full(7, -1, np.int32)), inputs, slots, table, step)
    assert_histories(table, samplers)
    chain = Chain(step)
    follow(inputs, slots, step, chain)
    for level in range(drafts.levels + 1):
        logits = device.upload(np.full((3 * (drafts.width if level else 1), 9), np.nan, "f"))
        rows = drafts.row if level else chain.last_row
        grow(drafts, level, candidates(logits, 2, rows), inputs, slots)
    keep(drafts, inputs, slots, step.results)
    assert_unused(step.forest, np.zeros(0, int))
    assert_unused(drafts.forest, np.zeros(0, int))
    assert [(*e[:3], len(e.draft)) for e in step.results.fetch(3, drafts=True)()] == [([], 0, 0, 0)] * 3
    for name, before in state.items():
        assert np.array_equal(on_host(slots, name)[0], before), name


def test_a_request_moves_into_a_slot(gpu):
    slots, state, _ = random_slots(np.random.default_rng(1))
    slots.admit(4, np.asarray([8, 3]), committed=6)
    pages, length, draft_count = on_host(slots, "pages", "length", "draft_count")
    state["pages"][4] = [8, 3, -1, -1, -1]
    state["length"][4], state["draft_count"][4] = 6, 0
    assert np.array_equal(pages, state["pages"])
    assert np.array_equal(length, state["length"]) and np.array_equal(draft_count, state["draft_count"])


def test_steps_that_do_not_fit_are_refused(gpu):
    inputs = StepInputs(130, 2, 129)
    with pytest.raises(ValueError, match="a step of 131 rows and 1 requests; its buffer holds 130 rows of 2 requests"):
        inputs.fill([Part(0, [1] * 131)])
    with pytest.raises(ValueError, match="a tree of 129 rows that is no chain; the GPU takes 128"):
        inputs.fill([Part(0, None, Tree.of([0] * 128, [-1] * 128))])
    with pytest.raises(ValueError, match="a draft needs all of them to be known"):
        inputs.fill([Part(0, [1], 3, complete=False)])
    with pytest.raises(ValueError, match="a step that samples after 130 rows; its buffer holds 129"):
        inputs.fill([Part(0, None, Tree.chain([0] * 129))])
    inputs.fill([Part(0, [1, 2], Tree.chain([0] * 128))])
