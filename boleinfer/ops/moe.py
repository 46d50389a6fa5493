"""The routed experts of a mixture-of-experts layer: router, grouping by expert, experts. Knows no shared expert."""

from __future__ import annotations

import numpy as np

from boleinfer.ops import Case, silu


def route(x: np.ndarray, router: np.ndarray, top_k: int, norm_topk: bool) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over all experts, then the `top_k` likeliest of each row, likeliest first, equal ones by lower index.

    x: [R, D]; router: [E, D]; -> weight [R, A] in the type of x, expert int64 [R, A], A = top_k.
    With `norm_topk` the chosen weights are divided by their sum. Source: Qwen3NextTopKRouter in HF transformers.
    """
    logits = x @ router.T  # [R, E]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expert = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]  # [R, A]
    weight = np.take_along_axis(p, expert, -1)
    if norm_topk:
        weight /= weight.sum(-1, keepdims=True)
    return weight, expert


def moe(
    x: np.ndarray, router: np.ndarray, gate_up: np.ndarray, down: np.ndarray, top_k: int, norm_topk: bool
) -> np.ndarray:
    """sum over a row's experts e of weight_e * down_e (silu(gate_e x) * up_e x).

    x: [R, D]; router: [E, D]; gate_up: [E, 2F, D], gate rows first; down: [E, D, F]; -> [R, D] in the type of x.
    The rows are grouped by expert, so the weights of each chosen expert are read once. A row adds up its experts by
    rising index, whatever other rows are there. Source: Qwen3NextSparseMoeBlock in HF transformers.
    """
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


CASES = {
    "moe": [
        _case(1, 1, 1, 1, 1, True),
        _case(3, 63, 5, 7, 2, False),
        _case(65, 65, 9, 3, 9, True),
        _case(1, 512, 32, 128, 10, True),
        _case(16, 512, 32, 128, 8, True),
    ]
}
