"""The stack of a Qwen hybrid: embedding, layers, final norm, head, and the MTP layer. Knows no family's file names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from boleinfer.config import ModelConfig
from boleinfer.layers import Weights, gated_attention, gated_deltanet
from boleinfer.ops.embedding import embedding
from boleinfer.ops.linear import linear
from boleinfer.ops.norms import rms_norm
from boleinfer.ops.rope import rope_table
from boleinfer.state import Batch, Factors, GDNLayer, State

FFN = Callable[[np.ndarray, Weights, ModelConfig], np.ndarray]


class Decoder:
    """A model: its sizes, its weights under canonical names (weights.py) and its feed-forward function.

    Raises nothing of its own: the loading plan has made sure that every weight is there in the right shape."""

    def __init__(self, config: ModelConfig, weights: Weights, ffn: FFN):
        self.config = config
        self.weights = weights
        self.ffn = ffn
        self._inv_freq = config.rope.inv_freq()  # [rotary/2]
        self._layers = [_under(weights, f"layers.{i}.") for i in range(config.num_hidden_layers)]
        self._mtp = _under(weights, "mtp.layers.0.") if "mtp.fc" in weights else None

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint brought an MTP layer."""
        return self._mtp is not None

    def forward(self, batch: Batch, state: State) -> tuple[np.ndarray, list[Factors | None]]:
        """All rows of the forest through all layers.

        Returns the hidden rows after the final norm [R, D], and per layer what the rows would add to the state
        (None at attention layers, whose rows already lie in scratch places of the KV pages)."""
        c = self.config
        x = embedding(batch.forest.token, self.weights["embed_tokens"])  # [R, D]
        rotation = rope_table(batch.forest.position, self._inv_freq, c.rope.attention_factor)
        pending: list[Factors | None] = []
        for w, memory in zip(self._layers, state.layers):
            h = rms_norm(x, w["input_layernorm"], c.rms_norm_eps)
            if isinstance(memory, GDNLayer):
                y, factors = gated_deltanet(h, w["linear_attn"], c, memory, batch)
            else:
                y, factors = gated_attention(h, w["self_attn"], c, memory, batch, rotation), None
            x = x + y
            x = x + self.ffn(rms_norm(x, w["post_attention_layernorm"], c.rms_norm_eps), w["mlp"], c)
            pending.append(factors)
        return rms_norm(x, self.weights["norm"], c.rms_norm_eps), pending

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden rows [n, D] times the head: [n, vocab]."""
        return linear(hidden, self.weights["lm_head"])

    def mtp(
        self, token: np.ndarray, hidden: np.ndarray, batch: Batch, state: State, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """One pass of the MTP layer: y [n, D], whose logits predict the token after `token`.

        token:  int32 [n], the token at the position after each row's
        hidden: [n, D], the target's hidden row (after the final norm) of each position, or the y that drafted `token`
        batch:  a forest of positions as the MTP layer counts them: position p pairs hidden p with token p + 1
        rows:   which rows of that forest these are (None: all)

        x = fc [norm(embedding(token)) ; norm(hidden)], then a full-attention layer with a KV cache of its own
        (equation: transformers' MtpModel)."""
        c, w, memory, eps = self.config, self._mtp, state.mtp, self.config.rms_norm_eps
        if w is None or memory is None:
            raise ValueError("this checkpoint, or the state made for it, has no MTP layer")
        e = rms_norm(embedding(token, self.weights["embed_tokens"]), self.weights["mtp.pre_fc_norm_embedding"], eps)
        h = rms_norm(hidden, self.weights["mtp.pre_fc_norm_hidden"], eps)
        x = linear(np.concatenate([e, h], axis=1), self.weights["mtp.fc"])  # [n, D]
        position = batch.forest.position
        position = position if rows is None else position[rows]
        rotation = rope_table(position, self._inv_freq, c.rope.attention_factor)
        h = rms_norm(x, w["input_layernorm"], eps)
        x = x + gated_attention(h, w["self_attn"], c, memory, batch, rotation, rows)
        x = x + self.ffn(rms_norm(x, w["post_attention_layernorm"], eps), w["mlp"], c)
        return rms_norm(x, self.weights["mtp.norm"], eps)


def _under(weights: Weights, prefix: str) -> dict:
    """The weights below a prefix, by module: {"mlp": {"gate_up_proj": ...}, "input_layernorm": ...}."""
    tree: dict = {}
    for name, array in weights.items():
        if name.startswith(prefix):
            part, _, rest = name[len(prefix) :].partition(".")
            if rest:
                tree.setdefault(part, {})[rest] = array
            else:
                tree[part] = array
    return tree
