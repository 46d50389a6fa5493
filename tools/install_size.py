#!/usr/bin/env python3
"""How large an installation is: a fresh environment for each way, and what pip put there. Needs no GPU.

python tools/install_size.py     writes benchmarks/results/install.json, which `boleinfer bench start` shows too
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from boleinfer.provenance import provenance  # noqa: E402

WAYS = {
    "cpu": ["."],
    "cuda13": [".[cuda13]"],
    "cuda13 with cuBLAS": [".[cuda13]", "cuda-toolkit[cublas]==13.0.*"],
}


def main() -> None:
    rows = []
    for name, wanted in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            packages = next(Path(folder).glob("lib*/python*/site-packages"))
            before, began = size(packages), time.perf_counter()
            pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", *wanted]
            subprocess.run(pip, cwd=ROOT, check=True)
            largest = sorted(((size(p), p.name) for p in packages.iterdir()), reverse=True)[:6]
            rows.append(
                {
                    "install": name,
                    "mb": (size(packages) - before) / 1e6,
                    "pip_s": time.perf_counter() - began,
                    "largest_mb": {entry: nbytes / 1e6 for nbytes, entry in largest},
                }
            )
            print(f"{name}: {rows[-1]['mb']:.0f} MB")
    output = ROOT / "benchmarks" / "results" / "install.json"
    output.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file() and not f.is_symlink()]
    return sum(f.stat().st_size for f in files)


if __name__ == "__main__":
    main()
