"""A second model drafts: what it remembers is always the text, so a long-serving drafter drafts as a fresh one does."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer import cli
from boleinfer.config import ConfigError
from boleinfer.decoder import Decoder
from boleinfer.draft import model as model_module
from boleinfer.draft.base import Limits
from boleinfer.draft.levels import Levels
from boleinfer.draft.model import ModelDrafter, check_same_tokens
from boleinfer.llm import BUNDLED, LLM
from boleinfer.sampling import SamplingParams
from boleinfer.state import State
from boleinfer.tokenizer import Tokenizer
from tests.checkpoints import plausible_checkpoint
from tests.running import VOCAB, Run, engine_of, finish, load, request_of

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LIMITS = Limits(nodes=12, depth=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(plausible_checkpoint(tmp_path_factory.mktemp("target"), "qwen3_5"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Another family's model with the same vocabulary."""
    return load(plausible_checkpoint(tmp_path_factory.mktemp("small"), "qwen3_next", seed=1, hidden_size=32))


def drafter_of(model: Decoder, slots: int = 4, vocab: int = VOCAB, levels: Levels | None = None) -> ModelDrafter:
    """A drafter with a poisoned state for requests of the engines of tests.running."""
    state = State(model.config, slots, slots * 27, 16, ring=7, poison=True)
    return ModelDrafter(model, state, vocab, 1 + LIMITS.nodes, levels)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 470, n).tolist()


def test_a_model_that_drafts_for_itself_is_always_right(target):
    want = finish(engine_of(target), [request_of(prompt_of(n, n), GREEDY) for n in (1, 9, 70)])
    requests = [request_of(prompt_of(n, n), GREEDY) for n in (1, 9, 70)]
    assert finish(engine_of(target, drafter_of(target, levels=Levels(top_k=1)), limits=LIMITS), requests) == want
    for request in requests:
        assert request.stats.steps <= -(-39 // (1 + LIMITS.depth)) + 1, request.stats.histogram


def test_its_trees_are_what_its_logits_say(small):
    drafter, ids = drafter_of(small, levels=Levels(2, 2, 3)), prompt_of(21)
    tree = drafter.propose([request_of(ids, GREEDY)], [LIMITS])[0]
    for n in range(len(tree)):
        path, likely = tree.token[tree.path(n)].tolist(), 1.0
        logits = Run(small).feed([*ids, *path])[0][len(ids) - 1 :].astype(np.float64)
        for token, row in zip(path, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)):
            likely *= row[token]
        assert tree.prob[n] == pytest.approx(likely, rel=1e-3)
    assert tree.depth.max() == 2 and len(tree) > 6


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_serving_long_changes_nothing(small, seed, steps, lengths):
    """Whatever was accepted, however many tokens came between two proposals: as if the text were all new."""
    rng, drafter = np.random.default_rng(seed), drafter_of(small)
    requests = [request_of(prompt_of(n, n), GREEDY) for n in lengths]
    for step in range(steps):
        asked = [r for r in requests if step == 0 or rng.random() < 0.8]
        if not asked:
            continue
        trees = drafter.propose(asked, [LIMITS] * len(asked))
        for request, tree in zip(asked, trees):
            fresh = drafter_of(small).propose([request], [LIMITS])[0]
            np.testing.assert_array_equal(tree.token, fresh.token)
            np.testing.assert_array_equal(tree.parent, fresh.parent)
            np.testing.assert_allclose(tree.prob, fresh.prob, rtol=1e-3)
        for request, tree in zip(asked, trees):
            path = tree.token[tree.path(int(rng.integers(0, len(tree))))].tolist()
            request.tokens += path[: int(rng.integers(0, len(path) + 1))] + prompt_of(int(rng.integers(1, 3)), step)
        if rng.random() < 0.3:  # one ends, another begins in its place
            ended = requests.pop(int(rng.integers(0, len(requests))))
            drafter.forget(ended)
            requests.append(request_of(prompt_of(5, seed + step), GREEDY))
    for request in requests:
        drafter.forget(request)
        drafter.forget(request)
    assert drafter._state.slots.free == drafter._state.slots.size and not drafter._seats


def test_a_long_prompt_is_read_in_pieces(small, monkeypatch):
    whole = drafter_of(small).propose([request_of(prompt_of(90), GREEDY)], [LIMITS])[0]
    monkeypatch.setattr(model_module, "PIECE", 16)
    pieces = drafter_of(small).propose([request_of(prompt_of(90), GREEDY)], [LIMITS])[0]
    np.testing.assert_array_equal(whole.token, pieces.token)
    np.testing.assert_allclose(whole.prob, pieces.prob, rtol=1e-3)


def test_a_pass_that_failed_is_made_up_for(small, monkeypatch):
    request, drafter = request_of(prompt_of(9), GREEDY), drafter_of(small)
    drafter.propose([request], [LIMITS])
    request.tokens += prompt_of(3, 5)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(small), "forward", lambda *args: (_ for _ in ()).throw(MemoryError))
        drafter.propose([request], [LIMITS])
    fresh = drafter_of(small).propose([request], [LIMITS])[0]
    np.testing.assert_array_equal(drafter.propose([request], [LIMITS])[0].token, fresh.token)


def test_only_the_targets_ids_are_proposed_and_ids_without_a_row_are_read(small):
    request = request_of([3, 511, 511, 4], GREEDY)
    drafter = drafter_of(small, vocab=50, levels=Levels(4, 2, 4))
    assert drafter.propose([request], [LIMITS])[0].token.max() < 50
    for tokens in ([600, 3], [3, 4, 600]):
        request = request_of(tokens, GREEDY)
        for _ in range(2):
            assert len(drafter_of(small).propose([request], [LIMITS])[0])
            request.tokens += [5, 6]


def test_no_room_means_no_nodes(small):
    drafter, request = drafter_of(small), request_of(prompt_of(5), GREEDY)
    for limits in (Limits(nodes=0, depth=5), Limits(nodes=5, depth=0)):
        assert not len(drafter.propose([request], [limits])[0])
    assert len(drafter.propose([request], [LIMITS])[0])


@pytest.mark.parametrize("draft", ["model", "graft", "auto"])
def test_the_library_takes_a_second_model(draft):
    plain, fast = LLM(device="cpu", draft="none"), LLM(device="cpu", draft=draft, draft_model=BUNDLED, draft_earlier=99)
    fast.engine.executor.price = lambda *_: None  # drafts are verified whether they pay or not
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=30, ignore_eos=True)
    for _ in range(2):
        (out,) = fast.generate("def area(self):", params)
        assert out.token_ids == plain.generate("def area(self):", params)[0].token_ids
    assert out.stats.accepted > 0


def test_a_second_model_that_nobody_asks_is_a_mistake():
    with pytest.raises(ConfigError, match="drafts on the CPU only, with draft='auto', 'graft' or 'model'"):
        LLM(device="cpu", draft="mtp", draft_model=BUNDLED)
    with pytest.raises(ConfigError, match="needs a second, smaller model"):
        LLM(device="cpu", draft="model")


def test_the_command_line_takes_a_second_model(capsys):
    arguments = ["generate", "--device", "cpu", "-n", "9", "--temp", "0", "--draft", "model", "--draft-top-k", "1"]
    assert cli.main([*arguments, "-md", str(BUNDLED), "--draft-depth", "3", "def area(self):"]) == 0
    assert "accepted" in capsys.readouterr().err
    assert cli.main([*arguments, "x"]) == 2
    assert "--draft-model" in capsys.readouterr().err


def test_another_tokenizer_is_refused(tmp_path):
    ours = Tokenizer.from_folder(BUNDLED)
    check_same_tokens(ours, Tokenizer.from_folder(BUNDLED))
    spec = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    n = len(ours.tokens())
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": n, "content": "<|more|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"id {n} is None in the model and '<\|more\|>' in the draft model"):
        check_same_tokens(ours, Tokenizer.from_folder(tmp_path))
