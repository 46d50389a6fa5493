"""Arrays on the GPU: telling them from NumPy's, making and copying them, and the names of their types. Knows no op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from boleinfer.declaration import TYPES
from boleinfer.nvrtc import ToolchainError, cupy_missing

Array = Any  # a NumPy or a CuPy array

NAN_BYTE = 0xFF  # fills any type of number with NaN
COUNTERS = 1 << 14  # of a stream, for blocks that share a task (cuda/arrival.cuh)

_C_TYPES = {dtype: c for c, dtype in reversed(TYPES.items())}


class Fp8(NamedTuple):
    """A matrix of FP8 (E4M3) numbers on the GPU, scaled in blocks of 128 x 128.

    bits: uint8 [..., Dout, Din]; scale: float32 [..., ceil(Dout/128), ceil(Din/128)], which multiplies
    """

    bits: Array
    scale: Array


class Split(NamedTuple):
    """bf16 rows [R, Din] as hopper_fp8.split_rows makes them, for products with Fp8.

    parts: uint8 [2 R, Din]; inverse: float32 [ceil(Din/128), R and a few more]; rows: they themselves, for others
    """

    parts: Array
    inverse: Array
    rows: Array | None = None

    @classmethod
    def empty(cls, R: int, Din: int, rows: Array | None = None) -> Split:
        """Of undefined contents."""
        inverse = empty((-(-Din // 128), -(-R // 64) * 64), np.float32)
        return cls(empty((2 * R, Din), np.uint8), inverse, rows)


@functools.cache
def dtype(c_name: str) -> np.dtype:
    """The host's dtype of a C type name: "bf16" is ml_dtypes.bfloat16, "float" float32, "fp8" ml_dtypes.float8_e4m3fn.

    KeyError for a name that kernels lack."""
    import ml_dtypes

    name = "float8_e4m3fn" if c_name == "fp8" else TYPES[c_name]
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def stored(dtype: np.typing.DTypeLike) -> np.dtype:
    """The dtype of a GPU array that holds such numbers: CuPy has no 8-bit floats, so uint8 holds their bits."""
    given = np.dtype(dtype)
    return np.dtype(np.uint8) if given.name.startswith("float8") else given


def on_gpu(x: Array) -> bool:
    """Whether an op has to launch a kernel for this array: anything but a plain NumPy array."""
    return type(x) is not np.ndarray


def empty(shape: int | tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
    """A GPU array of undefined contents, from CuPy's current allocator. Raises MemoryError where there is no room."""
    return cupy().empty(shape, stored(dtype))


def buffer(shape: tuple[int, ...], dtype: np.typing.DTypeLike, poison: bool = False) -> Array:
    """As memory.buffer, on the GPU."""
    array = empty(shape, dtype)
    if poison:
        fill(array, NAN_BYTE)
    return array


def counters(needed: int) -> Array:
    """int32 [COUNTERS], all 0 whenever a kernel of the current stream starts: whoever counts there leaves zeros.

    Made at a stream's first call, which no graph may capture. Raises ValueError where more are needed."""
    if needed > COUNTERS:
        raise ValueError(f"{needed} tasks shared by blocks in one launch; at most {COUNTERS} are possible")
    cuda = cupy().cuda
    return _counters(cuda.Device().id, cuda.get_current_stream().ptr)


@functools.cache
def _counters(device: int, stream: int) -> Array:
    pool = cupy().get_default_memory_pool()  # not that of the steps, which reuse theirs
    array = cupy().ndarray((COUNTERS,), np.int32, pool.malloc(4 * COUNTERS))
    fill(array, 0)
    return array


def fill(array: Array, byte: int) -> None:
    """Sets every byte of a contiguous array, wherever it is: 0 for zeros, NAN_BYTE for NaN (-1 in integers)."""
    if isinstance(array, np.ndarray):
        array.reshape(-1).view(np.uint8)[...] = byte
    elif array.size:
        array.data.memset_async(byte, array.nbytes)


def write(out: Array, values: Array) -> None:
    """Queues a copy over a contiguous GPU array from one of the same shape and type, on the host or on the GPU."""
    if isinstance(out, np.ndarray):
        out[...] = values
    elif isinstance(values, np.ndarray):
        out.data.copy_from_host_async(np.ascontiguousarray(values, out.dtype).ctypes.data, out.nbytes)
    else:
        out.data.copy_from_device_async(values.data, out.nbytes)


def upload(array: np.ndarray) -> Array:
    """A copy on the current GPU."""
    return cupy().asarray(array.view(stored(array.dtype)))


def download(array: Array) -> np.ndarray:
    """A copy in host memory; waits for the GPU."""
    return array.get()


def memory() -> tuple[int, int]:
    """Bytes of the current GPU's memory that are free, and all of them. Raises ToolchainError where CUDA refuses."""
    runtime = cupy().cuda.runtime
    try:
        cupy().get_default_memory_pool().free_all_blocks()
        free, total = runtime.memGetInfo()
    except (runtime.CUDARuntimeError, MemoryError) as error:
        raise ToolchainError(
            f"the GPU cannot be used ({error}); another program may hold all of its memory (nvidia-smi lists them), or "
            "may have it for itself"
        ) from error
    return int(free), int(total)


def current() -> int:
    """The number of this thread's current GPU."""
    return int(cupy().cuda.Device().id)


def use(number: int) -> None:
    """Makes a GPU the current one of this thread; a new thread begins with the first."""
    cupy().cuda.Device(number).use()


def shared_bytes() -> int:
    """Shared memory that one block may have on the current GPU."""
    return int(cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])


def multiprocessors() -> int:
    """Those of the current GPU, each of which holds at least one block of any kernel."""
    return int(cupy().cuda.Device().attributes["MultiProcessorCount"])


def blocks_together() -> int:
    """Blocks of a grid that may wait for one another, whatever they need."""
    return multiprocessors()


def c_type(array: Array) -> str:
    """The C name that kernels use for an array's type: "bf16" for bfloat16, "float" for float32."""
    return _C_TYPES[array.dtype.name]


def send(out: Array, values: np.ndarray) -> Callable[[], None]:
    """Queues a copy of pinned host memory over a contiguous GPU array; what it returns waits until that is done."""
    if isinstance(out, np.ndarray):
        out[...] = values
        return lambda: None
    out.data.copy_from_host_async(values.ctypes.data, out.nbytes)
    return _done()


def fetch(out: np.ndarray, array: Array) -> Callable[[], None]:
    """Queues a copy of a contiguous GPU array over pinned host memory; what it returns waits until that is done."""
    if isinstance(array, np.ndarray):
        out[...] = array
        return lambda: None
    array.data.copy_to_host_async(out.ctypes.data, array.nbytes)
    return _done()


def _done() -> Callable[[], None]:
    """Waits for all that is queued now on the current stream."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record()
    return event.synchronize


class Staging:
    """A pinned buffer whose copies to the GPU run beside everything else, in the order they were asked for.

    nbytes: its size
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = pinned(nbytes)
        self._stream = cupy().cuda.Stream(non_blocking=True)

    def view(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """The buffer's beginning as an array to write, once its last copy is done."""
        self.wait()
        return self._memory[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def copy_to(self, out: Array) -> None:
        """Queues the copy of the buffer's beginning to a contiguous GPU array."""
        out.data.copy_from_host_async(self._memory.ctypes.data, out.nbytes, self._stream)

    def wait(self) -> None:
        """Until the copies queued so far are done."""
        self._stream.synchronize()


def pinned(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of page-locked host memory."""
    memory = cupy().cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes)


@functools.cache
def cupy() -> Any:
    """The module, imported when it is needed. Raises ToolchainError where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ToolchainError(cupy_missing(error)) from error
    return cupy
