"""`pytest -m gpu` in a process of its own: every outcome, skipped tests by name."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.receipt import Report

ROOT = Path(__file__).parents[2]


def run(quick: bool = False) -> Report:
    """All tests that need a GPU; fails where one failed, or none ran."""
    report = Report()
    found = outcomes(["tests/test_kernels_gpu.py"] if quick else [])
    for name, (outcome, why) in found.items():
        report.count(outcome)
        if outcome == "failed":
            report.failures.append(f"{name}: {why}")
        elif outcome == "skipped":
            report.notes.setdefault("skipped", []).append(f"{name}: {why}")
    report.expect(report.counts.get("passed", 0) > 0, "no test passed")
    return report


def outcomes(arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Name of each test -> "passed", "failed" or "skipped", and why. RuntimeError where pytest itself fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "4", "-p", "no:cacheprovider"]
        command.append(f"--junitxml={file}")
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
        if not file.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return parse(file.read_text())


def parse(xml: str) -> dict[str, tuple[str, str]]:
    """As `outcomes`, from a JUnit report."""
    found = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, why = "failed", (child.get("message") or child.text or "")[:300]
            elif child.tag == "skipped":
                outcome, why = "skipped", (child.get("message") or "")[:300]
        found[f"{case.get('classname')}::{case.get('name')}"] = (outcome, why)
    return found
