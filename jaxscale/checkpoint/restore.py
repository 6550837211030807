"""The trained parameters of a run, restored from its directory for generation, evaluation and export.

The optimizer's state is not read. The train step is rebuilt for the devices of this machine, and computes what the
run's step computes.
"""

import dataclasses
from typing import Any

from jaxscale.checkpoint.store import Checkpoints, Description, Restored
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.records import directory as run_files
from jaxscale.records.storage import run_path

TOKENIZER = "tokenizer.json"
"""File with the tokenizer of a run's data, so that its model can be used without the data."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model with its parameters.

    Args:
        directory: the run directory.
        experiment: the trained experiment.
        step: a train step on the current devices; its optimizer is not the run's.
        state: a train state with the run's parameters and batch statistics.
        description: description of the checkpoint.
    """

    directory: Any
    experiment: Experiment
    step: Any
    state: Any
    description: Description


def read_tokenizer(directory: Any) -> Any:
    """The tokenizer in a run's directory, or `None` if its data is not text.

    Raises:
        UserError: the file is damaged.
    """
    path = run_path(directory) / TOKENIZER
    if not path.exists():
        return None
    from jaxscale.data.tokenizer import from_json

    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (LookupError, TypeError, ValueError) as error:  # UserError among them
        raise UserError(
            f"{path} is not the tokenizer of a run ({error}): restore it from a copy, or train some steps more, "
            "which writes it again"
        ) from error


def write_tokenizer(directory: Any, tokenizer: Any) -> None:
    """Write the tokenizer of the data to the run directory."""
    if tokenizer is not None and hasattr(tokenizer, "to_json"):
        (run_path(directory) / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")


def restore_newest(directory: Any, step: Any) -> Restored:
    """Restore a run's newest checkpoint that is not damaged, with its optimizer state.

    Args:
        directory: the run directory.
        step: the train step, which defines layout and dtypes of the arrays.

    Raises:
        UserError: the run has no checkpoint, or every checkpoint is damaged.
    """
    restored = Checkpoints(run_path(directory) / run_files.CHECKPOINTS, write=False).restore_arrays(
        step.canonical_abstract()
    )
    if restored is None:
        raise UserError(f"{directory} has no checkpoint yet: train it until its first save")
    return restored


def restore_parameters(
    directory: Any,
    *,
    experiment: Experiment | None = None,
    best: bool = False,
    split: bool = False,
) -> Trained:
    """Restore the parameters of a run's newest checkpoint, or of its best one.

    Args:
        directory: the run directory.
        experiment: the trained experiment; rebuilt from the directory by default.
        best: take the checkpoint with the least held-out loss.
        split: shard batch and parameters (ZeRO 3) over the devices, in the run's microbatches, for evaluation;
            otherwise one device holds everything, if it fits.

    Raises:
        UserError: the directory has no run, or no checkpoint that is not damaged.
    """
    import jax

    folder = run_files.existing_run(directory)
    if experiment is None:
        from jaxscale.records.source import load_experiment

        experiment = load_experiment(folder)
    checkpoints = Checkpoints(folder / run_files.CHECKPOINTS, write=False)
    checkpoint_step = checkpoints.best() if best else None
    if not checkpoints.steps() or (best and checkpoint_step is None):
        condition = "with a held-out loss " if best and checkpoints.steps() else ""
        raise UserError(f"{folder} has no checkpoint {condition}yet: train it until its first save")
    step = _step(experiment, jax.devices(), split)
    leaves = step.canonical_abstract()
    trained_leaves = {name: leaf for name, leaf in leaves.items() if name.split("/")[0] in ("params", "rest")}
    restored = checkpoints.restore_arrays(trained_leaves, step=checkpoint_step)
    assert restored is not None
    optimizer_leaves = {name: leaf for name, leaf in leaves.items() if name not in trained_leaves}
    zeros = jax.jit(
        lambda: {name: jax.numpy.zeros(leaf.shape, leaf.dtype) for name, leaf in optimizer_leaves.items()},
        out_shardings={name: leaf.sharding for name, leaf in optimizer_leaves.items()},
    )()
    state = step.from_canonical({**restored.arrays, **zeros})
    return Trained(folder, experiment, step, state, restored.description)


def _step(experiment: Experiment, devices: list[Any], split: bool) -> Any:
    """Build a step with the run's model and precision on these devices, without the run's optimizer."""
    from jaxscale.layers.loss import CHUNK
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.recipe.kernels import Kernels
    from jaxscale.recipe.plan import Plan
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.step.build import build

    run_plan = experiment.plan
    kernels, attention = run_plan.kernels, dict(run_plan.kernels.named).get("attention", "auto")
    is_unsupported = devices[0].platform != "tpu" and attention == "splash"
    chunk = CHUNK if kernels.scores in ("tpu", "chunked") and kernels.loss_chunk is None else kernels.loss_chunk
    is_portable = attention in ("plain", "chunked", "splash") and not is_unsupported
    kernels = Kernels(named=(("attention", attention),) * is_portable, loss_chunk=chunk)
    plan = Plan(precision=run_plan.precision, matmul=run_plan.matmul, kernels=kernels)
    # plain gradient descent has no optimizer state
    descent = Optimizer(name="sgd", clip=None, weight_decay=0.0)
    experiment = dataclasses.replace(experiment, optimizer=descent, plan=plan)
    if split:
        plan = dataclasses.replace(plan, microbatches=run_plan.microbatches)
        try:  # a model that was trained sharded may not fit whole
            return build(experiment, dataclasses.replace(plan, zero=3), devices=devices)
        except UserError:  # no dim of the parameters can be split evenly
            return build(experiment, plan, devices=devices)
    step = build(experiment, dataclasses.replace(plan, mesh=MeshSpec()), devices=devices[:1])
    limit_bytes = (devices[0].memory_stats() or {}).get("bytes_limit") if devices[0].platform != "cpu" else None
    if len(devices) > 1 and limit_bytes and 4 * step.parameters > 0.6 * limit_bytes:
        device_count = len(devices)
        experiment = dataclasses.replace(experiment, batch=device_count)
        step = build(experiment, dataclasses.replace(plan, mesh=MeshSpec(fsdp=device_count), zero=3), devices=devices)
    return step
