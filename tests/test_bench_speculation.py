"""The benchmark of speculation on an emulated GPU of a tiny size: tokens, records, table and plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from boleinfer import bench_speculation, cli, cuda_executor, device, pricing, speculation_tables
from boleinfer.acceptance import Guesses, Oracle, Profile, Shape, Template, scaled
from boleinfer.device_draft import DraftPlan
from boleinfer.device_step import Part, Results, Slots, StepInputs
from boleinfer.draft.device import DeviceDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.forest import Tree
from boleinfer.llm import LLM
from boleinfer.near_tie import APART, BOUNDS
from boleinfer.state import State
from tests.test_bench_gpu import GPU, TINY, pretend  # noqa: F401

WIDE = Shape(4, 4, 8)


@pytest.mark.parametrize("shape", [Shape(2, 1, 4), WIDE, Shape(1, 1, 3)])
def test_profile_is_right_as_often_as_it_says(shape):
    profile = Profile("some", (0.6, 0.2, 0.1, 0.05), "")
    answers = np.random.default_rng(0).integers(0, 900, (3, 700)).tolist()
    guesses, template, total, steps = Guesses(profile, answers, 900), Template.of(profile, shape, 40), 0, 0
    assert len(template.prob) <= 40 and (np.diff(template.prob) <= 0).all()
    assert (template.parent < np.arange(len(template.parent))).all()
    for i, answer in enumerate(answers):
        for known in range(1, 650):
            tokens, at = guesses.tokens(i, known, shape, 40), -1
            for token in answer[known:]:
                found = np.flatnonzero((template.parent == at) & (tokens == token))
                assert len(found) <= 1
                if not len(found):
                    break
                at, total = int(found[0]), total + 1
            steps += 1
    assert total / steps + 1 == pytest.approx(template.tokens_per_step, rel=0.05)


def test_an_adversary_is_never_right():
    profile, shape = Profile("some", (0.6, 0.2), ""), Shape(2, 2, 4)
    answers = np.random.default_rng(0).integers(0, 50, (1, 60)).tolist()
    guesses, roots = Guesses(profile, answers, 50, honest=False), Template.of(profile, shape, 9).parent < 0
    assert all((guesses.tokens(0, n, shape, 9)[roots] != answers[0][n]).all() for n in range(1, 50))


def test_what_the_gpu_drafted_is_overruled(gpu):
    profile, shape, plan = Profile("some", (0.6, 0.2), ""), Shape(2, 2, 4), DraftPlan()
    answers = np.random.default_rng(0).integers(0, 50, (2, 60)).tolist()
    guesses, template = Guesses(profile, answers, 50), Template.of(profile, shape, 9)
    slots, inputs, results = Slots(5, 1, 12), StepInputs(8, 3, 8), Results(3, 12)
    for slot, committed in ((4, 19), (1, 30), (2, 3)):
        slots.admit(slot, np.zeros(0, np.int32), committed)
    inputs.fill([Part(4, draft_nodes=12), Part(1, draft_nodes=4), Part(2, draft_nodes=12)])
    inputs.send()
    oracle = Oracle(5, 16, 9, [plan])
    oracle.tell(guesses, [4, 1], 16, [shape])
    oracle(plan, 3, inputs, slots, results)
    device.fill(results.count, 0)
    told = [e.draft for e in results.fetch(3, drafts=True)()]
    for b, (slot, i, known, n) in enumerate([(4, 0, 20, len(template.prob)), (1, 1, 31, 4)]):
        want = Tree(guesses.tokens(i, known, shape, 9)[:n], template.parent[:n], template.prob[:n])
        assert device.download(slots.draft_count)[slot] == n
        for name in ("token", "parent", "prob"):
            assert np.array_equal(getattr(told[b], name), getattr(want, name))
            assert np.array_equal(device.download(getattr(slots, f"draft_{name}"))[slot, :n], getattr(want, name))
    assert not len(told[2]) and device.download(slots.draft_count)[2] == 0
    oracle.silence()
    oracle(plan, 3, inputs, slots, results)
    assert not device.download(slots.draft_count)[[4, 1, 2]].any()


def test_scaled_to_tokens_a_step():
    ranks = scaled((0.8, 0.1, 0.05, 0.02), 6.0, WIDE, 127)
    assert Template.of(Profile("", ranks, ""), WIDE, 127).tokens_per_step == pytest.approx(6.0, abs=1e-3)


def made_up(**rows):
    """A result with nothing but these rows."""
    record = {"what": "", **GPU, "date": "2026-01-01T00:00", "context": 256, "known": 0.99, "profiles_of": []}
    return record | {part: [] for part in bench_speculation.PARTS} | rows


def profile_rows(shape, batch):
    numbers = {"tokens_per_step": 5.0, "rows": 8, "plain_ms_per_step": 4, "ms_per_step": 6, "tokens_per_s": 9 * batch}
    made = {"shape": shape, "batch": batch, "times_plain": 3.5 - batch / 20, **numbers}
    return [{**made, "profile": profile.name} for profile in bench_speculation.PROFILES]


def test_results_of_several_runs_are_shown_together():
    never = {"shape": "9b", "batch": 32, "profile": "paper", "times_plain": 0.99, "tokens_per_step": 1.0}
    mode = {"mode": "none", "text": "code", "tokens_per_step": 1.0, "tokens_per_s": 900.0, "times_plain": 1.0}
    mode |= {"prompts": 8, "differences": []}
    verify = [{"shape": "9b", "rows": n, "relative": 1 + n / 160} for n in (1, 64)]
    few, many = profile_rows("9b", 1) + profile_rows("9b", 8), profile_rows("9b", 32)
    large = made_up(profiles=profile_rows("27b", 1), date="2026-01-02T00:00")
    whole = [
        made_up(profiles=few, verify=verify),
        made_up(bundled=[mode]),
        large,
        made_up(profiles=many, never=[never]),
    ]
    found = speculation_tables.joined(whole)
    assert found["profiles"] == few + many + large["profiles"] and found["date"] == large["date"]
    text = speculation_tables.speculation(found)
    assert text.count("| 9b |") == 10 and text.count("| 27b |") == 3 and text.count("| none | 1.00 | 900 |") == 1
    assert "9b: a step of 64 rows takes 1.40 times one row." in text
    ElementTree.fromstring(speculation_tables.plot(found))
    assert speculation_tables.joined(whole[:1]) == whole[0]
    with pytest.raises(ValueError, match="the same rows of 'profiles'"):
        speculation_tables.joined([whole[0], made_up(profiles=few[:1])])
    with pytest.raises(ValueError, match="different context"):
        speculation_tables.joined([whole[0], made_up(context=1)])


@pytest.fixture
def quick(pretend, monkeypatch):  # noqa: F811
    plans = DraftPlan(2, 1, 2), DraftPlan(3, 2, 3)
    monkeypatch.setattr(bench_speculation, "DRAFT_PLANS", plans)
    monkeypatch.setattr("boleinfer.backend.DRAFT_PLANS", plans)
    monkeypatch.setattr(cuda_executor, "LARGEST_CAPTURED", 16)
    monkeypatch.setattr(pricing, "LARGEST_CAPTURED", 16)
    few = {"TOKENS": 8, "NEVER_TOKENS": 8, "WARM_TOKENS": 2, "NODES": 7}
    for name, value in few.items():
        monkeypatch.setattr(bench_speculation, name, value)
    monkeypatch.setattr(bench_speculation, "gpu_provenance", lambda: dict(GPU))
    monkeypatch.setattr(pricing, "ROUNDS", 1)
    monkeypatch.setattr(pricing, "price", lambda executor, o: pricing.measure(executor, o))


def test_published_shapes(quick, tmp_path, capsys):
    file = tmp_path / "speculation.json"
    args = ["bench", "speculation", "--random-weights", TINY, "--batch", "2", "--prompt", "12", "-o", str(file)]
    assert cli.main([*args, "--part", "profiles", "never"]) == 0
    record = json.loads(file.read_text())
    assert [r["profile"] for r in record["profiles"]] == ["paper", "code", "prose"] and len(record["never"]) == 1
    for row in record["profiles"]:
        assert row["same_tokens"] and row["logits_apart"] < APART
        assert row["tokens_per_step"] >= 1 and sum(row["ways"]) > 0
    assert record["never"][0]["tokens_per_step"] == 1
    assert f"| {TINY} | 2 | paper |" in capsys.readouterr().out
    ElementTree.fromstring(file.with_suffix(".svg").read_text())


def test_a_wrong_commit_is_noticed(quick, monkeypatch):
    """The tokens stay the same, since random weights go by the last one; the logits do not."""
    llm = LLM(device="cuda", random_weights=TINY, draft="mtp", draft_nodes=7, max_batch=2, max_model_len=128)
    monkeypatch.setattr(bench_speculation, "HEARD_TOKENS", 12)
    plain = bench_speculation.run(llm, 2, 12, 24, None)
    assert bench_speculation.logits_apart(llm, 2, 12, plain) < APART
    honest = State.commit

    def commit(self, batch, pending, paths):
        if isinstance(llm.engine.drafter, DeviceDrafter) and pending[0]:
            device.fill(pending[0].u, 0)
        honest(self, batch, pending, paths)

    monkeypatch.setattr(State, "commit", commit)
    assert bench_speculation.logits_apart(llm, 2, 12, plain) > APART
    fast = bench_speculation.against(llm, 2, 12, 12, bench_speculation.PROFILES[0], plain, honest=True)
    assert all(a[: len(b)] == b[: len(a)] for a, b in zip(fast.tokens, plain.tokens))


def test_ways_to_decode_one_model(quick, monkeypatch, tmp_path):
    """As with the shipped model: modes run, and give the tokens of plain decoding."""
    text = 'def f(x):\n    """Adds one to x."""\n    return'
    (tmp_path / "heldout_prompts.json").write_text(json.dumps([{"text": text}]))
    modes, rows = [m for m in bench_speculation.MODES if m.name in ("none", "tree-64", "auto")], []
    some = {"BUNDLED": tmp_path, "MODES": modes, "PROMPT_TOKENS": 4, "REPEATS": 1}
    some["LLM"] = lambda **given: LLM(random_weights=TINY, max_model_len=512, **given)
    for name, value in some.items():
        monkeypatch.setattr(bench_speculation, name, value)
    bench_speculation.bundled(rows)
    assert [r["mode"] for r in rows[::2]] == [m.name for m in modes] and len(rows) == 6
    assert all(r["same_tokens"] and r["prompts"] == 1 and r["tokens_per_step"] >= 1 for r in rows)
    text = speculation_tables.speculation(made_up(bundled=rows))
    assert "| tree-64 |" in text and "All answers are those of plain decoding." in text


def test_answers_that_differ_are_judged(quick, monkeypatch, tmp_path):
    """A token that is not plain decoding's is a near tie or it fails the command."""
    (tmp_path / "heldout_prompts.json").write_text(json.dumps([{"text": "import os"}, {"text": "def f"}]))
    modes = [m for m in bench_speculation.MODES if m.name in ("none", "chain-3")]
    some = {"BUNDLED": tmp_path, "MODES": modes, "PROMPT_TOKENS": 4, "REPEATS": 1}
    some["LLM"] = lambda **given: LLM(random_weights=TINY, max_model_len=512, **given)
    for name, value in some.items():
        monkeypatch.setattr(bench_speculation, name, value)
    monkeypatch.setattr(bench_speculation, "up_to_docstring", lambda text: text)
    generate = LLM.generate

    def spoilt(llm, prompt, params):
        outputs = generate(llm, prompt, params)
        if not isinstance(llm.engine.drafter, NoDrafter) or isinstance(llm.engine.drafter, DeviceDrafter):
            outputs[0].token_ids[2] = (outputs[0].token_ids[2] + 1) % 200
        return outputs

    monkeypatch.setattr(LLM, "generate", spoilt)
    for bound, ties in ((1e9, 2), (1e-9, 0)):
        monkeypatch.setitem(BOUNDS, "bf16", bound)
        rows = []
        bench_speculation.bundled(rows)
        assert [(d["prompt"], d["token"]) for d in rows[2]["differences"]] == [(0, 2), (1, 2)]
        assert sum(d["near_tie"] for d in rows[2]["differences"]) == ties and not rows[0]["differences"]
        assert f"4 of 8 answers differ from plain decoding's, {2 * ties} of them" in speculation_tables.speculation(
            made_up(bundled=rows)
        )
