"""The kernels of cuda/ on a GPU against the definitions in boleinfer/ops, on the same cases, into poisoned outputs."""

import warnings

import ml_dtypes
import numpy as np
import pytest

from boleinfer import kernels
from boleinfer.kernels import KernelError, ToolchainError, launch
from boleinfer.ops.norms import CASES as NORM_CASES
from boleinfer.ops.norms import rms_norm

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy():
    module = pytest.importorskip("cupy", reason="CuPy is not installed: the kernels were NOT run")
    try:
        kernels.Gpu()
    except ToolchainError as error:
        pytest.skip(f"the kernels were NOT run: {error}")
    return module


NUMBERS = {"float": (np.float32, 1e-6), "bf16": (ml_dtypes.bfloat16, 4e-3)}


def poisoned(cupy, shape, dtype):
    return cupy.asarray(np.full(shape, np.nan).astype(dtype))


def wide(array):
    return array.get().astype(np.float64)


@pytest.mark.parametrize("act", NUMBERS)
@pytest.mark.parametrize("block", [32, 256, 1024])
@pytest.mark.parametrize("case", NORM_CASES["rms_norm"], ids=lambda case: case.label)
def test_rms_norm(cupy, act, block, case):
    dtype, bound = NUMBERS[act]
    given = case.build(np.random.default_rng(0))
    x, w = given["x"].astype(dtype), given["w"].astype(np.float32)
    h = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
    summed = (h.astype(np.float32) + x.astype(np.float32)).astype(dtype)
    R, D = x.shape
    on = {"x": cupy.asarray(x), "w": cupy.asarray(w), "D": D, "eps": 1e-6}
    for name, row in (("rms_norm", x), ("add_rms_norm", summed)):
        args = on | {"out": poisoned(cupy, x.shape, dtype)}
        if name == "add_rms_norm":
            args["h"] = cupy.asarray(h)
        launch("rms_norm.cu", name, R, block, args, constants={"Act": act})
        expected = rms_norm(row.astype(np.float64), w.astype(np.float64), 1e-6)
        assert np.linalg.norm(wide(args["out"]) - expected) <= bound * np.linalg.norm(expected)
        if name == "add_rms_norm":
            assert np.array_equal(wide(args["h"]), summed.astype(np.float64))


def test_rows_that_are_not_aligned(cupy):
    numbers = np.random.default_rng(0).standard_normal(4 * 1024 + 1).astype(np.float32)
    x, w = cupy.asarray(numbers)[1:].reshape(4, 1024), cupy.asarray(numbers[:1024])
    args = {"x": x, "w": w, "out": poisoned(cupy, (4, 1024), np.float32), "D": 1024, "eps": 1e-6}
    launch("rms_norm.cu", "rms_norm", 4, 128, args, constants={"Act": "float"})
    assert np.abs(wide(args["out"]) - rms_norm(wide(x), wide(w), 1e-6)).max() < 1e-5


def test_a_launch_can_be_captured_and_replayed(cupy):
    x, w, out = (poisoned(cupy, shape, np.float32) for shape in ((2, 64), (64,), (2, 64)))
    w.set(np.zeros(64, np.float32))
    args = {"x": x, "w": w, "out": out, "D": 64, "eps": 0.0}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, warnings.catch_warnings():
        warnings.simplefilter("error")
        launch("rms_norm.cu", "rms_norm", 2, 32, args, constants={"Act": "float"})  # compiles and loads
        stream.synchronize()
        stream.begin_capture()
        launch("rms_norm.cu", "rms_norm", 2, 32, args, constants={"Act": "float"})
        graph = stream.end_capture()
        x.set(np.full((2, 64), -3, np.float32))
        graph.launch(stream)
        stream.synchronize()
    assert np.abs(out.get() + 1).max() < 1e-6


def test_what_a_gpu_refuses_is_an_error_that_names_the_kernel(cupy):
    args = {"x": np.ones((1, 4), np.float32), "D": 4, "eps": 0.0}
    args |= {"w": poisoned(cupy, (4,), np.float32), "out": poisoned(cupy, (1, 4), np.float32)}
    with pytest.raises(KernelError, match="rms_norm: x is a NumPy array"):
        launch("rms_norm.cu", "rms_norm", 1, 32, args, constants={"Act": "float"})
    args["x"] = poisoned(cupy, (1, 4), np.float32)
    with pytest.raises(KernelError, match="rms_norm asks for 1000000 bytes of dynamic shared memory"):
        launch("rms_norm.cu", "rms_norm", 1, 32, args, shared=10**6, constants={"Act": "float"})
