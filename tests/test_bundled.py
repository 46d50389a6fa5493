"""The model that ships: Hugging Face reads the same files and computes the same numbers, and it writes Python."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import numpy as np
import pytest

from boleinfer import LLM, SamplingParams
from boleinfer.draft import graft
from boleinfer.draft.levels import Levels
from boleinfer.forest import Forest, Tree
from boleinfer.llm import BUNDLED
from tests.running import Run

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(poison=True)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [p["text"] for p in json.loads((BUNDLED / "heldout_prompts.json").read_text(encoding="utf-8"))]


def test_logits_equal_hf_on_the_shipped_files(llm, prompts):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for text in prompts[:3]:
        ids = llm.tokenizer.encode(text)
        with torch.no_grad():
            want = hf(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(llm.logits(ids), want, atol=1e-4)


def test_shipped_sizes():
    shards = sorted(BUNDLED.glob("*.safetensors"))
    assert sum(s.stat().st_size for s in shards) <= 32e6 and len(shards) > 1
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["vocab_size"] == 8192
    assert config["linear_num_value_heads"] == 2 * config["linear_num_key_heads"]


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def plain(request, prompts):
    """Parameters, and the ids of plain decoding of one prompt after another."""
    llm = LLM(draft="none")
    return request.param, [llm.generate(text, request.param)[0].token_ids for text in prompts[:6]]


@pytest.mark.parametrize("draft", ["ngram", "mtp", "auto"])
def test_speculation_gives_the_same_ids_and_fewer_steps(prompts, plain, draft, monkeypatch):
    (params, want), fast = plain, LLM(draft=draft)
    fast.engine.executor.price = lambda *_: None  # drafts are made and verified whether they pay or not
    for judge, name in ((graft._Record, "pays"), (Levels, "_pays")):
        monkeypatch.setattr(judge, name, lambda *_: True)
    assert [fast.generate(text, params)[0].token_ids for text in prompts[:4]] == want[:4]
    every = fast.generate(prompts[:6], params)
    assert [o.token_ids for o in every] == want
    steps = sum(o.stats.steps for o in every)
    assert sum(o.stats.accepted for o in every) > (0.2 if draft == "ngram" else 0.8) * steps


def test_f13_the_mtp_layer_accepts_more_with_the_right_hidden_rows(llm, prompts):
    """Fed the state after the final norm it agrees with the trunk far more often than with another row's."""
    model, ids = llm.model, llm.tokenizer.encode("".join(prompts[:2]))[:250]
    run = Run(model)
    logits, hidden = run.feed(ids)

    def agreement(rows: np.ndarray) -> float:
        batch = run.state.batch(Forest.of([Tree.chain(ids[1:])], [0]), [run.place])
        y = model.mtp(np.asarray(ids[1:], np.int32), rows, batch.forest.position, batch, run.state)
        return float((model.logits(y).argmax(1) == logits[1:].argmax(1)).mean())

    good = agreement(hidden[:-1])
    assert good > 0.5  # at the head of files; 0.74 to 0.77 on whole packages (the model card)
    assert good > agreement(np.roll(hidden[:-1], 1, axis=0)) + 0.1 and good > agreement(-hidden[:-1]) + 0.3


def test_f13_every_level_is_worse_on_the_state_before_the_norm(llm, prompts):
    """Three levels, each on what the one before gave. The layer norms what it is fed, so only the gains differ."""
    model, ids = llm.model, llm.tokenizer.encode("".join(prompts[4:6]))[:250]
    logits, hidden = Run(model).feed(ids)

    def agreement(rows: np.ndarray) -> list[float]:
        found = []
        for level in range(1, 4):
            run, chain = Run(model), np.asarray(ids[level:], np.int32)
            batch = run.state.batch(Forest.of([Tree.chain(chain)], [0]), [run.place])
            rows = model.mtp(chain, rows[: len(chain)], batch.forest.position, batch, run.state)
            found.append(float((model.logits(rows).argmax(1) == logits[level:].argmax(1)).mean()))
        return found

    after, before = agreement(hidden), agreement(hidden / (1 + model.weights["norm"]))
    assert min(after) > 0.6 and all(a > b + 0.08 for a, b in zip(after, before)), (after, before)


def test_keys_and_values_alone_are_those_of_a_whole_pass_of_the_mtp_layer(llm, prompts):
    run, ids = Run(llm.model), np.asarray(llm.tokenizer.encode(prompts[0])[:20], np.int32)
    hidden = np.random.default_rng(0).standard_normal((20, llm.config.hidden_size)).astype(np.float32)
    batch = run.state.batch(Forest.of([Tree.chain(ids)], [0]), [run.place])
    pages, found = batch.page_table[0, : -(-20 // run.state.mtp.k.shape[1])], []
    for fill in (llm.model.mtp, llm.model.mtp_memory):
        fill(ids, hidden, batch.forest.position, batch, run.state)
        found.append((run.state.mtp.k[pages].copy(), run.state.mtp.v[pages].copy()))
        run.state.mtp.k[...] = run.state.mtp.v[...] = np.nan
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*found)) and np.isfinite(found[0][0]).any()


def test_it_writes_python(llm):
    text = llm.generate("def fibonacci(n):", replace(llm.default_params, seed=3, max_tokens=200))[0]
    assert text.stats.accepted > 0
    source = "def fibonacci(n):" + text.text
    for end in range(len(source), 20, -1):  # a token limit may cut the last statement short
        try:
            tree = ast.parse(source[:end])
        except SyntaxError:
            continue
        break
    assert isinstance(tree.body[0], ast.FunctionDef) and end > 0.6 * len(source), source
