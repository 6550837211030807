"""Line charts as HTML with inline SVG. They need no library, and are visible without a script.

The SVG contains only the curves, and is stretched to its box. Ticks and labels are HTML, so that text has the same size
on a wide screen and on a phone. A script in the page (report.js) reads the JSON of each chart and shows the values at
the pointer (the read-out). If a curve has many steps, only the smallest and the largest value in each bucket of steps
are drawn, so that no spike is lost.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxscale.figures.axes import spread_indices, thin, ticks
from jaxscale.figures.markup import Markup, element
from jaxscale.values.units import number, short

BUCKETS = 500
"""Number of buckets for a thinned curve, about a chart's width in pixels. Each bucket keeps at most two points."""

LARGEST = 1e300
"""Largest magnitude that is drawn. Arithmetic with larger values may leave the range of floats."""
_SIDE = 1000.0
"""Width and height of the SVG with the curves, in units of the SVG."""
_MAX_MARKS = 40
"""Largest number of marks on a chart."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart.

    Args:
        name: name of the axis, which the read-out shows before a value.
        format_ticks: function that formats the label of a tick; by default, ticks are whole numbers.
    """

    name: str = "step"
    format_ticks: Callable[[float], str] | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve of values over steps.

    Args:
        label: name of the curve in the legend and the read-out.
        steps: [n] ascending steps, or ascending values of another horizontal axis.
        values: [n] value at each step; a value that is not finite leaves a gap.
        style: style of the curve: a line, a faint line behind the others, or dots.
        color: number of the curve's color in the page's palette, from 1 on.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    style: Literal["line", "faint", "dots"] = "line"
    color: int = 1


@dataclasses.dataclass(frozen=True)
class Mark:
    """A labeled step, drawn as a vertical line through the chart.

    Args:
        step: the step.
        label: text beside the line.
    """

    step: int
    label: str


def smooth(values: np.ndarray, window: float) -> np.ndarray:
    """Return the moving average of values over about `window` steps around each step; near the ends, over fewer steps.

    Args:
        values: float [n]. NaN and infinity are left out of the averages.
        window: number of steps.

    Returns:
        The average at each step, float [n]. It is NaN if no value in the window is finite.

    Example:
        >>> smooth(np.array([1.0, 2.0, np.nan, 4.0, 5.0]), 3).tolist()
        [1.0, 1.5, 3.0, 4.5, 5.0]
    """
    is_finite = np.abs(values) <= LARGEST
    sums_before = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts_before = np.concatenate([[0], np.cumsum(is_finite)])
    positions = np.arange(len(values))
    radii = np.clip(np.minimum(positions, positions[::-1]), int(window) // 12, int(window) // 2)
    starts, ends = np.maximum(positions - radii, 0), np.minimum(positions + radii + 1, len(values))
    window_sums, window_counts = sums_before[ends] - sums_before[starts], counts_before[ends] - counts_before[starts]
    return np.where(window_counts > 0, window_sums / np.maximum(window_counts, 1), math.nan)


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
    is_tall: bool = False,
    axis: Axis = Axis(),
) -> Markup:
    """Draw a chart of curves over steps as an HTML figure.

    The axis of values is logarithmic if the values span more than two decades. Outliers do not affect the bounds of the
    axis. They lie outside the frame, and the caption gives their number.

    Args:
        title: the chart's title.
        series: the curves; those without a finite value are left out.
        unit: unit of the values, shown after the title.
        format_value: function that formats a value for the read-out.
        format_ticks: function that formats a tick label; by default, labels have just enough digits to be distinct.
        ticks_base: unit of the ticks, such as 1024; ticks are at round multiples of this number.
        from_zero: whether the axis of values begins at 0.
        marks: labeled steps, drawn as vertical lines.
        is_tall: whether the chart is tall and as wide as the page.
        axis: the horizontal axis.

    Returns:
        The figure; "" if no value is finite.
    """
    curves = [dataclasses.replace(curve, values=_drawable(curve.values)) for curve in series]
    curves = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not curves:
        return Markup()
    finite_values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    lower_bound, upper_bound, outside_count = _axis_bounds(finite_values)
    is_logarithmic = bool(lower_bound > 0 and upper_bound / lower_bound > 100 and not from_zero)
    if from_zero:
        lower_bound = min(0.0, lower_bound)
    # ends of the axis of values; if it is logarithmic, the logarithms of these ends
    low, high = (math.log10(lower_bound), math.log10(upper_bound)) if is_logarithmic else (lower_bound, upper_bound)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - margin), high + margin
    first_step = float(min(curve.steps.min() for curve in curves))
    last_step = float(max(curve.steps.max() for curve in curves))
    if first_step == last_step:
        first_step, last_step = first_step - 1, last_step + 1

    def x_of(step: float) -> float:
        """Return the horizontal position of a step in the chart, from 0 (left) to 1 (right)."""
        return (step - first_step) / (last_step - first_step)

    def y_of(value: float) -> float:
        """Return the vertical position of a value in the chart, from 0 (top) to 1 (bottom)."""
        scaled_value = value
        if is_logarithmic:
            scaled_value = math.log10(value) if value > 0 else low - 1
        return (high - scaled_value) / (high - low)

    shown_marks = [mark for mark in marks if first_step <= mark.step <= last_step][:_MAX_MARKS]
    if is_logarithmic:
        exponents = range(math.ceil(low), math.floor(high) + 1)
        stride = max(1, math.ceil(len(exponents) / 5))
        tick_values = [10.0**exponent for exponent in exponents if exponent % stride == 0]
    else:
        multiples = ticks(low / ticks_base, high / ticks_base, 7 if is_tall else 6)
        tick_values = [multiple * ticks_base for multiple in multiples]
    curves_svg = element(
        "svg",
        [element("path", class_="grid", d=f"M0 {y_of(value) * _SIDE:.1f}H{_SIDE:.0f}") for value in tick_values],
        [element("path", class_="mark", d=f"M{x_of(mark.step) * _SIDE:.1f} 0V{_SIDE:.0f}") for mark in shown_marks],
        [_curve_path(curve, x_of, y_of) for curve in curves],
        viewBox=f"0 0 {_SIDE:.0f} {_SIDE:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    format_tick = format_ticks or ("{:g}".format if is_logarithmic else _tick_formatter(tick_values))
    format_step = axis.format_ticks or (short if last_step >= 1e6 else "{:,.0f}".format)
    label_elements = [
        element("span", format_tick(value), class_="y", style=f"top:{y_of(value):.2%}") for value in tick_values
    ]
    tick_steps = [step for step in ticks(first_step, last_step, 5) if step == int(step) or axis.format_ticks]
    label_elements += [
        element("span", format_step(step), class_="x", style=f"left:{x_of(step):.2%}") for step in tick_steps
    ]
    label_elements += _mark_labels(shown_marks, x_of) if is_tall else []
    legend_entries = [
        element("span", element("i"), curve.label, class_=f"key c{curve.color} {curve.style}") for curve in curves
    ]
    has_legend = len(curves) > 1 and (is_tall or all(curve.style != "faint" for curve in curves))
    note_texts = [f"{outside_count} point{'s' * (outside_count > 1)} outside the frame"] if outside_count else []
    gap_count = sum(int((~np.isfinite(curve.values)).sum()) for curve in curves if curve.style != "line")
    note_texts += [f"{gap_count} not finite"] if gap_count else []
    note_texts += ["logarithmic"] if is_logarithmic else []
    caption_elements = (
        element("b", title),
        element("small", unit) if unit else None,
        element("span", legend_entries, class_="legend") if has_legend else None,
        element("small", ", ".join(note_texts), class_="note") if note_texts else None,
    )
    plot_elements = (curves_svg, label_elements, element("div", class_="cursor"), element("div", class_="tip"))
    description = _description(title, curves, format_value)
    readout_json = _readout_json(curves, shown_marks, format_value, (first_step, last_step), axis)
    return element(
        "figure",
        element("figcaption", caption_elements),
        element("div", plot_elements, class_="plot", tabindex=0, role="img", aria_label=description),
        element("script", readout_json, type="application/json"),
        class_="chart tall" if is_tall else "chart",
    )


def _drawable(values: np.ndarray) -> np.ndarray:
    """Replace values that are not finite, or whose magnitude exceeds `LARGEST`, by NaN, and tiny values by 0."""
    magnitudes = np.abs(values)
    return np.where(magnitudes <= LARGEST, np.where(magnitudes < 1 / LARGEST, 0.0, values), math.nan)


def _axis_bounds(finite_values: np.ndarray) -> tuple[float, float, int]:
    """Return the lower and the upper bound of the axis of values, and the number of values outside these bounds."""
    lower_bound, upper_bound = float(finite_values.min()), float(finite_values.max())
    if len(finite_values) < 50:
        return lower_bound, upper_bound, 0
    percentile_1, percentile_99 = np.percentile(finite_values, [1, 99]).tolist()
    central_range = percentile_99 - percentile_1
    if central_range > 0 and upper_bound > percentile_99 + 4 * central_range:
        upper_bound = percentile_99 + 0.5 * central_range
    if central_range > 0 and lower_bound < percentile_1 - 4 * central_range:
        lower_bound = percentile_1 - 0.5 * central_range
    return lower_bound, upper_bound, int(((finite_values > upper_bound) | (finite_values < lower_bound)).sum())


def _tick_formatter(tick_values: Sequence[float]) -> Callable[[float], str]:
    """Return a function that formats ticks with just enough decimals to make them distinct."""
    smallest_gap = min((after - before for before, after in pairwise(tick_values) if after > before), default=1.0)
    largest_value = max(map(abs, tick_values), default=1.0)
    decimal_count = max(0, -math.floor(math.log10(smallest_gap) + 1e-9))
    if largest_value >= 1e5:
        return short
    template = "{:.2g}" if largest_value < 1e-3 else f"{{:,.{decimal_count}f}}"
    return lambda value: template.format(value).replace("e-0", "e-").replace("-", "\N{MINUS SIGN}") if value else "0"


def _mark_labels(marks: Sequence[Mark], x_of: Callable[[float], float]) -> list[Markup]:
    """Return the labels of marks, at the upper ends of their lines. Labels that would overlap are joined into one."""
    # pairs of a horizontal position, from 0 to 1, and the labels there
    label_groups: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        x = x_of(mark.step)
        if not label_groups or x - label_groups[-1][0] >= 0.14:
            label_groups.append((x, []))
        label_groups[-1][1].append(mark.label)
    positioned_texts = [(x, ", ".join(dict.fromkeys(labels)), " before" * (x > 0.7)) for x, labels in label_groups]
    return [
        element("span", text, class_=f"rule{side_class}", style=f"left:{x:.2%}")
        for x, text, side_class in positioned_texts
    ]


def _curve_path(curve: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Markup:
    """Return the SVG path of a curve. Values that are not finite leave gaps; a single value between gaps is a dot."""
    steps, values = thin(curve.steps, curve.values, BUCKETS)
    style = "dots" if len(steps) == 1 else curve.style
    path_data = ""
    for is_finite, points in itertools.groupby(zip(steps, values, strict=True), lambda point: math.isfinite(point[1])):
        # texts "x y" of coordinates; they are clamped, because coordinates far outside the frame would lose digits
        coordinates = [
            f"{x_of(step) * _SIDE:.1f} {min(max(y_of(value), -1.0), 2.0) * _SIDE:.1f}"
            for step, value in points
            if is_finite
        ]
        if style == "dots" or len(coordinates) == 1:
            path_data += "".join(f"M{coordinate}h0" for coordinate in coordinates)
        elif coordinates:
            path_data += "M" + "L".join(coordinates)
    return element("path", class_=f"c{curve.color} {style}", d=path_data)


def _readout_json(
    curves: Sequence[Series],
    marks: Sequence[Mark],
    format_value: Callable[[float], str],
    end_steps: tuple[float, float],
    axis: Axis,
) -> Markup:
    """Return the JSON for the page's script. For long curves, it has evenly spaced steps and their formatted values.

    Args:
        curves: the curves of the chart.
        marks: the marks of the chart.
        format_value: function that formats a value.
        end_steps: steps at the left and the right side of the chart.
        axis: the horizontal axis of the chart.
    """
    curves_json = []
    for curve in curves:
        indices = spread_indices(len(curve.steps), BUCKETS)
        curves_json.append(
            {
                "label": curve.label,
                "color": curve.color,
                "steps": [int(step) if step == int(step) else round(step, 3) for step in curve.steps[indices].tolist()],
                "texts": [format_value(value) for value in curve.values[indices].tolist()],
            }
        )
    marks_json = [[mark.step, mark.label] for mark in marks]
    chart_json: dict[str, Any] = {
        "left": end_steps[0],
        "right": end_steps[1],
        "curves": curves_json,
        "marks": marks_json,
    }
    chart_json |= {} if axis.name == "step" else {"axis": axis.name}
    return Markup(json.dumps(chart_json, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"))


def _description(title: str, curves: Sequence[Series], format_value: Callable[[float], str]) -> str:
    """Return a description for screen readers, with the first and the last finite value of each curve."""
    curve_texts = []
    for curve in curves:
        first_value, last_value = curve.values[np.isfinite(curve.values)][[0, -1]]
        curve_texts.append(f"{curve.label} from {format_value(first_value)} to {format_value(last_value)}")
    return f"{title}: " + "; ".join(curve_texts)
