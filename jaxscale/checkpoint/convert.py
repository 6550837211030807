"""A run's newest checkpoint with its optimizer state in other bits, as a separate run that can be continued.

A run converts by itself when it is continued under another `--plan.state.moments`. This module writes the converted
files: float32 for a version or a tool that reads nothing else, few bits for the archive.
"""

import dataclasses
import shutil
from typing import Any

from jaxscale.checkpoint.restore import TOKENIZER, restore_newest
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import UserError
from jaxscale.records import directory as place
from jaxscale.records.storage import is_remote, run_path


def convert_state(run: Any, to: Any, out: Any = None) -> str:
    """Write a run directory whose checkpoint is the newest one of a run, with its optimizer state in other bits.

    Args:
        run: the run directory.
        to: bits of the moments, a value of `StatePlan.moments`.
        out: the directory to make; the run's name and `to` by default.

    Returns:
        A line for each kind of change.

    Raises:
        UserError: no run or checkpoint there, the new directory exists, or the optimizer takes no such state.
    """
    import jax

    from jaxscale.recipe.plan import Plan, StatePlan
    from jaxscale.records.source import load_experiment
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.step.build import build

    folder = run_path(run)
    target = run_path(f"{str(run).rstrip('/')}-{to}" if out is None else out)
    if is_remote(folder) or is_remote(target):
        raise UserError(f"convert-state {run}: both directories must be on a disk; copy the run to one")
    place.existing_run(folder)
    if target.exists():
        raise UserError(f"{target} exists: give another directory (--out)")
    experiment = load_experiment(folder)
    plan, count = experiment.plan, len(jax.devices())
    mesh, zero = MeshSpec(fsdp=count), 3 if count > 1 else 0
    step_plan = Plan(mesh=mesh, zero=zero, precision=plan.precision, state=StatePlan(to, plan.state.master))
    step = build(dataclasses.replace(experiment, batch=count, plan=step_plan), step_plan)
    restored = restore_newest(folder, step)
    plan = dataclasses.replace(plan, state=dataclasses.replace(plan.state, moments=to))
    with place.writing(target):
        target.mkdir(parents=True)
        place.write_values(target, dataclasses.replace(experiment, plan=plan), plan)
        if (folder / "source").is_dir():
            shutil.copytree(folder / "source", target / "source")
        if (folder / TOKENIZER).exists():
            shutil.copy(folder / TOKENIZER, target / TOKENIZER)
    Checkpoints(target / place.CHECKPOINTS).save(restored.arrays, restored.description, wait=True)
    notes = restored.converted or (f"its optimizer state was {to} already",)
    return "\n".join([*notes, f"step {restored.description.step} is in {target}"])
