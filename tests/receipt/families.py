"""Layer by layer: every family on NumPy and on the GPU, prompts in pieces and trees; names the first that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from boleinfer import device
from boleinfer.debug_layers import BOUNDS, LayerError, Side, compare, first_wrong
from boleinfer.forest import Forest, Tree
from boleinfer.state import State
from tests.receipt import Report
from tests.receipt.models import FAMILIES, Tiny, tiny

PUBLISHED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256, "hidden_size": 128}


def run(quick: bool = False) -> Report:
    """All models in float32 and in bf16; the bounds are debug_layers'."""
    report = Report(notes={"bounds": BOUNDS})
    with tempfile.TemporaryDirectory() as folder:
        for model in _models(Path(folder), quick):
            for act in ("float",) if quick else ("float", "bf16"):
                _run(report, model, act)
    return report


def _models(folder: Path, quick: bool) -> Iterator[Tiny]:
    for family in FAMILIES:
        yield tiny(folder, family)
    if not quick:
        for ratio in (1, 3, 4):
            yield tiny(folder, "qwen3_5", 1, f"Hv=2x{ratio}", linear_num_value_heads=2 * ratio)
            yield tiny(folder, "qwen3_next", 2, f"Hv=2x{ratio}", linear_num_value_heads=2 * ratio)
        for family in FAMILIES:
            yield tiny(folder, family, 3, "published head sizes", **PUBLISHED)


def _run(report: Report, model: Tiny, act: str) -> None:
    rng, pieces = np.random.default_rng(0), []
    host, gpu = _side(model, act, False), _side(model, act, True)
    committed = 0
    for tree, m in ((Tree.chain(rng.integers(0, 470, 33)), 33), (Tree.chain(rng.integers(0, 470, 5)), 5), _tree(rng)):
        path = np.arange(m) if tree.is_chain else tree.path(m)
        pieces.append(compare(host, gpu, Forest.of([tree], [committed]), [path]))
        committed += len(path)
    pieces.append(compare(host, gpu, Forest.of([Tree.chain([7])], [committed]), [np.arange(1)]))
    name = {"float": "float32", "bf16": "bfloat16"}[act]
    errors: list[LayerError] = [e for piece in pieces for e in piece]
    report.count("layers compared", len(errors))
    report.largest(f"largest error {name}", max(e.own for e in errors))
    report.largest(f"largest drift {name}", max(e.drift for e in errors))
    wrong = first_wrong(errors, BOUNDS[name])
    if wrong is not None:
        report.expect(False, f"{model.label}, {name}: {wrong.name} is the first that differs, by {wrong.own:.1e}")


def _tree(rng: np.random.Generator) -> tuple[Tree, int]:
    """A tree of 12 nodes and one of them, where the accepted path ends."""
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 12))]
    return Tree.of(rng.integers(0, 470, 12).tolist(), parents), 9


def _side(model: Tiny, act: str, gpu: bool) -> Side:
    decoder = model.on(act) if gpu else model.host
    dtype = device.dtype(act) if gpu else np.float32
    state = State(decoder.config, 3, 12, 16, 7, True, dtype, gpu=gpu, poison=True)
    state.slots.take(1)  # neither the first slot nor the first pages
    state.pages.take(2)
    return Side(decoder, state, state.take(80))
