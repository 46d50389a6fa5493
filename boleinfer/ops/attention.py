"""Attention of a forest over paged KV, and the moving of KV rows. Knows no other op and no model.

Slot i of a request lies in page page_table[b, i // P] at offset i % P. The T committed tokens take slots 0 .. T-1, the
nodes of the tree slots T .. T+N-1 in row order. Slots never written may hold anything, NaN included: they are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case

SCORES = 1 << 18  # scores held at once, to stay in cache: more query rows are taken in blocks


def tree_attention(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    forest: Forest,
    scale: float,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """softmax(scale * q k^T) v of each row over the committed tokens, its ancestors and itself.

    q: [n, Hq, Dh], of all R rows, or of the flat rows `rows` (increasing int [n]); query head h reads KV head
    h // (Hq // Hkv). k_pages, v_pages: [pages, P, Hkv, Dh], with the rows read already written.
    Returns [n, Hq, Dh] in q's dtype; float32 is within about 5e-7 of float64. A request's KV is read once, or once for
    every SCORES scores where there are more; consecutive pages are read in place, scattered ones gathered first.
    """
    out = np.empty_like(q)
    cuts = forest.start if rows is None else np.searchsorted(rows, forest.start)
    for b, tree in enumerate(forest.trees):
        lo, hi = int(cuts[b]), int(cuts[b + 1])
        T = int(forest.committed[b])
        nodes = np.arange(len(tree)) if rows is None else rows[lo:hi] - forest.start[b]
        block = max(8, SCORES // (q.shape[1] * (T + len(tree))))
        for i in range(0, hi - lo, block):
            n = nodes[i : i + block]
            mask = tree.ancestors[n]  # [n, N]
            slots = _slots_read(mask, T)
            k = _rows_of(k_pages, page_table[b], slots)  # [T+, Hkv, Dh]
            v = _rows_of(v_pages, page_table[b], slots)
            seen = mask[:, : slots.stop - T] if isinstance(slots, slice) else mask[:, slots[T:] - T]
            out[lo + i : lo + i + len(n)] = _attend(q[lo + i : lo + i + len(n)], k, v, seen, scale)
    return out


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """Softmax attention of q [n, Hq, Dh] over k, v [L, Hkv, Dh]; mask bool [n, m] covers the last m of the L keys."""
    (n, Hq, Dh), (L, Hkv, _) = q.shape, k.shape
    r = Hq // Hkv
    q = (q * q.dtype.type(scale)).reshape(n, Hkv, r, Dh).transpose(1, 0, 2, 3).reshape(Hkv, n * r, Dh)
    scores = k.transpose(1, 0, 2) @ q.transpose(0, 2, 1)  # [Hkv, L, n*r]: quicker than q k^T, which would copy k
    scores = np.ascontiguousarray(scores.transpose(0, 2, 1)).reshape(Hkv, n, r, L)
    np.copyto(scores[..., L - mask.shape[1] :], -np.inf, where=~mask[:, None])
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    out = (scores.reshape(Hkv, n * r, L) @ v.transpose(1, 0, 2)).reshape(Hkv, n, r, Dh)
    out /= total
    return out.transpose(1, 0, 2, 3).reshape(n, Hq, Dh)


def _slots_read(mask: np.ndarray, T: int) -> slice | np.ndarray:
    """The slots that rows with this ancestor mask [n, N] read: committed tokens and used nodes only."""
    used = np.flatnonzero(mask.any(0))
    if len(used) == used[-1] + 1:
        return slice(0, T + len(used))
    return np.concatenate((np.arange(T), T + used))


def _rows_of(pages: np.ndarray, table: np.ndarray, slots: slice | np.ndarray) -> np.ndarray:
    """Rows [L, Hkv, Dh] of some slots; a view where the slots are a slice and their pages consecutive."""
    P = pages.shape[1]
    last = slots.stop if isinstance(slots, slice) else int(slots[-1]) + 1
    ids = table[: -(-last // P)]
    consecutive = (ids[1:] - ids[:-1] == 1).all()
    held = pages[ids[0] : ids[0] + len(ids)] if consecutive else pages[ids]  # [pages of the request, P, Hkv, Dh]
    return held.reshape(-1, *pages.shape[2:])[slots]


def move_kv(
    k_pages: np.ndarray, v_pages: np.ndarray, page_table_row: np.ndarray, source: np.ndarray, target: np.ndarray
) -> None:
    """Move accepted rows of one request to their committed slots, in place.

    source, target: int [m] slots; they may overlap (all rows are read before any is written).
    """
    P = k_pages.shape[1]
    read = page_table_row[source // P], source % P
    write = page_table_row[target // P], target % P
    k_pages[write] = k_pages[read]
    v_pages[write] = v_pages[read]


def _case(trees: list[list[int]], T: int, P: int, Hq: int, Hkv: int, Dh: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        B, M = len(trees), -(-(T + max(map(len, trees))) // P)
        k_pages, v_pages = rng.standard_normal((2, B * M, P, Hkv, Dh))
        forest = Forest.of([Tree.of([0] * len(p), p) for p in trees], [T] * B)
        return {
            "q": rng.standard_normal((len(forest), Hq, Dh)),
            "k_pages": k_pages,
            "v_pages": v_pages,
            "page_table": rng.permutation(B * M).reshape(B, M).astype(np.int32),
            "forest": forest,
            "scale": Dh**-0.5,
        }

    return Case(f"R={'+'.join(str(len(p)) for p in trees)} T={T} P={P} Hq={Hq} Hkv={Hkv} Dh={Dh}", build)


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
CASES = {
    "tree_attention": [
        _case([[-1]], 0, 1, 1, 1, 3),
        _case([_RAGGED, [-1]], 63, 16, 3, 1, 65),
        _case([_RAGGED], 65, 7, 4, 4, 64),
        _case([[-1]] * 3, 300, 16, 16, 2, 256),
        _case([list(range(-1, 256)), _RAGGED], 100, 16, 8, 2, 256),
    ]
}
