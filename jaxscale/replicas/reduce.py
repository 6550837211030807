"""The reduce stage averages the replicas' gradients before optax uses them; the mean is equal on all replicas.

The stage runs in a `jax.shard_map` that is manual over every axis: each device has its shard of its replica's
gradients, and a codec sends an encoding of only that shard over the slow axis. Leaves that are too small for a codec,
and leaves that it does not support (norms, biases), are sent uncompressed in one message. NaN or Inf in a gradient
would corrupt the residuals and scales of one replica, and other replicas would not notice. Therefore all devices add up
one number that shows whether the gradients are finite. If they are not, the mean becomes NaN, so that the guard skips
the step, and the states do not change.

Left out: clipping and norms, which use the mean later, and the earlier reduction inside a replica, which XLA makes.
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
"""State arrays by the name of the gradient, then by the name of the state, such as "residual".

Residuals have the shape (replicas, *shape of the gradient), all other states (replicas, shards, *shape on a device).
"""


def squared_residuals(states: CodecStates) -> Float[Array, ""]:
    """Squared norm of the residuals in these states."""
    return sum((jnp.sum(jnp.square(state[RESIDUAL])) for state in states.values() if RESIDUAL in state), jnp.zeros(()))


def _index(states: CodecStates, index: int | None) -> CodecStates:
    """Index states along the dim of replicas, and along the dim of shards if they have one; `None` adds these dims."""
    return {
        name: {key: array[index] if key == RESIDUAL else array[index, index] for key, array in arrays.items()}
        for name, arrays in states.items()
    }


@dataclasses.dataclass(frozen=True)
class GradientLeaf:
    """Description of one gradient.

    Args:
        shape: global shape.
        spec: partition of the gradient's dims over mesh axes, without the slow axis.
        layers: whether the first dim is stacked layers.
        stack: name of the whole stack of layers, if this gradient has only some of them. It seeds the random draws, so
            that these do not depend on how the stack is divided.
        first: number of the gradient's first layer in the stack.
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
    """Result of averaging the gradients.

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
        leaves: description of each gradient, by name.
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
            _ = self._sent_bytes  # traces the codec now, so that the later trace of a step records only its own kernels
            return
        largest_name = max(self.leaves, key=lambda name: math.prod(self.local_shape(name)), default=None)
        if largest_name is None or self.replicas < 2:
            raise UserError(f"reduce {self.codec}: the mesh has no {self.axis} axis: add {self.axis}:N to the mesh")
        shape, layers = self.local_shape(largest_name), self.leaves[largest_name].layers
        reason = self.codec.refusal(shape, self.replicas, layers=layers) or (
            f"its {math.prod(shape)} elements on a device are too few, or the codec would send no fewer bytes"
        )
        raise UserError(
            f"reduce {self.codec}: the codec supports none of this model's gradients, so leave reduce out. "
            f"The largest gradient is {largest_name}: {reason}"
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
        """Number of shards into which a gradient is split over the mesh axes other than the slow axis."""
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
        """Whether the codec compresses a gradient: it supports the gradient and sends fewer bytes than float32."""
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
        """Bytes that one device sends over the slow axis in a step of the codec's last phase."""
        return self._sent_bytes[-1] + self._plain_bytes

    @property
    def program_bytes(self) -> int:
        """Bytes that one device sends in all messages of the compiled step, which contains the codec of every phase."""
        return sum(self._sent_bytes) + self._plain_bytes

    def wire_bytes_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Bytes that one device sends in the step that follows `step` updates."""
        first_steps = jnp.array([first_step for first_step, _ in self.codec.timetable])
        step_bytes = jnp.array([coded_bytes + self._plain_bytes for coded_bytes in self._sent_bytes], jnp.float32)
        return step_bytes[jnp.sum(step >= first_steps) - 1]

    @functools.cached_property
    def _sent_bytes(self) -> tuple[int, ...]:
        """Bytes that one device sends for the compressed gradients, in each phase of the codec."""
        return tuple(self._coded_bytes(codec) for _, codec in self.codec.timetable)

    def _coded_bytes(self, codec: Codec | None) -> int:
        """Bytes that one device sends for the compressed gradients by a codec; the codec `None` sends float32."""
        shapes_and_layers = [(self.local_shape(name), self.leaves[name].layers) for name in self.coded]
        if codec is None:
            return sum(wire.exact(shape, self.replicas) for shape, _ in shapes_and_layers)
        return sum(codec.wire_bytes(shape, self.replicas, layers=layers) for shape, layers in shapes_and_layers)

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
        """Shapes and dtypes of the states of one device of one replica, by gradient name and state name."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return {name: jax.eval_shape(functools.partial(self._init, name), key) for name in self.coded}

    def abstract(self, *, merged: bool = False) -> Any:
        """Shapes, dtypes and shardings of all replicas' states; with `merged`, those of the state from `merge`."""
        return {
            name: {
                state_name: self._abstract_state(name, state_name, local_state, merged)
                for state_name, local_state in local_states.items()
                if not merged or state_name in self.lasting_states(name)
            }
            for name, local_states in self._state_shapes.items()
        }

    def _abstract_state(self, name: str, state_name: str, local_state: Any, merged: bool) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of one state of a gradient; `local_state` has its shape and dtype on one device."""
        leaf = self.leaves[name]
        shape, spec = (self.shards(name), *local_state.shape), (leaf.axes or None,)
        if state_name == RESIDUAL:
            shape, spec = leaf.shape, leaf.spec
        if not merged:
            shape, spec = (self.replicas, *shape), (self.axis, *spec)
        return jax.ShapeDtypeStruct(shape, local_state.dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*spec)))

    def shardings(self, *, merged: bool = False) -> Any:
        """Shardings of the states of all replicas; with `merged`, those of the state that `merge` returns."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(merged=merged))

    def _specs(self, *, merged: bool = False) -> Any:
        """`PartitionSpec`s of the states that `shardings` describes."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(merged=merged))

    def init(self) -> CodecStates:
        """Make the states before the first step. Call this under `jax.jit` with `out_shardings`."""
        return self._shard_mapped(lambda: self._with_leading_dims(self.start()), (), self._specs())()

    def lasting_states(self, name: str) -> tuple[str, ...]:
        """Names of a gradient's states whose shapes do not depend on the number of replicas."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        shape, layers = self.local_shape(name), self.leaves[name].layers
        other_states = jax.eval_shape(lambda key: self.codec.init(shape, key, self.replicas + 1, layers=layers), key)
        return tuple(k for k, state in self._state_shapes[name].items() if state.shape == other_states[k].shape)

    def merge(self, states: CodecStates) -> CodecStates:
        """Merge the states of all replicas into one state with their mean residual.

        Any number of replicas can resume from the merged state.
        """

        def run_on_device(states: CodecStates) -> CodecStates:
            """Return the merged states of this device, from its states."""
            merged: CodecStates = {}
            for name, local_states in self._without_leading_dims(states).items():
                gathered_states = jax.tree.map(lambda array: lax.all_gather(array, self.axis), local_states)
                shape, layers = self.local_shape(name), self.leaves[name].layers
                new_state = self.codec.resize(gathered_states, shape, 1, layers=layers)
                # a residual has no dim of shards, so its leading dim of one replica is removed
                names = self.lasting_states(name)
                merged[name] = {k: new_state[k][0] if k == RESIDUAL else new_state[k] for k in names}
            return merged

        return self._shard_mapped(run_on_device, (self._specs(),), self._specs(merged=True))(states)

    def spread(self, merged: CodecStates) -> CodecStates:
        """Copy a merged state to all replicas of this mesh, and set states that it lacks to their initial values."""

        def run_on_device(merged: CodecStates) -> CodecStates:
            """Return the states of this device, from its part of the merged states."""
            states = self.start()
            merged_states = {
                name: {key: array if key == RESIDUAL else array[0] for key, array in arrays.items()}
                for name, arrays in merged.items()
            }
            return self._with_leading_dims({name: states[name] | merged_states.get(name, {}) for name in states})

        specs = {name: {key: self._specs(merged=True)[name][key] for key in arrays} for name, arrays in merged.items()}
        return self._shard_mapped(run_on_device, (specs,), self._specs())(merged)

    def _with_leading_dims(self, states: CodecStates) -> CodecStates:
        """States of one device with leading dims of size 1 for replicas and shards."""
        return _index(states, None)

    def _without_leading_dims(self, states: CodecStates) -> CodecStates:
        """The inverse of `_with_leading_dims`."""
        return _index(states, 0)

    # -- the stage -----------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""]) -> Reduced:
        """Average gradients over the replicas, and update the codec's states.

        Args:
            gradients: gradients by name, float32 (replicas, *shape of the gradient).
            states: states of the codec.
            step: number of updates made before this one.
        """

        def run_on_device(gradients: dict[str, Array], states: CodecStates, step: Array) -> Reduced:
            """Average this device's shards of the gradients."""
            shards, old_states = {name: g[0] for name, g in gradients.items()}, self._without_leading_dims(states)
            means, new_states = self.average_on_device(shards, old_states, step, self.mesh.axis_names)
            return Reduced(means, self._with_leading_dims(new_states), self._residual_norm(new_states))

        replicated = PartitionSpec()
        gradient_specs = {name: PartitionSpec(self.axis, *leaf.spec) for name, leaf in self.leaves.items()}
        mean_specs = {name: leaf.spec for name, leaf in self.leaves.items()}
        out_specs: Any = Reduced(*(mean_specs, self._specs(), replicated))  # pyright: ignore[reportArgumentType]
        run = self._shard_mapped(run_on_device, (gradient_specs, self._specs(), replicated), out_specs)
        return run({name: gradients[name] for name in self.leaves}, states, step)

    def average_on_device(
        self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""], agreeing_axes: Sequence[str]
    ) -> tuple[dict[str, Array], CodecStates]:
        """Average gradients over the replicas, called inside a region that is manual over the mesh axes.

        Args:
            gradients: this device's shards of its replica's gradients, by name, float32.
            states: states of this device, without dims of replicas and shards.
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
        """Make the states of one device before the first step, inside a region that is manual over the mesh axes."""
        key = jax.random.key(self.seed)
        return {name: self._init(name, self._shard_key(key, name)) for name in self.coded}

    def _exact_means(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Send the `plain` gradients in one message, and return their means; NaN in one leaf does not reach others."""
        if not self.plain:
            return {}
        flat_gradients = jnp.concatenate([gradients[name].reshape(-1) for name in self.plain])
        flat_means = lax.psum(flat_gradients, self.axis) / self.replicas
        means, offset = {}, 0
        for name in self.plain:
            shape = self.local_shape(name)
            means[name] = flat_means[offset : offset + math.prod(shape)].reshape(shape)
            offset += math.prod(shape)
        return means

    def _residual_norm(self, states: CodecStates) -> Array:
        """Add up the squares of the residuals over all devices, and return the root of their mean over the replicas."""
        squared_norm = jnp.zeros(())
        for name in states:
            shard_copies = self.mesh.size // (self.replicas * self.shards(name))
            squared_norm += squared_residuals({name: states[name]}) / shard_copies
        return jnp.sqrt(lax.psum(squared_norm, self.mesh.axis_names) / self.replicas)

    def _shard_key(self, key: Key, name: str) -> Key:
        """Random key of a gradient's shard, equal on all replicas and on all devices that have the same shard."""
        leaf = self.leaves[name]
        key = jax.random.fold_in(key, zlib.crc32((leaf.stack or name).encode()) & 0x7FFFFFFF)
        shard_index = jnp.int32(0)
        for axis in leaf.axes:
            shard_index = shard_index * self.mesh.shape[axis] + lax.axis_index(axis)
        return jax.random.fold_in(key, shard_index)

    def _shard_mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Map a function over the shards of all devices of the mesh, with `jax.shard_map`."""
        # replicas are equal, because each computes the same from the same inputs; the types cannot express this
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
