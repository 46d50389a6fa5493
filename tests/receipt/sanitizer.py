"""compute-sanitizer over tests/receipt/sanitized.py: memcheck and racecheck have to find nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.receipt import Report
from tests.receipt.sanitized import DONE

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_REFUSED = ("Device not supported", "Unable to find injection library", "Failed to initialize")


def run(quick: bool = False) -> Report:
    """Both tools. Where the program is missing or refuses the machine, the part is skipped and says so."""
    report = Report()
    program = find()
    if program is None:
        report.skipped = "compute-sanitizer is not on PATH: NOT checked"
        return report
    for tool in TOOLS:
        seconds = 10 if quick else 40 if tool == "memcheck" else 25
        command = [program, "--tool", tool, sys.executable, "-m", "tests.receipt.sanitized"]
        command[3:3] = ["--report-api-errors", "no"] if tool == "memcheck" else []  # CuPy raises those
        command += ["--seconds", str(seconds), "--tokens", "4" if tool == "memcheck" else "2"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        except subprocess.TimeoutExpired:
            report.failures.append(f"{tool}: not done after 240 s")
            continue
        judge(report, tool, done.stdout + done.stderr, done.returncode)
    return report


def judge(report: Report, tool: str, output: str, status: int) -> None:
    """Takes a tool's output into the report."""
    refused = next((r for r in _REFUSED if r in output), None)
    summary = _SUMMARY.search(output)
    said = re.search(re.escape(DONE) + "(.*)", output)
    report.notes[tool] = said[1] if said else "the run did not come to its end"
    if refused and not said:
        report.skipped = f"compute-sanitizer refuses this machine ({refused}): NOT checked"
    elif summary is None:
        report.failures.append(f"{tool}: no summary, exit status {status}: {output[-1500:]}")
    else:
        report.count(f"{tool} errors", int(summary[2]))
        first = next((line for line in output.splitlines() if re.match(r"=+ (?!COMPUTE)\S", line)), "")
        report.expect(summary[2] == "0", f"{tool}: {summary[0]}; first: {first}")
        report.expect(bool(said), f"{tool}: the program failed, exit status {status}: {output[-1500:]}")


def find() -> str | None:
    """The program on PATH, in a CUDA toolkit or among installed packages."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    roots = [Path(p) for p in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if p]
    roots += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*"))
    for root in roots:
        for place in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            if os.access(root / place, os.X_OK):
                return str(root / place)
    return None
