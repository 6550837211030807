"""Numbers of tokens or classes for each array of a batch: from the model's fields, or from a trace of its loss."""

import jax

from jaxscale.blocks import Context
from jaxscale.layers.targets import noting_class_counts
from jaxscale.model_traits import ModelTraits
from jaxscale.state import batches
from jaxscale.state.pure_model import PureModel
from jaxscale.typing import Array, Batch, Float, Params
from jaxscale.values.host_random import warning_of_host_random


def class_counts(pure_model: PureModel, batch: Batch, context: Context) -> dict[str, int]:
    """Return the number of tokens or classes for each array of tokens or labels, by the array's name.

    Args:
        pure_model: the model as pure functions.
        batch: arrays or shapes of a batch, with which the loss of a foreign model is traced. If the loss draws random
            numbers on the host, the trace warns about that.
        context: the settings of the forward pass.
    """
    model = pure_model.model
    traits = ModelTraits.of(model)
    if not traits.foreign:
        count_by_name = {"tokens": traits.vocab, "targets": traits.vocab, "labels": traits.classes}
        return {name: count for name, count in count_by_name.items() if count is not None}

    def total_loss(params: Params, model_state: Params, batch: Batch) -> Float[Array, ""]:
        return model.loss(pure_model.module(params, model_state), batch, context).total

    with noting_class_counts() as noted_counts, warning_of_host_random(model):
        jax.eval_shape(
            total_loss,
            pure_model.abstract_module_params,
            pure_model.abstract_model_state,
            batches.abstract_arrays(batch),
        )
    return noted_counts
