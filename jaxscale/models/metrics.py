"""Metrics of a user's own, computed on held-out batches beside the loss."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxscale.blocks import Context, Model
from jaxscale.errors import UserError
from jaxscale.models.classify import weighted_sum
from jaxscale.typing import Array, Batch, Float
from jaxscale.values.functions import check_parameters
from jaxscale.values.user_frames import place_of

Metric = Callable[[Callable[..., Any], Batch], Any]
"""`metric(module, batch)` returns one number per row ([B]) or per target ([B, S]), or a pair (numbers, weights).

The weighted mean over all held-out batches is reported. The function calls the module as the score of a model does.
"""

RESERVED = ("step", "kind", "time", "loss", "targets", "accuracy", "nonfinite")
"""Names in a row of metrics.jsonl that a metric cannot have."""


def check_metrics(metrics: Mapping[Any, Any]) -> None:
    """Raise UserError if a metric is no function, or its name is taken."""
    for name, metric in metrics.items():
        if name in RESERVED or not isinstance(name, str):
            raise UserError(f"metrics: got the name {name!r}, expected one that is not among {', '.join(RESERVED)}")
        if "/" in name:
            raise UserError(f"metrics: got the name {name!r}, expected one without '/', which follows a held-out set's")
        if not callable(metric):
            raise UserError(f"metrics: {name} is a {type(metric).__name__}, expected a function of module and batch")
        example = "lambda module, batch: abs(module(batch['x']) - batch['y'])"
        check_parameters(metric, f"{place_of(metric)}metrics: {name}", 2, example)


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
    run = getattr(model, "metric", None)
    if run is not None:
        return run(function, module, batch, context)
    values = function(module, batch)
    values, target_weights = values if isinstance(values, tuple) else (values, None)
    sums = weighted_sum(values, batch, target_weights)
    return sums.total, sums.weight
