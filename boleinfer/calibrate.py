"""`boleinfer calibrate`: measures what steps of a model cost on this machine, which decides how much is drafted."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from boleinfer.costs import CostTable
from boleinfer.options import load_model


def calibrate(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    llm = load_model(args)
    began = time.perf_counter()
    table = llm.engine.executor.price(fresh=True)
    assert table is not None
    print(shown(table))
    if not args.quiet:
        print(f"measured in {time.perf_counter() - began:.1f} s and kept", file=sys.stderr)
    return 0


def shown(table: CostTable) -> str:
    """Milliseconds of a step: rows down, requests and context across; then what the GPU's ways to draft add."""
    places = [(B, T) for B in table.batch for T in table.context]
    lines = ["ms a step", f"{'requests':>8} {' '.join(f'{B:>9}' for B, _ in places)}"]
    lines.append(f"{'context':>8} {' '.join(f'{T:>9}' for _, T in places)}")
    for rows in table.rows:
        cells = (1e3 * table.step_s(np.asarray([rows]), B, T)[0] for B, T in places)
        lines.append(f"{rows:>8} {' '.join(f'{ms:9.2f}' for ms in cells)}")
    for way in table.drafts:
        cells = (1e3 * table.draft_s(way, B) for B, _ in places)
        lines.append(f"draft {way:>2} {' '.join(f'{ms:9.2f}' for ms in cells)}")
    return "\n".join(lines)
