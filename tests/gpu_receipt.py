"""The proof that the GPU computes what NumPy does, in one command that writes its receipt.

    python -m tests.gpu_receipt                      every part; benchmarks/results/gpu_receipt.json
    python -m tests.gpu_receipt --quick              the same with less of everything
    python -m tests.gpu_receipt tokens fuzz          these parts; others stay in the receipt if the sources are the same

Each part runs in a process of its own, so that a crash, or a GPU that it leaves unusable, is that part's alone. The
receipt is written after each one. Exit status: 0 when all parts passed, 1 when one did not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from boleinfer import device, driver, kernels
from boleinfer.nvrtc import ToolchainError, toolchain
from boleinfer.provenance import provenance
from tests.receipt import Report

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "gpu_receipt.json"
PARTS = {
    "pytest": "gpu_tests",
    "check": "ops_cases",
    "families": "families",
    "tokens": "tokens",
    "verify": "verify",
    "fuzz": "fuzz",
    "churn": "churn",
    "steady": "steady",
    "big_pools": "big_pools",
    "sanitizer": "sanitizer",
}
"""Name of each part -> its file in tests/receipt."""

SECONDS = 540  # that a part may take


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and writes the receipt; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_receipt", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="the receipt (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)  # run one part here; its report goes to this file
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if args.alone is not None:
        args.alone.write_text(json.dumps(asdict(run_part(args.parts[0], args.quick)), default=str))
        return 0
    try:
        kernels.open_gpu()
    except ToolchainError as error:
        print(f"gpu_receipt: there is nothing to prove here: {error}", file=sys.stderr)
        return 2
    return run_all(args.parts or list(PARTS), args.out, args.quick)


def run_all(names: Sequence[str], out: Path, quick: bool) -> int:
    """Each part in its own process; the receipt grows with each."""
    receipt = origin() | {"quick": quick}
    receipt["parts"] = _kept(out, receipt)
    for name in names:
        began = time.perf_counter()
        report = in_process(name, quick)
        seconds = time.perf_counter() - began
        part = {"passed": not report.failures and not report.skipped, "seconds": round(seconds, 1), **asdict(report)}
        receipt["parts"][name] = part
        print(line(name, report, seconds), flush=True)
        for failure in report.failures[:20]:
            print(f"    {failure}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(receipt, indent=1, default=str) + "\n")
    failed = [name for name, part in receipt["parts"].items() if part["failures"]]
    missing = [name for name in PARTS if name not in receipt["parts"] or receipt["parts"][name]["skipped"]]
    print(
        f"{len(receipt['parts'])} parts, {len(failed)} failed{_listed(failed)}; not done:{_listed(missing) or ' none'}"
    )
    return 1 if failed else 0


def in_process(name: str, quick: bool) -> Report:
    """A part's report from another process; a failure that says why where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.gpu_receipt", name, "--alone", str(file)] + ["--quick"] * quick
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        child = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
        try:
            said, _ = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # and whatever it started
            return Report(failures=[f"not done after {SECONDS} s"])
        if not file.exists():
            return Report(failures=[f"exit status {child.returncode}: {said[-3000:]}"])
        return Report(**json.loads(file.read_text()))


def run_part(name: str, quick: bool) -> Report:
    """A part in this process; an exception is a failure."""
    try:
        return importlib.import_module(f"tests.receipt.{PARTS[name]}").run(quick)
    except Exception as error:
        import traceback

        return Report(failures=[f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"])


def line(name: str, report: Report, seconds: float) -> str:
    """What is printed of a part."""
    verdict = "FAILED" if report.failures else "SKIPPED" if report.skipped else "passed"
    counts = ", ".join(f"{what} {n:,}" for what, n in report.counts.items())
    notes = ", ".join(f"{what} {n:.3g}" for what, n in report.notes.items() if isinstance(n, float))
    return f"{name:<11}{verdict:<8}{seconds:6.1f} s  {'; '.join(filter(None, (report.skipped, counts, notes)))}"


def origin() -> dict[str, Any]:
    """GPU, driver, CUDA, CuPy, date and sources."""
    cupy, tools, found = device.cupy(), toolchain(), driver.ask()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    said = provenance()
    return {
        "gpu": name,
        "driver": found.version if found else "unknown",
        "cuda": ".".join(map(str, tools.version)),
        "cupy": cupy.__version__,
        **{key: said[key] for key in ("date", "sources_sha256", "boleinfer", "python", "numpy", "system")},
    }


def _kept(out: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """Parts of an earlier receipt of the same sources on the same kind of GPU."""
    try:
        old = json.loads(out.read_text())
        same = all(old[key] == receipt[key] for key in ("gpu", "driver", "cuda", "cupy", "sources_sha256", "quick"))
        return old["parts"] if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


if __name__ == "__main__":
    raise SystemExit(main())
