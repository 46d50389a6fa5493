"""Fixtures that several test files share: tiny checkpoints, each made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes on few cores

import pytest
from hypothesis import HealthCheck, settings

from boleinfer import kernels, nvrtc
from tests import emulator, tiny

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine may be busy
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)  # the change is judged, not new inputs
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """oracle(family, ratio=2, **options) -> tests.tiny.Oracle."""
    made = {}

    def get(family: str, ratio: int = 2, **options):
        key = (family, ratio, *sorted(options.items()))
        if key not in made:
            made[key] = tiny.make(tmp_path_factory.mktemp(family), family, ratio, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def compiler():
    """NVRTC, or a skip that says what was not tested."""
    try:
        return nvrtc.toolchain()
    except nvrtc.ToolchainError as error:
        pytest.skip(f"nothing was compiled: {error}")


@pytest.fixture(params=["forward", "random", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """Where kernels run: the emulator, its threads in that order, then a real GPU; or a skip that says so."""
    if request.param == "cuda":
        try:
            kernels.open_gpu()
        except nvrtc.ToolchainError as error:
            pytest.skip(f"the kernels were NOT run: {error}")
        yield request.param
    elif problem := emulator.missing():
        pytest.skip(problem)
    else:
        with emulator.emulated(order=request.param):
            yield request.param
            monkeypatch.undo()  # a test's own patches go before the emulator's, which they would otherwise bring back
