"""Drafts with the checkpoint's own MTP layer, run recursively as a best-first top-k tree.

The layer pairs the target's hidden row of position p with token p+1 and predicts token p+2. It keeps a KV cache of its
own, filled with true hidden rows up to the last committed token before it drafts; while drafting, a row's own output
stands in for the hidden row that is not known yet, and its keys and values lie in scratch places behind the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer.config import ConfigError
from boleinfer.decoder import Decoder
from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.levels import Growing, Levels
from boleinfer.forest import Forest, Tree
from boleinfer.request import Request
from boleinfer.state import State

WAITING_STEPS = 64  # whose rows may wait for the next proposal; a prompt's do not
FEW_ROWS = 8  # that one pass takes in and drafts from: little dearer than a row


class MTPDrafter:
    """Tree of the MTP layer; of each tree it runs at most `Limits.nodes` nodes, so their scratch places suffice."""

    own = None

    def __init__(self, model: Decoder, state: State, levels: Levels | None = None):
        if not model.has_mtp or state.mtp is None:
            raise ConfigError("draft 'mtp' needs a checkpoint with an MTP layer (mtp.* tensors); this one has none")
        self._model, self._state, self._levels = model, state, levels or Levels()
        self._waiting: dict[Request, list[Committed]] = {}  # committed, but not yet in the layer's KV
        self._last: dict[Request, np.ndarray] = {}  # y of the last position in the layer's KV

    def observe(self, news: Sequence[Committed]) -> None:
        for n in news:
            self._waiting.setdefault(n.request, []).append(n)
        for n in news:
            if n.start < n.request.prompt_length or len(self._waiting[n.request]) >= WAITING_STEPS:
                self._remember(n.request)

    def forget(self, request: Request) -> None:
        self._waiting.pop(request, None)
        self._last.pop(request, None)

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        for r in requests:
            if sum(len(n.hidden) for n in self._waiting.get(r, ())) > FEW_ROWS:
                self._remember(r)
        self._catch_up(requests)
        outputs = [{-1: self._last[r]} for r in requests]  # y by node; -1 is the row that drafts the roots

        def look(growing: list[Growing], chosen: list[list[int]]) -> np.ndarray:
            nodes = [(b, n) for b, ns in enumerate(chosen) for n in ns]
            if any(n >= 0 for _, n in nodes):
                self._run(requests, growing, nodes, outputs)
            return self._model.logits(np.stack([outputs[b][n] for b, n in nodes]))

        return self._levels.grow(limits, look)

    def _remember(self, request: Request) -> None:
        """The layer's keys and values of all rows that wait but the last, from which the next draft begins."""
        news = self._waiting[request]
        start, hidden = news[0].start, np.concatenate([n.hidden for n in news])
        if (n := len(hidden) - 1) < 1:
            return
        forest = Forest.of([Tree.chain(request.tokens[start + 1 : start + 1 + n])], [start])
        batch = self._state.batch(forest, [request.home])
        self._model.mtp_memory(forest.token, hidden[:-1], forest.position, batch, self._state)
        self._waiting[request] = [Committed(request, start + n, hidden[-1:].copy())]

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Runs the layer over the waiting positions with the target's hidden rows: its KV is true to the text again."""
        late = [r for r in requests if r in self._waiting]
        if not late:
            return
        news = [self._waiting[r] for r in late]
        starts = [n[0].start for n in news]
        hidden = [np.concatenate([part.hidden for part in n]) for n in news]
        chains = [Tree.chain(r.tokens[s + 1 : s + 1 + len(h)]) for r, s, h in zip(late, starts, hidden)]
        forest = Forest.of(chains, starts)
        batch = self._state.batch(forest, [r.home for r in late])
        y = self._model.mtp(forest.token, np.concatenate(hidden), forest.position, batch, self._state)
        for request, end in zip(late, forest.start[1:]):
            del self._waiting[request]  # only now: a pass that failed is made up for
            self._last[request] = y[end - 1]

    def _run(
        self,
        requests: Sequence[Request],
        growing: list[Growing],
        nodes: list[tuple[int, int]],
        outputs: list[dict[int, np.ndarray]],
    ) -> None:
        """The MTP layer over the last looked-at nodes, (request, node) each; their outputs come to the others."""
        forest = Forest.of([g.passes() for g in growing], [r.committed for r in requests])
        batch = self._state.batch(forest, [r.home for r in requests])
        rows = np.asarray([forest.start[b] + growing[b].looked.index(n) for b, n in nodes])
        hidden = np.stack([outputs[b][growing[b].parent[n]] for b, n in nodes])
        y = self._model.mtp(forest.token[rows], hidden, forest.position[rows], batch, self._state, rows)
        for (b, n), row in zip(nodes, y):
            outputs[b][n] = row
