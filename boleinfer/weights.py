"""Assembles a model's arrays from its checkpoint by a loading plan. Knows names, shapes and number formats, no maths.

Every array becomes float32, exactly. Matrices lie column-major (logical shape [out, in]; a stack of matrices has each
of them so), because `x @ w.T` then takes BLAS's quick path; where memory.panels says so, a matrix is cut into a stack
of panels [out / 64, 64, in], each column-major.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer.checkpoint import Checkpoint, Stored, WeightsError
from boleinfer.config import ModelConfig
from boleinfer.memory import PANEL, buffer, panels
from boleinfer.plans import Part, Shapes, Target

__all__ = ["WeightsError", "load", "match"]

Plan = Callable[[ModelConfig, Shapes], list[Target]]
LINE = 16  # numbers of a cache line; every array starts on one
BLOCK = 128  # FP8 weights have one scale per BLOCK x BLOCK weights
_WRAPPERS = ("model.", "language_model.")
_NOT_TEXT = ("visual.", "vision_tower.")
_OTHER_QUANTISATION = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_global_scale": "compressed-tensors NVFP4",
    "weight_scale_2": "NVFP4",
    "input_scale": "static activation scales",
}


def load(
    folder: str | Path,
    config: ModelConfig,
    plan: Plan,
    mtp: bool | str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Read a model folder's safetensors files: {canonical name: float32 array}.

    mtp: True needs the multi-token-prediction layer, False ignores it, "auto" takes it when all of it is there and
    warns once otherwise; "mtp.fc" in the result says whether it was loaded.
    A tied model's lm_head is the same object as embed_tokens, unless a different lm_head is stored: the stored one is
    then used, with a warning (as Hugging Face does).
    progress(done, total) is called with bytes of float32 after each array.
    Raises WeightsError with everything that is missing, unexpected, misshaped or of an unsupported kind, or when they
    do not fit in memory.
    """
    checkpoint = Checkpoint(folder)
    targets, names = match(config, plan, checkpoint.tensors, mtp)
    total = sum(4 * math.prod(target.shape) for target in targets)
    sizes = [-(-math.prod(target.shape) // LINE) * LINE for target in targets]
    try:
        memory = buffer((sum(sizes),))  # in one piece, so that the system may back it with large pages
    except MemoryError:
        raise WeightsError(
            f"the weights take {total / 2**30:.1f} GiB of memory as float32, more than this machine can give; "
            "use a smaller model"
        ) from None
    arrays: dict[str, np.ndarray] = {}
    at = done = 0
    for target, size in zip(targets, sizes):
        arrays[target.name] = _assemble(target, checkpoint, names, memory[at : at + size])
        at, done = at + size, done + arrays[target.name].nbytes
        if progress is not None:
            progress(done, total)
    tie(arrays, config, np.array_equal)
    return arrays


def match(
    config: ModelConfig, plan: Plan, stored: Mapping[str, Stored], mtp: bool | str = "auto"
) -> tuple[list[Target], dict[str, str]]:
    """Compare a plan with what is stored, without data: the targets to load and {bare name: stored name}.

    Raises WeightsError as `load` does.
    """
    if mtp not in (True, False, "auto"):
        raise ValueError(f"mtp is {mtp!r}, expected True, False or 'auto'")
    names = _bare_names(stored)
    _refuse_other_quantisation(names)
    kinds = {bare: stored[name] for bare, name in names.items()}
    scales = {s for bare, kind in kinds.items() if kind.dtype.startswith("F8") for s in scale_names(bare)}
    shapes = {bare: kind.shape for bare, kind in kinds.items() if bare not in scales and not _skipped(bare)}
    targets = _choose_mtp(plan(config, shapes), shapes, config, mtp)
    problems = _differences(targets, kinds, shapes)
    if problems:
        raise WeightsError("the weight files do not fit the model's config.json:\n  " + "\n  ".join(problems))
    return targets, names


# ---- comparing plan and files ----------------------------------------------------------------------------------------


def _bare_names(stored: Iterable[str]) -> dict[str, str]:
    """{name without wrapper prefixes: stored name}; raises WeightsError when two stored names mean the same tensor."""
    names: dict[str, str] = {}
    for name in stored:
        bare = name
        while bare.startswith(_WRAPPERS):
            bare = bare.split(".", 1)[1]
        if bare in names:
            raise WeightsError(f"{names[bare]} and {name} are the same tensor under two prefixes; one must go")
        names[bare] = name
    return names


def _refuse_other_quantisation(names: Mapping[str, str]) -> None:
    for bare, name in names.items():
        kind = _OTHER_QUANTISATION.get(bare.rsplit(".", 1)[-1])
        if kind is not None and not _skipped(bare):
            raise WeightsError(
                f"{name} belongs to a {kind} checkpoint, which is not supported; "
                "use a BF16, F16 or F32 release, or an FP8 one in blocks of 128 x 128"
            )


def _skipped(bare: str) -> bool:
    return bare.startswith(_NOT_TEXT) or bare.endswith("rotary_emb.inv_freq")


def scale_names(tensor: str) -> tuple[str, str]:
    """What the scales of an FP8 tensor may be called."""
    return f"{tensor}_scale_inv", f"{tensor}_scale"


def _choose_mtp(targets: list[Target], shapes: Shapes, config: ModelConfig, mtp: bool | str) -> list[Target]:
    """Drop the MTP layer's targets when it is not wanted, or in "auto" when a tensor of it is missing."""
    trunk = [t for t in targets if not t.name.startswith("mtp.")]
    layer = [t for t in targets if t.name.startswith("mtp.")]
    if mtp is True and not config.mtp_num_hidden_layers:
        raise WeightsError("the MTP layer was asked for, but the model's config.json announces none")
    absent = _absent(layer, shapes)
    if mtp is False or not layer:
        return trunk
    if mtp is True or not absent:
        return targets
    warnings.warn(f"the MTP layer is off: {len(absent)} of its tensors are missing ({_some(absent, 3)})", stacklevel=4)
    return trunk


def _absent(targets: list[Target], shapes: Shapes) -> list[str]:
    return [part.tensor for target in targets for part in target.parts if part.tensor not in shapes]


def _differences(targets: list[Target], kinds: Mapping[str, Stored], shapes: Shapes) -> list[str]:
    """One line for each kind of difference between the plan and the files; empty when they fit."""
    parts = [part for target in targets for part in target.parts]
    with_mtp = any(target.name.startswith("mtp.") for target in targets)
    planned = {part.tensor for part in parts}
    unused = [n for n in shapes if n not in planned and (with_mtp or not n.startswith("mtp."))]
    there = [part for part in parts if part.tensor in shapes]
    misshaped = [
        f"{p.tensor} is {list(shapes[p.tensor])}, expected {list(p.shape)}"
        for p in there
        if p.shape != shapes[p.tensor]
    ]
    scale_wrong, type_wrong = [], []
    for part in there:
        dtype, shape = kinds[part.tensor]
        if dtype == "F8_E4M3":
            scale_wrong += _scale_problems(part.tensor, shape, kinds)
        elif dtype not in ("F32", "BF16", "F16"):
            type_wrong.append(f"{part.tensor} ({dtype})")
    lonely = [n for n in unused if n.endswith(("_scale", "_scale_inv"))]
    scale_wrong += [f"{n} has no FP8 weight to scale" for n in lonely]
    found = {
        "missing": _absent(targets, shapes),
        "unexpected": [n for n in unused if n not in lonely],
        "misshaped": misshaped,
        "of an unsupported type": type_wrong,
        "with wrong FP8 scales": scale_wrong,
    }
    return [f"{len(items)} {what}: {_some(items, 20)}" for what, items in found.items() if items]


def _scale_problems(tensor: str, shape: tuple[int, ...], kinds: Mapping[str, Stored]) -> list[str]:
    found = [name for name in scale_names(tensor) if name in kinds]
    if len(found) != 1:
        return [f"{tensor} is FP8 and has {len(found) or 'no'} scales"]
    expected = (*shape[:-2], *(math.ceil(n / BLOCK) for n in shape[-2:]))
    dtype, scale_shape = kinds[found[0]]
    if len(shape) < 2 or scale_shape != expected or dtype not in ("F32", "BF16", "F16"):
        return [
            f"{found[0]} is {dtype} {list(scale_shape)}, expected F32 or BF16 {list(expected)} (blocks of 128 x 128)"
        ]
    return []


def _some(items: list[str], most: int) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


# ---- reading ---------------------------------------------------------------------------------------------------------


def _assemble(target: Target, checkpoint: Checkpoint, names: Mapping[str, str], memory: np.ndarray) -> np.ndarray:
    """The target's array, written into `memory`, which is at least as large."""
    *lead, rows, width = (1, 1, *target.shape)[-max(2, len(target.shape)) :]
    in_panels = len(target.shape) == 2 and panels(rows, width)
    if in_panels:
        lead, rows = [in_panels], PANEL
    shape = (math.prod(lead), width, rows)  # [matrices, width, rows]: each matrix column-major
    out = memory[: math.prod(shape)].reshape(shape)
    at = 0
    for part in target.parts:
        block = _rows(part, width, checkpoint, names)  # [n, width]
        while len(block):
            matrix, row = divmod(at, rows)
            n = min(rows - row, len(block))
            _widen(block[:n], out[matrix, :, row : row + n])
            block, at = block[n:], at + n
    stack = out.swapaxes(1, 2)  # [matrices or panels, rows, width]
    return stack if in_panels or len(target.shape) > 2 else stack.reshape(target.shape)


def _rows(part: Part, width: int, checkpoint: Checkpoint, names: Mapping[str, str]) -> np.ndarray:
    """A part's rows in their final order, [n, width]: uint16 holding BF16 bits, float16 or float32."""
    data = checkpoint.view(names[part.tensor])
    if data.dtype == np.uint8:
        scale = next(names[s] for s in scale_names(part.tensor) if s in names)
        data = dequantise(data, float32(checkpoint.view(scale)))
    data = data.reshape(-1, width)
    return data if part.rows is None else data[part.rows]


def _widen(block: np.ndarray, out: np.ndarray) -> None:
    """Write [n, width] into out [width, n] as float32; a BF16 number is the upper half of a float32."""
    if block.dtype == np.uint16:
        np.left_shift(block.T, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        out[...] = block.T


def float32(data: np.ndarray) -> np.ndarray:
    """Stored numbers widened; uint16 holds BF16 bits."""
    return (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data.astype(np.float32)


def dequantise(bits: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """FP8 weights times their scales: bits uint8 [..., N, K], scale float32 [..., ceil(N/128), ceil(K/128)] -> float32.

    The last block of a row or column may be partial. The checkpoints' `scale_inv` multiplies, despite its name.
    """
    N, K = bits.shape[-2:]
    values = _e4m3_values()[bits]
    for i in range(scale.shape[-2]):
        row = np.repeat(scale[..., i, :], BLOCK, axis=-1)[..., None, :K]  # [..., 1, K]
        values[..., i * BLOCK : (i + 1) * BLOCK, :] *= row
    return values


def _e4m3_values() -> np.ndarray:
    """The value of each F8_E4M3 bit pattern, float32 [256]: sign, 4 exponent bits (bias 7), 3 mantissa bits, no inf."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


def tie(arrays: dict[str, Any], config: ModelConfig, equal: Callable[[Any, Any], bool]) -> None:
    """Makes a tied model's head its embedding, unless a different head is stored, which is then used with a warning."""
    embedding = arrays["embed_tokens"]
    head = arrays.setdefault("lm_head", embedding)
    if not config.tie_word_embeddings or head is embedding:
        return
    if equal(head, embedding):
        arrays["lm_head"] = embedding
    else:
        warnings.warn(
            "config.json ties the output head to the embedding, but a different lm_head is stored: it is used",
            stacklevel=3,
        )
