"""The results of the GPU's benchmarks as README and docs show them: Markdown of the JSON that stands in a file."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def decode(record: Record) -> str:
    """decode.json."""
    rows = [
        (
            f"{r['shape']}{' fp8' if r['dtype'] == 'fp8' else ''}",
            r["batch"],
            f"{r['ms']:.2f}",
            f"{r['graph_ms']:.2f}",
            f"{r['floor_ms']:.2f}",
            f"{r['share']:.0%}",
            f"{1e3 * r['batch'] / r['ms']:.0f}",
            r["launches"],
        )
        for r in record["rows"]
    ]
    context = record["rows"][0]["context"] if record["rows"] else 0
    titles = (
        "shape",
        "batch",
        "ms a step",
        "of it the graph",
        "floor ms",
        "share",
        "tokens/s",
        "kernels",
    )
    table = (
        f"{_machine(record)}: plain decoding in bfloat16 (fp8: matrices in blocks of 128 x 128), random weights, about "
        f"{context:,.0f} tokens of context. *Floor* is the time to read once what a step must read, at the "
        f"{record['read_gb_s']:,.0f} GB/s that a kernel which only reads got in the same run; *share* is floor over "
        f"step.\n\n{_table(titles, rows)}"
    )
    if g := record.get("graphs"):
        table += (
            f"\n\nThe {g['graphs']} graphs of {g['shape']}, every number of rows and every way to draft, are captured "
            f"in {g['s']:.1f} s and take {g['bytes'] / 1e6:.0f} MB beside the {g['pool_bytes'] / 1e6:.0f} MB that all "
            f"steps share. {g['prompt_graphs']} more are of steps with more rows, captured when they came for the "
            f"second time. While more requests came and went, {g['captures_while_serving']} were captured."
        )
    return table


def prompts(record: Record) -> str:
    """prompts.json."""
    rows = [
        (
            r["shape"],
            f"{r['prompt']:,}",
            f"{r['ms']:.1f}",
            f"{r['first_ms']:.0f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['floor_ms']:.1f}",
            f"{r['share']:.0%}",
        )
        for r in record["rows"]
    ]
    titles = ("shape", "prompt", "first token, ms", "the first time", "tok/s", "floor ms", "share")
    return (
        f"{_machine(record)}: milliseconds from one request's prompt to its first token, bfloat16, random weights, "
        "nothing drafted. *The first time* the kernels of steps of so many rows are loaded, where none has used them, "
        "and launched one by one; from the third time on they are graphs. *Floor*: the products with weights alone, at "
        f"the memory's {record['read_gb_s']:,.0f} GB/s or the {record['product_tflop_s']:,.0f} TFLOP/s that a large "
        f"product got in the same run.\n\n{_table(titles, rows)}"
    )


def verify(record: Record) -> str:
    """verify.json: shapes down, rows across."""
    counts = sorted({r["rows"] for r in record["rows"]})
    lines = []
    for shape in dict.fromkeys(r["shape"] for r in record["rows"]):
        found = {r["rows"]: r for r in record["rows"] if r["shape"] == shape}
        first = found[min(found)]
        cells = [f"{found[n]['relative']:.2f}" if n in found else "" for n in counts]
        lines.append((shape, f"{first['ms']:.2f}", f"{first['graph_ms']:.2f}", *cells))
    titles = ("shape", "ms, 1 row", "of it the graph", *map(_rows, counts))
    return (
        f"{_machine(record)}: a whole step that verifies one request's random tree of so many nodes, its graph's time "
        f"against that of one row.\n\n{_table(titles, lines)}"
    )


def kernels(record: Record) -> str:
    """kernels.json, kind by kind."""
    parts = [f"{_machine(record)}: microseconds, and the share of {record['read_gb_s']:,.0f} GB/s."]
    for weights, title in (("bf16", "linear, beside cuBLAS"), ("fp8", "linear, FP8 weights")):
        linear = [r for r in record.get("linear", ()) if r.get("weights", "bf16") == weights]
        counts = sorted({r["R"] for r in linear})
        lines = []
        for sizes in dict.fromkeys((r["Dout"], r["Din"]) for r in linear):
            found = {r["R"]: r for r in linear if (r["Dout"], r["Din"]) == sizes}
            lines.append((f"{sizes[0]} x {sizes[1]}", *(_beside(found[n]) if n in found else "" for n in counts)))
        if lines:
            parts.append(_table((title, *map(_rows, counts)), lines))
    if small := record.get("small"):
        counts = sorted({r["R"] for r in small})
        lines = [
            (op, *(f"{r['us']:.1f}" for r in small if r["op"] == op)) for op in dict.fromkeys(r["op"] for r in small)
        ]
        parts.append(_table(("between the products", *map(_rows, counts)), lines))
    for kind, key, title in (("attention", "T", "attention, context"), ("gdn", "B", "gated delta rule, requests")):
        if measured := record.get(kind):
            lines = [(r[key], r["N"], f"{r['us']:.1f}", f"{r['floor_us']:.1f}", f"{r['share']:.0%}") for r in measured]
            parts.append(_table((title, "rows of each", "us", "floor us", "share"), lines))
    return "\n\n".join(parts)


def tree(record: Record) -> str:
    """gdn_tree.json: heads and requests down and nodes across, for every op."""
    parts = [
        f"{_machine(record)}: microseconds of one layer, how many times its floor (bytes at {record['read_gb_s']:,.0f} "
        "GB/s) that is, and in brackets how many times as long the other kernel takes in the same run."
    ]
    for op in dict.fromkeys(r["op"] for r in record["rows"]):
        found = [r for r in record["rows"] if r["op"] == op]
        if op == "attention":
            lines = [f"{r['heads'][0]} / {r['heads'][1]}, {r['B']} x {r['T']:,}" for r in found]
            parts.append(f"**{op}**\n\n{_grid('query / key heads, requests x context', lines, found)}")
        else:
            lines = [f"{r['Hv']}, {r['B']}" for r in found]
            peer = next((f", beside {r['peer']}" for r in found if "peer" in r), "")
            parts.append(f"**{op}**{peer}\n\n{_grid('value heads, requests', lines, found)}")
    return "\n\n".join(parts)


def tree_in_short(record: Record) -> str:
    """Of gdn_tree.json the trees of its first number of value heads."""
    found = [r for r in record["rows"] if r["op"] == "tree" and r["Hv"] == record["rows"][0]["Hv"]]
    return (
        f"{_machine(record)}: the gated delta rule of one layer with {found[0]['Hv']} value heads, microseconds, how "
        "many times its floor that is (every byte once), in brackets how many times as long SGLang's tree kernel takes "
        f"in the same run.\n\n{_grid('requests', [str(r['B']) for r in found], found)}"
    )


def _grid(title: str, lines: list[str], rows: list[Record]) -> str:
    """Measurements, each in the line named beside it and in the column of its nodes."""
    cells = {(line, r["N"]): _cell(r) for line, r in zip(lines, rows)}
    columns = sorted({n for _, n in cells})
    body = [(line, *(cells.get((line, n), "") for n in columns)) for line in dict.fromkeys(lines)]
    return _table((title, *(f"{n} nodes" if n > 1 else "1 node" for n in columns)), body)


def _cell(r: Record) -> str:
    peer = f" ({r['peer_us'] / r['us']:.1f}x)" if "peer_us" in r else ""
    return f"{r['us']:.1f}, {r['us'] / r['floor_us']:.1f} floors{peer}"


def ring(record: Record) -> str:
    """ring.json: capacities down; what a step commits, and requests, across."""
    sizes, rows = record["sizes"], record["rows"]
    columns = list(dict.fromkeys((r["tokens"], r["N"], r["B"]) for r in rows))
    lines = []
    for C in dict.fromkeys(r["C"] for r in rows):
        found = {(r["tokens"], r["N"], r["B"]): r for r in rows if r["C"] == C}
        lines.append(
            (C, *(f"{r['read_us']:.0f} + {r['fold_us']:.0f} ({r['share']:.2%})" for r in map(found.get, columns) if r))
        )
    titles = [f"{tokens} of {N}, {B} request{'s' * (B > 1)}" for tokens, N, B in columns]
    return (
        f"{_machine(record)}: microseconds of a step in all {sizes['layers']} layers of {record['shape']}: the delta "
        "rule, an average over how full the ring is, + folding it, an average over steps (and that as a share of a "
        "plain step); by the ring's capacity, the tokens that a step commits, and the nodes that it has.\n\n"
        f"{_table(('capacity', *titles), lines)}"
    )


def start(record: Record) -> str:
    """start.json."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record["phases_s"].items())
    load, lines = record["load"], []
    lines.append(("process start to first token, bundled model", f"{record['first_token_s']:.2f} s"))
    lines.append(("the same when every kernel has to be compiled first", f"{record['first_token_cold_s']:.1f} s"))
    lines.append(("`from boleinfer import LLM`, beyond Python's own start", f"{record['import_ms']:.0f} ms"))
    lines.append(
        (
            f"loading {load['shape']} ({load['bytes'] / 1e9:.1f} GB) from memory",
            f"{load['s']:.2f} s, {load['gb_s']:.1f} GB/s, {load['share']:.0%} of a plain copy",
        )
    )
    lines += [(f"installed size, {way['install']}", f"{way['mb']:,.0f} MB") for way in record["install"]]
    return f"{_machine(record)}; within a warm process, in seconds: {phases}.\n\n{_table(('what', 'takes'), lines)}"


FILES = {
    "decode.json": decode,
    "prompts.json": prompts,
    "verify.json": verify,
    "kernels.json": kernels,
    "gdn_tree.json": tree,
    "gdn_tree.json in short": tree_in_short,
    "ring.json": ring,
    "start.json": start,
}
"""Result file, and after it what is shown of it where it is shown twice -> what shows it."""


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"


def _machine(record: Record) -> str:
    return f"{record['gpu']}, driver {record['driver']}, {record['date'][:10]}"


def _beside(r: Record) -> str:
    cublas = f" / {r['cublas_us']:.1f}" if "cublas_us" in r else ""
    return f"{r['us']:.1f}{cublas} ({r['share']:.0%})"


def _table(titles: Any, rows: Any) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
