"""Two-phase codecs: a reduce-scatter and an all-gather of encoded chunks, with the sum between them in float32.

Every device owns a chunk of the leaf. All devices send the owner their codes of that chunk (all-to-all). The owner
decodes and averages them, encodes the mean and sends it to all (all-gather). Bytes do not grow with the number of
devices. The owner keeps the error of this second encoding as the *server's* residual (1-bit Adam: Tang et al., 2021,
arXiv:2102.02888), so that

    sum of residuals + n * (server's residuals) + n * mean = sum of gradients + both residual terms before.
"""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.compat import all_gather_alike
from jaxscale.replicas import wire
from jaxscale.replicas.codec import Codec, CodecState, computed_once, message_bytes
from jaxscale.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class TwoPhase(Codec):
    """A codec of chunks; subclasses define `encode`, `decode` and `multiple`."""

    @abc.abstractmethod
    def encode(self, chunks: Array, filled: Array, key: Key | None) -> Any:
        """The messages of some chunks: a tree of arrays whose first dim is that of the chunks.

        Args:
            chunks: float32 (chunks, elements); a chunk has zeros after its filled elements, which are the leaf's.
            filled: number of filled elements of each chunk.
            key: random key of this device, if the codec is `random`.
        """

    @abc.abstractmethod
    def decode(self, message: Any, elements: int) -> Array:
        """The chunks that messages encode: float32 (chunks, elements), arbitrary after the filled elements."""

    @abc.abstractmethod
    def multiple(self, elements: int) -> int:
        """The number that must divide the length of a chunk, if the chunk has at least this many elements."""

    def chunk(self, elements: int, n: int) -> int:
        """Length of each of the n chunks of a leaf with this many elements."""
        min_length = math.ceil(elements / n)
        multiple = self.multiple(min_length)
        return math.ceil(min_length / multiple) * multiple

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> CodecState:
        if not self.feedback:
            return {}
        return super()._init(shape, key, n) | {"server": jnp.zeros(self.chunk(math.prod(shape), n), jnp.float32)}

    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        n, elements = lax.axis_size(axis), gradient.size
        length = self.chunk(elements, n)
        device = lax.axis_index(axis)
        filled = np.clip(elements - length * np.arange(n), 0, length)
        chunk_key, mean_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, device))

        owed = self.owed(gradient, state)
        chunks = _padded(owed.reshape(-1), n * length).reshape(n, length)
        message = computed_once(self.encode(chunks, jnp.asarray(filled), chunk_key))
        messages = jax.tree.map(lambda array: lax.all_to_all(array, axis, 0, 0, tiled=True), message)
        chunk_mean = jnp.mean(self.decode(messages, length), 0)
        if self.feedback:
            chunk_mean = chunk_mean + state["server"]
        device_filled = jnp.asarray(filled)[device]
        if n * length != elements:
            chunk_mean = jnp.where(jnp.arange(length) < device_filled, chunk_mean, 0.0)
        mean_message = computed_once(self.encode(chunk_mean[None], device_filled[None], mean_key))
        mean_messages = jax.tree.map(lambda array: all_gather_alike(array, axis), mean_message)
        leaf_mean = _unpadded(self.decode(mean_messages, length), gradient.shape)
        if not self.feedback:
            return leaf_mean, {}
        server = chunk_mean - self.decode(mean_message, length)[0]
        if n * length != elements:
            server = jnp.where(jnp.arange(length) < device_filled, server, 0.0)
        return leaf_mean, {"residual": owed - _unpadded(self.decode(message, length), gradient.shape), "server": server}

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        chunks = jax.ShapeDtypeStruct((n, self.chunk(math.prod(shape), n)), jnp.float32)
        message = message_bytes(self, chunks, jax.ShapeDtypeStruct((n,), jnp.int32))
        return wire.all_to_all(message, n) + wire.all_gather(message // n, n)

    def _resize(self, states: CodecState, shape: tuple[int, ...], n: int) -> CodecState:
        """Each new replica gets the mean of the residuals plus the server's residuals of all chunks."""
        if not self.feedback:
            return {}
        owed = jnp.mean(states["residual"], 0) + _unpadded(states["server"], shape)
        server = jnp.zeros((n, self.chunk(math.prod(shape), n)), jnp.float32)
        return {"residual": jnp.broadcast_to(owed, (n, *owed.shape)), "server": server}


def _padded(flat: Array, length: int) -> Array:
    """An array with zeros appended up to a length."""
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _unpadded(chunks: Array, shape: tuple[int, ...]) -> Array:
    """The leaf of a shape whose elements lie in chunks."""
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)
