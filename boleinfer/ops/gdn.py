"""Gated delta rule on a forest: the recurrence, its chunk and tree forms.

Knows no other op and no model. In every function below
* `g` is the natural-log decay (<= 0, -inf allowed: a full reset), G its sum along the root path;
* the state S is [Hv, K, V], keys first; value head h reads key head h // (Hv // Hk);
* q is already L2-normalised and scaled by K**-0.5, k already L2-normalised;
* u is what a token adds to the state: S_n = e^{g_n} S_p + k_n u_n^T for a token n after p.

    u_n = beta_n (v_n - e^{g_n} S_p^T k_n),   o_n = S_n^T q_n

(Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"). Sums of g are taken in float64, with g clamped at -800, whose
exponential is already 0: differences of sums then never meet inf - inf and stay exact to 1e-11. Only exponents <= 0
are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import TREE_ROWS, DeviceForest
from boleinfer.forest import Forest, Tree
from boleinfer.kernels import KernelError
from boleinfer.ops import Case
from boleinfer.ring import Ring, fold

CHUNK = 64  # rows of a long chain taken at once
BLOCK = 16  # rows of the triangular system inverted at once


def recurrent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition, token by token along one path.

    q, k: [T, Hk, K]; v: [T, Hv, V]; g, beta: [T, Hv]; S: [Hv, K, V].
    Returns o, u [T, Hv, V] and the state after T tokens.
    """
    ratio = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, ratio, axis=1), np.repeat(k, ratio, axis=1)  # [T, Hv, K]
    o, u = np.empty_like(v), np.empty_like(v)
    for n in range(len(v)):
        S = np.exp(g[n])[:, None, None] * S
        u[n] = beta[n][:, None] * (v[n] - (k[n][:, None] @ S)[:, 0])
        S = S + k[n][:, :, None] * u[n][:, None]
        o[n] = (q[n][:, None] @ S)[:, 0]
    return o, u, S


def chunked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    S: np.ndarray,
    chunk: int = CHUNK,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`recurrent` for long paths: closed form inside a chunk, the state from chunk to chunk. Shapes as there."""
    o, u = np.empty_like(v), np.empty_like(v)
    causal = np.tri(min(chunk, len(v)), dtype=bool)
    for first in range(0, len(v), chunk):
        n = slice(first, first + chunk)
        N = len(v[n])
        o[n], u[n] = tree(q[n], k[n], v[n], g[n], beta[n], S, k[:0], u[:0], g[:0], causal[:N, :N])
        S = fold(S, k[n], u[n], g[n])
    return o, u, S


def tree(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    S: np.ndarray,
    ring_k: np.ndarray,
    ring_u: np.ndarray,
    ring_g: np.ndarray,
    ancestors: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Every node of a tree at once, S read once and never written. Closed form after Bole (arXiv 2608.01651).

        past(x) = e^{G_n} S^T x + sum over ring i of e^{G_n - G_i} (k_i . x) u_i
        (I + A) U = diag(beta) (V - past(k)),   A_na = beta_n e^{G_n - G_a} (k_a . k_n) at strict ancestors a of n
        o_n = past(q_n) + sum over ancestors a of n, n included, of e^{G_n - G_a} (k_a . q_n) u_a

    q, k: [N, Hk, K]; v: [N, Hv, V]; g, beta: [N, Hv]; S: [Hv, K, V], the state before the ring
    ring_k: [c, Hk, K]; ring_u: [c, Hv, V]; ring_g: [c, Hv], filled entries only, oldest first
    ancestors: bool [N, N], entry [n, a] True when a is n or an ancestor of n
    Returns o, u [N, Hv, V] (views of head-major arrays) in v's dtype; float32 is within about 2e-7 of float64.
    """
    (N, Hk, K), (Hv, V), c = k.shape, v.shape[1:], len(ring_k)
    r = Hv // Hk
    qk = np.concatenate((q, k)).transpose(1, 0, 2)  # [Hk, 2N, K]
    G, decay = _decays(g, ring_g, ancestors, v.dtype)  # [Hv, N], [Hv, N, c+N]

    past = qk[:, None] @ S.reshape(Hk, r, K, V)  # [Hk, r, 2N, V]
    past = past.reshape(Hv, 2, N, V)
    past *= G[:, None, :, None]
    keys = np.concatenate((ring_k, k)) if c else k  # [c+N, Hk, K]
    scores = (qk @ keys.transpose(1, 2, 0)).reshape(Hk, 1, 2, N, c + N)
    weights = (scores * decay.reshape(Hk, r, 1, N, c + N)).reshape(Hv, 2, N, c + N)
    if c:
        past += weights[..., :c] @ ring_u.transpose(1, 0, 2)[:, None]

    beta = beta.T[:, :, None]  # [Hv, N, 1]
    u = v.transpose(1, 0, 2) - past[:, 1]  # [Hv, N, V]
    u *= beta
    if N > 1:
        u = _solve(weights[:, 1, :, c:] * beta, u)
    o = past[:, 0] + weights[:, 0, :, c:] @ u
    return o.transpose(1, 0, 2), u.transpose(1, 0, 2)


def _solve(A: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(I + strict lower part of A)^-1 y, y [Hv, N, V], by blockwise substitution; A [Hv, N, N] is overwritten.

    A block's own inverse is safe to form: its entry [n, a] is what y_a leaves in u_n after the tokens between have
    each taken their part of it away, so it is never larger than beta_n.
    """
    N, u = A.shape[1], np.empty_like(y)
    np.einsum("hnn->hn", A)[...] = 1
    for first in range(0, N, BLOCK):
        n = slice(first, first + BLOCK)
        rest = y[:, n] - A[:, n, :first] @ u[:, :first] if first else y[:, n]
        u[:, n] = np.linalg.inv(A[:, n, n]) @ rest
    return u


def _decays(g: np.ndarray, ring_g: np.ndarray, ancestors: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """e^{G_n} [Hv, N] and e^{G_n - G_i} [Hv, N, c+N] over ring entries and nodes i; 0 where i is no ancestor of n."""
    c = len(ring_g)
    gsum = np.maximum(g.T, -800, dtype=np.float64) @ ancestors.T  # [Hv, N]
    columns = gsum
    if c:
        ring_gsum = np.maximum(ring_g.T, -800, dtype=np.float64).cumsum(1)
        gsum = gsum + ring_gsum[:, -1:]
        columns = np.concatenate((ring_gsum, gsum), axis=1)
    exponent = gsum[:, :, None] - columns[:, None]  # [Hv, N, c+N]
    np.copyto(exponent[:, :, c:], -np.inf, where=~ancestors)
    return np.exp(gsum.astype(dtype)), np.exp(exponent.astype(dtype))


def gdn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    S: Array,
    ring: Ring,
    slot: Array,
    forest: Forest | DeviceForest,
) -> tuple[Array, Array]:
    """Outputs o and factors u [R, Hv, V] of all rows of a forest; neither S nor the ring is written.

    q, k: [R, Hk, K]; v: [R, Hv, V]; g, beta: [R, Hv]; S: [slots, Hv, K, V]; slot: int [B].
    A chain longer than CHUNK runs in chunks from the folded state, anything else in closed form over [ring | tree].
    On the GPU q, k, v and o are of one type, all else float32, and what o and u say of unused rows is undefined.
    """
    if isinstance(forest, DeviceForest):
        return _launch(q, k, v, g, beta, S, ring, slot, forest)
    o, u = np.empty_like(v), np.empty_like(v)
    for b, nodes in enumerate(forest.trees):
        rows, s = forest.rows(b), slot[b]
        past = ring.filled(s, forest.committed[b])
        args = (q[rows], k[rows], v[rows], g[rows], beta[rows])
        if nodes.is_chain and len(nodes) > CHUNK:
            o[rows], u[rows], _ = chunked(*args, fold(S[s], *past))
        elif len(nodes):
            o[rows], u[rows] = tree(*args, S[s], *past, nodes.ancestors)
    return o, u


# ---- the GPU ---------------------------------------------------------------------------------------------------------

WIDTHS = 16, 32, 64, 128  # of K and V that the kernels are for
# Where requests have so many rows at most: columns of V and warps of a block, blocks of a multiprocessor, slices of the
# state that a block has room for. The first kind of which the device holds all blocks at once, or the last one, is it.
SMALL = {
    16: ((64, 16, 1, 8), (128, 16, 1, 8), (128, 8, 3, 5), (128, 8, 4, 2)),
    32: ((64, 16, 1, 8), (128, 16, 1, 8), (128, 8, 2, 4), (128, 8, 3, 3)),
    64: ((64, 16, 1, 8), (128, 16, 1, 8), (128, 8, 2, 2)),
}
SMALL_RING = 32
WARPS = {128: 12, 64: 8, 32: 8, 16: 8}  # of a block, by its columns of V
FEW_WARPS = 6  # of narrow blocks with few rows: two fit on a multiprocessor, so that the next launch's can begin early
PANELS = 64, 16  # how many columns before a window's own a block takes at once: as many as there is room for


def _tiles(k: Array, S: Array, ring: Ring, B: int) -> tuple[dict[str, Any], int, int]:
    """Constants, grid and block: the widest blocks that fit and do not leave columns of V to half of the device alone.

    Blocks stay, one a multiprocessor, and take one head's columns after another."""
    (Hv, K, V), C = S.shape[1:], ring.k.shape[1]
    if K not in WIDTHS or V not in WIDTHS or C > CHUNK:
        raise KernelError(f"gdn: K={K}, V={V}, a ring of {C}; the GPU takes K, V in {WIDTHS} and rings up to {CHUNK}")
    blocks, widest = device.multiprocessors(), min(32, V)
    while widest < V and B * Hv * V // widest > blocks:
        widest *= 2
    few = widest <= 32 and len(k) <= 16 * B
    for panel in PANELS[few:]:
        for width in (width for width in reversed(WIDTHS) if width <= widest):
            warps = FEW_WARPS if few else WARPS[width]
            constants = {"Act": device.c_type(k), "K": K, "V": V, "Vt": width, "Warps": warps, "Panel": panel}
            if _shared(constants, C) <= device.shared_bytes():
                return constants, min(B * Hv * V // width, blocks), 32 * warps
    need = _shared(constants, C)
    raise KernelError(f"gdn: K={K}, V={V} and a ring of {C} need {need} bytes of shared memory; use a shorter ring")


def _shared(constants: dict[str, Any], C: int) -> int:
    """Bytes of dynamic shared memory: Memory in gdn_window.cuh, whose end one_row in gdn_row.cuh uses as well."""
    K, Vt, panel, act = (constants[name] for name in ("K", "Vt", "Panel", "Act"))
    item, key_parts, parts, rows, buffers = (2, 1, 2, 32, 2) if act == "bf16" else (4, 3, 3, 16, 1)
    keys = 2 * key_parts * (4 * rows + buffers * panel) * (K + 8)
    steps = 8 * 4 * rows + 16 * rows + 2 * 8 * (CHUNK + TREE_ROWS) + 16 + 4 * 96 + 4 * 16
    weights = 8 * parts * rows * (panel + rows + 8) + rows // 16 * 2 * 6 * 16 * 16
    threads = min(4 * Vt, 1 << (32 * constants["Warps"]).bit_length() - 1)
    row = 4 * (Vt * threads // 16 + 3 * CHUNK + 4) + C * (K * item + 4 * Vt)
    return 4 * K * Vt + keys + steps + max(weights, row)


def small_rows(k: Array, S: Array, ring: Ring, most: int | None) -> int:
    """Rows of a request that a launch of gdn_small.cu is made for which takes these; 0: there is none.

    most: rows of a request, at most, where it is known"""
    (K, V), R = S.shape[2:], len(k)
    if k.itemsize != 2 or K != V or K not in WIDTHS or ring.k.shape[1] > SMALL_RING:
        return 0
    rows = next((rows for rows in SMALL if min(R, most or R) <= rows), 0)
    return rows if rows and max(small_bytes(K, rows, *kind) for kind in SMALL[rows]) <= device.shared_bytes() else 0


def small_bytes(K: int, rows: int, columns: int, warps: int, blocks: int, held: int, front: int = 0) -> int:
    """Bytes of Small in cuda/gdn_small.cuh for a kind of block; front: of what comes before W and T."""
    window, windows, columns = min(32, rows), -(-rows // 32), min(columns, K)
    wide, narrow = SMALL_RING + rows + 8, SMALL_RING + window + 8  # of W, of the last window and of one before it
    weights = 8 * window * (wide + (windows - 1) * narrow) + rows // 16 * 6 * 16 * 16
    row = 4 * (columns * min(4 * columns, 1 << (32 * warps).bit_length() - 1) // 16 + 3 * CHUNK + 4)
    keys = 2 * (K + 8) * (2 * rows + SMALL_RING)
    fixed = 4 * 16 * min(held, K // 16) * columns + keys + max(weights, row, front)
    return fixed + 8 * (CHUNK + rows + 1) + 4 * rows * (1 + windows) + 8 + 16


def _launch(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, ring: Ring, slot: Array, forest: DeviceForest
) -> tuple[Array, Array]:
    (R, Hk, K), Hv, C, B = k.shape, v.shape[1], ring.k.shape[1], len(forest.chain)
    o, u = device.empty(v.shape, v.dtype), device.empty(v.shape, np.float32)
    args = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "S": S, "slot": slot, "o": o, "u": u, "Hk": Hk, "Hv": Hv}
    args |= {"ring_k": ring.k, "ring_u": ring.u, "ring_g": ring.g, "C": C}
    args |= {name: getattr(forest, name) for name in ("start", "committed", "chain", "parent", "request", "ancestors")}
    grid: int | tuple[int, int, int]
    if rows := small_rows(k, S, ring, forest.most):
        heads = B * Hv / device.multiprocessors()
        kind = next((kind for kind in SMALL[rows] if heads * -(-K // kind[0]) <= kind[2]), SMALL[rows][-1])
        columns, warps, blocks, held = min(kind[0], K), *kind[1:]
        constants: dict[str, Any] = {"Act": "bf16", "K": K, "V": K, "Vt": columns, "Rows": rows, "Ring": SMALL_RING}
        constants |= {"Warps": warps, "Blocks": blocks, "Held": min(held, K // 16)}
        file, name, grid, block = "gdn_small.cu", "gdn_small", (Hv // Hk * (K // columns), Hk, B), 32 * warps
        shared = small_bytes(K, rows, *kind)
    else:
        file, name = "gdn.cu", "gdn"
        constants, grid, block = _tiles(k, S, ring, B)
        shared, args["B"] = _shared(constants, C), B
    if R and B:
        kernels.launch(file, name, grid, block, args, shared=shared, constants=constants)
    return o, u


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _rows(rng: np.random.Generator, T: int, Hk: int, Hv: int, K: int, V: int, hard: bool = False) -> dict[str, Any]:
    """q, k, v, g and beta of T rows; hard: keys that nearly coincide, beta near 1, decays from none to a full reset."""
    q, k = rng.standard_normal((2, T, Hk, K))
    g, beta = -np.exp(rng.uniform(-8, 3, (T, Hv))), rng.uniform(0, 1, (T, Hv))
    if hard:
        k, beta = k[:1] + 1e-2 * k, 1 - beta / 100
        g = rng.choice([0, -1e-6, -0.1, -6, -88, -1e4, -np.inf], (T, Hv), p=[0.4, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05])
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return {"q": q * K**-0.5, "k": k, "v": rng.standard_normal((T, Hv, V)), "g": g, "beta": beta}


def _path_case(T: int, Hk: int, Hv: int, K: int, V: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        return {**_rows(rng, T, Hk, Hv, K, V), "S": rng.standard_normal((Hv, K, V))}

    return Case(f"T={T} Hk={Hk} Hv={Hv} K={K} V={V}", build, gpu=False)


def _forest_case(trees: list[list[int]], C: int, *sizes: int, hard: bool = False) -> Case:
    """A batch for gdn.

    sizes: Hk, Hv, K, V. Slot s holds -s % C ring entries; all that nobody owns or has written is NaN.
    """
    Hk, Hv, K, V = sizes

    def build(rng: np.random.Generator) -> dict[str, Any]:
        slots = len(trees) + 1
        slot, length = np.arange(slots - 1, 0, -1), -np.arange(slots) % C
        forest = Forest.of([Tree.of([0] * len(p), p) for p in trees], C * slots - slot)
        rows, past = (_rows(rng, T, Hk, Hv, K, V, hard) for T in (len(forest), slots * C))
        k, u, g = (past[name].reshape(slots, C, *past[name].shape[1:]) for name in "kvg")
        for array in (k, u, g):
            array[np.arange(C) >= length[:, None]] = np.nan
        S = rng.standard_normal((slots, Hv, K, V))
        S[0] = np.nan
        return rows | {"S": S, "ring": Ring(k, u, g), "slot": slot, "forest": forest}

    label = f"R={'+'.join(str(len(p)) for p in trees)} C={C} Hk={Hk} Hv={Hv} K={K} V={V}" + " hard" * hard
    wide = ("u", "g", "beta", "S", "ring.u", "ring.g")
    return Case(label, build, bound_bf16=4e-3, wide=wide, gpu=K in WIDTHS and V in WIDTHS)


def _chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def _binary(n: int) -> list[int]:
    return [(i - 1) // 2 if i else -1 for i in range(n)]


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
_PATHS = [(1, 1, 1, 3, 5), (3, 1, 3, 7, 5), (65, 2, 4, 128, 128), (256, 16, 32, 128, 128)]
CASES = {
    "recurrent": [_path_case(*sizes) for sizes in _PATHS],
    "chunked": [_path_case(*sizes) for sizes in _PATHS],
    "gdn": [
        _forest_case([[-1]], 1, 1, 1, 3, 5),
        _forest_case([_RAGGED, [-1], _chain(129)], 5, 1, 3, 7, 5),
        _forest_case([[-1]], 1, 1, 1, 16, 16),
        _forest_case([_RAGGED, [-1], _chain(129)], 5, 1, 3, 16, 32),
        _forest_case([_binary(n) for n in (2, 16, 17, 64, 65, 128)], 7, 2, 4, 32, 16),
        _forest_case([_chain(n) for n in (63, 64, 65, 129, 300)], 64, 1, 4, 16, 16),
        _forest_case([[-1]] * 8, 7, 1, 2, 64, 64),
        _forest_case([_binary(40), _chain(130), _RAGGED], 16, 1, 3, 32, 32, hard=True),
        _forest_case([_RAGGED, [-1]], 32, 2, 4, 128, 128),
        _forest_case([[-1]] * 4, 16, 16, 32, 128, 128),
        _forest_case([_binary(64)], 32, 16, 16, 128, 128),
        _forest_case([_chain(130), _RAGGED, _binary(128)], 32, 16, 48, 128, 128),
        _forest_case([_binary(128), _chain(300)], 64, 16, 64, 128, 128, hard=True),
    ],
}
