"""Measuring what steps cost: once for a model and machine, kept, and without a trace in the model's memory."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from boleinfer import cli, nvrtc, pricing
from boleinfer.llm import LLM
from boleinfer.sampling import SamplingParams


@pytest.fixture
def load(oracle, tmp_path, monkeypatch):
    """A tiny model on the CPU, and a cache folder of its own."""
    folder = oracle("qwen3_5").folder
    monkeypatch.setattr(nvrtc, "default_cache", lambda: nvrtc.Cache(tmp_path / "cache" / "kernels"))
    monkeypatch.setattr(pricing, "ROUNDS", 2)
    monkeypatch.setattr(pricing, "measure", partial(pricing.measure, limit_s=np.inf))  # the machine may be busy
    return lambda **options: LLM(folder, device="cpu", max_model_len=120, **options)


def test_measured_once(load, monkeypatch, tmp_path):
    llm = load(max_batch=3)
    table = llm.engine.executor.price()
    assert table.rows == (1, 2, 4, 8, 16, 27) and table.batch == (1, 3) and not table.stairs
    state = llm.engine.state
    assert state.slots.free == state.slots.size and state.pages.free == state.pages.size
    honest = pricing.measure
    monkeypatch.setattr(pricing, "measure", lambda *_: pytest.fail("measured again"))
    np.testing.assert_array_equal(load(max_batch=3).engine.executor.price().seconds, table.seconds)
    for change in ({"max_batch": 2}, {"draft_nodes": 4}):
        with pytest.raises(pytest.fail.Exception):
            load(**{"max_batch": 3, **change}).engine.executor.price()
    monkeypatch.setattr(pricing, "measure", honest)
    assert llm.engine.executor.price(fresh=True) is not table
    file = pricing.file(llm.engine.executor, llm.engine.executor.price.args[1])
    assert file.is_file() and file.parent == tmp_path / "cache" / "costs"
    monkeypatch.setattr(pricing.provenance, "cpu_name", lambda: "another")
    assert not pricing.file(llm.engine.executor, llm.engine.executor.price.args[1]).is_file()


def test_when_there_is_no_time_few_rows_are_left(load):
    llm = load(max_batch=2)
    o = llm.engine.executor.price.args[1]
    assert pricing.measure(llm.engine.executor, o, limit_s=0.0).rows == (1,)


@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_the_text_is_that_of_plain_decoding(load, draft):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [[7, 8, 9, 7, 8, 9, 7], [5] * 20]
    want = [o.token_ids for o in load(draft="none").generate(prompts, params)]
    llm = load(draft=draft)
    assert [o.token_ids for o in llm.generate(prompts, params)] == want
    assert llm.engine.budget.costs is not None


def test_the_command(oracle, load, capsys):
    folder = str(oracle("qwen3_5").folder)
    assert cli.main(["calibrate", "-m", folder, "--device", "cpu", "--max-batch", "2", "-c", "100"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[3].split()[0] == "1" and "measured in" in err
