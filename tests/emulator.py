"""Runs the kernels of cuda/ on the CPU: g++ compiles the same text, threads are fibers, memory is poisoned.

    from tests.emulator import emulated

    with emulated():                      # or emulated(order="reverse"), emulated(order="random", seed=3)
        x = device.upload(numpy_array)    # an EmulatedArray: device.on_gpu(x) is true
        out = rms_norm(x, w, 1e-6)        # device.empty and kernels.launch are the emulator's
        kernels.launch("rms_norm.cu", "rms_norm", R, 256, args, constants={"Act": "bf16"})   # or directly
    out.get()                             # a NumPy array

A launch is checked by the lines that check a real one. Blocks run one after another; in a block each warp runs as far
as it gets, in the given order. Found are wrong results, deadlocks, misaligned and wild accesses, indices outside arrays
of fixed size, writes beyond an array (guard zones) or beyond dynamic shared memory, reads of what was never written
(device.empty, shared memory, and until their wait the targets of cp_async16, load_tile and wgmma hold 0xff bytes: NaN,
-1), reads of what an earlier launch writes before the wait for it (after_previous), and races that another order of
threads shows. Not found is what depends on timing, on warps in lockstep, on registers and occupancy.
Compiled kernels are kept in $BOLEINFER_CACHE or the temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from boleinfer import device, kernels, nvrtc
from boleinfer.declaration import Constant, KernelError, KernelFile

FOLDER = Path(__file__).parent / "emulated"
ORDERS = ("forward", "reverse", "random")
_GUARD, _POISON = 4096, 0xFF  # bytes on both sides of an array
_SHARED = 227 * 1024  # dynamic shared memory of a block on an H200
_MEMORY = 141 << 30
_LATE, _HIDDEN = 6, 1 << 18  # launches that are not seen until a kernel waits for them, bytes of their arrays at most
_LOCK = threading.Lock()
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-w", "-DEMULATED"),
    *("-fvisibility=hidden", "-fno-gnu-unique"),  # each library's shared memory is its own
    *("-fno-strict-aliasing", "-fno-ipa-reference", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"),
    *("-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"),
)
_EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:alignas\([^)]*\)\s*|__align__\([^)]*\)\s*)?(?P<type>[\w:]+(?:\s+\w+)*?)\s+"
    r"(?:__align__\([^)]*\)\s*)?(?P<name>\w+)\s*\[\s*\]\s*;"
)


def missing() -> str:
    """Why nothing can be emulated here, "" where it can."""
    return "" if shutil.which("g++") else "g++ is not installed: the kernels were NOT run on the CPU"


class EmulatedArray(np.ndarray):
    """An array of the emulated GPU with what the program uses of CuPy's: views, get, set. Arithmetic is refused."""

    _block: np.ndarray | None = None  # the bytes of the allocation with its guard zones

    def __array_finalize__(self, other: Any) -> None:
        self._block = getattr(other, "_block", None)

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("NumPy arithmetic on an array of the (emulated) GPU; launch a kernel, or call .get() first")

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a NumPy function on an array of the (emulated) GPU; launch a kernel, or call .get() first")

    def get(self) -> np.ndarray:
        """A copy in host memory."""
        return np.array(self.view(np.ndarray))

    def set(self, array: np.ndarray) -> None:
        """Overwrites the contents."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype} {self.shape}, found {array.dtype} {array.shape}")
        self.view(np.ndarray)[...] = array

    def check_guards(self) -> bool:
        """Whether nothing was written just before or behind the allocation."""
        if self._block is None:
            return True
        size = self._block.size - 2 * _GUARD
        return bool((self._block[:_GUARD] == _POISON).all() and (self._block[_GUARD + size :] == _POISON).all())


def empty(shape: int | tuple[int, ...], dtype: Any) -> EmulatedArray:
    """An array full of 0xff bytes, at a multiple of 512."""
    kind = device.stored(dtype)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    raw = np.full(nbytes + 2 * _GUARD + 512, _POISON, np.uint8)
    skip = -(raw.ctypes.data + _GUARD) % 512
    block = raw[skip : skip + nbytes + 2 * _GUARD]
    array = block[_GUARD : _GUARD + nbytes].view(kind).reshape(shape).view(EmulatedArray)
    array._block = block
    return array


def upload(array: np.ndarray) -> EmulatedArray:
    """A copy on the emulated GPU."""
    host = np.asarray(array)
    out = empty(host.shape, host.dtype)
    out.view(np.ndarray)[...] = host.view(out.dtype)
    return out


class _Staging:
    """device.Staging, whose copies are done at once."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes, np.uint8)

    def view(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self._memory[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def copy_to(self, out: EmulatedArray) -> None:
        out.view(np.ndarray).reshape(-1).view(np.uint8)[...] = self._memory[: out.nbytes]

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def emulated(order: str = "forward", seed: int = 0) -> Iterator[None]:
    """Ops on arrays from device.upload and device.empty run their kernels on the CPU, threads in the given order."""
    gpu = _Gpu(ORDERS.index(order), seed)
    with (
        mock.patch.object(device, "empty", empty),
        mock.patch.object(device, "upload", upload),
        mock.patch.object(device, "download", lambda array: array.get()),
        mock.patch.object(device, "counters", gpu.counters),
        mock.patch.object(device, "memory", lambda: (_MEMORY, _MEMORY)),
        mock.patch.object(device, "pinned", lambda nbytes: np.empty(nbytes, np.uint8)),
        mock.patch.object(device, "Staging", _Staging),
        mock.patch.object(device, "current", lambda: 0),
        mock.patch.object(device, "use", lambda number: None),
        mock.patch.object(device, "shared_bytes", lambda: _SHARED),
        mock.patch.object(device, "multiprocessors", lambda: 3),
        mock.patch.object(device, "blocks_together", lambda: 1),  # they run one after another
        mock.patch.object(kernels, "open_gpu", lambda: gpu),
        mock.patch.object(kernels, "usable", lambda: "90"),
        mock.patch.object(kernels, "_module", _Module),
        mock.patch.object(kernels, "launch", functools.partial(_launch, kernels.launch, gpu)),
    ):
        yield


def _launch(
    launch: Any, gpu: _Gpu, file: str, name: str, grid: Any, block: Any, args: dict[str, Any], *rest: Any, **more: Any
) -> None:
    """kernels.launch, which takes a failure of the run for CUDA's: only what the emulator says is kept of it."""
    source = kernels.kernel_file(file)
    if name not in source.early:
        gpu.written.clear()  # it starts when all are done
    gpu.hide()
    try:
        launch(file, name, grid, block, args, *rest, **more)
    except KernelError as error:
        if isinstance(error.__cause__, KernelError):
            raise error.__cause__ from None
        raise
    if "after_all_previous()" in source.text:
        gpu.written.clear()  # those behind it start when all before it are done
    outputs = [args[p.name] for p in source.kernels[name] if p.writes and args[p.name] is not None]
    arrays = [array for out in outputs for array in (out if isinstance(out, (list, tuple)) else [out])]
    gpu.written.append(
        [_Written(a) for a in arrays if 0 < a.nbytes <= _HIDDEN and a.flags.c_contiguous and a._block is not None]
    )


class _Written:
    """Where a launch wrote; keeps nothing alive."""

    def __init__(self, array: EmulatedArray) -> None:
        self.start, self.nbytes, self.block = int(array.ctypes.data), array.nbytes, weakref.ref(array._block)


class _Gpu:
    """What kernels.launch asks of a GPU."""

    def __init__(self, order: int, seed: int) -> None:
        self.order, self.seed = order, seed
        self.given: list[EmulatedArray] = []  # arrays of the launch being checked
        self.written: deque[list[_Written]] = deque(maxlen=_LATE)  # by launches that may still run
        self._counters = empty(device.COUNTERS, np.int32)
        device.fill(self._counters, 0)

    def counters(self, needed: int) -> EmulatedArray:
        """As device.counters; found are kernels that leave anything but zeros."""
        assert needed <= device.COUNTERS and not self._counters.get().any()
        return self._counters

    def hide(self) -> None:
        """What launches wrote that may still run is not seen by the next one until it waits for them."""
        alive = {w: w.block() for made in self.written for w in made}
        arrays = {(w.start, w.nbytes) for w, block in alive.items() if block is not None}
        n = len(arrays)
        at = (ctypes.c_void_p * max(n, 1))(*(start for start, _ in arrays))
        sizes = (ctypes.c_ulong * max(n, 1))(*(nbytes for _, nbytes in arrays))
        _runtime().emulated_written(n, at, sizes)

    def device(self) -> int:
        self.given = []
        return 0

    def arch(self, device: int) -> str:
        return "90"

    def is_array(self, value: Any) -> bool:
        return isinstance(value, EmulatedArray)

    def device_of(self, array: EmulatedArray) -> int:
        return 0

    def address(self, array: EmulatedArray) -> int:
        self.given.append(array)
        return int(array.ctypes.data)

    def tensor_map(self, array: EmulatedArray, box: tuple[int, ...]) -> np.generic:
        """The TensorMap of emulated/emulated_tma.h."""
        words = np.zeros(16, np.int64)
        row_bytes, first = array.shape[-1] * array.itemsize, (1,) * (4 - array.ndim)
        words[:2] = array.ctypes.data, row_bytes
        words[2:5], words[5:8], words[8:11] = (first + array.shape)[:3], (first + array.strides)[:3], first + box
        return np.void(words.tobytes())


class _Module:
    """A file compiled for the CPU, in place of kernels._Module."""

    def __init__(self, gpu: _Gpu, device: int, source: KernelFile, constants: tuple[tuple[str, Constant], ...]) -> None:
        self.gpu, self.source = gpu, source
        self.library = _library(source, constants)

    def function(self, name: str, shared: int) -> Any:
        where = f"{self.source.path.name}: {name}"
        if shared > _SHARED:
            raise KernelError(
                f"{where} asks for {shared} bytes of dynamic shared memory; at most {_SHARED} are possible"
            )
        bound = re.search(rf"__launch_bounds__\((\d+)[^)]*\)\s*{name}\(", self.source.text)

        def run(
            grid: tuple[int, ...], block: tuple[int, ...], values: list[np.generic], nbytes: int, stream: Any
        ) -> None:
            if bound and int(np.prod(block)) > int(bound[1]):
                raise KernelError(
                    f"{where}: {int(np.prod(block))} threads, more than its __launch_bounds__ of {bound[1]}"
                )
            self._run(where, name, grid, block, values, nbytes)

        return run

    def _run(
        self,
        where: str,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: list[np.generic],
        nbytes: int,
    ) -> None:
        held = [np.array([value]) for value in values]
        addresses = (ctypes.c_void_p * max(len(held), 1))(*(value.ctypes.data for value in held))
        library = self.library
        begin, end = (ctypes.c_void_p(getattr(library, f"emulated_shared_{x}")()) for x in ("begin", "end"))
        function = ctypes.cast(getattr(library, f"run_{name}"), ctypes.c_void_p)
        three = ctypes.c_uint * 3
        with _LOCK:
            problem = _runtime().emulated_launch(
                function, addresses, three(*grid), three(*block), nbytes, begin, end, self.gpu.order, self.gpu.seed
            )
        if problem:
            raise KernelError(f"{where}: {problem.decode()}")
        for array in self.gpu.given:
            if not array.check_guards():
                raise KernelError(f"{where}: wrote outside an array of {array.dtype.name} {list(array.shape)}")
        self.gpu.given = []


# ---- compiling -------------------------------------------------------------------------------------------------------


def _cache() -> Path:
    own = os.environ.get("BOLEINFER_CACHE")
    return (
        Path(own).expanduser() / "emulated"
        if own
        else Path(tempfile.gettempdir()) / f"boleinfer-emulated-{os.getuid()}"
    )


@functools.cache
def _native() -> tuple[str, ...]:
    """Fused multiply-add in hardware where there is one."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return ("-mfma", "-mavx2") if {"fma", "avx2"} <= set(flags) else ()


@functools.cache
def _runtime() -> ctypes.CDLL:
    text = (FOLDER / "runtime.cpp").read_text()
    path = _build(text, ("-std=c++17", "-O2", "-fPIC", "-w", *_native(), f"-I{FOLDER}"), "runtime.cpp")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emulated_launch.restype = ctypes.c_char_p
    return library


@functools.cache
def _library(source: KernelFile, constants: tuple[tuple[str, Constant], ...]) -> ctypes.CDLL:
    _runtime()
    path = _build(emulated_text(source, dict(constants)), (f"-I{_headers()}", *_flags()), source.path.name)
    library = ctypes.CDLL(str(path))
    for end in ("begin", "end"):
        getattr(library, f"emulated_shared_{end}").restype = ctypes.c_void_p
    return library


def emulated_text(source: KernelFile, constants: dict[str, Constant]) -> str:
    """What g++ compiles: the file as for NVRTC, dynamic shared memory renamed, and an entry for each kernel."""
    job = nvrtc.job(source, constants, source.archs[0] if source.archs else "90", kernels.cuda_folder())
    text = _EXTERN_SHARED.sub(
        r"\g<type>* const \g<name> = reinterpret_cast<\g<type>*>(emulated::dynamic_shared);", job.text
    )
    text = re.sub(r"__shared__\s+(alignas\([^)]*\))", r"\1 __shared__", text)
    visible = 'extern "C" __attribute__((visibility("default")))'
    entries = [f"{visible} void run_{name}(void** args) {{ emulated::call({name}, args); }}" for name in source.kernels]
    return "\n".join(
        [
            '#include "emulated.h"',
            text,
            '#line 1 "entries"',
            'extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];',
            f"{visible} char* emulated_shared_begin() {{ return __bss_start; }}",
            f"{visible} char* emulated_shared_end() {{ return _end; }}",
            *entries,
            "",
        ]
    )


@functools.cache
def _headers() -> Path:
    """A folder in which g++ finds what every kernel begins with as it has it in memory: a third of its work."""
    return _build('#include "emulated.h"\n#include "common.cuh"\n', _flags(), "emulated.h").parent


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_native(), f"-I{FOLDER}", f"-I{kernels.cuda_folder()}")


def _build(text: str, flags: tuple[str, ...], title: str) -> Path:
    """The shared library of a text, or emulated.h.gch of a header's, compiled unless the cache has it.

    Raises KernelError with what g++ says."""
    if problem := missing():
        raise KernelError(problem)
    job = nvrtc.Job(title, text, (str(FOLDER), str(kernels.cuda_folder())), "", "")
    parts = [text, *flags, *(f"{path.name}\n{path.read_text()}" for path in nvrtc.included(job))]
    folder, key = _cache(), hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    header, name = title.endswith(".h"), f"{Path(title).stem}-{key}"
    path = folder / name / f"{title}.gch" if header else folder / f"{name}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        cpp, obj, made = (str(Path(temporary) / file) for file in ("text.cpp", "text.o", "made"))
        Path(cpp).write_text(text)
        commands = [["g++", *flags, "-c", cpp, "-o", obj], ["g++", "-shared", obj, "-o", made]]
        for command in [["g++", *flags, "-x", "c++-header", cpp, "-o", made]] if header else commands:
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise KernelError(f"{title} does not compile with g++:\n{result.stderr[:6000]}")
        os.replace(made, path)
    return path
