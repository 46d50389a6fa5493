"""Compiling without a GPU: errors at their own lines, toolchains that do not fit, the cache under every misfortune."""

import os
import re
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from boleinfer import cli, nvrtc
from boleinfer.declaration import KernelError, parse, read
from boleinfer.kernels import cuda_folder
from boleinfer.nvrtc import Built, Cache, Job, Toolchain, ToolchainError
from tests.kernel_text import kernel

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Toolchain((13, 0), Path("headers"), (13, 0), (75, 80, 86, 89, 90, 100, 103, 120))
JOB = Job("k.cu", '#include "common.cuh"\n// text', ("somewhere",), "90", "K=4")
BUILT = Built(b"\0cubin\xff\0", "ptxas info: Ä\n")


def job_of(text: str, tmp_path: Path, arch="90", constants=None) -> Job:
    (tmp_path / "k.cu").write_text(text)
    return nvrtc.job(read(tmp_path / "k.cu"), constants or {}, arch, cuda_folder())


# ---- the text that is compiled ----


def test_constants_come_first_and_the_file_keeps_its_line_numbers():
    source = parse(kernel("x[0] = K;", "// sizes: K=1 Big=1 Act=bf16 Fast=true\n"), Path("folder/k.cu"))
    constants = {"K": -128, "Big": 2**31, "Act": "unsigned char", "Fast": False}
    job = nvrtc.job(source, constants, "90", Path("cuda"))
    before, line, text = job.text.partition('#line 1 "k.cu"\n')
    assert before.splitlines() == [
        '#include "common.cuh"',
        "constexpr int K = -128;",
        "constexpr long long Big = 2147483648;",
        "using Act = unsigned char;",
        "constexpr bool Fast = false;",
    ]
    assert line and text == source.text
    assert job.title == "k.cu for sm_90 with K=-128 Big=2147483648 Act=unsigned char Fast=false"


def test_errors_are_shown_with_file_and_line_and_without_warnings():
    log = (
        'a b/k.cu(7): warning #177-D: variable "n" was declared but never referenced\n  int n;\n      ^\n\n'
        'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n\n'
        'a b/k.cu(12): error: expected a ";"\n  int x y\n        ^\n\n'
        '/usr/c.cuh(3): catastrophic error: cannot open source file "n.h"\n  #include "n.h"\n\n1 error detected\n'
    )
    shown = nvrtc.errors_of(log)
    assert shown.startswith('a b/k.cu:12: error: expected a ";"\n  int x y\n        ^')
    assert '/usr/c.cuh:3: catastrophic error: cannot open source file "n.h"' in shown and "warning" not in shown
    many = nvrtc.errors_of("\n".join(f"k.cu({i}): error: e{i}\n" for i in range(30)))
    assert "e19" in many and "e20" not in many and many.endswith("and 10 more errors")


@pytest.mark.parametrize("line", [1, 4, 9])
def test_compile_errors_name_the_files_own_line(compiler, tmp_path, line):
    body = "\n".join("  undefined_name = 3;" if i == line else "  x[0] = K;" for i in range(1, 12))
    text = kernel(body, "// sizes: K=3\n")
    expected = text[: text.index("undefined")].count("\n") + 1
    with pytest.raises(KernelError) as caught:
        nvrtc.compile_job(job_of(text, tmp_path, constants={"K": 3}), compiler)
    title, first, source, *_ = str(caught.value).splitlines()
    assert title == "k.cu for sm_90 with K=3 does not compile:"
    assert first == f'k.cu:{expected}: error: identifier "undefined_name" is undefined'
    assert source.strip() == "undefined_name = 3;"


def test_a_letter_of_cudas_headers_may_be_a_constant(compiler, tmp_path):
    """The reason for constants instead of macros: -DT=4 would rewrite the templates in CUDA's headers."""
    header = "// sizes: T=4 K=2 N=8 Act=bf16\n#include <cuda_fp16.h>\n"
    job = job_of(
        kernel("  x[0] = T * K * N + to_float(from_float<Act>(x[1]));", header),
        tmp_path,
        constants={"T": 4, "K": 2, "N": 8, "Act": "bf16"},
    )
    assert nvrtc.compile_job(job, compiler).cubin.startswith(b"\x7fELF")


def test_a_cubin_is_whole(compiler, tmp_path):
    """The end of the last section or header table lies within the file."""
    cubin = nvrtc.compile_job(job_of(kernel("  x[0] = n;"), tmp_path), compiler).cubin
    at, size, count = (int.from_bytes(cubin[a:b], "little") for a, b in ((0x20, 0x28), (0x36, 0x38), (0x38, 0x3A)))
    assert at == 0 or at + size * count <= len(cubin)
    at, size, count = (int.from_bytes(cubin[a:b], "little") for a, b in ((0x28, 0x30), (0x3A, 0x3C), (0x3C, 0x3E)))
    assert at + size * count <= len(cubin)


def test_a_library_that_cannot_be_found_is_no_traceback(monkeypatch):
    def missing(name):
        raise RuntimeError(f"no {name}\nlooked in: a, b")

    library = nvrtc.library.__wrapped__
    fake_cupy(monkeypatch)
    monkeypatch.setattr(nvrtc, "library", library)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(load_nvidia_dynamic_lib=missing))
    with pytest.raises(ToolchainError, match=r"cannot be loaded \(no nvrtc\); install it with: pip install"):
        find_tools()


# ---- F51: compilers and headers that are missing or do not fit ----


def fake_cupy(monkeypatch, version=(13, 0), error=None):
    def library():
        if error:
            raise error
        return SimpleNamespace(version=lambda: version, archs=lambda: TOOLS.archs)

    monkeypatch.setattr(nvrtc, "library", library)
    cuda = SimpleNamespace(driver=SimpleNamespace(get_build_version=lambda: 1000 * version[0]))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def fake_headers(monkeypatch, tmp_path, version):
    if version:
        (tmp_path / "cuda_runtime_api.h").write_text(f"/* c */\n#define CUDART_VERSION  {version}\n")
    pathfinder = SimpleNamespace(find_nvidia_header_directory=lambda name: str(tmp_path) if name == "cudart" else None)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)


def find_tools():
    nvrtc.toolchain.cache_clear()
    try:
        return nvrtc.toolchain()
    finally:
        nvrtc.toolchain.cache_clear()


def test_f51_headers_and_compiler_of_one_cuda(monkeypatch, tmp_path):
    fake_cupy(monkeypatch)
    fake_headers(monkeypatch, tmp_path, 13020)
    assert find_tools() == Toolchain((13, 0), tmp_path, (13, 2), TOOLS.archs)


@pytest.mark.parametrize(
    "version, headers, error, message",
    [
        (
            (13, 0),
            13000,
            RuntimeError("libnvrtc.so.13: no\nlistdir: a\n b"),
            "NVRTC cannot be loaded (libnvrtc.so.13: no);",
        ),
        ((13, 0), None, None, "the CUDA headers are missing"),
        (
            (13, 0),
            12090,
            None,
            "are of CUDA 12.9, but NVRTC is of 13.0; install it with: pip install 'boleinfer[cuda13]'",
        ),
        (
            (12, 9),
            13000,
            None,
            "are of CUDA 13.0, but NVRTC is of 12.9; install it with: pip install 'boleinfer[cuda12]'",
        ),
    ],
)
def test_f51_what_is_missing_or_of_another_cuda_is_named_with_the_command(
    monkeypatch, tmp_path, version, headers, error, message
):
    fake_cupy(monkeypatch, version, error)
    fake_headers(monkeypatch, tmp_path, headers)
    with pytest.raises(ToolchainError, match=re.escape(message)):
        find_tools()


def test_f51_a_finder_that_breaks_counts_as_no_headers(monkeypatch):
    fake_cupy(monkeypatch)

    def broken(name):
        raise RuntimeError("CUDA_PATH and CUDA_HOME differ")

    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(find_nvidia_header_directory=broken))
    with pytest.raises(ToolchainError, match="headers are missing"):
        find_tools()
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(ToolchainError, match="headers are missing"):
        find_tools()


def test_f51_without_cupy_the_command_says_what_to_install(monkeypatch, capsys):
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    nvrtc.toolchain.cache_clear()
    assert cli.main(["kernels"]) == 2
    assert "pip install 'boleinfer[cuda13]'" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["77", "130", "", "sm_90", "90b", "9o"])
def test_f51_an_architecture_that_the_compiler_does_not_know(arch):
    with pytest.raises(ToolchainError, match="cannot compile for sm_.*it knows 75, 80, 86.*cuda-toolkit"):
        TOOLS.check_arch(arch)
    TOOLS.check_arch("90a")


@pytest.mark.parametrize("path", ["/nonexistent", "a folder with blanks"])
def test_f51_a_wrong_cuda_path_does_not_matter_to_an_installed_compiler(compiler, path, tmp_path):
    code = "from boleinfer import nvrtc; print(nvrtc.toolchain().headers)"
    environment = os.environ | {"CUDA_PATH": path, "CUDA_HOME": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == compiler.headers, done.stderr


# ---- the cache ----


def test_a_cached_file_comes_back(tmp_path):
    cache = Cache(tmp_path / "not there" / "with a blank")
    assert cache.get("key") is None
    cache.put("key", BUILT)
    assert cache.get("key") == BUILT == Cache(cache.folder).get("key")
    assert [p.name for p in cache.folder.iterdir()] == ["key.cubin"]


@pytest.mark.parametrize("damage", ["empty", "short", "head", "middle", "last", "longer", "swapped"])
def test_f51_a_damaged_file_is_found_and_made_again(tmp_path, damage):
    cache = Cache(tmp_path)
    cache.put("key", BUILT)
    file = tmp_path / "key.cubin"
    data = bytearray(file.read_bytes())
    if damage in ("head", "middle", "last"):
        data[{"head": 3, "middle": 34, "last": -1}[damage]] ^= 1
    cut = {"empty": b"", "short": data[:-1], "longer": data + b"\0"}.get(damage, data)
    file.write_bytes(cut)
    key = "other" if damage == "swapped" else "key"
    file.rename(tmp_path / f"{key}.cubin")
    assert cache.get(key) is None
    cache.put(key, BUILT)
    assert cache.get(key) == BUILT


def put_in_vain(folder):
    """Stores thrice in a cache that cannot keep anything; the warnings."""
    cache = Cache(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "b", "c"):
            cache.put(key, BUILT)
            assert cache.get(key) is None
    return [str(w.message) for w in caught]


def test_f51_a_folder_that_cannot_be_made_warns_once(tmp_path):
    (tmp_path / "file").touch()
    (message,) = put_in_vain(tmp_path / "file" / "kernels")
    assert str(tmp_path / "file" / "kernels") in message and "set BOLEINFER_CACHE" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_f51_a_read_only_folder_warns_once(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert len(put_in_vain(tmp_path)) == 1


def test_f51_a_full_disk_warns_once_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    (message,) = put_in_vain(tmp_path)
    assert "No space left on device" in message and not list(tmp_path.iterdir())


def hammer(folder: Path, seed: int) -> int:
    """Writes and reads the same few keys as fast as it can; how many reads were wrong."""
    cache, wrong = Cache(folder), 0
    for i in range(300):
        key = str((i + seed) % 3)
        cache.put(key, Built(key.encode() * 10_000, key))
        found = cache.get(key)
        wrong += found != Built(key.encode() * 10_000, key)
    return wrong


def test_f51_processes_and_threads_share_one_folder(tmp_path):
    wrong = []
    threads = [threading.Thread(target=lambda s=s: wrong.append(hammer(tmp_path, s))) for s in range(2)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        others = [pool.submit(hammer, tmp_path, seed) for seed in range(2)]
        for thread in threads:
            thread.start()
        wrong += [other.result() for other in others]
        for thread in threads:
            thread.join()
    assert wrong == [0, 0, 0, 0] and len(list(tmp_path.iterdir())) == 3


def test_the_key_is_of_all_that_decides_the_result(tmp_path, monkeypatch):
    (tmp_path / "common.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text("#pragma once\n")
    (tmp_path / "unused.cuh").write_text("int a;\n")
    job = Job("k.cu", '#include "common.cuh"\n', (str(tmp_path),), "90", "")
    first = nvrtc.cache_key(job, TOOLS)
    keys = [first]
    keys.append(nvrtc.cache_key(Job("k.cu", job.text + " ", job.includes, "90", ""), TOOLS))
    keys.append(nvrtc.cache_key(Job("k.cu", job.text, job.includes, "90a", ""), TOOLS))
    keys.append(nvrtc.cache_key(job, TOOLS._replace(version=(13, 1))))
    keys.append(nvrtc.cache_key(job, TOOLS._replace(headers_version=(13, 1))))
    (tmp_path / "unused.cuh").write_text("int b;\n")
    assert nvrtc.cache_key(job, TOOLS) == first, "a header that is not included does not matter"
    assert nvrtc.cache_key(job, TOOLS._replace(headers=Path("elsewhere"))) == first
    (tmp_path / "b.cuh").write_text("#pragma once\n// included by a header\n")
    keys.append(nvrtc.cache_key(job, TOOLS))
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-use_fast_math"))
    keys.append(nvrtc.cache_key(job, TOOLS))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"BOLEINFER_CACHE": "/a b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a b/kernels"),
        ({"BOLEINFER_CACHE": "~/c", "HOME": "/h"}, "/h/c/kernels"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/boleinfer/kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/boleinfer/kernels"),
        ({"HOME": "/h"}, "/h/.cache/boleinfer/kernels"),
        ({"HOME": "relative"}, "/dev/null/boleinfer/kernels"),
    ],
)
def test_where_the_cache_lies(monkeypatch, environment, folder):
    for name in ("BOLEINFER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    nvrtc.default_cache.cache_clear()
    assert nvrtc.default_cache().folder == Path(folder)
    nvrtc.default_cache.cache_clear()


def test_building_compiles_once_and_survives_a_cache_that_fails(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(nvrtc, "toolchain", lambda: TOOLS)
    monkeypatch.setattr(nvrtc, "compile_job", lambda job, tools: compiled.append(job) or BUILT)
    cache = Cache(tmp_path / "cache")
    assert nvrtc.build(JOB, cache) == nvrtc.build(JOB, Cache(cache.folder)) == BUILT and len(compiled) == 1
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert nvrtc.build(JOB, Cache(tmp_path / "file" / "x")) == BUILT
    with pytest.raises(ToolchainError, match="sm_77"):
        nvrtc.build(Job("k.cu", "", (), "77", ""), cache)
