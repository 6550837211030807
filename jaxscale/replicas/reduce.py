"""The gradient exchange averages the replicas' gradients before optax uses them; the mean is equal on all replicas.

The exchange runs in a `jax.shard_map` that is manual over every axis: each device has its shard of its replica's
gradients, and a codec sends an encoding of that shard alone over the slow axis. Leaves that are too small for the codec
and leaves that it does not support (norms, biases) are sent uncompressed in one message. NaN or Inf in a gradient would
corrupt the residuals and scales of one replica, and other replicas would not notice. Therefore all devices add up one
number, which is not finite if any gradient is not finite. In that case the mean becomes NaN, so that the guard skips
the step, and the states do not change.

Left out: clipping and norms, which are applied to the mean later, and the earlier reduction inside a replica, which XLA
inserts.
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
"""Name of the residual in the state of a codec."""

CodecStates = dict[str, dict[str, Any]]
"""State arrays, by the name of the gradient and then by the name of the state, such as "residual".

A residual is (replicas, *shape of the gradient), and any other state is (replicas, shards, *shape on one device).
"""


def squared_residual_norm(states: CodecStates) -> Float[Array, ""]:
    """Return the squared norm of the residuals in the states."""
    return sum((jnp.sum(jnp.square(state[RESIDUAL])) for state in states.values() if RESIDUAL in state), jnp.zeros(()))


def _index_leading_dims(states: CodecStates, index: int | None) -> CodecStates:
    """Return the states indexed along their leading dims (replicas, shards); the index `None` adds these dims."""
    return {
        name: {
            state_name: array[index] if state_name == RESIDUAL else array[index, index]
            for state_name, array in array_by_name.items()
        }
        for name, array_by_name in states.items()
    }


@dataclasses.dataclass(frozen=True)
class GradientLeaf:
    """Description of one gradient.

    Args:
        shape: global shape.
        spec: partition of the gradient's dims over mesh axes, without the slow axis.
        layers: whether the gradient has stacked layers along its first dim.
        stack: name of the whole stack of layers, if this gradient has only some of the layers. The name seeds the
            random draws, so that the draws do not depend on how the stack is divided.
        first: index of the gradient's first layer in the stack.
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


class ReducedGradients(NamedTuple):
    """The averaged gradients and the new states.

    Args:
        mean: mean of each gradient over the replicas, by name, float32.
        states: states of the codec after the step.
        residual_norm: norm of the residuals: the root mean square of the replicas' norms.
    """

    mean: dict[str, Array]
    states: CodecStates
    residual_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientExchange:
    """A codec applied to the gradients of a model.

    Args:
        codec: codec for all gradients that are not too small.
        mesh: mesh of the devices.
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
        >>> exchange = GradientExchange(Codec.parse("int8"), AbstractMesh((2, 4), ("replica", "fsdp")), leaves)
        >>> exchange.coded_names, exchange.plain_names, exchange.wire_bytes, exchange.exact_bytes
        (('kernel',), ('bias',), 35328, 133120)
    """

    codec: Codec
    mesh: Any
    leaves: Mapping[str, GradientLeaf]
    axis: str = "replica"
    seed: int = 0
    small: int = SMALL

    def __post_init__(self) -> None:
        if self.coded_names:
            _ = self._phase_bytes  # traces the codec here, so that the trace of a step records only the step's kernels
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
            f"For the largest gradient, {largest_name}: {reason}"
        )

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Number of devices on the slow axis."""
        return self.mesh.shape[self.axis]

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a gradient on one device."""
        leaf = self.leaves[name]
        sizes_and_axes = zip(leaf.shape, dim_axes(leaf.spec, len(leaf.shape)), strict=True)
        return tuple(dim_size // shard_count(self.mesh, axes) for dim_size, axes in sizes_and_axes)

    def shard_count(self, name: str) -> int:
        """Return the number of shards into which a gradient is split over the mesh axes other than the slow axis."""
        return shard_count(self.mesh, self.leaves[name].axes)

    @functools.cached_property
    def coded_names(self) -> tuple[str, ...]:
        """Names of the gradients that the codec compresses."""
        return tuple(name for name in self.leaves if self._is_coded(name))

    @functools.cached_property
    def plain_names(self) -> tuple[str, ...]:
        """Names of the gradients that are sent uncompressed, in one message."""
        return tuple(name for name in self.leaves if name not in self.coded_names)

    def _is_coded(self, name: str) -> bool:
        """Return whether the codec supports a gradient and sends fewer bytes for it than float32 has."""
        shape, layers, n = self.local_shape(name), self.leaves[name].layers, self.replicas
        if n < 2 or len(shape) - layers < 2 or math.prod(shape) < self.small:
            return False
        if self.codec.refusal(shape, n, layers=layers) is not None:
            return False
        return self.codec.wire_bytes(shape, n, layers=layers) < wire.exact(shape, n)

    @property
    def _plain_bytes(self) -> int:
        """Bytes that one device sends for the uncompressed gradients."""
        element_count = sum(math.prod(self.local_shape(name)) for name in self.plain_names)
        return wire.all_reduce(wire.FLOAT32 * element_count, self.replicas)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axis in a step of the codec's last phase."""
        return self._phase_bytes[-1] + self._plain_bytes

    @property
    def program_bytes(self) -> int:
        """Bytes that one device sends in all messages of the compiled step, which contains the codec of every phase."""
        return sum(self._phase_bytes) + self._plain_bytes

    def wire_bytes_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the bytes that one device sends in the step that follows `step` updates."""
        first_steps = jnp.array([first_step for first_step, _ in self.codec.timetable])
        step_bytes = jnp.array([coded_bytes + self._plain_bytes for coded_bytes in self._phase_bytes], jnp.float32)
        return step_bytes[jnp.sum(step >= first_steps) - 1]

    @functools.cached_property
    def _phase_bytes(self) -> tuple[int, ...]:
        """For each phase of the codec, the bytes that one device sends for the compressed gradients."""
        return tuple(self._coded_bytes(codec) for _, codec in self.codec.timetable)

    def _coded_bytes(self, codec: Codec | None) -> int:
        """Return the bytes that one device sends for the compressed gradients in a phase with a given codec.

        In a phase with the codec `None`, these gradients are sent as float32.
        """
        shapes_and_layers = [(self.local_shape(name), self.leaves[name].layers) for name in self.coded_names]
        if codec is None:
            return sum(wire.exact(shape, self.replicas) for shape, _ in shapes_and_layers)
        return sum(codec.wire_bytes(shape, self.replicas, layers=layers) for shape, layers in shapes_and_layers)

    @property
    def exact_bytes(self) -> int:
        """Bytes that one device would send for all gradients in float32."""
        return sum(wire.exact(self.local_shape(name), self.replicas) for name in self.leaves)

    # -- states --------------------------------------------------------------------------------------------------------

    def _init(self, name: str, key: Key) -> dict[str, Array]:
        """Return the initial state of a gradient on one device: arrays by the name of the state."""
        leaf = self.leaves[name]
        return self.codec.init(self.local_shape(name), key, self.replicas, layers=leaf.layers, first=leaf.first)

    @functools.cached_property
    def _abstract_local_states(self) -> dict[str, dict[str, Any]]:
        """Shapes and dtypes of the states on one device, by the name of the gradient and of the state."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return {name: jax.eval_shape(functools.partial(self._init, name), key) for name in self.coded_names}

    def abstract_states(self, *, is_merged: bool = False) -> Any:
        """Return shapes, dtypes and shardings of all replicas' states; if `is_merged`, those of the merged states."""
        return {
            name: {
                state_name: self._abstract_state(name, state_name, local_state, is_merged)
                for state_name, local_state in local_states.items()
                if not is_merged or state_name in self._lasting_names(name)
            }
            for name, local_states in self._abstract_local_states.items()
        }

    def _abstract_state(self, name: str, state_name: str, local_state: Any, is_merged: bool) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of one state of a gradient.

        Args:
            name: name of the gradient.
            state_name: name of the state.
            local_state: shape and dtype of the state on one device.
            is_merged: whether the state is merged, and so has no dim of replicas.
        """
        leaf = self.leaves[name]
        if state_name == RESIDUAL:
            shape, entries = leaf.shape, tuple(leaf.spec)
        else:
            shape, entries = (self.shard_count(name), *local_state.shape), (leaf.axes or None,)
        leading_shape, leading_entries = ((), ()) if is_merged else ((self.replicas,), (self.axis,))
        sharding = NamedSharding(self.mesh, PartitionSpec(*leading_entries, *entries))
        return jax.ShapeDtypeStruct((*leading_shape, *shape), local_state.dtype, sharding=sharding)

    def shardings(self, *, is_merged: bool = False) -> Any:
        """Return the shardings of all replicas' states; if `is_merged`, those of the merged states."""
        return jax.tree.map(lambda abstract_state: abstract_state.sharding, self.abstract_states(is_merged=is_merged))

    def _specs(self, *, is_merged: bool = False) -> Any:
        """Return the `PartitionSpec` of each state that `shardings` describes."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(is_merged=is_merged))

    def init(self) -> CodecStates:
        """Return the initial states. Call this under `jax.jit` with `out_shardings`."""

        def init_on_device() -> CodecStates:
            """Return the initial states of this device."""
            return self._with_leading_dims(self.initial_device_states())

        return self._shard_mapped(init_on_device, (), self._specs())()

    def _lasting_names(self, name: str) -> tuple[str, ...]:
        """Return the names of those states of a gradient whose shape does not depend on the number of replicas."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        shape, layers = self.local_shape(name), self.leaves[name].layers
        other_states = jax.eval_shape(lambda key: self.codec.init(shape, key, self.replicas + 1, layers=layers), key)
        names_and_own_states = self._abstract_local_states[name].items()
        return tuple(
            state_name for state_name, state in names_and_own_states if state.shape == other_states[state_name].shape
        )

    def merge(self, states: CodecStates) -> CodecStates:
        """Return the merged states: one state for each gradient, with the mean residual of all replicas.

        A run with any number of replicas can continue from the merged states.
        """

        def merge_on_device(stacked_states: CodecStates) -> CodecStates:
            """Return the merged states on this device, from the device's states with their leading dims."""
            merged_states: CodecStates = {}
            for name, local_states in self._without_leading_dims(stacked_states).items():
                gathered_states = jax.tree.map(lambda array: lax.all_gather(array, self.axis), local_states)
                shape, layers = self.local_shape(name), self.leaves[name].layers
                # the state of one replica, with a first dim of 1
                merged_state = self.codec.resize(gathered_states, shape, 1, layers=layers)
                # for a residual, the first dim is removed; for other states, it becomes the dim of shards
                merged_states[name] = {
                    state_name: merged_state[state_name][0] if state_name == RESIDUAL else merged_state[state_name]
                    for state_name in self._lasting_names(name)
                }
            return merged_states

        return self._shard_mapped(merge_on_device, (self._specs(),), self._specs(is_merged=True))(states)

    def spread(self, merged_states: CodecStates) -> CodecStates:
        """Return the states of all replicas of this mesh: copies of the merged states, or initial states.

        Args:
            merged_states: states from `merge`.
        """

        def spread_on_device(stacked_merged_states: CodecStates) -> CodecStates:
            """Return the states of this device, from the merged states on this device."""
            initial_states = self.initial_device_states()
            device_states = {
                name: {
                    state_name: array if state_name == RESIDUAL else array[0]
                    for state_name, array in array_by_name.items()
                }
                for name, array_by_name in stacked_merged_states.items()
            }
            return self._with_leading_dims(
                {name: initial_states[name] | device_states.get(name, {}) for name in initial_states}
            )

        all_specs = self._specs(is_merged=True)
        specs = {
            name: {state_name: all_specs[name][state_name] for state_name in array_by_name}
            for name, array_by_name in merged_states.items()
        }
        return self._shard_mapped(spread_on_device, (specs,), self._specs())(merged_states)

    def _with_leading_dims(self, states: CodecStates) -> CodecStates:
        """Return the states of one device with leading dims of size 1 for replicas and shards."""
        return _index_leading_dims(states, None)

    def _without_leading_dims(self, states: CodecStates) -> CodecStates:
        """Return the states of one device without the leading dims for replicas and shards."""
        return _index_leading_dims(states, 0)

    # -- the exchange --------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""]) -> ReducedGradients:
        """Average gradients over the replicas, and update the codec's states.

        Args:
            gradients: gradients by name, float32 (replicas, *shape of the gradient).
            states: states of the codec.
            step: number of updates made before this one.
        """

        def average_shards(
            stacked_gradients: dict[str, Array], stacked_states: CodecStates, update_count: Array
        ) -> ReducedGradients:
            """Average this device's shards of the gradients; return the shards of the means and of the new states.

            Each array has leading dims of size 1 for replicas, and for shards where states have them.
            """
            shards, device_states = (
                {name: g[0] for name, g in stacked_gradients.items()},
                self._without_leading_dims(stacked_states),
            )
            means, new_states = self.average_on_device(shards, device_states, update_count, self.mesh.axis_names)
            return ReducedGradients(means, self._with_leading_dims(new_states), self._residual_norm(new_states))

        empty_spec = PartitionSpec()
        gradient_specs = {name: PartitionSpec(self.axis, *leaf.spec) for name, leaf in self.leaves.items()}
        mean_specs = {name: leaf.spec for name, leaf in self.leaves.items()}
        out_specs: Any = ReducedGradients(*(mean_specs, self._specs(), empty_spec))  # pyright: ignore[reportArgumentType]
        average = self._shard_mapped(average_shards, (gradient_specs, self._specs(), empty_spec), out_specs)
        return average({name: gradients[name] for name in self.leaves}, states, step)

    def average_on_device(
        self, gradients: Mapping[str, Array], states: CodecStates, step: Int[Array, ""], agreeing_axes: Sequence[str]
    ) -> tuple[dict[str, Array], CodecStates]:
        """Average gradients over the replicas, called inside a region that is manual over the mesh axes.

        Args:
            gradients: this device's shards of its replica's gradients, by name, float32.
            states: states of this device, without dims of replicas and shards.
            step: number of updates made before this one.
            agreeing_axes: names of axes; all devices along them agree on whether the gradients are finite, so all of
                them must call this function.

        Returns:
            The mean of each gradient, by name, and the new states of this device.
        """
        squared_norm = sum((jnp.sum(jnp.square(gradient)) for gradient in gradients.values()), jnp.zeros(()))
        is_finite = jnp.isfinite(lax.psum(squared_norm, agreeing_axes))
        means, new_states = self._exact_means(gradients), {}
        step_key = jax.random.fold_in(jax.random.key(self.seed), step)
        for name in self.coded_names:
            leaf_mean, leaf_state = self.codec.reduce(
                gradients[name],
                states[name],
                self.axis,
                self._shard_key(step_key, name),
                step,
                layers=self.leaves[name].layers,
                first=self.leaves[name].first,
            )
            means[name], new_states[name] = jnp.where(is_finite, leaf_mean, jnp.nan), leaf_state
        checked_states = jax.tree.map(
            lambda new_state, old_state: jnp.where(is_finite, new_state, old_state), new_states, states
        )
        return {name: means[name] for name in self.leaves}, checked_states

    def initial_device_states(self) -> CodecStates:
        """Return the initial states of one device, inside a region that is manual over the mesh axes."""
        key = jax.random.key(self.seed)
        return {name: self._init(name, self._shard_key(key, name)) for name in self.coded_names}

    def _exact_means(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Send the uncompressed gradients in one message, and return the mean of each by name.

        A NaN in one gradient does not affect the means of the others.
        """
        if not self.plain_names:
            return {}
        flat_gradients = jnp.concatenate([gradients[name].reshape(-1) for name in self.plain_names])
        flat_means = lax.psum(flat_gradients, self.axis) / self.replicas
        means, start = {}, 0
        for name in self.plain_names:
            shape = self.local_shape(name)
            means[name] = flat_means[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return means

    def _residual_norm(self, states: CodecStates) -> Array:
        """Return the root mean square of the replicas' residual norms, from the states of this device."""
        squared_norm = jnp.zeros(())
        for name in states:
            # the number of devices of a replica that have the same shard
            copy_count = self.mesh.size // (self.replicas * self.shard_count(name))
            squared_norm += squared_residual_norm({name: states[name]}) / copy_count
        return jnp.sqrt(lax.psum(squared_norm, self.mesh.axis_names) / self.replicas)

    def _shard_key(self, key: Key, name: str) -> Key:
        """Return a random key for this device's shard of a gradient, equal on all devices that have the same shard."""
        leaf = self.leaves[name]
        gradient_key = jax.random.fold_in(key, zlib.crc32((leaf.stack or name).encode()) & 0x7FFFFFFF)
        shard_index = jnp.int32(0)
        for axis in leaf.axes:
            shard_index = shard_index * self.mesh.shape[axis] + lax.axis_index(axis)
        return jax.random.fold_in(gradient_key, shard_index)

    def _shard_mapped(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Return the function mapped over the shards of all devices of the mesh with `jax.shard_map`."""
        # the mean is equal on all replicas, because each computes it from the same messages; JAX's types of values that
        # vary over axes cannot express this
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
