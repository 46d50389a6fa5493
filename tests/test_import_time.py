"""`import boleinfer` is quick and light, and so is the command line until it needs a model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = [
    "torch",
    "transformers",
    "cupy",
    "scipy",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "ml_dtypes",
    "safetensors",
]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_takes_less_than_300_ms():
    timed = "import time; t = time.perf_counter(); import boleinfer; print(time.perf_counter() - t)"
    assert min(float(run_python(timed)) for _ in range(5)) <= 0.3


@pytest.mark.parametrize(
    "statement",
    [
        "import boleinfer",
        "from boleinfer import LLM, SamplingParams",
        "import boleinfer.cli; boleinfer.cli.build_parser()",
        "import importlib; [importlib.import_module(f'boleinfer.models.{m}') for m in "
        "('qwen3_next', 'qwen3_5', 'qwen3_5_moe')]",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement):
    loaded = run_python(f"{statement}\nimport sys; print(*[m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded == ""


def test_the_parser_needs_no_numpy():
    """`boleinfer --help` answers at once."""
    assert (
        run_python("import boleinfer.cli, sys; boleinfer.cli.build_parser(); print('numpy' in sys.modules)") == "False"
    )
