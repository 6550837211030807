"""Replicas: what DiLoCo adds to a train state, where it lies, how replicas meet, and their part of a checkpoint.

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
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jaxscale.lowbit.quantize import Quantized, is_quantized
from jaxscale.offload.updates import Advance
from jaxscale.replicas import wire
from jaxscale.replicas.diloco import Diloco, fragments_of
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf
from jaxscale.sharding.memory_space import in_memory_of
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import REPLICA_AXIS, Layout, Shapes, shardings_of
from jaxscale.state.naming import Naming, Part, roles
from jaxscale.state.train_state import Metrics, TrainState
from jaxscale.step.compiled_checks import bytes_over, check_alone
from jaxscale.step.exchange import REDUCE, Exchanged
from jaxscale.step.gradients import LossAndGradients, Objective
from jaxscale.step.planned_model import Specs
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Bool, Params, PyTree
from jaxscale.values.byte_sizes import bytes_at_least

R = TypeVar("R")
OUTER = "outer"
"""Name of the extra: what is each replica's own, and the outer momentum."""
WEIGHTS, MOMENTUM, OPTIMIZER = "weights", "momentum", "optimizer"
ONE, ALL = "one", "all"


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """DiLoCo on a mesh: replicas that train alone, and meet.

    Args:
        diloco: when replicas meet, and how they then move.
        plain: the layout of a step without extras.
        optimizer: each replica's, clipping and all.
        leaves: the parameters as a meeting has them, by name.
        stage: of the codec, for all of them; `None` sends ways back as they are.

    Raises:
        UserError: more parts than tensors, or the codec is for nothing of a part.
    """

    diloco: Diloco
    plain: Layout
    optimizer: optax.GradientTransformation
    leaves: Mapping[str, GradientLeaf]
    stage: GradientExchange | None = None
    name: str = dataclasses.field(default=OUTER, init=False)
    label: str = dataclasses.field(default="outer state", init=False)

    def __post_init__(self) -> None:
        assert len(self.stages) == len(self.fragments)

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.plain.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that meet together."""
        sizes = {name: leaf.size for name, leaf in named_leaves(self.plain.abstract.params).items()}
        return fragments_of(sizes, self.diloco.fragments)

    @functools.cached_property
    def stages(self) -> tuple[GradientExchange | None, ...]:
        """The codec's stage of each part; `None` where there is no codec."""
        if self.stage is None:
            return (None,) * len(self.fragments)
        leaves = [{name: self.leaves[name] for name in part} for part in self.fragments]
        return tuple(dataclasses.replace(self.stage, leaves=mine) for mine in leaves)

    def exact_bytes(self, part: int) -> int:
        """Bytes that a device sends over the replica axis when a part meets, in float32."""
        leaves = [self.leaves[name] for name in self.fragments[part]]
        shapes = [NamedSharding(self.plain.mesh, leaf.spec).shard_shape(leaf.shape) for leaf in leaves]
        return sum(wire.exact(shape, self.replicas) for shape in shapes)

    def wire_bytes(self, part: int) -> int:
        """The same in the dtype on the wire."""
        stage = self.stages[part]
        return self.exact_bytes(part) if stage is None else stage.wire_bytes

    def describe(self) -> list[str]:
        """What a user should know of it before the first step."""
        count, asked = len(self.fragments), self.diloco
        sent = [bytes_at_least(self.wire_bytes(part)) for part in range(count)]
        fewer = sum(map(self.exact_bytes, range(count))) / sum(map(self.wire_bytes, range(count)))
        codec = f", {fewer:.1f} times fewer than float32," if self.stage else ""
        return [
            f"diloco {asked}: {self.replicas} replicas train alone, and {' and '.join(sent)} per device{codec} cross "
            f"{REPLICA_AXIS} every {asked.every} steps{' in turn' * (count > 1)}; single numbers in between"
        ]

    # -- the state -----------------------------------------------------------------------------------------------------

    def placed(self, layout: Layout) -> Layout:
        """As of `StateExtra`; the optimizer's state has a dim of replicas too."""
        optimizer = self._abstract_apart(layout.abstract.optimizer)
        state = dataclasses.replace(layout.state, optimizer=shardings_of(optimizer))
        abstract = dataclasses.replace(layout.abstract, optimizer=optimizer)
        return dataclasses.replace(layout, state=state, abstract=abstract).with_extra(self.name, self._abstract())

    def _abstract_apart(self, abstract: Shapes) -> Shapes:
        """Shapes with a first dim for the replicas."""

        def apart(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            one = leaf.sharding
            sharding = in_memory_of(one, NamedSharding(one.mesh, PartitionSpec(REPLICA_AXIS, *one.spec)))
            return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(apart, abstract)

    def _abstract(self) -> dict[str, Shapes]:
        params = self.plain.abstract.params
        abstract = {WEIGHTS: self._abstract_apart(params)}
        if self.diloco.momentum:
            abstract[MOMENTUM] = jax.tree_util.tree_map_with_path(
                lambda path, leaf: jax.ShapeDtypeStruct(
                    leaf.shape,
                    jnp.float32,
                    sharding=NamedSharding(self.plain.mesh, self.leaves[path_name(path)].spec),
                ),
                params,
            )
        return abstract

    def _spread(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), tree)

    def init_optimizer(self, params: Params) -> optax.OptState:
        """Each replica's optimizer state before the first step: a function to jit with `out_shardings`."""
        return self._spread(self.optimizer.init(params))

    def init(self, state: TrainState) -> dict[str, Params]:
        """As of `StateExtra`: all replicas begin with the weights that they share."""
        value = {WEIGHTS: self._spread(state.params)}
        if self.diloco.momentum:
            value[MOMENTUM] = _zeros(state.params)
        return value

    # -- steps alone ---------------------------------------------------------------------------------------------------

    def gradients(self, objective: Objective, state: TrainState, batch: Batch) -> LossAndGradients:
        """Each replica's gradients, of its own weights."""
        return objective.gradients_apart(state, batch, state.extra[self.name][WEIGHTS])

    def update(self, advance: Advance, exchanged: Exchanged, state: TrainState, good: Bool[Array, ""]) -> TrainState:
        """Each replica's own update, in a region that is manual over replicas: no tensor of another's is reached."""
        rows, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()
        value = state.extra[self.name]

        def body(
            gradients: Params, optimizer: optax.OptState, weights: Params, norms: Array, good: Array
        ) -> tuple[Params, optax.OptState]:
            gradients, optimizer, weights, norms = jax.tree.map(lambda x: x[0], (gradients, optimizer, weights, norms))
            return jax.tree.map(lambda x: x[None], advance(gradients, optimizer, weights, norms, good))

        weights, optimizer = self._alone(body, (rows, rows, rows, rows, whole), rows)(
            exchanged.gradients, state.optimizer, value[WEIGHTS], exchanged.norms, good
        )
        extra = {**state.extra, self.name: {**value, WEIGHTS: weights}}
        return dataclasses.replace(state, optimizer=optimizer, extra=extra)

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meet(self, part: int, state: TrainState) -> tuple[TrainState, Metrics]:
        """A part of the weights moves by what replicas have moved it: a function to jit, the state being donated.

        Where one replica's weights are not finite, all stay as they are.
        """
        stage, names, mesh = self.stages[part], self.fragments[part], self.plain.mesh
        whole, rows = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
        value, extra = state.extra[self.name], dict(state.extra)
        metrics: Metrics = {}
        shared, own = named_leaves(state.params), named_leaves(value[WEIGHTS])
        momenta = named_leaves(value.get(MOMENTUM, {}))
        here = {name: shared[name] for name in names}

        def ways_back(here: Params, own: Params) -> dict[str, Array]:
            return {name: self._constrained(here[name] - own[name][0], self.leaves[name].spec)[None] for name in names}

        ways = self._alone(ways_back, (whole, rows), rows)(here, {name: own[name] for name in names})
        if stage is not None:
            residuals = state.extra[REDUCE]
            reduced = stage(ways, {name: residuals[name] for name in stage.coded}, state.step)
            means, extra[REDUCE] = reduced.mean, {**residuals, **reduced.states}
            metrics = {"residual_norm": reduced.residual_norm}
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

        def moved(here: Params, momenta: Params, means: Params) -> dict[str, tuple[Array, Array | None]]:
            after = {}
            for name in names:
                theta = self._constrained(here[name], self.leaves[name].spec)
                weight, momentum = self.diloco.moved(theta, momenta.get(name), means[name])
                weight = jnp.where(good, weight, theta)
                if momentum is not None:
                    momentum = jnp.where(good, momentum, momenta[name])
                after[name] = self._constrained(weight, masters[name].spec), momentum
            return after

        of_names = {name: momenta[name] for name in names if name in momenta}
        for name, (weight, momentum) in self._alone(moved, whole, whole)(here, of_names, means).items():
            shared[name] = weight
            own[name] = jnp.where(good, weight[None], own[name])
            if momentum is not None:
                momenta[name] = momentum

        extra[self.name] = {WEIGHTS: filled(value[WEIGHTS], own)}
        if momenta:
            extra[self.name][MOMENTUM] = filled(value[MOMENTUM], momenta)
        return dataclasses.replace(state, params=filled(state.params, shared), extra=extra), metrics

    def _alone(self, function: Callable[..., R], inputs: Specs, outputs: Specs) -> Callable[..., R]:
        """`function` in a region that is manual over replicas: what it moves stays in its replica."""
        return jax.shard_map(
            function,
            mesh=self.plain.mesh,
            in_specs=inputs,
            out_specs=outputs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    # -- in checkpoints ------------------------------------------------------------------------------------------------

    def saved(self, state: TrainState) -> TrainState:
        """As of `StateExtra`: the optimizer's state is what one replica would have, and all is beside it."""
        return self._saved(state, _mean(state.extra[self.name][WEIGHTS]), _mean(state.optimizer))

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """As of `StateExtra`."""
        return self._saved(abstract, self.plain.abstract.params, self.plain.abstract.optimizer)

    def _saved(self, state: TrainState, weights: Params, optimizer: optax.OptState) -> TrainState:
        """A state as a checkpoint holds it, with weights and optimizer state that one replica would have."""
        kept = dict(state.extra[self.name])
        everyone = {WEIGHTS: kept.pop(WEIGHTS), OPTIMIZER: state.optimizer}
        saved = {ALL: everyone, ONE: {WEIGHTS: weights}, **kept}
        return dataclasses.replace(state, optimizer=optimizer, extra={**state.extra, self.name: saved})

    def loaded(self, state: TrainState) -> TrainState:
        """As of `StateExtra`.

        With another number of replicas each begins from the mean; without DiLoCo before, from the weights.
        """
        saved, layout = state.extra[self.name], self.placed(self.plain).state
        places = layout.extra[self.name]
        one, weights, optimizer = saved[ONE][WEIGHTS], saved[ALL][WEIGHTS], saved[ALL][OPTIMIZER]
        if lacks(weights):
            spread = jax.jit(self._spread, out_shardings=places[WEIGHTS])
            weights = spread(state.params if lacks(one) else one)
        if lacks(optimizer):
            optimizer = jax.jit(self._spread, out_shardings=layout.optimizer)(state.optimizer)
        value = {WEIGHTS: weights}
        if self.diloco.momentum:
            momentum = saved[MOMENTUM]
            if lacks(momentum):
                momentum = jax.jit(_zeros, out_shardings=places[MOMENTUM])(state.params)
            value[MOMENTUM] = momentum
        return dataclasses.replace(state, optimizer=optimizer, extra={**state.extra, self.name: value})

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """As of `StateExtra`: by parameter, behind the dim of replicas where all have their own."""
        saved = abstract.extra[self.name]
        structure = jax.tree.structure(abstract.optimizer)
        trees = jax.tree.unflatten(structure, self.plain.owners(self.optimizer)), roles(abstract.optimizer)
        owners, kinds = (jax.tree.map(lambda _: "", saved) for _ in trees)
        owners[ALL][OPTIMIZER], kinds[ALL][OPTIMIZER] = trees

        def part(path: KeyPath, leaf: jax.ShapeDtypeStruct, owner: str, role: str) -> Part:
            which = path[0].key
            if which == MOMENTUM:
                prefix, path = f"{self.name}/{MOMENTUM}", path[1:]
            else:
                count = f"of_{self.replicas}" if which == ALL else ONE
                prefix, path = f"{self.name}/{count}/{path[1].key}", path[2:]
            name = owner if prefix.endswith(OPTIMIZER) else path_name(path)
            return naming.behind_replicas(
                which == ALL, leaf, lambda one: naming.of_param(prefix, path, name or None, one, role)
            )

        return jax.tree_util.tree_map_with_path(part, saved, owners, kinds)

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """As of `StateExtra`."""
        missing = [name for name in wanted if name.startswith(f"{self.name}/") and name not in names]
        if any(name.startswith(f"{self.name}/{ONE}/") for name in missing):
            return f"; it was trained without diloco: {self.replicas} replicas begin with its weights"
        if any(name.startswith(f"{self.name}/of_{self.replicas}/") for name in missing):
            return f"; it had another number of replicas: {self.replicas} begin with their mean"
        if any(name.startswith(f"{self.name}/{MOMENTUM}/") for name in missing):
            return "; it had no outer momentum, which begins with zero"
        return ""

    def check(self, program: CompiledProgram) -> None:
        """As of `StateExtra`: single numbers alone cross the replica axis between meetings."""
        sent = bytes_over(program.collectives, REPLICA_AXIS, self.replicas, slices=program.slices)
        check_alone(self.diloco, sent)


def _zeros(params: Params) -> Params:
    """Outer momentum before the first meeting."""
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)


def _mean(tree: PyTree) -> PyTree:
    """What one replica would have of what all have; of what has no mean, such as codes, the first's."""

    def one(leaf: Array | Quantized) -> Array | Quantized:
        if isinstance(leaf, Quantized) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.tree.map(lambda x: x[0], leaf)
        return jnp.mean(leaf, 0)

    return jax.tree.map(one, tree, is_leaf=is_quantized)
