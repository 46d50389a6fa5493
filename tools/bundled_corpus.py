"""Build the bundled model's corpus: clean Python source out of permissively licensed wheels, one text file per package.

    pip download --no-deps -d wheels $(python tools/bundled_corpus.py --pins)      # with Python 3.12's pip
    python tools/bundled_corpus.py wheels corpus --stdlib /usr/lib/python3.12 --notice models/bole-coder-16m/NOTICE

Every file becomes `# file: PATH`, its text and `<|endoftext|>`.  The packages of HELD_OUT go to corpus/heldout/ whole
and are never trained on; the others go to corpus/train/.  qiskit, scipy and the like have compiled parts: take any
platform's wheel, only its Python files are read.
"""

import argparse
import hashlib
import json
import random
import re
import zipfile
from email.parser import BytesParser
from pathlib import Path

EOT = "<|endoftext|>"
HELD_OUT = ("networkx", "pydantic", "tornado")
CAP_MB = {"transformers": 10.0, "plotly": 10.0, "homeassistant": 25.0}  # full of near-copies of themselves
# Licences as each wheel's METADATA states them, in SPDX terms.
PINS = {
    "aiohttp==3.14.5": "Apache-2.0 AND MIT",
    "astropy==8.0.2": "BSD-3-Clause",
    "bokeh==3.10.2": "BSD-3-Clause",
    "boto3==1.44.8": "Apache-2.0",
    "dask==2026.8.0": "BSD-3-Clause",
    "django==6.1.3": "BSD-3-Clause",
    "fastapi==0.165.0": "MIT",
    "jax==0.12.0.1": "Apache-2.0",
    "matplotlib==3.11.2": "PSF-style (matplotlib)",
    "mypy==2.4.1": "MIT",
    "networkx==3.7": "BSD-3-Clause",
    "nltk==3.10.4": "Apache-2.0",
    "numpy==2.5.5": "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
    "pandas==3.1.1": "BSD-3-Clause",
    "pip==26.3": "MIT",
    "plotly==7.1.0": "MIT",
    "pydantic==2.14.4": "MIT",
    "pygments==2.21.0": "BSD-2-Clause",
    "scikit-learn==1.9.1": "BSD-3-Clause",
    "scipy==1.18.1": "BSD-3-Clause",
    "setuptools==84.2.1": "MIT",
    "spacy==3.8.18": "MIT",
    "sphinx==9.1.1": "BSD-2-Clause",
    "sqlalchemy==2.1.9": "MIT",
    "statsmodels==0.15.0": "BSD-3-Clause",
    "sympy==1.14.0": "BSD-3-Clause",
    "tornado==6.6.1": "Apache-2.0",
    "transformers==5.24.0": "Apache-2.0",
    "twisted==26.10.0": "MIT",
    "xarray==2026.9.0": "Apache-2.0",
    "flax==0.12.12": "Apache-2.0",
    "homeassistant==2026.2.3": "Apache-2.0",
    "ipython==9.18.1": "BSD-3-Clause",
    "keras==3.15.1": "Apache-2.0",
    "mne==1.13.2": "BSD-3-Clause",
    "nilearn==0.14.1": "BSD-3-Clause",
    "pytest==9.2.0": "MIT",
    "qiskit==2.6.2": "Apache-2.0",
    "sktime==1.2.0": "BSD-3-Clause",
    "sqlglot==30.30.0": "MIT",
    "tensorflow-probability==0.25.0": "Apache-2.0",
}
SKIP = ("_vendor", "/substrates/")  # vendored code, and TensorFlow Probability's machine-made copies of itself
NOTICE = """\
bole-coder-16m was trained on the Python source of the packages below, each under the licence that stands beside
it (as its own metadata states it).  The weights hold no files of these packages; this list says where the text
that the model learned from comes from.

heldout_prompts.json quotes short pieces of networkx (Copyright (c) 2004-2026, NetworkX Developers, Aric Hagberg,
Dan Schult, Pieter Swart; BSD-3-Clause), pydantic (Copyright (c) 2017 to present Pydantic Services Inc. and
individual contributors; MIT) and tornado (Copyright Facebook and the Tornado authors; Apache-2.0).

"""
CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def clean(raw, seen):
    """The text of one source file, or None where the cleaning rule drops it."""
    if not 200 <= len(raw) <= 300_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    if EOT in text or CJK.search(text) or max(map(len, lines)) > 400 or len(text) / len(lines) > 80:
        return None
    digest = hashlib.md5("".join(text.split()).encode()).digest()
    if digest in seen:
        return None
    seen.add(digest)
    return text


def wheel_files(path):
    """(name, bytes) of every Python file in a wheel that is its own."""
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".py") and not any(part in name for part in SKIP):
                yield name, wheel.read(name)


def tree_files(root):
    """(name, bytes) of every Python file of the standard library at `root`."""
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and not any(part in str(path) for part in SKIP):
            yield str(path.relative_to(root)), path.read_bytes()


def stated_licence(path):
    """What a wheel's own METADATA says of its licence, to check PINS against."""
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        meta = BytesParser().parsebytes(wheel.read(name))
    stated = [meta.get("License-Expression") or "", str(meta.get("License") or "").split("\n")[0]]
    return [s for s in stated + [c for c in meta.get_all("Classifier", []) if c.startswith("License")] if s]


def write_package(name, files, out, seen):
    """Clean one package, cap it, write it, and return its numbers."""
    docs = [f"# file: {path}\n{text}{EOT}" for path, raw in files if (text := clean(raw, seen)) is not None]
    random.Random(name).shuffle(docs)
    cap = CAP_MB.get(name, 1e9) * 1e6
    kept, size = [], 0
    for doc in docs:
        size += len(doc.encode())
        if size > cap:
            break
        kept.append(doc)
    target = out / ("heldout" if name in HELD_OUT else "train") / f"{name}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(kept), encoding="utf-8")
    return {"name": name, "split": target.parent.name, "files": len(kept), "bytes": target.stat().st_size}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--stdlib", type=Path, help="a CPython 3.12 lib/python3.12 folder to add")
    parser.add_argument("--notice", type=Path, help="where to write the list of packages and licences")
    parser.add_argument("--pins", action="store_true", help="print the pinned requirements and stop")
    args = parser.parse_args()
    if args.pins:
        print(" ".join(PINS))
        return
    seen, report = set(), []
    pins = sorted(PINS.items(), key=lambda item: item[0].split("==")[0] not in HELD_OUT)  # held-out ones first
    for pin, licence in pins:
        name, version = pin.split("==")
        pattern = re.compile(re.escape(name.replace("-", "_")) + f"-{re.escape(version)}-", re.I)
        wheel = next(path for path in args.wheels.glob("*.whl") if pattern.match(path.name))
        row = write_package(name, wheel_files(wheel), args.out, seen)
        report.append({**row, "version": version, "licence": licence, "stated": stated_licence(wheel)})
    if args.stdlib:
        row = write_package("cpython-stdlib", tree_files(args.stdlib), args.out, seen)
        report.append({**row, "version": "3.12.1", "licence": "PSF-2.0", "stated": []})
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    for row in report:
        print(*(row[key] for key in ("split", "name", "version", "files", "bytes", "licence", "stated")))
    print("train bytes", sum(r["bytes"] for r in report if r["split"] == "train"))
    if args.notice:
        lines = []
        for row in sorted(report, key=lambda row: row["name"]):
            held = " (held out, not trained on)" if row["split"] == "heldout" else ""
            lines.append(f"{row['name']} {row['version']}: {row['licence']}{held}\n")
        args.notice.write_text(NOTICE + "".join(lines))


if __name__ == "__main__":
    main()
