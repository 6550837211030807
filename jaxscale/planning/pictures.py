"""Pictures of a step's memory as SVG, and the page around them: no library, no script, light and dark."""

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
"""Of kinds of tensor, in the order they are stacked (Tableau's ten)."""

CUT = 3
"""Costs so many times as far above the least as their median are drawn at the edge."""

STEPS = 400
"""Moments that are drawn at most; of neighbours the fullest."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on the curve of time against memory.

    Args:
        name: its text form.
        bytes: of device memory, per device.
        cost: FLOP, or seconds, as a multiple of the least.
        chosen: it is the plan in question.
        kept: bytes of activations, of the whole model; `None` where nothing tells.
        kept_of_a_block: the same of one block.
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
        limit: bytes that there are, drawn as a line.
        turn: number of the first moment of the backward pass, drawn as a line.

    Example:
        >>> stacked([{"parameters": 2**20}, {"parameters": 2**20, "loss": 2**20}]).count("<path")
        2
    """
    kinds = list(dict.fromkeys(kind for moment in moments for kind in moment))
    shown, at = _thinned(moments)
    top = max([sum(moment.values()) for moment in shown] + [0])
    # a limit far above all bytes would press them flat
    high = max(top, limit or 0) if limit is not None and limit < 2.5 * top else top
    high = (high or 1) * 1.06
    span = max(len(moments) - 1, 1)

    def across(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / span

    def down(count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / high

    parts = _frame(high, down)
    base = [0] * len(shown)
    for number, kind in enumerate(kinds):
        over = [low + moment.get(kind, 0) for low, moment in zip(base, shown, strict=True)]
        edge = [f"{across(x):.1f},{down(y):.1f}" for x, y in zip(at, over, strict=True)]
        back = [f"{across(x):.1f},{down(y):.1f}" for x, y in zip(at[::-1], base[::-1], strict=True)]
        color = COLORS[number % len(COLORS)]
        parts.append(f'<path d="M{" L".join([*edge, *back])}Z" fill="{color}"><title>{escape(kind)}</title></path>')
        base = over
    if limit is not None and limit <= high:
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(limit):.1f}" y2="{down(limit):.1f}"/>'
        )
        parts.append(_text(WIDTH - RIGHT - 4, down(limit) - 5, f"limit {size(limit)}", "end"))
    if turn is not None and 0 < turn < len(moments):
        x = across(turn)
        parts.append(f'<line class="turn" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x + 5, TOP + 12, "backward"))
        parts.append(_text(x - 5, TOP + 12, "forward", "end"))
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "operations in order; a loop's body stands there once", "middle")
    )
    legend = [
        f'<rect x="{LEFT + 150 * (n % 6)}" y="{HEIGHT + 6 + 20 * (n // 6)}" width="12" height="12" '
        f'fill="{COLORS[n % len(COLORS)]}"/>' + _text(LEFT + 18 + 150 * (n % 6), HEIGHT + 17 + 20 * (n // 6), kind)
        for n, kind in enumerate(kinds)
    ]
    return _svg([*parts, *legend], HEIGHT + 14 + 20 * math.ceil(len(kinds) / 6), "live bytes through a step")


def curve(points: Sequence[Point], limit: int | None = None) -> str:
    """Plans by bytes (across) and by cost (upwards), as an SVG image.

    What lies more than `CUT` times as far above 1 as the median of all is drawn at the upper edge.

    Args:
        points: the plans.
        limit: bytes that there are, drawn as a line.
    """
    widest = max(point.bytes for point in points)
    far = (max(widest, limit) if limit is not None and limit < 2.5 * widest else widest) * 1.12
    edge = _top([point.cost for point in points])
    high = 1 + (edge - 1) * 1.15

    def across(count: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * count / far

    def down(cost: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (cost - 1) / (high - 1)

    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(1):.1f}" y2="{down(1):.1f}"/>']
    for step in range(5):
        cost = 1 + (high - 1) * step / 4
        parts.append(_text(LEFT - 8, down(cost) + 4, f"{cost:.2f}x", "end"))
        parts.append(_text(across(far * step / 4.5), HEIGHT - BOTTOM + 16, size(far * step / 4.5), "middle"))
    if limit is not None and limit <= far:
        x = across(limit)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x - 5, TOP + 12, f"limit {size(limit)}", "end"))
    named: list[tuple[float, float, float]] = []
    for point in sorted(points, key=lambda point: not point.chosen):
        x, y, radius = across(point.bytes), down(min(point.cost, edge)), 7 if point.chosen else 5
        color = COLORS[6] if point.chosen else COLORS[0]
        told = f"{escape(point.name)}: {size(point.bytes)}, {point.cost:.2f}x"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"><title>{told}</title></circle>')
        wide = 3.6 * len(point.name)
        free = all(abs(x - other) > wide + half or abs(y - level) > 13 for other, level, half in named)
        if free or point.chosen:  # a name that would lie on another is shown under the pointer alone
            named.append((x, y, wide))
            above = f" {point.cost:.1f}x" if point.cost > edge else ""
            parts.append(_text(x, y - 11, point.name + above, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "bytes per device", "middle"))
    return _svg(parts, HEIGHT, "time against memory")


def lines(curves: Mapping[str, Sequence[Point]], across_name: str) -> str:
    """Several rules' plans by bytes (across) and by cost (upwards), a line for each rule, as an SVG image.

    What lies more than `CUT` times as far above 1 as the median of all is drawn at the upper edge.

    Args:
        curves: plans of each rule.
        across_name: what is drawn.

    Example:
        >>> curves = {"save": [Point("save:0B", 0, 1.3), Point("save:9B", 9, 1.0)], "none": [Point("none", 9, 1.0)]}
        >>> lines(curves, "bytes").count("<polyline")
        2
    """
    points = [point for found in curves.values() for point in found]
    right = RIGHT + 8 * max(map(len, curves))
    far = max([point.bytes for point in points] + [1])
    high = _top([point.cost for point in points])

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - right) * point.bytes / far
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(point.cost, high) - 1) / (high - 1)

    parts = []
    for step in range(5):
        x, y = place(Point("", far * step // 4, 1 + (high - 1) * step / 4))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{(high - 1) * step / 4:+.0%}", "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, size(far * step / 4), "middle"))
    for number, (rule, found) in enumerate(curves.items()):
        color = f"hsl({number * 360 // len(curves)} 65% 45%)"
        ordered = [(*place(point), point) for point in sorted(found, key=lambda point: point.bytes)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for x, y, point in ordered:
            told = f"{escape(point.name)}: {size(point.bytes)}, {point.cost - 1:+.1%}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{told}</title></circle>')
        y = TOP + 12 + 18 * number
        parts.append(f'<circle cx="{WIDTH - right + 14}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(_text(WIDTH - right + 24, y, rule))
    parts.append(_text((LEFT + WIDTH - right) / 2, HEIGHT - 4, across_name, "middle"))
    if any(point.cost > high for point in points):
        parts.append(_text(WIDTH - right - 4, TOP + 14, "at this edge: far above it", "end"))
    return _svg(parts, max(HEIGHT, TOP + 18 * len(curves)), "time against memory")


def _top(costs: Sequence[float]) -> float:
    """Up to which cost a picture reaches: past it a few points would press all others flat."""
    above = sorted(cost - 1 for cost in costs)
    middle = above[len(above) // 2] if above else 0.0
    return 1 + max(min(max(above, default=0.0), CUT * middle), 0.1) * 1.1


def table(items: Sequence[Item], rows: int = 60) -> str:
    """Arrays as an HTML table, the biggest first; what comes after `rows` is one line."""
    cells = [
        f"<tr><td class=n>{size(item.bytes)}</td><td>{escape(item.kind)}</td><td>{escape(item.name)}</td></tr>"
        for item in items[:rows]
    ]
    if len(items) > rows:
        rest = sum(item.bytes for item in items[rows:])
        cells.append(f"<tr><td class=n>{size(rest)}</td><td></td><td>{len(items) - rows} smaller ones</td></tr>")
    return f"<table><tr><th>bytes</th><th>for</th><th>what</th></tr>{''.join(cells)}</table>"


def page(title: str, parts: Sequence[tuple[str, str]]) -> str:
    """A page that stands alone, of headed parts."""
    body = "".join((f"<h2>{escape(head)}</h2>" if head else "") + content for head, content in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def framed(html: str, height: int) -> str:
    """A page in a frame for notebooks, so that its style stays its own.

    Example:
        >>> framed("<p>", 100)
        '<iframe srcdoc="&lt;p&gt;" style="width:100%;height:100px;border:0"></iframe>'
    """
    return f'<iframe srcdoc="{escape(html)}" style="width:100%;height:{height}px;border:0"></iframe>'


def write_picture(path: str | Path, svg: Callable[[], str], html: Callable[[], str]) -> None:
    """Write a page, or a picture alone where the name ends in .svg.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_text(svg() if path.suffix == ".svg" else html())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another name") from error


def _thinned(moments: Sequence[Mapping[str, int]]) -> tuple[list[Mapping[str, int]], list[int]]:
    """At most `STEPS` moments, and their numbers: of each bucket the fullest, and both ends."""
    if len(moments) <= STEPS:
        return list(moments), list(range(len(moments)))
    every = math.ceil(len(moments) / STEPS)
    at = {0, len(moments) - 1}
    for start in range(0, len(moments), every):
        bucket = range(start, min(start + every, len(moments)))
        at.add(max(bucket, key=lambda number: sum(moments[number].values())))
    return [moments[number] for number in sorted(at)], sorted(at)


def _frame(high: float, down: Callable[[float], float]) -> list[str]:
    """Rules at round numbers of bytes."""
    unit = 2.0 ** math.floor(math.log2(high / 3))
    parts = []
    for step in range(int(high / unit) + 1):
        y = down(step * unit)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, size(step * unit), "end"))
    return parts


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


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
