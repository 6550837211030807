"""TrainStep: one pure, compiled train step, and the placements of its arrays.

    (TrainState, batch) -> (TrainState, metrics)

`build` composes it of `StepParts`. The function itself is a `SynchronousStep`, or the step of an asynchronous pipeline,
which ends before all of its microbatches have passed through the stages (`step/pipelined/asynchronous.py`).
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
from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.programs.flop import model_flop
from jaxscale.recipe.kernels import KernelChoice
from jaxscale.replicas.reduce import GradientExchange
from jaxscale.state import batches
from jaxscale.state.canonical import Canonical
from jaxscale.state.extra import StateExtra
from jaxscale.state.layout import Layout, first_weights, local_bytes
from jaxscale.state.naming import Naming
from jaxscale.state.stages import Stages
from jaxscale.state.train_state import Metrics, TrainState, Watch
from jaxscale.step.compiled_checks import Compiled, check_compiled, check_host_bytes, check_kept_on_host
from jaxscale.step.gradients import Objective, accuracy, evaluate
from jaxscale.step.host import describe
from jaxscale.step.meetings import Meetings
from jaxscale.step.pipelined.asynchronous import AsyncPipeline
from jaxscale.step.replicas import Replicas
from jaxscale.step.traced_checks import KernelTrace, check_kernel_choices, check_traced
from jaxscale.step.update import Update
from jaxscale.typing import Array, Batch, Float, Params

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
"""From a state and a global batch to the next state and its metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of a train step, made by `build`.

    Args:
        objective: the loss of the model under its plan, at the newest weights.
        layout: the mesh and every placement, without extras.
        optimizer: the optimizer in its three forms.
        function: the step function: a `SynchronousStep`, or the step of an asynchronous pipeline.
        extras: what techniques add to the train state.
        stream: the asynchronous pipeline; `None` without one.
        replicas: the replicas of DiLoCo, which train alone and synchronise now and then; `None` without DiLoCo.
        codec: the exchange by a codec of gradients, or of displacements under DiLoCo; `None` without a codec.
        stages: the stages of the pipeline; `None` without one.
        decision: what the blocks keep; `None` if the plan's memory rule does not depend on them.
        lines: lines for the user: how the mesh was chosen, the memory rule's decision, and others.
    """

    objective: Objective
    layout: Layout
    optimizer: Update
    function: StepFunction
    extras: tuple[StateExtra, ...] = ()
    stream: AsyncPipeline | None = None
    replicas: Replicas | None = None
    codec: GradientExchange | None = None
    stages: Stages | None = None
    decision: Decision | None = None
    lines: tuple[str, ...] = ()


class TrainStep:
    """A train step, its evaluation, and the placements of their arrays. Make one with `build`.

    Args:
        parts: the parts of the train step, from `build`.
    """

    def __init__(self, parts: StepParts) -> None:
        planned = parts.objective.planned
        self.parts = parts
        self.experiment, self.plan = planned.experiment, planned.plan
        self.pure_model = planned.pure_model if parts.stream is None else parts.stream.model_with_copies
        self.objective, self.update = parts.objective, parts.optimizer
        self.optimizer = parts.optimizer.whole
        self.stages, self.decision, self.extras = parts.stages, parts.decision, parts.extras
        self.stream, self.replicas, self.codec = parts.stream, parts.replicas, parts.codec
        self.plain_layout = layout = parts.layout
        for extra in parts.extras:
            layout = extra.add_to_layout(layout)
        self.layout = layout
        self._kernels = KernelTrace(self.plan, layout.mesh, parts.optimizer.unfused)
        state, batches, whole = (
            layout.state_shardings,
            layout.batch_sharding,
            NamedSharding(layout.mesh, PartitionSpec()),
        )
        self.step_fn = jax.jit(
            self._kernels.noted(self._step),
            donate_argnums=0,
            in_shardings=(state, batches),
            out_shardings=(state, whole),
        )
        on_batch = functools.partial(jax.jit, in_shardings=(state, batches))
        self.gradients_fn = on_batch(self._mean_gradients, out_shardings=layout.gradient_shardings)
        self.evaluate_fn = on_batch(self._evaluate, out_shardings=whole)
        self.accuracy_fn = on_batch(self._accuracy, out_shardings=whole)
        self.meetings = None
        if parts.replicas is not None:
            self.meetings = Meetings(parts.replicas, layout, self.experiment.steps, self._kernels.noted)
        self._executable: jax.stages.Compiled | None = None
        # up to JAX 0.10, collectives of some fifty programs in flight starve one another of a CPU's threads
        self._one_at_a_time = layout.mesh.size > 1 and layout.platform == "cpu"
        # up to JAX 0.10 a compiled program refuses its own 4-bit arrays; `jit` runs the same program, compiled once
        self._by_jit = any(leaf.dtype in (jnp.int4, jnp.uint4) for leaf in jax.tree.leaves(layout.abstract.optimizer))

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The devices and their axes."""
        return self.layout.mesh

    @property
    def devices(self) -> int:
        """Number of devices that the step runs on."""
        return self.layout.mesh.size

    @property
    def parameters(self) -> int:
        """Number of trained numbers, the elements of all parameters."""
        return self.pure_model.parameters

    @property
    def kernels(self) -> tuple[KernelChoice, ...]:
        """The implementation of each kernel that the step uses, and why not a better one; () before a trace."""
        return self._kernels.taken

    @property
    def program(self) -> str | None:
        """The compiled program as text; `None` before `compile`."""
        return None if self._executable is None else self._executable.as_text()

    def describe(self) -> list[str]:
        """Lines for the user on the plan's effects, before the first step."""
        lines = list(self.parts.lines)
        unsplit = self.layout.unsplit()
        if unsplit:
            shown_names = ", ".join(unsplit[:5]) + (f" and {len(unsplit) - 5} more" if len(unsplit) > 5 else "")
            lines.append(f"zero {self.plan.zero}: no dim can be split evenly, kept whole: {shown_names}")
        for extra in self.extras:
            lines += extra.describe()
        return lines + describe(self.layout)

    def memory(self, batch: Batch) -> dict[str, int]:
        """Bytes that each device holds in its own memory between steps, by kind of tensor."""
        abstract = self.layout.abstract
        return {
            "parameters": local_bytes(abstract.params),
            "optimizer": local_bytes(abstract.optimizer),
            "model state": local_bytes((abstract.rest, abstract.watch, abstract.step)),
            **{extra.label: local_bytes(abstract.extra[extra.name]) for extra in self.extras},
            "batch": local_bytes(self.abstract_batch(batch)),
        }

    def host_memory(self) -> dict[str, int]:
        """Bytes that each device keeps on its host, by kind of tensor; {} if everything is on the device."""
        abstract = self.layout.abstract
        kinds = {
            "parameters": local_bytes(abstract.params, is_on_host=True),
            "optimizer": local_bytes(abstract.optimizer, is_on_host=True),
            "kept activations": 0 if self.decision is None else self.decision.host_bytes,
        }
        return {kind: count for kind, count in kinds.items() if count}

    def model_flop(self, batch: Batch) -> int:
        """FLOP of the matrix products and convolutions of a step's forward and backward pass, without recomputation."""
        context = self.objective.planned.context(None)
        context = dataclasses.replace(context, attention="plain", loss_chunk=None, loss="reference")

        def total_loss(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
            return self.experiment.model.loss(self.pure_model.module(params, rest), batch, context).total

        return model_flop(
            jax.grad(total_loss),
            self.pure_model.abstract_module_params,
            self.pure_model.abstract_rest,
            batches.shapes(batch),
        )

    # -- batches -------------------------------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """(index, count): this process feeds part `index` of `count` equal parts of the rows of a batch."""
        return self._data_shard

    @functools.cached_property
    def _data_shard(self) -> tuple[int, int]:
        return batches.shard_of(self.layout.batch_sharding, self.experiment.batch)

    def place(self, batch: Batch) -> dict[str, Array]:
        """Put the global batch on the devices, from this process's rows, and return its arrays."""
        return batches.put(batch, self.layout.batch_sharding, self._data_shard)

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a global batch, from its arrays or shapes."""
        return batches.shapes(batch, self.layout.batch_sharding)

    # -- states --------------------------------------------------------------------------------------------------------

    def init(self) -> TrainState:
        """Create the state before the first step. Every leaf is created already sharded, never whole on one device."""
        params, rest = first_weights(self.pure_model, self.layout)
        shardings = self.layout.state_shardings
        if self.update.split:
            start = jax.jit(self.update.start, out_shardings=(shardings.params, shardings.optimizer))
            params, optimizer = start(params)
        else:
            init = self.optimizer.init if self.replicas is None else self.replicas.init_optimizer
            optimizer = jax.jit(init, out_shardings=shardings.optimizer)(params)
        step, watch = jax.jit(
            lambda: (jnp.zeros((), jnp.int32), Watch.start()), out_shardings=(shardings.step, shardings.watch)
        )()
        state = TrainState(step, params, optimizer, rest, watch)
        for extra in self.extras:
            extra_state = jax.jit(extra.init, out_shardings=shardings.extra[extra.name])(state)
            state = dataclasses.replace(state, extra={**state.extra, extra.name: extra_state})
        return state

    @functools.cached_property
    def _canonical(self) -> Canonical:
        naming = Naming(self.pure_model, self.update.split)
        return Canonical(self.layout, self.extras, naming, self.plain_layout.owners(self.optimizer))

    def canonical_abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and placements of the arrays of a canonical form, to restore a checkpoint into."""
        return self._canonical.abstract()

    @property
    def canonical_copy_bytes(self) -> int:
        """Bytes per device that the canonical form needs in addition to the state."""
        return self._canonical.copy_bytes

    def to_canonical(self, state: TrainState) -> dict[str, Array]:
        """The canonical form of a state, which checkpoints hold: a flat dict of arrays.

        Its names and shapes do not depend on mesh, ZeRO stage or stacking of layers.
        """
        return self._canonical.take_apart(state)

    def from_canonical(self, arrays: Mapping[str, Array]) -> TrainState:
        """The state of a canonical form, whose arrays are placed as in `canonical_abstract`. The arrays are donated.

        Arrays of extras may be missing; such an extra starts from its initial value.
        """
        return self._canonical.put_together(dict(arrays))

    def describe_restored(self, names: Container[str]) -> str:
        """A note for the user on missing arrays of extras, starting with a semicolon; empty if none are missing.

        Args:
            names: names of the arrays in the checkpoint.
        """
        return "".join(extra.note_on_missing(names, self.canonical_abstract()) for extra in self.extras)

    def module(self, state: TrainState) -> nnx.Module:
        """The user's module with the parameters of a state, for generation, export or inspection."""
        params = state.params
        if self.plan.offload.masters:
            device_shardings = jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), self.layout.master_shardings)
            params = jax.device_put(params, device_shardings)
        return self.pure_model.module(self.pure_model.in_layers(params), state.rest)

    # -- running -------------------------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> Compiled:
        """Compile the step for batches like `batch` (of global shapes), and check that every request took effect."""
        start = time.perf_counter()
        traced = self.step_fn.trace(self.layout.abstract, self.abstract_batch(batch))
        self.check_traced(traced.jaxpr, batch)
        self.check_kernels()
        executable = traced.lower().compile()
        seconds = time.perf_counter() - start
        check_compiled(self.layout, self.optimizer, self.extras, executable)
        self._executable = executable
        memory = executable.memory_analysis()
        assert memory is not None, "CPU, GPU and TPU all report it"
        check_kept_on_host(self.layout, self.decision, memory.host_temp_size_in_bytes)
        check_host_bytes(self.layout, memory.host_argument_size_in_bytes, executable.as_text)
        if self.meetings is not None:
            start = time.perf_counter()
            self.meetings.compile()
            seconds += time.perf_counter() - start
        return Compiled.of(executable, seconds)

    def check_traced(self, jaxpr: ClosedJaxpr, batch: Batch) -> None:
        """Refuse requests that have no effect on the model.

        Args:
            jaxpr: jaxpr of the whole step.
            batch: arrays or shapes that the step was traced for.

        Raises:
            UserError: a request has no effect; the error says why, and what to do instead.
        """
        evaluation = functools.partial(self.evaluate_fn.trace, self.layout.abstract, self.abstract_batch(batch))
        check_traced(self.objective.planned, self.decision, batch, jaxpr, evaluation)

    def check_kernels(self) -> None:
        """Refuse a plan that names an implementation of a kernel which the traced step does not use.

        Raises:
            UserError: the named implementation is not used; the error reports which one is.
        """
        if self.meetings is not None and self.codec is not None:  # the kernels of the codec are used in meetings
            self.meetings.trace()
        check_kernel_choices(self.plan, self.kernels)

    def __call__(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, Metrics]:
        """Run one step, and the meetings that are due after it. The state is donated: use the one that is returned.

        Args:
            state: the train state.
            batch: device arrays, from `place`.

        Returns:
            The next state, and scalars: `loss` (nats per target), `grad_norm` before clipping, `learning_rate`,
            `weight` (targets), `skipped` (steps so far that were not applied), `skipped_in_row`; with a codec
            `residual_norm` (norm of what replicas have yet to send) and `wire_bytes` (bytes that each device sends over
            the replica axis). Under DiLoCo `grad_norm` is the root of the mean square of the replicas' norms, and
            `wire_bytes` is 0 in steps without a meeting.
        """
        if self._one_at_a_time:
            jax.block_until_ready(state.watch)
        number = 0 if self.meetings is None else self.meetings.number(state)
        state, metrics = (self.step_fn if self._executable is None or self._by_jit else self._executable)(state, batch)
        if self.meetings is None:
            return state, metrics
        return self.meetings.hold(number, state, metrics, by_jit=self._by_jit)

    def evaluate(self, state: TrainState, batch: Mapping[str, Array]) -> Loss:
        """Compute the sums of the loss of a batch, without dropout, microbatch by microbatch as in training."""
        loss = self.evaluate_fn(state, batch)
        return jax.block_until_ready(loss) if self._one_at_a_time else loss

    def accuracy(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[Array, Array] | None:
        """Numbers of correct targets and of all targets in a batch, from a forward pass as for the loss.

        Returns:
            Two sums; `None` if the model has no `accuracy`.
        """
        if getattr(self.experiment.model, "accuracy", None) is None:
            return None
        sums = self.accuracy_fn(state, batch)
        return jax.block_until_ready(sums) if self._one_at_a_time else sums

    # -- the step itself -----------------------------------------------------------------------------------------------

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step function, with the metrics that all steps have in common."""
        next_state, metrics = self.parts.function(state, batch)
        rate = self.experiment.optimizer.schedule_fn(self.experiment.steps)(state.watch.good)
        common_metrics = {
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": next_state.watch.skipped,
            "skipped_in_row": next_state.watch.in_row,
        }
        return next_state, {**metrics, **common_metrics}

    def _mean_gradients(self, state: TrainState, batch: Batch) -> Params:
        """The gradients of a global batch.

        Raises:
            UserError: the pipeline is asynchronous.
        """
        if self.stream is not None:
            raise UserError(
                f"{self.stream.pipeline_text}: a step has no gradients of its own; take a synchronous pipeline to "
                "compute them"
            )
        return self.objective.gradients(state, batch)[1]

    def _evaluate(self, state: TrainState, batch: Batch) -> Loss:
        return evaluate(self.objective, self._newest(state), batch)

    def _accuracy(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        return accuracy(self.objective, self._newest(state), batch)

    def _newest(self, state: TrainState) -> TrainState:
        """The state with the newest weights, for an evaluation."""
        return state if self.stream is None else self.stream.newest(state)
