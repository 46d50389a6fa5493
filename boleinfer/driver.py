"""What nvidia-smi says of the driver and the GPUs. Needs no CuPy, and works where CUDA does not."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from typing import NamedTuple

_FIRST_OF_CUDA = ((580, 13), (525, 12))  # the first driver of each CUDA version


class Driver(NamedTuple):
    """The installed NVIDIA driver: its version, the major CUDA version that it knows (0: unknown), names of GPUs."""

    version: str
    cuda: int
    gpus: tuple[str, ...]

    @property
    def extra(self) -> str:
        """The extra of this package that fits the driver: "cuda13" or "cuda12"; "" for one that is too old."""
        return f"cuda{min(self.cuda, 13)}" if self.cuda >= 12 else "" if self.cuda else "cuda13"


@functools.cache
def ask() -> Driver | None:
    """The driver as nvidia-smi describes it; None where there is no nvidia-smi or it finds no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    listed = _output(program, "--query-gpu=driver_version,name", "--format=csv,noheader")
    lines = [line.split(",", 1) for line in listed.splitlines() if re.match(r"\d+[\d.]*,", line)]
    said = _output(program)
    stated = re.search(r"Driver Version:\s*([\d.]+)", said)
    version = lines[0][0] if lines else stated[1] if stated else ""
    if not version:
        return None
    cuda = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+)", said)
    return Driver(version, int(cuda[1]) if cuda else _cuda_of(version), tuple(name.strip() for _, name in lines))


def install_command() -> str:
    """The one command that installs what this package needs for the GPU here, "" where the driver is too old for it."""
    found = ask()
    extra = "cuda13" if found is None else found.extra
    return f"pip install 'boleinfer[{extra}]'" if extra else ""


def _cuda_of(version: str) -> int:
    number = int(version.split(".")[0])
    return next((cuda for first, cuda in _FIRST_OF_CUDA if number >= first), 11)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
