"""`boleinfer check`: which ops it runs, what it prints, and that a wrong or failing op does not pass."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from boleinfer import cli, device, nvrtc
from boleinfer.check import check, op_files, run_checks
from boleinfer.declaration import KernelError
from boleinfer.ops import Case, linear, norms
from boleinfer.options import UsageError
from tests import emulator
from tests.emulator import emulated


def test_names_choose_ops_and_files():
    assert {r.op for r in run_checks(["rms_"])} == {op for op in norms.CASES if "rms_" in op}
    assert {r.op for r in run_checks(["norms"])} == set(norms.CASES)
    assert {r.op for r in run_checks(["swiglu", "embed"])} == {"swiglu", "embedding", "token_inputs"}
    with pytest.raises(UsageError, match="no op is called like 'flash'; there are .*rms_norm"):
        list(run_checks(["norms", "flash"]))


def test_every_op_file_is_found():
    assert {f.__name__.rpartition(".")[2] for f in op_files()} >= {"attention", "gdn", "linear", "moe", "norms"}


def test_a_right_op_has_an_error_a_bound_and_a_time():
    for result in run_checks(["rms_norm"]):
        assert result.right and 0 <= result.error <= result.bound and result.time_us > 0 and not result.failure


def test_the_table_and_the_exit_status(capsys):
    assert check(["swiglu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "case", "error", "bound", "time", "us"]
    assert len(lines) == len(linear.CASES["swiglu"]) + 2 and "0 wrong" in lines[-1]


def test_wrong_and_failing_ops_are_reported_and_the_rest_still_runs(monkeypatch, capsys):
    def rough(o, z, w, eps):
        return np.round(o, 2) if o.dtype == np.float32 else o

    def broken(x, w, eps):
        raise RuntimeError("no such instruction")

    cases = {name: norms.CASES[name] for name in ("rms_norm", "gated_rms_norm")}
    monkeypatch.setattr(norms, "CASES", cases)
    monkeypatch.setattr(norms, "gated_rms_norm", rough)
    monkeypatch.setattr(norms, "rms_norm", broken)
    assert check(["norms"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for line in lines[1:-1]:
        wrong = line.startswith(("gated_rms_norm", "rms_norm"))
        assert ("WRONG" in line) == wrong
        assert ("RuntimeError: no such instruction" in line) == line.startswith("rms_norm")
    assert f"{sum(map(len, cases.values()))} wrong" in lines[-1]


def test_nan_is_wrong(monkeypatch):
    monkeypatch.setitem(linear.CASES, "swiglu", [Case("nan", lambda rng: {"x": np.ones((1, 2))})])
    monkeypatch.setattr(linear, "swiglu", lambda x: x * np.nan if x.dtype == np.float32 else x)
    assert not next(run_checks(["swiglu"])).right


def test_the_command_line(capsys):
    assert cli.main(["check", "swi"]) == 0
    assert "swiglu" in capsys.readouterr().out
    assert cli.main(["check", "nonsense"]) == 2
    assert "no op is called like 'nonsense'" in capsys.readouterr().err


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """The emulator as GPU, and as much of CuPy as the check itself uses."""
    if problem := emulator.missing():
        pytest.skip(problem)
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(get_current_stream=lambda: stream, using_allocator=lambda _: contextlib.nullcontext())
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: None))
    with emulated():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_kernels_are_checked_in_both_types(gpu, dtype):
    results = list(run_checks(["add_rms"], "cuda", dtype))
    assert [r.case for r in results] == [case.label for case in norms.CASES["add_rms_norm"]]
    assert all(r.right and r.time_us > 0 and r.bound == (8e-3 if dtype == "bf16" else 1e-5) for r in results)
    assert all(r.error > 1e-4 for r in results if dtype == "bf16")


def test_wrong_kernels_are_found(gpu, monkeypatch):
    def case(value, **fields):
        return Case("R=3", lambda rng: {"x": np.full(3, value)}, **fields)

    def op(x):
        if not device.on_gpu(x):
            return x
        value = device.download(x)[0]
        if value < 0:
            raise KernelError("too small")
        runs.append(value)
        return device.upload(np.full(3, 2 if value == 2 else len(runs) if value == 4 else value + 1, np.float32))

    runs = []
    cases = [case(2.0), case(3.0), case(4.0), case(-1.0), case(-1.0, gpu=False), case(2.0, gpu=False)]
    monkeypatch.setattr(norms, "rms_norm", op)
    monkeypatch.setitem(norms.CASES, "rms_norm", cases)
    found = [r for r in run_checks(["rms_norm"], "cuda") if r.op == "rms_norm"]
    assert [r.right for r in found] == [True, False, False, False, True, False]
    assert [r.failure for r in found] == [
        *("", "", "two runs differ", "KernelError: too small", ""),
        "the kernel ran; the case says that it cannot",
    ]


def test_an_op_without_a_kernel_is_left_out(gpu):
    assert {r.op for r in run_checks(["l2_norm", "rms_norm"])} > {r.op for r in run_checks(["rms_norm"], "cuda")}
    with pytest.raises(UsageError, match="no op is called like 'l2_norm'"):
        list(run_checks(["l2_norm"], "cuda"))


def test_what_cannot_be_checked_is_said(capsys, monkeypatch):
    def no_gpu():
        raise nvrtc.ToolchainError("no GPU is visible")

    monkeypatch.setattr("boleinfer.kernels.open_gpu", no_gpu)
    assert cli.main(["check", "--device", "cuda", "rms_norm"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert cli.main(["check", "--dtype", "bf16", "rms_norm"]) == 2
    assert "the CPU computes in float32; for bf16 add --device cuda" in capsys.readouterr().err
