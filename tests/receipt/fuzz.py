"""Random forests through tree attention, convolution and gates, the gated delta rule, and the commits of each."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from boleinfer import device
from boleinfer.device_forest import Paths
from boleinfer.ops import gdn_commit, gdn_inputs, relative_error
from tests.ops.test_attention_gpu import fuzz_attention
from tests.ops.test_gdn_gpu import fuzz_gdn, random_tree
from tests.ops.test_inputs_gpu import commit_windows, downloaded, rounded, scattered, uploaded, wide64
from tests.receipt import Report
from tests.receipt.models import real_gpu

FORESTS = 10_000  # through each op
SECONDS = 240  # after which a worker stops and the count is short


class Kind(NamedTuple):
    """fuzz(seed) raises AssertionError where a kernel is wrong; it makes so many forests."""

    fuzz: Callable[[int], None]
    forests: int


def fuzz_inputs(seed: int) -> None:
    """One forest, its rows scattered in a wider envelope of NaN, through gdn_inputs and commit_window."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.choice([4, 20, 40]))) or [-1] for _ in range(int(rng.integers(1, 4)))]
    act, Hk = str(rng.choice(["float", "bf16"])), int(rng.integers(1, 3))
    K, V, W = (int(rng.choice(sizes)) for sizes in ([8, 16], [8, 24], [2, 4]))
    case = gdn_inputs._inputs_case(trees, Hk, K, Hk * int(rng.integers(1, 4)), V, W)
    given = rounded(case.build(rng), act, case.wide)
    forest, R = given["forest"], sum(map(len, trees))
    size = R + int(rng.integers(0, 20))
    rows = np.sort(rng.permutation(size)[:R])
    on = {}
    for name in ("qkvz", "ba"):
        on[name] = np.full((size, given[name].shape[1]), np.nan, given[name].dtype)
        on[name][rows] = given[name]
    on = uploaded({**given, **on}) | {"forest": scattered(forest, rows, size)}
    out = [x[rows] for x in downloaded(gdn_inputs.gdn_inputs(**on))]
    expected = gdn_inputs.gdn_inputs(**{name: wide64(value) for name, value in given.items()})
    error = relative_error(out, list(expected))
    assert error <= (case.bound_bf16 if act == "bf16" else 1e-6), f"gdn_inputs: {error:.1e} off"
    _commit(rng, given, forest)


def _commit(rng: np.random.Generator, given: dict, forest) -> None:
    Cc = given["window"].shape[2]
    nodes = [t.path(int(rng.integers(len(t)))) if rng.random() < 0.8 else np.zeros(0, np.int32) for t in forest.trees]
    paths = [path + start for path, start in zip(nodes, forest.start)]
    expected = given["window"].copy()
    gdn_commit.commit_window(given["qkvz"][:, :Cc], expected, given["slot"], forest.committed, paths)
    on = uploaded({name: given[name] for name in ("qkvz", "window", "slot", "forest")} | {"paths": paths})
    assert isinstance(on["paths"], Paths)
    commit_windows(on["qkvz"][:, :Cc], on["window"], on["slot"], on["forest"], on["paths"])
    assert device.download(on["window"]).tobytes() == expected.tobytes(), "commit_window"


KINDS = {
    "tree attention and moves": Kind(fuzz_attention, 1),
    "convolution and windows": Kind(fuzz_inputs, 1),
    "gated delta rule and commits": Kind(fuzz_gdn, 3),
}


def run(quick: bool = False, forests: int = FORESTS) -> Report:
    """On a real GPU several processes share the seeds; on the emulator a few seeds run here."""
    report, began = Report(), time.perf_counter()
    if not real_gpu():
        results = [_some(name, 0, 1, min(forests, 6), SECONDS) for name in KINDS]
    else:
        forests = forests // 10 if quick else forests
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the workers
        workers = max(1, min(6, (os.cpu_count() or 1) - 2))
        jobs = [(name, first, workers, forests, SECONDS) for name in KINDS for first in range(workers)]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            results = pool.starmap(_some, jobs, chunksize=1)
    for name, done, failures in results:
        report.count(f"forests through {name}", done)
        report.failures.extend(failures)
    for name in KINDS:
        done = report.counts[f"forests through {name}"]
        report.expect(done >= min(forests, 6 if not real_gpu() else forests), f"only {done} forests through {name}")
    report.notes["forests a second"] = round(sum(report.counts.values()) / (time.perf_counter() - began))
    return report


def _some(name: str, first: int, step: int, forests: int, seconds: float) -> tuple[str, int, list[str]]:
    """Seeds first, first + step, ...: how many forests, and what was wrong (at most three, then it stops)."""
    kind, done, failures = KINDS[name], 0, []
    end = time.monotonic() + seconds
    for seed in range(first, -(-forests // kind.forests), step):
        try:
            kind.fuzz(seed)
        except Exception as error:
            failures.append(f"{name}, seed {seed}: {type(error).__name__}: {error}"[:300])
        done += kind.forests
        if len(failures) == 3 or time.monotonic() > end:
            break
    return name, done, failures
