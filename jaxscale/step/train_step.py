"""TrainStep: one pure, compiled train step, and the placements of its arrays.

    (TrainState, batch) -> (TrainState, metrics)

`build` composes a `TrainStep` of `StepParts`. The step function is a `SynchronousStep`, or the step of an asynchronous
pipeline, which ends before all microbatches have passed through the stages (`step/pipelined/asynchronous.py`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Container, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxscale.blocks import Loss
from jaxscale.compiler.options import options_for
from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.models.scores import Metric
from jaxscale.programs.flop import model_flop
from jaxscale.recipe.kernels import KernelChoice
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.state import batches
from jaxscale.state.canonical import Canonical
from jaxscale.state.class_counts import class_counts
from jaxscale.state.ema import with_average
from jaxscale.state.extra import StateExtra
from jaxscale.state.layout import Layout, device_of, first_weights, local_bytes
from jaxscale.state.leaks import check_arguments, with_explained_errors
from jaxscale.state.naming import Naming
from jaxscale.state.stages import Stages
from jaxscale.state.train_state import Metrics, TrainState, Watch
from jaxscale.step.compiled_checks import Compiled, check_compiled, check_host_bytes, check_kept_on_host
from jaxscale.step.coupling import Coupling
from jaxscale.step.gradients import Objective, accuracy, evaluate, metric
from jaxscale.step.host import describe_offload
from jaxscale.step.meetings import Meetings
from jaxscale.step.pipelined.asynchronous import AsyncPipeline
from jaxscale.step.replicas import Replicas
from jaxscale.step.traced_checks import KernelTrace, check_kernel_choices, check_traced
from jaxscale.step.update import Update
from jaxscale.trees import named_leaves
from jaxscale.typing import Array, Batch, Float, Params
from jaxscale.values.drawn import drawn

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
"""A function from a train state and a global batch to the next state and the metrics of the step."""
SumsFunction = Callable[[TrainState, Batch], tuple[Array, Array]]
"""A function from a train state and a global batch to a weighted sum and the sum of the weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of a train step, which `build` makes.

    Args:
        objective: the loss of the model under its plan, at the newest weights.
        layout: the mesh, and every placement in a train state without extras.
        update: the optimizer under the plan; `Update` describes its parts.
        step_function: a `SynchronousStep`, or the step of an asynchronous pipeline.
        extras: the extras that techniques add to the train state.
        async_pipeline: the asynchronous pipeline; `None` without one.
        replicas: the replicas of DiLoCo, which train alone between meetings; `None` without DiLoCo.
        gradient_exchange: the exchange of gradients, or under DiLoCo of displacements, by a codec; `None` without a
            codec.
        stages: the stages of the pipeline; `None` without one.
        decision: the values that the blocks keep; `None` if the plan's memory rule does not depend on the blocks.
        lines: lines for the user, on the choice of the mesh, the decision of the memory rule, and other settings.
    """

    objective: Objective
    layout: Layout
    update: Update
    step_function: StepFunction
    extras: tuple[StateExtra, ...] = ()
    async_pipeline: AsyncPipeline | None = None
    replicas: Replicas | None = None
    gradient_exchange: GradientExchange | None = None
    stages: Stages | None = None
    decision: Decision | None = None
    lines: tuple[str, ...] = ()


class TrainStep:
    """A train step, its evaluation, and the placements of their arrays. Make one with `build`.

    Args:
        parts: the parts of the train step, from `build`. Most fields of `StepParts` are also attributes of the step.

    Attributes:
        experiment, plan: what is trained, and the plan with its mesh settled.
        pure_model: the model as pure functions; under an asynchronous pipeline, with copies of shared parameters.
        optimizer: the whole optimizer, clipping included.
        plain_layout, layout: the mesh and every placement, without extras and with them.
        step_fn, gradients_fn, evaluate_fn, accuracy_fn: jitted functions of (state, batch).
        meetings: the programs in which DiLoCo's replicas synchronize; `None` without DiLoCo.
    """

    def __init__(self, parts: StepParts) -> None:
        planned = parts.objective.planned
        self.parts = parts
        self.experiment, self.plan = planned.experiment, planned.plan
        async_pipeline = parts.async_pipeline
        self.pure_model = planned.pure_model if async_pipeline is None else async_pipeline.model_with_copies
        self.objective, self.update, self.optimizer = parts.objective, parts.update, parts.update.clipped_rule
        self.stages, self.decision, self.extras = parts.stages, parts.decision, parts.extras
        self.async_pipeline, self.replicas = async_pipeline, parts.replicas
        self.gradient_exchange = parts.gradient_exchange
        self.plain_layout = layout = parts.layout
        for extra in parts.extras:
            layout = extra.add_to_layout(layout)
        self.layout = layout
        self._kernel_trace = KernelTrace(self.plan, layout.mesh, parts.update.unfused_reason)
        whole_sharding = NamedSharding(layout.mesh, PartitionSpec())
        in_shardings = (layout.state_shardings, layout.batch_sharding)
        is_pipelined = self.plan.pipeline is not None
        compiler_options = options_for(self.plan.compiler, device_of(layout.mesh), is_pipelined=is_pipelined)
        self.step_fn = jax.jit(
            self._kernel_trace.with_recording(self._step),
            donate_argnums=0,
            in_shardings=in_shardings,
            out_shardings=(layout.state_shardings, whole_sharding),
            compiler_options=compiler_options or None,
        )
        jit = functools.partial(jax.jit, in_shardings=in_shardings)
        self.gradients_fn = jit(self._mean_gradients, out_shardings=layout.gradient_shardings)
        self.evaluate_fn = jit(self._evaluate, out_shardings=whole_sharding)
        self.accuracy_fn = jit(self._accuracy, out_shardings=whole_sharding)
        self._jit_sums = functools.partial(jit, out_shardings=whole_sharding)
        self._metric_fns: dict[Metric, SumsFunction] = {}
        self.meetings = None
        if parts.replicas is not None:
            step_count, with_recording = self.experiment.steps, self._kernel_trace.with_recording
            self.meetings = Meetings(parts.replicas, layout, step_count, with_recording)
        self._executable: jax.stages.Compiled | None = None
        self._class_counts: dict[str, int] | None = None  # counted for the first batch
        self._model_flop_by_shapes: dict[frozenset[tuple[str, jax.ShapeDtypeStruct]], int] = {}
        self._coupling, self._is_loss_checked = Coupling(planned), False
        # whether each program waits for the previous program: up to JAX 0.10, collectives of some fifty programs in
        # flight starve one another of a CPU's threads
        self._is_serial = layout.mesh.size > 1 and layout.platform == "cpu"
        # up to JAX 0.10, an executable refuses its own 4-bit arrays; a jitted function compiles the same program once
        self._is_run_by_jit = any(
            leaf.dtype in (jnp.int4, jnp.uint4) for leaf in jax.tree.leaves(layout.abstract.optimizer)
        )

    _repr_html_ = drawn

    def __repr__(self) -> str:
        return f"<TrainStep of {self.experiment.name!r}, {self.parameters:,} parameters, {self.plan!r}>"

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The devices and their axes."""
        return self.layout.mesh

    @property
    def devices(self) -> int:
        """Number of devices that the step runs on."""
        return self.layout.mesh.size

    @property
    def row_shards(self) -> int:
        """Number of shards into which the devices split the rows of a batch."""
        return self.experiment.batch // self.layout.batch_sharding.shard_shape((self.experiment.batch,))[0]

    @property
    def parameters(self) -> int:
        """Number of elements of all trained parameters."""
        return self.pure_model.parameters

    @property
    def kernels(self) -> tuple[KernelChoice, ...]:
        """The implementation of each kernel that the step uses, and the reason for the choice; () before a trace."""
        return self._kernel_trace.choices

    @property
    def program(self) -> str | None:
        """The compiled program as text; `None` before `compile`."""
        return None if self._executable is None else self._executable.as_text()

    def describe(self) -> list[str]:
        """Return lines for the user on the effects of the plan, to print before the first step."""
        lines = list(self.parts.lines)
        whole_names = self.layout.unsplit_names()
        if whole_names:
            more_count = len(whole_names) - 5
            names_text = ", ".join(whole_names[:5]) + f" and {more_count} more" * (more_count > 0)
            lines.append(f"zero {self.plan.zero}: kept whole, because no dim can be split evenly: {names_text}")
        return [*lines, *(line for extra in self.extras for line in extra.describe()), *describe_offload(self.layout)]

    def memory(self, batch: Batch) -> dict[str, int]:
        """Return the bytes that each device holds in its own memory between steps, by kind of tensor."""
        abstract_state = self.layout.abstract
        rest_leaf_by_name, frozen_names = named_leaves(abstract_state.rest), self.pure_model.frozen
        frozen_entry = (
            {"frozen parameters": local_bytes([rest_leaf_by_name[name] for name in frozen_names])}
            if frozen_names
            else {}
        )
        other_leaves = [leaf for name, leaf in rest_leaf_by_name.items() if name not in frozen_names]
        return {
            "parameters": local_bytes(abstract_state.params),
            **frozen_entry,
            "optimizer": local_bytes(abstract_state.optimizer),
            "model state": local_bytes((other_leaves, abstract_state.watch, abstract_state.step)),
            **{extra.label: local_bytes(abstract_state.extra[extra.name]) for extra in self.extras},
            "batch": local_bytes(self.abstract_batch(batch)),
        }

    def host_memory(self) -> dict[str, int]:
        """Return the bytes that each device keeps on its host, by kind of tensor; {} if everything is on the device."""
        abstract_state = self.layout.abstract
        bytes_by_kind = {
            "parameters": local_bytes(abstract_state.params, is_on_host=True),
            "optimizer": local_bytes(abstract_state.optimizer, is_on_host=True),
            "kept activations": 0 if self.decision is None else self.decision.host_bytes,
        }
        return {kind: kind_bytes for kind, kind_bytes in bytes_by_kind.items() if kind_bytes}

    def model_flop(self, batch: Batch) -> int:
        """Return the FLOP of a step's matrix products and convolutions, forward and backward, without recomputation."""
        abstract_batch = batches.abstract_arrays(batch)
        shapes_key = frozenset(abstract_batch.items())
        if shapes_key in self._model_flop_by_shapes:  # counting traces the model and its gradient
            return self._model_flop_by_shapes[shapes_key]
        plan_context = self.objective.planned.context(None)
        context = dataclasses.replace(plan_context, attention="plain", loss_chunk=None, loss="reference")

        def total_loss(params: Params, model_state: Params, batch: Batch) -> Float[Array, ""]:
            return self.experiment.model.loss(self.pure_model.module(params, model_state), batch, context).total

        abstract_model = (self.pure_model.abstract_module_params, self.pure_model.abstract_model_state)
        flop = model_flop(jax.grad(total_loss), *abstract_model, abstract_batch)
        self._model_flop_by_shapes[shapes_key] = flop
        return flop

    # -- batches -------------------------------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """Return (index, count): this process feeds part `index` of `count` equal parts of the rows of a batch."""
        return self._data_shard

    @functools.cached_property
    def _data_shard(self) -> tuple[int, int]:
        """The tuple (index, count) that `data_shard` returns, computed once."""
        return batches.shard_of(self.layout.batch_sharding, self.experiment.batch)

    def place(self, batch: Batch) -> dict[str, Array]:
        """Put the rows of this process on the devices, and return the arrays of the global batch.

        Raises:
            UserError: the batch is not a dict of arrays, its arrays differ in their numbers of rows, the devices cannot
                share the rows evenly, or a token or label is not one of the model's.
        """
        batches.check_rows(batch)
        if self._class_counts is None:
            self._class_counts = class_counts(self.pure_model, batch, self.objective.planned.context(None))
        batches.check_values(batch, self._class_counts)
        return batches.put(batch, self.layout.batch_sharding, self._data_shard)

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the abstract arrays of a global batch, with shardings, from its arrays or shapes."""
        return batches.abstract_arrays(batch, self.layout.batch_sharding)

    # -- states --------------------------------------------------------------------------------------------------------

    def init(self, weights: Mapping[str, Array] | None = None) -> TrainState:
        """Create the state before the first step, and return it. No device ever holds a sharded leaf whole.

        `weights` replace initial float32 parameters and statistics; they are named and placed as in the canonical form.
        """
        if weights is not None and not isinstance(weights, Mapping):
            raise UserError(f"init: got a {type(weights).__name__}, expected nothing, or a dict of arrays by name")
        params, model_state = first_weights(self.pure_model, self.layout)
        if weights:
            params, model_state = self._canonical.with_weights(params, model_state, weights)
        shardings = self.layout.state_shardings
        if self.update.is_split:
            start_fn = jax.jit(self.update.start, out_shardings=(shardings.params, shardings.optimizer))
            params, optimizer_state = start_fn(params)
        else:
            init_fn = self.optimizer.init if self.replicas is None else self.replicas.init_optimizer
            optimizer_state = jax.jit(init_fn, out_shardings=shardings.optimizer)(params)
        step, watch = jax.jit(
            lambda: (jnp.zeros((), jnp.int32), Watch.start()), out_shardings=(shardings.step, shardings.watch)
        )()
        state = TrainState(step, params, optimizer_state, model_state, watch)
        for extra in self.extras:
            extra_value = jax.jit(extra.init, out_shardings=shardings.extra[extra.name])(state)
            state = dataclasses.replace(state, extra={**state.extra, extra.name: extra_value})
        return state

    @functools.cached_property
    def _canonical(self) -> Canonical:
        """The functions that convert a state to its canonical form and back."""
        naming = Naming(self.pure_model, self.update.is_split)
        return Canonical(self.layout, self.extras, naming, self.plain_layout.owner_names(self.optimizer))

    def canonical_abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape, dtype and sharding of each array of the canonical form, by the array's name."""
        return self._canonical.abstract_arrays()

    @property
    def canonical_copy_bytes(self) -> int:
        """Bytes per device that the canonical form needs in addition to the state."""
        return self._canonical.copy_bytes

    def to_canonical(self, state: TrainState) -> dict[str, Array]:
        """Return the canonical form of a state, which checkpoints hold: a flat dict of arrays, by name.

        The names and shapes do not depend on the mesh, the ZeRO stage or the stacking of layers.
        """
        return self._canonical.take_apart(state)

    def from_canonical(self, arrays: Mapping[str, Array]) -> TrainState:
        """Return the state that a canonical form describes; its arrays are donated.

        An extra whose arrays are missing starts from its initial value.

        Args:
            arrays: arrays of the canonical form by name, placed as `canonical_abstract` specifies.
        """
        return self._canonical.put_together(dict(arrays))

    def describe_restored(self, names: Container[str]) -> str:
        """Return notes for the user on missing arrays of extras, each starting with "; "; empty if none are missing.

        Args:
            names: names of the arrays in the checkpoint.
        """
        return "".join(extra.note_on_missing(names, self.canonical_abstract()) for extra in self.extras)

    def module(self, state: TrainState) -> nnx.Module:
        """Return the user's module with a state's parameters, or their average, for generation or inspection."""
        params = with_average(state).params
        if self.plan.offload.masters:
            device_shardings = jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), self.layout.master_shardings)
            params = jax.device_put(params, device_shardings)
        return self.pure_model.module(self.pure_model.in_layers(params), state.rest)

    # -- running -------------------------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> Compiled:
        """Compile the step for batches with the global shapes of `batch`, and check that every setting takes effect.

        Returns:
            Bytes and FLOP of the compiled step, and its compile time in seconds.
        """
        start_time = time.perf_counter()
        traced_step = self.step_fn.trace(self.layout.abstract, self.abstract_batch(batch))
        self.check_traced(traced_step.jaxpr, batch)
        self.check_kernels()
        executable = traced_step.lower().compile()
        seconds = time.perf_counter() - start_time
        check_compiled(self.layout, self.optimizer, self.extras, executable)
        self._executable = executable
        memory_stats = executable.memory_analysis()
        assert memory_stats is not None, "compilers for CPU, GPU and TPU all report memory"
        check_kept_on_host(self.layout, self.decision, memory_stats.host_temp_size_in_bytes)
        check_host_bytes(self.layout, memory_stats.host_argument_size_in_bytes, executable.as_text)
        if self.meetings is not None:
            start_time = time.perf_counter()
            self.meetings.compile()
            seconds += time.perf_counter() - start_time
        return Compiled.of(executable, seconds)

    def check_traced(self, jaxpr: ClosedJaxpr, batch: Batch) -> None:
        """Refuse settings of the plan that have no effect on the model.

        Args:
            jaxpr: jaxpr of the whole step.
            batch: arrays or shapes of the batch for which the step was traced.

        Raises:
            UserError: a setting has no effect; the error gives the reason, and what to do instead.
        """
        trace_loss = functools.partial(self.evaluate_fn.trace, self.layout.abstract, self.abstract_batch(batch))
        check_traced(self.objective.planned, self.decision, batch, jaxpr, trace_loss)

    def check_kernels(self) -> None:
        """Refuse a plan that names an implementation of a kernel, if the traced step does not use the implementation.

        Raises:
            UserError: the named implementation is not used; the error reports which one is.
        """
        if self.meetings is not None and self.gradient_exchange is not None:
            self.meetings.trace()  # records the kernels of the codec, which only meetings use
        check_kernel_choices(self.plan, self.kernels)

    def __call__(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, Metrics]:
        """Run one step, and the meetings that are due after it. The state is donated: use the returned one instead.

        Args:
            state: the train state.
            batch: device arrays, from `place`.

        Returns:
            The next state, and scalars by name: `loss` (nats per target), `grad_norm` (before clipping),
            `learning_rate` (and the rate of each group), `weight` (number of targets), `skipped` (number of steps that
            were not applied), `skipped_in_row` (number of these since the last applied step). With a codec, there are
            also `residual_norm` (norm of the residuals) and `wire_bytes` (bytes that each device sends over the replica
            axis). Under DiLoCo, `grad_norm` is the root of the mean square of the replicas' norms, and `wire_bytes` is
            0 in steps without a meeting.
        """
        check_arguments(state, batch)
        if self._is_serial:
            with_explained_errors(jax.block_until_ready, self.experiment)(state.watch)
        if not self._is_loss_checked:  # before the first step
            self._coupling.check(lambda: self.module(state), batch)
            self._is_loss_checked = True
        step_fn = self.step_fn if self._executable is None or self._is_run_by_jit else self._executable
        run_step = with_explained_errors(step_fn, self.experiment)
        if self.meetings is None:
            return run_step(state, batch)
        step = self.meetings.next_step_number(state)  # before the step, which donates the state
        next_state, metrics = run_step(state, batch)
        return self.meetings.run_due(step, next_state, metrics, is_run_by_jit=self._is_run_by_jit)

    def couples_rows(self, state: TrainState, batch: Batch) -> bool:
        """Return whether the loss couples the rows of a batch, as the model declares, or as measured on this batch."""
        return self._coupling.couples_rows(self.module(state), batch)

    def evaluate(self, state: TrainState, batch: Mapping[str, Array]) -> Loss:
        """Return the sums of the loss over a batch, without dropout, computed by microbatches as in training."""
        check_arguments(state, batch, "step.evaluate")
        loss = self.evaluate_fn(state, batch)
        return jax.block_until_ready(loss) if self._is_serial else loss

    def accuracy(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[Array, Array] | None:
        """Count the correctly predicted targets of a batch, with the forward pass of the loss.

        Returns:
            The number of correct targets, and the number of all targets; `None` if the model has no `accuracy`.
        """
        if getattr(self.experiment.model, "accuracy", None) is None:
            return None
        sums = self.accuracy_fn(state, batch)
        return jax.block_until_ready(sums) if self._is_serial else sums

    def metric(self, function: Metric, state: TrainState, batch: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return the weighted sum over a batch of a metric, `function(module, batch)`, and the sum of the weights."""
        sums = self.metric_fn(function)(state, batch)
        return jax.block_until_ready(sums) if self._is_serial else sums

    def metric_fn(self, function: Metric) -> SumsFunction:
        """Return the jitted function that `metric` calls."""
        if function not in self._metric_fns:
            self._metric_fns[function] = self._jit_sums(functools.partial(self._metric, function))
        return self._metric_fns[function]

    # -- the step itself -----------------------------------------------------------------------------------------------

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run the step function; return the next state, and the metrics with learning rates and skip counts added."""
        next_state, metrics = self.parts.step_function(state, batch)
        learning_rates = self.experiment.optimizer.learning_rates(state.watch.good, self.experiment.steps)
        common_metrics = {
            **{name: jnp.asarray(rate, jnp.float32) for name, rate in learning_rates.items()},
            "skipped": next_state.watch.skipped,
            "skipped_in_row": next_state.watch.in_row,
        }
        return next_state, {**metrics, **common_metrics}

    def _mean_gradients(self, state: TrainState, batch: Batch) -> Params:
        """Return the mean gradients over a global batch.

        Raises:
            UserError: the pipeline is asynchronous.
        """
        if self.async_pipeline is not None:
            raise UserError(
                f"{self.async_pipeline.pipeline_text}: a step has no gradients of its own; take a synchronous pipeline "
                "to compute gradients"
            )
        _, gradients, _ = self.objective.gradients(state, batch)
        return gradients

    def _evaluate(self, state: TrainState, batch: Batch) -> Loss:
        """Return the sums of the loss over a batch: the function that `evaluate` jits."""
        return evaluate(self.objective, self._with_newest_weights(state), batch)

    def _accuracy(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        """Return the numbers of correct targets and of all targets: the function that `accuracy` jits."""
        return accuracy(self.objective, self._with_newest_weights(state), batch)

    def _metric(self, function: Metric, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        """Return the sums of a metric over a batch: the function that `metric` jits."""
        return metric(self.objective, function, self._with_newest_weights(state), batch)

    def _with_newest_weights(self, state: TrainState) -> TrainState:
        """Return the state for evaluation: with averaged weights, or with an asynchronous pipeline's newest weights."""
        return with_average(state) if self.async_pipeline is None else self.async_pipeline.with_newest_weights(state)
