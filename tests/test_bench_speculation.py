"""The benchmark of speculation on an emulated GPU of a tiny size: tokens, records, table and plot."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from boleinfer import bench_speculation, cli, cuda_executor, device, pricing
from boleinfer.acceptance import Profile, ProfileDrafter, Shape, Template, scaled
from boleinfer.cuda_executor import DraftPlan
from boleinfer.draft.base import Limits
from boleinfer.llm import LLM
from boleinfer.near_tie import APART
from boleinfer.state import State
from tests.test_bench_gpu import GPU, TINY, pretend  # noqa: F401

WIDE = Shape(4, 4, 8)


class Asking:
    """A request as the drafter sees it."""

    def __init__(self, tokens):
        self.tokens = tokens


@pytest.mark.parametrize("shape", [Shape(2, 1, 4), WIDE, Shape(1, 1, 3)])
def test_profile_is_right_as_often_as_it_says(shape):
    profile = Profile("some", (0.6, 0.2, 0.1, 0.05), "")
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 900, (3, 700)).tolist()
    drafter = ProfileDrafter(profile, answers, lambda: shape, 900)
    requests = [Asking(a[:600]) for a in answers]
    drafter.number(requests)
    limits, total, steps = Limits(nodes=40, depth=8), 0, 0
    template = Template.of(profile, shape, 40)
    for request, answer in zip(requests, answers):
        for known in range(1, 650):
            request.tokens = answer[:known]
            (tree,) = drafter.propose([request], [limits])
            assert len(tree) == len(template.prob) <= 40
            at = -1
            for token in answer[known:]:
                found = np.flatnonzero((tree.parent == at) & (tree.token == token))
                assert len(found) <= 1
                if not len(found):
                    break
                at, total = int(found[0]), total + 1
            steps += 1
    assert total / steps + 1 == pytest.approx(template.tokens_per_step, rel=0.05)


def test_an_adversary_is_never_right_and_claims_the_same():
    profile = Profile("some", (0.6, 0.2), "")
    answers = np.random.default_rng(0).integers(0, 50, (1, 60)).tolist()
    drafter = ProfileDrafter(profile, answers, lambda: Shape(2, 2, 4), 50, honest=False)
    request = Asking([])
    drafter.number([request])
    for known in range(1, 50):
        request.tokens = answers[0][:known]
        (tree,) = drafter.propose([request], [Limits(nodes=9, depth=4)])
        assert not (tree.token[tree.parent < 0] == answers[0][known]).any() and tree.prob[0] == np.float32(0.6)


def test_scaled_to_tokens_a_step():
    ranks = scaled((0.8, 0.1, 0.05, 0.02), 6.0, WIDE, 127)
    assert Template.of(Profile("", ranks, ""), WIDE, 127).tokens_per_step == pytest.approx(6.0, abs=1e-3)


@pytest.fixture
def quick(pretend, monkeypatch):  # noqa: F811
    plans = DraftPlan(2, 1, 2), DraftPlan(3, 2, 3)
    for module in (bench_speculation, cuda_executor):
        monkeypatch.setattr(module, "DRAFT_PLANS", plans)
    monkeypatch.setattr("boleinfer.backend.DRAFT_PLANS", plans)
    monkeypatch.setattr(cuda_executor, "LARGEST_CAPTURED", 16)
    monkeypatch.setattr(pricing, "LARGEST_CAPTURED", 16)
    for name, value in {"TOKENS": 8, "NEVER_TOKENS": 8, "NODES": 7}.items():
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
        if isinstance(llm.engine.drafter, ProfileDrafter):
            device.fill(pending[0].u, 0)
        honest(self, batch, pending, paths)

    monkeypatch.setattr(State, "commit", commit)
    assert bench_speculation.logits_apart(llm, 2, 12, plain) > APART
    fast = bench_speculation.against(llm, 2, 12, 12, bench_speculation.PROFILES[0], plain, honest=True)
    assert all(a[: len(b)] == b[: len(a)] for a, b in zip(fast.tokens, plain.tokens))
