"""One step on the GPU: everything from the rows to the accepted tokens and the next draft, replayed as one graph.

The host sends what it wants computed (StepInputs), and reads which tokens came out (Results): two copies a step. Steps
have a few sizes, envelopes of rows; what an envelope has too many of is unused rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from boleinfer import device
from boleinfer.decoder import Decoder
from boleinfer.device import Array
from boleinfer.device_draft import Drafts, candidates, grow, keep
from boleinfer.device_forest import upload as upload_forest
from boleinfer.device_forest import upload_paths
from boleinfer.device_sampling import SamplingTable
from boleinfer.device_step import Chain, Emitted, Part, Slots, Step, StepInputs, accept, follow, plant
from boleinfer.draft.device import is_own
from boleinfer.executor import Outcome
from boleinfer.forest import Forest, Tree
from boleinfer.graphs import Eager, Graphs
from boleinfer.ops.embedding import embedding
from boleinfer.request import Request
from boleinfer.sampling import BROKEN
from boleinfer.scheduler import Work
from boleinfer.state import Batch, Place, State

SMALLEST, LARGEST_CAPTURED = 8, 128  # rows of an envelope; larger steps read prompts and run kernel by kernel


@dataclass(frozen=True)
class DraftPlan:
    """How the GPU drafts with the MTP layer (draft.mtp.MTPDrafter explains each), and how much of it is kept."""

    top_k: int = 2
    width: int = 1
    depth: int = 4
    worth: float = 0.0
    least: float = 0.1


class _Frame:
    """The arrays of one envelope of rows."""

    def __init__(
        self, rows: int, requests: int, sampled: int, slots: Slots, drafting: DraftPlan | None, D: int, act: Any
    ):
        B = min(requests, rows)
        self.inputs = StepInputs(rows, B, min(rows, sampled))
        self.step = Step(self.inputs, slots)
        self.token = device.buffer((rows,), np.int32, poison=True)
        self.logits: Array = None  # of the rows inputs.wanted, once a step has run
        self.parts: list[Part] | None = None  # what the inputs on the GPU say
        if drafting is not None:
            d = drafting
            self.chain = Chain(self.step)
            self.drafts = Drafts(B, d.top_k, d.width, d.depth, d.worth, d.least)
            self.hidden = device.buffer((self.drafts.hidden_count, D), act, poison=True)


class CudaExecutor:
    """Runs an engine's steps on the current GPU.

    allowed:   bool [vocab], the ids that are tokens
    max_batch: requests of a step; max_rows: rows of a step; draft_nodes: guesses of a request and step
    pages:     pages of a request, at most
    drafting:  None when the GPU does not draft
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
        drafting: DraftPlan | None = None,
        graphs: bool = True,
    ):
        self.model, self.state = model, state
        self.runner: Eager | Graphs = Graphs() if graphs else Eager()
        self._max_batch, self._max_rows, self._draft_nodes = max_batch, max_rows, max(1, draft_nodes)
        self._drafting = drafting if draft_nodes else None
        self._slots = Slots(state.slots.size, pages, self._draft_nodes)
        self._sampling = SamplingTable(state.slots.size, model.config.vocab_size, allowed)
        self._frames: dict[int, _Frame] = {}

    def admit(self, request: Request) -> None:
        place = request.home
        with self.runner.on():
            self._slots.admit(place.slot, place.pages)
            self._sampling.set(place.slot, request.sampler, request.tokens)

    def start(self, works: Sequence[Work]) -> Callable[[], list[Outcome]]:
        frame = self._frame(sum(len(w.tree) for w in works))
        parts = [self._part(w) for w in works]
        plain = all(p.known is None and isinstance(p.draft, int) for p in parts)  # last tokens and drafts are there
        if not plain or parts != frame.parts:
            frame.inputs.fill(parts)
            frame.parts = parts if plain else None
            with self.runner.on():
                frame.inputs.send()
        with self.runner.on():
            self.runner.run(frame.inputs.rows, lambda: self._step(frame))
            fetched = frame.step.results.fetch(len(works))
        return lambda: [self._outcome(frame, b, w, emitted) for b, (w, emitted) in enumerate(zip(works, fetched()))]

    def may_repeat(self, works: Sequence[Work]) -> bool:
        """Only plain decoding and the GPU's own drafts go on by themselves, and only where there is room."""
        return all(
            w.decodes
            and (w.drafted == 0 or is_own(w.draft))
            and w.request.params.logprobs is None
            and len(w.request.tokens) + w.drafted + 1 < w.request.limit
            for w in works
        )

    def repeat(self, rows: int) -> None:
        """Queues the last step of so many rows again, as the GPU stands now; to measure, on requests to be dropped."""
        frame = self._frame(rows)
        self.runner.run(frame.inputs.rows, lambda: self._step(frame))

    def logits(self, tokens: Sequence[int], start: int, place: Place) -> np.ndarray:
        with self.runner.on():
            chain = Forest.of([Tree.chain(tokens)], [start])
            slot = device.upload(np.asarray([place.slot], np.int32))
            batch = Batch(upload_forest(chain), slot, device.upload(place.pages[None]))
            hidden, pending = self.model.forward(batch, self.state)
            self.state.commit(batch, pending, upload_paths(chain, [np.arange(len(tokens))]))
            n = self._max_batch * (1 + self._draft_nodes)  # rows whose logits a step holds as well
            pieces = [hidden[i : i + n] for i in range(0, len(tokens), n)]
            return np.concatenate([device.download(self.model.logits(piece)) for piece in pieces])

    def _step(self, frame: _Frame) -> object:
        """All launches of a step; returns the arrays that are read after it."""
        inputs, step, slots = frame.inputs, frame.step, self._slots
        plant(inputs, slots, step)
        batch = Batch(step.forest, step.slot, step.page_table)
        hidden, pending = self.model.forward(batch, self.state)  # [R, D]
        wanted = inputs.on.wanted
        frame.logits = self.model.logits(embedding(wanted, hidden))  # [n, vocab]
        self._sampling.sample(frame.logits, wanted, step.forest, step.slot, step.root, frame.token)
        accept(frame.token, inputs, slots, step)
        self.state.commit(batch, pending, step.paths)
        self._sampling.advance_history(step.results.token, step.results.count, step.slot)
        if self._drafting is not None:
            self._draft(frame, hidden)
        return frame.logits

    def _draft(self, frame: _Frame, hidden: Array) -> None:
        """The MTP layer over the accepted rows, then its tree for the next step, into the slots."""
        inputs, step, chain, drafts = frame.inputs, frame.step, frame.chain, frame.drafts
        follow(inputs, self._slots, step, chain)
        batch = Batch(chain.forest, step.slot, step.page_table)
        y = self.model.mtp(
            chain.forest.token, embedding(chain.hidden_row, hidden), chain.forest.position, batch, self.state
        )
        device.write(frame.hidden[drafts.hidden_rows(0)], embedding(chain.last_row, y))
        tree = Batch(drafts.forest, step.slot, step.page_table)
        for level in range(drafts.levels + 1):
            rows = chain.last_row if level == 0 else drafts.row
            logits = self.model.logits(frame.hidden[drafts.hidden_rows(level)])
            grow(drafts, level, *candidates(logits, drafts.top_k, rows), inputs, self._slots)
            if level < drafts.levels:
                source = embedding(drafts.source, frame.hidden)
                y = self.model.mtp(drafts.token, source, drafts.position, tree, self.state, drafts.row)
                device.write(frame.hidden[drafts.hidden_rows(level + 1)], y)
        keep(drafts, inputs, self._slots)

    def _frame(self, rows: int) -> _Frame:
        """The smallest envelope that holds so many rows, made and rehearsed when it is first asked for."""
        size = SMALLEST
        while size < rows:
            size *= 2
        size = min(size, self._max_rows)
        if size not in self._frames:
            sampled = self._max_batch * (1 + self._draft_nodes)
            c, act = self.model.config, self.state.dtype
            frame = _Frame(size, self._max_batch, sampled, self._slots, self._drafting, c.hidden_size, act)
            self._frames[size] = frame
            if size <= LARGEST_CAPTURED:
                with self.runner.on():
                    frame.inputs.send()  # nobody takes part
                    self.runner.rehearse(size, lambda: self._step(frame))
        return self._frames[size]

    def _part(self, work: Work) -> Part:
        """What the GPU has to know of a work. A decoding request's last token is there already."""
        request, m = work.request, work.known
        draft = work.draft
        goes_on = request.committed + m < len(request.tokens)
        room = request.limit - len(request.tokens) - 1 - work.drafted  # what the next step may still draft
        return Part(
            slot=request.home.slot,
            known=None if work.decodes else work.tree.token[:m],
            draft=len(draft) if is_own(draft) else draft,
            complete=work.complete,
            next_token=request.tokens[request.committed + m] if goes_on else -1,
            draft_nodes=self._draft_nodes if room > 0 and work.complete else 0,
            draft_depth=min(max(0, room), self._draft_nodes),
        )

    def _outcome(self, frame: _Frame, b: int, work: Work, emitted: Emitted) -> Outcome:
        if emitted.error:
            return Outcome(0, error=BROKEN[emitted.error])
        if not work.complete:
            return Outcome(work.known)
        tokens = emitted.tokens
        logprobs: list[dict[int, float] | None] = [None] * len(tokens)
        if work.request.params.logprobs is not None:
            rows = self._logits(frame, b, work.known - 1, len(tokens))
            logprobs = [work.request.sampler.logprobs(row, token) for row, token in zip(rows, tokens)]
        return Outcome(work.known - 1 + len(tokens), tokens, emitted.drafted, logprobs)

    def _logits(self, frame: _Frame, b: int, root: int, n: int) -> np.ndarray:
        """The logits [n, vocab] along the path of request b, from its root on."""
        first = int(frame.inputs.host.start[b])
        path = device.download(frame.step.paths.row)[first + root : first + root + n]
        wanted = frame.inputs.host.wanted.tolist()
        return np.stack([device.download(frame.logits[wanted.index(row)]) for row in path.tolist()])
