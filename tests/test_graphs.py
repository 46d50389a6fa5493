"""Steps that are captured: what is replayed, and what becomes of a step that cannot be captured (F52)."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest

from boleinfer import device
from boleinfer.graphs import Graphs


class CUDARuntimeError(RuntimeError):
    pass


class Stream(contextlib.nullcontext):
    """Captures what is called between begin and end; a capture that was spoilt says so at its end, as CUDA does."""

    def __init__(self):
        super().__init__()
        self.capturing, self.spoilt, self.launched = False, False, 0

    def synchronize(self):
        self.spoilt |= self.capturing

    def begin_capture(self):
        self.capturing, self.spoilt = True, False

    def end_capture(self):
        self.capturing = False
        if self.spoilt:
            raise CUDARuntimeError("operation failed due to a previous error during capture")
        return SimpleNamespace(launch=self.launch)

    def launch(self, stream):
        assert stream is self
        self.launched += 1


@pytest.fixture
def graphs(monkeypatch):
    cuda = SimpleNamespace(
        Stream=Stream,
        MemoryPool=lambda: SimpleNamespace(malloc=None, total_bytes=lambda: 0),
        using_allocator=lambda malloc: contextlib.nullcontext(),
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    return Graphs()


def test_f52_a_captured_step_is_replayed(graphs):
    calls = []
    graphs.rehearse("a", lambda: calls.append(graphs.stream.capturing) or "kept")
    assert calls == [False, True], "once to compile and to allocate, once to be captured"
    assert [graphs.run("a", calls.clear) for _ in range(2)] == ["kept", "kept"] and calls == [False, True]
    assert (graphs.stream.launched, graphs.captures, graphs.replays) == (2, 1, 2)
    assert graphs.run("b", lambda: "launched") == "launched", "nobody rehearsed it"


def test_a_step_that_may_come_again_is_captured_then(graphs):
    """The first time it is launched kernel by kernel; nothing is launched while it is captured."""
    seen = []

    def step():
        seen.append(graphs.stream.capturing)
        return "kept" if graphs.stream.capturing else "launched"

    assert [graphs.run("a", step, again=True) for _ in range(4)] == ["launched", "kept", "kept", "kept"]
    assert seen == [False, True] and (graphs.captures, graphs.replays) == (1, 3)
    assert [graphs.run("b", step) for _ in range(3)] == ["launched"] * 3 and graphs.captures == 1


@pytest.mark.parametrize("how", ["raises", "waits", "raises and waits"])
def test_f52_a_step_that_cannot_be_captured_runs_kernel_by_kernel(graphs, how):
    """One warning; the stream captures no longer, and other steps are captured and replayed as ever."""

    def step():
        if graphs.stream.capturing and "waits" in how:
            graphs.stream.synchronize()
        if graphs.stream.capturing and "raises" in how:
            raise MemoryError("no room")
        return "launched"

    with pytest.warns(UserWarning) as said:
        graphs.rehearse("bad", step)
    (message,) = (str(warning.message) for warning in said)
    assert message.startswith("step bad cannot be captured and runs kernel by kernel: ")
    assert ("no room" if "raises" in how else "during capture") in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.rehearse("good", lambda: "kept")
        assert [graphs.run(key, step) for key in ("bad", "good", "bad")] == ["launched", "kept", "launched"]
    assert not graphs.stream.capturing and (graphs.stream.launched, graphs.replays) == (1, 1)
