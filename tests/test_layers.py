"""The rules of docs/architecture.md that can be read off the source: who may import whom, file sizes, first lines."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYOUT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# "  config.py   0  ..." and "  ops/   2  ..." in the layout there: the level of a file of boleinfer/, or of a folder.
LEVELS = {
    name: int(number)
    for names, number in re.findall(r"^ {4,}((?:[\w.]+(?:\.py|/) +)+)(\d)  ", LAYOUT, re.MULTILINE)
    for name in names.split()
}
ISOLATED = ("boleinfer/ops/", "models/")  # their files import no neighbour, only the folder itself
LAZY = {
    "cupy",
    "cuda",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "ml_dtypes",
}  # imported where they are needed, never at the top
BANNED = {"torch", "transformers", "scipy"}

SOURCES = sorted(p.relative_to(ROOT).as_posix() for top in ("boleinfer", "models") for p in (ROOT / top).rglob("*.py"))
SCRIPTS = sorted(p.relative_to(ROOT).as_posix() for top in ("tools", "tests") for p in (ROOT / top).rglob("*.py"))


def level(path: str) -> int:
    *_, folder, name = ("", *path.split("/"))
    found = LEVELS.get(name if folder == "boleinfer" else f"{folder}/")
    assert found is not None, f"{path} has no level yet: add it to the layout in docs/architecture.md"
    return found


def file_of(module: str) -> str | None:
    """boleinfer.ops.gdn -> boleinfer/ops/gdn.py, boleinfer.models -> models/__init__.py; None for a file not here."""
    base = re.sub(r"^boleinfer/models(?=/|$)", "models", module.replace(".", "/"))
    found = [c for c in (f"{base}.py", f"{base}/__init__.py") if (ROOT / c).exists()]
    return found[0] if found else None


def imports(path: str, tree: ast.Module) -> list[tuple[str, bool]]:
    """(module, whether it is imported as the file is) for every import outside `if TYPE_CHECKING`, however nested."""
    package = path.replace("models/", "boleinfer/models/", 1) if path.startswith("models/") else path
    parts = package.removesuffix(".py").removesuffix("/__init__").split("/")
    found = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = parts[: len(parts) - node.level + (1 if path.endswith("__init__.py") else 0)] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            below = [f"{base}.{alias.name}" for alias in node.names]  # `from boleinfer.ops import gdn` imports a file
            found.extend((name if file_of(name) else base, top) for name in below)
        inside = top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, True)
    return found


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES)
def test_imports_point_down(path):
    here = level(path)
    for module, _ in imports(path, parse(path)):
        target = file_of(module) if module.split(".")[0] == "boleinfer" else None
        if target is None or target == path or path == "boleinfer/__init__.py":
            continue
        assert level(target) <= here, f"{path} (level {here}) imports {target} (level {level(target)})"
        for folder in ISOLATED:
            if path.startswith(folder) and not path.endswith("__init__.py") and target != f"{folder}__init__.py":
                assert not target.startswith(folder), f"{path} imports its neighbour {target}"
        if path.startswith("models/"):
            assert not target.startswith("boleinfer/draft/"), f"a model imports the drafter {target}"
        if path.startswith("boleinfer/draft/"):
            assert not target.startswith("models/"), f"a drafter imports the model {target}"


@pytest.mark.parametrize("path", SOURCES)
def test_third_party_imports(path):
    for module, at_import in imports(path, parse(path)):
        name = module.split(".")[0]
        assert name not in BANNED, f"{path} imports {name}, which belongs to the tests and tools"
        assert not (name in LAZY and at_import), (
            f"{path} imports {name} as it is imported; do so in the function that needs it"
        )
        at_root = name in {"models", "cuda", "tools", "tests"} and module != "cuda.pathfinder"  # that one is NVIDIA's
        assert not at_root, f"{path} imports {name} from a checkout's root"


def test_no_cycles_among_imports_at_the_top():
    graph = {
        path: {t for m, top in imports(path, parse(path)) if top and (t := file_of(m)) and t != path}
        for path in SOURCES
    }
    done: set[str] = set()

    def walk(path: str, trail: tuple[str, ...]) -> None:
        assert path not in trail, " -> ".join([*trail, path])
        if path not in done:
            for target in graph[path]:
                walk(target, (*trail, path))
            done.add(path)

    for path in SOURCES:
        walk(path, ())


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, "cli.py"])
def test_a_file_says_what_it_is(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 450, f"{path} has {len(lines)} lines; split it by what it is about"
    first = lines[1] if lines and lines[0].startswith("#!") else lines[0] if lines else ""
    assert re.match(r'r?"""\S', first), f"the first line of {path} must be a docstring that says what lives here"


@pytest.mark.parametrize("path", SOURCES)
def test_docs_place_every_file(path):
    """The layout in docs/architecture.md names each file, so that a newcomer can find its place."""
    name = Path(path).name if Path(path).name != "__init__.py" else Path(path).parent.name + "/"
    assert re.search(rf"(?<![\w/]){re.escape(name)}", LAYOUT), f"docs/architecture.md does not mention {path}"


def test_no_init_in_cuda():
    """A package named cuda at a checkout's root would hide NVIDIA's own, which CuPy imports."""
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_the_rules_themselves_can_fail():
    source = "import torch\ndef f():\n    from boleinfer.engine import Engine\n    import jinja2\n"
    found = imports("boleinfer/ops/norms.py", ast.parse(source))
    assert ("torch", True) in found and ("jinja2", False) in found
    assert ("boleinfer.engine", False) in found
    relative = imports("boleinfer/draft/mtp.py", ast.parse("from . import base\nfrom ..sampling import Sampler\n"))
    assert [m for m, _ in relative] == ["boleinfer.draft.base", "boleinfer.sampling"]
    with pytest.raises(AssertionError, match="no level"):
        level("boleinfer/engine_two.py")
