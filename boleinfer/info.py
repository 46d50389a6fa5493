"""`boleinfer info`: what a checkpoint holds and will need, from config.json and file headers. Reads no weight."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from boleinfer.config import ModelConfig
from boleinfer.memory_plan import FLOAT, Memory, MemoryPlan, size
from boleinfer.options import UsageError
from boleinfer.plans import Target

_FILE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def info(args: argparse.Namespace) -> int:
    """Exit status of the command. Raises ConfigError, WeightsError or HubError for a model that cannot be used."""
    from boleinfer.hub import load_headers
    from boleinfer.llm import BUNDLED

    if args.random_weights is not None:
        if args.model is not None:
            raise UsageError("a model and --random-weights were both given; give one")
        facts = describe_published(args.random_weights)
    elif args.model is None:
        facts = describe_model(BUNDLED)
    else:
        folder, headers = load_headers(args.model, args.revision, args.token, args.offline)
        facts = describe_model(folder, headers)
    print(json.dumps(facts) if args.json else _table(facts))
    return 0


def describe_model(folder: Path, headers: Mapping[str, tuple[str, tuple[int, ...]]] | None = None) -> dict[str, Any]:
    """Everything that `info` tells, as plain numbers, strings and lists; sizes in bytes.

    headers: {stored name: (type, shape)} where the weight files are not in the folder
    """
    from boleinfer import models
    from boleinfer.checkpoint import Checkpoint, Stored
    from boleinfer.config import read_config
    from boleinfer.device_weights import sizes_of
    from boleinfer.tokenizer import Tokenizer
    from boleinfer.weights import match

    c = read_config(folder / "config.json")
    stored = Checkpoint(folder).tensors if headers is None else {n: Stored(*s) for n, s in headers.items()}
    targets, names = match(c, models.family(c.model_type).plan, stored)
    used = {part.tensor for t in targets for part in t.parts}
    tokenizer = Tokenizer.from_folder(folder)
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    texts = {token["id"]: token["content"] for token in added}
    facts = {
        "folder": str(folder),
        "end_tokens": {str(i): texts.get(i, "") for i in sorted(tokenizer.eos_ids)},
        "stored_bytes": sum(_FILE_BYTES[stored[names[n]].dtype] * math.prod(stored[names[n]].shape) for n in used),
        "stored_types": sorted({stored[names[n]].dtype for n in used}),
    }
    return _described(facts, c, targets, sizes_of(targets, names, stored, _bf16()))


def describe_published(name: str) -> dict[str, Any]:
    """As describe_model, for a published size with random weights. Raises ConfigError for a name that is none."""
    from boleinfer import models, random_weights
    from boleinfer.published import published

    bare = name.lower().removesuffix("-fp8")
    c, fp8 = published(bare), name.lower().endswith("-fp8")
    plan = models.family(c.model_type).plan
    gpu = random_weights.sizes(c, plan, _bf16(), fp8=fp8)
    facts = {
        "folder": f"{name}, random weights",
        "end_tokens": {},
        "stored_bytes": 0,
        "stored_types": [],
    }
    return _described(facts, c, plan(c, {}), gpu)


def _described(facts: dict[str, Any], c: ModelConfig, targets: Sequence[Target], gpu: Mapping[str, int]) -> dict:
    """The facts with what the configuration, the plan and the bytes of each array on a GPU say."""
    counts = {t.name: math.prod(t.shape) for t in targets}
    mtp = sum(n for name, n in counts.items() if name.startswith("mtp."))
    experts = sum(n for name, n in counts.items() if ".experts." in name and not name.startswith("mtp."))
    total = sum(counts.values())
    lookup_only = 0 if c.tie_word_embeddings else counts["embed_tokens"]
    active = total - mtp - lookup_only - experts + experts * c.num_experts_per_tok // max(c.num_experts, 1)
    memory = Memory.of(c, mtp > 0)
    return facts | {
        "model_type": c.model_type,
        "layers": len(c.layer_types),
        "gdn_layers": c.layer_types.count("linear_attention"),
        "hidden_size": c.hidden_size,
        "attention_heads": [c.num_attention_heads, c.num_key_value_heads, c.head_dim],
        "gdn_heads": [c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim],
        "ffn": c.intermediate_size,
        "experts": [c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size],
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "tied_head": c.tie_word_embeddings,
        "parameters": total,
        "active_parameters": active,
        "mtp_parameters": mtp,
        "weight_bytes": FLOAT * total,
        **_request_bytes(memory),
        "node": node_bytes(c, memory, FLOAT),
        "gpu": _on_gpu(c, gpu, mtp > 0),
    }


def _on_gpu(c: ModelConfig, weights: Mapping[str, int], mtp: bool) -> dict[str, Any]:
    """The GPU's numbers, and the plan with the default options."""
    from boleinfer.backend import drafting
    from boleinfer.llm import GPU_ROWS, LONGEST_DEFAULT
    from boleinfer.memory_plan import Needs, Options, plan

    o = Options(min(LONGEST_DEFAULT, c.max_position_embeddings), max_rows=GPU_ROWS)
    needs = Needs(c, weights, drafting=drafting(o, mtp))
    p: MemoryPlan = plan(needs, o)
    return {
        "weight_bytes": sum(weights.values()),
        **_request_bytes(needs.memory),
        "node": node_bytes(c, needs.memory, needs.act),
        "max_model_len": o.context,
        "max_batch": o.max_batch,
        "max_rows": o.max_rows,
        "plan_bytes": {part.name: part.nbytes for part in p.parts},
        "total_bytes": p.total,
    }


def node_bytes(c: ModelConfig, memory: Memory, act: int) -> dict[str, int]:
    """Bytes of one drafted node in one GDN layer until the commit, and of what a copy for each node would be.

    factors: k, u and g; conv_inputs: the node's; held: both and z, which lies in the same rows as the inputs
    state, window: the copies; a window's has the W-1 inputs that are read
    """
    layers = max(1, c.layer_types.count("linear_attention"))
    factors, inputs = memory.ring // layers, (memory.factors - memory.ring) // layers
    z = act * c.linear_num_value_heads * c.linear_value_head_dim
    return {
        "factors": factors,
        "conv_inputs": inputs,
        "held": factors + inputs + z,
        "state": memory.state // layers,
        "window": (c.linear_conv_kernel_dim - 1) * inputs,
    }


def _request_bytes(memory: Memory) -> dict[str, int]:
    return {
        "state_bytes": memory.state,
        "conv_bytes": memory.conv,
        "kv_bytes_per_token": memory.kv,
        "factor_bytes_per_node": memory.factors,
    }


def _bf16() -> Any:
    from boleinfer import device

    return device.dtype("bf16")


def _table(f: dict[str, Any]) -> str:
    Hq, Hkv, Dh = f["attention_heads"]
    Hk, Hv, K, V = f["gdn_heads"]
    E, A, Fe = f["experts"]
    ends = ", ".join(f"{i} {text}".rstrip() for i, text in f["end_tokens"].items())
    stored = f"{size(f['stored_bytes'])} ({', '.join(f['stored_types'])})" if f["stored_bytes"] else "none"
    rows = [
        ("model", f["folder"]),
        ("family", f["model_type"]),
        ("layers", f"{f['layers']}: {f['gdn_layers']} gated delta net, {f['layers'] - f['gdn_layers']} full attention"),
        ("width", f"{f['hidden_size']}; " + (f"{E} experts of {Fe}, {A} a token" if E else f"feed-forward {f['ffn']}")),
        ("delta net heads", f"{Hk} key, {Hv} value; {K} x {V} state each"),
        ("attention heads", f"{Hq} query, {Hkv} key/value; {Dh} wide"),
        ("vocabulary", f"{f['vocab_size']}, {'tied' if f['tied_head'] else 'own'} head; end tokens {ends or 'none'}"),
        ("context", f"{f['max_position_embeddings']} tokens"),
        ("parameters", f"{_count(f['parameters'])}, {_count(f['active_parameters'])} used a token"),
        ("draft layer (MTP)", f"{_count(f['mtp_parameters'])} parameters" if f["mtp_parameters"] else "none"),
        ("weights on disk", stored),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_memory_table(f), "", *_plan_table(f["gpu"])])


def _memory_table(f: dict[str, Any]) -> list[str]:
    """What each backend takes, side by side."""
    context, sides = f["max_position_embeddings"], (f, f["gpu"])
    whole = [s["state_bytes"] + s["conv_bytes"] + context * s["kv_bytes_per_token"] for s in sides]
    nodes = [s["node"] for s in sides]
    of_state, of_window = (
        [f"{n[copy] / n[kept]:.0f} times" for n in nodes]
        for copy, kept in (("state", "factors"), ("window", "conv_inputs"))
    )
    rows = [
        ("memory", "CPU (float32)", "GPU (bf16)"),
        ("  weights", *(size(s["weight_bytes"]) for s in sides)),
        ("  a request, recurrent state", *(size(s["state_bytes"]) for s in sides)),
        ("  a request, convolution windows", *(size(s["conv_bytes"]) for s in sides)),
        ("  a token, keys and values", *(size(s["kv_bytes_per_token"]) for s in sides)),
        (f"  a request of {context} tokens in all", *map(size, whole)),
        ("  a drafted node in a layer, k, u and g", *(size(n["factors"]) for n in nodes)),
        ("    a copy of the state instead", *(size(n["state"]) for n in nodes)),
        ("    against k, u and g", *of_state),
        ("  a drafted node in a layer, convolution", *(size(n["conv_inputs"]) for n in nodes)),
        ("    a copy of the window instead", *(size(n["window"]) for n in nodes)),
        ("    against the inputs", *of_window),
        ("  a drafted node in all layers, with z", *(size(f["gdn_layers"] * n["held"]) for n in nodes)),
    ]
    width = max(len(name) for name, *_ in rows)
    return [f"{name:<{width}}  {cpu:>13}  {gpu:>10}" for name, cpu, gpu in rows]


def _plan_table(g: dict[str, Any]) -> list[str]:
    head = f"a GPU with {g['max_batch']} requests of {g['max_model_len']} tokens, steps of up to {g['max_rows']} rows"
    parts = {**g["plan_bytes"], "in all": g["total_bytes"]}
    return [head, *(f"  {name:<16}  {size(n):>10}" for name, n in parts.items())]


def _count(n: int) -> str:
    for step, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= step:
            return f"{n / step:.3g} {unit}"
    return str(n)
