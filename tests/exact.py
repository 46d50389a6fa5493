"""A model without weights and a slow definition of sampling: every text with its exact probability, by enumeration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from scipy.stats import chisquare

from boleinfer.request import Request
from boleinfer.sampling import Sampler, SamplingParams
from boleinfer.state import Batch, State

VOCAB, END, NO_TOKEN = 5, 0, 3
ALLOWED = np.arange(VOCAB) != NO_TOKEN
WINDOW = 3  # tokens that the next one depends on


class TokenModel:
    """Logits are random, seeded by the last WINDOW tokens. It remembers tokens as a real model remembers keys.

    A row's token lies in its KV place, behind the committed ones until it is accepted and moved; what a row sees is
    read from there and from its own path. A wrong commit therefore changes the text."""

    has_mtp = False

    def __init__(self, seed: int = 0, scale: float = 0.8):
        self.config = SimpleNamespace(
            layer_types=["full_attention"], num_key_value_heads=1, head_dim=1, vocab_size=VOCAB, hidden_size=WINDOW,
            linear_num_key_heads=1, linear_key_head_dim=1, linear_num_value_heads=1, linear_value_head_dim=1,
            linear_conv_kernel_dim=2,
        )  # fmt: skip
        self._seed, self._scale = seed, scale
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [VOCAB], the logits after a text."""
        seen = tuple(tokens[-WINDOW:])
        if seen not in self._rows:
            rng = np.random.default_rng([self._seed, *seen])
            row = self._scale * rng.standard_normal(VOCAB)
            row[END] -= 1  # most texts get to their full length
            self._rows[seen] = row.astype(np.float32)
        return self._rows[seen]

    def forward(self, batch: Batch, state: State) -> tuple[np.ndarray, list[None]]:
        """The last WINDOW tokens up to each row, float32 [R, WINDOW], -1 before the text."""
        forest, P, keys = batch.forest, state.page_size, state.layers[0].k[:, :, 0, 0]
        seen = np.full((len(forest), WINDOW), -1, np.float32)
        slots, request = forest.kv_slot, forest.request
        keys[batch.page_table[request, slots // P], slots % P] = forest.token
        for row, parent in enumerate(forest.parent.tolist()):
            b = request[row]
            if parent < 0:
                last = np.arange(max(0, int(forest.committed[b]) - WINDOW + 1), int(forest.committed[b]))
                before = keys[batch.page_table[b, last // P], last % P]
            else:
                before = seen[parent, 1:]
            seen[row, WINDOW - 1 - len(before) : -1], seen[row, -1] = before, forest.token[row]
        return seen, [None]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, VOCAB]."""
        assert not np.isnan(hidden).any(), "a row read a place that nobody wrote"
        return np.stack([self.after([t for t in row if t >= 0]) for row in hidden.astype(int).tolist()])


def request(prompt: Sequence[int], params: SamplingParams, seed: int, n: int) -> Request:
    """A request for n tokens at most; END ends it unless it is ignored."""
    sampler = Sampler(params, seed, 0, prompt, [END], ALLOWED)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset([END]))
    return Request(list(prompt), params, sampler, len(prompt) + n, ends)


def plain(model: TokenModel, made: Request) -> list[int]:
    """The request's answer, token by token, without an engine; the request is used up."""
    while not made.finished:
        row = model.after(made.tokens)
        token = made.sampler.sample(row)
        made.append(token, made.sampler.logprobs(row, token))
    return made.generated


def texts(model: TokenModel, prompt: Sequence[int], params: SamplingParams, n: int) -> dict[tuple[int, ...], float]:
    """Every answer of at most n tokens with its probability."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {END})
    done, growing = {}, {(): 1.0}
    for length in range(1, n + 1):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in growing.items():
            row = model.after([*prompt, *text])
            for token, q in slow_distribution(params, row, prompt, text, (END,), ALLOWED).items():
                (done if token in ends or length == n else longer)[(*text, token)] = p * q
        growing = longer
    return done


def slow_distribution(
    params: SamplingParams,
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int],
    allowed: np.ndarray,
) -> dict[int, float]:
    """{id: probability} of the token after `output`, from the documented rules alone, one token at a time."""
    x = {i: float(v) for i, v in enumerate(logits)}
    for i, bias in (params.logit_bias or {}).items():
        x[i] += bias
    count = Counter(output)
    for i in set(prompt) | set(output):
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        x[i] -= params.frequency_penalty * count[i] + params.presence_penalty * (count[i] > 0)
    if len(output) < params.min_tokens:
        for i in set(params.stop_token_ids) | (set() if params.ignore_eos else set(ends)):
            x[i] = -math.inf
    x = {i: v for i, v in x.items() if allowed[i] and v > -math.inf}
    falling = sorted(x, key=lambda i: (-x[i], i))
    if params.temperature < 1e-5:
        return {falling[0]: 1.0}
    top = x[falling[0]]
    weight = {i: math.exp((x[i] - top) / params.temperature) for i in falling}
    if params.top_k > 0:
        falling = falling[: params.top_k]
    if params.top_p < 1:
        whole, kept = math.fsum(weight[i] for i in falling), []
        while falling and (not kept or math.fsum(weight[i] for i in kept) < params.top_p * whole):
            kept.append(falling.pop(0))
        falling = kept
    falling = [i for i in falling if weight[i] >= params.min_p]
    whole = math.fsum(weight[i] for i in falling)
    return {i: weight[i] / whole for i in falling if weight[i] / whole > 0}


def p_value(drawn: Sequence[Sequence[int]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square's, of texts drawn independently; 0 where one of them cannot be. Rare texts are counted together."""
    count = Counter(map(tuple, drawn))
    if set(count) - set(expected):
        return 0.0
    pairs = sorted((len(drawn) * p, count[text]) for text, p in expected.items())
    cells, rare = [], [0.0, 0]
    for pair in pairs:
        if pair[0] >= 5:
            cells.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    if rare[0] >= 5 or not cells:
        cells.append((rare[0], rare[1]))
    elif rare[0] > 0:
        cells[0] = (cells[0][0] + rare[0], cells[0][1] + rare[1])
    if len(cells) == 1:
        return 1.0
    want, got = np.asarray(cells, float).T
    return float(chisquare(got, want * got.sum() / want.sum()).pvalue)
