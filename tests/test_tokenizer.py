"""Text and ids: equal to Hugging Face's, streams that never cut a character, end tokens, settings, broken files."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.sampling import SamplingParams
from boleinfer.tokenizer import Tokenizer, TokenizerError
from tests.tokenizers_made import SPECIAL, added_ids, make_tokenizer

TEXTS = [
    "",
    " ",
    "def f(x):\n    return x\n",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 emoji",
    "e\u0301",
    "\r\n\t\x00\x7f",
    "ﬁ",
]
TEXTS += ["<|im_start|>user\nhi<|im_end|>", "<think>a</think>", "a<|endoftext|>b", "x" * 5000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template="{{ messages[0].content }}")


@pytest.fixture(scope="module")
def ours(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    return [*pieces, stream.flush()]


# ---- encode and decode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_hf_and_adds_nothing(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_settings_are_not_obeyed(tmp_path):
    raw = json.loads((make_tokenizer(tmp_path) / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert len(Tokenizer.from_folder(tmp_path).encode("one two three four five six")) > 3


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 530), max_size=40))
def test_stream_equals_decode_for_any_ids(ours, theirs, ids):
    """Random ids are mostly broken UTF-8; special, padded and unknown ids are among them."""
    pieces = streamed(ours, ids)
    assert "".join(pieces) == ours.decode(ids)
    known = [i for i in ids if i < ours.n_ids]
    assert ours.decode(known) == theirs.decode(known, skip_special_tokens=True) == ours.decode(ids)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_stream_never_emits_half_a_character(ours, text):
    import unicodedata

    text = unicodedata.normalize("NFC", text)
    pieces = streamed(ours, ours.encode(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert text.startswith(so_far)


def test_character_cut_at_the_end_is_flushed_once(ours):
    ids = ours.encode("日")[:-1]
    assert len(ids) >= 1
    stream = ours.stream()
    assert "".join(stream.push(i) for i in ids) == ""
    assert stream.flush() == "\ufffd" == ours.decode(ids)
    assert stream.flush() == ""
    assert "".join(stream.push(i) for i in ours.encode("ok")) == "ok"  # and the stream starts afresh


def test_special_tokens_are_left_out_other_added_ones_kept(ours):
    ids = ours.encode("<|im_start|>a<think>b</think><|im_end|>")
    assert ours.decode(ids) == "a<think>b</think>" == "".join(streamed(ours, ids))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_f49_lone_surrogate(ours, text):
    with pytest.raises(ValueError, match="lone surrogate"):
        ours.encode(text)
    with pytest.raises(ValueError, match="lone surrogate"):
        ours.chat_ids([{"role": "user", "content": text}])


@pytest.mark.parametrize("text", [None, b"bytes", 3, ["a"]])
def test_f49_what_is_not_text(ours, text):
    with pytest.raises(ValueError, match="expected text"):
        ours.encode(text)


# ---- F46: ids without a token ----------------------------------------------------------------------------------------


def test_f46_padded_rows_are_masked_and_sparse_ids_stay(tmp_path):
    tokenizer = Tokenizer.from_folder(make_tokenizer(tmp_path, vocab=480, sparse=500))
    assert tokenizer.encode("<|far|>") == [500]
    assert tokenizer.n_ids == 501
    mask = tokenizer.valid_ids(512)
    assert mask.dtype == bool and mask.shape == (512,)
    assert np.flatnonzero(mask).tolist() == [*range(480), 500]
    for i in (480, 490, 499, 511, 512, 10**6, -1):
        assert tokenizer.decode([i]) == "" == "".join(streamed(tokenizer, [i]))
    assert tokenizer.valid_ids(490).sum() == 480  # fewer rows than ids: never out of bounds


# ---- F39: end tokens -------------------------------------------------------------------------------------------------

END, TURN, START = SPECIAL[0], SPECIAL[2], SPECIAL[1]


@pytest.mark.parametrize(
    "config, generation, setting, expected",
    [
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, TURN, {7, 8, 9, TURN}),
        ({"eos_token_id": [7, 6]}, {"eos_token_id": 8}, None, {6, 7, 8}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {"content": END, "lstrip": False}, {END}),
        ({"text_config": {"eos_token_id": 5}, "eos_token_id": 4}, None, TURN, {4, 5, TURN}),
        (None, None, END, {END}),
        (None, {"eos_token_id": 0}, None, {0}),
        (None, None, "<no such token>", set()),
        (None, None, None, set()),
    ],
)
def test_f39_end_tokens_are_the_union(tmp_path, config, generation, setting, expected):
    make_tokenizer(tmp_path, eos_token=setting)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    ids = added_ids(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_ids == frozenset(ids.get(e, e) for e in expected)


@pytest.mark.parametrize("bad", ["</s>", ["a"], 1.5, True, {"id": 3}])
def test_f39_malformed_end_token(tmp_path, bad):
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(TokenizerError, match="eos_token_id of generation_config.json"):
        Tokenizer.from_folder(tmp_path)


# ---- sampling defaults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "bos_token_id": 3},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "temperature": 1.0, "min_p": 0.1, "top_k": None}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_generation_defaults(tmp_path, generation, expected):
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = Tokenizer.from_folder(tmp_path).generation_defaults
    assert found == expected
    params = SamplingParams(**found)
    assert all(getattr(params, key) == value for key, value in expected.items())


def test_malformed_generation_default(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_k": "twenty"}')
    with pytest.raises(TokenizerError, match="top_k of generation_config.json is 'twenty'"):
        Tokenizer.from_folder(tmp_path)


# ---- broken files ----------------------------------------------------------------------------------------------------


def test_no_tokenizer_file(tmp_path):
    with pytest.raises(TokenizerError, match="has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}'])
def test_broken_tokenizer_file(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="tokenizer.json is not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_broken_setting_file(tmp_path, name, text):
    make_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match=re.escape(name)):
        Tokenizer.from_folder(tmp_path)


def test_ids_that_the_library_would_renumber(tmp_path):
    """tokenizer.json says 500 for a token that is not in the vocabulary: the library quietly uses the next free id."""
    make_tokenizer(tmp_path, vocab=480)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"].append(raw["added_tokens"][-1] | {"id": 500, "content": "<|far|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"500": {"content": "<|far|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"<\|far\|> has id 480 in tokenizer.json, 500 in tokenizer_config.json"):
        Tokenizer.from_folder(tmp_path)


def test_template_that_is_not_text(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(TokenizerError, match="chat_template.jinja cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_of_another_kind(tmp_path):
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not a byte-level tokenizer"):
        Tokenizer.from_folder(tmp_path)
