"""The table of what a step costs by its rows, requests and context, and the file that keeps it. Knows no model."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from boleinfer.files import write_whole

SAME, MANY = 32, 1024  # contexts that are taken as one; steps of so many kinds are remembered


@dataclass(frozen=True)
class CostTable:
    """c(rows, batch, context): seconds of a complete step, drafting apart, as they were measured.

    rows, batch, context: what was measured, each rising. A step of fewer rows than requests stands for as many rows
    seconds: float64 [rows, batch, context]
    stairs:  a step takes what the next larger size in `rows` takes, as captured graphs do; else lines between them
    single:  the same of steps in which every request has one row, float64 [batch, context]; None: nothing is special
             about them
    drafts:  by the number of each of the GPU's own ways to draft, the seconds that it adds, float64 [batch]
    """

    rows: tuple[int, ...]
    batch: tuple[int, ...]
    context: tuple[int, ...]
    seconds: np.ndarray
    stairs: bool = False
    drafts: dict[int, np.ndarray] = field(default_factory=dict)
    single: np.ndarray | None = None
    _known: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, at in (("rows", self.rows), ("batch", self.batch), ("context", self.context)):
            if not at or list(at) != sorted(set(at)) or at[0] < 0:
                raise ValueError(f"a table of costs needs rising {name}, got {at}")
        shape = (len(self.rows), len(self.batch), len(self.context))
        single = () if self.single is None else ((self.single, shape[1:]),)
        for array, expected in ((self.seconds, shape), *single, *((d, shape[1:2]) for d in self.drafts.values())):
            if array.shape != expected or not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(f"a table of costs needs {expected} finite seconds, got {array.shape}: {array}")
        if (self.seconds <= 0).any() or (self.single is not None and (self.single <= 0).any()):
            raise ValueError("a table of costs with steps that take no time")
        smooth = self.seconds
        for axis in range(3):  # more of anything takes no less
            smooth = np.maximum.accumulate(smooth, axis=axis)
        object.__setattr__(self, "seconds", smooth)

    @property
    def most(self) -> int:
        """The largest number of rows that was measured."""
        return self.rows[-1]

    def step_s(self, rows: np.ndarray, batch: int, context: float) -> np.ndarray:
        """Seconds of steps of so many rows, infinite above `most`; beyond the measured context on the last line."""
        return self._all(batch, int(context) // SAME * SAME)[np.minimum(rows, self.most + 1)]

    def one_s(self, rows: float, batch: int, context: float) -> float:
        """As step_s, of one step."""
        return float(self._all(batch, int(context) // SAME * SAME)[min(math.ceil(rows - 1e-6), self.most + 1)])

    def _all(self, batch: int, context: int) -> np.ndarray:
        """Seconds of steps of 0, 1, .. most rows, and of more."""
        if (batch, context) not in self._known:
            if len(self._known) >= MANY:
                self._known.clear()
            by_context = _along(self.seconds, 2, self.context, context, beyond=True)
            at = _along(by_context, 1, self.batch, batch, beyond=False)  # [rows]
            rows = np.arange(self.most + 1)
            on = at[np.searchsorted(self.rows, rows)] if self.stairs else np.interp(rows, self.rows, at)
            if self.single is not None and batch <= self.most:
                alone = _along(self.single, 1, self.context, context, beyond=True)
                on[batch] = min(on[batch], _along(alone, 0, self.batch, batch, beyond=False))
            self._known[batch, context] = np.append(on, np.inf)
        return self._known[batch, context]

    def draft_s(self, way: int, batch: float) -> float:
        """Seconds that the GPU's way to draft adds to a step; 0 for one that is not in the table."""
        return float(np.interp(batch, self.batch, self.drafts[way])) if way in self.drafts else 0.0


def _along(values: np.ndarray, axis: int, at: tuple[int, ...], x: float, beyond: bool) -> np.ndarray:
    """Values on the line between the two nearest measured places; outside them at the end, or further on that line."""
    if len(at) == 1:
        return values.take(0, axis)
    i = min(max(int(np.searchsorted(at, x)) - 1, 0), len(at) - 2)
    t = max(0.0, (x - at[i]) / (at[i + 1] - at[i]))
    if not beyond:
        t = min(t, 1.0)
    low, high = values.take(i, axis), values.take(i + 1, axis)
    return low + t * (high - low)


class CostFiles:
    """Tables in a folder, one file each, named by a hash of all that decides what is in it.

    Several processes may use one folder: a file appears whole or not at all. One that is damaged, or was made for
    another key, is as good as none. A folder that cannot be written costs a warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, key: dict[str, Any]) -> Path:
        """Where the table of that key is."""
        return self.folder / f"{_digest(key)[:32]}.json"

    def get(self, key: dict[str, Any]) -> CostTable | None:
        """What `put` kept under the key; None where there is nothing, or nothing sound."""
        try:
            content = json.loads(self.file(key).read_text(encoding="utf-8"))
            table, digest = content["table"], content["sha256"]
            if content["key"] != _plain(key) or digest != _digest([content["key"], table]):
                return None
            rows, batch, context = (tuple(table[name]) for name in ("rows", "batch", "context"))
            return CostTable(
                rows,
                batch,
                context,
                np.asarray(table["seconds"], np.float64),
                bool(table["stairs"]),
                {int(way): np.asarray(s, np.float64) for way, s in table["drafts"].items()},
                None if table["single"] is None else np.asarray(table["single"], np.float64),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, key: dict[str, Any], table: CostTable) -> None:
        """Keeps the table, in one go."""
        names = ("rows", "batch", "context", "seconds", "stairs", "drafts", "single")
        fields = {name: getattr(table, name) for name in names}
        content: dict[str, Any] = {"key": _plain(key), "table": _plain(fields)}
        content["sha256"] = _digest([content["key"], content["table"]])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.file(key), json.dumps(content, indent=1).encode())
        except OSError as error:
            warnings.warn(
                f"what steps cost cannot be kept in {self.folder} ({error}), so every start measures it again; "
                "set BOLEINFER_CACHE to a folder that can be written",
                stacklevel=2,
            )


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()
