"""The command line with the bundled model, in processes of its own: streaming, signals, pipes, wrong models."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from boleinfer import LLM, pricing
from boleinfer.costs import CostFiles, CostTable

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module", autouse=True)
def known_costs(tmp_path_factory):
    """A cache that says what steps of the bundled model cost, few rows as much as many: the clock chooses no drafts."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOLEINFER_CACHE", str(cache))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the command line has it
        executor = LLM(device="cpu").engine.executor
        table = CostTable((1, 64), (1, 8), (0,), np.full((2, 2, 1), 4e-3))
        CostFiles(cache / "costs").put(pricing.key(executor, executor.price.args[1]), table)
        yield


def boleinfer(*arguments, stdin=b"", env=None):
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, env={**os.environ, **(env or {})})


def test_main_job():
    """The README's first command: sensible text, and drafted tokens accepted."""
    done = boleinfer("generate", PROMPT, "-n", 48, "-s", 1)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode()) > 40
    accepted = int(done.stderr.decode().split("accepted=")[1].split(";")[0])
    assert accepted > 0


@pytest.mark.parametrize("drafter", ["auto", "ngram", "mtp"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_never_change_the_text(drafter, temperature):
    prompt = "".join(f"    self.{name} = {name}\n" for name in ("left", "right", "top"))  # something to look up
    flags = ["-n", 40, "-s", 5, "-t", temperature, "--json", "-q", prompt]
    plain, drafted = (json.loads(boleinfer("generate", *flags, "--draft", d).stdout) for d in ("none", drafter))
    assert plain["token_ids"] == drafted["token_ids"] and plain["text"] == drafted["text"]
    assert plain["stats"]["drafted"] == 0 and drafted["stats"]["drafted"] > 0


def test_json_and_stream_agree():
    flags = [PROMPT, "-n", 24, "-s", 3, "-q"]
    assert (
        boleinfer("generate", *flags).stdout.decode()
        == json.loads(boleinfer("generate", *flags, "--json").stdout)["text"] + "\n"
    )


def test_first_token_within_two_seconds_of_the_command():
    def seconds() -> float:
        start = time.perf_counter()
        with started("generate", PROMPT, "-n", 8, "-q") as process:
            process.stdout.read(1)
            return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) <= 2.0


@contextmanager
def started(*arguments):
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_text_comes_while_it_is_written():
    with started("generate", PROMPT, "-n", 2000, "--ignore-eos") as process:
        assert process.stdout.read(1)
        assert process.poll() is None, "the first characters came only when all was done"


def test_closed_pipe_ends_quietly():
    with started("generate", PROMPT, "-n", 2000, "--ignore-eos") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
        process.stdout = io.BytesIO()


def test_f47_ctrl_c_on_the_command_line():
    with started("generate", PROMPT, "-n", 3000, "--ignore-eos") as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("model", "said"),
    [("/nonexistent/model", "/nonexistent/model"), (str(ROOT / "docs"), "config.json")],
)
def test_a_model_that_is_none(model, said):
    for command in (["generate", "-m", model, "x"], ["info", model]):
        done = boleinfer(*command)
        err = done.stderr.decode()
        assert done.returncode == 2 and said in err and "Traceback" not in err, err


def test_an_unsupported_family_lists_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    for command in (["generate", "-m", tmp_path, "x"], ["info", tmp_path]):
        err = boleinfer(*command).stderr.decode()
        assert "llama" in err and "qwen3_next" in err and "Traceback" not in err


def test_f49_degenerate_prompts():
    assert boleinfer("generate", "").returncode == 2
    assert boleinfer("generate", " ", "-n", 2).returncode == 0
    assert boleinfer("generate", PROMPT, "-n", 0).returncode == 2
    long = boleinfer("generate", stdin=b"x" * 1_000_000)
    assert long.returncode == 2 and b"tokens" in long.stderr and b"Traceback" not in long.stderr
    assert boleinfer("generate", "-n", 4, stdin=b"\xff\xfe\x00\x80").returncode == 0


def test_an_ascii_terminal_gets_text_anyway():
    done = boleinfer("generate", "# naïve π\n", "-n", 4, "--echo", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"# na?ve ?" in done.stdout


def test_chat_with_the_bundled_model():
    done = boleinfer("chat", "-n", 8, "-s", 1, stdin=b"hello\nagain\n")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode().count("tokens a step") == 2


def test_check_runs_the_ops_that_are_named():
    done = boleinfer("check", "rms_norm", "swiglu")
    assert done.returncode == 0 and b"rms_norm" in done.stdout and b"0 wrong" in done.stdout, done.stdout.decode()
    assert b"gdn" not in done.stdout
    unknown = boleinfer("check", "no_such_op")
    assert unknown.returncode == 2 and b"no_such_op" in unknown.stderr and b"Traceback" not in unknown.stderr


def test_help_has_examples():
    for command in ("generate", "chat", "info", "check", "bench"):
        done = boleinfer(command, "--help")
        assert done.returncode == 0 and b"examples:" in done.stdout
    assert boleinfer("--version").stdout.startswith(b"boleinfer ")
