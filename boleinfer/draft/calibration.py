"""How likely a token is when several drafters have spoken, learned from what came out. Knows no drafter.

Each drafter is for a token, with a probability; or against it, when it named others; or silent; or was not asked. For
each such pattern of votes the odds are the product of the drafters' own odds, each to a power, times a constant:

    logit p = w + sum over drafters i of w_i x_i

x_i is the logit of p_i where i is for the token, of what the tokens that it named leave where it is against it, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from operator import mul

FIRM = 4.0  # sightings of even odds that the first weights stand for
RECENT = 500  # sightings over which what was learned fades
SUREST = 5.0  # logits are cut to -5 .. 5, a probability of 0.7 % to 99.3 %
DISSENT = -2.0  # what a vote against adds to the logit at first

Pattern = str  # a letter a drafter, one of these
FOR, AGAINST, SILENT, ABSENT = "fas-"
Vote = tuple[Pattern, list[float]]  # who said what of one token, and the x of all drafters


class Calibration:
    """Weights for each pattern of votes, learned online by Newton's method on each weight alone.

    Per pattern: w [1 + drafters], and of each its precision, the sum of p (1 - p) x^2 over recent sightings."""

    def __init__(self) -> None:
        self._weights: dict[Pattern, tuple[list[float], list[float]]] = {}

    def votes(self, said: Sequence[Mapping[int, float] | None]) -> dict[int, Vote]:
        """The vote on each token that a drafter named.

        said: of each drafter the tokens it names with their probabilities; None for one that was not asked"""
        others = "".join(ABSENT if s is None else AGAINST if s else SILENT for s in said)
        left = [_logit(1 - sum(s.values())) if s else 0.0 for s in said]
        found: dict[int, Vote] = {}
        for i, named in enumerate(said):
            for token, p in named.items() if named else ():
                pattern, x = found.get(token) or (others, left.copy())
                x[i] = _logit(p)
                found[token] = pattern[:i] + FOR + pattern[i + 1 :], x
        return found

    def likely(self, votes: Mapping[int, Vote]) -> dict[int, float]:
        """The probabilities of tokens of one place, 1 together at most."""
        prob = {token: self._likely(vote) for token, vote in votes.items()}
        total = sum(prob.values())
        return {token: p / total for token, p in prob.items()} if total > 1 else prob

    def learn(self, vote: Vote, right: bool) -> None:
        """Takes in whether it was that token."""
        pattern, x = vote
        w, precision = self._of(pattern)
        p = self._likely(vote)
        miss, slope = right - p, max(p * (1 - p), 1e-3)
        for i, value in enumerate((*x, 1.0)):
            precision[i] += slope * value * value - (precision[i] - FIRM / 4) / RECENT
            w[i] += miss * value / precision[i]

    def _likely(self, vote: Vote) -> float:
        pattern, x = vote
        w, _ = self._of(pattern)
        return 1 / (1 + exp(-w[-1] - sum(map(mul, w, x))))

    def _of(self, pattern: Pattern) -> tuple[list[float], list[float]]:
        """Weights and precisions; at first those who vote have the same say."""
        if (known := self._weights.get(pattern)) is None:
            against = pattern.count(AGAINST)
            say = 1 / (pattern.count(FOR) + against)
            w = [*(say if letter in (FOR, AGAINST) else 0.0 for letter in pattern), DISSENT * against]
            known = self._weights[pattern] = w, [FIRM / 4] * len(w)
        return known


def _logit(p: float) -> float:
    return max(-SUREST, min(SUREST, log(p / (1 - p)))) if 0 < p < 1 else (SUREST if p >= 1 else -SUREST)
