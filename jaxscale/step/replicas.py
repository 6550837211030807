"""Replicas: the arrays that DiLoCo adds to a train state, their placement, synchronization and form in checkpoints.

The parameters of the train state are the weights that all replicas share (θ); evaluation, samples and export read θ.
Each replica also has weights (w_i) and optimizer state of its own, in arrays with a first dim for the replicas. The
weights are divided into fragments. In a meeting, the replicas synchronize one fragment: θ moves by the mean of the
replicas' displacements θ - w_i. Every device sends its shard of the displacements over the replica axis. Under every
ZeRO stage, no two devices of a replica send the same values.

A checkpoint holds the arrays of all replicas and the mean over the replicas. So a run can continue from the mean with
another number of replicas, or from θ without DiLoCo. A run without DiLoCo can continue with DiLoCo.
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
from jaxscale.optim.update_guard import GuardedAdvance, UpdateGuard
from jaxscale.replicas import wire
from jaxscale.replicas.low_communication import Diloco, fragments_of
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf
from jaxscale.sharding.memory_space import in_memory_of
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import REPLICA_AXIS, AbstractArrays, Layout, shardings_of
from jaxscale.state.naming import Naming, Part, roles
from jaxscale.state.train_state import Metrics, TrainState
from jaxscale.step.compiled_checks import bytes_over, check_inner_step
from jaxscale.step.exchange import REDUCE, ExchangeResult
from jaxscale.step.gradients import LossAndGradients, Objective
from jaxscale.step.planned_model import Specs
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Bool, Params, PyTree
from jaxscale.values.byte_sizes import bytes_at_least

R = TypeVar("R")
OUTER = "outer"
"""Name of the `StateExtra` of DiLoCo: each replica's own weights, and the outer momentum."""
WEIGHTS, MOMENTUM, OPTIMIZER = "weights", "momentum", "optimizer"
"""Keys of the value of DiLoCo's extra, in the train state and in a checkpoint."""
ONE_REPLICA, ALL_REPLICAS = "one", "all"
"""Keys of DiLoCo's extra in a checkpoint: for the means over the replicas, and for the arrays of every replica."""


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """The `StateExtra` of DiLoCo, and its computations: replicas train alone, and synchronize weights in meetings.

    Args:
        diloco: settings of DiLoCo: when replicas meet, and the outer step that they then take.
        plain_layout: the layout of the train state without extras.
        optimizer: the whole optimizer of each replica, clipping included.
        displacement_leaves: shape and placement of each displacement that is sent, by the parameter's name.
        guard: the condition that an outer step must meet.
        displacement_exchange: the exchange of all displacements by the codec; `None` sends them in float32.
        name: key of this extra in `TrainState.extra`.
        label: name of this extra in tables of memory.

    Raises:
        UserError: there are more fragments than tensors, or the codec supports no tensor of a fragment.
    """

    diloco: Diloco
    plain_layout: Layout
    optimizer: optax.GradientTransformation
    displacement_leaves: Mapping[str, GradientLeaf]
    guard: UpdateGuard
    displacement_exchange: GradientExchange | None = None
    name: str = dataclasses.field(default=OUTER, init=False)
    label: str = dataclasses.field(default="outer state", init=False)

    def __post_init__(self) -> None:
        assert len(self.fragment_exchanges) == len(self.names_of_fragments)

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def replica_count(self) -> int:
        """Number of replicas."""
        return self.plain_layout.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def names_of_fragments(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each fragment."""
        element_count_by_name = {
            name: leaf.size for name, leaf in named_leaves(self.plain_layout.abstract.params).items()
        }
        return fragments_of(element_count_by_name, self.diloco.fragments)

    @functools.cached_property
    def fragment_exchanges(self) -> tuple[GradientExchange | None, ...]:
        """For each fragment, the exchange of its displacements by the codec; `None` without a codec."""
        if self.displacement_exchange is None:
            return (None,) * len(self.names_of_fragments)
        leaves_of_fragments = [
            {name: self.displacement_leaves[name] for name in names} for names in self.names_of_fragments
        ]
        return tuple(dataclasses.replace(self.displacement_exchange, leaves=leaves) for leaves in leaves_of_fragments)

    def exact_bytes(self, fragment_index: int) -> int:
        """Return the bytes that a device would send over the replica axis in float32, in the meeting of a fragment."""
        leaves = [self.displacement_leaves[name] for name in self.names_of_fragments[fragment_index]]
        local_shapes = [NamedSharding(self.plain_layout.mesh, leaf.spec).shard_shape(leaf.shape) for leaf in leaves]
        return sum(wire.exact(local_shape, self.replica_count) for local_shape in local_shapes)

    def wire_bytes(self, fragment_index: int) -> int:
        """Return the bytes that a device sends over the replica axis in the meeting of a fragment."""
        exchange = self.fragment_exchanges[fragment_index]
        return self.exact_bytes(fragment_index) if exchange is None else exchange.wire_bytes

    def describe(self) -> list[str]:
        """Return a line for the user on the bytes sent over the replica axis, and on how often they are sent."""
        diloco, fragment_count = self.diloco, len(self.names_of_fragments)
        fragment_indices = range(fragment_count)
        byte_texts = [bytes_at_least(self.wire_bytes(index)) for index in fragment_indices]
        bytes_ratio = sum(map(self.exact_bytes, fragment_indices)) / sum(map(self.wire_bytes, fragment_indices))
        codec_text = f", {bytes_ratio:.1f} times fewer than float32," if self.displacement_exchange else ""
        return [
            f"diloco {diloco}: {self.replica_count} replicas train alone, and {' and '.join(byte_texts)} per "
            f"device{codec_text} cross {REPLICA_AXIS} every {diloco.every} steps{' in turn' * (fragment_count > 1)}; "
            "single numbers in between"
        ]

    # -- the state -----------------------------------------------------------------------------------------------------

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout with this extra added, and with a first dim for the replicas in the optimizer's state."""
        abstract_optimizer = self._add_replica_dim(layout.abstract.optimizer)
        shardings = dataclasses.replace(layout.state_shardings, optimizer=shardings_of(abstract_optimizer))
        abstract_state = dataclasses.replace(layout.abstract, optimizer=abstract_optimizer)
        replica_layout = dataclasses.replace(layout, state_shardings=shardings, abstract=abstract_state)
        return replica_layout.with_extra(self.name, self._abstract_outer_state())

    def _add_replica_dim(self, abstract: AbstractArrays) -> AbstractArrays:
        """Return abstract arrays with a first dim for the replicas, split over the replica axis."""

        def add_to_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            mesh, spec = leaf.sharding.mesh, PartitionSpec(REPLICA_AXIS, *leaf.sharding.spec)
            sharding = in_memory_of(leaf.sharding, NamedSharding(mesh, spec))
            return jax.ShapeDtypeStruct((self.replica_count, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(add_to_leaf, abstract)

    def _abstract_outer_state(self) -> dict[str, AbstractArrays]:
        """Return the shapes, dtypes and shardings of the value of this extra."""
        abstract_params = self.plain_layout.abstract.params
        abstract_outer_state = {WEIGHTS: self._add_replica_dim(abstract_params)}
        if self.diloco.momentum:
            abstract_outer_state[MOMENTUM] = jax.tree_util.tree_map_with_path(
                lambda path, leaf: jax.ShapeDtypeStruct(
                    leaf.shape,
                    jnp.float32,
                    sharding=NamedSharding(self.plain_layout.mesh, self.displacement_leaves[path_name(path)].spec),
                ),
                abstract_params,
            )
        return abstract_outer_state

    def _spread(self, tree: PyTree) -> PyTree:
        """Return a tree with each array repeated for every replica, along a new first dim."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replica_count, *x.shape)), tree)

    def init_optimizer(self, params: Params) -> optax.OptState:
        """Return each replica's initial optimizer state, along a first dim. Callers jit this with `out_shardings`."""
        return self._spread(self.optimizer.init(params))

    def init(self, state: TrainState) -> dict[str, Params]:
        """Return the initial value of this extra: each replica has the shared weights, and any momentum is zero."""
        outer_state = {WEIGHTS: self._spread(state.params)}
        if self.diloco.momentum:
            outer_state[MOMENTUM] = _zero_momentum(state.params)
        return outer_state

    # -- steps alone ---------------------------------------------------------------------------------------------------

    def gradients(self, objective: Objective, state: TrainState, batch: Batch) -> LossAndGradients:
        """Compute the gradients of each replica at its own weights, and return them with the loss."""
        return objective.gradients_by_replica(state, batch, state.extra[self.name][WEIGHTS])

    def update(
        self, advance: GuardedAdvance, exchange_result: ExchangeResult, state: TrainState, is_good: Bool[Array, ""]
    ) -> tuple[TrainState, Bool[Array, ""]]:
        """Update each replica by itself, in a region that is manual over replicas.

        Args:
            advance: function that applies one update of the optimizer, either on all replicas or on none.
            exchange_result: each replica's gradients and their norms.
            state: the state before the update.
            is_good: whether the step is good so far; if not, weights and optimizer state are left unchanged.

        Returns:
            The new state, and whether the step was applied.
        """
        replica_spec, whole_spec = PartitionSpec(REPLICA_AXIS), PartitionSpec()
        outer_state = state.extra[self.name]

        def update_replica(
            gradients: Params, optimizer_state: optax.OptState, weights: Params, clip_norm: Array, is_good: Array
        ) -> tuple[Params, optax.OptState, Array]:
            """Return (weights, optimizer state, `is_good`) of one replica; the arrays have a first dim of 1."""
            own_gradients, own_state, own_weights, own_norm = jax.tree.map(
                lambda x: x[0], (gradients, optimizer_state, weights, clip_norm)
            )
            *new_trees, is_good = advance(own_gradients, own_state, own_weights, own_norm, is_good)
            return (*jax.tree.map(lambda x: x[None], new_trees), is_good)

        input_specs = (replica_spec, replica_spec, replica_spec, replica_spec, whole_spec)
        output_specs = (replica_spec, replica_spec, whole_spec)
        weights, optimizer_state, is_good = self._manual_over_replicas(update_replica, input_specs, output_specs)(
            exchange_result.gradients, state.optimizer, outer_state[WEIGHTS], exchange_result.clip_norms, is_good
        )
        extra = {**state.extra, self.name: {**outer_state, WEIGHTS: weights}}
        return dataclasses.replace(state, optimizer=optimizer_state, extra=extra), is_good

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meet(self, fragment_index: int, state: TrainState) -> tuple[TrainState, Metrics]:
        """Synchronize a fragment of the weights. Callers jit this, and donate the state.

        If the weights of a replica are not finite, all weights stay unchanged.

        Args:
            fragment_index: index of the fragment.
            state: the train state.

        Returns:
            The state after the meeting, and its metrics: the numbers of skipped steps and, with a codec, the norm of
            the residuals. An outer step that `guard` does not allow counts as a skipped step.
        """
        exchange, names = self.fragment_exchanges[fragment_index], self.names_of_fragments[fragment_index]
        whole_spec, replica_spec = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
        outer_state, extra = state.extra[self.name], dict(state.extra)
        metrics: Metrics = {}
        shared_weights, replica_weights = named_leaves(state.params), named_leaves(outer_state[WEIGHTS])
        momenta = named_leaves(outer_state.get(MOMENTUM, {}))
        thetas = {name: shared_weights[name] for name in names}
        displacement_specs = {name: self.displacement_leaves[name].spec for name in names}

        def displace(thetas: Params, replica_weights: Params) -> dict[str, Array]:
            """Return this replica's displacement of each weight, with a first dim of 1."""
            return {
                name: self._constrain(thetas[name] - replica_weights[name][0], displacement_specs[name])[None]
                for name in names
            }

        displacements = self._manual_over_replicas(displace, (whole_spec, replica_spec), replica_spec)(
            thetas, {name: replica_weights[name] for name in names}
        )
        if exchange is not None:
            codec_states = state.extra[REDUCE]
            reduction = exchange(displacements, {name: codec_states[name] for name in exchange.coded_names}, state.step)
            mean_displacements, extra[REDUCE] = reduction.mean, {**codec_states, **reduction.states}
            metrics = {"residual_norm": reduction.residual_norm}
        else:
            mean_displacements = jax.shard_map(
                lambda local_displacements: jax.tree.map(lambda x: lax.pmean(x[0], REPLICA_AXIS), local_displacements),
                mesh=self.plain_layout.mesh,
                in_specs=({name: PartitionSpec(REPLICA_AXIS, *spec) for name, spec in displacement_specs.items()},),
                out_specs=displacement_specs,
            )(displacements)
        master_shardings = named_leaves(self.plain_layout.master_shardings)

        def take_outer_step(
            thetas: Params, momenta: Params, mean_displacements: Params
        ) -> dict[str, tuple[Array, Array | None]]:
            """Return the new θ of each weight, and its new momentum (`None` without momentum)."""
            theta_and_momentum_by_name = {}
            for name in names:
                theta = self._constrain(thetas[name], displacement_specs[name])
                new_theta, new_momentum = self.diloco.outer_step(theta, momenta.get(name), mean_displacements[name])
                theta_and_momentum_by_name[name] = self._constrain(new_theta, master_shardings[name].spec), new_momentum
            return theta_and_momentum_by_name

        fragment_momenta = {name: momenta[name] for name in names if name in momenta}
        theta_and_momentum_by_name = self._manual_over_replicas(take_outer_step, whole_spec, whole_spec)(
            thetas, fragment_momenta, mean_displacements
        )
        is_good = self.guard.allows(
            {name: theta - thetas[name] for name, (theta, _) in theta_and_momentum_by_name.items()}, thetas
        )
        for name, (theta, momentum) in theta_and_momentum_by_name.items():
            shared_weights[name] = jnp.where(is_good, theta, thetas[name])
            replica_weights[name] = jnp.where(is_good, theta[None], replica_weights[name])
            if momentum is not None:
                momenta[name] = jnp.where(is_good, momentum, momenta[name])

        extra[self.name] = {WEIGHTS: filled(outer_state[WEIGHTS], replica_weights)}
        if momenta:
            extra[self.name][MOMENTUM] = filled(outer_state[MOMENTUM], momenta)
        skipped_count = (~is_good).astype(jnp.int32)
        watch = dataclasses.replace(
            state.watch, skipped=state.watch.skipped + skipped_count, in_row=state.watch.in_row + skipped_count
        )
        metrics |= {"skipped": watch.skipped, "skipped_in_row": watch.in_row}
        params = filled(state.params, shared_weights)
        return dataclasses.replace(state, params=params, extra=extra, watch=watch), metrics

    def _manual_over_replicas(
        self, function: Callable[..., R], input_specs: Specs, output_specs: Specs
    ) -> Callable[..., R]:
        """Return `function`, run in a region that is manual over replicas: XLA sends nothing between them."""
        return jax.shard_map(
            function,
            mesh=self.plain_layout.mesh,
            in_specs=input_specs,
            out_specs=output_specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def _constrain(self, x: Array, spec: PartitionSpec) -> Array:
        """Constrain an array to a placement, inside or outside of a manual region, and return it."""
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    # -- in checkpoints ------------------------------------------------------------------------------------------------

    def to_saved(self, state: TrainState) -> TrainState:
        """Return the train state for a checkpoint, with the means over the replicas and with every replica's arrays."""
        return self._in_saved_form(state, _mean(state.extra[self.name][WEIGHTS]), _mean(state.optimizer))

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the shapes, dtypes and placements of the train state that `to_saved` returns."""
        plain_state = self.plain_layout.abstract
        return self._in_saved_form(abstract, plain_state.params, plain_state.optimizer)

    def _in_saved_form(
        self, state: TrainState, mean_weights: Params, mean_optimizer_state: optax.OptState
    ) -> TrainState:
        """Return a train state in the form that a checkpoint holds.

        Args:
            state: the train state, of arrays or of abstract arrays.
            mean_weights: mean of the replicas' weights, from which a run with another number of replicas continues.
            mean_optimizer_state: mean of the replicas' optimizer states, from which any other run continues.
        """
        outer_state = dict(state.extra[self.name])
        trees_of_all_replicas = {WEIGHTS: outer_state.pop(WEIGHTS), OPTIMIZER: state.optimizer}
        saved_outer_state = {ALL_REPLICAS: trees_of_all_replicas, ONE_REPLICA: {WEIGHTS: mean_weights}, **outer_state}
        return dataclasses.replace(
            state, optimizer=mean_optimizer_state, extra={**state.extra, self.name: saved_outer_state}
        )

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the train state of a step, from the one that a checkpoint holds.

        If the number of replicas has changed, each replica starts from the mean of the saved replicas. If the run had
        no DiLoCo before, each replica starts from the weights of that run.
        """
        saved_outer_state, shardings = state.extra[self.name], self.add_to_layout(self.plain_layout).state_shardings
        outer_shardings = shardings.extra[self.name]
        mean_weights, trees_of_all_replicas = saved_outer_state[ONE_REPLICA][WEIGHTS], saved_outer_state[ALL_REPLICAS]
        replica_weights, optimizer_state = trees_of_all_replicas[WEIGHTS], trees_of_all_replicas[OPTIMIZER]
        if lacks(replica_weights):
            spread_fn = jax.jit(self._spread, out_shardings=outer_shardings[WEIGHTS])
            replica_weights = spread_fn(state.params if lacks(mean_weights) else mean_weights)
        if lacks(optimizer_state):
            optimizer_state = jax.jit(self._spread, out_shardings=shardings.optimizer)(state.optimizer)
        outer_state = {WEIGHTS: replica_weights}
        if self.diloco.momentum:
            momentum = saved_outer_state[MOMENTUM]
            if lacks(momentum):
                momentum = jax.jit(_zero_momentum, out_shardings=outer_shardings[MOMENTUM])(state.params)
            outer_state[MOMENTUM] = momentum
        return dataclasses.replace(state, optimizer=optimizer_state, extra={**state.extra, self.name: outer_state})

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return the `Part` of each leaf of the saved extra; leaves under `ALL_REPLICAS` have a replica dim.

        Args:
            naming: gives the names of the arrays that come from leaves shaped like parameters.
            abstract: shapes of the train state in its saved form.
        """
        saved_outer_state, optimizer_treedef = abstract.extra[self.name], jax.tree.structure(abstract.optimizer)
        # trees like the saved extra: the parameter whose shape each leaf of the optimizer state has, and its role
        owner_tree, role_tree = (jax.tree.map(lambda _: "", saved_outer_state) for _ in range(2))
        owner_tree[ALL_REPLICAS][OPTIMIZER] = optimizer_treedef.unflatten(self.plain_layout.owner_names(self.optimizer))
        role_tree[ALL_REPLICAS][OPTIMIZER] = roles(abstract.optimizer)

        def part_of(path: KeyPath, leaf: jax.ShapeDtypeStruct, owner: str, role: str) -> Part:
            group = path[0].key  # ONE_REPLICA, ALL_REPLICAS or MOMENTUM
            if group == MOMENTUM:
                prefix, leaf_path = f"{self.name}/{MOMENTUM}", path[1:]
            else:
                replica_prefix = f"of_{self.replica_count}" if group == ALL_REPLICAS else ONE_REPLICA
                prefix, leaf_path = f"{self.name}/{replica_prefix}/{path[1].key}", path[2:]
            param_name = owner if prefix.endswith(OPTIMIZER) else path_name(leaf_path)
            return naming.with_replica_dim(
                group == ALL_REPLICAS,
                leaf,
                lambda replica_leaf: naming.part_of_param(prefix, leaf_path, param_name or None, replica_leaf, role),
            )

        return jax.tree_util.tree_map_with_path(part_of, saved_outer_state, owner_tree, role_tree)

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user on arrays of this extra that a checkpoint lacks; empty if it lacks none.

        Args:
            saved_names: names of the arrays in the checkpoint.
            step_names: names of the arrays that the step restores.
        """
        missing_names = [name for name in step_names if name.startswith(f"{self.name}/") and name not in saved_names]
        if any(name.startswith(f"{self.name}/{ONE_REPLICA}/") for name in missing_names):
            return f"; it was trained without diloco, so {self.replica_count} replicas start from its weights"
        if any(name.startswith(f"{self.name}/of_{self.replica_count}/") for name in missing_names):
            return f"; it had another number of replicas, so {self.replica_count} replicas start from their mean"
        if any(name.startswith(f"{self.name}/{MOMENTUM}/") for name in missing_names):
            return "; it had no outer momentum, which starts from zero"
        return ""

    def check(self, program: CompiledProgram) -> None:
        """Check that the compiled step sends only scalars over the replica axis."""
        sent_bytes = bytes_over(program.collectives, REPLICA_AXIS, self.replica_count, slice_count=program.slice_count)
        check_inner_step(self.diloco, sent_bytes)


def _zero_momentum(params: Params) -> Params:
    """Return the outer momentum before the first meeting: float32 zeros in the shapes of the parameters."""
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)


def _mean(tree: PyTree) -> PyTree:
    """Return each array's mean over its first dim, the replicas; integer and quantized arrays are replica 0's."""

    def mean_leaf(leaf: Array | Quantized) -> Array | Quantized:
        if isinstance(leaf, Quantized) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.tree.map(lambda x: x[0], leaf)
        return jnp.mean(leaf, 0)

    return jax.tree.map(mean_leaf, tree, is_leaf=is_quantized)
