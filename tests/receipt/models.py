"""Tiny checkpoints on NumPy and on the GPU, engines over them, and requests: what several parts of the proof need."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer import device, device_weights, models
from boleinfer.config import read_config
from boleinfer.cuda_executor import CudaExecutor
from boleinfer.decoder import Decoder
from boleinfer.device_draft import DraftPlan
from boleinfer.draft import make_drafter
from boleinfer.draft.base import Drafter, Limits
from boleinfer.engine import Engine
from boleinfer.sampling import SamplingParams
from boleinfer.scheduler import Scheduler
from boleinfer.state import State
from tests.checkpoints import plausible_checkpoint
from tests.running import VOCAB, load

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
CONTEXT = 120  # tokens of a request at most
ALLOWED = np.arange(VOCAB) < 480
ALLOWED[500] = True


@dataclass(eq=False)
class Tiny:
    """A checkpoint of random weights whose numbers are all bf16, so that every type of activations reads the same."""

    folder: Path
    family: str
    label: str

    @functools.cached_property
    def host(self) -> Decoder:
        """On NumPy in float32."""
        return load(self.folder)

    def on(self, act: str) -> Decoder:
        """On the GPU; act: "float" or "bf16"."""
        config = read_config(self.folder)
        family = models.family(config.model_type)
        return family.build(config, device_weights.load(self.folder, config, family.plan, device.dtype(act)))


def tiny(folder: Path, family: str, seed: int = 0, label: str = "", **changed: Any) -> Tiny:
    """A model of a family in a new folder below `folder`."""
    name = f"{family} {label}".strip()
    place = plausible_checkpoint(folder / name.replace(" ", "-"), family, "BF16", seed, **changed)
    return Tiny(place, family, name)


def real_gpu() -> bool:
    """Whether arrays lie on a GPU, not on the emulator."""
    return not isinstance(device.empty(1, np.int32), np.ndarray)


def gpu_engine(
    model: Decoder,
    act: str = "float",
    draft: str | Drafter = "none",
    graphs: bool = True,
    max_batch: int = 3,
    max_rows: int = 64,
    nodes: int = 5,
    pages: int | None = None,
) -> Engine:
    """An engine on the GPU in poisoned memory; steps are graphs where there is a real GPU. pages: of the whole pool."""
    scratch = 1 + max(nodes, 3)
    each = -(-(CONTEXT + scratch) // 16)
    size = max_batch * each if pages is None else pages
    state = State(model.config, max_batch, size, 16, 7, True, device.dtype(act), gpu=True, poison=True)
    plans = (DraftPlan(depth=3, least=0.0),) if draft in ("mtp", "auto") else ()
    graphs = graphs and real_gpu()
    executor = CudaExecutor(model, state, ALLOWED, max_batch, max_rows, nodes, each, plans, graphs=graphs)
    drafter = make_drafter(draft, model, state) if isinstance(draft, str) else draft
    limits = Limits(nodes=nodes, depth=4, min_prob=0.0)
    return Engine(executor, drafter, Scheduler(state, max_batch, max_rows, max_rows, limits, scratch))


def prompts(lengths: Sequence[int] = (21, 1, 70)) -> list[list[int]]:
    """Prompts that repeat themselves, so that looking up finds something."""
    rng = np.random.default_rng(5)
    return [(rng.integers(0, 470, 7).tolist() * (1 + n // 7))[:n] for n in lengths]


def sampling(n: int) -> dict[str, list[SamplingParams]]:
    """Parameters for three prompts, n tokens each. "greedy" and "plain" keep every id, so near ties can be judged.

    A dozen ids are favoured, so that texts repeat themselves and looking up finds something."""
    some = {"max_tokens": n, "ignore_eos": True, "logit_bias": dict.fromkeys(range(3, 480, 40), 9.0)}
    return {
        "greedy": [SamplingParams(temperature=0, **some)] * 3,
        "plain": [SamplingParams(temperature=t, seed=s, **some) for t, s in ((0.8, 3), (1.0, 4), (1.3, 5))],
        "every parameter": [
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.2, **some),
            SamplingParams(temperature=1.2, min_p=0.05, presence_penalty=0.5, seed=4, logprobs=2, **some),
            SamplingParams(temperature=0, frequency_penalty=0.4, **some),
        ],
    }
