"""One running request: its tokens, its place in the state, how far it is committed, why it ended. Knows no model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from boleinfer.sampling import Sampler, SamplingParams
from boleinfer.state import Place


class RequestError(ValueError):
    """A prompt or a parameter that this model cannot serve; the message says what was asked, allowed and to do."""


@dataclass
class Stats:
    """What a request cost. Times in seconds, shared evenly by the requests of a step.

    histogram[i] = steps in which i drafted tokens were accepted; decode steps only (those that could draft)."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Accepted and bonus tokens of an average decode step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the decode steps over their time."""
        return (self.accepted + self.steps) / self.decode_s if self.decode_s else 0.0

    def count_step(self, drafted: int, accepted: int) -> None:
        """Adds one decode step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def as_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return {**self.__dict__, "tokens_per_step": self.tokens_per_step, "tokens_per_s": self.tokens_per_s}


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer.

    tokens:    the prompt, then what was generated
    limit:     tokens at most, prompt included
    committed: how many of the tokens the state holds
    end_ids:   ids after which the request stops, unless params.ignore_eos
    on_token:  called with each new token; True ends the request there (stop strings)
    """

    tokens: list[int]
    params: SamplingParams
    sampler: Sampler
    limit: int
    end_ids: frozenset[int]
    on_token: Callable[[int], bool] = lambda token: False
    place: Place | None = None
    committed: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    created: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.stats.prompt_tokens = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """The ids after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        """Known tokens that the state does not hold yet; at least one while the request runs."""
        return self.tokens[self.committed :]

    @property
    def home(self) -> Place:
        """Its place, while it runs; RuntimeError when it holds none."""
        if self.place is None:
            raise RuntimeError("a request that does not run holds no place")
        return self.place

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, logprobs: dict[int, float] | None) -> None:
        """Takes a sampled token and finds out whether the request ends with it."""
        self.tokens.append(token)
        self.sampler.history.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.created
        self.stats.generated_tokens += 1
        if token in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.on_token(token):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def fail(self, why: str) -> None:
        """Ends this request, and only this one, with an error."""
        self.finish_reason, self.error = "error", why
