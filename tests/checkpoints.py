"""Checkpoint files made by hand, byte by byte, and what a loader should make of them by HF's own splitting code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer import models, weights
from boleinfer.checkpoint import Stored
from boleinfer.config import ModelConfig, read_config
from boleinfer.memory import panels
from boleinfer.published import PUBLISHED
from tests.published import stored

RAW = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8, "F64": np.float64, "I32": np.int32}
RAW |= {"U8": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8}
_EXAMPLE = {"qwen3_next": "Qwen3-Next-80B-A3B", "qwen3_5": "Qwen3.5-27B", "qwen3_5_moe": "Qwen3.5-35B-A3B"}
Tensors = dict[str, tuple[str, np.ndarray]]  # name -> (stored type, its data as NumPy sees it)


def tiny_config(family: str, ratio: int = 2, **changed: Any) -> dict:
    """The config.json of a small model of odd sizes; ratio = value heads per key head."""
    raw = PUBLISHED[_EXAMPLE[family]]
    text = raw.get("text_config", raw)
    small = {
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "layer_types": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3 * ratio,
        "vocab_size": 40,
        "mtp_num_hidden_layers": 1,
    }
    if family == "qwen3_5":
        small["intermediate_size"] = 36
    else:
        small |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
        small |= {"shared_expert_intermediate_size": 9}
    return text | small | changed


def random_tensors(config: ModelConfig, rng: np.random.Generator, dtype: str = "BF16", **kind: Any) -> Tensors:
    """Every tensor of a checkpoint with random bits (NaN and infinity among them); `kind` as in published.stored."""
    return {n: random_tensor(rng, *s) for n, s in with_type(stored(config, **kind), dtype).items()}


def with_type(shapes: Mapping[str, Stored], dtype: str) -> dict[str, Stored]:
    return {n: Stored(dtype if s.dtype == "BF16" and "scale" not in n else s.dtype, s.shape) for n, s in shapes.items()}


def random_tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> tuple[str, np.ndarray]:
    raw = np.dtype(RAW[dtype])
    return dtype, np.frombuffer(rng.bytes(int(np.prod(shape)) * raw.itemsize), raw).reshape(shape)


def floats(tensor: tuple[str, np.ndarray]) -> np.ndarray:
    """The numbers of a BF16, F16 or F32 tensor as float32, by another way than the loader's."""
    dtype, raw = tensor
    if dtype != "BF16":
        return raw.astype(np.float32)
    halves = np.zeros((*raw.shape, 2), "<u2")
    halves[..., 1] = raw
    return halves.view("<f4")[..., 0]


def write(file: Path, tensors: Mapping[str, tuple[str, np.ndarray]], header: Mapping[str, Any] | None = None) -> None:
    """A safetensors file; `header` replaces entries of the true header."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, blobs = 0, []
    for name, (dtype, raw) in tensors.items():
        blobs.append(np.ascontiguousarray(raw).tobytes())
        entries[name] = {"dtype": dtype, "shape": list(raw.shape), "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(entries | dict(header or {})).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_model(folder: Path, raw: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> ModelConfig:
    """config.json and the weights, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        write(folder / "model.safetensors", tensors)
        return read_config(raw)
    names = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(tensors)}
    for shard in set(names.values()):
        write(folder / shard, {n: t for n, t in tensors.items() if names[n] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return read_config(raw)


def load(folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """The arrays as weights.load gives them, matrices in one piece again; arrays that are one object stay so."""
    config = read_config(folder)
    arrays = weights.load(folder, config, models.family(config.model_type).plan, **options)
    joined = {id(a): joined_panels(name, a) for name, a in arrays.items()}
    return {name: joined[id(a)] for name, a in arrays.items()}


def joined_panels(name: str, array: np.ndarray) -> np.ndarray:
    """[panels, n, width] -> [panels * n, width]; anything else as it is. Checks the memory order of every matrix."""
    if array.ndim >= 2:
        assert array.swapaxes(-1, -2).flags.c_contiguous, f"{name} is not column-major"
    if array.ndim < 3 or ".experts." in name:
        assert array.ndim != 2 or not panels(*array.shape), f"{name} {array.shape} is not cut into panels"
        return array
    assert array.shape[0] == panels(array.shape[0] * array.shape[1], array.shape[2])
    return array.reshape(-1, array.shape[2])


def make_model(folder, family="qwen3_5", ratio=2, seed=0, shards=1, changed=None, **kind):
    """A tiny model on disk; returns its tensors."""
    raw = tiny_config(family, ratio, **(changed or {}))
    tensors = random_tensors(read_config(raw), np.random.default_rng(seed), **kind)
    write_model(folder, raw, tensors, shards)
    return tensors


def same_bits(a, b):
    a, b = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b))
    return a.shape == b.shape and np.array_equal(a, b)


def expected(config, tensors):
    """The model's arrays, put together by HF's own splitting code and plain concatenation."""
    t = {n.removeprefix("model."): floats(v) for n, v in tensors.items()}
    out = {"embed_tokens": t["embed_tokens.weight"], "norm": t["norm.weight"]}
    out["lm_head"] = t.get("lm_head.weight", t["embed_tokens.weight"])
    layers = [(f"layers.{i}", kind) for i, kind in enumerate(config.layer_types)]
    if "mtp.fc.weight" in t:
        layers.append(("mtp.layers.0", "full_attention"))
        out |= {n.removesuffix(".weight"): v for n, v in t.items() if n.startswith("mtp.") and ".layers." not in n}
    for at, kind in layers:
        w = {n.removeprefix(f"{at}."): v for n, v in t.items() if n.startswith(f"{at}.")}
        found = _hf_attention(config, w) if kind == "full_attention" else _hf_delta_net(config, w)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[norm] = w[f"{norm}.weight"]
        found |= _experts(config, w) if config.num_experts else _mlp("mlp", w)
        out |= {f"{at}.{n}": v for n, v in found.items()}
    return out


def _hf_attention(config, w):
    import torch

    q = torch.from_numpy(w["self_attn.q_proj.weight"]).T[None]  # [1, D, rows]: HF's projections of D unit inputs
    query, gate = torch.chunk(q.view(*q.shape[:2], -1, config.head_dim * 2), 2, dim=-1)
    parts = [p.reshape(q.shape[1], -1).numpy().T for p in (query, gate)]
    parts += [w["self_attn.k_proj.weight"], w["self_attn.v_proj.weight"]]
    same = {f"self_attn.{n}": w[f"self_attn.{n}.weight"] for n in ("q_norm", "k_norm", "o_proj")}
    return {"self_attn.qgkv_proj": np.concatenate(parts), **same}


def _hf_delta_net(config, w):
    at = "linear_attn."
    if config.model_type == "qwen3_next":
        parts = _hf_qwen3_next_split(config, w[at + "in_proj_qkvz.weight"], w[at + "in_proj_ba.weight"])
    else:
        parts = [w[f"{at}in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a")]
    out = {at + "in_proj_qkvz": np.concatenate(parts[:-2]), at + "in_proj_ba": np.concatenate(parts[-2:])}
    out |= {at + n: w[at + n] for n in ("A_log", "dt_bias")}
    return out | {at + n: w[f"{at}{n}.weight"].squeeze() for n in ("conv1d", "norm", "out_proj")}


def _hf_qwen3_next_split(config, qkvz, ba):
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    class Sizes:
        num_k_heads, num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        head_k_dim, head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim

    mixed = [torch.from_numpy(m).T[None].contiguous() for m in (qkvz, ba)]  # [1, D, rows]
    parts = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(Sizes(), *mixed)
    return [p.reshape(p.shape[1], -1).numpy().T for p in parts]  # q, k, v, z, b, a: [rows, D]


def _mlp(at, w):
    gate, up, down = (w[f"{at}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return {f"{at}.gate_up_proj": np.concatenate([gate, up]), f"{at}.down_proj": down}


def _experts(config, w):
    at = "mlp.experts"
    each = [_mlp(f"{at}.{e}", w) for e in range(config.num_experts)] if f"{at}.0.up_proj.weight" in w else None
    out = _mlp("mlp.shared_expert", w) | {n: w[f"{n}.weight"] for n in ("mlp.gate", "mlp.shared_expert_gate")}
    for n in ("gate_up_proj", "down_proj"):
        out[f"{at}.{n}"] = (
            w[f"{at}.{n}"] if each is None else np.stack([x[f"{at}.{e}.{n}"] for e, x in enumerate(each)])
        )
    return out


def plausible_checkpoint(folder: Path, family: str, dtype: str = "F32", seed: int = 0, **changed: Any) -> Path:
    """A small model with random weights in a trained model's ranges, made without torch: vocabulary 512, MTP layer."""
    sizes = {"hidden_size": 64, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512}
    sizes |= {"intermediate_size": 96} if family == "qwen3_5" else {}
    if family != "qwen3_5":
        sizes |= {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    config = tiny_config(family, **(sizes | changed))
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (_, shape) in stored(read_config(config)).items():
        tensors[name] = _numbers(dtype, _plausible(rng, name, shape))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors)
    return folder


def _plausible(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("A_log"):
        return rng.uniform(-2, 1, shape)
    if name.endswith("dt_bias"):
        return rng.uniform(-3, 1, shape)
    if len(shape) == 1:
        return 0.3 * rng.standard_normal(shape) + name.endswith("linear_attn.norm.weight")
    scale = 0.5 if "conv1d" in name else 0.3 if "embed" in name else 0.6 / shape[-1] ** 0.5
    return scale * rng.standard_normal(shape)


def _numbers(dtype: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """The values in a stored type; BF16 by cutting off."""
    plain = values.astype(np.float32)
    return dtype, (plain.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else plain.astype(RAW[dtype])
