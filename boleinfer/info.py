"""`boleinfer info`: what a checkpoint holds and will need, from config.json and file headers. Reads no weight."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boleinfer.config import ModelConfig

FLOAT = 4  # bytes of a number on the CPU backend
_FILE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True)
class Memory:
    """Bytes that serving takes beside the weights; the formulas are docs/algorithm.md's, in numbers of `item` bytes.

    state:    recurrent state of one request, all GDN layers: Hv K V each
    conv:     convolution windows of one request: (W-1) (2 Hk K + Hv V) each
    kv:       keys and values of one token, attention layers and the MTP layer: 2 Hkv Dh each
    factors:  what one drafted node adds instead of a state: k, u, g and the convolution inputs
    """

    state: int
    conv: int
    kv: int
    factors: int

    @classmethod
    def of(cls, c: ModelConfig, mtp: bool, item: int = FLOAT) -> Memory:
        keys, values = (
            c.linear_num_key_heads * c.linear_key_head_dim,
            c.linear_num_value_heads * c.linear_value_head_dim,
        )
        gdn = c.layer_types.count("linear_attention")
        attention = len(c.layer_types) - gdn + (1 if mtp else 0)
        channels = 2 * keys + values
        return cls(
            state=item * gdn * values * c.linear_key_head_dim,
            conv=item * gdn * (c.linear_conv_kernel_dim - 1) * channels,
            kv=item * attention * 2 * c.num_key_value_heads * c.head_dim,
            factors=item * gdn * (keys + values + c.linear_num_value_heads + channels),
        )


def info(args: argparse.Namespace) -> int:
    """Exit status of the command. Raises ConfigError, WeightsError or HubError for a model that cannot be used."""
    from boleinfer.hub import load_model_files
    from boleinfer.llm import BUNDLED

    if args.model is None:
        folder = BUNDLED
    else:
        folder = load_model_files(args.model, revision=args.revision, token=args.token, offline=args.offline)
    facts = describe_model(folder)
    print(json.dumps(facts) if args.json else _table(facts))
    return 0


def describe_model(folder: Path) -> dict[str, Any]:
    """Everything that `info` tells, as plain numbers, strings and lists; sizes in bytes."""
    from boleinfer import models
    from boleinfer.checkpoint import Checkpoint
    from boleinfer.config import read_config
    from boleinfer.tokenizer import Tokenizer
    from boleinfer.weights import match

    c = read_config(folder / "config.json")
    stored = Checkpoint(folder).tensors
    targets, names = match(c, models.family(c.model_type).plan, stored)
    sizes = {t.name: math.prod(t.shape) for t in targets}
    mtp = sum(n for name, n in sizes.items() if name.startswith("mtp."))
    experts = sum(n for name, n in sizes.items() if ".experts." in name and not name.startswith("mtp."))
    total = sum(sizes.values())
    lookup_only = 0 if c.tie_word_embeddings else sizes["embed_tokens"]
    tokenizer = Tokenizer.from_folder(folder)
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    texts = {token["id"]: token["content"] for token in added}
    memory = Memory.of(c, mtp > 0)
    used = {part.tensor for t in targets for part in t.parts}
    return {
        "folder": str(folder),
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
        "end_tokens": {str(i): texts.get(i, "") for i in sorted(tokenizer.eos_ids)},
        "parameters": total,
        "active_parameters": total
        - mtp
        - lookup_only
        - experts
        + experts * c.num_experts_per_tok // max(c.num_experts, 1),
        "mtp_parameters": mtp,
        "stored_bytes": sum(_FILE_BYTES[stored[names[n]].dtype] * math.prod(stored[names[n]].shape) for n in used),
        "stored_types": sorted({stored[names[n]].dtype for n in used}),
        "weight_bytes": FLOAT * total,
        "state_bytes": memory.state,
        "conv_bytes": memory.conv,
        "kv_bytes_per_token": memory.kv,
        "factor_bytes_per_node": memory.factors,
    }


def _table(f: dict[str, Any]) -> str:
    Hq, Hkv, Dh = f["attention_heads"]
    Hk, Hv, K, V = f["gdn_heads"]
    E, A, Fe = f["experts"]
    ends = ", ".join(f"{i} {text}".rstrip() for i, text in f["end_tokens"].items())
    context = f["max_position_embeddings"]
    snapshot = f["state_bytes"] + f["conv_bytes"]
    rows = [
        ("model", f["folder"]),
        ("family", f["model_type"]),
        ("layers", f"{f['layers']}: {f['gdn_layers']} gated delta net, {f['layers'] - f['gdn_layers']} full attention"),
        ("width", f"{f['hidden_size']}; " + (f"{E} experts of {Fe}, {A} a token" if E else f"feed-forward {f['ffn']}")),
        ("delta net heads", f"{Hk} key, {Hv} value; {K} x {V} state each"),
        ("attention heads", f"{Hq} query, {Hkv} key/value; {Dh} wide"),
        ("vocabulary", f"{f['vocab_size']}, {'tied' if f['tied_head'] else 'own'} head; end tokens {ends or 'none'}"),
        ("context", f"{context} tokens"),
        ("parameters", f"{_count(f['parameters'])}, {_count(f['active_parameters'])} used a token"),
        ("draft layer (MTP)", f"{_count(f['mtp_parameters'])} parameters" if f["mtp_parameters"] else "none"),
        ("weights on disk", f"{_bytes(f['stored_bytes'])} ({', '.join(f['stored_types'])})"),
        ("", ""),
        ("memory on the CPU backend (float32)", ""),
        ("  weights", _bytes(f["weight_bytes"])),
        ("  a request, recurrent state", _bytes(f["state_bytes"])),
        ("  a request, convolution windows", _bytes(f["conv_bytes"])),
        ("  a token, keys and values", _bytes(f["kv_bytes_per_token"])),
        (f"  a request of {context} tokens in all", _bytes(snapshot + context * f["kv_bytes_per_token"])),
        ("  a drafted node, factors", f"{_bytes(f['factor_bytes_per_node'])}; a snapshot of the state would be "
                                      f"{_bytes(snapshot)}, {snapshot / f['factor_bytes_per_node']:.0f} times more"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _count(n: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def _bytes(n: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 1 << shift:
            return f"{n / (1 << shift):.1f} {unit}"
    return f"{n} B"
