"""Sampling on the GPU: each slot's parameters and history in arrays of fixed address, and the launches over them.

What is drawn is sampling.Sampler.sample's token. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.sampling import Sampler

MAX_EARLY = 64  # end tokens of a request with min_tokens
_GREEDY, _PENALISES, _BIASED = 1, 2, 4  # flags, as in sample.cu
_THREADS = 512
_GROUP, _AT_ONCE, _BLOCKS = 128, 64, 128  # logits of a group, groups of a block as in sample.cu, blocks worth starting
_LARGEST = 2**31 - 1


class SamplingTable:
    """Parameters and histories of the requests in `slots` state slots.

    vocab:   width of a row of logits
    allowed: bool [vocab], the ids that are tokens; others are never drawn
    """

    def __init__(self, slots: int, vocab: int, allowed: np.ndarray) -> None:
        self.vocab = vocab
        self.allowed = None if allowed.all() else device.upload(allowed.astype(np.uint8))  # [vocab]
        self.numbers = device.empty((slots, 6), np.float64)  # temperature, top_p, min_p, the three penalties
        self.whole = device.empty((slots, 5), np.int32)  # top_k, min_tokens, choice, flags, early ids
        self.seed = device.empty((slots,), np.uint64)
        self.early = device.empty((slots, MAX_EARLY), np.int32)
        self.bias = device.empty((slots, vocab), np.float64)  # of slots with a bias
        self.seen = device.empty((slots, vocab), np.int32)  # of slots with penalties: -1, or how often in the output
        self.known = device.empty((slots,), np.int32)  # tokens of prompt and output
        self.generated = device.empty((slots,), np.int32)  # tokens of the output

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU: 12 a slot and id of the vocabulary, and little else."""
        arrays = (self.numbers, self.whole, self.seed, self.early, self.bias, self.seen, self.known, self.generated)
        return sum(a.nbytes for a in arrays) + (0 if self.allowed is None else self.allowed.nbytes)

    @staticmethod
    def check(sampler: Sampler) -> None:
        """Raises ValueError when min_tokens would have to forbid more than MAX_EARLY ids."""
        p, early = sampler.params, sampler.early_ids
        if p.min_tokens and len(early) > MAX_EARLY:
            raise ValueError(
                f"min_tokens={p.min_tokens} has to forbid {len(early)} end and stop ids; at most {MAX_EARLY} are "
                "possible on the GPU: name fewer stop_token_ids, or leave min_tokens out"
            )

    def set(self, slot: int, sampler: Sampler, tokens: Sequence[int]) -> None:
        """Takes over a request before its first step: its parameters, and its tokens (prompt and output) so far.

        Raises ValueError as `check` does.
        """
        p, early, generated = sampler.params, sampler.early_ids, sampler.history.generated
        self.check(sampler)
        numbers = [p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
        flags = _GREEDY * p.greedy | _PENALISES * p.penalises | _BIASED * bool(p.logit_bias)
        top_k = p.top_k if 0 < p.top_k < self.vocab else 0
        choice = np.uint32(sampler.choice & 0xFFFFFFFF).view(np.int32)
        count = len(early) if p.min_tokens else 0
        self._write(self.numbers, slot, numbers)
        self._write(self.whole, slot, [top_k, min(p.min_tokens, _LARGEST), choice, flags, count])
        self._write(self.seed, slot, sampler.seed & 0xFFFFFFFFFFFFFFFF)
        self._write(self.known, slot, len(tokens))
        self._write(self.generated, slot, generated)
        if count:
            self._write(self.early, slot, np.pad(early, (0, MAX_EARLY - count)))
        if p.logit_bias:
            bias = np.zeros(self.vocab)
            bias[list(p.logit_bias)] = list(p.logit_bias.values())
            self._write(self.bias, slot, bias)
        if p.penalises:
            seen, ids = np.full(self.vocab, -1, np.int32), np.asarray(tokens, np.int64)
            seen[ids] = 0
            np.add.at(seen, ids[len(ids) - generated :], 1)
            self._write(self.seen, slot, seen)

    def sample(
        self,
        logits: Array,
        largest: Array | None,
        row: Array,
        use: Array,
        forest: DeviceForest,
        slot: Array,
        root: Array,
        token: Array,
    ) -> None:
        """Queues the drawing of the token that follows each of some rows of the forest.

        logits, largest: of n rows, the model's own, as linear.head gives them by `use`
        row:    int32 [n], their flat rows, -1 for none
        slot:   int32 [B]; root: int32 [B], the local row of each request's last known token, where its history ends;
                what lies between a row and its root is drafted and counts as output
        token:  int32 [R], written at those rows: the id, or -1 where the logits hold a NaN, -2 an infinite value, -3
                nothing that may be drawn; -4 for a request with penalties more than 512 rows below its root
        """
        arrays = {"parent": forest.parent, "token": forest.token, "depth": forest.depth, "request": forest.request}
        args = arrays | {"known": self.known, "generated": self.generated, "seen": self.seen}
        args |= {"logits": logits, "largest": largest, "row": row, "use": use}
        args |= {"start": forest.start, "slot": slot}
        args |= {"root": root, "allowed": self.allowed, "numbers": self.numbers, "whole": self.whole}
        args |= {"seed": self.seed, "early": self.early, "bias": self.bias, "out": token, "V": self.vocab}
        groups = -(-self.vocab // _GROUP)
        args |= {name: device.empty((len(row), groups), np.float64) for name in ("group_top", "group_mass")}
        args |= {"arrived": device.counters(len(row)), "Count": groups}
        parts = min(-(-groups // _AT_ONCE), max(1, _BLOCKS // len(row)))
        kernels.launch("sample.cu", "sample", (len(row), parts), _THREADS, args)

    @staticmethod
    def _write(array: Array, slot: int, values: object) -> None:
        row = array[slot : slot + 1]
        device.write(row, np.asarray(values, array.dtype).reshape(row.shape))
