"""`boleinfer trace`: a run as one web page that needs nothing else: each step's tree, who proposed it, what it cost."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boleinfer
from boleinfer.files import write_whole
from boleinfer.generate import read_prompt
from boleinfer.options import UsageError, load_model, sampling_params
from boleinfer.watch import StepSeen, watched

if TYPE_CHECKING:
    from boleinfer.llm import LLM, CompletionOutput
    from boleinfer.sampling import SamplingParams
    from boleinfer.tokenizer import Tokenizer

FORMAT = "boleinfer trace 1"  # of the JSON; docs/trace.md says what is in it
PAGE = Path(__file__).with_name("trace.html")
LIKELIEST = 3  # tokens that the model found likeliest at each place
SHOWN = 6  # known tokens before a step's drafts that are in its tree


def trace(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when the answer ended in an error. UsageError for a bad prompt, flag or file."""
    prompt = read_prompt(args)
    sampling_params(args)  # a bad value is reported before any weight is read
    out = args.out or ("-" if args.json else "trace.html")
    if not Path(out).parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}; make it, or name another file")
    llm = load_model(args)
    params = sampling_params(args, llm.default_params)
    record = record_of(llm, prompt, replace(params, n=1, logprobs=LIKELIEST))
    name = args.model or args.random_weights or "bole-coder-16m"
    record = {"format": FORMAT, "boleinfer": boleinfer.__version__, "model": name, "draft": args.draft} | record
    text = json.dumps(record) if args.json else page(record)
    if out == "-":
        print(text)
    else:
        try:
            write_whole(Path(out), (text + "\n").encode())
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror}; name a file that can be written") from error
        if not args.quiet:
            print(
                f"{out}: {len(record['steps'])} steps" + ("" if args.json else "; open it in a browser"),
                file=sys.stderr,
            )
    if record["error"]:
        print(f"boleinfer: the answer ended early: {record['error']}", file=sys.stderr)
    return 1 if record["error"] else 0


def page(record: dict[str, Any]) -> str:
    """The page that shows a record. Whatever its texts hold, none of it can end the JSON or be read as HTML."""
    data = json.dumps(record)  # ASCII: every other character is an escape
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return PAGE.read_text(encoding="utf-8").replace("__TRACE__", data)


def record_of(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """Answers a prompt and tells how, in plain numbers, strings and lists (docs/trace.md)."""
    with watched(llm) as seen:
        output = llm.generate([prompt], params)[0]
    answer, tokens = output.outputs[0], output.prompt_token_ids
    texts = _texts(llm.tokenizer, tokens + answer.token_ids)
    words = [_word(llm.tokenizer, i, text) for i, text in zip(tokens + answer.token_ids, texts)]
    steps, first = [], 0
    for step in seen:
        count = min(len(step.tokens), len(answer.token_ids) - first)  # what comes after an end is dropped
        steps.append(_step(llm.tokenizer, step, first, count))
        _tell_origins(words[len(tokens) + first :][:count], step, len(steps) - 1)
        first += count
    for word, chances in zip(words[len(tokens) :], answer.logprobs or []):
        (_, own), *others = chances.items()
        word["logprob"] = own
        word["likeliest"] = [_word(llm.tokenizer, i) | {"logprob": p} for i, p in others if p > -math.inf]
    return {
        "device": "cuda" if llm.gpu else "cpu",
        "dtype": llm.engine.state.dtype.name,
        "params": {"temperature": params.temperature, **_changed(params)},
        "seed": answer.seed,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "drafters": list(dict.fromkeys(name for step in seen for by in step.named for name in by)),
        "prompt": words[: len(tokens)],
        "answer": words[len(tokens) :],
        "steps": steps,
        "totals": _totals(answer),
    }


def _step(tokenizer: Tokenizer, step: StepSeen, first: int, count: int) -> dict[str, Any]:
    worth = None
    if step.worth is not None:
        expected, seconds = step.worth
        worth = {"expected": expected.tolist(), "ms": (1e3 * seconds).tolist(), "chosen": int(step.kept.sum())}
    nodes = [
        _word(tokenizer, token)
        | {"parent": parent, "prob": prob, "by": by, "verified": bool(kept), "accepted": bool(accepted)}
        for token, parent, prob, by, kept, accepted in zip(
            step.offered.token.tolist(),
            step.offered.parent.tolist(),
            step.offered.prob.tolist(),
            step.named,
            step.kept,
            step.accepted,
        )
    ]
    return {
        "decodes": step.decodes,
        "committed": step.committed,
        "known": len(step.known),
        "last_known": [_word(tokenizer, token) for token in step.known[-SHOWN:]],
        "nodes": nodes,
        "first": first,
        "count": count,
        "budget": worth,
        "ms": {phase: 1e3 * seconds for phase, seconds in step.seconds.items()},
    }


def _tell_origins(words: Sequence[dict[str, Any]], step: StepSeen, number: int) -> None:
    """Adds to the tokens that a step gave its number, and who had proposed each one."""
    path = [step.named[n] for n in range(len(step.named)) if step.accepted[n]]  # parents come before children
    for i, word in enumerate(words):
        word |= {"step": number, "by": path[i] if i < len(path) else {}}


def _word(tokenizer: Tokenizer, token: int, piece: str | None = None) -> dict[str, Any]:
    """A token as the page shows it: text is what its bytes say, with \\x.. for those that are no whole character.

    piece: what it adds to the running text, where that is something else"""
    if token in tokenizer.eos_ids:
        text = "<end>"
    else:
        text = tokenizer.bytes_of(token).decode("utf-8", "backslashreplace") or f"<{token}>"
    return {"id": token, "text": text} | ({} if piece is None or piece == text else {"piece": piece})


def _texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; half a character comes with the token that completes it."""
    stream = tokenizer.stream()
    texts = [stream.push(token) for token in tokens]
    if texts:
        texts[-1] += stream.flush()
    return texts


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not off."""
    usual = type(params)()
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens")
    return {name: value for name in names if (value := getattr(params, name)) != getattr(usual, name)}


def _totals(answer: CompletionOutput) -> dict[str, Any]:
    s = answer.stats
    return {
        "tokens": s.generated_tokens,
        "steps": s.steps,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "tokens_per_step": s.tokens_per_step,
        "tokens_per_s": s.tokens_per_s,
    }
