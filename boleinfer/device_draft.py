"""The draft tree of the MTP layer on the GPU, grown a level at a time and kept in the slots. Knows no model.

    y = the rows last_row of the MTP layer over device_step.Chain
    for level in range(drafts.levels + 1):
        found = candidates(logits of y, top_k, rows)    rows: last_row at level 0, then drafts.row
        grow(drafts, level, found, inputs, slots)       what to run next: token, row, source, position, forest
        y = the MTP layer over it, with y[source] (not after the last level)
    keep(drafts, inputs, slots, results)

The tree is that of draft.mtp.MTPDrafter, with three differences: probabilities are float32 products, nodes that are
equally likely come in the order of their logits and ids (there in any order), and the draft is stored with the likelier
nodes first. Logits that hold NaN or infinity give no candidate, and neither does a single logit of -infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import TREE_ROWS
from boleinfer.device_step import Results, Slots, StepInputs, forest_rows, new_forest

MOST_CHILDREN, MOST_CANDIDATES = 8, 512  # of a node, of a request
_WARPS, _PART, _MOST_WARPS = 8, 512, 16  # of a block of candidates, logits of a warp, of a block of grow
_DRAFT = ("draft_token", "draft_parent", "draft_prob", "draft_count")
LEVEL_ROWS = 8  # nodes of a level of all drafts together, and rows of each request, where several have one node each


@dataclass(frozen=True)
class DraftPlan:
    """A way in which the GPU drafts with the MTP layer (draft.mtp.MTPDrafter explains most of it).

    least: probability below which a node is not kept
    ids:   only the first of the vocabulary are looked at, and those of the texts (draft_head.py); None: all. With
           Qwen's 151,643, behind 256 tokens of a file of Python's library, 99 % of the tokens are among 65,536 and the
           file's own so far (98 % among 65,536 alone, 97 % among 32,768 and the file's)
    """

    top_k: int = 2
    width: int = 1
    depth: int = 4
    worth: float = 0.0
    least: float = 0.01
    ids: int | None = 65536

    def for_requests(self, requests: int) -> DraftPlan:
        """The same for a step of up to so many: fewer nodes of each, so that a level is cheap, and no deeper than the
        rows that each one has are worth."""
        depth = self.depth if requests == 1 else min(self.depth, LEVEL_ROWS - 1)
        return replace(self, width=max(1, min(self.width, LEVEL_ROWS // requests)), depth=depth)


DRAFT_PLANS = (  # few: each is captured with each envelope
    DraftPlan(top_k=4, width=8),
    DraftPlan(top_k=4, width=8, depth=8),
    DraftPlan(ids=None),  # for texts in other languages
)


class Drafts:
    """The drafts of a step's first B requests while they grow.

    top_k, width, depth, worth: as in MTPDrafter
    least:    probability below which a node is not kept (Limits.min_prob)
    levels:   passes of the MTP layer after the chain: depth - 1
    forest:   the MTP layer's trees, `levels * width` rows a request, filled from the front as nodes are chosen
    token, row, source, position: int32 [B * width], the rows that the next pass runs, -1 for none. row: in `forest`;
              source: the row of y that it pairs with; position: its own, 0 for none
    candidate_token, candidate_parent, candidate_prob: [B, C], all that were looked at, at fixed places (cuda/draft.cu)
    """

    def __init__(
        self, requests: int, top_k: int = 2, width: int = 1, depth: int = 6, worth: float = 0.5, least: float = 0.0
    ) -> None:
        self.top_k, self.width, self.worth, self.least = top_k, width, worth, least
        self.levels, self.requests = depth - 1, requests
        C = top_k * (1 + width * self.levels)
        if not (1 <= top_k <= MOST_CHILDREN and width >= 1 and depth >= 1 and C <= MOST_CANDIDATES):
            raise ValueError(
                f"drafts with top_k {top_k}, width {width}, depth {depth}; the GPU takes top_k 1 to {MOST_CHILDREN} "
                f"and top_k * (1 + width * (depth - 1)) up to {MOST_CANDIDATES}"
            )
        if width * self.levels > TREE_ROWS:
            raise ValueError(f"{width * self.levels} nodes to run for a draft; the GPU takes {TREE_ROWS}")

        def ints(*shape: int) -> Array:
            array = device.empty(shape, np.int32)
            device.fill(array, 0xFF)
            return array

        self.forest = new_forest(max(1, requests * width * self.levels), requests)
        self.token, self.row, self.source, self.position = (ints(requests * width) for _ in range(4))
        self.candidate_token, self.candidate_parent = ints(requests, C), ints(requests, C)
        self.candidate_prob = device.empty((requests, C), np.float32)
        self._run, self._chosen = ints(requests), ints(requests, width)


class Candidates(NamedTuple):
    """The likeliest tokens of rows of logits, as their parts have found them.

    part_key: uint64 [n, parts, top_k]; part_sum: float32 [n, parts, 2] (cuda/draft.cu)
    rows:     int32 [n], -1 where the row holds nothing (None: all hold something)
    names:    int32 [vocab], the id of each column, -1: none (None: columns are ids)"""

    part_key: Array
    part_sum: Array
    rows: Array | None
    names: Array | None


def candidates(logits: Array, top_k: int, rows: Array | None = None, names: Array | None = None) -> Candidates:
    """The likeliest tokens of each row of logits, float32 [n, vocab], by falling logit, of equal ones the lower column.

    Their probabilities are p = e^(x - max) / sum e^(x - max), sums in float32."""
    n, vocab = logits.shape
    parts = -(-vocab // _PART)
    found = Candidates(device.empty((n, parts, top_k), np.uint64), device.empty((n, parts, 2), np.float32), rows, names)
    args = {"logits": logits, "rows": rows, "part_key": found.part_key, "part_sum": found.part_sum}
    args |= {"Vocab": vocab, "Parts": parts}
    grid = n, -(-parts // _WARPS)
    kernels.launch("draft.cu", "candidates", grid, 32 * _WARPS, args, constants={"Top": top_k})
    return found


def grow(drafts: Drafts, level: int, found: Candidates, inputs: StepInputs, slots: Slots) -> None:
    """Adds a level's candidates to the trees and chooses the rows of the next pass, of all levels but the last.

    found: of n rows, n = B at level 0 (children of the root), then B * width (of the last pass)
    The draft's bounds are the inputs' draft_nodes and draft_depth. Level 0 begins new trees behind slots.length tokens.
    """
    d, on = drafts, inputs.on
    B, width = d.requests, d.width
    n, parts, top_k = found.part_key.shape
    expected = B if level == 0 else B * width, d.top_k
    if (n, top_k) != expected:
        raise ValueError(f"level {level} of these drafts needs candidates {expected}, got {n, top_k}")
    args = {
        **found._asdict(),
        "Parts": parts,
        "slot": on.slot[:B],
        "limit": on.draft_nodes[:B],
        "reach": on.draft_depth[:B],
        "length": slots.length,
        **_candidates(d),
        "run": d._run,
        "chosen": d._chosen,
        **{f"level_{name}": getattr(d, name).reshape(B, width) for name in ("token", "row", "source", "position")},
        **forest_rows(d.forest),
        **{name: getattr(d.forest, name) for name in ("ancestors", "start", "committed")},
        "C": d.candidate_prob.shape[1],
        "Width": width,
        "Levels": d.levels,
        "level": level,
        "worth": d.worth,
    }
    block = max(-(-width * d.top_k // 32), min(width, _MOST_WARPS)) * 32
    kernels.launch("draft.cu", "grow", B, block, args, constants={"Top": d.top_k})


def keep(drafts: Drafts, inputs: StepInputs, slots: Slots, results: Results) -> None:
    """The likeliest candidates, as many as draft_nodes allows, become the slots' drafts for the next step.

    The host is told of them in the results."""
    B, C, L = drafts.requests, drafts.candidate_prob.shape[1], slots.draft_token.shape[1]
    args = {
        **_candidates(drafts),
        "slot": inputs.on.slot[:B],
        "limit": inputs.on.draft_nodes[:B],
        **{name: getattr(slots, name) for name in _DRAFT},
        **{f"told_{name}": getattr(results, name)[:B] for name in _DRAFT},
        "C": C,
        "L": L,
        "least": drafts.least,
    }
    kernels.launch("draft.cu", "keep", B, -(-C // 32) * 32, args, constants={"Top": drafts.top_k})


def _candidates(drafts: Drafts) -> dict[str, Array]:
    return {name: getattr(drafts, name) for name in ("candidate_token", "candidate_parent", "candidate_prob")}
