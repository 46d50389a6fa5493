"""`boleinfer generate --debug-layers`: a prompt through NumPy and the GPU, layer by layer; the first that differs.

Every layer is run on NumPy's own inputs as well, so that one wrong layer does not make those after it look wrong.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from boleinfer import backend, device
from boleinfer.config import ModelConfig
from boleinfer.decoder import FFN, Decoder
from boleinfer.device import Array
from boleinfer.device_forest import upload as upload_forest
from boleinfer.device_forest import upload_paths
from boleinfer.forest import Forest, Tree
from boleinfer.layers import Weights
from boleinfer.llm import LLM
from boleinfer.ops import relative_error
from boleinfer.ops.embedding import embedding
from boleinfer.ops.linear import linear
from boleinfer.options import UsageError, load_model
from boleinfer.residual import Residual, normed
from boleinfer.state import Batch, Place, State

BOUNDS = {"float32": 1e-4, "bfloat16": 6e-2}
"""The largest error of one layer that is rounding, by type of activations."""

_CLEAR = {"float32": 1e-4, "bfloat16": 0.05}  # between the last chosen expert's router logit and the next one's


class LayerError(NamedTuple):
    """How far the GPU is from NumPy at one place of the stack; both as ||gpu - numpy|| / ||numpy||.

    drift: of the stream that enters here when the GPU goes on from its own results
    own:   of what comes out here when NumPy's results went in
    """

    name: str
    drift: float
    own: float


class Side(NamedTuple):
    """A model with its memory, and the place in it that the compared sequence takes."""

    model: Decoder
    state: State
    place: Place


def compare(host: Side, gpu: Side, forest: Forest, paths: Sequence[np.ndarray]) -> list[LayerError]:
    """Runs a forest of one request on both sides and commits `paths` (flat rows) on both.

    host: on NumPy in float32; gpu: the same model on the GPU; both have committed the same tokens. Rows whose choice of
    experts is a near tie are left out where experts were chosen."""
    act = gpu.state.dtype
    batch = host.state.batch(forest, [host.place])
    right = _Recorder(host.model)
    stream = embedding(forest.token, host.model.weights["embed_tokens"])
    hidden, pending = right.model.forward(batch, host.state, right.watch)
    host.state.commit(batch, pending, paths)

    slot = device.upload(np.asarray([gpu.place.slot], np.int32))
    on = Batch(upload_forest(forest), slot, device.upload(gpu.place.pages[None]))
    free = _Recorder(gpu.model)
    first = device.download(embedding(on.forest.token, gpu.model.weights["embed_tokens"], act)).astype(np.float32)
    free_hidden, _ = free.model.forward(on, gpu.state, free.watch)
    forced = _Recorder(gpu.model, right.outputs)
    forced_hidden, pending = forced.model.forward(on, gpu.state, forced.watch)
    gpu.state.commit(on, pending, upload_paths(forest, paths))

    found = [LayerError("embedding", 0.0, relative_error(first, stream))]
    drifted = first
    clear = right.clear_rows(_CLEAR[act.name])
    for name, want, own, went in zip(_names(host.model), right.outputs, forced.outputs, free.outputs):
        rows = clear[len(found) - 1]
        own_error = relative_error(own[rows], want[rows])
        found.append(LayerError(name, relative_error(drifted, stream), own_error))
        stream, drifted = stream + want, drifted + went
    ends = relative_error(_floats(free_hidden), hidden), relative_error(_floats(forced_hidden), hidden)
    found.append(LayerError("final norm", relative_error(drifted, stream), ends[1]))
    given = device.upload(hidden.astype(act))
    logits = _floats(gpu.model.logits(given)), host.model.logits(hidden)
    found.append(LayerError("logits", ends[0], relative_error(*logits)))
    if host.model.has_mtp and gpu.model.has_mtp:
        found.append(LayerError("MTP layer", 0.0, _mtp_error(host, gpu, batch, on, hidden, given)))
    return found


def compare_prompt(host: Side, gpu: Side, tokens: Sequence[int], rows: int) -> list[LayerError]:
    """A sequence in pieces of so many rows; per place the largest errors of all pieces."""
    pieces = []
    for start in range(0, len(tokens), rows):
        piece = tokens[start : start + rows]
        pieces.append(compare(host, gpu, Forest.of([Tree.chain(piece)], [start]), [np.arange(len(piece))]))
    worst = [max(errors, key=lambda e: _order(e.own)) for errors in zip(*pieces)]
    drifts = [max((e.drift for e in errors), key=_order) for errors in zip(*pieces)]
    return [e._replace(drift=d) for e, d in zip(worst, drifts)]


def first_wrong(errors: Sequence[LayerError], bound: float) -> LayerError | None:
    """The first place whose own error is above the bound, or is no number."""
    return next((e for e in errors if not e.own <= bound), None)


def debug_layers(args: argparse.Namespace, prompt: str) -> int:
    """Prints a line a layer; exit status 1 where one differs. UsageError where there is nothing to compare."""
    if args.random_weights is not None:
        raise UsageError("--debug-layers reads a checkpoint on both sides; --random-weights has none")
    if not backend.choose_device(args.device):
        raise UsageError("--debug-layers compares a GPU with NumPy; add --device cuda on a machine with a GPU")
    llm = load_model(argparse.Namespace(**{**vars(args), "device": "cuda"}))
    changed = {"device": "cpu", "dtype": "float32", "max_model_len": llm.max_model_len}
    host = load_model(argparse.Namespace(**{**vars(args), **changed}))
    tokens = llm.tokenizer.encode(prompt)[: llm.max_model_len]
    errors = compare_prompt(_side(host, len(tokens)), _side(llm, len(tokens)), tokens, host.engine.scheduler.max_rows)
    dtype = llm.engine.state.dtype.name
    for line in table(errors, len(tokens), dtype):
        print(line)
    return 0 if first_wrong(errors, BOUNDS[dtype]) is None else 1


def table(errors: Sequence[LayerError], tokens: int, dtype: str) -> Iterator[str]:
    """The lines that `debug_layers` prints."""
    bound = BOUNDS[dtype]
    yield f"{'layer':<28}{'stream':>10}{'own':>10}   ({tokens} tokens, GPU in {dtype} beside NumPy in float32)"
    for e in errors:
        yield f"{e.name:<28}{e.drift:10.1e}{e.own:10.1e}{'' if e.own <= bound else '   DIFFERS'}"
    wrong = first_wrong(errors, bound)
    if wrong is None:
        yield f"no layer differs: every own error is at most {bound:.0e}"
    else:
        yield f"the first that differs: {wrong.name}, {wrong.own:.1e} on NumPy's own inputs; rounding gives {bound:.0e}"


class _Recorder:
    """A model whose mixers' and feed-forward outputs are kept, in the order of the stack, as float32 [R, D].

    given: outputs to go on with instead of the model's own
    """

    def __init__(self, model: Decoder, given: Sequence[np.ndarray] | None = None) -> None:
        self.outputs: list[np.ndarray] = []
        self._margins: list[np.ndarray | None] = []
        self._given = given
        self._config = model.config
        self.model = copy.copy(model)
        self.model.ffn = self._around(model.ffn)

    def watch(self, layer: int, y: Array) -> None:
        """Decoder.forward calls it with a mixer's output."""
        self._margins.append(None)
        self._see(y)

    def clear_rows(self, least: float) -> list[np.ndarray | slice]:
        """Per output the rows to compare: all, or where experts are chosen those whose choice is no near tie."""
        return [slice(None) if m is None or not (m > least).any() else m > least for m in self._margins]

    def _around(self, ffn: FFN) -> FFN:
        def watched(r: Residual, w: Weights, c: ModelConfig) -> tuple[Array, Array]:
            host = isinstance(r.stream, np.ndarray) and not device.on_gpu(r.stream)
            x = normed(r._replace(stream=r.stream.copy()))[0] if host and c.num_experts else None
            self._margins.append(None if x is None else self._margin(x, w))
            y, stream = ffn(r, w, c)
            self._see(y)
            return y, stream

        return watched

    def _see(self, y: Array) -> None:
        number = len(self.outputs)
        self.outputs.append(_floats(y).copy())
        if self._given is not None:
            device.write(y, self._given[number].astype(y.dtype))

    def _margin(self, x: np.ndarray, w: Weights) -> np.ndarray:
        """[R], by how much the last chosen expert's router logit is above the first one's that was not chosen."""
        k = self._config.num_experts_per_tok
        falling = np.sort(linear(x, w["gate"]), axis=1)[:, ::-1]
        return falling[:, k - 1] - falling[:, k] if k < falling.shape[1] else np.full(len(x), np.inf)


def _mtp_error(host: Side, gpu: Side, batch: Batch, on: Batch, hidden: np.ndarray, given: Array) -> float:
    """The MTP layer on the forest's own tokens and NumPy's hidden rows; it writes scratch places alone."""
    want = host.model.mtp(batch.forest.token, hidden, batch.forest.position, batch, host.state)
    got = gpu.model.mtp(on.forest.token, given, on.forest.position, on, gpu.state)
    return relative_error(_floats(got), want)


def _names(model: Decoder) -> list[str]:
    kinds = {"linear_attention": "gated DeltaNet", "full_attention": "attention"}
    ffn = "experts" if model.config.num_experts else "feed-forward"
    types = model.config.layer_types
    return [name for i, kind in enumerate(types) for name in (f"layer {i} {kinds[kind]}", f"layer {i} {ffn}")]


def _side(llm: LLM, tokens: int) -> Side:
    state = llm.engine.state
    return Side(llm.model, state, state.take(tokens))


def _floats(array: Array) -> np.ndarray:
    return (device.download(array) if device.on_gpu(array) else array).astype(np.float32)


def _order(error: float) -> float:
    return np.inf if np.isnan(error) else error
