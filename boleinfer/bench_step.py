"""`boleinfer bench step`: where the time of one decoding step goes, kernel by kernel. For tuning; writes no result."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from boleinfer import timing
from boleinfer.bench_gpu import WARM, drop, graph_ms, load, one_by_one, random_tree, read_prompts, step_s
from boleinfer.draft.base import Drafter
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.llm import LLM
from boleinfer.results import output_file, write
from boleinfer.timing import Launch

CALLS = 48  # at least so many launches of a kernel in a graph


def bench_step(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    size, rows = args.random_weights, args.rows
    record = {"shape": size, "rows": rows, "context": args.prompt, "read_gb_s": timing.read_gb_s()}
    tree = random_tree(rows - 1, np.random.default_rng(1))
    draft: str | Drafter = ScriptedDrafter(lambda request: tree) if rows > 1 else "none"
    llm = load(size, args.prompt, 1, draft, max(8, rows - 1))
    requests, _ = read_prompts(llm, 1, args.prompt)
    step_s(llm, WARM)
    record["graph_ms"] = graph_ms(llm, rows)
    drop(llm, requests)
    record["kernels"] = kernels_of_step(llm, args.prompt)
    print(table(record))
    write(record, output_file(args, "step.json", quick=True))
    return 0


def kernels_of_step(llm: LLM, prompt: int) -> list[dict[str, Any]]:
    """Launches and microseconds of every kernel of a step, the dearest first.

    The launches of one step, made again kernel by kernel in graphs of their own, each with its own arrays, so that
    matrices come from memory as in the step; what is small comes from L2."""
    with one_by_one(llm):
        requests, _ = read_prompts(llm, 1, prompt)
        step_s(llm, 2)
        with timing.recorded() as launches:
            llm.engine.step()
        groups: dict[tuple[str, ...], list[Launch]] = defaultdict(list)
        for launch in launches:
            groups[label(launch)].append(launch)
        found = [
            {
                "kernel": " ".join(key),
                "launches": len(group),
                "us": group_us(group),
                "weight_bytes": weight_bytes(group),
            }
            for key, group in groups.items()  # in the step's order: a later kernel never changes what earlier ones read
        ]
        drop(llm, requests)
    return sorted(found, key=lambda entry: -entry["us"] * entry["launches"])


def label(launch: Launch) -> tuple[str, ...]:
    """A kernel by name, a product with its sizes too."""
    if not launch.name.startswith("linear"):
        return (launch.name,)
    Din = (launch.args | launch.given[1]["constants"])["Din"]  # where it is known to the compiler, a constant
    return launch.name, f"{launch.args['w'].size // Din}x{Din}"


def group_us(group: Sequence[Launch]) -> float:
    """Microseconds of a launch, an average of the group."""
    rounds = -(-CALLS // len(group))
    return timing.calls_us([launch.again for launch in group] * rounds)


def weight_bytes(group: Sequence[Launch]) -> int:
    """Bytes of the matrix of a launch that is a product, else 0."""
    return int(group[0].args["w"].nbytes) if group[0].name.startswith("linear") else 0


def table(record: dict[str, Any]) -> str:
    """The result for people."""
    entries, total = record["kernels"], sum(e["us"] * e["launches"] for e in record["kernels"])
    lines = [
        f"{record['shape']}, {record['rows']} rows, context {record['context']}: {total / 1e3:.3f} ms in "
        f"{sum(e['launches'] for e in entries)} launches, one kernel at a time; the graph takes "
        f"{record['graph_ms']:.3f} ms; memory gives {record['read_gb_s']:.0f} GB/s",
        "",
        f"{'kernel':36} {'launches':>8} {'us each':>9} {'us in all':>10} {'share':>6} {'of GB/s':>8}",
    ]
    for e in entries:
        gb_s = f"{e['weight_bytes'] / e['us'] / 1e3 / record['read_gb_s']:8.0%}" if e["weight_bytes"] else ""
        whole = e["us"] * e["launches"]
        lines.append(
            f"{e['kernel']:36} {e['launches']:8} {e['us']:9.2f} {whole:10.1f} {whole / total:6.1%} {gb_s}".rstrip()
        )
    return "\n".join(lines)
