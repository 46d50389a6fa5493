"""A wheel, an editable install and a plain checkout all find the families and the bundled model, from any folder."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = "bole-coder-16m"
FIND = f"""
import importlib, pathlib, sys
import boleinfer
for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
    importlib.import_module("boleinfer.models." + family)
import boleinfer.models
from boleinfer.kernels import cuda_folder
assert (cuda_folder() / "rms_norm.cu").is_file()
found = [p for p in boleinfer.models.__path__ if (pathlib.Path(p) / "{MODEL}" / "config.json").exists()]
assert found, list(boleinfer.models.__path__)
print(pathlib.Path(boleinfer.__file__).resolve())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a build reads, so that no build folder appears in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "boleinfer"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("boleinfer", "models", "cuda"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skip)
    for file in ("cli.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", source.parent, source)
    return next(source.parent.glob("*.whl"))


def pip(*arguments, python: Path | None = None) -> None:
    for tool in ("pip", "setuptools"):  # looked for without importing: setuptools changes the process that imports it
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed here")
    which = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *which, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(folder: Path) -> Path:
    """A new environment that sees this one's third-party packages but no editable boleinfer; returns its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "outer.pth").write_text("\n".join(outer))  # a plain path: the .pth files in there are not run
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def run(python: Path | str, *arguments, cwd: Path, path: list[Path] = (), rc: int = 0) -> str:  # type: ignore[assignment]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path:
        clean["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [str(python), *map(str, arguments)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout.strip()


def test_wheel_holds_models_and_licences(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for family in ("__init__", "qwen3_next", "qwen3_5", "qwen3_5_moe"):
        assert f"boleinfer/models/{family}.py" in names
    carried = {f"boleinfer/models/{MODEL}/{p.name}" for p in (ROOT / "models" / MODEL).iterdir()}
    assert carried <= names, sorted(carried - names)
    assert any(n.endswith("licenses/LICENSE") for n in names) and any(n.endswith("licenses/NOTICE") for n in names)
    assert not [n for n in names if n.split("/")[0] not in {"boleinfer"} and ".dist-info" not in n]
    assert {f"boleinfer/cuda/{p.name}" for p in (ROOT / "cuda").glob("*.cu*")} <= names
    assert "boleinfer/cuda/__init__.py" not in names and "boleinfer/trace.html" in names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "boleinfer").rglob("*.py")}
    assert sources <= names, f"not listed in pyproject's packages: {sorted(sources - names)}"


def test_wheel_from_any_folder(wheel, tmp_path):
    python = environment(tmp_path / "env")
    pip("install", "--no-deps", wheel, python=python)
    assert str(tmp_path / "env") in run(python, "-c", FIND, cwd=tmp_path)
    command = python.parent / "boleinfer"
    assert run(command, "--version", cwd=tmp_path).startswith("boleinfer ")
    assert "qwen3_5_text" in run(command, "info", cwd=tmp_path)


def test_editable_install_from_any_folder(source, tmp_path):
    python = environment(tmp_path / "env")
    pip("install", "--no-deps", "--no-build-isolation", "--editable", source, python=python)
    assert str(source) in run(python, "-c", FIND, cwd=tmp_path)
    assert "qwen3_5_text" in run(python.parent / "boleinfer", "info", cwd=tmp_path)


def test_plain_checkout(source, tmp_path):
    python = environment(tmp_path / "env")
    assert str(source) in run(python, "-c", FIND, cwd=source)
    assert str(source) in run(python, "-c", FIND, cwd=tmp_path, path=[source])
    assert run(python, "cli.py", "--version", cwd=source).startswith("boleinfer ")
    assert "qwen3_5_text" in run(python, source / "cli.py", "info", cwd=tmp_path)
    assert "usage: boleinfer" in run(python, "cli.py", "--help", cwd=source)


def test_pytest_starts_from_the_root():
    collected = run(sys.executable, "-m", "pytest", "--collect-only", "tests/test_import_time.py", cwd=ROOT)
    assert "test_the_parser_needs_no_numpy" in collected


@pytest.mark.parametrize("kind", ["namespace", "regular"])
def test_nvidias_cuda_package_stays_importable(kind, source, tmp_path):
    """CuPy imports cuda.pathfinder; a folder cuda/ at the checkout's root must not hide it."""
    packages = tmp_path / "packages"
    (packages / "cuda" / "pathfinder").mkdir(parents=True)
    (packages / "cuda" / "pathfinder" / "__init__.py").write_text("here = 'nvidia'\n")
    if kind == "regular":
        (packages / "cuda" / "__init__.py").touch()
    (source / "cuda").mkdir(exist_ok=True)
    (source / "cuda" / "common.cuh").touch()
    code = "import boleinfer, boleinfer.cli, cuda.pathfinder; print(cuda.pathfinder.here)"
    assert run(sys.executable, "-c", code, cwd=source, path=[packages]) == "nvidia"
    assert run(sys.executable, "-c", code, cwd=tmp_path, path=[source, packages]) == "nvidia"
    run(sys.executable, "-m", "pytest", "--version", cwd=source, path=[packages])
    assert run(sys.executable, "cli.py", "--version", cwd=source, path=[packages]).startswith("boleinfer ")
