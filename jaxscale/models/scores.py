"""Scores and metrics of a user's own: functions of a module and a batch, checked before the run and when traced.

A score returns the losses that are trained; a metric is computed on held-out batches beside the loss.
"""

import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context, Model
from jaxscale.errors import UserError
from jaxscale.models.classify import weighted_sum
from jaxscale.scoped import scoped
from jaxscale.typing import Array, Batch, Float, Key
from jaxscale.values.functions import check_parameters, has_parameter
from jaxscale.values.user_frames import place_of

Metric = Callable[..., Any]
"""`metric(module, batch)` returns one number per row ([B]) or per target ([B, S]), or a pair (numbers, weights).

The weighted mean over all held-out batches is reported. The function calls the module as the score of a model does, and
may have a parameter `key`, too.
"""

RESERVED = ("step", "kind", "time", "loss", "targets", "accuracy", "nonfinite")
"""Names that a metric cannot have, because the rows of metrics.jsonl use them."""

_patch_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class RowParts:
    """How the rows of a batch are divided into parts. The module is called with each part, the score with the batch.

    Args:
        axis: manual mesh axis that shards the rows; `None` if one device computes the parts one after another.
        count: number of parts.
    """

    axis: str | None
    count: int


_row_parts: ContextVar[RowParts | None] = ContextVar("row_parts", default=None)


def rows_in_parts(parts: RowParts) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a score sees the whole batch, and the module is called with each part of its rows."""
    return scoped(_row_parts, parts)


def whole_rows(rows: jax.typing.ArrayLike) -> Array:
    """Gather the rows of all devices along the mesh axis of `rows_in_parts`; if there is no axis, return `rows`."""
    parts = _row_parts.get()
    axis = None if parts is None else parts.axis
    return jnp.asarray(rows) if axis is None else jax.lax.all_gather(rows, axis, tiled=True)


def by_parts(call: Callable[..., Any], batch: Batch) -> Callable[..., Any]:
    """Return a call that runs the module on parts of the rows; outside of `rows_in_parts`, return `call` itself."""
    parts = _row_parts.get()
    return call if parts is None else _CallByParts(call, parts, len(jax.tree.leaves(dict(batch))[0]))


class _CallByParts:
    """A module whose call computes with one part of the rows at a time, and returns the results of all rows.

    If the rows are sharded over a manual mesh axis, each device computes with its own rows, and gathers the results of
    the other devices. Other attributes are those of the module.

    Args:
        call: the module, or its call with some arguments bound.
        parts: how the rows are divided.
        row_count: number of rows of the whole batch. An argument with as many rows is divided into parts.
    """

    def __init__(self, call: Callable[..., Any], parts: RowParts, row_count: int) -> None:
        self._call, self._parts, self._row_count = call, parts, row_count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's results, whose arrays have the rows of the whole batch."""
        parts, part_row_count = self._parts, self._row_count // self._parts.count

        def call_part(part_index: Any) -> Any:
            """Return the module's results for one part."""
            part_args, part_kwargs = jax.tree.map(
                lambda x: (
                    jax.lax.dynamic_slice_in_dim(x, part_index * part_row_count, part_row_count)
                    if getattr(x, "shape", ())[:1] == (self._row_count,)
                    else x
                ),
                (args, kwargs),
            )
            return self._call(*part_args, **part_kwargs)

        if parts.axis is None:
            part_results = [call_part(part_index) for part_index in range(parts.count)]
            return jax.tree.map(
                lambda *arrays: jnp.concatenate(arrays) if jnp.shape(arrays[0])[:1] == (part_row_count,) else arrays[0],
                *part_results,
            )
        axis = parts.axis
        return jax.tree.map(
            lambda x: jax.lax.all_gather(x, axis, tiled=True) if jnp.shape(x)[:1] == (part_row_count,) else x,
            call_part(jax.lax.axis_index(axis)),
        )


def bind_key(function: Callable[..., Any], key: Key) -> Callable[..., Any]:
    """Return a score or metric with its parameter `key` bound, or the function itself if it has no such parameter."""
    if not has_parameter(function, "key"):
        return function
    return functools.partial(function, key=jax.random.fold_in(key, zlib.crc32(b"score") & 0x7FFFFFFF))


def check_losses(score: Any, losses: Any, target_weights: Any, batch: Batch) -> None:
    """Raise UserError unless a score returned one float per row or target, and weights (if any) of the same shape.

    Args:
        score: the user's function, for messages.
        losses: the losses that it returned.
        target_weights: the weights that it returned; `None` if it returned none.
        batch: the batch, in which every array has the rows first.
    """
    name = f"{place_of(score)}score"
    row_count = len(jax.tree.leaves(dict(batch))[0])
    shape_or_type = getattr(losses, "shape", type(losses).__name__)
    if not getattr(losses, "shape", ()) or losses.shape[0] != row_count:
        advice_text = ". Do not take the mean: jaxscale computes it"
        if losses is None:
            advice_text = ". Return them"
        elif isinstance(losses, tuple | list):
            advice_text = "; only a pair (losses, weights) may be returned, and metrics go to train(metrics=...)"
        raise UserError(
            f"{name} returned {shape_or_type} for a batch of {row_count} rows; expected "
            f"one loss per row or per target, of shape (rows, ...){advice_text}"
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise UserError(
            f"{name} returned {losses.dtype}{list(losses.shape)}, which has no gradient; expected losses of a float "
            "type: a count of errors is a metric, for train(metrics=...)"
        )
    if target_weights is not None and getattr(target_weights, "shape", None) != losses.shape:
        shape_or_type = getattr(target_weights, "shape", type(target_weights).__name__)
        raise UserError(
            f"{name} returned weights {shape_or_type} for losses of shape {losses.shape}; expected the same shape. A "
            "pair is (losses, weights): other results, such as logits, are not returned"
        )


def check_not_paired(score: Any, losses: Any, batch: Batch, losses_of: Callable[[Batch], Any]) -> None:
    """Raise UserError if there is a loss for each pair of rows, as if [B, 1] and [B] were broadcast to [B, B].

    If the number of rows occurs twice in the shape of the losses, the score is traced again with one more row. A second
    dim that grows with the rows is a dim of rows.

    Args:
        score: the user's function, for messages.
        losses: the losses that the score returned, [B, ...].
        batch: the batch.
        losses_of: function that returns the losses of another batch.
    """
    row_count = losses.shape[0]
    if row_count not in losses.shape[1:]:
        return
    longer_batch = {
        name: jax.ShapeDtypeStruct((row_count + 1, *array.shape[1:]), array.dtype) for name, array in batch.items()
    }
    try:
        longer_shape = jax.eval_shape(losses_of, longer_batch).shape
    except Exception:  # the model accepts only the batch's number of rows
        return
    if row_count + 1 in longer_shape[1:]:
        raise UserError(
            f"{place_of(score)}score returned {losses.shape} for a batch of {row_count} rows, a loss for each pair of "
            "rows: were arrays of shape (rows, 1) and (rows,) subtracted? Take [:, 0] of the first one. A loss over "
            'pairs of rows is declared by ForeignModel(over="batch")'
        )


@contextlib.contextmanager
def no_new_parameters(module: nnx.Module) -> Iterator[None]:
    """Return a context in which making an `nnx.Param` raises UserError.

    Such a parameter would be drawn again in every step. Linen modules are exempt, because in each call they make their
    parameters from those of the state.
    """
    if any(isinstance(node, nnx.bridge.ToNNX) for _, node in nnx.iter_graph(module)):
        yield
        return
    thread = threading.get_ident()
    with _patch_lock:
        original_init: Any = nnx.Param.__init__
        has_own_init = "__init__" in vars(nnx.Param)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == thread:
                raise UserError(
                    "the forward pass makes an nnx.Param, which would be another one in every step and never be "
                    "trained: make the layer in __init__ of the module, and call it in __call__"
                )
            original_init(self, *args, **kwargs)

        setattr(nnx.Param, "__init__", init)  # noqa: B010 - a method of a foreign class
        try:
            yield
        finally:
            if has_own_init:
                setattr(nnx.Param, "__init__", original_init)  # noqa: B010
            else:
                del nnx.Param.__init__


@dataclasses.dataclass(frozen=True)
class NamedMetric:
    """A metric that checks its result, which must be one number per row or target. Errors name the metric and line.

    Args:
        name: name of the metric.
        function: the user's function.
    """

    name: str
    function: Metric

    def __call__(self, module: Callable[..., Any], batch: Batch, key: Key) -> Any:
        """Return the result of the user's function for a batch. If the function has a parameter `key`, pass the key."""
        metric_result = bind_key(self.function, key)(module, batch)
        message_start = f"{place_of(self.function)}metrics: {self.name}"
        metric_values, weights = (
            metric_result if isinstance(metric_result, tuple) and len(metric_result) == 2 else (metric_result, None)
        )
        row_count = len(jax.tree.leaves(dict(batch))[0])
        rows_text = (
            f"a batch of {row_count} rows; expected one number per row or per target, of shape ({row_count}, ...)"
        )
        metric_shape, dtype = getattr(metric_values, "shape", None), getattr(metric_values, "dtype", "")
        if metric_shape is None:
            advice_text = "or a pair (numbers, weights)"
            if metric_values is None:
                advice_text = "return them"
            elif isinstance(metric_values, Mapping):
                advice_text = "several metrics are several entries of metrics"
            raise UserError(f"{message_start} returned {type(metric_values).__name__} for {rows_text}: {advice_text}")
        if not metric_shape or metric_shape[0] != row_count:
            raise UserError(
                f"{message_start} returned {dtype}{list(metric_shape)} for {rows_text}: leave out the mean or sum, "
                "since jaxscale takes the weighted mean over all held-out rows, or return a pair (numbers, weights)"
            )
        if weights is not None and getattr(weights, "shape", None) != metric_shape:
            raise UserError(
                f"{message_start} returned numbers {metric_shape} and weights "
                f"{getattr(weights, 'shape', type(weights).__name__)}, expected a pair (numbers, weights) of the same "
                "shape"
            )
        return metric_result


def named_metrics(metrics: Mapping[Any, Any]) -> dict[str, NamedMetric]:
    """Return the metrics by name, each as a `NamedMetric`, which checks its results.

    Raises:
        UserError: a metric is not a function of two arguments, or its name is invalid or reserved.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"metrics: got a {type(metrics).__name__}, expected functions by name, such as {{'mae': mean_error}}"
        )
    for name, metric in metrics.items():
        if name in RESERVED or not isinstance(name, str):
            raise UserError(f"metrics: got the name {name!r}, expected one that is not among {', '.join(RESERVED)}")
        if "/" in name:
            raise UserError(f"metrics: got the name {name!r}, expected one without '/', which follows a held-out set's")
        if not callable(metric):
            raise UserError(f"metrics: {name} is a {type(metric).__name__}, expected a function of module and batch")
        example = "lambda module, batch: abs(module(batch['x']) - batch['y'])"
        check_parameters(metric, f"{place_of(metric)}metrics: {name}", 2, example, keyword="key")
    return {
        name: metric if isinstance(metric, NamedMetric) else NamedMetric(name, metric)
        for name, metric in metrics.items()
    }


def metric_sums(
    model: Model, function: Metric, module: nnx.Module, batch: Batch, context: Context
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the weighted sum of a metric over a batch, and the sum of the weights.

    Args:
        model: the model; a model with a method `metric` runs the function itself.
        function: `function(module, batch)` returns one number per row [B] or per target [B, S], or a pair of such
            numbers and weights of the same shape.
        module: the module.
        batch: the batch, whose weights multiply those of the function.
        context: the settings of the forward pass.
    """
    run_metric = getattr(model, "metric", None)
    if run_metric is not None:
        return run_metric(function, module, batch, context)
    metric_result = bind_key(function, jax.random.key(0))(module, batch)
    metric_values, target_weights = metric_result if isinstance(metric_result, tuple) else (metric_result, None)
    weighted_sums = weighted_sum(metric_values, batch, target_weights)
    return weighted_sums.total, weighted_sums.weight
