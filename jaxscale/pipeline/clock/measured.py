"""A synchronous schedule with the times of a real run: start and end of each action on its device, from a trace.

A trace has operations, not actions. In the program, the branch of a kind of action has operations of its own and runs
each of them once per action. A device runs its actions one after the other in the schedule's order. So the n-th run of
such an operation belongs to the n-th action of that kind, and an action lasts from its first operation to its last.
Left out: messages, which lie between actions, and schedules that never drain, whose steps hold parts of several
batches.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Kind
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.pipeline.orders import Schedule

MeasuredSpans = Mapping[str, Sequence[Span]]
"""The spans of each operation on one device, in order and in seconds."""


def measured(
    schedule: Schedule,
    operations: Mapping[str, Sequence[str]],
    timelines: Mapping[int, Sequence[MeasuredSpans]],
    steps: int,
) -> Simulation:
    """Make a simulation with measured times: the means over the traced steps and over the devices of each rank.

    Args:
        schedule: a synchronous schedule.
        operations: for each kind ("F", "B", "I", "W"), names of the operations that each of its actions runs once.
        timelines: for each rank, the spans of its devices.
        steps: number of steps in the trace.

    Returns:
        A simulation with the measured spans, from a step's start; its costs are their means by kind and stage.

    Raises:
        UserError: a rank has no device in the trace, or the trace has another number of actions than the schedule.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> times = [{"a": [(2.0, 3.0), (7.0, 8.0)], "b": [(3.0, 5.0), (8.0, 10.0)]}]
        >>> run = measured(METHODS["gpipe"].schedule(1, 1), {"F": ["a"], "B": ["b"]}, {0: times}, 2)
        >>> run.spans, run.costs.forward, run.costs.backward
        ((((0.0, 1.0), (1.0, 3.0)),), (1.0,), (2.0,))
    """
    spans_by_rank = []  # for each rank, device and step, the spans of the actions
    for rank in range(schedule.ranks):
        if not timelines.get(rank):
            raise UserError(
                f"the trace has no device of rank {rank} of {schedule.name}: it is of a run on other devices, or of "
                "one process of several. Trace a run of one process"
            )
        spans_by_rank.append([_spans(schedule, rank, operations, timeline, steps) for timeline in timelines[rank]])
    step_starts = [min(spans[step][0][0] for devices in spans_by_rank for spans in devices) for step in range(steps)]
    # float[device, step, action, end]; times of a step count from its start
    times = [np.array(devices) - np.array(step_starts)[:, None, None] for devices in spans_by_rank]
    rank_spans = [tuple(map(tuple, rank_times.mean((0, 1)).tolist())) for rank_times in times]
    return Simulation(schedule, _costs(schedule, rank_spans), "measured", tuple(rank_spans))


def _spans(
    schedule: Schedule, rank: int, operations: Mapping[str, Sequence[str]], timeline: MeasuredSpans, steps: int
) -> list[list[Span]]:
    """Return, for each step, the spans of one device's actions in the order of the schedule."""
    order = schedule.orders[rank]
    spans_by_kind: dict[Kind, list[Span]] = {}
    for kind in dict.fromkeys(action.kind for action in order):
        count = steps * sum(action.kind is kind for action in order)
        span_lists = [timeline[name] for name in operations.get(kind.value, ()) if len(timeline.get(name, ())) == count]
        if not span_lists:
            raise UserError(
                f"the trace does not show {kind.value} of {schedule.name} on rank {rank} {count} times, "
                f"{count // steps} times in each step: it is of another plan or was cut short. Trace the run again"
            )
        for spans in zip(*span_lists, strict=True):  # the spans of one action's operations
            spans_by_kind.setdefault(kind, []).append((min(start for start, _ in spans), max(end for _, end in spans)))
    # the spans of a kind, of all steps, are consumed step by step
    remaining_spans = {kind: iter(kind_spans) for kind, kind_spans in spans_by_kind.items()}
    return [[next(remaining_spans[action.kind]) for action in order] for _ in range(steps)]


def _costs(schedule: Schedule, rank_spans: Sequence[Sequence[Span]]) -> Costs:
    """Return the mean seconds of each kind and stage; half of a backward in one action counts for each gradient."""
    durations: dict[tuple[Kind, int], list[float]] = {}
    for order, spans in zip(schedule.orders, rank_spans, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            durations.setdefault((action.kind, action.stage), []).append(end - start)

    def mean_seconds(kind: Kind) -> tuple[float | None, ...]:
        """Return the mean seconds of a kind on each stage, `None` for a stage without such actions."""
        stage_durations = [durations.get((kind, stage)) for stage in range(schedule.stages)]
        return tuple(None if times is None else sum(times) / len(times) for times in stage_durations)

    forward_means, backward_means, input_means, weight_means = map(mean_seconds, KINDS)
    half_means = [(b or 0.0) / 2 for b in backward_means]
    inputs = [i or half for i, half in zip(input_means, half_means, strict=True)]
    weights = [w or half for w, half in zip(weight_means, half_means, strict=True)]
    backwards = [i + w if b is None else b for b, i, w in zip(backward_means, inputs, weights, strict=True)]
    return Costs(tuple(time or 0.0 for time in forward_means), tuple(inputs), tuple(weights), tuple(backwards))
