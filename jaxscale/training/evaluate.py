"""Measure the held-out loss, and the accuracy if the model reports it, during a run and after it.

The names of a held-out set's figures begin with the name of the set, as in "news/loss".
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.data.chat.chat_template import folder_tokenizer
from jaxscale.data.chat.chats import Chats
from jaxscale.data.loader import NumpyBatch, Opened
from jaxscale.data.text import Text
from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.models.huggingface import is_model_folder
from jaxscale.recipe.experiment import Evaluation
from jaxscale.recipe.fine_tuning import MAX_CONTEXT
from jaxscale.training.check_data import open_data, open_sets

if TYPE_CHECKING:
    from jaxscale.models.scores import Metric

_BATCH = 8
"""Number of rows of a batch on which a folder is evaluated."""
_IN_FLIGHT_LIMIT = 8
"""Number of batches that may wait on the devices at once."""


def held_out_means(
    step: Any,
    data: Any,
    state: Any,
    batches: int | None = None,
    *,
    one_at_a_time: bool,
    metrics: Mapping[str, "Metric"] = {},
) -> dict[str, float] | None:
    """Measure the held-out loss, the accuracy if the model reports it, and the user's own metrics.

    Args:
        step: the train step, which compiles the evaluation at its first use.
        data: the opened data.
        state: the train state.
        batches: number of held-out batches; all by default.
        one_at_a_time: whether to wait for each batch before starting the next one, as the CPU platform requires.
        metrics: functions of module and batch, by name.

    Returns:
        A dict of `loss` (nats per target), `targets` (number of targets), `accuracy` if the model reports it, and the
        mean of each metric; `None` if no data is held out.
    """
    import jax

    in_flight_limit = 1 if one_at_a_time else _IN_FLIGHT_LIMIT
    # for each batch: the sum of its losses, its weight, its accuracy as a pair of sums (`None` if not reported), and a
    # pair of sums for each metric
    batch_sums: list[Any] = []
    for batch in itertools.islice(data.evaluation(), batches):
        device_batch = step.place(batch)
        if fill_count := _fill_count(batch):
            device_batch = _batch_without_fill(step, state, batch, device_batch, fill_count)
            if device_batch is None:
                continue
        loss_and_weight_sums = step.evaluate(state, device_batch)
        if one_at_a_time:
            jax.block_until_ready(loss_and_weight_sums)
        # the accuracy needs a second forward pass, since the loss may be computed in chunks, without all logits at once
        metric_sums = {name: step.metric(metric, state, device_batch) for name, metric in metrics.items()}
        batch_sums.append((*loss_and_weight_sums[:2], step.accuracy(state, device_batch), metric_sums))
        if len(batch_sums) >= in_flight_limit:
            jax.block_until_ready(batch_sums[-in_flight_limit])
    host_sums = jax.device_get(batch_sums)
    total_weight = sum(float(batch_weight) for _, batch_weight, *_ in host_sums)
    if total_weight == 0:
        return None
    means = {"loss": sum(float(loss_sum) for loss_sum, *_ in host_sums) / total_weight, "targets": total_weight}
    if host_sums[0][2] is not None:
        means["accuracy"] = _mean(accuracy_sums for _, _, accuracy_sums, _ in host_sums)
    return means | {name: _mean(sums[name] for *_, sums in host_sums) for name in metrics}


def all_means(
    step: Any, data: Any, sets: Mapping[str, Any], state: Any, batches: int | None = None, **settings: Any
) -> dict[str, float] | None:
    """Measure the data's own held-out part and the held-out sets.

    Args:
        step, data, state, batches, settings: as in `held_out_means`.
        sets: the opened held-out sets by name.

    Returns:
        A dict of the figures of `held_out_means` for the data's own held-out part or, if there is none, for the first
        set; and of the figures of each set, by names such as "news/loss". A set without any target has 0 targets, and
        NaN as its loss. `None` if there is neither a held-out part nor a set.
    """
    own_means = held_out_means(step, data, state, batches, **settings)
    empty_means = {"loss": math.nan, "targets": 0.0}
    means_by_set = {name: held_out_means(step, sets[name], state, batches, **settings) or empty_means for name in sets}
    main_means = own_means or next(iter(means_by_set.values()), None)
    if main_means is None:
        return None
    return main_means | {
        f"{name}/{figure}": value for name, means in means_by_set.items() for figure, value in means.items()
    }


def _mean(sum_pairs: Iterable[tuple[Any, Any]]) -> float:
    """Return the weighted mean of batches, given pairs (weighted sum, sum of weights); NaN if all weights are 0."""
    total_sum, total_weight = np.array(list(sum_pairs), np.float64).sum(0)
    return float(total_sum / total_weight) if total_weight else math.nan


def _fill_count(batch: NumpyBatch) -> int:
    """Return the number of padding rows of a batch: the rows of weight 0 at its end."""
    weights = batch.get("weights")
    if weights is None:
        return 0
    weighted_row_indices = np.flatnonzero(np.any(np.asarray(weights).reshape(len(weights), -1), axis=1))
    return len(weights) - (int(weighted_row_indices[-1]) + 1 if len(weighted_row_indices) else 0)


def _batch_without_fill(step: Any, state: Any, batch: NumpyBatch, device_batch: Any, fill_count: int) -> Any:
    """Return a padded batch on the devices; if the loss couples rows, remove the padding rows.

    Returns:
        The batch. `None` if the loss couples rows, and the devices cannot share the remaining rows evenly or belong to
        several processes.
    """
    import jax

    if not step.couples_rows(state, device_batch):
        return device_batch
    row_count = len(batch["weights"]) - fill_count
    is_shared_evenly = row_count and not row_count % step.row_shards
    if not is_shared_evenly or jax.process_count() > 1:
        return None
    return step.place({name: array[:row_count] for name, array in batch.items()})


def evaluate(
    run: Any,
    *,
    best: bool = False,
    batches: int | None = None,
    metrics: Mapping[str, "Metric"] = {},
    data: Any = None,
) -> dict[str, Any]:
    """Measure the held-out loss of a run's newest or best checkpoint, or of the model in a Hugging Face folder.

    Args:
        run: the run directory, or a folder that transformers saved.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        batches: number of held-out batches; all by default.
        metrics: functions of module and batch, by name, as in `train`.
        data: data to evaluate on instead of the run's, in any form that `Experiment.held_out` takes, such as the path
            of a file that is read like the run's data. A model folder needs `data`: the path of a JSONL file of chats,
            with loss on the answers alone, or of a text file, with loss on every token.

    Returns:
        A dict of the checkpoint's `step`, `loss` (nats per target), `targets` (number of targets), `accuracy` if the
        model reports it, and the mean of each metric; and of the same figures for each held-out set of the experiment,
        by names such as "news/loss". For a model folder, there is no `step`.

    Raises:
        UserError: the directory has no run or checkpoint, or the data has nothing held out.

    Example:
        >>> evaluate("no/such/run")
        Traceback (most recent call last):
        jaxscale.errors.UserError: no/such/run holds no run: expected experiment.json there; give the directory of a run
    """
    from jaxscale.checkpoint.restore import open_folder, read_tokenizer, restore_parameters
    from jaxscale.models.scores import named_metrics

    metrics = named_metrics(metrics)
    settings: dict[str, Any] = {"metrics": metrics}
    if is_model_folder(run):
        if best or data is None:
            no_data_text = "no data, expected a file of chats to evaluate on"
            raise UserError(
                f"{run} is a model folder: got {'best, but a folder has no checkpoints' if best else no_data_text}"
            )
        file_data, opened_data = _open_file(run, data)
        loaded_model = open_folder(run, file_data, opened_data.batch, split=True)
        settings["one_at_a_time"] = loaded_model.step.mesh.devices.flat[0].platform == "cpu"
        _show_note(opened_data)
        means = held_out_means(loaded_model.step, opened_data, loaded_model.state, batches, **settings)
        assert means is not None, "a file without targets is refused when it is opened"
        return means
    trained_run = restore_parameters(run, best=best, split=True)
    experiment = trained_run.experiment
    process_index, process_count = trained_run.step.data_shard()
    if data is None:
        opened_data = open_data(experiment, process_index, process_count)
        sets = open_sets(experiment, opened_data, process_index, process_count)
    else:
        other_experiment = dataclasses.replace(experiment, held_out={"data": data}, evaluation=Evaluation())
        tokenizer_holder = SimpleNamespace(tokenizer=read_tokenizer(trained_run.directory))
        try:
            opened_data = open_sets(other_experiment, tokenizer_holder, process_index, process_count)["data"]
        except UserError as error:
            raise UserError(f"data{str(error).removeprefix('held_out.data')}") from None
        _show_note(opened_data)
        sets = {}
    settings["one_at_a_time"] = trained_run.step.mesh.devices.flat[0].platform == "cpu"
    means = all_means(trained_run.step, opened_data, sets, trained_run.state, batches, **settings)
    if means is None:
        raise UserError(
            f"the data of {trained_run.directory} has nothing held out: set data.held_out above 0, or give sets"
        )
    return {"step": trained_run.description.step, **means}


def _show_note(opened_data: Opened) -> None:
    """Print what the data reports about its rows, such as how many chats were cut."""
    if opened_data.note is not None:
        print(f"jaxscale: {opened_data.note}", file=sys.stderr, flush=True)


def _open_file(folder: Any, file: str | Path) -> tuple[Any, Opened]:
    """Return a data object that reads a file for a folder's model, and the opened data; all of it is held out."""
    from jaxscale.models.huggingface import read_config

    _, model = read_config(folder)
    traits = ModelTraits.of(model)
    if not traits.generates or traits.context is None:
        raise UserError(f"{folder} holds a {type(model).__name__}, expected a language model")
    context = min(traits.context, MAX_CONTEXT)
    if str(file).endswith((".jsonl", ".json")):
        chats = Chats(file, folder, context, held_out=1.0)
        longest_chat_tokens = chats.open(_BATCH, 0).facts["longest"]
        chats = dataclasses.replace(chats, context=max(1, min(context, -(-(longest_chat_tokens - 1) // 64) * 64)))
        return chats, chats.open(_BATCH, 0)
    folder_tokenizer(folder)  # raises an error if the folder has no tokenizer
    text = Text(file, Path(folder) / "tokenizer.json", 1, held_out=1.0)
    text = dataclasses.replace(text, context=min(context, text.open(1, 0).facts["held_out_tokens"] - 1))
    return text, text.open(_BATCH, 0)
