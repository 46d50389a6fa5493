"""`boleinfer bench decode` beside its rows: FP8 and experts in floors, what graphs hold, the picture."""

import json
import xml.etree.ElementTree as ElementTree
from copy import deepcopy

import pytest

from boleinfer import bench_gpu, bench_graphs, bench_prompts, bench_roofline, bench_tables, cli, cuda_executor, pricing
from boleinfer.device import Fp8
from boleinfer.llm import LLM
from boleinfer.published import PUBLISHED
from tests.test_bench_gpu import GPU, TINY, pretend  # noqa: F401

MOE = "tiny-moe"


@pytest.fixture
def experts(pretend, monkeypatch):  # noqa: F811
    """The tiny size with eight experts, of which a token takes two."""
    made = deepcopy(PUBLISHED["Qwen3.5-35B-A3B"])
    tiny = PUBLISHED[TINY]["text_config"]
    kept = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "model_type",
    )
    made["text_config"] |= {name: value for name, value in tiny.items() if name not in (*kept, "intermediate_size")}
    made["text_config"] |= dict(zip(kept, (8, 2, 128, 128)))
    monkeypatch.setitem(PUBLISHED, MOE, made)


@pytest.mark.parametrize("size", [f"{TINY}-fp8", MOE, f"{MOE}-fp8"])
def test_decode_of_fp8_and_of_experts(experts, tmp_path, size):
    file = tmp_path / "decode.json"
    args = [
        "bench",
        "decode",
        "--random-weights",
        size,
        "--batch",
        "2",
        "--prompt",
        "20",
        "-o",
        str(file),
        "--roofline",
    ]
    assert cli.main(args) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["shape"] == size.removesuffix("-fp8") and row["dtype"] == ("fp8" if "fp8" in size else "bfloat16")
    assert row["same_tokens"] and row["captured"] and row["flop"] > 0
    ElementTree.fromstring(file.with_suffix(".svg").read_text())


def test_floor_of_fp8_has_the_scales(pretend):  # noqa: F811
    llm = bench_gpu.load(f"{TINY}-fp8", 20)
    quantised = [w for name, w in llm.model.weights.items() if isinstance(w, Fp8) and "mtp" not in name]
    assert quantised
    llm.model.weights.update({name: w.bits for name, w in llm.model.weights.items() if isinstance(w, Fp8)})
    without = bench_gpu.step_bytes(llm, 1, 0)
    assert bench_gpu.step_bytes(bench_gpu.load(f"{TINY}-fp8", 20), 1, 0) - without == sum(
        w.scale.nbytes for w in quantised
    )


def test_floor_of_experts_is_what_is_chosen(experts):
    """One row reads two of eight, many rows all; each row computes with two."""
    llm = bench_gpu.load(MOE, 20)
    stacks = [w for name, w in llm.model.weights.items() if ".experts." in name and not name.startswith("mtp.")]
    others = [w for w, expert in bench_gpu._read_weights(llm) if not expert]
    whole, rest = sum(w.nbytes for w in stacks), sum(w.nbytes for w in others)
    request = bench_gpu.step_bytes(llm, 1, 0) - rest - whole // 4
    assert bench_gpu.step_bytes(llm, 2, 0) == rest + whole * (1 - (3 / 4) ** 2) + 2 * request
    assert bench_gpu.step_bytes(llm, 10**6, 0) == rest + whole + 10**6 * request
    numbers = sum(w.size for w in others) + sum(w.size for w in stacks) / 4
    assert bench_gpu.step_flop(llm, 3) == 6 * numbers
    head = llm.config.vocab_size * llm.config.hidden_size
    assert bench_prompts.floor(llm, 3, 1e9, 1.0) == pytest.approx((6 * numbers - 4 * head) / 1e9)  # of a prompt
    assert bench_prompts.floor(llm, 1, 1.0, 1e9) == pytest.approx((rest + whole / 4) / 1e6)


def test_graphs_are_weighed(pretend, monkeypatch):  # noqa: F811
    """Captured are all steps of few rows (here 32) of every kind, and none while requests come and go."""
    monkeypatch.setattr(cuda_executor, "LARGEST_CAPTURED", 32)
    monkeypatch.setattr(pricing, "price", lambda *_, **__: None)
    monkeypatch.setattr(bench_graphs, "REQUESTS", 10)
    monkeypatch.setattr(bench_graphs, "TOKENS", 4)
    monkeypatch.setattr(bench_graphs, "array_bytes", lambda: 0)
    found = bench_graphs.weighed(TINY)
    llm = LLM(device="cuda", random_weights=TINY, draft="auto")
    drafted = 3 + 3 + 1  # for several; for a request alone; of 32 rows, few of each request
    assert found["graphs"] == 4 * 2 + 1 + drafted * len(llm.engine.executor.depths)  # plain steps of single rows or not
    assert found["captures_while_serving"] == 0 and found["pool_grew_bytes"] == 0
    shown = bench_tables.decode({**GPU, "read_gb_s": 1.0, "rows": [], "graphs": {**found, "bytes": 123456789}})
    assert "take 123 MB" in shown


def test_the_picture_shows_every_step():
    """A point and a bar each, under both roofs."""
    rows = [
        {"shape": "qwen3.5-9b", "dtype": dtype, "batch": batch, "ms": 4.0, "share": 0.8}
        | {"flop": 2e10 * batch, "read_bytes": 1.7e10}
        for dtype in ("bfloat16", "fp8")
        for batch in (1, 128)
    ]  # fmt: skip
    made = bench_roofline.plot({**GPU, "read_gb_s": 4000.0, "product_tflop_s": 700.0, "rows": rows})
    page = ElementTree.fromstring(made)
    names = [element.tag.split("}")[1] for element in page.iter()]
    assert names.count("circle") == names.count("rect") == 4
    assert "9b" in made and "fp8 x 128" in made and "80%, 4.00 ms" in made and "700 TFLOP/s" in made
    assert "prefers-color-scheme" in made
    x, y = [float(point) for point in page.findall(".//{*}polyline")[0].get("points").split()[1].split(",")]
    assert all(float(c.get("cy")) > y for c in page.findall(".//{*}circle"))
    assert "bench" not in bench_roofline.plot({**GPU, "read_gb_s": 4000.0, "product_tflop_s": 700.0, "rows": []})
