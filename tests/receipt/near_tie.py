"""Whether a token that differs from NumPy's was a near tie: how far logits have to move to make it the choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer.sampling import Sampler, SamplingParams, uniform

BOUNDS = {"float": 2e-5, "bf16": 0.1}
"""The largest gap that is rounding, by type of activations, in standard deviations of the row's logits."""


def gap(logits: np.ndarray, sampler: Sampler, token: int) -> float:
    """By how much the difference of two logits has to change, at least, for `token` to be drawn; 0 where it is.

    logits: float [vocab], after which it was drawn; the sampler's history ends there, its parameters keep every id.
    Greedy: the largest logit less the token's. Sampled at temperature T with the random number u: if no logit moves by
    more than d, the log-odds of a set of ids move by at most 2d / T, so the end of the token's interval reaches u only
    when 2d >= T |log-odds(u) - log-odds(end)|; that is the gap."""
    p = sampler.params
    if p.greedy:
        x = sampler._adjusted(logits, ())
        return float(x.max() - x[token])
    ids, weight = sampler._candidates(logits, ())
    total = np.cumsum(weight)
    ends = np.concatenate(([0.0], total / total[-1]))
    place = int(np.searchsorted(ids, token))
    if place == len(ids) or ids[place] != token:
        return float("inf")
    u = float(uniform(sampler.seed, sampler.choice, sampler.history.length))
    low, high = ends[place], ends[place + 1]
    if low <= u < high:
        return 0.0
    return float(p.temperature * abs(_log_odds(u) - _log_odds(high if u >= high else low)))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers first differ; None where the shorter one is the longer one's beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def spread(logits: np.ndarray) -> float:
    """The unit of BOUNDS."""
    return float(logits[np.isfinite(logits)].std())


def keeps_every_id(p: SamplingParams) -> bool:
    """Whether `gap` can judge such a request."""
    return p.greedy or (p.top_k <= 0 and p.top_p == 1 and p.min_p == 0)


def _log_odds(p: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(p) - np.log1p(-p))
