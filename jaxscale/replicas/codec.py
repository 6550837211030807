"""A codec averages a gradient over a slow mesh axis with compressed messages.

A codec is applied to one leaf on one device: the local shard of a replica's gradient. A codec runs inside a region that
is manual over the axis (`jax.shard_map`), or under `jax.vmap(axis_name=axis)` on one device, and uses collectives over
no other axis. With error feedback, a codec keeps the error of its message in a residual and adds the residual to the
next gradient (Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847). Then, over n replicas,

    sum of residuals after + n * mean = sum of gradients + sum of residuals before.

Every codec works on one layer at a time; a leaf of stacked layers is mapped over its first dim. For codecs of matrices,
the last dim of a layer is the columns and all other dims together are the rows. A `OnePhase` or `TwoPhase` codec
defines only how a message is encoded and decoded. The modules in `codecs/` define the codecs. Left out here: the choice
of leaves, NaN and Inf, and metrics (`reduce.py`).
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
from jaxscale.errors import UserError
from jaxscale.replicas.named import NamedCodec
from jaxscale.trees import tree_bytes
from jaxscale.typing import Array, Float, Int, Key

CodecState = dict[str, Any]
"""A codec's state for a leaf on one device: arrays by name. The array `residual` is float32, of the leaf's shape."""


@dataclasses.dataclass(frozen=True)
class Codec(NamedCodec):
    """A method of averaging gradients over a slow axis.

    Example:
        >>> from jaxscale.replicas import wire
        >>> Codec.parse("int8").wire_bytes((1024, 1024), n=2), wire.exact((1024, 1024), n=2)
        (1064960, 4194304)
    """

    random: ClassVar[bool] = False
    """Whether `reduce` needs a random key."""

    # ---- the interface for callers

    @property
    def timetable(self) -> tuple[tuple[int, "Codec | None"], ...]:
        """The pair (first step, codec) of each phase, in order; with the codec `None`, the mean is exact.

        Phases differ in what the codec sends: the exact mean before `start`, then perhaps a warm-up.

        Example:
            >>> [(step, str(codec)) for step, codec in Codec.parse("topk:0.1,start=10,warmup=8").timetable]
            [(0, 'None'), (10, 'topk:0.25,block=512,warmup=0'), (18, 'topk:0.1,warmup=0')]
        """
        first_steps_and_codecs = [(self.start + step, codec) for step, codec in self._timetable()]
        return ((0, None), *first_steps_and_codecs) if self.start else tuple(first_steps_and_codecs)

    @property
    def timed(self) -> bool:
        """Whether the result of `reduce` depends on the argument `step`; if so, callers must pass `step`."""
        return len(self.timetable) > 1

    def refusal(self, shape: Sequence[int], n: int, *, layers: bool = False) -> str | None:
        """Return why this codec does not support a leaf, as text for a message; `None` if it supports the leaf.

        Args:
            shape: shape of the leaf on one device.
            n: number of devices on the axis.
            layers: whether the leaf has stacked layers along its first dim.
        """
        if n < 2:
            return f"got an axis of {n} replicas, expected 2 or more: a single replica has nothing to send"
        if layers and not shape:
            return "got a scalar, expected stacked layers"
        if math.prod(shape) == 0:
            return f"got a leaf of shape {tuple(shape)}, expected at least one element"
        return self._refusal(tuple(shape[layers:]), n)

    def init(
        self, shape: Sequence[int], key: Key | None, n: int, *, layers: bool = False, first: int = 0
    ) -> CodecState:
        """Return the initial state of one leaf on one device of one replica.

        Args:
            shape: shape of the leaf on one device.
            key: random key, equal on every replica.
            n: number of devices on the axis.
            layers: whether the leaf has stacked layers along its first dim.
            first: index of the leaf's first layer in its stack, if the leaf has only a part of the stack.

        Raises:
            UserError: the codec does not support the leaf or the axis.
        """
        if reason := self.refusal(shape, n, layers=layers):
            raise UserError(f"codec {self}: {reason}")
        if not layers:
            return self._init(tuple(shape), key, n)
        return jax.vmap(lambda layer_key: self._init(tuple(shape[1:]), layer_key, n), axis_size=shape[0])(
            _layer_keys(key, shape[0], first)
        )

    def reduce(
        self,
        gradient: Float[Array, "..."],
        state: CodecState,
        axis: str,
        key: Key | None = None,
        step: Int[Array, ""] | None = None,
        *,
        layers: bool = False,
        first: int = 0,
    ) -> tuple[Float[Array, "..."], CodecState]:
        """Average a leaf over an axis; the mean is equal on every replica.

        Args:
            gradient: gradient of this replica, of any float dtype.
            state: state from `init` or from the last step.
            axis: name of the axis: a manual axis of the region, or the `axis_name` of a `jax.vmap`.
            key: random key of the step and the leaf, equal on every replica; needed if `random`.
            step: number of updates made before this one, equal on every replica; needed if `timed`.
            layers: whether the leaf has stacked layers along its first dim.
            first: index of the leaf's first layer in its stack, if the leaf has only a part of the stack.

        Returns:
            The mean of the leaf, float32, and the codec's new state.
        """
        assert key is not None or not self.random, f"codec {self} rounds at random: pass a key to reduce"
        assert step is not None or not self.timed, f"codec {self} depends on the step: pass the step to reduce"
        float32_gradient = gradient.astype(jnp.float32)

        def reduce_by(codec: Codec | None, leaf_gradient: Array, leaf_state: CodecState) -> tuple[Array, CodecState]:
            """Average the leaf over the axis by the codec of one phase; return the mean and the leaf's new state."""
            if codec is None:
                return lax.pmean(leaf_gradient, axis), leaf_state

            def reduce_layer(
                layer_gradient: Array, layer_state: CodecState, layer_key: Key | None
            ) -> tuple[Array, CodecState]:
                """Return the mean of one layer and its new state."""
                return codec._reduce(layer_gradient, layer_state, axis, layer_key)

            if layers:
                mean, new_state = jax.vmap(reduce_layer)(
                    leaf_gradient, leaf_state, _layer_keys(key, len(leaf_gradient), first)
                )
            else:
                mean, new_state = reduce_layer(leaf_gradient, leaf_state, key)
            return mean, jax.tree.map(_vary_like, new_state, leaf_state)

        first_steps, codecs = zip(*self.timetable, strict=True)
        if step is None or not self.timed:
            return reduce_by(codecs[0], float32_gradient, state)
        phase_index = jnp.sum(step >= jnp.array(first_steps[1:]))
        branches = [functools.partial(reduce_by, codec) for codec in codecs]
        return lax.switch(phase_index, branches, float32_gradient, state)

    def wire_bytes(self, shape: Sequence[int], n: int, *, layers: bool = False) -> int:
        """Return the bytes that one device sends over the axis in a step of the last phase.

        For an exact mean in float32, the device would send `wire.exact` bytes.

        Args:
            shape: shape of the leaf on one device.
            n: number of devices on the axis.
            layers: whether the leaf has stacked layers along its first dim.
        """
        return shape[0] * self._wire_bytes(tuple(shape[1:]), n) if layers else self._wire_bytes(tuple(shape), n)

    def resize(self, states: CodecState, shape: Sequence[int], n: int, *, layers: bool = False) -> CodecState:
        """Convert the states of a leaf to another number of replicas; the mean of the residuals stays the same.

        Args:
            states: states of one leaf on one device; the first dim of each array is the old number of replicas.
            shape: shape of the leaf on one device.
            n: new number of replicas.
            layers: whether the leaf has stacked layers along its first dim.

        Returns:
            The states for the new number of replicas, which is the first dim of each array.
        """
        old_states = jax.tree.map(jnp.asarray, states)
        if not old_states:  # a codec without feedback has no state
            return old_states
        if not layers:
            return self._resize(old_states, tuple(shape), n)
        # the dim of layers comes after that of replicas
        return jax.vmap(lambda layer_states: self._resize(layer_states, tuple(shape[1:]), n), in_axes=1, out_axes=1)(
            old_states
        )

    # ---- the interface for subclasses, of one layer

    def _refusal(self, shape: tuple[int, ...], n: int) -> str | None:
        """Return why this codec does not support a layer of this shape; `None` if it supports the layer."""
        return None

    def _timetable(self) -> tuple[tuple[int, "Codec"], ...]:
        """Return (first step, codec) for each phase in which the codec compresses.

        Steps are counted from the first compressed step, and the codecs have `start` 0.
        """
        return ((0, dataclasses.replace(self, start=0)),)

    def _init(self, shape: tuple[int, ...], key: Key | None, n: int) -> CodecState:
        """Return the initial state of one layer."""
        return {"residual": jnp.zeros(shape, jnp.float32)} if self.feedback else {}

    @abc.abstractmethod
    def _reduce(self, gradient: Array, state: CodecState, axis: str, key: Key | None) -> tuple[Array, CodecState]:
        """Average one layer's gradient over the axis, and return the mean and the layer's new state.

        `reduce` has already selected the codec of the current phase, so `start` and warm-up are ignored here.
        """

    @abc.abstractmethod
    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        """Return the bytes that one device sends for one layer's gradient."""

    def _resize(self, states: CodecState, shape: tuple[int, ...], n: int) -> CodecState:
        """Convert the states of one layer; every new replica gets the mean of each state over the old replicas."""
        return {name: jnp.broadcast_to(jnp.mean(array, 0), (n, *array.shape[1:])) for name, array in states.items()}

    def add_residual(self, gradient: Array, state: CodecState) -> Array:
        """Return the gradient plus the residual of earlier messages, which is what the next message encodes."""
        return gradient + state["residual"] if self.feedback else gradient


def compute_once(message: Any) -> Any:
    """Return a message unchanged, after a barrier, so that XLA does not compute the message again to decode it here.

    The residual is then the error of exactly the bytes that are sent.
    """
    return lax.optimization_barrier(message)


@functools.lru_cache(maxsize=1024)
def message_bytes(codec: Any, *abstract_inputs: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of the message that a codec encodes from arrays of these shapes.

    Args:
        codec: codec with a method `encode`.
        abstract_inputs: shapes and dtypes of the arguments of `encode`, without the random key.
    """
    key = jax.random.key(0) if codec.random else None
    return tree_bytes(jax.eval_shape(lambda *arrays: codec.encode(*arrays, key), *abstract_inputs))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (number of rows, number of columns) of a layer as a matrix; all dims but the last form the rows.

    Example:
        >>> matrix_shape((3, 3, 64, 128)), matrix_shape((768,))
        ((576, 128), (1, 768))
    """
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


def _layer_keys(key: Key | None, layer_count: int, first_layer: int) -> Key | None:
    """Return the random keys of `layer_count` consecutive layers, each derived from the layer's index in its stack."""
    return None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, first_layer + jnp.arange(layer_count))


def _vary_like(array: Array, reference: Array) -> Array:
    """Return `array` marked as varying over all manual axes over which `reference` varies."""
    missing_axes = tuple(sorted(varying_axes(reference) - varying_axes(array)))
    return lax.pcast(array, missing_axes, to="varying") if missing_axes else array
