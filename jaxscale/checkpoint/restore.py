"""Restores the trained parameters of a run from its directory, for generation, evaluation and export.

`restore_parameters` does not read the optimizer's state. It builds a train step for the devices of this machine, with
the run's model and precision.
"""

import dataclasses
import sys
from typing import Any

from jaxscale.checkpoint.store import Checkpoints, Description, Restored
from jaxscale.checkpoint.verified import DamagedError
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.records import directory as run_files
from jaxscale.records.storage import run_path, write_whole
from jaxscale.records.sums import check_sums
from jaxscale.values.read_files import read_bytes

TOKENIZER = "tokenizer.json"
"""Name of the file that stores the tokenizer of a run's data, so that the model can be used without the data."""

TEMPLATE = "chat_template.json"
"""Name of the file that stores the chat template of a run's data."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model with its parameters.

    Args:
        directory: the run directory.
        experiment: the trained experiment.
        step: a train step for the current devices, with plain SGD instead of the run's optimizer.
        state: a train state with the run's parameters and batch statistics.
        description: description of the checkpoint.
    """

    directory: Any
    experiment: Experiment
    step: Any
    state: Any
    description: Description


def read_tokenizer(directory: Any) -> Any:
    """Return the tokenizer in a run's directory, or `None` if the directory has no tokenizer.

    Raises:
        UserError: the file is damaged.
    """
    content = _checked_bytes(directory, TOKENIZER)
    if content is None:
        return None
    from jaxscale.data.tokenizer import from_json

    try:
        return from_json(content.decode("utf-8"))
    except (LookupError, TypeError, ValueError) as error:  # UserError is a ValueError
        raise UserError(
            f"{run_path(directory) / TOKENIZER} is not the tokenizer of a run ({error}): restore the file from a copy, "
            "or continue the run for a few steps, which writes the file again"
        ) from error


def write_text_files(directory: Any, data: Any) -> None:
    """Write the tokenizer and the chat template of opened data, if it has them, to the run directory.

    A tokenizer that cannot be written as JSON is left out.
    """
    tokenizer, template = data.tokenizer, getattr(data, "chat_template", None)
    if tokenizer is not None and hasattr(tokenizer, "to_json"):
        write_whole(run_path(directory) / TOKENIZER, tokenizer.to_json())
    if template is not None:
        write_whole(run_path(directory) / TEMPLATE, template.to_json())


def read_template(directory: Any) -> Any:
    """Return the chat template in a run's directory, or `None` if the run was not trained on chats.

    Raises:
        UserError: the file is damaged.
    """
    content = _checked_bytes(directory, TEMPLATE)
    if content is None:
        return None
    from jaxscale.data.chat.chat_template import ChatTemplate

    return ChatTemplate.from_json(content.decode("utf-8", "replace"), str(run_path(directory) / TEMPLATE))


def _checked_bytes(directory: Any, name: str) -> bytes | None:
    """Return the content of a file in a run's directory after a check of its checksum; `None` if it does not exist."""
    path = run_path(directory) / name
    if not path.exists():
        return None
    check_sums(directory, name)
    return read_bytes(path)


def _report(message: str) -> None:
    """Print a message about a damaged checkpoint to stderr, separate from a command's output."""
    print(f"jaxscale: {message}", file=sys.stderr, flush=True)


def _best_step(checkpoints: Checkpoints) -> int | None:
    """Return the step of the best checkpoint; report each checkpoint whose description, with the loss, is damaged."""
    for step in checkpoints.steps():
        try:
            checkpoints.describe(step)
        except DamagedError as error:
            _report(f"checkpoint of step {step} is damaged and skipped: {error}")
    return checkpoints.best()


def restore_newest(directory: Any, step: Any) -> Restored:
    """Restore a run's newest undamaged checkpoint, with the optimizer state.

    Args:
        directory: the run directory.
        step: the train step, which determines the layout and dtypes of the arrays.

    Raises:
        UserError: the run has no checkpoint, or every checkpoint is damaged.
    """
    checkpoints = Checkpoints(run_path(directory) / run_files.CHECKPOINTS, write=False)
    restored = checkpoints.restore_arrays(step.canonical_abstract(), say=_report)
    if restored is None:
        raise UserError(f"{directory} has no checkpoint yet: continue the run until its first save")
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
        experiment: the trained experiment; `None` rebuilds it from the directory.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        split: whether to shard the batch and the parameters (ZeRO 3) over the devices and use the run's microbatches,
            for evaluation. If false, one device holds all parameters, unless they do not fit.

    Raises:
        UserError: the directory has no run, or the run has no undamaged checkpoint.
    """
    import jax

    folder = run_files.existing_run(directory)
    if experiment is None:
        from jaxscale.records.source import load_experiment

        experiment = load_experiment(folder)
    checkpoints = Checkpoints(folder / run_files.CHECKPOINTS, write=False)
    checkpoint_step = _best_step(checkpoints) if best else None
    if not checkpoints.steps() or (best and checkpoint_step is None):
        loss_text = "with a held-out loss " if best and checkpoints.steps() else ""
        raise UserError(f"{folder} has no checkpoint {loss_text}yet: continue the run until its first save")
    step = _build_step(experiment, jax.devices(), split)
    # shape, dtype and sharding of each array
    abstract_leaves = step.canonical_abstract()
    abstract_read = {
        name: leaf for name, leaf in abstract_leaves.items() if name.split("/")[0] in ("params", "rest", "ema")
    }
    restored = checkpoints.restore_arrays(abstract_read, step=checkpoint_step, say=_report)
    assert restored is not None
    abstract_unread = {name: leaf for name, leaf in abstract_leaves.items() if name not in abstract_read}
    zero_arrays = jax.jit(
        lambda: {name: jax.numpy.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract_unread.items()},
        out_shardings={name: leaf.sharding for name, leaf in abstract_unread.items()},
    )()
    state = step.from_canonical({**restored.arrays, **zero_arrays})
    return Trained(folder, experiment, step, state, restored.description)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The model of a Hugging Face folder with its parameters.

    Args:
        experiment: an experiment of that model.
        step: a train step for the current devices, with plain SGD.
        state: a train state with the folder's parameters.
    """

    experiment: Experiment
    step: Any
    state: Any


def open_folder(folder: Any, data: Any = None, batch: int = 8, *, split: bool = False) -> Loaded:
    """Load the model of a Hugging Face folder; accelerators compute with it in bfloat16.

    Args:
        folder: folder that transformers saved.
        data: the data to evaluate on; `None` if the model only generates.
        batch: number of rows of a batch.
        split: whether to shard the batch and the parameters, as in `restore_parameters`.

    Raises:
        UserError: the folder or its weights are not valid.
    """
    import jax

    from jaxscale.models.huggingface import Pretrained
    from jaxscale.recipe.plan import Plan

    devices = jax.devices()
    plan = Plan(precision="float32" if devices[0].platform == "cpu" else "bfloat16")
    name = run_path(folder).name or "folder"
    experiment = Experiment(name, Pretrained(folder), data, steps=1, batch=batch, plan=plan)
    step = _build_step(experiment, devices, split)
    return Loaded(experiment, step, step.init())


def _build_step(experiment: Experiment, devices: list[Any], split: bool) -> Any:
    """Return a train step for these devices, with the run's model and precision, and with plain SGD.

    Args:
        experiment: the run's experiment.
        devices: devices to build the step on.
        split: whether to shard the batch and the parameters, as in `restore_parameters`.
    """
    from jaxscale.layers.loss import CHUNK
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.recipe.kernels import Kernels
    from jaxscale.recipe.plan import Plan
    from jaxscale.sharding.mesh import MeshSpec
    from jaxscale.step.build import build

    run_plan, run_kernels = experiment.plan, experiment.plan.kernels
    attention = dict(run_kernels.named).get("attention", "auto")
    is_attention_unsupported = devices[0].platform != "tpu" and attention == "splash"
    is_chunk_missing = run_kernels.scores in ("tpu", "chunked") and run_kernels.loss_chunk is None
    is_attention_kept = attention in ("plain", "chunked", "splash") and not is_attention_unsupported
    loss_chunk = CHUNK if is_chunk_missing else run_kernels.loss_chunk
    kernels = Kernels(named=(("attention", attention),) * is_attention_kept, loss_chunk=loss_chunk)
    plan = Plan(precision=run_plan.precision, matmul=run_plan.matmul, kernels=kernels)
    # plain gradient descent has no optimizer state
    sgd = Optimizer("sgd", clip=None, weight_decay=0.0, train=experiment.optimizer.train, ema=experiment.optimizer.ema)
    sgd_experiment = dataclasses.replace(experiment, optimizer=sgd, plan=plan)
    if split:
        split_plan = dataclasses.replace(plan, microbatches=run_plan.microbatches)
        try:  # a model that was trained in shards may not fit on one device
            return build(sgd_experiment, dataclasses.replace(split_plan, zero=3), devices=devices)
        except UserError:  # no dim of the parameters can be split evenly
            return build(sgd_experiment, split_plan, devices=devices)
    step = build(sgd_experiment, dataclasses.replace(plan, mesh=MeshSpec()), devices=devices[:1])
    limit_bytes = (devices[0].memory_stats() or {}).get("bytes_limit") if devices[0].platform != "cpu" else None
    if len(devices) > 1 and limit_bytes and 4 * step.parameters > 0.6 * limit_bytes:
        device_count = len(devices)
        sharded_plan = dataclasses.replace(plan, mesh=MeshSpec(fsdp=device_count), zero=3)
        step = build(dataclasses.replace(sgd_experiment, batch=device_count), sharded_plan, devices=devices)
    return step
