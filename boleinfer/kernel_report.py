"""`boleinfer kernels`: compiles every kernel for several architectures without a GPU; registers, memory, spills."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from boleinfer import nvrtc
from boleinfer.declaration import KernelError, KernelFile
from boleinfer.kernels import cuda_folder, kernel_file
from boleinfer.nvrtc import Built, Job
from boleinfer.options import UsageError

ARCHS = ("80", "86", "89", "90", "100", "120")


@dataclass(frozen=True)
class Usage:
    """What one kernel needs, compiled with one set of sizes for one architecture.

    shared_bytes: static shared memory of a block; dynamic shared memory is the launch's business
    reason:       why the file allows spills, "" when it does not
    """

    file: str
    kernel: str
    sizes: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    reason: str

    @property
    def spills(self) -> bool:
        return bool(self.spill_store_bytes or self.spill_load_bytes)


def report(archs: Sequence[str] = ARCHS, names: Sequence[str] = (), jobs: int | None = None) -> list[Usage]:
    """Compiles the files whose name contains one of `names` (all when there are none) with each of their `// sizes:`.

    jobs: compilations at a time; as many as cores when None
    Files that are not for an architecture are left out there. What was compiled before comes from the cache.
    Raises KernelError with everything that does not compile, ToolchainError when the compiler is missing or does not
    know an architecture, UsageError for a name that no file has.
    """
    files = sorted(p.name for p in cuda_folder().glob("*.cu"))
    for name in names:
        if not any(name in file for file in files):
            raise UsageError(f"kernels: no file is called like {name!r}; there are {', '.join(files)}")
    tools = nvrtc.toolchain()
    for arch in archs:
        tools.check_arch(arch)
    sources = [kernel_file(file) for file in files if not names or any(name in file for name in names)]
    work = [
        (source, nvrtc.job(source, sizes, arch, cuda_folder()))
        for source in sources
        for sizes in source.sizes
        for arch in archs
        if source.target(arch) is not None
    ]
    built = _build([job for _, job in work], jobs)
    return [usage for (source, job), result in zip(work, built) for usage in usages(source, job, result.log)]


def usages(source: KernelFile, job: Job, log: str) -> list[Usage]:
    """What the compiler's log says of each kernel. Raises KernelError when it does not mention one."""
    blocks = dict(re.findall(r"Compiling entry function '(\w+)' for '\w+'(.*?)(?=Compiling entry|\Z)", log, re.S))
    found = []
    for name in source.kernels:
        block = blocks.get(name, "")
        registers = re.search(r"Used (\d+) registers", block)
        if registers is None:
            raise KernelError(f"{job.title}: the compiler's log says nothing of {name}:\n{log}")
        # one line for the kernel and one for each function that was not inlined
        stack, stores, loads = (
            [int(n) for n in re.findall(rf"(\d+) bytes {what}", block)]
            for what in ("stack frame", "spill stores", "spill loads")
        )
        shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", block)
        found.append(
            Usage(
                file=source.path.name,
                kernel=name,
                sizes=job.sizes,
                arch=job.arch,
                registers=int(registers[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=max(stack, default=0),
                spill_store_bytes=sum(stores),
                spill_load_bytes=sum(loads),
                reason=source.spills,
            )
        )
    return found


def kernels(archs: Sequence[str], names: Sequence[str] = (), as_json: bool = False, jobs: int | None = None) -> int:
    """Prints the report; 1 when a kernel spills whose file gives no reason, else 0. Raises as `report` does."""
    found = report(archs, names, jobs)
    wrong = [usage for usage in found if usage.spills and not usage.reason]
    if as_json:
        print(json.dumps([asdict(usage) for usage in found], indent=1))
        return 1 if wrong else 0
    rows: list[tuple[str, ...]] = [("kernel", "sizes", "sm", "registers", "shared", "stack", "spilled", "")]
    rows += _table(found)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [c.ljust(w) if i < 3 or i == 7 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
    count = len({(usage.file, usage.kernel) for usage in found})
    made_for = ", ".join(dict.fromkeys(f"sm_{usage.arch}" for usage in found)) or "nothing"
    print(f"{count} kernels, compiled for {made_for}; static shared bytes a block, stack and spilled bytes a thread")
    if wrong:
        files_wrong = ", ".join(dict.fromkeys(usage.file for usage in wrong))
        print(f"registers spill in {files_wrong}: use fewer, or give the reason in the file (// spills: why)")
    return 1 if wrong else 0


def _table(found: Sequence[Usage]) -> Iterator[tuple[str, ...]]:
    """One row for all architectures of a kernel whose numbers are the same."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for u in found:
        spilled = f"{u.spill_store_bytes}+{u.spill_load_bytes}" if u.spills else "0"
        note = "" if not u.spills else u.reason or "SPILLS"
        numbers = str(u.registers), str(u.shared_bytes), str(u.stack_bytes), spilled, note
        groups.setdefault((u.kernel, u.sizes, *numbers), []).append(u.arch)
    for (kernel, sizes, *rest), archs in groups.items():
        yield kernel, sizes, ",".join(archs), *rest


def _build(work: Sequence[Job], threads: int | None) -> list[Built]:
    """Every job's result, in order. Raises KernelError with all that does not compile."""
    cache = nvrtc.default_cache()
    built = {job: hit for job in work if (hit := nvrtc.find(job, cache)) is not None}
    problems: dict[str, list[str]] = {}
    with nvrtc.Builds(cache, threads) as builds:
        for job in work:
            if job not in built:
                builds.begin(job)
        for job, result in builds.results().items():
            if isinstance(result, KernelError):
                _, _, errors = str(result).partition("\n")
                problems.setdefault(errors, []).append(job.title)
            else:
                built[job] = result
    if problems:
        raise KernelError("\n\n".join(f"{_some(where)} does not compile:\n{e}" for e, where in problems.items()))
    return [built[job] for job in work]


def _some(titles: Sequence[str]) -> str:
    return titles[0] + (f" (and {len(titles) - 1} more combinations)" if len(titles) > 1 else "")
