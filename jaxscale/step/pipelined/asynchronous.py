"""AsyncPipeline: the train step of a pipeline whose stages update at different times, and never wait for one another.

A pipeline has p stages, one on each rank (device of the pipe axis), and runs in ticks: in each tick, every stage runs
one forward or backward pass of a microbatch. A step feeds the microbatches of one batch, and runs the ticks until the
next batch may enter (`pipeline.asynchronous`). The loss of the step is the mean over the forward passes that reach the
last stage in these ticks. In PipeDream and PipeMare, whose batch is one microbatch, these passes belong to batches that
entered up to p - 1 steps before. If no forward pass reaches the last stage in a step, the loss of the step is NaN.

Each stage clips its own gradients, watches for bad updates (it skips an update whose gradient is not finite or spikes),
applies a codec, and counts its updates for the learning rate. Gradients are means over the batch, so the weight of the
batch (its number of targets) is computed before its loss, and must not depend on the model.

Each stage has its own copy of every shared parameter (outside of the blocks). The first stage reads the parameters
before the blocks, and the last stage those after the blocks; the other copies stay zero. A model is refused if a
parameter is read both before and after the blocks (tied weights) or inside the blocks, because its copies would differ.

Between steps, the train state holds the newest weights, the optimizer's state, and the state in flight: messages
between stages, batches, values that forward passes keep for backward passes, older weights, sums of gradients, and the
watch and the counts of each stage. The names of these arrays in a checkpoint depend on the plan, so that a step with
another plan ignores them. Then the microbatches in flight are lost, although some stages have made their updates, and
the pipeline fills again. The first steps, as many as the plan's `synchronous_steps`, are ordinary synchronous steps:
their gradients are clipped by one norm, and the step is good or bad as a whole.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Container, Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import Loss
from jaxscale.optim.update_guard import UpdateGuard, guarded_advance
from jaxscale.pipeline.run.asynchronous import Asynchronous, UpdateAt
from jaxscale.pipeline.run.passes import At
from jaxscale.pipeline.run.pipemare import Remedies
from jaxscale.pipeline.run.stream import stream
from jaxscale.pipeline.schedules import METHODS
from jaxscale.recipe.plan import version_1_fields
from jaxscale.replicas.codec import Codec
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf, squared_residual_norm
from jaxscale.state.batches import batch_shapes
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import BATCH_AXES, PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.state.naming import Naming, Part, part_of_whole
from jaxscale.state.result_specs import split_as_results
from jaxscale.state.stages import Stages
from jaxscale.state.train_state import Metrics, TrainState, Watch
from jaxscale.step.exchange import describe_codec
from jaxscale.step.pipelined.forms import Arrays, Microbatch
from jaxscale.step.pipelined.gradients import MANUAL, Pipelined
from jaxscale.step.pipelined.reads import batch_weight_fn, copy_numbers
from jaxscale.step.planned_model import PlannedModel, positive_divisor
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Batch, Key, PyTree

IN_FLIGHT = "in_flight"
"""Name of an asynchronous pipeline's `StateExtra`; a step with another plan or version of JAX ignores the extra."""
DEVICE_SPEC = PartitionSpec(MANUAL)
"""Placement of arrays whose first dim has an entry for each device."""
Flight: TypeAlias = dict[str, PyTree]
"""The state in flight: "pipe" (the state of the executor of ticks), and three entries with the state of each stage.

"free" is the optimizer state that has no parameter's shape, such as counts. "watch" is the stage's watch for bad
updates. "codes" has the states of the stage's codec ("states") and the number of updates ("updates").
"""
StageParams: TypeAlias = tuple[Arrays, Arrays]
"""Parameters of one stage, with a first dim of 1: (parameters of its layers, its copies of the shared parameters)."""
Carry: TypeAlias = dict[str, PyTree]
"""State of one stage within a step: "free", "watch" and "codes" as in `Flight`, and three more entries.

"owned" is the optimizer state that has the shape of a parameter. "squares" is the sum of the squared gradient norms of
the updates in this step. "sent" is the number of bytes that a codec has sent in this step.
"""
ScaledBatch: TypeAlias = tuple[Microbatch, Array]
"""One microbatch or several, and the factor by which the loss of each microbatch is scaled."""
CORRECTION = 0.135
"""PipeMare's D, the decay of the discrepancy correction; the theory of PipeMare gives exp(-2)."""
ANNEAL = 4
"""By default, PipeMare's rescheduling of the learning rate fades out over 1 / `ANNEAL` of the steps of a run."""


class AsyncPipeline:
    """The train step of an asynchronous pipeline.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
        optimizer: the whole optimizer, clipping included.

    Attributes:
        plan, method, pipeline_text: the plan of the pipeline, its method, and the pipeline's text in messages.
        rank_count, microbatch_count: number of ranks, and number of microbatches of a batch.
        synchronous: a synchronous pipeline of the same model, for evaluation and synchronous steps.
        stream, remedies: the schedule of ticks, and PipeMare's remedies for old gradients.
        advance, batch_shapes: function that applies one update, and the abstract arrays of a global batch.
        model_with_copies, layout: model and layout of the train state, with a copy of shared parameters for each stage.
        gradient_exchange: the exchange of one stage's gradients by the codec; `None` without a codec.

    Raises:
        UserError: the model has tied weights, a parameter that several blocks share, or a loss whose weight depends on
            its parameters.
    """

    def __init__(self, planned: PlannedModel, stages: Stages, optimizer: optax.GradientTransformation) -> None:
        assert planned.plan.pipeline is not None
        self.planned, self.stages, self.plan = planned, stages, planned.plan.pipeline
        self.pipeline_text, self.method = f"pipeline {self.plan}", METHODS[self.plan.name]
        self.rank_count, self.microbatch_count = stages.schedule.ranks, stages.schedule.microbatches
        schedule = METHODS["1f1b"].schedule(self.rank_count, self.microbatch_count, None, 1)
        self.synchronous = Pipelined(planned, stages, schedule)
        self.stream = stream(self.method, self.rank_count, self.microbatch_count, self.plan.stash)
        self.remedies = self._remedies()
        self.advance = guarded_advance(optimizer, UpdateGuard(planned.experiment.guard.update))
        self.batch_shapes = batch_shapes(planned.experiment)
        self.model_with_copies = planned.pure_model.with_copies(copy_numbers(self.synchronous, self.batch_shapes))
        self.layout = Layout.of(self.model_with_copies, optimizer, planned.plan, planned.layout.mesh)
        self.gradient_exchange = self._make_exchange()
        self._owner_names = self.layout.owner_names(optimizer)
        self._row_shard_count = math.prod(self.layout.mesh.shape[axis] for axis in BATCH_AXES)
        self._state_treedef = jax.tree.structure(self.layout.abstract.optimizer)
        self._batch_weight = batch_weight_fn(planned, self.batch_shapes)

    def __str__(self) -> str:
        plan, max_delay = self.planned.plan, max(self.stream.delays)
        age_text = (
            f"gradients are up to {max_delay} updates old" if max_delay else "gradients are of the newest weights"
        )
        clip_text = "" if self.planned.experiment.optimizer.clip is None else " clips by its own gradient's norm and"
        synchronous_steps = self.plan.synchronous_steps
        start_text = f"the first {synchronous_steps} steps are synchronous, then " if synchronous_steps else ""
        if self.stream.has_newest_backward and (plan.memory.rule != "none" or plan.stages_keep == "input"):
            age_text += ", and recomputation reads newer weights than the forward pass did"
        stages_text = f"each stage{clip_text} skips bad updates by itself"
        return f"{self.pipeline_text}: {start_text}{age_text}; {stages_text}"

    def _remedies(self) -> Remedies:
        """Return PipeMare's remedies for old gradients, from the plan's settings.

        A setting that the plan leaves out has its published value under PipeMare. Under other methods, it is off.
        """
        plan, is_pipemare, step_count = self.plan, self.stream.has_newest_backward, self.planned.experiment.steps
        anneal = step_count // ANNEAL if is_pipemare and plan.anneal is None else plan.anneal or 0
        correction = CORRECTION if is_pipemare and plan.correction is None else plan.correction
        return Remedies(anneal=anneal, correction=correction or None)

    def _make_exchange(self) -> GradientExchange | None:
        """Return the codec's exchange of one stage's gradients, whole on each device; `None` without a codec."""
        planned = self.planned
        if not isinstance(planned.plan.reduce, Codec):
            return None
        stage_params, shared_params = self.synchronous.divide(named_leaves(planned.pure_model.abstract_params))
        gradient_leaves = {
            name: GradientLeaf((self.stages.depth, *leaf.shape[1:]), PartitionSpec(), layers=True)
            for name, leaf in stage_params.items()
        }
        gradient_leaves |= {name: GradientLeaf(leaf.shape, PartitionSpec()) for name, leaf in shared_params.items()}
        mesh, seed = self.layout.mesh, planned.pure_model.seed
        return GradientExchange(planned.plan.reduce, mesh, gradient_leaves, REPLICA_AXIS, seed)

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _cast_for_passes(self, params: StageParams) -> StageParams:
        """Return the parameters in the dtype of `plan.precision`, in which passes compute; integers are unchanged."""
        dtype = jnp.dtype(self.planned.plan.precision)
        return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)

    def _tick_executor(self, params: StageParams, scaled_batch: ScaledBatch, key: Key) -> Asynchronous:
        """Return the executor of the pipeline's ticks, for use inside a region that is manual over `MANUAL`."""
        run_stage = self.synchronous.stage_fn(self.synchronous.loss, lambda loss: loss.total + loss.penalty)

        def run_scaled_stage(
            stage_params: Arrays, shared_params: Arrays, message: PyTree, scaled_rows: ScaledBatch, action: At, key: Key
        ) -> tuple[PyTree, Array, PyTree]:
            """Run a stage on a message; return (message to the next stage, scaled objective, sums of the loss)."""
            rows, scale = scaled_rows
            next_message, objective, loss_sums = run_stage(stage_params, shared_params, message, rows, action, key)
            return next_message, objective * scale, loss_sums

        stage_params, shared_params = self._cast_for_passes(jax.tree.map(lambda leaf: leaf[0], params))
        microbatch, _ = jax.tree.map(lambda leaf: leaf[0], scaled_batch)
        run_before_blocks = self.synchronous.form.model_parts(self.synchronous.loss).before
        abstract_message = jax.eval_shape(run_before_blocks, stage_params, shared_params, microbatch, key, jnp.int32(0))
        return Asynchronous(
            self.stream,
            run_scaled_stage,
            self._update,
            abstract_message,
            to_compute=None if self.planned.plan.precision == "float32" else self._cast_for_passes,
            remedies=self.remedies,
            axis=PIPE_AXIS,
            manual_axes=MANUAL,
        )

    def _update(
        self, params: StageParams, gradients: StageParams, carry: Carry, _: UpdateAt
    ) -> tuple[StageParams, Carry]:
        """Sum one stage's gradients over the data axes, check, clip and apply them; return new parameters and carry."""
        # a codec sums the gradients of replicas
        unsummed_axes = {PIPE_AXIS} if self.gradient_exchange is None else {PIPE_AXIS, REPLICA_AXIS}
        sum_axes = [axis for axis in MANUAL if axis not in unsummed_axes]
        stage_gradients, shared_gradients = jax.tree.map(
            lambda leaf: self.synchronous.reduce(leaf[0], sum_axes, PartitionSpec()), gradients
        )
        exchange, codec_state, new_states = self.gradient_exchange, carry["codes"], {}
        if exchange is not None:
            gradient_sums = jax.tree.map(lambda leaf: leaf * exchange.replicas, {**stage_gradients, **shared_gradients})
            averages, new_states = self._average(exchange, gradient_sums, codec_state["states"], codec_state["updates"])
            stage_gradients = {name: averages[name] for name in stage_gradients}
            shared_gradients = {name: averages[name] for name in shared_gradients}
        means = self.synchronous.join(stage_gradients, shared_gradients)
        norm = optax.tree.norm(means)
        is_good = carry["watch"].judge(norm, norm, self.planned.experiment.guard)
        state_leaves = [carry["owned" if owner_name else "free"][i] for i, owner_name in enumerate(self._owner_names)]
        optimizer_state = self._state_treedef.unflatten(state_leaves)
        joined_params = self.synchronous.join(*jax.tree.map(lambda leaf: leaf[0], params))
        new_params, new_optimizer_state, is_good = self.advance(means, optimizer_state, joined_params, norm, is_good)
        watch = carry["watch"].after(norm, is_good)
        new_codec_state, sent_bytes = codec_state, carry["sent"]
        if exchange is not None:
            new_states = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new_states, codec_state["states"])
            new_codec_state = {"states": new_states, "updates": codec_state["updates"] + 1}
            sent_bytes = sent_bytes + exchange.wire_bytes_at(codec_state["updates"])
        owned_leaves, free_leaves = self._divide_state(jax.tree.leaves(new_optimizer_state))
        squared_norm_sum = carry["squares"] + jnp.square(norm)
        new_carry = {"owned": owned_leaves, "free": free_leaves, "watch": watch, "codes": new_codec_state}
        new_carry |= {"squares": squared_norm_sum, "sent": sent_bytes}
        return jax.tree.map(lambda leaf: leaf[None], self.synchronous.split(new_params)), new_carry

    def _average(
        self, exchange: GradientExchange, gradients: Arrays, states: PyTree, update_count: Array
    ) -> tuple[Arrays, PyTree]:
        """Average one stage's gradients over the replicas by the codec; return the means and the codec's new states."""
        # the kernels of a codec need a region that is manual over all mesh axes
        return jax.shard_map(
            functools.partial(exchange.average_on_device, agreeing_axes=(REPLICA_AXIS,)),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(self.layout.mesh.axis_names) - set(MANUAL),
            check_vma=False,
        )(gradients, states, update_count)

    def _divide_state(self, leaves: list[Array]) -> tuple[dict[int, Array], dict[int, Array]]:
        """Return (the state's leaves that have a parameter's shape, all other leaves of the state).

        Both are dicts by the index of the leaf in `leaves`, the list of the leaves of the optimizer's state.
        """
        owned_leaves = {i: leaf for i, leaf in enumerate(leaves) if self._owner_names[i]}
        return owned_leaves, {i: leaf for i, leaf in enumerate(leaves) if not self._owner_names[i]}

    # -- the state -----------------------------------------------------------------------------------------------------

    def in_flight(self, state: TrainState) -> Flight:
        """Return the state in flight of an empty pipeline, in which each stage has made `state.step` updates."""

        def fill_stage(
            stage_params: Arrays, shared_params: Arrays, free: dict[int, Array], watch: Watch, update_count: Array
        ) -> Flight:
            """Return this device's state in flight, each array with a first dim of 1."""
            params = jax.tree.map(lambda leaf: leaf[None], stage_params), shared_params
            count, row_count = self.microbatch_count, self.planned.experiment.batch // self.microbatch_count
            local_row_count = row_count // self._row_shard_count
            zero_rows = {
                name: jnp.zeros((count, local_row_count, *leaf.shape[1:]), leaf.dtype)
                for name, leaf in self.batch_shapes.items()
            }
            scaled_batch = (
                (zero_rows, jnp.zeros((count, local_row_count), jnp.int32)),
                jnp.zeros((count,), jnp.float32),
            )
            key = jax.random.key(self.planned.experiment.seed)
            pipe = self._tick_executor(params, scaled_batch, key).empty_pipe(params, scaled_batch, key)
            # each stage's norm, on the assumption that all stages have equal norms
            stage_watch = dataclasses.replace(watch, norm=watch.norm / self.rank_count**0.5)
            codec_state = {}
            if self.gradient_exchange is not None:
                codec_state = {"states": self.gradient_exchange.initial_device_states(), "updates": update_count}
            stage_state = {"free": free, "watch": stage_watch, "codes": codec_state}
            return {"pipe": pipe, **jax.tree.map(lambda leaf: leaf[None], stage_state)}

        _, free = self._divide_state(jax.tree.leaves(state.optimizer))
        stage_spec, whole_spec = PartitionSpec(PIPE_AXIS), PartitionSpec()
        with self.planned.tracing():
            in_specs = (stage_spec, stage_spec, whole_spec, whole_spec, whole_spec)
            return self.planned.shard_map_of(fill_stage, MANUAL, in_specs, DEVICE_SPEC)(
                *self.synchronous.split(state.params), free, state.watch, state.step
            )

    # -- one batch -----------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the ticks of one batch; return the state after them, and the metrics `loss`, `grad_norm` and `weight`.

        `grad_norm` is the joint norm of all gradients by which stages made updates in these ticks; 0 without updates.
        With a codec, there are also `wire_bytes`, for the device that sends most, and `residual_norm`, over all stages.
        """
        synchronous_steps = self.plan.synchronous_steps
        if not synchronous_steps:
            return self.step_in_stream(state, batch)
        return jax.lax.cond(
            state.step < synchronous_steps, self._step_synchronously, self.step_in_stream, state, dict(batch)
        )

    def _step_synchronously(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take a synchronous step, after which the pipeline is empty; return the next state and the metrics."""
        loss, gradients, _ = self.synchronous.gradients(self.with_newest_weights(state), batch)
        gradients_with_copies = jax.lax.with_sharding_constraint(
            self.model_with_copies.in_rows(self.planned.pure_model.in_layers(gradients)), self.layout.master_shardings
        )
        mean_loss, norm = loss.total / positive_divisor(loss.weight), optax.tree.norm(gradients_with_copies)
        is_good = state.watch.judge(mean_loss, norm, self.planned.experiment.guard)
        trees = gradients_with_copies, state.optimizer, state.params
        params, optimizer_state, is_good = self.advance(*trees, norm, is_good)
        watch = state.watch.after(norm, is_good)
        next_state = dataclasses.replace(
            state, step=state.step + 1, params=params, optimizer=optimizer_state, watch=watch
        )
        metrics: Metrics = {"loss": mean_loss, "grad_norm": norm, "weight": loss.weight}
        if self.gradient_exchange is not None:  # synchronous steps send float32, without the codec
            metrics |= {"residual_norm": jnp.zeros(()), "wire_bytes": jnp.float32(self.gradient_exchange.exact_bytes)}
        return dataclasses.replace(next_state, extra={IN_FLIGHT: self.in_flight(next_state)}), metrics

    def with_newest_weights(self, state: TrainState) -> TrainState:
        """Return the state with the newest weights in a synchronous pipeline's layout: one copy of each shared weight.

        The optimizer state is not converted, so only passes that do not read it may use the result.
        """
        stage_params, copies_by_name = self.synchronous.split(state.params)
        rank_by_name = {name: numbers.index(0) for name, numbers in self.model_with_copies.copy_numbers.items()}
        shared_params = {name: copies[rank_by_name[name]] for name, copies in copies_by_name.items()}
        return dataclasses.replace(state, params=self.synchronous.join(stage_params, shared_params), extra={})

    def step_in_stream(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the ticks of one batch, in which stages make their updates; return the next state and the metrics."""
        owned_leaves, _ = self._divide_state(jax.tree.leaves(state.optimizer))
        layered_flags = {
            i: not owner_name or self.planned.pure_model.is_stacked(owner_name)
            for i, owner_name in enumerate(self._owner_names)
        }
        stage_spec, whole_spec, rows_spec = PartitionSpec(PIPE_AXIS), PartitionSpec(), PartitionSpec(None, BATCH_AXES)

        def advance_stage(
            stage_params: Arrays,
            shared_params: Arrays,
            owned_leaves: dict[int, Array],
            flight: Flight,
            scaled_batch: ScaledBatch,
            key: Key,
        ) -> tuple[Arrays, Arrays, dict[int, Array], Flight, tuple[Loss, Array, dict[str, Array]]]:
            """Run the ticks on one device; return new values of the first four arguments, and the metrics.

            The metrics are the sums of the loss, the gradient norm, and metrics of the codec by name.
            """
            params = jax.tree.map(lambda leaf: leaf[None], stage_params), shared_params
            stage_state = {name: jax.tree.map(lambda x: x[0], flight[name]) for name in ("free", "watch", "codes")}
            stage_owned_leaves = {i: leaf if layered_flags[i] else leaf[0] for i, leaf in owned_leaves.items()}
            carry = {"owned": stage_owned_leaves, **stage_state, "squares": jnp.zeros(()), "sent": jnp.zeros(())}
            executor = self._tick_executor(params, scaled_batch, key)
            advance_result = executor.advance(params, carry, flight["pipe"], scaled_batch, key)
            (stacked_params, new_shared_params), new_carry = advance_result.parameters, advance_result.optimizer
            new_stage_params = jax.tree.map(lambda leaf: leaf[0], stacked_params)
            new_owned_leaves = {i: leaf if layered_flags[i] else leaf[None] for i, leaf in new_carry["owned"].items()}
            new_stage_state = jax.tree.map(lambda leaf: leaf[None], {name: new_carry[name] for name in stage_state})
            norm = jnp.sqrt(jax.lax.psum(new_carry["squares"], PIPE_AXIS))
            loss_sums = jax.lax.psum(advance_result.sums, MANUAL)
            codec_metrics = {}
            if self.gradient_exchange is not None:
                codec_states = new_carry["codes"]["states"]
                residual_squares = jax.lax.psum(squared_residual_norm(codec_states), MANUAL) / self._row_shard_count
                sent_bytes = jax.lax.pmax(new_carry["sent"], MANUAL)
                codec_metrics = {"residual_norm": jnp.sqrt(residual_squares), "wire_bytes": sent_bytes}
            new_flight = {"pipe": advance_result.in_flight, **new_stage_state}
            return new_stage_params, new_shared_params, new_owned_leaves, new_flight, (loss_sums, norm, codec_metrics)

        scales = jnp.broadcast_to(1.0 / positive_divisor(self._batch_weight(batch)), (self.microbatch_count,))
        with self.planned.tracing():
            key = self.planned.key(state)
            out_specs = (stage_spec, stage_spec, stage_spec, DEVICE_SPEC, whole_spec)
            in_specs = (*out_specs[:4], (rows_spec, whole_spec), whole_spec)
            advance_stages = self.planned.shard_map_of(advance_stage, MANUAL, in_specs, out_specs)
            scaled_batch = (self.synchronous.microbatches(batch), scales)
            stage_params, shared_params, owned_leaves, flight, (loss, norm, codec_metrics) = advance_stages(
                *self.synchronous.split(state.params), owned_leaves, state.extra[IN_FLIGHT], scaled_batch, key
            )
        # all devices of a stage have the same free state and the same watch, so one of them is enough
        free_by_rank, watch_by_rank = jax.tree.map(
            lambda leaf: leaf.reshape(self.rank_count, -1)[:, 0], (flight["free"], flight["watch"])
        )
        state_leaves = {**owned_leaves, **jax.tree.map(lambda leaf: leaf[-1], free_by_rank)}
        watch_norm = jnp.sqrt(jnp.square(watch_by_rank.norm).sum())
        next_state = TrainState(
            step=state.step + 1,
            params=self.synchronous.join(stage_params, shared_params),
            optimizer=self._state_treedef.unflatten([state_leaves[i] for i in range(len(state_leaves))]),
            rest=state.rest,
            watch=dataclasses.replace(jax.tree.map(jnp.max, watch_by_rank), norm=watch_norm),
            extra={IN_FLIGHT: flight},
        )
        mean_loss = jnp.where(loss.weight > 0, loss.total / positive_divisor(loss.weight), jnp.nan)
        return next_state, {"loss": mean_loss, "grad_norm": norm, "weight": loss.weight, **codec_metrics}


@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """The `StateExtra` of an asynchronous pipeline: messages, batches, older weights, gradient sums, watches of stages.

    Args:
        pipeline: the asynchronous pipeline.
        name: key of this extra in `TrainState.extra`.
        label: name of this extra in tables of memory.
    """

    pipeline: AsyncPipeline
    name: str = dataclasses.field(default=IN_FLIGHT, init=False)
    label: str = dataclasses.field(default="in flight", init=False)

    def add_to_layout(self, layout: Layout) -> Layout:
        """Return the layout of the train state with this extra; each array has a first dim over the devices.

        Other dims are split over axes such as tensor as they are at the end of a step.
        """
        flight = jax.eval_shape(self.pipeline.in_flight, layout.abstract)
        arguments = dataclasses.replace(layout.abstract, extra={self.name: flight}), self.pipeline.batch_shapes
        placed_flight = split_as_results(
            lambda state, batch: self.pipeline.step_in_stream(state, batch)[0].extra[self.name],
            arguments,
            flight,
            NamedSharding(layout.mesh, DEVICE_SPEC),
        )
        return layout.with_extra(self.name, placed_flight)

    def init(self, state: TrainState) -> Flight:
        """Return the state in flight of an empty pipeline."""
        return self.pipeline.in_flight(state)

    def to_saved(self, state: TrainState) -> TrainState:
        """Return the state itself, because a checkpoint holds this extra unchanged."""
        return state

    def to_saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the abstract state itself, because a checkpoint holds this extra unchanged."""
        return abstract

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the state from a checkpoint; the pipeline starts empty if an array of this extra is missing."""
        if not lacks(state.extra[self.name]):
            return state
        other_extras = {name: tree for name, tree in state.extra.items() if name != self.name}
        shardings = self.add_to_layout(self.pipeline.layout).state_shardings.extra[self.name]
        flight = jax.jit(self.pipeline.in_flight, out_shardings=shardings)(
            dataclasses.replace(state, extra=other_extras)
        )
        return dataclasses.replace(state, extra={**other_extras, self.name: flight})

    def checkpoint_parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return a tree with a `Part` for each array; the names contain a hash, so that other plans ignore the arrays.

        The hash is of the plan, the layers of each stage, the batch size, the version of JAX, and the arrays' shapes.
        """
        pipeline, abstract_flight = self.pipeline, abstract.extra[self.name]
        shapes_and_dtypes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(abstract_flight)]
        planned = pipeline.planned
        hashed_values = [
            version_1_fields(planned.plan),
            pipeline.stages.layer_counts,
            planned.experiment.batch,
            jax.__version__,
            shapes_and_dtypes,
        ]
        plan_hash = hashlib.sha256(json.dumps(hashed_values, sort_keys=True).encode()).hexdigest()[:12]
        prefix = f"{self.name}/{pipeline.method.name}-{plan_hash}"
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: part_of_whole(f"{prefix}/{path_name(path)}", leaf), abstract_flight
        )

    def note_on_missing(self, saved_names: Container[str], step_names: Iterable[str]) -> str:
        """Return a note for the user if the checkpoint lacks arrays of this extra; empty if it lacks none.

        Args:
            saved_names: names of the arrays in the checkpoint.
            step_names: names of the arrays that the step restores.
        """
        if all(name in saved_names for name in step_names if name.startswith(f"{self.name}/")):
            return ""
        return f"; it has nothing in flight for {self.pipeline.pipeline_text}, which starts empty"

    def describe(self) -> list[str]:
        """Return lines for the user on the pipeline and on its codec."""
        exchange, optimizer = self.pipeline.gradient_exchange, self.pipeline.planned.experiment.optimizer
        return [str(self.pipeline), *([] if exchange is None else describe_codec(exchange, optimizer))]

    def check(self, program: CompiledProgram) -> None:
        """Check nothing: the text of the program does not show how often stages update."""
