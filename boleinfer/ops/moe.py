"""The routed experts of a mixture-of-experts layer: router, grouping by expert, experts. Knows no shared expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.declaration import KernelError
from boleinfer.device import Array, Fp8
from boleinfer.ops import Case, sigmoid, silu

MOST_EXPERTS, MOST_CHOSEN = 512, 32  # on the GPU
PIECE = 2048  # rows that pass the experts together on the GPU: what lies between its kernels is float32 [PIECE*A, D]


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


def moe(x: Array, router: Array, gate_up: Array | Fp8, down: Array | Fp8, top_k: int, norm_topk: bool) -> Array:
    """sum over a row's experts e of weight_e * down_e (silu(gate_e x) * up_e x).

    x: [R, D]; router: [E, D]; gate_up: [E, 2F, D], gate rows first; down: [E, D, F], on the GPU these two also Fp8
    -> [R, D] in the type of x.
    The rows are grouped by expert, so the weights of each chosen expert are read once. A row adds up its experts by
    rising index, whatever other rows are there. On the GPU silu(..) * .. is rounded to the type of x, all sums are
    float32, and a row with a NaN among its router's scores is NaN. Source: Qwen3NextSparseMoeBlock in HF transformers.
    """
    if device.on_gpu(x):
        return _moe(x, router, gate_up, down, top_k, norm_topk)
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
    return out


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


def _route(x: Array, router: Array, A: int, norm_topk: bool) -> _Groups:
    (R, D), E = x.shape, len(router)
    if not 0 < A <= min(E, MOST_CHOSEN) or E > MOST_EXPERTS:
        raise KernelError(
            f"moe: {A} of {E} experts were asked for; the kernels support up to {MOST_CHOSEN} of up to {MOST_EXPERTS}"
        )
    few = R <= 32
    slots = min(E, R * A) if few else E
    logits = device.empty((R, E), np.float32)
    out = _Groups(
        device.empty((R, A), np.float32),
        *(device.empty(shape, np.int32) for shape in ((R, A), slots, slots + 1, R * A)),
    )
    if not R:
        return out
    args = {"x": x, "router": router, "logits": logits, "R": R, "D": D, "E": E}
    constants = {"Act": device.c_type(x)}
    kernels.launch("moe_router.cu", "router_logits", (-(-R // 8), -(-E // 2)), 64, args, constants=constants)
    each = {"PerLane": next(n for n in (1, 8, 16) if 32 * n >= E)}
    chosen = {"logits": logits, "weight": out.weight, "expert": out.expert}
    chosen |= {"R": R, "E": E, "A": A, "norm_topk": norm_topk}
    groups = {"expert_of": out.expert_of, "first": out.first, "order": out.order}
    if few:
        args = {**chosen, **groups, "Slots": slots}
        kernels.launch("moe_group.cu", "top_k_group", 1, 512, args, constants=each)
    else:
        kernels.launch("moe_group.cu", "top_k", -(-R // 4), 128, chosen, constants=each)
        flat = {"weight": out.weight.reshape(-1), "expert": out.expert.reshape(-1)}
        args = {**flat, **groups, "P": R * A, "E": E}
        kernels.launch("moe_group.cu", "group", -(-E // 4), 128, args, constants=each)
    return out


def _moe(x: Array, router: Array, gate_up: Array | Fp8, down: Array | Fp8, A: int, norm_topk: bool) -> Array:
    R, D = x.shape
    out = device.empty(x.shape, x.dtype)
    for r in range(0, R, PIECE):
        piece = x[r : r + PIECE]
        groups = _route(piece, router, A, norm_topk)
        y = _experts(piece, groups, gate_up, down)  # [n*A, D]
        args = {"y": y, "weight": groups.weight, "expert": groups.expert, "out": out[r : r + PIECE], "A": A, "D": D}
        _launch_combine("combine", len(piece), D, x, args)
    return out


def _experts(x: Array, groups: _Groups, gate_up: Array | Fp8, down: Array | Fp8) -> Array:
    """What each row's experts give, float32 [R*A, D]; undefined for rows without experts."""
    (R, D), A = x.shape, groups.weight.shape[1]
    up_weights, up_scale = gate_up if isinstance(gate_up, Fp8) else (gate_up, None)
    down_weights, down_scale = down if isinstance(down, Fp8) else (down, None)
    F, slots = down_weights.shape[-1], len(groups.expert_of)
    hidden, y = device.empty((R * A, F), x.dtype), device.empty((R * A, D), np.float32)
    act, wt = device.c_type(x), device.c_type(up_weights)
    tiled = act == "bf16" and wt in ("bf16", "fp8") and (D | F) % (8 if wt == "bf16" else 16) == 0
    most = 1 if R <= 8 else 8 if wt == "bf16" else 4  # tiles of 8 rows that a block multiplies together
    file, prefix = "moe_experts.cu", ""
    constants: dict[str, int | str] = {"Wt": wt, "Tiles": most}
    features, outputs, rows = 16, 32, 8 * most  # of a block
    if not tiled:
        file, prefix, constants = "moe_plain.cu", "plain_", {"Act": act, "Wt": wt}
        features, outputs, rows = 4, 4, 8
    splits = min(64, -(-R * A // (slots * rows)))
    where = {"expert_of": groups.expert_of, "first": groups.first, "order": groups.order, "D": D, "F": F}
    args = {**where, "x": x, "weights": up_weights, "scale": up_scale, "hidden": hidden, "A": A}
    kernels.launch(file, prefix + "gate_up", (-(-F // features), slots, splits), 128, args, constants=constants)
    args = {**where, "hidden": hidden, "weights": down_weights, "scale": down_scale, "y": y}
    kernels.launch(file, prefix + "down", (-(-D // outputs), slots, splits), 128, args, constants=constants)
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
