"""Fixtures that several test files share: tiny checkpoints, each made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes on few cores

import pytest
from hypothesis import settings

from boleinfer import nvrtc
from tests import tiny

settings.register_profile("ci", derandomize=True)  # CI judges a change, not the luck of new inputs; others explore
if os.environ.get("CI"):
    settings.load_profile("ci")


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
