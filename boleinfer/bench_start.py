"""`boleinfer bench start`: a process from its start to its first token, loading a checkpoint, installed sizes."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import boleinfer
from boleinfer import bench_tables, device, device_weights, models
from boleinfer.bench import process_s, run_python
from boleinfer.config import ModelConfig
from boleinfer.provenance import gpu_provenance
from boleinfer.published import published
from boleinfer.results import output_file, write

REPEATS = 3
PINNED_BYTES = 256 << 20
GENERATE = (
    "from boleinfer.cli import main; main(['generate', '-q', '-n', '1', '--device', 'cuda', 'def fibonacci(n):'])"
)
PHASE_NAMES = "import boleinfer", "import cupy", "load", "first token"
PHASES = """
import json, time
times = [time.perf_counter()]
from boleinfer import LLM, SamplingParams
times.append(time.perf_counter())
import cupy
times.append(time.perf_counter())
llm = LLM(device="cuda")
times.append(time.perf_counter())
llm.generate("def fibonacci(n):", SamplingParams(max_tokens=1))
times.append(time.perf_counter())
print(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


def bench_start(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    output = output_file(args, "start.json", quick=args.random_weights is not None)
    record: dict[str, Any] = {"what": "wall time of whole processes, the interpreter's start included"}
    with tempfile.TemporaryDirectory() as cache:
        cold_s, _ = run_python(GENERATE, BOLEINFER_CACHE=cache)
        warm = [run_python(GENERATE, BOLEINFER_CACHE=cache)[0] for _ in range(REPEATS)]
        phases = [json.loads(run_python(PHASES, BOLEINFER_CACHE=cache)[1]) for _ in range(REPEATS)]
        python_s = median(run_python("")[0] for _ in range(REPEATS))
    print("processes: done", file=sys.stderr)
    record |= {
        **gpu_provenance(),
        "first_token_cold_s": cold_s,
        "first_token_s": median(warm),
        "phases_s": {"python": python_s, **dict(zip(PHASE_NAMES, map(median, zip(*phases))))},
        "import_ms": 1e3 * process_s("from boleinfer import LLM"),
    }
    write(record, output, note=False)
    size = args.random_weights or "qwen3.5-9b"
    config = published(size)
    folder = Path(args.folder) if args.folder else _folder_for(_tensors(config)[1])
    with tempfile.TemporaryDirectory(dir=folder) as made:
        record["load"] = {"shape": size, "folder": str(folder), **load_speed(config, Path(made))}
    record["install"] = _install_sizes()
    print(bench_tables.start(record))
    write(record, output)
    return 0


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_speed(config: ModelConfig, folder: Path) -> dict[str, float]:
    """Loading of a checkpoint that is in memory already, beside copies from a pinned buffer and nothing else."""
    nbytes = write_checkpoint(config, folder)
    family, act = models.family(config.model_type), device.dtype("bf16")
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        arrays = device_weights.load(folder, config, family.plan, act)
        seconds.append(time.perf_counter() - began)
        del arrays
        device.memory()  # gives back what the pool keeps
    pinned = pinned_gb_s()
    return {
        "bytes": nbytes,
        "first_s": seconds[0],
        "s": seconds[1],
        "gb_s": nbytes / seconds[1] / 1e9,
        "pinned_gb_s": pinned,
        "share": nbytes / seconds[1] / 1e9 / pinned,
    }


def write_checkpoint(config: ModelConfig, folder: Path) -> int:
    """A BF16 checkpoint of a configuration, all numbers random; bytes of its tensors."""
    header, end = _tensors(config)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    block = np.random.default_rng(0).standard_normal(8 << 20, np.float32).view(np.uint16)[1::2].tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for begin in range(0, end, len(block)):
            file.write(block[: end - begin])
    return end


def _tensors(config: ModelConfig) -> tuple[dict[str, Any], int]:
    """The header of such a file, and the bytes behind it."""
    header: dict[str, Any] = {}
    end = 0
    for target in models.family(config.model_type).plan(config, {}):
        for part in target.parts:
            if part.tensor not in header:
                begin, end = end, end + 2 * math.prod(part.shape)
                header[part.tensor] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [begin, end]}
    return header, end


def pinned_gb_s(nbytes: int = PINNED_BYTES) -> float:
    """GB/s of copies from one pinned buffer to the GPU."""
    staging, out = device.Staging(nbytes), device.empty((nbytes,), np.uint8)
    staging.view((nbytes,), np.uint8)[...] = 1

    def copies_s(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            staging.copy_to(out)
        staging.wait()
        return time.perf_counter() - began

    copies_s(2)
    return 8 * nbytes / median(copies_s(8) for _ in range(3)) / 1e9


def _folder_for(nbytes: int) -> Path:
    """A folder whose files lie in memory, where there is one with room; else one whose files are cached there."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes
    return memory if roomy else Path(tempfile.gettempdir())


def _install_sizes() -> list[dict[str, Any]]:
    """What tools/install_size.py found, which needs no GPU."""
    file = Path(boleinfer.__file__).parent.parent / "benchmarks" / "results" / "install.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
