"""Pools above 2^31 elements: a model whose request lives at the top of each gives the bits of one at the bottom."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import numpy as np

from boleinfer import device
from boleinfer.decoder import Decoder
from boleinfer.device_forest import upload, upload_paths
from boleinfer.forest import Forest, Tree
from boleinfer.state import Batch, GDNLayer, KVLayer, State
from tests import strategies as some
from tests.receipt import Report
from tests.receipt.gpu_tests import outcomes
from tests.receipt.models import real_gpu, tiny

LARGE = 2**31
PAGES = 8  # of the request
_TWO_LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2}
_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} | {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_WIDE = {"linear_num_key_heads": 64, "linear_num_value_heads": 64, "linear_conv_kernel_dim": 8}


def run(quick: bool = False) -> Report:
    """States, rings, windows and KV pages, each pool in turn; then the tests of single ops that need such sizes."""
    report = Report()
    large = LARGE if real_gpu() else 50_000
    with tempfile.TemporaryDirectory() as folder:
        states = tiny(Path(folder), "qwen3_5", 1, "states", **_TWO_LAYERS, **_HEADS if real_gpu() else {})
        windows = tiny(Path(folder), "qwen3_5", 2, "windows", **_TWO_LAYERS, **_WIDE if real_gpu() else {})
        pages = tiny(Path(folder), "qwen3_5", 3, "pages", **_TWO_LAYERS)
        for act in ("bf16",) if quick else ("bf16", "float"):
            for model, ring, pools in (
                (states, 32, ("S", "ring.u")),
                (windows, 1, ("window",)),
                (pages, 4, ("keys", "values")),
            ):
                _compare(report, model.label, model.on(act), act, ring, pools, large)
    if real_gpu():
        _tests(report)
    return report


def _compare(
    report: Report, label: str, decoder: Decoder, act: str, ring: int, pools: tuple[str, ...], large: int
) -> None:
    small = State(decoder.config, 3, 2 * PAGES, 16, ring, True, device.dtype(act), gpu=True, poison=True)
    sizes = _elements(small)
    scale = 1 + max(large // (sizes[name] // (2 * PAGES if name in ("keys", "values") else 3)) for name in pools)
    paged = "keys" in pools
    want = _run(decoder, small)
    slots, pages = (3, scale + 2 * PAGES) if paged else (scale + 3, 2 * PAGES)
    try:
        big = State(decoder.config, slots, pages, 16, ring, True, device.dtype(act), gpu=True, poison=True)
    except MemoryError as error:
        report.expect(False, f"{label} {act}: no room for pools of {large} elements: {error}")
        return
    for name in pools:
        elements = _elements(big)[name]
        report.count("pools")
        report.notes[f"elements of {name} {act}"] = elements
        report.expect(elements > large, f"{label}: {name} has only {elements} elements")
    got = _run(decoder, big)
    report.count("forests", len(got))
    report.expect(got == want, f"{label} {act}: not the bits of low places in {', '.join(pools)}")
    del big
    gc.collect()
    if real_gpu():
        device.cupy().get_default_memory_pool().free_all_blocks()


def _elements(state: State) -> dict[str, int]:
    """Elements of one layer's pools."""
    gdn = next(la for la in state.layers if isinstance(la, GDNLayer))
    kv = next(la for la in state.layers if isinstance(la, KVLayer))
    arrays = {"S": gdn.S, "ring.u": gdn.ring.u, "window": gdn.window, "keys": kv.k, "values": kv.v}
    return {name: int(array.size) for name, array in arrays.items()}


def _run(decoder: Decoder, state: State) -> list[bytes]:
    """Hidden rows of some forests of one request that lives in the last places of the state."""
    state.slots.take(state.slots.size - 1)
    state.pages.take(state.pages.size - PAGES)
    place, rng, committed, found = state.take(16 * PAGES), np.random.default_rng(0), 0, []
    ragged, star = [-1, 0, 0, 1, 2, 1, 3, 4, 7], some.star(9)
    for parents, last in ((some.chain(50), 49), (ragged, 6), (some.chain(1), 0), (star, 5), (some.chain(9), 8)):
        tree = Tree.of(rng.integers(0, 470, len(parents)).tolist(), parents)
        forest = Forest.of([tree], [committed])
        slot = device.upload(np.asarray([place.slot], np.int32))
        batch = Batch(upload(forest), slot, device.upload(place.pages[None]))
        hidden, pending = decoder.forward(batch, state)
        state.commit(batch, pending, upload_paths(forest, [tree.path(last)]))
        found.append(device.download(hidden).tobytes())
        committed += len(tree.path(last))
    return found


def _tests(report: Report) -> None:
    found = outcomes(["-k", "2_31"])
    for name, (outcome, why) in found.items():
        report.count(f"tests {outcome}")
        report.expect(outcome == "passed", f"{name} {outcome}: {why}")
    report.expect(len(found) >= 4, f"only {len(found)} tests of large sizes were found")
