"""Conversion of a run's optimizer state to another number of bits, in a copy of the run that can be continued.

A run that is continued with another `--plan.state.moments` converts its state without this module. The copy serves
versions and tools that read only float32, or an archive of few bits.
"""

import dataclasses
import shutil
from typing import Any

from jaxscale.checkpoint.restore import TOKENIZER, restore_newest
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import UserError
from jaxscale.records import directory as run_files
from jaxscale.records.storage import is_remote, run_path


def convert_state(run: Any, to: Any, out: Any = None) -> str:
    """Write a new run directory, with the newest checkpoint of a run and its optimizer state in another format.

    Args:
        run: the run directory.
        to: format of the moments, a value of `StatePlan.moments`.
        out: the directory to create; its default name is that of the run and `to`.

    Returns:
        Text with a line for each kind of change, and a line with the step and the new directory.

    Raises:
        UserError: `run` has no run or checkpoint, the new directory exists, or the optimizer does not support the
            format.
    """
    import jax

    from jaxscale.recipe.plan import Plan, StatePlan
    from jaxscale.records.source import load_experiment
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.step.build import build

    folder = run_path(run)
    target = run_path(f"{str(run).rstrip('/')}-{to}" if out is None else out)
    if is_remote(folder) or is_remote(target):
        raise UserError(f"convert-state {run}: got a bucket, expected both directories on a disk; copy the run to one")
    run_files.existing_run(folder)
    if target.exists():
        raise UserError(f"{target} exists: give another directory (--out)")
    experiment = load_experiment(folder)
    plan, device_count = experiment.plan, len(jax.devices())
    mesh, zero = MeshSpec(fsdp=device_count), 3 if device_count > 1 else 0
    step_plan = Plan(mesh=mesh, zero=zero, precision=plan.precision, state=StatePlan(to, plan.state.master))
    step = build(dataclasses.replace(experiment, batch=device_count, plan=step_plan), step_plan)
    restored = restore_newest(folder, step)
    plan = dataclasses.replace(plan, state=dataclasses.replace(plan.state, moments=to))
    with run_files.explain_write_errors(target):
        target.mkdir(parents=True)
        run_files.write_values(target, dataclasses.replace(experiment, plan=plan), plan)
        if (folder / "source").is_dir():
            shutil.copytree(folder / "source", target / "source")
        if (folder / TOKENIZER).exists():
            shutil.copy(folder / TOKENIZER, target / TOKENIZER)
    Checkpoints(target / run_files.CHECKPOINTS).save(restored.arrays, restored.description, wait=True)
    notes = restored.converted or (f"its optimizer state was {to} already",)
    return "\n".join([*notes, f"step {restored.description.step} is in {target}"])
