"""A simulated schedule as lines of text: one line for each rank; time runs to the right.

An action is shown as the letter of its kind and, if every action has room for it, the index of its microbatch. Padding
fills the rest of the action's width. Letters are uppercase for a rank's first stage and lowercase for its later stages.
If several actions fall into one column, the column shows the longest of them.
"""

import math
from collections.abc import Callable, Sequence

from jaxscale.figures.axes import ticks
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.pipeline.orders import Action, Kind

FILL = {Kind.F: "─", Kind.B: "═", Kind.I: "─", Kind.W: "┄", Kind.U: "*"}
"""The character that pads an action of each kind."""
PLAIN = str.maketrans({"─": "-", "═": "=", "┄": ".", "│": "|"})
"""A table for `str.translate` that replaces the characters beyond ASCII, for terminals that cannot show them."""
COLORS = {Kind.F: (75, 67), Kind.B: (114, 71), Kind.I: (80, 37), Kind.W: (215, 172), Kind.U: (176, 133)}
"""For each kind, two of the 256 terminal colors: one for a rank's first stage and one for its later stages."""
MIN_COLUMNS = 24
"""The least number of columns of the time axis, even in a narrower terminal."""

Cell = tuple[str, Kind | None, bool]
"""(character, kind, is_later): a character, the kind of the action that it shows (`None` if the rank is idle), and
whether the action's stage is a later stage of the rank."""


def text_chart(
    simulation: Simulation,
    width: int = 100,
    *,
    time_scale: float | None = None,
    color: bool = False,
    format_time: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """Draw the chart of a simulation. Each rank's line ends with the most activations that the rank holds.

    Args:
        simulation: the simulation to be drawn.
        width: columns of the terminal.
        time_scale: number of columns per second; `None`: as many as fill the width (`columns_per_second`).
        color: whether to use escape sequences for colors.
        format_time: function that formats a time as text.

    Example:
        >>> from jaxscale.pipeline.clock.costs import Costs
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> from jaxscale.pipeline.clock.simulate import simulate
        >>> schedule = METHODS["1f1b"].schedule(2, 3)
        >>> print(text_chart(simulate(schedule, Costs.alike(schedule)), 50))
        rank 0 │F0F1    B0══F2B1══  B2══│ 2 live
        rank 1 │  F0B0══F1B1══F2B2══    │ 1 live
               0   2   4   6   8   10  12
    """
    schedule = simulation.schedule
    chosen_scale = columns_per_second([simulation], width) if time_scale is None else time_scale
    column_count = max(1, round(simulation.seconds * chosen_scale))
    # whether all labels have room for the index of the microbatch
    is_numbered = all(
        round(end * chosen_scale) - round(start * chosen_scale) >= len(_label(action))
        for action, start, end in _actions_and_times(simulation)
        if action.kind is not Kind.U
    )
    lines = []
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        cells = _cells(order, spans, schedule.stages_of(rank)[0], column_count, chosen_scale, is_numbered)
        body = _colored_text(cells) if color else "".join(character for character, _, _ in cells)
        lines.append(f"{_rank_label(simulation, rank)}│{body}│ {simulation.live_shares[rank]:g} live")
    return "\n".join(
        [*lines, " " * len(_rank_label(simulation, 0)) + axis_line(chosen_scale, column_count, format_time)]
    )


def columns_per_second(simulations: Sequence[Simulation], width: int) -> float:
    """Return the number of columns per second with which the longest simulation fills a terminal.

    If all durations are multiples of the shortest, the scale is rounded down so that every action has a whole number of
    columns. Some of the width may then stay unused.
    """
    plot_width = min(width - len(_rank_label(sim, 0)) - len(f"││ {max(sim.live_shares):g} live") for sim in simulations)
    full_width_scale = max(plot_width, MIN_COLUMNS) / max(sim.seconds for sim in simulations)
    durations = {
        end - start for sim in simulations for _, start, end in _actions_and_times(sim) if end - start > 1e-9 * end
    }
    shortest_duration = min(durations)
    shortest_columns = full_width_scale * shortest_duration
    are_multiples = all(
        abs(duration / shortest_duration - round(duration / shortest_duration)) < 1e-6 for duration in durations
    )
    return (
        math.floor(shortest_columns) / shortest_duration
        if are_multiples and shortest_columns >= 1
        else full_width_scale
    )


def axis_line(time_scale: float, column_count: int, format_time: Callable[[float], str]) -> str:
    """Return the line below a chart, with labels at round times.

    Args:
        time_scale: number of columns per second.
        column_count: number of columns of the chart.
        format_time: function that formats a time as text.

    Example:
        >>> axis_line(1.2, 40, "{:g}".format)
        '0     5     10    15    20    25    30'
    """
    line = ""
    for time in ticks(0.0, column_count / time_scale, 8):
        label, column = format_time(time) if time else "0", round(time * time_scale)
        if column >= len(line) + bool(line):
            line += " " * (column - len(line)) + label
    return line


def _rank_label(simulation: Simulation, rank: int) -> str:
    """Return the label at the left end of a rank's line, padded to the width of the longest label."""
    return f"rank {rank:<{len(str(simulation.schedule.ranks - 1))}} "


def _actions_and_times(simulation: Simulation) -> list[tuple[Action, float, float]]:
    """Return (action, start in seconds, end in seconds) for every action."""
    orders_and_spans = zip(simulation.schedule.orders, simulation.spans, strict=True)
    return [(action, *span) for order, spans in orders_and_spans for action, span in zip(order, spans, strict=True)]


def _cells(
    order: Sequence[Action],
    spans: Sequence[Span],
    first_stage: int,
    column_count: int,
    time_scale: float,
    is_numbered: bool,
) -> list[Cell]:
    """Return the cells of a rank's line, one for each column.

    Args:
        order: the actions of the rank.
        spans: start and end of each action in seconds.
        first_stage: the first stage of the rank.
        column_count: number of columns.
        time_scale: number of columns per second.
        is_numbered: whether to show the index of an action's microbatch.
    """
    cells: list[Cell] = [(" ", None, False)] * column_count
    shown_widths = [0.0] * column_count  # for each column, the share of its width that the shown action fills
    for action, (start, end) in zip(order, spans, strict=True):
        is_later_stage, width = action.stage != first_stage, (end - start) * time_scale
        first_column, end_column = round(start * time_scale), round(end * time_scale)
        label = _label(action) if is_numbered else action.kind.value
        cased_label = label.lower() if is_later_stage else label
        if end_column > first_column:
            padded_label = cased_label + FILL[action.kind] * (end_column - first_column)
            for column in range(first_column, end_column):
                cells[column], shown_widths[column] = (
                    (padded_label[column - first_column], action.kind, is_later_stage),
                    1.0,
                )
        elif first_column < column_count and width > shown_widths[first_column]:
            cells[first_column], shown_widths[first_column] = (cased_label[0], action.kind, is_later_stage), width
    return cells


def _label(action: Action) -> str:
    """Return the letter of an action's kind and the index of its microbatch."""
    return f"{action.kind.value}{action.microbatch}"


def _colored_text(cells: Sequence[Cell]) -> str:
    """Return the text of cells, with escape sequences for the color of each kind. Blanks replace the padding."""
    text, current_style = "", (None, False)
    for character, kind, is_later in cells:
        if (kind, is_later) != current_style:
            current_style = kind, is_later
            text += "\x1b[0m" if kind is None else f"\x1b[0;30;48;5;{COLORS[kind][is_later]}m"
        text += " " if character in FILL.values() else character
    return text + "\x1b[0m"
