"""Simulated schedules as an SVG image: a panel for each schedule and a row for each rank; time runs to the right.

All panels have the same time scale. If the pointer is on an action, the browser shows a description of it (`<title>`).
`draw.py` makes a page from the image.
"""

from collections.abc import Callable, Sequence

from jaxscale.figures.axes import ticks
from jaxscale.figures.frame import PER_LETTER, legend, svg, svg_text
from jaxscale.figures.markup import Markup, element
from jaxscale.pipeline.clock.simulate import Simulation
from jaxscale.pipeline.orders import Action, Kind

IMAGE_WIDTH, LEFT_MARGIN, RIGHT_MARGIN = 1000, 64, 12
"""Widths of the image and of its margins, in pixels."""
HEADING_HEIGHT, AXIS_HEIGHT = 26, 26
"""Height of a panel's heading and height of its time axis, in pixels."""
COLORS = {Kind.F: "#4e79a7", Kind.B: "#59a14f", Kind.I: "#76b7b2", Kind.W: "#f28e2b", Kind.U: "#b07aa1"}
"""Color of each kind of action."""
WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
}
"""Name of each kind of action in words."""


def svg_chart(
    panels: Sequence[tuple[str, Simulation]], *, format_time: Callable[[float], str] = "{:.4g}".format
) -> Markup:
    """Draw schedules, one below the other.

    Args:
        panels: (heading, simulation) of each panel.
        format_time: function that formats a time as text.

    Example:
        >>> from jaxscale.pipeline.clock.costs import Costs
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.clock.simulate import simulate
        >>> schedule = METHODS["gpipe"].schedule(2, 3)
        >>> svg_chart([("gpipe", simulate(schedule, Costs.alike(schedule)))]).count("<rect")
        15
    """
    pixels_per_second = (IMAGE_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / max(simulation.seconds for _, simulation in panels)
    panel_elements, top = [], 0.0
    for heading, simulation in panels:
        elements, height = _panel(heading, simulation, top, pixels_per_second, format_time)
        panel_elements += elements
        top += height
    schedules = [simulation.schedule for _, simulation in panels]
    kinds = {action.kind for schedule in schedules for order in schedule.orders for action in order}
    legend_entries = [({"class_": kind.value}, WORDS[kind]) for kind in Kind if kind in kinds]
    if any(schedule.chunks > 1 for schedule in schedules):
        legend_entries.append(({"class_": "F l"}, "paler: a rank's later stages"))
    legend_elements, height = legend(legend_entries, LEFT_MARGIN, top + 6, IMAGE_WIDTH)
    return svg(IMAGE_WIDTH, top + 6 + height, "pipeline schedules", panel_elements, legend_elements, style=_STYLE)


def _panel(
    heading: str, simulation: Simulation, top: float, pixels_per_second: float, format_time: Callable[[float], str]
) -> tuple[list[Markup], float]:
    """Return (elements, height): the SVG elements of one schedule's panel, and the height of the panel in pixels.

    Args:
        heading: text above the panel.
        simulation: the simulation to be drawn.
        top: distance of the panel from the top of the image, in pixels.
        pixels_per_second: scale of the time axis.
        format_time: function that formats a time as text.
    """
    schedule, seconds = simulation.schedule, simulation.seconds
    row_height = 24 if schedule.ranks <= 8 else 16
    label_width = PER_LETTER * len(str(schedule.microbatches - 1)) + 2
    plot_top, plot_height = top + HEADING_HEIGHT, row_height * schedule.ranks
    bottom = plot_top + plot_height
    panel_elements = [
        svg_text(LEFT_MARGIN, top + 18, heading, class_="h"),
        element("rect", class_="n", x=LEFT_MARGIN, y=plot_top, width=seconds * pixels_per_second, height=plot_height),
    ]
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        y, first_stage = plot_top + row_height * rank, schedule.stages_of(rank)[0]
        panel_elements.append(svg_text(LEFT_MARGIN - 8, y + row_height / 2 + 4, f"rank {rank}", "end"))
        for action, (start, end) in zip(order, spans, strict=True):
            x, width = LEFT_MARGIN + start * pixels_per_second, (end - start) * pixels_per_second
            is_later_stage = action.stage != first_stage  # whether it is a later stage of the rank
            box_width = max(width - 0.8, width / 2)  # leaves a gap between neighbors
            start_text = format_time(start) if start else "0"
            css_classes = action.kind.value + " l" * is_later_stage
            action_elements = [
                element("title", f"{_description(action, rank)}, {start_text} to {format_time(end)}"),
                element("rect", class_=css_classes, x=x, y=y + 1, width=box_width, height=row_height - 2),
            ]
            if action.kind is not Kind.U and width > label_width:
                action_elements.append(
                    svg_text(
                        x + width / 2, y + row_height / 2 + 4, action.microbatch, class_="m" + " d" * is_later_stage
                    )
                )
            panel_elements.append(element("g", action_elements, data_m=action.microbatch))
    for time in ticks(0.0, seconds, 10):
        x = LEFT_MARGIN + time * pixels_per_second
        panel_elements.append(element("path", class_="t", d=f"M{x:.2f} {bottom:.0f}v4"))
        panel_elements.append(svg_text(x, bottom + 16, format_time(time) if time else "0", "middle"))
    return panel_elements, HEADING_HEIGHT + plot_height + AXIS_HEIGHT


def _description(action: Action, rank: int) -> str:
    """Return the description of an action in words."""
    return f"{action}: {WORDS[action.kind]} of microbatch {action.microbatch}, stage {action.stage}, rank {rank}"


_STYLE = (
    "".join(f".{kind.value}{{fill:{color}}}" for kind, color in COLORS.items())
    + ".l{fill-opacity:.55}.n{fill:#8882}.h{font-weight:600}"
    + ".m{fill:#fff;text-anchor:middle;font-size:11px}.d{fill:#222}.t{stroke:#888}"
)
