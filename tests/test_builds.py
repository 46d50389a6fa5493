"""Jobs that compile side by side in threads: what comes out, and what becomes of those that do not compile."""

import re
import time

import pytest

from boleinfer import nvrtc
from boleinfer.declaration import KernelError
from boleinfer.nvrtc import Builds, Built, Cache
from tests.kernel_text import kernel
from tests.test_nvrtc import job_of


def jobs_of(tmp_path, *values):
    return [job_of(kernel(f"  x[0] = {value};"), tmp_path) for value in values]


def untimed(built):
    """Without ptxas' times, which differ."""
    return Built(built.cubin, re.sub(r"Compile time = .*", "", built.log))


def built(tmp_path, jobs, threads=3):
    with Builds(Cache(tmp_path / "cache"), threads) as builds:
        for job in jobs:
            builds.begin(job)
            assert job in builds
        return {job: untimed(r) if isinstance(r, Built) else r for job, r in builds.results().items()}


def test_what_compiles_side_by_side_is_what_compiles_alone(compiler, tmp_path):
    """With all of its log, and each job once."""
    jobs = jobs_of(tmp_path, *range(8))
    found = built(tmp_path, [*jobs, *jobs[:3]])
    assert found == {job: untimed(nvrtc.compile_job(job, compiler)) for job in jobs}
    cache = Cache(tmp_path / "cache")
    assert {job: untimed(nvrtc.find(job, cache)) for job in jobs} == found


def test_an_error_names_file_and_line_and_the_rest_is_kept(compiler, tmp_path):
    good, bad, *more = jobs_of(tmp_path, 1, "nothing", 2)
    found = built(tmp_path, [good, bad, *more])
    assert isinstance(found[bad], KernelError) and re.search(r'k\.cu:\d+: error: .*"nothing"', str(found[bad]))
    assert all(isinstance(found[job], Built) for job in (good, *more))
    assert nvrtc.find(bad, Cache(tmp_path / "cache")) is None


def test_what_has_not_begun_is_left(compiler, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(nvrtc, "compile_job", lambda job, tools: begun.append(job) or time.sleep(0.1))
    with pytest.raises(KeyboardInterrupt), Builds(Cache(tmp_path / "cache"), 1) as builds:
        for job in jobs_of(tmp_path, *range(20)):
            builds.begin(job)
        raise KeyboardInterrupt
    assert len(begun) <= 2


@pytest.mark.parametrize("version,options", [((12, 8), ()), ((12, 9), ("--no-cache",)), ((13, 0), ("--no-cache",))])
def test_nvrtc_keeps_no_cache_of_its_own(compiler, version, options):
    """Where there is a driver it would answer from there a second time, without a log."""
    assert compiler._replace(version=version).options == options
