"""The flags that commands share, and the LLM and SamplingParams they ask for. Knows argparse, not the engine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boleinfer.llm import LLM
    from boleinfer.params import SamplingParams


class UsageError(Exception):
    """Something the person at the keyboard has to change: printed without a traceback, exit status 2."""


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")


def _fraction(text: str) -> float:
    """A number above 0 and up to 1."""
    try:
        if 0 < (number := float(text)) <= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")


def _logit_bias(text: str) -> tuple[int, float]:
    token, equals, bias = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=BIAS, such as 198=-100, got {text!r}") from None


# (flags, field of SamplingParams, type, metavar, help). The first long flag is llama.cpp's or vLLM's name for it.
_SAMPLING: list[tuple[tuple[str, ...], str, Any, str, str]] = [
    (("-n", "--max-tokens", "--predict"), "max_tokens", int, "N", "stop after N tokens (default: {})"),
    (("-t", "--temp", "--temperature"), "temperature", float, "T", "0 = always the likeliest token"),
    (("--top-k",), "top_k", int, "K", "sample among the K likeliest tokens; 0 = all"),
    (("--top-p",), "top_p", float, "P", "sample among the likeliest tokens that hold probability P; 1 = all"),
    (("--min-p",), "min_p", float, "P", "drop tokens less likely than P times the likeliest; 0 = none"),
    (("--repeat-penalty", "--repetition-penalty"), "repetition_penalty", float, "X", "1 = off"),
    (
        ("--presence-penalty",),
        "presence_penalty",
        float,
        "X",
        "taken off the logit of a token already written; 0 = off",
    ),
    (("--frequency-penalty",), "frequency_penalty", float, "X", "the same, once for each time it was written; 0 = off"),
    (("--min-tokens",), "min_tokens", int, "N", "no end token before N tokens"),
    (("-s", "--seed"), "seed", int, "N", "same seed, same text, with or without drafts (default: a new one)"),
]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, from where."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="MODEL", help="folder or hub id (default: the bundled bole-coder-16m)")
    add_hub_flags(group)


def add_hub_flags(group: argparse._ActionsContainer) -> None:
    """What a model that comes from a hub needs."""
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
    group.add_argument("--token", metavar="TOKEN", help="hub access token (default: HF_TOKEN or your saved login)")
    group.add_argument("--offline", action="store_true", default=None, help="use only what is already on this disk")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Where and how the model runs."""
    group = parser.add_argument_group("running")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                       help="default: auto, a GPU that works, else the CPU")  # fmt: skip
    group.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                       help="of activations (default: auto, bfloat16 on a GPU, float32 on the CPU)")  # fmt: skip
    group.add_argument(
        "--random-weights",
        metavar="SIZE",
        help="shapes of a published model, such as qwen3.5-9b or qwen3.5-27b-fp8, with made-up weights",
    )
    group.add_argument("--no-graphs", dest="graphs", action="store_false", help="launch kernels one by one (debugging)")
    group.add_argument(
        "-c",
        "--ctx-size",
        "--max-model-len",
        dest="max_model_len",
        type=count,
        metavar="N",
        help="longest prompt plus answer, in tokens (default: the model's own limit, at most 8192)",
    )
    group.add_argument("--max-batch", type=count, metavar="N", help="requests at once, each with a state (default: 8)")
    group.add_argument("--max-rows", type=count, metavar="N",
                       help="tokens of one step (default: 512, on a GPU 2048 where they fit)")  # fmt: skip
    group.add_argument("--page-size", type=count, metavar="N", help="tokens of a page of keys, values (default: 16)")
    group.add_argument("--memory-fraction", type=_fraction, metavar="X",
                       help="of the GPU's memory, what may be in use (default: 0.9)")  # fmt: skip
    group.add_argument("--draft", choices=["auto", "none", "suffix", "ngram", "mtp", "graft", "model"], default="auto",
                       help="who proposes the tokens to verify; never changes the text (default: auto, as pays; suffix "
                       "or ngram: look-up in the text; graft: all there are)")  # fmt: skip
    group.add_argument("-md", "--draft-model", "--model-draft", metavar="MODEL",
                       help="folder or hub id of a smaller model of the same tokenizer, which drafts too")  # fmt: skip
    group.add_argument("--draft-nodes", "--draft-max", type=count, metavar="N",
                       help="at most N proposed tokens a step (default: 8, on a GPU 63)")  # fmt: skip
    group.add_argument("--draft-depth", type=count, metavar="N", help="at most N of them in a row (default: 8)")
    group.add_argument("--draft-top-k", type=count, metavar="N",
                       help="children of a node of a drafted tree, on the CPU (default: 3)")  # fmt: skip
    group.add_argument("--draft-width", type=count, metavar="N",
                       help="nodes of a level that have children, on the CPU (default: 1)")  # fmt: skip
    group.add_argument("--draft-earlier", type=count, metavar="N",
                       help="look up in the last N tokens of earlier answers, too (default: 0)")  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser, choices: bool, max_tokens: int = 256) -> None:
    """One flag a field of SamplingParams; what is not given keeps the model's own default.

    max_tokens: the command's default, for the help"""
    group = parser.add_argument_group("sampling (default: the model's generation_config.json)")
    for flags, field, kind, metavar, text in _SAMPLING:
        group.add_argument(*flags, dest=field, type=kind, metavar=metavar, help=text.format(max_tokens))
    group.add_argument("--logit-bias", type=_logit_bias, action="append", metavar="ID=BIAS", help="may be repeated")
    group.add_argument("--stop", action="append", metavar="TEXT",
                       help="stop before TEXT; may be repeated; a newline is $'\\n' in most shells")  # fmt: skip
    group.add_argument("--stop-token-id", dest="stop_token_ids", type=int, action="append", metavar="ID",
                       help="stop at this token; may be repeated")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end tokens")
    if choices:
        group.add_argument("--n", type=int, metavar="N", help="write N independent answers")
        group.add_argument(
            "--logprobs", type=int, metavar="K", help="with --json: the K likeliest tokens at each place"
        )


def load_model(args: argparse.Namespace) -> LLM:
    """The LLM that the flags ask for. Raises ConfigError, WeightsError or HubError for a model that cannot be used."""
    from boleinfer.llm import LLM

    names = ["draft_model", "draft_nodes", "draft_depth", "draft_top_k", "draft_width", "draft_earlier"]
    names += ["max_batch", "max_rows", "page_size", "memory_fraction"]
    asked = {name: value for name in names if (value := getattr(args, name)) is not None}
    return LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        draft=args.draft,
        revision=args.revision,
        token=args.token,
        offline=args.offline,
        max_model_len=args.max_model_len,
        random_weights=args.random_weights,
        graphs=args.graphs,
        progress=_show_progress if sys.stderr.isatty() and not args.quiet else None,
        **asked,
    )


def _show_progress(done: int, total: int) -> None:
    """One line on a terminal that goes away at the end; nothing for a model that is there at once."""
    if total > 1 << 30:
        line = "" if done == total else f"reading weights: {done / total:.0%}"
        print(f"\r{line:24}", end="\r", file=sys.stderr, flush=True)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """`defaults` (the model's) with every given flag laid over it; UsageError for a value that cannot be.

    Without `defaults` it only checks the flags, so that a bad value is reported before a large model is read.
    """
    from boleinfer.params import SamplingParams

    fields = [field for _, field, *_ in _SAMPLING] + ["stop", "stop_token_ids", "ignore_eos", "n", "logprobs"]
    given = {field: value for field in fields if (value := getattr(args, field, None)) is not None}
    if args.logit_bias:
        given["logit_bias"] = dict(args.logit_bias)
    try:
        return replace(defaults or SamplingParams(), **given)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
