"""`boleinfer doctor` finds each thing that keeps the GPU from being used and says what to do about it (F51)."""

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from boleinfer import backend, cli, cublas, device, doctor, driver, kernels, nvrtc
from boleinfer.driver import Driver
from boleinfer.nvrtc import Toolchain, ToolchainError
from tests import emulator
from tests.emulator import emulated

GIB = 1 << 30
HEADERS = "/usr/include"


class CUDARuntimeError(RuntimeError):
    pass


class Fake:
    """A machine whose parts can be broken one by one: driver, CuPy, GPUs, compiler."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.smi = Driver("580.65.06", 13, ("NVIDIA H200",))
        self.knows, self.built, self.version = 13000, 13020, "14.2.0"
        self.gpus = [("NVIDIA H200", 9, 0, 141 * GIB)]
        self.count_error = ""
        self.free = (140 * GIB, 141 * GIB)
        self.packages = ["cupy-cuda13x"]
        self.tools = Toolchain((13, 0), HEADERS, (13, 0), (80, 89, 90, 100))
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: self.knows,
            getDeviceCount=self.count,
            getDevice=lambda: 0,
            getDeviceProperties=self.properties,
            memGetInfo=self.memory,
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(get_build_version=lambda: self.built),
            Device=lambda i: SimpleNamespace(compute_capability="{1}{2}".format(*self.gpus[i])),
        )
        pool = SimpleNamespace(free_all_blocks=lambda: None)
        self.cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool, ndarray=dict)
        monkeypatch.setattr(device, "cupy", self.open_cupy)
        monkeypatch.setattr(driver, "ask", lambda: self.smi)
        monkeypatch.setattr(nvrtc, "toolchain", self.toolchain)
        monkeypatch.setattr(kernels, "open_gpu", kernels.Gpu)
        monkeypatch.setattr(doctor, "cupy_packages", lambda: self.packages)
        monkeypatch.setattr(doctor, "_self_test", lambda: doctor.Finding("self-test", "fine"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        monkeypatch.setattr(cublas, "library", lambda: object())

    def without_cupy(self):
        self.monkeypatch.setitem(sys.modules, "cupy", None)
        self.cupy = None

    def open_cupy(self):
        if self.cupy is None:
            raise ToolchainError("no CuPy")
        return self.cupy

    def count(self):
        if self.count_error:
            raise CUDARuntimeError(self.count_error)
        return len(self.gpus)

    def properties(self, i):
        name, major, minor, total = self.gpus[i]
        return {"name": name.encode(), "major": major, "minor": minor, "totalGlobalMem": total}

    def memory(self):
        if isinstance(self.free, str):
            raise CUDARuntimeError(self.free)
        return self.free

    def toolchain(self):
        if isinstance(self.tools, str):
            raise ToolchainError(self.tools)
        return self.tools

    def findings(self):
        if self.cupy is not None:
            self.cupy.__version__ = self.version
        return {f.check: f for f in doctor.examine()}

    def problems(self):
        return {name: f for name, f in self.findings().items() if not f.ok and f.needed}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "default_cache", lambda: nvrtc.Cache(tmp_path / "kernels"))
    return Fake(monkeypatch)


def test_a_machine_that_is_right(machine, capsys):
    found = machine.findings()
    assert machine.problems() == {}
    assert list(found) == [
        *("packages", "kernel cache", "NVIDIA driver", "CuPy", "GPU 0", "CUDA compiler", "cuBLAS", "GPU memory"),
        "self-test",
    ]
    assert found["NVIDIA driver"].found == "580.65.06, knows CUDA 13"
    assert found["CuPy"].found == "14.2.0 for CUDA 13"
    assert found["GPU 0"].found == "NVIDIA H200, sm_90, 141.0 GiB"
    assert HEADERS in found["CUDA compiler"].found
    assert found["GPU memory"].found == "140.0 GiB of 141.0 GiB free, enough for the bundled model"
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == len(found) + 1 and "PROBLEM" not in out and out.endswith("the GPU is ready\n")
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ready"] and [f["check"] for f in told["findings"]] == list(found)


def test_no_driver(machine):
    machine.smi, machine.knows, machine.count_error = None, 0, "cudaErrorInsufficientDriver"
    problems = machine.problems()
    assert list(problems) == ["NVIDIA driver"]
    assert "install the NVIDIA driver, 580 or newer" in problems["NVIDIA driver"].remedy


def test_a_driver_without_nvidia_smi(machine):
    machine.smi = None
    assert machine.problems() == {}
    assert machine.findings()["NVIDIA driver"].found == "knows CUDA 13.0; no nvidia-smi"


@pytest.mark.parametrize(
    ("smi", "command"),
    [
        (Driver("580.65", 13, ()), "pip install 'boleinfer[cuda13]'"),
        (Driver("590.1", 14, ()), "pip install 'boleinfer[cuda13]'"),
        (Driver("550.54", 12, ()), "pip install 'boleinfer[cuda12]'"),
        (None, "pip install 'boleinfer[cuda13]'"),
        (Driver("470.1", 11, ()), "update the NVIDIA driver to 580 or newer, then pip install 'boleinfer[cuda13]'"),
    ],
)
def test_cupy_missing(machine, smi, command):
    machine.smi, machine.packages = smi, []
    machine.without_cupy()
    assert machine.problems()["CuPy"].remedy == command


def test_cupy_that_cannot_be_imported_is_installed_again(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert machine.problems()["CuPy"].remedy == "pip uninstall -y cupy-cuda13x, then pip install 'boleinfer[cuda13]'"


def test_a_driver_too_old_for_this_cupy(machine):
    machine.smi, machine.knows, machine.count_error = (
        Driver("550.54", 12, ("L4",)),
        12040,
        "cudaErrorInsufficientDriver",
    )
    problems = machine.problems()
    assert list(problems) == ["CuPy"]
    assert problems["CuPy"].found == "14.2.0 for CUDA 13, and the driver knows CUDA 12 only"
    assert problems["CuPy"].remedy == (
        "update the NVIDIA driver to 580 or newer, "
        "or: pip uninstall -y cupy-cuda13x, then pip install 'boleinfer[cuda12]'"
    )


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"built": 11080, "packages": ["cupy-cuda11x"]}, "for CUDA 11 does not fit"),
        ({"version": "13.6.0"}, "13.6.0 for CUDA 13 is too old"),
        ({"packages": ["cupy-cuda12x", "cupy-cuda13x"]}, "several are installed.*cupy-cuda12x, cupy-cuda13x"),
    ],
)
def test_the_wrong_cupy(machine, changed, found):
    vars(machine).update(changed)
    problem = machine.problems()["CuPy"]
    assert re.search(found, problem.found)
    assert problem.remedy == f"pip uninstall -y {' '.join(machine.packages)}, then pip install 'boleinfer[cuda13]'"


def test_no_gpu_is_visible(machine, monkeypatch):
    machine.gpus = []
    assert "nvidia-smi -L" in machine.problems()["GPU"].remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert machine.problems()["GPU"].remedy.startswith("CUDA_VISIBLE_DEVICES is '7': unset it")
    machine.count_error = "cudaErrorSystemNotReady: system not yet initialized"
    assert "cudaErrorSystemNotReady" in machine.problems()["GPU"].found


def test_a_gpu_that_is_too_old(machine):
    machine.gpus = [("Tesla T4", 7, 5, 16 * GIB)]
    problems = machine.problems()
    assert list(problems) == ["GPU 0"] and problems["GPU 0"].found == "Tesla T4, sm_75, 16.0 GiB: too old"
    assert problems["GPU 0"].remedy == "sm_80 (Ampere) or newer is needed; use the CPU"
    machine.gpus.append(("RTX 4090", 8, 9, 24 * GIB))
    assert machine.problems()["GPU 0"].remedy == "set CUDA_VISIBLE_DEVICES=1"
    machine.gpus.reverse()
    assert machine.problems() == {} and not machine.findings()["GPU 1"].ok


def test_headers_missing_or_a_gpu_that_the_compiler_does_not_know(machine):
    machine.tools = (
        "the CUDA headers are missing (cuda_runtime_api.h ...); install it with: pip install 'boleinfer[cuda13]'"
    )
    problem = machine.problems()["CUDA compiler"]
    assert problem.remedy == "install it with: pip install 'boleinfer[cuda13]'" and "headers" in problem.found
    machine.tools = Toolchain((12, 9), HEADERS, (12, 9), (80, 90))
    machine.gpus = [("B200", 10, 0, 180 * GIB)]
    problem = machine.problems()["CUDA compiler"]
    assert (
        "cannot compile for sm_100" in problem.found and "pip install -U 'cuda-toolkit[nvrtc,cudart]'" in problem.remedy
    )


@pytest.mark.parametrize("free", [(300 << 20, 24 * GIB), "cudaErrorMemoryAllocation: out of memory"])
def test_out_of_memory(machine, free):
    machine.free = free
    problem = machine.problems()["GPU memory"]
    assert "nvidia-smi" in problem.remedy
    assert "300.0 MiB of 24.0 GiB free" in problem.found or "out of memory" in problem.found


def test_a_cache_that_cannot_be_written_is_a_note(machine, monkeypatch, capsys):
    monkeypatch.setattr(nvrtc, "default_cache", lambda: nvrtc.Cache(Path(os.devnull) / "x"))
    finding = machine.findings()["kernel cache"]
    assert not finding.ok and not finding.needed and "BOLEINFER_CACHE" in finding.remedy
    assert cli.main(["doctor"]) == 0
    assert "note     kernel cache" in capsys.readouterr().out


def test_the_cache_is_measured(machine, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cubin").write_bytes(bytes(3 << 20))
    assert machine.findings()["kernel cache"].found.endswith("1 compiled files, 3.0 MiB")


def test_packages_that_are_missing(machine, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "tokenizers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.problems()["packages"].remedy == "pip install tokenizers"


def test_problems_are_status_1_and_the_cpu_is_named(machine, capsys):
    machine.without_cupy()
    machine.packages = []
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  CuPy" in out and "-> pip install 'boleinfer[cuda13]'" in out
    assert "The CPU backend works regardless" in out.splitlines()[-1]
    assert cli.main(["doctor", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ready"]


def test_the_self_test_runs_a_kernel(monkeypatch):
    if problem := emulator.missing():
        pytest.skip(problem)
    monkeypatch.setattr(doctor, "_TIMED_BYTES", 4 * 8192)
    with emulated():
        finding = doctor._self_test()
        assert finding.ok and "rms_norm is right" in finding.found and "GB/s" in finding.found
        monkeypatch.setattr(device, "download", lambda array: array.get() + 1)
        assert "wrong by" in doctor._self_test().found

    def refuses(*arguments):
        raise kernels.KernelError("CUDA refuses the launch\nmore")

    monkeypatch.setattr(device, "upload", refuses)
    finding = doctor._self_test()
    assert not finding.ok and finding.found == "KernelError: CUDA refuses the launch"


# ---- what nvidia-smi says --------------------------------------------------------------------------------------------

HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |
"""


@pytest.mark.parametrize(
    ("listed", "said", "expected"),
    [
        ("580.65.06, NVIDIA H200\n580.65.06, NVIDIA H200\n", HEAD, ("580.65.06", 13, 2, "cuda13")),
        ("550.54.14, L4\n", HEAD.replace("13.0", "12.4"), ("550.54.14", 12, 1, "cuda12")),
        ("600.1, B300\n", "| Driver Version: 600.1  CUDA UMD Version: 14.1 |", ("600.1", 14, 1, "cuda13")),
        ("535.1, A100\n", "", ("535.1", 12, 1, "cuda12")),
        ("580.1, A100\n", "", ("580.1", 13, 1, "cuda13")),
        ("470.1, V100\n", "", ("470.1", 11, 1, "")),
        ("No devices were found\n", HEAD, ("580.65.06", 13, 0, "cuda13")),
    ],
)
def test_nvidia_smi(monkeypatch, tmp_path, listed, said, expected):
    (tmp_path / "listed").write_text(listed)
    (tmp_path / "said").write_text(said)
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\nif [ -n "$1" ]; then cat {tmp_path}/listed; else cat {tmp_path}/said; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver.ask.cache_clear()
    try:
        found = driver.ask()
        assert (found.version, found.cuda, len(found.gpus), found.extra) == expected
        if found.extra:
            assert driver.install_command() == f"pip install 'boleinfer[{found.extra}]'"
    finally:
        driver.ask.cache_clear()


def test_nvidia_smi_without_a_driver(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it could not talk to the driver\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver.ask.cache_clear()
    try:
        assert driver.ask() is None
    finally:
        driver.ask.cache_clear()


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    kernels.open_gpu.cache_clear()


@pytest.mark.parametrize(("version", "cuda"), [("580.65.06", 13), ("550.54", 12)])
def test_auto_says_once_what_to_install(monkeypatch, no_cupy, version, cuda):
    monkeypatch.setattr(driver, "ask", lambda: Driver(version, cuda, ("L4",)))
    with pytest.warns(UserWarning) as warned:
        assert backend.choose_device("auto") is False
    (warning,) = warned
    assert f"pip install 'boleinfer[cuda{cuda}]'" in str(warning.message)
    assert str(warning.message).count("pip install") == 1


@pytest.mark.filterwarnings("error")
def test_auto_is_quiet_without_a_gpu(monkeypatch, no_cupy):
    monkeypatch.setattr(driver, "ask", lambda: None)
    assert backend.choose_device("auto") is False
    assert backend.choose_device("cpu") is False


def test_auto_warns_where_kernels_cannot_be_compiled(machine):
    machine.tools = "the CUDA headers are missing; install it with: pip install 'boleinfer[cuda13]'"
    with pytest.warns(UserWarning, match="not used: the CUDA headers are missing"):
        assert backend.choose_device("auto") is False
    with pytest.raises(ToolchainError):
        backend.choose_device("cuda")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "-q"]])
def test_asking_for_cuda_without_it_is_a_mistake_not_a_traceback(monkeypatch, no_cupy, capsys, command):
    monkeypatch.setattr(driver, "ask", lambda: None)
    assert cli.main([*command, "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("boleinfer: the GPU needs CuPy") and "Traceback" not in err
    assert "pip install 'boleinfer[cuda13]'" in err
