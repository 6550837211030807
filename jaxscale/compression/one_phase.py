"""One-phase codecs: every device tells all others its message, and each adds up what they stand for.

One all-gather; the bytes grow with the number of devices, which suits messages that do not add up in their coded form
and are far smaller than the leaf, such as the largest elements and where they lie.
"""

import abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.compat import all_gather_alike
from jaxscale.compression import wire
from jaxscale.compression.codec import Codec, State
from jaxscale.typing import Array, Float, Key


@dataclasses.dataclass(frozen=True)
class OnePhase(Codec):
    """A codec of whole leaves; it writes `encode` and `decode`."""

    @abc.abstractmethod
    def encode(self, flat: Float[Array, "elements"], key: Key | None) -> Any:
        """The message of a leaf: arrays.

        Args:
            flat: float32, the leaf of one layer.
            key: this device's own, where `random`.
        """

    @abc.abstractmethod
    def decode(self, message: Any, elements: int) -> Float[Array, "elements"]:
        """What a message stands for, float32; the same bits on every device."""

    def message(self, flat: Float[Array, "elements"], key: Key | None) -> Any:
        """`encode`, done once: what is left over is measured against the very bytes that are sent.

        XLA would compute the message again inside whatever decodes it on this device.
        """
        return lax.optimization_barrier(self.encode(flat, key))

    def _reduce(self, gradient: Array, state: State, axis: str, key: Key | None) -> tuple[Array, State]:
        own = None if key is None else jax.random.fold_in(key, lax.axis_index(axis))
        owed = self.owed(gradient, state)
        message = self.message(owed.reshape(-1), own)
        mean = self.mean(message, gradient.size, axis).reshape(gradient.shape)
        if not self.feedback:
            return mean, {}
        return mean, {"residual": owed - self.decode(message, gradient.size).reshape(gradient.shape)}

    def mean(self, message: Any, elements: int, axis: str) -> Float[Array, "elements"]:
        """The mean of what all devices' messages stand for.

        They are added one after another: scattered all at once, a GPU would add them in an order of its own, and
        replicas would drift apart.
        """
        messages = jax.tree.map(lambda part: all_gather_alike(part[None], axis), message)
        first, rest = (jax.tree.map(lambda part, cut=cut: part[cut], messages) for cut in (0, slice(1, None)))

        def add(total: Array, message: Any) -> tuple[Array, None]:
            return total + self.decode(message, elements), None

        total, _ = lax.scan(add, self.decode(first, elements), rest)
        return total / lax.axis_size(axis)

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        return wire.all_gather(_message_bytes(self, math.prod(shape)), n)


@functools.lru_cache(maxsize=1024)
def _message_bytes(codec: OnePhase, elements: int) -> int:
    """Bytes of a message."""
    key = jax.random.key(0) if codec.random else None
    flat = jax.ShapeDtypeStruct((elements,), jnp.float32)
    return wire.message_bytes(jax.eval_shape(lambda x: codec.encode(x, key), flat))
