"""`boleinfer generate`: a prompt in, text out as it comes, statistics beside. Knows only the LLM's public methods."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boleinfer.options import UsageError, load_model, sampling_params

if TYPE_CHECKING:
    from boleinfer.llm import LLM, CompletionOutput, RequestOutput
    from boleinfer.params import SamplingParams


def generate(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when an answer ended in an error. UsageError for a bad prompt or flag."""
    prompt = read_prompt(args)
    sampling_params(args)  # a bad value is reported before any weight is read
    if args.debug_layers:
        from boleinfer.debug_layers import debug_layers

        return debug_layers(args, prompt)
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs has no place in plain text; add --json")
    llm = load_model(args)
    params = sampling_params(args, llm.default_params)
    if args.echo and not args.json:
        print(prompt, end="", flush=True)
    if args.json or params.n > 1:
        output, first_token_s = llm.generate(prompt, params)[0], None
        _print_whole(args, output)
    else:
        output, first_token_s = stream(llm, prompt, params)
    if not args.quiet:
        print(describe(output.outputs, first_token_s), file=sys.stderr)
    errors = [f"boleinfer: answer {o.index} ended early: {o.error}" for o in output.outputs if o.error]
    print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the argument, --file or stdin; bytes that are not UTF-8 become U+FFFD, said once on stderr."""
    if args.file is not None and args.prompt is not None:
        raise UsageError("a prompt and --file were both given; give one")
    if args.file is not None:
        try:
            raw = Path(args.file).read_bytes()
        except OSError as error:
            raise UsageError(f"--file {args.file}: {error.strerror}; name a file of text") from error
    elif args.prompt is None and sys.stdin.isatty():
        raise UsageError('no prompt: give one (boleinfer generate "def main():"), or --file FILE, or pipe text in')
    elif args.prompt in (None, "-"):
        raw = sys.stdin.buffer.read()
    else:
        raw = args.prompt.encode("utf-8", "surrogateescape")  # what the shell passed, byte for byte
    text = raw.decode("utf-8", "replace")
    if text.encode("utf-8") != raw:
        print("boleinfer: the prompt is not valid UTF-8; its broken bytes were replaced", file=sys.stderr)
    if not text:
        raise UsageError("the prompt is empty; a model needs at least one token to go on from")
    return text


def stream(llm: LLM, prompt: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    """Print the answer piece by piece; returns it whole, and the seconds until its first piece."""
    start, first_token_s, output = time.perf_counter(), math.nan, None
    with closing(llm.stream(prompt, params)) as chunks:  # closing it (Ctrl-C, closed pipe) drops the request
        for chunk in chunks:
            if math.isnan(first_token_s):
                first_token_s = time.perf_counter() - start
            print(chunk.text, end="", flush=True)
            output = chunk.output or output
    print(flush=True)
    assert output is not None, "a stream ends with its output"
    return output, first_token_s


def _print_whole(args: argparse.Namespace, output: RequestOutput) -> None:
    if args.json:
        record = {"model": args.model or args.random_weights or "bole-coder-16m", "prompt": output.prompt,
                  "prompt_token_ids": output.prompt_token_ids, **_plain(output.outputs[0])}  # fmt: skip
        if len(output.outputs) > 1:
            record["choices"] = [_plain(o) for o in output.outputs]
        print(json.dumps(_plain(record), allow_nan=False))
        return
    for choice in output.outputs:
        print(f"--- answer {choice.index + 1} of {len(output.outputs)}, seed {choice.seed}\n{choice.text}")


def describe(outputs: list[CompletionOutput], first_token_s: float | None = None) -> str:
    """Two lines on how an answer came about; several answers are added up."""
    stats = [o.stats for o in outputs]
    tokens = sum(s.generated_tokens for s in stats)
    steps, drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("steps", "drafted", "accepted"))
    decode_s = sum(s.decode_s for s in stats)  # a step's time is shared out among the answers it served
    histogram = [sum(column) for column in zip_longest(*(s.histogram for s in stats), fillvalue=0)]
    first = f", first after {first_token_s:.2f} s" if first_token_s is not None else ""
    by_accepted = " ".join(f"{number}:{count}" for number, count in enumerate(histogram) if count)
    return (
        f"[{stats[0].prompt_tokens} prompt tokens, {tokens} tokens{first}; "
        f"{(accepted + steps) / decode_s if decode_s else 0:.1f} tokens/s; "
        f"{', '.join(sorted({str(o.finish_reason) for o in outputs}))}; seed {outputs[0].seed}]\n"
        f"[{steps} steps, {(accepted + steps) / max(steps, 1):.2f} tokens a step; "
        f"drafted={drafted} accepted={accepted}; steps by number accepted: {by_accepted or 'none'}]"
    )


def _plain(value: Any) -> Any:
    """What JSON can hold of dataclasses, NumPy values and dicts with any keys; inf and NaN become null."""
    if hasattr(value, "as_dict"):
        return _plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
