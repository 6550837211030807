"""One-phase codecs: every device sends its message to all others, and each device adds up the decoded messages.

The exchange takes one all-gather, and the bytes that a device sends grow with the number of devices. One phase is meant
for messages that cannot be added in their encoded form and are much smaller than the leaf, such as the largest elements
and their positions.
"""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.compat import all_gather_invarying
from jaxscale.replicas import wire
from jaxscale.replicas.codec import Codec, CodecState, compute_once, message_bytes
from jaxscale.typing import Array, Float, Key


@dataclasses.dataclass(frozen=True)
class OnePhase(Codec):
    """A codec that encodes a whole layer as one message; subclasses define `encode` and `decode`."""

    @abc.abstractmethod
    def encode(self, flat: Float[Array, "elements"], key: Key | None) -> Any:
        """Encode one layer of a leaf as a message, a tree of arrays.

        Args:
            flat: float32 elements of the layer.
            key: random key of this device, if the codec is `random`.
        """

    @abc.abstractmethod
    def decode(self, message: Any, elements: int) -> Float[Array, "elements"]:
        """Return the elements that a message encodes, float32, bit for bit the same on every device.

        Args:
            message: a message from `encode`.
            elements: number of elements of the layer.
        """

    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        """Return the mean of one layer's gradient over the axis, and the layer's new state."""
        device_key = None if key is None else jax.random.fold_in(key, lax.axis_index(axis))
        corrected_gradient = self.add_residual(gradient, state)
        message = compute_once(self.encode(corrected_gradient.reshape(-1), device_key))
        mean = self.exchange(message, gradient.size, axis).reshape(gradient.shape)
        if not self.feedback:
            return mean, {}
        return mean, {"residual": corrected_gradient - self.decode(message, gradient.size).reshape(gradient.shape)}

    def exchange(self, message: Any, elements: int, axis: str) -> Float[Array, "elements"]:
        """Send a message to all devices, and return the mean of all devices' decoded messages.

        The decoded messages are added one after another. In a single scatter, the order of additions would differ
        between GPUs, and replicas would diverge.

        Args:
            message: this device's message, from `encode`.
            elements: number of elements of the layer.
            axis: name of the axis of the devices.
        """
        messages = jax.tree.map(lambda array: all_gather_invarying(array[None], axis), message)
        first_message = jax.tree.map(lambda array: array[0], messages)
        other_messages = jax.tree.map(lambda array: array[1:], messages)

        def add(partial_sum: Array, other_message: Any) -> tuple[Array, None]:
            """Add one device's decoded message to the total, and return (total, None), as `lax.scan` requires."""
            return partial_sum + self.decode(other_message, elements), None

        message_sum, _ = lax.scan(add, self.decode(first_message, elements), other_messages)
        return message_sum / lax.axis_size(axis)

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        """Return the bytes that one device sends for one layer of this shape, with n devices on the axis."""
        return wire.all_gather(message_bytes(self, jax.ShapeDtypeStruct((math.prod(shape),), jnp.float32)), n)
