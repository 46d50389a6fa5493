"""What a gated DeltaNet layer does between its projections, in one launch for few rows a request: for gdn_core."""

from __future__ import annotations

from typing import Any

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.ops.gdn import SMALL_RING, WIDTHS, small_bytes
from boleinfer.ops.gdn_inputs import Sizes
from boleinfer.ring import Ring

ROWS = 16  # of a request, at most
# Warps of a block, blocks of a multiprocessor, slices of the state that a block has room for, rows that a warp
# convolves at once. The first kind of which the device holds all blocks at once is taken, or the last one.
BLOCKS = (16, 1, 8, 4), (12, 2, 4, 2), (8, 3, 4, 2)
RING, TAPS = SMALL_RING, 4


def takes(qkvz: Array, taps: Array, ring: Ring, forest: DeviceForest, sizes: Sizes) -> bool:
    """Whether there is a kernel for these rows."""
    (_, K, _, V), R = sizes, len(qkvz)
    fits = 0 < min(R, forest.most or R) <= ROWS and taps.shape[1] == TAPS and ring.k.shape[1] <= RING
    small = qkvz.itemsize == 2 and K == V and K in WIDTHS
    return fits and small and max(_shared(K, *kind[:3]) for kind in BLOCKS) <= device.shared_bytes()


def launch(args: dict[str, Any], forest: DeviceForest, sizes: Sizes) -> None:
    """args: what gdn_token.cu takes, and k, u and g."""
    (Hk, K, Hv, V), B = sizes, args.pop("B")
    most = device.multiprocessors()
    warps, blocks, held, batch = next((kind for kind in BLOCKS if B * Hv <= kind[1] * most), BLOCKS[-1])
    args |= {name: getattr(forest, name) for name in ("chain", "parent", "request", "ancestors")}
    constants: dict[str, Any] = {"Act": "bf16", "K": K, "V": V, "W": TAPS, "Rows": ROWS, "Ring": RING}
    constants |= {"Warps": warps, "Blocks": blocks, "Batch": batch, "Held": min(held, K // 16)}
    shared = _shared(K, warps, blocks, held)
    kernels.launch("gdn_few.cu", "gdn_few", (Hv // Hk, Hk, B), 32 * warps, args, shared=shared, constants=constants)


def _shared(K: int, warps: int, blocks: int, held: int) -> int:
    """Bytes of dynamic shared memory: Memory in gdn_few.cu."""
    front = 12 * K * TAPS + 6 * K * (TAPS - 1 + ROWS) + 4 * ROWS * TAPS
    return small_bytes(K, ROWS, K, warps, blocks, held, front) + 2 * (K + 8) * ROWS
