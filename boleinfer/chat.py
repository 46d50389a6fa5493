"""`boleinfer chat`: a conversation, at the terminal or from a pipe. Knows only the LLM's public methods."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from boleinfer.generate import describe
from boleinfer.options import UsageError, load_model, sampling_params

if TYPE_CHECKING:
    from boleinfer.llm import RequestOutput, StreamChunk

Message = dict[str, str]
_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit leaves"


def chat(args: argparse.Namespace) -> int:
    """Exit status of the command: 1 when an answer ended in an error. Ctrl-C at the prompt raises KeyboardInterrupt."""
    sampling_params(args)  # a bad value is reported before any weight is read
    llm = load_model(args)
    params = sampling_params(args, llm.default_params)
    messages, status = [_message("system", args.system)] if args.system else [], 0
    for line in read_lines():
        name, _, rest = line.partition(" ")
        if name == "/exit":
            break
        if name == "/reset":
            messages = [m for m in messages if m["role"] == "system"]
        elif name == "/system":
            messages = [m for m in messages if m["role"] != "system"]
            messages[:0] = [_message("system", rest.strip())] if rest.strip() else []
        elif name.startswith("/"):
            print(f"boleinfer: no such command: {name}. {_HELP}", file=sys.stderr)
        else:
            turn = [*messages, _message("user", line)]
            try:
                chunks = llm.chat_stream(turn, params)
            except ValueError as error:  # too long, no template, or one that takes no such conversation
                if not sys.stdin.isatty():
                    raise UsageError(str(error)) from error
                print(f"boleinfer: {error}", file=sys.stderr)
                continue
            text, output = answer(chunks)
            messages = [*turn, _message("assistant", text)]
            if output is not None and not args.quiet:
                print(describe(output.outputs), file=sys.stderr)
            if output is not None and (broken := output.outputs[0].error):
                print(f"boleinfer: the answer ended early: {broken}", file=sys.stderr)
                status = 1
    return status


def read_lines() -> Iterator[str]:
    """Lines that are not blank, from a terminal (prompt, line editing, history) or a pipe, until the input ends."""
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            if line := raw.decode("utf-8", "replace").strip():
                yield line
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (its import gives input() editing and history)
    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def answer(chunks: Generator[StreamChunk, None, None]) -> tuple[str, RequestOutput | None]:
    """Print an answer as it comes; returns its text, and the output unless Ctrl-C stopped it."""
    text, output = "", None
    with ctrl_c_noted() as stopped, closing(chunks):
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
            text += chunk.text
            output = chunk.output or output
            if stopped:
                break
    print(flush=True)
    return text, output


@contextmanager
def ctrl_c_noted() -> Iterator[list[int]]:
    """Notes a first Ctrl-C in the yielded list, so that a step under way is finished; a second interrupts at once."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
