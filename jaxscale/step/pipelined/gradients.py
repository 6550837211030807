"""Pipelined: the loss of a global batch and its gradients, computed by a pipeline of stages.

One program serves all stages. It contains the model in three parts (`forms.py`); the first and the last part are in a
`cond` on the index of the stage. `pipeline.execute` runs the program in ticks by the schedule. In each tick, every rank
(device of the pipe axis) runs one pass of a microbatch. A rank may have several stages, its chunks.

The loop over ticks is inside one `shard_map`, manual over the pipe axis and the axes that split the rows of a batch, so
that gradients are summed in the loop and reduced once after it. Under ZeRO 3, each pass gathers weights, and each
backward pass scatters gradients. The compiler handles the tensor and sequence axes. Shared parameters are those outside
of the blocks (embedding, head, norms). They are split over the pipe axis between steps and gathered once before the
loop, and their gradients are scattered once after the loop.

Weights on the host stay there, and each block of a stage copies its weights to the device when it runs, in every tick.
Under any ZeRO stage, the block copies this device's shard, and then gathers the shards as under ZeRO 3.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jaxscale import blocks
from jaxscale.blocks import Context, Loss
from jaxscale.compat import prune
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.execute import DeviceSums, execute
from jaxscale.pipeline.run.passes import At, StageFunction
from jaxscale.pipeline.run.tables import Tables, tabulate
from jaxscale.sharding.memory_space import to_device
from jaxscale.sharding.partition import axes_of, dim_axes, spec_of
from jaxscale.state.batches import microbatches
from jaxscale.state.layout import BATCH_AXES, PIPE_AXIS, REPLICA_AXIS
from jaxscale.state.stages import Stages
from jaxscale.state.train_state import TrainState
from jaxscale.step.gradients import LossAndGradients, Sums, Whole
from jaxscale.step.host import streamed_weight
from jaxscale.step.pipelined.forms import Arrays, ChainForm, Microbatch, Score, StackForm, StageForm, WeightsByName
from jaxscale.step.planned_model import PlannedModel, Specs, positive_divisor
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Key, Params, PyTree

MANUAL = (PIPE_AXIS, *BATCH_AXES)
"""Axes that are manual inside of the `shard_map`: the pipe axis, and the axes that split the rows of a batch."""
StageAndSharedSpecs = tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]
"""Placements of the parameters of stages, and of the shared parameters, by name."""
R = TypeVar("R")
T = TypeVar("T")


class Pipelined:
    """The objective of a model under a pipeline of stages.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
        schedule: the schedule by which the stages run; by default the schedule of `stages`.

    Attributes:
        form: the form in which stages read the parameters of their blocks.
    """

    def __init__(self, planned: PlannedModel, stages: Stages, schedule: Schedule | None = None) -> None:
        self.planned, self.stages = planned, stages
        self.schedule = stages.schedule if schedule is None else schedule
        self.form: StageForm = (ChainForm if stages.chain else StackForm)(planned, stages)

    @property
    def stage_depth(self) -> int | None:
        """Number of blocks of the deepest stage; `None` for a chain, whose blocks differ in structure."""
        return None if self.stages.chain else self.stages.depth

    @property
    def stages_per_device(self) -> int:
        """Number of stages that one device runs."""
        return self.stages.schedule.chunks

    # -- the model in parts --------------------------------------------------------------------------------------------

    def split(self, params: Params) -> tuple[Arrays, Arrays]:
        """Return (parameters of stages, shared parameters), two dicts by name."""
        return self.divide(named_leaves(params))

    def divide(self, entry_by_name: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """Divide a dict by parameter name; return (entries for parameters of stages, entries for shared parameters)."""
        stage_entries = {name: entry for name, entry in entry_by_name.items() if self.form.is_staged(name)}
        return stage_entries, {name: entry for name, entry in entry_by_name.items() if name not in stage_entries}

    def join(self, stage_params: Arrays, shared_params: Arrays) -> Params:
        """Return all parameters as one nested dict: the inverse of `split`."""
        return filled(self.planned.pure_model.abstract_params, {**stage_params, **shared_params})

    def stage_fn(self, score: Score, objective: Callable[[PyTree], Array]) -> StageFunction:
        """Return the function of a stage that `pipeline.execute` calls.

        Args:
            score: function from the module, a microbatch and the settings of the pass to sums.
            objective: function from the sums to the scalar to differentiate.
        """
        model_parts, last_stage = self.form.model_parts(score), self.stages.schedule.stages - 1

        def run_stage(
            stage_params: Arrays, shared_params: Arrays, message: PyTree, microbatch: Microbatch, action: At, key: Key
        ) -> tuple[PyTree, Array, PyTree]:
            """Run one stage on a message; return the next message, the scalar to differentiate, and the sums."""
            weights: WeightsByName = stage_params
            if action.frozen is not None:  # the weights are on the host; zeros on the device receive their gradients
                plan = self.planned.plan
                weights = {
                    name: streamed_weight(plan, action.frozen[name], zeros) for name, zeros in stage_params.items()
                }
            args = (weights, shared_params, microbatch, key, action.stage)
            # recomputed in the backward pass, because otherwise every stage would need slots for their residuals
            before, after = jax.checkpoint(model_parts.before), jax.checkpoint(model_parts.after)
            input_message = jax.lax.cond(
                action.stage == 0, lambda x, *args: before(*args), lambda x, *args: x, message, *args
            )
            output_message = model_parts.inside(input_message, *args)
            abstract_sums = jax.eval_shape(model_parts.after, output_message, *args)
            sums = jax.lax.cond(
                action.stage == last_stage,
                after,
                lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_sums),
                output_message,
                *args,
            )
            return output_message, objective(sums), sums

        return run_stage

    # -- one batch -----------------------------------------------------------------------------------------------------

    def microbatches(self, batch: Batch) -> tuple[Batch, Array]:
        """Return each array of a batch as (microbatches, rows, ...), and the index of each row in the global batch."""
        return microbatches((dict(batch), self.planned.row_indices(batch)), count=self.stages.schedule.microbatches)

    def _run(
        self,
        tables: Tables,
        run_stage: StageFunction,
        state: TrainState,
        batch: Batch,
        finish: Callable[[DeviceSums], R],
        output_specs: Specs,
        weights: Params | None = None,
    ) -> R:
        """Run `pipeline.execute` inside of the `shard_map`, and return the results of `finish`.

        Args:
            tables: tables of the actions in each tick.
            run_stage: function that runs a stage, from `self.stage_fn`.
            state: the train state.
            batch: the global batch.
            finish: function from the value that `execute` returns to this device's results.
            output_specs: placements of these results.
            weights: weights of each replica along a first dim; `None` if all replicas use those of `state`.
        """
        has_replica_weights, param_specs = weights is not None, self._specs("compute")
        if weights is None:
            copies = self._copies(state.params)
        else:
            copies = jax.vmap(self._copies, spmd_axis_name=REPLICA_AXIS)(weights)
            param_specs = _with_replica_dim(param_specs)
        stage_params, shared_params = self.split(copies)
        stage_specs, shared_specs = param_specs
        pipeline = self.planned.plan.pipeline
        assert pipeline is not None
        host_stage_params = self.split(state.params)[0] if self._has_host_weights else None
        rows_spec = PartitionSpec(None, BATCH_AXES)

        def run_on_device(
            stage_params: Arrays, host_stage_params: Arrays | None, shared_params: Arrays, batch: Microbatch, key: Key
        ) -> R:
            """Run the pipeline on this device's shards, and return the results of `finish`."""
            if has_replica_weights:
                stage_params, shared_params = jax.tree.map(lambda leaf: leaf[0], (stage_params, shared_params))
            chunks = self.form.chunks(stage_params)
            host_chunks = None if host_stage_params is None else self.form.chunks(host_stage_params)
            first_chunk, microbatch = jax.tree.map(lambda leaf: leaf[0], (chunks, batch))
            run_before_blocks, stage_index = self.form.model_parts(self.loss).before, jnp.int32(0)
            abstract_message = jax.eval_shape(
                run_before_blocks, first_chunk, shared_params, microbatch, key, stage_index
            )
            reader_stages = None
            if tables.has_backward:
                reader_stages = self._reader_stages(abstract_message, first_chunk, shared_params, microbatch, key)
            device_sums = execute(
                tables,
                run_stage,
                chunks,
                shared_params,
                batch,
                key,
                abstract_message,
                axis=PIPE_AXIS,
                manual_axes=MANUAL,
                lowering=pipeline.lowering,
                readers=reader_stages,
                hosted_names=blocks.treatment().host_names,
                frozen=host_chunks,
            )
            return finish(device_sums)

        host_specs = None if host_stage_params is None else stage_specs
        input_specs = (stage_specs, host_specs, shared_specs, rows_spec, PartitionSpec())
        return self.planned.shard_map_of(run_on_device, MANUAL, input_specs, output_specs)(
            stage_params, host_stage_params, shared_params, self.microbatches(batch), self.planned.key(state)
        )

    def _reader_stages(
        self, message: PyTree, chunk: Arrays, shared_params: Arrays, microbatch: Microbatch, key: Key
    ) -> tuple[int, ...] | None:
        """Return the indices of the stages that read shared parameters; `None` (all stages) if blocks read some."""
        run_blocks = self.form.model_parts(self.loss).inside
        read_flags = leaf_read_flags(run_blocks, message, chunk, shared_params, microbatch, key, jnp.int32(0))
        start = len(jax.tree.leaves((message, chunk)))  # index of the first leaf of the shared parameters
        return None if any(read_flags[start : start + len(shared_params)]) else (0, self.stages.schedule.stages - 1)

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the sums of the model's loss over a microbatch, with the penalty as an array."""
        loss = self.planned.loss(module, batch, context)
        return Loss(loss.total, loss.weight, jnp.asarray(loss.penalty, jnp.float32))

    def loss_of_masters(self, params: Params, model_state: Params, batch: Batch, key: Key, row_indices: Array) -> Array:
        """Return the objective of one microbatch with the blocks of a single stage, or with all blocks of a chain.

        Args:
            params: float32 master weights on the device, with all layers.
            model_state: the model's other state.
            batch: one microbatch.
            key: key of the step.
            row_indices: index in the global batch of every row of the microbatch.
        """
        if self.stage_depth is None:
            return Whole(self.planned).loss_of_masters(params, model_state, batch, key, row_indices)
        stage_params, shared_params = self.split(self._copies(self.planned.pure_model.in_rows(params)))
        model_parts, rows_spec = self.form.model_parts(self.loss), PartitionSpec(BATCH_AXES)

        def total_loss(
            stage_params: Arrays, shared_params: Arrays, batch: Batch, row_indices: Array, key: Key
        ) -> Array:
            """Return the total loss of this device's rows, with the blocks of its first chunk."""
            first_chunk = jax.tree.map(lambda leaf: leaf[0], self.form.chunks(stage_params))
            args = (first_chunk, shared_params, (batch, row_indices), key, jnp.int32(0))
            return model_parts.after(model_parts.inside(model_parts.before(*args), *args), *args).total

        input_specs = (*self._specs("compute"), rows_spec, rows_spec, PartitionSpec())
        total_loss_on_devices = self.planned.shard_map_of(total_loss, MANUAL, input_specs, PartitionSpec())
        return total_loss_on_devices(stage_params, shared_params, batch, row_indices, key)

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """Return the loss and the gradients of a global batch; the gradients are float32 means over its targets."""
        loss, gradients = self._gradients(state, batch)
        return loss, self.planned.place_gradients(gradients), state.rest

    def gradients_by_replica(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """Return the loss of a global batch, and each replica's own gradients along a first dim.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32 weights of each replica along a first dim; `None` if all replicas use those of `state`.
        """
        return *self._gradients(state, batch, is_by_replica=True, weights=weights), state.rest

    def _gradients(
        self, state: TrainState, batch: Batch, *, is_by_replica: bool = False, weights: Params | None = None
    ) -> tuple[Loss, Params]:
        """Return the sums of the loss, and the gradients.

        Args:
            state: the train state.
            batch: the global batch.
            is_by_replica: whether to return each replica's gradients along a first dim, instead of their mean.
            weights: weights of each replica along a first dim; `None` if all replicas use those of `state`.
        """
        run_stage = self.stage_fn(self.loss, lambda loss: loss.total + loss.penalty)
        gradient_specs, unsummed_axes, replica_factor = self._specs("gradient"), (), 1.0
        if is_by_replica:
            # with this factor, the mean of the replicas' gradients is the mean over all targets of the global batch
            unsummed_axes, replica_factor = (REPLICA_AXIS,), self.planned.layout.mesh.shape[REPLICA_AXIS]

        def finish(device_sums: DeviceSums) -> tuple[Loss, Arrays, Arrays]:
            """Return (sums of the loss, gradients of stages' parameters, gradients of shared parameters)."""
            loss = jax.lax.psum(device_sums.sums, MANUAL)
            stage_and_shared_gradients = (
                self.form.gradients_at_home(device_sums.weight_gradients),
                device_sums.shared_gradients,
            )
            stage_and_shared_sums = [
                {
                    name: self.reduce(gradient, self._axes_to_sum(name, unsummed_axes), spec_by_name[name])
                    for name, gradient in gradient_by_name.items()
                }
                for gradient_by_name, spec_by_name in zip(stage_and_shared_gradients, gradient_specs, strict=True)
            ]
            scale = replica_factor / positive_divisor(loss.weight)
            return loss, *jax.tree.map(
                lambda g: (g * scale)[None] if is_by_replica else g * scale, stage_and_shared_sums
            )

        output_specs = (PartitionSpec(), *(_with_replica_dim(gradient_specs) if is_by_replica else gradient_specs))
        with self.planned.tracing():
            tables = tabulate(self.schedule, self.planned.plan.stages_keep)
            loss, stage_gradients, shared_gradients = self._run(
                tables, run_stage, state, batch, finish, output_specs, weights
            )
            gradients = self.join(stage_gradients, shared_gradients)
        return Loss(loss.total, loss.weight), gradients

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """Return the sum of a score over all microbatches, computed by forward passes of the pipeline."""
        run_stage = self.stage_fn(
            lambda module, microbatch, context: score(module, microbatch), lambda sums: jnp.zeros(())
        )

        def finish(device_sums: DeviceSums) -> Sums:
            return jax.lax.psum(device_sums.sums, MANUAL)

        forward_tables = tabulate(self.schedule, forward_only=True)
        with self.planned.tracing(is_forward_only=True):
            return self._run(forward_tables, run_stage, state, batch, finish, PartitionSpec())

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _has_host_weights(self) -> bool:
        """Whether the weights of stages lie on the host."""
        return self.planned.plan.offload.weights == "host"

    def _copies(self, params: Params) -> Params:
        """Return the weights that stages read, in the dtype of `plan.precision`.

        Shared weights are gathered over the pipe axis. Weights of stages that lie on the host are replaced by zeros on
        the device, which receive their gradients.
        """
        layout, dtype = self.planned.layout, jnp.dtype(self.planned.plan.precision)

        def copy(path: KeyPath, param: Array, master_sharding: NamedSharding) -> Array:
            name = path_name(path)
            # masters themselves may lie on the host
            device_master_sharding = NamedSharding(master_sharding.mesh, master_sharding.spec)
            compute_sharding = NamedSharding(layout.mesh, self.planned.read_spec(name))
            if self._has_host_weights and self.form.is_staged(name):
                return jax.lax.with_sharding_constraint(jnp.zeros(param.shape, param.dtype), compute_sharding)
            if jnp.issubdtype(param.dtype, jnp.floating) and dtype != param.dtype:
                # cast first, so that half the bytes are gathered
                param = jax.lax.with_sharding_constraint(param.astype(dtype), device_master_sharding)
                param = jax.lax.optimization_barrier(param)
            return jax.lax.with_sharding_constraint(param, compute_sharding)

        return jax.tree_util.tree_map_with_path(copy, to_device(params), layout.master_shardings)

    def _specs(self, kind: str) -> StageAndSharedSpecs:
        """Return (placements of stages' parameters, placements of shared parameters) by name, along the manual axes.

        Args:
            kind: "compute" for the placements in which stages read parameters, "gradient" for placements of gradients.
        """
        spec_by_name = {}
        for name, placement in self.planned.layout.placements.items():
            # gradients of weights on the host are scattered when a pass computes them
            has_read_spec = kind == "compute" or (self._has_host_weights and self.form.is_staged(name))
            spec_by_name[name] = _manual_spec(
                self.planned.read_spec(name) if has_read_spec else getattr(placement, kind)
            )
        return self.divide(spec_by_name)

    def _axes_to_sum(self, name: str, unsummed_axes: Sequence[str]) -> list[str]:
        """Return the manual axes over which a gradient is summed after the loop, without `unsummed_axes`."""
        if not self.planned.pure_model.is_stacked(name):
            return [axis for axis in MANUAL if axis not in unsummed_axes]
        # a pass has already scattered the gradients of weights that it gathered over fsdp
        left_out_axes = {PIPE_AXIS, *unsummed_axes, *({"fsdp"} & set(axes_of(self.planned.read_spec(name))))}
        return [axis for axis in MANUAL if axis not in left_out_axes]

    def reduce(self, gradient: Array, axes: Sequence[str], spec: PartitionSpec) -> Array:
        """Sum one gradient over the devices along some axes, scatter it to its placement, and return it in float32.

        Args:
            gradient: this device's term of the sum.
            axes: names of the mesh axes to sum over.
            spec: placement of the sum.
        """
        if self.planned.plan.reduce == "bfloat16":
            gradient = gradient.astype(jnp.bfloat16)
        unreduced_axes = [axis for axis in axes if self.planned.layout.mesh.shape[axis] > 1 or axis in axes_of(spec)]
        for dim, axes_of_dim in enumerate(dim_axes(spec)):
            for axis in axes_of_dim:
                if axis in unreduced_axes:
                    unreduced_axes.remove(axis)
                    gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        return (jax.lax.psum(gradient, unreduced_axes) if unreduced_axes else gradient).astype(jnp.float32)


def leaf_read_flags(function: Callable[..., PyTree], *arguments: PyTree) -> list[bool]:
    """Trace a function, and return for each leaf of its arguments whether the function reads it."""
    program = jax.make_jaxpr(function)(*arguments)
    return list(prune(program, [True] * len(program.jaxpr.outvars))[1])


def _manual_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return a placement without the axes that are not in `MANUAL`, as `shard_map` requires."""
    return spec_of([tuple(axis for axis in axes if axis in MANUAL) for axes in dim_axes(spec)])


def _with_replica_dim(specs: StageAndSharedSpecs) -> StageAndSharedSpecs:
    """Return the placements with an additional first dim, which is split over the replica axis."""
    return jax.tree.map(
        lambda spec: PartitionSpec(REPLICA_AXIS, *spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
