"""Every drafter, by the name a user gives it: the ids of plain decoding, whatever is asked for and however it goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.draft import ALIASES, NAMES, make_drafter
from boleinfer.draft.base import Limits
from boleinfer.draft.levels import Levels
from boleinfer.draft.model import ModelDrafter
from boleinfer.engine import Engine
from boleinfer.sampling import SamplingParams
from boleinfer.state import State
from tests.checkpoints import plausible_checkpoint
from tests.running import VOCAB, engine_of, finish, load, request_of
from tests.tiny import FAMILIES

EVERY = [*NAMES, *ALIASES, "model"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, logit_bias=dict.fromkeys(range(5), 9.0)),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=16, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, seed=5, max_tokens=16, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.4,
        logit_bias=dict.fromkeys(range(9), 4.0),
    ),
    "greedy, penalties": SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2, frequency_penalty=0.3),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return load(plausible_checkpoint(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return load(plausible_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3_5"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load(plausible_checkpoint(tmp_path_factory.mktemp("small"), "qwen3_next", seed=1, hidden_size=32))


def engine_with(model, small, name: str, max_batch: int = 4, limits: Limits | None = None, limit: int = 200) -> Engine:
    """An engine whose drafter was made by name, with a second model in a poisoned state of its own."""
    limits = limits or Limits(nodes=10, depth=5)
    engine = engine_of(model, "none", max_batch, limits=limits, limit=limit)
    pages = max_batch * -(-(limit + 1 + limits.nodes) // 16)
    second = ModelDrafter(small, State(small.config, max_batch, pages, 16, 7, poison=True), VOCAB, 1 + limits.nodes)
    engine.drafter = make_drafter(name, model, engine.state, Levels(2, 2, 4), earlier=100, second=second)
    return engine


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [(rng.integers(0, 470, 9).tolist() * 8)[:n] for n in (30, 1, 2, 70)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", EVERY)
def test_the_ids_are_plain_decodings(model, small, name, params):
    want = finish(engine_of(model, limit=200), [request_of(p, PARAMS[params]) for p in prompts()])
    requests = [request_of(p, PARAMS[params]) for p in prompts()]
    assert finish(engine_with(model, small, name, max_batch=2), requests) == want
    if name in ("mtp", "model", "graft"):
        assert sum(r.stats.drafted for r in requests) > 0


@settings(max_examples=25)
@given(
    st.sampled_from(EVERY),
    st.builds(Limits, nodes=st.integers(0, 9), depth=st.integers(0, 6), min_prob=st.sampled_from([0.0, 0.3])),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_limits_batches_and_ends(dense, small, name, limits, shapes, max_batch, seed):
    """Short prompts, requests that come and go, ends of contexts, any bounds of the tree."""
    ends = [
        (
            np.random.default_rng(seed + n).integers(0, 5, n).tolist(),
            SamplingParams(temperature=1, seed=seed, max_tokens=m),
        )
        for n, m in shapes
    ]
    want = [finish(engine_of(dense, limit=45), [request_of(p, q, limit=45)])[0] for p, q in ends if len(p) < 45]
    requests = [request_of(p, q, limit=45) for p, q in ends if len(p) < 45]
    engine = engine_with(dense, small, name, max_batch, limits, limit=45)
    assert finish(engine, requests) == want
    for request in requests:
        assert request.stats.drafted <= limits.nodes * request.stats.steps


@pytest.mark.parametrize("name", ["mtp", "model", "graft", "auto"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_draft_head_that_breaks_costs_only_speed(dense, small, name, value):
    """Logits of the drafting model that are no numbers."""

    class Broken:
        """The model, but what it drafts with is broken."""

        def __init__(self, whole):
            self.whole = whole

        def __getattr__(self, name):
            return getattr(self.whole, name)

        def logits(self, hidden):
            return np.full_like(self.whole.logits(hidden), value)

    want = finish(engine_of(dense, limit=200), [request_of(p, PARAMS["seeded"]) for p in prompts()])
    engine = engine_with(dense, small, "none")
    second = ModelDrafter(Broken(small), State(small.config, 4, 60, 16, 7, poison=True), VOCAB, 11)
    engine.drafter = make_drafter(name, Broken(dense), engine.state, earlier=50, second=second)
    with np.errstate(all="ignore"):
        assert finish(engine, [request_of(p, PARAMS["seeded"]) for p in prompts()]) == want


def test_names(dense, small):
    state = State(dense.config, 1, 4, mtp=True)
    with pytest.raises(ValueError, match="use one of auto, none, suffix, mtp, graft, model"):
        make_drafter("magic", dense, state)
    with pytest.raises(ValueError, match="needs a second, smaller model"):
        make_drafter("model", dense, state)
    with pytest.raises(ValueError, match="needs a checkpoint with an MTP layer"):
        make_drafter("mtp", dense, State(dense.config, 1, 4))
