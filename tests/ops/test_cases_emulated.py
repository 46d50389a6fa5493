"""Every op's CASES through its kernels, on the CPU emulator, in both types of activations and two orders of threads."""

import math

import numpy as np
import pytest

from boleinfer import device_cases
from boleinfer.declaration import KernelError
from boleinfer.device_cases import DTYPES
from boleinfer.ops import relative_error
from tests import emulator
from tests.emulator import emulated
from tests.ops.test_cases import FILES

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())

LARGEST = 300_000  # numbers in all arguments of a case; what is larger runs on GPUs only (`boleinfer check`)
ALL = [
    (getattr(file, name), case)
    for file in FILES
    for name, cases in file.CASES.items()
    if any(case.gpu for case in cases)
    for case in cases
]


def numbers_in(value):
    members = device_cases._members(value)
    return sum(map(numbers_in, members.values())) if members else math.prod(getattr(value, "shape", (1,)))


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("op,case", ALL, ids=[f"{op.__name__} {case.label}" for op, case in ALL])
def test_kernels_agree_with_definitions(op, case, act):
    if (size := numbers_in(case.build(np.random.default_rng(0)))) > LARGEST:
        pytest.skip(f"{size} numbers are too many for the emulator")
    if not case.gpu:
        with emulated(), pytest.raises(KernelError):
            device_cases.run_on_device(op, case, act)
        return
    with emulated():
        out = device_cases.run_on_device(op, case, act)
    with emulated(order="reverse"):
        assert device_cases.same_bits(out, device_cases.run_on_device(op, case, act))
    assert relative_error(out, device_cases.reference(op, case, act)) <= device_cases.bound(case, act)
