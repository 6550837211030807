"""Gradients: the loss of a global batch and its gradients, computed as the plan specifies.

Loss and gradients are means over all targets of the global batch, whatever the mesh, the packing and the number of
microbatches: sums are computed over parts of the batch, added, and divided once. ZeRO is expressed by sharding
constraints in Auto mode. XLA turns them into the collectives that the table in `sharding/zero.py` implies.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxscale.blocks import Context, Loss
from jaxscale.model_traits import ModelTraits
from jaxscale.models.scores import Metric, RowParts, metric_sums, rows_in_parts
from jaxscale.replicas.named import NamedCodec
from jaxscale.sharding.memory_space import to_device
from jaxscale.state.batches import microbatches
from jaxscale.state.layout import REPLICA_AXIS
from jaxscale.state.train_state import TrainState
from jaxscale.step.planned_model import FromWeights, PlannedModel, leaves_as_params, positive_divisor
from jaxscale.typing import Array, Batch, Float, Key, Params, PyTree

LossAndGradients = tuple[Loss, Params, Params]
"""A tuple (sums of the loss over the targets, gradients, the model's other state, such as batch statistics)."""
Sums = TypeVar("Sums")


@runtime_checkable
class Objective(Protocol):
    """The loss of a model under a plan, with methods for gradients and for sums over a batch: `Whole` or `Pipelined`.

    Attributes:
        planned: the model under its plan.
    """

    planned: PlannedModel

    @property
    def stage_depth(self) -> int | None:
        """Number of blocks in a stage of a pipeline; `None` without a pipeline, where each device runs all blocks."""
        ...

    @property
    def stages_per_device(self) -> int:
        """Number of a pipeline's stages that one device runs; 1 without a pipeline."""
        ...

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """Return the loss and the gradients of a global batch; the gradients are float32 means over its targets."""
        ...

    def gradients_by_replica(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """Return the loss of a global batch, and each replica's own gradients along a first dim.

        The mean of the gradients over the first dim is the gradient of the global batch. No array as large as a
        parameter is sent over the replica axis.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32 weights of each replica along a first dim; `None` if all replicas use those of `state`.
        """
        ...

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """Return the sum of a score over the microbatches. They run one after another, to save memory.

        Args:
            score: function from the module and a microbatch to a tree of sums.
            state: the train state.
            batch: the global batch.
        """
        ...

    def loss_of_masters(self, params: Params, model_state: Params, batch: Batch, key: Key, row_indices: Array) -> Array:
        """Return the objective of one microbatch, from float32 masters on the device. This method is only traced.

        Args:
            params: float32 master weights.
            model_state: the model's other state.
            batch: one microbatch.
            key: key of the step.
            row_indices: index in the global batch of every row of the microbatch.
        """
        ...


def evaluate(objective: Objective, state: TrainState, batch: Batch) -> Loss:
    """Return the sums of the loss over a batch, without dropout or other randomness."""
    planned = objective.planned

    def score(module: nnx.Module, microbatch: Batch) -> Loss:
        loss = planned.loss(module, microbatch, planned.context(None))
        return Loss(loss.total, loss.weight)

    return objective.sums(score, state, batch)


def accuracy(objective: Objective, state: TrainState, batch: Batch) -> tuple[Array, Array]:
    """Return the numbers of correct targets and of all targets in a batch; the model must have a method `accuracy`."""
    planned = objective.planned
    count_correct = getattr(planned.experiment.model, "accuracy", None)
    assert count_correct is not None
    return objective.sums(
        lambda module, microbatch: count_correct(module, microbatch, planned.context(None)), state, batch
    )


def metric(objective: Objective, function: Metric, state: TrainState, batch: Batch) -> tuple[Array, Array]:
    """Return the weighted sum of a metric over a batch, and the sum of the weights."""
    planned = objective.planned
    model, context = planned.experiment.model, planned.context(None)
    return objective.sums(
        lambda module, microbatch: metric_sums(model, function, module, microbatch, context), state, batch
    )


@dataclasses.dataclass(eq=False)
class Whole:
    """The objective of a model without a pipeline: every device runs all blocks, and JAX differentiates the loss.

    Args:
        planned: the model under its plan.
        stage_depth: `None`, because there is no pipeline.
        stages_per_device: 1, because there is no pipeline.
    """

    planned: PlannedModel
    stage_depth: None = dataclasses.field(default=None, init=False)
    stages_per_device: int = dataclasses.field(default=1, init=False)

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """Return the loss and the gradients of a global batch; the gradients are float32 means over its targets."""
        with self.planned.tracing():
            weights, params_of = self.planned.differentiated_leaves(state.params)
            key, row_indices = self.planned.key(state), self.planned.row_indices(batch)
            return self._gradients(weights, params_of, state.rest, batch, key, row_indices)

    def gradients_by_replica(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """Return the loss of a global batch, and each replica's own gradients along a first dim.

        The replica axis is manual here, and the compiler handles all other axes.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32 weights of each replica along a first dim; `None` if all replicas use those of `state`.
        """
        planned, replica_count = self.planned, self.planned.layout.mesh.shape[REPLICA_AXIS]
        whole_spec, replica_spec = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def replica_gradients(
            weight_arrays: PyTree, model_state: Params, batch: Batch, key: Key, row_indices: Array
        ) -> LossAndGradients:
            """Return the loss of the global batch, and this replica's gradients with a first dim of 1.

            `weight_arrays` are (masters, copies) that all replicas share, or copies of this replica's own weights.
            """
            if weights is None:
                leaves, params_of = planned.differentiated_leaves(*weight_arrays, is_manual=True)
            else:
                leaves, params_of = jax.tree.map(lambda weight: weight[0], weight_arrays), leaves_as_params
            local_loss, gradients, new_model_state = self._gradients(
                leaves, params_of, model_state, batch, key, row_indices, replica_count
            )
            loss = jax.tree.map(lambda local_sum: jax.lax.psum(local_sum, REPLICA_AXIS), local_loss)
            return loss, jax.tree.map(lambda g: g[None], gradients), new_model_state

        with planned.tracing():
            if weights is None:
                weight_arrays, weight_spec = (state.params, planned.copies(to_device(state.params))), whole_spec
            else:
                weight_arrays = jax.vmap(planned.copies, spmd_axis_name=REPLICA_AXIS)(weights)
                weight_spec = replica_spec
            input_specs = (weight_spec, whole_spec, replica_spec, whole_spec, replica_spec)
            output_specs = (whole_spec, replica_spec, whole_spec)
            return planned.shard_map_of(replica_gradients, (REPLICA_AXIS,), input_specs, output_specs)(
                weight_arrays, state.rest, dict(batch), planned.key(state), planned.row_indices(batch)
            )

    def _gradients(
        self,
        weights: Params,
        params_of: FromWeights,
        model_state: Params,
        batch: Batch,
        key: Key,
        row_indices: Array,
        replica_count: int = 1,
    ) -> LossAndGradients:
        """Return the loss and the gradients of a global batch, or of one replica's rows in a manual region.

        Args:
            weights: the leaves with respect to which the loss is differentiated.
            params_of: function from these leaves to the module's parameters.
            model_state: the model's other state.
            batch: rows of the global batch, or of the replica.
            key: key of the step.
            row_indices: index in the global batch of every row of `batch`.
            replica_count: number of replicas inside a region that is manual over replicas; 1 outside of such a region.
        """
        planned, is_manual = self.planned, replica_count > 1

        def objective(
            weights: Params, model_state: Params, batch: Batch, context: Context
        ) -> tuple[Array, tuple[Loss, Params]]:
            """Return the scalar to differentiate, and the auxiliary (sums of the loss, the model's other state)."""
            return self._objective(params_of(weights), model_state, batch, context, replica_count)

        value_and_gradients_fn = jax.value_and_grad(objective, has_aux=True)

        def microbatch_gradients(model_state: Params, batch: Batch, row_indices: Array) -> LossAndGradients:
            """Return the loss and the gradients of one microbatch, and the model's other state after it."""
            context = planned.context(key, row_indices)
            (_, (loss, new_model_state)), gradients = value_and_gradients_fn(weights, model_state, batch, context)
            return loss, planned.place_gradients(gradients, is_manual=is_manual), new_model_state

        if planned.plan.microbatches == 1:
            return microbatch_gradients(model_state, batch, row_indices)

        def add_microbatch(carry: LossAndGradients, microbatch: tuple[Batch, Array]) -> tuple[LossAndGradients, None]:
            """Add a microbatch's loss and gradients to the sums over earlier microbatches: a body for `lax.scan`."""
            loss_sums, gradient_sums, model_state = carry
            loss, gradients, new_model_state = microbatch_gradients(model_state, *microbatch)
            return (*jax.tree.map(jnp.add, (loss_sums, gradient_sums), (loss, gradients)), new_model_state), None

        zero_gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), planned.pure_model.abstract_params)
        initial_carry = (
            Loss(jnp.zeros(()), jnp.zeros(())),
            planned.place_gradients(zero_gradients, is_manual=is_manual),
            model_state,
        )
        stacked_microbatches = microbatches((dict(batch), row_indices), count=planned.plan.microbatches)
        (loss, gradient_sums, new_model_state), _ = jax.lax.scan(add_microbatch, initial_carry, stacked_microbatches)
        gradient_scale = 1.0 / _divisor(loss.weight, replica_count)
        return loss, jax.tree.map(lambda g: g * gradient_scale, gradient_sums), new_model_state

    def _objective(
        self, params: Params, model_state: Params, batch: Batch, context: Context, replica_count: int = 1
    ) -> tuple[Array, tuple[Loss, Params]]:
        """Return the objective of a microbatch: the mean loss if the microbatch is the whole batch, otherwise the sum.

        Returns:
            A tuple (the scalar to differentiate, (sums of the loss, the model's other state)).
        """
        module = self.planned.pure_model.module(params, model_state)
        if replica_count > 1 and ModelTraits.of(self.planned.experiment.model).over == "batch":
            with rows_in_parts(RowParts(REPLICA_AXIS, replica_count)):
                loss = self.planned.loss(module, batch, context)
            # each replica has the loss of the whole batch, whose gradient is the mean of the replicas' gradients
            loss = jax.tree.map(lambda whole_sum: whole_sum / replica_count, loss)
        else:
            loss = self.planned.loss(module, batch, context)
        objective = loss.total + loss.penalty
        if self.planned.plan.microbatches == 1:
            objective = objective / _divisor(jax.lax.stop_gradient(loss.weight), replica_count)
        return objective, (Loss(loss.total, loss.weight), self.planned.pure_model.model_state_of(module))

    def loss_of_masters(self, params: Params, model_state: Params, batch: Batch, key: Key, row_indices: Array) -> Array:
        """Return the objective of one microbatch, from float32 masters on the device. This method is only traced.

        Under a codec or DiLoCo, where each replica has its own gradients, this is the objective of one replica's rows.
        """
        planned = self.planned
        copies = planned.copies(params)
        if not isinstance(planned.plan.reduce, NamedCodec) and planned.plan.diloco is None:
            return self._objective(copies, model_state, batch, planned.context(key, row_indices))[0]
        whole_spec, replica_spec = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def replica_objective(copies: Params, model_state: Params, batch: Batch, key: Key, row_indices: Array) -> Array:
            replica_count = planned.layout.mesh.shape[REPLICA_AXIS]
            return self._objective(copies, model_state, batch, planned.context(key, row_indices), replica_count)[0]

        input_specs = (whole_spec, whole_spec, replica_spec, whole_spec, replica_spec)
        return planned.shard_map_of(replica_objective, (REPLICA_AXIS,), input_specs, whole_spec)(
            copies, model_state, dict(batch), key, row_indices
        )

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """Return the sum of a score over the microbatches, which run one after another."""
        planned = self.planned
        with planned.tracing(is_forward_only=True):
            weights, params_of = planned.differentiated_leaves(state.params)
            params = params_of(weights)

            def score_microbatch(microbatch: Batch) -> Sums:
                return score(planned.pure_model.module(params, state.rest), microbatch)

            if planned.plan.microbatches == 1:
                return score_microbatch(batch)
            stacked_microbatches = microbatches(dict(batch), count=planned.plan.microbatches)
            return jax.tree.map(
                lambda stacked_sums: stacked_sums.sum(0), jax.lax.map(score_microbatch, stacked_microbatches)
            )


def _divisor(weight: Float[Array, ""], replica_count: int) -> Float[Array, ""]:
    """Return the divisor that turns a replica's sums into values whose mean over replicas is the mean over all targets.

    Replicas may have different numbers of targets.

    Args:
        weight: number of targets, or the sum of their weights; in a manual region, over one replica's targets alone.
        replica_count: number of replicas inside a region that is manual over replicas; 1 outside of such a region.
    """
    return (
        positive_divisor(weight)
        if replica_count == 1
        else positive_divisor(jax.lax.psum(weight, REPLICA_AXIS)) / replica_count
    )
