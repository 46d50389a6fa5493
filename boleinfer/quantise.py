"""bf16 matrices made FP8 on the GPU, for what drafts: it changes how often guesses are right, no token. Knows no op.

    scale = max |w| / 448 of each block of 128 x 128, bits = E4M3(w / scale)

E4M3 keeps four significant bits, so a number moves by 3 % at most and a product of many by about 2 %.
"""

from __future__ import annotations

import math

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array, Fp8
from boleinfer.weights import BLOCK

LARGEST = 448.0  # of E4M3
LEAST = 1 << 22  # numbers of a matrix from which on half the bytes are less time


def drafts_in_fp8(name: str, shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether a matrix of that name, stored with so many bytes a number, is one that only drafts read and gets FP8."""
    alone = "shared_expert" not in name  # whose experts stay as they are
    return name.startswith("mtp.") and alone and pays(shape, itemsize)


def pays(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether a matrix is large enough, and in bf16 with rows of whole 16-byte words in FP8."""
    return len(shape) == 2 and itemsize == 2 and math.prod(shape) >= LEAST and shape[1] % 16 == 0


def nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of an FP8 matrix, or a stack of them, and its scales."""
    *lead, rows, width = shape
    return math.prod(shape) + 4 * math.prod(lead) * -(-rows // BLOCK) * -(-width // BLOCK)


def quantise(w: Array) -> Fp8:
    """w, bf16 [Dout, Din] with Din a multiple of 16, as FP8."""
    scale = scales(w)
    return Fp8(narrow(w, scale), scale)


def scales(w: Array) -> Array:
    """max |w| / 448 of each block, 1 where all are 0: float32 [ceil(Dout/128), ceil(Din/128)]."""
    (Dout, Din), blocks = w.shape, tuple(-(-n // BLOCK) for n in w.shape)
    if device.on_gpu(w):
        scale = device.empty(blocks, np.float32)
        args = {"w": w, "scale": scale, "Dout": Dout, "Din": Din}
        kernels.launch("quantise.cu", "scales", (blocks[1], blocks[0]), 256, args)
        return scale
    wide = np.zeros([BLOCK * n for n in blocks], np.float32)
    wide[:Dout, :Din] = abs(w.astype(np.float32))
    most = wide.reshape(blocks[0], BLOCK, blocks[1], BLOCK).max((1, 3))
    return np.where(most > 0, most / np.float32(LARGEST), np.float32(1))


def narrow(w: Array, scale: Array, out: Array = None) -> Array:
    """The bits of w / scale: uint8 [Dout, Din], in `out` where it is given.

    scale: of each block, or [1, ceil(Din/128)], which then all rows share"""
    Dout, Din = w.shape
    out = device.empty(w.shape, np.uint8) if out is None and device.on_gpu(w) else out
    if device.on_gpu(w):
        args = {"w": w, "scale": scale, "bits": out, "Dout": Dout, "Din": Din, "Tall": len(scale)}
        kernels.launch("quantise.cu", "narrow", (-(-Din // BLOCK), -(-Dout // BLOCK)), 256, args)
        return out
    tall = scale if len(scale) == 1 else scale.repeat(BLOCK, 0)[:Dout]
    bits = (w.astype(np.float32) / tall.repeat(BLOCK, 1)[:, :Din]).astype(device.dtype("fp8")).view(np.uint8)
    if out is None:
        return bits
    out[...] = bits
    return out
