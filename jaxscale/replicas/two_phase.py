"""Two-phase codecs: a reduce-scatter and an all-gather of encoded chunks, with the mean between them in float32.

Every device owns a chunk of the leaf. All devices encode this chunk of their gradient and send the message to the owner
(all-to-all). The owner decodes and averages the messages, encodes the mean and sends it to all devices (all-gather).
The bytes that a device sends do not grow with the number of devices. All chunks have the same length, so the last
chunks may end in zeros; the elements before these zeros belong to the leaf and are called *filled*. The owner keeps the
error of the second encoding as the *server's* residual (1-bit Adam: Tang et al., 2021, arXiv:2102.02888). With r for
the residuals and s for the servers' residuals,

    sum of r after + n * (s after) + n * mean = sum of gradients + sum of r before + n * (s before).
"""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.compat import all_gather_invarying
from jaxscale.replicas import wire
from jaxscale.replicas.codec import Codec, CodecState, compute_once, message_bytes
from jaxscale.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class TwoPhase(Codec):
    """A codec that encodes chunks of a layer; subclasses define `encode`, `decode` and `divisor`."""

    @abc.abstractmethod
    def encode(self, chunks: Array, filled_counts: Array, key: Key | None) -> Any:
        """Encode each chunk as a message, and return the messages as a tree of arrays (chunks, ...).

        Args:
            chunks: float32 (chunks, elements), with zeros after the filled elements of each chunk.
            filled_counts: int32 (chunks,), number of filled elements of each chunk.
            key: random key of this device, if the codec is `random`.
        """

    @abc.abstractmethod
    def decode(self, message: Any, elements: int) -> Array:
        """Return the chunks that messages encode, float32 (chunks, elements).

        Args:
            message: messages from `encode`.
            elements: number of elements of a chunk. Decoded elements after the filled elements may have any value.
        """

    @abc.abstractmethod
    def divisor(self, elements: int) -> int:
        """Return a number by which the length of a chunk must be divisible.

        Args:
            elements: the least number of elements that a chunk must have.
        """

    def chunk_length(self, elements: int, n: int) -> int:
        """Return the number of elements of each of the n chunks of a layer with `elements` elements."""
        min_length = math.ceil(elements / n)
        divisor = self.divisor(min_length)
        return math.ceil(min_length / divisor) * divisor

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> CodecState:
        """Return the initial state of one layer of this shape, for n replicas."""
        if not self.feedback:
            return {}
        return super()._init(shape, key, n) | {"server": jnp.zeros(self.chunk_length(math.prod(shape), n), jnp.float32)}

    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        """Return the mean of one layer's gradient over the axis, and the layer's new state."""
        n, element_count = lax.axis_size(axis), gradient.size
        chunk_length, device_index = self.chunk_length(element_count, n), lax.axis_index(axis)
        filled_counts = np.clip(element_count - chunk_length * np.arange(n), 0, chunk_length)  # for each chunk
        chunk_key, mean_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, device_index))

        corrected_gradient = self.add_residual(gradient, state)
        chunks = _pad(corrected_gradient.reshape(-1), n * chunk_length).reshape(n, chunk_length)
        sent_messages = compute_once(self.encode(chunks, jnp.asarray(filled_counts), chunk_key))
        received_messages = jax.tree.map(lambda array: lax.all_to_all(array, axis, 0, 0, tiled=True), sent_messages)
        # from here on: the chunk that this device owns
        chunk_mean = jnp.mean(self.decode(received_messages, chunk_length), 0)
        if self.feedback:
            chunk_mean = chunk_mean + state["server"]
        filled_count = jnp.asarray(filled_counts)[device_index]
        if n * chunk_length != element_count:
            chunk_mean = jnp.where(jnp.arange(chunk_length) < filled_count, chunk_mean, 0.0)
        mean_message = compute_once(self.encode(chunk_mean[None], filled_count[None], mean_key))
        mean_messages = jax.tree.map(lambda array: all_gather_invarying(array, axis), mean_message)
        leaf_mean = _unpad(self.decode(mean_messages, chunk_length), gradient.shape)
        if not self.feedback:
            return leaf_mean, {}
        server_residual = chunk_mean - self.decode(mean_message, chunk_length)[0]
        if n * chunk_length != element_count:
            server_residual = jnp.where(jnp.arange(chunk_length) < filled_count, server_residual, 0.0)
        residual = corrected_gradient - _unpad(self.decode(sent_messages, chunk_length), gradient.shape)
        return leaf_mean, {"residual": residual, "server": server_residual}

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        """Return the bytes that one device sends for one layer of this shape, with n devices on the axis."""
        abstract_chunks = jax.ShapeDtypeStruct((n, self.chunk_length(math.prod(shape), n)), jnp.float32)
        total_bytes = message_bytes(
            self, abstract_chunks, jax.ShapeDtypeStruct((n,), jnp.int32)
        )  # of the messages of all chunks
        return wire.all_to_all(total_bytes, n) + wire.all_gather(total_bytes // n, n)

    def _resize(self, states: CodecState, shape: tuple[int, ...], n: int) -> CodecState:
        """Return the states of one layer for n replicas.

        Each residual is the mean of the old residuals plus the servers' residuals, which become zero.
        """
        if not self.feedback:
            return {}
        residual = jnp.mean(states["residual"], 0) + _unpad(states["server"], shape)
        server_residuals = jnp.zeros((n, self.chunk_length(math.prod(shape), n)), jnp.float32)
        return {"residual": jnp.broadcast_to(residual, (n, *residual.shape)), "server": server_residuals}


def _pad(flat: Array, length: int) -> Array:
    """Return a one-dimensional array with zeros appended up to a length."""
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _unpad(chunks: Array, shape: tuple[int, ...]) -> Array:
    """Return the leaf with this shape from the concatenation of its chunks."""
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)
