"""A simulated schedule as lines of text: one for each rank, time to the right.

A cell is the letter of its kind and, if there is room, the number of its microbatch, filled up to its width; small
letters are a rank's later stages. If actions are narrower than a column, the column shows the action that
fills most of it.
"""

import math
from collections.abc import Callable, Sequence

from jaxscale.figures.axes import ticks
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.pipeline.orders import Action, Kind

FILL = {Kind.F: "─", Kind.B: "═", Kind.I: "─", Kind.W: "┄", Kind.U: "*"}
PLAIN = str.maketrans({"─": "-", "═": "=", "┄": ".", "│": "|"})
"""The letters that replace others in terminals without Unicode, for `str.translate`."""
COLORS = {Kind.F: (75, 67), Kind.B: (114, 71), Kind.I: (80, 37), Kind.W: (215, 172), Kind.U: (176, 133)}
"""Numbers of two of the 256 terminal colors: one for a rank's first stage, one for its later stages."""
LEAST_COLUMNS = 24
"""The least number of columns for time, however narrow the terminal."""

Cell = tuple[str, Kind | None, bool]
"""A letter, the kind of its action, and whether its stage is a later stage of the rank."""


def text_chart(
    simulation: Simulation,
    width: int = 100,
    *,
    per_second: float | None = None,
    color: bool = False,
    clock: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """Draw the chart of a simulation, with the most live activations at the right of each rank.

    Args:
        simulation: the simulation to be drawn.
        width: columns of the terminal.
        per_second: number of columns per second; `None`: as many as fill the width (`columns_per_second`).
        color: whether to use the escape sequences of a terminal.
        clock: function that formats a time.

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
    per_second = columns_per_second([simulation], width) if per_second is None else per_second
    column_count = max(1, round(simulation.seconds * per_second))
    is_numbered = all(
        round(end * per_second) - round(start * per_second) >= len(_label(action))
        for action, start, end in _actions(simulation)
        if action.kind is not Kind.U
    )
    lines = []
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        cells = _cells(order, spans, schedule.stages_of(rank)[0], column_count, per_second, is_numbered)
        body = _colored(cells) if color else "".join(letter for letter, _, _ in cells)
        lines.append(f"{_rank_label(simulation, rank)}│{body}│ {simulation.live_shares[rank]:g} live")
    return "\n".join([*lines, " " * len(_rank_label(simulation, 0)) + axis(per_second, column_count, clock)])


def columns_per_second(simulations: Sequence[Simulation], width: int) -> float:
    """Return the scale on which the longest of some simulations fills a terminal.

    If a scale exists on which every action has a whole number of columns, it is taken, although some of the width stays
    unused.
    """
    plot_width = min(width - len(_rank_label(sim, 0)) - len(f"││ {max(sim.live_shares):g} live") for sim in simulations)
    per_second = max(plot_width, LEAST_COLUMNS) / max(sim.seconds for sim in simulations)
    durations = {end - start for sim in simulations for _, start, end in _actions(sim) if end - start > 1e-9 * end}
    shortest = min(durations)
    shortest_columns = per_second * shortest
    are_whole = all(abs(duration / shortest - round(duration / shortest)) < 1e-6 for duration in durations)
    return math.floor(shortest_columns) / shortest if are_whole and shortest_columns >= 1 else per_second


def axis(per_second: float, columns: int, clock: Callable[[float], str]) -> str:
    """Return the line of times below a chart, at round numbers.

    Args:
        per_second: number of columns per second.
        columns: number of columns of the chart.
        clock: function that formats a time.

    Example:
        >>> axis(1.2, 40, "{:g}".format)
        '0     5     10    15    20    25    30'
    """
    line = ""
    for time in ticks(0.0, columns / per_second, 8):
        label, column = clock(time) if time else "0", round(time * per_second)
        if column >= len(line) + bool(line):
            line += " " * (column - len(line)) + label
    return line


def _rank_label(simulation: Simulation, rank: int) -> str:
    """Return a rank's name for the left of its line, padded to the width of the longest."""
    return f"rank {rank:<{len(str(simulation.schedule.ranks - 1))}} "


def _actions(simulation: Simulation) -> list[tuple[Action, float, float]]:
    """Return every action with its start and end in seconds."""
    rows = zip(simulation.schedule.orders, simulation.spans, strict=True)
    return [(action, *span) for order, spans in rows for action, span in zip(order, spans, strict=True)]


def _cells(
    order: Sequence[Action], spans: Sequence[Span], first_stage: int, columns: int, per_second: float, is_numbered: bool
) -> list[Cell]:
    """Return the cells of a rank's line, one for each column."""
    cells: list[Cell] = [(" ", None, False)] * columns
    shown_lengths = [0.0] * columns
    for action, (start, end) in zip(order, spans, strict=True):
        is_later, length = action.stage != first_stage, (end - start) * per_second
        left, right = round(start * per_second), round(end * per_second)
        if right > left:
            text = _label(action) if is_numbered else action.kind.value
            text = (text.lower() if is_later else text) + FILL[action.kind] * (right - left)
            for column in range(left, right):
                cells[column], shown_lengths[column] = (text[column - left], action.kind, is_later), 1.0
        elif left < columns and length > shown_lengths[left]:
            letter = action.kind.value.lower() if is_later else action.kind.value
            cells[left], shown_lengths[left] = (letter, action.kind, is_later), length
    return cells


def _label(action: Action) -> str:
    """Return the letter of an action's kind and the number of its microbatch."""
    return f"{action.kind.value}{action.microbatch}"


def _colored(cells: Sequence[Cell]) -> str:
    """Return the text of cells, with escape sequences around each kind; fill characters become colored blanks."""
    text, current_style = "", (None, False)
    for letter, kind, is_later in cells:
        if (kind, is_later) != current_style:
            current_style = kind, is_later
            text += "\x1b[0m" if kind is None else f"\x1b[0;30;48;5;{COLORS[kind][is_later]}m"
        text += " " if letter in FILL.values() else letter
    return text + "\x1b[0m"
