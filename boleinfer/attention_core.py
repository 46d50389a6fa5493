"""What an attention layer does between its projections: two ops, or for one row a request a single launch."""

from __future__ import annotations

from boleinfer.device import Array
from boleinfer.device_forest import DeviceForest
from boleinfer.forest import Forest
from boleinfer.ops.attention import Inputs, launch, takes_inputs, tree_attention
from boleinfer.ops.attention_inputs import Sizes, attention_inputs
from boleinfer.ops.embedding import embedding


def attention_core(
    qgkv: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    forest: Forest | DeviceForest,
    sizes: Sizes,
    rows: Array | None = None,
    wanted: Array | None = None,
) -> Array:
    """The gated output of attention, [R, Hq, Dh]; keys and values of the rows are written to their pages.

    qgkv: [R, (2 Hq + 2 Hkv) Dh], q, gate, k and v side by side; all else as in attention_inputs and tree_attention.
    wanted: int32 [m], where qgkv has the forest's first rows: those that attend, [m, Hq, Dh] (None: all that it has)
    On the GPU a forest of `single` rows is one launch where the kernel can do it, with the bits of the two."""
    (Hq, Hkv, Dh), R = sizes, len(qgkv)
    pages = k_pages, v_pages, page_table, forest
    q, gate = (qgkv[:, i * Hq * Dh : (i + 1) * Hq * Dh].reshape(R, Hq, Dh) for i in range(2))
    if (
        isinstance(forest, DeviceForest)
        and forest.single
        and rows is wanted is None
        and takes_inputs(q, k_pages, page_table, cos.shape[1])
    ):
        inputs = Inputs(qgkv[:, 2 * Hq * Dh :].reshape(R, 2 * Hkv, Dh), q_norm, k_norm, eps, cos, sin)
        return launch(q, gate, k_pages, v_pages, page_table, forest, Dh**-0.5, None, inputs)
    q = attention_inputs(qgkv, q_norm, k_norm, eps, cos, sin, *pages, sizes, rows)
    if wanted is not None:
        q, qgkv = (embedding(wanted, x.reshape(R, -1)) for x in (q, qgkv))
        q, gate = (x.reshape(-1, Hq, Dh) for x in (q, qgkv[:, Hq * Dh : 2 * Hq * Dh]))
        rows = wanted
    return tree_attention(q, gate, *pages, Dh**-0.5, rows)
