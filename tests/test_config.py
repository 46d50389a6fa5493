"""config.json in every spelling, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from boleinfer.config import ConfigError, read_config
from boleinfer.published import PUBLISHED, ROPE
from boleinfer.supported import ONLY, OTHER_HYBRIDS, SUPPORTED

DENSE = PUBLISHED["Qwen3.5-9B"]["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
MOE = PUBLISHED["Qwen3.5-35B-A3B"]
NEXT = PUBLISHED["Qwen3-Next-80B-A3B"]


def without(config: dict, *keys: str) -> dict:
    return {k: v for k, v in config.items() if k not in keys}


# ---- published files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    raw = PUBLISHED[name]
    text = raw.get("text_config", raw)
    config = read_config(raw)
    assert config.model_type == text["model_type"]
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "linear_num_value_heads", "vocab_size"):
        assert getattr(config, key) == text[key]
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == list(range(3, config.num_hidden_layers, 4))
    assert (config.rope.rope_type, config.rope.rotary_dim) == ("default", 64)
    assert config.rope.theta == (5e6 if name == "Qwen3-Coder-Next" else 1e7)
    assert config.tie_word_embeddings is (name in ("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B"))
    assert config.mtp_num_hidden_layers == 1
    assert config.max_position_embeddings == 262144
    assert config.dtype == "bfloat16"
    assert config.quantization is None
    dense = config.model_type == "qwen3_5_text"
    assert (config.num_experts == 0) is dense
    assert (config.intermediate_size > 0) is dense
    assert config.norm_topk_prob is not dense


def test_hf_configs_are_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    for kind, model_type in (
        ("Qwen3NextConfig", "qwen3_next"),
        ("Qwen3_5TextConfig", "qwen3_5_text"),
        ("Qwen3_5MoeTextConfig", "qwen3_5_moe_text"),
        ("Qwen3_5Config", "qwen3_5_text"),
        ("Qwen3_5MoeConfig", "qwen3_5_moe_text"),
    ):
        rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        flat = {"rope_parameters": rope, "num_hidden_layers": 5, "eos_token_id": [7, 3]}
        config = getattr(transformers, kind)(**({"text_config": flat} if kind[-8:-6] in ("_5", "oe") else flat))
        config.save_pretrained(tmp_path / kind)
        ours = read_config(tmp_path / kind)
        assert ours.model_type == model_type
        theirs = config.get_text_config()
        assert list(ours.layer_types) == theirs.layer_types
        assert ours.rope.theta == 1e6 and ours.rope.rotary_dim == 128
        assert ours.eos_token_ids == (3, 7)
        assert ours.num_key_value_heads == theirs.num_key_value_heads


# ---- spellings -------------------------------------------------------------------------------------------------------


def spellings(yarn: bool) -> list[dict]:
    """One model eight ways: flat or nested, older or newer rope, base and fraction inside the settings or outside."""
    text = without(DENSE, "rope_parameters", "architectures", "model_type", "layer_types", "dtype")
    extra = {"factor": 4.0, "original_max_position_embeddings": 65536} if yarn else {}
    base = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
    files = []
    for newer in (True, False):
        kind = {"rope_type" if newer else "type": "yarn" if yarn else "default"} | extra
        for beside in (True, False):
            key = "rope_parameters" if newer else "rope_scaling"
            rope = {key: kind} | base if beside else {key: kind | base}
            rope |= {"dtype": "bfloat16"} if newer else {"torch_dtype": "torch.bfloat16", "layer_types": None}
            inner = text | {"model_type": "qwen3_5_text"}
            files.append(inner | rope | {"architectures": ["Qwen3_5ForCausalLM"]})
            outside = {k: rope.pop(k) for k in base if k in rope}
            files.append({"model_type": "qwen3_5", "text_config": inner | rope} | outside)
    return files


@pytest.mark.parametrize("yarn", [False, True])
def test_f09_eight_spellings_are_one_config(yarn, tmp_path):
    files = spellings(yarn)
    assert len({json.dumps(f, sort_keys=True) for f in files}) == 8
    configs = []
    for i, file in enumerate(files):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(file))
        configs.append(read_config(path))
    assert all(c == configs[0] for c in configs)
    assert configs[0].rope.rope_type == ("yarn" if yarn else "default")
    assert configs[0].rope.theta == 1e7 and configs[0].rope.rotary_dim == 64
    if not yarn:
        assert configs[0] == read_config(PUBLISHED["Qwen3.5-9B"])


def test_layer_types_or_interval():
    listed = read_config(DENSE)
    interval = read_config(without(DENSE, "layer_types"))
    neither = read_config(without(DENSE, "layer_types", "full_attention_interval"))
    assert listed == interval == neither
    two = read_config(without(DENSE, "layer_types") | {"full_attention_interval": 2})
    assert two.layer_types[:4] == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("outer", [True, False, None])
def test_f11_tie_flag_at_either_level(inner, outer):
    raw = without(MOE, "tie_word_embeddings") | {"text_config": without(MOE["text_config"], "tie_word_embeddings")}
    if inner is not None:
        raw["text_config"]["tie_word_embeddings"] = inner
    if outer is not None:
        raw["tie_word_embeddings"] = outer
    assert read_config(raw).tie_word_embeddings is bool(inner or outer)


def test_mtp_count_keys():
    assert read_config(NEXT).mtp_num_hidden_layers == 1  # not announced in its files
    assert read_config(NEXT | {"num_nextn_predict_layers": 0}).mtp_num_hidden_layers == 0
    plain = without(DENSE, "mtp_num_hidden_layers")
    assert read_config(plain).mtp_num_hidden_layers == 0
    assert read_config(plain | {"num_nextn_predict_layers": 1}).mtp_num_hidden_layers == 1
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers is 2"):
        read_config(plain | {"mtp_num_hidden_layers": 2})


def test_f39_end_tokens_of_both_levels():
    nested = {"model_type": "qwen3_5", "text_config": without(DENSE, "architectures") | {"eos_token_id": [5, 2]}}
    assert read_config(nested | {"eos_token_id": 9}).eos_token_ids == (2, 5, 9)
    assert read_config(nested | {"eos_token_id": None}).eos_token_ids == (2, 5)
    assert read_config(DENSE | {"eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_config(DENSE | {"eos_token_id": ["</s>"]})


# ---- YaRN ------------------------------------------------------------------------------------------------------------

YARNS = [
    {"factor": 4.0, "original_max_position_embeddings": 262144},
    {"factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"factor": 2.5, "original_max_position_embeddings": 1000, "mscale": 0.7, "mscale_all_dim": 0.3},
    {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.25},
    {"factor": 16.0},
]


@pytest.mark.parametrize("settings", YARNS)
@pytest.mark.parametrize("theta, partial", [(1e7, 0.25), (1e4, 0.5), (150.0, 1.0)])
def test_yarn_equals_hf(settings, theta, partial):
    hf = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import Qwen3_5TextConfig

    rope = {"rope_type": "yarn", "rope_theta": theta, "partial_rotary_factor": partial} | settings
    theirs = Qwen3_5TextConfig(rope_parameters=dict(rope), max_position_embeddings=2048, head_dim=64)
    inv_freq, scale = hf.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = read_config(DENSE | {"rope_parameters": rope, "max_position_embeddings": 2048, "head_dim": 64})
    np.testing.assert_allclose(ours.rope.inv_freq(), inv_freq.numpy(), rtol=2e-6)
    assert ours.rope.attention_factor == pytest.approx(scale, rel=1e-12)
    original = settings.get("original_max_position_embeddings", 2048)
    assert ours.max_position_embeddings == max(2048, int(settings["factor"] * original))


def test_plain_rope():
    rope = read_config(DENSE).rope
    np.testing.assert_allclose(rope.inv_freq(), [1e7 ** (-j / 32) for j in range(32)], rtol=1e-15)
    assert rope.attention_factor == 1.0


def test_yarn_factor_from_the_context_lengths():
    rope = without(ROPE, "rope_type") | {"rope_type": "yarn", "original_max_position_embeddings": 65536}
    assert read_config(DENSE | {"rope_parameters": rope}).rope.factor == 4.0
    with pytest.raises(ConfigError, match="factor is missing"):
        read_config(DENSE | {"rope_parameters": ROPE | {"rope_type": "yarn"}})


# ---- refusals --------------------------------------------------------------------------------------------------------

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
SIZES += ("linear_conv_kernel_dim", "max_position_embeddings")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


@pytest.mark.parametrize("key", [*SIZES, "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "8", True])
def test_f09_required_size_missing_or_malformed_is_named(key, value):
    raw = without(DENSE, key) if value is None else DENSE | {key: value}
    with pytest.raises(ConfigError, match=f"(?m)^  {key} is"):
        read_config(raw)


@pytest.mark.parametrize("key", EXPERT_SIZES)
def test_required_expert_size_missing_is_named(key):
    for raw in (NEXT, MOE["text_config"]):
        with pytest.raises(ConfigError, match=f"(?m)^  {key} is missing"):
            read_config(without(raw, key))


def test_f09_missing_base_frequency_is_never_defaulted():
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        read_config(without(DENSE, "rope_parameters") | {"partial_rotary_factor": 0.25})


def test_all_problems_come_together():
    raw = without(DENSE, "hidden_size", "head_dim") | {"hidden_act": "gelu", "vocab_size": "many"}
    with pytest.raises(ConfigError) as error:
        read_config(raw)
    for word in ("hidden_size is missing", "head_dim is missing", "hidden_act is 'gelu'", "vocab_size is 'many'"):
        assert word in str(error.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "llama3", "su"])
def test_f09_unknown_rope_type_is_refused(kind):
    for rope in ({"rope_parameters": ROPE | {"rope_type": kind}}, {"rope_scaling": {"type": kind, "factor": 2.0}}):
        with pytest.raises(ConfigError, match=f"rope_type is '{kind}'"):
            read_config(DENSE | rope)


def test_rope_levels_that_contradict_each_other_are_refused():
    nested = {"model_type": "qwen3_5", "text_config": without(DENSE, "architectures")}
    with pytest.raises(ConfigError, match="rope_type is 'default' in text_config but 'yarn' outside"):
        read_config(nested | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(ConfigError, match="rope_theta"):
        read_config(nested | {"rope_theta": 10000})


OTHER_MATHS = {
    "hidden_act": "gelu",
    "output_gate_type": "sigmoid",
    "attention_bias": True,
    "attn_output_gate": False,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "final_logit_softcapping": 30.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "linear_allow_neg_eigval": True,
    "hc_count": 4,
    "ple_layer_ids": [2],
    "mtp_use_dedicated_embeddings": True,
    "layer_types": ["linear_attention", "sliding_attention"] * 16,
    "num_experts": 8,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}


@pytest.mark.parametrize("key", OTHER_MATHS)
def test_values_that_change_the_maths_are_refused_by_name(key):
    for raw in (
        DENSE | {key: OTHER_MATHS[key]},
        {"model_type": "qwen3_5", "text_config": DENSE | {key: OTHER_MATHS[key]}},
    ):
        with pytest.raises(ConfigError, match=key):
            read_config(raw)


@pytest.mark.parametrize("key", ONLY)
def test_null_and_the_supported_values_are_accepted(key):
    base = NEXT
    expected = read_config(base)
    for value in (None, *ONLY[key]):
        assert read_config(base | {key: value}) == expected


def test_harmless_keys_are_ignored():
    extra = {
        "output_gate_type": "swish",
        "language_model_only": False,
        "sliding_window": 4096,
        "router_aux_loss_coef": 1,
    }
    extra |= {"use_sliding_window": False, "attention_dropout": 0.1, "pad_token_id": 3, "transformers_version": "9"}
    assert read_config(DENSE | extra) == read_config(DENSE)


def test_norm_topk_prob():
    assert read_config(NEXT | {"norm_topk_prob": False}).norm_topk_prob is False
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        read_config(MOE["text_config"] | {"norm_topk_prob": False})


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads 6"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 3 / 256}}, "partial_rotary_factor"),
        ({"rope_parameters": ROPE | {"rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_parameters": ROPE | {"rope_theta": math.inf}}, "rope_theta is inf"),
        ({"rope_parameters": [1]}, "rope settings"),
        ({"layer_types": ["linear_attention"]}, "lists 1 layers"),
        ({"layer_types": 4}, "layer_types is 4"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(changed, named):
    with pytest.raises(ConfigError, match=named):
        read_config(DENSE | changed)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_quantisation():
    assert read_config(DENSE | {"quantization_config": FP8}).quantization == "fp8"
    assert read_config(MOE | {"quantization_config": FP8 | {"modules_to_not_convert": ["x"]}}).quantization == "fp8"
    for changed in ({"weight_block_size": [64, 64]}, {"weight_block_size": None}, {"fmt": "e5m2"}):
        with pytest.raises(ConfigError, match="quantization_config"):
            read_config(DENSE | {"quantization_config": FP8 | changed})
    for method in ("awq", "compressed-tensors", "modelopt", "mxfp4", "bitsandbytes"):
        with pytest.raises(ConfigError, match=method):
            read_config(DENSE | {"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize("kind", [*OTHER_HYBRIDS, "llama", "qwen3", "qwen3_5_vision", 7])
def test_other_families_are_refused_with_what_is_supported(kind):
    for raw in ({"model_type": kind}, {"model_type": kind, "text_config": {"model_type": f"{kind}_text"}}):
        with pytest.raises(ConfigError) as error:
            read_config(raw)
        assert repr(kind) in str(error.value)
        assert all(supported in str(error.value) for supported in SUPPORTED)
        assert OTHER_HYBRIDS.get(kind, "") in str(error.value)


def test_family_by_architecture_alone_and_in_conflict():
    assert read_config(without(DENSE, "model_type")) == read_config(DENSE)
    with pytest.raises(ConfigError, match="different families"):
        read_config(DENSE | {"architectures": ["Qwen3_5MoeForCausalLM"]})
    with pytest.raises(ConfigError, match="Qwen3_5ForSequenceClassification"):
        read_config(DENSE | {"architectures": ["Qwen3_5ForSequenceClassification"]})


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": 1', b"\xff\xfe{}"])
def test_broken_file(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="config.json"):
        read_config(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path / "no" / "config.json")


def test_a_folder_and_its_file_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == read_config(DENSE)
