"""Functions that return or draw the schedule with a given name."""

from jaxscale.errors import unknown
from jaxscale.pipeline.charts.text import text_chart
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.plan import schedule_of
from jaxscale.pipeline.schedules import METHODS


def schedule(name: str, ranks: int, microbatches: int, *, chunks: int | None = None, updates: int = 1) -> Schedule:
    """Return a named schedule: the passes of each device, in order.

    Args:
        name: name of the method, such as "1f1b" or "zb-h1"; `METHODS` has all names as its keys.
        ranks: p, number of devices on the pipe axis.
        microbatches: m, number of microbatches per update of the weights.
        chunks: v, number of stages per device, if the method lets the user choose it; `None`: the method's default.
        updates: number of updates of an asynchronous schedule.

    Raises:
        UserError: the name is unknown (the message suggests the nearest name), or the method is not defined for these
            numbers of ranks, microbatches, chunks and updates.

    Example:
        >>> schedule("1f1b", 4, 8).live
        (4, 3, 2, 1)
        >>> schedule("1f1c", 4, 8)
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown schedule '1f1c': expected one of 1f1b, 2bw, chimera, dualpipe-v, gpipe, \
interleaved, lockstep, pipedream, pipemare, search, zb-h1, zb-h2, zb-v; did you mean '1f1b'?
    """
    if name not in METHODS:
        raise unknown("schedule", name, METHODS)
    return METHODS[name].schedule(ranks, microbatches, chunks, updates)


def draw(schedule: Schedule | str, costs: Costs | None = None, *, width: int = 100) -> str:
    """Draw a schedule as text, with a line for each device and time to the right.

    Args:
        schedule: any schedule, or its text, such as "1f1b:4x8".
        costs: seconds of the passes of each stage. `None`: all ranks are equal; a forward through all stages of a rank
            takes 1 second, and a backward takes 2.
        width: number of columns.

    Example:
        >>> print(draw("gpipe:2x3", width=50))
        rank 0 │F0F1F2      B0══B1══B2══│ 3 live
        rank 1 │  F0F1F2B0══B1══B2══    │ 3 live
               0   2   4   6   8   10  12
    """
    parsed_schedule = schedule_of(schedule)
    pass_costs = Costs.alike(parsed_schedule) if costs is None else costs
    return text_chart(simulate(parsed_schedule, pass_costs), width)
