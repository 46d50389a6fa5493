"""What GDN reads: causal convolution on a forest, L2 norms, gates. Knows no other op."""

from __future__ import annotations

from typing import Any

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case, sigmoid, silu

Sizes = tuple[int, int, int, int]  # Hk, K, Hv, V


def gdn_inputs(
    qkvz: Array,
    ba: Array,
    taps: Array,
    A_log: Array,
    dt_bias: Array,
    window: Array,
    slot: Array,
    forest: Forest | DeviceForest,
    sizes: Sizes,
) -> tuple[Array, Array, Array, Array, Array]:
    """q, k, v, g and beta of the rows of a forest: convolution and silu, then norms and gates.

        q = l2(silu(conv(q))) / sqrt(K),  k = l2(silu(conv(k))),  v = silu(conv(v))

    qkvz: [R, 2 Hk K + 2 Hv V], q, k, v and z side by side (z is not read); ba: [R, 2 Hv], b and then a
    taps: [2 Hk K + Hv V, W]; A_log, dt_bias: [Hv]; window: [slots, W, 2 Hk K + Hv V]; slot: int [B]
    sizes: Hk, K, Hv, V
    Returns q, k [R, Hk, K], v [R, Hv, V], g, beta [R, Hv]. On the GPU ba, taps, A_log, dt_bias, g and beta are float32,
    sums too; the others have qkvz's type, to which they are rounded once, and rows without a request stay undefined.
    """
    Hk, K, Hv, V = sizes
    if isinstance(forest, DeviceForest):
        return _launch(qkvz, ba, taps, A_log, dt_bias, window, slot, forest, sizes)
    R, HkK = len(qkvz), Hk * K
    qkv = causal_conv(qkvz[:, : 2 * HkK + Hv * V], taps, window, slot, forest)
    qk = l2_norm(qkv[:, : 2 * HkK].reshape(R, 2 * Hk, K))
    g, beta = gates(ba[:, Hv:], ba[:, :Hv], A_log, dt_bias)
    return qk[:, :Hk] * K**-0.5, qk[:, Hk:], qkv[:, 2 * HkK :].reshape(R, Hv, V), g, beta


def causal_conv(x: np.ndarray, w: np.ndarray, window: np.ndarray, slot: np.ndarray, forest: Forest) -> np.ndarray:
    """silu(conv(x)): each channel is correlated with its own W taps along the node's root path.

    y[r, c] = sum_j w[c, j] * input[c] of the (W-1-j)-th ancestor of row r; the last tap meets row r itself. Where the
    path is shorter than W, the request's window goes on to the left: the input of position p lies at place p % W, and
    zeros are before the first. Only the W-1 places before the root are read. Equation: HF Qwen3-Next, `causal_conv1d`.

    x:      [R, Cc] inputs before the convolution
    w:      [Cc, W]
    window: [slots, W, Cc]; only rows `slot` are read
    slot:   int [B]
    Returns [R, Cc] in x's dtype. Nothing is modified.
    """
    Cc, W = w.shape
    places = (forest.committed[:, None] + np.arange(1, W)) % W  # [B, W-1], the oldest input first
    past = window[np.reshape(slot, (-1, 1)), places]  # [B, W-1, Cc]
    inputs = np.concatenate((past.reshape(-1, Cc), x))  # [B*(W-1) + R, Cc]
    taps = np.ascontiguousarray(w.T)  # [W, Cc]; the layout that loaded weights have already
    *older, current = zip(forest.conv_sources(W), taps)
    y = inputs[current[0]] * current[1]  # [R, Cc]
    part = np.empty_like(y)
    for source, tap in older:
        y += np.multiply(inputs[source], tap, out=part)
    return silu(y)


def l2_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """x / sqrt(sum x^2 + eps): eps is added to the sum, inside the root, as in HF transformers.

    x: [..., K] -> [..., K] in the type of x.
    """
    return x / np.sqrt(np.einsum("...d,...d->...", x, x)[..., None] + eps)


def gates(a: np.ndarray, b: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """g = -e^{A_log} softplus(a + dt_bias) and beta = sigmoid(b), both [R, Hv] in a's dtype, for any finite input.

    a, b: [R, Hv]; A_log, dt_bias: [Hv], in float32 or wider (narrower storage shifts every decay).
    softplus(x) = log(e^0 + e^x), which is x itself for large x and never overflows. Source: HF Qwen3-Next.
    """
    g = np.logaddexp(0, a + dt_bias) * -np.exp(A_log)
    return g.astype(a.dtype, copy=False), sigmoid(b)


# ---- the GPU ---------------------------------------------------------------------------------------------------------

THREADS = 128


def _launch(
    qkvz: Array,
    ba: Array,
    taps: Array,
    A_log: Array,
    dt_bias: Array,
    window: Array,
    slot: Array,
    forest: DeviceForest,
    sizes: Sizes,
) -> tuple[Array, Array, Array, Array, Array]:
    (R, _), (Hk, K, Hv, V), W = qkvz.shape, sizes, taps.shape[1]
    q, k, v = (device.empty((R, *shape), qkvz.dtype) for shape in ((Hk, K), (Hk, K), (Hv, V)))
    g, beta = (device.empty((R, Hv), np.float32) for _ in "gb")
    span = 4 if R <= 64 else 16 if R <= 1024 else 32  # rows of a block: many read the taps more seldom
    heads = 2 * Hk + Hv
    if R:
        args = {
            "qkvz": qkvz,
            "ba": ba,
            "taps": taps,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "window": window,
            "slot": slot,
        }
        args |= {
            "parent": forest.parent,
            "request": forest.request,
            "committed": forest.committed,
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
        }
        args |= {"R": R, "Hk": Hk, "Hv": Hv, "span": span}
        constants = {"K": K, "V": V, "W": W, "Act": device.c_type(qkvz)}
        kernels.launch("gdn_inputs.cu", "gdn_inputs", -(-R // span) * (heads + 1), THREADS, args, constants=constants)
    return q, k, v, g, beta


# ---- CASES -----------------------------------------------------------------------------------------------------------


def _label(trees: list[list[int]], **sizes: int) -> str:
    return " ".join(["R=" + "+".join(str(len(p)) for p in trees), *(f"{k}={n}" for k, n in sizes.items())])


def _batch(rng: np.random.Generator, trees: list[list[int]], Cc: int, W: int) -> dict[str, Any]:
    """A forest, its slots, and windows that are poison where nothing was committed."""
    B = len(trees)
    slot = rng.permutation(B + 2)[:B].astype(np.int32)
    forest = Forest.of([Tree.of([0] * len(p), p) for p in trees], 7 + np.arange(B))
    window = np.full((B + 2, W, Cc), np.nan)
    window[slot] = rng.standard_normal((B, W, Cc))
    window[slot, forest.committed % W] = np.nan  # the next token's
    return {"window": window, "slot": slot, "forest": forest}


def _inputs_case(trees: list[list[int]], Hk: int, K: int, Hv: int, V: int, W: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        Cc, R = 2 * Hk * K + Hv * V, sum(map(len, trees))
        return {
            "qkvz": rng.standard_normal((R, Cc + Hv * V)),
            "ba": rng.normal(0, 5, (R, 2 * Hv)),
            "taps": rng.standard_normal((Cc, W)) / 2,
            "A_log": rng.normal(0, 2, Hv),
            "dt_bias": rng.standard_normal(Hv),
            **_batch(rng, trees, Cc, W),
            "sizes": (Hk, K, Hv, V),
        }

    wide = ("ba", "taps", "A_log", "dt_bias")
    return Case(_label(trees, Hk=Hk, K=K, Hv=Hv, V=V, W=W), build, wide=wide)


def _conv_case(trees: list[list[int]], Cc: int, W: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.standard_normal((sum(map(len, trees)), Cc))
        return {"x": x, "w": rng.standard_normal((Cc, W)) / 2, **_batch(rng, trees, Cc, W)}

    return Case(_label(trees, Cc=Cc, W=W), build, gpu=False)


def _l2_case(R: int, H: int, K: int) -> Case:
    return Case(f"R={R} Hk={H} K={K}", lambda rng: {"x": rng.standard_normal((R, H, K))}, gpu=False)


def _gates_case(R: int, Hv: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        a, b = rng.normal(0, 30, (2, R, Hv))
        return {"a": a, "b": b, "A_log": rng.normal(0, 3, Hv), "dt_bias": rng.standard_normal(Hv)}

    return Case(f"R={R} Hv={Hv}", build, gpu=False)


def _chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
_BINARY = [(n - 1) // 2 if n else -1 for n in range(128)]
CASES: dict[str, list[Case]] = {
    "gdn_inputs": [
        _inputs_case([[-1]], 1, 3, 1, 5, 4),
        _inputs_case([_RAGGED, [-1], _chain(70)], 1, 7, 3, 5, 2),
        _inputs_case([_RAGGED, _chain(9)], 3, 48, 6, 63, 3),
        _inputs_case([_chain(5), _RAGGED], 2, 32, 4, 16, 8),
        _inputs_case([_RAGGED, _BINARY], 2, 64, 2, 128, 4),
        _inputs_case([_chain(1100), _RAGGED], 1, 16, 2, 24, 4),
        _inputs_case([[-1]], 16, 128, 32, 128, 4),
        _inputs_case([[-1]] * 5 + [_RAGGED], 16, 128, 48, 128, 4),
        _inputs_case([_BINARY, _chain(130), _RAGGED], 16, 128, 32, 128, 4),
    ],
    "causal_conv": [
        _conv_case([[-1]], 3, 4),
        _conv_case([_RAGGED, [-1]], 65, 4),
        _conv_case([_RAGGED], 7, 2),
        _conv_case([_chain(64), _RAGGED], 1024, 4),
        _conv_case([[-1]], 8192, 4),
        _conv_case([_chain(256)], 8192, 4),
    ],
    "l2_norm": [_l2_case(R, H, K) for R, H, K in [(1, 1, 1), (3, 5, 63), (65, 2, 65), (16, 16, 128)]],
    "gates": [_gates_case(R, Hv) for R, Hv in [(1, 1), (65, 3), (16, 32)]],
}
