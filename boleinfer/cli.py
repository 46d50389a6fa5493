"""The command line: parses, dispatches, makes a message and an exit status of every failure. Knows no model."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from boleinfer import __version__
from boleinfer.bench_flags import EXAMPLES as _BENCH
from boleinfer.bench_flags import add_bench_commands
from boleinfer.options import UsageError, add_hub_flags, add_model_flags, add_run_flags, add_sampling_flags, count

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

_MAIN = """\
commands at a glance:
  boleinfer generate "def fibonacci(n):"     write on from a prompt with the bundled model
  boleinfer chat -m Qwen/Qwen3.5-0.8B        talk to a model from the hub
  boleinfer info ~/models/Qwen3.5-9B         what is in a model and how much memory it needs
  boleinfer trace "def fibonacci(n):"        the same as a web page that shows what each step proposed and accepted
  boleinfer check                            does every op compute what its definition says on this machine?
  boleinfer verify                           does speculation change a single token, with your model and prompts?
  boleinfer doctor                           can the GPU be used here, and what to do if not?
  boleinfer kernels                          do all CUDA kernels compile, and what does each need?
  boleinfer calibrate                        what steps cost here, by which it is chosen how much to draft
  boleinfer bench cpu                        what speculation gains on this machine

exit status: 0 done, 1 failed while running, 2 something you asked for cannot be, 130 stopped with Ctrl-C
"""
_GENERATE = """\
examples:
  boleinfer generate "def fibonacci(n):"
  boleinfer generate --echo --temp 0 -n 64 "class Stack:"
  boleinfer generate -f prompt.py --stop $'\\n\\n' > answer.py
  git show HEAD:setup.py | boleinfer generate --json -s 7 | jq .text
  boleinfer generate -m ./my-model --draft none "import "      # plain decoding, one token a step
"""
_CHAT = """\
examples:
  boleinfer chat -m Qwen/Qwen3.5-0.8B --system "Answer in one sentence."
  printf 'Hello!\\nWhat did I just say?\\n' | boleinfer chat -m ./my-model -q

at the prompt: /reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D leaves.
Ctrl-C stops an answer; at the prompt it leaves.
"""
_INFO = """\
examples:
  boleinfer info                       the bundled model
  boleinfer info ~/models/Qwen3.5-9B   reads config.json and the headers of the weight files, never the weights
  boleinfer info Qwen/Qwen3.5-9B       the same of a model on the hub, whose weights are not fetched
  boleinfer info --random-weights qwen3.5-27b-fp8     what a published size would need
"""
_CHECK = """\
examples:
  boleinfer check
  boleinfer check gdn attention                  only the ops whose name contains one of these
  boleinfer check --device cuda --dtype bf16     the kernels, in the types that models run in on a GPU
"""
_VERIFY = """\
examples:
  boleinfer verify                                  the bundled model, built-in prompts, every drafter
  boleinfer verify Qwen/Qwen3.5-0.8B -n 200 --temp 0.7 --top-p 0.9
  boleinfer verify ./my-model --device cuda --prompts prompts.txt --json | jq .verdict

prompts.txt holds a prompt a line; prompts.json an array of strings, which may be longer than a line. Every drafter (or
the one of --draft), and one that knows the answer and errs now and then, is compared with plain decoding of one prompt
at a time: greedy, and with the sampling parameters given; one prompt after another, and all in a batch. Answers are of
up to 48 tokens unless -n says otherwise.

exit status: 0 when all tokens are the same, or differ only where rounding decides; 1 when they differ
"""
_TRACE = """\
examples:
  boleinfer trace "def fibonacci(n):"                 writes trace.html; open it in a browser, no network is needed
  boleinfer trace -f prompt.py -n 100 -s 3 -o run.html -m ./my-model
  boleinfer trace --json "import " | jq '.steps[1].nodes'

The page shows each step's tree of guesses, who proposed them, which the model accepted, what they were expected to be
worth, and where the time went. docs/trace.md says what is in the JSON.
"""
_CALIBRATE = """\
examples:
  boleinfer calibrate                         the bundled model
  boleinfer calibrate -m ./my-model --max-batch 32

The first use of a model does it too, in a few seconds. The table decides how many guesses a step verifies, and whether
any are made. It is kept in the cache folder and used with this model, machine, version and options alone.
"""
_DOCTOR = """\
examples:
  boleinfer doctor
  boleinfer doctor --json | jq '.findings[] | select(.ok | not)'

exit status: 0 when the GPU can be used, 1 when not; the CPU backend needs none of it
"""
_KERNELS = """\
examples:
  boleinfer kernels                          every kernel for every GPU generation, with no GPU needed
  boleinfer kernels rms --arch 90 --json     only files whose name contains rms, for an H100 or H200

A kernel whose registers spill to memory fails the command, unless its file gives the reason (// spills: why).
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; each command's namespace carries `run`, the function that does it."""
    parser = _Parser(
        prog="boleinfer",
        description="Tree speculative decoding for hybrid-attention language models.",
        epilog=_MAIN,
    )
    parser.add_argument("--version", action="version", version=f"boleinfer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        sentence = f"{summary[0].upper()}{summary[1:]}."
        made = commands.add_parser(name, help=summary, description=sentence, epilog=epilog)
        made.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
        return made

    generate = command("generate", "write on from a prompt", _GENERATE)
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to go on from; - or nothing reads stdin"
    )
    generate.add_argument("-f", "--file", metavar="FILE", help="read the prompt from FILE")
    generate.add_argument("--echo", action="store_true", help="print the prompt too")
    generate.add_argument("--json", action="store_true", help="print one JSON object when done instead of streaming")
    generate.add_argument("--debug-layers", action="store_true",
                          help="write nothing: compare the GPU with NumPy on the prompt, layer by layer")  # fmt: skip
    _add_quiet(generate)
    add_sampling_flags(generate, choices=True)
    add_run_flags(generate)
    add_model_flags(generate)
    generate.set_defaults(run=_run_generate)

    trace = command("trace", "write on from a prompt, and a web page that shows how", _TRACE)
    trace.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to go on from; - or nothing reads stdin")
    trace.add_argument("-f", "--file", metavar="FILE", help="read the prompt from FILE")
    trace.add_argument("-o", "--out", metavar="FILE",
                       help="default: trace.html, or stdout for the JSON; - is stdout")  # fmt: skip
    trace.add_argument("--json", action="store_true", help="only the data of the page, as one JSON object")
    _add_quiet(trace)
    add_sampling_flags(trace, choices=False)
    add_run_flags(trace)
    add_model_flags(trace)
    trace.set_defaults(run=_run_trace)

    chat = command("chat", "talk with a model, turn by turn", _CHAT)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_quiet(chat)
    add_sampling_flags(chat, choices=False)
    add_run_flags(chat)
    add_model_flags(chat)
    chat.set_defaults(run=_run_chat)

    info = command("info", "what is in a model and how much memory it needs", _INFO)
    info.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub id (default: the bundled model)")
    info.add_argument("--random-weights", metavar="SIZE", help="a published size instead, such as qwen3.5-27b-fp8")
    info.add_argument("--json", action="store_true", help="print it as one JSON object")
    add_hub_flags(info)
    info.set_defaults(run=_run_info)

    check = command("check", "compute every op on this machine and compare it with its definition", _CHECK)
    check.add_argument("ops", nargs="*", metavar="OP", help="only ops whose name contains OP")
    check.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    check.add_argument(
        "--dtype", choices=["float32", "bf16"], default="float32", help="type of activations (default: float32)"
    )
    check.set_defaults(run=_run_check)

    verify = command("verify", "compare the tokens of every drafter with plain decoding", _VERIFY)
    verify.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub id (default: the bundled model)")
    verify.add_argument("--prompts", metavar="FILE", help="prompts to answer (default: six that are built in)")
    verify.add_argument("--json", action="store_true", help="print it as one JSON object")
    _add_quiet(verify)
    add_sampling_flags(verify, choices=False, max_tokens=48)
    add_run_flags(verify)
    add_hub_flags(verify.add_argument_group("model"))
    verify.set_defaults(run=_run_verify, draft=None)

    calibrate = command("calibrate", "measure what steps cost, which decides how much is drafted", _CALIBRATE)
    _add_quiet(calibrate)
    add_run_flags(calibrate)
    add_model_flags(calibrate)
    calibrate.set_defaults(run=_run_calibrate)

    doctor = command("doctor", "look whether the GPU can be used here, and say what to do if not", _DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print it as one JSON object")
    doctor.set_defaults(run=_run_doctor)

    kernels = command("kernels", "compile the CUDA kernels and show what each needs", _KERNELS)
    kernels.add_argument("names", nargs="*", metavar="NAME", help="only files whose name contains NAME")
    kernels.add_argument(
        "--arch", default="80,86,89,90,100,120", metavar="LIST", help="compute capabilities (default: %(default)s)"
    )
    kernels.add_argument("--json", action="store_true", help="print it as one JSON array")
    kernels.add_argument("-j", "--jobs", type=count, metavar="N", help="compile N at a time (default: all cores)")
    kernels.set_defaults(run=_run_kernels)

    add_bench_commands(command("bench", "measure speed on this machine", _BENCH))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Only --help, --version and a bad flag leave through SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets "?" instead of a crash
    args = build_parser().parse_args(argv)
    if (getattr(args, "model", None) or getattr(args, "random_weights", None)) is None:
        # the bundled model, before NumPy is imported; see docs/performance-notes.md
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough; nothing more may be written, not even by the interpreter's exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if args.debug or os.environ.get("BOLEINFER_DEBUG") == "1":
            raise
        mistake = _is_mistake(error)
        print(f"boleinfer: {'' if mistake else type(error).__name__ + ': '}{error}", file=sys.stderr)
        if not mistake:
            print("boleinfer: set BOLEINFER_DEBUG=1 to see where this happened", file=sys.stderr)
        return MISTAKE if mistake else FAILED


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A line on stderr, without the place in the source."""
    print(f"boleinfer: {message}", file=sys.stderr)


def _is_mistake(error: Exception) -> bool:
    from boleinfer.config import ConfigError
    from boleinfer.hub import HubError
    from boleinfer.nvrtc import ToolchainError
    from boleinfer.request import RequestError
    from boleinfer.tokenizer import TokenizerError
    from boleinfer.weights import WeightsError

    return isinstance(
        error, (UsageError, ConfigError, HubError, RequestError, TokenizerError, ToolchainError, WeightsError)
    )


class _Parser(argparse.ArgumentParser):
    """Shows examples as they are written, takes no abbreviated flags, and answers a bad flag in one line."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="no statistics on stderr")


def _run_generate(args: argparse.Namespace) -> int:
    from boleinfer.generate import generate

    return generate(args)


def _run_trace(args: argparse.Namespace) -> int:
    from boleinfer.trace import trace

    return trace(args)


def _run_chat(args: argparse.Namespace) -> int:
    from boleinfer.chat import chat

    return chat(args)


def _run_info(args: argparse.Namespace) -> int:
    from boleinfer.info import info

    return info(args)


def _run_check(args: argparse.Namespace) -> int:
    from boleinfer.check import check

    return check(args.ops, args.device, args.dtype)


def _run_verify(args: argparse.Namespace) -> int:
    from boleinfer.verify import verify

    return verify(args)


def _run_calibrate(args: argparse.Namespace) -> int:
    from boleinfer.calibrate import calibrate

    return calibrate(args)


def _run_doctor(args: argparse.Namespace) -> int:
    from boleinfer.doctor import doctor

    return doctor(args.json)


def _run_kernels(args: argparse.Namespace) -> int:
    from boleinfer.kernel_report import kernels

    return kernels(args.arch.split(","), args.names, args.json, args.jobs)
