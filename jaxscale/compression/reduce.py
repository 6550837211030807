"""The reduce stage: from each replica's own gradients to their mean, the same on all, before optax sees it.

It runs in a `jax.shard_map` that is manual over every axis: each device holds its shard of its replica's gradients, and
a codec sends what it makes of that shard over the slow axis alone. Leaves too small to be worth a codec (norms, biases,
what it can't take) go as they are, all in one message. A gradient with NaN or Inf would poison residuals and scales of
one replica, and the others would not know: all devices agree on it by one number, the mean becomes NaN, so that the
guard skips the step, and states stay as they were in every bit.

What it leaves out: clipping and norms (the mean's, which come after), and the reduction inside a replica, which XLA has
done before.
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

from jaxscale.compression import wire
from jaxscale.compression.codec import Codec
from jaxscale.errors import UserError
from jaxscale.typing import Array, Float, Int, Key

SMALL = 256
"""Elements on a device below which a gradient is sent as it is."""

RESIDUAL = "residual"

States = dict[str, dict[str, Any]]
"""By gradient and name: residuals (replicas, *shape), others (replicas, shards, *shape on a device)."""


def squared_residuals(states: States) -> Float[Array, ""]:
    """Squared norm of what the codec owes, of these states."""
    return sum((jnp.sum(jnp.square(mine[RESIDUAL])) for mine in states.values() if RESIDUAL in mine), jnp.zeros(()))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One gradient of the stage.

    Args:
        shape: of all of it.
        spec: where its shards lie; the slow axis is none of its axes.
        layers: its first dim is stacked layers.
        stack: where these are a part of a stack, the name of the whole: what codecs draw does not depend on the parts.
        first: number of the first of them in the stack.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    layers: bool = False
    stack: str | None = None
    first: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it is split, in the order of its dims."""
        return tuple(a for e in self.spec if e is not None for a in ((e,) if isinstance(e, str) else e))


class Reduced(NamedTuple):
    """What the stage gives.

    Args:
        mean: of the gradients over the replicas, by name, float32.
        states: after it.
        residual_norm: of what the codec owes: root of the mean over replicas of its squared norm.
    """

    mean: dict[str, Array]
    states: States
    residual_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A codec at work on the gradients of a model.

    Args:
        codec: for all gradients that are not too small.
        mesh: of devices.
        leaves: the gradients, by name.
        axis: the slow one.
        seed: of what codecs draw.
        small: elements on a device below which a gradient is sent as it is.

    Raises:
        UserError: the axis has one device, or the codec takes none of the gradients.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> leaves = {"kernel": Leaf((256, 512), PartitionSpec("fsdp")), "bias": Leaf((512,), PartitionSpec())}
        >>> stage = Stage(Codec.parse("int8"), AbstractMesh((2, 4), ("replica", "fsdp")), leaves)
        >>> stage.coded, stage.plain, stage.wire_bytes, stage.exact_bytes
        (('kernel',), ('bias',), 35328, 133120)
    """

    codec: Codec
    mesh: Any
    leaves: Mapping[str, Leaf]
    axis: str = "replica"
    seed: int = 0
    small: int = SMALL

    def __post_init__(self) -> None:
        if self.coded:
            _ = self._sent  # sizes of messages come of tracing them, which is not to be noted as what a step takes
            return
        largest = max(self.leaves, key=lambda name: math.prod(self.local(name)), default=None)
        if largest is None or self.replicas < 2:
            raise UserError(f"reduce {self.codec}: the mesh has no {self.axis} axis to reduce over; add {self.axis}:N")
        why = self.codec.refusal(self.local(largest), self.replicas, layers=self.leaves[largest].layers)
        count = math.prod(self.local(largest))
        why = why or f"it has {count} elements on a device, which are too few, or take no more bytes as they are"
        raise UserError(
            f"reduce {self.codec}: it is for none of this model's gradients. The largest is {largest}: {why}; leave "
            "reduce out"
        )

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Devices on the slow axis."""
        return self.mesh.shape[self.axis]

    def local(self, name: str) -> tuple[int, ...]:
        """Shape of a gradient on one device."""
        leaf = self.leaves[name]
        entries = [*leaf.spec, *(None,) * (len(leaf.shape) - len(leaf.spec))]
        ways = [math.prod(self.mesh.shape[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in entries]
        return tuple(size // n for size, n in zip(leaf.shape, ways, strict=True))

    def shards(self, name: str) -> int:
        """Parts into which a gradient is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.leaves[name].axes)

    @functools.cached_property
    def coded(self) -> tuple[str, ...]:
        """Gradients that the codec is for."""
        return tuple(name for name in self.leaves if self._worth(name))

    @functools.cached_property
    def plain(self) -> tuple[str, ...]:
        """Gradients that are sent as they are, in one message."""
        return tuple(name for name in self.leaves if name not in self.coded)

    def _worth(self, name: str) -> bool:
        shape, layers, n = self.local(name), self.leaves[name].layers, self.replicas
        if n < 2 or len(shape) - layers < 2 or math.prod(shape) < self.small:
            return False
        if self.codec.refusal(shape, n, layers=layers) is not None:
            return False
        return self.codec.wire_bytes(shape, n, layers=layers) < wire.exact(shape, n)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the one message of small gradients."""
        return wire.FLOAT32 * sum(math.prod(self.local(name)) for name in self.plain)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends over the slow axis in one step, once nothing changes with time any more."""
        return self._coded_bytes(self.codec) + wire.all_reduce(self.plain_bytes, self.replicas)

    @property
    def program_bytes(self) -> int:
        """The same of all that the compiled step can send: a program holds every codec of the timetable."""
        return sum(self._sent) + wire.all_reduce(self.plain_bytes, self.replicas)

    def wire_bytes_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The same of one step, after so many updates."""
        firsts = jnp.array([first for first, _ in self.codec.timetable])
        small = wire.all_reduce(self.plain_bytes, self.replicas)
        return jnp.array([coded + small for coded in self._sent], jnp.float32)[jnp.sum(step >= firsts) - 1]

    @functools.cached_property
    def _sent(self) -> tuple[int, ...]:
        """Bytes of the gradients that the codec is for, by each codec of the timetable."""
        return tuple(self._coded_bytes(codec) for _, codec in self.codec.timetable)

    def _coded_bytes(self, codec: Codec | None) -> int:
        """Of the gradients that the codec is for; `None` sends them in float32."""
        shapes = ((self.local(name), self.leaves[name].layers) for name in self.coded)
        if codec is None:
            return sum(wire.exact(shape, self.replicas) for shape, _ in shapes)
        return sum(codec.wire_bytes(shape, self.replicas, layers=layers) for shape, layers in shapes)

    @property
    def exact_bytes(self) -> int:
        """The same of a reduction in float32."""
        return sum(wire.exact(self.local(name), self.replicas) for name in self.leaves)

    # -- states --------------------------------------------------------------------------------------------------------

    def _of_leaf(self, name: str, key: str, shape: tuple[int, ...], *, one: bool = False) -> Leaf:
        """Shape and placement of the whole of a state, of all replicas or of one."""
        leaf, n, first = self.leaves[name], (self.replicas,), (self.axis,)
        if one:
            n, first = (), ()
        if key == RESIDUAL:
            return Leaf((*n, *leaf.shape), PartitionSpec(*first, *leaf.spec))
        return Leaf((*n, self.shards(name), *shape), PartitionSpec(*first, leaf.axes or None))

    def _init(self, name: str, key: Key) -> dict[str, Array]:
        leaf = self.leaves[name]
        return self.codec.init(self.local(name), key, self.replicas, layers=leaf.layers, first=leaf.first)

    @functools.cached_property
    def _shapes(self) -> dict[str, dict[str, Any]]:
        """States of one device and replica."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return {name: jax.eval_shape(functools.partial(self._init, name), key) for name in self.coded}

    def _whole(self, *, one: bool = False) -> dict[str, dict[str, Leaf]]:
        return {
            name: {
                key: self._of_leaf(name, key, found.shape, one=one)
                for key, found in states.items()
                if not one or key in self.lasting(name)
            }
            for name, states in self._shapes.items()
        }

    def abstract(self, *, one: bool = False) -> Any:
        """Shapes, dtypes and placements of the states, of all replicas or of what `merged` makes of them."""
        return {
            name: {
                key: jax.ShapeDtypeStruct(
                    leaf.shape, self._shapes[name][key].dtype, sharding=NamedSharding(self.mesh, leaf.spec)
                )
                for key, leaf in states.items()
            }
            for name, states in self._whole(one=one).items()
        }

    def shardings(self, *, one: bool = False) -> Any:
        """Placements of the states."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(one=one))

    def _specs(self, *, one: bool = False) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(one=one))

    def init(self) -> States:
        """States before the first step: a function to jit with `out_shardings`."""

        def local() -> States:
            return self._lifted(self.start())

        return self._mapped(local, (), self._specs())()

    def lasting(self, name: str) -> tuple[str, ...]:
        """States of a gradient whose shape does not depend on the number of replicas."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        more = jax.eval_shape(
            lambda key: self.codec.init(self.local(name), key, self.replicas + 1, layers=self.leaves[name].layers),
            key,
        )
        return tuple(k for k, found in self._shapes[name].items() if found.shape == more[k].shape)

    def merged(self, states: States) -> States:
        """What one replica would have in place of all: what they owe on average, so that another number can go on."""

        def local(states: States) -> States:
            found: States = {}
            for name, mine in self._lowered(states).items():
                every = jax.tree.map(lambda part: lax.all_gather(part, self.axis), mine)
                one = self.codec.resize(every, self.local(name), 1, layers=self.leaves[name].layers)
                found[name] = {key: one[key][0] if key == RESIDUAL else one[key] for key in self.lasting(name)}
            return found

        return self._mapped(local, (self._specs(),), self._specs(one=True))(states)

    def spread(self, merged: States) -> States:
        """The inverse of `merged`, for the replicas of this mesh; what it lacks begins anew."""

        def local(merged: States) -> States:
            fresh = self.start()
            given = {
                name: {key: part if key == RESIDUAL else part[0] for key, part in mine.items()}
                for name, mine in merged.items()
            }
            return self._lifted({name: {**fresh[name], **given.get(name, {})} for name in fresh})

        specs = {n: {k: self._specs(one=True)[n][k] for k in mine} for n, mine in merged.items()}
        return self._mapped(local, (specs,), self._specs())(merged)

    def _lifted(self, states: States) -> States:
        """States of a device with the dims that those of all have before theirs."""
        return {
            name: {key: part[None] if key == RESIDUAL else part[None, None] for key, part in mine.items()}
            for name, mine in states.items()
        }

    def _lowered(self, states: States) -> States:
        return {
            name: {key: part[0] if key == RESIDUAL else part[0, 0] for key, part in mine.items()}
            for name, mine in states.items()
        }

    # -- the stage -----------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Mapping[str, Array], states: States, step: Int[Array, ""]) -> Reduced:
        """The mean of gradients over the replicas.

        Args:
            gradients: by name, float32 (replicas, *shape).
            states: of the codec.
            step: updates made before this one.
        """

        def local(gradients: dict[str, Array], states: States, step: Array) -> Reduced:
            mine = {name: gradient[0] for name, gradient in gradients.items()}
            mean, after = self.inside(mine, self._lowered(states), step, self.mesh.axis_names)
            return Reduced(mean, self._lifted(after), self._norm(after))

        whole = PartitionSpec()
        apart = {name: PartitionSpec(self.axis, *leaf.spec) for name, leaf in self.leaves.items()}
        together = {name: leaf.spec for name, leaf in self.leaves.items()}
        out: Any = Reduced(*(together, self._specs(), whole))  # pyright: ignore[reportArgumentType]
        ordered = {name: gradients[name] for name in self.leaves}
        return self._mapped(local, (apart, self._specs(), whole), out)(ordered, states, step)

    def inside(
        self, gradients: Mapping[str, Array], states: States, step: Int[Array, ""], agreeing: Sequence[str]
    ) -> tuple[dict[str, Array], States]:
        """The mean of gradients over the replicas, and states after it, in a region that is manual over the axes.

        Args:
            gradients: by name, float32: shards of this device and replica.
            states: of this device and replica.
            step: updates made before this one.
            agreeing: axes whose devices agree on whether the gradients are finite; all run this.
        """
        squares = sum((jnp.sum(jnp.square(gradient)) for gradient in gradients.values()), jnp.zeros(()))
        good = jnp.isfinite(lax.psum(squares, agreeing))
        mean, after = self._exact(gradients), {}
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        for name in self.coded:
            reduced, left = self.codec.reduce(
                gradients[name],
                states[name],
                self.axis,
                self._key(key, name),
                step,
                layers=self.leaves[name].layers,
                first=self.leaves[name].first,
            )
            mean[name], after[name] = jnp.where(good, reduced, jnp.nan), left
        after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, states)
        return {name: mean[name] for name in self.leaves}, after

    def start(self) -> States:
        """States of one device and replica before the first step, in a region that is manual over the axes."""
        key = jax.random.key(self.seed)
        return {name: self._init(name, self._key(key, name)) for name in self.coded}

    def _exact(self, mine: Mapping[str, Array]) -> dict[str, Array]:
        """The means of the small gradients, which are sent together. One that is bad makes its own mean so."""
        if not self.plain:
            return {}
        flat = jnp.concatenate([mine[name].reshape(-1) for name in self.plain])
        ends = [0]
        for name in self.plain:
            ends.append(ends[-1] + math.prod(self.local(name)))
        flat = lax.psum(flat, self.axis) / self.replicas
        return {
            name: flat[start:end].reshape(self.local(name))
            for name, start, end in zip(self.plain, ends, ends[1:], strict=False)
        }

    def _norm(self, states: States) -> Array:
        found = jnp.zeros(())
        for name, mine in states.items():
            copies = self.mesh.size // (self.replicas * self.shards(name))
            found += squared_residuals({name: mine}) / copies
        return jnp.sqrt(lax.psum(found, self.mesh.axis_names) / self.replicas)

    def _key(self, key: Key, name: str) -> Key:
        """Of a gradient's shard: the same on all replicas, and on all devices that hold the same shard."""
        leaf = self.leaves[name]
        key = jax.random.fold_in(key, zlib.crc32((leaf.stack or name).encode()) & 0x7FFFFFFF)
        number = jnp.int32(0)
        for axis in leaf.axes:
            number = number * self.mesh.shape[axis] + lax.axis_index(axis)
        return jax.random.fold_in(key, number)

    def _mapped(self, local: Any, given: Any, out: Any) -> Any:
        # replicas are alike because each computes the same of what all have, which no type can tell
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=out, check_vma=False)
