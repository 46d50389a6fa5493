"""`boleinfer verify`: are the tokens with every drafter, alone and in a batch, those of plain decoding alone?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boleinfer.draft import NAMES, make_drafter
from boleinfer.draft.base import Drafter
from boleinfer.draft.none import NoDrafter
from boleinfer.draft.scripted import ScriptedDrafter
from boleinfer.forest import Tree
from boleinfer.near_tie import BOUNDS, first_difference, gap, spread
from boleinfer.options import UsageError, load_model, sampling_params
from boleinfer.request import Request
from boleinfer.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from boleinfer.llm import LLM, RequestOutput

PROMPTS = [
    "def fibonacci(n):\n",
    "The three laws of motion are",
    "one, two, three, four, one, two, three, four, one, two,",
    "import json\n\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
    "Ünïcödé 漢字 🙂",
    "a",
]
TOKENS = 48  # of an answer, unless asked for
PROMPTS_FILE = "name a file with a prompt a line, or a .json file with an array of non-empty strings"
DEPTH = 4  # of the drafts made of plain decoding's own tokens


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not plain decoding's.

    prompt, position: both from 0; position in the answer
    expected, got:    ids, plain decoding's first; None where an answer had ended
    texts, logits:    of the two, the logits as the model gave them
    gap:              by how much the difference of two logits has to change, at least, before each of the two is drawn
                      (near_tie.gap), the larger of the two numbers
    deviations:       that gap in standard deviations of the logits; up to `bound` it is rounding: a near tie
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    texts: tuple[str, str]
    bound: float
    logits: tuple[float, float] | None = None
    gap: float = float("inf")
    deviations: float = float("inf")

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.deviations <= self.bound


@dataclass
class Run:
    """All prompts answered in one way, beside plain decoding of one prompt at a time.

    sampling: "greedy" or "seeded"; draft: a drafter's name, or "known": plain decoding's own tokens, some spoilt
    together: all prompts in one batch, else one after another
    """

    sampling: str
    draft: str
    together: bool
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(args: argparse.Namespace) -> int:
    """Exit status of the command: 0 where every answer is plain decoding's up to near ties, else 1."""
    prompts = PROMPTS if args.prompts is None else read_prompts(Path(args.prompts))
    sampling_params(args)  # a bad value is reported before any weight is read
    llm = load_model(argparse.Namespace(**{**vars(args), "draft": args.draft or "auto"}))
    params = sampling_params(args, llm.default_params)
    if args.max_tokens is None:
        params = replace(params, max_tokens=max(TOKENS, params.min_tokens))
    name = args.model or args.random_weights or "bole-coder-16m"
    about = f"{name} on {'cuda' if llm.gpu else 'cpu'}, {llm.engine.state.dtype.name}"
    if not args.json:
        print(f"{about}: {len(prompts)} prompts, up to {params.max_tokens} tokens each", flush=True)
    runs = []
    drafters = drafters_of(llm, NAMES if args.draft is None else ()) | {args.draft or "auto": llm.engine.drafter}
    for run in compare(llm, prompts, ways(params), drafters):
        runs.append(run)
        if not args.json:
            print(_line(run), flush=True)
    if args.json:
        sampling = {way: asdict(p) for way, p in ways(params).items()}
        record = {"model": about, "prompts": prompts, "sampling": sampling, "verdict": verdict(runs)}
        print(json.dumps(record | {"runs": [_plain(run) for run in runs]}))
    else:
        print(_summary(runs, prompts))
    return 1 if verdict(runs) == "different" else 0


def read_prompts(file: Path) -> list[str]:
    """A prompt a line, empty lines left out, or a JSON array of strings (.json). UsageError for what is neither."""
    try:
        text = file.read_text(encoding="utf-8")
        prompts = json.loads(text) if file.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"--prompts {file}: {error.strerror}; {PROMPTS_FILE}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise UsageError(f"--prompts {file}: {error}; {PROMPTS_FILE}") from error
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p for p in prompts):
        raise UsageError(f"--prompts {file} holds no prompts; {PROMPTS_FILE}")
    return prompts


def ways(params: SamplingParams) -> dict[str, SamplingParams]:
    """What is tried: greedy, and where the parameters sample, those with a seed; one answer a prompt."""
    params = replace(params, n=1, seed=0 if params.seed is None else params.seed)
    greedy = {"greedy": replace(params, temperature=0.0)}
    return greedy if params.greedy else greedy | {"seeded": params}


def drafters_of(llm: LLM, names: Sequence[str]) -> dict[str, Drafter]:
    """The drafters of these names, but those that this model cannot have."""
    made = {}
    for name in names:
        with suppress(ValueError):  # it needs what the checkpoint has not
            made[name] = make_drafter(name, llm.model, llm.engine.state)
    return made


def compare(
    llm: LLM, prompts: Sequence[str], sampling: Mapping[str, SamplingParams], drafters: Mapping[str, Drafter]
) -> Iterator[Run]:
    """Every way of answering beside plain decoding alone.

    drafters: by name; one that knows the answers comes last
    The LLM keeps the last drafter, and verifies from now on what drafters propose whether it pays or not. RuntimeError
    where plain decoding itself fails."""
    llm.engine.executor.price = lambda *_: None
    none = NoDrafter()
    for way, params in sampling.items():
        plain = _answers(llm, none, prompts, params, together=False)
        for i, output in enumerate(plain):
            if output.outputs[0].error:
                raise RuntimeError(f"plain decoding of prompt {i} ended early: {output.outputs[0].error}")
        known = {tuple(output.prompt_token_ids): output.token_ids for output in plain}
        last = known_drafter(known, llm.config.vocab_size)
        for name, drafter in {"none": none, **drafters, "known": last}.items():
            for together in (True,) if name == "none" else (False, True):
                outputs = _answers(llm, drafter, prompts, params, together)
                yield held_against(llm, Run(way, name, together), params, plain, outputs)


def known_drafter(answers: dict[tuple[int, ...], list[int]], vocab: int) -> ScriptedDrafter:
    """Proposes the answers that are known by prompt, in chains and trees, spoilt nowhere and at each place in turn."""

    def script(request: Request) -> Tree:
        at = len(request.generated)
        turn, step = divmod(request.stats.steps, DEPTH + 1)
        right = answers[tuple(request.tokens[: request.prompt_length])][at : at + DEPTH]
        return spoilt_draft(right, DEPTH - step, turn % 2 == 1, vocab)

    return ScriptedDrafter(script)


def spoilt_draft(tokens: Sequence[int], place: int, wide: bool, vocab: int) -> Tree:
    """A chain whose token number `place` is wrong; `wide` puts another wrong token beside each."""
    chain = [(t + 1) % vocab if i == place else t for i, t in enumerate(tokens)]
    if not wide:
        return Tree.of(chain, range(-1, len(chain) - 1), [0.9 ** (i + 1) for i in range(len(chain))])
    ids, parents, probs, above = [], [], [], -1
    for i, token in enumerate(chain):
        ids += [(token + 2) % vocab, token]
        parents += [above, above]
        probs += [0.8 * 0.9**i, 0.9 ** (i + 1)]
        above = len(ids) - 1
    return Tree.of(ids, parents, probs)


def verdict(runs: Sequence[Run]) -> str:
    """ "identical", "near ties" or "different"."""
    differences = [d for run in runs for d in run.differences]
    return "identical" if not differences else "near ties" if all(d.near_tie for d in differences) else "different"


def _answers(
    llm: LLM, drafter: Drafter, prompts: Sequence[str], params: SamplingParams, together: bool
) -> list[RequestOutput]:
    llm.engine.drafter = drafter
    batches = [list(prompts)] if together else [[prompt] for prompt in prompts]
    return [output for batch in batches for output in llm.generate(batch, params)]


def held_against(
    llm: LLM, run: Run, params: SamplingParams, plain: Sequence[RequestOutput], outputs: Sequence[RequestOutput]
) -> Run:
    """Fills the run with what came out and where it differs."""
    for i, (right, output) in enumerate(zip(plain, outputs)):
        run.tokens += len(output.token_ids)
        run.drafted += output.stats.drafted
        run.accepted += output.stats.accepted
        at = first_difference(right.token_ids, output.token_ids)
        if at is not None:
            run.differences.append(_judge(llm, i, at, params, right, output.token_ids[at]))
        elif len(right.token_ids) != len(output.token_ids) or output.outputs[0].error:
            run.differences.append(_other_end(i, right, output))
    return run


def _judge(llm: LLM, prompt: int, at: int, params: SamplingParams, right: RequestOutput, got: int) -> Difference:
    """The difference at a token, with the logits that plain decoding's tokens lead to."""
    expected, before = right.token_ids[at], right.token_ids[:at]
    row = llm.logits(right.prompt_token_ids + before)[-1]
    allowed = llm.tokenizer.valid_ids(llm.config.vocab_size)
    sampler = Sampler(params, params.seed or 0, 0, right.prompt_token_ids, llm.tokenizer.eos_ids, allowed)
    for token in before:
        sampler.history.append(token)
    widest = max(gap(row, sampler, token) for token in (expected, got))
    return Difference(
        prompt,
        at,
        expected,
        got,
        (llm.tokenizer.decode([expected]), llm.tokenizer.decode([got])),
        BOUNDS["bf16" if llm.engine.state.dtype.itemsize == 2 else "float"],
        (float(row[expected]), float(row[got])),
        widest,
        widest / spread(row),
    )


def _other_end(prompt: int, right: RequestOutput, output: RequestOutput) -> Difference:
    """The difference of two answers of which one is the other's beginning."""
    at = min(len(right.token_ids), len(output.token_ids))
    ids = [next(iter(o.token_ids[at:]), None) for o in (right, output)]
    ends = [o.outputs[0].error or o.finish_reason or "" for o in (right, output)]
    return Difference(prompt, at, ids[0], ids[1], (ends[0], ends[1]), 0.0)


def _plain(run: Run) -> dict[str, Any]:
    """What JSON can hold of a run: infinite gaps become null."""
    differences = [asdict(d) | {"near_tie": d.near_tie} for d in run.differences]
    return asdict(run) | {
        "verdict": verdict([run]),
        "differences": [{k: None if v == float("inf") else v for k, v in d.items()} for d in differences],
    }


def _line(run: Run) -> str:
    drafts = f", {run.accepted:,} of {run.drafted:,} drafted were right" if run.draft != "none" else ""
    where = "in a batch" if run.together else "alone"
    return f"  {run.sampling:<7} {run.draft:<7} {where:<10}  {verdict([run]):<9}  {run.tokens:,} tokens{drafts}"


def _summary(runs: Sequence[Run], prompts: Sequence[str]) -> str:
    """The verdict in words, with the first difference that is no near tie, or else the first one."""
    tokens = f"{sum(run.tokens for run in runs):,} tokens in {len(runs)} runs"
    drafts = f"{sum(run.accepted for run in runs):,} of {sum(run.drafted for run in runs):,} drafted tokens accepted"
    found = [(run, d) for run in runs for d in run.differences]
    if not found:
        return f"identical: {tokens}, {drafts}, each token that of plain decoding one prompt at a time"
    run, d = min(found, key=lambda pair: pair[1].near_tie)
    where = f"{run.sampling}, {run.draft}{', in a batch' if run.together else ''}, prompt {d.prompt}"
    what = (
        f"  first difference: {where} ({prompts[d.prompt][:40]!r}), token {d.position} of the answer:\n"
        f"  plain decoding has {_named(d.expected, d.texts[0])}, here it is {_named(d.got, d.texts[1])}"
    )
    if d.logits is not None:
        what += (
            f"\n  their logits are {d.logits[0]:.6g} and {d.logits[1]:.6g}; for both to be drawn, the difference of "
            f"two logits has to change by {d.gap:.3g},\n  {d.deviations:.3g} standard deviations of the row "
            f"(up to {d.bound:g} it is rounding: a near tie)"
        )
    total = {"near ties": "near ties only", "different": "DIFFERENT"}[verdict(runs)]
    ties = sum(d.near_tie for _, d in found)
    return f"{total}: {len(found)} answers differ, {ties} of them at a near tie; {tokens}, {drafts}\n{what}"


def _named(token: int | None, text: str) -> str:
    return f"the end ({text})" if token is None else f"{token} {text!r}"
