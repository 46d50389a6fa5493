"""Keeps the logits of the tokens that a request gets, to compare runs by more than their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from boleinfer.request import Request
from boleinfer.sampling import Sampler


class _Heard(Sampler):
    """A sampler as it stands, which keeps the logits of its request's tokens from now on in `rows`, [vocab] each."""

    def __init__(self, sampler: Sampler) -> None:
        self.__dict__.update(sampler.__dict__)
        self.rows: list[np.ndarray] = []

    def logprobs(self, logits: np.ndarray, token: int) -> dict[int, float] | None:
        self.rows.append(logits)
        return None


def hear(requests: Sequence[Request]) -> list[list[np.ndarray]]:
    """From now on the logits of each request's tokens are put into its list, float32 [vocab] each."""
    samplers = [_Heard(request.sampler) for request in requests]
    for request, sampler in zip(requests, samplers):
        request.sampler, request.params = sampler, replace(request.params, logprobs=0)
    return [sampler.rows for sampler in samplers]
