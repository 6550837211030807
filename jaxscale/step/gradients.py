"""Gradients: the loss of a global batch and its gradients, computed as the plan specifies.

Loss and gradients are means over all targets of the global batch, whatever the mesh, the packing and the number of
microbatches: every part gives sums, which are divided once. ZeRO is expressed by sharding constraints in Auto mode, in
the form that XLA turns into the collectives one expects (`sharding/zero.py` has the table).
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxscale.blocks import Context, Loss
from jaxscale.replicas.named import NamedCodec
from jaxscale.sharding.memory_space import to_device
from jaxscale.state.batches import microbatches
from jaxscale.state.layout import REPLICA_AXIS
from jaxscale.state.train_state import TrainState
from jaxscale.step.planned_model import FromWeights, PlannedModel, positive, unchanged
from jaxscale.typing import Array, Batch, Float, Key, Params, PyTree

LossAndGradients = tuple[Loss, Params, Params]
"""Sums of the loss over the targets, the gradients, and the model's other state (batch statistics)."""
Sums = TypeVar("Sums")


@runtime_checkable
class Objective(Protocol):
    """The loss of a model under a plan, with methods for its gradients and for its sums: `Whole` or `Pipelined`."""

    planned: PlannedModel

    @property
    def stage_depth(self) -> int | None:
        """Number of blocks in a pipeline's stage; `None` without a pipeline, when a device runs all blocks."""
        ...

    @property
    def stages_per_device(self) -> int:
        """Number of stages of a pipeline that one device runs; 1 without a pipeline."""
        ...

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """Loss and gradients of a global batch; the gradients are float32 means over its targets."""
        ...

    def gradients_by_replica(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """Loss and gradients of a global batch, with each replica's own gradients along a first dim.

        The mean over that dim is the gradient of the global batch. No array as large as a parameter is sent over the
        replica axis.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32 weights of each replica along a first dim; by default all replicas use the state's.
        """
        ...

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """Score all microbatches, one by one so that memory is no more than in training, and return the sum.

        Args:
            score: function from the module and a microbatch to a tree of sums.
            state: the train state.
            batch: the global batch.
        """
        ...

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Key, examples: Array) -> Array:
        """The objective of one microbatch, from float32 masters on the device: a function to trace, not to run.

        Args:
            params: float32 master weights.
            rest: the model's other state.
            batch: one microbatch.
            key: key of the step.
            examples: index of every row in the global batch.
        """
        ...


def evaluate(objective: Objective, state: TrainState, batch: Batch) -> Loss:
    """Sums of the loss of a batch, without dropout or other randomness."""
    planned = objective.planned

    def score(module: nnx.Module, microbatch: Batch) -> Loss:
        loss = planned.loss(module, microbatch, planned.context(None))
        return Loss(loss.total, loss.weight)

    return objective.sums(score, state, batch)


def accuracy(objective: Objective, state: TrainState, batch: Batch) -> tuple[Array, Array]:
    """Numbers of correct targets and of all targets in a batch, for a model that has `accuracy`: a classifier."""
    planned = objective.planned
    count_correct = getattr(planned.experiment.model, "accuracy", None)
    assert count_correct is not None
    return objective.sums(lambda module, rows: count_correct(module, rows, planned.context(None)), state, batch)


@dataclasses.dataclass(eq=False)
class Whole:
    """The objective of a model that every device computes from end to end, `value_and_grad` of its loss.

    Args:
        planned: the model under its plan.
    """

    planned: PlannedModel
    stage_depth: None = dataclasses.field(default=None, init=False)
    stages_per_device: int = dataclasses.field(default=1, init=False)

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """As in `Objective`."""
        with self.planned.tracing():
            weights, params_of = self.planned.differentiated(state.params)
            key, examples = self.planned.key(state), self.planned.examples(batch)
            return self._gradients(weights, params_of, state.rest, batch, key, examples)

    def gradients_by_replica(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """As in `Objective`: the replica axis is manual here, and the compiler handles all other axes."""
        planned, replicas = self.planned, self.planned.layout.mesh.shape[REPLICA_AXIS]
        whole, by_replica = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def body(copies: PyTree, rest: Params, batch: Batch, key: Key, examples: Array) -> LossAndGradients:
            if weights is None:
                leaves, params_of = planned.differentiated(*copies, is_manual=True)
            else:
                leaves, params_of = jax.tree.map(lambda weight: weight[0], copies), unchanged
            loss, gradients, rest = self._gradients(leaves, params_of, rest, batch, key, examples, replicas)
            loss = jax.tree.map(lambda local_sum: jax.lax.psum(local_sum, REPLICA_AXIS), loss)
            return loss, jax.tree.map(lambda g: g[None], gradients), rest

        with planned.tracing():
            if weights is None:
                copies, copies_spec = (state.params, planned.copies(to_device(state.params))), whole
            else:
                copies, copies_spec = jax.vmap(planned.copies, spmd_axis_name=REPLICA_AXIS)(weights), by_replica
            inputs, outputs = (copies_spec, whole, by_replica, whole, by_replica), (whole, by_replica, whole)
            return planned.mapped(body, (REPLICA_AXIS,), inputs, outputs)(
                copies, state.rest, dict(batch), planned.key(state), planned.examples(batch)
            )

    def _gradients(
        self,
        weights: Params,
        params_of: FromWeights,
        rest: Params,
        batch: Batch,
        key: Key,
        examples: Array,
        replicas: int = 1,
    ) -> LossAndGradients:
        """Loss and gradients of a global batch, or of one replica's rows in a region that is manual over replicas.

        Args:
            weights: the differentiated leaves.
            params_of: function from them to the module's parameters.
            rest: the model's other state.
            batch: rows of the global batch, or of the replica.
            key: key of the step.
            examples: index of every row in the global batch.
            replicas: number of replicas in a manual region; 1 outside of one.
        """
        planned, is_manual = self.planned, replicas > 1

        def objective(
            weights: Params, rest: Params, batch: Batch, context: Context
        ) -> tuple[Array, tuple[Loss, Params]]:
            return self._loss(params_of(weights), rest, batch, context, replicas)

        grad = jax.value_and_grad(objective, has_aux=True)

        def of_microbatch(rest: Params, batch: Batch, examples: Array) -> LossAndGradients:
            (_, (loss, rest)), gradients = grad(weights, rest, batch, planned.context(key, examples))
            return loss, planned.placed(gradients, is_manual=is_manual), rest

        if planned.plan.microbatches == 1:
            return of_microbatch(rest, batch, examples)

        def add(carry: LossAndGradients, microbatch: tuple[Batch, Array]) -> tuple[LossAndGradients, None]:
            loss, gradients, rest = of_microbatch(carry[2], *microbatch)
            return (*jax.tree.map(jnp.add, (carry[0], carry[1]), (loss, gradients)), rest), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), planned.pure_model.abstract_params)
        first_sums = (Loss(jnp.zeros(()), jnp.zeros(())), planned.placed(zeros, is_manual=is_manual), rest)
        stacked_microbatches = microbatches((dict(batch), examples), parts=planned.plan.microbatches)
        (loss, gradients, rest), _ = jax.lax.scan(add, first_sums, stacked_microbatches)
        scale = 1.0 / _divisor(loss.weight, replicas)
        return loss, jax.tree.map(lambda g: g * scale, gradients), rest

    def _loss(
        self, params: Params, rest: Params, batch: Batch, context: Context, replicas: int = 1
    ) -> tuple[Array, tuple[Loss, Params]]:
        """The loss to differentiate: the mean if the batch is one microbatch, otherwise the sum of one of several.

        Returns:
            The objective to differentiate, and with it the sums of the loss and the model's other state.
        """
        module = self.planned.pure_model.module(params, rest)
        loss = self.planned.loss(module, batch, context)
        objective = loss.total + loss.penalty
        if self.planned.plan.microbatches == 1:
            objective = objective / _divisor(jax.lax.stop_gradient(loss.weight), replicas)
        return objective, (Loss(loss.total, loss.weight), self.planned.pure_model.rest_of(module))

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Key, examples: Array) -> Array:
        """As in `Objective`. Under a codec or DiLoCo, whose replicas have their own gradients, the loss of one."""
        planned = self.planned
        copies = planned.copies(params)
        if not isinstance(planned.plan.reduce, NamedCodec) and planned.plan.diloco is None:
            return self._loss(copies, rest, batch, planned.context(key, examples))[0]
        whole, by_replica = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def body(copies: Params, rest: Params, batch: Batch, key: Key, examples: Array) -> Array:
            replicas = planned.layout.mesh.shape[REPLICA_AXIS]
            return self._loss(copies, rest, batch, planned.context(key, examples), replicas)[0]

        return planned.mapped(body, (REPLICA_AXIS,), (whole, whole, by_replica, whole, by_replica), whole)(
            copies, rest, dict(batch), key, examples
        )

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """As in `Objective`."""
        planned = self.planned
        with planned.tracing(is_forward_only=True):
            weights, params_of = planned.differentiated(state.params)
            params = params_of(weights)

            def of_microbatch(batch: Batch) -> Sums:
                return score(planned.pure_model.module(params, state.rest), batch)

            if planned.plan.microbatches == 1:
                return of_microbatch(batch)
            stacked_microbatches = microbatches(dict(batch), parts=planned.plan.microbatches)
            return jax.tree.map(lambda sums: sums.sum(0), jax.lax.map(of_microbatch, stacked_microbatches))


def _divisor(weight: Float[Array, ""], replicas: int) -> Float[Array, ""]:
    """The divisor of a replica's sums with which the mean over replicas is the mean over all targets.

    Replicas may have different numbers of targets.

    Args:
        weight: number of targets, or their summed weights; in a manual region, of one replica alone.
        replicas: number of replicas in a manual region; 1 outside of one.
    """
    return positive(weight) if replicas == 1 else positive(jax.lax.psum(weight, REPLICA_AXIS)) / replicas
