"""Line charts as HTML with inline SVG: no library, and no script needed to see them.

The SVG holds only the curves and is stretched to its box; ticks and labels are HTML beside it, so that text keeps its
size on a wide screen and on a phone. A script in the page (report.js) reads each chart's JSON for the read-out under
the pointer. Curves of many steps are thinned to the chart's pixels: the least and largest value of each bucket, so that
no spike is lost.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Literal

import numpy as np

from jaxscale.values.units import number, short

BUCKETS = 500
"""Buckets of a thinned curve, of at most two points each: as many as a chart has pixels."""

_UNITS = 1000.0
_TICKS = 5
_MARKS = 40


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve: values over steps.

    Args:
        label: its name in the legend and the read-out.
        steps: (n,) ascending.
        values: (n,); a value that is not finite leaves a gap.
        style: a line, a faint line behind others, or dots.
        color: number of its colour in the page's palette, from 1.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    style: Literal["line", "faint", "dots"] = "line"
    color: int = 1


@dataclasses.dataclass(frozen=True)
class Mark:
    """A labelled step, drawn as a rule across the chart."""

    step: int
    label: str


def smooth(values: np.ndarray, window: float) -> np.ndarray:
    """Mean over about `window` steps around each step, fewer towards the ends. NaN and infinity are left out.

    Example:
        >>> smooth(np.array([1.0, 2.0, np.nan, 4.0, 5.0]), 3).tolist()
        [1.0, 1.5, 3.0, 4.5, 5.0]
    """
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    position = np.arange(len(values))
    radius = np.clip(np.minimum(position, position[::-1]), int(window) // 12, int(window) // 2)
    start, end = np.maximum(position - radius, 0), np.minimum(position + radius + 1, len(values))
    sums, counts = total[end] - total[start], count[end] - count[start]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


def thin(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """The visible points of a curve: the least and the largest of each bucket, and both ends.

    Example:
        >>> steps, values = thin(np.arange(10_000), np.zeros(10_000))
        >>> len(steps) <= 2 * BUCKETS + 4
        True
    """
    if len(steps) <= 2 * buckets:
        return steps, values
    indices = {0, len(steps) - 1}
    edges = np.linspace(0, len(steps), buckets + 1).astype(int)
    for start, end in pairwise(edges):
        bucket = values[start:end]
        finite = np.flatnonzero(np.isfinite(bucket))
        if len(finite) == 0:
            indices.add(int(start))
            continue
        indices |= {int(start + finite[np.argmin(bucket[finite])]), int(start + finite[np.argmax(bucket[finite])])}
    order = np.array(sorted(indices))
    return steps[order], values[order]


def ticks(low: float, high: float, wanted: int = _TICKS) -> list[float]:
    """About `wanted` round numbers between two bounds.

    Example:
        >>> ticks(0.0, 2000.0), ticks(1.43, 4.2)
        ([0.0, 500.0, 1000.0, 1500.0, 2000.0], [1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    """
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    text: Callable[[float], str] = number,
    ticks_text: Callable[[float], str] | None = None,
    ticks_base: float = 1.0,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    tall: bool = False,
) -> str:
    """A chart of curves over steps as an HTML figure.

    The axis is logarithmic where the values span more than two decades. Rare values far from all others do not set its
    bounds: the frame cuts them off, and the caption counts them.

    Args:
        title: the chart's title.
        series: the curves; those without a finite value are left out.
        unit: unit of the values, after the title.
        text: formats a value for the read-out.
        ticks_text: formats a tick; by default with as many digits as the ticks need.
        ticks_base: ticks are round multiples of it.
        from_zero: the axis begins at 0.
        marks: rules across the chart.
        tall: the chart takes the page's width.

    Returns:
        The figure, or "" where there is nothing to draw.
    """
    series = [curve for curve in series if np.isfinite(curve.values).any()]
    if not series:
        return ""
    finite = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in series])
    low, high, outside_count = _bounds(finite)
    logarithmic = bool(low > 0 and high / low > 100 and not from_zero)
    if from_zero:
        low = min(0.0, low)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - pad), high + pad
    first = float(min(curve.steps.min() for curve in series))
    last = float(max(curve.steps.max() for curve in series))
    if first == last:
        first, last = first - 1, last + 1

    def x_of(step: float) -> float:
        return (step - first) / (last - first)

    def y_of(value: float) -> float:
        if logarithmic:
            value = math.log10(value) if value > 0 else low - 1
        return (high - value) / (high - low)

    marks = [mark for mark in marks if first <= mark.step <= last][:_MARKS]
    rules = "".join(f'<path class="mark" d="M{x_of(m.step) * _UNITS:.1f} 0V{_UNITS:.0f}"/>' for m in marks)
    paths = "".join(_curve(curve, x_of, y_of) for curve in series)
    if logarithmic:
        heights = _log_ticks(low, high)
    else:
        multiples = ticks(low / ticks_base, high / ticks_base, 5 if tall else 4)
        heights = [(v * ticks_base, y_of(v * ticks_base)) for v in multiples]
    grid = "".join(f'<path class="grid" d="M0 {y * _UNITS:.1f}H{_UNITS:.0f}"/>' for _, y in heights)
    tick_text = ticks_text or ("{:g}".format if logarithmic else _tick_text([v for v, _ in heights]))
    labels = "".join(f'<span class="y" style="top:{y:.2%}">{escape(tick_text(v))}</span>' for v, y in heights)
    step_text = short if last >= 1e6 else "{:,.0f}".format
    step_ticks = [s for s in ticks(first, last, 4) if s == int(s)]
    labels += "".join(f'<span class="x" style="left:{x_of(s):.2%}">{step_text(s)}</span>' for s in step_ticks)
    legend = [f'<span class="key c{curve.color} {curve.style}"><i></i>{escape(curve.label)}</span>' for curve in series]
    if tall:
        labels += _mark_labels(marks, x_of)
    notes = [f"{outside_count} point{'s' * (outside_count > 1)} outside the frame"] if outside_count else []
    gap_count = sum(int((~np.isfinite(curve.values)).sum()) for curve in series if curve.style != "line")
    notes += [f"{gap_count} not finite"] if gap_count else []
    notes += ["logarithmic"] if logarithmic else []
    caption = [
        f"<b>{escape(title)}</b>",
        f"<small>{escape(unit)}</small>" if unit else "",
        f'<span class="legend">{"".join(legend)}</span>' if tall and len(legend) > 1 else "",
        f'<small class="note">{escape(", ".join(notes))}</small>' if notes else "",
    ]
    return (
        f'<figure class="chart{" tall" if tall else ""}"><figcaption>{"".join(caption)}</figcaption>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_aria_label(title, series, text))}">'
        f'<svg viewBox="0 0 {_UNITS:.0f} {_UNITS:.0f}" preserveAspectRatio="none" aria-hidden="true">'
        f'{grid}{rules}{paths}</svg>{labels}<div class="cursor"></div><div class="tip"></div></div>'
        f'<script type="application/json">{_readout(series, marks, text, first, last)}</script></figure>'
    )


def _bounds(finite: np.ndarray) -> tuple[float, float, int]:
    """Bounds of the axis, and the number of values outside."""
    low, high = float(finite.min()), float(finite.max())
    if len(finite) < 50:
        return low, high, 0
    p1, p99 = (float(p) for p in np.percentile(finite, [1, 99]))
    reach = 4 * (p99 - p1)
    if reach > 0 and high > p99 + reach:
        high = p99 + (p99 - p1) * 0.5
    if reach > 0 and low < p1 - reach:
        low = p1 - (p99 - p1) * 0.5
    return low, high, int(((finite > high) | (finite < low)).sum())


def _tick_text(values: Sequence[float]) -> Callable[[float], str]:
    """A formatter with as many decimals as distinguish the ticks."""
    gap = min((abs(b - a) for a, b in pairwise(values) if a != b), default=abs(values[0]) if values else 1.0)
    biggest = max((abs(value) for value in values), default=1.0)
    if biggest >= 1e5:
        return short
    if biggest < 1e-3:
        return _scientific
    decimals = next(p for p in range(12) if abs(gap * 10**p - round(gap * 10**p)) < 1e-6 * gap * 10**p or p == 11)
    return lambda value: f"{value:,.{decimals}f}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _scientific(value: float) -> str:
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _mark_labels(marks: Sequence[Mark], x_of: Callable[[float], float]) -> str:
    """Names at the heads of the rules; names that would overlap are joined."""
    groups: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        x = x_of(mark.step)
        if groups and x - groups[-1][0] < 0.14:
            if mark.label not in groups[-1][1]:
                groups[-1][1].append(mark.label)
        else:
            groups.append((x, [mark.label]))
    classes = {True: "rule before", False: "rule"}
    return "".join(
        f'<span class="{classes[x > 0.7]}" style="left:{x:.2%}">{escape(", ".join(names))}</span>'
        for x, names in groups
    )


def _log_ticks(low: float, high: float) -> list[tuple[float, float]]:
    exponents = range(math.ceil(low), math.floor(high) + 1)
    stride = max(1, math.ceil(len(exponents) / 5))
    return [(10.0**exponent, (high - exponent) / (high - low)) for exponent in exponents if exponent % stride == 0]


def _curve(curve: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    steps, values = thin(curve.steps, curve.values)
    commands: list[str] = []
    pen_down = False
    dots = curve.style == "dots" or len(steps) == 1
    for i, (step, value) in enumerate(zip(steps.tolist(), values.tolist(), strict=True)):
        if not math.isfinite(value):
            pen_down = False
            continue
        # clamp: a coordinate far outside the frame would lose its digits
        y = min(max(y_of(value), -1.0), 2.0) * _UNITS
        single = not pen_down and (i + 1 == len(steps) or not math.isfinite(values[i + 1]))
        commands.append(f"{'L' if pen_down else 'M'}{x_of(step) * _UNITS:.1f} {y:.1f}")
        if dots or single:
            commands.append("h0")
        pen_down = not dots
    style = "dots" if dots else curve.style
    return f'<path class="c{curve.color} {style}" d="{"".join(commands)}"/>'


def _readout(
    series: Sequence[Series], marks: Sequence[Mark], text: Callable[[float], str], first: float, last: float
) -> str:
    """The JSON for the page's script: steps and formatted values of each curve, evenly thinned."""
    curves = []
    for curve in series:
        indices = np.unique(np.linspace(0, len(curve.steps) - 1, min(len(curve.steps), BUCKETS)).astype(int))
        curves.append(
            {
                "label": curve.label,
                "color": curve.color,
                "steps": curve.steps[indices].astype(int).tolist(),
                "texts": [text(value) for value in curve.values[indices].tolist()],
            }
        )
    chart = {"left": first, "right": last, "curves": curves, "marks": [[mark.step, mark.label] for mark in marks]}
    return json.dumps(chart, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _aria_label(title: str, series: Sequence[Series], text: Callable[[float], str]) -> str:
    finite_values = [(curve.label, curve.values[np.isfinite(curve.values)]) for curve in series]
    return f"{title}: " + "; ".join(f"{label} from {text(v[0])} to {text(v[-1])}" for label, v in finite_values)
