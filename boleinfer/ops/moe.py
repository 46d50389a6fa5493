"""A mixture-of-experts layer: router, grouping by expert, experts, and the expert that all rows share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.declaration import KernelError
from boleinfer.device import Array, Fp8
from boleinfer.ops import Case, sigmoid, silu

MOST_EXPERTS, MOST_CHOSEN = 512, 32  # on the GPU
PIECE = 2048  # rows that pass the experts together on the GPU: what lies between its kernels is float32 [PIECE*A, D]
SOME_ROWS = 128  # up to which the shared expert is one more of the experts there


class Shared(NamedTuple):
    """The shared expert's matrices: gate [1, D], the row of its own score; gate_up [2F, D]; down [D, F]."""

    gate: Array
    gate_up: Array | Fp8
    down: Array | Fp8


def route(x: Array, router: Array, top_k: int, norm_topk: bool) -> tuple[Array, Array]:
    """Softmax over all experts, then the `top_k` likeliest of each row, likeliest first, equal ones by lower index.

    x: [R, D]; router: [E, D]; -> weight [R, A] in the type of x, on the GPU float32, expert int64, on the GPU int32
    [R, A], A = top_k. With `norm_topk` the chosen weights are divided by their sum. A row with a NaN among its scores
    gets experts 0 .. A-1 and weights NaN on the GPU. Source: Qwen3NextTopKRouter in HF transformers.
    """
    if device.on_gpu(x):
        groups = _route(x, router, top_k, norm_topk)
        return groups.weight, groups.expert
    logits = x @ router.T  # [R, E]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expert = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]  # [R, A]
    weight = np.take_along_axis(p, expert, -1)
    if norm_topk:
        weight /= weight.sum(-1, keepdims=True)
    return weight, expert


def moe(
    x: Array,
    router: Array,
    gate_up: Array | Fp8,
    down: Array | Fp8,
    top_k: int,
    norm_topk: bool,
    shared: Shared | None = None,
) -> Array:
    """sum over a row's experts e of weight_e * down_e (silu(gate_e x) * up_e x), and `shared` as add_shared adds it.

    x: [R, D]; router: [E, D]; gate_up: [E, 2F, D], gate rows first; down: [E, D, F], on the GPU these two also Fp8
    -> [R, D] in the type of x. On the GPU `shared` only where joins says so.
    The rows are grouped by expert, so the weights of each chosen expert are read once. A row adds up its experts by
    rising index, whatever other rows are there. On the GPU silu(..) * .. is rounded to the type of x, all sums are
    float32, and a row with a NaN among its router's scores is NaN. Source: Qwen3NextSparseMoeBlock in HF transformers.
    """
    if device.on_gpu(x):
        return _moe(x, router, gate_up, down, top_k, norm_topk, shared)
    assert not isinstance(gate_up, Fp8) and not isinstance(down, Fp8)
    weight, expert = route(x, router, top_k, norm_topk)
    R, F = len(x), down.shape[-1]
    order = np.argsort(expert.ravel(), kind="stable")  # [R*A], places grouped by expert
    chosen, first = np.unique(expert.ravel()[order], return_index=True)
    out = np.zeros_like(x)
    for e, places in zip(chosen.tolist(), np.split(order, first[1:])):
        rows = places // top_k if R > 1 else slice(None)
        h = x[rows] @ gate_up[e].T  # [n, 2F]
        h = silu(h[:, :F]) * h[:, F:]  # [n, F]
        out[rows] += weight.ravel()[places, None] * (h @ down[e].T)
    if shared is not None:
        assert not isinstance(shared.gate_up, Fp8) and not isinstance(shared.down, Fp8)
        h = x @ shared.gate_up.T
        out = add_shared(out, x @ shared.gate.T, silu(h[:, :F]) * h[:, F:] @ shared.down.T)
    return out


def joins(x: Array, gate_up: Array | Fp8, down: Array | Fp8, shared: Shared) -> bool:
    """Whether moe takes the shared expert with the others: on the GPU, for few rows, where it is as they are."""
    alike = _alike(gate_up, shared.gate_up) and _alike(down, shared.down)
    return device.on_gpu(x) and alike and 0 < len(x) <= SOME_ROWS and _tiled(x, gate_up, down)


def add_shared(routed: Array, gate: Array, shared: Array) -> Array:
    """routed + sigmoid(gate) * shared: the shared expert's output, scaled by a gate of its own for each row.

    routed, shared: [R, D]; gate: [R, 1], on the GPU float32; -> [R, D] in the type of routed.
    Source: Qwen3NextSparseMoeBlock in HF transformers.
    """
    if not device.on_gpu(routed):
        return routed + sigmoid(gate) * shared
    (R, D), out = routed.shape, device.empty(routed.shape, routed.dtype)
    args = {"routed": routed, "gate": gate, "shared": shared, "out": out, "D": D}
    _launch_combine("add_shared", R, D, routed, args)
    return out


# ---- on the GPU ------------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """The experts of each row and the rows of each expert, as moe_group.cu describes them."""

    weight: Array  # float32 [R, A]
    expert: Array  # int32 [R, A]
    expert_of: Array  # int32 [slots]
    first: Array  # int32 [slots+1]
    order: Array  # int32 [R*A]


def bits(w: Array | Fp8) -> Array:
    """The numbers of a matrix."""
    return w.bits if isinstance(w, Fp8) else w


def scale(w: Array | Fp8) -> Array | None:
    """The scales of an FP8 matrix."""
    return w.scale if isinstance(w, Fp8) else None


def _alike(experts: Array | Fp8, shared: Array | Fp8) -> bool:
    a, b = bits(experts), bits(shared)
    return isinstance(experts, Fp8) == isinstance(shared, Fp8) and a.dtype == b.dtype and a.shape[1:] == b.shape


def _tiled(x: Array, gate_up: Array | Fp8, down: Array | Fp8) -> bool:
    """Whether the kernels of matrix tiles can do it: types, and rows of whole 16-byte words."""
    types, (D, F) = [device.c_type(bits(w)) for w in (gate_up, down)], bits(down).shape[1:]
    same = types[0] == types[1] and types[0] in ("bf16", "fp8")
    return device.c_type(x) == "bf16" and same and (D | F) % (8 if types[0] == "bf16" else 16) == 0


def _scores(x: Array, router: Array, shared: Shared | None = None) -> tuple[Array, Array | None]:
    """float32 [R, E] of the experts, and [R] of the shared one."""
    (R, D), E = x.shape, len(router)
    logits = device.empty((R, E), np.float32)
    gate = None if shared is None else device.empty(R, np.float32)
    if not R:
        return logits, gate
    args = {"x": x, "router": router, "shared_gate": shared and shared.gate, "logits": logits, "gate": gate}
    args |= {"R": R, "D": D, "E": E}
    grid, constants = (E // 2 + 1, -(-R // 8)), {"Act": device.c_type(x)}
    kernels.launch("moe_router.cu", "router_logits", grid, 256, args, constants=constants)
    return logits, gate


def per_lane(E: int, A: int) -> int:
    """Experts of a lane. Raises KernelError where there are too many."""
    if not 0 < A <= min(E, MOST_CHOSEN) or E > MOST_EXPERTS:
        raise KernelError(
            f"moe: {A} of {E} experts were asked for; the kernels support up to {MOST_CHOSEN} of up to {MOST_EXPERTS}"
        )
    return next(n for n in (8, 16) if 32 * n >= E)


def _route(x: Array, router: Array, A: int, norm_topk: bool) -> _Groups:
    constants: dict[str, int | str] = {"PerLane": per_lane(len(router), A)}
    return _group(_scores(x, router)[0], A, norm_topk, constants)


def _group(logits: Array, A: int, norm_topk: bool, constants: dict[str, int | str]) -> _Groups:
    R, E = logits.shape
    few = R <= 32
    slots = min(E, R * A) if few else E
    out = _Groups(
        device.empty((R, A), np.float32),
        *(device.empty(shape, np.int32) for shape in ((R, A), slots, slots + 1, R * A)),
    )
    if not R:
        return out
    chosen = {"logits": logits, "weight": out.weight, "expert": out.expert}
    chosen |= {"R": R, "E": E, "A": A, "norm_topk": norm_topk}
    groups = {"expert_of": out.expert_of, "first": out.first, "order": out.order}
    if few:
        args = {**chosen, **groups, "Slots": slots}
        kernels.launch("moe_group.cu", "top_k_group", 1, 512, args, constants=constants)
    else:
        kernels.launch("moe_group.cu", "top_k", -(-R // 4), 128, chosen, constants=constants)
        flat = {"weight": out.weight.reshape(-1), "expert": out.expert.reshape(-1)}
        args = {**flat, **groups, "P": R * A, "E": E}
        kernels.launch("moe_group.cu", "group", -(-E // 4), 128, args, constants=constants)
    return out


def _moe(
    x: Array,
    router: Array,
    gate_up: Array | Fp8,
    down: Array | Fp8,
    A: int,
    norm_topk: bool,
    shared: Shared | None,
) -> Array:
    R, D = x.shape
    constants: dict[str, int | str] = {"PerLane": per_lane(len(router), A)}
    if shared is not None and not joins(x, gate_up, down, shared):
        raise KernelError("moe: the shared expert is not like the others; ask joins, and add it with add_shared")
    out = device.empty(x.shape, x.dtype)
    for r in range(0, R, PIECE):
        piece = x[r : r + PIECE]
        logits, gate = _scores(piece, router, shared)
        groups = _group(logits, A, norm_topk, constants)
        y = _experts(piece, groups, gate_up, down, shared)  # [n*A, D], and [n, D] of the shared expert
        args = {"y": y, "weight": groups.weight, "expert": groups.expert, "gate": gate, "out": out[r : r + PIECE]}
        args |= {"R": len(piece), "A": A, "D": D, "Places": len(y)}
        _launch_combine("combine", len(piece), D, x, args)
    return out


def _experts(x: Array, groups: _Groups, gate_up: Array | Fp8, down: Array | Fp8, shared: Shared | None) -> Array:
    """What each row's experts give, float32 [R*A, D], behind it the shared one's; undefined where there are none."""
    (R, D), A = x.shape, groups.weight.shape[1]
    F, slots, act, wt = bits(down).shape[-1], len(groups.expert_of), device.c_type(x), device.c_type(bits(gate_up))
    places = R * (A + (shared is not None))
    hidden, y = device.empty((places, F), x.dtype), device.empty((places, D), np.float32)
    where = {"expert_of": groups.expert_of, "first": groups.first, "order": groups.order, "D": D, "F": F}
    up = {**where, "x": x, "weights": bits(gate_up), "scale": scale(gate_up), "hidden": hidden, "A": A}
    last = {**where, "hidden": hidden, "weights": bits(down), "scale": scale(down), "y": y}
    if not _tiled(x, gate_up, down):
        tile: dict[str, int | str] = {"Act": act, "Wt": wt}
        splits = min(64, -(-R * A // (slots * 8)))
        kernels.launch("moe_plain.cu", "plain_gate_up", (-(-F // 4), slots, splits), 128, up, constants=tile)
        kernels.launch("moe_plain.cu", "plain_down", (-(-D // 4), slots, splits), 128, last, constants=tile)
        return y
    tiles = 8 if wt == "bf16" else 4  # of 8 rows, that a block multiplies together
    splits, all_slots = min(64, -(-R * A // (slots * 8 * tiles))), slots + (shared is not None)
    more = {"R": R, "A": A, "Slots": slots, "Places": places}
    up |= {**more, "shared": shared and bits(shared.gate_up), "shared_scale": shared and scale(shared.gate_up)}
    last |= {**more, "shared": shared and bits(shared.down), "shared_scale": shared and scale(shared.down)}
    tile = {"Wt": wt, "Tiles": tiles}
    kernels.launch("moe_experts.cu", "gate_up", (-(-F // 16), all_slots, splits), 128, up, constants=tile)
    kernels.launch("moe_experts.cu", "down", (-(-D // 32), all_slots, splits), 128, last, constants=tile)
    return y


def _launch_combine(name: str, R: int, D: int, x: Array, args: dict[str, object]) -> None:
    block = min(128, -(-D // 256) * 32)  # 8 numbers a thread
    if R:
        grid, constants = (R, -(-D // (8 * block))), {"Act": device.c_type(x)}
        kernels.launch("moe_combine.cu", name, grid, block, args, constants=constants)


# ---- cases -----------------------------------------------------------------------------------------------------------


def _case(R: int, D: int, E: int, F: int, top_k: int, norm_topk: bool) -> Case:
    return Case(
        f"R={R} D={D} E={E} F={F} top{top_k}{'' if norm_topk else ' raw'}",
        lambda rng: {
            "x": rng.standard_normal((R, D)),
            "router": rng.standard_normal((E, D)) / np.sqrt(D),
            "gate_up": rng.standard_normal((E, 2 * F, D)) / np.sqrt(D),
            "down": rng.standard_normal((E, D, F)) / np.sqrt(F),
            "top_k": top_k,
            "norm_topk": norm_topk,
        },
    )


def _shared_case(R: int, D: int) -> Case:
    return Case(
        f"R={R} D={D}",
        lambda rng: {
            "routed": rng.standard_normal((R, D)),
            "gate": 3 * rng.standard_normal((R, 1)),
            "shared": rng.standard_normal((R, D)),
        },
        wide=("gate",),
    )


CASES = {
    "moe": [
        _case(1, 1, 1, 1, 1, True),
        _case(3, 63, 5, 7, 2, False),
        _case(65, 65, 9, 3, 9, True),
        _case(5, 72, 7, 40, 3, True),
        _case(33, 264, 40, 24, 4, False),
        _case(200, 128, 3, 64, 2, True),
        _case(1, 512, 32, 128, 10, True),
        _case(16, 512, 32, 128, 8, True),
        _case(2, 2048, 6, 512, 3, True),
    ],
    "add_shared": [_shared_case(R, D) for R, D in [(1, 1), (3, 63), (65, 65), (1, 2048), (16, 2048)]],
}
