"""The results of `boleinfer bench decode` as a picture: a roofline, and what share of it each step reaches. SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

LEFT, TOP, SIDE = 56, 44, 380  # of the roofline's square
BARS, LINE, WIDE = 520, 22, 300  # where the shares begin, the height of one, and 100 %
COLOURS = ("#1b6ca8", "#c8553d", "#2a9d5c", "#8a5fb0", "#b7791f", "#0f8b8d", "#b83280")  # readable on black and white
STYLE = """
  <style>
    svg { color: #1f2933; background: #ffffff }
    @media (prefers-color-scheme: dark) { svg { color: #e4e7eb; background: #14181d } }
    text { fill: currentColor }
    .axis { stroke: currentColor; stroke-opacity: 0.25 }
    .roof { stroke: currentColor; stroke-width: 2; fill: none }
  </style>"""


def plot(record: Record) -> str:
    """decode.json as SVG.

    Left, both axes logarithmic: a step's additions and multiplications a second over those for each byte that it has to
    read, under the roofs that the same run measured: memory's, and a large product's. Right: floor over time.
    """
    rows = record["rows"]
    shapes = list(dict.fromkeys((r["shape"], r["dtype"]) for r in rows))
    colours = {shape: COLOURS[i % len(COLOURS)] for i, shape in enumerate(shapes)}
    height = max(TOP + SIDE + 60, TOP + LINE * len(rows) + 40)
    title = f"{record['gpu']}: plain decoding against what memory and arithmetic give"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}" role="img" aria-label="{title}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12">' + STYLE,
            _text(LEFT, 22, title, 'font-size="16" font-weight="700"'),
            *_roofline(record, rows, colours),
            *_shares(rows, colours),
            "</svg>\n",
        ]
    )


def _roofline(record: Record, rows: Sequence[Record], colours: dict[Any, str]) -> list[str]:
    memory, arithmetic = record["read_gb_s"] / 1e3, record["product_tflop_s"]  # 10^12 a second
    ridge = arithmetic / memory
    points = [(r["flop"] / r["read_bytes"], r["flop"] / r["ms"] / 1e9, r) for r in rows]
    x_ends = min([0.5, *(x / 2 for x, _, _ in points)]), 4 * ridge
    y_ends = min([x_ends[0] * memory, *(y / 2 for _, y, _ in points)]), 2 * arithmetic

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + SIDE * _along(x, *x_ends), TOP + SIDE * (1 - _along(y, *y_ends))

    out = []
    for power in range(math.ceil(math.log10(x_ends[0])), math.floor(math.log10(x_ends[1])) + 1):
        x, _ = at(10**power, y_ends[0])
        out += [_line(x, TOP, x, TOP + SIDE), _text(x, TOP + SIDE + 16, f"{10**power:g}", 'text-anchor="middle"')]
    for power in range(math.ceil(math.log10(y_ends[0])), math.floor(math.log10(y_ends[1])) + 1):
        _, y = at(x_ends[0], 10**power)
        out += [_line(LEFT, y, LEFT + SIDE, y), _text(LEFT - 6, y + 4, f"{10**power:g}", 'text-anchor="end"')]
    roof = [at(x_ends[0], x_ends[0] * memory), at(ridge, arithmetic), at(x_ends[1], arithmetic)]
    out.append(f'<polyline class="roof" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in roof)}"/>')
    (x, y), slope = at(ridge, arithmetic), math.degrees(math.atan2(roof[0][1] - roof[1][1], roof[1][0] - roof[0][0]))
    middle = (roof[0][0] + x) / 2, (roof[0][1] + y) / 2 - 8
    turned = f'text-anchor="middle" transform="rotate({-slope:.1f} {middle[0]:.1f} {middle[1]:.1f})"'
    out.append(_text(*middle, f"memory, {record['read_gb_s']:,.0f} GB/s", turned))
    out.append(_text(x, y - 8, f"products, {arithmetic:,.0f} TFLOP/s", 'text-anchor="middle"'))
    for intensity, speed, r in points:
        x, y = at(intensity, speed)
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[r["shape"], r["dtype"]]}"/>')
    below = "operations for each byte that has to be read"
    out.append(_text(LEFT + SIDE / 2, TOP + SIDE + 36, below, 'text-anchor="middle"'))
    out.append(_text(LEFT, TOP - 8, "TFLOP/s"))
    return out


def _shares(rows: Sequence[Record], colours: dict[Any, str]) -> list[str]:
    out = [_text(BARS + 170, TOP - 8, "floor over time of a step")]
    for i, r in enumerate(rows):
        y, x = TOP + LINE * i, BARS + 170
        name = f"{r['shape'].removeprefix('qwen')} {'fp8 ' if r['dtype'] == 'fp8' else ''}x {r['batch']}"
        out.append(_text(x - 8, y + 14, name, 'text-anchor="end"'))
        colour = colours[r["shape"], r["dtype"]]
        bar = 2 / 3 * WIDE * min(1.0, r["share"])
        out.append(f'<rect x="{x}" y="{y + 2}" width="{bar:.1f}" height="{LINE - 6}" fill="{colour}"/>')
        out.append(_text(x + bar + 6, y + 14, f"{r['share']:.0%}, {r['ms']:.2f} ms"))
    return out


def _along(value: float, low: float, high: float) -> float:
    """How far value lies from low to high, by logarithms."""
    return math.log(value / low) / math.log(high / low)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="axis" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'
