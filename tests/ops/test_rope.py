"""Rotary positions against complex rotation in float64 and against HF transformers, plain and YaRN."""

import math

import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from boleinfer.config import RopeConfig
from boleinfer.ops.attention_inputs import rope
from boleinfer.ops.embedding import rotary_angles

PLAIN = RopeConfig("default", 1e7, 64)


def table(position, config, dtype=np.float32):
    return rotary_angles(position, config.inv_freq(), config.attention_factor, dtype)


def hf_config(parameters, head_dim=256, length=4096):
    return Qwen3NextConfig(head_dim=head_dim, max_position_embeddings=length, rope_parameters=parameters)


@pytest.mark.parametrize("shape,rotary", [((1, 1, 2), 2), ((3, 2, 63), 16), ((5, 4, 256), 64), ((2, 3, 8), 8)])
def test_rope_turns_pairs_of_halves(shape, rotary):
    rng = np.random.default_rng(rotary)
    x, position = rng.standard_normal(shape), rng.integers(0, 300_000, shape[0])
    cos, sin = table(position, RopeConfig("default", 1e4, rotary), np.float64)
    out = rope(x, cos, sin)
    for r, h in np.ndindex(shape[:2]):
        for i in range(rotary // 2):
            angle = int(position[r]) * 1e4 ** (-2 * i / rotary)
            turned = complex(x[r, h, i], x[r, h, i + rotary // 2]) * complex(math.cos(angle), math.sin(angle))
            assert abs(complex(out[r, h, i], out[r, h, i + rotary // 2]) - turned) < 1e-9
    np.testing.assert_array_equal(out[..., rotary:], x[..., rotary:])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "parameters,config",
    [
        ({"rope_type": "default"}, PLAIN),
        (YARN, RopeConfig("yarn", 1e7, 64, 4.0, 1024, attention_factor=0.1 * math.log(4) + 1)),
        (
            {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5},
            RopeConfig("yarn", 1e7, 64, 4.0, 1024, 8.0, 2.0, 1.5),
        ),
    ],
)
def test_rope_equals_hf(parameters, config):
    source = hf_config({"rope_theta": 1e7, "partial_rotary_factor": 0.25, **parameters})
    position = np.asarray([0, 1, 2, 63, 1000, 4095])
    x = np.random.default_rng(1).standard_normal((len(position), 5, 256)).astype(np.float32)
    q = torch.from_numpy(x).transpose(0, 1)[None]  # [1, H, R, Dh]
    cos, sin = hf.Qwen3NextRotaryEmbedding(source)(q, torch.from_numpy(position)[None])
    expected = hf.apply_rotary_pos_emb(q, q, cos, sin)[0][0].transpose(0, 1).numpy()
    out = rope(x, *table(position, config))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[:5], expected[:5], atol=3e-4)  # HF forms the angles in float32: 1000 * 2^-24
    np.testing.assert_allclose(out, expected, atol=2e-3)


def test_the_product_of_two_turned_heads_depends_on_their_distance_alone():
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 1, 256)).astype(np.float32)

    def score(a, b):
        cos, sin = table(np.asarray([a, b]), PLAIN)
        return float(np.vdot(rope(q, cos[:1], sin[:1]), rope(k, cos[1:], sin[1:])))

    for start in (1, 1000, 262_000, 1_010_000):  # float32 angles would be off by a few 1e-2 at the last
        assert score(start + 17, start) == pytest.approx(score(17, 0), abs=1e-4)


def test_no_row_leaves_no_row_and_the_argument_untouched():
    cos, sin = table(np.zeros(0, np.int64), PLAIN)
    assert rope(np.zeros((0, 2, 256), np.float32), cos, sin).shape == (0, 2, 256)
    x = np.ones((1, 1, 256), np.float32)
    assert not np.shares_memory(rope(x, *table(np.asarray([3]), PLAIN)), x)
    assert (x == 1).all()
