"""What `boleinfer kernels` says of spills and errors, that every kernel compiles, and that Philox gives its bits."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from boleinfer import cli, kernel_report, nvrtc, sampling
from boleinfer.declaration import KernelError, parse, read
from boleinfer.kernels import cuda_folder
from boleinfer.nvrtc import Cache, Job
from tests.kernel_text import kernel

JOB = Job("k.cu", "// text", ("somewhere",), "90", "K=4")


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
ptxas         .     96 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 96 bytes cumulative stack size, 1152 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 372 bytes cmem[0]
"""


def two_kernels(header=""):
    text = header + kernel("").replace(" k(", " a(") + kernel("").replace(" k(", " b(")
    return parse(text, Path("two.cu"))


def test_the_compilers_log_is_read():
    a, b = kernel_report.usages(two_kernels("// spills: why\n"), JOB, LOG)
    assert (a.kernel, a.registers, a.shared_bytes, a.stack_bytes, a.spills) == ("a", 12, 0, 0, False)
    assert (b.registers, b.shared_bytes, b.stack_bytes, b.spill_store_bytes, b.spill_load_bytes) == (
        64,
        1152,
        96,
        44,
        44,
    )
    assert (b.file, b.sizes, b.arch, b.reason) == ("two.cu", "K=4", "90", "why") and b.spills
    with pytest.raises(KernelError, match="k.cu for sm_90 with K=4: the compiler's log says nothing of b"):
        kernel_report.usages(two_kernels(), JOB, LOG.replace("'b'", "'c'"))


@pytest.mark.parametrize("header, status", [("", 1), ("// spills: it is a test\n", 0)])
def test_spills_fail_unless_the_file_gives_a_reason(monkeypatch, capsys, header, status):
    found = kernel_report.usages(two_kernels(header), JOB, LOG)
    found += [type(u)(**(vars(u) | {"arch": "100"})) for u in found]
    monkeypatch.setattr(kernel_report, "report", lambda *asked: found)
    assert cli.main(["kernels"]) == status
    out = capsys.readouterr().out
    assert re.search(r"^b +K=4 +90,100 +64 +1152 +96 +44\+44  (SPILLS|it is a test)$", out, re.M)
    assert re.search(r"^a +K=4 +90,100 +12 +0 +0 +0$", out, re.M)
    assert ("registers spill in two.cu: use fewer" in out) == bool(status)
    assert cli.main(["kernels", "--json"]) == status
    rows = json.loads(capsys.readouterr().out)
    assert [(r["kernel"], r["arch"], r["spill_store_bytes"]) for r in rows[:3]] == [
        ("a", "90", 0),
        ("b", "90", 44),
        ("a", "100", 0),
    ]


def test_the_command_refuses_what_it_does_not_know(compiler, capsys):
    assert cli.main(["kernels", "no-such-kernel"]) == 2
    assert "no file is called like 'no-such-kernel'; there are accept.cu, " in capsys.readouterr().err
    assert cli.main(["kernels", "--arch", "90,x"]) == 2
    assert "cannot compile for sm_x; it knows" in capsys.readouterr().err


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cuda folder of one's own, with a blank in its name, and a cache beside it."""
    made = tmp_path / "my kernels"
    shutil.copytree(cuda_folder(), made, ignore=lambda _, names: [n for n in names if n.endswith(".cu")])
    monkeypatch.setattr(kernel_report, "cuda_folder", lambda: made)
    monkeypatch.setattr(kernel_report, "kernel_file", lambda name: read(made / name))
    monkeypatch.setattr(nvrtc, "default_cache", lambda: Cache(tmp_path / "my cache"))
    return made


def test_a_kernel_that_spills_is_found(compiler, folder):
    body = "  float v[64];\n" + "".join(f"  v[{i}] = x[{i} * n];\n" for i in range(64))
    body += "  __syncthreads();\n" + "".join(f"  x[{i}] = v[{i}] * v[{63 - i}];\n" for i in range(64))
    text = kernel(body, "// sizes: K=1,2\n").replace("void k(", "void __launch_bounds__(1024, 2) k(")
    (folder / "k.cu").write_text(text)
    found = kernel_report.report(["80", "90", "90a"])
    assert len(found) == 6 and {u.arch for u in found} == {"80", "90", "90a"}
    assert all(u.registers <= 32 and u.spill_store_bytes > 0 and u.spill_load_bytes > 0 for u in found)


def test_every_error_is_reported_once_and_the_rest_is_kept(compiler, folder, tmp_path):
    (folder / "good.cu").write_text(kernel("  x[0] = 1;"))
    (folder / "bad.cu").write_text(kernel("  x[0] = ;", "// sizes: K=1,2,3\n"))
    (folder / "ninety.cu").write_text(kernel("  x[0] = 1;", "// arch: 90a\n"))
    with pytest.raises(KernelError) as caught:
        kernel_report.report(["80", "90"], jobs=2)
    message = str(caught.value)
    assert message.startswith(
        "bad.cu for sm_80 with K=1 (and 5 more combinations) does not compile:\nbad.cu:6: error: "
    )
    assert message.count("error: ") == 1
    (folder / "bad.cu").unlink()
    assert len(list((tmp_path / "my cache").iterdir())) == 3
    assert [(u.file, u.arch) for u in kernel_report.report(["80", "90"])] == [
        ("good.cu", "80"),
        ("good.cu", "90"),
        ("ninety.cu", "90a"),
    ]


def test_all_kernels_compile_for_every_architecture_without_spills(compiler, capsys):
    """What CI must never let through; takes what `boleinfer kernels` left in the cache."""
    known = [arch for arch in kernel_report.ARCHS if int(arch) in compiler.archs]
    assert kernel_report.kernels(known) == 0, capsys.readouterr().out


# ---- random numbers ----

PHILOX = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
#include "philox.cuh"
int main() {
  unsigned long long seed; unsigned choice; long long position;
  while (scanf("%llu %u %lld", &seed, &choice, &position) == 3) {
    uint4 r = philox(uint4{unsigned(position), choice, 7u, unsigned(seed >> 9)}, uint2{unsigned(seed), choice});
    printf("%u %u %u %u %a\\n", r.x, r.y, r.z, r.w, uniform(seed, choice, position));
  }
}
"""


def test_philox_gives_the_bits_of_the_definition(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("philox.cuh was not compared: there is no C++ compiler")
    (tmp_path / "p.cpp").write_text(PHILOX)
    command = [compiler, "-std=c++17", f"-I{cuda_folder()}", "-o", str(tmp_path / "p"), str(tmp_path / "p.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    rng = np.random.default_rng(5)
    inputs = [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**63 - 1)]
    inputs += [tuple(int(n) for n in rng.integers(0, (2**63, 2**32, 2**40))) for _ in range(500)]
    text = "\n".join(" ".join(map(str, line)) for line in inputs)
    done = subprocess.run([tmp_path / "p"], input=text, capture_output=True, text=True, check=True)
    for (seed, choice, position), line in zip(inputs, done.stdout.splitlines(), strict=True):
        *words, number = line.split()
        low = 0xFFFFFFFF
        expected = sampling.philox((position & low, choice, 7, seed >> 9 & low), (seed & low, choice))
        assert tuple(map(int, words)) == expected
        assert float.fromhex(number) == sampling.uniform(seed, choice, position)
