"""Drafts with the checkpoint's own MTP layer, run recursively as a best-first top-k tree.

The layer pairs the target's hidden row of position p with token p+1 and predicts token p+2. It keeps a KV cache of its
own, filled with true hidden rows up to the last committed token before it drafts; while drafting, a row's own output
stands in for the hidden row that is not known yet, and its keys and values lie in scratch places behind the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from boleinfer.decoder import Decoder
from boleinfer.draft.base import Committed, Limits
from boleinfer.forest import Forest, Tree
from boleinfer.request import Request
from boleinfer.state import State

WAITING_ROWS = 512  # committed rows of a request that may wait for the next proposal


class _Growing:
    """The draft tree of one request while it grows: all candidates, and which of them the MTP layer has run."""

    def __init__(self, y: np.ndarray):
        self.token: list[int] = []
        self.parent: list[int] = []
        self.prob: list[float] = []
        self.frontier: list[int] = []  # candidates of the deepest level
        self.run: dict[int, int] = {}  # candidate -> its node in the MTP layer's own tree
        self.run_parent: list[int] = []
        self.y: dict[int, np.ndarray] = {-1: y}  # candidate -> MTP output; -1 is the row that drafts the roots

    def add(self, parent: int, tokens: np.ndarray, probs: np.ndarray) -> None:
        """The top-k children of a candidate (-1: roots)."""
        at = self.prob[parent] if parent >= 0 else 1.0
        for token, prob in zip(tokens.tolist(), probs.tolist()):
            self.frontier.append(len(self.token))
            self.token.append(token)
            self.parent.append(parent)
            self.prob.append(at * prob)

    def expand(self, width: int, worth: float) -> list[int]:
        """The likeliest candidates of the deepest level, now nodes of the MTP layer's tree."""
        best = sorted(self.frontier, key=lambda n: -self.prob[n])[:width]
        chosen = [n for n in best if self.prob[n] >= worth]
        self.frontier = []
        for n in chosen:
            self.run[n] = len(self.run_parent)
            self.run_parent.append(self.run.get(self.parent[n], -1))
        return chosen


class MTPDrafter:
    """Top-k tree of the MTP layer; of each tree it runs at most `Limits.nodes` nodes, so their scratch places suffice.

    top_k:  children of a node
    width:  nodes of a level that are expanded, and `worth`, the likelihood from which one is
    depth:  levels, whatever the limits allow
    """

    reads_text = True

    def __init__(
        self,
        model: Decoder,
        state: State,
        top_k: int = 2,
        width: int = 1,
        depth: int = 6,
        worth: float = 0.5,
    ):
        if not model.has_mtp or state.mtp is None:
            raise ValueError("draft 'mtp' needs a checkpoint with an MTP layer (mtp.* tensors); this one has none")
        self._model, self._state = model, state
        self._top_k, self._width, self._depth, self._worth = top_k, width, depth, worth
        self._waiting: dict[Request, list[Committed]] = {}  # committed, but not yet in the layer's KV
        self._last: dict[Request, np.ndarray] = {}  # y of the last position in the layer's KV

    def observe(self, news: Sequence[Committed]) -> None:
        for n in news:
            self._waiting.setdefault(n.request, []).append(n)
        self._catch_up([n.request for n in news if self._rows_waiting(n.request) >= WAITING_ROWS])

    def forget(self, request: Request) -> None:
        self._waiting.pop(request, None)
        self._last.pop(request, None)

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        self._catch_up(requests)
        growing = [_Growing(self._last[r]) for r in requests]
        self._add_children([(g, -1) for g, lim in zip(growing, limits) if lim.depth > 0 and lim.nodes > 0])
        for level in range(1, min(self._depth, max((lim.depth for lim in limits), default=0))):
            chosen = [
                g.expand(min(self._width, lim.nodes - len(g.run)), self._worth) if level < lim.depth else []
                for g, lim in zip(growing, limits)
            ]
            if not any(chosen):
                break
            self._run(requests, growing, chosen)
            self._add_children([(g, n) for g, nodes in zip(growing, chosen) for n in nodes])
        return [lim.trim(Tree.of(g.token, g.parent, g.prob)) for g, lim in zip(growing, limits)]

    def _rows_waiting(self, request: Request) -> int:
        return sum(len(n.hidden) for n in self._waiting.get(request, ()))

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

    def _run(self, requests: Sequence[Request], growing: list[_Growing], chosen: list[list[int]]) -> None:
        """The MTP layer over the chosen candidates of all requests."""
        trees = [Tree.of([0] * len(g.run), g.run_parent) for g in growing]
        forest = Forest.of(trees, [r.committed for r in requests])
        batch = self._state.batch(forest, [r.home for r in requests])
        rows = [s + g.run[n] for s, g, nodes in zip(forest.start.tolist(), growing, chosen) for n in nodes]
        token = [g.token[n] for g, nodes in zip(growing, chosen) for n in nodes]
        hidden = np.stack([g.y[g.parent[n]] for g, nodes in zip(growing, chosen) for n in nodes])
        at = np.asarray(rows)
        y = self._model.mtp(np.asarray(token, np.int32), hidden, forest.position[at], batch, self._state, at)
        for row, (g, n) in zip(y, ((g, n) for g, nodes in zip(growing, chosen) for n in nodes)):
            g.y[n] = row

    def _add_children(self, parents: list[tuple[_Growing, int]]) -> None:
        """One look of the draft head at each parent's output, and its top-k tokens as children."""
        if not parents:
            return
        logits = self._model.logits(np.stack([g.y[n] for g, n in parents]))  # [n, vocab]
        top = np.argpartition(logits, -self._top_k, axis=1)[:, -self._top_k :]
        peak = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - peak).sum(axis=1, keepdims=True)
        prob = np.exp(np.take_along_axis(logits, top, axis=1) - peak) / total
        for (g, n), tokens, probs in zip(parents, top, prob):
            g.add(n, tokens, probs)
