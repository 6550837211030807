"""Converts a run's optimizer state to another number of bits, in a copy of the run that can be continued.

A run that is continued with another `--plan.state.moments` converts its state without this module. A converted copy is
useful for versions and tools that read only float32, or for a small archive.
"""

import dataclasses
import shutil
from typing import Any

from jaxscale.checkpoint.restore import TOKENIZER, restore_newest
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import UserError
from jaxscale.records import directory as run_files
from jaxscale.records.storage import check_location, is_remote, run_path
from jaxscale.records.sums import write_sums


def convert_state(run: Any, moments: Any, out: Any = None) -> str:
    """Write a new run directory with a run's newest checkpoint, in which the optimizer state has another format.

    Args:
        run: the run directory.
        moments: new format of the moments, a value of `StatePlan.moments`.
        out: the directory to create; by default, its name is the run's name, a hyphen and `moments`.

    Returns:
        Text for the user: a line for each kind of converted array, and a line with the step and the new directory.

    Raises:
        UserError: `run` has no run or checkpoint, the new directory already exists, or the optimizer does not support
            the format.
    """
    import jax

    from jaxscale.recipe.plan import Plan, StatePlan
    from jaxscale.records.source import load_experiment
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.step.build import build

    run_folder = run_path(run)
    new_folder = run_path(f"{str(run).rstrip('/')}-{moments}" if out is None else out)
    if is_remote(run_folder) or is_remote(new_folder):
        raise UserError(f"convert-state {run}: got a bucket, expected local directories: copy the run to a local disk")
    run_files.existing_run(run_folder)
    check_location(new_folder)
    if new_folder.exists():
        raise UserError(f"{new_folder} already exists: give another directory with --out")
    experiment = load_experiment(run_folder)
    run_plan, device_count = experiment.plan, len(jax.devices())
    mesh, zero_stage = MeshSpec(fsdp=device_count), 3 if device_count > 1 else 0
    state_plan = StatePlan(moments, run_plan.state.master)
    step_plan = Plan(mesh=mesh, zero=zero_stage, precision=run_plan.precision, state=state_plan)
    step = build(dataclasses.replace(experiment, batch=device_count, plan=step_plan), step_plan)
    restored = restore_newest(run_folder, step)
    new_plan = dataclasses.replace(run_plan, state=dataclasses.replace(run_plan.state, moments=moments))
    with run_files.explain_write_errors(new_folder):
        new_folder.mkdir(parents=True)
        run_files.write_values(new_folder, dataclasses.replace(experiment, plan=new_plan), new_plan)
        if (run_folder / "source").is_dir():
            shutil.copytree(run_folder / "source", new_folder / "source")
        if (run_folder / TOKENIZER).exists():
            shutil.copy(run_folder / TOKENIZER, new_folder / TOKENIZER)
        write_sums(new_folder)
    Checkpoints(new_folder / run_files.CHECKPOINTS).save_arrays(restored.arrays, restored.description, wait=True)
    conversion_lines = restored.converted or (f"the optimizer state was already {moments}",)
    return "\n".join([*conversion_lines, f"step {restored.description.step} is in {new_folder}"])
