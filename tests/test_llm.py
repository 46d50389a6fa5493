"""The library as its users see it: prompts of every kind, streams, stops, choices, errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import LLM, SamplingParams
from boleinfer.request import RequestError
from tests import emulator
from tests.checkpoints import plausible_checkpoint
from tests.tokenizers_made import make_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(oracle):
    return oracle("qwen3_5").folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_batch=3, max_model_len=200, max_rows=40, ring=6, poison=True)


@pytest.fixture(autouse=True)
def nothing_is_kept(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert engine.state.pages.free == engine.state.pages.size and engine.state.slots.free == engine.state.slots.size
        assert not engine.busy


def test_one_or_many_strings_or_ids(llm):
    (one,) = llm.generate("hello there", GREEDY)
    ids = llm.tokenizer.encode("hello there")
    assert one.prompt == "hello there" and one.prompt_token_ids == ids
    many = llm.generate(["hello there", ids, "x"], [GREEDY, GREEDY, SamplingParams(max_tokens=1, seed=1)])
    assert many[0].token_ids == many[1].token_ids == one.token_ids and len(many[2].token_ids) == 1
    assert many[1].prompt is None
    assert llm.generate(np.asarray(ids), GREEDY)[0].token_ids == one.token_ids
    assert one.stats.prompt_tokens == len(ids) and one.stats.generated_tokens == len(one.token_ids)


def test_logits_equal_hf(llm, oracle):
    ids = llm.tokenizer.encode("def f(a, b): return a" * 4)
    np.testing.assert_allclose(llm.logits(ids), oracle("qwen3_5").logits(ids), atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=60), SamplingParams(seed=4, logprobs=2)])
def test_a_stream_joins_to_the_whole(llm, params):
    (whole,) = llm.generate("abc", params)
    chunks = list(llm.stream("abc", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason and chunks[-1].output.text == whole.text
    assert (whole.logprobs is None) == (chunks[-1].output.logprobs is None) == (params.logprobs is None)
    for a, b in zip(chunks[-1].output.logprobs or (), whole.logprobs or (), strict=True):
        assert list(a) == list(b)
        # draft="auto" chooses a step's rows by the clock, and NumPy's sums round differently with other rows.
        np.testing.assert_allclose(list(a.values()), list(b.values()), atol=5e-4)


def test_a_stream_has_the_logprobs_of_the_whole_to_the_bit(folder):
    """Where a step's rows do not hang on the clock."""
    llm, params = LLM(folder, draft="none"), SamplingParams(seed=4, max_tokens=30, logprobs=2)
    (whole,) = llm.generate("abc", params)
    *_, last = llm.stream("abc", params)
    assert len(whole.logprobs) == len(whole.token_ids) and last.output.logprobs == whole.logprobs


def test_f35_stop_strings_end_text_ids_and_logprobs_together(folder):
    """Whatever is drafted, and wherever the stop lies in what was accepted."""
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=60, logprobs=0)
    plain = LLM(folder, draft="none")
    text = plain.generate("abc", params)[0].text
    for start in (1, 7, 20):
        for n in (1, 2, 5):
            stop = text[start : start + n]
            stopping = SamplingParams(temperature=0.8, seed=11, max_tokens=60, logprobs=0, stop=["@never@", stop])
            want = plain.generate("abc", stopping)[0]
            assert want.finish_reason == "stop" and want.outputs[0].stop_reason == stop
            assert want.text == text[: text.index(stop)] and stop not in want.text
            assert len(want.token_ids) == len(want.logprobs)
            for draft in ("ngram", "mtp", "auto"):
                llm = LLM(folder, draft=draft)
                chunks = list(llm.stream("abc", stopping))
                assert "".join(c.text for c in chunks) == want.text
                assert chunks[-1].output.token_ids == want.token_ids


def test_f39_end_tokens_end_the_answer_and_are_not_in_its_text(llm):
    assert llm.tokenizer.eos_ids == {478}
    biased = SamplingParams(temperature=0, max_tokens=9, logit_bias={478: 100.0})
    (out,) = llm.generate("abc", biased)
    assert (out.token_ids, out.text, out.finish_reason, out.outputs[0].stop_reason) == ([478], "", "stop", 478)
    ignoring = SamplingParams(temperature=0, max_tokens=4, logit_bias={478: 100.0}, ignore_eos=True)
    (out,) = llm.generate("abc", ignoring)
    assert out.token_ids == [478] * 4 and out.finish_reason == "length"
    later = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={478: 100.0})
    assert len(llm.generate("abc", later)[0].token_ids) == 4


def test_f46_padded_rows_are_never_sampled(llm):
    padded = SamplingParams(temperature=0, max_tokens=3, logit_bias={490: 100.0})
    assert 490 not in llm.generate("abc", padded)[0].token_ids
    legal = SamplingParams(temperature=0, max_tokens=3, logit_bias={500: 100.0})
    assert llm.generate("abc", legal)[0].token_ids == [500] * 3
    assert llm.generate([[479, 480, 511]], GREEDY)[0].token_ids


def test_n_answers_differ_and_repeat_with_the_seed(llm):
    params = SamplingParams(n=3, seed=7, temperature=2, max_tokens=12)
    first, again = (llm.generate("abc", params)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3 and [o.index for o in first.outputs] == [0, 1, 2]
    alone = SamplingParams(seed=7, temperature=2, max_tokens=12)
    assert llm.generate("abc", alone)[0].token_ids == first.outputs[0].token_ids
    unseeded = [llm.generate("abc", SamplingParams(temperature=2, max_tokens=12))[0] for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids
    repeated = SamplingParams(temperature=2, max_tokens=12, seed=unseeded[0].outputs[0].seed)
    assert llm.generate("abc", repeated)[0].token_ids == unseeded[0].token_ids


def test_f47_a_closed_stream_frees_what_it_holds(llm):
    stream = llm.stream("abc", SamplingParams(max_tokens=100, seed=1))
    next(stream)
    assert llm.engine.busy
    stream.close()
    assert not llm.engine.busy
    llm.stream("abc", GREEDY)  # never started: nothing was taken


def test_two_streams_at_once(llm):
    want = [llm.generate(p, GREEDY)[0].text for p in ("abc", "xyz")]
    streams, got = [llm.stream(p, GREEDY) for p in ("abc", "xyz")], ["", ""]
    alive = [0, 1]
    while alive:
        for i in list(alive):
            chunk = next(streams[i], None)
            if chunk is None:
                alive.remove(i)
            else:
                got[i] += chunk.text
    assert got == want


def test_f38_prompts_up_to_the_limit(llm):
    ids = np.random.default_rng(0).integers(0, 470, 201).tolist()
    out = llm.generate([ids[:199], ids[:200]], SamplingParams(temperature=0, max_tokens=None))
    assert [len(o.token_ids) for o in out] == [1, 0] and [o.finish_reason for o in out] == ["length"] * 2
    with pytest.raises(RequestError, match="201 tokens, more than the 200"):
        llm.generate([ids], GREEDY)


@pytest.mark.parametrize(
    "prompts,why",
    [
        ("", "the prompt is empty"),
        ([], "list of prompts is empty"),
        ([""], "the prompt is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([[]], "the prompt is empty"),
        ([[-1]], "token id -1; ids run from 0 to 511"),
        ([["a"]], "must be a string or a list of token ids"),
        ([512], "token id 512"),
        (None, "must be a string"),
        (7, "must be a string"),
        ([None], "must be a string"),
        ([True], "must be a string"),
    ],
)
def test_f49_bad_prompts_are_named(llm, prompts, why):
    with pytest.raises(RequestError, match=why):
        llm.generate(prompts, GREEDY)
    assert llm.generate("a", GREEDY)[0].token_ids


def test_bad_parameters_are_named(llm, folder):
    with pytest.raises(RequestError, match="2 prompts need as many params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="a stream carries one answer"):
        llm.stream("a", SamplingParams(n=2))
    with pytest.raises(RequestError, match="logit_bias names token id 512"):
        llm.generate("a", SamplingParams(logit_bias={512: 1.0}))
    for options, why in [
        ({"device": "tpu"}, "'auto' or 'cpu' or 'cuda'"),
        ({"device": "cpu", "dtype": "bfloat16"}, "float32"),
        ({"draft": "magic"}, "auto, none, suffix, mtp, graft, model"),
        ({"max_model_len": 513}, "1 to 512"),
        ({"max_batch": 0}, "at least 1"),
        ({"max_rows": 2}, "max_rows=2 is less than max_batch=8"),
        ({"draft_nodes": -1}, "draft_nodes=-1"),
        ({"random_weights": "qwen3.5-9b"}, "were both given; give one"),
    ]:
        with pytest.raises(ValueError, match=why):
            LLM(folder, **options)


def test_what_a_gpu_cannot_sample_by_is_said_before_anything_runs(tmp_path):
    if problem := emulator.missing():
        pytest.skip(problem)
    folder = make_tokenizer(plausible_checkpoint(tmp_path, "qwen3_5", "BF16", 1))
    with emulator.emulated():
        gpu = LLM(folder, device="cuda", draft="none", max_model_len=64, max_batch=1, graphs=False)
        too_many = SamplingParams(min_tokens=2, stop_token_ids=list(range(70)))
        with pytest.raises(RequestError, match="min_tokens=2 has to forbid 7. end and stop ids"):
            gpu.generate(["a", "b"], [GREEDY, too_many])
        assert not gpu.engine.busy


def test_long_and_odd_text(llm):
    with pytest.raises(RequestError, match="more than the 200"):
        llm.generate("x" * 1_000_000, GREEDY)
    for text in (" ", "\n\n", "é漢字🙂"):
        assert llm.generate(text, GREEDY)[0].token_ids
    with pytest.raises(RequestError, match="the prompt cannot be encoded: .*surrogate"):
        llm.generate("\ud800 lone", GREEDY)


def test_chat_is_the_template_then_generate(llm):
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer.chat_ids(messages)
    want = llm.generate([ids], GREEDY)[0]
    assert llm.chat(messages, GREEDY).token_ids == want.token_ids
    assert "".join(c.text for c in llm.chat_stream(messages, GREEDY)) == want.text


def test_f50_what_does_not_fit_in_memory_is_said_before_it_is_used(folder, monkeypatch):
    from boleinfer import state, weights

    def full(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as m:
        m.setattr(weights, "buffer", full)
        with pytest.raises(weights.WeightsError, match=r"take 0\.0 GiB of memory as float32, more than this machine"):
            LLM(folder)
    monkeypatch.setattr(state, "buffer", full)
    with pytest.raises(ValueError, match="max_batch=3 requests of max_model_len=99 tokens need more memory"):
        LLM(folder, max_batch=3, max_model_len=99)


def test_the_mtp_layer_is_read_only_where_it_may_draft(folder):
    assert [LLM(folder, draft=d).model.has_mtp for d in ("none", "ngram", "mtp", "auto")] == [False, False, True, True]
