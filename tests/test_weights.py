"""Weights end up where the mathematics expects them, bit for bit, and what does not fit is named."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from boleinfer import models, weights
from boleinfer.checkpoint import Checkpoint, WeightsError
from boleinfer.config import ConfigError, read_config
from tests.checkpoints import (
    expected,
    floats,
    load,
    make_model,
    random_tensors,
    same_bits,
    tiny_config,
    write,
    write_model,
)

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("dtype, fused, shards", [("BF16", False, 1), ("F16", True, 3), ("F32", False, 2)])
def test_f02_every_row_is_where_hf_has_it(tmp_path, family, ratio, dtype, fused, shards):
    tensors = make_model(tmp_path, family, ratio, shards=shards, dtype=dtype, fused=fused)
    arrays = load(tmp_path)
    wanted = expected(read_config(tmp_path), tensors)
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        assert array.dtype == np.float32
        assert same_bits(array, wanted[name]), name


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_f02_rows_set_to_their_own_index(tmp_path, ratio):
    """Value head i uses key head i // ratio: the rows of a group stay in its key head's order."""
    make_model(tmp_path, "qwen3_next", ratio, dtype="F32")
    config = read_config(tmp_path)
    Hk, K, V = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    tensors = random_tensors(config, np.random.default_rng(0), dtype="F32")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    rows = np.arange(tensors[name][1].shape[0], dtype=np.float32)
    tensors[name] = ("F32", np.broadcast_to(rows[:, None], tensors[name][1].shape))
    write(tmp_path / "model.safetensors", tensors)
    loaded = load(tmp_path)["layers.0.linear_attn.in_proj_qkvz"][:, 0]
    group = 2 * K + 2 * ratio * V
    for head in range(Hk * ratio):
        start = 2 * Hk * K + head * V
        first = (head // ratio) * group + 2 * K + (head % ratio) * V
        np.testing.assert_array_equal(loaded[start : start + V], np.arange(first, first + V))


@pytest.mark.parametrize("family", FAMILIES)
def test_f01_trunk_is_bit_equal_with_and_without_mtp(tmp_path, family):
    tensors = make_model(tmp_path / "all", family)
    raw = json.loads((tmp_path / "all" / "config.json").read_text())
    write_model(tmp_path / "trunk", raw, {n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    with pytest.warns(UserWarning, match="MTP layer is off"):
        trunk = load(tmp_path / "trunk")
    both, ignored = load(tmp_path / "all"), load(tmp_path / "all", mtp=False)
    assert trunk.keys() == ignored.keys() == {n for n in both if not n.startswith("mtp.")}
    for name in trunk:
        assert same_bits(trunk[name], both[name]) and same_bits(trunk[name], ignored[name])
    stored = floats(tensors["model.layers.0.input_layernorm.weight"])
    assert same_bits(both["layers.0.input_layernorm"], stored)  # the delta as stored: nobody adds 1 here


def test_f05_types_in_one_file(tmp_path):
    bits = np.array(
        [0x3F80, 0xC020, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x8000], np.uint16
    )  # 1, -2.5, subnormal, inf, nan, -0
    half = np.array([1.0, -2.5, 6e-8, np.inf], np.float16)
    single = np.array([[1.1], [1e-45], [3e38]], np.float32)
    mixed = {
        "b": ("BF16", bits),
        "h": ("F16", half),
        "s": ("F32", single),
        "q": ("F8_E4M3", np.arange(5, dtype=np.uint8)),
    }
    empty = np.zeros((0, 4), np.uint16)
    write(tmp_path / "model.safetensors", mixed | {"none": ("BF16", empty), "d": ("F64", np.ones(1))})
    files = Checkpoint(tmp_path)
    widened = weights.float32(files.view("b"))
    assert np.array_equal(widened.view(np.uint32), bits.astype(np.uint32) << 16)
    assert widened[0] == 1.0 and widened[1] == -2.5 and widened[2] == 2.0**-133 and np.isnan(widened[5])
    assert np.array_equal(widened.view(np.uint32) >> 16, bits)
    assert np.array_equal(files.view("h"), half) and np.array_equal(files.view("s"), single)
    assert np.array_equal(files.view("q"), np.arange(5))
    assert files.view("none").shape == (0, 4) and files.tensors["none"].shape == (0, 4)
    with pytest.raises(WeightsError, match="d is stored as F64"):
        files.view("d")


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_f19_float32_is_never_narrowed(tmp_path, name):
    raw = tiny_config("qwen3_5")
    tensors = random_tensors(read_config(raw), np.random.default_rng(1))
    values = np.array([-9.7, -1.234567891, 1e-30, 0.0, 2.7182818, 10.1], np.float32)
    tensors[f"model.layers.1.linear_attn.{name}"] = ("F32", values)
    write_model(tmp_path, raw, tensors)
    arrays = load(tmp_path)
    assert same_bits(arrays[f"layers.1.linear_attn.{name}"], values)
    stored = floats(tensors[f"model.layers.0.linear_attn.{name}"])
    assert same_bits(arrays[f"layers.0.linear_attn.{name}"], stored)


def test_arrays_are_independent_of_the_files(tmp_path):
    make_model(tmp_path)
    arrays = load(tmp_path)
    before = {n: a.copy() for n, a in arrays.items()}
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:  # in place: a mapping of it would see this
        handle.seek(size // 2)
        handle.write(b"\xab" * (size // 2))
    for name, array in arrays.items():
        assert same_bits(array, before[name])
        array[...] = 0  # writable


def test_progress_counts_every_byte_once(tmp_path):
    make_model(tmp_path, "qwen3_5_moe")
    calls = []
    arrays = load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert len({t for _, t in calls}) == 1 and done == sorted(done) and len(done) == len(arrays)
    assert done[-1] == calls[0][1] == sum(a.nbytes for a in arrays.values())


@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "differing"])
def test_f11_output_head(tmp_path, level, tied, head):
    text = tiny_config("qwen3_5", tie_word_embeddings=None)
    raw = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": None}
    (text if level == "inner" else raw)["tie_word_embeddings"] = tied
    rng = np.random.default_rng(2)
    tensors = random_tensors(read_config(raw), rng, dtype="F32", wrapper="language_model.")
    table = rng.standard_normal((40, 24)).astype(np.float32)
    tensors["model.language_model.embed_tokens.weight"] = ("F32", table)
    other = rng.standard_normal((40, 24)).astype(np.float32)
    tensors["lm_head.weight"] = ("F32", table if head == "equal" else other)
    if head == "absent":
        del tensors["lm_head.weight"]
    write_model(tmp_path, raw, tensors)
    if not tied and head == "absent":
        with pytest.raises(WeightsError, match="1 missing: lm_head.weight"):
            load(tmp_path)
        return
    if tied and head == "differing":
        with pytest.warns(UserWarning, match="a different lm_head is stored: it is used"):
            arrays = load(tmp_path)
    else:
        arrays = load(tmp_path)
    assert (arrays["lm_head"] is arrays["embed_tokens"]) is (tied and head != "differing")
    assert same_bits(arrays["lm_head"], other if head == "differing" else table)
    assert same_bits(arrays["embed_tokens"], table)


def test_tied_model_that_stores_only_the_head(tmp_path):
    tensors = make_model(tmp_path, changed={"tie_word_embeddings": True})
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write(tmp_path / "model.safetensors", tensors)
    arrays = load(tmp_path)
    assert arrays["embed_tokens"] is arrays["lm_head"]
    assert same_bits(arrays["lm_head"], floats(tensors["lm_head.weight"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_f12_mtp_tensors_present_missing_or_stray(tmp_path, family, prefix):
    tensors = {n.replace("mtp.", prefix): t for n, t in make_model(tmp_path, family).items()}
    write(tmp_path / "model.safetensors", tensors)
    mtp_names = [n for n in tensors if "mtp." in n]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wanted in (True, "auto"):  # all there: taken, silently
            assert "mtp.fc" in load(tmp_path, mtp=wanted)
    for gone in ([prefix + "norm.weight"], mtp_names):  # one missing, all missing
        write(tmp_path / "model.safetensors", {n: t for n, t in tensors.items() if n not in gone})
        with pytest.raises(WeightsError, match="missing: .*mtp.norm.weight"):
            load(tmp_path, mtp=True)
        with pytest.warns(UserWarning) as said:
            arrays = load(tmp_path)
        assert len(said) == 1 and "mtp." in str(said[0].message) and "mtp.fc" not in arrays
    write_model(tmp_path, tiny_config(family, mtp_num_hidden_layers=0), tensors)  # stray: ignored by design
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(n.startswith("mtp.") for n in load(tmp_path))
    with pytest.raises(WeightsError, match="announces none"):
        load(tmp_path, mtp=True)


def test_f12_mtp_tensor_of_wrong_shape_or_unknown_name_is_never_skipped(tmp_path):
    tensors = make_model(tmp_path)
    write(tmp_path / "model.safetensors", tensors | {"mtp.fc.weight": ("F32", np.zeros((2, 2), np.float32))})
    with pytest.raises(WeightsError, match=r"mtp.fc.weight is \[2, 2\], expected \[24, 48\]"):
        load(tmp_path)
    write(tmp_path / "model.safetensors", tensors | {"mtp.layers.1.x": ("F32", np.zeros(2, np.float32))})
    with pytest.raises(WeightsError, match="unexpected: mtp.layers.1.x"):
        load(tmp_path)


def test_mtp_argument_is_checked(tmp_path):
    make_model(tmp_path)
    with pytest.raises(ValueError, match="mtp is 'yes'"):
        load(tmp_path, mtp="yes")


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    tensors = make_model(tmp_path, "qwen3_next")
    del tensors["model.norm.weight"], tensors["model.layers.0.linear_attn.A_log"]
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.1.bias"] = ("F32", np.zeros(3, np.float32))
    tensors["model.layers.3.self_attn.k_proj.weight"] = ("BF16", np.zeros((5, 24), np.uint16))
    tensors["model.layers.3.self_attn.v_proj.weight"] = ("I32", np.zeros((32, 24), np.int32))
    tensors["model.layers.1.input_layernorm.weight"] = ("BF16", np.zeros((0,), np.uint16))
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsError) as error:
        load(tmp_path)
    text = str(error.value)
    assert "3 missing: norm.weight, layers.0.linear_attn.A_log, layers.2.mlp.experts.3.up_proj.weight" in text
    assert "1 unexpected: layers.1.bias" in text
    assert "layers.3.self_attn.k_proj.weight is [5, 24], expected [32, 24]" in text
    assert "layers.1.input_layernorm.weight is [0], expected [24]" in text
    assert "layers.3.self_attn.v_proj.weight (I32)" in text


def test_a_long_list_is_cut(tmp_path):
    tensors = make_model(tmp_path, "qwen3_next")
    write(tmp_path / "model.safetensors", {n: t for n, t in tensors.items() if ".experts." not in n or ".0." in n})
    with pytest.raises(WeightsError, match=r"missing: .* and \d+ more") as error:
        load(tmp_path)
    assert len(str(error.value)) < 2000


def test_the_same_tensor_under_two_prefixes_is_refused(tmp_path):
    tensors = make_model(tmp_path)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match="model.norm.weight and model.language_model.norm.weight"):
        load(tmp_path)


def test_vision_and_rotary_tensors_are_skipped(tmp_path):
    tensors = make_model(tmp_path)
    extra = {"model.visual.patch_embed.proj.weight": ("I32", np.zeros(2, np.int32))}
    extra["model.layers.3.self_attn.rotary_emb.inv_freq"] = ("F64", np.zeros(2))
    write(tmp_path / "model.safetensors", tensors | extra)
    assert load(tmp_path).keys() == expected(read_config(tmp_path), tensors).keys()


def test_unknown_family():
    with pytest.raises(ConfigError, match="qwen3_next, qwen3_5_text, qwen3_5_moe_text"):
        models.family("llama")
