"""The parts of the proof on a GPU (tests/gpu_receipt.py): one file a part, each with `run(quick) -> Report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """What a part found.

    counts: how many of what were tried; failures: one line each, empty when all is well; notes: what else was measured
    skipped: why nothing could be tried, "" where it was
    """

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""

    def count(self, what: str, n: int = 1) -> None:
        """Adds to a count."""
        self.counts[what] = self.counts.get(what, 0) + n

    def expect(self, right: bool, failure: str) -> bool:
        """Notes a failure unless `right`."""
        if not right:
            self.failures.append(failure)
        return bool(right)

    def largest(self, name: str, value: float) -> None:
        """Keeps the largest of several values."""
        self.notes[name] = max(float(value), self.notes.get(name, float("-inf")))
