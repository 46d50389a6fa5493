"""What SamplingParams accepts, what it refuses and how it says so."""

from dataclasses import fields, replace

import numpy as np
import pytest

from boleinfer.params import SamplingParams

NAN, INF = float("nan"), float("inf")
BAD = {
    "temperature": [NAN, -1, -1e-9, INF, 10**400, None, "1", True, [1]],
    "top_k": [-2, 1.5, NAN, None, "5", True],
    "top_p": [-0.1, 1.01, NAN, INF, None, "0.9", False],
    "min_p": [-0.1, 1.01, NAN, None],
    "repetition_penalty": [0, -1, NAN, INF, None],
    "presence_penalty": [NAN, INF, -INF, None, "0"],
    "frequency_penalty": [NAN, INF, -INF, None],
    "logit_bias": [{1: NAN}, {1: INF}, {-1: 1}, {1.5: 1}, {"x": 1}, {"-1": 1}, {1: None}, {1: True}, [1], "1"],
    "min_tokens": [-1, 1.5, None, True, 257],
    "max_tokens": [0, -1, 1.5, NAN, "9", True],
    "stop": ["", [""], ["a", ""], [1], None, 5, {"a": 1}],
    "stop_token_ids": [[-1], ["1"], [1.5], [True], None, 3, "12"],
    "ignore_eos": [None, 1, "yes"],
    "seed": [1.5, NAN, "1", True, 2**64, -(2**63) - 1],
    "n": [0, -1, None, 1.5, True],
    "logprobs": [-1, 1.5, True, "5"],
}


def test_every_field_has_bad_values():
    assert set(BAD) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name,value", [(name, value) for name, values in BAD.items() for value in values])
def test_f36_bad_values_name_the_field_what_was_given_and_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*; got ") as error:
        SamplingParams(**{name: value})
    assert any(
        word in str(error.value) for word in ("integer", "number", "string", "true or false", "map", "max_tokens")
    )
    if value is not None:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            SamplingParams.from_dict({name: value})


@pytest.mark.parametrize("name", BAD)
def test_f36_null_in_json_is_the_default(name):
    assert SamplingParams.from_dict({name: None}) == SamplingParams()


def test_f36_limits_are_accepted():
    for good in (
        {"temperature": 0}, {"temperature": 1e-45}, {"temperature": 1e300}, {"top_k": 0}, {"top_k": -1},
        {"top_k": 10**9}, {"top_p": 0}, {"top_p": 1e-9}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1},
        {"max_tokens": None}, {"max_tokens": 1}, {"seed": 0}, {"seed": -1}, {"seed": 2**63 - 1}, {"seed": None},
        {"logprobs": 0}, {"logprobs": None}, {"logit_bias": {}}, {"logit_bias": None}, {"stop": []},
        {"presence_penalty": -2}, {"min_tokens": 256},
    ):  # fmt: skip
        params = SamplingParams(**good)
        name, value = next(iter(good.items()))
        assert getattr(params, name) in (value, tuple(value) if isinstance(value, list) else value)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'best_of', 'topp'; known are temperature, top_k"):
        SamplingParams.from_dict({"topp": 0.5, "best_of": None, "top_k": 3})


def test_values_are_normalised_and_survive_replace():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        stop="###",
        stop_token_ids=[np.int32(7)],
        logit_bias={"5": 1, 6: -2},
    )
    assert params.stop == params.stop_strings == ("###",)
    assert params.stop_token_ids == (7,) and params.logit_bias == {5: 1.0, 6: -2.0}
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.stop_token_ids[0]) is int
    again = replace(params, max_tokens=5)
    assert replace(again, max_tokens=256) == params
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, which is 2; got 3"):
        replace(params, min_tokens=3, max_tokens=2)
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_a_callers_containers_are_copied():
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[3] = 4
    assert params.stop == ("a",) and params.logit_bias == {1: 2.0}
