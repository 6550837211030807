"""Simulated schedules as an SVG image: a panel for each, a row for each rank, time to the right on one scale.

The pointer shows an action's description (`<title>`); `draw.py` puts the image into a page with more. No library, light
and dark.
"""

from collections.abc import Callable, Sequence
from html import escape

from jaxscale.pipeline.charts.text import step_of
from jaxscale.pipeline.clock.simulate import Simulation
from jaxscale.pipeline.schedule import Action, Kind

WIDTH, LEFT, RIGHT = 1000, 64, 12
HEADING, AXIS, LEGEND = 26, 26, 26
COLORS = {Kind.F: "#4e79a7", Kind.B: "#59a14f", Kind.I: "#76b7b2", Kind.W: "#f28e2b", Kind.U: "#b07aa1"}
WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
}
_PER_LETTER = 6.6
"""Width of a letter in the image's units."""


def svg_chart(panels: Sequence[tuple[str, Simulation]], *, clock: Callable[[float], str] = "{:.4g}".format) -> str:
    """The chart of one schedule, or of several, one below the other.

    Args:
        panels: heading and simulation of each.
        clock: the format of a time.

    Example:
        >>> from jaxscale.pipeline.clock.costs import Costs
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.clock.simulate import simulate
        >>> schedule = METHODS["gpipe"].schedule(2, 3)
        >>> svg_chart([("gpipe", simulate(schedule, Costs.alike(schedule)))]).count("<rect")
        15
    """
    longest = max(simulation.seconds for _, simulation in panels)
    per_second = (WIDTH - LEFT - RIGHT) / longest
    parts, top = [], 0.0
    for heading, simulation in panels:
        elements, height = _panel(heading, simulation, top, per_second, clock)
        parts += elements
        top += height
    kinds = {action.kind for _, simulation in panels for order in simulation.schedule.orders for action in order}
    has_later = any(simulation.schedule.chunks > 1 for _, simulation in panels)
    parts += _legend([kind for kind in Kind if kind in kinds], has_later, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + LEGEND:.0f}" role="img" '
        f'aria-label="pipeline schedules" font-family="system-ui, sans-serif" font-size="12" fill="#777">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>"
    )


def _panel(
    heading: str, simulation: Simulation, top: float, per_second: float, clock: Callable[[float], str]
) -> tuple[list[str], float]:
    """The elements of one schedule, and their height."""
    schedule = simulation.schedule
    row, digits = 24 if schedule.ranks <= 8 else 16, len(str(schedule.microbatches - 1))
    bottom = top + HEADING + row * schedule.ranks
    parts = [f'<text class="h" x="{LEFT}" y="{top + 18:.0f}">{escape(heading)}</text>']
    parts.append(
        f'<rect class="n" x="{LEFT}" y="{top + HEADING:.0f}" width="{simulation.seconds * per_second:.2f}" '
        f'height="{row * schedule.ranks}"/>'
    )
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        y, first = top + HEADING + row * rank, schedule.stages_of(rank)[0]
        parts.append(f'<text x="{LEFT - 8}" y="{y + row / 2 + 4:.0f}" text-anchor="end">rank {rank}</text>')
        for action, (start, end) in zip(order, spans, strict=True):
            x, width = LEFT + start * per_second, (end - start) * per_second
            shade = action.kind.value + (" l" if action.stage != first else "")
            tooltip = f"{_tooltip(action, rank)}, {clock(start) if start else '0'} to {clock(end)}"
            box_width = max(width - 0.8, width / 2)  # a gap between neighbours
            box = f'<rect class="{shade}" x="{x:.2f}" y="{y + 1}" width="{box_width:.2f}" height="{row - 2}"/>'
            if action.kind is not Kind.U and width > _PER_LETTER * digits + 2:
                dark = " d" if action.stage != first else ""
                place = f'x="{x + width / 2:.2f}" y="{y + row / 2 + 4:.1f}"'
                box += f'<text class="m{dark}" {place}>{action.microbatch}</text>'
            parts.append(f'<g data-m="{action.microbatch}"><title>{escape(tooltip)}</title>{box}</g>')
    seconds = simulation.seconds
    for number in range(int(seconds / step_of(seconds, 10)) + 1):
        time = number * step_of(seconds, 10)
        x = LEFT + time * per_second
        parts.append(f'<path class="t" d="M{x:.2f} {bottom:.0f}v4"/>')
        parts.append(
            f'<text x="{x:.2f}" y="{bottom + 16:.0f}" text-anchor="middle">{clock(time) if time else 0}</text>'
        )
    return parts, HEADING + row * schedule.ranks + AXIS


def _tooltip(action: Action, rank: int) -> str:
    return f"{action}: {WORDS[action.kind]} of microbatch {action.microbatch}, stage {action.stage}, rank {rank}"


def _legend(kinds: Sequence[Kind], has_later: bool, top: float) -> list[str]:
    entries = [(kind.value, WORDS[kind]) for kind in kinds]
    if has_later:
        entries.append(("F l", "paler: a rank's later stages"))
    parts, x = [], float(LEFT)
    for shade, words in entries:
        parts.append(f'<rect class="{shade}" x="{x:.0f}" y="{top + 6:.0f}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{top + 16:.0f}">{words}</text>')
        x += 32 + _PER_LETTER * len(words)
    return parts


_STYLE = (
    "".join(f".{kind.value}{{fill:{color}}}" for kind, color in COLORS.items())
    + ".l{fill-opacity:.55}.n{fill:#8882}.h{font-weight:600}"
    + ".m{fill:#fff;text-anchor:middle;font-size:11px}.d{fill:#222}.t{stroke:#888}"
)
