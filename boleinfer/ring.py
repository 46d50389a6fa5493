"""Factors that GDN has committed since a checkpoint: the ring, and how it is folded into the state. Knows no op.

What a request's checkpoint and ring of C entries hold follows from how many of its tokens are committed, T: the
checkpoint all before the last multiple of C, the ring the T % C tokens behind it, that of position p at entry p % C.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from boleinfer.device import Array


class Ring(NamedTuple):
    """Rows committed since the checkpoint S, per slot: a chain before every tree. The entries behind it are scratch.

    k: [slots, C, Hk, K]; u: [slots, C, Hv, V]; g: [slots, C, Hv]; on the GPU u and g are float32. Those of all layers
       together have the layers as their first axis
    """

    k: Array
    u: Array
    g: Array

    def filled(self, slot: int, committed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of the k, u and g of one slot that are valid when so many tokens are committed."""
        c = committed % self.k.shape[1]
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
