"""Attention of a forest over paged KV, and the moving of accepted KV rows. Knows no other op and no model.

Slot i of a request lies in page page_table[b, i // P] at offset i % P. The T committed tokens take slots 0 .. T-1, the
nodes of the tree slots T .. T+N-1 in row order. Slots never written may hold anything, NaN included: they are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case, sigmoid

SCORES = 1 << 18  # scores held at once, to stay in cache: more query rows are taken in blocks
SCRATCH = 1 << 28  # bytes on the GPU for the parts of rows whose splits are worked on side by side
_SIDE_ROWS = 512  # such rows at most
_TREE_ROWS = 128  # of one request at most
_BLOCKS, _WORKERS = 1024, 4  # blocks worth starting; for each tile at least this many, if it has as many splits
WIDTHS = (32, 64, 128, 256)  # of heads, on the GPU
_LEAVES = 32  # of a row, at most, in attention_tile.cuh
_SINGLE = 128  # requests of which each has one row, at most, where the kernel makes its inputs itself
_HOPPER = "tree_attention_hopper.cu"


def tree_attention(
    q: Array,
    gate: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: Forest | DeviceForest,
    scale: float,
    rows: Array | None = None,
) -> Array:
    """softmax(scale * q k^T) v of each row over the committed tokens, its ancestors and itself, times sigmoid(gate).

    q, gate: [n, Hq, Dh], of all R rows, or of the flat rows `rows` (int32 [n], increasing; on the GPU in any order, -1
    for none); query head h reads KV head h // (Hq // Hkv). gate may be a view with rows further apart.
    k_pages, v_pages: [pages, P, Hkv, Dh], with the rows read already written. page_table: int32 [B, M]
    Returns [n, Hq, Dh] in q's dtype; rows without a request are undefined on the GPU.

    NumPy: float32 is within about 5e-7 of float64. A request's KV is read once, or once for every SCORES scores where
    there are more; consecutive pages are read in place, scattered ones gathered first.
    GPU: Dh 32, 64, 128 or 256. Scores, softmax and sums in float32; with bf16 the weights of the softmax are rounded to
    bf16, above and below the fraction alike. A row's bits depend on its own request alone, and while that has at most
    128 rows not on their number. The forest, page_table, rows and what is committed have to be there before the pass
    begins (after_all_previous in cuda/common.cuh). Scratch memory: SCRATCH bytes and 4 n Hq Dh, at most.
    """
    if isinstance(forest, DeviceForest):
        return launch(q, gate, k_pages, v_pages, page_table, forest, scale, rows)
    out = np.empty_like(q)
    cuts = forest.start if rows is None else np.searchsorted(rows, forest.start)
    for b, tree in enumerate(forest.trees):
        lo, hi = int(cuts[b]), int(cuts[b + 1])
        if lo == hi:
            continue
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
    out *= sigmoid(np.ascontiguousarray(gate))
    return out


class Inputs(NamedTuple):
    """What the kernel of sm_90a makes q, k and v of itself, as attention_inputs does, where each request has one row.

    kv: [n, 2 Hkv, Dh], k and v side by side, in rows as far apart as q's; the others as in attention_inputs"""

    kv: Array
    q_norm: Array
    k_norm: Array
    eps: float
    cos: Array
    sin: Array


def takes_inputs(q: Array, k_pages: Array, page_table: Array, half: int) -> bool:
    """Whether `launch` takes Inputs for q [n, Hq, Dh] and so many turned pairs."""
    (_, Hq, Dh), (P, Hkv) = q.shape, k_pages.shape[1:3]
    fits = half % 8 == 0 and Hq <= 8 * Hkv and Hq % Hkv == 0 and Dh in WIDTHS and len(page_table) <= _SINGLE
    return fits and _on_hopper(q, P)


def _on_hopper(q: Array, P: int) -> bool:
    return device.c_type(q) == "bf16" and q.shape[2] >= 64 and _box(P) > 0 and kernels.runs_here(_HOPPER)


def launch(
    q: Array,
    gate: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: DeviceForest,
    scale: float,
    rows: Array | None,
    inputs: Inputs | None = None,
) -> Array:
    """One kernel, or two. Grids depend on the sizes of arrays and on the device alone.

    inputs: q is what the product before gives, perhaps of wider rows, and k and v are written to their pages"""
    (n, Hq, Dh), (B, M), (P, Hkv) = q.shape, page_table.shape, k_pages.shape[1:3]
    act, ratio = device.c_type(q), Hq // Hkv
    if Dh not in WIDTHS or Hq % Hkv or act not in ("bf16", "float"):
        raise kernels.KernelError(
            f"tree_attention: {Hq} query heads, {Hkv} KV heads of width {Dh} in {act}; the GPU takes widths 32, 64, "
            "128 and 256, whole numbers of query heads for each KV head, bf16 and float"
        )
    out = device.empty(q.shape, q.dtype)
    if not n:
        return out
    hopper = _on_hopper(q, P)
    splits = min(_LEAVES, splits_of(P * M)) if hopper else splits_of(P * M)
    room = min(n, _SIDE_ROWS, max(1, SCRATCH // (4 * splits * Hq * Dh)))
    held = room * splits + (0 if room == n <= _TREE_ROWS else n)
    part_o, part_ml = (device.empty((held, Hq, width), np.float32) for width in (Dh, 2))

    shared = {"Hq": Hq, "rows": rows, "request": forest.request, "part_o": part_o, "part_ml": part_ml}
    end = {"gate": gate, "Ldg": gate.strides[0] // gate.dtype.itemsize}
    args = shared | {"q": q, "page_table": page_table, "Hkv": Hkv, "P": P, "B": B, "M": M, "Rq": n, "Room": room}
    args |= {name: getattr(forest, name) for name in ("ancestors", "chain", "start", "committed")}
    args |= {"Splits": splits, "scale": scale}

    def tiles(size: int) -> int:
        """Tiles of so many queries, at most."""
        return n * -(-ratio // size) if rows is not None else (n * ratio + min(B, n) * (size - 1)) // size

    if hopper:
        args |= end | {"out": out}
        each = n / min(B, n) if rows is None and inputs is None else 1
        _launch_hopper(args, k_pages, v_pages, tiles, each, inputs)
        return out

    tile = 64 if act == "bf16" and rows is None and n * ratio > 32 * min(B, n) else 16
    workers = min(splits, max(_WORKERS, _BLOCKS // (tiles(tile) * Hkv)))
    joins = act == "bf16" and tile == 16 and tiles(tile) * Hkv <= device.COUNTERS  # all in one launch
    parts = None if joins else device.empty((n, 2), np.int32)
    args |= {"k_pages": k_pages, "v_pages": v_pages, "parts": parts}
    grid = tiles(tile), Hkv, workers
    if act == "bf16":
        keys = 32 if Dh == 256 else 64
        stage = 2 * keys * (max(Dh, tile) + Dh)
        stages = 3 if tile == 16 and 2 * tile * Dh + 3 * stage <= device.shared_bytes() - 1024 else 2
        constants = {"Dh": Dh, "Rows": tile, "Stages": stages, "Act": act}
        memory = 2 * tile * Dh + stages * stage
        args |= end | {"out": out if joins else None, "arrived": device.counters(tiles(tile) * Hkv if joins else 0)}
        kernels.launch("tree_attention.cu", "tree_attention", grid, 4 * max(tile, 32), args, None, memory, constants)
    else:
        memory = 4 * (16 * (Dh + 1) + 32 * Dh + 16 * 32)
        constants = {"Dh": Dh, "Act": act}
        kernels.launch("tree_attention_float.cu", "tree_attention", grid, 128, args, None, memory, constants)
    if not joins:
        constants = {"Dh": Dh, "Act": act}
        args, blocks = shared | end | {"parts": parts, "out": out}, -(-Hq * Dh // 512)
        kernels.launch("attention_join.cu", "attention_join", (n, blocks), 128, args, constants=constants)
    return out


def _launch_hopper(
    args: dict[str, Any],
    k_pages: Array,
    v_pages: Array,
    tiles: Callable[[int], int],
    each: float,
    inputs: Inputs | None,
) -> None:
    """The one kernel of sm_90a; each: rows of a request that attend together, on average."""
    (P, Hkv, Dh), ratio = k_pages.shape[1:], args["Hq"] // args["Hkv"]
    size = next(s for s in (8, 64, 128) if each * ratio <= s or s == 128)  # queries of a tile
    processors, tile_bytes, extra = device.multiprocessors(), 128 * Dh, 2 * size * Dh + 2048 * (size == 8)
    cuts = 0 if args["rows"] is not None else min(args["B"], args["Rq"])  # a request's rows may be of two classes
    most = args["Rq"] if inputs else tiles(size) + cuts
    # half a multiprocessor's memory where blocks are more than these, and for one row, beside which other kernels begin
    half_each = size == 8 and (most == 1 or most * Hkv > processors)
    memory = (device.shared_bytes() - 1024) // 2 if half_each else device.shared_bytes()
    stages = min(8, (memory - 1280 - 28 * size - extra) // tile_bytes)
    panels = Hkv * Dh // 64  # of 64 columns; the map takes eight slots of a panel, then those of the next one
    k, v = (pages.reshape(-1, 8, panels, 64).transpose(0, 2, 1, 3) for pages in (k_pages, v_pages))
    args |= {"k": k, "v": v, "Box": _box(P), "arrived": device.counters(processors)}
    args |= {"Blocks": max(1, processors // Hkv), "Ldq": args["q"].strides[0] // 2}
    args |= dict.fromkeys((*Inputs._fields, "k_pages", "v_pages")) | {"eps": 0.0}
    if inputs:
        args |= inputs._asdict() | {"k_pages": k_pages, "v_pages": v_pages}
    half = inputs.cos.shape[1] if inputs else 0
    constants = {"Dh": Dh, "Rows": size, "Ratio": ratio, "Stages": stages, "Act": "bf16", "Half": half}
    shared, threads = extra + stages * tile_bytes, 384 if size == 128 or (size == 64 and Dh > 64) else 160
    grid = Hkv, max(args["Blocks"], most)
    kernels.launch(_HOPPER, "tree_attention", grid, threads, args, None, shared, constants)


def _box(P: int) -> int:
    """Slots of a page that TMA copies at a time, for pages of P slots; 0 where it cannot."""
    return min(P, 64) if P >= 8 and P & (P - 1) == 0 else 0


def splits_of(slots: int) -> int:
    """Into how many splits the GPU cuts a context: of 64 slots up to 2048, then 16 for every doubling."""
    last = max(slots, 1) - 1
    if last < 2048:
        return last // 64 + 1
    octave = (last // 2048).bit_length() - 1
    return 32 + 16 * octave + ((last - (2048 << octave)) >> (7 + octave)) + 1


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
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: Forest | DeviceForest,
    paths: Sequence[np.ndarray] | Paths,
) -> None:
    """Move the KV of accepted rows of all layers behind the committed tokens, in place: row i of a path to slot T + i.

    k_pages, v_pages: [layers, pages, P, Hkv, Dh]; page_table: int32 [B, M]
    paths: increasing flat rows, an array for each request; on the GPU Paths
    """
    if isinstance(paths, Paths):
        (layers, pages, P, Hkv, Dh), (B, M) = k_pages.shape, page_table.shape
        width = Hkv * Dh // (16 // k_pages.dtype.itemsize) if Hkv * Dh * k_pages.dtype.itemsize % 16 == 0 else Hkv * Dh
        args = {
            "k_pages": k_pages,
            "v_pages": v_pages,
            "page_table": page_table,
            "row": paths.row,
            "count": paths.count,
        }
        args |= {
            "start": forest.start,
            "committed": forest.committed,
            "Pages": pages,
            "Hkv": Hkv,
            "Dh": Dh,
            "P": P,
            "M": M,
        }
        grid, constants = (B, -(-width // 128), layers), {"Act": device.c_type(k_pages)}
        if B and layers:
            kernels.launch("move_kv.cu", "move_kv", grid, 128, args, constants=constants)
        return
    P = k_pages.shape[2]
    for b, path in enumerate(paths):
        source = forest.committed[b] + path - forest.start[b]
        target = forest.committed[b] + np.arange(len(path))
        read, write = ((page_table[b, slot // P], slot % P) for slot in (source, target))
        for pages in (k_pages, v_pages):
            pages[:, write[0], write[1]] = pages[:, read[0], read[1]]


def _pages(rng: np.random.Generator, forest: Forest, P: int, Hkv: int, Dh: int) -> dict[str, Any]:
    """KV of the committed tokens and of all rows on scattered pages, NaN in every other slot."""
    slots = [int(T) + len(tree) for T, tree in zip(forest.committed, forest.trees)]
    B, M = len(slots), max(1, -(-max(slots) // P))
    table = rng.permutation(B * M + 1)[: B * M].reshape(B, M).astype(np.int32)
    k_pages, v_pages = np.full((2, B * M + 1, P, Hkv, Dh), np.nan)
    for ids, n in zip(table, slots):
        page, offset = np.divmod(np.arange(n), P)
        k_pages[ids[page], offset], v_pages[ids[page], offset] = rng.standard_normal((2, n, Hkv, Dh))
    return {"k_pages": k_pages, "v_pages": v_pages, "page_table": table, "forest": forest}


def _forest(trees: list[list[int]], T: int | list[int]) -> Forest:
    return Forest.of([Tree.of([0] * len(p), p) for p in trees], [T] * len(trees) if isinstance(T, int) else T)


def _case(
    trees: list[list[int]], T: int | list[int], P: int, Hq: int, Hkv: int, Dh: int, rows: list[int] | None = None
) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        forest = _forest(trees, T)
        q, gate = rng.standard_normal((2, len(forest) if rows is None else len(rows), Hq, Dh))
        given = {} if rows is None else {"rows": np.asarray(rows, np.int32)}
        return {"q": q, "gate": gate, **_pages(rng, forest, P, Hkv, Dh), "scale": Dh**-0.5, **given}

    count = "+".join(str(len(p)) for p in trees) + ("" if rows is None else f" of which {len(rows)}")
    return Case(f"R={count} T={T} P={P} Hq={Hq} Hkv={Hkv} Dh={Dh}", build, gpu=Dh in WIDTHS)


def _move_case(trees: list[list[int]], T: int, paths: list[list[int]], P: int, Hkv: int, Dh: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        forest = _forest(trees, T)
        accepted = [start + np.asarray(path, np.int32) for start, path in zip(forest.start, paths)]
        memory = _pages(rng, forest, P, Hkv, Dh)
        both = {name: np.stack([memory[name], 2 * memory[name]]) for name in ("k_pages", "v_pages")}  # two layers
        return memory | both | {"paths": accepted}

    label = f"R={'+'.join(str(len(p)) for p in trees)} m={'+'.join(str(len(p)) for p in paths)}"
    return Case(f"{label} T={T} P={P} Hkv={Hkv} Dh={Dh}", build, ("k_pages", "v_pages"))


def _chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def _tree(n: int) -> list[int]:
    """Ragged, with parents that are not adjacent and a second root."""
    return [-1 if i in (0, 7) else max(0, i - 1 - (i * 7) % 11) for i in range(n)]


CASES = {
    "tree_attention": [
        _case([_chain(1)], 0, 1, 1, 1, 3),
        _case([_tree(11), _chain(1)], 63, 16, 3, 1, 65),
        _case([_chain(1)], 0, 1, 1, 1, 32),
        _case([_chain(2)], 15, 7, 2, 1, 64),
        _case([_tree(16), [], _tree(17)], [16, 3, 17], 7, 4, 4, 64),
        _case([_tree(64)], 63, 16, 3, 1, 128),
        _case([_tree(65), _chain(1)], 64, 64, 8, 1, 64),
        _case([_tree(128), _chain(3), _tree(9)], [1, 300, 20], 16, 10, 2, 32),
        _case([_chain(200)], 100, 16, 4, 2, 64),
        _case([_chain(513), _tree(20)], [7, 1000], 64, 4, 1, 32),
        _case([_chain(1)] * 3, [300, 255, 256], 16, 16, 2, 256),
        _case([_tree(20), _chain(30)], [40, 290], 16, 6, 2, 64, [0, 7, 13, 19, 20, 33, 49]),
        _case([_chain(1)], 4500, 64, 6, 1, 32),
        _case([_chain(1)] * 5, 1000, 64, 8, 2, 256),
        _case([_tree(64)] * 2, 1000, 64, 16, 4, 256),
        _case([_tree(16)], 5000, 64, 24, 4, 256),
        _case([_chain(257), _tree(11)], 100, 16, 8, 2, 256),
    ],
    "move_kv": [
        _move_case([_chain(1)], 0, [[0]], 1, 1, 3),
        _move_case([_tree(30), _chain(3), _tree(12)], 13, [[0, 1, 9, 29], [], [7, 10]], 16, 2, 64),
        _move_case([_tree(128), _chain(200)], 300, [[*range(1, 128, 9)], [*range(200)]], 7, 4, 256),
    ],
}
