"""Pipelined: the loss of a global batch and its gradients, computed by a pipeline of stages.

One program serves all stages: the model in three parts (`forms.py`), of which a `cond` on the stage's number runs the
first and the last. `pipeline.execute` runs it in ticks by the schedule: each tick is one pass of a microbatch on every
rank (device of the pipe axis). A rank may have several stages, its chunks.

The loop over ticks is inside one `shard_map`, manual over the pipe axis and over the axes that rows are split over, so
that gradients are summed in the loop and reduced once after it. Under ZeRO 3 each pass gathers weights, and each
backward pass scatters gradients. The compiler handles tensor and sequence axes. Shared parameters, those outside of the
blocks (embedding, head, norms), are split over the pipe axis between steps and gathered once before the loop; their
gradients are scattered once after it.

Weights on the host stay there: each block of a stage copies its own to the device when it runs, in every tick. With any
ZeRO stage, it copies this device's shard, and then gathers the shards as under ZeRO 3.
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
from jaxscale.pipeline.run.execute import Executed, execute
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
from jaxscale.step.pipelined.forms import ChainForm, Microbatch, Named, Scored, StackForm, StageForm, Weights
from jaxscale.step.planned_model import PlannedModel, Specs, positive
from jaxscale.trees import filled, named_leaves, path_name
from jaxscale.typing import Array, Batch, Key, Params, PyTree

MANUAL = (PIPE_AXIS, *BATCH_AXES)
"""Axes that are manual inside of the `shard_map`: the pipe axis, and those that rows are split over."""
StageAndSharedSpecs = tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]
"""Placements of the parameters of stages, and of the shared parameters, by name."""
R = TypeVar("R")
T = TypeVar("T")


class Pipelined:
    """The objective of a model that a pipeline computes.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
        schedule: the schedule by which the stages run; that of `stages` by default.
    """

    def __init__(self, planned: PlannedModel, stages: Stages, schedule: Schedule | None = None) -> None:
        self.planned, self.stages = planned, stages
        self.schedule = stages.schedule if schedule is None else schedule
        self.form: StageForm = (StackForm if stages.chain is None else ChainForm)(planned, stages)

    @property
    def stage_depth(self) -> int | None:
        """Number of blocks of the deepest stage; `None` for a chain, whose blocks are unlike."""
        return self.stages.depth if self.stages.chain is None else None

    @property
    def stages_here(self) -> int:
        """Number of stages that one device runs."""
        return self.stages.schedule.chunks

    # -- the model in parts --------------------------------------------------------------------------------------------

    def split(self, params: Params) -> tuple[Named, Named]:
        """Divide the parameters; return those of stages, and the shared ones, each by name."""
        return self.divide(named_leaves(params))

    def divide(self, entry_of_name: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """Divide a dict by parameter name; return the entries of stages' parameters, and those of shared parameters."""
        stage_entries = {name: entry for name, entry in entry_of_name.items() if self.form.is_staged(name)}
        return stage_entries, {name: entry for name, entry in entry_of_name.items() if name not in stage_entries}

    def join(self, stage_params: Named, shared_params: Named) -> Params:
        """Return all parameters as one nested dict: the inverse of `split`."""
        return filled(self.planned.pure_model.params, {**stage_params, **shared_params})

    def stage_fn(self, score: Scored, objective: Callable[[PyTree], Array]) -> StageFunction:
        """Return the function of a stage that `pipeline.execute` calls.

        Args:
            score: function from the module, a microbatch and the settings of the pass to sums.
            objective: function from the sums to the number that is differentiated.
        """
        parts, last_stage = self.form.parts(score), self.stages.schedule.stages - 1

        def run_stage(
            stage_params: Named, shared_params: Named, x: PyTree, microbatch: Microbatch, at: At, key: Key
        ) -> tuple[PyTree, Array, PyTree]:
            """Run one stage on the message `x`; return the next message, the number to differentiate, and the sums."""
            weights: Weights = stage_params
            if at.frozen is not None:  # the weights are on the host, and zeros on the device receive their gradients
                plan = self.planned.plan
                weights = {name: streamed_weight(plan, at.frozen[name], zeros) for name, zeros in stage_params.items()}
            args = (weights, shared_params, microbatch, key, at.stage)
            # recomputed in the backward pass, because otherwise every stage would need slots for their residuals
            before, behind = jax.checkpoint(parts.before), jax.checkpoint(parts.behind)
            x = jax.lax.cond(at.stage == 0, lambda x, *args: before(*args), lambda x, *args: x, x, *args)
            y = parts.inside(x, *args)
            sum_shapes = jax.eval_shape(parts.behind, y, *args)
            sums = jax.lax.cond(
                at.stage == last_stage,
                behind,
                lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes),
                y,
                *args,
            )
            return y, objective(sums), sums

        return run_stage

    # -- one batch -----------------------------------------------------------------------------------------------------

    def microbatches(self, batch: Batch) -> tuple[Batch, Array]:
        """Return each array of a batch as (microbatches, rows, ...), and the index of each row in the global batch."""
        return microbatches((dict(batch), self.planned.examples(batch)), parts=self.stages.schedule.microbatches)

    def _run(
        self,
        tables: Tables,
        stage: StageFunction,
        state: TrainState,
        batch: Batch,
        finish: Callable[[Executed], R],
        output_specs: Specs,
        weights: Params | None = None,
    ) -> R:
        """Run `pipeline.execute` inside of the `shard_map`, and return the results of `finish`.

        Args:
            tables: actions of each tick.
            stage: function that runs a stage, from `self.stage_fn`.
            state: the train state.
            batch: the global batch.
            finish: function from the value that `execute` returns to this device's results.
            output_specs: placements of these results.
            weights: weights of each replica along a first dim; by default all replicas use the state's.
        """
        has_own_weights, specs = weights is not None, self._specs("compute")
        if weights is None:
            copies = self._copies(state.params)
        else:
            copies, specs = jax.vmap(self._copies, spmd_axis_name=REPLICA_AXIS)(weights), _with_replica_dim(specs)
        stage_params, shared_params = self.split(copies)
        pipeline = self.planned.plan.pipeline
        assert pipeline is not None
        frozen = self.split(state.params)[0] if self._streams else None
        by_rows = PartitionSpec(None, BATCH_AXES)

        def body(stage_params: Named, frozen: Named | None, shared_params: Named, batch: Microbatch, key: Key) -> R:
            """Run the pipeline on this device's shards, and return the results of `finish`."""
            if has_own_weights:
                stage_params, shared_params = jax.tree.map(lambda leaf: leaf[0], (stage_params, shared_params))
            chunks = self.form.chunks(stage_params)
            frozen = None if frozen is None else self.form.chunks(frozen)
            chunk, microbatch = jax.tree.map(lambda leaf: leaf[0], (chunks, batch))
            form, stage_number = self.form, jnp.int32(0)
            message = jax.eval_shape(form.parts(self.loss).before, chunk, shared_params, microbatch, key, stage_number)
            readers = self._readers(message, chunk, shared_params, microbatch, key) if tables.backward else None
            executed = execute(
                tables,
                stage,
                chunks,
                shared_params,
                batch,
                key,
                message,
                axis=PIPE_AXIS,
                manual=MANUAL,
                lowering=pipeline.lowering,
                readers=readers,
                hosted=blocks.treatment().host_names,
                frozen=frozen,
            )
            return finish(executed)

        input_specs = (specs[0], None if frozen is None else specs[0], specs[1], by_rows, PartitionSpec())
        return self.planned.mapped(body, MANUAL, input_specs, output_specs)(
            stage_params, frozen, shared_params, self.microbatches(batch), self.planned.key(state)
        )

    def _readers(
        self, message: PyTree, chunk: Named, shared_params: Named, microbatch: Microbatch, key: Key
    ) -> tuple[int, ...] | None:
        """Return the stages that read shared parameters: first and last, or `None` for all if blocks read any."""
        run_blocks = self.form.parts(self.loss).inside
        is_read = find_leaves_read(run_blocks, message, chunk, shared_params, microbatch, key, jnp.int32(0))
        start = len(jax.tree.leaves((message, chunk)))  # index of the first leaf of the shared parameters
        return None if any(is_read[start : start + len(shared_params)]) else (0, self.stages.schedule.stages - 1)

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the sums of the model's loss, with the penalty also as an array."""
        loss = self.planned.loss(module, batch, context)
        return Loss(loss.total, loss.weight, jnp.asarray(loss.penalty, jnp.float32))

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Key, examples: Array) -> Array:
        """As in `Objective`, but with the blocks of a single stage. A chain has all its blocks."""
        if self.stage_depth is None:
            return Whole(self.planned).loss_of_masters(params, rest, batch, key, examples)
        stage_params, shared_params = self.split(self._copies(self.planned.pure_model.in_rows(params)))
        parts, specs, by_rows = self.form.parts(self.loss), self._specs("compute"), PartitionSpec(BATCH_AXES)

        def body(stage_params: Named, shared_params: Named, batch: Batch, examples: Array, key: Key) -> Array:
            """Return the total loss of this device's rows, with the blocks of its first chunk."""
            chunk = jax.tree.map(lambda leaf: leaf[0], self.form.chunks(stage_params))
            args = (chunk, shared_params, (batch, examples), key, jnp.int32(0))
            return parts.behind(parts.inside(parts.before(*args), *args), *args).total

        run = self.planned.mapped(body, MANUAL, (*specs, by_rows, by_rows, PartitionSpec()), PartitionSpec())
        return run(stage_params, shared_params, batch, examples, key)

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """As in `Objective`."""
        loss, gradients = self._gradients(state, batch)
        return loss, self.planned.placed(gradients), state.rest

    def gradients_apart(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """As in `Objective`."""
        return *self._gradients(state, batch, per_replica=True, weights=weights), state.rest

    def _gradients(
        self, state: TrainState, batch: Batch, *, per_replica: bool = False, weights: Params | None = None
    ) -> tuple[Loss, Params]:
        """Compute the sums of the loss, and the gradients; return both in this order.

        Args:
            state: the train state.
            batch: the global batch.
            per_replica: whether to return each replica's gradients along a first dim, instead of their mean.
            weights: weights of each replica along a first dim; by default all replicas use the state's.
        """
        stage = self.stage_fn(self.loss, lambda loss: loss.total + loss.penalty)
        specs = self._specs("gradient")
        mesh = self.planned.layout.mesh
        # the mean of the replicas' gradients is then the mean over all targets of the global batch
        replica_factor, apart_axes = (mesh.shape[REPLICA_AXIS], (REPLICA_AXIS,)) if per_replica else (1.0, ())

        def finish(executed: Executed) -> tuple[Loss, Named, Named]:
            """Return the sums of the loss, and the gradients of stages' and of shared parameters, by name."""
            loss = jax.lax.psum(executed.sums, MANUAL)
            gradients = self.form.home(executed.weight_gradients), executed.shared_gradients
            summed_gradients = [
                {
                    name: self.reduce(gradient, self._axes_to_sum(name, apart_axes), spec_of_name[name])
                    for name, gradient in gradient_of_name.items()
                }
                for gradient_of_name, spec_of_name in zip(gradients, specs, strict=True)
            ]
            scale = replica_factor / positive(loss.weight)
            return loss, *jax.tree.map(lambda g: (g * scale)[None] if per_replica else g * scale, summed_gradients)

        output_specs = (PartitionSpec(), *(_with_replica_dim(specs) if per_replica else specs))
        with self.planned.tracing():
            tables = tabulate(self.schedule, self.planned.plan.stages_keep)
            loss, *gradients_of_both = self._run(tables, stage, state, batch, finish, output_specs, weights)
            gradients = self.join(*gradients_of_both)
        return Loss(loss.total, loss.weight), gradients

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """As in `Objective`."""
        stage = self.stage_fn(lambda module, microbatch, context: score(module, microbatch), lambda sums: jnp.zeros(()))

        def finish(executed: Executed) -> Sums:
            return jax.lax.psum(executed.sums, MANUAL)

        forward_tables = tabulate(self.schedule, forward_only=True)
        with self.planned.tracing(is_forward_only=True):
            return self._run(forward_tables, stage, state, batch, finish, PartitionSpec())

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        """Whether the weights of stages come from the host."""
        return self.planned.plan.offload.weights == "host"

    def _copies(self, params: Params) -> Params:
        """Return the weights that stages read, in the dtype of `plan.precision`.

        Shared weights are gathered over the pipe axis. Weights of stages that lie on the host are replaced by zeros on
        the device, which receive their gradients.
        """
        layout, dtype = self.planned.layout, jnp.dtype(self.planned.plan.precision)

        def copy(path: KeyPath, param: Array, master: NamedSharding) -> Array:
            name = path_name(path)
            master = NamedSharding(master.mesh, master.spec)  # on the device, although masters may lie on the host
            compute = NamedSharding(layout.mesh, self.planned.read_spec(name))
            if self._streams and self.form.is_staged(name):
                return jax.lax.with_sharding_constraint(jnp.zeros(param.shape, param.dtype), compute)
            if jnp.issubdtype(param.dtype, jnp.floating) and dtype != param.dtype:
                # cast first, so that half the bytes are gathered
                param = jax.lax.with_sharding_constraint(param.astype(dtype), master)
                param = jax.lax.optimization_barrier(param)
            return jax.lax.with_sharding_constraint(param, compute)

        return jax.tree_util.tree_map_with_path(copy, to_device(params), layout.masters)

    def _specs(self, kind: str) -> StageAndSharedSpecs:
        """The placements of all parameters, with their manual axes alone.

        Args:
            kind: "compute" for the placements in which stages read parameters, "gradient" for those of their gradients.
        """
        specs = {}
        for name, placement in self.planned.layout.placements.items():
            # gradients of weights on the host are scattered when a pass computes them
            has_read_spec = kind == "compute" or (self._streams and self.form.is_staged(name))
            specs[name] = _manual_spec(self.planned.read_spec(name) if has_read_spec else getattr(placement, kind))
        return self.divide(specs)

    def _axes_to_sum(self, name: str, apart_axes: Sequence[str]) -> list[str]:
        """Return the manual axes over which a gradient is summed after the loop, without `apart_axes`."""
        if not self.planned.pure_model.stacked(name):
            return [axis for axis in MANUAL if axis not in apart_axes]
        # a pass has already scattered the gradients of weights that it gathered over fsdp
        left_out_axes = {PIPE_AXIS, *apart_axes, *({"fsdp"} & set(axes_of(self.planned.read_spec(name))))}
        return [axis for axis in MANUAL if axis not in left_out_axes]

    def reduce(self, gradient: Array, axes: Sequence[str], spec: PartitionSpec) -> Array:
        """Sum one gradient over the devices along some axes, scatter it to its placement, and return it.

        Args:
            gradient: this device's part of the sum.
            axes: names of the mesh axes to sum over.
            spec: placement of the sum.
        """
        if self.planned.plan.reduce == "bfloat16":
            gradient = gradient.astype(jnp.bfloat16)
        axes = [axis for axis in axes if self.planned.layout.mesh.shape[axis] > 1 or axis in axes_of(spec)]
        for dim, axes_of_dim in enumerate(dim_axes(spec)):
            for axis in axes_of_dim:
                if axis in axes:
                    axes.remove(axis)
                    gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        return (jax.lax.psum(gradient, axes) if axes else gradient).astype(jnp.float32)


def find_leaves_read(function: Callable[..., PyTree], *arguments: PyTree) -> list[bool]:
    """Trace a function, and return for each leaf of its arguments whether the function reads it."""
    program = jax.make_jaxpr(function)(*arguments)
    return list(prune(program, [True] * len(program.jaxpr.outvars))[1])


def _manual_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return a placement without the axes that are not in `MANUAL`, as `shard_map` requires."""
    return spec_of([tuple(axis for axis in axes if axis in MANUAL) for axes in dim_axes(spec)])


def _with_replica_dim(specs: StageAndSharedSpecs) -> StageAndSharedSpecs:
    """Return the placements of arrays that have a first dim for the replicas before the dims of `specs`."""
    return jax.tree.map(
        lambda spec: PartitionSpec(REPLICA_AXIS, *spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
