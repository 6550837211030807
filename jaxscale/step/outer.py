"""Outer: what DiLoCo adds to a train state, where it lies, how replicas meet, and what of it a checkpoint holds.

The state's parameters are the weights that all share (θ): evaluation, samples and export read them as ever. Each
replica's own weights, and the optimizer's state, have a first dim for the replicas. A meeting moves a part of θ by what
the replicas have moved, in one manual region: every device sends its shard of the ways back over the replica axis, and
no two devices of a replica the same number, whatever ZeRO's stage.

A checkpoint holds all of it, and beside it what one replica would have: the mean of their weights and states. So a run
goes on with another number of replicas, from that mean, and what they had moved since they met is kept on average; or
without DiLoCo, from θ; and a run that had none takes it up.
"""

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.compression import wire
from jaxscale.compression.reduce import Leaf, Stage
from jaxscale.optim.diloco import Diloco, fragments_of
from jaxscale.optim.quantize import is_quantized
from jaxscale.sharding.memory_space import in_memory_of
from jaxscale.step.functional import Functional
from jaxscale.step.layout import REPLICA_AXIS, Layout
from jaxscale.step.plan import Plan
from jaxscale.step.reducing import leaves_of_gradients
from jaxscale.step.state import TrainState
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Params
from jaxscale.values.byte_sizes import bytes_at_least

OUTER = "outer"
"""Prefix of what is each replica's own and of the outer momentum, in a checkpoint; another plan leaves it behind."""
WEIGHTS, MOMENTUM, OPTIMIZER = "weights", "momentum", "optimizer"
ONE, ALL = "one", "all"


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """DiLoCo on a mesh.

    Args:
        diloco: when replicas meet, and how they then move.
        plain: the layout of a step without replicas' own.
        optimizer: each replica's, clipping and all.
        leaves: the parameters as a meeting has them, by name.
        stage: of the codec, for all of them; `None` sends ways back as they are.
    """

    diloco: Diloco
    plain: Layout
    optimizer: optax.GradientTransformation
    leaves: Mapping[str, Leaf]
    stage: Stage | None = None

    @classmethod
    def of(cls, plan: Plan, functional: Functional, plain: Layout, optimizer: Any, stage: Stage | None) -> "Outer":
        """DiLoCo of a plan that has it.

        Raises:
            UserError: more parts than tensors, or the codec is for nothing of a part.
        """
        assert plan.diloco is not None
        made = cls(plan.diloco, plain, optimizer, leaves_of_gradients(plan, functional, plain), stage)
        assert all(made.stages)
        return made

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.plain.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that meet together."""
        sizes = {name: leaf.size for name, leaf in named_leaves(self.plain.abstract.params).items()}
        return fragments_of(sizes, self.diloco.fragments)

    @functools.cached_property
    def stages(self) -> tuple[Stage | bool, ...]:
        """The codec's stage of each part; `True` where there is no codec."""
        if self.stage is None:
            return (True,) * len(self.parts)
        leaves = [{name: self.leaves[name] for name in part} for part in self.parts]
        return tuple(dataclasses.replace(self.stage, leaves=mine) for mine in leaves)

    def exact_bytes(self, part: int) -> int:
        """Bytes that a device sends over the replica axis when a part meets, in float32."""
        shapes = [NamedSharding(self.plain.mesh, leaf.spec).shard_shape(leaf.shape) for leaf in self._leaves(part)]
        return sum(wire.exact(shape, self.replicas) for shape in shapes)

    def wire_bytes(self, part: int) -> int:
        """The same as it is sent."""
        stage = self.stages[part]
        return stage.wire_bytes if isinstance(stage, Stage) else self.exact_bytes(part)

    def _leaves(self, part: int) -> list[Leaf]:
        return [self.leaves[name] for name in self.parts[part]]

    def describe(self) -> list[str]:
        """What a user should know of it before the first step."""
        count, asked = len(self.parts), self.diloco
        sent = [bytes_at_least(self.wire_bytes(part)) for part in range(count)]
        fewer = sum(map(self.exact_bytes, range(count))) / sum(map(self.wire_bytes, range(count)))
        codec = f", {fewer:.1f} times fewer than float32," if self.stage else ""
        return [
            f"diloco {asked}: {self.replicas} replicas train alone, and {' and '.join(sent)} per device{codec} cross "
            f"{REPLICA_AXIS} every {asked.every} steps{' in turn' * (count > 1)}; single numbers in between"
        ]

    # -- the state -----------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """The layout of a train state that has what is each replica's own."""
        plain = self.plain
        state = dataclasses.replace(
            plain.state, optimizer=self._apart(plain.state.optimizer), outer=self._shardings(self._abstract_outer())
        )
        abstract = dataclasses.replace(
            plain.abstract, optimizer=self._abstract_apart(plain.abstract.optimizer), outer=self._abstract_outer()
        )
        return dataclasses.replace(plain, state=state, abstract=abstract)

    def _apart(self, shardings: Any) -> Any:
        def apart(sharding: NamedSharding) -> NamedSharding:
            return in_memory_of(sharding, NamedSharding(sharding.mesh, PartitionSpec(REPLICA_AXIS, *sharding.spec)))

        return jax.tree.map(apart, shardings)

    def _abstract_apart(self, abstract: Any) -> Any:
        def one(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(one, abstract, self._apart(self._shardings(abstract)))

    def _abstract_outer(self) -> dict[str, Any]:
        params = self.plain.abstract.params
        found = {WEIGHTS: self._abstract_apart(params)}
        if self.diloco.momentum:
            found[MOMENTUM] = jax.tree_util.tree_map_with_path(
                lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=self._place(path_name(path))),
                params,
            )
        return found

    def _shardings(self, abstract: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def _place(self, name: str, *apart: str) -> NamedSharding:
        """Where a parameter lies at a meeting."""
        return NamedSharding(self.plain.mesh, PartitionSpec(*apart, *self.leaves[name].spec))

    def _spread(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), tree)

    def start(self, params: Params) -> tuple[Any, Any]:
        """Optimizer state and what is added, before the first step: a function to jit with `out_shardings`."""
        found = {WEIGHTS: self._spread(params)}
        if self.diloco.momentum:
            found[MOMENTUM] = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return self._spread(self.optimizer.init(params)), found

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meet(self, part: int, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """A part of the weights moves by what replicas have moved it: a function to jit, the state being donated.

        Where one replica's weights are not finite, all stay as they are.
        """
        stage, names, mesh = self.stages[part], self.parts[part], self.plain.mesh
        shared, own = named_leaves(state.params), named_leaves(state.outer[WEIGHTS])
        momenta = named_leaves(state.outer.get(MOMENTUM, {}))
        reduce, metrics = state.reduce, {}
        here = {name: shared[name] for name in names}
        ways = self._within_replicas(
            lambda here, own: {name: self._placed(here[name] - own[name][0], name)[None] for name in names}
        )(here, {name: own[name] for name in names})
        if isinstance(stage, Stage):
            found = stage(ways, {name: state.reduce[name] for name in stage.coded}, state.step)
            means, reduce = found.mean, {**state.reduce, **found.states}
            metrics = {"residual_norm": found.residual_norm}
        else:
            specs = {name: self.leaves[name].spec for name in names}
            means = jax.shard_map(
                lambda mine: jax.tree.map(lambda way: lax.pmean(way[0], REPLICA_AXIS), mine),
                mesh=mesh,
                in_specs=({name: PartitionSpec(REPLICA_AXIS, *spec) for name, spec in specs.items()},),
                out_specs=specs,
            )(ways)
        good = jnp.isfinite(optax.tree.norm(means))
        masters = named_leaves(self.plain.masters)

        def moved(here: Any, momenta: Any, means: Any) -> Any:
            after = {}
            for name in names:
                theta = self._placed(here[name], name)
                weight, momentum = self.diloco.moved(theta, momenta.get(name), means[name])
                weight = jnp.where(good, weight, theta)
                if momentum is not None:
                    momentum = jnp.where(good, momentum, momenta[name])
                after[name] = self._constrained(weight, masters[name].spec), momentum
            return after

        whole = {name: momenta[name] for name in names if name in momenta}
        for name, (weight, momentum) in self._within_replicas(moved, apart=False)(here, whole, means).items():
            shared[name] = weight
            own[name] = jnp.where(good, weight[None], own[name])
            if momentum is not None:
                momenta[name] = momentum

        def filled(tree: Any, by_name: Mapping[str, Array]) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: by_name[path_name(path)], tree)

        outer = {WEIGHTS: filled(state.outer[WEIGHTS], own)}
        if momenta:
            outer[MOMENTUM] = filled(state.outer[MOMENTUM], momenta)
        after = dataclasses.replace(state, params=filled(state.params, shared), reduce=reduce, outer=outer)
        return after, metrics

    def _within_replicas(self, function: Any, *, apart: bool = True) -> Any:
        """`function` in a region that is manual over replicas: what it moves from place to place stays in its replica.

        Args:
            function: of what all replicas share, and, where `apart`, of what each has of its own, which it returns.
            apart: the last argument and the result have a first dim for the replicas.
        """
        whole, rows = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def run(*args: Any) -> Any:
            specs = (*(whole,) * (len(args) - 1), rows if apart else whole)
            return jax.shard_map(
                function,
                mesh=self.plain.mesh,
                in_specs=specs,
                out_specs=rows if apart else whole,
                axis_names={REPLICA_AXIS},
                check_vma=False,
            )(*args)

        return run

    def _placed(self, x: Array, name: str) -> Array:
        """A tensor where a meeting has it, within a replica."""
        return self._constrained(x, self.leaves[name].spec)

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    # -- in checkpoints ------------------------------------------------------------------------------------------------

    def kept(self, state: TrainState) -> TrainState:
        """A state as a checkpoint holds it: its optimizer's is what one replica would have, and all is beside it."""
        outer = {ALL: {WEIGHTS: state.outer[WEIGHTS], OPTIMIZER: state.optimizer}}
        outer[ONE] = {WEIGHTS: _mean(state.outer[WEIGHTS])}
        if MOMENTUM in state.outer:
            outer[MOMENTUM] = state.outer[MOMENTUM]
        return dataclasses.replace(state, optimizer=_mean(state.optimizer), outer=outer)

    def kept_abstract(self, abstract: TrainState) -> TrainState:
        """Its shapes, dtypes and placements."""
        outer = {ALL: {WEIGHTS: abstract.outer[WEIGHTS], OPTIMIZER: abstract.optimizer}}
        outer[ONE] = {WEIGHTS: self.plain.abstract.params}
        if MOMENTUM in abstract.outer:
            outer[MOMENTUM] = abstract.outer[MOMENTUM]
        return dataclasses.replace(abstract, optimizer=self.plain.abstract.optimizer, outer=outer)

    def restored(self, state: TrainState) -> TrainState:
        """The state of what `kept` gave, with `None` for what a checkpoint lacks.

        With another number of replicas each begins from the mean; without DiLoCo before, from the weights.
        """
        found, layout = state.outer, self.layout().state
        spread = functools.partial(_jitted, self._spread)
        one = found[ONE][WEIGHTS]
        weights = found[ALL][WEIGHTS]
        if _lacks(weights):
            weights = spread(layout.outer[WEIGHTS])(state.params if _lacks(one) else one)
        optimizer = found[ALL][OPTIMIZER]
        if _lacks(optimizer):
            optimizer = spread(layout.optimizer)(state.optimizer)
        outer = {WEIGHTS: weights}
        if self.diloco.momentum:
            momentum = found[MOMENTUM]
            if _lacks(momentum):
                zeros = functools.partial(jax.tree.map, lambda p: jnp.zeros(p.shape, jnp.float32))
                momentum = _jitted(zeros, layout.outer[MOMENTUM])(state.params)
            outer[MOMENTUM] = momentum
        return dataclasses.replace(state, optimizer=optimizer, outer=outer)

    def prefix(self, path: Any) -> tuple[str, bool, Any]:
        """Of a leaf of what is kept of `outer`: the prefix of its name, whether all replicas' are in it, its path."""
        which = path[0].key
        if which == MOMENTUM:
            return f"{OUTER}/{MOMENTUM}", False, path[1:]
        count = f"of_{self.replicas}" if which == ALL else ONE
        return f"{OUTER}/{count}/{path[1].key}", which == ALL, path[2:]

    def said_of_restored(self, names: Container[str], wanted: Iterable[str]) -> str:
        """What of it a checkpoint with arrays of these names lacks, as a user should know; mostly nothing.

        Args:
            names: of the checkpoint's arrays.
            wanted: names of the step's.
        """
        lacking = [name for name in wanted if name.startswith(f"{OUTER}/") and name not in names]
        said = ""
        if any(name.startswith(f"{OUTER}/{ONE}/") for name in lacking):
            said = f"; it was trained without diloco: {self.replicas} replicas begin with its weights"
        elif any(name.startswith(f"{OUTER}/of_{self.replicas}/") for name in lacking):
            said = f"; it had another number of replicas: {self.replicas} begin with their mean"
        elif any(name.startswith(f"{OUTER}/{MOMENTUM}/") for name in lacking):
            said = "; it had no outer momentum, which begins with zero"
        return said


def _mean(tree: Any) -> Any:
    """What one replica would have of what all have; of what has no mean, such as codes, the first's."""

    def one(leaf: Any) -> Any:
        if is_quantized(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.tree.map(lambda x: x[0], leaf)
        return jnp.mean(leaf, 0)

    return jax.tree.map(one, tree, is_leaf=is_quantized)


def _lacks(tree: Any) -> bool:
    return any(leaf is None for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None))


def _jitted(function: Any, shardings: Any) -> Any:
    return jax.jit(function, out_shardings=shardings)
