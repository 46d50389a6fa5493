"""`boleinfer trace`: the record says what the run did, and the page shows it whatever the texts hold."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from boleinfer import cli, trace, watch
from boleinfer.llm import LLM
from boleinfer.sampling import SamplingParams
from tests import browser, emulator
from tests.checkpoints import plausible_checkpoint
from tests.tokenizers_made import make_tokenizer

PROMPT = 'class Stack:\n    """A stack of things."""\n\n    def __init__(self):\n'
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.1, seed=5, max_tokens=40, logprobs=3)


@pytest.fixture(scope="module")
def llm():
    made = LLM(device="cpu", draft="graft", draft_nodes=12)
    made.engine.executor.price = lambda *_: None  # what pays differs from machine to machine
    return made


@pytest.fixture(scope="module")
def record(llm):
    return trace.record_of(llm, PROMPT, PARAMS) | {"format": trace.FORMAT, "model": "m", "draft": "auto"}


# ---- the record ------------------------------------------------------------------------------------------------------


def test_watching_changes_nothing(llm, record):
    parts = llm.engine, llm.engine.scheduler, llm.engine.executor, llm.engine.executor.model, llm.engine.executor.state
    output = llm.generate([PROMPT], PARAMS)[0]
    assert [word["id"] for word in record["answer"]] == output.token_ids
    assert [word["id"] for word in record["prompt"]] == output.prompt_token_ids
    assert "".join(word.get("piece", word["text"]) for word in record["answer"]) == output.text
    assert [type(part).__module__ for part in parts] == [
        f"boleinfer.{name}" for name in ("engine", "scheduler", "executor", "decoder", "state")
    ]
    json.dumps(record, allow_nan=False)


def test_steps_add_up(record):
    steps, answer = record["steps"], record["answer"]
    assert (
        not steps[0]["decodes"] and steps[0]["known"] == len(record["prompt"]) and all(s["decodes"] for s in steps[1:])
    )
    assert [s["first"] for s in steps] == np.cumsum([0, *(s["count"] for s in steps[:-1])]).tolist()
    assert sum(s["count"] for s in steps) == len(answer) == record["totals"]["tokens"]
    assert sum(n["verified"] for s in steps for n in s["nodes"]) == record["totals"]["drafted"]
    accepted = 0
    for i, step in enumerate(steps):
        assert step["committed"] == (0 if i == 0 else len(record["prompt"]) + step["first"] - 1)
        assert {"forward", "accept", "commit", "rest"} <= set(step["ms"]) and all(t >= 0 for t in step["ms"].values())
        words = answer[step["first"] :][: step["count"]]
        assert all(word["step"] == i for word in words)
        path = [n for n in step["nodes"] if n["accepted"]]
        accepted += min(len(path), step["count"] - (len(path) < step["count"]))
        assert [n["id"] for n in path][: len(words)] == [w["id"] for w in words][: len(path)]
        assert [w["by"] for w in words] == [n["by"] for n in path][: len(words)] + [{}] * (len(words) - len(path))
        for node in step["nodes"]:
            assert (
                node["by"] and set(node["by"]) <= set(record["drafters"]) and not (node["accepted"] > node["verified"])
            )
            assert 0 < node["prob"] <= 1 and all(0 <= p <= 1 for p in node["by"].values())
    assert accepted == record["totals"]["accepted"] > 5
    assert set(record["drafters"]) == {"suffix", "mtp"}
    assert any(len(node["by"]) == 2 for step in steps for node in step["nodes"])


def test_measuring_costs_is_no_part_of_a_step(llm, monkeypatch):
    real, late = time.perf_counter, [0.0]

    def price(*_):
        late[0] += 1000.0  # seconds

    monkeypatch.setattr(llm.engine.executor, "price", price)
    monkeypatch.setattr(watch.time, "perf_counter", lambda: real() + late[0])
    record = trace.record_of(llm, "a", SamplingParams(max_tokens=2, logprobs=0))
    assert late[0] and all(sum(step["ms"].values()) < 1e6 and "price" not in step["ms"] for step in record["steps"])


def test_the_model_own_chances(llm, record):
    row = llm.logits([word["id"] for word in record["prompt"]])[-1].astype(float)
    first = record["answer"][0]
    chances = row - row.max() - np.log(np.exp(row - row.max()).sum())
    np.testing.assert_allclose(first["logprob"], chances[first["id"]], atol=1e-4)
    others = [word["id"] for word in first["likeliest"]]
    assert others == [i for i in np.argsort(-chances)[:3].tolist() if i != first["id"]]


def test_tokens_that_are_no_text(llm):
    end = next(iter(llm.tokenizer.eos_ids))
    half = next(i for i in range(llm.tokenizer.n_ids) if llm.tokenizer.bytes_of(i) == b"\xe6")
    assert trace._word(llm.tokenizer, end) == {"id": end, "text": "<end>"}
    assert trace._word(llm.tokenizer, half, "") == {"id": half, "text": "\\xe6", "piece": ""}
    ids = llm.tokenizer.encode("a漢b")
    assert "".join(trace._texts(llm.tokenizer, ids)) == "a漢b"
    assert "".join(trace._texts(llm.tokenizer, ids + [half])) == "a漢b\ufffd"


def test_on_a_gpu_a_step_is_one_phase(tmp_path):
    if problem := emulator.missing():
        pytest.skip(problem)
    model = make_tokenizer(plausible_checkpoint(tmp_path, "qwen3_5", "BF16", 1))
    with emulator.emulated():
        llm = LLM(model, device="cuda", dtype="float32", draft="mtp", max_model_len=64, max_batch=1, graphs=False)
        llm.engine.executor.price = lambda *_: None
        record = trace.record_of(llm, "abc", SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    steps = record["steps"]
    assert record["device"] == "cuda" and record["drafters"] == ["mtp"] and sum(s["count"] for s in steps) == 4
    assert all(s["ms"]["step"] > 0 and "forward" not in s["ms"] for s in steps)
    assert steps[1]["nodes"] and all(0 <= n["id"] < 512 and n["verified"] for n in steps[1]["nodes"])


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments):
    return cli.main(["trace", "--device", "cpu", "-n", "6", "--temp", "0", *arguments, "def f(x):\n"])


def test_the_command_writes_one_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run() == 0
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"trace.html: \d steps; open it in a browser\n", err)
    text = Path("trace.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "__TRACE__" not in text
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org)""", text)  # nothing from elsewhere
    assert run("--json", "-q") == 0
    assert json.loads(capsys.readouterr().out)["format"] == trace.FORMAT
    assert run("--json", "-o", "t.json") == 0
    assert json.loads(Path("t.json").read_text())["params"] == {
        "temperature": 0.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_tokens": 6,
    }
    assert run("-o", str(tmp_path / "no" / "file")) == 2
    assert "--out" in capsys.readouterr().err


# ---- the page --------------------------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 2'>",
    "<!-- <script>",
    "\"'`${window.bad = 3}\\",
    "\u202eevil\u2066\u200f",
    "\x00\x07\x1b[31m\r",
    "\ud800",
    "&lt;b&gt;",
    "x" * 4000,
    "\n\t  ",
    "漢字🙂é",
]


def hostile(record):
    """The record with such texts wherever there is one."""
    made, texts = copy.deepcopy(record), iter(HOSTILE * 2000)

    def spoil(value):
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = next(texts) if isinstance(item, str) and key != "format" else item
                spoil(value[key])
            if "by" in value:
                value["by"] = {f"mtp{HOSTILE[1]}": p for p in list(value["by"].values())[:1]}
        elif isinstance(value, list):
            for item in value:
                spoil(item)

    spoil(made)
    return made | {"drafters": [f"mtp{HOSTILE[1]}"]}


def test_nothing_in_the_data_ends_it(record):
    made = hostile(record)
    text = trace.page(made)
    (data,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == made and data.isascii() and not set(data) & set("<>&")
    assert text.count("</script>") == 2


@pytest.fixture(scope="module")
def chromium():
    if problem := browser.missing():
        pytest.skip(problem)
    with browser.Browser() as made:
        yield made


def shown(chromium, record, tmp_path, place=""):
    file = tmp_path / "trace.html"
    file.write_text(trace.page(record), encoding="utf-8")
    chromium.open(file, place)
    return chromium


def text_of(chromium, selector):
    return chromium.js("document.querySelector(arguments[0]).textContent", selector)


TOKENS = "(s => new Set([...document.querySelectorAll(s)].map(span => span.dataset.token)).size)"


def test_stepping_through(chromium, record, tmp_path):
    page, steps = shown(chromium, record, tmp_path), record["steps"]
    assert text_of(page, "#place") == f"step 1 of {len(steps)}"
    assert text_of(page, "#text") == PROMPT + "".join(w.get("piece", w["text"]) for w in record["answer"])
    for i, step in enumerate(steps):
        assert text_of(page, "#place") == f"step {i + 1} of {len(steps)}"
        counts = page.js(
            "Object.fromEntries(['known', 'right', 'wrong', 'spare', 'bonus'].map("
            "k => [k, document.querySelectorAll('#tree .node.' + k).length]))"
        )
        nodes = step["nodes"]
        right = sum(n["accepted"] for n in nodes)
        assert counts == {
            "known": min(6, step["known"]),
            "right": right,
            "wrong": sum(n["verified"] for n in nodes) - right,
            "spare": sum(not n["verified"] for n in nodes),
            "bonus": int(step["count"] > right),
        }
        assert page.js(f"{TOKENS}('.answer.now')") == step["count"]
        assert page.js("document.querySelectorAll('#thought tr').length") == step["count"]
        assert page.js(f"{TOKENS}('.answer:not(.later)')") == step["first"] + step["count"]
        page.press("right")
    assert text_of(page, "#place") == f"step {len(steps)} of {len(steps)}"  # the last one stays
    page.press("home", "right", "right", "left")
    assert text_of(page, "#place") == f"step 2 of {len(steps)}" and page.js("location.hash") == "#2"
    page.press("end")
    assert text_of(page, "#place") == f"step {len(steps)} of {len(steps)}"
    page.click("#first")
    page.click("#strip button:nth-child(3)")
    assert text_of(page, "#place") == f"step 3 of {len(steps)}"
    before = page.js("getComputedStyle(document.body).backgroundColor")
    page.press("t")
    assert page.js("getComputedStyle(document.body).backgroundColor") != before
    shown(chromium, record, tmp_path, "#4")
    assert page.log() == []


def test_hostile_texts_are_only_text(chromium, record, tmp_path):
    made = hostile(record)
    page = shown(chromium, made, tmp_path)
    for _ in made["steps"]:
        page.press("right")
    assert page.js("window.bad ?? null") is None and page.js("document.querySelectorAll('img, iframe').length") == 0
    assert page.js("document.scripts.length") == 2 and page.log() == []
    text = text_of(page, "#text")
    assert HOSTILE[0] in text and "U+202E" in text and "U+0000" in text and "U+D800" in text
    assert not set("\u202e\u2066\u200f\x00\x07\x1b") & set(page.js("document.body.innerText"))


@pytest.mark.parametrize("costs", [False, True])
def test_the_budget_is_shown_where_costs_are_known(chromium, record, tmp_path, costs):
    made = copy.deepcopy(record)
    at = next(i for i, s in enumerate(made["steps"]) if len(s["nodes"]) > 2)
    nodes = len(made["steps"][at]["nodes"])
    known = {"expected": [1 + 0.5 * n for n in range(nodes + 1)], "ms": [3 + n for n in range(nodes + 1)], "chosen": 1}
    made["steps"][at]["budget"] = known if costs else None
    page = shown(chromium, made, tmp_path, f"#{at + 1}")
    assert page.js("document.querySelectorAll('#budget svg').length") == 1 + costs
    assert (f"1 of {nodes}" if costs else "tokens of a step: 1") in text_of(page, "#budgetsaid")
    assert page.log() == []


def test_one_step_or_none(chromium, record, tmp_path):
    """A prompt that the context just holds gives no answer, and so no steps."""
    made = copy.deepcopy(record) | {"answer": [], "steps": []}
    page = shown(chromium, made, tmp_path)
    assert "no step" in text_of(page, "#said").lower() and page.log() == []
