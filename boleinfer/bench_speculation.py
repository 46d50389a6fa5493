"""`boleinfer bench speculation`: what drafting gains on the GPU, with the shipped model and with published shapes.

Random weights accept nothing, so with the published shapes what the MTP layer chose, and that alone, is replaced on
the GPU by what is right as often as a stated profile says (acceptance.py). All that drafting computes is computed. The
tokens of every run have to be those of plain decoding, the shipped model's up to near ties, or the command fails.
Random weights give mostly the same tokens whatever the state holds (random_weights.py), so that in a run beside the
timed ones their logits have to agree as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, cast

import numpy as np

from boleinfer import speculation_tables, timing, verify
from boleinfer.acceptance import Guesses, Oracle, Profile, Shape, scaled
from boleinfer.bench_gpu import HEARD, drop, executor_of, read_prompts, verify_rows
from boleinfer.device_draft import DRAFT_PLANS, DraftPlan
from boleinfer.draft import NAMES, make_drafter
from boleinfer.draft.base import Limits
from boleinfer.draft.device import DeviceDrafter
from boleinfer.draft.none import NoDrafter
from boleinfer.heard import hear
from boleinfer.llm import BUNDLED, LLM, RequestOutput
from boleinfer.near_tie import APART, distance, first_difference
from boleinfer.params import SamplingParams
from boleinfer.provenance import gpu_provenance
from boleinfer.request import Request
from boleinfer.results import output_file, write

PARTS = ("bundled", "profiles", "verify", "never")
SIZES, BATCHES = ("qwen3.5-9b", "qwen3.5-27b"), (1, 4, 8, 16, 32)
NEVER_BATCHES = (1, 8, 32)
NODES = 127  # of a request's draft at most, so that a lone request can fill a step of 128 rows
TOKENS, NEVER_TOKENS, HEARD_TOKENS = 256, 512, 24  # of each request, on average; with their logits
WARM_TOKENS = 16  # of plain decoding before anything is timed
ANSWERS = 4  # requests of a profile at least, one after another if need be: which guesses are right is drawn for each
PROMPTS, PROMPT_TOKENS, REPEATS = 8, 96, 2  # of each kind of text, and how often all are answered
KNOWN = 0.99  # of the tokens are among the ids that drafts look at (DraftPlan.ids)

_PAPER = Shape(top_k=4, width=8, depth=8)
_CODE, _PROSE = 0.908, 0.492  # how often the likeliest token is right


def _rest(first: float) -> tuple[float, ...]:
    """The second, third and fourth token are taken to be right in 40, 15 and 8 % of cases where the first is not."""
    return (first, *(share * (1 - first) for share in (0.40, 0.15, 0.08)))


PROFILES = (
    Profile(
        "paper",
        scaled(_rest(0.88), 6.65, _PAPER, NODES),
        "6.4 to 6.9 tokens a step on code with a native MTP head, top-k 4, depth 8, 128 rows: the middle, 6.65",
    ),
    Profile("code", _rest(_CODE), f"likeliest token right {_CODE:.1%}: Qwen3.8-27B's MTP layer on code, published"),
    Profile("prose", _rest(_PROSE), f"likeliest token right {_PROSE:.1%}: the same on prose"),
)


def bench_speculation(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when a drafter changed a token."""
    parts, sizes = args.part or PARTS, args.random_weights or SIZES
    output = output_file(args, "speculation.json", quick=bool(args.part or args.random_weights or args.batch))
    record: dict[str, Any] = {
        "what": "speculation on the GPU: tokens a step, tokens a second, against plain decoding in the same run",
        **gpu_provenance(),
        "read_gb_s": timing.read_gb_s(),
        "profiles_of": [asdict(p) for p in PROFILES],
        "context": args.prompt,
        "known": KNOWN,
        **{part: [] for part in PARTS},
    }
    if "bundled" in parts:
        bundled(record["bundled"])
        write(record, output, note=False)
    for size in sizes if {"profiles", "never"} & set(parts) else ():
        published(record, size, parts, args.batch, args.prompt, lambda: write(record, output, note=False))
    if "verify" in parts:
        gc.collect()
        record["verify"] = verify_rows(sizes[0], (1, 64), args.prompt)
    print(speculation_tables.speculation(record))
    write(record, output)
    if output is not None and record["profiles"]:
        output.with_suffix(".svg").write_text(speculation_tables.plot(record), encoding="utf-8")
    different = [d for r in record["bundled"] for d in r["differences"] if not d["near_tie"]]
    rows = [*record["profiles"], *record["never"]]
    apart = [r["logits_apart"] for r in (*record["profiles"], *record["never"])]
    return 0 if not different and all(r["same_tokens"] for r in rows) and max(apart, default=0.0) <= APART else 1


# ---- (a) the shipped model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way to decode: a drafter's name, or trees of one shape and size whatever they cost."""

    name: str
    plans: tuple[DraftPlan, ...] = ()
    nodes: int = 0


MODES = (
    Mode("none"),
    Mode("chain-3", (DraftPlan(1, 1, 3, least=0.0),), 3),
    *(Mode(f"tree-{n}", (DraftPlan(4, 4, 8, least=0.0),), n - 1) for n in (16, 32, 64)),
    *(Mode(name, DRAFT_PLANS if name != "suffix" else ()) for name in NAMES if name != "none"),
)


def bundled(rows: list[dict[str, Any]]) -> None:
    """Held-out code and docstrings, one request at a time, greedy: every mode in turn, medians over the rounds.

    An answer that is not plain decoding's is judged as in `boleinfer verify`: what it differs at is told."""
    llm = LLM(device="cuda", draft="auto", draft_nodes=NODES)
    code = [e["text"] for e in json.loads((BUNDLED / "heldout_prompts.json").read_text(encoding="utf-8"))]
    texts = {"code": code[:PROMPTS], "docstrings": [t for text in code if (t := up_to_docstring(text))][:PROMPTS]}
    params = SamplingParams(temperature=0, max_tokens=PROMPT_TOKENS, ignore_eos=True)
    answers: dict[tuple[str, str], list[RequestOutput]] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    steps: dict[tuple[str, str], int] = {}
    for repeat in range(REPEATS + 1):  # the first round measures costs, compiles and captures
        for mode in MODES:
            engage(llm, mode)
            for kind, prompts in texts.items():
                outputs = [llm.generate(p, params)[0] for p in prompts]
                key = mode.name, kind
                if repeat:
                    seconds.setdefault(key, []).append(sum(o.stats.decode_s for o in outputs))
                answers[key], steps[key] = outputs, sum(o.stats.steps for o in outputs)
    for (name, kind), times in seconds.items():
        made = sum(len(o.token_ids) - 1 for o in answers[name, kind])  # the first comes with the prompt
        compared = verify.Run("greedy", name, together=False)
        verify.held_against(llm, compared, params, answers["none", kind], answers[name, kind])
        rows.append(
            {
                "mode": name,
                "text": kind,
                "prompts": len(texts[kind]),
                "tokens_per_step": made / steps[name, kind],
                "tokens_per_s": made / median(times),
                "times_plain": median(seconds["none", kind]) / median(times),
                "same_tokens": not compared.differences,
                "differences": [
                    {"prompt": d.prompt, "token": d.position, "near_tie": d.near_tie}
                    | ({"deviations": d.deviations} if d.near_tie else {})
                    for d in compared.differences
                ],
            }
        )


def up_to_docstring(text: str) -> str:
    """A text up to the first words of its last docstring; empty where it has none."""
    at = max((m.end() for m in re.finditer(r':\n\s*"""(?:\s*\w+){3}', text)), default=0)
    return text[:at]


def engage(llm: LLM, mode: Mode) -> None:
    """Makes the engine decode in a mode."""
    engine, executor = llm.engine, executor_of(llm)
    executor.draft_as(mode.plans)
    engine.scheduler.limits = Limits(nodes=mode.nodes or NODES, depth=8)
    engine.drafter = _Unpriced() if mode.nodes else make_drafter(mode.name, llm.model, engine.state)


class _Unpriced(DeviceDrafter, NoDrafter):
    """The GPU's trees, all of their nodes whatever they cost."""


# ---- (b, d) published shapes -----------------------------------------------------------------------------------------


def published(
    record: dict[str, Any],
    size: str,
    parts: Sequence[str],
    asked: Sequence[int] | None,
    prompt: int,
    save: Callable[[], None],
) -> None:
    """One shape: for each number of requests each profile and the adversary, and plain decoding around all of them.

    save: called when a number of requests is done"""
    for most, batches in groupby(sorted(asked or {*BATCHES, *NEVER_BATCHES}), key=lambda batch: max(8, batch)):
        at_once(record, size, parts, list(batches), most, prompt, bool(asked), save)


def at_once(
    record: dict[str, Any],
    size: str,
    parts: Sequence[str],
    batches: Sequence[int],
    most: int,
    prompt: int,
    every: bool,
    save: Callable[[], None],
) -> None:
    """As published, for some numbers of requests, with room for `most`. every: all parts of each"""
    llm = LLM(
        device="cuda",
        random_weights=size,
        draft="mtp",
        draft_nodes=NODES,
        max_batch=most,
        max_model_len=prompt + 2 * NEVER_TOKENS + 2 * NODES,
    )
    oracle_of(llm)
    for plans in ((), DRAFT_PLANS):
        executor_of(llm).draft_as(plans)
        executor_of(llm).capture()
    for batch in batches:
        plainly = partial(run, llm, batch, prompt, guesses=None)
        plainly(WARM_TOKENS)
        right = plainly(NEVER_TOKENS + NEVER_TOKENS // 8)
        found = []
        if "profiles" in parts and (every or batch in BATCHES):
            plains = [plainly(TOKENS)]
            for profile in PROFILES:
                seeds = range(-(-ANSWERS // batch))
                draws = [against(llm, batch, prompt, TOKENS, profile, right, True, seed) for seed in seeds]
                found.append(("profiles", profile, draws, plains))
                plains.append(plainly(TOKENS))
        if "never" in parts and (every or batch in NEVER_BATCHES):
            before = plainly(NEVER_TOKENS)
            adversary = against(llm, batch, prompt, NEVER_TOKENS, PROFILES[0], right, honest=False)
            found.append(("never", PROFILES[0], [adversary], [before, plainly(NEVER_TOKENS)]))
        apart = logits_apart(llm, batch, prompt, right)
        for part, profile, fast, plains in found:
            numbers = {**row(batch, profile, fast, plains, right), "logits_apart": apart}
            record[part].append({"shape": size, "context": prompt, **numbers})
            print(f"{size} at {batch}, {part}: {record[part][-1]['times_plain']:.3f} x plain", file=sys.stderr)
        save()
    del llm
    gc.collect()


def row(batch: int, profile: Profile, fast: Sequence[Run], plains: Sequence[Run], right: Run) -> dict[str, Any]:
    """A profile's runs beside plain decoding of as many tokens in the same process, since later tokens take longer.

    right: plain decoding of all tokens that any of them may have come to"""
    plain_s = median(run.tokens_per_s for run in plains)
    made, seconds, steps = (sum(getattr(run, name) for run in fast) for name in ("made", "seconds", "steps"))
    return {
        "batch": batch,
        "profile": profile.name,
        "tokens_per_s": made / seconds,
        "plain_tokens_per_s": plain_s,
        "times_plain": made / seconds / plain_s,
        "tokens_per_step": made / steps / batch,
        "ms_per_step": 1e3 * seconds / steps,
        "plain_ms_per_step": 1e3 * batch / plain_s,
        "rows": sum(run.rows * run.steps for run in fast) / steps,
        "ways": [sum(steps) for steps in zip(*(run.ways for run in fast))],
        "same_tokens": all(a[: len(b)] == b[: len(a)] for run in fast for a, b in zip(run.tokens, right.tokens)),
    }


def shape_of(plan: DraftPlan, requests: int) -> Shape:
    """The trees of a plan, of up to so many requests together."""
    plan = plan.for_requests(requests)
    return Shape(plan.top_k, plan.width, plan.depth, 1.0 if plan.ids is None else KNOWN)


@dataclass
class Run:
    """What some requests generated after their first tokens, and how fast.

    ways: steps in each way to draft; logits: of the first requests where they were kept, [vocab] a token"""

    tokens: list[list[int]]
    seconds: float
    made: int
    steps: int
    rows: float
    ways: list[int]
    logits: list[list[np.ndarray]]

    @property
    def tokens_per_s(self) -> float:
        return self.made / self.seconds


def against(
    llm: LLM,
    batch: int,
    prompt: int,
    length: int,
    profile: Profile,
    plain: Run,
    honest: bool,
    seed: int = 0,
    hears: bool = False,
) -> Run:
    """A profile's run, which begins with everything still to be learnt. seed: of which guesses are right."""
    shapes = [shape_of(plan, 1 if batch == 1 else llm.engine.scheduler.max_batch) for plan in DRAFT_PLANS]
    answers = [t + [0] * NODES for t in plain.tokens]
    return run(
        llm, batch, prompt, length, (Guesses(profile, answers, llm.config.vocab_size, honest, seed), shapes), hears
    )


def logits_apart(llm: LLM, batch: int, prompt: int, plain: Run) -> float:
    """The largest distance (near_tie.distance) of a token's logits with drafts from those of plain decoding.

    Tokens are compared up to a request's first that differs. Drafts are right as the first profile says; what was
    accepted and committed wrongly moves the logits of every token behind it."""
    right = run(llm, batch, prompt, HEARD_TOKENS, None, hears=True)
    found = against(llm, batch, prompt, HEARD_TOKENS, PROFILES[0], plain, honest=True, hears=True)
    worst = 0.0
    for b, (x, y) in enumerate(zip(found.logits, right.logits)):
        tokens = [r.tokens[b][prompt + 1 :] for r in (found, right)]  # the first comes with the prompt
        same = first_difference(*tokens)
        compared = min(map(len, tokens)) if same is None else same + 1
        worst = max([worst, *(distance(i, j) for i, j in zip(x[:compared], y))])
    return worst


def run(
    llm: LLM,
    batch: int,
    prompt: int,
    length: int,
    guesses: tuple[Guesses, Sequence[Shape]] | None,
    hears: bool = False,
) -> Run:
    """Requests with random prompts until they have generated so much on average.

    guesses: what drafts are, and the shapes of each way's; None: plain decoding. hears: logits of some are kept"""
    engine, executor = llm.engine, executor_of(llm)
    executor.draft_as(() if guesses is None else DRAFT_PLANS)
    engine.drafter = NoDrafter() if guesses is None else DeviceDrafter()
    oracle_of(llm).silence()
    requests, _ = read_prompts(llm, batch, prompt)
    if guesses is not None:
        oracle_of(llm).tell(guesses[0], [r.home.slot for r in requests], prompt, guesses[1])
    heard = hear(requests[:HEARD]) if hears else []
    steps, first = 0, generated(requests)
    ways = dict.fromkeys(range(1 + len(executor.depths)), 0)
    began = time.perf_counter()
    while generated(requests) < batch * length:
        engine.step()
        steps += 1
        ways[engine.budget.ways[engine.way].variant] += 1
    seconds = time.perf_counter() - began
    found = Run(
        [list(r.tokens) for r in requests],
        seconds,
        generated(requests) - first,
        steps,
        batch + sum(r.stats.drafted for r in requests) / steps,
        list(ways.values()),
        heard,
    )
    drop(llm, requests)
    return found


def oracle_of(llm: LLM) -> Oracle:
    """What overrules the model's drafts, from its first call on."""
    executor = executor_of(llm)
    if executor.overrule is None:
        places = NEVER_TOKENS + NEVER_TOKENS // 8
        executor.overrule = Oracle(llm.engine.state.slots.size, places, NODES, DRAFT_PLANS)
    return cast(Oracle, executor.overrule)


def generated(requests: Sequence[Request]) -> int:
    """Tokens of all of them."""
    return sum(len(r.generated) for r in requests)
