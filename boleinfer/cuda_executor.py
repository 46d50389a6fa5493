"""One step on the GPU: everything from the rows to the accepted tokens and the next draft, replayed as one graph.

The host sends what it wants computed (StepInputs), and reads which tokens came out (Results): two copies a step. Steps
have a few sizes, envelopes of rows; what an envelope has too many of is unused rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from boleinfer import device, gdn_few
from boleinfer.costs import CostTable
from boleinfer.decoder import Decoder
from boleinfer.device import Array, Fp8
from boleinfer.device_draft import LEVEL_ROWS, DraftPlan, Drafts, candidates, grow, keep
from boleinfer.device_forest import upload as upload_forest
from boleinfer.device_forest import upload_paths
from boleinfer.device_sampling import SamplingTable
from boleinfer.device_step import EMPTY, Chain, Emitted, Part, Slots, Step, StepInputs, accept, follow, plant
from boleinfer.device_waiting import MOST_WAITING, RING, Waiting
from boleinfer.draft_head import MORE, DraftHead, rows_of
from boleinfer.executor import Outcome
from boleinfer.forest import Forest, Tree
from boleinfer.graphs import Eager, Graphs
from boleinfer.ops.embedding import embedding
from boleinfer.request import Request
from boleinfer.sampling import BROKEN, Sampler
from boleinfer.scheduler import Work
from boleinfer.state import Batch, Place, State

ONE = 1  # row of the envelope in which a lone request decodes plainly
SMALLEST, LARGEST_CAPTURED = 8, 128  # rows of the others; larger steps read prompts and are captured as they come again
ALONE_ROWS = 16  # rows that are accepted of a request that decodes alone, at most


def sampled_rows(max_batch: int, draft_nodes: int) -> int:
    """Rows of a step after which a token may be sampled, at most: a draft's go into a captured step."""
    return max_batch + min(max_batch * max(1, draft_nodes), LARGEST_CAPTURED)


class _Kind(NamedTuple):
    """What is known of a step, and what it does for the MTP layer beside verifying.

    single: no request has more than one row, or asks for logits
    waits: the hidden rows that were accepted are kept for later; takes: the layer takes them in; plan: and then drafts
    alone: for the first request only, which decodes and of which ALONE_ROWS are accepted at most
    few: no request has more than gdn_few.ROWS rows, where all together may have many
    quiet: nobody asks for logits of a step that reads much of a prompt
    """

    single: bool
    waits: bool
    takes: bool
    plan: DraftPlan | None
    alone: bool = False
    few: bool = False
    quiet: bool = False


class _Frame:
    """The arrays of one envelope of rows.

    largest: uint64, of the rows inputs.wanted of which only that is read; zeros between steps
    """

    def __init__(self, rows: int, requests: int, sampled: int, slots: Slots):
        self.inputs = StepInputs(rows, min(requests, rows), min(rows, sampled))
        self.step = Step(self.inputs, slots)
        self.chain = Chain(self.step)
        self.token = device.buffer((rows,), np.int32, poison=True)
        self.largest = device.upload(np.zeros(len(self.inputs.on.wanted), np.uint64))
        self.first = device.upload(np.arange(min(rows, ALONE_ROWS), dtype=np.int32))
        self.ready: set[_Kind] = set()
        self.drafts: dict[_Kind, Drafts] = {}
        self.parts: list[Part] | None = None  # what the inputs on the GPU say
        self.last: _Kind | None = None  # of the last step

    def add_drafts(self, kind: _Kind, plan: DraftPlan) -> None:
        """The arrays of a way to draft."""
        requests = 1 if kind.alone else self.inputs.requests
        d = plan.for_requests(requests)
        self.drafts[kind] = Drafts(requests, d.top_k, d.width, d.depth, d.worth, d.least)


class CudaExecutor:
    """Runs an engine's steps on the current GPU.

    allowed:   bool [vocab], the ids that are tokens
    max_batch: requests of a step; max_rows: rows of a step; draft_nodes: guesses of a request and step
    pages:     pages of a request, at most
    drafting:  the ways in which the GPU drafts, numbered from 1
    graphs:    False launches kernel by kernel
    """

    def __init__(
        self,
        model: Decoder,
        state: State,
        allowed: np.ndarray,
        max_batch: int,
        max_rows: int,
        draft_nodes: int,
        pages: int,
        drafting: Sequence[DraftPlan] = (),
        graphs: bool = True,
    ):
        self.model, self.state = model, state
        self.price: Callable[..., CostTable | None] = lambda fresh=False: None
        self.overrule: Callable[..., None] | None = None  # what comes in the place of drafts, in measurements
        self.runner: Eager | Graphs = Graphs() if graphs else Eager()
        self._waiting: Waiting | None = None
        self._heads: dict[int | None, DraftHead] = {}  # by the ids that are always there
        self._unheard: deque[int] = deque(maxlen=MORE)  # tokens that came since heads were told
        self._max_batch, self._max_rows, self._draft_nodes = max_batch, max_rows, max(1, draft_nodes)
        self.draft_as(drafting if draft_nodes else ())
        self._slots = Slots(state.slots.size, pages, self._draft_nodes)
        self._sampling = SamplingTable(state.slots.size, model.config.vocab_size, allowed)
        self._frames: dict[int, _Frame] = {}
        self.most_drafted = LARGEST_CAPTURED
        self._drafts: dict[int, Tree] = {}  # of the slots, as far as the host knows
        self._taken: dict[int, int] = {}  # by slot, the committed tokens that the MTP layer has taken in
        self._taking = False  # whether the step that is launched has got as far as to move its requests on

    def draft_as(self, drafting: Sequence[DraftPlan]) -> None:
        """The ways in which the GPU drafts from now on; while no request runs."""
        self._drafting = tuple(drafting)
        self.depths: Sequence[int] = [d.depth for d in self._drafting]
        if self._drafting and self._waiting is None:
            self._waiting = Waiting(self.state.slots.size, self.model.config.hidden_size, self.state.dtype)
        head = self.model.weights["lm_head"]
        for ids in {d.ids for d in self._drafting if d.ids is not None} - self._heads.keys():
            if not isinstance(head, Fp8) and rows_of(ids) < len(head):
                self._heads[ids] = DraftHead(head, ids, max(LEVEL_ROWS, self._max_batch))

    def capture(self) -> None:
        sizes = {min(SMALLEST << i, self._max_rows) for i in range(((self._max_rows - 1) // SMALLEST).bit_length() + 1)}
        asked = []
        for size in sorted({ONE} | sizes):  # larger ones are not captured, but their kernels compile with the others
            ways = range(1 + len(self._drafting) if size >= min(SMALLEST, self._max_rows) else 1)
            asked += [self._frame(size, way) for way in ways]
            if size <= LARGEST_CAPTURED:
                asked += [self._frame(size, 0, single=True), *(self._frame(size, way, few=True) for way in ways)]
                if size <= self._envelope(1 + self._draft_nodes, 1):
                    asked += [self._frame(size, way, alone=True) for way in ways[1:]]
        self._rehearse(asked)

    def check(self, sampler: Sampler) -> None:
        self._sampling.check(sampler)

    def admit(self, request: Request) -> None:
        place = request.home
        self._drafts[place.slot], self._taken[place.slot] = EMPTY, request.committed
        with self.runner.on():
            self._slots.admit(place.slot, place.pages, request.committed)
            self._sampling.set(place.slot, request.sampler, request.tokens)
            for head in self._heads.values():
                head.add(request.tokens)

    def start(self, works: Sequence[Work], way: int = 0) -> Callable[[], list[Outcome]]:
        quiet = all(w.request.params.logprobs is None for w in works)
        longest = max(len(w.tree) for w in works)
        alone = len(works) == 1 and self._is_short(works[0])
        single, few = quiet and longest == 1, longest <= gdn_few.ROWS
        rows = sum(len(w.tree) for w in works)
        frame, kind = self._frame(rows, way, single=single, alone=alone, few=few, quiet=quiet)
        self._rehearse([(frame, kind)])
        frame.last = kind
        if kind.waits or kind.takes:
            self._take_in([w.request for w in works], at_once=kind.takes)
        parts = [self._part(w, kind.plan) for w in works]
        if len(parts) == 1 and isinstance(nodes := parts[0].draft, int) and nodes:  # its other rows would be empty
            parts[0] = parts[0]._replace(draft=max(nodes, min(frame.inputs.rows - works[0].known, self._draft_nodes)))
        plain = all(p.known is None and isinstance(p.draft, int) for p in parts)  # last tokens and drafts are there
        if not plain or parts != frame.parts:
            frame.inputs.fill(parts)
            frame.parts = parts if plain else None
            with self.runner.on():
                frame.inputs.send()
        self._taking = False
        try:
            with self.runner.on():
                key = frame.inputs.rows, kind
                logits = self.runner.run(key, lambda: self._step(frame, kind), kind.quiet)
                fetched = frame.step.results.fetch(len(works), drafts=way > 0)
                if kind.plan is not None:  # in time for the next drafts but one, so that no step waits for it
                    for head in self._heads.values():
                        head.add(self._unheard)
                    self._unheard.clear()
        except Exception as error:
            for w in works if self._taking else ():
                w.request.fail(f"a step failed when the GPU had taken its tokens ({error}); send the request again")
            raise
        return lambda: [
            self._outcome(frame, kind, logits, b, w, emitted) for b, (w, emitted) in enumerate(zip(works, fetched()))
        ]

    def may_repeat(self, works: Sequence[Work]) -> bool:
        """Only plain decoding and drafts of the GPU's own go on by themselves, where there is room.

        Each request keeps as many rows as it has: the host reads too late how likely the next nodes are."""
        longest = max(self.depths, default=0)
        return all(
            w.decodes
            and (w.drafted == 0 or self._is_own(w))
            and w.request.params.logprobs is None
            and len(w.request.tokens) + (longest if w.drafted else 0) + 1 < w.request.limit
            for w in works
        )

    def repeat(self, rows: int, way: int = 0) -> None:
        """Queues the last step of so many rows again, as the GPU stands now; to measure, on requests to be dropped."""
        frame = self._frames[self._envelope(rows, way)]
        kind = frame.last
        assert kind is not None
        self.runner.run((frame.inputs.rows, kind), lambda: self._step(frame, kind), kind.quiet)

    def time(self, works: Sequence[Work], way: int, about_s: float, most: int) -> float:
        rows = sum(len(w.tree) for w in works)
        with self.runner.on():
            for w in works:  # their lengths may have been changed by hand
                self._slots.admit(w.request.home.slot, w.request.home.pages, w.request.committed)
                self._taken[w.request.home.slot] = w.request.committed
        self.start(works, way)()
        once, repeats = 0.0, 1
        for _ in range(2):
            began = time.perf_counter()
            for _ in range(repeats):
                self.repeat(rows, way)
            self.runner.wait()
            once = (time.perf_counter() - began) / repeats
            repeats = max(2, min(most, int(about_s / once)))
        return once

    def logits(self, tokens: Sequence[int], start: int, place: Place) -> np.ndarray:
        with self.runner.on():
            chain = Forest.of([Tree.chain(tokens)], [start])
            slot = device.upload(np.asarray([place.slot], np.int32))
            batch = Batch(upload_forest(chain), slot, device.upload(place.pages[None]))
            hidden, pending = self.model.forward(batch, self.state)
            self.state.commit(batch, pending, upload_paths(chain, [np.arange(len(tokens))]))
            n = sampled_rows(self._max_batch, self._draft_nodes)  # rows whose logits a step holds as well
            pieces = [hidden[i : i + n] for i in range(0, len(tokens), n)]
            return np.concatenate([device.download(self.model.logits(piece)) for piece in pieces])

    def _kind(
        self, way: int, rows: int, single: bool = False, alone: bool = False, few: bool = False, quiet: bool = True
    ) -> _Kind:
        """Of a step of so many rows. A step that reads much of a prompt leaves too many rows to wait, and would keep
        many logits; one that drafts hardly ever has single rows."""
        single &= way == 0
        quiet &= rows > LARGEST_CAPTURED
        few &= not single and rows > gdn_few.ROWS  # of smaller envelopes it is known
        if not self._drafting:
            return _Kind(single, False, False, None, few=few, quiet=quiet)
        takes = way > 0 or rows > LARGEST_CAPTURED
        plan = self._drafting[way - 1] if way else None
        return _Kind(single, not takes, takes, plan, alone and way > 0, few, quiet)

    def _take_in(self, requests: Sequence[Request], at_once: bool) -> None:
        """The MTP layer's keys and values of tokens that wait.

        at_once: of all, else only of those requests whose rings fill up, and as many as go in one pass of others of
        which many wait: its launches hide behind the step that is under way, those of several passes would not"""

        def waiting(most: int) -> list[Request]:
            return [r for r in requests if r.committed - self._taken[r.home.slot] > most]

        n = max(1, self._max_rows // RING)
        late = waiting(0) if at_once else waiting(MOST_WAITING) or waiting(MOST_WAITING // 2)[:n]
        while late:
            now, late = late[:n], late[n:]
            slots, starts = [r.home.slot for r in now], [self._taken[r.home.slot] for r in now]
            chains = [Tree.chain(r.tokens[t + 1 : r.committed + 1]) for r, t in zip(now, starts)]
            pages = np.full((len(now), self._slots.pages.shape[1]), -1, np.int32)
            for row, r in zip(pages, now):
                row[: len(r.home.pages)] = r.home.pages
            with self.runner.on():
                forest = upload_forest(Forest.of(chains, starts))
                batch = Batch(forest, device.upload(np.asarray(slots, np.int32)), device.upload(pages))
                assert self._waiting is not None
                hidden = self._waiting.rows_of(slots, [range(t, r.committed) for r, t in zip(now, starts)])
                self.model.mtp_memory(forest.token, hidden, forest.position, batch, self.state)
            self._taken.update((r.home.slot, r.committed) for r in now)

    def _step(self, frame: _Frame, kind: _Kind) -> Array | None:
        """All launches of a step; returns what may be read after it, its logits, where any are asked for."""
        inputs, step, slots = frame.inputs, frame.step, self._slots
        plant(inputs, slots, step)
        most = gdn_few.ROWS if kind.few else None
        batch = Batch(replace(step.forest, single=kind.single, most=most), step.slot, step.page_table)
        hidden, pending = self.model.forward(batch, self.state)  # [R, D]
        wanted = inputs.on.wanted
        rows, use = hidden if len(wanted) == inputs.rows else embedding(wanted, hidden), inputs.on.use
        logits, largest = self.model.logits_to_sample(rows, use, self._sampling.allowed, frame.largest)  # [n, vocab]
        self._sampling.sample(logits, largest, wanted, use, step.forest, step.slot, step.root, frame.token)
        self._taking = True
        accept(frame.token, inputs, slots, self._sampling, step)
        self.state.commit(batch, pending, step.paths)
        if kind.waits:
            assert self._waiting is not None
            self._waiting.keep(hidden, step)
        if kind.takes:
            follow(inputs, slots, step, frame.chain)
            accepted = Batch(frame.chain.forest, step.slot, step.page_table)
            some, n = (frame.first, len(frame.first)) if kind.alone else (None, inputs.rows)
            chain, source = frame.chain.forest, frame.chain.hidden_row[:n]
            pairs = chain.token[:n], hidden, chain.position[:n]
            if kind.plan is not None:
                last = frame.chain.last_row[: frame.drafts[kind].requests]
                y = self.model.mtp(*pairs, accepted, self.state, some, source, last)
                self._draft(frame, kind, last, y)
            else:
                self.model.mtp_memory(*pairs, accepted, self.state, source)
        return None if kind.single or kind.quiet else logits

    def _draft(self, frame: _Frame, kind: _Kind, last: Array, y: Array) -> None:
        """The MTP layer's tree for the next step, into the slots. y: the layer's rows of the last accepted tokens."""
        assert kind.plan is not None
        inputs, step, drafts = frame.inputs, frame.step, frame.drafts[kind]
        tree = Batch(drafts.forest, step.slot[: drafts.requests], step.page_table[: drafts.requests])
        short = self._heads.get(kind.plan.ids)
        rows, names = (None, None) if short is None else (short.rows, short.ids)
        for level in range(drafts.levels + 1):
            logits = self.model.logits(y, rows)
            found = candidates(logits, drafts.top_k, drafts.row if level else last, names)
            grow(drafts, level, found, inputs, self._slots)
            if level < drafts.levels:
                y = self.model.mtp(drafts.token, y, drafts.position, tree, self.state, drafts.row, drafts.source)
        keep(drafts, inputs, self._slots, step.results)
        if self.overrule is not None:
            self.overrule(kind.plan, drafts.requests, inputs, self._slots, step.results)

    def _frame(self, rows: int, way: int, **more: bool) -> tuple[_Frame, _Kind]:
        """The smallest envelope that holds so many rows, and the kind of a step in it, with their arrays."""
        size = self._envelope(rows, way)
        if size not in self._frames:
            sampled = sampled_rows(self._max_batch, self._draft_nodes)
            self._frames[size] = _Frame(size, self._max_batch, sampled, self._slots)
        frame, kind = self._frames[size], self._kind(way, size, **more)
        if kind.plan is not None and kind not in frame.drafts:
            frame.add_drafts(kind, kind.plan)
        return frame, kind

    def _rehearse(self, asked: Sequence[tuple[_Frame, _Kind]]) -> None:
        """Makes ready what is not; the kernels that any of them lacks compile side by side.

        As nobody takes part, a rehearsal reads and writes what its step has made, and `largest` stays zeros."""
        new = [(frame, kind) for frame, kind in dict.fromkeys(asked) if kind not in frame.ready]
        steps = [partial(self._step, *made) for made in new]
        for n, (frame, kind) in enumerate(new):
            if frame.inputs.rows <= LARGEST_CAPTURED:
                frame.inputs.fill(())
                frame.parts = None
                with self.runner.on():
                    frame.inputs.send()
                    self.runner.rehearse((frame.inputs.rows, kind), steps[n], steps[n + 1 :])
            frame.ready.add(kind)

    def _envelope(self, rows: int, way: int) -> int:
        """Rows of the smallest frame that holds so many."""
        size = ONE if rows == ONE and not way else SMALLEST
        while size < rows:
            size *= 2
        return min(size, self._max_rows)

    def _is_short(self, work: Work) -> bool:
        """Whether no path of a work can be longer than ALONE_ROWS, the GPU's own drafts included."""
        deepest = max([*self.depths, *(work.draft.depth + 1).tolist()], default=0)
        return work.decodes and 1 + deepest <= ALONE_ROWS

    def _is_own(self, work: Work) -> bool:
        """Whether a work's draft is the likeliest nodes of its slot's, so that the GPU knows it."""
        draft, own = work.draft, self._drafts[work.request.home.slot]
        n = len(draft)
        return 0 < n <= len(own) and bool(
            (draft.token == own.token[:n]).all() and (draft.parent == own.parent[:n]).all()
        )

    def _part(self, work: Work, plan: DraftPlan | None) -> Part:
        """What the GPU has to know of a work: the same in every step as long as the plan has room. A decoding request's
        last token is there already."""
        request, m = work.request, work.known
        draft: Tree | int = work.draft
        if not work.drafted:
            draft = 0
        elif self._is_own(work):
            draft = work.drafted
        goes_on = request.committed + m < len(request.tokens)
        room = 0  # what the next step may still draft
        if plan is not None and work.complete:
            room = min(plan.depth, max(0, request.limit - len(request.tokens) - 1 - work.drafted))
        return Part(
            slot=request.home.slot,
            known=None if work.decodes else work.tree.token[:m],
            draft=draft,
            complete=work.complete,
            next_token=request.tokens[request.committed + m] if goes_on else -1,
            largest=request.params.takes_largest,
            draft_nodes=self._draft_nodes if room else 0,
            draft_depth=min(room, self._draft_nodes),
        )

    def _outcome(
        self, frame: _Frame, kind: _Kind, logits: Array | None, b: int, work: Work, emitted: Emitted
    ) -> Outcome:
        request, draft = work.request, emitted.draft if kind.waits or kind.takes else None
        tokens = [] if emitted.error else emitted.tokens
        self._unheard.extend(tokens)
        committed = 0 if emitted.error else work.known - work.complete + len(tokens)
        if request.place is not None:
            self._drafts[request.place.slot] = emitted.draft
            if kind.takes:
                self._taken[request.place.slot] = request.committed + committed
        if emitted.error:
            return Outcome(0, error=BROKEN[emitted.error])
        if not work.complete:
            return Outcome(committed, draft=draft)
        logprobs: list[dict[int, float] | None] = [None] * len(tokens)
        if request.params.logprobs is not None:
            assert logits is not None
            rows = _along_path(frame, logits, b, work.known - 1, len(tokens))
            logprobs = [request.sampler.logprobs(row, token) for row, token in zip(rows, tokens)]
        return Outcome(committed, tokens, emitted.drafted, logprobs, draft=draft)


def _along_path(frame: _Frame, logits: Array, b: int, root: int, n: int) -> np.ndarray:
    """Of a step's logits those [n, vocab] along the path of request b, from its root on."""
    first = int(frame.inputs.host.start[b])
    path = device.download(frame.step.paths.row)[first + root : first + root + n]
    wanted = frame.inputs.host.wanted.tolist()
    return np.stack([device.download(logits[wanted.index(row)]) for row in path.tolist()])
