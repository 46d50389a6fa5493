"""Handles and workspaces of cuBLAS: one of each stream, given back when the stream is gone. Without the library."""

import ctypes
import weakref
from types import SimpleNamespace

import pytest

from boleinfer import cublas, device


class Stream:
    def __init__(self, ptr):
        self.ptr = ptr


class Calls:
    """Notes what is called; handles are numbered from 1 on."""

    def __init__(self):
        self.alive, self.made, self.status = set(), 0, 0

    def cublasCreate_v2(self, handle):
        self.made += 1
        self.alive.add(self.made)
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = self.made
        return self.status

    def cublasDestroy_v2(self, handle):
        self.alive.remove(handle.value)
        return self.status

    def cublasSetStream_v2(self, handle, stream):
        return self.status

    def cublasSetWorkspace_v2(self, handle, at, nbytes):
        assert nbytes.value == cublas.WORKSPACE
        return self.status


@pytest.fixture
def library(monkeypatch):
    def ndarray(shape, dtype, memory):
        return SimpleNamespace(data=SimpleNamespace(ptr=4096), memory=memory)

    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0), get_current_stream=lambda: library.current)
    pool = SimpleNamespace(malloc=lambda nbytes: Stream(nbytes))  # anything that can be watched
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool, ndarray=ndarray)
    monkeypatch.setattr(device, "cupy", lambda: cupy)
    library = cublas.Library.__new__(cublas.Library)
    library._calls, library._rooms, library.current = Calls(), {}, None
    return library


def use(library, stream):
    library.current = stream
    handle = library._handle().value
    library.current = None
    return handle


def test_a_stream_keeps_its_handle(library):
    streams = [Stream(0), Stream(64)]
    assert [use(library, s) for s in streams + streams] == [1, 2, 1, 2]


def test_what_a_stream_had_goes_before_the_next_one_gets_a_handle(library):
    kept, ended = Stream(0), [Stream(64), Stream(128)]
    for stream in (kept, *ended):
        use(library, stream)
    memory = [weakref.ref(room.workspace.memory) for room in library._rooms.values()]
    del stream, ended
    assert library._calls.alive == {1, 2, 3}  # nothing happens when it goes: something may be captured
    assert use(library, kept) == 1 and library._calls.alive == {1, 2, 3}
    assert use(library, another := Stream(192)) == 4 and library._calls.alive == {1, 4}
    assert [of() is None for of in memory] == [False, True, True]
    assert use(library, another) == 4


def test_a_stream_at_the_address_of_another_takes_over_its_handle(library):
    use(library, Stream(64))
    later = Stream(64)
    assert use(library, later) == 1 and library._calls.made == 1
    use(library, kept := Stream(128))
    assert library._calls.alive == {1, 2} and use(library, later) == 1 and use(library, kept) == 2


def test_a_call_that_fails_says_which(library):
    library._calls.status = 3
    with pytest.raises(RuntimeError, match="cublasCreate_v2 of cuBLAS fails with status 3"):
        use(library, Stream(0))
