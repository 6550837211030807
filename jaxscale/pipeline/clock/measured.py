"""A synchronous schedule with the times of a real run: the start and end of each action on its device, from a trace.

A trace has operations, not actions. In the program, each kind of action has its own branch. Some operations occur only
in this branch and run once per action. A device runs its actions one after the other in the schedule's order. So the
n-th run of such an operation belongs to the n-th action of that kind. An action lasts from the start of its first
operation to the end of its last operation. Left out: messages, which are sent between actions, and schedules that never
drain, because their steps contain actions of several batches.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Kind
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.pipeline.orders import Schedule

MeasuredSpans = Mapping[str, Sequence[Span]]
"""By the name of each operation on one device: the (start, end) of each of its runs in order, in seconds."""


def measured_simulation(
    schedule: Schedule,
    operations: Mapping[str, Sequence[str]],
    timelines: Mapping[int, Sequence[MeasuredSpans]],
    steps: int,
) -> Simulation:
    """Make a simulation with measured times: the means over the traced steps and over the devices of each rank.

    Args:
        schedule: a synchronous schedule.
        operations: for each kind of action ("F", "B", "I", "W"), the names of the operations that run once per action
            of this kind.
        timelines: for each rank, the spans of the operations on each device of the rank.
        steps: number of steps in the trace.

    Returns:
        A simulation with the measured spans, in seconds from the start of a step. Its costs are the mean seconds of the
        actions of each kind and stage.

    Raises:
        UserError: a rank has no device in the trace, or the trace does not have as many actions as the schedule.

    Example:
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> times = [{"a": [(2.0, 3.0), (7.0, 8.0)], "b": [(3.0, 5.0), (8.0, 10.0)]}]
        >>> run = measured_simulation(METHODS["gpipe"].schedule(1, 1), {"F": ["a"], "B": ["b"]}, {0: times}, 2)
        >>> run.spans, run.costs.forward, run.costs.backward
        ((((0.0, 1.0), (1.0, 3.0)),), (1.0,), (2.0,))
    """
    spans_by_rank = []  # for each rank, device and step, the spans of the actions
    for rank in range(schedule.ranks):
        if not timelines.get(rank):
            raise UserError(
                f"the trace has no device of rank {rank} of {schedule.name}: the traced run had other devices or "
                "several processes. Trace a run of one process on these devices"
            )
        spans_by_rank.append(
            [_action_spans(schedule, rank, operations, timeline, steps) for timeline in timelines[rank]]
        )
    step_starts = [
        min(spans_by_step[step][0][0] for spans_by_device in spans_by_rank for spans_by_step in spans_by_device)
        for step in range(steps)
    ]
    # for each rank, float[device, step, action, 2]: start and end of the action in seconds from the start of the step
    times_by_rank = [
        np.array(spans_by_device) - np.array(step_starts)[:, None, None] for spans_by_device in spans_by_rank
    ]
    mean_spans = [tuple(map(tuple, rank_times.mean((0, 1)).tolist())) for rank_times in times_by_rank]
    return Simulation(schedule, _mean_costs(schedule, mean_spans), "measured", tuple(mean_spans))


def _action_spans(
    schedule: Schedule, rank: int, operations: Mapping[str, Sequence[str]], timeline: MeasuredSpans, steps: int
) -> list[list[Span]]:
    """Return, for each step, the spans of one device's actions in the order of the schedule."""
    order = schedule.orders[rank]
    spans_by_kind: dict[Kind, list[Span]] = {}
    for kind in dict.fromkeys(action.kind for action in order):
        run_count = steps * sum(action.kind is kind for action in order)
        operation_names = [
            operation_name
            for operation_name in operations.get(kind.value, ())
            if len(timeline.get(operation_name, ())) == run_count
        ]
        span_lists = [timeline[operation_name] for operation_name in operation_names]
        if not span_lists:
            raise UserError(
                f"the trace does not show {kind.value} of {schedule.name} on rank {rank} {run_count} times, "
                f"{run_count // steps} times in each step: it is of another plan or was cut short. Trace the run again"
            )
        for operation_spans in zip(*span_lists, strict=True):  # the spans of one action's operations
            spans_by_kind.setdefault(kind, []).append(
                (min(start for start, _ in operation_spans), max(end for _, end in operation_spans))
            )
    # iterators over the spans of each kind in all steps, which the steps consume one after the other
    span_iterators = {kind: iter(kind_spans) for kind, kind_spans in spans_by_kind.items()}
    return [[next(span_iterators[action.kind]) for action in order] for _ in range(steps)]


def _mean_costs(schedule: Schedule, spans_by_rank: Sequence[Sequence[Span]]) -> Costs:
    """Return costs with the mean seconds of the actions of each kind and stage.

    If a backward is one action, half of its seconds counts as the input gradient and half as the weight gradient.
    """
    durations_by_pass: dict[tuple[Kind, int], list[float]] = {}
    for order, spans in zip(schedule.orders, spans_by_rank, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            durations_by_pass.setdefault((action.kind, action.stage), []).append(end - start)

    def mean_seconds(kind: Kind) -> tuple[float | None, ...]:
        """Return, for each stage, the mean seconds of its actions of a kind; `None` if it has no such actions."""
        durations_by_stage = [durations_by_pass.get((kind, stage)) for stage in range(schedule.stages)]
        return tuple(
            None if stage_durations is None else sum(stage_durations) / len(stage_durations)
            for stage_durations in durations_by_stage
        )

    forward_means, backward_means, input_means, weight_means = map(mean_seconds, KINDS)
    half_means = [(b or 0.0) / 2 for b in backward_means]
    input_seconds = [i or half for i, half in zip(input_means, half_means, strict=True)]
    weight_seconds = [w or half for w, half in zip(weight_means, half_means, strict=True)]
    backward_seconds = [
        i + w if b is None else b for b, i, w in zip(backward_means, input_seconds, weight_seconds, strict=True)
    ]
    return Costs(
        tuple(forward_mean or 0.0 for forward_mean in forward_means),
        tuple(input_seconds),
        tuple(weight_seconds),
        tuple(backward_seconds),
    )
