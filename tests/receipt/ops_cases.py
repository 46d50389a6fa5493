"""Every op's CASES on the GPU, twice each into poisoned memory, against the float64 definition."""

from __future__ import annotations

from boleinfer.check import run_checks
from tests.receipt import Report


def run(quick: bool = False) -> Report:
    """float32 and bf16."""
    report = Report()
    for dtype in ("float32", "bf16"):
        for result in run_checks(["norms", "rope"] if quick else (), "cuda", dtype):
            report.count(f"cases {dtype}")
            if result.bound and result.right:
                report.largest(f"largest share of a bound {dtype}", result.error / result.bound)
            said = result.failure or f"error {result.error:.1e}, bound {result.bound:.0e}"
            report.expect(result.right, f"{result.op} {result.case} {dtype}: {said}")
    return report
