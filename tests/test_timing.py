"""What events say, how often calls are repeated, and where a measurement on the GPU says that it comes from."""

from types import SimpleNamespace

import pytest

from boleinfer import device, driver, kernels, nvrtc, provenance, timing
from boleinfer.graphs import Eager


class Clock:
    """A GPU that takes `ms` for each call of `work`, and events that read its time."""

    def __init__(self, ms):
        self.now, self.ms, self.calls = 0.0, ms, 0

    def work(self):
        self.now += self.ms
        self.calls += 1

    def cupy(self):
        clock = self

        class Event:
            def record(self):
                self.at = clock.now

            def synchronize(self):
                pass

        runtime = SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=lambda _: {"name": b"GPU", "totalGlobalMem": 9, "multiProcessorCount": 7},
            runtimeGetVersion=lambda: 13020,
            driverGetVersion=lambda: 13000,
        )
        elapsed = lambda begin, end: end.at - begin.at  # noqa: E731
        cuda = SimpleNamespace(Event=Event, get_elapsed_time=elapsed, runtime=runtime)
        return SimpleNamespace(cuda=cuda, __version__="14.0")


def test_events_time_one_run(monkeypatch):
    clock = Clock(2.5)
    monkeypatch.setattr(device, "cupy", clock.cupy)
    assert timing.event_ms(clock.work, repeats=4, rounds=3) == pytest.approx(2.5)
    assert clock.calls == 12


def test_what_memory_gives_is_the_quickest_reading(monkeypatch):
    clock = Clock(4.0)

    def launch(*_):
        clock.ms = 1.0 if clock.calls >= 60 else 4.0  # it takes a while to wake up
        clock.work()

    for name in ("buffer", "empty"):
        monkeypatch.setattr(device, name, lambda *_, **__: None)
    monkeypatch.setattr(device, "multiprocessors", lambda: 7)
    monkeypatch.setattr(device, "cupy", clock.cupy)
    monkeypatch.setattr(kernels, "launch", launch)
    assert timing.read_gb_s(10**9) == pytest.approx(1000)
    assert clock.calls == 4 * timing.READINGS


@pytest.mark.parametrize("ms, most", [(0.001, 400), (50.0, 40)])
def test_calls_are_repeated_as_their_time_allows(monkeypatch, ms, most):
    clock = Clock(ms)
    monkeypatch.setattr(device, "cupy", clock.cupy)
    monkeypatch.setattr(timing, "Graphs", Eager)
    assert timing.calls_us([clock.work] * 2) == pytest.approx(1e3 * ms)
    assert clock.calls <= most


def test_copies_are_past_the_cache():
    assert timing.copies(timing.PAST_L2 // 4, least=2) == 4
    assert timing.copies(timing.PAST_L2 * 2, least=2) == 2
    assert timing.copies(1, most=256) == 256


def test_a_gpu_measurement_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(device, "cupy", Clock(1).cupy)
    monkeypatch.setattr(kernels, "usable", lambda: "90")
    monkeypatch.setattr(driver, "ask", lambda: driver.Driver("580.1", 13, ("GPU",)))
    monkeypatch.setattr(nvrtc, "toolchain", lambda: SimpleNamespace(version=(13, 0)))
    record = provenance.gpu_provenance()
    assert (record["gpu"], record["driver"], record["cuda"], record["nvrtc"]) == ("GPU", "580.1", "13.2", "13.0")
    assert record["cuda_of_driver"] == "13.0" and record["cupy"] == "14.0" and len(record["sources_sha256"]) == 64
