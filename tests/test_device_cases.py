"""How a case's arguments are rounded and copied to the GPU, and its results back."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from boleinfer import device_cases
from boleinfer.device_forest import DeviceForest, Paths
from boleinfer.forest import Forest, Tree
from boleinfer.ops import Case
from tests.emulator import EmulatedArray, emulated


class Pair(NamedTuple):
    k: Any
    u: Any


def build(rng):
    forest = Forest.of([Tree.of([5, 6, 7], [-1, 0, 0]), Tree.of([8], [-1])], [3, 9])
    return {
        "x": rng.standard_normal((4, 3)),
        "ring": Pair(rng.standard_normal(3), rng.standard_normal(3)),
        "w": rng.standard_normal(3),
        "slot": np.arange(2),
        "forest": forest,
        "paths": [np.asarray([0, 2]), np.asarray([], int)],
        "sizes": (1, 2),
        "scale": 0.5,
        "rows": None,
    }


CASE = Case("", build, wide=("w", "ring.u"))


@pytest.mark.parametrize("act,kind", [("bf16", ml_dtypes.bfloat16), ("float32", np.float32)])
def test_types_and_numbers(act, kind):
    numbers = device_cases.rounded(CASE, act)
    with emulated():
        on = device_cases.to_device(numbers, act, CASE.wide)
        for array, value, dtype in [
            (on["x"], numbers["x"], kind),
            (on["ring"].k, numbers["ring"].k, kind),
            (on["ring"].u, numbers["ring"].u, np.float32),
            (on["w"], numbers["w"], np.float32),
            (on["slot"], numbers["slot"], np.int32),
        ]:
            assert type(array) is EmulatedArray and array.dtype == dtype
            assert np.array_equal(array.get().astype(np.float64), value.astype(np.float64))
        assert isinstance(on["forest"], DeviceForest) and on["forest"].token.get().tolist() == [5, 6, 7, 8]
        assert isinstance(on["paths"], Paths) and on["paths"].count.get().tolist() == [2, 0]
        assert on["paths"].row.get().tolist() == [0, 2, -1, -1]
        assert (on["sizes"], on["scale"], on["rows"]) == ((1, 2), 0.5, None) and isinstance(on["ring"], Pair)
        exact = {k: v.astype(np.float64) for k, v in build(np.random.default_rng(0)).items() if k in "xw"}
    assert np.array_equal(numbers["w"], exact["w"].astype(np.float32))
    assert np.array_equal(numbers["x"], exact["x"].astype(np.float32).astype(kind).astype(np.float32))


def test_results_come_back_with_what_was_changed():
    def op(x, ring, **others):
        if isinstance(x, EmulatedArray):
            ring.k.set(np.full(3, 7, ring.k.dtype))
            return x
        ring.k[:] = 7
        return x

    case = CASE._replace(outputs=("ring",))
    with emulated():
        out = device_cases.run_on_device(op, case, "bf16")
        again = device_cases.run_on_device(op, case, "bf16")
    reference = device_cases.reference(op, case, "bf16")
    assert device_cases.same_bits(out, again) and reference[0].dtype == np.float64
    assert np.array_equal(out[0].astype(np.float64), reference[0]) and (out[1].k == 7).all()
    assert type(out[1].u) is np.ndarray and (reference[1].k == 7).all()
    again[1].u[1] += 1
    assert not device_cases.same_bits(out, again)
    assert device_cases.bound(case, "bf16") == case.bound_bf16 and device_cases.bound(case, "float32") == case.bound
