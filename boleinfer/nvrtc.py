"""Compiles a .cu file with NVRTC, for any architecture and without a GPU, and keeps the result on disk. Knows no array.

CuPy's own compile path would ask the driver, and cannot do sm_90a.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from boleinfer import driver
from boleinfer.declaration import Constant, KernelError, KernelFile
from boleinfer.files import write_whole
from boleinfer.nvrtc_library import NvrtcError, library

OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v")
_SHOWN = 20  # error messages of one compilation


class ToolchainError(KernelError):
    """CuPy, NVRTC, the CUDA headers, the driver or the GPU is missing or does not fit; the message says what to do."""


class Toolchain(NamedTuple):
    """What compiles: NVRTC's version, the folder of CUDA's headers, their version, architectures that NVRTC knows."""

    version: tuple[int, int]
    headers: Path
    headers_version: tuple[int, int]
    archs: tuple[int, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """What only some versions know: a cache of NVRTC's own, which would answer without a log, is not for use."""
        return ("--no-cache",) if self.version >= (12, 9) else ()

    def check_arch(self, arch: str) -> None:
        """Raises ToolchainError for an architecture that this NVRTC cannot compile for."""
        if not (match := re.fullmatch(r"(\d+)[af]?", arch)) or int(match[1]) not in self.archs:
            known = ", ".join(map(str, self.archs))
            raise ToolchainError(
                f"NVRTC {_dotted(self.version)} cannot compile for sm_{arch}; it knows {known}. For a newer GPU "
                f"install a newer one: pip install -U 'cuda-toolkit[nvrtc,cudart]'"
            )


class Built(NamedTuple):
    """A compiled file and what the compiler said about registers, memory and warnings."""

    cubin: bytes
    log: str


@dataclass(frozen=True)
class Job:
    """Everything that a compilation depends on, and how to name it in messages."""

    file: str
    text: str
    includes: tuple[str, ...]
    arch: str
    sizes: str

    @property
    def title(self) -> str:
        return f"{self.file} for sm_{self.arch}" + (f" with {self.sizes}" if self.sizes else "")


@functools.cache
def toolchain() -> Toolchain:
    """Finds CuPy, NVRTC and the CUDA headers. Raises ToolchainError with the pip command for what is not there."""
    try:
        from cupy.cuda import driver as cuda_driver
    except ImportError as error:
        raise ToolchainError(cupy_missing(error)) from error
    extra = f"cuda{cuda_driver.get_build_version() // 1000}"
    remedy = f"install it with: pip install 'boleinfer[{extra}]'"
    try:
        version, archs = library().version(), library().archs()
    except Exception as error:  # various kinds when the library cannot be found or loaded
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(": ")  # folder listings follow
        raise ToolchainError(f"the CUDA compiler NVRTC cannot be loaded ({reason}); {remedy}") from error
    folder = _find_headers()
    if folder is None:
        raise ToolchainError(
            f"the CUDA headers are missing (cuda_runtime_api.h in site-packages or under CUDA_PATH); {remedy}"
        )
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", (folder / "cuda_runtime_api.h").read_text(errors="replace"))
    headers_version = (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else (0, 0)
    if headers_version[0] != version[0]:
        raise ToolchainError(
            f"the CUDA headers in {folder} are of CUDA {_dotted(headers_version)}, but NVRTC is of "
            f"{_dotted(version)}; {remedy}"
        )
    return Toolchain(version, folder, headers_version, archs)


def cupy_missing(error: ImportError) -> str:
    """What to tell someone whose CuPy cannot be imported: the command for the driver that is here."""
    found = driver.ask()
    if found is not None and not found.extra:
        remedy = f"update the NVIDIA driver ({found.version}) to 580 or newer, then pip install 'boleinfer[cuda13]'"
    elif found is not None:
        remedy = f"install it with: {driver.install_command()}"
    else:
        remedy = (
            "install it with: pip install 'boleinfer[cuda13]' (driver 580 or newer; for older ones 'boleinfer[cuda12]')"
        )
    return f"the GPU needs CuPy, which cannot be imported ({error}); {remedy}"


def _find_headers() -> Path | None:
    """The folder with CUDA's headers: NVIDIA's wheels first, then conda, CUDA_PATH or CUDA_HOME, then the system."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    try:
        found = find_nvidia_header_directory("cudart")
    except Exception:  # a broken CUDA_PATH, or CUDA_PATH and CUDA_HOME that differ
        found = None
    return Path(found) if found and (Path(found) / "cuda_runtime_api.h").is_file() else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# ---- compiling -------------------------------------------------------------------------------------------------------


def job(source: KernelFile, constants: Mapping[str, Constant], arch: str, common: Path) -> Job:
    """What to compile: the constants as a prelude, then the file. `common` is the folder of the shared headers.

    Raises KernelError when the file is not for this architecture.
    """
    target = source.target(arch)
    if target is None:
        raise KernelError(
            f"{source.path.name} runs on {', '.join('sm_' + a for a in source.archs)} only (`// arch:` in the file), "
            f"not on sm_{arch}; choose another kernel there"
        )
    sizes = " ".join(f"{name}={_written(value)}" for name, value in constants.items())
    text = f'{prelude(constants)}#line 1 "{source.path.name}"\n{source.text}'
    return Job(source.path.name, text, (str(common),), target, sizes)


def prelude(constants: Mapping[str, Constant]) -> str:
    """The lines before the file's own: shared types, then the constants. Macros would rewrite CUDA's headers."""
    lines = ['#include "common.cuh"']
    for name, value in constants.items():
        if isinstance(value, str):
            lines.append(f"using {name} = {value};")
        else:
            kind = "bool" if isinstance(value, bool) else "int" if abs(value) < 2**31 else "long long"
            lines.append(f"constexpr {kind} {name} = {_written(value)};")
    return "\n".join(lines) + "\n"


def _written(value: Constant) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def compile_job(job: Job, tools: Toolchain) -> Built:
    """Runs NVRTC. Raises KernelError with file, line and message of each error."""
    options = (*OPTIONS, *tools.options, f"-arch=sm_{job.arch}", *(f"-I{f}" for f in (*job.includes, tools.headers)))
    try:
        return Built(*library().compile(job.text, job.file, options))
    except NvrtcError as error:
        shown = errors_of(error.log) or f"{error.log.strip()} ({error})"
        raise KernelError(f"{job.title} does not compile:\n{shown}") from error


def errors_of(log: str) -> str:
    """The errors in a compiler's log, as `file:line: error: message` with the source line; no warnings."""
    blocks = re.split(r"\n(?=\S.*?\(\d+\): )|\n\s*\n", log)
    found = [
        re.sub(r"^(\S.*?)\((\d+)\): ", r"\1:\2: ", block.strip("\n"))
        for block in blocks
        if re.match(r"\S.*?\(\d+\): (catastrophic )?error", block)
    ]
    more = f"\nand {len(found) - _SHOWN} more errors" if len(found) > _SHOWN else ""
    return "\n".join(found[:_SHOWN]) + more


def find(job: Job, cache: Cache) -> Built | None:
    """The compiled job where the cache has it. Raises as `toolchain` does."""
    tools = toolchain()
    tools.check_arch(job.arch)
    return cache.get(cache_key(job, tools))


def build(job: Job, cache: Cache) -> Built:
    """The compiled job: from the cache, or compiled and put there. Raises as `toolchain` and `compile_job` do."""
    if (built := find(job, cache)) is None:
        built = compile_job(job, toolchain())
        cache.put(cache_key(job, toolchain()), built)
    return built


# ---- compiling side by side ------------------------------------------------------------------------------------------


class Builds:
    """Jobs that are compiled side by side in threads, each once; at the end of a `with` what has not begun is left.

    threads: as many as cores when None"""

    def __init__(self, cache: Cache, threads: int | None = None) -> None:
        self._cache, self._pool = cache, ThreadPoolExecutor(threads or os.cpu_count() or 1)
        self._begun: dict[Job, Future[Built]] = {}

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __bool__(self) -> bool:
        """Whether any has begun."""
        return bool(self._begun)

    def __contains__(self, job: Job) -> bool:
        """Whether it has begun."""
        return job in self._begun

    def begin(self, job: Job) -> None:
        """Compiles it as soon as a thread is free."""
        if job not in self._begun:
            self._begun[job] = self._pool.submit(compile_job, job, toolchain())

    def results(self) -> dict[Job, Built | KernelError]:
        """What has become of each, when all are done; what compiled is in the cache."""
        found: dict[Job, Built | KernelError] = {}
        for job, future in self._begun.items():
            try:
                found[job] = built = future.result()
                self._cache.put(cache_key(job, toolchain()), built)
            except KernelError as error:
                found[job] = error
        return found


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_key(job: Job, tools: Toolchain) -> str:
    """A hash of all that decides the result: text with prelude, included files, options, architecture, CUDA version."""
    parts = [job.text, job.arch, *OPTIONS, _dotted(tools.version), _dotted(tools.headers_version)]
    parts += [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in included(job)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def included(job: Job) -> list[Path]:
    """The files of the include folders that the text includes, directly or through one another, in order."""
    found: dict[Path, None] = {}
    texts = [job.text]
    while texts:
        for name in re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', texts.pop(), re.M):
            paths = [p for folder in job.includes if (p := Path(folder) / name).is_file() and p not in found]
            for path in paths[:1]:
                found[path] = None
                texts.append(path.read_text(encoding="utf-8"))
    return list(found)


class Cache:
    """Compiled files in a folder, one file each: a checksum, the length of the log, the log, the cubin.

    Several processes may use one folder: a file appears whole or not at all, and one that was damaged is made again.
    A folder that cannot be written is given up with one warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writable = True

    def get(self, key: str) -> Built | None:
        """What `put` stored under the key; None when it is missing, unreadable or damaged."""
        try:
            data = self._file(key).read_bytes()
        except OSError:
            return None
        digest, payload = data[:32], data[32:]
        if len(payload) < 8 or hashlib.sha256(key.encode() + payload).digest() != digest:
            return None
        cut = 8 + int.from_bytes(payload[:8], "little")
        return Built(payload[cut:], payload[8:cut].decode())

    def put(self, key: str, built: Built) -> None:
        """Stores it; warns, once, when the folder cannot be written or is full."""
        if not self._writable:
            return
        log = built.log.encode()
        payload = len(log).to_bytes(8, "little") + log + built.cubin
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(key), hashlib.sha256(key.encode() + payload).digest() + payload)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"compiled kernels cannot be kept in {self.folder} ({error}), so every start compiles them again; "
                "set BOLEINFER_CACHE to a folder that can be written",
                stacklevel=2,
            )

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"


@functools.cache
def default_cache() -> Cache:
    """$BOLEINFER_CACHE/kernels, else $XDG_CACHE_HOME/boleinfer/kernels, else ~/.cache/boleinfer/kernels."""
    if own := os.environ.get("BOLEINFER_CACHE"):
        return Cache(Path(own).expanduser() / "kernels")
    # a relative XDG_CACHE_HOME is to be ignored; ~ stays as it is without a home; os.devnull makes `put` warn
    places = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"), os.devnull)
    base = next(place for place in places if os.path.isabs(place))
    return Cache(Path(base) / "boleinfer" / "kernels")
