"""A mixture of experts behind its norm: ops one by one, or for few rows a single launch."""

from __future__ import annotations

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array, Fp8
from boleinfer.ops.linear import gated_linear, linear
from boleinfer.ops.moe import Shared, add_shared, bits, joins, moe, per_lane, scale
from boleinfer.residual import Residual, normed


def moe_core(
    r: Residual, router: Array, gate_up: Array | Fp8, down: Array | Fp8, top_k: int, norm_topk: bool, shared: Shared
) -> tuple[Array, Array]:
    """moe of the normed rows, with the shared expert, [R, D], and the stream with what was to be added before.

    router .. norm_topk: as in moe. On the GPU up to FEW_ROWS rows are one launch, with the bits of the others."""
    places = _places(r, gate_up, down, top_k, shared)
    if places:
        return _launch(r, router, gate_up, down, top_k, norm_topk, shared, places)
    x, stream = normed(r)
    if joins(x, gate_up, down, shared):
        return moe(x, router, gate_up, down, top_k, norm_topk, shared), stream
    routed = moe(x, router, gate_up, down, top_k, norm_topk)
    own = linear(x, shared.gate, np.float32), linear(gated_linear(x, shared.gate_up), shared.down)
    return add_shared(routed, *own), stream


# ---- the GPU ---------------------------------------------------------------------------------------------------------

FILE, FP8_FILE = "moe_few.cu", "moe_few_fp8.cu"
FEW_ROWS, THIN_ROWS = 8, 2  # THIN_ROWS: up to which FP8 weights are multiplied in another way
LEAST_PLACES, MOST_PLACES, MOST_K, MOST_SCALED = 4, 12, 8192, 4096  # warps of a block; k, and k of FP8 weights
MOST_BYTES, BESIDE = 208 * 1024, 10 * 1024  # of shared memory: most that is asked for, and what is left at least


def _room(R: int, itemsize: int) -> int:
    """Rows that a block has room for."""
    return THIN_ROWS if itemsize == 1 and R <= THIN_ROWS else FEW_ROWS


def _bytes(R: int, D: int, F: int, A: int, itemsize: int) -> tuple[int, int]:
    """Shared memory for x, or what a block has of out, and for a unit's weights."""
    rows, x_row, out_row = _room(R, itemsize), 2 * D + (64 if itemsize == 2 else 16), 64 * (A + 1)
    features = 4 if itemsize == 1 and rows == FEW_ROWS else 2
    return rows * max(x_row, out_row), max(2 * features * D, 16 * F) * itemsize


def _places(r: Residual, gate_up: Array | Fp8, down: Array | Fp8, A: int, shared: Shared) -> int:
    """Units that a block of the single launch has under way; 0 where it cannot multiply such matrices."""
    if not 0 < len(r.stream) <= FEW_ROWS or r.added is None or not joins(r.stream, gate_up, down, shared):
        return 0
    (D, F), itemsize = bits(down).shape[1:], bits(down).itemsize
    if D % 256 or F % 256 or max(D, F) > (MOST_SCALED if itemsize == 1 else MOST_K) or not kernels.runs_here(FILE):
        return 0
    x_bytes, place = _bytes(len(r.stream), D, F, A, itemsize)
    places = min(MOST_PLACES, (min(MOST_BYTES, device.shared_bytes() - BESIDE) - x_bytes) // place)
    return places if places >= LEAST_PLACES else 0


def _launch(
    r: Residual,
    router: Array,
    gate_up: Array | Fp8,
    down: Array | Fp8,
    A: int,
    norm_topk: bool,
    shared: Shared,
    places: int,
) -> tuple[Array, Array]:
    (R, D), E, F, itemsize = r.stream.shape, len(router), bits(down).shape[-1], bits(down).itemsize
    slots, keys = 1 + min(E, R * A), R * (E // 4 * 4 + 4)
    h, out, hidden = (device.empty(shape, r.stream.dtype) for shape in ((R, D), (R, D), (slots, R, F)))
    args = {"stream": r.stream, "added": r.added, "norm": r.norm, "router": router, "shared_gate": shared.gate}
    args |= {"gate_up": bits(gate_up), "down": bits(down)}
    args |= {"shared_up": bits(shared.gate_up), "shared_down": bits(shared.down)}
    args |= {"counters": device.counters(4 + keys)[: 4 + keys], "hidden": hidden, "h": h, "out": out}
    args |= {"R": R, "E": E, "A": A, "D": D, "F": F, "Slots": slots, "eps": r.eps, "norm_topk": norm_topk}
    constants: dict[str, int | str] = {"PerLane": per_lane(E, A), "Wt": device.c_type(bits(gate_up)), "Places": places}
    if itemsize == 1:
        args |= {"up_scale": scale(gate_up), "down_scale": scale(down)}
        args |= {"shared_up_scale": scale(shared.gate_up), "shared_down_scale": scale(shared.down)}
        constants["Rows"] = _room(R, itemsize)
    x_bytes, place = _bytes(R, D, F, A, itemsize)
    nbytes, grid = x_bytes + places * place, min(device.blocks_together(), E + 1)  # a score for each block
    file = FP8_FILE if itemsize == 1 else FILE
    kernels.launch(file, "few", grid, 32 * places, args, shared=nbytes, constants=constants)
    return out, h
