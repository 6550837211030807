"""The weights before the first step: drawn where they will lie, or loaded by a model that brings its own."""

from typing import Any

import jax
import numpy as np

from jaxscale.state.layout import Layout
from jaxscale.state.pure_model import PureModel, in_groups
from jaxscale.typing import Array, Params


def first_weights(model: Any, pure_model: PureModel, layout: Layout) -> tuple[Params, Params]:
    """Parameters, and the rest of the model's state. Every leaf is created already sharded, never whole on one device.

    Args:
        model: whose `initial_params`, where it has it, are taken instead of random ones.
        pure_model: the model as pure functions.
        layout: where its arrays live.
    """
    params, rest = jax.jit(pure_model.create, out_shardings=(layout.masters, layout.state.rest))()
    load = getattr(model, "initial_params", None)
    if load is not None:
        loaded = pure_model.in_rows(in_groups(load(), pure_model.groups))
        places = jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), pure_model.params, layout.masters
        )
        params = jax.tree.map(_placed, loaded, places)
    return params, rest


def _placed(array: Any, abstract: jax.ShapeDtypeStruct) -> Array:
    """A host array put on the devices shard by shard; dims that are padded in the model get zeros."""
    if array.shape != abstract.shape:
        array = np.pad(array, [(0, want - have) for have, want in zip(array.shape, abstract.shape, strict=True)])
    return jax.make_array_from_callback(
        abstract.shape, abstract.sharding, lambda index: np.asarray(array[index], abstract.dtype)
    )
