"""Feeds a model by hand in tests: a request in a poisoned state, trees and pieces of prompts, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from boleinfer import models, weights
from boleinfer.config import read_config
from boleinfer.decoder import Decoder
from boleinfer.draft import make_drafter
from boleinfer.draft.base import Drafter, Limits
from boleinfer.engine import Engine
from boleinfer.executor import HostExecutor
from boleinfer.forest import Forest, Tree
from boleinfer.request import Request
from boleinfer.sampling import Sampler, SamplingParams
from boleinfer.scheduler import Scheduler
from boleinfer.state import GDNLayer, State


def load(folder: Path) -> Decoder:
    """The checkpoint in a folder."""
    config = read_config(folder)
    family = models.family(config.model_type)
    return family.build(config, weights.load(folder, config, family.plan))


class Run:
    """One request of a model, in a state of its own filled with NaN."""

    def __init__(self, model: Decoder, positions: int = 512, ring: int = 7, page_size: int = 16):
        self.model = model
        self.state = State(
            model.config, 3, 3 + -(-positions // page_size), page_size, ring, mtp=model.has_mtp, poison=True
        )
        self.state.slots.take(1)  # neither the first slot nor the first page
        self.state.pages.take(2)
        self.place = self.state.take(positions)
        self.committed = 0

    def step(self, tree: Tree, path: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Runs a tree and commits a path of it (None: all of it, a chain); returns logits and hidden rows."""
        batch = self.state.batch(Forest.of([tree], [self.committed]), [self.place])
        hidden, pending = self.model.forward(batch, self.state)
        path = np.arange(len(tree)) if path is None else np.asarray(path, np.int64)
        self.state.commit(batch, pending, [path])
        self.committed += len(path)
        return self.model.logits(hidden), hidden

    def feed(self, ids: Sequence[int], pieces: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Runs a sequence in pieces of the given lengths (the last one repeats); returns all logits and hidden rows."""
        pieces = list(pieces or [len(ids)])
        logits, hidden, at = [], [], 0
        while at < len(ids):
            n = pieces.pop(0) if len(pieces) > 1 else pieces[0]
            for rows, row in zip((logits, hidden), self.step(Tree.chain(ids[at : at + n]))):
                rows.append(row)
            at += n
        return np.concatenate(logits), np.concatenate(hidden)

    def memory(self) -> list[np.ndarray]:
        """What the request remembers: per layer the folded state and the window, or the committed keys and values."""
        from boleinfer.ring import fold

        slot, found = self.place.slot, []
        for layer in self.state.layers:
            if isinstance(layer, GDNLayer):
                W = layer.window.shape[1]
                recent = layer.window[slot, (self.committed - np.arange(1, W)) % W]
                found += [fold(layer.S[slot], *layer.ring.filled(slot, self.committed)), recent]
            else:
                for pages in (layer.k, layer.v):
                    found.append(pages[self.place.pages].reshape(-1, *pages.shape[2:])[: self.committed].copy())
        return found


VOCAB = 512


def request_of(
    prompt: Sequence[int], params: SamplingParams, limit: int = 400, seed: int = 0, choice: int = 0
) -> Request:
    """A request whose only end id is 478; ids from 480 on are no tokens, except 500."""
    allowed = np.arange(VOCAB) < 480
    allowed[500] = True
    sampler = Sampler(params, params.seed if params.seed is not None else seed, choice, prompt, [478], allowed)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset([478]))
    limit = min(limit, len(prompt) + (params.max_tokens or limit))
    return Request(list(prompt), params, sampler, limit, ends)


def engine_of(
    model: Decoder,
    draft: str | Drafter = "none",
    max_batch: int = 4,
    max_rows: int = 64,
    draft_rows: int = 64,
    limits: Limits | None = None,
    limit: int = 400,
    pages: int | None = None,
    ring: int = 7,
) -> Engine:
    """An engine in a poisoned state."""
    limits = limits or Limits(nodes=12, depth=5)
    scratch = 1 + limits.nodes
    pages = max_batch * -(-(limit + scratch) // 16) if pages is None else pages
    state = State(model.config, max_batch, pages, 16, ring, mtp=model.has_mtp, poison=True)
    drafter = make_drafter(draft, model, state) if isinstance(draft, str) else draft
    scheduler = Scheduler(state, max_batch, max_rows, draft_rows, limits, scratch)
    return Engine(HostExecutor(model, state), drafter, scheduler)


def finish(engine: Engine, requests: Sequence[Request], most: int = 5000) -> list[list[int]]:
    """Runs the requests to their ends; every page and slot must be free afterwards. Returns what each generated."""
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
        most -= 1
        assert most, "the engine does not come to an end"
    assert engine.state.pages.free == engine.state.pages.size and engine.state.slots.free == engine.state.slots.size
    return [r.generated for r in requests]
