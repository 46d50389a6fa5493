"""cuBLAS through ctypes: its product, also while a graph is captured, where CuPy's binding refuses. Knows no op."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any, NamedTuple

import numpy as np

from boleinfer import device
from boleinfer.device import Array

WORKSPACE = 32 << 20  # bytes for each GPU and stream: given, so that graphs and single launches choose the same way
_BF16, _TRANSPOSED, _AS_IT_IS, _FLOAT_SUMS, _CHOOSES = 14, 1, 0, 68, -1  # cudaDataType, cublasOperation_t, ...
_OUT = {"bf16": _BF16, "float": 0}


class _Room(NamedTuple):
    """What the library has for one stream of one GPU."""

    handle: ctypes.c_void_p
    workspace: Array
    stream: weakref.ref[Any]


class Library:
    """The library's functions. Raises what cuda.pathfinder and ctypes raise where it is missing."""

    def __init__(self) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self._calls = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublas").abs_path))
        self._rooms: dict[tuple[int, int], _Room] = {}  # by GPU and stream

    def product(self, x: Array, w: Array, out: Array) -> None:
        """out = x w^T on the current stream, of which no graph may be captured the first time.

        bf16 x [R, Din], rows perhaps further apart, and w [Dout, Din]; out [R, Dout], bf16 or float32"""
        (R, Din), Dout = x.shape, len(w)
        apart = x.strides[0] // x.itemsize if R > 1 else Din
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        self._call(
            "cublasGemmEx",
            self._handle(),
            *(_TRANSPOSED, _AS_IT_IS, Dout, R, Din),  # by columns: out^T = w x^T
            *(ctypes.byref(one), _at(w), _BF16, Din, _at(x), _BF16, apart),
            *(ctypes.byref(zero), _at(out), _OUT[device.c_type(out)], Dout),
            *(_FLOAT_SUMS, _CHOOSES),
        )

    def _handle(self) -> ctypes.c_void_p:
        cuda = device.cupy().cuda
        stream = cuda.get_current_stream()
        where = int(cuda.Device().id), int(stream.ptr)
        room = self._rooms.get(where)
        if room is None:
            self._leave_ended()
            room = self._rooms[where] = self._room(stream)
        elif room.stream() is not stream:  # a new one at an old one's address takes over what that had
            room = self._rooms[where] = room._replace(stream=weakref.ref(stream))
        return room.handle

    def _room(self, stream: Any) -> _Room:
        handle = ctypes.c_void_p()
        pool = device.cupy().get_default_memory_pool()  # not that of the steps, which reuse theirs
        workspace = device.cupy().ndarray((WORKSPACE,), np.uint8, pool.malloc(WORKSPACE))
        self._call("cublasCreate_v2", ctypes.byref(handle))
        self._call("cublasSetStream_v2", handle, ctypes.c_void_p(int(stream.ptr)))
        self._call("cublasSetWorkspace_v2", handle, _at(workspace), ctypes.c_size_t(WORKSPACE))
        return _Room(handle, workspace, weakref.ref(stream))

    def _leave_ended(self) -> None:
        """Gives back what streams had that are gone. The GPU is waited for, which would break off a capture: so not as
        soon as a stream goes, which may be at any time, but before another one gets a handle, when this thread captures
        nothing. (What another thread captures just then it would break off still.)"""
        for where, room in list(self._rooms.items()):
            if room.stream() is None:
                self._call("cublasDestroy_v2", room.handle)
                del self._rooms[where]

    def _call(self, name: str, *args: object) -> None:
        if status := getattr(self._calls, name)(*args):
            raise RuntimeError(f"{name} of cuBLAS fails with status {status}")


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data.ptr)


@functools.cache
def library() -> Library | None:
    """The one that is installed; None where none is."""
    try:
        return Library()
    except (ImportError, OSError, RuntimeError):
        return None
