"""`boleinfer doctor`: whether the GPU can be used here, piece by piece, and what to do about each that is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from boleinfer import backend, cublas, device, driver, kernels, memory_plan, nvrtc
from boleinfer.config import ConfigError, read_config
from boleinfer.memory_plan import size
from boleinfer.ops import norms, relative_error

_OLDEST_CUPY = 14
_TIMED_BYTES, _TIMED_RUNS = 512 << 20, 20
_PACKAGES = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "huggingface_hub", "jinja2")
_UPDATE = "update the NVIDIA driver to 580 or newer"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    found:  what is there, or what is wrong
    remedy: what to do; "" when it is right
    needed: whether the GPU cannot be used without it
    """

    check: str
    found: str
    remedy: str = ""
    needed: bool = True

    @property
    def ok(self) -> bool:
        return not self.remedy


def doctor(as_json: bool = False) -> int:
    """Exit status of the command: 0 when the GPU can be used, 1 when not."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            verdict = "ok" if finding.ok else "PROBLEM" if finding.needed else "note"
            print(f"{verdict:<8} {finding.check:<14} {finding.found}", flush=True)
            if finding.remedy:
                print(f"{'':<8} {'':<14} -> {finding.remedy}")
    wrong = sum(f.needed and not f.ok for f in findings)
    if as_json:
        print(json.dumps({"ready": not wrong, "findings": [{**asdict(f), "ok": f.ok} for f in findings]}))
    elif wrong:
        problems = "1 problem" if wrong == 1 else f"{wrong} problems"
        print(f"the GPU cannot be used: {problems}. The CPU backend works regardless (--device cpu)")
    else:
        print("the GPU is ready")
    return 1 if wrong else 0


def examine() -> Iterator[Finding]:
    """Looks at one thing after the other; what cannot be looked at without an earlier one is left out."""
    yield _packages()
    yield _cache()
    yield (there := _driver())
    yield (usable := _cupy())
    if not usable.ok:
        return
    if there.ok:
        gpus = list(_gpus())
        yield from gpus
        there = gpus[0]
    yield (compiler := _compiler(there.ok))
    yield _cublas()
    if not there.ok:
        return
    yield (memory := _memory())
    if compiler.ok and memory.ok:
        yield _self_test()


# ---- without a GPU ---------------------------------------------------------------------------------------------------


def _packages() -> Finding:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding("packages", ", ".join(found))


def _cache() -> Finding:
    """Whether compiled kernels can be kept, and how much is kept."""
    folder = nvrtc.default_cache().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-"):
            pass
        files = list(folder.glob("*.cubin"))
        kept = sum(f.stat().st_size for f in files)
    except OSError as error:
        remedy = "set BOLEINFER_CACHE to a folder that can be written"
        return Finding("kernel cache", f"{folder} cannot be written, so every start compiles ({error})", remedy, False)
    return Finding("kernel cache", f"{folder}, {len(files)} compiled files, {size(kept)}")


def _driver() -> Finding:
    found = driver.ask()
    if found is None:
        version = _driver_by_cupy()
        if not version:
            remedy = "install the NVIDIA driver, 580 or newer (in a container: start it with --gpus all)"
            return Finding("NVIDIA driver", "there is none: nvidia-smi is missing or finds no driver", remedy)
        return Finding("NVIDIA driver", f"knows CUDA {version // 1000}.{version % 1000 // 10}; no nvidia-smi")
    if not found.extra:
        return Finding("NVIDIA driver", f"{found.version} knows CUDA {found.cuda}, which is too old", _UPDATE)
    return Finding("NVIDIA driver", f"{found.version}, knows CUDA {found.cuda}")


def _driver_by_cupy() -> int:
    """The CUDA version of the driver as CuPy sees it, 13020 for 13.2; 0 where there is neither."""
    try:
        return int(device.cupy().cuda.runtime.driverGetVersion())
    except Exception:  # no CuPy, or CuPy's error of no driver
        return 0


def _cupy() -> Finding:
    """CuPy itself, and whether it is for a CUDA that the driver knows."""
    install = driver.install_command() or f"{_UPDATE}, then pip install 'boleinfer[cuda13]'"
    packages = cupy_packages()
    remove = f"pip uninstall -y {' '.join(packages)}, then {install}"
    if len(packages) > 1:
        return Finding("CuPy", f"several are installed, of which one breaks the other: {', '.join(packages)}", remove)
    try:
        import cupy

        built, version = int(cupy.cuda.driver.get_build_version()), str(cupy.__version__)
    except Exception as error:  # a broken CuPy raises more than ImportError
        reason = next((line for line in str(error).splitlines() if line.strip(" =*")), type(error).__name__)
        return Finding("CuPy", f"cannot be imported ({reason.strip()})", remove if packages else install)
    what = f"{version} for CUDA {built // 1000}"
    if int(re.match(r"\d*", version)[0] or 0) < _OLDEST_CUPY:  # type: ignore[index]
        return Finding("CuPy", f"{what} is too old", remove)
    if built // 1000 not in (12, 13) or getattr(cupy.cuda.runtime, "is_hip", False):
        return Finding("CuPy", f"{what} does not fit", remove)
    found, knows = driver.ask(), _driver_by_cupy() // 1000
    knows = knows or (found.cuda if found is not None else 0)
    if knows and knows < built // 1000:
        return Finding("CuPy", f"{what}, and the driver knows CUDA {knows} only", f"{_UPDATE}, or: {remove}")
    return Finding("CuPy", what)


def cupy_packages() -> list[str]:
    """The installed packages that bring a module `cupy`."""
    names = {str(d.metadata["Name"]).lower() for d in importlib.metadata.distributions()}
    return sorted(n for n in names if re.fullmatch(r"cupy(-cuda\d+x|-rocm[\d-]+)?", n))


def _compiler(gpu: bool) -> Finding:
    try:
        tools = nvrtc.toolchain()
        if gpu:
            tools.check_arch(kernels.open_gpu().arch(kernels.open_gpu().device()))
    except nvrtc.ToolchainError as error:
        return _from("CUDA compiler", error)
    version, headers = (".".join(map(str, v)) for v in (tools.version, tools.headers_version))
    return Finding("CUDA compiler", f"NVRTC {version}, headers {headers} in {tools.headers}")


def _cublas() -> Finding:
    if cublas.library() is None:
        return Finding("cuBLAS", "not installed; boleinfer's own kernels are used, long prompts are read slower")
    return Finding("cuBLAS", "there; used for long prompts")


# ---- with one --------------------------------------------------------------------------------------------------------


def _gpus() -> Iterator[Finding]:
    """A finding for each GPU; the first is the one that would be used, and alone has to do."""
    runtime = device.cupy().cuda.runtime
    try:
        count, reason = int(runtime.getDeviceCount()), "none is visible to CUDA"
    except Exception as error:  # CuPy's error, whose class is its own
        count, reason = 0, str(error)
    if not count:
        yield Finding("GPU", reason, _why_invisible())
        return
    properties = [runtime.getDeviceProperties(i) for i in range(count)]
    archs = [10 * int(p["major"]) + int(p["minor"]) for p in properties]
    able = next((i for i, arch in enumerate(archs) if arch >= kernels.OLDEST), None)
    for i, (p, arch) in enumerate(zip(properties, archs)):
        name = p["name"].decode() if isinstance(p["name"], bytes) else str(p["name"])
        what = f"{name}, sm_{arch}, {size(int(p['totalGlobalMem']))}"
        if arch >= kernels.OLDEST:
            yield Finding(f"GPU {i}", what)
        elif able is None:
            yield Finding(f"GPU {i}", f"{what}: too old", "sm_80 (Ampere) or newer is needed; use the CPU", i == 0)
        else:
            yield Finding(f"GPU {i}", f"{what}: too old", f"set CUDA_VISIBLE_DEVICES={able}", i == 0)


def _why_invisible() -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return f"CUDA_VISIBLE_DEVICES is {chosen!r}: unset it, or give the number of a GPU that nvidia-smi -L lists"
    return "look whether nvidia-smi -L lists one; in a container: start it with --gpus all"


def _memory() -> Finding:
    """Whether the bundled model has room."""
    from boleinfer.llm import BUNDLED, GPU_ROWS, LONGEST_DEFAULT

    config = read_config(BUNDLED / "config.json")
    context = min(LONGEST_DEFAULT, config.max_position_embeddings)
    o = backend.Options(context, max_rows=GPU_ROWS)
    needed = backend.needs(config, backend.Source(BUNDLED), o, "auto", device.dtype("bf16"), True)
    remedy = "end what uses the GPU (nvidia-smi lists it), or choose another GPU with CUDA_VISIBLE_DEVICES"
    try:
        free, total = device.memory()
    except nvrtc.ToolchainError as error:
        return Finding("GPU memory", str(error), remedy)
    what = f"{size(free)} of {size(total)} free"
    try:
        memory_plan.fit(needed, o, free, total, True, True)
    except ConfigError:
        needs = memory_plan.plan(needed, o).total
        return Finding("GPU memory", f"{what}; the bundled model takes up to {size(needs)}", remedy)
    return Finding("GPU memory", f"{what}, enough for the bundled model")


def _self_test() -> Finding:
    """A kernel compiled, run and compared with its definition, and how fast memory is read."""
    rng, eps = np.random.default_rng(0), 1e-6
    x, w = rng.standard_normal((33, 320), np.float32), rng.standard_normal(320, np.float32)
    try:
        start = time.perf_counter()
        out = device.download(norms.rms_norm(device.upload(x), device.upload(w), eps))
        first_s = time.perf_counter() - start
        error = relative_error(out, norms.rms_norm(x.astype(np.float64), w.astype(np.float64), eps))
        if not error < 1e-6:
            return Finding("self-test", f"rms_norm is wrong by {error:.1e}", "run: boleinfer check --device cuda")
        rate = bytes_per_s(_TIMED_BYTES)
    except Exception as problem:  # whatever CUDA says is what has to be shown
        remedy = "run: boleinfer check --device cuda, and report what it says"
        return Finding("self-test", f"{type(problem).__name__}: {str(problem).splitlines()[0]}", remedy)
    return Finding(
        "self-test", f"rms_norm is right ({first_s:.2f} s with compiling); memory gives {rate / 1e9:.0f} GB/s"
    )


def bytes_per_s(nbytes: int) -> float:
    """Bytes that a kernel reads in a second, roughly, of an array of this size."""
    groups, blocks = max(1, nbytes // 16), min(2048, -(-nbytes // 4096))
    x, out = device.empty(4 * groups, np.uint32), device.empty(8 * blocks, np.uint32)
    device.fill(x, 0)

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            kernels.launch("read_bandwidth.cu", "read_bandwidth", blocks, 256, {"x": x, "out": out, "Groups": groups})
        device.download(out)  # waits
        return time.perf_counter() - start

    run(2)
    return _TIMED_RUNS * x.nbytes / run(_TIMED_RUNS)


def _from(check: str, error: Exception) -> Finding:
    """An error whose text ends in what to do, behind its last semicolon."""
    found, _, remedy = str(error).rpartition("; ")
    return Finding(check, found, remedy)
