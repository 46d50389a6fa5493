"""Drafts with a second, smaller model that reads the same tokens, as a best-first top-k tree.

It has a state of its own. Each pass runs the tokens that are new to it and the tree so far; what it would remember of
them stays pending until the target has accepted some, and only these are committed. So nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boleinfer.config import ConfigError
from boleinfer.decoder import Decoder
from boleinfer.draft.base import Committed, Limits
from boleinfer.draft.levels import Growing, Levels
from boleinfer.forest import Forest, Tree
from boleinfer.request import Request
from boleinfer.state import Batch, Factors, Place, State
from boleinfer.tokenizer import Tokenizer

PIECE = 512  # rows of a pass over a prompt


@dataclass
class _Seat:
    """A request's place in the state, and how many of its tokens are committed there."""

    place: Place
    committed: int = 0


@dataclass(frozen=True)
class _Pass:
    """What a pass left pending."""

    requests: Sequence[Request]
    trees: Sequence[Tree]
    batch: Batch
    pending: Sequence[Factors | None]


class ModelDrafter:
    """Trees of a smaller model.

    state:   its own, with as many slots as there may be requests, and pages for the longest of them
    vocab:   ids of the target; no other is proposed
    scratch: places behind a request's tokens, for `Limits.nodes` drafted ones
    """

    own = None

    def __init__(self, model: Decoder, state: State, vocab: int, scratch: int, levels: Levels | None = None):
        self._model, self._state, self._vocab, self._scratch = model, state, vocab, scratch
        self._levels = levels or Levels()
        self._seats: dict[Request, _Seat] = {}
        self._last: _Pass | None = None

    def observe(self, news: Sequence[Committed]) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._settle()
        if (seat := self._seats.pop(request, None)) is not None:
            self._state.give_back(seat.place)

    def propose(self, requests: Sequence[Request], limits: Sequence[Limits]) -> list[Tree]:
        self._settle()
        for request in requests:
            if request not in self._seats:
                self._seats[request] = _Seat(self._state.take(request.limit + self._scratch))
            self._read(request)

        def look(growing: list[Growing], chosen: list[list[int]]) -> np.ndarray:
            news = [r.tokens[self._seats[r].committed :] for r in requests]
            hidden, forest = self._run(requests, [g.passes(known) for known, g in zip(news, growing)])
            rows = [
                start + len(known) + (g.looked.index(n) if n >= 0 else -1)
                for start, known, g, nodes in zip(forest.start.tolist(), news, growing, chosen)
                for n in nodes
            ]
            return self._model.logits(hidden[rows])[:, : self._vocab]

        return self._levels.grow(limits, look)

    def _read(self, request: Request) -> None:
        """Commits all but the last few tokens of a long text that is new."""
        seat = self._seats[request]
        while len(request.tokens) - seat.committed > PIECE:
            piece = request.tokens[seat.committed : seat.committed + PIECE]
            self._run([request], [Tree.chain(piece)])
            self._settle()

    def _run(self, requests: Sequence[Request], trees: Sequence[Tree]) -> tuple[np.ndarray, Forest]:
        """A pass over all the trees; what it leaves pending replaces what the one before left."""
        seats = [self._seats[r] for r in requests]
        forest = Forest.of([self._known(t) for t in trees], [s.committed for s in seats])
        batch = self._state.batch(forest, [s.place for s in seats])
        hidden, pending = self._model.forward(batch, self._state)
        self._last = _Pass(requests, trees, batch, pending)
        return hidden, forest

    def _known(self, tree: Tree) -> Tree:
        """The tree with another id where this model's matrices have no row for one: such ids stand for no token."""
        return Tree(np.minimum(tree.token, self._model.config.vocab_size - 1), tree.parent, tree.prob)

    def _settle(self) -> None:
        """Commits what the last pass ran and the target has accepted, except the last token: it is to run again."""
        if (last := self._last) is None:
            return
        self._last = None
        paths = []
        for request, tree, start in zip(last.requests, last.trees, last.batch.forest.start):
            seat = self._seats[request]
            path = tree.along(request.tokens[seat.committed : -1])
            paths.append(path + start)
            seat.committed += len(path)
        self._state.commit(last.batch, last.pending, paths)


def check_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises ConfigError unless every id stands for the same in both models."""
    ours, theirs = target.tokens(), draft.tokens()
    if ours == theirs:
        return
    differ = min(id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id))
    raise ConfigError(
        f"the draft model has another tokenizer: id {differ} is {ours.get(differ)!r} in the model and "
        f"{theirs.get(differ)!r} in the draft model ({len(ours)} and {len(theirs)} tokens); a draft model has to be of "
        "the same family"
    )
