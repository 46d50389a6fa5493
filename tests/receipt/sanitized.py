"""What compute-sanitizer watches: small cases of every op, and tiny models with every drafter, kernel by kernel.

    compute-sanitizer --tool memcheck python -m tests.receipt.sanitized --seconds 40

Every array is an allocation of its own, so that an access beyond one is seen.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer import device, device_cases
from boleinfer.check import op_files
from tests.receipt.models import FAMILIES, gpu_engine, prompts, sampling, tiny
from tests.running import finish, request_of

DONE = "sanitized run: "
_LARGEST = 300_000  # numbers in a case's arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Prints DONE and what ran. --seconds is for the cases; the models run in any case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--tokens", type=int, default=4)
    args = parser.parse_args(argv)
    if not isinstance(device.empty(1, np.int32), np.ndarray):
        device.cupy().cuda.set_allocator(None)
    steps = models(args.tokens)
    ran, left = cases(args.seconds)
    print(f"{DONE}{steps} steps of models, {ran} cases, {left} cases left out for lack of time")
    return 0


def models(n: int) -> int:
    """Every family and every drafter, n tokens of three requests together; returns how many steps there were."""
    steps, kinds = 0, sampling(n)
    with tempfile.TemporaryDirectory() as folder:
        for i, family in enumerate(FAMILIES):
            model = tiny(Path(folder), family, seed=11)
            act = ("bf16", "float")[i % 2]
            decoder = model.on(act)
            for draft in ("none", "ngram", "mtp", "auto"):
                engine = gpu_engine(decoder, act, draft, graphs=False)
                params = kinds["every parameter" if draft == "auto" else "greedy"]
                requests = [request_of(p, s) for p, s in zip(prompts((21, 1, 40)), params)]
                finish(engine, requests)
                steps += sum(r.stats.steps for r in requests)
    return steps


def cases(seconds: float) -> tuple[int, int]:
    """Small cases, ops in turn so that each has its share of the time: how many ran, how many were left out."""
    queues = []
    for file in op_files():
        for op, listed in file.CASES.items():
            small = [c for c in listed if c.gpu and _size(c.build(np.random.default_rng(0))) <= _LARGEST]
            queues.append([(getattr(file, op), c, act) for c in small for act in ("bf16", "float32")])
    in_turn = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]
    end, ran = time.monotonic() + seconds, 0
    for op, case, act in in_turn:
        if time.monotonic() > end:
            break
        device_cases.run_on_device(op, case, act)
        ran += 1
    return ran, len(in_turn) - ran


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return sum(map(_size, members))


if __name__ == "__main__":
    raise SystemExit(main())
