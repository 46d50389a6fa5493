"""Where a model runs: loads it, makes its memory and the executor that steps it. Knows no request and no text."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from boleinfer import device, device_weights, driver, kernels, memory_plan, models, pricing, random_weights, weights
from boleinfer.config import ConfigError, ModelConfig
from boleinfer.cuda_executor import SMALLEST, CudaExecutor
from boleinfer.decoder import Decoder
from boleinfer.device_draft import DRAFT_PLANS, DraftPlan
from boleinfer.executor import Executor, HostExecutor
from boleinfer.memory_plan import Needs, Options
from boleinfer.state import State

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Source:
    """Where the weights come from: a folder, or a seed.

    seed: None reads the folder's files; a number makes random weights for the configuration, FP8 ones with `fp8`
    """

    folder: Path | None = None
    seed: int | None = None
    fp8: bool = False


def choose_device(asked: str) -> bool:
    """Whether to run on the GPU. "auto" takes a GPU that works, and says what is missing where there is one.

    Raises ToolchainError when "cuda" was asked for and cannot be."""
    if asked == "cpu":
        return False
    try:
        kernels.usable()
    except kernels.ToolchainError as problem:
        if asked == "cuda":
            raise
        if driver.ask() is not None:
            warnings.warn(f"there is an NVIDIA GPU here, but it is not used: {problem}", stacklevel=3)
        return False
    return True


def load_host(config: ModelConfig, source: Source, o: Options, mtp: bool | str, progress: Progress | None) -> Executor:
    """The model on NumPy. Raises WeightsError, or ConfigError when its memory cannot be had."""
    family = models.family(config.model_type)
    if source.seed is not None:
        arrays = random_weights.make(
            config, family.plan, np.dtype(np.float32), source.seed, mtp is not False, gpu=False
        )
    else:
        assert source.folder is not None
        arrays = weights.load(source.folder, config, family.plan, mtp=mtp, progress=progress)
    model = family.build(config, arrays)
    executor = HostExecutor(model, _state(config, o, model, np.dtype(np.float32), gpu=False))
    executor.price = partial(pricing.price, executor, o)
    return executor


def needs(
    config: ModelConfig, source: Source, o: Options, mtp: bool | str, act: np.dtype, drafts: bool
) -> memory_plan.Needs:
    """What decides how much of a GPU the model takes; reads headers of files at most.

    act: type of activations; drafts: whether the MTP layer drafts there"""
    family = models.family(config.model_type)
    if source.seed is not None:
        found = random_weights.sizes(config, family.plan, act, mtp is not False, source.fp8)
    else:
        assert source.folder is not None
        found = device_weights.sizes(source.folder, config, family.plan, act, mtp)
    return Needs(config, found, act.itemsize, drafting(o, drafts and "mtp.fc" in found))


def fit_cuda(needed: Needs, o: Options, free_context: bool, free_rows: bool) -> Options:
    """The options, or smaller ones where the user left the context or the rows open, that fit on the current GPU.

    Raises ConfigError when nothing does, ToolchainError when the GPU cannot be used."""
    free, total = device.memory()
    fitting = memory_plan.fit(needed, o, free, total, free_context, free_rows)
    if fitting.context < o.context:
        warnings.warn(
            f"requests may have {fitting.context} tokens, as many as the GPU's memory holds for "
            f"max_batch={o.max_batch}; choose with max_model_len and max_batch",
            stacklevel=3,
        )
    return fitting


def load_cuda(
    config: ModelConfig,
    source: Source,
    o: Options,
    mtp: bool | str,
    act: np.dtype,
    allowed: np.ndarray,
    needed: Needs,
    progress: Progress | None,
) -> Executor:
    """The model on the current GPU.

    act: type of activations; allowed: bool [vocab]; needed: what `needs` gave
    Raises WeightsError, or ConfigError when its memory cannot be had after all (fit_cuda sees to it before)."""
    family = models.family(config.model_type)
    try:
        if source.seed is not None:
            arrays = random_weights.make(config, family.plan, act, source.seed, mtp is not False, source.fp8)
        else:
            assert source.folder is not None
            arrays = device_weights.load(source.folder, config, family.plan, act, mtp=mtp, progress=progress)
        arrays = {name: array for name, array in arrays.items() if mtp is not False or not name.startswith("mtp.")}
        model = family.build(config, arrays)
        state = _state(config, o, model, act, gpu=True)
        executor = CudaExecutor(
            model, state, allowed, o.max_batch, o.max_rows, o.draft_nodes, o.pages, needed.drafting, o.graphs
        )
        executor.runner.reserve(memory_plan.pool_bytes(needed, o))
        executor.price = partial(pricing.price, executor, o)
    except MemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out while the model was loaded ({error}); planned were\n"
            f"{memory_plan.plan(needed, o).table()}\n"
            "lower max_model_len, max_batch or max_rows, or end what else uses the GPU"
        ) from None
    return executor


def drafting(o: Options, drafts: bool) -> tuple[DraftPlan, ...]:
    """The ways in which the MTP layer drafts on the GPU, where it does."""
    if not (drafts and o.draft_nodes and o.draft_depth):
        return ()
    plans = [replace(plan, depth=min(plan.depth, o.draft_depth)) for plan in DRAFT_PLANS]
    return tuple(p for p in plans if p.depth <= plans[0].depth or o.draft_nodes > SMALLEST)


def _state(config: ModelConfig, o: Options, model: Decoder, act: np.dtype, gpu: bool) -> State:
    try:
        return State(
            config,
            o.max_batch,
            o.max_batch * o.pages,
            o.page_size,
            o.ring,
            mtp=model.has_mtp,
            dtype=act,
            gpu=gpu,
            poison=o.poison,
        )
    except MemoryError:
        raise ConfigError(
            f"max_batch={o.max_batch} requests of max_model_len={o.context} tokens need more memory than this "
            f"{'GPU' if gpu else 'machine'} can give; lower either (`boleinfer info` prints what a request and a token "
            "take)"
        ) from None
