"""What README.md and --help show can be typed as it stands; links lead somewhere; figures stand in a result file."""

import json
import re
import shlex
from pathlib import Path

import pytest

from boleinfer import bench, bench_tables, cli, speculation_tables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HELP = "".join(
    text for name, text in vars(cli).items() if name.isupper() and isinstance(text, str) and "boleinfer " in text
)
COMMANDS = sorted(set(re.findall(r"^ {2,}(?:.*[&|] )?(boleinfer [a-z].*)$", README + HELP, re.MULTILINE)))


def arguments(line: str) -> list[str]:
    """The words of a shown command, up to a comment, an explanation or the next command of a pipe."""
    line = re.split(r"\s{3,}|\s[|>]\s|\s#\s", line)[0]
    return shlex.split(line.replace("$'", "'"))[1:]


@pytest.mark.parametrize("line", COMMANDS)
def test_shown_commands_parse(line):
    cli.build_parser().parse_args(arguments(line))


def test_every_command_is_shown():
    named = "generate trace chat info check verify calibrate doctor kernels bench"
    assert {arguments(line)[0] for line in COMMANDS} == set(named.split())


def test_library_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code.replace("max_tokens=100", "max_tokens=12"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 30


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
    for path in re.findall(r"`((?:boleinfer|models|docs|tests|tools|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}"


TABLES = {"cpu.json": bench.markdown, **bench_tables.FILES, "speculation.json": speculation_tables.speculation}
PAGES = dict.fromkeys(("gdn_tree.json", "ring.json"), "docs/tree-kernel.md")  # else README.md
PAGES["kernels.json"] = "docs/performance-notes.md"


@pytest.mark.parametrize("file", TABLES)
def test_figures_are_those_of_the_result_file(file):
    """The table between the markers is what `boleinfer bench` recorded, not what someone remembers.

    What was not measured yet is not shown. `python tools/fill_tables.py` puts every table in its place."""
    page, result = PAGES.get(file, "README.md"), ROOT / "benchmarks" / "results" / file.split()[0]
    shown = re.findall(
        rf"<!-- {re.escape(file)} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
    if not result.exists():
        assert not shown, f"{page} shows {file}, which is not there"
        return
    (text,) = shown
    if file == "speculation.json":  # may stand in several files
        files = sorted(result.parent.glob("speculation*.json"))
        record = speculation_tables.joined([json.loads(f.read_text(encoding="utf-8")) for f in files])
    else:
        record = json.loads(result.read_text(encoding="utf-8"))
    assert text.strip() == TABLES[file](record), "run: python tools/fill_tables.py"
