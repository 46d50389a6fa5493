"""Tokens of the GPU beside NumPy's, equal up to near ties, with every drafter and scripted drafts."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from boleinfer.decoder import Decoder
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.forest import Tree
from boleinfer.llm import BUNDLED, LLM
from boleinfer.near_tie import BOUNDS, first_difference, gap, spread
from boleinfer.request import Request
from boleinfer.sampling import Sampler, SamplingParams
from boleinfer.verify import spoilt_draft
from tests.receipt import Report
from tests.receipt.models import FAMILIES, Tiny, gpu_engine, prompts, real_gpu, sampling, tiny
from tests.running import Run, engine_of, finish, request_of

DRAFTS = ("none", "ngram", "mtp", "auto")
DRAFTED = 4  # tokens of a scripted draft
SMOOTH = {"hidden_size": 128}
"""Of models in bf16; they also take every expert, since a near tie among experts is none among logits."""


def run(quick: bool = False) -> Report:
    """Tiny models of each family, then the bundled model (on a real GPU)."""
    report = Report(notes={"near tie, in standard deviations of the logits": BOUNDS})
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES[1:2] if quick else FAMILIES:
            smooth = SMOOTH | ({} if family == "qwen3_5" else {"num_experts_per_tok": 8})
            models = {
                "float": tiny(Path(folder), family, 11),
                "bf16": tiny(Path(folder), family, 11, "smooth", **smooth),
            }
            for act, model in models.items():
                one_family(report, model, act, 7 if quick else 40, quick)
    if real_gpu():
        bundled(report, 4 if quick else 16, 16 if quick else 64)
    return report


# ---- tiny models -----------------------------------------------------------------------------------------------------


def one_family(report: Report, model: Tiny, act: str, n: int, quick: bool) -> None:
    """n tokens of three requests together: every drafter, then scripted ones."""
    report.largest(f"largest logit error {act} (deviations)", _tiny_logit_error(model, act))
    gpu, logits = model.on(act), _tiny_logits(model.host)
    for kind, params in sampling(n).items():
        if quick and (kind == "plain" or (act == "bf16" and kind != "greedy")):
            continue
        if act == "bf16" and not all(map(keeps_every_id, params)):
            continue
        asked = [request_of(p, s) for p, s in zip(prompts((9, 1, 20) if quick else (21, 1, 70)), params)]
        base = finish(engine_of(model.host), _again(asked))
        for draft in ("none", "auto") if quick else DRAFTS:
            requests = _again(asked)
            got = finish(gpu_engine(gpu, act, draft), requests)
            what = f"{model.label} {kind} {act} draft={draft}"
            _judge(report, what, act, requests, got, base, logits)
            _count_drafts(report, what, draft, requests)
            base = got if draft == "none" else base  # speculation is compared with none on the same GPU
        if not quick or (kind == "greedy" and act == "float"):
            _scripted(report, f"{model.label} {kind} {act}", gpu, act, asked, base, logits, quick)


def _scripted(
    report: Report,
    what: str,
    gpu: Decoder,
    act: str,
    asked: Sequence[Request],
    base: list[list[int]],
    logits: Callable,
    quick: bool,
) -> None:
    """Drafts of the known-right tokens, spoilt at each place in turn, as chains and as trees with wrong siblings."""
    right = {tuple(r.tokens): answer for r, answer in zip(asked, base)}
    seen: set[str] = set()
    every = [(spoilt, wide) for wide in (False, True) for spoilt in range(DRAFTED + 1)]
    for spoilt, wide in [(0, False), (2, True), (DRAFTED, False)] if quick else every:

        def script(request: Request, spoilt: int = spoilt, wide: bool = wide) -> Tree:
            known = right[tuple(request.tokens[: request.prompt_length])]
            at = len(request.generated)
            return spoilt_draft(known[at : at + DRAFTED], spoilt, wide, vocab=470)

        requests = _again(asked)
        got = finish(gpu_engine(gpu, act, ScriptedDrafter(script), nodes=2 * DRAFTED), requests)
        _judge(report, f"{what} spoilt at {spoilt} wide={wide}", act, requests, got, base, logits)
        for request in requests:
            for accepted, steps in enumerate(request.stats.histogram):
                if steps:
                    seen.add("none" if not accepted else "all" if accepted >= DRAFTED else "some")
                    report.count(f"steps that accepted {accepted} of {DRAFTED}", steps)
    report.expect(seen == {"none", "some", "all"}, f"{what}: of scripted drafts only {sorted(seen)} were accepted")


def _again(requests: Sequence[Request]) -> list[Request]:
    return [request_of(r.tokens[: r.prompt_length], r.params) for r in requests]


def _tiny_logits(model: Decoder) -> Callable[[list[int]], np.ndarray]:
    return lambda tokens: Run(model).feed(tokens)[0][-1]


def _tiny_logit_error(model: Tiny, act: str) -> float:
    tokens = prompts((30,))[0]
    executor = gpu_engine(model.on(act), act, graphs=False).executor
    got = executor.logits(tokens, 0, executor.state.take(len(tokens)))
    return _error(got, Run(model.host).feed(tokens)[0])


def _count_drafts(report: Report, what: str, draft: str, requests: Sequence[Request]) -> None:
    drafted = sum(r.stats.drafted for r in requests)
    report.count("drafted tokens", drafted)
    report.count("accepted tokens", sum(r.stats.accepted for r in requests))
    report.expect(draft == "none" or drafted > 0, f"{what}: nothing was drafted")


def _judge(
    report: Report,
    what: str,
    act: str,
    requests: Sequence[Request],
    got: Sequence[list[int]],
    want: Sequence[list[int]],
    logits: Callable[[list[int]], np.ndarray],
) -> None:
    """Compares answers; the first difference of each has to be a near tie by NumPy's logits."""
    for request, mine, right in zip(requests, got, want):
        report.count(f"answers {act}")
        report.count(f"tokens {act}", len(mine))
        at = first_difference(mine, right)
        if at is None:
            report.expect(len(mine) == len(right), f"{what}: {len(mine)} tokens instead of {len(right)}")
            continue
        sampler = _sampler_at(request, mine[:at])
        row = logits(request.tokens[: request.prompt_length] + mine[:at])
        gaps = [gap(row, sampler, t) / spread(row) for t in (mine[at], right[at])]
        report.count(f"first differences {act}")
        report.largest(f"largest gap {act}", max(gaps))
        report.expect(
            max(gaps) <= BOUNDS[act],
            f"{what}: token {at} is {mine[at]} instead of {right[at]}; gaps {gaps[0]:.4f} and {gaps[1]:.4f} deviations",
        )


def keeps_every_id(p: SamplingParams) -> bool:
    """Whether answers in bf16 are compared: where ids are cut away, rounding soon changes which."""
    return p.greedy or (p.top_k <= 0 and p.top_p == 1 and p.min_p == 0)


def _sampler_at(request: Request, generated: Sequence[int]) -> Sampler:
    s = request.sampler
    prompt = request.tokens[: request.prompt_length]
    sampler = Sampler(s.params, s.seed, s.choice, prompt, s.early_ids, s.allowed)
    for token in generated:
        sampler.history.append(token)
    return sampler


# ---- the bundled model -----------------------------------------------------------------------------------------------


def bundled(report: Report, count: int, n: int, drafts: Sequence[str] = DRAFTS) -> None:
    """The model that ships, on its held-out prompts: NumPy beside the GPU, in both types, with every drafter."""
    texts = [entry["text"] for entry in json.loads((BUNDLED / "heldout_prompts.json").read_text())]
    host = LLM(device="cpu", max_model_len=512)
    ids = [host.tokenizer.encode(text)[: 20 + 11 * i] for i, text in enumerate(texts[:count])]
    kinds = {"greedy": SamplingParams(temperature=0, max_tokens=n), "plain": SamplingParams(seed=1, max_tokens=n)}
    kinds["top-p"] = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=2, max_tokens=n)
    want = {kind: [o.token_ids for o in host.generate(ids, params)] for kind, params in kinds.items()}

    def row(tokens: list[int]) -> np.ndarray:
        return host.logits(tokens)[-1]

    for dtype, act in (("float32", "float"), ("bfloat16", "bf16")):
        base = dict(want)
        for draft in drafts:
            llm = LLM(device="cuda", dtype=dtype, draft=draft, max_model_len=512, graphs=real_gpu())
            for kind, params in kinds.items():
                if act == "bf16" and not keeps_every_id(params):
                    continue
                outputs = llm.generate(ids, params)
                requests = [_bundled_request(host, prompt, params) for prompt in ids]
                got = [o.token_ids for o in outputs]
                _judge(report, f"bundled {kind} {dtype} draft={draft}", act, requests, got, base[kind], row)
                report.count("drafted tokens", sum(o.outputs[0].stats.drafted for o in outputs))
                report.count("accepted tokens", sum(o.outputs[0].stats.accepted for o in outputs))
                base[kind] = got if draft == "none" else base[kind]
            if draft == "none":
                errors = [_logit_error(llm, host, prompt) for prompt in ids[:4]]
                report.largest(f"largest logit error {act} (deviations)", max(errors))
            del llm
            gc.collect()


def _logit_error(llm: LLM, host: LLM, prompt: list[int]) -> float:
    return _error(llm.logits(prompt), host.logits(prompt))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of a logit, in standard deviations of its row."""
    return float((np.abs(want - got).max(1) / want.std(1)).max())


def _bundled_request(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    allowed = llm.tokenizer.valid_ids(llm.config.vocab_size)
    sampler = Sampler(params, params.seed or 0, 0, prompt, llm.tokenizer.eos_ids, allowed)
    return Request(list(prompt), params, sampler, 512, frozenset())
