"""Whether a token that differs from another run's was a near tie: how far logits have to move to make it the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from boleinfer.params import SamplingParams
from boleinfer.sampling import Sampler, uniform

BOUNDS = {"float": 2e-5, "bf16": 0.1}
"""The largest gap that is rounding, by type of activations, in standard deviations of the row's logits."""

APART = 0.1
"""The largest distance of two rows of logits of the same text in bf16 that is rounding."""


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """How far x is from y, two rows of logits, against y's own size: |x - y| / |y - its mean|."""
    return float(np.linalg.norm(x - y) / np.linalg.norm(y - y.mean()))


def gap(logits: np.ndarray, sampler: Sampler, token: int) -> float:
    """By how much the difference of two logits has to change, at least, for `token` to be drawn; 0 where it is.

    logits: float [vocab], after which it was drawn; the sampler's history ends there.
    Greedy: the largest logit less the token's. Sampled at temperature T with the random number u: if no logit moves by
    more than d, the log-odds of a set of ids move by at most 2d / T, so the end of the token's interval reaches u only
    when 2d >= T |log-odds(u) - log-odds(end)|; that is the gap. Where top-k, top-p or min-p cut the ids, the last kept
    id may also go or a next one come, which takes a gap of its own; changes of two ids or more are not looked for."""
    p = sampler.params
    x = sampler.adjusted(logits).astype(np.float64)
    if p.greedy:
        return float(x.max() - x[token])
    u = float(uniform(sampler.seed, sampler.choice, sampler.history.length))
    return min(max(change, _interval_gap(x, ids, token, u, p.temperature)) for change, ids in _kept(x, p))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers first differ; None where the shorter one is the longer one's beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def spread(logits: np.ndarray) -> float:
    """The unit of BOUNDS."""
    return float(logits[np.isfinite(logits)].std())


def _interval_gap(x: np.ndarray, ids: np.ndarray, token: int, u: float, temperature: float) -> float:
    """The gap where exactly `ids` may be drawn."""
    ids = np.sort(ids)
    place = int(np.searchsorted(ids, token))
    if place == len(ids) or ids[place] != token:
        return float("inf")
    total = np.cumsum(np.exp((x[ids] - x.max()) / temperature))
    low, high = np.concatenate(([0.0], total / total[-1]))[place : place + 2]
    if low <= u < high:
        return 0.0
    return float(temperature * abs(_log_odds(u) - _log_odds(high if u >= high else low)))


def _kept(x: np.ndarray, p: SamplingParams) -> Iterator[tuple[float, np.ndarray]]:
    """Sets of ids that may be drawn, each with what the difference of two logits has to change by to make it so.

    First the ids that are kept as the logits are (the n likeliest, whatever cuts them), then those with one id less,
    one more, and the last one replaced by the next."""
    falling = np.argsort(-x, kind="stable")
    falling = falling[x[falling] > -np.inf]
    y, k, T = x[falling], p.top_k if p.top_k > 0 else len(falling), p.temperature
    weight = np.exp((y - y[0]) / T)
    held = np.cumsum(weight[:k]) / weight[:k].sum()  # by the likeliest 1, 2, ..
    floor = y[0] + T * np.log(p.min_p) if p.min_p else -np.inf
    n = min(k, len(falling), int((weight >= p.min_p).sum()))
    if p.top_p < 1:
        n = min(n, int(np.searchsorted(held, p.top_p)) + 1)
    yield 0.0, falling[:n]
    beyond = [T * (_log_odds(q) - _log_odds(p.top_p)) if p.top_p < 1 else -np.inf for q in held[max(0, n - 2) : n]]
    if n > 1:
        yield min(float(y[n - 1] - floor), -beyond[-2]), falling[: n - 1]
    if n < len(falling):
        if n < k:
            yield max(0.0, float(floor - y[n]), beyond[-1]), falling[: n + 1]
        yield float(y[n - 1] - y[n]), np.append(falling[: n - 1], falling[n])


def _log_odds(p: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(p) - np.log1p(-p))
