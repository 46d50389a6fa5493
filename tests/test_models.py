"""The three families against Hugging Face's float32 models on tiny random checkpoints, however they are fed."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.levels import Levels
from boleinfer.draft.mtp import MTPDrafter
from boleinfer.forest import Forest, Tree
from boleinfer.sampling import SamplingParams
from tests.running import Run, load, request_of
from tests.tiny import FAMILIES

CLOSE = 1e-4


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 480, n).tolist()


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hf(oracle, family, ratio):
    hf = oracle(family, ratio)
    ids = ids_of(150, ratio)
    logits, hidden = Run(load(hf.folder)).feed(ids)
    np.testing.assert_allclose(logits, hf.logits(ids), atol=CLOSE, rtol=0)
    np.testing.assert_allclose(hidden, hf.hidden(ids), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("pattern", ["LLLLLF", "FLLFL", "F"])
def test_layers_in_any_order(oracle, pattern):
    hf = oracle("qwen3_5", 3, pattern=pattern)
    ids = ids_of(70, 2)
    logits, _ = Run(load(hf.folder)).feed(ids, [33, 1])
    np.testing.assert_allclose(logits, hf.logits(ids), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_at_a_time(oracle, family):
    hf = oracle(family)
    ids = ids_of(80, 1)
    logits, _ = Run(load(hf.folder)).feed(ids, [1])
    np.testing.assert_allclose(logits, hf.logits(ids), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_f03_prompt_cut_anywhere(oracle, family):
    hf = oracle(family)
    model = load(hf.folder)
    for n in (63, 64, 65):
        ids = ids_of(n, n)
        want = hf.logits(ids)
        for cut in range(1, n, 7 if n != 65 else 1):
            run = Run(model)
            got, _ = run.feed(ids, [cut, n])
            np.testing.assert_allclose(got, want, atol=CLOSE, rtol=0, err_msg=f"{n} tokens cut at {cut}")
    for n, piece in ((127, 64), (128, 63), (129, 65), (200, 3), (200, 2)):
        ids = ids_of(n, n)
        whole, parts = Run(model), Run(model)
        whole.feed(ids)
        got, _ = parts.feed(ids, [piece])
        np.testing.assert_allclose(got, hf.logits(ids), atol=CLOSE, rtol=0, err_msg=f"{n} tokens by {piece}")
        for a, b in zip(whole.memory(), parts.memory(), strict=True):
            np.testing.assert_allclose(a, b, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_f06_prompts_shorter_than_the_conv_window(oracle, family):
    hf = oracle(family)
    model = load(hf.folder)
    for n in range(1, 6):
        for piece in (1, 2, n):
            ids = ids_of(n, n)
            run = Run(model)
            logits, _ = run.feed(ids, [piece])
            for _ in range(8):  # greedy
                want = hf.logits(ids)
                np.testing.assert_allclose(logits[-1], want[-1], atol=CLOSE, rtol=0)
                ids.append(int(logits[-1].argmax()))
                logits, _ = run.feed(ids[-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_of_a_tree_equals_hf_on_its_path(oracle, family):
    hf = oracle(family)
    model = load(hf.folder)
    rng = np.random.default_rng(5)
    prompt = ids_of(33, 6)
    for path in ([0, 2, 5], [0], [0, 1, 4, 8]):
        run = Run(model)
        run.feed(prompt)
        parents = [-1, 0, 0, 1, 1, 2, 5, 3, 4, 0, 2, 7]
        tree = Tree.of(rng.integers(0, 480, len(parents)).tolist(), parents)
        logits, _ = run.step(tree, path)
        for node in range(len(tree)):
            want = hf.logits(prompt + tree.token[tree.path(node)].tolist())[-1]
            np.testing.assert_allclose(logits[node], want, atol=CLOSE, rtol=0, err_msg=f"node {node}")
        taken = prompt + tree.token[path].tolist()
        more = ids_of(5, 7)
        got, _ = run.feed(more)
        np.testing.assert_allclose(got, hf.logits(taken + more)[-5:], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_equals_hf(oracle, family):
    hf = oracle(family)
    model = load(hf.folder)
    ids = ids_of(40, 9)
    run = Run(model)
    _, hidden = run.feed(ids)
    batch = run.state.batch(Forest.of([Tree.chain(ids[1:])], [0]), [run.place])
    y = model.mtp(np.asarray(ids[1:], np.int32), hidden[:-1], batch.forest.position, batch, run.state)
    np.testing.assert_allclose(model.logits(y), hf.mtp_logits(ids), atol=CLOSE, rtol=0)


def chain_of_mtp(model, run, ids, hidden, drafts):
    """The probabilities the MTP layer gives each of `drafts` in turn, computed as one long chain after ids."""
    tokens, states = ids[1:], hidden[:-1]
    out = []
    for draft in drafts:
        batch = run.state.batch(Forest.of([Tree.chain(tokens)], [0]), [run.place])
        y = model.mtp(np.asarray(tokens, np.int32), states, batch.forest.position, batch, run.state)
        logits = model.logits(y[-1:])[0].astype(np.float64)
        out.append(np.exp(logits[draft] - np.logaddexp.reduce(logits)))
        tokens, states = [*tokens, draft], np.concatenate([states, y[-1:]])
    return out


@pytest.mark.parametrize("pieces", [[41], [16], [1], [40, 1]])
def test_f13_f14_mtp_tree_equals_chains(oracle, pieces):
    """A path of the drafted tree is as likely as when it is run as a chain, however the prompt was cut."""
    hf = oracle("qwen3_5")
    model = load(hf.folder)
    ids = ids_of(42, 11)  # 41 of the prompt are committed; the last one was just sampled
    run = Run(model)
    request = request_of(ids, SamplingParams())
    request.place = run.place
    drafter = MTPDrafter(model, run.state, Levels(top_k=3, width=2, depth=4))
    at, left, hidden = 0, list(pieces), []
    while at < 41:
        n = min(left.pop(0) if len(left) > 1 else left[0], 41 - at)
        hidden.append(run.feed(ids[at : at + n])[1])
        drafter.observe([Committed(request, at, hidden[-1])])
        at += n
    request.committed = 41
    tree = drafter.propose([request], [Limits(nodes=40, depth=4)])[0]
    again = drafter.propose([request], [Limits(nodes=40, depth=4)])[0]
    np.testing.assert_array_equal(tree.token, again.token)  # drafting leaves nothing behind
    assert tree.depth.max() == 3 and len(tree) == 3 + 3 * 2 * 3
    for node in range(len(tree)):
        path = tree.token[tree.path(node)].tolist()
        want = np.prod(chain_of_mtp(model, run, ids, np.concatenate(hidden + [hidden[-1][:1]]), path))
        np.testing.assert_allclose(tree.prob[node], want, rtol=1e-3)
