"""What is said where CuPy, the driver or the GPU is missing or too old; and that nothing needs them before a launch."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from boleinfer import kernels, nvrtc
from boleinfer.kernels import ToolchainError, launch

ROOT = Path(__file__).resolve().parent.parent


def test_without_cupy_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    kernels.open_gpu.cache_clear()
    with pytest.raises(ToolchainError, match=re.escape("pip install 'boleinfer[cuda13]'")):
        launch("rms_norm.cu", "rms_norm", 1, 32, {}, constants={"Act": "float"})


def test_importing_kernels_needs_no_cupy():
    code = "import sys, boleinfer.kernels, boleinfer.kernel_report; print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def fake_cupy(driver, devices, capability="90"):
    """A cupy module with a driver of that version, and a number of devices or the error that counting them gives."""

    class CUDARuntimeError(RuntimeError):
        pass

    def count():
        if isinstance(devices, str):
            raise CUDARuntimeError(devices)
        return devices

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=count, driverGetVersion=lambda: driver)
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(get_build_version=lambda: 13020),
        Device=lambda number: SimpleNamespace(compute_capability=capability),
    )
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize(
    "driver, devices, message",
    [
        (
            0,
            "cudaErrorInsufficientDriver",
            "there is no NVIDIA driver (cudaErrorInsufficientDriver); install one, or run on",
        ),
        (
            12040,
            "cudaErrorInsufficientDriver",
            "driver knows CUDA 12.4, and this CuPy is for CUDA 13 (cudaErrorInsuffi",
        ),
        (12040, "cudaErrorInsufficientDriver", "pip uninstall cupy-cuda13x, then pip install 'boleinfer[cuda12]'"),
        (13000, "cudaErrorNoDevice", "no GPU is visible to CUDA (cudaErrorNoDevice); look at nvidia-smi and CUDA_VIS"),
        (13000, 0, "no GPU is visible to CUDA (0 devices)"),
    ],
)
def test_f51_no_driver_an_old_one_and_no_gpu_are_told_apart(monkeypatch, driver, devices, message):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(driver, devices))
    with pytest.raises(ToolchainError, match=re.escape(message)):
        kernels.Gpu()


def test_f51_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000, 1))
    assert kernels.Gpu().arch(0) == "90"
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000, 1, "75"))
    with pytest.raises(ToolchainError, match=r"GPU 0 is of architecture 75; the kernels need 80 \(Ampere\)"):
        kernels.Gpu().arch(0)


def test_f51_usable_means_that_kernels_can_be_compiled_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(13000, 1))
    monkeypatch.setattr(kernels, "open_gpu", kernels.Gpu)
    monkeypatch.setattr(kernels.Gpu, "device", lambda self: 0)
    tools = nvrtc.Toolchain((13, 0), Path("/headers"), (13, 0), (80, 90))
    monkeypatch.setattr(nvrtc, "toolchain", lambda: tools)
    assert kernels.usable() == "90"
    monkeypatch.setattr(nvrtc, "toolchain", lambda: tools._replace(archs=(80,)))
    with pytest.raises(ToolchainError, match="cannot compile for sm_90"):
        kernels.usable()
