"""`boleinfer bench cpu`: plain decoding, every drafter and the matrix-vector floor, interleaved in one run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import boleinfer
from boleinfer.draft import NAMES, make_drafter
from boleinfer.llm import BUNDLED, LLM
from boleinfer.ops.linear import linear
from boleinfer.params import SamplingParams
from boleinfer.provenance import provenance
from boleinfer.results import output_file, write

SEED = 20
FIRST_TOKEN = "from boleinfer.cli import main; main(['generate', '-q', '-n', '1', 'def fibonacci(n):'])"
Product = Callable[[np.ndarray, np.ndarray], np.ndarray]


def bench_cpu(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when a drafter changed a token. Writes the result file of a full run."""
    output = output_file(args, "cpu.json", quick=args.prompts is not None)
    origin = provenance()  # of the sources that are about to run
    held_out = json.loads((BUNDLED / "heldout_prompts.json").read_text(encoding="utf-8"))
    prompts = [entry["text"] for entry in held_out[: args.prompts]]
    llm = LLM(args.model, device="cpu")
    names = [name for name in NAMES if name != "mtp" or llm.model.has_mtp]
    modes = {
        "sampled": replace(llm.default_params, seed=SEED, max_tokens=args.max_tokens, ignore_eos=True),
        "greedy": SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True),
    }
    matrices = list(decode_matrices(llm))
    whole = whole_matrices(matrices)
    results = {mode: {name: Runs() for name in names} for mode in modes}
    matvec_s: list[float] = []
    linear_s: list[float] = []
    for repeat in range(args.repeats + 1):  # the first round only warms up
        for mode, params in modes.items():
            for prompt in prompts[:1] if repeat == 0 else prompts:
                for name in names:
                    llm.engine.drafter = make_drafter(name, llm.model, llm.engine.state)
                    results[mode][name].add(prompt, *timed(llm, prompt, params), keep=repeat > 0)
                matvec_s.append(product_s(whole, lambda x, w: np.dot(x[0], w.T)))
                linear_s.append(product_s(matrices, linear))
    record = {
        "what": "batch 1, held-out Python prompts; medians over the repeats, summed over the prompts",
        **origin,
        "model": args.model or BUNDLED.name,
        "prompts": len(prompts),
        "tokens_a_prompt": args.max_tokens,
        "repeats": args.repeats,
        "sampled": {name: getattr(llm.default_params, name) for name in ("temperature", "top_p", "repetition_penalty")},
        "import_ms": 1e3 * process_s("from boleinfer import LLM"),
        "first_token_ms": 1e3 * process_s(FIRST_TOKEN),
        "matvec_ms": 1e3 * median(matvec_s),
        "linear_ms": 1e3 * median(linear_s),
        "matvec_bytes": sum(w.nbytes for w, _ in matrices),
        "modes": {mode: summary(runs, median(matvec_s)) for mode, runs in results.items()},
    }
    print(table(record))
    write(record, output)
    return 0 if all(runs["same_tokens"] for mode in record["modes"].values() for runs in mode.values()) else 1


class Runs:
    """What one drafter did: per prompt its seconds, tokens and statistics."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.stats: dict[str, Any] = {}

    def add(self, prompt: str, seconds: float, tokens: list[int], stats: Any, keep: bool) -> None:
        if keep:
            self.seconds.setdefault(prompt, []).append(seconds)
        self.tokens[prompt], self.stats[prompt] = tokens, stats

    @property
    def decode_s(self) -> float:
        """Median seconds of each prompt, summed."""
        return sum(median(s) for s in self.seconds.values())

    @property
    def decoded(self) -> int:
        """Tokens that those seconds gave: all but each answer's first, which the prompt's own pass gives."""
        return sum(len(self.tokens[prompt]) - 1 for prompt in self.seconds)


def timed(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, list[int], Any]:
    """Wall seconds of one request without its prompt's pass, its tokens and statistics."""
    start = time.perf_counter()
    output = llm.generate(prompt, params)[0]
    return time.perf_counter() - start - output.stats.prefill_s, output.token_ids, output.stats


def decode_matrices(llm: LLM) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every matrix that plain decoding multiplies one row with, once a token, each with such a row [1, Din]."""
    rng = np.random.default_rng(0)
    for name, w in llm.model.weights.items():
        if name.startswith("mtp.") or name.endswith("conv1d") or name == "embed_tokens":
            continue  # drafting only; depthwise, no matrix; a look-up (a tied head is there as lm_head)
        stack = w[: llm.config.num_experts_per_tok] if ".experts." in name else [w]
        for matrix in stack if w.ndim > 1 else []:
            yield matrix, rng.standard_normal((1, matrix.shape[-1]), np.float32)


def process_s(code: str, repeats: int = 5) -> float:
    """Median seconds of a fresh Python process that runs `code`, less those of one that runs nothing."""
    seconds: dict[str, list[float]] = {code: [], "": []}
    for _ in range(repeats):
        for source, times in seconds.items():
            times.append(run_python(source)[0])
    return median(seconds[code]) - median(seconds[""])


def run_python(code: str, **environment: str) -> tuple[float, str]:
    """Seconds of a fresh Python process from its start to its end, and what it printed."""
    everything = {**os.environ, "PYTHONPATH": str(Path(boleinfer.__file__).parent.parent), **environment}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=everything, check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - start, done.stdout


def whole_matrices(matrices: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same matrices in one piece each, column-major: the order in which NumPy's own product is quickest."""
    return [(np.asfortranarray(w.reshape(-1, w.shape[-1])), x) for w, x in matrices]


def product_s(matrices: list[tuple[np.ndarray, np.ndarray]], product: Product, repeats: int = 5) -> float:
    """Median seconds of one row through all of them."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for w, x in matrices:
            product(x, w)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def summary(runs: dict[str, Runs], matvec_s: float) -> dict[str, dict[str, Any]]:
    """Per drafter: speed, ratio to plain decoding and to matrix-vector products, steps and what was accepted."""
    plain = runs["none"]
    made = {}
    for name, run in runs.items():
        stats = list(run.stats.values())
        histogram = [sum(column) for column in zip_longest(*(s.histogram for s in stats), fillvalue=0)]
        steps, accepted = sum(s.steps for s in stats), sum(s.accepted for s in stats)
        made[name] = {
            "tokens_per_s": run.decoded / run.decode_s,
            "times_plain": (run.decoded / run.decode_s) / (plain.decoded / plain.decode_s),
            "ms_per_token": 1e3 * run.decode_s / run.decoded,
            "matvec_share": matvec_s * run.decoded / run.decode_s,
            "tokens_per_step": (accepted + steps) / steps,
            "drafted": sum(s.drafted for s in stats),
            "accepted": accepted,
            "steps_by_accepted": histogram,
            "draft_s": sum(s.draft_s for s in stats),
            "verify_s": sum(s.verify_s for s in stats),
            "same_tokens": run.tokens == plain.tokens,
        }
    return made


def table(record: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{record['model']} on {record['cpu']}, {record['cores']} cores, numpy {record['numpy']} ({record['blas']})",
        f"{record['prompts']} prompts x {record['tokens_a_prompt']} tokens, batch 1, median of {record['repeats']}; "
        f"one row through the weights alone: NumPy's own matrix-vector products {record['matvec_ms']:.2f} ms, ours, in "
        f"panels, {record['linear_ms']:.2f} ms",
        "",
        f"{'':8} {'draft':6} {'tokens/s':>9} {'x plain':>8} {'ms/token':>9} {'of matvec':>10} {'a step':>7}  steps by "
        "accepted tokens",
    ]
    for mode, runs in record["modes"].items():
        for name, r in runs.items():
            speed = (
                f"{r['tokens_per_s']:9.1f} {r['times_plain']:8.2f} {r['ms_per_token']:9.2f} {r['matvec_share']:10.0%}"
            )
            by_accepted = " ".join(f"{i}:{n}" for i, n in enumerate(r["steps_by_accepted"]) if n)
            lines.append(
                f"{mode:8} {name:6} {speed} {r['tokens_per_step']:7.2f}  {by_accepted}"
                f"{'' if r['same_tokens'] else '  TOKENS DIFFER FROM PLAIN'}"
            )
    return "\n".join(lines)


def markdown(record: dict[str, Any]) -> str:
    """The result as README and docs show it."""
    r = record
    lines = [
        f"{r['model']} on {r['cpu']}, {r['cores']} cores, {r['date'][:10]}: {r['prompts']} held-out prompts, "
        f"{r['tokens_a_prompt']} tokens each, one request at a time. One row through all weights and nothing else: "
        f"{r['matvec_ms']:.2f} ms with NumPy's own matrix-vector products, {r['linear_ms']:.2f} ms with ours. Beyond "
        f"Python's own start, `from boleinfer import LLM` takes {r['import_ms']:.0f} ms, `boleinfer generate` up to "
        f"its first token {r['first_token_ms']:.0f} ms.",
        "",
        "| decoding | drafter | tokens/s | against plain | tokens a step | speed against NumPy's products alone |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mode, runs in record["modes"].items():
        for name in sorted(runs, key=lambda name: (name != "none", name)):
            run = runs[name]
            lines.append(
                f"| {mode} | {name} | {run['tokens_per_s']:.0f} | {run['times_plain']:.2f}x | "
                f"{run['tokens_per_step']:.2f} | {run['matvec_share']:.0%} |"
            )
    return "\n".join(lines)
