"""The pipeline actions of a trace: which operations belong to each, and when they ran.

A trace names operations as the compiled program does. Each kind of action has its own branch there, marked by the named
scope of its operations: `pipeline_F` (forward), `pipeline_B` (backward), or, where a backward pass runs in two parts,
`pipeline_I` (gradients of inputs) and `pipeline_W` (gradients of weights). `actions.json` holds, for every kind, the
operations that its branch runs once, and the rank of each device. It is written with the trace, while the program is
available.
"""

import collections
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxscale.compiler.hlo_program import HloProgram, callees
from jaxscale.errors import UserError
from jaxscale.pipeline.clock.measured import MeasuredSpans, measured
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.recipe.plan import Plan, read_plan
from jaxscale.records.storage import is_remote
from jaxscale.training.device_times import newest_trace, operations_of, traced_event
from jaxscale.training.profile import FOLDER

ACTIONS, PLAN = "actions.json", "plan.json"
_SCOPE = re.compile(r'op_name="[^"]*\bpipeline_([FBIW])\b')
_TRIVIAL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def actions_of(program: str) -> dict[str, list[str]]:
    """The operations of a compiled program that each kind of pipeline action runs once.

    Args:
        program: text of the program, `compiled.as_text()`.

    Returns:
        Names of operations by kind of action, such as "F"; empty if kinds have no branches, that is without a pipeline
        or with the lowering without conditionals.
    """
    hlo = HloProgram(program)
    operations_by_kind: dict[str, list[str]] = {}
    branches = {
        name
        for computation in hlo.computations.values()
        for op in computation.instructions.values()
        if op.opcode == "conditional"
        for name in callees(op.attributes)
    }
    for name in sorted(branches):
        operations = [op for op in hlo.computations[name].instructions.values() if op.opcode not in _TRIVIAL]
        kind_counts = collections.Counter(match[1] for op in operations if (match := _SCOPE.search(op.attributes)))
        # a branch nested in an action has its scope, too
        is_outermost = not any(_SCOPE.search(op.attributes) for _, op in hlo.callers.get(name, ()))
        if kind_counts and is_outermost:
            operations_by_kind.setdefault(kind_counts.most_common(1)[0][0], []).extend(op.name for op in operations)
    return operations_by_kind


def trace_files(step: Any) -> dict[str, str]:
    """Text of each file to write beside a trace of this step, by file name; empty without a pipeline.

    Args:
        step: a compiled `TrainStep`.
    """
    program = step.program
    if step.plan.pipeline is None or program is None:
        return {}
    import jax
    import numpy as np

    from jaxscale.state.layout import PIPE_AXIS

    axis = step.mesh.axis_names.index(PIPE_AXIS)
    ranks = {
        _number(device): int(position[axis])
        for position, device in np.ndenumerate(step.mesh.devices)
        if device.process_index == jax.process_index()
    }
    actions = {"operations": actions_of(program), "ranks": ranks, "processes": jax.process_count()}
    return {ACTIONS: json.dumps(actions) + "\n"}


def measured_run(folder: Any) -> tuple[Plan, Simulation, int]:
    """The measured pipeline of a run, from its trace.

    Args:
        folder: the run's folder.

    Returns:
        The run's plan, the schedule with its measured times, and the number of steps over which times are means.

    Raises:
        UserError: the folder has no run, pipeline or trace, or a trace without actions; the message has advice.
    """
    plan = traced_plan(folder)
    trace = Path(folder) / FOLDER
    record = json.loads((trace / ACTIONS).read_text())
    advice = "train it again with --profile FIRST:STOP, such as 10:13"
    if record["processes"] > 1:
        raise UserError(
            f"{trace}: the run had {record['processes']} processes, whose clocks differ; trace a run of one process"
        )
    if not record["operations"]:
        raise UserError(f"{trace}: the program has no branch for each kind of action, so its devices never idle")
    operation_names = {name for names in record["operations"].values() for name in names}
    with newest_trace(trace) as profiles:
        timelines = _timelines((plane for profile in profiles for plane in profile.planes), operation_names)
    timelines_of_rank: dict[int, list[MeasuredSpans]] = {}
    for device, rank in record["ranks"].items():
        if int(device) in timelines:
            timelines_of_rank.setdefault(rank, []).append(timelines[int(device)])
    assert plan.pipeline is not None
    schedule = plan.pipeline.schedule()
    forward_count = sum(action.kind.value == "F" for action in schedule.orders[0])
    run_counts = collections.Counter(
        len(spans)
        for name in record["operations"].get("F", ())
        for timeline in timelines_of_rank.get(0, ())
        if (spans := timeline.get(name))
    )
    if not run_counts or run_counts.most_common(1)[0][0] % forward_count:
        raise UserError(f"{trace}: no whole step is in the trace; {advice}")
    steps = run_counts.most_common(1)[0][0] // forward_count
    return plan, measured(schedule, record["operations"], timelines_of_rank, steps), steps


def traced_plan(folder: Any) -> Plan:
    """The plan of a run, after a check that its files suffice to draw its trace.

    Raises:
        UserError: the files do not suffice, as in `measured_run`.
    """
    if is_remote(folder):
        raise UserError(f"{folder} lies in a bucket: copy its {PLAN} and {FOLDER}/ here, and give their folder")
    folder = Path(folder)
    if not (folder / PLAN).exists():
        raise UserError(f"{folder} is no run: it has no {PLAN}; expected the folder that train wrote (--out)")
    plan = read_plan(folder / PLAN)
    if plan.pipeline is None:
        raise UserError(f"{folder} was trained without a pipeline: there is no pipeline to draw")
    if plan.asynchronous:
        raise UserError(
            f"{folder}: pipeline {plan.pipeline} never drains, and a step works on several batches; draw a "
            f"synchronous one, or `draw pipeline {plan.pipeline}` with --cost"
        )
    if not (folder / FOLDER / ACTIONS).exists():
        raise UserError(
            f"{folder} has no trace with {FOLDER}/{ACTIONS}: train it with --profile FIRST:STOP, such as 10:13"
        )
    return plan


def _timelines(planes: Iterable[Any], names: set[str]) -> dict[int, MeasuredSpans]:
    """Start and end in seconds of each run of the operations with these names, by device and operation."""
    timelines: dict[int, dict[str, list[Span]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for plane in planes:
        # a CPU's work in other threads ends after the call has returned, with a separate event
        host_events = (event for line in plane.lines for event in line.events if plane.name == "/host:CPU")
        end_of_event = {
            event.stats.get("_c"): event.end
            for event in map(traced_event, host_events)
            if event.name.startswith("end: ")
        }
        for device, operations in operations_of(plane):
            device_match = re.fullmatch(r"[CGT]PU:(\d+)", device)
            if device_match is None:
                continue
            for operation in operations:
                name = str(operation.stats.get("hlo_op", operation.name))
                if name in names and str(operation.stats.get("hlo_module", "jit__step")).startswith("jit__step"):
                    end = max(operation.end, end_of_event.get(operation.stats.get("_p"), operation.end))
                    timelines[int(device_match[1])][name].append((operation.start * 1e-9, end * 1e-9))
    return {device: {name: sorted(spans) for name, spans in timeline.items()} for device, timeline in timelines.items()}


def _number(device: Any) -> int:
    """The number of a device in a trace of its process."""
    number = getattr(device, "local_hardware_id", None)
    return int(device.id if number is None else number)
