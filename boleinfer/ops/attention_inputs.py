"""What attention reads: queries and keys normed and rotated, keys and values written to their pages. Knows no other op.

Slot i of a request lies in page page_table[b, i // P] at offset i % P. The T committed tokens take slots 0 .. T-1, the
nodes of the tree slots T .. T+N-1 in row order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case

Sizes = tuple[int, int, int]  # Hq, Hkv, Dh


def attention_inputs(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: Forest | DeviceForest,
    sizes: Sizes,
    rows: Array | None = None,
) -> Array:
    """q = rope(rms_norm(q)), returned; rope(rms_norm(k)) and v, written to the pages of their rows in place.

    qkv: [n, (2 Hq + 2 Hkv) Dh], all q, all gates (not read), all k, all v side by side; sizes: Hq, Hkv, Dh
    q_norm, k_norm: [Dh], stored as deltas to 1; cos, sin: [n, rotary/2], of the n rows
    k_pages, v_pages: [pages, P, Hkv, Dh]; page_table: int32 [B, M]
    rows: int32 [n], the flat rows of the forest that qkv holds; None: all of them
    Returns q [n, Hq, Dh]. On the GPU the norms, cos and sin are float32, sums too; the others have qkv's type, to which
    they are rounded once; a row without a page writes no k and v; of a row without a request, and of an entry -1 of
    `rows`, nothing is written, q included; the forest, page_table and rows have to be there before the pass begins.
    NumPy raises IndexError for a row without a page.
    Equations: Qwen3NextAttention in HF transformers.
    """
    if isinstance(forest, DeviceForest):
        return _launch(qkv, q_norm, k_norm, eps, cos, sin, k_pages, v_pages, page_table, forest, sizes, rows)
    (Hq, Hkv, Dh), n = sizes, len(qkv)
    q = qkv[:, : Hq * Dh].reshape(n, Hq, Dh)
    kv = qkv[:, 2 * Hq * Dh :].reshape(n, 2 * Hkv, Dh)
    k = rope(_rms_norm(kv[:, :Hkv], k_norm, eps), cos, sin)
    write_kv(k, kv[:, Hkv:], k_pages, v_pages, page_table, forest, rows)
    return rope(_rms_norm(q, q_norm, eps), cos, sin)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turns the pair (i, i + rotary/2) of each head by the angle i of its row; later dimensions pass unchanged.

    x: [R, H, Dh]; cos, sin: [R, rotary/2]; -> a new [R, H, Dh] in the type of x.
    Source: Su et al. 2021, in the halves order of GPT-NeoX, as in HF transformers' Qwen models.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [R, 1, rotary/2]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    return out


def write_kv(
    k: np.ndarray,
    v: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    forest: Forest,
    rows: np.ndarray | None = None,
) -> None:
    """Write the keys and values of tree rows to their slots, in place.

    k, v: [n, Hkv, Dh], of all R rows, or of the flat rows `rows` (int [n])
    k_pages, v_pages: [pages, P, Hkv, Dh]; page_table: int32 [B, M]
    Raises IndexError where a row has no page (page id below 0, or beyond the table).
    """
    slot, request = (forest.kv_slot, forest.request) if rows is None else (forest.kv_slot[rows], forest.request[rows])
    page, offset = np.divmod(slot, k_pages.shape[1])
    page = page_table[request, page]
    if len(page) and page.min() < 0:
        raise IndexError("a tree row has no KV page: allocate pages for committed length + nodes before writing")
    k_pages[page, offset] = k
    v_pages[page, offset] = v


def _rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    mean_square = np.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    return x / np.sqrt(mean_square + eps) * (1 + w)


# ---- the GPU ---------------------------------------------------------------------------------------------------------

THREADS = 128


def _launch(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: DeviceForest,
    sizes: Sizes,
    rows: Array | None,
) -> Array:
    (Hq, Hkv, Dh), n = sizes, len(qkv)
    q = device.empty((n, Hq, Dh), qkv.dtype)
    if n:
        args = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin, "rows": rows}
        args |= {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
        args |= {"request": forest.request, "kv_slot": forest.kv_slot, "q": q}
        args |= {"Rows": n, "Hq": Hq, "Hkv": Hkv, "P": k_pages.shape[1], "M": page_table.shape[1], "eps": eps}
        constants = {"Dh": Dh, "Half": cos.shape[1], "Act": device.c_type(qkv)}
        lanes = min(32, 1 << (-(-Dh * qkv.itemsize // 16) - 1).bit_length())  # of a head
        heads = n * (Hq + 2 * Hkv)
        kernels.launch(
            "attention_inputs.cu", "attention_inputs", -(-heads * lanes // THREADS), THREADS, args, constants=constants
        )
    return q


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _case(
    trees: list[list[int]],
    T: Sequence[int],
    P: int,
    Hq: int,
    Hkv: int,
    Dh: int,
    rotary: int,
    step: int = 0,
) -> Case:
    """Pages are poison before; only every `step`-th row is given where step is not 0."""
    R = sum(map(len, trees))
    n = len(range(0, R, step)) if step else R

    def build(rng: np.random.Generator) -> dict[str, Any]:
        B, needed = len(trees), [-(-(t + len(p)) // P) for t, p in zip(T, trees)]
        page_table = rng.permutation(B * (max(needed) + 1)).reshape(B, -1).astype(np.int32)
        for table, used in zip(page_table, needed):
            table[used:] = -1
        angle = rng.uniform(0, 2 * np.pi, (n, rotary // 2))
        pages = np.full((page_table.size, P, Hkv, Dh), np.nan)
        return {
            "qkv": rng.standard_normal((n, (2 * Hq + 2 * Hkv) * Dh)),
            "q_norm": 0.2 * rng.standard_normal(Dh),
            "k_norm": 0.2 * rng.standard_normal(Dh),
            "eps": 1e-6,
            "cos": np.cos(angle),
            "sin": np.sin(angle),
            "k_pages": pages,
            "v_pages": pages.copy(),
            "page_table": page_table,
            "forest": Forest.of([Tree.of([0] * len(p), p) for p in trees], T),
            "sizes": (Hq, Hkv, Dh),
            "rows": np.arange(0, R, step, dtype=np.int32) if step else None,
        }

    some = f"/{step}" if step else ""
    label = f"R={'+'.join(str(len(p)) for p in trees)}{some} P={P} Hq={Hq} Hkv={Hkv} Dh={Dh} rotary={rotary}"
    return Case(label, build, outputs=("k_pages", "v_pages"), wide=("q_norm", "k_norm", "cos", "sin"))


def _chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
_BINARY = [(n - 1) // 2 if n else -1 for n in range(128)]
CASES = {
    "attention_inputs": [
        _case([[-1]], [0], 1, 1, 1, 2, 2),
        _case([_RAGGED, [-1], _chain(70)], [5, 0, 31], 7, 3, 1, 63, 16),
        _case([_RAGGED, _chain(3)], [15, 16], 16, 4, 2, 65, 64),
        _case([_RAGGED, _chain(9)], [0, 15], 16, 6, 3, 32, 32),
        _case([_RAGGED, [-1]], [100, 3], 16, 4, 4, 64, 24, step=3),
        _case([_chain(5), _RAGGED], [1, 64], 32, 8, 1, 128, 128, step=2),
        _case([[-1]], [300], 16, 16, 4, 256, 64),
        _case([[-1]] * 5 + [_RAGGED], [0, 15, 16, 17, 200, 63], 16, 16, 2, 256, 64),
        _case([_BINARY, _chain(130), _RAGGED], [60, 5, 0], 16, 16, 4, 256, 64),
    ]
}
