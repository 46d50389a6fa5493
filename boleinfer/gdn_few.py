"""What a gated DeltaNet layer does between its projections, in one launch for few rows a request: for gdn_core."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.ops.gdn import WIDTHS, small_bytes
from boleinfer.ops.gdn_inputs import Sizes
from boleinfer.ring import Ring

# By rows of a request, at most: warps of a block, blocks of a multiprocessor, slices of the state that a block has room for, rows
# that a warp convolves at once; where there is a multiprocessor for each head, and else.
BLOCKS = {16: ((16, 1, 8, 4), (12, 2, 8, 2)), 32: ((16, 1, 8, 4), (16, 1, 8, 4))}
ROWS = 16  # of a request: few, also where all have more together
HEADS = 2  # for each multiprocessor, up to which one launch is quicker than three
RING, TAPS = 32, 4


def rows_for(qkvz: Array, taps: Array, ring: Ring, forest: DeviceForest, sizes: Sizes) -> int:
    """Rows of a request that a launch is made for which takes these; 0: there is none."""
    (_, K, Hv, V), R = sizes, len(qkvz)
    if len(forest.chain) * Hv > HEADS * device.multiprocessors():
        return 0
    if qkvz.itemsize != 2 or K != V or K not in WIDTHS or taps.shape[1] != TAPS or ring.k.shape[1] > RING:
        return 0
    most = min(R, forest.most or R)
    rows = next((rows for rows in BLOCKS if most <= rows and (rows <= ROWS or R <= rows)), 0)
    return rows if rows and max(_shared(K, rows, *kind[:3]) for kind in BLOCKS[rows]) <= device.shared_bytes() else 0


def launch(
    rows: int,
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
) -> tuple[Array, Array, Array, Array]:
    """y, k, u and g as gdn_core says. rows: what rows_for found."""
    (Hk, K, Hv, V), R, B = sizes, len(qkvz), len(slot)
    y, k = device.empty((R, Hv, V), qkvz.dtype), device.empty((R, Hk, K), qkvz.dtype)
    u, g = device.empty((R, Hv, V), np.float32), device.empty((R, Hv), np.float32)
    args = {"qkvz": qkvz, "ba": ba, "taps": taps, "A_log": A_log, "dt_bias": dt_bias, "norm": norm, "window": window}
    args |= {"S": S, "ring_k": ring.k, "ring_u": ring.u, "ring_g": ring.g, "length": ring.length, "slot": slot}
    args |= {name: getattr(forest, name) for name in ("start", "chain", "parent", "request", "ancestors")}
    args |= {"y": y, "k": k, "u": u, "g": g, "Hk": Hk, "Hv": Hv, "C": ring.k.shape[1], "B": B, "eps": eps}
    warps, blocks, held, batch = BLOCKS[rows][B * Hv > device.multiprocessors()]
    args["Ahead"] = max(1, blocks * device.multiprocessors() // Hv)
    constants: dict[str, Any] = {"Act": device.c_type(qkvz), "K": K, "V": V, "W": TAPS, "Rows": rows, "Ring": RING}
    constants |= {"Warps": warps, "Blocks": blocks, "Batch": batch, "Held": min(held, K // 16)}
    if R and B:
        shared = _shared(K, rows, warps, blocks, held)
        kernels.launch("gdn_few.cu", "gdn_few", (Hv // Hk, Hk, B), 32 * warps, args, shared=shared, constants=constants)
    return y, k, u, g


def _shared(K: int, rows: int, warps: int, blocks: int, held: int) -> int:
    """Bytes of dynamic shared memory: Memory in gdn_few.cu."""
    return small_bytes(K, rows, warps, blocks, held, 12 * K * TAPS + 6 * K * (TAPS - 1 + rows) + 4 * rows * TAPS)
