"""Whether to draft for a step, how, and how many guesses to verify, over the whole batch. Knows no model.

    choose R to maximise (B + sum of the R likeliest path probabilities) / (draft cost + c(R)),  R = B always among them

c is a table of measured seconds (costs.py), corrected by how long steps then take. Whether drafting pays at all cannot
be read off a draft that was not made, so what drafts claimed, and their hits, are remembered for all ways that draft
with the same, and of each way what its steps brought and took:

    tokens a step and request = 1 + coverage surprise (c_1 + c_2 + .. + c_depth)
    speed of a way            = tokens / seconds of its steps, against plain decoding

c_d is what a draft's probabilities of its nodes of depth d add up to, among the likeliest that so many rows have room
for; known as soon as one was made, and taken to fall further down as it fell before. Surprise is how many tokens were
right for each that drafts expected. Where nothing was drafted yet, c_d is that of a chain.

The fastest way is taken, and plain decoding as soon as it looks fastest. Another way is tried again for a few steps
where it may be about as fast, and plain decoding where drafted steps take far longer than the table says and it is not
known whether others do; while nothing is drafted, the one of each kind whose try loses least. Pauses between tries grow
while they are in vain, and are long where a try is dear, so that all trying together costs less than 1 %; a request
that begins is a reason to try sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from boleinfer.costs import CostTable
from boleinfer.forest import Tree
from boleinfer.ways import PLAIN, StepNews, Way

PRIOR_RATE = 0.7  # how often a guess is right where those before it are, before any was seen
SEEN = 0.5  # drafts from which on their depth is known
PRIOR_HITS = 2.0  # how firmly it is believed that drafts are right; of the GPU's half as firmly with each try in vain
PRIOR_TRIES = 4.0  # how firmly is foreseen what a way brings
ALIKE_TRIES = 24.0  # the same where others draft with the same
RECENT = 24.0  # steps after which a record counts a third
PRIOR_S = 5e-4  # seconds that asking a drafter takes, before any was asked
PRIOR_LOOKUP = 0.05  # part of the requests for which something is found without the GPU's drafts, before any was asked
AHEAD = 1.03  # how much faster plain decoding is taken to be than it looks: the host does its part meanwhile
SURER = 1.03  # how much faster another way to draft must look
EARLY, SETTLING = 16, 2  # steps that are all followed by a comparison of the ways; requests' steps until later ones are
RESTING, LOOKED_AT = 16, 4  # the same of plain steps, which say nothing of other ways; of how many one is taken in
BRIEF_S = 1.5e-3  # seconds of a step below which others are treated so, too: learning takes a tenth of that
STAY = 4  # steps before a way to draft that was chosen is left, later twice as many; except for one that was tried
TRIED = 3  # steps of a try that count
PACE_STEPS, SAME_PACE, OUTLIER = 8, 2.0, 4.0  # steps that the pace is of; that all ways share it; beyond which none is
DOUBTFUL = 1.5  # pace beyond which it may be drafting that is slow, not the machine: plain decoding is tried, too
FIRST_PAUSE = 63  # steps before the first try of a way to draft at least
SHORTEST_PAUSE, MOST_DOUBLINGS = 8, 4  # steps between two tries at least; each that is in vain doubles them
DEAR, SOONER = 300.0, 3  # steps between tries that lose one; a new request divides them
UNSURPRISED = 8.0, 8.0  # tokens that were right, and that were expected


@dataclass
class _Drafts:
    """What is known of the drafts of all ways that draft with the same, recent steps counting most.

    likely: float64 [sizes of the table, depth], probabilities of the likeliest nodes, as many as a step of that size
            has room for, by their depth
    made:   [depth], drafts that may have been so deep
    found:  requests for which there was one, of those that `spoken` counts
    """

    likely: np.ndarray
    made: np.ndarray
    spoken: float = 0.0
    found: float = 0.0
    claimed: float = 0.0  # tokens that drafts expected to be right
    hits: float = 0.0

    def fade(self, keep: float) -> None:
        """Lets what is known count less."""
        for name in ("likely", "made", "spoken", "found", "claimed", "hits"):
            setattr(self, name, getattr(self, name) * keep)

    def forget(self) -> None:
        """A try begins: whether its guesses are right counts more than whether others were."""
        self.claimed /= 4
        self.hits /= 4


@dataclass
class _Record:
    """What is known of a way, recent steps counting most. Sums of steps, or of their requests."""

    asked: float = 0.0
    brought: float = 0.0
    steps: float = 0.0
    rows: float = 0.0  # of a request
    slow: float = 0.0  # seconds against the table's and the pace of all ways at the time
    draft_s: float = 0.0  # of the host, at the table's pace
    late: bool = False  # the last step took as long as an outlier
    vain: int = 0  # tries in vain, one after another
    since: int = 1  # steps since it was last in use
    due: int = FIRST_PAUSE
    hopeless: bool = False  # it is too slow even if all guesses were right

    def fade(self, keep: float) -> None:
        """Lets what is known count less."""
        for name in ("asked", "brought", "steps", "rows", "slow", "draft_s"):
            setattr(self, name, getattr(self, name) * keep)


@dataclass
class Budget:
    """Chooses ways and rows for an engine, and learns from its steps.

    ways:  the first is PLAIN; of those that are as fast as far as is known, the first is taken
    costs: None leaves rows as the drafter has them, and takes the first way in which the GPU drafts, else the second
    """

    ways: Sequence[Way]
    costs: CostTable | None = None
    _records: list[_Record] = field(init=False)
    _drafts: dict[bool, _Drafts] = field(init=False)  # the GPU's, and the others
    _trial: int | None = None
    _left: int = 0
    _best: int = 0
    _timed: int = 0
    _pace_now: float = 1.0  # seconds of steps against the table's: what else the machine does slows all ways
    _steps: int = 0
    _begun: bool = False
    _held: int = 0  # steps since the best way was chosen
    _surprise: tuple[float, float] = UNSURPRISED

    def __post_init__(self) -> None:
        if not self.ways or self.ways[0] != PLAIN:
            raise ValueError(f"a budget's first way is to draft nothing, got {self.ways}")
        sizes = 0 if self.costs is None else len(self.costs.rows)
        depths = {on: max((w.depth for w in self.ways if w.on_gpu == on), default=0) for on in (True, False)}
        self._drafts = {on: _Drafts(np.zeros((sizes, depth)), np.zeros(depth)) for on, depth in depths.items()}
        self._records = [_Record() for _ in self.ways]
        self._records[0].due = SHORTEST_PAUSE
        self._best = next((i for i, way in enumerate(self.ways) if way.variant), min(1, len(self.ways) - 1))

    def choose(self, batch: int, context: float) -> int:
        """The number of the way for a step of so many decoding requests; the same until `learn` is called."""
        if self.costs is None or len(self.ways) == 1:
            return self._best
        if batch >= self.costs.most:
            return 0
        if not self._begun:  # perhaps by a prompt, whose last step drafts for one request
            self._best = max(range(1, len(self.ways)), key=lambda i: self.speed(i, max(1, batch), context))
            self._begun = True
        if not batch:
            return self._best
        return self._best if self._trial is None else self._trial

    def share(self, trees: Sequence[Tree], way: int, context: float, most: int) -> list[Tree]:
        """The nodes to verify: as many of the likeliest of all trees as are worth their rows, `most` at most."""
        if not any(map(len, trees)):
            return list(trees)
        worth = self.worth(trees, way, context, most)
        return share(trees, most if worth is None else int(np.argmax(worth[0] / worth[1])))

    def worth(self, trees: Sequence[Tree], way: int, context: float, most: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Expected tokens, and seconds, of a step with 0, 1, .. `most` of the likeliest nodes of all trees.

        None without a table."""
        if self.costs is None:
            return None
        batch, (right, expected) = len(trees), self._surprise
        most = max(0, min(most, self.costs.most - batch, sum(map(len, trees))))
        prob = np.sort(np.concatenate([t.prob for t in trees]))[::-1][:most] if most else np.zeros(0)
        tokens = batch + np.concatenate([[0.0], np.cumsum(prob * min(1.0, right / expected))])  # [1 + most]
        rows = np.minimum(batch + np.arange(most + 1), self.costs.most)  # more requests than that are not told apart
        seconds = self.costs.step_s(rows, batch, context)
        return tokens, self.draft_s(way, batch) + seconds

    def speed(self, way: int, batch: int, context: float) -> float:
        """Tokens of a way over its time, against plain decoding as the table has it: foreseen, then as it was."""
        assert self.costs is not None
        costs, r = self.costs, self._records[way]
        plain, draft_s, slow = costs.one_s(batch, batch, context), self.draft_s(way, batch), self._slow(way)
        if not way:
            return 1 / slow
        sizes = np.maximum(costs.rows, batch)
        tokens = 1 + self._coverage(way) * self._right(way, sizes / batch)
        foreseen = float((tokens * plain / (slow * costs.step_s(sizes, batch, context) + draft_s)).max())
        if not r.steps:
            return foreseen
        step = costs.one_s(min(r.rows / r.steps * batch, costs.most), batch, context)
        seen = (1 + r.brought / r.asked) * plain / (slow * step + draft_s)
        firm = PRIOR_TRIES if len(self._kin(way)) < 2 else ALIKE_TRIES
        return (firm * foreseen + r.asked * seen) / (firm + r.asked)

    def _right(self, way: int, rows: np.ndarray) -> np.ndarray:
        """[sizes of the table]: tokens of a draft that will be right, where a request has so many rows."""
        drafts, depth = self._drafts[self.ways[way].on_gpu], self.ways[way].depth
        known = int((drafts.made[:depth] >= SEEN).sum())
        if not known:
            return PRIOR_RATE * (1 - PRIOR_RATE ** np.clip(rows - 1, 0, depth)) / (1 - PRIOR_RATE)
        found = drafts.likely[:, :known] / drafts.made[:known]
        last, above = found[:, -1], found[:, -2] if known > 1 else 1.0
        fall = np.clip(last / np.maximum(above, 1e-9), 0, 1)
        more = last * sum(fall**i for i in range(1, depth - known + 1))
        doubts = self._records[way].vain if self.ways[way].on_gpu else 0  # what is looked up may not have been there
        prior = PRIOR_HITS / (1 << doubts)
        return (found.sum(1) + more) * (drafts.hits + prior) / (drafts.claimed + prior)

    def draft_s(self, way: int, batch: int) -> float:
        """Seconds that drafting adds to a step, on the host and on the GPU."""
        on_gpu = self.costs.draft_s(self.ways[way].variant, batch) if self.costs is not None else 0.0
        if self.ways[way].asks and not self._asked():
            return on_gpu + PRIOR_S
        some = self._steps_like(way)
        steps = sum(r.steps for r in some)
        return on_gpu + (sum(r.draft_s for r in some) / steps if steps else 0.0)

    def learn(self, news: StepNews) -> None:
        """Takes in a step."""
        if self.costs is None or len(self.ways) == 1 or news.batch >= self.costs.most:
            return
        resting = self._rests(news) and news.way == self._best and self._steps >= EARLY and self._steps % LOOKED_AT
        if news.way == news.drawn and not resting:  # else the step has the one way's guesses and the other's time
            self._record(news)
        if any(map(len, news.drafts)):
            keep, happened = 1 - 1 / (2 * RECENT), (sum(news.accepted), news.expected)
            right, expected = (
                keep * s + (1 - keep) * u + new for s, u, new in zip(self._surprise, UNSURPRISED, happened)
            )
            self._surprise = right, expected
        self._pace(news)

    def welcome(self) -> None:
        """A request begins, whose text may be of another kind: what was slow is tried sooner."""
        for r in self._records[1:]:
            if r.due != FIRST_PAUSE and not r.hopeless:
                r.due = min(r.due, max(r.since + 1, r.due // SOONER))

    def _record(self, news: StepNews) -> None:
        assert self.costs is not None
        r, right = self._records[news.way], sum(news.accepted)
        for i in self._kin(news.way) if news.way else [0]:
            self._records[i].fade(1 - 1 / RECENT)
        r.asked += news.batch
        r.brought += right
        if news.way:
            drafts = self._drafts[self.ways[news.way].on_gpu]
            drafts.fade(1 - 1 / RECENT)
            drafts.spoken += news.batch
            drafts.hits += right
            if any(map(len, news.drafts)):
                self._read(drafts, news)
        told = self.costs.one_s(news.rows, news.batch, news.context)
        told += self.costs.draft_s(self.ways[news.way].variant, news.batch)
        ratio = (news.seconds - news.draft_s) / told
        if r.since or not math.isfinite(ratio):  # the first step in a way has to catch up; or nobody asked for it
            return
        before, r.late = r.late, self._timed > 0 and ratio > OUTLIER * self._pace_now
        if r.late and not before:  # a graph was captured, a prompt caught up; two in a row are the way's own
            return
        self._timed += 1
        if self._timed == 1:
            self._pace_now = ratio
        r.steps += 1
        r.rows += news.rows / news.batch
        r.slow += ratio / self._pace_now
        r.draft_s += news.draft_s / self._pace_now
        self._pace_now += (ratio / self._slow(news.way) - self._pace_now) / min(self._timed, PACE_STEPS)

    def _read(self, drafts: _Drafts, news: StepNews) -> None:
        """What a step's drafts say of themselves."""
        assert self.costs is not None
        deepest, found = self.ways[news.way].depth, sum(len(d) > 0 for d in news.drafts)
        drafts.found += found
        drafts.made[:deepest] += found
        drafts.claimed += news.expected
        prob, depth = (np.concatenate([getattr(d, name) for d in news.drafts]) for name in ("prob", "depth"))
        order = np.argsort(-prob, kind="stable")
        prob, depth = prob[order], np.minimum(depth[order], deepest - 1)
        for likely, size in zip(drafts.likely, self.costs.rows):
            n = max(0, size - news.batch)
            likely[:deepest] += np.bincount(depth[:n], prob[:n], minlength=deepest)

    def _pace(self, news: StepNews) -> None:
        """Counts the steps until a way is tried again, and ends a try."""
        for i, r in enumerate(self._records):
            r.since = 0 if i == news.way else r.since + 1
        if self._trial is not None:
            self._left -= news.way == news.drawn == self._trial
            if self._left > 0:
                return
            tried, self._trial = self._trial, None
            self._settle(news, tried)
            return
        self._steps += 1
        self._held += 1
        early = self._steps < EARLY
        if early or self._steps % max(1, (RESTING if self._rests(news) else SETTLING) // news.batch) == 0:
            self._settle(news, None)
        if not early and not self._best and news.seconds < BRIEF_S and self._steps % RESTING:
            return
        for i, r in enumerate(self._records):
            if i != self._best and r.since >= r.due and self._may_try(i, news):
                if r.due == FIRST_PAUSE:
                    self._let_wait(i, news)
                if r.since >= r.due:
                    self._trial, self._left, self._surprise = i, TRIED, UNSURPRISED
                    for stale in [i] if self._best else self._kin(i):
                        self._records[stale].fade(1 / 4)
                    if not self._best:
                        self._drafts[self.ways[i].on_gpu].forget()
                    return

    def _rests(self, news: StepNews) -> bool:
        """Whether there is little to learn, or no time."""
        return not self._best or news.seconds < BRIEF_S

    def _may_try(self, way: int, news: StepNews) -> bool:
        """Plain decoding if the pace is doubtful; any way to draft beside another, else that of its kind which loses
        least."""
        if not way:
            return self._pace_now > DOUBTFUL
        return self._best > 0 or way == min(self._kin(way), key=lambda i: self._loss(i, news.batch, news.context))

    def _settle(self, news: StepNews, tried: int | None) -> None:
        """Goes over to the fastest way; one that was left, or tried in vain, has to wait."""
        before, speeds = self._best, [self.speed(i, news.batch, news.context) for i in range(len(self.ways))]
        speeds[0] *= AHEAD
        fastest = int(np.argmax(speeds))
        surer = SURER if fastest else 1.0
        stayed = self._held >= (STAY if self._steps < EARLY else 2 * STAY)
        if speeds[fastest] > surer * speeds[before] and (stayed or tried is not None or not before):
            self._best, self._held = fastest, 0
        left = [self.ways[i].kind for i in (before, tried) if i not in (None, self._best)]
        for i, (r, way) in enumerate(zip(self._records, self.ways)):
            if way.kind in left and i != self._best:  # its like would fare alike
                self._let_wait(i, news)
                r.vain = min(r.vain + 1, MOST_DOUBLINGS)
                r.since = 0
        if before == self._best:
            self._records[self._best].vain = 0

    def _let_wait(self, way: int, news: StepNews) -> None:
        """Says after how many steps a way is tried again."""
        r, lost = self._records[way], self._loss(way, news.batch, news.context)
        r.due = max(SHORTEST_PAUSE, round(DEAR * lost**1.5)) << r.vain
        r.hopeless = self._most(way, news) < self.speed(self._best, news.batch, news.context)

    def _loss(self, way: int, batch: int, context: float) -> float:
        """Steps that a try loses: when nothing is right, or beside another way to draft as far as is foreseen."""
        assert self.costs is not None
        if self._best:
            tried, best = (self.speed(i, batch, context) for i in (way, self._best))
            return (TRIED + 1) * max(0.0, 1 - tried / best)
        plain = self._slow(0) * self.costs.one_s(batch, batch, context)
        return (TRIED + 1) * max(0.0, self._step_s(way, batch, context) / plain - 1)

    def _step_s(self, way: int, batch: int, context: float) -> float:
        """Seconds of a way's step, with as many rows as its steps had."""
        assert self.costs is not None
        r = self._records[way]
        rows = r.rows / r.steps if r.steps else 1.0 + self.ways[way].depth
        step = self.costs.one_s(min(rows * batch, self.costs.most), batch, context)
        return self._slow(way) * step + self.draft_s(way, batch)

    def _most(self, way: int, news: StepNews) -> float:
        """As `speed`, if all guesses were right."""
        assert self.costs is not None
        plain = self.costs.one_s(news.batch, news.batch, news.context)
        return (1 + self.ways[way].depth) * plain / self._step_s(way, news.batch, news.context)

    def _kin(self, way: int) -> list[int]:
        """The ways to draft with the GPU's drafts, or the others."""
        return [i for i, w in enumerate(self.ways) if i and w.on_gpu == self.ways[way].on_gpu]

    def _coverage(self, way: int) -> float:
        """Part of the requests for which there was a draft at all; the GPU makes one whoever else is asked."""
        on_gpu = self.ways[way].on_gpu
        drafts, prior = self._drafts[on_gpu], PRIOR_LOOKUP if not on_gpu and any(w.on_gpu for w in self.ways) else 1.0
        return (drafts.found + PRIOR_TRIES * prior) / (drafts.spoken + PRIOR_TRIES)

    def _slow(self, way: int) -> float:
        """Seconds of a way's steps against the table's, where 1 is what all ways together take."""
        some = self._steps_like(way)
        return (sum(r.slow for r in some) + SAME_PACE) / (sum(r.steps for r in some) + SAME_PACE)

    def _steps_like(self, way: int) -> list[_Record]:
        """What tells how long a way's steps take: its record, or while it has no steps those of the ways that ask, too,
        and while nobody was asked those of all that draft with the same."""
        own = self._records[way]
        if own.steps or not way:
            return [own]
        asked = self._asked() if self.ways[way].asks else []
        return asked or [self._records[i] for i in self._kin(way)]

    def _asked(self) -> list[_Record]:
        """Ways in which drafters were asked."""
        return [r for r, w in zip(self._records, self.ways) if w.asks and r.steps]


def share(trees: Sequence[Tree], rows: int) -> list[Tree]:
    """The likeliest `rows` nodes of all the trees together: likely requests get more of them."""
    if sum(map(len, trees)) <= rows:  # also when there are none
        return list(trees)
    owner = np.repeat(np.arange(len(trees)), [len(t) for t in trees])
    likeliest = np.argsort(-np.concatenate([t.prob for t in trees]), kind="stable")[:rows]
    counts = np.bincount(owner[likeliest], minlength=len(trees)).tolist()
    return [_best(t, n) for t, n in zip(trees, counts)]


def _best(tree: Tree, n: int) -> Tree:
    """As Tree.best, quicker where the likelier nodes come first, as the GPU gives them."""
    if n >= len(tree) or (tree.prob[1:] > tree.prob[:-1]).any():
        return tree.best(n)
    return Tree(tree.token[:n], tree.parent[:n], tree.prob[:n])
