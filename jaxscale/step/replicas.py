"""Replicas: what DiLoCo adds to a train state, where it lies, how replicas synchronise, and what a checkpoint holds.

The parameters of the state are the weights that all replicas share (θ): evaluation, samples and export read them. Each
replica's own weights, and its optimizer state, lie along a first dim for the replicas. In a meeting, replicas
synchronise one fragment of the weights (a part of them): θ moves by the mean displacement θ - w_i of the replicas'
weights. Every device sends its shard of the displacements over the replica axis, and no two devices of a replica send
the same number, whatever ZeRO's stage.

A checkpoint holds the arrays of all replicas, and also their mean, for a single replica. So a run can continue from
that mean with another number of replicas, or from θ without DiLoCo. A run without DiLoCo can continue with DiLoCo.
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
from jaxscale.replicas.low_communication import Diloco, fragments_of
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
"""Name of this `StateExtra`: each replica's own weights, and the outer momentum."""
WEIGHTS, MOMENTUM, OPTIMIZER = "weights", "momentum", "optimizer"
"""Keys of the value of this extra, and of its saved form."""
ONE, ALL = "one", "all"
"""Keys of the saved form: the arrays of a single replica in place of all, and the arrays of all replicas."""


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """DiLoCo on a mesh: replicas that train alone, and synchronise their weights in meetings.

    Args:
        diloco: when replicas meet, and the outer step that they then take.
        plain: the layout of the train state without extras.
        optimizer: the whole optimizer of each replica, clipping included.
        leaves: shape and placement of each displacement that is sent, by the parameter's name.
        stage: the exchange of all displacements by the codec; `None` sends them in float32.

    Raises:
        UserError: there are more fragments than tensors, or the codec can be applied to no tensor of a fragment.
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
        """Number of replicas."""
        return self.plain.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each fragment."""
        sizes = {name: leaf.size for name, leaf in named_leaves(self.plain.abstract.params).items()}
        return fragments_of(sizes, self.diloco.fragments)

    @functools.cached_property
    def stages(self) -> tuple[GradientExchange | None, ...]:
        """The exchange of each fragment by the codec; `None` for each without a codec."""
        if self.stage is None:
            return (None,) * len(self.fragments)
        leaves_by_fragment = [{name: self.leaves[name] for name in names} for names in self.fragments]
        return tuple(dataclasses.replace(self.stage, leaves=leaves) for leaves in leaves_by_fragment)

    def exact_bytes(self, fragment: int) -> int:
        """Bytes that a device sends over the replica axis in a meeting of a fragment, in float32."""
        leaves = [self.leaves[name] for name in self.fragments[fragment]]
        shapes = [NamedSharding(self.plain.mesh, leaf.spec).shard_shape(leaf.shape) for leaf in leaves]
        return sum(wire.exact(shape, self.replicas) for shape in shapes)

    def wire_bytes(self, fragment: int) -> int:
        """Bytes that a device sends over the replica axis in a meeting of a fragment, by the codec if there is one."""
        stage = self.stages[fragment]
        return self.exact_bytes(fragment) if stage is None else stage.wire_bytes

    def describe(self) -> list[str]:
        """As in `StateExtra`: a line on how many bytes are sent, and how often."""
        count, diloco = len(self.fragments), self.diloco
        byte_texts = [bytes_at_least(self.wire_bytes(fragment)) for fragment in range(count)]
        ratio = sum(map(self.exact_bytes, range(count))) / sum(map(self.wire_bytes, range(count)))
        codec_text = f", {ratio:.1f} times fewer than float32," if self.stage else ""
        return [
            f"diloco {diloco}: {self.replicas} replicas train alone, and {' and '.join(byte_texts)} per "
            f"device{codec_text} cross {REPLICA_AXIS} every {diloco.every} steps{' in turn' * (count > 1)}; "
            "single numbers in between"
        ]

    # -- the state -----------------------------------------------------------------------------------------------------

    def placed(self, layout: Layout) -> Layout:
        """As in `StateExtra`; the optimizer's state has a dim of replicas too."""
        optimizer = self._abstract_apart(layout.abstract.optimizer)
        state = dataclasses.replace(layout.state, optimizer=shardings_of(optimizer))
        abstract = dataclasses.replace(layout.abstract, optimizer=optimizer)
        return dataclasses.replace(layout, state=state, abstract=abstract).with_extra(self.name, self._abstract())

    def _abstract_apart(self, abstract: Shapes) -> Shapes:
        """Shapes with a first dim for the replicas."""

        def apart(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            plain = leaf.sharding
            sharding = in_memory_of(plain, NamedSharding(plain.mesh, PartitionSpec(REPLICA_AXIS, *plain.spec)))
            return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(apart, abstract)

    def _abstract(self) -> dict[str, Shapes]:
        """Shapes, dtypes and shardings of the value of this extra."""
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
        """Arrays repeated for every replica, along a new first dim."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), tree)

    def init_optimizer(self, params: Params) -> optax.OptState:
        """Each replica's optimizer state before the first step: a function to jit with `out_shardings`."""
        return self._spread(self.optimizer.init(params))

    def init(self, state: TrainState) -> dict[str, Params]:
        """As in `StateExtra`: all replicas begin with the shared weights."""
        outer_state = {WEIGHTS: self._spread(state.params)}
        if self.diloco.momentum:
            outer_state[MOMENTUM] = _zeros(state.params)
        return outer_state

    # -- steps alone ---------------------------------------------------------------------------------------------------

    def gradients(self, objective: Objective, state: TrainState, batch: Batch) -> LossAndGradients:
        """Compute the gradients of each replica at its own weights, and return them with the loss."""
        return objective.gradients_apart(state, batch, state.extra[self.name][WEIGHTS])

    def update(self, advance: Advance, exchanged: Exchanged, state: TrainState, good: Bool[Array, ""]) -> TrainState:
        """Update each replica by itself, in a region that is manual over replicas, and return the new state.

        Args:
            advance: one step of the optimizer.
            exchanged: each replica's gradients and their norms.
            state: the state before the update.
            good: whether the step is good; if not, weights and optimizer state are left unchanged.
        """
        by_replica, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()
        outer_state = state.extra[self.name]

        def body(
            gradients: Params, optimizer: optax.OptState, weights: Params, norms: Array, good: Array
        ) -> tuple[Params, optax.OptState]:
            gradients, optimizer, weights, norms = jax.tree.map(lambda x: x[0], (gradients, optimizer, weights, norms))
            return jax.tree.map(lambda x: x[None], advance(gradients, optimizer, weights, norms, good))

        weights, optimizer = self._alone(body, (by_replica, by_replica, by_replica, by_replica, whole), by_replica)(
            exchanged.gradients, state.optimizer, outer_state[WEIGHTS], exchanged.norms, good
        )
        extra = {**state.extra, self.name: {**outer_state, WEIGHTS: weights}}
        return dataclasses.replace(state, optimizer=optimizer, extra=extra)

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meet(self, fragment: int, state: TrainState) -> tuple[TrainState, Metrics]:
        """Synchronise a fragment of the weights: a function to jit, whose state is donated.

        If the weights of a replica are not finite, all weights stay unchanged.

        Args:
            fragment: index of the fragment.
            state: the train state.

        Returns:
            The state after the meeting, and with a codec the norm of the residuals.
        """
        stage, names, mesh = self.stages[fragment], self.fragments[fragment], self.plain.mesh
        whole, by_replica = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
        outer_state, extra = state.extra[self.name], dict(state.extra)
        metrics: Metrics = {}
        shared, own = named_leaves(state.params), named_leaves(outer_state[WEIGHTS])
        momenta = named_leaves(outer_state.get(MOMENTUM, {}))
        thetas = {name: shared[name] for name in names}

        def displace(thetas: Params, own: Params) -> dict[str, Array]:
            return {n: self._constrained(thetas[n] - own[n][0], self.leaves[n].spec)[None] for n in names}

        displacements = self._alone(displace, (whole, by_replica), by_replica)(thetas, {n: own[n] for n in names})
        if stage is not None:
            residuals = state.extra[REDUCE]
            reduced = stage(displacements, {name: residuals[name] for name in stage.coded_names}, state.step)
            means, extra[REDUCE] = reduced.mean, {**residuals, **reduced.states}
            metrics = {"residual_norm": reduced.residual_norm}
        else:
            specs = {name: self.leaves[name].spec for name in names}
            means = jax.shard_map(
                lambda arrays: jax.tree.map(lambda array: lax.pmean(array[0], REPLICA_AXIS), arrays),
                mesh=mesh,
                in_specs=({name: PartitionSpec(REPLICA_AXIS, *spec) for name, spec in specs.items()},),
                out_specs=specs,
            )(displacements)
        is_good = jnp.isfinite(optax.tree.norm(means))
        masters = named_leaves(self.plain.masters)

        def moved(thetas: Params, momenta: Params, means: Params) -> dict[str, tuple[Array, Array | None]]:
            new_arrays = {}
            for name in names:
                theta = self._constrained(thetas[name], self.leaves[name].spec)
                weight, momentum = self.diloco.outer_step(theta, momenta.get(name), means[name])
                weight = jnp.where(is_good, weight, theta)
                if momentum is not None:
                    momentum = jnp.where(is_good, momentum, momenta[name])
                new_arrays[name] = self._constrained(weight, masters[name].spec), momentum
            return new_arrays

        fragment_momenta = {name: momenta[name] for name in names if name in momenta}
        new_arrays = self._alone(moved, whole, whole)(thetas, fragment_momenta, means)
        for name, (weight, momentum) in new_arrays.items():
            shared[name] = weight
            own[name] = jnp.where(is_good, weight[None], own[name])
            if momentum is not None:
                momenta[name] = momentum

        extra[self.name] = {WEIGHTS: filled(outer_state[WEIGHTS], own)}
        if momenta:
            extra[self.name][MOMENTUM] = filled(outer_state[MOMENTUM], momenta)
        return dataclasses.replace(state, params=filled(state.params, shared), extra=extra), metrics

    def _alone(self, function: Callable[..., R], inputs: Specs, outputs: Specs) -> Callable[..., R]:
        """`function` in a region that is manual over replicas, so that it sends nothing between replicas."""
        return jax.shard_map(
            function,
            mesh=self.plain.mesh,
            in_specs=inputs,
            out_specs=outputs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
        """An array constrained to a placement, inside or outside of a manual region."""
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    # -- in checkpoints ------------------------------------------------------------------------------------------------

    def saved(self, state: TrainState) -> TrainState:
        """As in `StateExtra`: the optimizer state is that of a single replica; the extra has those of all replicas."""
        return self._saved(state, _mean(state.extra[self.name][WEIGHTS]), _mean(state.optimizer))

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """As in `StateExtra`."""
        return self._saved(abstract, self.plain.abstract.params, self.plain.abstract.optimizer)

    def _saved(self, state: TrainState, weights: Params, optimizer: optax.OptState) -> TrainState:
        """A state in the form that a checkpoint holds.

        Args:
            state: the train state.
            weights: mean weights of the replicas, from which a run without replicas continues.
            optimizer: mean optimizer state of the replicas, likewise.
        """
        outer_state = dict(state.extra[self.name])
        all_replicas = {WEIGHTS: outer_state.pop(WEIGHTS), OPTIMIZER: state.optimizer}
        saved = {ALL: all_replicas, ONE: {WEIGHTS: weights}, **outer_state}
        return dataclasses.replace(state, optimizer=optimizer, extra={**state.extra, self.name: saved})

    def loaded(self, state: TrainState) -> TrainState:
        """As in `StateExtra`.

        If the number of replicas has changed, each starts from the mean of the saved replicas. If the run had no DiLoCo
        before, each starts from the weights of that run.
        """
        saved, shardings = state.extra[self.name], self.placed(self.plain).state
        outer_shardings = shardings.extra[self.name]
        mean_weights, weights, optimizer = saved[ONE][WEIGHTS], saved[ALL][WEIGHTS], saved[ALL][OPTIMIZER]
        if lacks(weights):
            spread = jax.jit(self._spread, out_shardings=outer_shardings[WEIGHTS])
            weights = spread(state.params if lacks(mean_weights) else mean_weights)
        if lacks(optimizer):
            optimizer = jax.jit(self._spread, out_shardings=shardings.optimizer)(state.optimizer)
        outer_state = {WEIGHTS: weights}
        if self.diloco.momentum:
            momentum = saved[MOMENTUM]
            if lacks(momentum):
                momentum = jax.jit(_zeros, out_shardings=outer_shardings[MOMENTUM])(state.params)
            outer_state[MOMENTUM] = momentum
        return dataclasses.replace(state, optimizer=optimizer, extra={**state.extra, self.name: outer_state})

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """As in `StateExtra`: arrays are named by their parameter; those of all replicas have a first dim for them."""
        saved = abstract.extra[self.name]
        structure = jax.tree.structure(abstract.optimizer)
        trees = jax.tree.unflatten(structure, self.plain.owners(self.optimizer)), roles(abstract.optimizer)
        owners, kinds = (jax.tree.map(lambda _: "", saved) for _ in trees)
        owners[ALL][OPTIMIZER], kinds[ALL][OPTIMIZER] = trees

        def part(path: KeyPath, leaf: jax.ShapeDtypeStruct, owner: str, role: str) -> Part:
            key = path[0].key  # ONE, ALL or MOMENTUM
            if key == MOMENTUM:
                prefix, path = f"{self.name}/{MOMENTUM}", path[1:]
            else:
                count = f"of_{self.replicas}" if key == ALL else ONE
                prefix, path = f"{self.name}/{count}/{path[1].key}", path[2:]
            name = owner if prefix.endswith(OPTIMIZER) else path_name(path)
            return naming.behind_replicas(
                key == ALL, leaf, lambda one: naming.of_param(prefix, path, name or None, one, role)
            )

        return jax.tree_util.tree_map_with_path(part, saved, owners, kinds)

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """As in `StateExtra`."""
        missing = [name for name in wanted if name.startswith(f"{self.name}/") and name not in names]
        if any(name.startswith(f"{self.name}/{ONE}/") for name in missing):
            return f"; it was trained without diloco, so {self.replicas} replicas start from its weights"
        if any(name.startswith(f"{self.name}/of_{self.replicas}/") for name in missing):
            return f"; it had another number of replicas, so {self.replicas} replicas start from their mean"
        if any(name.startswith(f"{self.name}/{MOMENTUM}/") for name in missing):
            return "; it had no outer momentum, which starts from zero"
        return ""

    def check(self, program: CompiledProgram) -> None:
        """As in `StateExtra`: check that a step sends only single numbers over the replica axis."""
        sent_bytes = bytes_over(program.collectives, REPLICA_AXIS, self.replicas, slices=program.slices)
        check_alone(self.diloco, sent_bytes)


def _zeros(params: Params) -> Params:
    """Outer momentum before the first meeting."""
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)


def _mean(tree: PyTree) -> PyTree:
    """The mean of arrays over their first dim, the replicas; for quantized and integer arrays, those of replica 0."""

    def mean_leaf(leaf: Array | Quantized) -> Array | Quantized:
        if isinstance(leaf, Quantized) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.tree.map(lambda x: x[0], leaf)
        return jnp.mean(leaf, 0)

    return jax.tree.map(mean_leaf, tree, is_leaf=is_quantized)
