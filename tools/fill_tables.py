#!/usr/bin/env python3
"""Puts the tables of benchmarks/results/*.json between their markers in README.md and docs/*.md.

python tools/fill_tables.py     a result that is shown nowhere yet gets markers at the end of its section

What `boleinfer bench speculation` measured may stand in several files, speculation*.json; their plot is drawn as well.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from boleinfer import bench, bench_tables, speculation_tables  # noqa: E402

SPECULATION = "speculation.json"
TABLES = {"cpu.json": bench.markdown, **bench_tables.FILES, SPECULATION: speculation_tables.speculation}
PAGES = {
    "kernels.json": ("docs/performance-notes.md", "## Kernels on the GPU (`boleinfer bench kernels`)"),
    "gdn_tree.json": ("docs/tree-kernel.md", "## What it takes (`boleinfer bench tree`)"),
    "ring.json": ("docs/tree-kernel.md", "## How long the ring is (`boleinfer bench ring`)"),
}
README = ("README.md", "## How fast on a GPU")
BEFORE = "## Where to start reading"  # what a new section of the README is put in front of
WHAT = {
    "decode.json": "`boleinfer bench decode` measures plain decoding, with random weights of the published shapes:",
    "prompts.json": "`boleinfer bench prompts` measures how long a prompt takes:",
    "verify.json": "`boleinfer bench verify` measures what more rows cost, and so how large a draft may be:",
    "gdn_tree.json in short": "`boleinfer bench tree` measures trees in the recurrence ([more](docs/tree-kernel.md)):",
    "speculation.json": "`boleinfer bench speculation` measures what drafting gains "
    "([plot](benchmarks/results/speculation.svg)):",
    "start.json": "`boleinfer bench start` measures start-up:",
    "kernels.json": "Each product as ours / cuBLAS (share of the bandwidth that ours takes).",
}


def main() -> None:
    for shown_as, table in TABLES.items():
        record = read(shown_as.split()[0])
        if record is None:
            continue
        name, section = PAGES.get(shown_as, README)
        page = ROOT / name
        shown = table(record)
        page.write_text(filled(page.read_text(encoding="utf-8"), shown_as, section, shown), encoding="utf-8")
        print(f"{shown_as} -> {name}")
        if shown_as == SPECULATION and record["profiles"]:
            (RESULTS / "speculation.svg").write_text(speculation_tables.plot(record), encoding="utf-8")


def read(file: str) -> dict[str, Any] | None:
    """A result; None where there is none."""
    name = "speculation*.json" if file == SPECULATION else file
    records = [json.loads(found.read_text(encoding="utf-8")) for found in sorted(RESULTS.glob(name))]
    if file == SPECULATION and records:
        return speculation_tables.joined(records)
    return records[0] if records else None


def filled(text: str, file: str, section: str, shown: str) -> str:
    """The page with the table between its markers, which are made where they are missing."""
    block = f"<!-- {file} -->\n{shown}\n\n<!-- end -->"
    found = re.compile(rf"<!-- {re.escape(file)} -->\n.*?<!-- end -->", re.DOTALL)
    if found.search(text):
        return found.sub(lambda _: block, text)
    if f"\n{section}\n" not in text:
        at = text.find(f"\n{BEFORE}\n")
        at = len(text.rstrip()) + 1 if at < 0 else at + 1
        text = f"{text[:at]}{'' if text[at:] else chr(10)}{section}\n{chr(10) if text[at:] else ''}{text[at:]}"
    start = text.index(f"\n{section}\n") + len(section) + 2
    end = text.find("\n## ", start - 1)
    end = len(text) if end < 0 else end
    body = text[start:end].strip("\n")
    new = "\n\n".join(part for part in (body, WHAT.get(file, ""), block) if part)
    return f"{text[:start]}\n{new}\n{text[end:]}"


if __name__ == "__main__":
    main()
