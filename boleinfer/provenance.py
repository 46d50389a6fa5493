"""Where a measurement comes from: machine, libraries, date, exact sources. Knows nothing of what was measured."""

from __future__ import annotations

import hashlib
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

import boleinfer
from boleinfer import device, driver, kernels, models, nvrtc

_SUFFIXES = {".py", ".cu", ".cuh"}


def provenance() -> dict[str, Any]:
    """What a result file says of its origin, as JSON can hold it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "boleinfer": boleinfer.__version__,
        "sources_sha256": sources_hash(),
        **cpu_machine(),
    }


def gpu_provenance() -> dict[str, Any]:
    """As `provenance`, and what it says of the current GPU and of what drives it. Raises ToolchainError without one."""
    kernels.usable()
    runtime, said = device.cupy().cuda.runtime, driver.ask()
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        **provenance(),
        "gpu": properties["name"].decode(),
        "gpu_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "driver": said.version if said is not None else "",
        "cuda": _dotted(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc.toolchain().version)),
        "cuda_of_driver": _dotted(runtime.driverGetVersion()),
        "cupy": device.cupy().__version__,
    }


def cpu_machine() -> dict[str, Any]:
    """What of this machine decides how long NumPy takes."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": {
            k: v for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if (v := os.environ.get(k))
        },
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_name(),
    }


def gpu_machine() -> dict[str, Any]:
    """What of this machine decides how long the current GPU takes."""
    runtime = device.cupy().cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    kernel_driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": properties["name"].decode(),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "driver": kernel_driver.read_text(encoding="utf-8") if kernel_driver.is_file() else "",
        "cuda": [runtime.runtimeGetVersion(), runtime.driverGetVersion(), nvrtc.toolchain().version],
    }


def _dotted(version: int) -> str:
    """CUDA's 13020 is 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


def sources_hash() -> str:
    """SHA-256 over the names and contents of everything that computes: boleinfer/, models/*.py and cuda/."""
    package = Path(boleinfer.__file__).parent
    folders = {"boleinfer": package, "models": Path(models.__file__).parent}
    folders["cuda"] = next((p for p in (package / "cuda", package.parent / "cuda") if p.is_dir()), package / "cuda")
    digest = hashlib.sha256()
    for name, folder in folders.items():
        for file in sorted(f for f in folder.rglob("*") if f.suffix in _SUFFIXES):
            where = f"{name}/{file.relative_to(folder).as_posix()}"
            if name == "boleinfer" and where.split("/")[1] in ("models", "cuda"):
                continue  # an installed package holds the other two folders inside this one
            digest.update(f"{where}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def blas_name() -> str:
    """Name and version of the BLAS that NumPy was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
