"""Launches the kernels of cuda/: checks arguments against the declaration, compiles, loads. The only file that does.

    launch("rms_norm.cu", "rms_norm", grid=R, block=256, args={"x": x, "w": w, "out": out, "D": D, "eps": eps},
           constants={"Act": "bf16"})

How a kernel declares its parameters is in declaration.py. bf16 arrays are CuPy arrays of ml_dtypes.bfloat16 (integers
that hold the bits are refused), fp8 arrays are uint8. A first launch may compile (0.1 s to 5 s) and load a module,
which a graph capture does not allow: `rehearse` everything before capturing, which also compiles side by side.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import boleinfer
from boleinfer import nvrtc
from boleinfer.arguments import check_arguments, check_constants, pitches
from boleinfer.declaration import Constant, KernelError, KernelFile, read
from boleinfer.nvrtc import Built, Job, ToolchainError

__all__ = [
    "OLDEST",
    "KernelError",
    "ToolchainError",
    "cuda_folder",
    "kernel_file",
    "launch",
    "rehearse",
    "runs_here",
    "usable",
]

Extent = int | tuple[int, ...]
_GRID, _BLOCK, _THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024  # limits of every architecture
OLDEST = 80  # the first architecture with bf16
_EARLY_SINCE = 90  # the first architecture on which a kernel can start before the previous one is done
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_UINT8, _BFLOAT16, _NOT_INTERLEAVED, _SWIZZLE_128B, _L2_128B, _ZEROS_OUTSIDE = 0, 9, 0, 3, 2, 0  # CUtensorMap's


def launch(
    file: str | Path,
    name: str,
    grid: Extent,
    block: Extent,
    args: Mapping[str, Any],
    dims: Mapping[str, int] | None = None,
    shared: int = 0,
    constants: Mapping[str, Constant] | None = None,
    stream: Any = None,
) -> None:
    """Queue kernel `name` of cuda/`file` on the current device.

    grid, block: blocks, and threads of a block: a number or up to three
    args:        every parameter by name: CuPy arrays, Python or NumPy numbers, None for a null pointer
    dims:        sizes (capital names) that no array or scalar states, or that must agree with what they state
    shared:      bytes of dynamic shared memory of a block
    constants:   the compile-time constants of the file's `// sizes:`: numbers, truth values, types by their C name
    stream:      a CuPy stream; the current one when None
    Raises KernelError for anything that does not fit the declaration or does not compile, ToolchainError (one kind of
    it) when CuPy, NVRTC, its headers, the driver or the GPU is missing or does not fit.
    """
    source = kernel_file(file)
    chosen = check_constants(source, constants or {})
    gpu = open_gpu()
    device = gpu.device()
    values = check_arguments(source, name, args, dims or {}, chosen, gpu, device)
    where = f"{source.path.name}: {name}"
    shape = _extent(grid, "grid", _GRID, where), _extent(block, "block", _BLOCK, where)
    threads = shape[1][0] * shape[1][1] * shape[1][2]
    if threads > _THREADS:
        raise KernelError(f"{where}: the block has {threads} threads; at most {_THREADS} are possible")
    if shared < 0:
        raise KernelError(f"{where}: {shared} bytes of shared memory were asked for; give 0 or more")
    try:
        function = _module(gpu, device, source, tuple(chosen.items())).function(name, shared)
    except _NotCompiled:
        return
    if (rehearsal := _rehearsal.get()) is not None and rehearsal.builds:
        return
    try:
        function(*shape, values, shared, stream)
    except Exception as error:  # CuPy's kinds of error differ between driver and runtime
        raise KernelError(
            f"{where}: CUDA refuses the launch with grid {shape[0]}, block {shape[1]} and {shared} bytes of dynamic "
            f"shared memory, or an earlier kernel has failed ({error})"
        ) from error


# ---- compiling side by side ------------------------------------------------------------------------------------------


class _Rehearsal(NamedTuple):
    """A pass over launches. There are none any more when any kernel is on its way; `built` are those that have come."""

    builds: nvrtc.Builds
    built: Mapping[Job, Built]


_rehearsal: ContextVar[_Rehearsal | None] = ContextVar("rehearsal", default=None)


class _NotCompiled(Exception):
    """A launch of a rehearsal waits for the compiler."""


def rehearse(step: Callable[[], object], later: Sequence[Callable[[], object]] = ()) -> None:
    """Runs a step that nothing is wanted of, with all its launches; the kernels that they lack compile side by side.

    From the first launch on that lacks its kernel nothing is launched; but what that step launches, and those that will
    be rehearsed `later`, is checked, and begins to compile where it has to. When all is there the step runs again.

    A step that ends half-way does no harm when it writes to nothing but arrays of its own (its batch is empty) and
    reads of these only what it has written: no launch comes after one that was left out, so that none reads what that
    one would have written; each leaves counters at zero; and another pass begins at the beginning.
    Raises as `launch` does."""
    built: dict[Job, Built] = {}
    while True:
        with nvrtc.Builds(nvrtc.default_cache()) as builds:
            before = _rehearsal.set(_Rehearsal(builds, built))
            try:
                step()
                for other in later if builds else ():
                    other()
            finally:
                _rehearsal.reset(before)
            if not builds:
                return
            for job, result in builds.results().items():
                if isinstance(result, KernelError):
                    raise result
                built[job] = result


def _compiled(job: Job) -> Built:
    """The compiled job. Raises _NotCompiled in a rehearsal that has to wait for it."""
    rehearsal, cache = _rehearsal.get(), nvrtc.default_cache()
    if rehearsal is None:
        return nvrtc.build(job, cache)
    if job in rehearsal.builds:
        raise _NotCompiled
    found = rehearsal.built.get(job) or nvrtc.find(job, cache)
    if found is None:
        rehearsal.builds.begin(job)
        raise _NotCompiled
    return found


def runs_here(file: str | Path) -> bool:
    """Whether the current device is of an architecture that the kernels of cuda/`file` are for (its `// arch:`)."""
    gpu = open_gpu()
    return kernel_file(file).target(gpu.arch(gpu.device())) is not None


def cuda_folder() -> Path:
    """The folder of the .cu files: inside the installed package, or beside it in a checkout."""
    folders = [Path(p) / "cuda" for p in boleinfer.__path__]
    found = [folder for folder in folders if (folder / "common.cuh").is_file()]
    if not found:
        raise KernelError(f"no kernels in {' or '.join(map(str, folders))}; reinstall boleinfer")
    return found[0]


@functools.cache
def kernel_file(file: str | Path) -> KernelFile:
    """The parsed file, by its name in the cuda folder or by an absolute path; read once in a process."""
    return read(cuda_folder() / file)


def _extent(given: Extent, what: str, limits: tuple[int, int, int], where: str) -> tuple[int, int, int]:
    sizes = given if isinstance(given, tuple) else (given,)
    full = (*sizes, 1, 1)[:3]
    if not 1 <= len(sizes) <= 3 or not all(1 <= n <= most for n, most in zip(full, limits)):
        raise KernelError(
            f"{where}: the {what} is {given}, expected one to three numbers from 1 up to {limits}; "
            "do not launch when there is nothing to do"
        )
    return full[0], full[1], full[2]


# ---- the device ------------------------------------------------------------------------------------------------------


@functools.cache
def open_gpu() -> Gpu:
    """The GPU through CuPy. Raises ToolchainError, with what to do, when CuPy, the driver or a GPU is missing."""
    return Gpu()


def usable() -> str:
    """The current GPU's architecture, once it is sure that kernels can be compiled for it and started.

    Raises ToolchainError as `launch` does."""
    gpu = open_gpu()
    arch = gpu.arch(gpu.device())
    nvrtc.toolchain().check_arch(arch)
    return arch


def _no_gpu(driver: int, built: int, reason: str) -> str:
    """Why CUDA finds no GPU and what to do, by the CUDA versions (13020 is 13.2) of the driver and of CuPy."""
    if not driver:
        return f"there is no NVIDIA driver ({reason}); install one, or run on the CPU"
    if driver // 1000 < built // 1000:
        return (
            f"the NVIDIA driver knows CUDA {driver // 1000}.{driver % 1000 // 10}, and this CuPy is for CUDA "
            f"{built // 1000} ({reason}); update the driver, or: pip uninstall cupy-cuda{built // 1000}x, then "
            f"pip install 'boleinfer[cuda{driver // 1000}]'"
        )
    return f"no GPU is visible to CUDA ({reason}); look at nvidia-smi and CUDA_VISIBLE_DEVICES"


class Gpu:
    """All that a launch needs of CuPy: what is an array, and how a cubin becomes a function."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ToolchainError(nvrtc.cupy_missing(error)) from error
        self._cupy = cupy
        runtime = cupy.cuda.runtime
        try:
            found, reason = runtime.getDeviceCount(), "0 devices"
        except runtime.CUDARuntimeError as error:
            found, reason = 0, str(error)
        if not found:
            raise ToolchainError(_no_gpu(runtime.driverGetVersion(), cupy.cuda.driver.get_build_version(), reason))

    def device(self) -> int:
        """The number of the current device."""
        return int(self._cupy.cuda.runtime.getDevice())

    def arch(self, device: int) -> str:
        """The architecture of a device, such as "90". Raises ToolchainError for a GPU older than Ampere."""
        arch = str(self._cupy.cuda.Device(device).compute_capability)
        if int(arch) < OLDEST:
            raise ToolchainError(f"GPU {device} is of architecture {arch}; the kernels need {OLDEST} (Ampere) or newer")
        return arch

    def is_array(self, value: Any) -> bool:
        """Whether it is a CuPy array."""
        return isinstance(value, self._cupy.ndarray)

    def device_of(self, array: Any) -> int:
        """The number of the device that holds the array."""
        return int(array.device.id)

    def address(self, array: Any) -> int:
        """The device address of its first element."""
        return int(array.data.ptr)

    def tensor_map(self, array: Any, box: tuple[int, ...]) -> np.generic:
        """The TensorMap by which cuda/tma.cuh reads an array: its bytes."""
        axes, itemsize = array.ndim, array.dtype.itemsize
        made = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(made) % 64
        status = self._driver.cuTensorMapEncodeTiled(
            ctypes.byref(made, start),
            {1: _UINT8, 2: _BFLOAT16}[itemsize],
            axes,
            ctypes.c_void_p(self.address(array)),
            (ctypes.c_uint64 * axes)(*array.shape[::-1]),  # innermost first, as in the next three
            (ctypes.c_uint64 * (axes - 1))(*pitches(array)[::-1]),
            (ctypes.c_uint32 * axes)(128 // itemsize, *box[::-1]),
            (ctypes.c_uint32 * axes)(*[1] * axes),
            *(_NOT_INTERLEAVED, _SWIZZLE_128B, _L2_128B, _ZEROS_OUTSIDE),
        )
        if status:
            raise KernelError(
                f"cuTensorMapEncodeTiled gives error {status} for {array.dtype.name} {list(array.shape)} in boxes of "
                f"{list(box)} rows: the driver is older than CUDA 12, or the array is larger than it can describe"
            )
        return np.void(made.raw[start : start + 128])

    def load(self, cubin: bytes) -> Any:
        """The cubin as a module of the current device."""
        module = self._cupy.cuda.function.Module()
        module.load(cubin)
        return module

    def function(self, module: Any, name: str) -> Any:
        """What launches a kernel of a loaded module: called with (grid, block, values, shared, stream).

        All kernels ask for the same split of L1, the one with most shared memory: a multiprocessor changes it only when
        no block is left on it, so that a kernel with a split of its own could not start beside the one before."""
        function, driver = module.get_function(name), self._cupy.cuda.driver
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        return function

    def launch_directly(
        self,
        function: Any,
        early: bool,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: Sequence[np.generic],
        shared: int,
        stream: Any,
    ) -> None:
        """Queues a kernel by the driver's cuLaunchKernelEx: CuPy passes neither attributes nor structs by value.

        early: it may start before the previous one of the stream is done (it waits by itself)"""
        stream = self._cupy.cuda.get_current_stream() if stream is None else stream
        attributes = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,)))
        config = _Config(*grid, *block, shared, stream.ptr, attributes, int(early))
        held = [ctypes.create_string_buffer(value.tobytes(), value.nbytes) for value in values]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        status = self._driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function.ptr), addresses, None)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx gives error {status}")

    @functools.cached_property
    def _driver(self) -> Any:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def allow_shared(self, function: Any, nbytes: int) -> None:
        """Permits a kernel so much dynamic shared memory: without it, 48 KiB with the static. Raises CuPy's error."""
        driver = self._cupy.cuda.driver
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a union of 64 bytes of which whole numbers are used here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _Module:
    """One compiled file on one device: its functions, and the dynamic shared memory that each was permitted."""

    def __init__(self, gpu: Gpu, title: str, cubin: bytes, early: frozenset[str], by_value: frozenset[str]) -> None:
        self._gpu, self._title, self._early, self._by_value = gpu, title, early, by_value
        try:
            self._module = gpu.load(cubin)
        except Exception as error:  # CuPy's kinds of error differ between driver and runtime
            raise KernelError(f"{title}: the driver refuses the compiled kernel ({error})") from error
        self._functions: dict[str, tuple[Any, int]] = {}

    def function(self, name: str, shared: int) -> Callable[..., None]:
        """The kernel's function: called with (grid, block, values, shared, stream)."""
        function, allowed = self._functions.get(name) or (self._gpu.function(self._module, name), 0)
        if shared > allowed:
            try:
                self._gpu.allow_shared(function, shared)
            except Exception as error:
                raise KernelError(
                    f"{self._title}: {name} asks for {shared} bytes of dynamic shared memory, more than this device "
                    f"gives a block ({error}); use smaller tiles"
                ) from error
            allowed = shared
        self._functions[name] = function, allowed
        if name in self._early | self._by_value:
            return functools.partial(self._gpu.launch_directly, function, name in self._early)
        return function


@functools.cache
def _job(source: KernelFile, constants: tuple[tuple[str, Constant], ...], arch: str) -> Job:
    return nvrtc.job(source, dict(constants), arch, cuda_folder())


@functools.cache
def _module(gpu: Gpu, device: int, source: KernelFile, constants: tuple[tuple[str, Constant], ...]) -> _Module:
    job = _job(source, constants, gpu.arch(device))
    built = _compiled(job)
    by_value = frozenset(name for name, parameters in source.kernels.items() if any(p.by_value for p in parameters))
    early = source.early if int(gpu.arch(device)) >= _EARLY_SINCE else frozenset()
    return _Module(gpu, job.title, built.cubin, early, by_value)
