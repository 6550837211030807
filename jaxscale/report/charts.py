"""Line charts as HTML with inline SVG, without a library, and visible without a script.

The SVG holds only the curves and is stretched to its box. Ticks and labels are HTML beside it, so that text keeps its
size on a wide screen and on a phone. A script in the page (report.js) reads each chart's JSON, and shows the values
under the pointer (the read-out). A curve of many steps is thinned to the least and the largest value of each bucket of
steps, so that no spike is lost.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from jaxscale.figures.axes import spread, thin, ticks
from jaxscale.figures.markup import Markup, element
from jaxscale.values.units import number, short

BUCKETS = 500
"""Number of buckets of a thinned curve, about a chart's width in pixels; each bucket keeps at most two points."""

_SIDE = 1000.0
"""Width and height of the curves' SVG, in its own units."""
_MOST_MARKS = 40
"""Largest number of marks on a chart."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve of values over steps.

    Args:
        label: name of the curve in the legend and the read-out.
        steps: (n,) ascending steps.
        values: (n,) value at each step; a value that is not finite leaves a gap.
        style: style of the curve: a line, a faint line behind the others, or dots.
        color: number of the curve's colour in the page's palette, from 1.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    style: Literal["line", "faint", "dots"] = "line"
    color: int = 1


@dataclasses.dataclass(frozen=True)
class Mark:
    """A labelled step, drawn as a vertical line across the chart."""

    step: int
    label: str


def smooth(values: np.ndarray, window: float) -> np.ndarray:
    """Return the mean of the values over about `window` steps around each step; over fewer towards the ends.

    Args:
        values: float (n,). NaN and infinity are left out of the means.
        window: number of steps.

    Returns:
        float (n,), with NaN at a step without a finite value around it.

    Example:
        >>> smooth(np.array([1.0, 2.0, np.nan, 4.0, 5.0]), 3).tolist()
        [1.0, 1.5, 3.0, 4.5, 5.0]
    """
    is_finite = np.isfinite(values)
    sums_before = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts_before = np.concatenate([[0], np.cumsum(is_finite)])
    positions = np.arange(len(values))
    radii = np.clip(np.minimum(positions, positions[::-1]), int(window) // 12, int(window) // 2)
    starts, ends = np.maximum(positions - radii, 0), np.minimum(positions + radii + 1, len(values))
    sums, counts = sums_before[ends] - sums_before[starts], counts_before[ends] - counts_before[starts]
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    format_value: Callable[[float], str] = number,
    format_ticks: Callable[[float], str] | None = None,
    ticks_base: float = 1.0,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    tall: bool = False,
) -> Markup:
    """Draw a chart of curves over steps as an HTML figure.

    The axis of values is logarithmic if they span more than two decades. Rare values far from all others do not affect
    its bounds. They are outside the frame, and the caption tells how many they are.

    Args:
        title: the chart's title.
        series: the curves; those without a finite value are left out.
        unit: unit of the values, shown after the title.
        format_value: function that formats a value for the read-out.
        format_ticks: function that formats a tick; by default, a tick has as many digits as distinguish the ticks.
        ticks_base: number of whose round multiples the ticks are, such as 1024.
        from_zero: whether the axis begins at 0.
        marks: labelled steps, drawn as vertical lines.
        tall: whether the chart is tall and has the page's width.

    Returns:
        The figure; "" if no value is finite.
    """
    series = [curve for curve in series if np.isfinite(curve.values).any()]
    if not series:
        return Markup()
    finite_values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in series])
    # bounds of the axis; they are replaced by their logarithms below if the axis is logarithmic
    low, high, outside_count = _axis_bounds(finite_values)
    is_logarithmic = bool(low > 0 and high / low > 100 and not from_zero)
    if from_zero:
        low = min(0.0, low)
    if is_logarithmic:
        low, high = math.log10(low), math.log10(high)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - margin), high + margin
    first_step = float(min(curve.steps.min() for curve in series))
    last_step = float(max(curve.steps.max() for curve in series))
    if first_step == last_step:
        first_step, last_step = first_step - 1, last_step + 1

    def x_of(step: float) -> float:
        """Return the position of a step across the chart, from 0 at the left to 1."""
        return (step - first_step) / (last_step - first_step)

    def y_of(value: float) -> float:
        """Return the position of a value down the chart, from 0 at the top to 1."""
        if is_logarithmic:
            value = math.log10(value) if value > 0 else low - 1
        return (high - value) / (high - low)

    marks = [mark for mark in marks if first_step <= mark.step <= last_step][:_MOST_MARKS]
    # `levels` are the values of the ticks
    if is_logarithmic:
        exponents = range(math.ceil(low), math.floor(high) + 1)
        stride = max(1, math.ceil(len(exponents) / 5))
        levels = [10.0**exponent for exponent in exponents if exponent % stride == 0]
    else:
        levels = [multiple * ticks_base for multiple in ticks(low / ticks_base, high / ticks_base, 7 if tall else 6)]
    image = element(
        "svg",
        [element("path", class_="grid", d=f"M0 {y_of(level) * _SIDE:.1f}H{_SIDE:.0f}") for level in levels],
        [element("path", class_="mark", d=f"M{x_of(mark.step) * _SIDE:.1f} 0V{_SIDE:.0f}") for mark in marks],
        [_curve_path(curve, x_of, y_of) for curve in series],
        viewBox=f"0 0 {_SIDE:.0f} {_SIDE:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    format_tick = format_ticks or ("{:g}".format if is_logarithmic else _make_tick_format(levels))
    format_step = short if last_step >= 1e6 else "{:,.0f}".format
    labels = [element("span", format_tick(level), class_="y", style=f"top:{y_of(level):.2%}") for level in levels]
    tick_steps = [step for step in ticks(first_step, last_step, 5) if step == int(step)]
    labels += [element("span", format_step(step), class_="x", style=f"left:{x_of(step):.2%}") for step in tick_steps]
    labels += _mark_labels(marks, x_of) if tall else []
    keys = [element("span", element("i"), curve.label, class_=f"key c{curve.color} {curve.style}") for curve in series]
    note_texts = [f"{outside_count} point{'s' * (outside_count > 1)} outside the frame"] if outside_count else []
    gap_count = sum(int((~np.isfinite(curve.values)).sum()) for curve in series if curve.style != "line")
    note_texts += [f"{gap_count} not finite"] if gap_count else []
    note_texts += ["logarithmic"] if is_logarithmic else []
    caption = (
        element("b", title),
        element("small", unit) if unit else None,
        element("span", keys, class_="legend") if tall and len(keys) > 1 else None,
        element("small", ", ".join(note_texts), class_="note") if note_texts else None,
    )
    plot = (image, labels, element("div", class_="cursor"), element("div", class_="tip"))
    description = _description(title, series, format_value)
    return element(
        "figure",
        element("figcaption", caption),
        element("div", plot, class_="plot", tabindex=0, role="img", aria_label=description),
        element("script", _readout_json(series, marks, format_value, first_step, last_step), type="application/json"),
        class_="chart tall" if tall else "chart",
    )


def _axis_bounds(finite_values: np.ndarray) -> tuple[float, float, int]:
    """Return the lower and the upper bound of the axis for finite values, and the number of values outside."""
    low, high = float(finite_values.min()), float(finite_values.max())
    if len(finite_values) < 50:
        return low, high, 0
    p1, p99 = np.percentile(finite_values, [1, 99]).tolist()
    central_range = p99 - p1
    if central_range > 0 and high > p99 + 4 * central_range:
        high = p99 + 0.5 * central_range
    if central_range > 0 and low < p1 - 4 * central_range:
        low = p1 - 0.5 * central_range
    return low, high, int(((finite_values > high) | (finite_values < low)).sum())


def _make_tick_format(tick_values: Sequence[float]) -> Callable[[float], str]:
    """Return a function that formats ticks with just enough decimals to tell them apart."""
    least_gap = min((after - before for before, after in pairwise(tick_values) if after > before), default=1.0)
    biggest = max(map(abs, tick_values), default=1.0)
    decimals = max(0, -math.floor(math.log10(least_gap) + 1e-9))
    if biggest >= 1e5:
        return short
    template = "{:.2g}" if biggest < 1e-3 else f"{{:,.{decimals}f}}"
    return lambda value: template.format(value).replace("e-0", "e-").replace("-", "\N{MINUS SIGN}") if value else "0"


def _mark_labels(marks: Sequence[Mark], x_of: Callable[[float], float]) -> list[Markup]:
    """Return labels at the upper ends of the marks; labels that would overlap are joined."""
    # a position across the chart, and the labels there
    label_groups: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        x = x_of(mark.step)
        if not label_groups or x - label_groups[-1][0] >= 0.14:
            label_groups.append((x, []))
        label_groups[-1][1].append(mark.label)
    texts = [(x, ", ".join(dict.fromkeys(labels)), " before" * (x > 0.7)) for x, labels in label_groups]
    return [element("span", text, class_=f"rule{side_class}", style=f"left:{x:.2%}") for x, text, side_class in texts]


def _curve_path(curve: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Markup:
    """Return the SVG path of a curve, with a gap at each value that is not finite; a value between gaps is a dot."""
    steps, values = thin(curve.steps, curve.values, BUCKETS)
    style = "dots" if len(steps) == 1 else curve.style
    path_data = ""
    for is_finite, points in itertools.groupby(zip(steps, values, strict=True), lambda point: math.isfinite(point[1])):
        # pairs of coordinates, clamped, since a coordinate far outside the frame would lose its digits
        pairs = [f"{x_of(x) * _SIDE:.1f} {min(max(y_of(y), -1.0), 2.0) * _SIDE:.1f}" for x, y in points if is_finite]
        if style == "dots" or len(pairs) == 1:
            path_data += "".join(f"M{pair}h0" for pair in pairs)
        elif pairs:
            path_data += "M" + "L".join(pairs)
    return element("path", class_=f"c{curve.color} {style}", d=path_data)


def _readout_json(
    series: Sequence[Series], marks: Sequence[Mark], format_value: Callable[[float], str], left: float, right: float
) -> Markup:
    """Return the JSON for the page's script, with the steps and formatted values of each curve, evenly thinned.

    The numbers `left` and `right` are the steps at the chart's sides.
    """
    curves_json = []
    for curve in series:
        indices = spread(len(curve.steps), BUCKETS)
        curves_json.append(
            {
                "label": curve.label,
                "color": curve.color,
                "steps": curve.steps[indices].astype(int).tolist(),
                "texts": [format_value(value) for value in curve.values[indices].tolist()],
            }
        )
    chart = {"left": left, "right": right, "curves": curves_json, "marks": [[mark.step, mark.label] for mark in marks]}
    return Markup(json.dumps(chart, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"))


def _description(title: str, series: Sequence[Series], format_value: Callable[[float], str]) -> str:
    """Return a text for screen readers, with the first and the last finite value of each curve."""
    triples = [(curve.label, *map(format_value, curve.values[np.isfinite(curve.values)][[0, -1]])) for curve in series]
    return f"{title}: " + "; ".join(f"{label} from {first} to {last}" for label, first, last in triples)
