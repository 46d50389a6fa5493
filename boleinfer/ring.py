"""Factors that GDN has committed since a checkpoint: the ring, and how it is folded into the state. Knows no op."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from boleinfer.device import Array


class Ring(NamedTuple):
    """Rows committed since the checkpoint S, per slot: a chain before every tree. Entries 0 .. length-1 are valid.

    k: [slots, C, Hk, K]; u: [slots, C, Hv, V]; g: [slots, C, Hv]; on the GPU u and g are float32. Those of all layers
       together have the layers as their first axis
    length: int [slots], shared by all layers
    """

    k: Array
    u: Array
    g: Array
    length: Array

    def filled(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of the valid k, u and g of one slot."""
        c = int(self.length[slot])
        return self.k[slot, :c], self.u[slot, :c], self.g[slot, :c]


def fold(S: np.ndarray, k: np.ndarray, u: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The state after m more tokens of known u: e^{G_m} S + sum_i e^{G_m - G_i} k_i u_i^T.

    S: [Hv, K, V]; k: [m, Hk, K]; u: [m, Hv, V]; g: [m, Hv]. Returns a new [Hv, K, V].
    """
    Hv, K, V = S.shape
    m, Hk, _ = k.shape
    gsum = np.maximum(g, -800).cumsum(0, dtype=np.float64)
    total = gsum[-1] if m else np.zeros(Hv)
    faded = u * np.exp((total - gsum).astype(u.dtype))[:, :, None]  # [m, Hv, V]
    added = k.transpose(1, 2, 0)[:, None] @ faded.transpose(1, 0, 2).reshape(Hk, Hv // Hk, m, V)
    return S * np.exp(total.astype(S.dtype))[:, None, None] + added.reshape(Hv, K, V)


def ring_after(length: int, m: int, C: int) -> int:
    """Ring length after committing m rows to a ring of capacity C that holds `length`.

    Rows are appended while they fit; else the ring is folded into the state first, and the rows themselves too
    when they are more than C.
    """
    if length + m <= C:
        return length + m
    return m if m <= C else 0
