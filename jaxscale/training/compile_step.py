"""Compilation of a run's step, with what the run shows, logs and checks about the compiled program."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxscale import heartbeat
from jaxscale.checkpoint.store import save_memory_warning
from jaxscale.compiler.collectives import collective_loop_depth
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.compiler.kept_programs import count_excluded
from jaxscale.errors import UserError
from jaxscale.platforms.cpu_threads import check_loop_depth
from jaxscale.recipe.kernels import fields_of, lines_of
from jaxscale.records import directory as run_files
from jaxscale.records.processes import is_first
from jaxscale.training.journal import Journal
from jaxscale.values import to_json
from jaxscale.values.units import size

if TYPE_CHECKING:
    from jaxscale.step.train_step import TrainStep


def compile_step(
    step: "TrainStep", batch: Mapping[str, Any], journal: Journal, updates: int, device_limit: int | None
) -> None:
    """Compile a train step for a batch; show and log its memory, FLOP and kernels, and write `layout.json`.

    Args:
        step: the train step.
        batch: a batch on the devices.
        journal: the run's journal.
        updates: number of updates made so far.
        device_limit: bytes of device memory that the compiled step may need; `None` if there is no limit.

    Raises:
        UserError: the compiled step needs more than the limit, or more threads on a CPU than there are.
    """
    heartbeat.set_phase("compiling")
    for line in step.describe():
        journal.say(line)
    excluded_count = count_excluded()  # number of programs so far that are not kept in the compile cache
    compile_facts = step.compile(batch)
    check_loop_depth(lambda: collective_loop_depth(HloProgram(step.program or "")))
    journal.log_event(updates, "compile", **dataclasses.asdict(compile_facts))
    step_bytes = (
        compile_facts.argument_bytes + compile_facts.output_bytes - compile_facts.alias_bytes + compile_facts.temp_bytes
    )
    if device_limit is not None and step_bytes > device_limit:
        raise UserError(
            f"the compiled step needs {size(step_bytes)} per device, but the limit is {size(device_limit)}: "
            "set memory fit, or use more devices, ZeRO 3, more microbatches or a smaller batch",
            page="choosing/memory",
        )
    for line in lines_of(step.kernels):
        journal.say(line)
        journal.log_event(updates, "kernels", **fields_of(step.kernels))
    # bytes by kind of tensor, such as "parameters"
    device_bytes_by_kind, host_bytes_by_kind = step.memory(batch), step.host_memory()
    copy_bytes = step.canonical_copy_bytes
    bytes_by_name = device_bytes_by_kind | {
        f"host {kind}": kind_bytes for kind, kind_bytes in host_bytes_by_kind.items()
    }
    bytes_by_name["checkpoint copy"] = copy_bytes
    predicted_fields: dict[str, float] = {}
    predicted_fields |= {f"{name.replace(' ', '_')}_bytes": byte_count for name, byte_count in bytes_by_name.items()}
    try:
        step_seconds = modeled_step_seconds(step)
    except UserError as error:  # a run can train with a damaged calibration
        step_seconds = None
        journal.say(f"the step has no modeled seconds: {error}")
    if step_seconds is not None:
        predicted_fields["step_seconds"] = step_seconds
    model_flop = int(step.model_flop(batch))
    journal.log_event(updates, "predicted", model_flop=model_flop, parameters=step.parameters, **predicted_fields)
    if is_first():
        all_device_bytes_by_kind = {**device_bytes_by_kind, "gradients and activations": compile_facts.temp_bytes}
        with run_files.explain_write_errors(journal.folder):
            layout_json = {**step.layout.table(), "memory": all_device_bytes_by_kind, "host_memory": host_bytes_by_kind}
            run_files.write_json(journal.folder / "layout.json", layout_json)
            if step.decision is not None:
                run_files.write_json(journal.folder / "memory.json", to_json(step.decision))
    first_device = step.mesh.local_devices[0]  # pyright: ignore[reportOptionalSubscript]
    measured_device = None if first_device.platform == "cpu" else first_device
    if (warning := save_memory_warning(sum(device_bytes_by_kind.values()), copy_bytes, measured_device)) is not None:
        journal.say(warning)
    journal.say(f"{step.parameters:,} parameters, compiled in {compile_facts.seconds:.1f} s")
    if count_excluded() > excluded_count:
        journal.say(
            f"the step is compiled at every start ({compile_facts.seconds:.1f} s) and not kept in the compile "
            "cache: on several CPU devices, a program with collectives in a loop may hang if loaded from the cache"
        )


def modeled_step_seconds(step: "TrainStep") -> float | None:
    """Return the modeled time of a step in seconds; `None` if its devices' rates are neither known nor calibrated.

    Raises:
        UserError: the file of calibrations is damaged.
    """
    from jaxscale.planning.fit import seconds_of
    from jaxscale.platforms.detect import detect

    devices = list(step.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    modeled_seconds = seconds_of(step.experiment, detect(devices), step.plan)
    return None if modeled_seconds is None else modeled_seconds.total
