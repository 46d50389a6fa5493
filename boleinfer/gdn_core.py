"""What a gated DeltaNet layer does between its projections: three ops, or for few rows a request a single launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, gdn_few, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.forest import Forest
from boleinfer.kernels import KernelError
from boleinfer.ops.gdn import CHUNK, WIDTHS, gdn
from boleinfer.ops.gdn_inputs import Sizes, gdn_inputs
from boleinfer.ops.norms import gated_rms_norm
from boleinfer.ring import Ring


def gdn_core(
    qkvz: Array,
    ba: Array,
    taps: Array,
    A_log: Array,
    dt_bias: Array,
    norm: Array,
    eps: float,
    window: Array,
    S: Array,
    ring: Ring,
    slot: Array,
    forest: Forest | DeviceForest,
    sizes: Sizes,
) -> tuple[Array, tuple[Array, Array, Array] | None]:
    """The gated output y [R, Hv, V] of all rows, and their factors k [R, Hk, K], u [R, Hv, V] and g [R, Hv].

    norm: [V], the gain of the gated norm; all else as in gdn_inputs and gdn. What is committed is not written.
    On the GPU a forest of `single` rows, or of few rows a request, is one launch, with the bits of the three. Single
    rows leave factors and inputs where they belong once they are committed, in ring and window: None is returned."""
    if isinstance(forest, DeviceForest):
        few = not forest.single and gdn_few.takes(qkvz, taps, ring, forest, sizes)
        if forest.single or few:
            return _launch(few, qkvz, ba, taps, A_log, dt_bias, norm, eps, window, S, ring, slot, forest, sizes)
    Hk, K, Hv, V = sizes
    z = qkvz[:, 2 * Hk * K + Hv * V :].reshape(-1, Hv, V)
    q, k, v, g, beta = gdn_inputs(qkvz, ba, taps, A_log, dt_bias, window, slot, forest, sizes)
    o, u = gdn(q, k, v, g, beta, S, ring, slot, forest)
    return gated_rms_norm(o, z, norm, eps), (k, u, g)


# ---- the GPU ---------------------------------------------------------------------------------------------------------

FEW, MANY = "gdn_token.cu", "gdn_tokens.cu"  # heads: as many as fit at once, or more
BLOCKS = 2  # of a multiprocessor


def _launch(
    few: bool,
    qkvz: Array,
    ba: Array,
    taps: Array,
    A_log: Array,
    dt_bias: Array,
    norm: Array,
    eps: float,
    window: Array,
    S: Array,
    ring: Ring,
    slot: Array,
    forest: DeviceForest,
    sizes: Sizes,
) -> tuple[Array, tuple[Array, Array, Array] | None]:
    """few: by gdn_few; else each request has one row at most."""
    (Hk, K, Hv, V), R, B, C = sizes, len(qkvz), len(slot), ring.k.shape[1]
    if K not in WIDTHS or V not in WIDTHS or C > CHUNK:
        raise KernelError(f"gdn: K={K}, V={V}, a ring of {C}; the GPU takes K, V in {WIDTHS} and rings up to {CHUNK}")
    y = device.empty((R, Hv, V), qkvz.dtype)
    args = {"qkvz": qkvz, "ba": ba, "taps": taps, "A_log": A_log, "dt_bias": dt_bias, "norm": norm, "window": window}
    args |= {"S": S, "ring_k": ring.k, "ring_u": ring.u, "ring_g": ring.g, "slot": slot, "eps": eps}
    args |= {"start": forest.start, "committed": forest.committed, "y": y, "Hk": Hk, "Hv": Hv, "C": C, "B": B}
    if few:
        k, u = device.empty((R, Hk, K), qkvz.dtype), device.empty((R, Hv, V), np.float32)
        g = device.empty((R, Hv), np.float32)
        gdn_few.launch(args | {"k": k, "u": u, "g": g}, forest, sizes)
        return y, (k, u, g)
    if R and B:
        _launch_single(args, taps.shape[1], sizes)
    return y, None


def _launch_single(args: dict[str, Any], W: int, sizes: Sizes) -> None:
    """For requests with one row at most, whose arguments gdn_token.cu and gdn_tokens.cu share."""
    (Hk, K, Hv, V), qkvz = sizes, args["qkvz"]
    warps, together = 8 if V >= 64 else 4, BLOCKS * device.multiprocessors()
    constants: dict[str, Any] = {"Act": device.c_type(qkvz), "K": K, "V": V, "W": W, "Warps": warps}
    if args["B"] * Hv > together and kernels.runs_here(MANY):
        shared = _shared(qkvz.itemsize, K, V, W, warps)
        kernels.launch(MANY, "gdn_tokens", together, 32 * (warps + 1), args, shared=shared, constants=constants)
    else:
        kernels.launch(FEW, "gdn_token", (Hv // Hk, Hk, args["B"]), 32 * warps, args, constants=constants)


def _shared(itemsize: int, K: int, V: int, W: int, warps: int) -> int:
    """Bytes of Memory in cuda/gdn_tokens.cu: a state; sums, scores and fades; q and k; taps; barriers."""
    readers = min(32 * warps, 4 * V) // 32
    row = 4 * (readers * 2 * V + 2 * (CHUNK + 1) + CHUNK + 1)
    return 4 * K * V + row + -row % 16 + 2 * K * itemsize + 4 * (2 * K + V) * W + 512
