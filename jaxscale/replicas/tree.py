"""The average of a tree of gradients by a codec, for custom training loops inside a `jax.shard_map`."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from jaxscale.replicas.codec import Codec
from jaxscale.replicas.reduce import CodecStates, GradientExchange, GradientLeaf
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Int, PyTree


def start_reduction(codec: Codec | str, gradients: PyTree, replicas: int, *, seed: int = 0) -> CodecStates:
    """Return the initial states of a codec, which are equal on every replica.

    Args:
        codec: a codec, or its text, such as "powersgd:4".
        gradients: the gradients of one device, arrays of any dtype or their shapes.
        replicas: number of devices on the axis over which gradients are averaged.
        seed: seed of the codec's random draws.

    Returns:
        The states: arrays by the name of the gradient, then by the name of the state.

    Raises:
        UserError: the codec applies to none of the gradients, or there is a single replica.
    """
    return _exchange(codec, gradients, "replica", replicas, seed).initial_device_states()


def reduce_gradients(
    codec: Codec | str, gradients: PyTree, states: CodecStates, axis: str, step: Int[Array, ""], *, seed: int = 0
) -> tuple[PyTree, CodecStates]:
    """Average gradients over a mesh axis with compressed messages; the mean is equal on all devices of the axis.

    With error feedback, over n replicas,

        sum of residuals after + n mean = sum of gradients + sum of residuals before.

    In a two-phase codec (int8, int4, onebit), the owner of each chunk has another residual, which counts n times in the
    sums of residuals. Leaves to which the codec does not apply (vectors, scalars, small arrays) are averaged exactly,
    in one message. If a gradient of any replica is not finite, the mean is NaN and the states do not change.

    Args:
        codec: a codec, or its text: "int8", "onebit", "topk:0.01", "powersgd:4", ...
        gradients: this device's gradients of the loss of its replica; any tree of arrays.
        states: this device's states, from `start_reduction` or from the previous step; they differ between devices.
        axis: name of an axis over which the surrounding `jax.shard_map` is manual.
        step: number of updates made before this one, int32.
        seed: seed of the codec's random draws, as in `start_reduction`.

    Returns:
        The mean, a float32 tree like `gradients`, and the new states of this device.

    Raises:
        UserError: the codec applies to none of the gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> gradients = {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}
        >>> start_reduction("int8", gradients, 2)["kernel"].keys()
        dict_keys(['residual', 'server'])

    References:
        Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD",
        2019 (https://arxiv.org/abs/1901.09847).
    """
    exchange = _exchange(codec, gradients, axis, jax.lax.axis_size(axis), seed)
    gradient_by_name = {name: leaf.astype(jnp.float32) for name, leaf in named_leaves(gradients).items()}
    mean_by_name, new_states = exchange.average_on_device(gradient_by_name, states, step, (axis,))
    means = [mean_by_name[name] for name in gradient_by_name]
    return jax.tree.unflatten(jax.tree.structure(gradients), means), new_states


def _exchange(codec: Codec | str, gradients: PyTree, axis: str, replicas: int, seed: int) -> GradientExchange:
    """Return the `GradientExchange` of gradients that are not divided over the devices of a replica."""
    leaf_by_name = {name: GradientLeaf(leaf.shape, PartitionSpec()) for name, leaf in named_leaves(gradients).items()}
    parsed_codec: Codec = Codec.parse(codec) if isinstance(codec, str) else codec
    return GradientExchange(parsed_codec, AbstractMesh((replicas,), (axis,)), leaf_by_name, axis, seed)
