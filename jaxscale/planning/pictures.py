"""Pictures of a step's memory as SVG: live bytes through a step, and memory plans by bytes and cost."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxscale.figures import markup
from jaxscale.figures.axes import byte_ticks, thin, ticks
from jaxscale.figures.frame import COLORS, Frame, dot, legend, svg, svg_text
from jaxscale.figures.markup import Markup, element, joined
from jaxscale.planning.timeline import Item
from jaxscale.values.units import size

CUT = 3
"""Largest excess cost (above the lowest cost) that is drawn to scale, as a multiple of the median excess cost."""

MAX_MOMENTS = 400
"""Maximum number of moments drawn; of each group of neighbors, those with the most and the fewest bytes are kept."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan in a picture of time against memory.

    Args:
        name: text of the plan.
        bytes: bytes of device memory per device.
        cost: FLOP or seconds of a step, as a multiple of the lowest cost of all plans.
        is_current: whether this is the user's plan or, in a search, the best plan.
        kept_bytes: bytes of kept activations of the whole model; `None` if unknown.
        block_kept_bytes: bytes of kept activations of one block; `None` if unknown.
    """

    name: str
    bytes: int
    cost: float
    is_current: bool = False
    kept_bytes: int | None = None
    block_kept_bytes: int | None = None


def live_bytes_svg(
    moments: Sequence[Mapping[str, int]], limit: int | None = None, backward_start: int | None = None
) -> str:
    """Return an SVG image of the live bytes at each moment of a step, stacked by kind of tensor.

    Args:
        moments: live bytes by kind at each moment.
        limit: available bytes, drawn as a horizontal line.
        backward_start: index of the first moment of the backward pass, drawn as a vertical line.

    Example:
        >>> live_bytes_svg([{"parameters": 2**20}, {"parameters": 2**20, "loss": 2**20}]).count("<path")
        2
    """
    kinds = list(dict.fromkeys(kind for moment in moments for kind in moment))
    byte_counts = np.array([sum(moment.values()) for moment in moments], float)
    drawn_indices = thin(np.arange(len(moments)), byte_counts, MAX_MOMENTS // 2)[0].tolist()
    top_bytes = 1.06 * _axis_bytes(max(byte_counts, default=0), limit)
    frame = Frame((0, max(len(moments) - 1, 1)), (0, top_bytes))
    elements = [frame.grid(byte_ticks(top_bytes), size)]
    lower_byte_counts = [0] * len(drawn_indices)
    for kind, color in zip(kinds, itertools.cycle(COLORS)):
        upper_byte_counts = [
            low + moments[index].get(kind, 0) for low, index in zip(lower_byte_counts, drawn_indices, strict=True)
        ]
        elements.append(frame.area(drawn_indices, lower_byte_counts, upper_byte_counts, color, kind))
        lower_byte_counts = upper_byte_counts
    if limit is not None and limit <= top_bytes:
        elements.append(frame.level(limit, "limit"))
        elements.append(svg_text(frame.width - frame.right - 4, frame.y_of(limit) - 5, f"limit {size(limit)}", "end"))
    if backward_start is not None and 0 < backward_start < len(moments):
        elements.append(frame.rule(backward_start, "turn"))
        elements.append(svg_text(frame.x_of(backward_start) + 5, frame.top + 12, "backward"))
        elements.append(svg_text(frame.x_of(backward_start) - 5, frame.top + 12, "forward", "end"))
    elements.append(frame.title("operations in order; a loop's body is drawn once"))
    legend_entries = [({"fill": color}, kind) for kind, color in zip(kinds, itertools.cycle(COLORS))]
    kinds_legend, legend_height = legend(legend_entries, frame.left, frame.height + 12, frame.width)
    return svg(frame.width, frame.height + 12 + legend_height, "live bytes through a step", elements, kinds_legend)


def plans_svg(points: Sequence[Point], limit: int | None = None) -> str:
    """Return an SVG image of plans, with bytes on the horizontal axis and cost on the vertical axis.

    Costs above the largest cost that is drawn to scale (`CUT`) are drawn at the upper edge.

    Args:
        points: the plans to draw.
        limit: available bytes, drawn as a vertical line.
    """
    edge_cost = _edge_cost(points)
    frame = Frame((0, 1.12 * _axis_bytes(max(point.bytes for point in points), limit)), (1, 1 + 1.15 * (edge_cost - 1)))
    elements = [_plan_axes(frame, "{:.2f}x".format), frame.title("bytes per device")]
    if limit is not None and limit <= frame.x_range[1]:
        elements.append(frame.rule(limit, "limit"))
        elements.append(svg_text(frame.x_of(limit) - 5, frame.top + 12, f"limit {size(limit)}", "end"))
    label_boxes: list[tuple[float, float, float]] = []  # x, y and half the width of each label that is drawn
    for point in sorted(points, key=lambda point: not point.is_current):
        x, y = frame.x_of(point.bytes), frame.y_of(min(point.cost, edge_cost))
        radius, color = (7, COLORS[6]) if point.is_current else (5, COLORS[0])
        elements.append(dot(x, y, radius, color, f"{point.name}: {size(point.bytes)}, {point.cost:.2f}x"))
        half_width = 3.6 * len(point.name)
        has_room = all(
            abs(x - label_x) > half_width + label_half_width or abs(y - label_y) > 13
            for label_x, label_y, label_half_width in label_boxes
        )
        if has_room or point.is_current:  # a label that would overlap another is shown only as a tooltip
            label_boxes.append((x, y, half_width))
            cost_text = f" {point.cost:.1f}x" if point.cost > edge_cost else ""
            elements.append(svg_text(x, y - 11, point.name + cost_text, "middle"))
    return svg(frame.width, frame.height, "time against memory", elements)


def rules_svg(points_by_rule: Mapping[str, Sequence[Point]], x_title: str) -> str:
    """Return an SVG image with a line for each memory rule: cost on the vertical axis, bytes on the horizontal axis.

    Costs above the largest cost that is drawn to scale (`CUT`) are drawn at the upper edge.

    Args:
        points_by_rule: memory plans of each rule, by the rule's name.
        x_title: title of the horizontal axis.

    Example:
        >>> save_points = [Point("save:0B", 0, 1.3), Point("save:9B", 9, 1.0)]
        >>> points_by_rule = {"save": save_points, "none": [Point("none", 9, 1.0)]}
        >>> rules_svg(points_by_rule, "bytes").count("<polyline")
        2
    """
    points = [point for rule_points in points_by_rule.values() for point in rule_points]
    edge_cost = _edge_cost(points)
    right_margin = 16 + 8 * max(map(len, points_by_rule))
    frame = Frame((0, max([point.bytes for point in points] + [1])), (1, edge_cost), right_margin)
    right_edge = frame.width - right_margin
    elements = [_plan_axes(frame, lambda cost: f"{cost - 1:+.0%}"), frame.title(x_title)]
    for index, (rule, rule_points) in enumerate(points_by_rule.items()):
        color = f"hsl({index * 360 // len(points_by_rule)} 65% 45%)"
        sorted_points = sorted(rule_points, key=lambda point: point.bytes)
        positions = [(frame.x_of(point.bytes), frame.y_of(min(point.cost, edge_cost))) for point in sorted_points]
        coordinates_text = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        elements.append(element("polyline", points=coordinates_text, fill="none", stroke=color, stroke_width=1.5))
        for point, position in zip(sorted_points, positions, strict=True):
            elements.append(dot(*position, 3.5, color, f"{point.name}: {size(point.bytes)}, {point.cost - 1:+.1%}"))
        y = frame.top + 12 + 18 * index
        elements += [dot(right_edge + 14, y - 4, 4, color), svg_text(right_edge + 24, y, rule)]
    if any(point.cost > edge_cost for point in points):
        elements.append(svg_text(right_edge - 4, frame.top + 14, "at this edge: cost above the scale", "end"))
    return svg(frame.width, max(frame.height, frame.top + 18 * len(points_by_rule)), "time against memory", elements)


def _plan_axes(frame: Frame, format_cost: Callable[[float], str]) -> Markup:
    """Return the axes of a picture of memory plans; `format_cost` returns the label of a cost."""
    return joined([frame.grid(ticks(*frame.y_range, 5), format_cost), frame.labels(byte_ticks(frame.x_range[1]), size)])


def _axis_bytes(largest_bytes: float, limit: int | None) -> float:
    """Return the bytes at the end of an axis. It reaches the limit unless that would flatten the picture."""
    return max(largest_bytes, limit if limit is not None and limit < 2.5 * largest_bytes else 0, 1)


def _edge_cost(points: Sequence[Point]) -> float:
    """Return the largest cost that is drawn to scale, limited so that a few high costs do not flatten the picture."""
    excess_costs = sorted(point.cost - 1 for point in points)
    median_excess = excess_costs[len(excess_costs) // 2] if excess_costs else 0.0
    return 1 + max(min(max(excess_costs, default=0.0), CUT * median_excess), 0.1) * 1.1


def items_table(items: Sequence[Item], row_count: int = 60) -> Markup:
    """Return the first `row_count` arrays as an HTML table, with one row for the total of all other arrays."""
    rows = [(size(item.bytes), item.kind, item.name) for item in items[:row_count]]
    smaller_items = items[row_count:]
    sum_row = (size(sum(item.bytes for item in smaller_items)), "", f"{len(smaller_items)} smaller ones")
    return markup.table(
        rows, ("bytes", "for", "what"), numeric=(0,), name_column=2, extra_rows=[sum_row] if smaller_items else []
    )


def page(title: str, headings_and_contents: Sequence[tuple[str, str]]) -> str:
    """Return a self-contained HTML page of sections, given as pairs of heading and markup; "" means no heading."""
    heading_elements = [element("h2", heading) if heading else None for heading, _ in headings_and_contents]
    contents = [Markup(content) for _, content in headings_and_contents]
    return markup.page(title, element("h1", title), list(zip(heading_elements, contents, strict=True)))
