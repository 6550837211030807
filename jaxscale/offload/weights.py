"""Weights in host memory, streamed to the device block by block.

L2L (Pudipeddi et al. 2020, "Training Large Neural Networks with Constant Memory using a New Execution Algorithm", arXiv
2002.05645) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857): a block's weights come to the device when the
block runs, in the forward pass and again in the backward pass, and are dropped behind it. A scan over layers reads the
layer's slice of the stacked weights, and a `Chain` those of the block. Left out: NVMe, and prefetching a block ahead,
which XLA's scheduler undoes.

Activations are offloaded by name (`keep_named`), in a pipeline with the slot that a stage keeps them in.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import BlockFunction, Treatment, Wrapper, as_it_is
from jaxscale.memory.keep_named import Keeping
from jaxscale.sharding.memory_space import to_device
from jaxscale.typing import Array

FETCHED = "jaxscale:fetched"
"""Name of a weight that came from the host, for policies of `jax.checkpoint`."""

_OF_BLOCKS = re.compile(r"(?:^|/)layers(?:_from_\d+)?(?:/|$)")


def of_a_block(name: str) -> bool:
    """Whether a parameter belongs to a block of a `Stack` or a `Chain`, by its name.

    Example:
        >>> of_a_block("blocks/layers/mlp/up/weight"), of_a_block("chain/layers/3/scale"), of_a_block("embed/table")
        (True, True, False)
    """
    return _OF_BLOCKS.search(name) is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed:
    """A weight in host memory, which takes the place of an array in a module until its block runs.

    Args:
        weight: float32, on the host; stacked or of one layer.
        tie: zeros like it on the device, which get its gradient; `None` leaves the gradient on the host.
        dtype: type of the fetched weight, as a name; `None` leaves it unchanged.
        keep_type: the weight is rounded to `dtype` but keeps its type, so that its gradient is summed in that type.
    """

    weight: Array
    tie: Array | None = None
    dtype: str | None = dataclasses.field(default=None, metadata={"static": True})
    keep_type: bool = dataclasses.field(default=False, metadata={"static": True})

    def fetch(self) -> Array:
        """The weight on the device."""
        if self.tie is None:
            weight = to_device(self.weight)
        else:
            weight = _tied(to_device(jax.lax.stop_gradient(self.weight)), self.tie)
        if self.dtype is not None and jnp.issubdtype(weight.dtype, jnp.floating):
            low = weight.astype(self.dtype)
            weight = low.astype(weight.dtype) if self.keep_type else low
        return checkpoint_name(weight, FETCHED)


@jax.custom_vjp
def _tied(weight: Array, tie: Array) -> Array:
    """The weight, whose gradient goes to `tie`."""
    return weight


_tied.defvjp(lambda weight, tie: (weight, None), lambda _, gradient: (None, gradient))


def keep_all_but_weights(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Policy of an otherwise untreated block: every residual is kept but weights, which are fetched again."""
    is_fetched = primitive.name == "name" and params["name"] == FETCHED
    # a residual on the host would be copied there, layer by layer, at which the TPU's compiler fails
    on_host = any(getattr(leaf, "memory_space", None) == jax.memory.Space.Host for leaf in inputs)
    # a cast of a weight is a weight, and any other cast is cheap; a pipeline gathers fetched weights
    return not is_fetched and not on_host and primitive.name not in ("device_put", "convert_element_type", "all_gather")


def streaming(treatment: Treatment) -> Treatment:
    """The treatment of blocks, with every `Streamed` weight fetched when its block runs.

    Args:
        treatment: the other treatment of blocks, which recomputes fetching too. It must have no segments of several
            blocks, for which the stacked weights would be sliced first.
    """

    def fetching(wrapper: Wrapper) -> Wrapper:
        if isinstance(wrapper, Keeping):  # its save sets are for the block without fetching
            return dataclasses.replace(wrapper, prepare=fetched, everything=keep_all_but_weights)

        def wrapped(block: BlockFunction, rolled: bool) -> BlockFunction:
            def run(*args: Any) -> Any:
                return block(*fetched(args))

            if wrapper is as_it_is:
                return jax.checkpoint(run, policy=keep_all_but_weights, prevent_cse=not rolled)
            return wrapper(run, rolled)

        return wrapped

    return treatment.with_wrappers(fetching)


def offloading_later(treatment: Treatment) -> Treatment:
    """The treatment of a pipeline's blocks, whose stages keep their residuals in slots.

    Offloaded values go to the host with the slot, after the stage's forward, and return at the start of its backward.
    Offloaded by the block, they would move from host to host, which needs a program on the host.
    """
    wrappers = (treatment.wrapper, *(wrapper for _, wrapper in treatment.groups))
    keeping = [wrapper for wrapper in wrappers if isinstance(wrapper, Keeping)]

    def delayed(wrapper: Wrapper) -> Wrapper:
        return dataclasses.replace(wrapper, later=True) if isinstance(wrapper, Keeping) else wrapper

    hosted = frozenset().union(*(wrapper.hosted for wrapper in keeping))
    return dataclasses.replace(treatment.with_wrappers(delayed), hosted=hosted)


def fetched(args: Any) -> Any:
    """The arguments of a block, with every `Streamed` weight on the device."""

    def is_streamed(leaf: Any) -> bool:
        return isinstance(leaf, Streamed)

    return jax.tree.map(lambda leaf: leaf.fetch() if is_streamed(leaf) else leaf, args, is_leaf=is_streamed)
