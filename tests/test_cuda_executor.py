"""The whole step on the GPU against the one on NumPy, token by token: emulated, and on a GPU where there is one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from boleinfer import cuda_executor, device, device_waiting, device_weights, draft_head, gdn_few, models, timing
from boleinfer.config import read_config
from boleinfer.cuda_executor import CudaExecutor
from boleinfer.device_draft import DraftPlan
from boleinfer.draft.base import Limits
from boleinfer.draft.device import DeviceDrafter
from boleinfer.draft.graft import GraftedDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.draft.suffix import SuffixDrafter
from boleinfer.engine import Engine
from boleinfer.forest import Tree
from boleinfer.gdn_core import FEW, MANY
from boleinfer.graphs import Eager
from boleinfer.sampling import SamplingParams
from boleinfer.scheduler import Scheduler
from boleinfer.state import GDNLayer, State
from tests.checkpoints import plausible_checkpoint
from tests.running import VOCAB, engine_of, finish, load, request_of
from tests.tiny import FAMILIES

pytestmark = pytest.mark.parametrize(
    "gpu", ["forward", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)  # whole steps take long: one order of threads


def cuda_engine(
    folder, draft: str, max_batch: int = 3, max_rows: int = 64, nodes: int = 5, act: str = "float", context: int = 120
) -> Engine:
    """An engine on the GPU whose memory is poisoned; on a real GPU its steps are graphs."""
    real = not isinstance(device.empty(1, np.int32), np.ndarray)
    config = read_config(folder)
    family = models.family(config.model_type)
    arrays = device_weights.load(folder, config, family.plan, device.dtype(act))
    model = family.build(config, arrays)
    scratch = 1 + max(nodes, 3)
    pages = -(-(context + scratch) // 16)
    state = State(config, max_batch, max_batch * pages, 16, 7, mtp=True, dtype=device.dtype(act), gpu=True, poison=True)
    allowed = np.arange(VOCAB) < 480
    allowed[500] = True
    plans = (DraftPlan(depth=3, least=0.0), DraftPlan(3, 2, 3, least=0.0, ids=300)) if draft in ("mtp", "auto") else ()
    executor = CudaExecutor(model, state, allowed, max_batch, max_rows, nodes, pages, plans, graphs=real)
    drafter = {
        "none": NoDrafter(),
        "suffix": GraftedDrafter([SuffixDrafter()]),
        "mtp": DeviceDrafter(),
        "auto": GraftedDrafter([SuffixDrafter()], [DeviceDrafter()], always=True),
    }[draft]
    limits = Limits(nodes=nodes, depth=4, min_prob=0.05)
    return Engine(executor, drafter, Scheduler(state, max_batch, max_rows, max_rows, limits, scratch))


@pytest.fixture(autouse=True)
def short_heads(monkeypatch):
    monkeypatch.setattr(draft_head, "MORE", 9)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [(rng.integers(0, 470, 7).tolist() * 5)[:n] for n in (21, 1, 70)]


@pytest.mark.parametrize("draft", ["none", "suffix", "mtp", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_numpy(tmp_path, gpu, family, draft):
    folder = plausible_checkpoint(tmp_path, family)
    greedy = SamplingParams(temperature=0, max_tokens=12, logit_bias=dict.fromkeys(range(5), 9.0))
    want = finish(engine_of(load(folder)), [request_of(p, greedy) for p in prompts()])
    requests = [request_of(p, greedy) for p in prompts()]
    assert finish(cuda_engine(folder, draft), requests) == want
    if draft != "none":
        assert sum(r.stats.drafted for r in requests) > 0


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_sampled_tokens_are_those_of_numpy(tmp_path, gpu, draft):
    folder = plausible_checkpoint(tmp_path, "qwen3_5")
    several = [
        SamplingParams(temperature=0.8, max_tokens=10, seed=3, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, max_tokens=10, seed=4, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, min_p=0.05, presence_penalty=0.5, max_tokens=8, seed=5, logprobs=2),
    ]
    want = [request_of(p, s) for p, s in zip(prompts(), several)]
    finish(engine_of(load(folder)), want)
    got = [request_of(p, s) for p, s in zip(prompts(), several)]
    finish(cuda_engine(folder, draft), got)
    assert [r.generated for r in got] == [r.generated for r in want]
    for g, w in zip(got, want):
        assert [list(e or ()) for e in g.logprobs] == [list(e or ()) for e in w.logprobs]


@pytest.mark.parametrize("together", [1, 3])
def test_steps_begin_before_their_guesses_are_read(tmp_path, gpu, monkeypatch, together):
    """As many in a row as may be, each with what the GPU drafted in the one before; the tokens are the same."""
    monkeypatch.setattr("boleinfer.engine.BLIND", 3)
    folder, some = plausible_checkpoint(tmp_path, "qwen3_5"), prompts()[:together]
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    want = finish(engine_of(load(folder)), [request_of(p, greedy) for p in some])
    engine, ahead, drafts = cuda_engine(folder, "mtp"), [], {}
    run, learn = engine._run, engine._learn

    def noted(works, way, before=0):
        step = run(works, way, before)
        ahead.append((before, sum(w.drafted for w in works)))
        return step

    def learnt(step, works, *times):
        for w, o in works:
            assert not w.drafted or w.draft.token.tolist() == drafts[w.request].best(w.drafted).token.tolist()
            drafts[w.request] = o.draft
        learn(step, works, *times)

    monkeypatch.setattr(engine, "_run", noted)
    monkeypatch.setattr(engine, "_learn", learnt)
    requests = [request_of(p, greedy) for p in some]
    assert finish(engine, requests) == want
    assert max(ahead)[0] == 3 and all(drafted for before, drafted in ahead if before)


@pytest.mark.parametrize("nodes", [2, 5, 17])
def test_everything_is_captured_beforehand(tmp_path, gpu, monkeypatch, nodes):
    """A lone request and several, with drafts of few nodes and of many: no step is new while they run."""
    engine = cuda_engine(plausible_checkpoint(tmp_path, "qwen3_5"), "auto", nodes=nodes)
    engine.executor.capture()
    late = []
    monkeypatch.setattr(engine.executor.runner, "rehearse", lambda key, *steps: late.append(key))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for together in (prompts()[:1], prompts()):
        finish(engine, [request_of(p, greedy) for p in together])
    assert not late


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_steps_that_read_prompts_are_captured_when_they_come_again(tmp_path, gpu, draft):
    """Launched kernel by kernel, captured, and replayed, they leave the same bits; not where logits are asked for."""
    if gpu != "cuda":
        pytest.skip("graphs were NOT tried: only a GPU captures")
    engine = cuda_engine(plausible_checkpoint(tmp_path, "qwen3_5"), draft, max_rows=256, act="bf16", context=400)
    runner, ids, found = engine.executor.runner, np.random.default_rng(0).integers(0, 470, 200).tolist(), []
    for logprobs in (None, None, None, None, 1, 1):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=logprobs)
        request, before = request_of(ids, params, 400), (runner.captures, runner.replays)
        engine.add(request)
        engine.step()  # reads the prompt
        counts = runner.captures - before[0], runner.replays - before[1]
        layers = [m for m in engine.state.layers if isinstance(m, GDNLayer)]
        memory = [device.download(a[request.home.slot]).tobytes() for m in layers for a in (m.S, m.window, *m.ring)]
        found.append((counts, list(request.generated), memory))
        finish(engine, [])
    assert [counts for counts, *_ in found] == [(0, 0), (1, 1), (0, 1), (0, 1), (0, 0), (0, 0)]
    assert all(left == [*found[0][1:]] for _, *left in found)


def test_logprobs_are_of_the_step_that_ran(tmp_path, gpu):
    """Also of a graph behind steps of the same rows that were launched one by one."""
    engine, found = cuda_engine(plausible_checkpoint(tmp_path, "qwen3_5"), "none"), []
    graphs = engine.executor.runner
    for runner in (graphs, Eager(), graphs):
        engine.executor.runner = runner
        request = request_of(prompts()[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2))
        finish(engine, [request])
        found.append(request.logprobs)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("draft", ["none", "mtp", "auto"])
def test_f38_fills_the_context_exactly(tmp_path, gpu, draft):
    """Also where steps go on by themselves, and where drafts are cut at the end."""
    folder, limit = plausible_checkpoint(tmp_path, "qwen3_5"), 57
    to_the_end = SamplingParams(
        temperature=0, max_tokens=None, ignore_eos=True, logit_bias=dict.fromkeys(range(5), 9.0)
    )
    texts = [(prompts()[2] * 2)[:n] for n in (45, 55, 56)]
    want = finish(engine_of(load(folder), limit=limit), [request_of(p, to_the_end, limit) for p in texts])
    requests = [request_of(p, to_the_end, limit) for p in texts]
    assert finish(cuda_engine(folder, draft), requests) == want
    assert [(len(r.tokens), r.finish_reason) for r in requests] == [(limit, "length")] * 3


def test_f50_a_failed_step_changes_nothing(tmp_path, gpu, monkeypatch):
    """Memory that runs out in the third piece of a long prompt, beside a request that decodes and drafts."""
    folder = plausible_checkpoint(tmp_path, "qwen3_5")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = prompts()[1:]
    want = finish(engine_of(load(folder)), [request_of(p, greedy) for p in texts])
    engine = cuda_engine(folder, "auto", max_rows=16)
    engine.executor.runner = Eager()  # where a step is a graph nothing can run out
    requests = [request_of(p, greedy) for p in texts]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    state, honest = engine.state, type(engine.executor.model).forward

    def fails(*args):
        honest(*args)
        raise MemoryError("injected")

    def seen():
        lengths = device.download(engine.executor._slots.length)
        return [(r.committed, len(r.tokens)) for r in requests], state.pages.free, lengths.tolist()

    before = seen()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(engine.executor.model), "forward", fails)
        engine.step()
    assert seen() == before and 0 < requests[1].committed < len(texts[1])
    while engine.busy:
        engine.step()
    assert [r.generated for r in requests] == want


@pytest.mark.parametrize("where", ["mtp", "commit"])
def test_f50_a_step_that_fails_halfway_ends_its_requests(tmp_path, gpu, monkeypatch, where):
    """The GPU has taken tokens by then of which nobody hears; who waits is served, and nothing leaks."""
    folder = plausible_checkpoint(tmp_path, "qwen3_5")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = finish(engine_of(load(folder)), [request_of(prompts()[0], greedy)])
    engine = cuda_engine(folder, "auto", max_batch=2, max_rows=16)
    engine.executor.runner = Eager()
    requests = [request_of(p, greedy) for p in (prompts()[1], prompts()[2], prompts()[0])]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    owner = type(engine.executor.model if where == "mtp" else engine.state)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(owner, where, lambda *args: (_ for _ in ()).throw(MemoryError("injected")))
        engine.step()
    assert [r.finish_reason for r in requests] == ["error", "error", None] and "injected" in requests[0].error
    assert finish(engine, []) == [] and [requests[2].generated] == want


def test_ways_to_draft_may_change_at_any_step(tmp_path, gpu):
    folder = plausible_checkpoint(tmp_path, "qwen3_5")
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    want = finish(engine_of(load(folder)), [request_of(p, greedy) for p in prompts()])
    engine, ways = cuda_engine(folder, "mtp"), itertools.cycle([0, 1, 1, 2, 0, 0, 2, 2, 1])
    engine.budget.choose = lambda *_: next(ways)
    assert finish(engine, [request_of(p, greedy) for p in prompts()]) == want


@pytest.mark.parametrize("most", [96, 3])
def test_what_was_not_drafted_for_is_remembered(tmp_path, gpu, monkeypatch, most):
    """After steps that do not draft, the MTP layer drafts what it would have drafted anyway: also where a few rows at a
    time are taken in, round a ring that just holds a prompt and those."""
    monkeypatch.setattr(cuda_executor, "MOST_WAITING", most)
    monkeypatch.setattr(device_waiting, "RING", 256 if most > 24 else 21 + most)
    folder, found = plausible_checkpoint(tmp_path, "qwen3_5"), []
    for idle in (0, 6):
        engine, drafts = cuda_engine(folder, "mtp"), {}
        request = request_of(prompts()[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        engine.budget.choose = lambda *_, r=request, e=idle: int(len(r.generated) >= e)
        engine.add(request)
        while not request.finished:
            engine.step()
            tree = engine.drafter._own.get(request, Tree.chain([]))
            drafts[len(request.tokens)] = {
                tuple(tree.token[tree.path(n)].tolist()): float(p) for n, p in enumerate(tree.prob)
            }
        found.append(drafts)
    common = [n for n, tree in found[1].items() if tree and n in found[0]]
    assert len(common) > 5
    for n in common:
        assert found[1][n] == pytest.approx(found[0][n], rel=1e-3)


def test_single_rows_take_one_launch_in_a_gated_deltanet_layer(tmp_path, gpu):
    """Plain decoding does, and has the tokens of steps that take three; requests that want logits do not."""
    folder, found = plausible_checkpoint(tmp_path, "qwen3_5"), []
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for params in (greedy, replace(greedy, logprobs=1)):
        with timing.recorded() as launches:
            found.append(finish(cuda_engine(folder, "none"), [request_of(p, params) for p in prompts()]))
        assert (not {FEW, MANY}.isdisjoint(launch.file for launch in launches)) == (params is greedy)
    assert found[0] == found[1]


def test_small_trees_take_one_launch_in_a_gated_deltanet_layer(tmp_path, gpu, monkeypatch):
    """And have the tokens of steps that take three."""
    folder, found = plausible_checkpoint(tmp_path, "qwen3_5"), []
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    takes = gdn_few.takes
    for few in (True, False):
        monkeypatch.setattr(gdn_few, "takes", takes if few else lambda *_: False)
        with timing.recorded() as launches:
            requests = [request_of(p, params) for p in prompts()]
            found.append(finish(cuda_engine(folder, "mtp", act="bf16"), requests))
        assert ("gdn_few.cu" in {launch.file for launch in launches}) == few
    assert found[0] == found[1]


def test_a_repeated_step_is_the_last_one_again(tmp_path, gpu):
    """The same launches, for the same requests: what is measured is the step, and not one of nobody."""
    engine = cuda_engine(plausible_checkpoint(tmp_path, "qwen3_5"), "none")
    for prompt in prompts():
        engine.add(request_of(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    executor, rows = engine.executor, len(prompts())
    with timing.recorded() as step:
        engine.step()
    before = device.download(executor._slots.length)
    with timing.recorded() as again:
        executor.repeat(rows)
    assert [launch.name for launch in again] == [launch.name for launch in step]
    assert (device.download(executor._slots.length) - before).tolist() == [1] * rows
