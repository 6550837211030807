"""A synchronous schedule with the clock of a real run: when each action began and ended on its device, out of a trace.

A trace has operations, not actions. The branch of a kind runs each of its own operations once an action, and a device
does its actions one after the other in the schedule's order: so the n-th time of such an operation belongs to the n-th
action of that kind, and an action lasts from the first of them to the last. Left out: messages, which lie between
actions, and schedules that never drain, whose steps hold parts of several batches.
"""

from collections.abc import Mapping, Sequence

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Kind
from jaxscale.pipeline.costs import Costs
from jaxscale.pipeline.schedule import Schedule
from jaxscale.pipeline.simulate import Simulation, Span

Timeline = Mapping[str, Sequence[Span]]
"""Of one device: the times of each operation in order, in seconds."""


def measured(
    schedule: Schedule,
    operations: Mapping[str, Sequence[str]],
    timelines: Mapping[int, Sequence[Timeline]],
    steps: int,
) -> Simulation:
    """The schedule as it ran: the mean over traced steps, and over the devices of a rank, counted from a step's start.

    Args:
        schedule: synchronous.
        operations: those that an action of each kind ("F", "B", "I", "W") runs once.
        timelines: of the devices of each rank.
        steps: in the trace, one after the other.

    Returns:
        Its spans are what was measured, its costs their means by kind and stage.

    Raises:
        UserError: a rank without a device in the trace; another number of actions than the schedule has.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> times = [{"a": [(2.0, 3.0), (7.0, 8.0)], "b": [(3.0, 5.0), (8.0, 10.0)]}]
        >>> found = measured(METHODS["gpipe"].schedule(1, 1), {"F": ["a"], "B": ["b"]}, {0: times}, 2)
        >>> found.spans, found.costs.forward, found.costs.backward
        ((((0.0, 1.0), (1.0, 3.0)),), (1.0,), (2.0,))
    """
    found = []
    for rank in range(schedule.ranks):
        if not timelines.get(rank):
            raise UserError(
                f"the trace has no device of rank {rank} of {schedule.name}: it is of a run on other devices, or of "
                "one process of several; trace a run of one process"
            )
        found.append([_spans(schedule, rank, operations, timeline, steps) for timeline in timelines[rank]])
    start = [min(spans[step][0][0] for devices in found for spans in devices) for step in range(steps)]
    orders: list[tuple[Span, ...]] = []
    for devices in found:
        every = [(spans[step], start[step]) for spans in devices for step in range(steps)]
        count = len(every)
        orders.append(
            tuple(
                (
                    sum(spans[place][0] - begun for spans, begun in every) / count,
                    sum(spans[place][1] - begun for spans, begun in every) / count,
                )
                for place in range(len(every[0][0]))
            )
        )
    return Simulation(schedule, _costs(schedule, orders), "measured", tuple(orders))


def _spans(
    schedule: Schedule, rank: int, operations: Mapping[str, Sequence[str]], timeline: Timeline, steps: int
) -> list[list[Span]]:
    """One device's actions, step by step, in the order of the schedule."""
    order = schedule.orders[rank]
    by_kind: dict[Kind, list[Span]] = {}
    for kind in dict.fromkeys(action.kind for action in order):
        count = steps * sum(action.kind is kind for action in order)
        once = [timeline[name] for name in operations.get(kind.value, ()) if len(timeline.get(name, ())) == count]
        if not once:
            raise UserError(
                f"the trace shows {kind.value} of {schedule.name} on rank {rank} another number of times than "
                f"{count}, {count // steps} a step: it is of another plan, or was cut short; trace the run again"
            )
        by_kind[kind] = [(min(times[n][0] for times in once), max(times[n][1] for times in once)) for n in range(count)]
    found = []
    for step in range(steps):
        places = dict.fromkeys(by_kind, 0)
        spans = []
        for action in order:
            here = by_kind[action.kind]
            spans.append(here[step * (len(here) // steps) + places[action.kind]])
            places[action.kind] += 1
        found.append(spans)
    return found


def _costs(schedule: Schedule, orders: Sequence[Sequence[Span]]) -> Costs:
    """Mean seconds of each kind and stage; where backwards are in one, half of them counts as either gradient."""
    taken: dict[tuple[Kind, int], list[float]] = {}
    for order, spans in zip(schedule.orders, orders, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            taken.setdefault((action.kind, action.stage), []).append(end - start)

    def mean(kind: Kind) -> tuple[float | None, ...]:
        every = [taken.get((kind, stage)) for stage in range(schedule.stages)]
        return tuple(None if times is None else sum(times) / len(times) for times in every)

    forward, backward, inner, outer = (mean(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    halves = [
        (either or 0.0, other or 0.0) if whole is None else (either or whole / 2, other or whole / 2)
        for whole, either, other in zip(backward, inner, outer, strict=True)
    ]
    whole = [sum(pair) if together is None else together for together, pair in zip(backward, halves, strict=True)]
    return Costs(
        tuple(time or 0.0 for time in forward),
        tuple(pair[0] for pair in halves),
        tuple(pair[1] for pair in halves),
        tuple(whole),
    )
