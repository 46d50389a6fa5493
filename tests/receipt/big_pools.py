"""Pools above 2^31 elements: the top of each gives what its bottom gives."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer import device
from boleinfer.ops import gdn_inputs
from boleinfer.ops.gdn import Ring, advance, commit, gdn
from boleinfer.sampling import SamplingParams
from boleinfer.state import KVLayer
from tests import strategies as some
from tests.ops.test_gdn_gpu import Envelope, Memory
from tests.ops.test_inputs_gpu import rounded, uploaded
from tests.receipt import Report
from tests.receipt.gpu_tests import outcomes
from tests.receipt.models import Tiny, gpu_engine, prompts, real_gpu, tiny
from tests.running import request_of

LARGE = 2**31


def run(quick: bool = False) -> Report:
    """GDN states and rings, windows, KV pages under an engine; then the tests of other ops that need such sizes."""
    report = Report()
    large = LARGE if real_gpu() else 50_000
    sizes = (16, 32, 128, 128) if real_gpu() else (1, 2, 16, 16)
    for act in ("float", "bf16"):
        gdn_pools(report, act, large, sizes)
        window_pool(report, act, large, (16, 128, 32, 128) if real_gpu() else (1, 6, 3, 12))
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        engine_pools(report, tiny(Path(folder), "qwen3_5", seed=11), large)
    if real_gpu():
        _tests(report)
    return report


def gdn_pools(report: Report, act: str, large: int, sizes: tuple[int, int, int, int]) -> None:
    """gdn and commit in the last slots of pools whose S and ring.u have more than `large` elements; Hk, Hv, K, V."""
    rng, C = np.random.default_rng(0), 32
    small = Memory(rng, act, 3, C, *sizes)
    envelope = Envelope(rng, [some.binary(20), some.chain(40), [-1]])
    small.step(rng, Envelope(rng, [some.chain(9), some.chain(70), some.chain(3)]))  # rings are not empty
    arrays = [small.S, *small.ring]
    slots = large // min(arrays[0][0].size, arrays[2][0].size) + 1 + len(small.S)
    shift = slots - len(small.S)
    big = [_tail(array, slots) for array in arrays]
    rows = [envelope.rows(x) for x in small.rows(rng, len(envelope.forest), False)]
    paths, on = envelope.paths([[0, 1, 3], np.arange(40), [0]]), envelope.upload()
    results = []
    for pool, slot in ((arrays, small.slot), (big, small.slot + shift)):
        S, ring, slot = pool[0], Ring(*pool[1:]), device.upload(slot.astype(np.int32))
        o, u = gdn(*rows, S, ring, slot, on)
        commit(S, ring, rows[1], u, rows[3], slot, on, paths)
        advance(ring.length, slot, paths, C)
        ends = [device.download(x[-len(small.S) :]) for x in pool]
        results.append([x[envelope.flat].tobytes() for x in map(device.download, (o, u))] + [x.tobytes() for x in ends])
    report.count("GDN pools")
    report.notes[f"elements of S {act}"] = int(big[0].size)
    report.notes[f"elements of ring.u {act}"] = int(big[2].size)
    report.expect(min(big[0].size, big[2].size) > large, "the pools are not large enough")
    report.expect(results[0] == results[1], f"GDN in slots from {shift} on, {act}: not what low slots give")


def window_pool(report: Report, act: str, large: int, sizes: tuple[int, int, int, int]) -> None:
    """gdn_inputs and commit_window in the last slots of a pool of windows; sizes: Hk, K, Hv, V."""
    case = gdn_inputs._inputs_case([some.binary(9), some.chain(5)], *sizes, 4)
    given = rounded(case.build(np.random.default_rng(0)), act, case.wide)
    forest = given["forest"]
    paths = [np.asarray([0, 1, 3]), forest.start[1] + np.arange(5)]
    on = uploaded(given | {"paths": paths})
    found, n = [], len(given["window"])
    slots = large // on["window"][0].size + 1 + n
    for window, shift in ((on["window"], 0), (_tail(on["window"], slots), slots - n)):
        slot = device.upload((given["slot"] + shift).astype(np.int32))
        arguments = {name: on[name] for name in ("qkvz", "ba", "taps", "A_log", "dt_bias", "forest", "sizes")}
        out = gdn_inputs.gdn_inputs(**arguments, window=window, slot=slot)
        x = on["qkvz"][:, : window.shape[2]]
        gdn_inputs.commit_window(x, window, slot, on["forest"], on["paths"])
        found.append([device.download(x).tobytes() for x in (*out, window[-n:])])
    report.count("window pools")
    report.expect(found[0] == found[1], f"windows of slots from {slots - n} on, {act}: not what low slots give")


def engine_pools(report: Report, model: Tiny, large: int) -> None:
    """A whole engine whose requests live in the last KV pages."""
    page = 16 * model.host.config.num_key_value_heads * model.host.config.head_dim
    count, params = 27, SamplingParams(temperature=0, max_tokens=8 if real_gpu() else 3, ignore_eos=True)
    decoder, answers = model.on("bf16"), []
    for pages in (count, large // page + 1 + count):
        engine = gpu_engine(decoder, "bf16", "auto", pages=pages)
        lost = engine.state.pages.take(pages - count)
        requests = [request_of(p, params) for p in prompts()]
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
        answers.append([r.generated for r in requests])
        engine.state.pages.give_back(lost)
        layer = next(la for la in engine.state.layers if isinstance(la, KVLayer))
        report.notes["elements of a layer's keys"] = int(layer.k.size)
        del engine, layer
        gc.collect()
    report.count("engines")
    report.expect(answers[0] == answers[1], "requests in the last KV pages give other tokens")


def _tail(array: Any, slots: int) -> Any:
    """A pool of so many slots, NaN, whose last ones are a copy of the array."""
    pool = device.buffer((slots, *array.shape[1:]), array.dtype, poison=True)
    device.write(pool[slots - len(array) :], array)
    return pool


def _tests(report: Report) -> None:
    found = outcomes(["-k", "2_31"])
    for name, (outcome, why) in found.items():
        report.count(f"tests {outcome}")
        report.expect(outcome == "passed", f"{name} {outcome}: {why}")
    report.expect(len(found) >= 4, f"only {len(found)} tests of large sizes were found")
