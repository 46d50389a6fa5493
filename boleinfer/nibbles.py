"""Matrices of four bits a number, for the head that drafts look at, and their product with few rows. Knows no model.

    w = scale (n - 8), n of 0 .. 15 and a bf16 scale for each row and 32 neighbours; of the largest of these n is 0

A number moves by a sixteenth of the largest at most, or by an eighth near its opposite. Numbers lie in bricks of 32
rows by 128 k, as a warp multiplies them (cuda/linear_nibbles.cu): of row 8 r + g and k = 32 i + 8 t + e the bits stand
in 32-bit word (32 r + 4 g + t, i), from bit 4 (e / 2) of its lower half on where e is even, of its upper half where it
is odd. Behind the words are the scales, [g, r, i].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array

FILE = "linear_nibbles.cu"
FEATURES, K, SHARING = 32, 128, 32  # of a brick; neighbours with the same scale
NUMBERS = FEATURES * K // 2  # bytes of a brick's numbers
BRICK = NUMBERS + 2 * FEATURES * K // SHARING
MOST_ROWS, MOST_AT_ONCE = 8, 65535  # of a product; that one launch makes
RANGES, MOST_PLACES = 16, 2  # of k; of a warp's ring (three are slower on an H200)
SUMS = 2 * 4 * RANGES * FEATURES * MOST_ROWS  # bytes


class Nibbles(NamedTuple):
    """A matrix [Dout, Din]. bricks: uint8 [Dout/32, Din/128, BRICK]"""

    bricks: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Dout and Din."""
        return FEATURES * self.bricks.shape[0], K * self.bricks.shape[1]


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a matrix can be cut into bricks."""
    return len(shape) == 2 and shape[0] % FEATURES == 0 and shape[1] % K == 0


def nbytes(shape: tuple[int, int]) -> int:
    """Bytes of such a matrix."""
    return shape[0] // FEATURES * (shape[1] // K) * BRICK


def zeros(shape: tuple[int, int]) -> Nibbles:
    """A matrix of zeros on the GPU."""
    bricks = device.empty((shape[0] // FEATURES, shape[1] // K, BRICK), np.uint8)
    device.fill(bricks, 0)
    return Nibbles(bricks)


def narrow(rows: Array, w: Nibbles, first: int) -> None:
    """bf16 rows [n, Din] become rows of w, from `first` on."""
    n, Din = rows.shape
    if device.on_gpu(rows):
        for a in range(0, n, MOST_AT_ONCE):
            some = rows[a : a + MOST_AT_ONCE]
            args = {"rows": some, "w": w.bricks, "First": first + a, "Din": Din, "Dout": w.shape[0]}
            kernels.launch("narrow_nibbles.cu", "narrow_nibbles", (Din // K, len(some)), 32, args)
        return
    wide = rows.astype(np.float32).reshape(n, -1, K // SHARING, SHARING)
    largest = np.take_along_axis(wide, abs(wide).argmax(-1, keepdims=True), -1)
    scale = (largest / np.float32(-8)).astype(device.dtype("bf16"))  # [n, Din/128, i, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.where(scale == 0, 8, np.clip(np.rint(wide / scale.astype(np.float32)) + 8, 0, 15)).astype(np.uint32)
    eight = number.reshape(n, -1, 4, 4, 4, 2) << np.asarray([[0, 16], [4, 20], [8, 24], [12, 28]], np.uint32)
    words = np.bitwise_or.reduce(eight, axis=(-2, -1)).swapaxes(-1, -2)  # [n, Din/128, t, i]
    for row, (own, of_row) in enumerate(zip(words, scale[..., 0]), first):
        bricks, r, g = w.bricks[row // FEATURES], row % FEATURES // 8, row % 8
        for at, part in ((16 * (32 * r + 4 * g), own), (NUMBERS + 8 * (4 * g + r), of_row)):
            some = np.ascontiguousarray(part).view(np.uint8).reshape(len(bricks), -1)
            bricks[:, at : at + some.shape[1]] = some


def wide(w: Nibbles) -> np.ndarray:
    """The matrix in float32, [Dout, Din]."""
    bricks = device.download(w.bricks) if device.on_gpu(w.bricks) else w.bricks
    tall, across, _ = bricks.shape
    words = np.ascontiguousarray(bricks[..., :NUMBERS]).view(np.uint32).reshape(tall, across, 4, 8, 4, 4)  # r g t i
    shifts = np.asarray([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)  # of e
    number = (words[..., None] >> shifts & 15).astype(np.float32) - 8  # r g t i e
    scale = np.ascontiguousarray(bricks[..., NUMBERS:]).view(device.dtype("bf16")).astype(np.float32)
    scale = scale.reshape(tall, across, 8, 4, 4).swapaxes(2, 3)  # r g i
    number = number.swapaxes(-2, -3) * scale[..., None, None]  # r g i t e
    return number.reshape(tall, across, FEATURES, K).swapaxes(1, 2).reshape(w.shape)


def product(x: Array, w: Nibbles) -> Array:
    """x w^T in float32, [R, Dout]; on the GPU of bf16 x [R, Din] with up to MOST_ROWS rows.

    A row's bits do not depend on the rows beside it."""
    if not device.on_gpu(x):
        return x @ wide(w).astype(x.dtype).T
    (R, Din), (Dout, _) = x.shape, w.shape
    if R > MOST_ROWS:
        raise kernels.KernelError(f"a product of {R} rows with a matrix of four bits a number; it takes {MOST_ROWS}")
    out, x_bytes = device.empty((R, Dout), np.float32), MOST_ROWS * (2 * Din + 64)
    room = device.shared_bytes() - SUMS
    staged = room - x_bytes >= 2 * RANGES * BRICK
    room -= x_bytes if staged else 0
    depth = max(1, min(MOST_PLACES, room // (RANGES * BRICK)))
    kernels.launch(
        FILE,
        "linear_nibbles",
        min(device.multiprocessors(), Dout // FEATURES),
        32 * RANGES,
        {"x": x, "w": w.bricks, "out": out, "R": R, "Din": Din, "Dout": Dout},
        shared=depth * RANGES * BRICK + SUMS + (x_bytes if staged else 0),
        constants={"Depth": depth, "Staged": staged},
    )
    return out
