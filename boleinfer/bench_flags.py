"""The flags of `boleinfer bench`, one parser for each thing that is measured. Imports it when it is asked for."""

from __future__ import annotations

import argparse
from importlib import import_module

from boleinfer.options import count

EXAMPLES = """\
examples:
  boleinfer bench cpu                              all prompts; writes benchmarks/results/cpu.json
  boleinfer bench cpu --prompts 2 --repeats 1      a quick look
  boleinfer bench decode                           plain decoding of published sizes on the GPU
  boleinfer bench decode --random-weights qwen3.5-9b qwen3.5-9b-fp8 --batch 1 8 32 --roofline
  boleinfer bench prompts --random-weights qwen3.5-9b --lengths 200 2000     the first token of prompts
  boleinfer bench verify                           what a step of many rows costs there, against one row
  boleinfer bench kernels --only linear            products beside cuBLAS
  boleinfer bench tree --requests 1 32             trees in the delta rule and in attention, beside their floors
  boleinfer bench ring                             how many committed factors to keep
  boleinfer bench speculation                      what drafting gains, and what it costs where nothing is right
  boleinfer bench start                            first token of a new process, loading
  boleinfer bench step --random-weights qwen3.5-27b --rows 16     microseconds of each kernel of a step

Each writes its file in benchmarks/results of this checkout when it ran as it stands; with -o, wherever you say.
"""


def add_bench_commands(bench: argparse.ArgumentParser) -> None:
    """cpu, decode, prompts, verify, kernels, tree, ring, speculation, start and step below `boleinfer bench`."""
    commands = bench.add_subparsers(title="what is measured", metavar="WHAT", required=True)

    def command(name: str, module: str, summary: str, file: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        default = f"default: benchmarks/results/{file} of this checkout" if file else "also write it as JSON"
        made.add_argument("-o", "--output", metavar="FILE", help=default)
        made.set_defaults(run=lambda args: getattr(import_module(f"boleinfer.{module}"), f"bench_{name}")(args))
        return made

    cpu = command("cpu", "bench", "plain decoding, every drafter, and the weights' products alone", "cpu.json")
    cpu.add_argument("-m", "--model", metavar="MODEL", help="folder or hub id (default: the bundled model)")
    cpu.add_argument("-n", "--max-tokens", type=count, default=128, metavar="N", help="tokens a prompt (default: 128)")
    cpu.add_argument("--prompts", type=count, metavar="N", help="only the first N prompts")
    cpu.add_argument(
        "--repeats", type=count, default=3, metavar="N", help="runs of which the median counts (default: 3)"
    )

    decode = command("decode", "bench_gpu", "plain decoding of published sizes on the GPU", "decode.json")
    _add_sizes(decode)
    decode.add_argument("--batch", type=count, nargs="+", metavar="N", help="requests at once (default: 1 to 128)")
    decode.add_argument("--roofline", action="store_true", help="also draw what it reached, beside the result (.svg)")
    _add_prompt(decode)

    prompts = command(
        "prompts", "bench_prompts", "one request's first token, by the length of its prompt", "prompts.json"
    )
    _add_sizes(prompts)
    prompts.add_argument("--lengths", type=count, nargs="+", metavar="N", help="tokens (default: 100 to 8000)")

    verify = command("verify", "bench_gpu", "a step of many rows against one of one row, on the GPU", "verify.json")
    _add_sizes(verify)
    verify.add_argument("--rows", type=rows, nargs="+", metavar="N", help="nodes of the trees (default: 1 to 128)")
    _add_prompt(verify)

    kernels = command("kernels", "bench_kernels", "ops on the GPU, products beside cuBLAS", "kernels.json")
    kernels.add_argument(
        "--only", choices=["linear", "small", "attention", "gdn"], nargs="+", metavar="KIND",
        help="linear, small, attention or gdn (default: all)",
    )  # fmt: skip

    tree = command("tree", "bench_tree", "verifying trees in GDN and attention, on the GPU", "gdn_tree.json")
    tree.add_argument("--only", choices=["gdn", "attention"], nargs="+", metavar="KIND", help="default: both")
    tree.add_argument("--requests", type=count, nargs="+", metavar="N", help="requests at once (default: 1 to 128)")
    tree.add_argument("--value-heads", type=count, nargs="+", metavar="N", help="of GDN (default: 32 48 64)")
    tree.add_argument("--peers", metavar="FOLDER", help="holds gdn_peers.py: other kernels to run beside GDN's")

    ring = command("ring", "bench_ring", "committed factors by how many are kept, on the GPU", "ring.json")
    ring.add_argument("--requests", type=count, nargs="+", metavar="N", help="requests at once (default: 1 8 32)")
    _add_prompt(ring)

    speculation = command("speculation", "bench_speculation", "what drafting gains on the GPU", "speculation.json")
    _add_sizes(speculation)
    speculation.add_argument("--batch", type=count, nargs="+", metavar="N", help="requests at once (default: 1 to 32)")
    speculation.add_argument(
        "--part", choices=["bundled", "profiles", "verify", "never"], nargs="+", metavar="PART",
        help="bundled, profiles, verify or never (default: all)",
    )  # fmt: skip
    _add_prompt(speculation)

    start = command("start", "bench_start", "a new process up to its first token, loading", "start.json")
    start.add_argument("--random-weights", metavar="SIZE", help="of the checkpoint to load (default: qwen3.5-9b)")
    start.add_argument("--folder", metavar="DIR", help="where it is written for a while (default: memory)")

    step = command("step", "bench_step", "microseconds of each kernel of a decoding step on the GPU")
    step.add_argument("--random-weights", default="qwen3.5-9b", metavar="SIZE", help="default: %(default)s")
    step.add_argument("--rows", type=rows, default=1, metavar="N", help="nodes of the tree, 1 to 128 (default: 1)")
    _add_prompt(step)


def rows(text: str) -> int:
    """A number of nodes that a tree on the GPU may have."""
    if (number := count(text)) <= 128:
        return number
    raise argparse.ArgumentTypeError(f"expected at most 128, got {number}")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--random-weights", nargs="+", metavar="SIZE", help="published sizes, such as qwen3.5-9b-fp8")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", type=count, default=1024, metavar="N", help="tokens of each prompt (default: %(default)s)"
    )
