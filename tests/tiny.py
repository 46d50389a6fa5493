"""Tiny random checkpoints of each family, written as HF writes them, with the HF model and MTP layer as oracles."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass
class Oracle:
    """An HF model in float32 (eager attention and experts) beside the folder that holds its weights."""

    folder: Path
    model: Any
    mtp: Any

    def logits(self, ids: list[int]):
        """float32 [T, vocab], the whole sequence recomputed without a cache."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def hidden(self, ids: list[int]):
        """float32 [T, D] after the final norm."""
        import torch

        with torch.no_grad():
            return self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].numpy()

    def mtp_logits(self, ids: list[int]):
        """float32 [T-1, vocab]: row p predicts token p+2 from hidden p and token p+1."""
        import torch

        with torch.no_grad():
            hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
            positions = torch.arange(len(ids) - 1)[None]
            y = self.mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=torch.tensor([ids[1:]]))
            y = y[0] if isinstance(y, tuple) else y
            return self.model.lm_head(y)[0].numpy()


def make(
    folder: Path, family: str, ratio: int = 2, seed: int = 0, pattern: str = "LLLF", tie: bool | None = None
) -> Oracle:
    """A checkpoint with every weight random (norms, dt_bias, conv and A_log too), so that no mistake can hide.

    ratio = Hv / Hk. pattern: one letter a layer, L linear, F full attention. Vocabulary 512, of which the tokenizer
    names 480."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.modeling_layers import MtpModel

    common = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": len(pattern),
        "layer_types": [{"L": "linear_attention", "F": "full_attention"}[kind] for kind in pattern],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * ratio,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "attn_implementation": "eager",
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    experts = {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    if family != "qwen3_next":
        rope.update(mrope_interleaved=True, mrope_section=[2, 1, 1])
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(
            **common, **experts, intermediate_size=128, norm_topk_prob=True, rope_parameters=rope
        )
        cls = transformers.Qwen3NextForCausalLM
    elif family == "qwen3_5":
        tie = True if tie is None else tie
        config = transformers.Qwen3_5TextConfig(**common, intermediate_size=96, rope_parameters=rope)
        cls = transformers.Qwen3_5ForCausalLM
    else:
        config = transformers.Qwen3_5MoeTextConfig(**common, **experts, rope_parameters=rope)
        cls = transformers.Qwen3_5MoeForCausalLM
    config.tie_word_embeddings = bool(tie)
    torch.manual_seed(seed)
    model = cls(config).float().eval()
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    mtp = MtpModel(model, 1).float().eval()
    for module in (model, mtp):
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")
    own = {n: p for n, p in mtp.named_parameters() if not n.startswith(("embed_tokens", "shared_head"))}
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *own.items()]:
            _randomise(name, p)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _add_mtp(folder, own, save_file)
    _add_config_keys(folder)
    _add_tokenizer(folder)
    return Oracle(folder, model, mtp)


def _randomise(name: str, p) -> None:
    import torch

    if name.endswith("A_log"):
        p.uniform_(-2.0, 1.0)
    elif name.endswith("dt_bias"):
        p.uniform_(-3.0, 1.0)
    elif p.dim() == 1:
        p.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.3)
    elif "conv1d" in name:
        p.normal_(0, 0.5)
    else:
        p.normal_(0, 0.3 if "embed" in name else 0.6 / p.shape[-1] ** 0.5)
    assert torch.isfinite(p).all()


def _add_mtp(folder: Path, own: dict, save_file) -> None:
    """The MTP layer in a shard of its own, under released names."""
    names = {"enorm.weight": "pre_fc_norm_embedding.weight", "hnorm.weight": "pre_fc_norm_hidden.weight"}
    names |= {"eh_proj.weight": "fc.weight", "post_norm.weight": "norm.weight"}
    tensors = {}
    for name, p in own.items():
        rest = name.removeprefix("layers.0.")
        rest = names.get(rest, rest.replace("mtp_block.", "layers.0."))
        tensors[f"mtp.{rest}"] = p.detach().contiguous()
    save_file(tensors, folder / "mtp.safetensors")
    main = "model.safetensors"
    from safetensors import safe_open

    with safe_open(folder / main, "pt") as f:
        index = dict.fromkeys(f.keys(), main)
    index |= dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _add_config_keys(folder: Path) -> None:
    """The keys of released configs in place of the oracle's own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("num_mtp_layers", None)
    config.pop("mtp_layer_types", None)
    config["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config))


def _add_tokenizer(folder: Path) -> None:
    """Byte-level BPE that names 480 ids: bytes, merges of a few words, and two special tokens at 478 and 500."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for a in alphabet:  # pairs of plain letters, until 478 ids are named
        for b in "aeiou":
            if a.isascii() and a.isalpha() and len(vocab) < 478:
                merges.append((a, b))
                vocab[a + b] = len(vocab)
    vocab |= {"<|endoftext|>": 478, "<|im_end|>": 500}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [
        {"id": 478, "content": "<|endoftext|>", **special},
        {"id": 500, "content": "<|im_end|>", **special},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [478]}))
