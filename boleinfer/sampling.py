"""Choosing tokens: the random numbers, the distribution that the parameters ask for, and the walk over a tree.

This is the exact definition, in float64; a kernel has to agree with it. It knows no model, text or request.
A token depends only on (logits, parameters, tokens before it, seed, choice, absolute position), never on what was
drafted, so the text is the same with and without speculation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from boleinfer.forest import Tree
from boleinfer.params import SamplingParams

__all__ = ["BrokenLogits", "Sampler", "SamplingParams", "TokenHistory", "accept", "new_seed", "uniform"]

Word = TypeVar("Word", int, np.ndarray)  # 32-bit words, as Python integers or in uint64


class BrokenLogits(ValueError):
    """A row of logits from which no token can be drawn; the message says why. It concerns one request only."""


BROKEN = {
    code: f"the model's logits hold {kind}; the request cannot go on"
    for code, kind in ((-1, "NaN"), (-2, "an infinite value"), (-3, "no token that may be drawn"))
} | {-4: "more than 512 drafted tokens lie between the text and one to draw; with penalties the GPU cannot go on"}
"""Why no token was drawn, by what a kernel gives in its place."""


def new_seed() -> int:
    """An unpredictable seed, 63 bits."""
    return secrets.randbits(63)


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: four random 32-bit words of a counter and a key. Source: Salmon et al., SC11 (Random123)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: Any) -> Any:
    """The random number in [0, 1) for the token at the absolute `position` of the `choice`-th answer; 53 bits.

    seed: any integer, its low 64 bits count; position: one, or an integer array -> float, or float64 of that shape.
    Key = seed, counter = (position low, position high, choice, 0).
    """
    if isinstance(position, np.ndarray):
        position = position.astype(np.uint64)
    counter = (position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, choice & 0xFFFFFFFF, 0)
    a, b, _, _ = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((a >> 5) * 2**26 + (b >> 6)) / 2**53


class TokenHistory:
    """The distinct tokens of one answer so far, and how often each is in the output; grows as tokens are committed.

    length: tokens of prompt and output; generated: tokens of the output
    """

    def __init__(self, prompt: Sequence[int] | np.ndarray) -> None:
        self.length, self.generated = len(prompt), 0
        self._ids = np.unique(np.asarray(prompt, np.int64))
        self._count = np.zeros(len(self._ids), np.int64)
        self._place = {token: i for i, token in enumerate(self._ids.tolist())}

    def append(self, token: int) -> None:
        """Commits one more token of the output."""
        if token not in self._place:
            self._grow()
            self._place[token] = len(self._place)
            self._ids[self._place[token]] = token
        self._count[self._place[token]] += 1
        self.length += 1
        self.generated += 1

    def after(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids int64 [M] and their counts in the output int64 [M] (0: prompt only) once `path` follows."""
        new = [token for token in dict.fromkeys(path) if token not in self._place]
        M = len(self._place)
        ids = np.concatenate((self._ids[:M], np.asarray(new, np.int64)))
        count = np.concatenate((self._count[:M], np.zeros(len(new), np.int64)))
        place = {token: M + i for i, token in enumerate(new)}
        for token in path:
            count[place[token] if token in place else self._place[token]] += 1
        return ids, count

    def _grow(self) -> None:
        if len(self._place) == len(self._ids):
            room = np.zeros(len(self._ids) + 16, np.int64)
            self._ids, self._count = np.concatenate((self._ids, room)), np.concatenate((self._count, room))


class Sampler:
    """Draws the tokens of one answer.

    history: its tokens so far, the prompt at first; whoever commits a token appends it there
    end_ids: the model's end tokens (min_tokens forbids them for a while, unless params.ignore_eos)
    allowed: bool [vocab], False at rows of the output matrix that are no token; these are never drawn
    early_ids: int64, ascending: what min_tokens forbids
    Raises ValueError when params name an id outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        choice: int,
        prompt: Sequence[int] | np.ndarray,
        end_ids: Iterable[int],
        allowed: np.ndarray,
    ) -> None:
        self.params, self.seed, self.choice, self.allowed = params, seed, choice, allowed
        self.history = TokenHistory(prompt)
        bias = params.logit_bias or {}
        for field, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
            if ids and max(ids) >= len(allowed):
                raise ValueError(f"{field} names token id {max(ids)}; the vocabulary is 0 .. {len(allowed) - 1}")
        self._bias_ids = np.fromiter(bias, np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float64, len(bias))
        self._never = np.flatnonzero(~allowed)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(end_ids))
        self.early_ids = np.asarray(sorted(ends), np.int64)

    def sample(self, logits: np.ndarray, path: Sequence[int] = ()) -> int:
        """The token that follows the history and then `path`.

        logits: float [vocab], the model's own, at the last token before. Raises BrokenLogits.
        """
        if self.params.greedy:
            return self._likeliest(logits, path)
        ids, weight = self._candidates(logits, path)
        total = np.cumsum(weight)
        u = uniform(self.seed, self.choice, self.history.length + len(path))
        place = np.searchsorted(total, u * total[-1], side="right")
        if place == len(total):  # the product was rounded up to the whole
            place = np.searchsorted(total, total[-1])
        return int(ids[place])

    def adjusted(self, logits: np.ndarray, path: Sequence[int] = ()) -> np.ndarray:
        """The logits after bias, penalties and forbidden ids: a new float64 [vocab]; `logits` when nothing applies."""
        p, h = self.params, self.history
        early = self.early_ids if h.generated + len(path) < p.min_tokens else self.early_ids[:0]
        if not (p.penalises or len(self._bias) or len(early) or len(self._never)):
            return logits
        x = logits.astype(np.float64)
        x[self._bias_ids] += self._bias
        if p.penalises:
            ids, count = h.after(path)  # [M]
            seen = x[ids]
            with np.errstate(over="ignore"):
                seen = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
                x[ids] = seen - p.frequency_penalty * count - p.presence_penalty * (count > 0)
        x[early] = -np.inf
        x[self._never] = -np.inf
        return x

    def distribution(self, logits: np.ndarray, path: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The ids that `sample` may draw, ascending, int64 [M], and their probabilities, float64 [M]."""
        if self.params.greedy:
            return np.asarray([self._likeliest(logits, path)]), np.ones(1)
        ids, weight = self._candidates(logits, path)
        return ids[weight > 0], weight[weight > 0] / weight.sum()

    def logprobs(self, logits: np.ndarray, token: int) -> dict[int, float] | None:
        """Natural-log probabilities of `token`, then of the `params.logprobs` likeliest allowed ids; None if not asked.

        They are of the model itself, before any parameter changes its logits. Entries: the token first, the others
        by falling probability, equal ones by rising id; no id twice.
        """
        if self.params.logprobs is None:
            return None
        x = logits.astype(np.float64)
        x -= x.max()
        x -= np.log(np.exp(x).sum())
        k = min(self.params.logprobs, len(x) - len(self._never))
        ids = _largest(np.where(self.allowed, x, -np.inf), k) if k else np.zeros(0, np.int64)
        ids = ids[np.argsort(-x[ids], kind="stable")]
        return {i: float(x[i]) for i in (token, *ids.tolist())}

    def _likeliest(self, logits: np.ndarray, path: Sequence[int]) -> int:
        x = self.adjusted(logits, path)
        token = int(x.argmax())  # a NaN counts as largest, so one look tells whether the row is sound
        _check(x, x[token])
        return token

    def _candidates(self, logits: np.ndarray, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [M], ascending, and weights float64 [M] proportional to their probabilities, the largest 1."""
        p = self.params
        x = self.adjusted(logits, path)
        top = x.max()
        _check(x, top)
        if 0 < p.top_k < len(x):
            ids = _largest(x, p.top_k)
            x = x[ids]  # [M]
        else:
            ids = np.arange(len(x))
        weight = np.exp((x.astype(np.float64) - top) / p.temperature)
        if p.top_p < 1:
            kept = _nucleus(weight, p.top_p)
            ids, weight = ids[kept], weight[kept]
        if p.min_p > 0:
            kept = weight >= p.min_p
            ids, weight = ids[kept], weight[kept]
        return ids, weight


def accept(
    tree: Tree,
    logits: np.ndarray | Callable[[int], np.ndarray],
    sampler: Sampler,
    root: int = 0,
) -> tuple[np.ndarray, list[int]]:
    """Walks the tree with the target's own tokens: which nodes are right, and which tokens come out.

    logits: [N, vocab], or a function from a node to its row, called only for nodes on the way
    root:   the node of the last known token; sampler.history ends with that token
    -> nodes int32 [m], the path from `root`, and m tokens, the i-th drawn at the i-th node; the last is no node yet.
    A broken row at the root raises BrokenLogits. Below the root it ends the walk above that node, so that the error
    comes one step later, after the same tokens as without drafts. An end token does not end the walk: whoever commits
    the tokens drops what comes after it.
    """
    row = logits if callable(logits) else logits.__getitem__
    nodes, tokens = [root], [sampler.sample(row(root))]
    while True:
        children = np.flatnonzero((tree.parent == nodes[-1]) & (tree.token == tokens[-1]))
        if not children.size:
            break
        node = int(children[0])
        try:
            token = sampler.sample(row(node), tokens)
        except BrokenLogits:
            break
        nodes.append(node)
        tokens.append(token)
    return np.asarray(nodes, np.int32), tokens


def _check(x: np.ndarray, largest: np.floating) -> None:
    if not np.isfinite(largest):
        raise BrokenLogits(BROKEN[-1 if np.isnan(largest) else -2 if largest > 0 else -3])


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest of x [n], ascending; of equal values the lower id. 1 <= k <= n.

    The k-th largest of many columns' maxima is no larger than the k-th largest value, so it bounds the search.
    """
    columns = max(4 * k, 512)
    near = x
    if len(x) >= 2 * columns:
        maxima = x[: len(x) // columns * columns].reshape(-1, columns).max(0)  # [columns]
        near = x[x >= np.partition(maxima, -k)[-k]]
    return _at_least(x, np.partition(near, -k)[-k], k)


def _nucleus(weight: np.ndarray, top_p: float) -> np.ndarray:
    """Places of the fewest largest weights that hold `top_p` of the sum, ascending; of equal weights the earlier.

    Weights below (1 - top_p) / n of the sum hold less than 1 - top_p together, so none of them is needed.
    """
    total = weight.sum()
    falling = np.sort(weight[weight >= (1 - top_p) * total / len(weight)])[::-1]
    n = min(int(np.searchsorted(np.cumsum(falling), top_p * total)) + 1, len(falling))
    return _at_least(weight, falling[n - 1], n)


def _at_least(x: np.ndarray, least: np.floating, n: int) -> np.ndarray:
    """Places of the n largest of x, ascending, when the n-th largest is `least`; of those equal to it the first."""
    places = np.flatnonzero(x >= least)
    if len(places) == n:
        return places
    equal = np.flatnonzero(x[places] == least)
    return np.delete(places, equal[n - len(places) :])
