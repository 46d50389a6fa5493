"""`boleinfer verify` on the GPU: every drafter beside plain decoding with the bundled model, alone and in a batch."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from boleinfer.draft import NAMES
from boleinfer.llm import LLM
from boleinfer.verify import PROMPTS, TOKENS, compare, drafters_of, verdict, ways
from tests.receipt import Report
from tests.receipt.models import real_gpu, tiny
from tests.tokenizers_made import make_tokenizer


def run(quick: bool = False) -> Report:
    """The bundled model in both types, greedy and sampled; on the emulator a little of a tiny one."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        if real_gpu():
            for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
                one_model(report, None, dtype, PROMPTS, TOKENS, NAMES)
        else:
            model = make_tokenizer(tiny(Path(folder), "qwen3_5", 1).folder)
            one_model(report, model, "bfloat16", PROMPTS[-2:], 4, ["mtp"])
    report.expect(report.counts["accepted tokens"] > 0, "no draft was accepted")
    return report


def one_model(
    report: Report, model: Path | None, dtype: str, prompts: list[str], n: int, drafts: Sequence[str]
) -> None:
    """Every way of answering with n tokens; model: None is the bundled one."""
    llm = LLM(model, device="cuda", dtype=dtype, max_model_len=256, max_batch=len(prompts), graphs=real_gpu())
    tried = ways(replace(llm.default_params, max_tokens=n))
    for done in compare(llm, prompts, tried, drafters_of(llm, drafts)):
        how = f"{dtype} {done.sampling} {done.draft} {'together' if done.together else 'alone'}"
        report.count(f"ways {dtype}")
        report.count("tokens", done.tokens)
        report.count("drafted tokens", done.drafted)
        report.count("accepted tokens", done.accepted)
        report.count("near ties", len(done.differences))
        for d in done.differences:
            report.largest(f"largest gap {dtype} (deviations)", d.deviations)
        report.expect(verdict([done]) != "different", f"{how}: {done.differences[:2]}")
    del llm
    gc.collect()
