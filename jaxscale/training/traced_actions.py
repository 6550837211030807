"""Which operations of a trace are actions of a pipeline, written beside the trace, and the chart that comes of both.

A trace names operations as the compiled program does. Each kind of action has a branch of its own there, told by the
named scope of what stands in it (`pipeline_F`, ...), so `actions.json` holds, for every kind, the operations that its
branch runs once, and which device is which rank. The program is at hand when the trace is made, and not later.
"""

import collections
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.pipeline.measured import Timeline, measured
from jaxscale.pipeline.simulate import Simulation, Span
from jaxscale.platforms.hlo_program import Program, called
from jaxscale.step.plan import Plan, read_plan
from jaxscale.training.profile import FOLDER, newest_trace
from jaxscale.training.storage import is_remote

ACTIONS, PLAN = "actions.json", "plan.json"
_SCOPE = re.compile(r'op_name="[^"]*\bpipeline_([FBIW])\b')
_TRIVIAL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def actions_of(program: str) -> dict[str, list[str]]:
    """For each kind of action, the operations of a compiled program that one of them runs once.

    Args:
        program: `compiled.as_text()`.

    Returns:
        Empty where the program has no branch for each kind: no pipeline, or the conditional-free lowering.
    """
    read = Program(program)
    found: dict[str, list[str]] = {}
    branches = {
        name
        for computation in read.computations.values()
        for op in computation.instructions.values()
        if op.opcode == "conditional"
        for name in called(op.attributes)
    }
    for name in sorted(branches):
        operations = [op for op in read.computations[name].instructions.values() if op.opcode not in _TRIVIAL]
        scopes = collections.Counter(match[1] for op in operations if (match := _SCOPE.search(op.attributes)))
        # branches within an action lie in its scope, too
        outermost = not any(_SCOPE.search(op.attributes) for _, op in read.callers.get(name, ()))
        if scopes and outermost:
            found.setdefault(scopes.most_common(1)[0][0], []).extend(op.name for op in operations)
    return found


def described(step: Any) -> dict[str, str]:
    """Files to write beside a trace of this step, by name: none where it has no pipeline.

    Args:
        step: a compiled `TrainStep`.
    """
    program = step.program
    if step.plan.pipeline is None or program is None:
        return {}
    import jax
    import numpy as np

    from jaxscale.step.layout import PIPE_AXIS

    axis = step.mesh.axis_names.index(PIPE_AXIS)
    ranks = {
        _number(device): int(place[axis])
        for place, device in np.ndenumerate(step.mesh.devices)
        if device.process_index == jax.process_index()
    }
    told = {"operations": actions_of(program), "ranks": ranks, "processes": jax.process_count()}
    return {ACTIONS: json.dumps(told) + "\n"}


def measured_run(folder: Any) -> tuple[Plan, Simulation, int]:
    """The pipeline of a run as its trace shows it.

    Args:
        folder: of the run.

    Returns:
        Its plan, the schedule with what was measured, and how many steps that is the mean of.

    Raises:
        UserError: no run, no pipeline, no trace, one from which actions cannot be told; with what to do.
    """
    plan = checked(folder)
    trace = Path(folder) / FOLDER
    told = json.loads((trace / ACTIONS).read_text())
    again = "train it again with --profile FIRST:LAST, such as 10:13"
    if told["processes"] > 1:
        raise UserError(
            f"{trace}: the run was one of {told['processes']} processes, whose clocks differ; trace one of one process"
        )
    if not told["operations"]:
        raise UserError(f"{trace}: this program has no branch for each kind of action, and devices do not idle in it")
    wanted = {name for names in told["operations"].values() for name in names}
    timelines = _timelines(newest_trace(trace), wanted)
    ranks: dict[int, list[Timeline]] = {}
    for device, rank in told["ranks"].items():
        if int(device) in timelines:
            ranks.setdefault(rank, []).append(timelines[int(device)])
    assert plan.pipeline is not None
    schedule = plan.pipeline.schedule()
    forwards = sum(action.kind.value == "F" for action in schedule.orders[0])
    seen = collections.Counter(
        len(times)
        for names in [told["operations"].get("F", ())]
        for name in names
        for line in ranks.get(0, ())
        if (times := line.get(name))
    )
    if not seen or seen.most_common(1)[0][0] % forwards:
        raise UserError(f"{trace}: no whole step is in the trace; {again}")
    steps = seen.most_common(1)[0][0] // forwards
    return plan, measured(schedule, told["operations"], ranks, steps), steps


def checked(folder: Any) -> Plan:
    """The plan of a run whose trace can be drawn, as far as its files tell.

    Raises:
        UserError: as `measured_run`.
    """
    if is_remote(folder):
        raise UserError(f"{folder} lies in a bucket: copy its {PLAN} and {FOLDER}/ here, and give their folder")
    folder = Path(folder)
    if not (folder / PLAN).exists():
        raise UserError(f"{folder} is no run: it has no {PLAN}; expected the folder that train wrote (--out)")
    plan = read_plan(folder / PLAN)
    if plan.pipeline is None:
        raise UserError(f"{folder} was trained without a pipeline: there is nothing of one to draw")
    if plan.asynchronous:
        raise UserError(
            f"{folder}: pipeline {plan.pipeline} never drains, and a step holds parts of several batches; draw a "
            f"synchronous one, or `draw pipeline {plan.pipeline}` with --cost"
        )
    if not (folder / FOLDER / ACTIONS).exists():
        raise UserError(
            f"{folder} has no trace with {FOLDER}/{ACTIONS}: train it with --profile FIRST:LAST, such as 10:13"
        )
    return plan


def _timelines(files: Any, wanted: set[str]) -> dict[int, Timeline]:
    """The times of operations on each device of a trace, in seconds."""
    from jax.profiler import ProfileData

    found: dict[int, dict[str, list[Span]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `profile.summary_of`
        for file in files:
            for plane in ProfileData.from_file(str(file)).planes:
                _read_plane(plane, wanted, found)
    return {device: {name: sorted(times) for name, times in line.items()} for device, line in found.items()}


def _read_plane(plane: Any, wanted: set[str], found: Mapping[int, Mapping[str, list[Span]]]) -> None:
    card = re.fullmatch(r"/device:(?:TPU|GPU):(\d+)", plane.name)
    host = plane.name == "/host:CPU"
    if card is None and not host:
        return
    events, ends = [], {}
    for line in plane.lines:
        if card is not None and line.name != "XLA Ops" and not line.name.startswith("Stream"):
            continue
        for event in line.events:
            name = str(event.name).split(" = ")[0].lstrip("%")
            stats = dict(event.stats)
            if host and name.startswith("end: "):
                ends[stats.get("_c")] = event.start_ns + event.duration_ns
                continue
            name = str(stats.get("hlo_op", name))
            if name in wanted and str(stats.get("hlo_module", "jit__step")).startswith("jit__step"):
                if host and "hlo_op" not in stats:
                    continue
                device = int(card[1]) if card else int(stats.get("device_ordinal", 0))
                events.append((device, name, event.start_ns, event.start_ns + event.duration_ns, stats.get("_p")))
    for device, name, start, end, producer in events:
        # what a CPU does in other threads goes on after the call has returned, and its end is an event of its own
        found[device][name].append((start * 1e-9, max(end, ends.get(producer, end)) * 1e-9))


def _number(device: Any) -> int:
    """Of a device in a trace of its process."""
    number = getattr(device, "local_hardware_id", None)
    return int(device.id if number is None else number)
