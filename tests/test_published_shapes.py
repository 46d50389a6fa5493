"""Every published size: its loading plan takes each stored tensor exactly once, with the right shape. No data."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from boleinfer import models, weights
from boleinfer.checkpoint import Stored
from boleinfer.config import read_config
from boleinfer.published import PUBLISHED
from tests.published import stored

# parameters of the text model and of the MTP layer, and gigabytes of both in BF16, as published (rounded)
SIZES = {
    "Qwen3-Next-80B-A3B": (79.67e9, 1.65e9, 162.7),
    "Qwen3-Coder-Next": (79.67e9, 1.65e9, 162.7),
    "Qwen3.5-0.8B": (0.752e9, 0.020e9, 1.55),
    "Qwen3.5-2B": (1.88e9, 0.061e9, 3.89),
    "Qwen3.5-4B": (4.21e9, 0.121e9, 8.65),
    "Qwen3.5-9B": (8.95e9, 0.243e9, 18.4),
    "Qwen3.5-27B": (26.90e9, 0.425e9, 54.6),
    "Qwen3.5-35B-A3B": (34.66e9, 0.845e9, 71.0),
    "Qwen3.5-122B-A10B": (122.1e9, 2.52e9, 249.3),
    "Qwen3.5-397B-A17B": (396.3e9, 6.60e9, 805.9),
    "Qwen3.8-2.4T-A95B": (2420e9, 26e9, 4892.0),
}
MOE = [name for name, config in PUBLISHED.items() if "num_experts" in config.get("text_config", config)]
CASES = [(name, False, False) for name in PUBLISHED] + [(name, True, False) for name in MOE]
CASES += [(name, False, True) for name in PUBLISHED if name != "Qwen3.8-2.4T-A95B"]


def _wrapper(name: str) -> str:
    return "language_model." if "text_config" in PUBLISHED[name] else ""


@pytest.mark.parametrize("name, fused, fp8", CASES)
def test_plan_takes_every_tensor_once(name, fused, fp8):
    config = read_config(PUBLISHED[name])
    files = stored(config, fused=fused, fp8=fp8, wrapper=_wrapper(name))
    plan = models.family(config.model_type).plan
    targets, names = weights.match(config, plan, files, mtp=True)
    taken = Counter(names[part.tensor] for target in targets for part in target.parts)
    assert taken == Counter({n: 1 for n in files if not n.endswith("_scale_inv")})
    for target in targets:
        assert math.prod(target.shape) == sum(math.prod(part.shape) for part in target.parts), target.name
        for part in target.parts:
            assert part.shape == files[names[part.tensor]].shape
            assert part.rows is None or len(part.rows) == part.shape[0]
    assert len({target.name for target in targets}) == len(targets)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    config = read_config(PUBLISHED[name])
    text, mtp, gigabytes = SIZES[name]
    counts = {n: math.prod(kind.shape) for n, kind in stored(config, fused=bool(config.num_experts)).items()}
    in_mtp = sum(count for n, count in counts.items() if n.startswith("mtp."))
    in_text = sum(counts.values()) - in_mtp
    assert in_text == pytest.approx(text, rel=5e-3)
    assert in_mtp == pytest.approx(mtp, rel=3e-2)
    assert 2 * (in_text + in_mtp) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_tensor_counts_of_known_releases():
    dense = stored(read_config(PUBLISHED["Qwen3.5-27B"]))
    assert sum(not n.startswith("mtp.") for n in dense) == 851
    assert sum(n.startswith("mtp.") for n in dense) == 15
    fp8 = stored(read_config(PUBLISHED["Qwen3.5-35B-A3B"]), fp8=True)
    assert sum(n.startswith("mtp.") for n in fp8) == 1560
    assert len(fp8) == 64196 - 333  # 333 vision tensors are in the released files too


@pytest.mark.parametrize("name", MOE)
def test_mtp_experts_may_be_stored_unlike_the_trunk(name):
    config = read_config(PUBLISHED[name])
    plan = models.family(config.model_type).plan
    fused, single = (stored(config, fused=f) for f in (True, False))
    mixed = {n: s for n, s in fused.items() if "mtp." not in n} | {n: s for n, s in single.items() if "mtp." in n}
    targets, names = weights.match(config, plan, mixed, mtp=True)
    assert {names[p.tensor] for t in targets for p in t.parts} == set(mixed)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_every_prefix_means_the_same(prefix):
    config = read_config(PUBLISHED["Qwen3.5-9B"])
    plan = models.family(config.model_type).plan
    plain = stored(config)
    files = {prefix + n.removeprefix("model.") if n.startswith("model.") else n: s for n, s in plain.items()}
    files |= {"model.visual.blocks.0.attn.qkv.weight": Stored("BF16", (9, 3)), "visual.x": Stored("I32", (1,))}
    files["model.layers.0.self_attn.rotary_emb.inv_freq"] = Stored("F32", (32,))
    found, expected = (_taken(weights.match(config, plan, kinds)[0]) for kinds in (files, plain))
    assert found == expected


def _taken(targets):
    return [(target.name, [part.tensor for part in target.parts]) for target in targets]
