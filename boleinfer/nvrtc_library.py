"""NVRTC through ctypes. Threads compile side by side with it: CuPy's binding holds the interpreter's lock meanwhile."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence


class NvrtcError(Exception):
    """NVRTC refuses; log: what the compiler said, "" where nothing was compiled."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Library:
    """The library's functions. Raises what cuda.pathfinder and ctypes raise where it is missing."""

    def __init__(self) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self._calls = ctypes.CDLL(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
        self._calls.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Such as (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def archs(self) -> tuple[int, ...]:
        """Architectures that it compiles for, such as 90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def compile(self, text: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """The cubin and the compiler's log. Raises NvrtcError with the log for what does not compile."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self._call("nvrtcCompileProgram", program, len(options), given)
            except NvrtcError as error:
                raise NvrtcError(str(error), self._log(program)) from None
            return self._bytes(program, "CUBIN"), self._log(program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, found)
        return found.raw

    def _call(self, name: str, *args: object) -> None:
        if status := getattr(self._calls, name)(*args):
            raise NvrtcError(f"{self._calls.nvrtcGetErrorString(status).decode()} ({status})")


@functools.cache
def library() -> Library:
    """The one that is installed; Library's errors."""
    return Library()
