"""Result files of measurements: where they are written, and how. Knows nothing of what was measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import boleinfer
from boleinfer.files import write_whole
from boleinfer.options import UsageError


def output_file(args: argparse.Namespace, name: str, quick: bool) -> Path | None:
    """Where to write: --output, else benchmarks/results/NAME; None for a quick look, which is no result to keep.

    Raises UsageError where there is no such folder."""
    if args.output is not None:
        return Path(args.output)
    if quick:
        return None
    root = Path(boleinfer.__file__).parent.parent
    if not (root / "pyproject.toml").is_file():
        raise UsageError("this is no checkout, so there is no benchmarks/results to write into; name a file with -o")
    return root / "benchmarks" / "results" / name


def write(record: dict[str, Any], output: Path | None, note: bool = True) -> None:
    """Writes the record, where there is a file to write; `note` says so on stderr."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, (json.dumps(record, indent=1) + "\n").encode())
        if note:
            print(f"written to {output}", file=sys.stderr)
