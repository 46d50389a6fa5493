"""Launching: every kind of wrong argument is refused with its kernel, parameter and declaration; right ones arrive.

A fake GPU whose arrays are NumPy's takes CuPy's place, so all this runs anywhere. test_kernels_gpu.py runs the kernels.
"""

import math
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer import kernels, nvrtc
from boleinfer.kernels import KernelError, launch
from boleinfer.nvrtc import Built

MIX = """\
// sizes: K=4,8 Act=bf16 Fast=true
extern "C" __global__ void mix(
    const Act* __restrict__ q,         // [R, Hk, K]
    const float* __restrict__ bias,    // [2*Hk*K+Hv] or null
    const int* ids,                    // [R]
    Act* __restrict__ out,             // [R, Hv, K/2] strides [Pitch, K/2, 1] aligned 16
    int Hv,
    long long Pitch,
    float eps,
    bool last,
    unsigned seed)
{ }

extern "C" __global__ void other(
    float* x,  // [N]
    unsigned long long big,
    double d)
{ }
"""
CONSTANTS = {"K": 4, "Act": "bf16", "Fast": True}


class FakeFunction:
    def __init__(self, name):
        self.name, self.calls, self.error = name, [], None

    def __call__(self, grid, block, values, shared, stream):
        if self.error:
            raise self.error
        self.calls.append((grid, block, values, shared, stream))


class FakeModule:
    def __init__(self):
        self.functions = {}

    def get_function(self, name):
        assert name not in self.functions, "fetched twice"
        return self.functions.setdefault(name, FakeFunction(name))


class FakeGpu:
    """NumPy arrays stand for CuPy's; a Far is one on another device. 227 KiB of shared memory, as on an H100."""

    def __init__(self):
        self.current, self.modules, self.permitted = 0, [], []

    def device(self):
        return self.current

    def arch(self, device):
        return "90"

    def is_array(self, value):
        return isinstance(value, np.ndarray) and not isinstance(value, Host)

    def device_of(self, array):
        return 1 if isinstance(array, Far) else 0

    def address(self, array):
        return array.ctypes.data

    def load(self, cubin):
        assert cubin == b"cubin"
        self.modules.append(FakeModule())
        return self.modules[-1]

    def function(self, module, name):
        return module.get_function(name)

    def allow_shared(self, function, nbytes):
        if nbytes > 227 * 1024:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        self.permitted.append((function.name, nbytes))


class Host(np.ndarray):
    """An array that is not on the GPU."""


class Far(np.ndarray):
    """An array on the second GPU."""


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.jobs = []
    monkeypatch.setattr(kernels, "open_gpu", lambda: made)
    monkeypatch.setattr(nvrtc, "build", lambda job, cache: made.jobs.append(job) or Built(b"cubin", ""))
    return made


@pytest.fixture
def mix(tmp_path):
    file = tmp_path / "mix.cu"
    file.write_text(MIX)
    return file


def aligned(shape, dtype=np.float32, offset=0):
    """Zeros at a multiple of 64 bytes, plus an offset."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def right(R=3, Hk=2, Hv=5, K=4, pitch=32):
    """Arguments of `mix` that are as declared."""
    out = aligned((R * pitch,), ml_dtypes.bfloat16)
    steps = (2 * pitch, K, 2)
    return {
        "q": aligned((R, Hk, K), ml_dtypes.bfloat16),
        "bias": aligned((2 * Hk * K + Hv,)),
        "ids": aligned((R,), np.int32),
        "out": np.lib.stride_tricks.as_strided(out, (R, Hv, K // 2), steps),
        "Hv": Hv,
        "Pitch": pitch,
        "eps": 1e-6,
        "last": False,
        "seed": 7,
    }


def run(file, args, name="mix", grid=3, block=128, constants=CONSTANTS, **more):
    launch(file, name, grid, block, args, constants=constants, **more)


# ---- what arrives ----


def test_scalars_arrive_in_the_declared_type_and_arrays_as_addresses(gpu, mix):
    args = right()
    run(mix, args, grid=(3, 2), block=(32, 4), shared=100, stream="s")
    ((grid, block, values, shared, stream),) = gpu.modules[0].functions["mix"].calls
    assert (grid, block, shared, stream) == ((3, 2, 1), (32, 4, 1), 100, "s")
    kinds = [np.uint64, np.uint64, np.uint64, np.uint64, np.int32, np.int64, np.float32, np.bool_, np.uint32]
    assert [type(v) for v in values] == kinds
    assert values == [args[n].ctypes.data for n in ("q", "bias", "ids", "out")] + [5, 32, np.float32(1e-6), False, 7]


def test_a_null_pointer_arrives_as_eight_zero_bytes(gpu, mix):
    run(mix, right() | {"bias": None, "Hv": np.int64(5), "eps": np.float64(0.5), "last": np.True_, "seed": 2**32 - 1})
    values = gpu.modules[0].functions["mix"].calls[0][2]
    assert values[1] == 0 and values[1].nbytes == 8 and values[-1] == 2**32 - 1


def test_a_kernel_is_compiled_once_for_each_set_of_constants_and_device(gpu, mix):
    for _ in range(3):
        run(mix, right())
    run(mix, right(K=8), constants=CONSTANTS | {"K": np.int64(8)})
    assert [job.sizes for job in gpu.jobs] == ["K=4 Act=bf16 Fast=true", "K=8 Act=bf16 Fast=true"]
    assert len(gpu.modules[0].functions["mix"].calls) == 3
    run(mix, {"x": aligned((4,)), "big": 2**64 - 1, "d": 10**300}, name="other")
    assert len(gpu.modules) == 2, "two kernels of a file share a module"
    gpu.current = 1
    run(mix, {n: a.view(Far) if isinstance(a, np.ndarray) else a for n, a in right().items()})
    assert len(gpu.modules) == 3, "a module belongs to one device"


def test_shared_memory_is_permitted_once(gpu, mix):
    """However little: with what the kernel holds by itself it may pass the 48 KiB that need no permission."""
    for shared in (0, 40_000, 100_000, 100_000, 60_000, 227 * 1024):
        run(mix, right(), shared=shared)
    assert gpu.permitted == [("mix", 40_000), ("mix", 100_000), ("mix", 227 * 1024)]
    with pytest.raises(KernelError, match=r"mix asks for 232449 bytes of dynamic shared memory.*use smaller tiles"):
        run(mix, right(), shared=227 * 1024 + 1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_any_one_extent_that_is_off_is_found(tmp_path_factory, R, Hk, Hv, data):
    file = tmp_path_factory.getbasetemp() / "extents.cu"
    file.write_text(MIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "open_gpu", FakeGpu)
        patch.setattr(nvrtc, "build", lambda job, cache: Built(b"cubin", ""))
        args = right(R, Hk, Hv)
        run(file, args)
        name = data.draw(st.sampled_from(["q", "bias", "ids", "out"]))
        axis = data.draw(st.integers(0, args[name].ndim - 1))
        shape = list(args[name].shape)
        shape[axis] += data.draw(st.sampled_from([-1, 1, 7]))
        args[name] = np.lib.stride_tricks.as_strided(args[name], shape, args[name].strides)
        with pytest.raises(KernelError, match=r"^extents.cu: mix: .*expected \[|, declared `"):
            run(file, args)


# ---- what is refused ----


def bf16(*shape):
    return aligned(shape, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bias": aligned((21,), np.float64)}, "bias is float64 [21], declared `const float* __restrict__ bias, // ["),
        (
            {"q": aligned((3, 2, 4))},
            "q is float32 [3, 2, 4], declared `const Act* __restrict__ q, // [R, Hk, K]`; pass bf",
        ),
        ({"q": aligned((3, 2, 4), np.uint16)}, "pass bfloat16: array.view(ml_dtypes.bfloat16) if these are its bits"),
        ({"q": bf16(3, 2, 5)}, "q is bfloat16 [3, 2, 5]"),
        (
            {"q": bf16(3, 2, 5)},
            "expected [3, 2, 4] (R = 3 by axis 0 of q, Hk = 2 by axis 1 of q, K = 4 by the constants)",
        ),
        ({"q": bf16(3, 8)}, "pass an array of 3 axes"),
        ({"q": bf16(2, 3, 4).swapaxes(0, 1)}, "q is bfloat16 [3, 2, 4] but not C-contiguous"),
        ({"bias": aligned((20,))}, "bias is float32 [20], declared"),
        (
            {"bias": aligned((20,))},
            "expected [21] (Hk = 2 by axis 1 of q, K = 4 by the constants, Hv = 5 by the argument Hv)",
        ),
        ({"ids": aligned((4,), np.int32)}, "ids is int32 [4], declared `const int* ids, // [R]`; expected [3]"),
        ({"ids": aligned((3,), np.int64)}, "ids is int64 [3]"),
        ({"ids": aligned((3,), np.uint32)}, "ids is uint32 [3]"),
        ({"ids": None}, "ids is None, declared `const int* ids, // [R]`; pass an array on the GPU"),
        ({"ids": 5}, "ids is a int"),
        ({"ids": [1, 2, 3]}, "ids is a list"),
        ({"bias": 0}, "pass an array on the GPU or None"),
        (
            {"ids": np.zeros(3, np.int32).view(Host)},
            "ids is a NumPy array, declared `const int* ids, // [R]`; copy it to",
        ),
        (
            {"ids": aligned((3,), np.int32).view(Far)},
            "ids is on device 1, declared `const int* ids, // [R]`; the current",
        ),
        ({"Hv": 5.0}, "Hv is 5.0 (float), declared `int Hv,`; pass an integer in its range"),
        ({"Hv": True}, "Hv is True (bool)"),
        ({"Hv": 2**31}, "Hv is 2147483648 (int)"),
        ({"Pitch": 2**63}, "Pitch is 9223372036854775808 (int), declared `long long Pitch,`"),
        ({"seed": -1}, "seed is -1 (int), declared `unsigned seed)`"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"eps": 1e39}, "eps is 1e+39 (float), declared `float eps,`; pass a finite number in its range"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": "1"}, "eps is '1' (str)"),
        ({"eps": None}, "eps is None (NoneType)"),
        ({"eps": np.ones(1)}, "eps is an array, declared `float eps,`; pass a Python number"),
        ({"last": 1}, "last is 1 (int), declared `bool last,`; pass True or False"),
        ({"Hv": 6}, "out is bfloat16 [3, 5, 2]"),
        ({"Pitch": 33}, "out is of strides [32, 2, 1] (elements), declared"),
        ({"extra": 1}, "mix: unknown: extra. Its parameters are q, bias, ids, out, Hv, Pitch, eps, last, seed"),
    ],
)
def test_wrong_arguments(gpu, mix, change, message):
    args = right() | change
    if "bias" not in change and "Hv" in change:
        args["bias"] = None
    with pytest.raises(KernelError) as caught:
        run(mix, args)
    assert str(caught.value).startswith("mix.cu: mix: ") and message in str(caught.value)
    assert not gpu.modules, "nothing is compiled for arguments that are wrong"


def test_missing_arguments_are_all_named(gpu, mix):
    args = right()
    del args["q"], args["eps"]
    with pytest.raises(KernelError, match=re.escape("mix: missing: q, eps. Its parameters are q, bias")):
        run(mix, args)


def test_a_view_that_is_not_aligned(gpu, mix):
    args = right()
    whole = aligned((3 * 32 + 8,), ml_dtypes.bfloat16, offset=2)
    args["out"] = np.lib.stride_tricks.as_strided(whole, (3, 5, 2), (64, 4, 2))
    with pytest.raises(KernelError, match="out is a view at address .*must be a multiple of 16: pass a copy"):
        run(mix, args)


def test_letters_must_agree_with_dims_and_constants(gpu, mix):
    run(mix, right(), dims={"R": 3, "Hk": 2})
    with pytest.raises(KernelError, match=re.escape("ids is int32 [3]") + "|" + re.escape("q is bfloat16 [3, 2, 4]")):
        run(mix, right(), dims={"R": 4})
    with pytest.raises(KernelError, match="Hv is 9 by dims and 5 by the argument Hv; make them agree"):
        run(mix, right(), dims={"Hv": 9})


def test_a_size_that_nothing_states(gpu, tmp_path):
    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void k(\n  float* x,  // [2*N]\n  int n)\n{}\n')
    args = {"x": aligned((6,)), "n": 3}
    with pytest.raises(KernelError, match=re.escape("nothing says what N is in `float* x, // [2*N]`; give it in dims")):
        launch(file, "k", 1, 1, args)
    launch(file, "k", 1, 1, args, dims={"N": 3})
    file = tmp_path / "z.cu"
    file.write_text('extern "C" __global__ void k(\n  float* x,  // [6/N]\n  int N)\n{}\n')
    with pytest.raises(KernelError, match="6/N in .* divides by zero"):
        launch(file, "k", 1, 1, {"x": aligned((6,)), "N": 0})


@pytest.mark.parametrize("part", [slice(0, 6), slice(1, 7), slice(2, 4)])
def test_a_written_array_must_not_overlap_another_restricted_one(gpu, tmp_path, part):
    file = tmp_path / "k.cu"
    lines = (
        "const float* __restrict__ a,  // [A]\n const float* __restrict__ b,  // [B]\n float* __restrict__ out)  // [C]"
    )
    file.write_text(f'extern "C" __global__ void k(\n{lines}\n{{}}\n')
    x, free = aligned((8,)), aligned((3,))
    launch(file, "k", 1, 1, {"a": x, "b": x[part], "out": free})
    with pytest.raises(KernelError, match="out is in the same memory as a, declared .*pass separate arrays"):
        launch(file, "k", 1, 1, {"a": x, "b": free, "out": x[part]})
    launch(file, "k", 1, 1, {"a": x[:2], "b": x[2:3], "out": x[3:]})


@pytest.mark.parametrize(
    "constants, message",
    [
        (
            {"K": 4, "Act": "bf16"},
            "its compile-time constants are K, Act, Fast (`// sizes:` in the file), the launch gives K,",
        ),
        (None, "the launch gives none"),
        (CONSTANTS | {"D": 3}, "the launch gives K, Act, Fast, D"),
        (CONSTANTS | {"K": 4.0}, "the constant K must be an integer; the launch gives 4.0"),
        (CONSTANTS | {"K": True}, "the constant K must be an integer; the launch gives True"),
        (CONSTANTS | {"K": "bf16"}, "the constant K must be an integer; the launch gives 'bf16'"),
        (CONSTANTS | {"Fast": 1}, "the constant Fast must be True or False; the launch gives 1"),
        (CONSTANTS | {"Act": "bfloat16"}, "the constant Act must be a type (bf16, half, fp8, float"),
    ],
)
def test_wrong_constants(gpu, mix, constants, message):
    with pytest.raises(KernelError, match="^mix.cu: .*" + re.escape(message)):
        run(mix, right(), constants=constants)


@pytest.mark.parametrize("grid", [0, -1, (1, 65536), (1, 1, 65536), 2**31, (), (1, 1, 1, 1)])
def test_a_grid_that_cannot_be(gpu, mix, grid):
    with pytest.raises(KernelError, match=r"mix.cu: mix: the grid is .*do not launch when there is nothing to do"):
        run(mix, right(), grid=grid)


@pytest.mark.parametrize("block", [0, 1025, (1, 1, 65), (64, 32)])
def test_a_block_that_cannot_be(gpu, mix, block):
    with pytest.raises(KernelError, match=r"mix.cu: mix: the block "):
        run(mix, right(), block=block)
    with pytest.raises(KernelError, match="-1 bytes of shared memory"):
        run(mix, right(), shared=-1)


def test_an_unknown_kernel_or_file(gpu, mix, tmp_path):
    with pytest.raises(KernelError, match=r"mix.cu has no kernel 'mixed'; it has mix, other"):
        run(mix, right(), name="mixed")
    with pytest.raises(KernelError, match=r"gone.cu: the kernel file cannot be read"):
        run(tmp_path / "gone.cu", right())


def test_a_kernel_of_another_architecture(gpu, tmp_path):
    file = tmp_path / "k.cu"
    file.write_text('// arch: 100a\nextern "C" __global__ void k(\n  int n)\n{}\n')
    with pytest.raises(KernelError, match=r"k.cu runs on sm_100a only .* not on sm_90; choose another kernel"):
        launch(file, "k", 1, 1, {"n": 1})


def test_what_the_driver_refuses(gpu, mix, monkeypatch):
    run(mix, right())
    gpu.modules[0].functions["mix"].error = RuntimeError("CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(KernelError, match=r"mix.cu: mix: CUDA refuses the launch with grid \(3, 1, 1\).*LAUNCH_FAILED"):
        run(mix, right())

    def refuse(cubin):
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(gpu, "load", refuse)
    with pytest.raises(KernelError, match=r"mix.cu for sm_90 with K=8 .*: the driver refuses .*NO_BINARY"):
        run(mix, right(K=8), constants=CONSTANTS | {"K": 8})


def test_arrays_of_layers_are_checked_one_by_one_and_passed_by_value(gpu, tmp_path, monkeypatch):
    file, seen = tmp_path / "each.cu", []
    file.write_text(
        'extern "C" __global__ void k(\n  const __grid_constant__ Each<const float> x,  // [R, 4] strides [Ld, 1]\n'
        "  int Ld)\n{ }\n"
    )
    monkeypatch.setattr(FakeGpu, "launch_directly", lambda *a: seen.append(a[1:]), raising=False)
    layers = [aligned((3, 8))[:, :4] for _ in range(5)]
    launch(file, "k", 1, 32, {"x": layers, "Ld": 8})
    ((_, early, _, _, (value, pitch), *_),) = seen
    assert not early and pitch == 8 and value.nbytes == 8 * 96
    assert np.frombuffer(value.tobytes(), np.uint64).tolist() == [x.ctypes.data for x in layers] + [0] * 91
    for wrong, message in [
        ([], "a list of 0, .*pass a list of 1 to 96 arrays"),
        (layers * 20, "a list of 100, "),
        (layers[0], "a ndarray, "),
        ([*layers, None], "x is None"),
        ([*layers, aligned((2, 8))[:, :4]], r"float32 \[2, 4\].*expected \[3, 4\]"),
        ([*layers, aligned((3, 9))[:, :4]], r"strides \[9, 1\]"),
        ([*layers, aligned((3, 8), np.float64)[:, :4]], "pass float32"),
    ]:
        with pytest.raises(KernelError, match=message):
            launch(file, "k", 1, 32, {"x": wrong, "Ld": 8})
    (optional := tmp_path / "null.cu").write_text(file.read_text().replace("1]\n", "1] or null\n"))
    launch(optional, "k", 1, 32, {"x": None, "Ld": 8})  # as a whole
    assert seen[-1][4][0].tobytes() == bytes(8 * 96)
    with pytest.raises(KernelError, match="x is None"):
        launch(optional, "k", 1, 32, {"x": [*layers, None], "Ld": 8})


def test_a_matrix_read_in_boxes_is_checked_and_passed_by_value(gpu, tmp_path, monkeypatch):
    file, seen = tmp_path / "boxes.cu", []
    file.write_text(
        "// sizes: Rows=8\n"
        'extern "C" __global__ void k(\n'
        "  const __grid_constant__ TensorMap<const bf16> x,  // [R, D] strides [Ld, 1] box [Rows]\n"
        "  const __grid_constant__ TensorMap<const bf16> y,  // [R, D] box [Rows] or null\n"
        "  int D,\n  int Ld)\n{ }\n"
    )
    bf16 = ml_dtypes.bfloat16
    monkeypatch.setattr(FakeGpu, "launch_directly", lambda *a: seen.append(a[1:]), raising=False)
    monkeypatch.setattr(FakeGpu, "tensor_map", lambda self, array, box: np.void(bytes(box) * 128), raising=False)

    def go(x, D=8, Ld=16, Rows=8):
        launch(file, "k", 1, 32, {"x": x, "y": None, "D": D, "Ld": Ld}, constants={"Rows": Rows})

    go(aligned((3, 16), bf16)[:, :8])
    ((_, early, _, _, (value, null, *_), *_),) = seen
    assert not early and value.tobytes() == bytes([8]) * 128 and null.tobytes() == bytes(128)
    for wrong, message in [
        (lambda: go(aligned((3, 16), bf16)[:, :8], Rows=257), "read in boxes of 257 rows, .*1 to 256 are possible"),
        (lambda: go(aligned((3, 16), bf16)[:, 1:9]), "at address .* with rows 32 bytes apart.*multiples of 16"),
        (lambda: go(aligned((3, 12), bf16)[:, :8], Ld=12), "with rows 24 bytes apart"),
        (lambda: go(aligned((3, 16), bf16)), r"\[3, 16\].*D = 8|D is 8 .*16"),
        (lambda: go(aligned((3, 16))[:, :8]), "pass bfloat16"),
        (lambda: go(None), "x is None"),
    ]:
        with pytest.raises(KernelError, match=message):
            wrong()
