"""Where a model runs: loads it, makes its memory and the executor that steps it. Knows no request and no text."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from boleinfer import device_weights, kernels, models, random_weights, weights
from boleinfer.config import ConfigError, ModelConfig
from boleinfer.cuda_executor import CudaExecutor, DraftPlan
from boleinfer.decoder import Decoder
from boleinfer.executor import Executor, HostExecutor
from boleinfer.state import State

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How much may run at once, and how (the fields are explained at LLM)."""

    context: int
    max_batch: int = 8
    max_rows: int = 512
    page_size: int = 16
    ring: int = 32
    draft_nodes: int = 8
    draft_depth: int = 8
    poison: bool = False
    graphs: bool = True

    @property
    def scratch(self) -> int:
        """Positions behind the committed ones that drafting and verification may write."""
        return 1 + max(self.draft_nodes, self.draft_depth)

    @property
    def pages(self) -> int:
        """KV pages of one request at most."""
        return -(-(self.context + self.scratch) // self.page_size)


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
        gpu = kernels.open_gpu()
        gpu.arch(gpu.device())
    except kernels.ToolchainError as problem:
        if asked == "cuda":
            raise
        if shutil.which("nvidia-smi"):
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
    return HostExecutor(model, _state(config, o, model, np.dtype(np.float32), gpu=False))


def load_cuda(
    config: ModelConfig,
    source: Source,
    o: Options,
    mtp: bool | str,
    act: np.dtype,
    allowed: np.ndarray,
    drafts: bool,
    progress: Progress | None,
) -> Executor:
    """The model on the current GPU.

    act: type of activations; allowed: bool [vocab]; drafts: whether the MTP layer drafts there
    Raises WeightsError, or ConfigError when its memory cannot be had."""
    family = models.family(config.model_type)
    if source.seed is not None:
        arrays = random_weights.make(config, family.plan, act, source.seed, mtp is not False, source.fp8)
    else:
        assert source.folder is not None
        arrays = device_weights.load(source.folder, config, family.plan, act, mtp=mtp, progress=progress)
    arrays = {name: array for name, array in arrays.items() if mtp is not False or not name.startswith("mtp.")}
    model = family.build(config, arrays)
    state = _state(config, o, model, act, gpu=True)
    plan = DraftPlan(depth=min(4, o.draft_depth)) if drafts and model.has_mtp and o.draft_nodes else None
    return CudaExecutor(model, state, allowed, o.max_batch, o.max_rows, o.draft_nodes, o.pages, plan, o.graphs)


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
