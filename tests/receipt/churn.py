"""Thousands of steps with requests coming, going, breaking and being dropped: nothing is lost, nobody disturbed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from boleinfer import device
from boleinfer.engine import Engine
from boleinfer.near_tie import first_difference
from boleinfer.request import Request
from boleinfer.sampling import SamplingParams
from boleinfer.state import KVLayer
from tests.receipt import Report
from tests.receipt.models import CONTEXT, Tiny, gpu_engine, real_gpu, tiny
from tests.running import engine_of, finish, request_of


@dataclass
class Crowd:
    """Requests that a seed makes come and go in an engine.

    broken: those whose memory was overwritten with NaN
    """

    engine: Engine
    rng: np.random.Generator
    report: Report
    live: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)

    def step(self, busy: bool = True) -> None:
        """Perhaps some events, then a step of the engine."""
        rng = self.rng
        while busy and len(self.live) < 7 and rng.random() < 0.6:
            request = self._new()
            self.live.append(request)
            self.engine.add(request)
        if self.live and rng.random() < 0.06:
            self.engine.drop(self.live[int(rng.integers(len(self.live)))])
            self.report.count("dropped")
        if rng.random() < 0.08:
            self._break()
        self.engine.step()
        self.report.count("steps")
        self.ended += [r for r in self.live if r.finished]
        self.live = [r for r in self.live if not r.finished]

    def _new(self) -> Request:
        rng = self.rng
        n = int(rng.choice([1, 2, 15, 16, 17, 40, 90]))
        prompt = (rng.integers(0, 470, int(rng.integers(1, 9))).tolist() * n)[:n]
        kind, seed = int(rng.integers(5)), int(rng.integers(1 << 30))
        some = {"seed": seed, "max_tokens": int(rng.integers(1, 30)), "ignore_eos": bool(rng.random() < 0.5)}
        params = (
            SamplingParams(temperature=0, **some),
            SamplingParams(temperature=1.0, **some),
            SamplingParams(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.1, **some),
            SamplingParams(temperature=0, logprobs=2, presence_penalty=0.3, **some),
            SamplingParams(temperature=1.1, min_p=0.02, stop_token_ids=list(range(0, 480, 16)), **some),
        )[kind]
        return request_of(prompt, params, limit=min(CONTEXT, n + int(rng.integers(1, 60))))

    def _break(self) -> None:
        """Overwrites a running request's oldest keys with NaN: its logits are broken from then on."""
        running = [r for r in self.engine.scheduler.running if r.committed and id(r) not in self.broken]
        if running:
            request = running[int(self.rng.integers(len(running)))]
            with self.engine.executor.runner.on():
                for layer in self.engine.state.layers:
                    if isinstance(layer, KVLayer):
                        device.fill(layer.k[int(request.home.pages[0])], device.NAN_BYTE)
            self.broken.add(id(request))
            self.report.count("broken on purpose")


def run(quick: bool = False, steps: int = 2000) -> Report:
    """2,000 steps on a real GPU, a few on the emulator; every kind of end is compared with a run alone on NumPy."""
    report = Report()
    steps = steps if real_gpu() and not quick else min(steps, 200 if real_gpu() else 15)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder), "qwen3_5", seed=11)
        engine = gpu_engine(model.on("float"), "float", "auto", max_batch=4)
        crowd = Crowd(engine, np.random.default_rng(0), report)
        for _ in range(steps):
            crowd.step()
        while engine.busy:
            crowd.step(busy=False)
        _all_free(report, engine)
        _ends(report, crowd)
        if steps >= 1000:
            for what in ("dropped", "broken on purpose", "ended: stop", "ended: length", "ended: error"):
                report.expect(report.counts.get(what, 0) > 0, f"in {steps} steps there was no {what!r}")
        sample = crowd.ended if len(crowd.ended) < 300 else crowd.ended[:: len(crowd.ended) // 300]
        _alone(report, model, sample, crowd.broken)
    return report


def _all_free(report: Report, engine: Engine) -> None:
    for what in (engine.state.pages, engine.state.slots):
        report.expect(what.free == what.size, f"{what.size - what.free} of {what.size} {what.what} were never freed")
    report.expect(not engine.scheduler.running and not engine.scheduler.waiting, "requests are left in the queues")


def _ends(report: Report, crowd: Crowd) -> None:
    for request in crowd.ended:
        report.count(f"ended: {request.finish_reason}")
        if request.finish_reason == "error":
            report.expect(id(request) in crowd.broken, f"a request ended with {request.error!r} that nobody broke")


def _alone(report: Report, model: Tiny, requests: list[Request], broken: set[int]) -> None:
    """Each answer, or what there is of it, is the one that NumPy gives the request alone."""
    for request in requests:
        prompt = request.tokens[: request.prompt_length]
        alone = request_of(prompt, request.params, request.limit)
        (want,) = finish(engine_of(model.host), [alone])
        report.count("compared with a run alone")
        whole = request.finish_reason in ("stop", "length") and id(request) not in broken
        got = request.generated
        same = got == want and request.finish_reason == alone.finish_reason if whole else got == want[: len(got)]
        report.expect(
            same,
            f"a prompt of {len(prompt)} tokens: {request.finish_reason} after {len(got)} tokens, "
            f"alone {alone.finish_reason} after {len(want)}; first difference {first_difference(got, want)}",
        )
        if whole and request.params.logprobs is not None:
            ids = [[list(entry) for entry in r.logprobs] for r in (request, alone)]
            report.expect(ids[0] == ids[1], f"logprobs of a prompt of {len(prompt)} tokens name other ids")
