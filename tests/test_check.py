"""`boleinfer check`: which ops it runs, what it prints, and that a wrong or failing op does not pass."""

import numpy as np
import pytest

from boleinfer import cli
from boleinfer.check import check, op_files, run_checks
from boleinfer.ops import Case, linear, norms
from boleinfer.options import UsageError


def test_names_choose_ops_and_files():
    assert {r.op for r in run_checks(["rms_"])} == {op for op in norms.CASES if "rms_" in op}
    assert {r.op for r in run_checks(["norms"])} == set(norms.CASES)
    assert {r.op for r in run_checks(["swiglu", "embed"])} == {"swiglu", "embedding"}
    with pytest.raises(UsageError, match="no op is called like 'flash'; there are .*rms_norm"):
        list(run_checks(["norms", "flash"]))


def test_every_op_file_is_found():
    assert {f.__name__.rpartition(".")[2] for f in op_files()} >= {"attention", "gdn", "linear", "moe", "rope"}


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
