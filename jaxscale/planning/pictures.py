"""Pictures of a step's memory as SVG, and the HTML page around them: no library, no script, light and dark."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.planning.timeline import Item
from jaxscale.values.units import size

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 86, 16, 16, 40
COLORS = (
    "#4e79a7", "#59a14f", "#9c755f", "#bab0ac", "#76b7b2", "#f28e2b", "#e15759", "#b07aa1", "#edc948", "#ff9da7",
)  # fmt: skip
"""Colors of the kinds of tensor, in stacking order (Tableau's ten)."""

CUT = 3
"""Costs farther above the least than this many times the median distance are drawn at the edge."""

STEPS = 400
"""Maximum number of moments drawn; of neighbours, the one with the most live bytes."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on the curve of time against memory.

    Args:
        name: its text form.
        bytes: device memory per device.
        cost: FLOP or seconds, as a multiple of the least.
        chosen: whether it is the user's plan.
        kept: bytes of kept activations, of the whole model; `None` if unknown.
        kept_of_a_block: the same for one block.
    """

    name: str
    bytes: int
    cost: float
    chosen: bool = False
    kept: int | None = None
    kept_of_a_block: int | None = None


def stacked(moments: Sequence[Mapping[str, int]], limit: int | None = None, turn: int | None = None) -> str:
    """Live bytes by kind over the moments of a step, stacked, as an SVG image.

    Args:
        moments: live bytes by kind.
        limit: available bytes, drawn as a line.
        turn: index of the first moment of the backward pass, drawn as a line.

    Example:
        >>> stacked([{"parameters": 2**20}, {"parameters": 2**20, "loss": 2**20}]).count("<path")
        2
    """
    kinds = list(dict.fromkeys(kind for moment in moments for kind in moment))
    drawn_moments, indices = _thinned(moments)
    most_bytes = max([sum(moment.values()) for moment in drawn_moments] + [0])
    # a limit far above all bytes would flatten them
    top_bytes = max(most_bytes, limit or 0) if limit is not None and limit < 2.5 * most_bytes else most_bytes
    top_bytes = (top_bytes or 1) * 1.06
    span = max(len(moments) - 1, 1)

    def x_of(index: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / span

    def y_of(count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / top_bytes

    parts = _frame(top_bytes, y_of)
    lower_edge = [0] * len(drawn_moments)
    for index, kind in enumerate(kinds):
        upper_edge = [low + moment.get(kind, 0) for low, moment in zip(lower_edge, drawn_moments, strict=True)]
        upper = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(indices, upper_edge, strict=True)]
        lower = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(indices[::-1], lower_edge[::-1], strict=True)]
        color = COLORS[index % len(COLORS)]
        parts.append(f'<path d="M{" L".join([*upper, *lower])}Z" fill="{color}"><title>{escape(kind)}</title></path>')
        lower_edge = upper_edge
    if limit is not None and limit <= top_bytes:
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(limit):.1f}" y2="{y_of(limit):.1f}"/>'
        )
        parts.append(_text(WIDTH - RIGHT - 4, y_of(limit) - 5, f"limit {size(limit)}", "end"))
    if turn is not None and 0 < turn < len(moments):
        x = x_of(turn)
        parts.append(f'<line class="turn" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x + 5, TOP + 12, "backward"))
        parts.append(_text(x - 5, TOP + 12, "forward", "end"))
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "operations in order; a loop's body is drawn once", "middle")
    )
    legend = [
        f'<rect x="{LEFT + 150 * (n % 6)}" y="{HEIGHT + 6 + 20 * (n // 6)}" width="12" height="12" '
        f'fill="{COLORS[n % len(COLORS)]}"/>' + _text(LEFT + 18 + 150 * (n % 6), HEIGHT + 17 + 20 * (n // 6), kind)
        for n, kind in enumerate(kinds)
    ]
    return _svg([*parts, *legend], HEIGHT + 14 + 20 * math.ceil(len(kinds) / 6), "live bytes through a step")


def curve(points: Sequence[Point], limit: int | None = None) -> str:
    """Plans by bytes (across) and by cost (upwards), as an SVG image.

    Costs farther above 1 than `CUT` times the median distance are drawn at the upper edge.

    Args:
        points: the plans.
        limit: available bytes, drawn as a line.
    """
    most_bytes = max(point.bytes for point in points)
    max_bytes = (max(most_bytes, limit) if limit is not None and limit < 2.5 * most_bytes else most_bytes) * 1.12
    edge_cost = _top_cost([point.cost for point in points])
    top_cost = 1 + (edge_cost - 1) * 1.15

    def x_of(count: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * count / max_bytes

    def y_of(cost: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (cost - 1) / (top_cost - 1)

    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(1):.1f}" y2="{y_of(1):.1f}"/>']
    for step in range(5):
        cost = 1 + (top_cost - 1) * step / 4
        parts.append(_text(LEFT - 8, y_of(cost) + 4, f"{cost:.2f}x", "end"))
        parts.append(_text(x_of(max_bytes * step / 4.5), HEIGHT - BOTTOM + 16, size(max_bytes * step / 4.5), "middle"))
    if limit is not None and limit <= max_bytes:
        x = x_of(limit)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x - 5, TOP + 12, f"limit {size(limit)}", "end"))
    labels: list[tuple[float, float, float]] = []
    for point in sorted(points, key=lambda point: not point.chosen):
        x, y, radius = x_of(point.bytes), y_of(min(point.cost, edge_cost)), 7 if point.chosen else 5
        color = COLORS[6] if point.chosen else COLORS[0]
        tooltip = f"{escape(point.name)}: {size(point.bytes)}, {point.cost:.2f}x"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"><title>{tooltip}</title></circle>')
        half_width = 3.6 * len(point.name)
        has_room = all(abs(x - lx) > half_width + half or abs(y - ly) > 13 for lx, ly, half in labels)
        if has_room or point.chosen:  # a label that would overlap another is shown only as a tooltip
            labels.append((x, y, half_width))
            above = f" {point.cost:.1f}x" if point.cost > edge_cost else ""
            parts.append(_text(x, y - 11, point.name + above, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "bytes per device", "middle"))
    return _svg(parts, HEIGHT, "time against memory")


def lines(curves: Mapping[str, Sequence[Point]], across_name: str) -> str:
    """Plans of several rules by bytes (across) and by cost (upwards), a line per rule, as an SVG image.

    Costs farther above 1 than `CUT` times the median distance are drawn at the upper edge.

    Args:
        curves: plans of each rule.
        across_name: title of the horizontal axis.

    Example:
        >>> curves = {"save": [Point("save:0B", 0, 1.3), Point("save:9B", 9, 1.0)], "none": [Point("none", 9, 1.0)]}
        >>> lines(curves, "bytes").count("<polyline")
        2
    """
    points = [point for plans in curves.values() for point in plans]
    right_margin = RIGHT + 8 * max(map(len, curves))
    max_bytes = max([point.bytes for point in points] + [1])
    top_cost = _top_cost([point.cost for point in points])

    def position(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - right_margin) * point.bytes / max_bytes
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(point.cost, top_cost) - 1) / (top_cost - 1)

    parts = []
    for step in range(5):
        x, y = position(Point("", max_bytes * step // 4, 1 + (top_cost - 1) * step / 4))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - right_margin}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{(top_cost - 1) * step / 4:+.0%}", "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, size(max_bytes * step / 4), "middle"))
    for index, (rule, plans) in enumerate(curves.items()):
        color = f"hsl({index * 360 // len(curves)} 65% 45%)"
        ordered = [(*position(point), point) for point in sorted(plans, key=lambda point: point.bytes)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for x, y, point in ordered:
            tooltip = f"{escape(point.name)}: {size(point.bytes)}, {point.cost - 1:+.1%}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{tooltip}</title></circle>')
        y = TOP + 12 + 18 * index
        parts.append(f'<circle cx="{WIDTH - right_margin + 14}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(_text(WIDTH - right_margin + 24, y, rule))
    parts.append(_text((LEFT + WIDTH - right_margin) / 2, HEIGHT - 4, across_name, "middle"))
    if any(point.cost > top_cost for point in points):
        parts.append(_text(WIDTH - right_margin - 4, TOP + 14, "at this edge: cost above the scale", "end"))
    return _svg(parts, max(HEIGHT, TOP + 18 * len(curves)), "time against memory")


def _top_cost(costs: Sequence[float]) -> float:
    """The largest cost drawn to scale: beyond it a few points would flatten all others."""
    excesses = sorted(cost - 1 for cost in costs)
    median = excesses[len(excesses) // 2] if excesses else 0.0
    return 1 + max(min(max(excesses, default=0.0), CUT * median), 0.1) * 1.1


def table(items: Sequence[Item], rows: int = 60) -> str:
    """Arrays as an HTML table, the largest first; those after `rows` are summed in one line."""
    cells = [
        f"<tr><td class=n>{size(item.bytes)}</td><td>{escape(item.kind)}</td><td>{escape(item.name)}</td></tr>"
        for item in items[:rows]
    ]
    if len(items) > rows:
        total = sum(item.bytes for item in items[rows:])
        cells.append(f"<tr><td class=n>{size(total)}</td><td></td><td>{len(items) - rows} smaller ones</td></tr>")
    return f"<table><tr><th>bytes</th><th>for</th><th>what</th></tr>{''.join(cells)}</table>"


def page(title: str, parts: Sequence[tuple[str, str]]) -> str:
    """A self-contained page of parts with headings."""
    body = "".join((f"<h2>{escape(heading)}</h2>" if heading else "") + content for heading, content in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def framed(html: str, height: int) -> str:
    """A page in a frame for notebooks, which isolates its style.

    Example:
        >>> framed("<p>", 100)
        '<iframe srcdoc="&lt;p&gt;" style="width:100%;height:100px;border:0"></iframe>'
    """
    return f'<iframe srcdoc="{escape(html)}" style="width:100%;height:{height}px;border:0"></iframe>'


def write_picture(path: str | Path, svg: Callable[[], str], html: Callable[[], str]) -> None:
    """Write a page, or only a picture if the name ends in .svg.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_text(svg() if path.suffix == ".svg" else html())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another name") from error


def _thinned(moments: Sequence[Mapping[str, int]]) -> tuple[list[Mapping[str, int]], list[int]]:
    """At most `STEPS` moments and their indices: the fullest of each bucket, and both ends."""
    if len(moments) <= STEPS:
        return list(moments), list(range(len(moments)))
    bucket_size = math.ceil(len(moments) / STEPS)
    indices = {0, len(moments) - 1}
    for start in range(0, len(moments), bucket_size):
        bucket = range(start, min(start + bucket_size, len(moments)))
        indices.add(max(bucket, key=lambda index: sum(moments[index].values())))
    return [moments[index] for index in sorted(indices)], sorted(indices)


def _frame(top_bytes: float, y_of: Callable[[float], float]) -> list[str]:
    """Grid lines at round numbers of bytes."""
    unit = 2.0 ** math.floor(math.log2(top_bytes / 3))
    parts = []
    for multiple in range(int(top_bytes / unit) + 1):
        y = y_of(multiple * unit)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, size(multiple * unit), "end"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="12" fill="#777">'
        f"<style>{_LINES}</style>{''.join(parts)}</svg>"
    )


_LINES = (
    ".grid{stroke:#8884;stroke-width:1}.limit{stroke:#e15759;stroke-width:1.5;stroke-dasharray:6 4}"
    ".turn{stroke:#888;stroke-width:1;stroke-dasharray:2 4}"
)
_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;"
    "padding:0 1rem}svg{width:100%;height:auto}pre{white-space:pre-wrap;line-height:1.35}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.15rem .7rem;text-align:left;"
    "border-bottom:1px solid #8883}.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
)
