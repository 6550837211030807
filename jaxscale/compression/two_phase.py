"""Two-phase codecs: reduce-scatter and all-gather, each of coded chunks, with the sum between them in float32.

Every device owns a chunk of the leaf. All send it their codes of that chunk (all-to-all), it decodes and averages them,
codes the mean anew and sends it to all (all-gather): bytes do not grow with the number of devices. The second coding
has an error of its own, which its owner keeps as the *server's* residual (1-bit Adam: Tang et al., 2021,
arXiv:2102.02888), so that

    sum of residuals + n * (server's residuals) + n * mean = sum of what was owed.
"""

import abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.compat import all_gather_alike
from jaxscale.compression import wire
from jaxscale.compression.codec import Codec, State
from jaxscale.typing import Array, Key


@dataclasses.dataclass(frozen=True)
class TwoPhase(Codec):
    """A codec of chunks; it writes `encode`, `decode` and `multiple`."""

    @abc.abstractmethod
    def encode(self, chunks: Array, filled: Array, key: Key | None) -> Any:
        """The message of each chunk: arrays whose first dim is the chunks'.

        Args:
            chunks: float32 (chunks, elements); zeros behind what is filled.
            filled: how many elements of each chunk are the leaf's.
            key: this device's own, where `random`.
        """

    @abc.abstractmethod
    def decode(self, message: Any, elements: int) -> Array:
        """The chunks of a message: float32 (chunks, elements); anything behind what is filled."""

    @abc.abstractmethod
    def multiple(self, elements: int) -> int:
        """What the length of a chunk must be a multiple of, where one of so many elements would do."""

    def message(self, chunks: Array, filled: Array, key: Key | None) -> Any:
        """`encode`, done once: what is left over is measured against the very bytes that are sent.

        XLA would compute the message again inside whatever decodes it on this device.
        """
        return lax.optimization_barrier(self.encode(chunks, filled, key))

    def chunk(self, elements: int, n: int) -> int:
        """Length of each of n chunks that hold so many elements."""
        least = math.ceil(elements / n)
        multiple = self.multiple(least)
        return math.ceil(least / multiple) * multiple

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> State:
        if not self.feedback:
            return {}
        return super()._init(shape, key, n) | {"server": jnp.zeros(self.chunk(math.prod(shape), n), jnp.float32)}

    def _reduce(self, gradient: Array, state: State, axis: str, key: Key | None) -> tuple[Array, State]:
        n, elements = lax.axis_size(axis), gradient.size
        length = self.chunk(elements, n)
        place = lax.axis_index(axis)
        filled = np.clip(elements - length * np.arange(n), 0, length)
        first, second = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, place))

        owed = self.owed(gradient, state)
        chunks = _padded(owed.reshape(-1), n * length).reshape(n, length)
        message = self.message(chunks, jnp.asarray(filled), first)
        received = jax.tree.map(lambda part: lax.all_to_all(part, axis, 0, 0, tiled=True), message)
        mean = jnp.mean(self.decode(received, length), 0)
        if self.feedback:
            mean = mean + state["server"]
        mine = jnp.asarray(filled)[place]
        if n * length != elements:
            mean = jnp.where(jnp.arange(length) < mine, mean, 0.0)
        answer = self.message(mean[None], mine[None], second)
        told = jax.tree.map(lambda part: all_gather_alike(part, axis), answer)
        result = _unpadded(self.decode(told, length), gradient.shape)
        if not self.feedback:
            return result, {}
        server = mean - self.decode(answer, length)[0]
        if n * length != elements:
            server = jnp.where(jnp.arange(length) < mine, server, 0.0)
        return result, {"residual": owed - _unpadded(self.decode(message, length), gradient.shape), "server": server}

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        message = _message_bytes(self, self.chunk(math.prod(shape), n), n)
        return wire.all_to_all(message, n) + wire.all_gather(message // n, n)

    def _resize(self, states: State, shape: tuple[int, ...], n: int) -> State:
        """Each replica takes the mean of the residuals, and what the servers owe to all."""
        if not self.feedback:
            return {}
        owed = jnp.mean(states["residual"], 0) + _unpadded(states["server"], shape)
        server = jnp.zeros((n, self.chunk(math.prod(shape), n)), jnp.float32)
        return {"residual": jnp.broadcast_to(owed, (n, *owed.shape)), "server": server}


def _padded(flat: Array, length: int) -> Array:
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _unpadded(chunks: Array, shape: tuple[int, ...]) -> Array:
    return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)


@functools.lru_cache(maxsize=1024)
def _message_bytes(codec: TwoPhase, length: int, n: int) -> int:
    """Bytes of a message of n chunks."""
    key = jax.random.key(0) if codec.random else None
    chunks = jax.ShapeDtypeStruct((n, length), jnp.float32)
    return wire.message_bytes(jax.eval_shape(lambda x: codec.encode(x, jnp.full(n, length), key), chunks))
