"""Rehearsals of steps: kernels that are not compiled compile side by side, once each, and what is captured has run."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from boleinfer import cuda_executor, device, kernels, nvrtc
from boleinfer.cuda_executor import CudaExecutor
from boleinfer.kernels import KernelError, cuda_folder, launch
from boleinfer.nvrtc import Built, Cache, Toolchain
from boleinfer.params import SamplingParams
from tests import emulator
from tests.checkpoints import plausible_checkpoint
from tests.kernel_text import kernel
from tests.running import engine_of, finish, load, request_of
from tests.test_cuda_executor import cuda_engine
from tests.test_graphs import graphs  # noqa: F401
from tests.test_kernels import FakeGpu

TOOLS = Toolchain((13, 0), Path("headers"), (13, 0), (90,))


class Compiler:
    """Takes NVRTC's place. compiled: files in order; bad: those that do not compile; threads: where it was called."""

    def __init__(self):
        self.compiled, self.bad, self.threads, self.meeting = [], set(), set(), None

    def __call__(self, job, headers, *worker):
        if self.meeting:
            self.meeting.wait(10)
        self.compiled.append(job.file)
        self.threads.add(threading.get_ident())
        if job.file in self.bad:
            raise KernelError(f"{job.title} does not compile:\n{job.file}:6: error: wrong")
        return Built(b"cubin", "")


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    made = Compiler()
    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(nvrtc, "toolchain", lambda: TOOLS)
    monkeypatch.setattr(nvrtc, "compile_job", made)
    monkeypatch.setattr(nvrtc, "default_cache", lambda: cache)
    monkeypatch.setattr(nvrtc.os, "cpu_count", lambda: 3)
    return made


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    monkeypatch.setattr(kernels, "open_gpu", lambda: made)
    return made


@pytest.fixture
def files(tmp_path):
    """Three files of one kernel each."""
    found = [tmp_path / name for name in ("a.cu", "b.cu", "c.cu")]
    for file in found:
        file.write_text(kernel("", f"// {file.name}\n"))
    return found


X = np.zeros(4, np.float32)


def call(file, n=1):
    launch(file, "k", 1, 32, {"x": X, "n": n})


def calls(gpu):
    """Launches of each module, in the order in which these were loaded."""
    return [sum(len(f.calls) for f in module.functions.values()) for module in gpu.modules]


def test_what_is_missing_compiles_side_by_side_and_once(gpu, compiler, files):
    a, b, c = files
    call(a)
    assert compiler.compiled == ["a.cu"] and calls(gpu) == [1]
    compiler.meeting = threading.Barrier(2)  # broken, and so an error, where one waits for the other
    passes, later = [], []

    def step():
        passes.append(calls(gpu))
        for file in (a, b, a, b, a):
            call(file)

    def other():
        later.append(calls(gpu))
        call(c)
        call(a)

    kernels.rehearse(step, [other])
    assert sorted(compiler.compiled[1:]) == ["b.cu", "c.cu"] and threading.get_ident() in compiler.threads
    assert len(compiler.threads) == 3
    assert passes == [[1], [2]], "behind a kernel that is not there nothing is launched"
    assert later == [[2]] and calls(gpu) == [5, 2], "the step has run once as a whole, what comes later has not"
    compiler.meeting = None
    kernels.rehearse(other)
    assert sorted(compiler.compiled) == ["a.cu", "b.cu", "c.cu"] and calls(gpu) == [6, 2, 1]


def test_where_nothing_is_missing_there_is_one_pass(gpu, compiler, files):
    """In this process or in one before it."""
    for _ in range(2):
        kernels.rehearse(lambda: [call(file) for file in files])
        kernels._module.cache_clear()
    passes = []
    kernels.rehearse(lambda: passes.append([call(file) for file in files]), [lambda: pytest.fail("was looked at")])
    assert len(passes) == 1 and sorted(compiler.compiled) == ["a.cu", "b.cu", "c.cu"]
    assert calls(gpu) == [1] * 9


def test_a_cache_that_keeps_nothing_does_not_matter(gpu, compiler, files, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "kernels")
    monkeypatch.setattr(nvrtc, "default_cache", lambda: cache)
    with pytest.warns(UserWarning, match="cannot be kept"):
        kernels.rehearse(lambda: [call(file) for file in files])
    assert sorted(compiler.compiled) == ["a.cu", "b.cu", "c.cu"] and calls(gpu) == [1, 1, 1]


def test_launches_are_checked_though_there_are_none(gpu, compiler, files):
    with pytest.raises(KernelError, match="b.cu: k"):
        kernels.rehearse(lambda: (call(files[0]), call(files[1], n="many")))
    assert calls(gpu) == []
    call(files[0])
    assert calls(gpu) == [1], "nothing is left of the rehearsal"


def test_a_file_that_does_not_compile_is_named_and_the_rest_is_kept(gpu, compiler, files):
    compiler.bad = {"b.cu"}

    def step():
        for file in files:
            call(file)

    with pytest.raises(KernelError, match=r"b.cu for sm_90 does not compile:\nb.cu:6: error: wrong"):
        kernels.rehearse(step)
    assert calls(gpu) == []
    call(files[0])
    with pytest.raises(KernelError, match="b.cu:6: error: wrong"):
        call(files[1])
    compiler.bad = set()
    kernels.rehearse(step)
    assert sorted(compiler.compiled) == ["a.cu", "b.cu", "b.cu", "b.cu", "c.cu"] and calls(gpu) == [3, 1, 1]


def test_what_is_captured_has_been_launched_before(gpu, compiler, files, graphs):  # noqa: F811
    captured = []

    def step():
        for file in files:
            call(file)
        if graphs.stream.capturing:
            captured.append(calls(gpu))

    graphs.rehearse("step", step)
    assert captured == [[2, 2, 2]] and graphs.captures == 1


# ---- all steps of an engine ----


@pytest.fixture(params=["everything", "some"])
def lacking(request):
    """Whether a kernel is not compiled yet: none is, or those of the middle of a step are not."""
    return lambda file: request.param == "everything" or file in ("sample.cu", "accept.cu", "mtp_inputs.cu", "draft.cu")


@pytest.fixture
def engine(lacking, compiler, graphs, tmp_path, monkeypatch):  # noqa: F811
    """One on the emulated GPU, whose steps are captured, and whose kernels have to be compiled as on a real one."""
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulator.emulated():
        honest, loaded = kernels._module, set()

        def module(gpu, device, source, constants):
            if (source, constants) not in loaded and lacking(source.path.name):
                kernels._compiled(nvrtc.job(source, dict(constants), "90", cuda_folder()))
                loaded.add((source, constants))
            return honest(gpu, device, source, constants)

        monkeypatch.setattr(kernels, "_module", module)
        made = cuda_engine(plausible_checkpoint(tmp_path, "qwen3_5"), "mtp", nodes=3, max_rows=256)
        compiler.compiled.clear()
        made.executor.runner = graphs
        monkeypatch.setattr(
            graphs, "run", lambda key, step, again=False: step()
        )  # a graph here is nothing that can be replayed
        monkeypatch.setattr(cuda_executor, "LARGEST_CAPTURED", 8)
        yield made
        monkeypatch.undo()


def test_all_steps_compile_in_one_wave(engine, compiler, monkeypatch, tmp_path):
    """Those of prompts, too; then they are captured one after another. Nothing is new while requests run, and the first
    pass, which ends half-way, leaves nothing that changes their tokens."""
    executor, runner, passes = engine.executor, engine.executor.runner, []
    honest = CudaExecutor._step

    def step(self, frame, kind):
        before = len(compiler.compiled)
        found = honest(self, frame, kind)
        passes.append((frame.inputs.rows, kind, before))
        return found

    monkeypatch.setattr(CudaExecutor, "_step", step)
    executor.capture()
    steps = list(dict.fromkeys((rows, kind) for rows, kind, _ in passes))
    captured = [(rows, kind) for rows, kind in steps if rows <= 8]
    assert {rows for rows, _ in steps} == {1, 8, 16, 32, 64, 128, 256} and runner.captures == len(captured)
    assert [(rows, kind) for rows, kind, _ in passes] == [*steps, *(s for s in captured for _ in range(2))]
    wave = sorted(compiler.compiled)
    assert {compiled for *_, compiled in passes[len(steps) :]} == {len(wave)}
    assert not any(device.download(frame.largest).any() for frame in executor._frames.values())
    passes.clear()
    executor.capture()
    assert not passes
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found, want = (request_of([*range(20)], greedy) for _ in range(2))
    assert finish(engine, [found]) == finish(engine_of(load(tmp_path)), [want])
    assert sorted(compiler.compiled) == wave


def test_a_step_whose_kernels_do_not_compile_is_rehearsed_again(engine, compiler):
    executor = engine.executor
    compiler.bad = {"accept.cu"}
    for _ in range(2):
        with pytest.raises(KernelError, match="accept.cu:6: error"):
            executor.capture()
    assert executor.runner.captures == 0
    compiler.bad = set()
    executor.capture()
    assert executor.runner.captures > 0 and compiler.compiled.count("sample.cu") == 1
