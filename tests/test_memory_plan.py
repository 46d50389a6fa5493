"""The memory plan is what is allocated, and what does not fit is said with the largest settings that would (F50)."""

import contextlib
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from boleinfer import backend, device, device_weights, kernels, memory_plan, models, nvrtc, random_weights
from boleinfer.config import ConfigError, read_config
from boleinfer.device_sampling import SamplingTable
from boleinfer.device_step import Slots
from boleinfer.device_waiting import Waiting
from boleinfer.draft.base import Limits
from boleinfer.draft.device import DeviceDrafter
from boleinfer.engine import Engine
from boleinfer.graphs import Eager, Graphs
from boleinfer.llm import BUNDLED, GPU_NODES
from boleinfer.memory_plan import PAGE, RESERVE, Needs, Options, fit, plan
from boleinfer.published import published
from boleinfer.sampling import SamplingParams
from boleinfer.scheduler import Scheduler
from boleinfer.state import State
from tests import emulator
from tests.checkpoints import make_model, plausible_checkpoint
from tests.emulator import emulated
from tests.running import finish, request_of

GIB = 1 << 30
OPTIONS = Options(8192, max_rows=2048)
BF16 = device.dtype("bf16")


def needs_of(name="qwen3.5-9b", o=OPTIONS, fp8=False):
    return backend.needs(published(name), backend.Source(seed=0, fp8=fp8), o, "auto", BF16, True)


@contextlib.contextmanager
def counted(monkeypatch):
    """Yields [bytes alive, most bytes alive] of arrays that device.empty and device.upload made since."""
    alive = [0, 0]

    def counting(make):
        def made(*arguments):
            array = make(*arguments)
            owner = array
            while owner.base is not None:
                owner = owner.base
            alive[0] += array.nbytes
            alive[1] = max(alive)
            weakref.finalize(owner, gone, array.nbytes)
            return array

        return made

    def gone(nbytes):
        alive[0] -= nbytes

    with monkeypatch.context() as m:
        for name in ("empty", "upload"):
            m.setattr(device, name, counting(getattr(device, name)))
        yield alive


# ---- the plan against allocations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("dtype", ["bf16", "float"])
def test_state_and_pages_are_what_the_state_allocates(monkeypatch, name, dtype):
    o = Options(64, max_batch=2, ring=3, page_size=4, draft_nodes=5)
    config, act = published(name), device.dtype(dtype)
    needed = backend.needs(config, backend.Source(seed=0), o, "auto", act, True)
    p = plan(needed, o)
    with emulated(), counted(monkeypatch) as alive:
        state = State(config, o.max_batch, o.max_batch * o.pages, o.page_size, o.ring, needed.mtp, act, gpu=True)
        tables = SamplingTable(o.max_batch, config.vocab_size, np.ones(1, bool)), Slots(o.max_batch, o.pages, 5)
        waiting = Waiting(o.max_batch, config.hidden_size, act) if needed.drafting else None
        assert p["state"] + p["keys and values"] == alive[0]
        del state, tables, waiting


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_5", "float"), ("qwen3_5_moe", "float"), ("qwen3_5", "bf16")])
def test_f50_a_prompt_at_full_batch_stays_within_the_plan(monkeypatch, tmp_path, family, dtype):
    if problem := emulator.missing():
        pytest.skip(problem)
    plausible_checkpoint(tmp_path, family, hidden_size=320 if dtype == "bf16" else 64)  # bf16 has products in ranges
    config = read_config(tmp_path)
    o = Options(100, max_batch=3, max_rows=48, ring=7, draft_nodes=5, draft_depth=4, graphs=False)
    act, source = device.dtype(dtype), backend.Source(tmp_path)
    needed = backend.needs(config, source, o, "auto", act, True)
    p = plan(needed, o)
    reserved = []
    monkeypatch.setattr(Eager, "reserve", lambda self, nbytes: reserved.append(nbytes))
    with emulated(), counted(monkeypatch) as alive:
        allowed = np.ones(config.vocab_size, bool)
        executor = backend.load_cuda(config, source, o, "auto", act, allowed, needed, None)
        executor.price = lambda: None
        exact = sum(needed.weights.values()) + p["state"] + p["keys and values"]
        assert exact <= alive[0] <= exact + 4096, "inverse frequencies and ring lengths beside"
        limits = Limits(nodes=5, depth=4, min_prob=0.0)
        engine = Engine(executor, DeviceDrafter(), Scheduler(executor.state, 3, 48, 48, limits, o.scratch))
        prompts = [list(range(1, 1 + n)) for n in (40, 60, 90)]
        loaded, alive[1] = alive[0], 0
        finish(engine, [request_of(ids, SamplingParams(temperature=0, max_tokens=6), 100) for ids in prompts])
        planned = memory_plan.workspace(needed, o)
        assert reserved == [memory_plan.pool_bytes(needed, o)] and reserved[0] < planned
        # not all ways to draft are used here, and the sums that large products keep are more than tiny ones need
        assert planned / (4 if dtype == "float" else 24) < alive[1] - loaded <= planned
        del engine, executor


def test_weights_are_what_is_loaded(monkeypatch, tmp_path):
    make_model(tmp_path, "qwen3_5_moe")
    config = read_config(tmp_path)
    family = models.family(config.model_type)
    for act in (np.dtype(np.float32), BF16):
        with emulated():
            arrays = device_weights.load(tmp_path, config, family.plan, act)
        found = device_weights.sizes(tmp_path, config, family.plan, act)
        assert found == {n: a.nbytes for n, a in arrays.items() if n in found}


@pytest.mark.parametrize("fp8", [False, True])
def test_random_weights_are_counted_like_files(fp8):
    family = models.family("qwen3_5_text")
    config = published("qwen3.5-27b")
    found = random_weights.sizes(config, family.plan, BF16, fp8=fp8)
    billions = sum(np.prod(t.shape) for t in family.plan(config, {})) / 1e9
    assert sum(found.values()) / 1e9 == pytest.approx(1.098 * billions if fp8 else 2 * billions, rel=0.01)


def test_allocations_come_in_pages():
    assert [memory_plan.allocated(n) for n in (0, 1, 513, PAGE // 2, PAGE // 2 + 1, PAGE + 1)] == [
        0, 512, 1024, PAGE // 2, PAGE, 2 * PAGE,
    ]  # fmt: skip


# ---- what fits -------------------------------------------------------------------------------------------------------


def total_of(needed, **changed):
    return plan(needed, replace(OPTIONS, **changed)).total


def room(needed, o, part):
    """A memory in which everything up to this part fits, and half of it."""
    before = 0
    for p in plan(needed, o).parts:
        if p.name == part:
            return before + p.nbytes // 2
        before += p.nbytes
    raise AssertionError(part)


@pytest.mark.parametrize("max_batch", [1, 64, 1024])
@pytest.mark.parametrize("part", ["state", "keys and values", "workspace", "reserve"])
def test_f50_what_does_not_fit_is_listed_with_what_would(max_batch, part):
    o = replace(OPTIONS, max_batch=max_batch, draft_nodes=64, memory_fraction=1.0)
    needed = needs_of("qwen3.5-0.8b", o)
    free = room(needed, o, part)
    with pytest.raises(ConfigError) as error:
        fit(needed, o, free, 2 * free)
    message = str(error.value)
    for name in ("weights", "state", "keys and values", "workspace", "reserve"):
        assert f"\n  {name} " in message
    assert "may be used" in message and "of " in message and "are free" in message
    last = message.splitlines()[-1]
    if free < plan(needed, replace(o, context=1, max_batch=1, max_rows=256)).total:
        assert "a smaller model, or its FP8 release" in last
        return
    names = {"max_model_len": "context", "max_batch": "max_batch", "max_rows": "max_rows"}
    ways = last.removeprefix("what would fit: ").partition("; or use the CPU")[0].split(", or ")
    for way in ways:
        values = {names[k]: int(v) for k, v in re.findall(r"(\w+)=(\d+)", way)}
        assert values, way
        assert fit(needed, replace(o, **values), free, 2 * free) == replace(o, **values)
        first = next(iter(values))
        more = replace(o, **(values | {first: values[first] + 1}))
        if "together" not in way:
            assert plan(needed, more).total > free, f"{way} is not the largest"


def test_f50_weights_alone_are_too_much():
    with pytest.raises(ConfigError, match=r"the weights alone are too much; a smaller model, or its FP8 release"):
        fit(needs_of("qwen3.5-27b"), OPTIONS, 23 * GIB, 24 * GIB)


def test_a_larger_fraction_is_offered_where_it_is_enough():
    needed = needs_of()
    free = plan(needed, OPTIONS).total + GIB
    with pytest.raises(ConfigError, match=r"or memory_fraction=0\.9[5-9]"):
        fit(needed, OPTIONS, free, free)
    assert fit(needed, replace(OPTIONS, memory_fraction=0.97), free, free).context == OPTIONS.context


def test_defaults_shrink_instead_of_failing():
    needed = needs_of()
    whole = plan(needed, replace(OPTIONS, memory_fraction=1)).total
    o = replace(OPTIONS, memory_fraction=1)
    assert fit(needed, o, whole, whole, True, True) == o
    less = fit(needed, o, whole - GIB, whole, True, True)
    assert less.max_rows in (1024, 512) and less.context == o.context
    little = plan(needed, replace(o, max_rows=256, context=1000)).total
    small = fit(needed, o, little, whole, True, True)
    assert small.max_rows == 256 and 1000 <= small.context < 1017
    too_little = plan(needed, replace(o, max_rows=256, context=300)).total
    with pytest.raises(ConfigError, match="max_batch="):
        fit(needed, o, too_little, whole, True, True)
    with pytest.raises(ConfigError):
        fit(needed, o, little, whole, False, True)


def test_more_of_anything_takes_more():
    needed = needs_of("qwen3.5-35b-a3b")
    for name, values in {
        "context": (1, 512, 8192, 100_000),
        "max_batch": (1, 2, 64, 1024),
        "max_rows": (8, 9, 100, 2048, 4000),
        "draft_nodes": (1, 8, 64),
    }.items():
        totals = [
            total_of(needed, **{"max_rows": 1 << 20 if name == "max_batch" else 2048} | {name: v}) for v in values
        ]
        assert totals == sorted(totals) and totals[0] < totals[-1], name


def test_fp8_and_no_drafts_take_less():
    half = needs_of("qwen3.5-27b", fp8=True)
    assert plan(half, OPTIONS)["weights"] < 0.6 * plan(needs_of("qwen3.5-27b"), OPTIONS)["weights"]
    without = Needs(half.config, {n: b for n, b in half.weights.items() if not n.startswith("mtp.")})
    assert plan(without, OPTIONS)["keys and values"] < plan(half, OPTIONS)["keys and values"]
    assert plan(half, OPTIONS)["reserve"] == RESERVE


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU with the given bytes free, on which nothing may be loaded."""

    def made(free, total=None):
        monkeypatch.setattr(kernels, "usable", lambda: "90")
        monkeypatch.setattr(device, "memory", lambda: (free, total or free))

        def never(*arguments, **named):
            raise AssertionError("something was loaded")

        monkeypatch.setattr(device_weights, "load", never)
        monkeypatch.setattr(random_weights, "make", never)

    return made


def test_f50_the_library_refuses_before_loading(small_gpu):
    from boleinfer import LLM

    small_gpu(1 * GIB)
    with pytest.raises(ConfigError, match=r"does not fit on the GPU: it takes .* and 921\.6 MiB may be used"):
        LLM(device="cuda", max_batch=64, max_model_len=4096)
    with pytest.raises(ConfigError, match="the weights alone are too much"):
        LLM(device="cuda", random_weights="qwen3.5-9b")
    with pytest.raises(ValueError, match="memory_fraction=1.5"):
        LLM(device="cuda", memory_fraction=1.5)


def test_the_default_context_shrinks_with_a_warning(small_gpu, monkeypatch):
    from boleinfer import LLM

    o = Options(4096, max_batch=64, max_rows=256, draft_nodes=GPU_NODES)
    needed = backend.needs(read_config(BUNDLED), backend.Source(BUNDLED), o, "auto", BF16, True)
    small_gpu(plan(needed, replace(o, context=1024)).total + 1000, 1 * GIB)

    class Loaded(Exception):
        pass

    def loading(config, source, options, *more):
        raise Loaded(options.context, options.max_rows)

    monkeypatch.setattr(backend, "load_cuda", loading)
    with pytest.warns(UserWarning, match=r"requests may have 10\d\d tokens"), pytest.raises(Loaded) as given:
        LLM(device="cuda", max_batch=64, memory_fraction=1.0)
    assert 1024 <= given.value.args[0] < 1040 and given.value.args[1] == 256


def test_graphs_reserve_one_piece_of_their_own_pool(monkeypatch):
    """On the stream of the steps, and given back at once, so that all of them share it."""
    events = []

    @contextlib.contextmanager
    def entered(what):
        events.append(f"{what} on")
        yield
        events.append(f"{what} off")

    pool = SimpleNamespace(malloc="pool")
    cuda = SimpleNamespace(
        Stream=lambda: entered("stream"),
        MemoryPool=lambda: pool,
        using_allocator=lambda allocate: entered(allocate),
    )
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "empty", lambda shape, dtype: events.append((shape, dtype)))
    Graphs().reserve(77)
    assert events == ["stream on", "pool on", ((77,), np.uint8), "pool off", "stream off"]


def test_memory_that_runs_out_after_all_is_a_config_error(monkeypatch):
    o = Options(64, max_batch=1, max_rows=8)
    needed = backend.needs(read_config(BUNDLED), backend.Source(BUNDLED), o, "auto", BF16, True)

    def full(*arguments, **named):
        raise MemoryError("out of memory allocating 5 bytes")

    monkeypatch.setattr(device_weights, "load", full)
    with pytest.raises(ConfigError, match=r"ran out while the model was loaded \(out of memory alloc.*(?s:.)*weights"):
        backend.load_cuda(read_config(BUNDLED), backend.Source(BUNDLED), o, "auto", BF16, np.ones(1), needed, None)


def test_a_gpu_that_cannot_be_used_is_a_toolchain_error(monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def busy():
        raise CUDARuntimeError("cudaErrorDevicesUnavailable")

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, memGetInfo=busy)
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(device, "cupy", lambda: fake)
    with pytest.raises(nvrtc.ToolchainError, match="cudaErrorDevicesUnavailable.*nvidia-smi"):
        device.memory()
    runtime.memGetInfo = lambda: (np.int64(5), np.int64(7))
    assert device.memory() == (5, 7)
