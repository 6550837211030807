"""Weights in host memory, streamed to the device block by block.

L2L (Pudipeddi et al. 2020, "Training Large Neural Networks with Constant Memory using a New Execution Algorithm", arXiv
2002.05645) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857): a block's weights come to the device when the
block runs, in the forward pass and again in the backward pass, and are then freed. A scan over layers reads the
layer's slice of the stacked weights; a `Chain` reads the block's own weights. Left out: NVMe, and prefetching the
next block, which XLA's scheduler undoes.

Activations are offloaded by name (`keep_named`). In a pipeline, they move together with their slot: the buffer in
which a stage keeps the residuals of one microbatch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import Treatment, Wrapper
from jaxscale.memory.keep_named import Keeping
from jaxscale.memory.prepared import with_prepared_args
from jaxscale.sharding.memory_space import to_device, to_host
from jaxscale.typing import Array

FETCHED = "jaxscale:fetched"
"""Name of a weight that came from the host, for policies of `jax.checkpoint`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed:
    """A weight in host memory, which takes the place of an array in a module until the array's block runs.

    Args:
        weight: float32 array on the host, of one layer or of stacked layers.
        tie: array of zeros like the weight, on the device, which receives the weight's gradient; `None` leaves the
            gradient on the host.
        dtype: name of the fetched weight's dtype; `None` leaves the dtype unchanged.
        keep_type: whether to round the weight to `dtype` but return it in its dtype on the host. Its gradient is then
            summed in the dtype on the host.
    """

    weight: Array
    tie: Array | None = None
    dtype: str | None = dataclasses.field(default=None, metadata={"static": True})
    keep_type: bool = dataclasses.field(default=False, metadata={"static": True})

    def fetch(self) -> Array:
        """Return the weight on the device, in the specified dtype."""
        if self.tie is None:
            weight = to_device(self.weight)
        else:
            weight = _with_gradient_to_tie(to_device(jax.lax.stop_gradient(self.weight)), self.tie)
        if self.dtype is not None and jnp.issubdtype(weight.dtype, jnp.floating):
            rounded_weight = weight.astype(self.dtype)
            weight = rounded_weight.astype(weight.dtype) if self.keep_type else rounded_weight
        return checkpoint_name(weight, FETCHED)


@jax.custom_vjp
def _with_gradient_to_tie(weight: Array, tie: Array) -> Array:
    """Return the weight unchanged; its gradient goes to `tie` instead."""
    return weight


_with_gradient_to_tie.defvjp(lambda weight, tie: (weight, None), lambda _, gradient: (None, gradient))


@jax.custom_vjp
def _zeros_on_device(weight: Array) -> Array:
    """Return zeros on the device, whose gradient goes to the host as that of `weight`."""
    return jnp.zeros(weight.shape, weight.dtype)


_zeros_on_device.defvjp(lambda weight: (_zeros_on_device(weight), None), lambda _, gradient: (to_host(gradient),))


def with_device_gradients(params: Any) -> Any:
    """Return the parameters of a cycle of layers, whose gradients are summed on the device and then go to the host.

    Each layer of a cycle has a gradient for its slice of the stacked weights, and arrays on the host cannot be added.
    """

    def with_tie(node: Any) -> Any:
        is_untied = isinstance(node, Streamed) and node.tie is None
        return dataclasses.replace(node, tie=_zeros_on_device(node.weight)) if is_untied else node

    return jax.tree.map(with_tie, params, is_leaf=lambda node: isinstance(node, Streamed))


def keep_all_but_weights(primitive: Any, *input_avals: Any, **params: Any) -> bool:
    """Return whether to keep a residual; a policy for `jax.checkpoint`.

    False for fetched weights, for values computed from inputs on the host, and for results of copies, casts and
    gathers, all of which are recomputed; true for all other values.
    """
    is_fetched = primitive.name == "name" and params["name"] == FETCHED
    # a residual on the host would be copied within the host, layer by layer, and TPU's compiler fails on such copies
    has_host_input = any(getattr(aval, "memory_space", None) == jax.memory.Space.Host for aval in input_avals)
    # the result of a cast may be a weight, and is cheap to recompute; a pipeline gathers fetched weights
    return not (is_fetched or has_host_input) and primitive.name not in (
        "device_put",
        "convert_element_type",
        "all_gather",
    )


def with_streamed_weights(treatment: Treatment) -> Treatment:
    """Return a treatment of blocks that also fetches every `Streamed` weight when its block runs.

    Args:
        treatment: treatment of the blocks for other purposes. If the treatment recomputes a block, weights are fetched
            again. The treatment must not have segments of several blocks, because stacked weights would be sliced
            before the fetch.
    """
    treatment = treatment.with_wrappers(
        lambda wrapper: with_prepared_args(wrapper, fetch_weights, keep_all_but_weights)
    )
    return dataclasses.replace(treatment, prepare_cycle=with_device_gradients)


def with_deferred_offload(treatment: Treatment) -> Treatment:
    """Return a treatment of a pipeline's blocks that moves offloaded values together with their stage's slot.

    The values go to the host after the stage's forward pass, and return at the start of its backward pass. If each
    block offloaded its own values, a program on the host would have to copy the values into the slot.
    """
    wrappers = (treatment.wrapper, *(wrapper for _, wrapper in treatment.groups))
    keeping_wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper, Keeping)]

    def defer_offload(wrapper: Wrapper) -> Wrapper:
        return dataclasses.replace(wrapper, is_offload_deferred=True) if isinstance(wrapper, Keeping) else wrapper

    hosted_names = frozenset().union(*(wrapper.deferred_names for wrapper in keeping_wrappers))
    return dataclasses.replace(treatment.with_wrappers(defer_offload), host_names=hosted_names)


def fetch_weights(args: Any) -> Any:
    """Return the arguments of a block, with every `Streamed` weight replaced by the fetched array."""

    def is_streamed(node: Any) -> bool:
        return isinstance(node, Streamed)

    return jax.tree.map(lambda node: node.fetch() if is_streamed(node) else node, args, is_leaf=is_streamed)
