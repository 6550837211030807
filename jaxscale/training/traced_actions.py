"""The pipeline actions of a trace: which operations belong to each action, and when they ran.

A trace gives operations the names that they have in the compiled program. There, each kind of action has its own branch
of a conditional, marked by the named scope of its operations: `pipeline_F` (forward), `pipeline_B` (backward), or, if a
backward pass runs in two parts, `pipeline_I` (gradients of inputs) and `pipeline_W` (gradients of weights).
The file `actions.json` lists, for each kind, the operations that its branch runs once, and gives the rank of each
device. The file is written with the trace, while the program is available.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxscale.compiler.hlo_program import HloProgram, callees
from jaxscale.errors import UserError
from jaxscale.pipeline.clock.measured import MeasuredSpans, measured_simulation
from jaxscale.pipeline.clock.simulate import Simulation, Span
from jaxscale.recipe.plan import Plan, read_plan
from jaxscale.records.storage import is_remote
from jaxscale.training.device_times import device_events, newest_trace, traced_event
from jaxscale.training.profile import FOLDER
from jaxscale.values import from_json, read_json
from jaxscale.values.read_files import whole_number

ACTIONS, PLAN = "actions.json", "plan.json"
_SCOPE = re.compile(r'op_name="[^"]*\bpipeline_([FBIW])\b')
_TRIVIAL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def operation_names_by_kind(program_text: str) -> dict[str, list[str]]:
    """Return the names of the operations that each kind of pipeline action runs once in a compiled program.

    Args:
        program_text: text of the program, `compiled.as_text()`.

    Returns:
        A dict of lists of operation names, by kind of action, such as "F". It is empty if the kinds have no branches of
        their own, because the program has no pipeline or was lowered without conditionals.
    """
    hlo = HloProgram(program_text)
    names_by_kind: dict[str, list[str]] = {}
    branch_names = {
        branch_name
        for computation in hlo.computations.values()
        for op in computation.instructions.values()
        if op.opcode == "conditional"
        for branch_name in callees(op.attributes)
    }
    for branch_name in sorted(branch_names):
        instructions = [op for op in hlo.computations[branch_name].instructions.values() if op.opcode not in _TRIVIAL]
        kind_counts = collections.Counter(match[1] for op in instructions if (match := _SCOPE.search(op.attributes)))
        # operations of a branch nested in an action have the action's scope, too
        is_outermost = not any(_SCOPE.search(op.attributes) for _, op in hlo.callers.get(branch_name, ()))
        if kind_counts and is_outermost:
            names_by_kind.setdefault(kind_counts.most_common(1)[0][0], []).extend(op.name for op in instructions)
    return names_by_kind


def trace_files(step: Any) -> dict[str, str]:
    """Return the texts of the files to write beside this step's trace, by file name; {} if it has no pipeline.

    Args:
        step: a compiled `TrainStep`.
    """
    program_text = step.program
    if step.plan.pipeline is None or program_text is None:
        return {}
    import jax
    import numpy as np

    from jaxscale.state.layout import PIPE_AXIS

    axis_index = step.mesh.axis_names.index(PIPE_AXIS)
    rank_by_device_number = {
        _trace_device_number(device): int(mesh_index[axis_index])
        for mesh_index, device in np.ndenumerate(step.mesh.devices)
        if device.process_index == jax.process_index()
    }
    actions_json = {
        "operations": operation_names_by_kind(program_text),
        "ranks": rank_by_device_number,
        "processes": jax.process_count(),
    }
    return {ACTIONS: json.dumps(actions_json) + "\n"}


@dataclasses.dataclass(frozen=True)
class TracedActions:
    """The content of actions.json.

    Args:
        operations: names of operations by kind of action, such as "F".
        ranks: rank of each device, by the device's number as text.
        processes: number of processes of the run.
    """

    operations: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    processes: int = 1

    def __post_init__(self) -> None:
        for device_text in self.ranks:
            if whole_number(device_text) is None:
                raise UserError(f"ranks: got the device {device_text!r:.40}, expected the number of a device")


def read_actions(path: Path) -> TracedActions:
    """Read the file that lists the operations of each kind of action.

    Raises:
        UserError: the file is missing or damaged.
    """
    return from_json(TracedActions, read_json(path), str(path))


def measured_run(folder: Any) -> tuple[Plan, Simulation, int]:
    """Read the measured pipeline of a run from its trace.

    Args:
        folder: the run's folder.

    Returns:
        The run's plan, the schedule with its measured times, and the number of steps over which these times are means.

    Raises:
        UserError: the folder has no run, pipeline or trace, or its trace has no actions; the message gives advice.
    """
    plan = traced_plan(folder)
    trace_dir = Path(folder) / FOLDER
    traced_actions = read_actions(trace_dir / ACTIONS)
    if traced_actions.processes > 1:
        count_text = f"{traced_actions.processes} processes"
        raise UserError(f"{trace_dir}: the run had {count_text}, and their clocks differ: trace a run of one process")
    names_by_kind = traced_actions.operations
    if not names_by_kind:
        raise UserError(f"{trace_dir}: the program has no branch for each kind of action, so its devices never idle")
    operation_names = {name for kind_names in names_by_kind.values() for name in kind_names}
    with newest_trace(trace_dir) as profiles:
        timeline_by_device = _read_timelines(
            (plane for profile in profiles for plane in profile.planes), operation_names
        )
    timelines_by_rank: dict[int, list[MeasuredSpans]] = {}
    for device_text, rank in traced_actions.ranks.items():
        if int(device_text) in timeline_by_device:
            timelines_by_rank.setdefault(rank, []).append(timeline_by_device[int(device_text)])
    assert plan.pipeline is not None
    schedule = plan.pipeline.schedule()
    forward_count = sum(action.kind.value == "F" for action in schedule.orders[0])
    # for each number of executions, how many operations of forward actions were executed that often
    execution_counts = collections.Counter(
        len(spans)
        for name in names_by_kind.get("F", ())
        for timeline in timelines_by_rank.get(0, ())
        if (spans := timeline.get(name))
    )
    if not execution_counts or execution_counts.most_common(1)[0][0] % forward_count:
        raise UserError(
            f"{trace_dir}: no whole step is in the trace: train again with --profile FIRST:STOP, such as 10:13"
        )
    step_count = execution_counts.most_common(1)[0][0] // forward_count
    return plan, measured_simulation(schedule, names_by_kind, timelines_by_rank, step_count), step_count


def traced_plan(folder: Any) -> Plan:
    """Read the plan of a run, and check that the run's files suffice to draw its trace.

    Raises:
        UserError: the folder has no run, pipeline or trace; the message gives advice.
    """
    if is_remote(folder):
        raise UserError(f"{folder} is in a bucket: copy {PLAN} and {FOLDER}/ to a local folder, and give that folder")
    run_folder = Path(folder)
    if not (run_folder / PLAN).exists():
        raise UserError(f"{folder} is not a run: it has no {PLAN}. Give the folder that train wrote (its --out)")
    plan = read_plan(run_folder / PLAN)
    if plan.pipeline is None:
        raise UserError(f"{folder} was trained without a pipeline, so there is no pipeline to draw")
    if plan.asynchronous:
        raise UserError(
            f"{folder}: pipeline {plan.pipeline} never drains, and a step works on several batches. Draw a run with a "
            f"synchronous pipeline, or draw this schedule with `draw pipeline {plan.pipeline}` and --cost"
        )
    if not (run_folder / FOLDER / ACTIONS).exists():
        raise UserError(
            f"{folder} has no trace with {FOLDER}/{ACTIONS}: train again with --profile FIRST:STOP, such as 10:13"
        )
    return plan


def _read_timelines(planes: Iterable[Any], operation_names: set[str]) -> dict[int, MeasuredSpans]:
    """Read the start and end, in seconds, of each execution of the operations named in `operation_names`.

    Returns:
        For each device, by its number, a dict of sorted lists of spans (start, end), by operation name.
    """
    timeline_by_device: dict[int, dict[str, list[Span]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for plane in planes:
        # on a CPU, an operation's work in other threads ends in a separate event, whose "_c" is the operation's "_p"
        host_events = (event for line in plane.lines for event in line.events if plane.name == "/host:CPU")
        end_ns_by_id = {
            event.stats.get("_c"): event.end
            for event in map(traced_event, host_events)
            if event.name.startswith("end: ")
        }
        for device, events in device_events(plane):
            device_match = re.fullmatch(r"[CGT]PU:(\d+)", device)
            if device_match is None:
                continue
            for event in events:
                name, program_name = event.stats.get("hlo_op", event.name), event.stats.get("hlo_module", "jit__step")
                if str(name) in operation_names and str(program_name).startswith("jit__step"):
                    end_ns = max(event.end, end_ns_by_id.get(event.stats.get("_p"), event.end))
                    timeline_by_device[int(device_match[1])][str(name)].append((event.start * 1e-9, end_ns * 1e-9))
    return {
        device: {name: sorted(spans) for name, spans in timeline.items()}
        for device, timeline in timeline_by_device.items()
    }


def _trace_device_number(device: Any) -> int:
    """Return the number by which a trace of the device's process identifies the device."""
    number = getattr(device, "local_hardware_id", None)
    return int(device.id if number is None else number)
