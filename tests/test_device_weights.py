"""Weights on the GPU against those on NumPy: the same numbers in other types, FP8 kept, and random ones."""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest

from boleinfer import device, device_weights, models, random_weights, weights
from boleinfer.config import read_config
from boleinfer.device import Fp8
from boleinfer.published import PUBLISHED, published
from boleinfer.weights import WeightsError
from tests.checkpoints import joined_panels, plausible_checkpoint, tiny_config, write_model
from tests.published import stored

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
BF16, FLOAT = device.dtype("bf16"), np.dtype(np.float32)


def on_host(folder):
    config = read_config(folder)
    arrays = weights.load(folder, config, models.family(config.model_type).plan)
    return {name: joined_panels(name, a) for name, a in arrays.items()}


def on_gpu(folder, act, **options):
    config = read_config(folder)
    return device_weights.load(folder, config, models.family(config.model_type).plan, act, **options)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("act", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers_as_on_numpy(tmp_path, gpu, monkeypatch, family, act, kind):
    monkeypatch.setattr(device_weights, "STAGING", 4096)  # many pieces
    folder = plausible_checkpoint(tmp_path, family, kind)
    seen = []
    found, want = on_gpu(folder, act, progress=lambda done, total: seen.append((done, total))), on_host(folder)
    assert found.keys() == want.keys() and seen[-1][0] == seen[-1][1]
    for name, array in found.items():
        got = device.download(array)
        matrix = got.ndim > 1 and not name.endswith("conv1d")
        assert got.dtype == (act if matrix else FLOAT) and got.flags.c_contiguous, name
        np.testing.assert_array_equal(got, want[name].astype(got.dtype), err_msg=name)
    assert (found["lm_head"] is found["embed_tokens"]) == (want["lm_head"] is want["embed_tokens"])


def test_the_threads_that_copy_use_the_callers_gpu(tmp_path, gpu, monkeypatch):
    """A new thread would begin with the first GPU."""
    if gpu == "cuda":
        pytest.skip("the caller's GPU is the first one here: nothing would be told apart")
    monkeypatch.setattr(device_weights, "STAGING", 4096)
    monkeypatch.setattr(device, "current", lambda: 7)
    using: dict[int, int] = {}
    monkeypatch.setattr(device, "use", lambda number: using.update({threading.get_ident(): number}))
    made, staged = device.Staging, []

    def staging(nbytes):
        staged.append(using.get(threading.get_ident()))
        return made(nbytes)

    monkeypatch.setattr(device, "Staging", staging)
    on_gpu(plausible_checkpoint(tmp_path, "qwen3_5", "BF16"), BF16)
    assert staged and set(staged) == {7}


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_cut_short_meanwhile(tmp_path, gpu, monkeypatch, cut):
    """Whoever reads it says so, and all others stop; also where files are read by their mapping alone, unharmed."""
    folder = plausible_checkpoint(tmp_path, "qwen3_5", "BF16")
    want = on_gpu(folder, BF16)
    if not cut:
        monkeypatch.delattr(os, "preadv")
        found = on_gpu(folder, BF16)
        assert all(np.array_equal(device.download(array), device.download(want[name])) for name, array in found.items())
        return
    copied = device_weights._copied

    def after_the_cut(pieces):
        for file in folder.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
        return copied(pieces)

    monkeypatch.setattr(device_weights, "_copied", after_the_cut)
    with pytest.raises(WeightsError, match="cut short while it was read"):
        on_gpu(folder, BF16)


def fp8_checkpoint(folder, family, **changed):
    """Sizes at which FP8 blocks matter: some parts are whole blocks of 128 rows, some are not."""
    sizes = {"hidden_size": 160, "head_dim": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    raw = tiny_config(family, **(sizes | changed))
    config = read_config(raw)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (dtype, shape) in stored(config, fp8=True).items():
        if dtype == "F8_E4M3":
            tensors[name] = dtype, rng.integers(0, 120, shape).astype(np.uint8)
        else:
            values = rng.uniform(0.5, 2, shape).astype(np.float32)
            tensors[name] = dtype, (values.view(np.uint32) >> 16).astype(np.uint16)
    write_model(folder, raw, tensors)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_stays_fp8_where_it_can(tmp_path, gpu, family):
    folder = fp8_checkpoint(tmp_path, family)
    found, want = on_gpu(folder, BF16), on_host(folder)
    kept = {name for name, array in found.items() if isinstance(array, Fp8)}
    assert any(name.endswith("qgkv_proj") for name in kept) and any(name.endswith("o_proj") for name in kept)
    for name, array in found.items():
        if not isinstance(array, Fp8):
            np.testing.assert_array_equal(device.download(array), want[name].astype(array.dtype), err_msg=name)
            continue
        bits, scale = device.download(array.bits), device.download(array.scale)
        assert scale.shape == (*bits.shape[:-2], *(math.ceil(n / 128) for n in bits.shape[-2:])), name
        np.testing.assert_array_equal(weights.dequantise(bits, scale), want[name], err_msg=name)


def test_fp8_is_widened_for_float32(tmp_path, gpu):
    folder = fp8_checkpoint(tmp_path, "qwen3_5")
    found, want = on_gpu(folder, FLOAT), on_host(folder)
    for name, array in found.items():
        np.testing.assert_array_equal(device.download(array), want[name], err_msg=name)


def test_a_permutation_of_whole_blocks_is_seen():
    blocks = np.asarray([2, 0, 1])
    rows = (128 * blocks[:, None] + np.arange(128)).ravel()
    assert device_weights._block_rows(rows).tolist() == [2, 0, 1]
    assert device_weights._block_rows(np.roll(rows, 1)) is None and device_weights._block_rows(rows[:100]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_shapes_of_files_and_sound_sizes(gpu, family):
    config = read_config(tiny_config(family, hidden_size=256))
    plan = models.family(config.model_type).plan
    targets = {t.name: t.shape for t in plan(config, {})}
    gpu_arrays = random_weights.make(config, plan, BF16, seed=3)
    cpu_arrays = random_weights.make(config, plan, FLOAT, seed=3, gpu=False)
    for name, shape in targets.items():
        a, b = device.download(gpu_arrays[name]).astype(np.float64), joined_panels(name, cpu_arrays[name])
        assert a.shape == b.shape == shape, name
        if len(shape) == 1:
            np.testing.assert_array_equal(a, b, err_msg=name)
        elif a.size > 5000:
            assert a.std() == pytest.approx(b.std(), rel=0.05) and abs(a.mean()) < 0.05 * a.std(), name
    if "lm_head" in targets:  # what likely follows a token is another one
        kept = {name: device.download(gpu_arrays[name]) for name in ("embed_tokens", "lm_head")}
        for arrays in (kept, {name: joined_panels(name, cpu_arrays[name]) for name in kept}):
            follows = random_weights.followed(len(arrays["lm_head"]))
            np.testing.assert_array_equal(arrays["lm_head"], arrays["embed_tokens"][follows])
    again = random_weights.make(config, plan, BF16, seed=3)
    other = random_weights.make(config, plan, BF16, seed=4)
    for name, array in gpu_arrays.items():
        assert np.array_equal(device.download(array), device.download(again[name])), name
    assert not np.array_equal(device.download(gpu_arrays["embed_tokens"]), device.download(other["embed_tokens"]))


def test_random_fp8_weights(gpu):
    config = read_config(tiny_config("qwen3_5", hidden_size=256))
    arrays = random_weights.make(config, models.family(config.model_type).plan, BF16, fp8=True)
    down = next(array for name, array in arrays.items() if name.endswith("down_proj"))
    assert isinstance(down, Fp8) and not isinstance(arrays["embed_tokens"], Fp8)
    values = weights.dequantise(device.download(down.bits), device.download(down.scale))
    layers, width = config.num_hidden_layers, values.shape[-1]
    assert values.std() == pytest.approx(1 / math.sqrt(2 * width * layers), rel=0.05)


def test_every_published_size_is_found_and_another_is_refused():
    for name in PUBLISHED:
        assert published(name.lower()) == read_config(PUBLISHED[name])
    with pytest.raises(ValueError, match="no published model is called 'qwen9'; there are Qwen3-Next-80B"):
        published("qwen9")
