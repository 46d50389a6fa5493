"""The fixture of tests that run kernels: on the emulator in two orders of threads, and on a GPU where there is one."""

import pytest

from boleinfer import kernels
from boleinfer.kernels import ToolchainError
from tests.emulator import emulated, missing


@pytest.fixture(params=["forward", "random", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request):
    """The emulator with its threads in that order, or a real GPU."""
    if request.param == "cuda":
        try:
            kernels.open_gpu()
        except ToolchainError as error:
            pytest.skip(f"the kernels were NOT run: {error}")
        yield request.param
    elif problem := missing():
        pytest.skip(problem)
    else:
        with emulated(order=request.param):
            yield request.param
