"""The reduce stage averages the replicas' gradients, before optax uses the mean; the mean is equal on all replicas.

The stage runs in a `jax.shard_map` that is manual over every axis: each device has its shard of its replica's
gradients, and a codec sends an encoding of that shard only over the slow axis. Leaves too small for a codec, and leaves
to which it does not apply (norms, biases), are sent uncompressed in one message. NaN or Inf in a gradient would corrupt
the residuals and scales of one replica, unnoticed by the others. All devices therefore agree by one number on whether
the gradients are finite. If not, the mean becomes NaN, so that the guard skips the step, and the states do not change.

Left out: clipping and norms, which apply to the mean afterwards, and the reduction inside a replica, which XLA does
before.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.replicas import wire
from jaxscale.replicas.codec import Codec
from jaxscale.sharding.partition import axes_of, dim_axes, shard_count
from jaxscale.typing import Array, Float, Int, Key

SMALL = 256
"""Number of elements on a device below which a gradient is sent uncompressed."""

RESIDUAL = "residual"
"""Name of the residual among the states of a codec."""

CodecStates = dict[str, dict[str, Any]]
"""Arrays by the name of the gradient and of the state.

Residuals have the shape (replicas, *shape), all other states (replicas, shards, *shape on a device).
"""


def squared_residuals(states: CodecStates) -> Float[Array, ""]:
    """Squared norm of the residuals in these states."""
    return sum((jnp.sum(jnp.square(state[RESIDUAL])) for state in states.values() if RESIDUAL in state), jnp.zeros(()))


def _indexed(states: CodecStates, index: int | None) -> CodecStates:
    """Index states along the dim of replicas, and along the dim of shards if they have one; `None` adds these dims."""
    return {
        name: {key: array[index] if key == RESIDUAL else array[index, index] for key, array in state.items()}
        for name, state in states.items()
    }


@dataclasses.dataclass(frozen=True)
class GradientLeaf:
    """One gradient of the stage.

    Args:
        shape: global shape.
        spec: partition of its dims over mesh axes, without the slow axis.
        layers: whether its first dim is stacked layers.
        stack: name of the whole stack if these layers are a part of it, so that random draws do not depend on how the
            stack is divided.
        first: number of its first layer in the stack.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    layers: bool = False
    stack: str | None = None
    first: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which the gradient is split, in the order of its dims."""
        return axes_of(self.spec)


class Reduced(NamedTuple):
    """Result of the stage.

    Args:
        mean: mean of each gradient over the replicas, by name, float32.
        states: states of the codec after the step.
        residual_norm: root of the mean over replicas of the residuals' squared norm.
    """

    mean: dict[str, Array]
    states: CodecStates
    residual_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientExchange:
    """A codec applied to the gradients of a model.

    Args:
        codec: codec for all gradients that are not too small.
        mesh: mesh of devices.
        leaves: descriptions of the gradients, by name.
        axis: name of the slow mesh axis.
        seed: seed of the codec's random draws.
        small: number of elements on a device below which a gradient is sent uncompressed.

    Raises:
        UserError: the axis has one device, or the codec accepts none of the gradients.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> kernel, bias = GradientLeaf((256, 512), PartitionSpec("fsdp")), GradientLeaf((512,), PartitionSpec())
        >>> leaves = {"kernel": kernel, "bias": bias}
        >>> stage = GradientExchange(Codec.parse("int8"), AbstractMesh((2, 4), ("replica", "fsdp")), leaves)
        >>> stage.coded, stage.plain, stage.wire_bytes, stage.exact_bytes
        (('kernel',), ('bias',), 35328, 133120)
    """

    codec: Codec
    mesh: Any
    leaves: Mapping[str, GradientLeaf]
    axis: str = "replica"
    seed: int = 0
    small: int = SMALL

    def __post_init__(self) -> None:
        if self.coded:
            _ = self._sent_bytes  # traced here, so that the trace of a step does not record the kernels of this trace
            return
        largest = max(self.leaves, key=lambda name: math.prod(self.local_shape(name)), default=None)
        if largest is None or self.replicas < 2:
            raise UserError(f"reduce {self.codec}: the mesh has no {self.axis} axis to reduce over; add {self.axis}:N")
        reason = self.codec.refusal(self.local_shape(largest), self.replicas, layers=self.leaves[largest].layers)
        elements = math.prod(self.local_shape(largest))
        reason = reason or f"its {elements} elements on a device are too few, or the codec would send no fewer bytes"
        raise UserError(
            f"reduce {self.codec}: it applies to none of this model's gradients. The largest is {largest}: {reason}; "
            "leave reduce out"
        )

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Number of devices on the slow axis."""
        return self.mesh.shape[self.axis]

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a gradient on one device."""
        leaf = self.leaves[name]
        dims = zip(leaf.shape, dim_axes(leaf.spec, len(leaf.shape)), strict=True)
        return tuple(size // shard_count(self.mesh, axes) for size, axes in dims)

    def shards(self, name: str) -> int:
        """Number of shards of a gradient."""
        return shard_count(self.mesh, self.leaves[name].axes)

    @functools.cached_property
    def coded(self) -> tuple[str, ...]:
        """Names of the gradients that the codec compresses."""
        return tuple(name for name in self.leaves if self._is_coded(name))

    @functools.cached_property
    def plain(self) -> tuple[str, ...]:
        """Names of the gradients that are sent uncompressed, in one message."""
        return tuple(name for name in self.leaves if name not in self.coded)

    def _is_coded(self, name: str) -> bool:
        """Whether the codec compresses a gradient: it applies to the gradient and sends fewer bytes."""
        shape, layers, n = self.local_shape(name), self.leaves[name].layers, self.replicas
        if n < 2 or len(shape) - layers < 2 or math.prod(shape) < self.small:
            return False
        if self.codec.refusal(shape, n, layers=layers) is not None:
            return False
        return self.codec.wire_bytes(shape, n, layers=layers) < wire.exact(shape, n)

    @property
    def _plain_bytes(self) -> int:
        """Bytes that one device sends for the uncompressed gradients."""
        elements = sum(math.prod(self.local_shape(name)) for name in self.plain)
        return wire.all_reduce(wire.FLOAT32 * elements, self.replicas)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axis in a step, with the last codec of the timetable."""
        return self._sent_bytes[-1] + self._plain_bytes

    @property
    def program_bytes(self) -> int:
        """Bytes of all messages in the compiled step, which contains every codec of the timetable."""
        return sum(self._sent_bytes) + self._plain_bytes

    def wire_bytes_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Bytes that one device sends in the step that follows `step` updates."""
        starts = jnp.array([first for first, _ in self.codec.timetable])
        step_bytes = jnp.array([coded_bytes + self._plain_bytes for coded_bytes in self._sent_bytes], jnp.float32)
        return step_bytes[jnp.sum(step >= starts) - 1]

    @functools.cached_property
    def _sent_bytes(self) -> tuple[int, ...]:
        """Bytes that one device sends for the compressed gradients, under each codec of the timetable."""
        return tuple(self._coded_bytes(codec) for _, codec in self.codec.timetable)

    def _coded_bytes(self, codec: Codec | None) -> int:
        """Bytes that one device sends for the compressed gradients under a codec; the codec `None` sends float32."""
        shapes = ((self.local_shape(name), self.leaves[name].layers) for name in self.coded)
        if codec is None:
            return sum(wire.exact(shape, self.replicas) for shape, _ in shapes)
        return sum(codec.wire_bytes(shape, self.replicas, layers=layers) for shape, layers in shapes)

    @property
    def exact_bytes(self) -> int:
        """Bytes that one device would send for all gradients in float32."""
        return sum(wire.exact(self.local_shape(name), self.replicas) for name in self.leaves)

    # -- states --------------------------------------------------------------------------------------------------------

    def _init(self, name: str, key: Key) -> dict[str, Array]:
        """The initial state of a gradient on one device: arrays by the name of the state."""
        leaf = self.leaves[name]
        return self.codec.init(self.local_shape(name), key, self.replicas, layers=leaf.layers, first=leaf.first)

    @functools.cached_property
    def _state_shapes(self) -> dict[str, dict[str, Any]]:
        """Shapes of the states of one device of one replica, by gradient and state name."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return {name: jax.eval_shape(functools.partial(self._init, name), key) for name in self.coded}

    def abstract(self, *, one: bool = False) -> Any:
        """Shapes, dtypes and shardings of all replicas' states; with `one`, those of the state that `merge` returns."""
        return {
            name: {
                key: self._abstract_state(name, key, state, one)
                for key, state in states.items()
                if not one or key in self.lasting(name)
            }
            for name, states in self._state_shapes.items()
        }

    def _abstract_state(self, name: str, key: str, state: Any, one: bool) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of one state of a gradient; `state` is its shape on one device."""
        leaf = self.leaves[name]
        shape, spec = (self.shards(name), *state.shape), (leaf.axes or None,)
        if key == RESIDUAL:
            shape, spec = leaf.shape, leaf.spec
        if not one:
            shape, spec = (self.replicas, *shape), (self.axis, *spec)
        return jax.ShapeDtypeStruct(shape, state.dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*spec)))

    def shardings(self, *, merged: bool = False) -> Any:
        """Shardings of the states of all replicas; with `merged`, those of the state that `merge` returns."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(one=merged))

    def _specs(self, *, merged: bool = False) -> Any:
        """`PartitionSpec`s of the states that `shardings` describes."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(merged=merged))

    def init(self) -> CodecStates:
        """Make the states before the first step; to be run under `jax.jit` with `out_shardings`."""
        return self._shard_mapped(lambda: self._with_leading_dims(self.start()), (), self._specs())()

    def lasting(self, name: str) -> tuple[str, ...]:
        """Names of a gradient's states whose shapes do not depend on the number of replicas."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        shape, layers = self.local_shape(name), self.leaves[name].layers
        grown_shapes = jax.eval_shape(lambda key: self.codec.init(shape, key, self.replicas + 1, layers=layers), key)
        return tuple(key for key, state in self._state_shapes[name].items() if state.shape == grown_shapes[key].shape)

    def merge(self, states: CodecStates) -> CodecStates:
        """Merge the states of all replicas into one with their mean residual, for any number of replicas to resume."""

        def run_on_device(states: CodecStates) -> CodecStates:
            merged: CodecStates = {}
            for name, state in self._without_leading_dims(states).items():
                gathered_state = jax.tree.map(lambda array: lax.all_gather(array, self.axis), state)
                shape, layers = self.local_shape(name), self.leaves[name].layers
                one_state = self.codec.resize(gathered_state, shape, 1, layers=layers)
                merged[name] = {k: one_state[k][0] if k == RESIDUAL else one_state[k] for k in self.lasting(name)}
            return merged

        return self._shard_mapped(run_on_device, (self._specs(),), self._specs(merged=True))(states)

    def spread(self, merged: CodecStates) -> CodecStates:
        """Copy a merged state to all replicas of this mesh; states that it lacks get their initial values."""

        def run_on_device(merged: CodecStates) -> CodecStates:
            initial = self.start()
            local_states = {
                name: {key: array if key == RESIDUAL else array[0] for key, array in state.items()}
                for name, state in merged.items()
            }
            return self._with_leading_dims({name: {**initial[name], **local_states.get(name, {})} for name in initial})

        specs = {name: {key: self._specs(merged=True)[name][key] for key in state} for name, state in merged.items()}
        return self._shard_mapped(run_on_device, (specs,), self._specs())(merged)

    def _with_leading_dims(self, states: CodecStates) -> CodecStates:
        """States of one device with leading dims of size 1 for replicas and shards."""
        return _indexed(states, None)

    def _without_leading_dims(self, states: CodecStates) -> CodecStates:
        """The inverse of `_with_leading_dims`."""
        return _indexed(states, 0)

    # -- the stage -----------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""]) -> Reduced:
        """Average gradients over the replicas.

        Args:
            gradients: gradients by name, float32 (replicas, *shape).
            states: states of the codec.
            step: number of updates made before this one.
        """

        def run_on_device(gradients: dict[str, Array], states: CodecStates, step: Array) -> Reduced:
            shards = {name: gradient[0] for name, gradient in gradients.items()}
            mean, new_states = self.inside(shards, self._without_leading_dims(states), step, self.mesh.axis_names)
            return Reduced(mean, self._with_leading_dims(new_states), self._residual_norm(new_states))

        replicated = PartitionSpec()
        gradient_specs = {name: PartitionSpec(self.axis, *leaf.spec) for name, leaf in self.leaves.items()}
        mean_specs = {name: leaf.spec for name, leaf in self.leaves.items()}
        out_specs: Any = Reduced(*(mean_specs, self._specs(), replicated))  # pyright: ignore[reportArgumentType]
        run = self._shard_mapped(run_on_device, (gradient_specs, self._specs(), replicated), out_specs)
        return run({name: gradients[name] for name in self.leaves}, states, step)

    def inside(
        self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""], agreeing_axes: Sequence[str]
    ) -> tuple[dict[str, Array], CodecStates]:
        """Average gradients over the replicas inside a region that is manual over the mesh axes.

        Args:
            gradients: this device's shards of its replica's gradients, by name, float32.
            states: states of this device.
            step: number of updates made before this one.
            agreeing_axes: names of the axes whose devices agree on whether the gradients are finite; all of these
                devices must call this function.

        Returns:
            The mean of each gradient, by name, and the new states of this device.
        """
        squared_norm = sum((jnp.sum(jnp.square(gradient)) for gradient in gradients.values()), jnp.zeros(()))
        is_finite = jnp.isfinite(lax.psum(squared_norm, agreeing_axes))
        means, new_states = self._exact_means(gradients), {}
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        for name in self.coded:
            leaf_mean, leaf_state = self.codec.reduce(
                gradients[name],
                states[name],
                self.axis,
                self._shard_key(key, name),
                step,
                layers=self.leaves[name].layers,
                first=self.leaves[name].first,
            )
            means[name], new_states[name] = jnp.where(is_finite, leaf_mean, jnp.nan), leaf_state
        new_states = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new_states, states)
        return {name: means[name] for name in self.leaves}, new_states

    def start(self) -> CodecStates:
        """The states of one device before the first step, in a region that is manual over the axes."""
        key = jax.random.key(self.seed)
        return {name: self._init(name, self._shard_key(key, name)) for name in self.coded}

    def _exact_means(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Send the `plain` gradients in one message, and return their means; NaN in one leaf does not reach others."""
        if not self.plain:
            return {}
        flat_gradients = jnp.concatenate([gradients[name].reshape(-1) for name in self.plain])
        flat_gradients = lax.psum(flat_gradients, self.axis) / self.replicas
        means, offset = {}, 0
        for name in self.plain:
            shape = self.local_shape(name)
            means[name] = flat_gradients[offset : offset + math.prod(shape)].reshape(shape)
            offset += math.prod(shape)
        return means

    def _residual_norm(self, states: CodecStates) -> Array:
        """Add up the squares of the residuals over all devices, and return the root of their mean over the replicas."""
        squares = jnp.zeros(())
        for name, state in states.items():
            shard_copies = self.mesh.size // (self.replicas * self.shards(name))
            squares += squared_residuals({name: state}) / shard_copies
        return jnp.sqrt(lax.psum(squares, self.mesh.axis_names) / self.replicas)

    def _shard_key(self, key: Key, name: str) -> Key:
        """Random key of a gradient's shard, equal on all replicas and on all devices that have the same shard."""
        leaf = self.leaves[name]
        key = jax.random.fold_in(key, zlib.crc32((leaf.stack or name).encode()) & 0x7FFFFFFF)
        shard = jnp.int32(0)
        for axis in leaf.axes:
            shard = shard * self.mesh.shape[axis] + lax.axis_index(axis)
        return jax.random.fold_in(key, shard)

    def _shard_mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """A function mapped over the shards of all devices of the mesh."""
        # replicas are equal because all compute the same from the same inputs, which the types cannot express
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
