"""TrainStep: one pure, compiled train step, with where its arrays live.

    (TrainState, batch) -> (TrainState, metrics)

Loss and gradients come from `step/objective.py`, their places from `step/layout.py`; the update is optax's.
"""

import dataclasses
import functools
import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import Loss
from jaxscale.compression.reduce import Stage
from jaxscale.memory.decision import Decision
from jaxscale.optim.offloaded import Advance, global_norm
from jaxscale.step import rows
from jaxscale.step.canonical import IN_FLIGHT, Canonical
from jaxscale.step.chained import Chained
from jaxscale.step.choices import Notes, check_taken, noted, taken
from jaxscale.step.compiled import Compiled
from jaxscale.step.experiment import Experiment
from jaxscale.step.first_weights import first_weights
from jaxscale.step.functional import Functional
from jaxscale.step.host import check_host_bytes, describe
from jaxscale.step.kernels import Taken
from jaxscale.step.layout import Layout, local_bytes, masters_on_host
from jaxscale.step.objective import Objective, positive
from jaxscale.step.pipelined import Pipelined
from jaxscale.step.plan import Plan
from jaxscale.step.reducing import describe_reduce, exchanged, said_of_restored
from jaxscale.step.remember import treatment_of
from jaxscale.step.stages import Stages
from jaxscale.step.state import TrainState, Watch
from jaxscale.step.streamed import Streamed
from jaxscale.step.update import Update
from jaxscale.typing import Array, Batch, Float, Params

Metrics = dict[str, Array]


class TrainStep:
    """A train step, its evaluation, and where their arrays live. Make one with `build`.

    Args:
        experiment: what is trained.
        plan: how, with the mesh settled.
        functional: the model as pure functions.
        layout: the mesh and every placement.
        update: the optimizer.
        advance: how its step is made.
        said: how the mesh was chosen and what the memory rule came to, a line each.
        decision: what the plan's memory rule comes to; `None` for one that says by itself what blocks keep.
        stages: of its pipeline; `None` without one.
        streamed: what the step of an asynchronous pipeline computes; `None` for any other.
        stage: of a codec, which reduces the gradients of replicas; `None` where XLA does.
    """

    outer: Any = None
    """Under DiLoCo how replicas meet, an `Outer`."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        functional: Functional,
        layout: Layout,
        update: Update,
        advance: Advance,
        said: Sequence[str],
        decision: Decision | None = None,
        stages: Stages | None = None,
        streamed: Streamed | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.experiment = experiment
        self.plan = plan
        self.functional = functional
        self.layout = layout
        self.update, self.optimizer = update, update.whole
        self.advance = advance
        self.said = tuple(said)
        self.decision = decision
        self.stages = stages
        self.stage = stage
        parts = (experiment, plan, functional, layout, treatment_of(plan, decision, layout.platform))
        self.streamed = streamed
        self.objective = streamed or objective_of(stages, *parts)
        state, batches, whole = layout.state, layout.batch, NamedSharding(layout.mesh, PartitionSpec())
        self._notes: Notes = []
        self.step_fn = jax.jit(
            noted(self, self._step), donate_argnums=0, in_shardings=(state, batches), out_shardings=(state, whole)
        )
        self.gradients_fn = jax.jit(
            lambda state, batch: self.objective.gradients(state, batch)[1],
            in_shardings=(state, batches),
            out_shardings=layout.gradients,
        )
        self.evaluate_fn = jax.jit(self.objective.evaluate, in_shardings=(state, batches), out_shardings=whole)
        self.accuracy_fn = jax.jit(self.objective.accuracy, in_shardings=(state, batches), out_shardings=whole)
        self._executable: Any = None
        # up to JAX 0.10, collectives of some fifty programs in flight starve one another of a CPU's threads
        self._one_at_a_time = layout.mesh.size > 1 and layout.platform == "cpu"
        # up to JAX 0.10 a compiled program refuses its own 4-bit arrays; `jit` runs the same program, compiled once
        self._by_jit = any(leaf.dtype in (jnp.int4, jnp.uint4) for leaf in jax.tree.leaves(layout.abstract.optimizer))

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Any:
        """The devices and their axes."""
        return self.layout.mesh

    @property
    def devices(self) -> int:
        """How many devices the step runs on."""
        return self.layout.mesh.size

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return self.functional.parameters

    @property
    def kernels(self) -> tuple[Taken, ...]:
        """Which implementation of each kernel the step takes, and why not a better one; known once it is traced."""
        return taken(self._notes)

    @property
    def program(self) -> str | None:
        """The compiled program as text; `None` before `compile`."""
        return None if self._executable is None else self._executable.as_text()

    def describe(self) -> list[str]:
        """What a user should know before the first step, one line each."""
        lines = list(self.said)
        unsplit = self.layout.unsplit()
        if unsplit:
            shown = ", ".join(unsplit[:5]) + (f" and {len(unsplit) - 5} more" if len(unsplit) > 5 else "")
            lines.append(f"zero {self.plan.zero}: no dim divides by {self.mesh.shape['fsdp']}, kept whole: {shown}")
        return lines + describe_reduce(self.stage, self.experiment.optimizer) + describe(self.layout)

    def memory(self, batch: Batch) -> dict[str, int]:
        """Bytes per device of what lives in its own memory between steps, by kind of tensor."""
        abstract = self.layout.abstract
        return {
            "parameters": local_bytes(abstract.params),
            "optimizer": local_bytes(abstract.optimizer),
            "model state": local_bytes((abstract.rest, abstract.watch, abstract.step)),
            **({"in flight": local_bytes(abstract.in_flight)} if self.streamed else {}),
            **({"residuals": local_bytes(abstract.reduce)} if self.stage else {}),
            **({"outer state": local_bytes(abstract.outer)} if self.outer else {}),
            "batch": local_bytes(self.abstract_batch(batch)),
        }

    def host_memory(self) -> dict[str, int]:
        """Bytes on each device's share of its host, by kind of tensor; nothing where all is on the device."""
        abstract = self.layout.abstract
        kinds = {
            "parameters": local_bytes(abstract.params, host=True),
            "optimizer": local_bytes(abstract.optimizer, host=True),
            "kept activations": 0 if self.decision is None else self.decision.host_bytes,
        }
        return {kind: count for kind, count in kinds.items() if count}

    def model_flop(self, batch: Batch) -> int:
        """FLOP of the matrix products and convolutions of a step's forward and backward pass, nothing recomputed."""
        from jaxscale.costs.trace import model_flop

        context = self.objective.context(None)
        context = dataclasses.replace(context, attention="plain", loss_chunk=None, loss="reference")

        def objective(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
            module = self.functional.module(params, rest)
            loss = self.experiment.model.loss(module, batch, context)
            return loss.total

        return model_flop(jax.grad(objective), self.functional.whole, self.functional.rest, rows.shapes(batch))

    # -- batches -------------------------------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """(index, count): this process feeds part `index` of `count` equal parts of the rows of a batch."""
        return self._data_shard

    @functools.cached_property
    def _data_shard(self) -> tuple[int, int]:
        return rows.shard_of(self.layout.batch, self.experiment.batch)

    def place(self, batch: Batch) -> dict[str, Array]:
        """This process's rows of a batch, put on the devices as their part of the global batch."""
        return rows.put(batch, self.layout.batch, self._data_shard)

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch (of arrays or of shapes), with their sharding."""
        return rows.shapes(batch, self.layout.batch)

    # -- states --------------------------------------------------------------------------------------------------------

    def init(self) -> TrainState:
        """The state before the first step. Every leaf is created already sharded, never whole on one device."""
        params, rest = first_weights(self.experiment.model, self.functional, self.layout)
        state = self.layout.state
        if self.update.split:
            params, optimizer = jax.jit(self.update.start, out_shardings=(state.params, state.optimizer))(params)
            more = {}
        else:
            optimizer, more = self._optimizer_and_more(params)
        step, watch = jax.jit(
            lambda: (jnp.zeros((), jnp.int32), Watch.start()), out_shardings=(state.step, state.watch)
        )()
        codec = () if self.stage is None else jax.jit(self.stage.init, out_shardings=state.reduce)()
        return self._filled(TrainState(step, params, optimizer, rest, watch, reduce=codec, **more))

    def _optimizer_and_more(self, params: Params) -> tuple[Any, dict[str, Any]]:
        """The optimizer's state of new weights, and what else of a train state depends on them."""
        return jax.jit(self.optimizer.init, out_shardings=self.layout.state.optimizer)(params), {}

    def _filled(self, state: TrainState) -> TrainState:
        """The state with an empty pipe, where it has one that is not drained."""
        if self.streamed is None:
            return state
        return jax.jit(self.streamed.filled, out_shardings=self.layout.state, donate_argnums=0)(state)

    @functools.cached_property
    def _canonical(self) -> Canonical:
        return Canonical(self)

    def canonical_abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and placements of the canonical form of this step's states: what to restore into."""
        return self._canonical.abstract()

    @property
    def canonical_copy_bytes(self) -> int:
        """Bytes per device that the canonical form takes beside the state it is made of."""
        return self._canonical.copy_bytes

    def to_canonical(self, state: TrainState) -> dict[str, Array]:
        """The state as a flat dict of arrays that no mesh, ZeRO stage or stacking shows in: what a checkpoint holds."""
        return self._canonical.take_apart(state)

    def from_canonical(self, arrays: Mapping[str, Array]) -> TrainState:
        """The state of a canonical form, placed as `canonical_abstract` says. The arrays are given away with it.

        What an asynchronous pipeline had in flight may be missing, and it then begins empty.
        """
        state = self._canonical.put_together(dict(arrays))
        lacking = any(leaf is None for leaf in jax.tree.leaves(state.in_flight, is_leaf=lambda leaf: leaf is None))
        return self._filled(dataclasses.replace(state, in_flight=())) if lacking else state

    def describe_restored(self, names: Container[str]) -> str:
        """What a user should know of a checkpoint with arrays of these names, behind a semicolon; mostly nothing."""
        if self.stage is not None:
            return said_of_restored(self.stage, names, self.canonical_abstract())
        lacking = any(name.startswith(f"{IN_FLIGHT}/") and name not in names for name in self.canonical_abstract())
        return f"; nothing was in flight for pipeline {self.plan.pipeline} as it is now: it begins empty" * lacking

    def module(self, state: TrainState) -> Any:
        """The user's module with the parameters of a state, for generation, export, or a look inside."""
        params = state.params
        if masters_on_host(self.plan):
            placed = jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), self.layout.masters)
            params = jax.device_put(params, placed)
        return self.functional.module(self.functional.in_layers(params), state.rest)

    # -- running -------------------------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> Compiled:
        """Compile the step for batches like `batch` (global shapes), and check that every request took effect."""
        from jaxscale.step.check import check_compiled, check_kept_on_host, check_traced

        start = time.perf_counter()
        traced = self.step_fn.trace(self.layout.abstract, self.abstract_batch(batch))
        check_traced(self, traced.jaxpr, batch)
        self.check_kernels()
        executable = traced.lower().compile()
        seconds = time.perf_counter() - start
        check_compiled(self, executable)
        self._executable = executable
        memory = executable.memory_analysis()
        check_kept_on_host(self, memory)
        check_host_bytes(self.layout, memory, executable.as_text)
        return Compiled.of(executable, seconds)

    def check_kernels(self) -> None:
        """Refuse a plan that names a kernel which the step does not take, once it is traced.

        Raises:
            UserError: as it says.
        """
        check_taken(self.plan, self.kernels)

    def run(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, Metrics]:
        """One step. The state given is donated: use the one that comes back.

        Args:
            state: the train state.
            batch: device arrays, from `place`.

        Returns:
            The next state, and scalars: `loss` (nats per target), `grad_norm` before clipping, `learning_rate`,
            `weight` (targets), `skipped` (steps so far that were not applied), `skipped_in_row`; with a codec
            `residual_norm` (of what replicas owe) and `wire_bytes` (each device's, over the replica axis).
        """
        if self._one_at_a_time:
            jax.block_until_ready(state.watch)
        return (self.step_fn if self._executable is None or self._by_jit else self._executable)(state, batch)

    def evaluate(self, state: TrainState, batch: Mapping[str, Array]) -> Loss:
        """Sums of the loss of a batch, without dropout, microbatch by microbatch as in training."""
        loss = self.evaluate_fn(state, batch)
        return jax.block_until_ready(loss) if self._one_at_a_time else loss

    def accuracy(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[Array, Array] | None:
        """Correct targets of a batch, and all, computed as the loss is but in a forward pass of its own.

        Returns:
            Two sums; `None` where the model cannot tell.
        """
        if getattr(self.experiment.model, "accuracy", None) is None:
            return None
        sums = self.accuracy_fn(state, batch)
        return jax.block_until_ready(sums) if self._one_at_a_time else sums

    # -- the step itself -----------------------------------------------------------------------------------------------

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if self.streamed is not None:
            after, found = self.streamed.step(state, batch)
            return after, {**found, **self._progress(state.watch, after.watch)}
        codec: Metrics = {}
        if self.stage is None:
            (loss, gradients, rest), left = self.objective.gradients(state, batch), state.reduce
            norm = global_norm(gradients, self.layout.gradients)
        else:
            loss, gradients, rest = self.objective.gradients_apart(state, batch)
            found = exchanged(self.stage, self.update.messages, gradients, state, self.layout)
            gradients, norm, left, codec = found
        mean = loss.total / positive(loss.weight)
        good, watch = state.watch.judge(mean, norm, self.experiment.guard)
        # a bad step leaves parameters, optimizer and batch statistics as they were
        params, optimizer = self.advance(gradients, state.optimizer, state.params, norm, good)
        metrics = {"loss": mean, "grad_norm": norm, "weight": loss.weight, **codec}
        metrics |= self._progress(state.watch, watch)
        after = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer,
            rest=jax.tree.map(lambda new, old: jnp.where(good, new, old), rest, state.rest),
            watch=watch,
            reduce=jax.tree.map(lambda new, old: jnp.where(good, new, old), left, state.reduce),
        )
        return after, metrics

    def _progress(self, before: Watch, after: Watch) -> Metrics:
        rate = self.experiment.optimizer.schedule_fn(self.experiment.steps)(before.good)
        return {
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": after.skipped,
            "skipped_in_row": after.in_row,
        }


def objective_of(stages: Stages | None, *parts: Any) -> Objective:
    """What a step computes that begins with the newest weights.

    Args:
        stages: of its pipeline; `None` without one.
        parts: as `Objective` takes them.
    """
    if stages is None:
        return Objective(*parts)
    return (Pipelined if stages.chain is None else Chained)(stages, *parts)
