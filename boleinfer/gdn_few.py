"""What a gated DeltaNet layer does between its projections, in one launch for few rows a request: for gdn_core."""

from __future__ import annotations

from typing import Any

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.ops.gdn import SMALL_RING, WIDTHS, small_bytes
from boleinfer.ops.gdn_inputs import Sizes
from boleinfer.ring import Ring

# By rows of a request, at most: warps of a block, blocks of a multiprocessor, slices of the state that a block has room
# for, rows that a warp convolves at once; where there is a multiprocessor for each head, and else.
BLOCKS = {16: ((16, 1, 8, 4), (12, 2, 8, 2)), 32: ((16, 1, 8, 4), (16, 1, 8, 4))}
ROWS = 16  # of a request: few, also where all have more together
HEADS = 2  # for each multiprocessor, up to which one launch is quicker than three
RING, TAPS = SMALL_RING, 4


def rows_for(qkvz: Array, taps: Array, ring: Ring, forest: DeviceForest, sizes: Sizes) -> int:
    """Rows of a request that a launch is made for which takes these; 0: there is none."""
    (_, K, Hv, V), R = sizes, len(qkvz)
    if len(forest.chain) * Hv > HEADS * device.multiprocessors():
        return 0
    if qkvz.itemsize != 2 or K != V or K not in WIDTHS or taps.shape[1] != TAPS or ring.k.shape[1] > RING:
        return 0
    most = min(R, forest.most or R)
    rows = next((rows for rows in BLOCKS if most <= rows and (rows <= ROWS or rows >= R)), 0)
    return rows if rows and max(_shared(K, rows, *kind[:3]) for kind in BLOCKS[rows]) <= device.shared_bytes() else 0


def launch(rows: int, args: dict[str, Any], forest: DeviceForest, sizes: Sizes) -> None:
    """rows: what rows_for found; args: what gdn_token.cu takes."""
    (Hk, K, Hv, V), B = sizes, args["B"]
    warps, blocks, held, batch = BLOCKS[rows][B * Hv > device.multiprocessors()]
    args |= {name: getattr(forest, name) for name in ("chain", "parent", "request", "ancestors")}
    args["Ahead"] = max(1, blocks * device.multiprocessors() // Hv)
    constants: dict[str, Any] = {"Act": "bf16", "K": K, "V": V, "W": TAPS, "Rows": rows, "Ring": RING}
    constants |= {"Warps": warps, "Blocks": blocks, "Batch": batch, "Held": min(held, K // 16)}
    shared = _shared(K, rows, warps, blocks, held)
    kernels.launch("gdn_few.cu", "gdn_few", (Hv // Hk, Hk, B), 32 * warps, args, shared=shared, constants=constants)


def _shared(K: int, rows: int, warps: int, blocks: int, held: int) -> int:
    """Bytes of dynamic shared memory: Memory in gdn_few.cu."""
    return small_bytes(K, rows, warps, blocks, held, 12 * K * TAPS + 6 * K * (TAPS - 1 + rows) + 4 * rows * TAPS)
