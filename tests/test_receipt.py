"""The parts of the proof on a GPU, small and on the emulator, and the command that runs them and writes the receipt."""

from __future__ import annotations

import json

import numpy as np
import pytest

from boleinfer import kernels, provenance
from boleinfer.near_tie import first_difference
from boleinfer.sampling import SamplingParams
from tests import emulator, gpu_receipt
from tests.emulator import emulated
from tests.receipt import (
    Report,
    big_pools,
    churn,
    families,
    fuzz,
    gpu_tests,
    sanitized,
    sanitizer,
    steady,
    tokens,
    verify,
)
from tests.receipt.models import gpu_engine, tiny
from tests.receipt.tokens import keeps_every_id
from tests.running import engine_of, request_of


@pytest.fixture
def gpu():
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulated():
        yield


@pytest.mark.parametrize("part,least", [(families, 100), (tokens, 100), (verify, 10), (big_pools, 5), (churn, 30)])
def test_a_part_passes_on_the_emulator(gpu, part, least):
    report = part.run(quick=True)
    assert not report.failures and sum(report.counts.values()) >= least


def test_fuzz_runs_every_kind(gpu):
    report = fuzz.run(quick=True)
    assert not report.failures
    assert {n for what, n in report.counts.items() if what.startswith("forests through")} == {6}


def test_fuzz_names_the_seed_of_a_wrong_kernel(gpu, monkeypatch):
    def wrong(seed):
        if seed == 3:
            raise AssertionError("bits differ")

    monkeypatch.setattr(fuzz, "KINDS", {"this": fuzz.Kind(wrong, 1)})
    assert fuzz.run().failures == ["this, seed 3: AssertionError: bits differ"]


def test_the_workload_of_steady_state_is_that_of_numpy(gpu, tmp_path):
    model = tiny(tmp_path, "qwen3_5", seed=11)
    got = steady.workload(gpu_engine(model.on("float"), "float", "auto", max_batch=4), 8)
    want = steady.workload(engine_of(model.host), 20)  # other drafts, other numbers of tokens in as many steps
    assert all(len(g) > 3 and first_difference(g, w) is None for g, w in zip(got, want))


def test_what_the_sanitizer_watches_runs(gpu, capsys, monkeypatch):
    monkeypatch.setattr(sanitized, "FAMILIES", ("qwen3_5",))
    assert sanitized.main(["--seconds", "0.5", "--tokens", "2"]) == 0
    assert sanitized.DONE in capsys.readouterr().out


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_what_is_compared_in_bf16():
    assert keeps_every_id(SamplingParams(temperature=0, top_k=5)) and keeps_every_id(SamplingParams())
    assert not keeps_every_id(SamplingParams(top_p=0.9)) and not keeps_every_id(SamplingParams(min_p=0.1))


def test_a_wrong_token_is_a_failure_unless_it_is_a_near_tie():
    request = request_of([5, 6], SamplingParams(temperature=0))
    row = np.zeros(512)
    row[3], row[4], row[9] = 1, 0.999, -1
    for act, token, fails in (("bf16", 4, False), ("bf16", 9, True), ("float", 4, True)):
        report = Report()
        tokens._judge(report, "x", act, [request], [[token]], [[3]], lambda ids: row)
        assert bool(report.failures) == fails and report.counts[f"first differences {act}"] == 1


# ---- what other programs say -----------------------------------------------------------------------------------------


def test_outcomes_of_a_junit_report():
    text = (
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two[x]">'
        '<failure message="assert 1 == 2">long</failure></testcase><testcase classname="b" name="three">'
        '<skipped message="no room"/></testcase></testsuite></testsuites>'
    )
    assert gpu_tests.parse(text) == {
        "a::one": ("passed", ""),
        "a::two[x]": ("failed", "assert 1 == 2"),
        "b::three": ("skipped", "no room"),
    }


def test_tests_that_need_a_gpu_are_skipped_by_name():
    found = gpu_tests.outcomes(["tests/test_kernels_gpu.py"])
    assert found and all(outcome in ("passed", "skipped") for outcome, _ in found.values())


@pytest.mark.parametrize(
    "output,failures,skipped",
    [
        (f"========= COMPUTE-SANITIZER\n{sanitizer.DONE}5 steps\n========= ERROR SUMMARY: 0 errors\n", 0, False),
        (
            f"{sanitizer.DONE}5 steps\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            0,
            False,
        ),
        (f"========= Invalid __global__ write\n{sanitizer.DONE}5\n========= ERROR SUMMARY: 2 errors\n", 1, False),
        ("Traceback\n========= ERROR SUMMARY: 0 errors\n", 1, False),
        ("========= Error: Device not supported\n", 0, True),
        ("segmentation fault", 1, False),
    ],
)
def test_what_compute_sanitizer_says(output, failures, skipped):
    report = Report()
    sanitizer.judge(report, "memcheck", output, 0)
    assert len(report.failures) == failures and bool(report.skipped) == skipped


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    """Parts without a GPU: {name: what in_process gives}."""
    given = {"check": Report({"cases": 3}, [], {"error": 0.5}), "fuzz": Report(failures=["seed 4"])}
    origin = {"gpu": "G", "driver": "1", "cuda": "13.0", "cupy": "14", "sources_sha256": provenance.sources_hash()}
    monkeypatch.setattr(kernels, "open_gpu", lambda: None)
    monkeypatch.setattr(gpu_receipt, "origin", lambda: dict(origin))
    monkeypatch.setattr(gpu_receipt, "in_process", lambda name, quick: given[name])
    return given


def test_the_receipt_is_written_even_when_a_part_fails(parts, tmp_path, capsys):
    out = tmp_path / "results" / "receipt.json"
    assert gpu_receipt.main(["fuzz", "check", "--out", str(out)]) == 1
    receipt = json.loads(out.read_text())
    assert receipt["gpu"] == "G" and list(receipt["parts"]) == ["fuzz", "check"]
    assert receipt["parts"]["fuzz"]["failures"] == ["seed 4"] and not receipt["parts"]["fuzz"]["passed"]
    assert receipt["parts"]["check"] | {"seconds": 0} == {
        "passed": True, "seconds": 0, "counts": {"cases": 3}, "failures": [], "notes": {"error": 0.5}, "skipped": ""
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "fuzz       FAILED" in said and "    seed 4" in said and "cases 3, error 0.5" in said.replace(";", ",")


def test_parts_of_the_same_sources_stay_in_the_receipt(parts, tmp_path, monkeypatch):
    out = tmp_path / "receipt.json"
    assert gpu_receipt.main(["check", "--out", str(out)]) == 0
    parts["fuzz"] = Report(skipped="no program")
    assert gpu_receipt.main(["fuzz", "--out", str(out)]) == 0
    assert set(json.loads(out.read_text())["parts"]) == {"check", "fuzz"}
    monkeypatch.setattr(gpu_receipt, "origin", lambda: {"gpu": "another"})
    assert gpu_receipt.main(["fuzz", "--out", str(out)]) == 0
    assert set(json.loads(out.read_text())["parts"]) == {"fuzz"}


def test_without_a_gpu_the_command_says_so(capsys):
    try:
        kernels.open_gpu()
    except kernels.ToolchainError:
        assert gpu_receipt.main([]) == 2 and "nothing to prove here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        gpu_receipt.main(["nothing"])
    assert exit.value.code == 2 and "no part is called 'nothing'" in capsys.readouterr().err


def test_a_part_that_raises_or_dies_is_a_failure(monkeypatch):
    monkeypatch.setitem(gpu_receipt.PARTS, "odd", "no_such_file")
    assert "No module named" in gpu_receipt.run_part("odd", False).failures[0]
    assert "exit status 2" in gpu_receipt.in_process("odd", False).failures[0]  # the other process knows no such part


def test_every_part_has_its_file():
    for name, file in gpu_receipt.PARTS.items():
        assert callable(__import__(f"tests.receipt.{file}", fromlist=["run"]).run), name
