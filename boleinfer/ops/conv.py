"""Short causal convolution on a forest, and the window of past inputs it continues from. Knows no other op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case, silu


def causal_conv(x: np.ndarray, w: np.ndarray, window: np.ndarray, slot: np.ndarray, forest: Forest) -> np.ndarray:
    """silu(conv(x)): each channel is correlated with its own W taps along the node's root path.

    y[r, c] = sum_j w[c, j] * input[c] of the (W-1-j)-th ancestor of row r; the last tap meets row r itself. Where the
    path is shorter than W, the request's window goes on to the left. Equation: HF Qwen3-Next, `causal_conv1d`.

    x:      [R, Cc] inputs before the convolution
    w:      [Cc, W]
    window: [slots, W-1, Cc], the last W-1 committed inputs of each slot, oldest first; only rows `slot` are read
    slot:   int [B]
    Returns [R, Cc] in x's dtype. Nothing is modified.
    """
    Cc, W = w.shape
    inputs = np.concatenate((window[slot].reshape(-1, Cc), x))  # [B*(W-1) + R, Cc]
    taps = np.ascontiguousarray(w.T)  # [W, Cc]; the layout that loaded weights have already
    *older, current = zip(forest.conv_sources(W), taps)
    y = inputs[current[0]] * current[1]  # [R, Cc]
    part = np.empty_like(y)
    for source, tap in older:
        y += np.multiply(inputs[source], tap, out=part)
    return silu(y)


def commit_window(x: np.ndarray, window: np.ndarray, slot: np.ndarray, paths: Sequence[np.ndarray]) -> None:
    """Keep, in place, the last W-1 inputs of (window ++ accepted rows) of each request.

    x:      [R, Cc], the inputs given to `causal_conv`
    window: [slots, W-1, Cc], written at `slot` only
    slot:   int [B]
    paths:  B arrays of flat rows from a root downwards; an empty one changes nothing
    """
    kept = window.shape[1]
    for s, path in zip(slot, paths):
        m = min(len(path), kept)
        if m:
            window[s] = np.concatenate((window[s, m:], x[path[-m:]]))


def _case(trees: list[list[int]], Cc: int, W: int) -> Case:
    def build(rng: np.random.Generator) -> dict[str, Any]:
        B = len(trees)
        forest = Forest.of([Tree.of([0] * len(p), p) for p in trees], [7] * B)
        return {
            "x": rng.standard_normal((len(forest), Cc)),
            "w": rng.standard_normal((Cc, W)) / 2,
            "window": rng.standard_normal((B + 2, W - 1, Cc)),
            "slot": rng.permutation(B + 2)[:B].astype(np.int32),
            "forest": forest,
        }

    return Case(f"R={'+'.join(str(len(p)) for p in trees)} Cc={Cc} W={W}", build)


_RAGGED = [-1, 0, 0, 1, 2, 1, 3, -1, 4, 7, 6]
CASES: dict[str, list[Case]] = {
    "causal_conv": [
        _case([[-1]], 3, 4),
        _case([_RAGGED, [-1]], 65, 4),
        _case([_RAGGED], 7, 2),
        _case([list(range(-1, 63)), _RAGGED], 1024, 4),
        _case([[-1]], 8192, 4),
        _case([list(range(-1, 255))], 8192, 4),
    ]
}
