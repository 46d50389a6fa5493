"""A step's bookkeeping on the GPU: its rows from host and slots, the accepted paths, what came out. Knows no model.

    inputs.fill(parts); inputs.send()          one copy to the GPU
    plant(inputs, slots, step)                 step.forest, step.page_table, ... for the forward pass
    accept(sampled, inputs, slots, table, step)  step.paths for the commit, step.results for the host
    follow(inputs, slots, step, chain)         the chain of accepted rows for the MTP layer
    ... the next draft (device_draft.py) ...
    step.results.fetch(B)                      one copy to the host: what came out, and the next draft

Nothing between the two copies reads GPU data on the host, so that all of it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from boleinfer import device, kernels
from boleinfer.device import Array
from boleinfer.device_forest import TREE_ROWS, WORDS, DeviceForest, Paths
from boleinfer.device_sampling import SamplingTable
from boleinfer.forest import Tree

_BLOCK = 256  # threads of a request
EMPTY = Tree.chain([])
_OWN = -1 - np.arange(TREE_ROWS, dtype=np.int32)  # the slot's last token, then its draft's
_OWN_PARENT = np.where(_OWN == -1, -1, -2).astype(np.int32)


class Part(NamedTuple):
    """One request's part of a step.

    slot:        its state slot
    known:       its next tokens that are known; None for the one that the last step gave, known to the slot alone
    draft:       the tree below the last known token, or how many nodes of the slot's own draft, the likeliest ones;
                 nodes that the draft turns out not to have become unused rows
    complete:    whether a token is sampled after the known ones (else the prompt goes on and there is no draft)
    next_token:  the token after the known ones when not complete; for the MTP layer alone
    largest:     whether its tokens are those of the largest logits, and nobody reads the others
    draft_nodes: nodes of the next draft at most
    draft_depth: tokens of a path of the next draft at most
    """

    slot: int
    known: Sequence[int] | np.ndarray | None = None
    draft: Tree | int = 0
    complete: bool = True
    next_token: int = -1
    largest: bool = False
    draft_nodes: int = 0
    draft_depth: int = 0


class InputArrays(NamedTuple):
    """int32 views of one buffer for up to R rows, B requests and n sampled rows, on the host or on the GPU.

    start:   [B+1], first rows; an unused request is empty and comes after those in use
    slot:    [B], -1 for an unused request
    known:   [B], rows of known tokens, the last of them the root of the draft; 0 for an unused request
    complete, next_token, draft_nodes, draft_depth: [B], as in Part
    token:   [R], -1 for the slot's last token, -(2 + j) for node j of its draft, which stands at row known + j
    parent:  [R], index inside the request, -1 root, -2 unused; not read where the row is a node of the slot's draft
    wanted:  [n], flat rows after which a token may be sampled: of complete requests, from the root on; -1 for none.
             Each stands at its own place where there is one for every row, else one behind the other
    use:     [n], what is read of their logits, as in linear.head: 0 nothing, 1 all, 2 the largest
    """

    start: Array
    slot: Array
    known: Array
    complete: Array
    next_token: Array
    draft_nodes: Array
    draft_depth: Array
    token: Array
    parent: Array
    wanted: Array
    use: Array


class StepInputs:
    """What the host says of a step, in one buffer: up to `rows` rows of up to `requests` requests.

    sampled: rows after which a token may be sampled, at most
    host:    its arrays in pinned memory; on: the same on the GPU
    """

    def __init__(self, rows: int, requests: int, sampled: int) -> None:
        n = 2 * rows + 7 * requests + 1 + 2 * sampled
        self.rows, self.requests = rows, requests
        self._host = device.pinned(4 * n).view(np.int32)
        self._device = device.empty(n, np.int32)
        self._sent: Callable[[], None] = lambda: None
        self.host, self.on = (_input_arrays(x, rows, requests) for x in (self._host, self._device))
        self.fill(())

    def fill(self, parts: Sequence[Part]) -> None:
        """Writes a step into the host's buffer.

        Raises ValueError for one that does not fit, or whose tree is more than the GPU takes."""
        trees = [_rows(part) for part in parts]
        total = sum(len(token) for token, _ in trees)
        if total > self.rows or len(parts) > self.requests:
            raise ValueError(
                f"a step of {total} rows and {len(parts)} requests; "
                f"its buffer holds {self.rows} rows of {self.requests} requests"
            )
        self._sent()  # the last copy of the buffer has been made
        h, n = self.host, len(parts)
        start = np.cumsum([0, *(len(token) for token, _ in trees)])
        known = [1 if p.known is None else len(p.known) for p in parts]
        sampled = [
            (r, 2 if p.largest else 1)
            for p, s, m, end in zip(parts, start, known, start[1:])
            if p.complete
            for r in range(s + m - 1, end)
        ]
        if len(sampled) > len(h.wanted):
            raise ValueError(f"a step that samples after {len(sampled)} rows; its buffer holds {len(h.wanted)}")
        wanted, use = np.asarray(sampled, np.int32).reshape(-1, 2).T
        places = wanted if len(h.wanted) == self.rows else slice(len(wanted))
        h.start[: n + 1], h.start[n + 1 :] = start, total
        columns = (
            (h.slot, [p.slot for p in parts], -1),
            (h.known, known, 0),
            (h.complete, [int(p.complete) for p in parts], 0),
            (h.next_token, [p.next_token for p in parts], -1),
            (h.draft_nodes, [p.draft_nodes for p in parts], 0),
            (h.draft_depth, [p.draft_depth for p in parts], 0),
        )
        for array, values, unused in columns:
            array[: len(values)] = values
            array[len(values) :] = unused
        h.wanted[:], h.use[:] = -1, 0
        h.wanted[places], h.use[places] = wanted, use
        h.token[total:], h.parent[total:] = -1, -2
        for first, (token, parent) in zip(start, trees):
            h.token[first : first + len(token)] = token
            h.parent[first : first + len(token)] = parent

    def send(self) -> None:
        """Queues the copy to the GPU on the current stream."""
        self._sent = device.send(self._device, self._host)


class Slots:
    """What the GPU remembers of each request from step to step, by state slot. int32 arrays, draft_prob float32.

    last_token, length: [slots], the last token that was sampled, and how many tokens are committed
    pages:        [slots, M], pages in order of position, -1 behind them
    draft_token, draft_parent, draft_prob: [slots, L], the next draft, likelier nodes first, so that parents
                  come before children; parents inside the draft, -1 below the root; probabilities of the whole path
    draft_count:  [slots], its nodes
    """

    def __init__(self, slots: int, pages: int, draft_nodes: int) -> None:
        if not 0 < draft_nodes < TREE_ROWS:
            raise ValueError(f"drafts of {draft_nodes} nodes; the GPU takes 1 to {TREE_ROWS - 1}")
        self.last_token, self.length, self.draft_count = (_minus_ones((slots,)) for _ in range(3))
        self.pages = _minus_ones((slots, pages))
        self.draft_token, self.draft_parent = (_minus_ones((slots, draft_nodes)) for _ in range(2))
        self.draft_prob = device.empty((slots, draft_nodes), np.float32)

    def admit(self, slot: int, pages: np.ndarray, committed: int = 0) -> None:
        """A request moves in: its pages, int [at most M], and how many of its tokens they hold; no draft."""
        M = self.pages.shape[1]
        if len(pages) > M:
            raise ValueError(f"a request of {len(pages)} pages; a slot holds {M}")
        row = np.full(M, -1, np.int32)
        row[: len(pages)] = pages
        device.write(self.pages[slot], row)
        for array, value in ((self.last_token, -1), (self.length, committed), (self.draft_count, 0)):
            device.write(array[slot : slot + 1], np.asarray([value], np.int32))


class Emitted(NamedTuple):
    """What a step gave one request.

    tokens:  sampled along the accepted path, in order; empty when the prompt goes on or on an error
    drafted: rows that were guesses; len(tokens) - 1 of them were right
    error:   0, or the negative number that was sampled where the last known token's logits are broken
    draft:   the slot's draft for the next step
    """

    tokens: list[int]
    drafted: int
    error: int
    draft: Tree


class Results:
    """What the host has to know of a step, views of one GPU buffer for up to B requests.

    count [B], tokens that came out; error [B]; drafted [B]; token [B, L+1]
    draft_count [B], draft_token, draft_parent, draft_prob [B, L]: as in Slots, where the step drafts
    """

    def __init__(self, requests: int, draft_nodes: int) -> None:
        self._shape = requests, draft_nodes
        self.buffer = _minus_ones((requests * (4 * draft_nodes + 5),))
        self._copies = [device.pinned(self.buffer.nbytes).view(np.int32) for _ in range(2)]  # of this and the last step
        self.count, self.error, self.drafted, self.draft_count, self.token, *draft = self._views(self.buffer)
        self.draft_token, self.draft_parent, self.draft_prob = draft

    def fetch(self, requests: int, drafts: bool) -> Callable[[], list[Emitted]]:
        """Queues the copy to the host; what it returns waits for it and gives the first requests' outcomes.

        drafts: whether the step has drafted
        They have to be taken before the results of the next step but one are fetched."""
        self._copies.reverse()
        copy = self._copies[0]
        done = device.fetch(copy, self.buffer)

        def outcomes() -> list[Emitted]:
            done()
            return self.parse(copy, requests, drafts)

        return outcomes

    def parse(self, buffer: np.ndarray, requests: int, drafts: bool) -> list[Emitted]:
        """The first requests' outcomes from a copy of the buffer."""
        *numbers, token, draft_token, draft_parent, draft_prob = self._views(buffer)
        found = []
        for b, (count, error, drafted, nodes) in enumerate(zip(*(array[:requests].tolist() for array in numbers))):
            draft = EMPTY
            if drafts and nodes > 0:
                draft = Tree(*(array[b, :nodes].copy() for array in (draft_token, draft_parent, draft_prob)))
            found.append(Emitted(token[b, :count].tolist(), drafted, error, draft))
        return found

    def _views(self, buffer: Array) -> list[Array]:
        B, L = self._shape
        ends = np.cumsum([0, B, B, B, B, B * (L + 1), B * L, B * L, B * L]).tolist()
        views = [buffer[a:b] for a, b in zip(ends, ends[1:])]
        return [*views[:4], views[4].reshape(B, L + 1), *(v.reshape(B, L) for v in views[5:7]),
                views[7].view(np.float32).reshape(B, L)]  # fmt: skip


class Step:
    """A step's arrays on the GPU between its two copies, all int32.

    forest:     the rows (start is the inputs')
    slot:       [B] (the inputs'); page_table: [B, M]
    root:       [B], the last known row, inside the request; -1 for an unused one
    paths:      the accepted rows
    results:    for the host
    """

    def __init__(self, inputs: StepInputs, slots: Slots) -> None:
        R, B = inputs.rows, inputs.requests
        self.slot = inputs.on.slot
        self.forest = new_forest(R, B, start=inputs.on.start)
        self.page_table = _minus_ones((B, slots.pages.shape[1]))
        self.root = _minus_ones((B,))
        self.paths = Paths(_minus_ones((R,)), _minus_ones((B,)))
        self.results = Results(B, slots.draft_token.shape[1])


class Chain:
    """The accepted rows of a step as the MTP layer reads them, each request's a chain from its first row on.

    forest:     token is the one after each accepted row; start and committed are the step's
    hidden_row: int32 [R], the row of the step whose hidden row pairs with it; -1 at an unused row
    last_row:   int32 [B], the chain's last row; -1 when it is empty
    """

    def __init__(self, step: Step) -> None:
        R, B = len(step.forest), len(step.slot)
        self.forest = new_forest(R, B, start=step.forest.start, committed=step.forest.committed)
        self.hidden_row, self.last_row = _minus_ones((R,)), _minus_ones((B,))


def plant(inputs: StepInputs, slots: Slots, step: Step) -> None:
    """The step's forest, page table and roots from what the host sent and what the slots hold."""
    on = inputs.on
    args = {
        "given_token": on.token,
        "given_parent": on.parent,
        **{name: getattr(on, name) for name in ("start", "slot", "known")},
        **{name: getattr(slots, name) for name in ("last_token", "length", "pages")},
        **{name: getattr(slots, name) for name in ("draft_token", "draft_parent", "draft_count")},
        **forest_rows(step.forest),
        "ancestors": step.forest.ancestors,
        "committed": step.forest.committed,
        "root": step.root,
        "page_table": step.page_table,
        "R": inputs.rows,
        "L": slots.draft_token.shape[1],
        "M": slots.pages.shape[1],
    }
    kernels.launch("plant.cu", "plant", inputs.requests, _BLOCK, args)


def accept(sampled: Array, inputs: StepInputs, slots: Slots, table: SamplingTable, step: Step) -> None:
    """Walks each tree along the sampled tokens: the step's paths and results, tokens and lengths of slots and texts.

    sampled: int32 [R], the token after each row from the root on (others are not read), negative where its logits are
             broken. At the root that ends the request; below it the walk ends above, as in sampling.accept.
    """
    on, forest, results = inputs.on, step.forest, step.results
    args = {
        "sampled": sampled,
        "token": forest.token,
        "parent": forest.parent,
        **{name: getattr(on, name) for name in ("start", "slot", "known", "complete")},
        **step.paths._asdict(),
        "emitted": results.token,
        "emitted_count": results.count,
        "error": results.error,
        "drafted": results.drafted,
        **{name: getattr(slots, name) for name in ("last_token", "length", "draft_count")},
        **{name: getattr(table, name) for name in ("whole", "generated", "seen")},
        "text_length": table.known,
        "L": results.token.shape[1] - 1,
        "V": table.vocab,
    }
    kernels.launch("accept.cu", "walk", inputs.requests, _BLOCK, args)


def follow(inputs: StepInputs, slots: Slots, step: Step, chain: Chain) -> None:
    """The chain of accepted rows, each with the token that follows it; after `accept`."""
    on, forest = inputs.on, chain.forest
    args = {
        "path": step.paths.row,
        "count": step.paths.count,
        "step_token": step.forest.token,
        "committed": step.forest.committed,
        **{name: getattr(on, name) for name in ("start", "slot", "complete", "next_token")},
        "last_token": slots.last_token,
        **forest_rows(forest),
        "hidden_row": chain.hidden_row,
        "last_row": chain.last_row,
        "R": inputs.rows,
    }
    kernels.launch("accept.cu", "follow", inputs.requests, _BLOCK, args)


def new_forest(rows: int, requests: int, start: Array = None, committed: Array = None) -> DeviceForest:
    """A forest of unwritten rows; `start` and `committed` may be another one's."""
    return DeviceForest(
        **{name: _minus_ones((rows,)) for name in ("token", "parent", "depth", "request", "position", "kv_slot")},
        ancestors=_minus_ones((rows, WORDS)).view(np.uint32),
        chain=_minus_ones((requests,)),
        start=_minus_ones((requests + 1,)) if start is None else start,
        committed=_minus_ones((requests,)) if committed is None else committed,
    )


def forest_rows(forest: DeviceForest) -> dict[str, Array]:
    """Arguments that every kernel writing a forest has."""
    names = ("token", "parent", "depth", "request", "position", "kv_slot", "chain")
    return {name: getattr(forest, name) for name in names}


def _rows(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents of a request's rows, as InputArrays has them."""
    if part.known is None and part.complete and isinstance(part.draft, int) and part.draft < TREE_ROWS:
        return _OWN[: 1 + part.draft], _OWN_PARENT[: 1 + part.draft]
    token = np.asarray([-1] if part.known is None else part.known, np.int32)
    m, draft = len(token), part.draft
    n = draft if isinstance(draft, int) else len(draft)
    if not m or (n and not part.complete):
        raise ValueError("a request needs a known token, and a draft needs all of them to be known")
    parent = np.arange(-1, m - 1, dtype=np.int32)
    if isinstance(draft, int):
        tail, above = -2 - np.arange(n, dtype=np.int32), np.full(n, -2, np.int32)
        chain = False  # nobody here knows
    else:
        tail, above = draft.token, draft.parent + m  # -1, a root's, becomes m - 1
        chain = draft.is_chain
    if n and not chain and m + n > TREE_ROWS:
        raise ValueError(f"a tree of {m + n} rows that is no chain; the GPU takes {TREE_ROWS}")
    return np.concatenate([token, tail]), np.concatenate([parent, above])


def _input_arrays(buffer: Array, R: int, B: int) -> InputArrays:
    widths = [B + 1, *[B] * 6, R, R]
    sampled = (len(buffer) - sum(widths)) // 2
    ends = np.cumsum([0, *widths, sampled, sampled]).tolist()
    return InputArrays(*(buffer[a:b] for a, b in zip(ends, ends[1:])))


def _minus_ones(shape: tuple[int, ...]) -> Array:
    """An int32 array on the GPU of -1, which reads as "nothing" everywhere here."""
    array = device.empty(shape, np.int32)
    device.fill(array, 0xFF)
    return array
