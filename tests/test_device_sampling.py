"""Sampling on the GPU draws the tokens of sampling.Sampler, on the emulator and on a real GPU alike."""

from __future__ import annotations

import contextlib
import itertools
import re

import numpy as np
import pytest

from boleinfer import device, device_forest, device_sampling, kernels
from boleinfer.device_forest import TREE_ROWS
from boleinfer.device_sampling import MAX_EARLY, SamplingTable
from boleinfer.device_step import Slots
from boleinfer.forest import Forest, Tree
from boleinfer.kernels import ToolchainError, cuda_folder
from boleinfer.ops.linear import largest_of
from boleinfer.sampling import BROKEN, BrokenLogits, Sampler, SamplingParams
from tests import emulator

SKIPPED, UNWRITTEN = -1, -77
VALUES = {
    "temperature": [0, 0.3, 1.0, 2.5],
    "top_k": [0, 1, 2, 5, 40, 600],
    "top_p": [0, 1e-9, 0.31, 0.83, 0.97, 1],
    "min_p": [0, 0.05, 0.4, 1],
    "repetition_penalty": [1, 1.3, 0.7],
    "presence_penalty": [0, 1.5, -0.5],
    "frequency_penalty": [0, 0.6, -0.4],
    "logit_bias": [None, {0: -100, 3: 2.5, 4: 0.1}],
    "min_tokens": [0, 4],
    "stop_token_ids": [(), (3, 4)],
    "ignore_eos": [False, True],
}


@pytest.fixture(
    params=[
        pytest.param("emulator", marks=pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def machine(request):
    """Where the kernels run: device.upload and kernels.launch go there."""
    if request.param == "emulator":
        context = emulator.emulated("random", seed=5)
    else:
        try:
            kernels.open_gpu()
        except ToolchainError as error:
            pytest.skip(f"the kernels were NOT run: {error}")
        context = contextlib.nullcontext()
    with context:
        yield request.param


def sampler_of(params, prompt=(1, 2, 2), output=(), ends=(0,), allowed=None, vocab=8, seed=7, choice=0):
    allowed = np.ones(vocab, bool) if allowed is None else allowed
    sampler = Sampler(SamplingParams(**params), seed, choice, prompt, ends, allowed)
    for token in output:
        sampler.history.append(token)
    return sampler


def expected(sampler, logits, path=()):
    """The token, or the code that stands for the error."""
    try:
        return sampler.sample(logits, path)
    except BrokenLogits as error:
        return next(code for code, text in BROKEN.items() if text == str(error))


def drawn(table, samplers, histories, logits, forest, slots, root, rows):
    """Tokens [R] that the table gives the rows of a forest whose requests are in `slots`."""
    for slot, sampler, tokens in zip(slots, samplers, histories):
        table.set(slot, sampler, tokens)
    ints = [device.upload(np.asarray(x, np.int32)) for x in (rows, slots, root)]
    token = device.upload(np.full(len(forest), UNWRITTEN, np.int32))
    use = device.upload(np.ones(len(rows), np.int32))
    table.sample(device.upload(logits), None, ints[0], use, device_forest.upload(forest), ints[1], ints[2], token)
    return device.download(token)


def rows_of(samplers, histories, logits, vocab, allowed=None):
    """One row for each sampler, as plain decoding does."""
    allowed = np.ones(vocab, bool) if allowed is None else allowed
    B = len(samplers)
    forest = Forest.of([Tree.chain([0])] * B, [4] * B)
    table = SamplingTable(B, vocab, allowed)
    return drawn(table, samplers, histories, logits, forest, list(range(B)), [0] * B, list(range(B)))


def some_logits(rng, n, vocab, kind):
    x = (3 * rng.standard_normal((n, vocab))).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "holes":
        x[rng.random(x.shape) < 0.3] = -np.inf
        x[:, 2] = 1.0
    if kind == "flat":
        x[:] = -0.0
        x[:, ::3] = 0.0
    return x


@pytest.mark.parametrize("kind", ["smooth", "ties", "holes", "flat"])
@pytest.mark.parametrize("vocab", [5, 33, 512, 1999, 2000])
def test_the_token_is_the_definitions_for_all_parameters(machine, vocab, kind):
    rng = np.random.default_rng([vocab, len(kind)])
    n = 100 if machine == "emulator" else 400
    allowed = rng.random(vocab) < 0.9
    allowed[2] = True
    samplers, histories = [], []
    for i in range(n):
        params = {name: values[rng.integers(len(values))] for name, values in VALUES.items()}
        prompt, output = rng.integers(0, vocab, 5).tolist(), rng.integers(0, vocab, rng.integers(0, 7)).tolist()
        seed = int(rng.integers(-(2**63), 2**63))
        samplers.append(sampler_of(params, prompt, output, (0, 1), allowed, seed=seed, choice=i % 3))
        histories.append(prompt + output)
    logits = some_logits(rng, n, vocab, kind)
    got = rows_of(samplers, histories, logits, vocab, allowed)
    assert got.tolist() == [expected(s, x) for s, x in zip(samplers, logits)]


def test_every_pair_of_parameters(machine):
    rng = np.random.default_rng(3)
    pairs = [
        {a: x, b: y} for a, b in itertools.combinations(VALUES, 2) for x, y in itertools.product(VALUES[a], VALUES[b])
    ]
    vocab = 700
    samplers = [sampler_of(p, vocab=vocab, output=[3, 5, 3], seed=i) for i, p in enumerate(pairs)]
    logits = some_logits(rng, len(pairs), vocab, "smooth")
    got = rows_of(samplers, [[1, 2, 2, 3, 5, 3]] * len(pairs), logits, vocab)
    assert got.tolist() == [expected(s, x) for s, x in zip(samplers, logits)]


@pytest.mark.parametrize("vocab", [151_936, 248_320, 262_144, 100_003])
def test_large_vocabularies(machine, vocab):
    if machine == "emulator" and vocab > 110_000:
        pytest.skip("runs on a GPU only")
    rng = np.random.default_rng(vocab)
    some = [{}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"top_p": 0.95}, {"top_k": 1000}, {"min_p": 0.05},
            {"temperature": 0}, {"top_p": 0.9, "presence_penalty": 1.5}]  # fmt: skip
    n = len(some) if machine == "emulator" else 4 * len(some)
    samplers = [sampler_of(some[i % len(some)], vocab=vocab, seed=i) for i in range(n)]
    for kind in ("smooth", "ties") if machine == "cuda" else ("smooth",):
        logits = some_logits(rng, n, vocab, kind)
        got = rows_of(samplers, [[1, 2, 2]] * n, logits, vocab)
        assert got.tolist() == [expected(s, x) for s, x in zip(samplers, logits)]


def test_rows_of_trees_count_the_path_below_the_root(machine):
    """Decoding trees whose root lies below known tokens, a piece of a prompt, unused rows and slots in any order."""
    rng, vocab, slots = np.random.default_rng(11), 60, [4, 0, 2, 5]
    some = [
        {"presence_penalty": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"min_tokens": 6},
        {"temperature": 0, "repetition_penalty": 2.0, "min_tokens": 5},
        {"top_k": 9, "frequency_penalty": -0.3},
    ]
    for round_ in range(3):
        trees, root, histories, samplers, rows, paths = [], [], [], [], [], []
        for b, params in enumerate(some):
            known, drafts = int(rng.integers(1, 4)), int(rng.integers(0, 20))
            prompt, output = rng.integers(0, 9, 6).tolist(), rng.integers(0, 9, rng.integers(1, 4)).tolist()
            histories.append(prompt + output)
            samplers.append(sampler_of(params, prompt, output, (0, 1), vocab=vocab, seed=b + 10 * round_))
            parent = [*range(-1, known - 1), *(int(rng.integers(known - 1, known + i)) for i in range(drafts))]
            token = histories[b][-known:] + rng.integers(0, 9, drafts).tolist()
            trees.append(Tree.of(token, parent))
            root.append(known - 1)
        forest = Forest.of(trees, [len(h) - r - 1 for h, r in zip(histories, root)])
        for b, tree in enumerate(trees):
            for i in range(root[b], len(tree)):
                path, node = [], i
                while node != root[b]:
                    path.insert(0, int(tree.token[node]))
                    node = int(tree.parent[node])
                rows.append(int(forest.start[b]) + i)
                paths.append((b, path))
        order = rng.permutation(len(rows))
        rows, paths = [rows[i] for i in order] + [SKIPPED], [paths[i] for i in order]
        logits = some_logits(rng, len(rows), vocab, "smooth")
        logits[-1] = np.nan
        table = SamplingTable(6, vocab, np.ones(vocab, bool))
        got = drawn(table, samplers, histories, logits, forest, slots, root, rows)
        for row, (b, path), x in zip(rows, paths, logits):
            assert got[row] == expected(samplers[b], x, path)
        assert (np.delete(got, rows[:-1]) == UNWRITTEN).all()


@pytest.mark.parametrize("kind", ["smooth", "ties", "holes", "flat", "broken"])
def test_rows_of_which_the_largest_logit_alone_is_kept(machine, kind):
    rng, vocab, n = np.random.default_rng(len(kind)), 333, 12
    allowed = rng.random(vocab) < 0.7
    logits = some_logits(rng, n, vocab, kind)
    if kind == "broken":
        logits[:4, 5], logits[4:7, 6], logits[7:10] = np.nan, np.inf, -np.inf
    samplers = [sampler_of({"temperature": 0}, allowed=allowed, vocab=vocab, ends=()) for _ in range(n)]
    table = SamplingTable(n, vocab, allowed)
    use = np.where(np.arange(n) % 4 > 0, 2, 1).astype(np.int32)
    keys = np.asarray([largest_of(x, allowed) if u == 2 else 0 for x, u in zip(logits, use)], np.uint64)
    given, unread = device.upload(keys), np.where((use == 2)[:, None], np.float32(np.nan), logits)
    forest, (rows, root) = Forest.of([Tree.chain([0])] * n, [4] * n), (np.arange(n), np.zeros(n, int))
    for slot, sampler in enumerate(samplers):
        table.set(slot, sampler, [1, 2, 2])
    ints = [device.upload(np.asarray(x, np.int32)) for x in (rows, use, rows, root)]
    token = device.empty(n, np.int32)
    table.sample(device.upload(unread), given, *ints[:2], device_forest.upload(forest), *ints[2:], token)
    assert device.download(token).tolist() == [expected(s, x) for s, x in zip(samplers, logits)]
    assert not device.download(given).any()


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_f36_broken_rows_are_told_apart_and_concern_no_other(machine, params):
    sound = np.linspace(-1, 1, 8).astype(np.float32)
    logits = np.tile(sound, (6, 1))
    logits[0, 3], logits[1, 3], logits[2], logits[3] = np.nan, np.inf, -np.inf, np.nan
    logits[4, 2:4] = np.inf, np.nan
    samplers = [sampler_of(params) for _ in range(6)]
    got = rows_of(samplers, [[1, 2, 2]] * 6, logits, 8)
    assert got.tolist() == [-1, -2, -3, -1, -1, samplers[5].sample(sound)]


def test_f36_limits(machine):
    """Rounded weights that tie, extreme temperatures and logits, and what min_tokens leaves nothing of."""
    huge, equal = np.asarray([-3e38, 3e38, 3.1e38, 0], np.float32), np.zeros(4, np.float32)
    ladder = np.asarray([0.5, 2, 1, 1.9], np.float32)
    cases = [({"temperature": t}, huge) for t in (0, 1e-45, 1e-5, 1e-3, 1, 1e3, 1e308)]
    cases += [({"temperature": 1e308, "top_p": 0.5}, x) for x in (huge, ladder)]
    edges = ({"top_k": 2}, {"top_k": 10**9}, {"top_k": -1}, {"top_p": 0.5}, {"top_p": 0}, {"min_p": 1})
    cases += [(p, x) for p in edges for x in (equal, ladder)]
    cases += [({"repetition_penalty": 1e-300, "presence_penalty": 1e308}, huge), ({"repetition_penalty": 1e300}, huge)]
    cases += [
        ({"min_tokens": 10**12, "max_tokens": None, "stop_token_ids": (1, 2, 3)}, ladder),
        ({"logit_bias": {1: 1e308}}, ladder),
    ]
    samplers = [sampler_of(p, vocab=4, seed=-i) for i, (p, _) in enumerate(cases)]
    got = rows_of(samplers, [[1, 2, 2]] * len(cases), np.stack([x for _, x in cases]), 4)
    assert got.tolist() == [expected(s, x) for s, (_, x) in zip(samplers, cases)]


def test_too_many_ids_for_min_tokens_are_refused_with_their_number(machine):
    table = SamplingTable(1, 100, np.ones(100, bool))
    stops = {"stop_token_ids": tuple(range(MAX_EARLY + 1))}
    table.set(0, sampler_of(stops, vocab=100, ends=()), [1])
    with pytest.raises(ValueError, match=r"min_tokens=2 has to forbid 65 end and stop ids; at most 64"):
        table.set(0, sampler_of(stops | {"min_tokens": 2}, vocab=100, ends=()), [1])
    assert table.nbytes < 12 * 100 + 600


def test_every_code_of_the_kernel_has_a_message_and_drafts_are_shorter_than_its_longest_path():
    text, row = ((cuda_folder() / name).read_text() for name in ("sample.cu", "sample_row.cuh"))
    codes = re.findall(r"= (-\d+)", next(line for line in text.splitlines() if "BROKEN_NAN =" in line))
    assert {int(code) for code in codes} == set(BROKEN)
    assert int(re.search(r"MAX_PATH = (\d+)", row)[1]) >= TREE_ROWS
    assert str(re.search(r"MAX_PATH = (\d+)", row)[1]) in BROKEN[-4]
    with pytest.raises(ValueError, match="drafts of 128 nodes; the GPU takes 1 to 127"):
        Slots(1, 1, TREE_ROWS)


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_the_token_is_the_same_however_many_blocks_share_a_row(machine, monkeypatch, blocks):
    monkeypatch.setattr(device_sampling, "_BLOCKS", blocks)
    vocab, rng = 30_001, np.random.default_rng(8)
    some = [{"temperature": 0}, {}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9}, {"temperature": 0, "min_tokens": 3}]
    samplers = [sampler_of(p, vocab=vocab, seed=i) for i, p in enumerate(some)]
    logits = some_logits(rng, len(some), vocab, "ties")
    got = rows_of(samplers, [[1, 2, 2]] * len(some), logits, vocab)
    assert got.tolist() == [expected(s, x) for s, x in zip(samplers, logits)]
