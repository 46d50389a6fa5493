"""The GPU's benchmarks on the emulated GPU, with a clock in place of events: what they count, compare and write."""

import json
import time
from copy import deepcopy
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from boleinfer import (
    bench_gpu,
    bench_kernels,
    bench_prompts,
    bench_start,
    bench_tables,
    bench_tree,
    cli,
    cublas,
    cuda_executor,
    device,
    kernels,
    timing,
)
from boleinfer.graphs import Eager
from boleinfer.llm import LLM
from boleinfer.published import PUBLISHED
from boleinfer.random_weights import normal
from tests import emulator
from tests.emulator import emulated

TINY = "tiny"
GPU = {"gpu": "Emulated", "driver": "1.0", "date": "2026-01-01T00:00:00"}


class FakeGraphs(Eager):
    """Counts replays, captures nothing."""

    pool_bytes = 0

    def __init__(self):
        self.captures = self.replays = 0

    def rehearse(self, key, step, later=()):
        self.captures += 1

    def run(self, key, step, again=False):
        self.replays += 1
        return step()


def clock_ms(run, repeats=1, rounds=1):
    """timing.event_ms without events."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        found.append(1e3 * (time.perf_counter() - began) / repeats)
    return median(found)


@pytest.fixture
def pretend(monkeypatch):
    """An emulated GPU, a tiny published size, few steps."""
    if problem := emulator.missing():
        pytest.skip(problem)
    tiny = deepcopy(PUBLISHED["Qwen3.5-9B"])
    tiny["text_config"] |= {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "layer_types": tiny["text_config"]["layer_types"][:4],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }
    monkeypatch.setitem(PUBLISHED, TINY, tiny)
    monkeypatch.setattr(bench_gpu, "PRODUCT", (16, 64, 64))
    for name, value in {"STEPS": 4, "WARM": 1, "COMPARED": 3, "REPLAYS": 4, "ROUNDS": 1}.items():
        monkeypatch.setattr(bench_gpu, name, value)
    for module in (cuda_executor, bench_gpu, timing):
        monkeypatch.setattr(module, "Graphs", FakeGraphs)
    monkeypatch.setattr(timing, "event_ms", clock_ms)
    for module in (bench_gpu, bench_kernels, bench_prompts, bench_start):
        monkeypatch.setattr(module, "gpu_provenance", lambda: dict(GPU))
    monkeypatch.setattr(timing, "READINGS", 2)
    honest = timing.read_gb_s
    monkeypatch.setattr(timing, "read_gb_s", lambda: honest(1 << 16))
    with emulated():
        yield
        monkeypatch.undo()  # a test's own patches go before the emulator's, which they would otherwise bring back


def test_reading_reads_everything():
    """The kernel's results together are the exclusive or of all words."""
    if problem := emulator.missing():
        pytest.skip(problem)
    for groups in (1, 255, 3 * 256, 16 * 512 + 77):
        x = np.random.default_rng(0).integers(0, 2**32, 4 * groups, dtype=np.uint32)
        with emulated():
            out = device.empty((16,), np.uint32)
            kernels.launch(
                "read_bandwidth.cu", "read_bandwidth", 2, 256, {"x": device.upload(x), "out": out, "Groups": groups}
            )
            assert np.bitwise_xor.reduce(out.get()) == np.bitwise_xor.reduce(x)


def test_decode(pretend, tmp_path, capsys):
    file = tmp_path / "decode.json"
    args = ["bench", "decode", "--random-weights", TINY, "--batch", "1", "2", "--prompt", "20", "-o", str(file)]
    assert cli.main(args) == 0
    record = json.loads(file.read_text())
    assert [row["batch"] for row in record["rows"]] == [1, 2] and record["gpu"] == GPU["gpu"]
    assert [row["rows"] for row in record["rows"]] == [1, 8]
    for row in record["rows"]:
        assert row["same_tokens"] and row["same_logits"] and row["captured"]
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
        assert row["context"] == pytest.approx(20 + 1 + 2, abs=2)
        assert row["launches"] > 20
    assert "| tiny | 1 |" in capsys.readouterr().out


def test_prompts(pretend, monkeypatch, tmp_path, capsys):
    file = tmp_path / "prompts.json"
    args = ["bench", "prompts", "--random-weights", TINY, "--lengths", "5", "40", "-o", str(file)]
    assert cli.main(args) == 0
    record = json.loads(file.read_text())
    assert [row["prompt"] for row in record["rows"]] == [5, 40] and record["gpu"] == GPU["gpu"]
    for row in record["rows"]:
        assert row["same_tokens"] and row["ms"] > 0 and row["first_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["prompt"] / row["ms"])
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
    assert "| tiny | 40 |" in capsys.readouterr().out

    honest, said = bench_prompts.read_prompts, iter(range(9))

    def spoilt(*args):
        requests, seconds = honest(*args)
        requests[0].tokens[-1] += next(said) == 3
        return requests, seconds

    monkeypatch.setattr(bench_prompts, "read_prompts", spoilt)
    assert cli.main(args[:-3]) == 1


def test_the_floor_of_a_prompt(pretend):
    """A short one reads the weights once; a long one multiplies, each piece the head once."""
    llm = LLM(device="cuda", random_weights=TINY, draft="none", max_model_len=64, max_rows=16)
    matrices = {n: w for n, w in llm.model.weights.items() if n != "embed_tokens" and not n.startswith("mtp.")}
    nbytes, head = sum(w.nbytes for w in matrices.values()), matrices["lm_head"].size
    layers = sum(w.size for n, w in matrices.items() if n != "lm_head")
    assert bench_prompts.floor(llm, 3, 1.0, 1e9) == pytest.approx(nbytes / 1e6)
    assert bench_prompts.floor(llm, 35, 1e9, 1.0) == pytest.approx(2 * (35 * layers + 3 * head) / 1e9)


@pytest.mark.parametrize("what", ["tokens", "logits"])
def test_a_graph_that_gives_other_tokens_or_logits_fails_the_run(pretend, monkeypatch, what):
    honest = bench_gpu.first_answers

    def first_answers(llm, batch, prompt):
        tokens, logits = honest(llm, batch, prompt)
        if type(llm.engine.executor.runner) is Eager:
            return ([[0]], logits) if what == "tokens" else (tokens, np.nextafter(logits, np.float32(9)))
        return tokens, logits

    monkeypatch.setattr(bench_gpu, "first_answers", first_answers)
    assert cli.main(["bench", "decode", "--random-weights", TINY, "--prompt", "20"]) == 1


def test_bytes_of_a_step(pretend):
    """Weights without embedding and MTP; state, windows, half a ring and the context of each request."""
    llm = bench_gpu.load(TINY, 20)
    weights = llm.model.weights
    expected = sum(w.nbytes for n, w in weights.items() if n != "embed_tokens" and not n.startswith("mtp."))
    alone = bench_gpu.step_bytes(llm, 1, 0)
    state = 3 * (4 * 4 * 16 * 16 + 2 * 3 * 128 + 15.5 * (2 * 32 + 4 * 64 + 4 * 4))
    assert alone == expected + state
    assert bench_gpu.step_bytes(llm, 2, 10) == expected + 2 * (state + 10 * 2 * 2 * 2 * 32)


def test_verify(pretend, tmp_path, capsys):
    file = tmp_path / "verify.json"
    args = ["bench", "verify", "--random-weights", TINY, "--rows", "1", "9", "20", "--prompt", "20", "-o", str(file)]
    assert cli.main(args) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["rows"] for row in rows] == [1, 9, 20] and rows[0]["relative"] == 1
    assert rows[2]["relative"] == pytest.approx(rows[2]["graph_ms"] / rows[0]["graph_ms"])
    assert "| 9 rows | 20 rows |" in capsys.readouterr().out


def test_verify_runs_the_trees(pretend, monkeypatch):
    """A step has as many rows as its tree has nodes."""
    seen = []
    honest = cuda_executor.CudaExecutor._part

    def part(self, work, plan):
        if work.decodes:
            seen.append(len(work.tree))
        return honest(self, work, plan)

    monkeypatch.setattr(cuda_executor.CudaExecutor, "_part", part)
    bench_gpu.verify_rows(TINY, [1, 12], 10)
    assert set(seen) == {1, 12}


def test_step(pretend, tmp_path, capsys):
    file = tmp_path / "step.json"
    assert cli.main(["bench", "step", "--random-weights", TINY, "--rows", "6", "--prompt", "20", "-o", str(file)]) == 0
    found = json.loads(file.read_text())["kernels"]
    launches = {entry["kernel"]: entry["launches"] for entry in found}
    assert launches["gdn_few"] == 3 and launches["tree_attention"] == 1 and launches["plant"] == 1
    assert sum(n for name, n in launches.items() if name.startswith("linear")) == 3 * 4 + 4 + 1
    assert "in all" in capsys.readouterr().out


def test_kernels(pretend, monkeypatch, tmp_path, capsys):
    for name, value in {
        "LINEAR": ((64, 32), (40, 64)),
        "LINEAR_ROWS": (1, 9),
        "SMALL_ROWS": (1, 3),
        "PROMPTS": (70,),
        "D": 64,
        "F": 96,
        "HV": 4,
        "V": 16,
    }.items():
        monkeypatch.setattr(bench_kernels, name, value)
    for name, value in {"HK": 2, "WIDTH": 16, "HEADS": ((4, 2, 32),)}.items():
        monkeypatch.setattr(bench_tree, name, value)
    monkeypatch.setattr(device, "memory", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(timing, "copies", lambda nbytes, least=2, most=4: 2)
    monkeypatch.setattr(cublas, "library", lambda: SimpleNamespace(product=lambda x, w, out: None))
    file = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", "-o", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [row["weights"] for row in record["linear"]] == ["bf16"] * 4 + ["fp8"] * 4
    assert all(("cublas_us" in row) == (row["weights"] == "bf16") for row in record["linear"])
    assert [(r["T"], r["N"]) for r in record["attention"]] == [(0, 70)]
    assert [(r["B"], r["N"]) for r in record["gdn"]] == [(1, 70)]
    shown = capsys.readouterr().out
    assert "| 64 x 32 |" in shown and "FP8 weights" in shown


def test_start(pretend, monkeypatch, tmp_path, capsys):
    def run_python(code, **environment):
        assert environment.keys() <= {"BOLEINFER_CACHE"}
        compile(code, "code", "exec")
        return 1.5, "[0.1, 0.2, 0.3, 0.4]"

    monkeypatch.setattr(bench_start, "run_python", run_python)
    monkeypatch.setattr(bench_start, "process_s", lambda code: 0.2)
    monkeypatch.setattr(bench_start, "PINNED_BYTES", 1 << 16)
    monkeypatch.setattr(bench_start, "pinned_gb_s", lambda honest=bench_start.pinned_gb_s: honest(1 << 16))
    file = tmp_path / "start.json"
    args = ["bench", "start", "--random-weights", TINY, "--folder", str(tmp_path), "-o", str(file)]
    assert cli.main(args) == 0
    record = json.loads(file.read_text())
    assert record["first_token_s"] == 1.5 and record["phases_s"]["load"] == 0.3
    assert record["load"]["gb_s"] > 0 and record["load"]["pinned_gb_s"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["start.json"]
    assert "installed size" in capsys.readouterr().out


def test_a_written_checkpoint_loads(pretend, tmp_path):
    """It has every tensor that the model wants, finite numbers in all of them."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[TINY]))
    config = bench_start.published(TINY)
    bench_start.write_checkpoint(config, tmp_path)
    arrays = bench_start.device_weights.load(
        tmp_path, config, bench_start.models.family(config.model_type).plan, device.dtype("bf16")
    )
    assert "mtp.fc" in arrays and np.isfinite(arrays["norm"].get()).all()
    assert np.isfinite(arrays["mtp.fc"].get().astype(np.float32)).all()


def test_recording_launches_them_too(pretend):
    with timing.recorded() as launches:
        x = normal((4, 8), np.dtype(np.float32), 0, 0, 1.0)
    want = x.get()
    device.fill(x, 0)
    (launch,) = launches
    assert launch.name == "random_normal"
    launch.again()
    assert (x.get() == want).all()


def test_tables_of_what_is_not_there_yet():
    """An unfinished record is shown as far as it goes."""
    assert "microseconds" in bench_tables.kernels({**GPU, "read_gb_s": 1.0})
    assert "shape" in bench_tables.decode({**GPU, "read_gb_s": 1.0, "rows": []})


def test_kernels_are_launched_one_by_one_only_inside(pretend):
    llm = LLM(device="cuda", random_weights=TINY, draft="none", max_model_len=64)
    runner = llm.engine.executor.runner
    with bench_gpu.one_by_one(llm):
        assert type(llm.engine.executor.runner) is Eager
    assert llm.engine.executor.runner is runner
