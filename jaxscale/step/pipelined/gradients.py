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
from jaxscale.pipeline.run.execute import Executed, execute
from jaxscale.pipeline.run.passes import At, StageFunction
from jaxscale.pipeline.run.tables import Tables, tabulate
from jaxscale.pipeline.schedule import Schedule
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
SpecsOfBoth = tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]
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
        """The parameters of stages, and the shared parameters, by name."""
        return self.divided(named_leaves(params))

    def divided(self, by_name: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """The entries of the parameters of stages, and those of the shared parameters, by parameter name."""
        staged = {name: leaf for name, leaf in by_name.items() if self.form.is_staged(name)}
        return staged, {name: leaf for name, leaf in by_name.items() if name not in staged}

    def joined(self, staged: Named, shared: Named) -> Params:
        """The inverse of `split`."""
        return filled(self.planned.pure_model.params, {**staged, **shared})

    def stage(self, score: Scored, objective: Callable[[PyTree], Array]) -> StageFunction:
        """The function of a stage that `pipeline.execute` calls.

        Args:
            score: function from the module, a microbatch and the settings of the pass to sums.
            objective: function from the sums to the number that is differentiated.
        """
        parts, last = self.form.parts(score), self.stages.schedule.stages - 1

        def stage(
            staged: Named, shared: Named, x: PyTree, microbatch: Microbatch, at: At, key: Key
        ) -> tuple[PyTree, Array, PyTree]:
            weights: Weights = staged
            if at.frozen is not None:
                plan = self.planned.plan
                weights = {name: streamed_weight(plan, at.frozen[name], tie) for name, tie in staged.items()}
            args = (weights, shared, microbatch, key, at.stage)
            # recomputed in the backward pass, because otherwise every stage would need slots for their residuals
            before, behind = jax.checkpoint(parts.before), jax.checkpoint(parts.behind)
            x = jax.lax.cond(at.stage == 0, lambda x, *args: before(*args), lambda x, *args: x, x, *args)
            y = parts.inside(x, *args)
            sum_shapes = jax.eval_shape(parts.behind, y, *args)
            sums = jax.lax.cond(
                at.stage == last,
                behind,
                lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes),
                y,
                *args,
            )
            return y, objective(sums), sums

        return stage

    # -- one batch -----------------------------------------------------------------------------------------------------

    def microbatches(self, batch: Batch) -> tuple[Batch, Array]:
        """Every array of a batch as (microbatches, rows, ...), and the index of every row in the global batch."""
        return microbatches((dict(batch), self.planned.examples(batch)), parts=self.stages.schedule.microbatches)

    def _run(
        self,
        tables: Tables,
        stage: StageFunction,
        state: TrainState,
        batch: Batch,
        finish: Callable[[Executed], R],
        outputs: Specs,
        weights: Params | None = None,
    ) -> R:
        """Run `pipeline.execute` inside of the `shard_map`, and return what `finish` makes of it.

        Args:
            tables: actions of each tick.
            stage: the function of a stage, from `self.stage`.
            state: the train state.
            batch: the global batch.
            finish: function from the value that `execute` returns to this device's results.
            outputs: placements of these results.
            weights: weights of each replica along a first dim; by default all replicas use the state's.
        """
        has_own_weights, specs = weights is not None, self._specs("compute")
        if weights is None:
            copies = self._copies(state.params)
        else:
            copies, specs = jax.vmap(self._copies, spmd_axis_name=REPLICA_AXIS)(weights), _of_replicas(specs)
        staged, shared = self.split(copies)
        pipeline = self.planned.plan.pipeline
        assert pipeline is not None
        frozen = self.split(state.params)[0] if self._streams else None
        by_rows = PartitionSpec(None, BATCH_AXES)

        def body(staged: Named, frozen: Named | None, shared: Named, batch: Microbatch, key: Key) -> R:
            if has_own_weights:
                staged, shared = jax.tree.map(lambda leaf: leaf[0], (staged, shared))
            chunks = self.form.chunks(staged)
            frozen = None if frozen is None else self.form.chunks(frozen)
            chunk, microbatch = jax.tree.map(lambda leaf: leaf[0], (chunks, batch))
            x = jax.eval_shape(self.form.parts(self.loss).before, chunk, shared, microbatch, key, jnp.int32(0))
            readers = self._readers(x, chunk, shared, microbatch, key) if tables.backward else None
            executed = execute(
                tables,
                stage,
                chunks,
                shared,
                batch,
                key,
                x,
                axis=PIPE_AXIS,
                manual=MANUAL,
                lowering=pipeline.lowering,
                readers=readers,
                hosted=blocks.treatment().hosted,
                frozen=frozen,
            )
            return finish(executed)

        inputs = (specs[0], None if frozen is None else specs[0], specs[1], by_rows, PartitionSpec())
        return self.planned.mapped(body, MANUAL, inputs, outputs)(
            staged, frozen, shared, self.microbatches(batch), self.planned.key(state)
        )

    def _readers(
        self, x: PyTree, chunk: Named, shared: Named, microbatch: Microbatch, key: Key
    ) -> tuple[int, ...] | None:
        """The stages that read shared parameters: the first and the last, or `None` (all) if blocks read some."""
        inside = self.form.parts(self.loss).inside
        used = leaves_read(inside, x, chunk, shared, microbatch, key, jnp.int32(0))
        before = len(jax.tree.leaves((x, chunk)))
        return None if any(used[before : before + len(shared)]) else (0, self.stages.schedule.stages - 1)

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Sums of the model's loss, with the penalty as an array too."""
        loss = self.planned.loss(module, batch, context)
        return Loss(loss.total, loss.weight, jnp.asarray(loss.penalty, jnp.float32))

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Key, examples: Array) -> Array:
        """As of `Objective`, with only the blocks of one stage, as a device runs them; for a chain, with all blocks."""
        if self.stage_depth is None:
            return Whole(self.planned).loss_of_masters(params, rest, batch, key, examples)
        staged, shared = self.split(self._copies(self.planned.pure_model.in_rows(params)))
        parts, specs, by_rows = self.form.parts(self.loss), self._specs("compute"), PartitionSpec(BATCH_AXES)

        def body(staged: Named, shared: Named, batch: Batch, examples: Array, key: Key) -> Array:
            chunk = jax.tree.map(lambda leaf: leaf[0], self.form.chunks(staged))
            args = (chunk, shared, (batch, examples), key, jnp.int32(0))
            return parts.behind(parts.inside(parts.before(*args), *args), *args).total

        inputs = (specs[0], specs[1], by_rows, by_rows, PartitionSpec())
        return self.planned.mapped(body, MANUAL, inputs, PartitionSpec())(staged, shared, batch, examples, key)

    def gradients(self, state: TrainState, batch: Batch) -> LossAndGradients:
        """As of `Objective`."""
        loss, gradients = self._gradients(state, batch)
        return loss, self.planned.placed(gradients), state.rest

    def gradients_apart(self, state: TrainState, batch: Batch, weights: Params | None = None) -> LossAndGradients:
        """As of `Objective`."""
        return *self._gradients(state, batch, per_replica=True, weights=weights), state.rest

    def _gradients(
        self, state: TrainState, batch: Batch, *, per_replica: bool = False, weights: Params | None = None
    ) -> tuple[Loss, Params]:
        """Sums of the loss, and gradients.

        Args:
            state: the train state.
            batch: the global batch.
            per_replica: whether to return each replica's gradients along a first dim, instead of their mean.
            weights: weights of each replica along a first dim; by default all replicas use the state's.
        """
        stage = self.stage(self.loss, lambda loss: loss.total + loss.penalty)
        specs = self._specs("gradient")
        mesh = self.planned.layout.mesh
        replicas, apart_axes = (mesh.shape[REPLICA_AXIS], (REPLICA_AXIS,)) if per_replica else (1.0, ())

        def finish(executed: Executed) -> tuple[Loss, Named, Named]:
            loss = jax.lax.psum(executed.sums, MANUAL)
            staged = self.form.home(executed.weight_gradients)
            reduced = [
                {
                    name: self.reduced(leaf, self._summed_over(name, apart_axes), spec_of_name[name])
                    for name, leaf in by_name.items()
                }
                for by_name, spec_of_name in zip((staged, executed.shared_gradients), specs, strict=True)
            ]
            scale = replicas / positive(loss.weight)
            return loss, *jax.tree.map(lambda g: (g * scale)[None] if per_replica else g * scale, reduced)

        outputs = (PartitionSpec(), *specs)
        if per_replica:
            outputs = (outputs[0], *_of_replicas(specs))
        with self.planned.tracing():
            tables = tabulate(self.schedule, self.planned.plan.stages_keep)
            loss, staged, shared = self._run(tables, stage, state, batch, finish, outputs, weights)
            gradients = self.joined(staged, shared)
        return Loss(loss.total, loss.weight), gradients

    def sums(self, score: Callable[[nnx.Module, Batch], Sums], state: TrainState, batch: Batch) -> Sums:
        """As of `Objective`."""
        stage = self.stage(lambda module, microbatch, context: score(module, microbatch), lambda sums: jnp.zeros(()))

        def finish(executed: Executed) -> Sums:
            return jax.lax.psum(executed.sums, MANUAL)

        scoring = tabulate(self.schedule, forward_only=True)
        with self.planned.tracing(plainly=True):
            return self._run(scoring, stage, state, batch, finish, PartitionSpec())

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        """Whether the weights of stages come from the host."""
        return self.planned.plan.offload.weights == "host"

    def _copies(self, params: Params) -> Params:
        """The weights that stages read, in the dtype of `plan.precision`, with shared ones gathered over the pipe axis.

        Weights of stages that lie on the host are replaced by zeros on the device, which receive their gradients.
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

    def _specs(self, kind: str) -> SpecsOfBoth:
        """The placements of all parameters, with their manual axes alone.

        Args:
            kind: "compute" for the placements in which stages read parameters, "gradient" for those of their gradients.
        """
        specs = {}
        for name, placement in self.planned.layout.placements.items():
            # gradients of weights on the host are scattered when a pass computes them
            like_read = kind == "compute" or (self._streams and self.form.is_staged(name))
            specs[name] = _manual_axes(self.planned.read_spec(name) if like_read else getattr(placement, kind))
        return self.divided(specs)

    def _summed_over(self, name: str, apart_axes: Sequence[str]) -> list[str]:
        """The manual axes over which the gradient of a parameter must still be summed; `apart_axes` are left out."""
        if not self.planned.pure_model.stacked(name):
            return [axis for axis in MANUAL if axis not in apart_axes]
        summed = {PIPE_AXIS, *apart_axes, *({"fsdp"} & set(axes_of(self.planned.read_spec(name))))}
        return [axis for axis in MANUAL if axis not in summed]

    def reduced(self, gradient: Array, axes: Sequence[str], spec: PartitionSpec) -> Array:
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


def leaves_read(function: Callable[..., PyTree], *arguments: PyTree) -> list[bool]:
    """For each leaf of a function's arguments, whether the function reads it."""
    program = jax.make_jaxpr(function)(*arguments)
    return list(prune(program, [True] * len(program.jaxpr.outvars))[1])


def _manual_axes(spec: PartitionSpec) -> PartitionSpec:
    """A placement without the axes that are not in `MANUAL`, as `shard_map` requires."""
    return spec_of([tuple(axis for axis in axes if axis in MANUAL) for axes in dim_axes(spec)])


def _of_replicas(specs: SpecsOfBoth) -> SpecsOfBoth:
    """Placements of arrays that have a first dim for the replicas."""
    return jax.tree.map(
        lambda spec: PartitionSpec(REPLICA_AXIS, *spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
