"""What a user may ask of the sampling of one request, checked when it is made. Knows no logits and no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop. Raises ValueError naming the field that is wrong.

    temperature:        divides the logits; below GREEDY_BELOW (0 above all) the likeliest token is taken
    top_k:              only the k likeliest tokens; 0 and -1 are off
    top_p:              only the likeliest tokens that together hold this probability, at least one; 1 is off
    min_p:              only tokens at least this times as likely as the likeliest; 0 is off
    repetition_penalty: divides the positive logits of tokens seen in prompt or output and multiplies the negative ones
    presence_penalty:   subtracted from the logit of a token in the output
    frequency_penalty:  the same, once for each time the token is in the output
    logit_bias:         added to the logits of these ids
    min_tokens:         no end token and no stop id before so many tokens
    max_tokens:         at most so many tokens; None goes on to the context limit
    stop:               the text ends before the first of these strings
    stop_token_ids:     the request ends at these ids, besides the model's own end tokens
    ignore_eos:         the model's own end tokens end nothing
    seed:               same seed, same text, whatever runs beside it; None draws a new one for each request
    n:                  independent answers to one prompt
    logprobs:           log-probabilities of the chosen token and of so many of the likeliest; None gives none
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: rule.check(name, getattr(self, name)) for name, rule in _NUMBERS.items()}
        checked["logit_bias"] = _bias(self.logit_bias)
        checked["stop"] = _stop(self.stop)
        checked["stop_token_ids"] = _ids(self.stop_token_ids)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise _error("ignore_eos", self.ignore_eos, "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From JSON: null is the default, an unknown name is an error (ValueError), as is every bad value."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(
                f"unknown sampling parameter {', '.join(map(repr, unknown))}; known are {', '.join(known)}"
            )
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever was given."""
        return self.stop  # type: ignore[return-value]  # normalised above

    @property
    def takes_largest(self) -> bool:
        """Whether a token is always that of the model's largest logit, and nothing else of the logits is read."""
        changed = self.penalises or self.logit_bias or self.min_tokens
        return self.greedy and not changed and self.logprobs is None

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """True when earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY_BELOW = 1e-5  # a smaller temperature would only choose among exact ties, and overflow in float32


class _Number(NamedTuple):
    kind: type  # int or float
    low: float
    high: float
    allowed: str
    optional: bool = False
    above_low: bool = False

    def check(self, name: str, value: Any) -> int | float | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral if self.kind is int else Real):
            raise _error(name, value, self.allowed)
        try:
            number = self.kind(value)
        except (OverflowError, ValueError):  # an integer beyond the range of float
            raise _error(name, value, self.allowed) from None
        if not self.low <= number <= self.high or (self.above_low and number == self.low):
            raise _error(name, value, self.allowed)
        return number


_LARGEST = math.nextafter(math.inf, 0.0)
_NUMBERS = {
    "temperature": _Number(float, 0, _LARGEST, "a finite number >= 0 (0 takes the likeliest token)"),
    "top_k": _Number(int, -1, math.inf, "an integer >= 1, or 0 or -1 for off"),
    "top_p": _Number(float, 0, 1, "a number from 0 to 1 (1 is off)"),
    "min_p": _Number(float, 0, 1, "a number from 0 to 1 (0 is off)"),
    "repetition_penalty": _Number(float, 0, _LARGEST, "a finite number > 0 (1 is off)", above_low=True),
    "presence_penalty": _Number(float, -_LARGEST, _LARGEST, "a finite number (0 is off)"),
    "frequency_penalty": _Number(float, -_LARGEST, _LARGEST, "a finite number (0 is off)"),
    "min_tokens": _Number(int, 0, math.inf, "an integer >= 0"),
    "max_tokens": _Number(int, 1, math.inf, "an integer >= 1, or None for up to the context limit", optional=True),
    "seed": _Number(int, -(2**63), 2**64 - 1, "an integer from -2^63 to 2^64-1, or None for a new one", optional=True),
    "n": _Number(int, 1, math.inf, "an integer >= 1"),
    "logprobs": _Number(int, 0, math.inf, "an integer >= 0, or None for none", optional=True),
}


def _error(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{name} must be {allowed}; got {value!r}")


def _stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise _error("stop", value, "a non-empty string or a list of them")
    return tuple(strings)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not all(_is_id(i) for i in value):
        raise _error("stop_token_ids", value, "a list of token ids (integers >= 0)")
    return tuple(int(i) for i in value)


def _bias(value: Any) -> dict[int, float] | None:
    allowed = "a map from token ids (integers >= 0) to finite numbers, or None"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _error("logit_bias", value, allowed)
    bias = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key  # JSON's keys are strings
        if not _is_id(token) or isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise _error("logit_bias", {key: number}, allowed)
        bias[int(token)] = float(number)
    return bias


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
