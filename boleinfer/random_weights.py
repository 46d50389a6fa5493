"""Seeded random weights for a configuration, in the ranges of a trained model. Reads no file.

Matrices are normal with variance 1 / width, those that end a block smaller by the square root of twice the number of
layers, so that the residual stream stays near unit size; decays are those that Gated DeltaNet is initialised with.

The head's rows are the embedding's in another order, so that one token is likelier than all others by a few logits, as
it mostly is for a trained model, and rounding hardly ever changes what is chosen: the id after the last one, inside a
block of 1,024 ids; the last one itself where the head is the embedding. All other logits are noise of the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.config import ModelConfig
from boleinfer.device import Fp8
from boleinfer.device_weights import kind
from boleinfer.memory import panels
from boleinfer.ops.embedding import embedding
from boleinfer.plans import Shapes, Target
from boleinfer.quantise import drafts_in_fp8, nbytes, quantise
from boleinfer.weights import BLOCK

_FP8_UNIT = 64.0  # standard deviation of the stored FP8 numbers; they end at 448
_ROUND = 1024  # ids that follow each other, the first one the last
_TOKEN, _LOGITS = 6.0, 0.25  # length of an embedding; gain of the final norm: logits of standard deviation 1.5


def make(
    config: ModelConfig,
    plan: Callable[[ModelConfig, Shapes], list[Target]],
    act: np.dtype,
    seed: int = 0,
    mtp: bool = True,
    fp8: bool = False,
    gpu: bool = True,
) -> dict[str, Any]:
    """{canonical name: array}, as device_weights.load gives it, or weights.load where `gpu` is False.

    fp8: FP8 with scales of 128 x 128 blocks for what the FP8 releases quantise
    """
    targets = [t for t in plan(config, {}) if mtp or not t.name.startswith("mtp.")]
    arrays: dict[str, Any] = {}
    for stream, target in enumerate(targets):
        rng = np.random.default_rng((seed, stream))
        if target.name == "lm_head" and gpu:
            rows = device.upload(followed(config.vocab_size).astype(np.int32))
            arrays[target.name] = embedding(rows, arrays["embed_tokens"])
        elif len(target.shape) == 1:
            vector = _vector(target, rng)
            arrays[target.name] = device.upload(vector) if gpu else vector
        elif gpu:
            dtype = kind(target.name, target.shape, act)
            quantised = fp8 and _is_quantised(target.name)
            arrays[target.name] = _matrix(target, config, dtype, quantised, seed, stream)
        else:
            if target.name == "lm_head":
                rng = np.random.default_rng((seed, [t.name for t in targets].index("embed_tokens")))
            values = rng.standard_normal(target.shape, np.float32)
            values *= _scale(target, config)
            arrays[target.name] = _as_loaded(values[followed(len(values))] if target.name == "lm_head" else values)
    arrays.setdefault("lm_head", arrays["embed_tokens"])
    return arrays


def sizes(
    config: ModelConfig,
    plan: Callable[[ModelConfig, Shapes], list[Target]],
    act: np.dtype,
    mtp: bool = True,
    fp8: bool = False,
) -> dict[str, int]:
    """Bytes on the GPU of each array that `make` would give, scales included."""
    found = {}
    for target in plan(config, {}):
        if mtp or not target.name.startswith("mtp."):
            name, shape = target.name, target.shape
            in_fp8 = fp8 and _is_quantised(name) and len(shape) > 1
            if in_fp8 or drafts_in_fp8(name, shape, act.itemsize):
                found[name] = nbytes(shape)
            else:
                found[name] = math.prod(shape) * kind(name, shape, act).itemsize
    return found


def followed(vocab: int) -> np.ndarray:
    """int64 [vocab]: the id that each id follows."""
    ids = np.arange(vocab)
    first = ids // _ROUND * _ROUND
    return first + (ids - first - 1) % np.minimum(_ROUND, vocab - first)


def _vector(target: Target, rng: np.random.Generator) -> np.ndarray:
    (n,), name = target.shape, target.name
    if name.endswith("A_log"):
        values = np.log(rng.uniform(1, 16, n))
    elif name.endswith("dt_bias"):
        step = np.exp(rng.uniform(math.log(0.001), math.log(0.1), n))
        values = step + np.log(-np.expm1(-step))  # softplus of it is the step
    else:  # norms; the one inside GDN is a plain gain
        values = 0.1 * rng.standard_normal(n) + name.endswith("linear_attn.norm")
        if name in ("norm", "mtp.norm"):
            values = _LOGITS * (1 + values) - 1
    return values.astype(np.float32)


def _scale(target: Target, config: ModelConfig) -> float:
    """Standard deviation of a matrix."""
    name, width = target.name, target.shape[-1]
    if name.endswith("conv1d"):
        return 0.5
    if name in ("embed_tokens", "lm_head"):
        return _TOKEN / math.sqrt(width)
    if name.endswith(("o_proj", "out_proj", "down_proj")):
        return 1 / math.sqrt(2 * width * config.num_hidden_layers)
    return 1 / math.sqrt(width)


def _matrix(target: Target, config: ModelConfig, dtype: np.dtype, fp8: bool, seed: int, stream: int) -> Any:
    scale, shape = _scale(target, config), target.shape
    if not fp8:
        matrix = normal(shape, dtype, seed, stream, scale)
        return quantise(matrix) if drafts_in_fp8(target.name, shape, dtype.itemsize) else matrix
    blocks = (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))
    scales = np.full(blocks, scale / _FP8_UNIT, np.float32)
    return Fp8(normal(shape, device.dtype("fp8"), seed, stream, _FP8_UNIT), device.upload(scales))


def normal(shape: tuple[int, ...], dtype: np.dtype, seed: int, stream: int, scale: float) -> Any:
    """A GPU array of normal numbers of that standard deviation; stream: which of the seed's sequences."""
    out = device.empty(shape, dtype)
    flat = out.reshape(-1)
    blocks = min(4096, -(-out.size // 1024))
    args = {"out": flat, "Count": out.size, "seed": seed, "stream": stream, "scale": scale}
    kernels.launch("random_normal.cu", "random_normal", blocks, 256, args, constants={"T": device.c_type(out)})
    return out


def _is_quantised(name: str) -> bool:
    return name.endswith(("_proj", "in_proj_qkvz")) and not name.endswith("shared_expert_gate")


def _as_loaded(values: np.ndarray) -> np.ndarray:
    """In the layout of weights.load: column-major, in panels where memory.panels says so."""
    *lead, rows, width = values.shape
    count = 0 if lead else panels(rows, width)
    stack = values.reshape(count, -1, width) if count else values
    return np.ascontiguousarray(stack.swapaxes(-1, -2)).swapaxes(-1, -2)
