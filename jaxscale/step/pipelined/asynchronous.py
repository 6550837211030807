"""AsyncPipeline: the train step of a pipeline whose stages update at different times, and never wait for one another.

A pipeline has p stages, one on each rank (device of the pipe axis), and runs in ticks: in one tick every stage does one
forward or backward pass of a microbatch. A step feeds the microbatches of one batch, and runs the ticks until the next
batch may enter (`pipeline.asynchronous`). Its loss is the mean over the forward passes that reach the last stage in
these ticks. In PipeDream and PipeMare, whose batch is one microbatch, these passes belong to batches that entered up to
p - 1 steps before. If no forward pass reaches the last stage in a step, the loss of the step is NaN.

Each stage clips its own gradients, watches for bad steps (a non-finite or spiking gradient skips that stage's update),
applies a codec, and counts its updates for the learning rate. Gradients are means over the batch, so the weight of the
batch (its number of targets) is computed before its loss, and must not depend on the model.

Each stage has its own copy of every shared parameter (one outside of the blocks). The first stage reads the parameters
before the blocks, the last stage those behind them; the other copies stay zero. A parameter that is read in both places
(tied weights) or in the blocks would become several different ones, and is refused.

Between steps the train state holds the newest weights, the optimizer's state, and what is in flight: messages between
stages, batches, what forward passes keep for their backward passes, older weights, sums of gradients, each stage's
watch and counts. A checkpoint holds this under a name that depends on the plan, so a step with another plan ignores it:
microbatches in flight are lost, although some stages have made their updates. The pipeline then fills again. The first
steps, as many as the plan's `synchronous_steps`, are ordinary synchronous steps, clipped and watched as a whole.
"""

import dataclasses
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
from jaxscale.offload.updates import update_on_device
from jaxscale.pipeline.run.asynchronous import Asynchronous, UpdateAt
from jaxscale.pipeline.run.passes import At
from jaxscale.pipeline.run.pipemare import Remedies
from jaxscale.pipeline.run.stream import stream
from jaxscale.pipeline.schedules import METHODS
from jaxscale.recipe.plan import version_1
from jaxscale.replicas.codec import Codec
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf, squared_residuals
from jaxscale.state.batches import batch_shapes
from jaxscale.state.extra import CompiledProgram, lacks
from jaxscale.state.layout import BATCH_AXES, PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.state.naming import Naming, Part, plain
from jaxscale.state.stages import Stages
from jaxscale.state.train_state import Metrics, TrainState, Watch
from jaxscale.step.exchange import describe_codec
from jaxscale.step.pipelined.forms import Microbatch, Named
from jaxscale.step.pipelined.gradients import MANUAL, Pipelined
from jaxscale.step.pipelined.reads import shared_copies, weight_program
from jaxscale.step.planned_model import PlannedModel, positive
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Batch, Key, PyTree

IN_FLIGHT = "in_flight"
"""Name of this `StateExtra`. A saved one is ignored by a step with another plan, or under another version of JAX."""
DEVICE_SPEC = PartitionSpec(MANUAL)
"""Placement of arrays whose first dim has an entry for each device."""
Flight: TypeAlias = dict[str, PyTree]
"""The state in flight: "pipe", the state of the executor of ticks, and three entries of each stage.

"free" is the optimizer state that has no parameter's shape, such as counts. "watch" is the stage's watch for bad steps.
"codes" is the state of its codec, with the number of updates.
"""
Parameters: TypeAlias = tuple[Named, Named]
"""Parameters of one stage, with a first dim of 1: those of its layers, and its copies of the shared ones."""
Carry: TypeAlias = dict[str, PyTree]
"""State of one stage within a step: "free", "watch" and "codes" as in `Flight`, and three more entries.

"owned" is the optimizer state that has a parameter's shape. "squares" is the sum of the squared gradient norms of this
step's updates. "sent" is the number of bytes that a codec has sent in this step.
"""
Scaled: TypeAlias = tuple[Microbatch, Array]
"""One microbatch or several, and the factor by which the loss of each is scaled."""
CORRECTION = 0.135
"""PipeMare's D, the decay of its discrepancy correction; its theory gives exp(-2)."""
ANNEAL = 4
"""By default PipeMare's rescheduling of the learning rate fades over a run's steps divided by this number."""


class AsyncPipeline:
    """The train step of an asynchronous pipeline.

    Evaluation and synchronous steps use a synchronous pipeline of the same model. `model_with_copies` and `layout`
    describe the train state, in which each stage has its own copy of every shared parameter.

    Args:
        planned: the model under its plan.
        stages: the layers of each stage.
        optimizer: the whole optimizer, clipping included.

    Raises:
        UserError: the model has tied weights, a parameter that several blocks share, or a loss whose weight depends on
            its parameters.
    """

    def __init__(self, planned: PlannedModel, stages: Stages, optimizer: optax.GradientTransformation) -> None:
        assert planned.plan.pipeline is not None
        self.planned, self.stages, self.plan = planned, stages, planned.plan.pipeline
        self.pipeline_text, self.method = f"pipeline {self.plan}", METHODS[self.plan.name]
        self.ranks, self.group = stages.schedule.ranks, stages.schedule.microbatches
        self.synchronous = Pipelined(planned, stages, METHODS["1f1b"].schedule(self.ranks, self.group, None, 1))
        self.stream = stream(self.method, self.ranks, self.group, self.plan.stash)
        self.remedies = self._remedies()
        self.advance = update_on_device(optimizer)
        self.batch_shapes = batch_shapes(planned.experiment)
        self.model_with_copies = planned.pure_model.copied(shared_copies(self.synchronous, self.batch_shapes))
        self.layout = Layout.of(self.model_with_copies, optimizer, planned.plan, planned.layout.mesh)
        self.codec = self._codec_stage()
        self._owners = self.layout.owners(optimizer)
        self._row_shards = math.prod(self.layout.mesh.shape[axis] for axis in BATCH_AXES)
        self._state_treedef = jax.tree.structure(self.layout.abstract.optimizer)
        self._batch_weight = weight_program(planned, self.batch_shapes)

    def __str__(self) -> str:
        plan, delay = self.planned.plan, max(self.stream.delays)
        age_text = f"gradients are up to {delay} updates old" if delay else "gradients are of the newest weights"
        clip_text = "" if self.planned.experiment.optimizer.clip is None else " clips by its own gradient's norm and"
        synchronous_steps = self.plan.synchronous_steps
        start_text = f"the first {synchronous_steps} steps are synchronous, then " if synchronous_steps else ""
        axes = " x ".join(axis for axis in ("sequence", "tensor") if self.layout.mesh.shape[axis] > 1)
        copies_text = f"; every device along {axes} holds all that is in flight" if axes else ""
        if self.stream.has_newest_backward and (plan.memory.rule != "none" or plan.stages_keep == "input"):
            age_text += ", and recomputation reads newer weights than the forward pass did"
        stages_text = f"each stage{clip_text} skips bad updates by itself{copies_text}"
        return f"{self.pipeline_text}: {start_text}{age_text}; {stages_text}"

    def _remedies(self) -> Remedies:
        """Return PipeMare's remedies for old gradients, from the plan's settings.

        Settings that the plan leaves out have their published values under PipeMare. Other methods then use no remedy.
        """
        plan, is_pipemare, steps = self.plan, self.stream.has_newest_backward, self.planned.experiment.steps
        anneal = steps // ANNEAL if is_pipemare and plan.anneal is None else plan.anneal or 0
        correction = CORRECTION if is_pipemare and plan.correction is None else plan.correction
        return Remedies(anneal=anneal, correction=correction or None)

    def _codec_stage(self) -> GradientExchange | None:
        """Return the exchange of one stage's gradients by the codec; `None` if the plan has no codec.

        Each device has whole gradients of its stage.
        """
        planned = self.planned
        if not isinstance(planned.plan.reduce, Codec):
            return None
        stage_params, shared_params = self.synchronous.divide(named_leaves(planned.pure_model.params))
        leaves = {
            name: GradientLeaf((self.stages.depth, *leaf.shape[1:]), PartitionSpec(), layers=True)
            for name, leaf in stage_params.items()
        }
        leaves |= {name: GradientLeaf(leaf.shape, PartitionSpec()) for name, leaf in shared_params.items()}
        return GradientExchange(planned.plan.reduce, self.layout.mesh, leaves, REPLICA_AXIS, planned.pure_model.seed)

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _cast_for_passes(self, parameters: Parameters) -> Parameters:
        """Cast parameters to the dtype of `plan.precision`, in which passes compute; integers are unchanged."""
        dtype = jnp.dtype(self.planned.plan.precision)
        return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, parameters)

    def _pipe(self, parameters: Parameters, batch: Scaled, key: Key) -> Asynchronous:
        """Return the executor of the pipeline's ticks, for use inside a region that is manual over `MANUAL`."""
        run_stage = self.synchronous.stage_fn(self.synchronous.loss, lambda loss: loss.total + loss.penalty)

        def run_scaled_stage(
            stage_params: Named, shared_params: Named, x: PyTree, microbatch: Scaled, at: At, key: Key
        ) -> tuple[PyTree, Array, PyTree]:
            """Run a stage on a message `x`; return (message to the next stage, scaled objective, sums of the loss)."""
            rows, scale = microbatch
            y, objective, sums = run_stage(stage_params, shared_params, x, rows, at, key)
            return y, objective * scale, sums

        stage_params, shared_params = self._cast_for_passes(jax.tree.map(lambda leaf: leaf[0], parameters))
        rows, _ = jax.tree.map(lambda leaf: leaf[0], batch)
        run_before_blocks = self.synchronous.form.parts(self.synchronous.loss).before
        message_shape = jax.eval_shape(run_before_blocks, stage_params, shared_params, rows, key, jnp.int32(0))
        return Asynchronous(
            self.stream,
            run_scaled_stage,
            self._update,
            message_shape,
            to_compute=None if self.planned.plan.precision == "float32" else self._cast_for_passes,
            remedies=self.remedies,
            axis=PIPE_AXIS,
            manual_axes=MANUAL,
        )

    def _update(
        self, parameters: Parameters, gradients: Parameters, carry: Carry, at: UpdateAt
    ) -> tuple[Parameters, Carry]:
        """Sum one stage's gradients over the data axes, check, clip and apply them; return new parameters and carry."""
        del at
        axes_left_out = {PIPE_AXIS} if self.codec is None else {PIPE_AXIS, REPLICA_AXIS}
        axes = [axis for axis in MANUAL if axis not in axes_left_out]  # a codec sums the gradients of replicas
        stage_gradients, shared_gradients = jax.tree.map(
            lambda leaf: self.synchronous.reduce(leaf[0], axes, PartitionSpec()), gradients
        )
        codec, codes, codec_states = self.codec, carry["codes"], {}
        if codec is not None:
            sums = jax.tree.map(lambda leaf: leaf * codec.replicas, {**stage_gradients, **shared_gradients})
            averages, codec_states = self._average_over_replicas(codec, sums, codes["states"], codes["updates"])
            stage_gradients = {name: averages[name] for name in stage_gradients}
            shared_gradients = {name: averages[name] for name in shared_gradients}
        means = self.synchronous.join(stage_gradients, shared_gradients)
        norm = optax.tree.norm(means)
        is_good, watch = carry["watch"].judge(norm, norm, self.planned.experiment.guard)
        if codec is not None:
            codec_states = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), codec_states, codes["states"])
            codes = {"states": codec_states, "updates": codes["updates"] + 1}
            carry = {**carry, "sent": carry["sent"] + codec.wire_bytes_at(carry["codes"]["updates"])}
        state_leaves = [carry["owned" if owner else "free"][i] for i, owner in enumerate(self._owners)]
        params = self.synchronous.join(*jax.tree.map(lambda leaf: leaf[0], parameters))
        params, optimizer_state = self.advance(
            means, self._state_treedef.unflatten(state_leaves), params, norm, is_good
        )
        owned, free = self._divide_state(jax.tree.leaves(optimizer_state))
        squares = carry["squares"] + jnp.square(norm)
        carry |= {"owned": owned, "free": free, "watch": watch, "codes": codes, "squares": squares}
        return jax.tree.map(lambda leaf: leaf[None], self.synchronous.split(params)), carry

    def _average_over_replicas(
        self, codec: GradientExchange, gradients: Named, states: PyTree, updates: Array
    ) -> tuple[Named, PyTree]:
        """Average one stage's gradients over the replicas by the codec; return the means and the codec's new states.

        The kernels of a codec need a region that is manual over all mesh axes.
        """
        return jax.shard_map(
            lambda gradients, states, updates: codec.average_on_device(gradients, states, updates, (REPLICA_AXIS,)),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(self.layout.mesh.axis_names) - set(MANUAL),
            check_vma=False,
        )(gradients, states, updates)

    def _divide_state(self, leaves: list[Array]) -> tuple[dict[int, Array], dict[int, Array]]:
        """Divide the leaves of the optimizer's state; return those that have a parameter's shape, and the others.

        Both are dicts by the index of the leaf in the list.
        """
        owned = {i: leaf for i, leaf in enumerate(leaves) if self._owners[i]}
        return owned, {i: leaf for i, leaf in enumerate(leaves) if not self._owners[i]}

    # -- the state -----------------------------------------------------------------------------------------------------

    def in_flight(self, state: TrainState) -> Flight:
        """Return the state in flight of an empty pipeline.

        The number of updates that each stage has made is the number of steps of `state`.
        """

        def fill_stage(
            stage_params: Named, shared_params: Named, free: dict[int, Array], watch: Watch, updates: Array
        ) -> Flight:
            """Return this device's state in flight, each array with a first dim of 1."""
            parameters = jax.tree.map(lambda leaf: leaf[None], stage_params), shared_params
            rows = self.planned.experiment.batch // self.group // self._row_shards
            zeros = {
                name: jnp.zeros((self.group, rows, *leaf.shape[1:]), leaf.dtype)
                for name, leaf in self.batch_shapes.items()
            }
            batch = ((zeros, jnp.zeros((self.group, rows), jnp.int32)), jnp.zeros((self.group,), jnp.float32))
            key = jax.random.key(self.planned.experiment.seed)
            pipe = self._pipe(parameters, batch, key).empty_pipe(parameters, batch, key)
            # each stage's norm, on the assumption that all stages have equal norms
            watch = dataclasses.replace(watch, norm=watch.norm / self.ranks**0.5)
            codes = {}
            if self.codec is not None:
                codes = {"states": self.codec.initial_device_states(), "updates": updates}
            stage_state = {"free": free, "watch": watch, "codes": codes}
            return {"pipe": pipe, **jax.tree.map(lambda leaf: leaf[None], stage_state)}

        _, free = self._divide_state(jax.tree.leaves(state.optimizer))
        stage_spec, whole_spec = PartitionSpec(PIPE_AXIS), PartitionSpec()
        with self.planned.tracing():
            in_specs = (stage_spec, stage_spec, whole_spec, whole_spec, whole_spec)
            return self.planned.mapped(fill_stage, MANUAL, in_specs, DEVICE_SPEC)(
                *self.synchronous.split(state.params), free, state.watch, state.step
            )

    # -- one batch -----------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the ticks of one batch; return the state after them, and their metrics `loss`, `grad_norm` and `weight`.

        `grad_norm` is the norm of all gradients by which stages made updates, taken together; 0 if there were none.
        With a codec there are also `wire_bytes`, of the device that sends most, and `residual_norm`, over all stages.
        """
        synchronous_steps = self.plan.synchronous_steps
        if not synchronous_steps:
            return self._step_in_stream(state, batch)
        return jax.lax.cond(
            state.step < synchronous_steps, self._step_synchronously, self._step_in_stream, state, dict(batch)
        )

    def _step_synchronously(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take a synchronous step, after which the pipeline is empty; return the next state and the metrics."""
        loss, gradients, _ = self.synchronous.gradients(self.newest(state), batch)
        gradients = self.model_with_copies.in_rows(self.planned.pure_model.in_layers(gradients))
        gradients = jax.lax.with_sharding_constraint(gradients, self.layout.masters)
        mean_loss, norm = loss.total / positive(loss.weight), optax.tree.norm(gradients)
        is_good, watch = state.watch.judge(mean_loss, norm, self.planned.experiment.guard)
        params, optimizer_state = self.advance(gradients, state.optimizer, state.params, norm, is_good)
        next_state = dataclasses.replace(
            state, step=state.step + 1, params=params, optimizer=optimizer_state, watch=watch
        )
        metrics: Metrics = {"loss": mean_loss, "grad_norm": norm, "weight": loss.weight}
        if self.codec is not None:  # synchronous steps send float32, without the codec
            metrics |= {"residual_norm": jnp.zeros(()), "wire_bytes": jnp.float32(self.codec.exact_bytes)}
        return dataclasses.replace(next_state, extra={IN_FLIGHT: self.in_flight(next_state)}), metrics

    def newest(self, state: TrainState) -> TrainState:
        """Return the state of a synchronous pipeline with the newest weights.

        Its optimizer state is that of `state`, so it serves only passes that read no optimizer state.
        """
        stage_params, copies_by_name = self.synchronous.split(state.params)
        copy_indices = {name: copies.index(0) for name, copies in self.model_with_copies.copies.items()}
        shared_params = {name: copies[copy_indices[name]] for name, copies in copies_by_name.items()}
        return dataclasses.replace(state, params=self.synchronous.join(stage_params, shared_params), extra={})

    def _step_in_stream(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the ticks of one batch, in which stages make their updates; return the next state and the metrics."""
        owned, _ = self._divide_state(jax.tree.leaves(state.optimizer))
        has_layers = {i: not owner or self.planned.pure_model.stacked(owner) for i, owner in enumerate(self._owners)}
        stage_spec, whole_spec, rows_spec = PartitionSpec(PIPE_AXIS), PartitionSpec(), PartitionSpec(None, BATCH_AXES)

        def advance_stage(
            stage_params: Named, shared_params: Named, owned: dict[int, Array], flight: Flight, batch: Scaled, key: Key
        ) -> tuple[Named, Named, dict[int, Array], Flight, tuple[Loss, Array, dict[str, Array]]]:
            """Run the ticks on one device; return new values of the first four arguments, and the metrics.

            The metrics are the sums of the loss, the gradient norm, and metrics of the codec by name.
            """
            parameters = jax.tree.map(lambda leaf: leaf[None], stage_params), shared_params
            stage_state = {name: jax.tree.map(lambda x: x[0], flight[name]) for name in ("free", "watch", "codes")}
            owned = {i: leaf if has_layers[i] else leaf[0] for i, leaf in owned.items()}
            carry = {"owned": owned, **stage_state, "squares": jnp.zeros(()), "sent": jnp.zeros(())}
            pipe = self._pipe(parameters, batch, key)
            advanced = pipe.advance(parameters, carry, flight["pipe"], batch, key)
            stage_params, shared_params = advanced.parameters
            stage_params, carry = jax.tree.map(lambda leaf: leaf[0], stage_params), advanced.optimizer
            owned = {i: leaf if has_layers[i] else leaf[None] for i, leaf in carry["owned"].items()}
            stage_state = jax.tree.map(lambda leaf: leaf[None], {name: carry[name] for name in stage_state})
            norm = jnp.sqrt(jax.lax.psum(carry["squares"], PIPE_AXIS))
            loss_sums = jax.lax.psum(advanced.sums, MANUAL)
            codec_metrics = {}
            if self.codec is not None:
                residual_squares = jax.lax.psum(squared_residuals(carry["codes"]["states"]), MANUAL) / self._row_shards
                sent_bytes = jax.lax.pmax(carry["sent"], MANUAL)
                codec_metrics = {"residual_norm": jnp.sqrt(residual_squares), "wire_bytes": sent_bytes}
            flight = {"pipe": advanced.in_flight, **stage_state}
            return stage_params, shared_params, owned, flight, (loss_sums, norm, codec_metrics)

        scale = jnp.broadcast_to(1.0 / positive(self._batch_weight(batch)), (self.group,))
        with self.planned.tracing():
            key = self.planned.key(state)
            out_specs = (stage_spec, stage_spec, stage_spec, DEVICE_SPEC, whole_spec)
            in_specs = (*out_specs[:4], (rows_spec, whole_spec), whole_spec)
            advance_stages = self.planned.mapped(advance_stage, MANUAL, in_specs, out_specs)
            microbatches = (self.synchronous.microbatches(batch), scale)
            stage_params, shared_params, owned, flight, (loss, norm, codec_metrics) = advance_stages(
                *self.synchronous.split(state.params), owned, state.extra[IN_FLIGHT], microbatches, key
            )
        # devices of a stage hold the same free state and watch: take one device of each stage
        free, watch = jax.tree.map(lambda leaf: leaf.reshape(self.ranks, -1)[:, 0], (flight["free"], flight["watch"]))
        state_leaves = {**owned, **jax.tree.map(lambda leaf: leaf[-1], free)}
        watch_norm = jnp.sqrt(jnp.square(watch.norm).sum())
        next_state = TrainState(
            step=state.step + 1,
            params=self.synchronous.join(stage_params, shared_params),
            optimizer=self._state_treedef.unflatten([state_leaves[i] for i in range(len(state_leaves))]),
            rest=state.rest,
            watch=dataclasses.replace(jax.tree.map(jnp.max, watch), norm=watch_norm),
            extra={IN_FLIGHT: flight},
        )
        mean_loss = jnp.where(loss.weight > 0, loss.total / positive(loss.weight), jnp.nan)
        return next_state, {"loss": mean_loss, "grad_norm": norm, "weight": loss.weight, **codec_metrics}


@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """The extra of an asynchronous pipeline: messages, batches, older weights, sums of gradients, each stage's watch.

    Args:
        pipeline: the asynchronous pipeline.
    """

    pipeline: AsyncPipeline
    name: str = dataclasses.field(default=IN_FLIGHT, init=False)
    label: str = dataclasses.field(default="in flight", init=False)

    def placed(self, layout: Layout) -> Layout:
        """Return the layout of the train state with this extra; each array has a first dim over the devices."""
        sharding = NamedSharding(layout.mesh, DEVICE_SPEC)
        flight = jax.eval_shape(self.pipeline.in_flight, layout.abstract)
        return layout.with_extra(
            self.name,
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), flight),
        )

    def init(self, state: TrainState) -> Flight:
        """Return the state in flight of an empty pipeline."""
        return self.pipeline.in_flight(state)

    def saved(self, state: TrainState) -> TrainState:
        """Return the state itself, because a checkpoint holds this extra unchanged."""
        return state

    def saved_abstract(self, abstract: TrainState) -> TrainState:
        """Return the abstract state itself, because a checkpoint holds this extra unchanged."""
        return abstract

    def loaded(self, state: TrainState) -> TrainState:
        """Return the state that a checkpoint gives; the pipeline starts empty if any array of this extra is missing."""
        if not lacks(state.extra[self.name]):
            return state
        other_extras = {name: tree for name, tree in state.extra.items() if name != self.name}
        shardings = self.placed(self.pipeline.layout).state.extra[self.name]
        flight = jax.jit(self.pipeline.in_flight, out_shardings=shardings)(
            dataclasses.replace(state, extra=other_extras)
        )
        return dataclasses.replace(state, extra={**other_extras, self.name: flight})

    def parts(self, naming: Naming, abstract: TrainState) -> PyTree[Part]:
        """Return a tree with a `Part` for each array. Names have a hash, so a step with another plan ignores them.

        The hash is of the plan, the layers of each stage, the batch size, the version of JAX, and the arrays' shapes.
        """
        pipeline, flight = self.pipeline, abstract.extra[self.name]
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(flight)]
        planned = pipeline.planned
        dependencies = [
            version_1(planned.plan),
            pipeline.stages.layers,
            planned.experiment.batch,
            jax.__version__,
            shapes,
        ]
        plan_hash = hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()[:12]
        prefix = f"{self.name}/{pipeline.method.name}-{plan_hash}"
        return jax.tree_util.tree_map_with_path(lambda path, leaf: plain(f"{prefix}/{path_name(path)}", leaf), flight)

    def notes(self, names: Container[str], wanted: Iterable[str]) -> str:
        """Return a note for the user if the checkpoint lacks arrays of this extra, otherwise ""."""
        if all(name in names for name in wanted if name.startswith(f"{self.name}/")):
            return ""
        return f"; it has nothing in flight for {self.pipeline.pipeline_text}, which starts empty"

    def describe(self) -> list[str]:
        """Return lines for the user on the pipeline and on its codec."""
        optimizer = self.pipeline.planned.experiment.optimizer
        codec_lines = [] if self.pipeline.codec is None else describe_codec(self.pipeline.codec, optimizer)
        return [str(self.pipeline), *codec_lines]

    def check(self, program: CompiledProgram) -> None:
        """Check nothing, because the program's text does not show how often stages update."""
