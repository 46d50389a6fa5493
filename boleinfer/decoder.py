"""The stack of a Qwen hybrid: embedding, layers, final norm, head, and the MTP layer. Knows no family's file names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from boleinfer import device, nibbles
from boleinfer.config import ModelConfig
from boleinfer.device import Array, Fp8
from boleinfer.layers import Weights, gated_attention, gated_deltanet, remember
from boleinfer.nibbles import Nibbles
from boleinfer.ops.embedding import token_inputs
from boleinfer.ops.linear import head, linear
from boleinfer.ops.mtp_inputs import mtp_inputs
from boleinfer.residual import Residual, normed
from boleinfer.state import Batch, Factors, GDNLayer, KVLayer, State

FFN = Callable[[Residual, Weights, ModelConfig], tuple[Array, Array]]
Watch = Callable[[int, Array], None]


class Decoder:
    """A model: its sizes, its weights under canonical names (weights.py) and its feed-forward function.

    Raises nothing of its own: the loading plan has made sure that every weight is there in the right shape."""

    def __init__(self, config: ModelConfig, weights: Weights, ffn: FFN):
        self.config = config
        self.weights = weights
        self.ffn = ffn
        inv_freq = config.rope.inv_freq()  # [rotary/2]
        self._inv_freq = device.upload(inv_freq) if device.on_gpu(weights["norm"]) else inv_freq
        self._layers = [_under(weights, f"layers.{i}.") for i in range(config.num_hidden_layers)]
        self._mtp: dict = _under(weights, "mtp.layers.0.") if "mtp.fc" in weights else {}

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint brought an MTP layer."""
        return bool(self._mtp)

    def forward(self, batch: Batch, state: State, watch: Watch | None = None) -> tuple[Array, list[Factors | None]]:
        """All rows of the forest through all layers.

        watch: called with the number of each layer and its output [R, D], before it is added to the stream
        Returns the hidden rows after the final norm [R, D], and per layer what the rows would add to the state
        (None where they lie in scratch places of it already: at attention layers, and as gdn_core says)."""
        c, eps = self.config, self.config.rms_norm_eps
        token, position, factor = batch.forest.token, batch.forest.position, c.rope.attention_factor
        table = self.weights["embed_tokens"]
        stream, *rotation = token_inputs(token, table, position, self._inv_freq, factor, state.dtype)  # [R, D]
        pending: list[Factors | None] = []
        y, factors = None, None
        for i, (w, memory) in enumerate(zip(self._layers, state.layers)):
            before = Residual(stream, y, w["input_layernorm"], eps)
            if isinstance(memory, GDNLayer):
                y, stream, factors = gated_deltanet(before, w["linear_attn"], c, memory, batch)
            else:
                (y, stream), factors = gated_attention(before, w["self_attn"], c, memory, batch, tuple(rotation)), None
            if watch is not None:
                watch(i, y)
            y, stream = self.ffn(Residual(stream, y, w["post_attention_layernorm"], eps), w["mlp"], c)
            pending.append(factors)
        return normed(Residual(stream, y, self.weights["norm"], eps))[0], pending

    def logits(self, hidden: Array, head: Array | Fp8 | Nibbles | None = None) -> Array:
        """Hidden rows [n, D] times the head: float32 [n, vocab].

        head: some of its rows, [ids, D], whose logits alone are wanted"""
        if isinstance(head, Nibbles):
            return nibbles.product(hidden, head)
        return linear(hidden, self.weights["lm_head"] if head is None else head, np.float32)

    def logits_to_sample(
        self, hidden: Array, use: Array, allowed: Array | None, largest: Array
    ) -> tuple[Array, Array | None]:
        """The same as far as a step reads it: linear.head."""
        return head(hidden, self.weights["lm_head"], use, allowed, largest)

    def mtp(
        self,
        token: Array,
        hidden: Array,
        position: Array,
        batch: Batch,
        state: State,
        rows: Array | None = None,
        source: Array | None = None,
        wanted: Array | None = None,
    ) -> Array:
        """One pass of the MTP layer: y [n, D], whose logits predict the token after `token`.

        token:    int32 [n], the token at the position after each row's
        hidden:   [n, D], the target's hidden row (after the final norm) of each position, or the y that drafted `token`
        position: [n], as the MTP layer counts them: position p pairs hidden p with token p + 1
        batch:    a forest of such positions
        rows:     which rows of that forest these are (None: all)
        source:   int32 [n], the rows of `hidden` that are meant (None: as they stand)
        wanted:   int32 [m], of a pass over the forest's first n rows those whose y is wanted (None: all); of the others
                  only keys and values are computed. On the GPU -1 is none, whose y is undefined

        x = fc [norm(embedding(token)) ; norm(hidden)], then a full-attention layer with a KV cache of its own
        (equation: transformers' MtpModel)."""
        c, w, eps = self.config, self._mtp, self.config.rms_norm_eps
        before, rotation, memory = self._mtp_inputs(token, hidden, position, state, source)
        y, stream = gated_attention(before, w["self_attn"], c, memory, batch, rotation, rows, wanted)
        y, stream = self.ffn(Residual(stream, y, w["post_attention_layernorm"], eps), w["mlp"], c)
        return normed(Residual(stream, y, self.weights["mtp.norm"], eps))[0]

    def mtp_memory(
        self,
        token: Array,
        hidden: Array,
        position: Array,
        batch: Batch,
        state: State,
        source: Array | None = None,
    ) -> None:
        """Of a pass of the MTP layer over all rows of the batch what later ones need: its keys and values."""
        before, rotation, memory = self._mtp_inputs(token, hidden, position, state, source)
        remember(before, self._mtp["self_attn"], self.config, memory, batch, rotation)

    def _mtp_inputs(
        self, token: Array, hidden: Array, position: Array, state: State, source: Array | None
    ) -> tuple[Residual, tuple[Array, Array], KVLayer]:
        """What the MTP layer reads, [n, D], the rows' rotation, and the layer's pages."""
        w, eps, all_ = self._mtp, self.config.rms_norm_eps, self.weights
        if not w or state.mtp is None:
            raise ValueError("this checkpoint, or the state made for it, has no MTP layer")
        norms = all_["mtp.pre_fc_norm_embedding"], all_["mtp.pre_fc_norm_hidden"]
        angles = position, self._inv_freq, self.config.rope.attention_factor
        x, *rotation = mtp_inputs(
            token, all_["embed_tokens"], norms[0], hidden, norms[1], *angles, eps, source
        )  # [n, 2 D]
        stream = linear(x, all_["mtp.fc"])  # [n, D]
        return Residual(stream, None, w["input_layernorm"], eps), tuple(rotation), state.mtp


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
