"""Kimi Delta Attention on a forest: the gated delta rule where every key channel decays on its own. No kernel yet.

Names and conventions are those of ops/gdn.py, except that g and its sums G have an axis more, [.., Hv, K]:

    S_n = diag(e^{g_n}) S_p + k_n u_n^T,   u_n = beta_n (v_n - S_p^T diag(e^{g_n}) k_n),   o_n = S_n^T q_n

(Kimi Team 2025, "Kimi Linear"). With equal decays of all channels it is gdn. What is new: a decay no longer stands
outside a product of two rows, score(n, a) = sum_j x_nj k_aj e^{G_nj - G_aj}, and taken apart as
(x_n e^{G_n}) . (k_a e^{-G_a}) its second factor overflows. It is taken apart at a node c between a and n instead,

    score(n, a) = sum_j (x_nj e^{G_nj - G_cj}) (k_aj e^{G_cj - G_aj}),

where no exponent is positive, and where one c serves all rows above it with all rows below it in one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from boleinfer.ops import Case


def recurrent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition, token by token along one path.

    q, k: [T, Hk, K]; v: [T, Hv, V]; g: [T, Hv, K]; beta: [T, Hv]; S: [Hv, K, V].
    Returns o, u [T, Hv, V] and the state after T tokens.
    """
    q, k = (_of_value_heads(x, v.shape[1]) for x in (q, k))  # [T, Hv, K]
    o, u = np.empty_like(v), np.empty_like(v)
    for n in range(len(v)):
        S = np.exp(g[n])[:, :, None] * S
        u[n] = beta[n][:, None] * (v[n] - (k[n][:, None] @ S)[:, 0])
        S = S + k[n][:, :, None] * u[n][:, None]
        o[n] = (q[n][:, None] @ S)[:, 0]
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
    """Every node of a tree at once over [ring | tree], S read once and never written.

    With E the sum of the ring's decays, G_n from the tree's root on and all exponentials [K]:

        past(x) = S^T (e^E e^{G_n} x) + sum over ring i of (k_i . (e^{E - G_i} e^{G_n} x)) u_i
        (I + A) U = diag(beta) (V - past(k)),   A_na = beta_n score(n, a) with x = k at strict ancestors a of n
        o_n = past(q_n) + sum over ancestors a of n, n included, of score(n, a) u_a with x = q

    The end of the ring lies between each of its entries and every node, so it is their c. Shapes as in gdn.tree, but
    g [N, Hv, K] and ring_g [c, Hv, K]. Returns o, u [N, Hv, V] in v's dtype.
    """
    N, Hv = v.shape[:2]
    x = np.stack([_of_value_heads(rows, Hv).swapaxes(0, 1) for rows in (q, k)])  # [2, Hv, N, K]
    keys, ring_keys = x[1], _of_value_heads(ring_k, Hv).swapaxes(0, 1)  # [Hv, N, K], [Hv, c, K]
    G = np.einsum("na,ahk->hnk", ancestors.astype(np.float64), _clamped(g))
    left = _left_of_ring(ring_g, Hv, G.shape[-1])  # [Hv, 1+c, K]

    faded = x * np.exp(G.astype(v.dtype))
    left = np.exp(left.astype(v.dtype))
    past = (faded * left[:, :1]) @ S  # [2, Hv, N, V]
    past += (faded @ (ring_keys * left[:, 1:]).swapaxes(-1, -2)) @ ring_u.swapaxes(0, 1)
    W = scores(x, keys, G, ancestors)  # [2, Hv, N, N]
    A = W[1] * beta.T[:, :, None]
    np.einsum("hnn->hn", A)[...] = 1  # I + A
    u = np.linalg.solve(A, beta.T[:, :, None] * (v.swapaxes(0, 1) - past[1]))
    o = past[0] + W[0] @ u
    return o.swapaxes(0, 1), u.swapaxes(0, 1)


def scores(x: np.ndarray, k: np.ndarray, G: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
    """score(n, a) of every node with itself and its ancestors, 0 elsewhere: [..., Hv, N, N].

    x: [..., Hv, N, K], queries or keys of the nodes; k: [Hv, N, K]; G: float64 [Hv, N, K]; ancestors: bool [N, N]
    """
    N = len(ancestors)
    W = np.zeros((*x.shape[:-1], N), x.dtype)
    np.einsum("...nn->...n", W)[...] = (x * k).sum(-1)
    for c, below, above in between(ancestors):
        later = np.exp((G[:, below] - G[:, c, None]).astype(x.dtype))  # [Hv, below, K]
        earlier = np.exp((G[:, c, None] - G[:, above]).astype(x.dtype))
        W[..., below[:, None], above] = (x[..., below, :] * later) @ (k[:, above] * earlier).swapaxes(-1, -2)
    return W


def between(ancestors: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Nodes c, each with nodes below and nodes above it, c among both, that share out the pairs of an ancestor and its
    descendant: every pair but that of a node with itself is in exactly one c's.

    Of a part of the tree that node is taken which lies between most pairs; then come what is below it and the rest,
    between which no pair is left. A chain is halved: N nodes take N log2 N rows instead of N^2 pairs.
    """
    parts = [np.arange(len(ancestors))]
    while parts:
        part = parts.pop()
        inside = ancestors[np.ix_(part, part)]  # [n, a]
        pairs = inside.sum(0) * inside.sum(1)  # nodes below times nodes above, itself among both
        if pairs.max(initial=1) == 1:
            continue
        best = int(pairs.argmax())
        below = inside[:, best]
        yield int(part[best]), part[below], part[inside[best]]
        parts += [part[~below], part[below & (np.arange(len(part)) != best)]]


def fold(S: np.ndarray, k: np.ndarray, u: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The state after m more tokens of known u: e^{E} S + sum_i (e^{E - G_i} k_i) u_i^T, the exponentials [K].

    S: [Hv, K, V]; k: [m, Hk, K]; u: [m, Hv, V]; g: [m, Hv, K]. Returns a new [Hv, K, V].
    """
    left = np.exp(_left_of_ring(g, *S.shape[:2]).astype(S.dtype))
    keys = _of_value_heads(k, len(S)).swapaxes(0, 1) * left[:, 1:]  # [Hv, m, K]
    return S * left[:, 0, :, None] + keys.swapaxes(-1, -2) @ u.swapaxes(0, 1)


def _left_of_ring(g: np.ndarray, Hv: int, K: int) -> np.ndarray:
    """Log decays to the end of a chain, from before it and from after each of its entries: float64 [Hv, 1+c, K]."""
    after = np.zeros((len(g) + 1, Hv, K))
    after[:-1] = _clamped(g)[::-1].cumsum(0)[::-1]
    return after.swapaxes(0, 1)


def _clamped(g: np.ndarray) -> np.ndarray:
    """In float64, no less than -800, whose exponential is 0: sums never meet inf - inf."""
    return np.maximum(g, -800, dtype=np.float64)


def _of_value_heads(x: np.ndarray, Hv: int) -> np.ndarray:
    """[.., Hk, K] -> [.., Hv, K], each key head for its value heads."""
    return np.repeat(x, Hv // x.shape[1], axis=1)


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _rows(rng: np.random.Generator, T: int, Hk: int, Hv: int, K: int, V: int) -> dict[str, Any]:
    """q, k, v, g and beta of T rows; decays from none to a full reset side by side in one key."""
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, T, Hk, K)))
    g = -np.exp(rng.uniform(-8, 5, (T, Hv, K)))
    return {"q": q * K**-0.5, "k": k, "v": rng.standard_normal((T, Hv, V)), "g": g, "beta": rng.uniform(0, 1, (T, Hv))}


def _path_case(T: int, Hk: int, Hv: int, K: int, V: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        return {**_rows(rng, T, Hk, Hv, K, V), "S": rng.standard_normal((Hv, K, V))}

    return Case(f"T={T} Hk={Hk} Hv={Hv} K={K} V={V}", build, gpu=False)


def _tree_case(N: int, c: int, Hk: int, Hv: int, K: int, V: int) -> Case:
    """A random tree of N nodes behind a ring of c entries."""

    def build(rng: np.random.Generator) -> dict[str, Any]:
        ancestors = np.eye(N, dtype=bool)
        for n in range(1, N):
            ancestors[n] |= ancestors[rng.integers(n)]
        past = _rows(rng, c, Hk, Hv, K, V)
        ring = {f"ring_{name}": past[other] for name, other in (("k", "k"), ("u", "v"), ("g", "g"))}
        return {**_rows(rng, N, Hk, Hv, K, V), "S": rng.standard_normal((Hv, K, V)), **ring, "ancestors": ancestors}

    return Case(f"N={N} ring={c} Hk={Hk} Hv={Hv} K={K} V={V}", build, gpu=False)


CASES = {
    "recurrent": [_path_case(*s) for s in [(1, 1, 1, 3, 5), (3, 1, 3, 7, 5), (65, 2, 4, 128, 128)]],
    "tree": [
        _tree_case(*s) for s in [(1, 0, 1, 1, 3, 5), (3, 1, 1, 3, 7, 5), (63, 5, 2, 4, 16, 8), (65, 32, 2, 2, 128, 128)]
    ],
}
