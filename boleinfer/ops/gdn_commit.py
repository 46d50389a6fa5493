"""How accepted rows become part of what the GDN layers remember: windows, rings, checkpoints. Knows no other op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.declaration import MOST_EACH
from boleinfer.device import Array
from boleinfer.device_forest import Paths
from boleinfer.forest import Forest, Tree
from boleinfer.kernels import KernelError
from boleinfer.ops import Case
from boleinfer.ring import Ring, fold


def commit(
    window: Array,
    S: Array,
    ring: Ring,
    x: Sequence[Array],
    k: Sequence[Array],
    u: Sequence[Array],
    g: Sequence[Array],
    slot: Array,
    forest: Any,
    paths: Sequence[np.ndarray] | Paths,
) -> None:
    """Commit the accepted rows of each request in all GDN layers, in place, at `slot` only.

    window: [layers, slots, W, Cc]; S: [layers, slots, Hv, K, V]; ring: its k, u and g [layers, slots, C, ...]
    x, k, u, g: of each layer [R, Cc] (rows of a wider matrix), [R, Hk, K], [R, Hv, V] and [R, Hv]. On the GPU of no
        layer where a request has one row at most, which lies in window and ring already (gdn_core)
    slot: int [B]; forest: Forest or DeviceForest
    paths: B arrays of flat rows from a root downwards, possibly empty (Paths on the GPU)
    """
    if isinstance(paths, Paths):
        return _launch(window, S, ring, x, k, u, g, slot, forest, paths)
    for layer in range(len(S)):
        of_layer = Ring(ring.k[layer], ring.u[layer], ring.g[layer])
        commit_window(x[layer], window[layer], slot, forest.committed, paths)
        commit_factors(S[layer], of_layer, k[layer], u[layer], g[layer], slot, forest.committed, paths)


def commit_window(
    x: np.ndarray, window: np.ndarray, slot: np.ndarray, committed: np.ndarray, paths: Sequence[np.ndarray]
) -> None:
    """Keep, in place, the last inputs of each request: that of position p at place p % W.

    x:         [R, Cc], the inputs before the convolution
    window:    [slots, W, Cc], written at `slot` only
    committed: int [B], the tokens before the paths, which are the position of their first rows
    slot, paths: as in `commit`; an empty path changes nothing
    """
    W = window.shape[1]
    for s, T, path in zip(slot, committed, paths):
        position = T + np.arange(len(path))[-W:]
        window[s, position % W] = x[path[-W:]]


def commit_factors(
    S: np.ndarray,
    ring: Ring,
    k: np.ndarray,
    u: np.ndarray,
    g: np.ndarray,
    slot: np.ndarray,
    committed: np.ndarray,
    paths: Sequence[np.ndarray],
) -> None:
    """Commit accepted rows to the ring of one layer, in place, and to its checkpoint where they reach a multiple of C.

    S: [slots, Hv, K, V] and the ring are written at `slot` only
    k: [R, Hk, K]; u: [R, Hv, V]; g: [R, Hv]; slot, committed, paths: as in `commit_window`
    """
    C = ring.k.shape[1]
    for s, T, path in zip(slot, committed, paths):
        after = T % C + len(path)
        end = after % C  # of the ring
        kept = min(len(path), end)
        if after >= C:
            S[s] = fold(S[s], *ring.filled(s, T))
            folded = path[: len(path) - kept]
            S[s] = fold(S[s], k[folded], u[folded], g[folded])
        here, last = slice(end - kept, end), path[len(path) - kept :]
        ring.k[s, here], ring.u[s, here], ring.g[s, here] = k[last], u[last], g[last]


# ---- the GPU ---------------------------------------------------------------------------------------------------------

WIDTHS = 16, 32, 64, 128  # of K and V that the kernels are for
_FOLDING = 12  # warps that fold, on a multiprocessor
APPENDING = 128  # threads that share a row of what is appended, 16 bytes each


def _launch(
    window: Array,
    S: Array,
    ring: Ring,
    x: Sequence[Array],
    k: Sequence[Array],
    u: Sequence[Array],
    g: Sequence[Array],
    slot: Array,
    forest: Any,
    paths: Paths,
) -> None:
    """Folds first; then nothing reads what the second kernel writes."""
    (layers, slots, Hv, K, V), (Hk, C), (B,) = S.shape, (ring.k.shape[3], ring.k.shape[2]), slot.shape
    if K not in WIDTHS or V not in WIDTHS:
        raise KernelError(f"gdn: K={K}, V={V}; the GPU takes K, V in {WIDTHS}")
    if not layers or not B or not len(paths.row):
        return
    act, width, in_place = device.c_type(ring.k), min(V, 64), not x
    shared = {"slot": slot, "start": forest.start, "committed": forest.committed, **paths._asdict()}
    shared |= {"Slots": slots, "Hk": Hk, "Hv": Hv, "C": C}
    slices, warps = V // width * Hv, max(1, width // 32) * (1 if K < 64 else 2)
    of_fold = {"Act": act, "K": K, "V": V, "Vt": width, "Warps": warps}
    pieces = [slice(first, min(first + MOST_EACH, layers)) for first in range(0, layers, MOST_EACH)]
    for piece in pieces:
        n = piece.stop - piece.start
        args = shared | _of_layers(piece, ring, *((None,) * 3 if in_place else (k, u, g)))
        args |= {"S": S[piece], "B": B, "Layers": n}
        blocks = min(slices * n * B, _FOLDING // warps * device.multiprocessors())
        kernels.launch("gdn_fold.cu", "gdn_fold", blocks, 32 * warps, args, constants=of_fold)
    if in_place:
        return
    Cc, half = window.shape[3], 16 // ring.k.itemsize
    at_once = half * APPENDING, 4 * APPENDING, half * APPENDING, APPENDING
    grid = sum(-(-width // n) for width, n in zip((Cc, Hv * V, Hk * K, Hv), at_once))
    of_append = {"W": window.shape[2], "Act": act}
    for piece in pieces:
        args = shared | _of_layers(piece, ring, k, u, g)
        args |= {"x": list(x[piece]), "window": window[piece], "Pitch": x[0].strides[0] // (8 * x[0].itemsize)}
        args |= {"Packs": Cc // 8, "K": K, "V": V}
        kernels.launch("gdn_append.cu", "gdn_append", (grid, B, len(k[piece])), APPENDING, args, constants=of_append)


def _of_layers(
    piece: slice, ring: Ring, k: Sequence[Array] | None, u: Sequence[Array] | None, g: Sequence[Array] | None
) -> dict[str, Any]:
    """Arguments of both kernels, of some layers."""
    rows = {name: None if of is None else list(of[piece]) for name, of in (("k", k), ("u", u), ("g", g))}
    return rows | {f"ring_{name}": array[piece] for name, array in ring._asdict().items()}


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _rows(rng: np.random.Generator, n: int, Hk: int, Hv: int, K: int, V: int, hard: bool) -> list[np.ndarray]:
    """k, u and g of n rows; hard: decays from none to a full reset."""
    k, u = rng.standard_normal((n, Hk, K)), rng.standard_normal((n, Hv, V))
    g = -np.exp(rng.uniform(-8, 3, (n, Hv)))
    if hard:
        g = rng.choice([0, -1e-6, -0.1, -6, -88, -1e4, -np.inf], (n, Hv), p=[0.4, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05])
    return [k / np.linalg.norm(k, axis=-1, keepdims=True), u, g]


def _case(
    trees: list[list[int]], layers: int, C: int, W: int, Hk: int, Hv: int, K: int, V: int, hard: bool = False
) -> Case:
    """The path to the last node of each tree, of every fifth tree none.

    Slot s holds -s % C ring entries; all that nobody owns or has written is NaN.
    """

    def build(rng: np.random.Generator) -> dict[str, Any]:
        slots, Cc, R = len(trees) + 1, 2 * Hk * K + Hv * V, sum(map(len, trees))
        slot, length = np.arange(slots - 1, 0, -1), -np.arange(slots) % C
        forest = Forest.of([Tree.of([0] * len(p), p) for p in trees], C * slots - slot)
        past = _rows(rng, layers * slots * C, Hk, Hv, K, V, hard)
        ring_k, ring_u, ring_g = (a.reshape(layers, slots, C, *a.shape[1:]) for a in past)
        for array in (ring_k, ring_u, ring_g):
            array[:, np.arange(C) >= length[:, None]] = np.nan
        S, window = rng.standard_normal((layers, slots, Hv, K, V)), rng.standard_normal((layers, slots, W, Cc))
        S[:, 0], window[:, 0] = np.nan, np.nan
        k, u, g = map(list, zip(*(_rows(rng, R, Hk, Hv, K, V, hard) for _ in range(layers))))
        nodes = [t.path(len(t) - 1)[: len(t) * (b % 5 < 4)] for b, t in enumerate(forest.trees)]
        return {
            "window": window,
            "S": S,
            "ring": Ring(ring_k, ring_u, ring_g),
            "x": list(rng.standard_normal((layers, R, Cc))),
            "k": k,
            "u": u,
            "g": g,
            "slot": slot,
            "forest": forest,
            "paths": [path + start for path, start in zip(nodes, forest.start)],
        }

    label = f"R={'+'.join(str(len(p)) for p in trees)} layers={layers} C={C} W={W} Hk={Hk} Hv={Hv} K={K} V={V}"
    wide = ("S", "ring.u", "ring.g", *(f"{name}.{layer}" for name in "ug" for layer in range(layers)))
    supported = K in WIDTHS and V in WIDTHS
    return Case(label + " hard" * hard, build, ("window", "S", "ring"), bound_bf16=2e-6, wide=wide, gpu=supported)


def _chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def _binary(n: int) -> list[int]:
    return [(i - 1) // 2 if i else -1 for i in range(n)]


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
CASES = {
    "commit": [
        _case([_RAGGED, [-1], _chain(129)], 2, 5, 4, 1, 3, 7, 5),
        _case([[-1]], 3, 1, 2, 1, 1, 16, 16),
        _case([_chain(3)] * 7 + [_chain(130), _RAGGED, _chain(8)], 2, 7, 4, 2, 4, 32, 16),
        _case([_chain(n) for n in (64, 65, 63, 1, 300)], 1, 64, 8, 1, 4, 16, 16),
        _case([_chain(200), _RAGGED, _chain(17)], 2, 16, 3, 1, 3, 32, 32, hard=True),
        _case([_binary(64), _chain(2)], 1, 32, 4, 2, 4, 64, 128),
        _case([[-1], [-1], [-1]], 98, 2, 4, 1, 1, 16, 16),
        _case([[-1]] * 4, 3, 32, 4, 16, 32, 128, 128),
        _case([_chain(1000), _binary(100)], 2, 32, 4, 16, 32, 128, 128),
    ],
}
