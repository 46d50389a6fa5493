"""The emulator of tests/emulator.py: what its threads exchange, what it finds, and its number types."""

import re

import ml_dtypes
import numpy as np
import pytest

from boleinfer import device, kernels
from boleinfer.declaration import KernelError
from boleinfer.ops.norms import rms_norm
from tests import emulator
from tests.emulator import EmulatedArray, emulated

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())

HEAD = '#include "mma.cuh"\nextern "C" __global__ void k(\n'
FLOATS = HEAD + "    const float* x,  // [N]\n    float* y)  // [M]\n{\n  const int t = threadIdx.x;\n%s\n}\n"


@pytest.fixture
def run(tmp_path):
    """run(body, x, shape of y, block) -> y of a kernel of floats."""

    def go(body, x, shape, block=32, grid=1, shared=0, order="forward", seed=0):
        path = tmp_path / f"k{len(list(tmp_path.iterdir()))}.cu"
        path.write_text(FLOATS % body)
        with emulated(order, seed):
            given = device.upload(np.asarray(x, np.float32).reshape(-1))
            y = device.empty(int(np.prod(shape)), np.float32)
            kernels.launch(path, "k", grid, block, {"x": given, "y": y}, shared=shared)
        return y.get().reshape(shape)

    return go


@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("act,bound", [("float", 1e-6), ("bf16", 4e-3)])
def test_a_kernel_agrees_with_its_definition(order, act, bound):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 264)).astype(device.dtype(act)), rng.standard_normal(264).astype(np.float32)
    with emulated(order):
        out = device.empty(x.shape, x.dtype)
        args = {"x": device.upload(x), "w": device.upload(w), "out": out, "D": 264, "eps": 1e-6}
        kernels.launch("rms_norm.cu", "rms_norm", 5, 96, args, constants={"Act": act})
        expected = rms_norm(x.astype(np.float64), w.astype(np.float64), 1e-6)
        assert np.linalg.norm(device.download(out).astype(np.float64) - expected) <= bound * np.linalg.norm(expected)
        with pytest.raises(KernelError, match=r"expected \[5, 264\]"):
            kernels.launch("rms_norm.cu", "rms_norm", 5, 96, args | {"out": out[1:]}, constants={"Act": act})
        with pytest.raises(KernelError, match="1024 threads.*at most|bound|2048"):
            kernels.launch("rms_norm.cu", "rms_norm", 5, 2048, args, constants={"Act": act})


# ---- exchange --------------------------------------------------------------------------------------------------------

SHUFFLES = {
    "__shfl_sync(ALL_LANES, v, 3)": lambda x: np.full(32, x[3]),
    "__shfl_sync(ALL_LANES, v, 2, 8)": lambda x: np.repeat(x[2::8], 8),
    "__shfl_xor_sync(ALL_LANES, v, 5)": lambda x: x[np.arange(32) ^ 5],
    "__shfl_up_sync(ALL_LANES, v, 3)": lambda x: np.concatenate([x[:3], x[:-3]]),
    "__shfl_down_sync(ALL_LANES, v, 1, 16)": lambda x: np.concatenate([x[1:16], x[15:16], x[17:], x[31:]]),
    "float(__ballot_sync(0xffffu, v > 0) >> 8)": None,
    "__any_sync(ALL_LANES, t % 32 == 9)": lambda x: np.ones(32),
    "__all_sync(ALL_LANES, t % 32 != 9)": lambda x: np.zeros(32),
    "__popc(__match_any_sync(ALL_LANES, t / 8))": lambda x: np.full(32, 8),
    "__reduce_max_sync(ALL_LANES, t * 3 % 32)": lambda x: np.full(32, 31),
    "__reduce_add_sync(ALL_LANES, 1u)": lambda x: np.full(32, 32),
    "min(t % 32, 3u) + max(0, t % 32 - 30) + max(min(v, v + 1), nan()) - v": lambda x: (
        np.minimum(np.arange(32), 3) + np.maximum(0, np.arange(32) - 30)
    ),
    "warp_sum(v)": lambda x: np.full(32, x.sum()),
}


@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("expression", SHUFFLES)
def test_exchange_within_a_warp(run, expression, order):
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    guard = "if (t % 32 < 16) " if "0xffffu" in expression else ""
    y = run(f"  const float v = x[t];\n  {guard}y[t] = {expression};", x, (2, 32), block=64, order=order)
    for out, row in zip(y, x.reshape(2, 32)):
        if guard:
            votes = np.packbits(row[8:16] > 0, bitorder="little")[0]
            assert (out[:16] == votes).all() and np.isnan(out[16:]).all()
        else:
            assert np.allclose(out, SHUFFLES[expression](row), atol=1e-5)


def test_halves_of_a_warp_go_their_own_ways(run):
    body = """  float v = x[t];
  if (t < 16) { for (int i = 1; i < 16; i *= 2) v += __shfl_xor_sync(0x0000ffffu, v, i); }
  else { for (int i = 1; i < 4; i *= 2) v += __shfl_xor_sync(0xffff0000u, v, i); }
  __syncwarp();
  y[t] = v;"""
    y = run(body, np.arange(32), 32)
    assert (y[:16] == 120).all() and (y[16:] == np.repeat([70, 86, 102, 118], 4)).all()


@pytest.mark.parametrize("order", emulator.ORDERS)
def test_block_barriers_and_dynamic_shared_memory(run, order):
    body = """  extern __shared__ float s[];
  s[t] = x[t];
  const int positive = __syncthreads_count(x[t] > 0);
  y[t] = s[blockDim.x - 1 - t] + positive + 1000 * __syncthreads_and(t < 96) + 2000 * __syncthreads_or(t == 5);"""
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    y = run(body, x, 96, block=96, shared=384, order=order)
    assert np.allclose(y, x[::-1] + (x > 0).sum() + 3000)


def test_threads_that_ended_do_not_hold_up_a_barrier(run):
    assert run("  if (t >= 40) return;\n  __syncthreads();\n  y[t] = 1;", [0], 64, block=64).tolist()[:40] == [1] * 40


def test_atomics_and_block_indices(run):
    body = "  if (t == 0) y[blockIdx.x] = 0;\n  __syncthreads();\n  atomicAdd(&y[blockIdx.x], float(threadIdx.y + 1));"
    assert run(body, [0], 3, block=(4, 2), grid=3).tolist() == [12, 12, 12]


# ---- fragments -------------------------------------------------------------------------------------------------------

PRODUCT = """
  __shared__ alignas(16) bf16 A[16][24], W[16][24], V[16][24];
  for (int i = t; i < 256; i += 32) {
    A[i / 16][i % 16] = from_float<bf16>(x[i]);
    W[i / 16][i % 16] = from_float<bf16>(x[256 + i]);
    V[i / 16][i % 16] = from_float<bf16>(x[256 + i]);
  }
  __syncwarp();
  unsigned a[4], w[4], v[4];
  ldmatrix_x4(a, &A[t % 16][8 * (t / 16)]);
  ldmatrix_x4(w, &W[t % 8 + 8 * (t / 16)][8 * (t / 8 % 2)]);
  ldmatrix_x4_trans(v, &V[t % 16][8 * (t / 16)]);
  for (int n = 0; n < 2; n++) {
    float d[4] = {1, 1, 1, 1}, e[4] = {};
    const unsigned bw[2] = {w[2 * n], w[2 * n + 1]}, bv[2] = {v[2 * n], v[2 * n + 1]};
    mma_m16n8k16(d, a, bw);
    mma_m16n8k16(e, a, bv);
    for (int i = 0; i < 4; i++) {
      const int at = 16 * (t / 4 + 8 * (i / 2)) + 8 * n + 2 * (t % 4) + i % 2;
      y[at] = d[i];
      y[256 + at] = e[i];
    }
  }"""


@pytest.mark.parametrize("order", emulator.ORDERS)
def test_products_of_fragments(run, order):
    x = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(ml_dtypes.bfloat16).astype(np.float32)
    y = run(PRODUCT, x, (2, 16, 16), order=order)
    assert np.allclose(y[0], 1 + x[0] @ x[1].T, atol=1e-5) and np.allclose(y[1], x[0] @ x[1], atol=1e-5)


COPY = """  __shared__ alignas(16) float s[2][128];
  cp_async16(&s[0][4 * t], x + 4 * t, true);
  cp_async_commit();
  cp_async16(&s[1][4 * t], x + 128 + 4 * t, t %% 2 == 0);
  cp_async_commit();
  cp_async_wait<%d>();
  __syncwarp();
  for (int i = t; i < 256; i += 32) y[i] = s[i / 128][i %% 128];"""


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_copies_arrive_at_the_wait(run, groups):
    x = np.arange(256, dtype=np.float32)
    y = run(COPY % groups, x, (2, 32, 4))
    assert (y[0] == x[:128].reshape(32, 4)).all() if groups < 2 else np.isnan(y[0]).all()
    second = np.where(np.arange(32)[:, None] % 2, 0, x[128:].reshape(32, 4))
    assert (y[1] == second).all() if groups == 0 else np.isnan(y[1]).all()


# ---- tiles and warpgroups --------------------------------------------------------------------------------------------

TILES = """#include "tma.cuh"
#include "wgmma.cuh"
extern "C" __global__ void k(
    const __grid_constant__ TensorMap<const bf16> a,  // [M, 128] box [64]
    const __grid_constant__ TensorMap<const bf16> b,  // [N, 128] box [16]
    float* y)  // [64, 16]
{
  extern __shared__ uint4 tiles[];
  __shared__ Barrier full[2], empty;
  char* const at = reinterpret_cast<char*>(tiles);  // a [64, 64], then b [16, 64]
  const int t = threadIdx.x;
  if (t == 0) make_barrier(full[0], 1), make_barrier(full[1], 1), make_barrier(empty, 4), barriers_made();
  __syncthreads();
  if (t == 128) {
    for (int i = 0; i < 2; i++) {
      EMPTY
      arrive_expecting(full[i], BYTES);
      load_tile(at, a, full[i], 64 * i, 1);
      load_tile(at + 8192, b, full[i], 64 * i, 0);
    }
  }
  if (t >= 128) return;
  float d[8] = {};
  for (int i = 0; i < 2; i++) {
    FULL
    wgmma_begin();
    for (int step = 0; step < 4; step++) wgmma(d, Tile(at), Tile(at + 8192), step);
    wgmma_end();
    DONE
    if (t % 32 == 0) arrive(empty);
  }
  for (int i = 0; i < 8; i++) {
    y[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * (t % 4) + i % 2] = d[i];
  }
}
"""
RIGHT = {
    "EMPTY": "if (i) wait(empty, 0);",
    "FULL": "wait(full[i], 0);",
    "BYTES": "8192 + 2048",
    "DONE": "wgmma_wait<0>();",
}


@pytest.fixture
def tiles(tmp_path):
    """tiles(order, **changes of RIGHT) -> y and what it should be: rows 1 .. 64 of a, of which the last is missing."""

    def go(order="forward", **changes):
        text, path = TILES, tmp_path / "k.cu"
        for name, code in {**RIGHT, **changes}.items():
            text = text.replace(name, code)
        path.write_text(text)
        kernels.kernel_file.cache_clear()
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((rows, 128)).astype(ml_dtypes.bfloat16) for rows in (64, 16))
        with emulated(order):
            y = device.empty((64, 16), np.float32)
            kernels.launch(path, "k", 1, 160, {"a": device.upload(a), "b": device.upload(b), "y": y}, shared=10240)
        below = np.concatenate((a[1:], np.zeros_like(a[:1]))).astype(np.float64)
        return y.get(), below @ b.astype(np.float64).T

    return go


@pytest.mark.parametrize("order", emulator.ORDERS)
def test_products_of_tiles(tiles, order):
    y, expected = tiles(order)
    assert np.allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"FULL": ""},  # nobody waits for the tiles
        {"FULL": "if (i == 0) wait(full[0], 0);"},
        {"FULL": "wait(full[i], 1);"},  # the parity of the phase before, which is always over
        {"EMPTY": ""},  # tiles are overwritten while they are read
        {"EMPTY": "if (i) wait(empty, 1);"},
        {"DONE": ""},  # nobody waits for the products
        {"DONE": "wgmma_wait<1>();"},
        {"BYTES": "8192"},
        {"BYTES": "16384"},
        {"FULL": "wait(full[i], 0);\n if (t < 32) continue;"},
    ],
)
def test_a_warpgroup_that_does_not_wait_is_found(tiles, changes):
    for order in emulator.ORDERS:
        try:
            y, expected = tiles(order, **changes)
            assert not np.allclose(y, expected, atol=1e-4)
        except KernelError as error:
            assert re.search("deadlock|nobody waits for load_tile", str(error))


# ---- what is found ---------------------------------------------------------------------------------------------------

WRONG = {
    "  if (t < 32) __syncthreads();\n  else __syncwarp(0x1u);": "the lane is not in its own mask",
    "  if (t < 5) warp_sum(x[t]);\n  else __syncthreads();": (
        r"block \(0, 0, 0\): deadlock. 5 threads at __shfl_xor_sync common.cuh:\d+, mask ffffffff \(first: thread 0\). "
        r"59 threads at __syncthreads k0.cu:\d+ \(first: thread 5\)."
    ),
    "  if (t >= 16) return;\n  warp_sum(x[t]);": "48 threads ended",
    "  y[64 + t] = 1;": "wrote outside an array of float32",
    "  y[t - 64] = 1;": "wrote outside an array of float32",
    "  *(float*)(unsigned long long)t = 1;": r"thread \(\d, 0, 0\).*(null|memory access|no multiple)",
    "  y[t << 28] = 1;": "thread .*an illegal memory access",
    "  *(float2*)(y + 1) = float2{0, 0};": r"k0.cu:\d+: an access to address .* no multiple of 8",
    "  __shared__ float s[4];\n  s[t] = 1;": r"thread \(4, 0, 0\): k0.cu:\d+: index 4 is outside the array",
    "  extern __shared__ float s[];\n  s[t] = 1;": "wrote beyond the 16 bytes of dynamic shared memory",
    "  y[t] = 100 / (t - 3);": "thread .*division by zero",
    "  assert(t < 7);": r"thread \(7, 0, 0\): assert\(t < 7\) at k0.cu:\d+",
    "  unsigned r[4];\n  ldmatrix_x4(r, x);": "ldmatrix k0.cu:.*not in shared memory",
    "  __shared__ float s[256];\n  cp_async16(s + t, x, true);": "cp_async16 k0.cu:.*no multiple of 16",
    "  return nothing;": "k0.cu does not compile with g",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_said(run, body):
    with pytest.raises(KernelError, match=WRONG[body]):
        run(body, np.zeros(64), 64, block=64, shared=16)
    assert run("  y[t] = 1;", [0], 32).all()  # and the next launch runs


def test_a_race_shows_in_another_order(run):
    body = "  __shared__ float s[64];\n  s[t] = x[t];\n  y[t] = s[(t + 32) % 64];"
    x = np.arange(64)
    found = [np.array_equal(run(body, x, 64, block=64, order=order), (x + 32) % 64) for order in emulator.ORDERS]
    assert not any(found)
    later = "  __shared__ float s[64];\n  s[t] = x[t];\n  if (t >= 32) y[t - 32] = s[t - 32];"
    assert run(later, x, 32, block=64).tolist() == list(range(32))  # warp 0 happens to be first
    assert np.isnan(run(later, x, 32, block=64, order="reverse")).any()


def test_shared_memory_and_new_arrays_are_poisoned(run):
    assert np.isnan(run("  __shared__ float s[32];\n  if (*x > 0) s[t] = 1;\n  y[t] = s[t];", [0], 32, grid=2)).all()
    assert np.isnan(run("  extern __shared__ float s[];\n  y[t] = s[t];", [0], 32, shared=128)).all()
    assert np.isnan(run("", [0], 32)).all()


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with emulated():
        on = device.upload(x)
        assert (
            device.on_gpu(on) and device.on_gpu(on[1:, :2].reshape(4)) and isinstance(on.view(np.int32), EmulatedArray)
        )
        assert (
            type(on.get()) is np.ndarray and np.array_equal(device.download(on[1]), x[1]) and on.ctypes.data % 512 == 0
        )
        on.set(x + 1)
        device.fill(on[2:], 0)
        assert np.array_equal(on.get(), np.concatenate([x[:2] + 1, np.zeros((1, 4))]))
        for arithmetic in (lambda: on + 1, lambda: np.concatenate([on, on]), lambda: on.sum()):
            with pytest.raises(TypeError, match="launch a kernel"):
                arithmetic()


# ---- number types ----------------------------------------------------------------------------------------------------

CONVERT = """extern "C" __global__ void k(
    const float* x,  // [N]
    T* y,            // [N]
    const T* z,      // [M]
    float* w)        // [M]
{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 16384) y[i] = from_float<T>(x[i]);
  w[i] = to_float(z[i]);
}
"""


@pytest.mark.parametrize("name", ["bf16", "half", "fp8"])
def test_number_types_round_as_ml_dtypes(tmp_path, name):
    path = tmp_path / "convert.cu"
    path.write_text(f"// sizes: T={name}\n{CONVERT}")
    kind = device.dtype(name)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(16384) * 2.0 ** rng.integers(-26, 8, 16384)).astype(np.float32)
    every = np.arange(65536).astype(f"u{kind.itemsize}").view(kind)
    halfway = (every[:8192].astype(np.float32) + every[1:8193].astype(np.float32)) / 2  # ties
    x[:8192] = np.where(np.isfinite(halfway) & (np.abs(halfway) < 448), halfway, -0.0)
    with emulated():
        y, w = device.empty(16384, kind), device.empty(65536, np.float32)
        args = {"x": device.upload(x), "y": y, "z": device.upload(every), "w": w}
        kernels.launch(path, "k", 256, 256, args, constants={"T": name})
    expected = np.clip(x, -448, 448).astype(kind) if name == "fp8" else x.astype(kind)
    assert np.array_equal(y.get().view(f"u{kind.itemsize}"), expected.view(f"u{kind.itemsize}"))
    assert np.array_equal(w.get(), every.astype(np.float32), equal_nan=True)


# ---- one launch after another ----------------------------------------------------------------------------------------

LATE = {  # what a thread does, and whether it may, where y holds its number: z = 2 y
    "after_previous();\n  z[t] = 2.0f * y[t];": True,
    "const float early = y[t];\n  after_previous();\n  z[t] = 2.0f * early;": False,
    "if (t >= 32) after_previous();\n  z[t] = 2.0f * y[t];": False,
    "if (t >= 32) after_previous();\n  __syncthreads();\n  z[t] = 2.0f * y[t];": True,
    "z[t] = 2.0f * t;\n  after_previous();\n  if (y[t] != t) z[t] = 1.0f;": False,
    "z[t] = 2.0f * y[t];\n  if (y == z) after_previous();": False,
    "after_all_previous();\n  z[t] = 2.0f * y[t];": True,
    "z[t] = 2.0f * y[t];": True,  # starts when all is done
}


@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("body", LATE)
def test_what_earlier_launches_wrote_is_seen_after_the_wait(tmp_path, body, order):
    first, second = tmp_path / "first.cu", tmp_path / "second.cu"
    given = "\n    const float* y,  // [N]\n    float* z)        // [N]\n{\n  const int t = threadIdx.x;\n  "
    for path, does in ((first, "after_previous();\n  z[t] = y[t];"), (second, body)):
        path.write_text(f'extern "C" __global__ void k({given}{does}\n}}\n')
    numbers = np.arange(64, dtype=np.float32)
    with emulated(order):
        x, y, z = device.upload(numbers), device.empty(64, np.float32), device.empty(64, np.float32)
        kernels.launch(first, "k", 1, 64, {"y": x, "z": z})  # z is written twice
        kernels.launch(first, "k", 1, 64, {"y": x, "z": y})
        kernels.launch(second, "k", 1, 64, {"y": y, "z": z})
        assert np.array_equal(z.get(), 2 * numbers) == LATE[body]


def test_behind_a_launch_that_all_wait_for_what_was_before_it_may_be_read_early(tmp_path):
    body = "\n    const float* y,  // [N]\n    float* z)        // [N]\n{\n  const int t = threadIdx.x;\n  "
    first, gate, second = (tmp_path / f"{name}.cu" for name in ("first", "gate", "second"))
    first.write_text(f'extern "C" __global__ void k({body}after_previous();\n  z[t] = y[t];\n}}\n')
    gate.write_text(f'extern "C" __global__ void k({body}after_all_previous();\n  z[t] = y[t];\n}}\n')
    second.write_text(
        f'extern "C" __global__ void k({body}const float x = y[t];\n  after_previous();\n  z[t] = x;\n}}\n'
    )
    numbers = np.arange(32, dtype=np.float32)
    with emulated():
        x, a, b, c, d = device.upload(numbers), *(device.empty(32, np.float32) for _ in range(4))
        kernels.launch(first, "k", 1, 32, {"y": x, "z": a})
        kernels.launch(gate, "k", 1, 32, {"y": a, "z": b})
        kernels.launch(second, "k", 1, 32, {"y": a, "z": c})
        kernels.launch(second, "k", 1, 32, {"y": b, "z": d})
    assert np.array_equal(c.get(), numbers)
    assert np.isnan(d.get()).all()
