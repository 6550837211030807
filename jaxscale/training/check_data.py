"""Check, before the first step, that the model can be trained on the data, and what the evaluations will compute."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.errors import UserError
from jaxscale.model_traits import ModelTraits
from jaxscale.recipe.experiment import Experiment, Samples
from jaxscale.training.callbacks import Callbacks


def open_data(experiment: Experiment, process_index: int, process_count: int) -> Any:
    """Return one process's shard of an experiment's data, opened.

    Args:
        experiment: the experiment.
        process_index: index of the process.
        process_count: number of processes that share the batch.

    Raises:
        UserError: the experiment has no data, or the data cannot be opened.
    """
    if experiment.data is None:
        raise UserError("data: got None, expected what to train on, such as data.Text('a.txt') or a dict of arrays")
    return experiment.data.open(experiment.batch, experiment.seed, process=process_index, processes=process_count)


def open_sets(experiment: Experiment, data: Any, process_index: int, process_count: int) -> dict[str, Any]:
    """Return one process's shard of each held-out set of an experiment, opened, by name.

    Args:
        experiment: the experiment.
        data: the opened training data, whose tokenizer encodes the texts of the sets.
        process_index: index of the process.
        process_count: number of processes that share the batch.

    Raises:
        UserError: a set cannot be opened or holds nothing out, or the model cannot read it.
    """
    if not experiment.held_out:
        return {}
    from jaxscale.data.held_out_sets import open_held_out_sets

    sets = open_held_out_sets(
        experiment.held_out,
        experiment.batch,
        experiment.seed,
        process=process_index,
        processes=process_count,
        tokenizer=getattr(data, "tokenizer", None),
    )
    for name, opened_set in sets.items():
        try:
            check_data(dataclasses.replace(experiment, data=experiment.held_out[name]), opened_set, is_trained=False)
        except UserError as error:
            raise UserError(f"held_out.{name}: {error}") from None
    return sets


def check_data(experiment: Experiment, data: Any, *, is_trained: bool = True) -> None:
    """Raise an error for data that the model cannot be trained on.

    Args:
        experiment: the experiment, with the model.
        data: the opened data. If the data has a `tokenizer` or a dict `facts`, these are checked; `facts` may give the
            number of "classes" and the "shape" of the images.
        is_trained: whether the model is trained on the data; if false, all of it may be held out.

    Raises:
        UserError: all of the data is held out; the tokenizer has more tokens than the model's vocabulary, or cannot
            encode a sample prompt; a sample prompt is longer than the model's context; or the data has more classes,
            images of another shape, or longer sequences than the model takes.
    """
    tokenizer, traits = getattr(data, "tokenizer", None), ModelTraits.of(experiment.model)
    if tokenizer is not None and traits.vocab is not None and tokenizer.size > traits.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.size} tokens, but model.vocab is {traits.vocab}: "
            f"set model.vocab to {tokenizer.size} or more"
        )
    if tokenizer is not None:
        for prompt in prompts_of(experiment, tokenizer):
            try:
                token_count = len(tokenizer.encode(prompt))
            except UserError as error:
                raise UserError(f"samples.prompts: {prompt!r}: {error}") from None
            if not token_count:
                raise UserError(f"samples.prompts: {prompt!r} has no tokens: give text, or remove the prompt")
            if traits.generates and traits.context is not None and token_count > traits.context:
                raise UserError(
                    f"samples.prompts: {prompt[:40]!r} has {token_count} tokens, but model.context is "
                    f"{traits.context} positions: shorten the prompt"
                )
    data_facts = getattr(data, "facts", {})
    if is_trained and data_facts.get("rows") == 0:
        raise UserError("data.held_out: got 1, which leaves nothing to train on; give a share below 1")
    class_count = data_facts.get("classes", 0)
    if traits.classes is not None and class_count > traits.classes:
        raise UserError(
            f"the data has {class_count} classes, but model.classes is {traits.classes}: "
            f"set model.classes to {class_count}"
        )
    # height, width and channels of the images; `None` in the model's shape accepts any size
    data_shape, model_shape = data_facts.get("shape"), (traits.image, traits.image, traits.channels)
    if data_shape is not None and any(
        model_size not in (None, data_size) for data_size, model_size in zip(data_shape, model_shape, strict=True)
    ):
        data_text, model_text = (
            " x ".join(str(size or "any") for size in shape) for shape in (data_shape, model_shape)
        )
        raise UserError(
            f"the images are {data_text}, but the model takes {model_text}: set model.image and model.channels"
        )
    data_context = getattr(experiment.data, "context", None)
    if traits.context is not None and data_context is not None and data_context > traits.context:
        raise UserError(
            f"data.context is {data_context}, but model.context is {traits.context} positions: "
            f"set data.context to {traits.context}"
        )


def prompts_of(experiment: Experiment, tokenizer: Any) -> tuple[str, ...]:
    """Return the prompts of an experiment's samples.

    The default prompt is a line break. If the tokenizer cannot encode it, the prompt is the text of the token 0.

    Args:
        experiment: the experiment.
        tokenizer: tokenizer of the data.
    """
    prompts = experiment.samples.prompts
    if prompts != Samples().prompts:
        return prompts
    try:
        tokenizer.encode(prompts[0])
    except UserError:
        return (tokenizer.decode([0]),)
    return prompts


def checked_metrics(metrics: Any) -> Any:
    """Return the metrics by name, each with a check of its results; see `models.scores.named_metrics`."""
    if not metrics:
        return {}
    from jaxscale.models.scores import named_metrics

    return named_metrics(metrics)


def check_evaluation(
    step: Any, data: Any, sets: Mapping[str, Any], metrics: Mapping[str, Any], callbacks: Callbacks
) -> None:
    """Trace the metrics for a held-out batch, and check that evaluations report the metric of each `EarlyStopping`.

    Args:
        step: the train step.
        data: the opened data.
        sets: the opened held-out sets by name.
        metrics: functions of module and batch, by name.
        callbacks: the callbacks of the run.

    Raises:
        UserError: a metric returns something other than one number per row or per target; nothing is held out, so there
            are no evaluations; or evaluations do not report the metric of an `EarlyStopping`.
    """
    if not metrics and not callbacks.early_stopping:
        return
    own_batch = next(iter(data.evaluation()), None)
    set_batches = {name: next(iter(opened_set.evaluation()), None) for name, opened_set in sets.items()}
    batch = next((each for each in (own_batch, *set_batches.values()) if each is not None), None)
    if batch is None:
        got_text = f"metrics: got {', '.join(metrics)}" if metrics else "callbacks: got EarlyStopping"
        raise UserError(
            f"{got_text}, but nothing is held out, so that no evaluation takes place: set data.held_out above 0, or "
            'give a set as Experiment(held_out={"name": ...})'
        )
    _trace(step, metrics, batch)
    has_accuracy = getattr(step.experiment.model, "accuracy", None) is not None
    figure_names = ["loss", "targets", *(["accuracy"] if has_accuracy else []), *metrics]
    all_figure_names = [*figure_names, *(f"{name}/{figure}" for name in sets for figure in figure_names)]
    evaluation, step_count = step.experiment.evaluation, step.experiment.steps
    for callback in callbacks.early_stopping:
        callback.check(all_figure_names, evaluation.every, step_count)


def _trace(step: Any, metrics: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
    """Trace each metric for a global batch whose rows are like those of `batch`."""
    import jax

    row_count = step.experiment.batch
    abstract_arrays = {
        name: jax.ShapeDtypeStruct((row_count, *array.shape[1:]), array.dtype) for name, array in batch.items()
    }
    for name, metric in metrics.items():
        try:
            jax.eval_shape(step.metric_fn(metric), step.layout.abstract, step.abstract_batch(abstract_arrays))
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"in the metric {name!r}, which is traced before the first step")
            raise
