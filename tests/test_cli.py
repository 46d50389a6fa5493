"""The command line from outside: what lands on stdout and stderr, exit statuses, what a user's mistake looks like."""

import io
import json
import os
import signal
import sys
import warnings

import pytest

from boleinfer import chat as chat_module
from boleinfer import cli
from boleinfer import generate as generate_module
from boleinfer.config import ConfigError
from boleinfer.llm import CompletionOutput, RequestOutput, StreamChunk
from boleinfer.request import RequestError, Stats
from boleinfer.sampling import SamplingParams

PROMPT = "def fibonacci(n):\n"


# ---- in one process, with a model that answers what it is told ----


class FakeLLM:
    """Answers with fixed pieces and remembers what it was asked."""

    def __init__(self, pieces=("one ", "two"), error=None, before_piece=lambda i: None):
        self.pieces, self.error, self.before_piece = pieces, error, before_piece
        self.default_params = SamplingParams(temperature=0.25, top_k=7)
        self.asked = []
        self.closed = False

    def output(self, prompt, params):
        stats = Stats(
            steps=2, drafted=5, accepted=3, histogram=[1, 0, 0, 1], prompt_tokens=4, generated_tokens=5, decode_s=0.5
        )
        reason = "error" if self.error else "stop"
        outputs = [
            CompletionOutput(
                i, "".join(self.pieces), [1, 2], reason, None, [{1: -0.5, 2: float("-inf")}], stats, 99, self.error
            )
            for i in range(params.n)
        ]
        return RequestOutput(prompt, [5, 6], outputs)

    def generate(self, prompt, params):
        self.asked.append((prompt, params))
        return [self.output(prompt, params)]

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        try:
            for i, piece in enumerate(self.pieces):
                self.before_piece(i)
                last = i == len(self.pieces) - 1
                yield StreamChunk(piece, [i], "stop" if last else None, self.output(prompt, params) if last else None)
        finally:
            self.closed = True

    def chat_stream(self, messages, params):
        if len(messages) > 6:
            raise RequestError("the conversation is too long")
        return self.stream([dict(m) for m in messages], params)


@pytest.fixture
def fake(monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(generate_module, "load_model", lambda args: llm)
    monkeypatch.setattr(chat_module, "load_model", lambda args: llm)
    return llm


@pytest.fixture
def stdin(monkeypatch):
    def give(data: bytes, tty: bool = False):
        stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        stream.isatty = lambda: tty
        monkeypatch.setattr(sys, "stdin", stream)

    return give


def test_generate_streams_to_stdout_and_statistics_to_stderr(fake, capsys):
    assert cli.main(["generate", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out == "one two\n"
    assert "drafted=5 accepted=3" in err and "2.50 tokens a step" in err and "10.0 tokens/s" in err
    assert "0:1 3:1" in err and "seed 99" in err and "first after" in err
    assert fake.closed


def test_quiet_and_echo(fake, capsys):
    assert cli.main(["generate", "-q", "--echo", PROMPT]) == 0
    assert capsys.readouterr() == (PROMPT + "one two\n", "")


def test_flags_override_the_models_own_defaults(fake, capsys):
    flags = [
        "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1", "--repeat-penalty", "1.1", "--presence-penalty", "0.2",
        "--frequency-penalty", "0.3", "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--min-tokens", "1",
        "--stop", "a", "--stop", "b", "--stop-token-id", "9", "--ignore-eos", "-s", "11", "-n", "17",
    ]  # fmt: skip
    assert cli.main(["generate", *flags, PROMPT]) == 0
    prompt, params = fake.asked[0]
    assert prompt == PROMPT
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 3, 0.5, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert dict(params.logit_bias) == {5: -1.5, 6: 2.0} and params.min_tokens == 1 and params.ignore_eos
    assert list(params.stop) == ["a", "b"] and list(params.stop_token_ids) == [9]
    assert (params.seed, params.max_tokens) == (11, 17)


@pytest.mark.parametrize("flag", ["--temp", "--temperature", "-t"])
def test_known_spellings(fake, flag):
    assert cli.main(["generate", flag, "0", "-q", PROMPT]) == 0
    assert fake.asked[0][1].temperature == 0


def test_json_is_one_object(fake, capsys):
    assert cli.main(["generate", "--json", "--logprobs", "2", PROMPT]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "one two" and record["token_ids"] == [1, 2] and record["finish_reason"] == "stop"
    assert record["logprobs"] == [{"1": -0.5, "2": None}]
    assert record["seed"] == 99 and record["model"] == "bole-coder-16m" and record["prompt_token_ids"] == [5, 6]
    assert record["stats"]["accepted"] == 3 and record["stats"]["tokens_per_step"] == 2.5


def test_several_answers(fake, capsys):
    assert cli.main(["generate", "--n", "2", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out.count("one two") == 2 and "answer 2 of 2" in out and "drafted=10 accepted=6" in err
    assert cli.main(["generate", "--n", "2", "--json", PROMPT]) == 0
    assert [c["index"] for c in json.loads(capsys.readouterr().out)["choices"]] == [0, 1]


def test_an_answer_that_ends_in_an_error_fails_the_command(fake, capsys):
    fake.error = "logits of step 3 are NaN"
    assert cli.main(["generate", PROMPT]) == 1
    assert "logits of step 3 are NaN" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["-"], []])
def test_prompt_from_stdin(fake, stdin, how):
    stdin("naïve = 'π'\n".encode())
    assert cli.main(["generate", *how]) == 0
    assert fake.asked[0][0] == "naïve = 'π'\n"


def test_prompt_from_file(fake, tmp_path):
    (tmp_path / "prompt.py").write_bytes(b"a\r\nb")
    assert cli.main(["generate", "-f", str(tmp_path / "prompt.py")]) == 0
    assert fake.asked[0][0] == "a\r\nb"


def test_broken_utf8_is_replaced_and_said(fake, stdin, capsys):
    stdin(b"caf\xe9 = 1\n")
    assert cli.main(["generate", "-q"]) == 0
    assert fake.asked[0][0] == "caf\ufffd = 1\n"
    assert "not valid UTF-8" in capsys.readouterr().err
    assert cli.main(["generate", "-q", os.fsdecode(b"caf\xe9")]) == 0
    assert fake.asked[1][0] == "caf\ufffd"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", ""], "empty"),
        (["generate"], "empty"),
        (["generate", "-"], "empty"),
        (["generate", "x", "-f", "y"], "give one"),
        (["generate", "-f", "/nonexistent/p.py"], "/nonexistent/p.py"),
        (["generate", "-f", "/"], "directory"),
        (["generate", "--logprobs", "2", "x"], "--json"),
        (["generate", "--temp", "-1", "x"], "temperature"),
        (["generate", "--temp", "nan", "x"], "temperature"),
        (["generate", "--top-p", "1.01", "x"], "top_p"),
        (["generate", "-n", "0", "x"], "max_tokens"),
        (["generate", "--min-p", "2", "x"], "min_p"),
        (["generate", "-n", "-3", "x"], "max_tokens"),
        (["generate", "--n", "0", "x"], "n"),
        (["generate", "--stop", "", "x"], "stop"),
        (["chat", "--top-p", "7"], "top_p"),
    ],
)
def test_f49_mistakes_are_told_without_a_traceback(fake, stdin, capsys, arguments, said):
    stdin(b"")
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "Traceback" not in err
    assert fake.asked == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--no-such-flag", "x"], "--no-such-flag"),
        (["generate", "--temp", "warm", "x"], "warm"),
        (["generate", "--logit-bias", "5", "x"], "ID=BIAS"),
        (["generate", "--draft", "magic", "x"], "magic"),
        (["generate", "--draft-nodes", "0", "x"], "at least 1"),
        (["generate", "--max-batch", "0", "x"], "at least 1"),
        (["generate", "--memory-fraction", "1.1", "x"], "up to 1"),
        (["chat", "--memory-fraction", "0"], "above 0"),
        (["generate", "one", "two"], "two"),
        (["genrate", "x"], "genrate"),
        ([], "COMMAND"),
    ],
)
def test_bad_flags(capsys, arguments, said):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2 and said in capsys.readouterr().err


def test_names_keep_their_capitals(capsys):
    for command, words in (("doctor", "Look whether the GPU can"), ("kernels", "Compile the CUDA kernels")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert words in capsys.readouterr().out


def test_memory_flags_reach_the_library(monkeypatch, capsys):
    asked = {}

    def llm(model, **options):
        asked.update(options)
        raise ConfigError("enough seen")

    monkeypatch.setattr("boleinfer.llm.LLM", llm)
    flags = ["--max-batch", "3", "--max-rows", "64", "--page-size", "32", "--memory-fraction", "0.5", "-c", "99"]
    assert cli.main(["generate", *flags, "x"]) == 2 and "enough seen" in capsys.readouterr().err
    found = {name: asked[name] for name in ("max_batch", "max_rows", "page_size", "memory_fraction", "max_model_len")}
    assert found == {"max_batch": 3, "max_rows": 64, "page_size": 32, "memory_fraction": 0.5, "max_model_len": 99}
    asked.clear()
    assert cli.main(["generate", "x"]) == 2
    assert asked["max_model_len"] is None and not {"max_batch", "max_rows", "memory_fraction"} & set(asked)


def test_warnings_are_one_line(fake, capsys, monkeypatch):
    def warns(i):
        warnings.warn("the context shrinks", stacklevel=1)

    fake.before_piece = warns
    assert cli.main(["generate", "-q", "x"]) == 0
    assert capsys.readouterr().err == "boleinfer: the context shrinks\n"


def test_no_prompt_at_a_terminal(fake, stdin, capsys):
    stdin(b"never read", tty=True)
    assert cli.main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [([], None, "1"), ([], "3", "3"), (["-m", "elsewhere"], None, None), (["--random-weights", "x"], None, None)],
)
def test_one_blas_thread_for_the_bundled_model(fake, monkeypatch, flags, before, after):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", before or "")
    if before is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert cli.main(["generate", "-q", *flags, PROMPT]) == 0
    assert os.environ.get("OPENBLAS_NUM_THREADS") == after


def test_an_unexpected_failure_is_status_1_and_debug_shows_it(fake, capsys, monkeypatch):
    def broken(i):
        raise OSError("disk on fire")

    fake.before_piece = broken
    assert cli.main(["generate", PROMPT]) == 1
    err = capsys.readouterr().err
    assert "OSError: disk on fire" in err and "BOLEINFER_DEBUG" in err and "Traceback" not in err
    with pytest.raises(OSError, match="fire"):
        cli.main(["generate", "--debug", PROMPT])
    monkeypatch.setenv("BOLEINFER_DEBUG", "1")
    with pytest.raises(OSError, match="fire"):
        cli.main(["generate", PROMPT])


def test_ctrl_c_while_generating(fake, capsys):
    fake.before_piece = lambda i: signal.raise_signal(signal.SIGINT) if i else None
    assert cli.main(["generate", PROMPT]) == 130
    assert capsys.readouterr().out == "one " and fake.closed


# ---- chat ----


def roles(messages):
    return [(m["role"], m["content"]) for m in messages]


def test_chat_keeps_the_conversation(fake, stdin, capsys):
    stdin(b"hello\n\n  \nand now?\n")
    assert cli.main(["chat", "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two\none two\n" and err.count("accepted=3") == 2
    system = ("system", "be brief")
    assert roles(fake.asked[0][0]) == [system, ("user", "hello")]
    assert roles(fake.asked[1][0]) == [system, ("user", "hello"), ("assistant", "one two"), ("user", "and now?")]


def test_chat_commands(fake, stdin, capsys):
    stdin(b"a\n/reset\nb\n/system  be kind \nc\n/system\nd\n/nonsense\n/exit\nnever\n")
    assert cli.main(["chat", "-q", "--system", "x"]) == 0
    asked = [roles(m) for m, _ in fake.asked]
    assert asked[1] == [("system", "x"), ("user", "b")]
    assert asked[2][0] == ("system", "be kind") and asked[2][1] == ("user", "b")
    assert all(role != "system" for role, _ in asked[3])
    assert len(asked) == 4 and "/nonsense" in capsys.readouterr().err


def test_chat_at_a_terminal_goes_on_after_a_bad_turn(fake, stdin, capsys, monkeypatch):
    lines = iter(["a", "b", "c", "d", "/reset", "e"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    stdin(b"", tty=True)
    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(["chat", "-q"]) == 0
    assert "too long" in capsys.readouterr().err
    assert roles(fake.asked[-1][0]) == [("user", "e")]


def test_chat_says_why_an_answer_ended_early(fake, stdin, capsys):
    fake.error = "the model's logits hold NaN"
    stdin(b"a\nb\n")
    assert cli.main(["chat", "-q"]) == 1
    assert capsys.readouterr().err.count("the answer ended early: the model's logits hold NaN") == 2


def test_chat_from_a_pipe_stops_at_a_bad_turn(fake, stdin, capsys):
    stdin(b"a\nb\nc\nd\ne\n")
    assert cli.main(["chat", "-q"]) == 2
    assert "too long" in capsys.readouterr().err and len(fake.asked) == 3


def test_chat_ctrl_c_stops_the_answer_not_the_program(fake, stdin, capsys):
    fake.before_piece = lambda i: signal.raise_signal(signal.SIGINT) if i == 0 and len(fake.asked) == 1 else None
    stdin(b"a\nb\n")
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["chat", "-q"]) == 0
    assert capsys.readouterr().out == "one \none two\n"
    assert roles(fake.asked[1][0])[1] == ("assistant", "one ")
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_second_ctrl_c_interrupts_a_step_that_hangs(fake, stdin):
    def twice(i):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    fake.before_piece = twice
    stdin(b"a\nb\n")
    assert cli.main(["chat", "-q"]) == 130
    assert fake.closed


def test_chat_ctrl_c_at_the_prompt_leaves(fake, stdin, monkeypatch):
    def pressed(prompt):
        raise KeyboardInterrupt

    stdin(b"", tty=True)
    monkeypatch.setattr("builtins.input", pressed)
    assert cli.main(["chat"]) == 130
