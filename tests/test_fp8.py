"""FP8 checkpoints in blocks of 128 x 128, and the other quantised forms that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from boleinfer import weights
from boleinfer.checkpoint import WeightsError
from boleinfer.config import read_config
from tests.checkpoints import (
    expected,
    floats,
    load,
    make_model,
    random_tensor,
    random_tensors,
    tiny_config,
    write,
    write_model,
)


def dequantised(bits, scale):
    """Element by element, with ml_dtypes' own reading of the bits."""
    import ml_dtypes

    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    i, j = np.indices(bits.shape[-2:])
    return values * scale[..., i // 128, j // 128]


@pytest.mark.parametrize("shape", [(128, 128), (192, 64), (64, 300), (1, 129), (257, 128), (3, 130, 140)])
def test_f43_dequantised_blocks_equal_a_plain_reference(shape):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    bits.flat[: min(256, bits.size)] = np.arange(256)[: bits.size]
    scale = rng.standard_normal((*shape[:-2], *(-(-n // 128) for n in shape[-2:]))).astype(np.float32)
    assert np.array_equal(weights.dequantise(bits, scale), dequantised(bits, scale), equal_nan=True)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("scale_type", ["BF16", "F32"])
def test_f43_fp8_checkpoint(tmp_path, family, suffix, scale_type):
    """Parts of fused projections are scaled apart; what has no scale (router, norms, a skipped layer) stays."""
    sizes = {"hidden_size": 192, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "moe_intermediate_size": 64}
    sizes |= {"intermediate_size": 320, "shared_expert_intermediate_size": 128}
    raw = tiny_config(family, **sizes)
    config = read_config(raw)
    rng = np.random.default_rng(4)
    tensors = random_tensors(config, rng, fp8=True)
    plain = dict(tensors)
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        del tensors[name], plain[name]
        weight = name.removesuffix("_scale_inv")
        shape = tensors[weight][1].shape
        if ".layers.1." in name:  # excluded from quantisation
            plain[weight] = tensors[weight] = random_tensor(rng, "BF16", shape)
            continue
        values = np.abs(rng.standard_normal([-(-n // 128) for n in shape])).astype(np.float32)
        scale = (values.view(np.uint32) >> 16).astype(np.uint16) if scale_type == "BF16" else values
        tensors[weight + suffix] = (scale_type, scale)
        plain[weight] = ("F32", dequantised(tensors[weight][1], floats((scale_type, scale))))
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.1"]}
    write_model(tmp_path, raw | {"quantization_config": quant}, tensors, shards=2)
    arrays, wanted = load(tmp_path), expected(config, plain)
    assert sum(kind == "F8_E4M3" for kind, _ in tensors.values()) > 10
    assert arrays.keys() == wanted.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], wanted[name], err_msg=name)


def test_f43_fused_fp8_experts(tmp_path):
    raw = tiny_config("qwen3_5_moe", hidden_size=140, moe_intermediate_size=70)
    rng = np.random.default_rng(5)
    tensors = random_tensors(read_config(raw), rng, fused=True)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    bits, scale = rng.integers(0, 126, (5, 140, 140)).astype(np.uint8), rng.random((5, 2, 2), np.float32)
    write_model(tmp_path, raw, tensors | {name: ("F8_E4M3", bits), f"{name}_scale_inv": ("F32", scale)})
    np.testing.assert_array_equal(load(tmp_path)["layers.2.mlp.experts.gate_up_proj"], dequantised(bits, scale))


Q = "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "changed, named",
    [
        ({Q: "F8_E4M3"}, "q_proj.weight is FP8 and has no scales"),
        ({Q: "F8_E5M2"}, r"unsupported type: layers.3.self_attn.q_proj.weight \(F8_E5M2\)"),
        ({Q: "F64"}, r"q_proj.weight \(F64\)"),
        ({f"{Q}_scale_inv": "F32"}, "q_proj.weight_scale_inv has no FP8 weight"),
        ({f"{Q}_scale": "BF16"}, "q_proj.weight_scale has no FP8 weight"),
        ({Q: "F8_E4M3", f"{Q}_scale_inv": "F8_E8M0"}, "q_proj.weight_scale_inv is F8_E8M0"),
        ({Q: "F8_E4M3", f"{Q}_scale": "F32", f"{Q}_scale_inv": "F32"}, "has 2 scales"),
        ({"model.layers.3.self_attn.q_proj.qweight": "I32"}, "GPTQ or AWQ"),
        ({"model.layers.3.self_attn.q_proj.weight_packed": "U8"}, "compressed-tensors"),
        ({"model.layers.3.self_attn.q_proj.weight_scale_2": "F32"}, "NVFP4"),
    ],
)
def test_f43_other_quantisation_is_refused_by_name(tmp_path, changed, named):
    tensors = make_model(tmp_path)
    for name, dtype in changed.items():
        shape = tensors[Q][1].shape if name == Q else (1, 1)
        tensors[name] = random_tensor(np.random.default_rng(0), dtype, shape)
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=named):
        load(tmp_path)


def test_scale_per_channel_is_refused_with_the_expected_shape(tmp_path):
    tensors = make_model(tmp_path)
    rows, width = tensors[Q][1].shape
    tensors[Q] = random_tensor(np.random.default_rng(0), "F8_E4M3", (rows, width))
    tensors[f"{Q}_scale"] = ("F32", np.ones((rows, 1), np.float32))
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=r"q_proj.weight_scale is F32 \[128, 1\], expected F32 or BF16 \[1, 1\]"):
        load(tmp_path)
