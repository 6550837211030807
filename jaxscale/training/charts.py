"""Line charts as HTML with inline SVG: no library, and no script needed to see them.

The SVG holds the curves alone and is stretched to its box; ticks and labels are HTML beside it, so that text keeps its
size on a wide screen and on a phone. A script in the page (report.js) reads each chart's JSON for the read-out under
the pointer. Curves of many steps are thinned to the pixels there are: least and largest value of each bucket, so that
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
"""Points of a thinned curve, at most two each: more than a chart's width in pixels would not be seen."""

_UNITS = 1000.0
_TICKS = 5
_MARKS = 40


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve: values over steps.

    Args:
        label: what it is, for the legend and the read-out.
        steps: (n,) ascending.
        values: (n,); what is not finite leaves a gap.
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
    """A step at which something happened, drawn as a rule across the chart."""

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
    number = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    half = np.clip(np.minimum(place, place[::-1]), int(window) // 12, int(window) // 2)
    start, end = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    sums, counts = total[end] - total[start], number[end] - number[start]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


def thin(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """The points of a curve that are seen: of each bucket the least and the largest, and both ends.

    Example:
        >>> steps, values = thin(np.arange(10_000), np.zeros(10_000))
        >>> len(steps) <= 2 * BUCKETS + 4
        True
    """
    if len(steps) <= 2 * buckets:
        return steps, values
    keep = {0, len(steps) - 1}
    edges = np.linspace(0, len(steps), buckets + 1).astype(int)
    for start, end in pairwise(edges):
        part = values[start:end]
        finite = np.flatnonzero(np.isfinite(part))
        if len(finite) == 0:
            keep.add(int(start))
            continue
        keep |= {int(start + finite[np.argmin(part[finite])]), int(start + finite[np.argmax(part[finite])])}
    index = np.array(sorted(keep))
    return steps[index], values[index]


def ticks(low: float, high: float, wanted: int = _TICKS) -> list[float]:
    """Round numbers between two bounds, about as many as wanted.

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

    The axis is logarithmic where the values span more than two decades. Rare values far away from all others do not
    squeeze the rest: they are cut at the frame, and the caption counts them.

    Args:
        title: what is drawn.
        series: the curves; those without a finite value are left out.
        unit: of the values, after the title.
        text: a value as text, for the read-out.
        ticks_text: a tick as text; its digits by default.
        ticks_base: ticks are round multiples of it.
        from_zero: the axis begins at 0.
        marks: rules across the chart.
        tall: a chart that takes the page's width.

    Returns:
        The figure, or "" where there is nothing to draw.
    """
    series = [one for one in series if np.isfinite(one.values).any()]
    if not series:
        return ""
    finite = np.concatenate([one.values[np.isfinite(one.values)] for one in series])
    low, high, cut = _bounds(finite)
    logarithmic = bool(low > 0 and high / low > 100 and not from_zero)
    if from_zero:
        low = min(0.0, low)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - pad), high + pad
    left = float(min(one.steps.min() for one in series))
    right = float(max(one.steps.max() for one in series))
    if left == right:
        left, right = left - 1, right + 1

    def across(step: float) -> float:
        return (step - left) / (right - left)

    def down(value: float) -> float:
        if logarithmic:
            value = math.log10(value) if value > 0 else low - 1
        return (high - value) / (high - low)

    marks = [mark for mark in marks if left <= mark.step <= right][:_MARKS]
    rules = "".join(f'<path class="mark" d="M{across(m.step) * _UNITS:.1f} 0V{_UNITS:.0f}"/>' for m in marks)
    curves = "".join(_curve(one, across, down) for one in series)
    if logarithmic:
        heights = _log_ticks(low, high)
    else:
        round_ones = ticks(low / ticks_base, high / ticks_base, 5 if tall else 4)
        heights = [(v * ticks_base, down(v * ticks_base)) for v in round_ones]
    grid = "".join(f'<path class="grid" d="M0 {y * _UNITS:.1f}H{_UNITS:.0f}"/>' for _, y in heights)
    say = ticks_text or ("{:g}".format if logarithmic else _digits([v for v, _ in heights]))
    labels = "".join(f'<span class="y" style="top:{y:.2%}">{escape(say(v))}</span>' for v, y in heights)
    whole = short if right >= 1e6 else "{:,.0f}".format
    widths = [s for s in ticks(left, right, 4) if s == int(s)]
    labels += "".join(f'<span class="x" style="left:{across(s):.2%}">{whole(s)}</span>' for s in widths)
    keys = [f'<span class="key c{one.color} {one.style}"><i></i>{escape(one.label)}</span>' for one in series]
    if tall:
        labels += _mark_labels(marks, across)
    notes = [f"{cut} point{'s' * (cut > 1)} outside the frame"] if cut else []
    lost = sum(int((~np.isfinite(one.values)).sum()) for one in series if one.style != "line")
    notes += [f"{lost} not finite"] if lost else []
    notes += ["logarithmic"] if logarithmic else []
    caption = [
        f"<b>{escape(title)}</b>",
        f"<small>{escape(unit)}</small>" if unit else "",
        f'<span class="legend">{"".join(keys)}</span>' if tall and len(keys) > 1 else "",
        f'<small class="note">{escape(", ".join(notes))}</small>' if notes else "",
    ]
    return (
        f'<figure class="chart{" tall" if tall else ""}"><figcaption>{"".join(caption)}</figcaption>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_spoken(title, series, text))}">'
        f'<svg viewBox="0 0 {_UNITS:.0f} {_UNITS:.0f}" preserveAspectRatio="none" aria-hidden="true">'
        f'{grid}{rules}{curves}</svg>{labels}<div class="cursor"></div><div class="tip"></div></div>'
        f'<script type="application/json">{_readout(series, marks, text, left, right)}</script></figure>'
    )


def _bounds(finite: np.ndarray) -> tuple[float, float, int]:
    """Bounds of the axis, and how many values lie outside."""
    low, high = float(finite.min()), float(finite.max())
    if len(finite) < 50:
        return low, high, 0
    near, far = (float(value) for value in np.percentile(finite, [1, 99]))
    reach = 4 * (far - near)
    if reach > 0 and high > far + reach:
        high = far + (far - near) * 0.5
    if reach > 0 and low < near - reach:
        low = near - (far - near) * 0.5
    return low, high, int(((finite > high) | (finite < low)).sum())


def _digits(values: Sequence[float]) -> Callable[[float], str]:
    """Ticks with as many decimals as tell them apart."""
    apart = min((abs(b - a) for a, b in pairwise(values) if a != b), default=abs(values[0]) if values else 1.0)
    biggest = max((abs(value) for value in values), default=1.0)
    if biggest >= 1e5:
        return short
    if biggest < 1e-3:
        return _scientific
    places = next(p for p in range(12) if abs(apart * 10**p - round(apart * 10**p)) < 1e-6 * apart * 10**p or p == 11)
    return lambda value: f"{value:,.{places}f}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _scientific(value: float) -> str:
    head, _, power = f"{value:.1e}".partition("e")
    return f"{head.removesuffix('.0')}e{int(power)}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _mark_labels(marks: Sequence[Mark], across: Callable[[float], float]) -> str:
    """Names at the heads of the rules; those that would lie on each other are joined."""
    joined: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        where = across(mark.step)
        if joined and where - joined[-1][0] < 0.14:
            if mark.label not in joined[-1][1]:
                joined[-1][1].append(mark.label)
        else:
            joined.append((where, [mark.label]))
    side = {True: "rule before", False: "rule"}
    return "".join(
        f'<span class="{side[where > 0.7]}" style="left:{where:.2%}">{escape(", ".join(names))}</span>'
        for where, names in joined
    )


def _log_ticks(low: float, high: float) -> list[tuple[float, float]]:
    powers = range(math.ceil(low), math.floor(high) + 1)
    every = max(1, math.ceil(len(powers) / 5))
    return [(10.0**power, (high - power) / (high - low)) for power in powers if power % every == 0]


def _curve(one: Series, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    steps, values = thin(one.steps, one.values)
    pieces: list[str] = []
    drawing = False
    isolated = one.style == "dots" or len(steps) == 1
    for place, (step, value) in enumerate(zip(steps.tolist(), values.tolist(), strict=True)):
        if not math.isfinite(value):
            drawing = False
            continue
        # far beyond the frame a coordinate would lose its digits, and nobody sees it there
        y = min(max(down(value), -1.0), 2.0) * _UNITS
        alone = not drawing and (place + 1 == len(steps) or not math.isfinite(values[place + 1]))
        pieces.append(f"{'L' if drawing else 'M'}{across(step) * _UNITS:.1f} {y:.1f}")
        if isolated or alone:
            pieces.append("h0")
        drawing = not isolated
    style = "dots" if isolated else one.style
    return f'<path class="c{one.color} {style}" d="{"".join(pieces)}"/>'


def _readout(
    series: Sequence[Series], marks: Sequence[Mark], text: Callable[[float], str], left: float, right: float
) -> str:
    """The JSON that the page's script reads: for each curve its steps and values as text, evenly thinned."""
    curves = []
    for one in series:
        pick = np.unique(np.linspace(0, len(one.steps) - 1, min(len(one.steps), BUCKETS)).astype(int))
        curves.append(
            {
                "label": one.label,
                "color": one.color,
                "steps": one.steps[pick].astype(int).tolist(),
                "texts": [text(value) for value in one.values[pick].tolist()],
            }
        )
    told = {"left": left, "right": right, "curves": curves, "marks": [[mark.step, mark.label] for mark in marks]}
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _spoken(title: str, series: Sequence[Series], text: Callable[[float], str]) -> str:
    last = [(one.label, one.values[np.isfinite(one.values)]) for one in series]
    return f"{title}: " + "; ".join(f"{label} from {text(v[0])} to {text(v[-1])}" for label, v in last)
