"""`boleinfer bench cpu` measures what it says, refuses a drafter that changes a token, and says where it comes from."""

import json

import numpy as np
import pytest

from boleinfer import bench, cli, provenance, results
from boleinfer.draft import NAMES
from boleinfer.llm import LLM
from boleinfer.options import UsageError


@pytest.fixture
def quick(tmp_path):
    return ["bench", "cpu", "--prompts", "1", "--repeats", "1", "-n", "12", "-o", str(tmp_path / "deep" / "cpu.json")]


def test_a_run_is_recorded(quick, tmp_path, capsys):
    assert cli.main(quick) == 0
    record = json.loads((tmp_path / "deep" / "cpu.json").read_text())
    assert {"date", "cpu", "numpy", "blas", "sources_sha256"} <= record.keys()
    assert record["prompts"] == 1 and record["matvec_ms"] > 0
    for mode in ("greedy", "sampled"):
        runs = record["modes"][mode]
        assert set(runs) == {"none", "suffix", "mtp", "graft", "auto"}
        assert runs["none"]["times_plain"] == 1 and runs["none"]["drafted"] == 0
        for run in runs.values():
            assert run["same_tokens"]
            assert sum(run["steps_by_accepted"]) + run["accepted"] == 11  # the prompt's own pass gives the first of 12
            assert run["matvec_share"] == pytest.approx(record["matvec_ms"] / run["ms_per_token"])
            assert run["tokens_per_s"] == pytest.approx(1e3 / run["ms_per_token"])
    out = capsys.readouterr().out
    assert "greedy" in out and "of matvec" in out and "DIFFER" not in out


def test_a_drafter_that_changes_a_token_fails_the_run(quick, monkeypatch, capsys):
    honest = bench.timed

    def spoilt(llm, prompt, params):
        seconds, tokens, stats = honest(llm, prompt, params)
        return seconds, [*tokens[:-1], tokens[-1] + (type(llm.engine.drafter).__name__ == "NoDrafter")], stats

    monkeypatch.setattr(bench, "timed", spoilt)
    assert cli.main(quick) == 1
    assert capsys.readouterr().out.count("TOKENS DIFFER") == 2 * (len(NAMES) - 1)  # plain decoding's were spoilt


def test_a_quick_look_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.boleinfer, "__file__", str(tmp_path / "boleinfer" / "__init__.py"))
    args = cli.build_parser().parse_args(["bench", "cpu", "--prompts", "1"])
    assert results.output_file(args, "cpu.json", quick=True) is None
    args = cli.build_parser().parse_args(["bench", "cpu"])
    with pytest.raises(UsageError, match="-o"):  # installed, not a checkout
        results.output_file(args, "cpu.json", quick=False)
    (tmp_path / "pyproject.toml").touch()
    assert results.output_file(args, "cpu.json", quick=False) == tmp_path / "benchmarks" / "results" / "cpu.json"


def test_every_decoding_weight_is_multiplied_once():
    llm = LLM()
    matrices = list(bench.decode_matrices(llm))
    assert all(x.shape == (1, w.shape[-1]) and x.dtype == np.float32 for w, x in matrices)
    weights = llm.model.weights
    depthwise = sum(w.size for name, w in weights.items() if name.endswith("conv1d"))
    expected = sum(w.size for n, w in weights.items() if w.ndim > 1 and not n.startswith("mtp.")) - depthwise
    expected -= weights["embed_tokens"].size  # a look-up; the head is counted under its own name
    assert sum(w.size for w, _ in matrices) == expected


def test_the_hash_follows_the_sources(monkeypatch, tmp_path):
    package = tmp_path / "boleinfer"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(provenance.boleinfer, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(provenance.models, "__file__", str(tmp_path / "models" / "__init__.py"))
    seen = {provenance.sources_hash()}
    (package / "notes.txt").write_text("not a source")
    assert provenance.sources_hash() in seen
    (tmp_path / "cuda" / "k.cu").write_text("__global__ void k() {}\n")
    seen.add(provenance.sources_hash())
    (package / "a.py").write_text("x = 2\n")
    seen.add(provenance.sources_hash())
    (package / "a.py").rename(package / "b.py")
    seen.add(provenance.sources_hash())
    assert len(seen) == 4


def test_the_hash_is_the_same_wherever_the_folders_lie(monkeypatch, tmp_path):
    """In a checkout models/ and cuda/ lie beside the package, in an installation inside it."""
    hashes = []
    for package, parent in (
        (tmp_path / "checkout" / "boleinfer", "checkout"),
        (tmp_path / "site" / "boleinfer", "site/boleinfer"),
    ):
        package.mkdir(parents=True)
        (package / "a.py").write_text("x = 1\n")
        for folder, file in (("models", "m.py"), ("cuda", "k.cu")):
            (tmp_path / parent / folder).mkdir()
            (tmp_path / parent / folder / file).write_text(file)
        monkeypatch.setattr(provenance.boleinfer, "__file__", str(package / "__init__.py"))
        monkeypatch.setattr(provenance.models, "__file__", str(tmp_path / parent / "models" / "__init__.py"))
        hashes.append(provenance.sources_hash())
    assert hashes[0] == hashes[1]


def test_the_machine_is_named():
    record = provenance.provenance()
    assert record["cpu"] and record["blas"] and record["cores"] >= 1 and len(record["sources_sha256"]) == 64
    json.dumps(record)
