"""Codec: the mean of a gradient over an axis whose links are slow, from few bytes.

A codec sees one leaf on one device: the local shard of this replica's own gradient. It runs inside a region that is
manual over the axis (`jax.shard_map`), or under `jax.vmap(axis_name=axis)` on one device, and uses collectives over
that axis alone. What a message leaves out goes, with error feedback, into a residual that is added to the next
gradient (Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847), so that

    sum of residuals after + n * mean = sum of gradients + sum of residuals before.

Every rule is per layer: a leaf of stacked layers is mapped over its first dim, and a matrix is (everything else, last
axis). `OnePhase` and `TwoPhase` codecs write `encode` and `decode` only; each file of `codecs/` defines one and is
found by itself. Left out here: which leaves a codec is for, NaN and Inf, metrics (`reduce.py`).
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.compat import varying_axes
from jaxscale.compression.named import NamedCodec
from jaxscale.errors import UserError
from jaxscale.typing import Array, Float, Int, Key

State = dict[str, Any]
"""What a codec keeps of a leaf on one device and replica: arrays by name; `residual` is float32 in the leaf's shape."""


@dataclasses.dataclass(frozen=True)
class Codec(NamedCodec):
    """How gradients are averaged over a slow axis.

    Example:
        >>> from jaxscale.compression import wire
        >>> Codec.parse("int8").wire_bytes((1024, 1024), n=2), wire.exact((1024, 1024), n=2)
        (1064960, 4194304)
    """

    random: ClassVar[bool] = False
    """Whether `reduce` needs a key."""

    # ---- what a caller asks

    @property
    def timetable(self) -> tuple[tuple[int, "Codec | None"], ...]:
        """What runs from which step on, in order, from step 0: `None` is the exact mean.

        Example:
            >>> [(step, str(codec)) for step, codec in Codec.parse("topk:0.1,start=10,warmup=8").timetable]
            [(0, 'None'), (10, 'topk:0.25,block=512,warmup=0'), (18, 'topk:0.1,warmup=0')]
        """
        compressed = [(self.start + step, codec) for step, codec in self._timetable()]
        return ((0, None), *compressed) if self.start else tuple(compressed)

    @property
    def timed(self) -> bool:
        """Whether `reduce` does another thing at some steps than at others, and needs the step's number."""
        return len(self.timetable) > 1

    def refusal(self, shape: Sequence[int], n: int, *, layers: bool = False) -> str | None:
        """Why this codec can't take a leaf, as a message says it; `None` where it can.

        Args:
            shape: of the leaf, as one device has it.
            n: devices on the axis.
            layers: the first dim is stacked layers.
        """
        if n < 2:
            return f"got an axis of {n}, expected 2 or more replicas: there is nothing to send"
        if layers and not shape:
            return "got a scalar, expected stacked layers"
        if math.prod(shape) == 0:
            return f"got a leaf of shape {tuple(shape)}, expected elements"
        return self._refusal(tuple(shape[layers:]), n)

    def init(self, shape: Sequence[int], key: Key | None, n: int, *, layers: bool = False, first: int = 0) -> State:
        """The state of one leaf on one device and replica, before the first step.

        Args:
            shape: of the leaf, as one device has it.
            key: the same on every replica.
            n: devices on the axis.
            layers: the first dim is stacked layers.
            first: number of the first of them, where the leaf is a part of a stack.

        Raises:
            UserError: a leaf or an axis that the codec can't take.
        """
        if why := self.refusal(shape, n, layers=layers):
            raise UserError(f"codec {self}: {why}")
        if not layers:
            return self._init(tuple(shape), key, n)
        return jax.vmap(lambda key: self._init(tuple(shape[1:]), key, n), axis_size=shape[0])(
            _keys(key, shape[0], first)
        )

    def reduce(
        self,
        gradient: Float[Array, "..."],
        state: State,
        axis: str,
        key: Key | None = None,
        step: Int[Array, ""] | None = None,
        *,
        layers: bool = False,
        first: int = 0,
    ) -> tuple[Float[Array, "..."], State]:
        """The mean of a leaf over an axis, the same on every replica, and the state after it.

        Args:
            gradient: this replica's own, any float dtype.
            state: what `init` or the last step left.
            axis: name of the axis; the region is manual over it, or a `jax.vmap` of that name.
            key: of step and leaf, the same on every replica; needed where `random`.
            step: updates made before this one, the same on every replica; needed where `timed`.
            layers: the first dim is stacked layers.
            first: number of the first of them, where the leaf is a part of a stack.

        Returns:
            The mean, float32, and the new state.
        """
        assert key is not None or not self.random, f"codec {self} rounds at random: give reduce a key"
        assert step is not None or not self.timed, f"codec {self} changes with time: give reduce the step"
        gradient = gradient.astype(jnp.float32)

        def run(codec: Codec | None, gradient: Array, state: State) -> tuple[Array, State]:
            if codec is None:
                return lax.pmean(gradient, axis), state

            def one_layer(gradient: Array, state: State, key: Key | None) -> tuple[Array, State]:
                return codec._reduce(gradient, state, axis, key)

            if layers:
                mean, after = jax.vmap(one_layer)(gradient, state, _keys(key, len(gradient), first))
            else:
                mean, after = one_layer(gradient, state, key)
            return mean, jax.tree.map(_typed_like, after, state)

        firsts, codecs = zip(*self.timetable, strict=True)
        if step is None or not self.timed:
            return run(codecs[0], gradient, state)
        number = jnp.sum(step >= jnp.array(firsts[1:]))
        return lax.switch(number, [functools.partial(run, codec) for codec in codecs], gradient, state)

    def wire_bytes(self, shape: Sequence[int], n: int, *, layers: bool = False) -> int:
        """Bytes that one device sends over the axis in a step, once nothing changes with time any more.

        The mean in float32 sends `wire.exact`.

        Args:
            shape: of the leaf, as one device has it.
            n: devices on the axis.
            layers: the first dim is stacked layers.
        """
        return shape[0] * self._wire_bytes(tuple(shape[1:]), n) if layers else self._wire_bytes(tuple(shape), n)

    def resize(self, states: State, shape: Sequence[int], n: int, *, layers: bool = False) -> State:
        """States of another number of replicas, with the mean of what the residuals still owe kept.

        Args:
            states: of one leaf on one device, with a leading dim for the replicas that were.
            shape: of the leaf, as one device has it.
            n: replicas that will be.
            layers: the first dim of the leaf is stacked layers.

        Returns:
            The same with a leading dim of n.
        """
        states = jax.tree.map(jnp.asarray, states)
        if not states:  # a codec without feedback keeps none
            return states
        if not layers:
            return self._resize(states, tuple(shape), n)
        return jax.vmap(lambda mine: self._resize(mine, tuple(shape[1:]), n), in_axes=1, out_axes=1)(states)

    # ---- what a kind of codec writes, of one layer

    def _refusal(self, shape: tuple[int, ...], n: int) -> str | None:
        return None

    def _timetable(self) -> tuple[tuple[int, "Codec"], ...]:
        """What compresses from which step on, counted from the first that is compressed; these have no `start`."""
        return ((0, dataclasses.replace(self, start=0)),)

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> State:
        return {"residual": jnp.zeros(shape, jnp.float32)} if self.feedback else {}

    @abc.abstractmethod
    def _reduce(self, gradient: Array, state: State, axis: str, key: Key | None) -> tuple[Array, State]:
        """The mean of one layer's gradient over the axis, and what is kept, without `start` or a warm-up."""

    @abc.abstractmethod
    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        """Bytes that one device sends of one layer's gradient."""

    def _resize(self, states: State, shape: tuple[int, ...], n: int) -> State:
        """What is alike on all replicas, and residuals: each replica takes the mean."""
        return {name: _repeated(jnp.mean(part, 0), n) for name, part in states.items()}

    def owed(self, gradient: Array, state: State) -> Array:
        """What a message should say: the gradient and what earlier messages left out."""
        return gradient + state["residual"] if self.feedback else gradient


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a leaf seen as a matrix: everything else, and the last axis.

    Example:
        >>> matrix((3, 3, 64, 128)), matrix((768,))
        ((576, 128), (1, 768))
    """
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


def _keys(key: Key | None, layers: int, first: int) -> Key | None:
    """A key for each layer, which depends on its number alone."""
    return None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(layers))


def _repeated(value: Array, n: int) -> Array:
    return jnp.broadcast_to(value, (n, *value.shape))


def _typed_like(value: Array, like: Array) -> Array:
    """A value marked as varying over the manual axes over which another does."""
    missing = tuple(sorted(varying_axes(like) - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value
