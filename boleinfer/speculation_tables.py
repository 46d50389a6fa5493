"""The results of `boleinfer bench speculation` as README and docs show them: Markdown, and a plot as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
_COLOURS = {"paper": "#1b6ca8", "code": "#2a9d5c", "prose": "#c8553d"}


SAME = ("what", "gpu", "driver", "context", "known", "profiles_of")  # of results that are shown together


def joined(records: Sequence[Record]) -> Record:
    """The files speculation*.json as one: runs of the command for different parts, shapes or batches on one machine.

    Every ratio is of one run. Raises ValueError where two cannot be shown together, or both have the same row."""
    for name in SAME:
        if any(r[name] != records[0][name] for r in records):
            raise ValueError(f"results of bench speculation with a different {name}: {[r[name] for r in records]}")
    found = {**records[0], "date": max(r["date"] for r in records)}
    for part, keys in (
        ("bundled", ("mode", "text")),
        ("profiles", ("shape", "batch", "profile")),
        ("verify", ("shape", "rows")),
        ("never", ("shape", "batch", "profile")),
    ):
        rows = {tuple(row[key] for key in keys): row for r in records for row in r[part]}
        if len(rows) < sum(len(r[part]) for r in records):
            raise ValueError(f"two results of bench speculation have the same rows of {part!r}; remove one")
        shapes = list(dict.fromkeys(row.get("shape") for row in rows.values()))
        found[part] = sorted(rows.values(), key=lambda row: (shapes.index(row.get("shape")), row.get("batch", 0)))
    return found


def speculation(record: Record) -> str:
    """speculation.json, or several joined."""
    machine = f"{record['gpu']}, driver {record['driver']}, {record['date'][:10]}"
    parts = []
    if rows := record["bundled"]:
        kinds = list(dict.fromkeys(r["text"] for r in rows))
        lines = []
        for mode in dict.fromkeys(r["mode"] for r in rows):
            found = {r["text"]: r for r in rows if r["mode"] == mode}
            cells = [
                f"{found[k]['tokens_per_step']:.2f} | {found[k]['tokens_per_s']:.0f} | {found[k]['times_plain']:.2f}x"
                for k in kinds
            ]
            lines.append(f"| {mode} | {' | '.join(cells)} |")
        titles = " | ".join(f"{k}: tokens a step | tokens/s | against plain" for k in kinds)
        parts.append(
            f"{machine}: the shipped model on held-out prompts, greedy, one request at a time. Trees of fixed size are "
            f"verified whatever they cost; the named drafters keep to the budget.\n\n"
            + _table(f"| drafter | {titles} |", lines)
            + _differences(rows)
        )
    if rows := record["profiles"]:
        lines = [
            f"| {r['shape']} | {r['batch']} | {r['profile']} | {r['tokens_per_step']:.2f} | {r['rows']:.0f} | "
            f"{r['plain_ms_per_step']:.2f} | {r['ms_per_step']:.2f} | {r['tokens_per_s']:.0f} | "
            f"{r['times_plain']:.2f}x |"
            for r in rows
        ]
        told = "; ".join(f"*{p['name']}*: {p['source']}" for p in record["profiles_of"])
        parts.append(
            f"{machine}: random weights, {record['context']} tokens of prompt, acceptance after a profile ({told}). "
            f"What the MTP layer computes is computed and timed; its choices alone are replaced.\n\n"
            + _table(
                "| shape | batch | profile | tokens a step and request | rows a step | ms, plain | ms | tokens/s | "
                "against plain |",
                lines,
            )
        )
    if rows := record["never"]:
        lines = [
            f"| {r['shape']} | {r['batch']} | {r['times_plain']:.3f}x | {r['tokens_per_step']:.3f} |" for r in rows
        ]
        parts.append(
            "The same when nothing that is drafted is ever right, from the first step on:\n\n"
            + _table("| shape | batch | against plain | tokens a step and request |", lines)
        )
    if rows := record["verify"]:
        parts.append(
            "; ".join(
                f"{r['shape']}: a step of {r['rows']} rows takes {r['relative']:.2f} times one row"
                for r in rows
                if r["rows"] > 1
            )
            + "."
        )
    return "\n\n".join(parts)


def _differences(rows: Sequence[Record]) -> str:
    """In how many answers of the shipped model a token is not plain decoding's, and how near the choice was."""
    found = [d for r in rows for d in r["differences"]]
    if not found:
        return "\n\nAll answers are those of plain decoding."
    ties = [d["deviations"] for d in found if d["near_tie"]]
    return (
        f"\n\n{len(found)} of {sum(r['prompts'] for r in rows)} answers differ from plain decoding's, {len(ties)} of "
        f"them at a near tie, where the logits of the two tokens are at most {max(ties, default=0):.3f} standard "
        "deviations of the row apart."
    )


def _table(titles: str, lines: Sequence[str]) -> str:
    return "\n".join([titles, "|" + " --- |" * (titles.count("|") - 1), *lines])


def plot(record: Record) -> str:
    """Speed against plain decoding over the batch, a panel a shape, a line a profile; SVG."""
    rows = record["profiles"]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    batches = sorted({r["batch"] for r in rows})
    top = max(2.0, 1.1 * max(r["times_plain"] for r in rows))
    width, height, left, above = 300, 200, 44, 34

    def place(panel: int, batch: int, times: float = 0.0) -> tuple[float, float]:
        step = (width - 30) / max(1, len(batches) - 1)
        return left + panel * (width + 40) + batches.index(batch) * step + 10, above + height * (1 - times / top)

    out = []
    for panel, shape in enumerate(shapes):
        x0 = left + panel * (width + 40)
        out.append(f'<text x="{x0 + width / 2:.0f}" y="18" text-anchor="middle" font-weight="600">{shape}</text>')
        for times in range(int(top) + 1):
            at = above + height * (1 - times / top)
            dash = "" if times == 1 else ' stroke-dasharray="2 4"'
            out.append(f'<path d="M{x0} {at:.1f}h{width}" stroke="#9aa0a6"{dash}/>')
            out.append(f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">{times}x</text>')
        for batch in batches:
            middle, below = place(panel, batch)
            out.append(f'<text x="{middle:.1f}" y="{below + 18:.1f}" text-anchor="middle">{batch}</text>')
        for name in dict.fromkeys(r["profile"] for r in rows):
            points = [
                place(panel, r["batch"], r["times_plain"]) for r in rows if (r["shape"], r["profile"]) == (shape, name)
            ]
            colour = _COLOURS.get(name, "#555")
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
            if points and panel == len(shapes) - 1:
                end = points[-1]
                out.append(f'<text x="{end[0] + 8:.1f}" y="{end[1] + 4:.1f}" fill="{colour}">{name}</text>')
    total = left + len(shapes) * (width + 40) + 30
    out.append(f'<text x="{total / 2:.0f}" y="{above + height + 38}" text-anchor="middle">requests at once</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {above + height + 48}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#3c4043">\n'
        '<title>Speed against plain decoding</title>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(out)
        + "\n</svg>\n"
    )
