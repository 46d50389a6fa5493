"""What the graphs of all steps hold of the GPU's memory, and that none is captured again while requests come and go."""

from __future__ import annotations

import gc
import time
from typing import Any, cast

import numpy as np

from boleinfer import device
from boleinfer.cuda_executor import CudaExecutor
from boleinfer.graphs import Graphs
from boleinfer.llm import LLM
from boleinfer.params import SamplingParams

REQUESTS, TOKENS = 24, 24  # that come and go; tokens of each, about


def weighed(size: str) -> dict[str, Any]:
    """A published size with every way to draft: what capturing all its steps takes, and captures while serving.

    bytes: of the GPU's memory for graphs and for code that is loaded with them, beside arrays that each step keeps
           (array_bytes) and the pool that they share (pool_bytes), which is reserved before"""
    llm = LLM(device="cuda", random_weights=size, draft="auto")
    executor = cast(CudaExecutor, llm.engine.executor)
    runner = cast(Graphs, executor.runner)
    pool, (free, _), arrays, began = runner.pool_bytes, device.memory(), array_bytes(), time.perf_counter()
    executor.capture()
    runner.wait()
    seconds, (left, _), captures = time.perf_counter() - began, device.memory(), runner.captures
    arrays = array_bytes() - arrays
    for _ in range(2):  # steps that read much of a prompt are captured when they come again
        serve(llm)
    captured = runner.captures
    serve(llm)
    found = {
        "shape": size,
        "graphs": captures,
        "s": seconds,
        "bytes": free - left - arrays,
        "array_bytes": arrays,
        "pool_bytes": runner.pool_bytes,
        "pool_grew_bytes": runner.pool_bytes - pool,
        "prompt_graphs": captured - captures,
        "captures_while_serving": runner.captures - captured,
    }
    del llm, executor, runner
    gc.collect()
    return found


def array_bytes() -> int:
    """Device memory of arrays outside the steps' pool."""
    return int(device.cupy().get_default_memory_pool().total_bytes())


def serve(llm: LLM) -> None:
    """Requests of all kinds, more than may run at once, with prompts and answers of different lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, int(n)).tolist() for n in rng.integers(1, 300, REQUESTS)]
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=1 + int(n), ignore_eos=True)
        for i, n in enumerate(rng.integers(0, 2 * TOKENS, REQUESTS))
    ]
    llm.generate(prompts, params)
