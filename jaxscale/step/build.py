"""build: from an Experiment and a Plan to one pure, compiled train step.

    (TrainState, batch) -> (TrainState, metrics)

Loss and gradients are means over all targets of the global batch, whatever the mesh, the packing and the number of
microbatches: every part gives sums, which are divided once. ZeRO is expressed by sharding constraints in Auto mode, in
the form that XLA turns into the collectives one expects (`sharding/zero.py` has the table).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Context, Loss
from jaxscale.memory.apply import wrapper
from jaxscale.sharding import place
from jaxscale.step.canonical import Canonical
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.layout import Layout, check_model, local_bytes, resolve_mesh, vocab_multiple
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, Watch
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import Array, Batch, Float, Params

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said of a train step, per device.

    Args:
        seconds: that compiling took.
        argument_bytes: of the train state and the batch.
        output_bytes: of what the step gives back.
        alias_bytes: of outputs that take the place of donated arguments.
        temp_bytes: of everything that lives within the step: gradients, activations, gathered weights.
        flop: floating-point operations as the compiler counts them; a loop's body counts once.
    """

    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    flop: float


class TrainStep:
    """A train step, its evaluation, and where their arrays live. Make one with `build`.

    Args:
        experiment: what is trained.
        plan: how, with the mesh settled.
        functional: the model as pure functions.
        layout: the mesh and every placement.
        optimizer: the optax transformation.
        mesh_said: a sentence on how the mesh was chosen.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        functional: Functional,
        layout: Layout,
        optimizer: optax.GradientTransformation,
        mesh_said: str,
    ) -> None:
        self.experiment = experiment
        self.plan = plan
        self.functional = functional
        self.layout = layout
        self.optimizer = optimizer
        self.mesh_said = mesh_said
        state, rows, whole = layout.state, layout.batch, NamedSharding(layout.mesh, PartitionSpec())
        self.step_fn = jax.jit(self._step, donate_argnums=0, in_shardings=(state, rows), out_shardings=(state, whole))
        self.gradients_fn = jax.jit(
            lambda state, batch: self._gradients(state, batch)[1],
            in_shardings=(state, rows),
            out_shardings=layout.gradients,
        )
        self.evaluate_fn = jax.jit(self._evaluate, in_shardings=(state, rows), out_shardings=whole)
        self.accuracy_fn = jax.jit(self._accuracy, in_shardings=(state, rows), out_shardings=whole)
        self._executable: Any = None

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> jax.sharding.Mesh:
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

    def describe(self) -> list[str]:
        """What a user should know before the first step, one line each."""
        lines = [self.mesh_said]
        if self.plan.zero and self.mesh.shape["fsdp"] == 1:
            lines.append(f"zero {self.plan.zero}: one device along fsdp, so nothing is sharded")
        unsplit = self.layout.unsplit()
        if unsplit:
            shown = ", ".join(unsplit[:5]) + (f" and {len(unsplit) - 5} more" if len(unsplit) > 5 else "")
            lines.append(f"zero {self.plan.zero}: no dim divides by {self.mesh.shape['fsdp']}, kept whole: {shown}")
        return lines

    def memory(self, batch: Batch) -> dict[str, int]:
        """Bytes per device of what lives between steps, by kind of tensor."""
        abstract = self.layout.abstract
        return {
            "parameters": local_bytes(abstract.params),
            "optimizer": local_bytes(abstract.optimizer),
            "model state": local_bytes((abstract.rest, abstract.watch, abstract.step)),
            "batch": local_bytes(self.abstract_batch(batch)),
        }

    def model_flop(self, batch: Batch) -> int:
        """FLOP of the matrix products and convolutions of a step's forward and backward pass, nothing recomputed."""
        from jaxscale.costs.trace import model_flop

        context = dataclasses.replace(self._context(None), attention="plain", loss_chunk=None)

        def objective(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
            module = self.functional.module(params, rest)
            loss = self.experiment.model.loss(module, batch, context)
            return loss.total

        abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        return model_flop(jax.grad(objective), self.functional.params, self.functional.rest, abstract)

    # -- batches -------------------------------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """(index, count): this process feeds part `index` of `count` equal parts of the rows of a batch.

        Where the devices of a process hold rows that do not lie together (a torus orders devices by their links, not by
        their hosts), it reads the whole batch, (0, 1), and puts its own rows on its devices.
        """
        return self._data_shard

    @functools.cached_property
    def _data_shard(self) -> tuple[int, int]:
        rows = self.experiment.batch
        mine = self.layout.batch.addressable_devices_indices_map((rows,)).values()
        return equal_part({span(part, rows) for part in mine if part is not None}, rows)

    def place(self, batch: Batch) -> dict[str, Array]:
        """This process's rows of a batch, put on the devices as their part of the global batch."""
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), self.layout.batch)
        index, count = self._data_shard

        def spread(mine: np.ndarray) -> Array:
            rows, first = count * len(mine), index * len(mine)

            def part(where: Any) -> np.ndarray:
                start, stop = span(where, rows)
                return mine[start - first : stop - first]

            return jax.make_array_from_callback((rows, *mine.shape[1:]), self.layout.batch, part)

        return {name: spread(np.asarray(mine)) for name, mine in batch.items()}

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch (of arrays or of shapes), with their sharding."""
        return {
            k: jax.ShapeDtypeStruct(
                np.shape(v) if not hasattr(v, "shape") else v.shape, v.dtype, sharding=self.layout.batch
            )
            for k, v in batch.items()
        }

    # -- states --------------------------------------------------------------------------------------------------------

    def init(self) -> TrainState:
        """The state before the first step. Every leaf is created already sharded, never whole on one device."""
        params, rest = jax.jit(self.functional.create, out_shardings=(self.layout.masters, self.layout.state.rest))()
        load = getattr(self.experiment.model, "initial_params", None)
        if load is not None:
            params = jax.tree.map(_place_host_array, load(), self.layout.abstract.params)
        return self._fresh(params, rest)

    def _fresh(self, params: Params, rest: Params) -> TrainState:
        state = self.layout.state
        optimizer = jax.jit(self.optimizer.init, out_shardings=state.optimizer)(params)
        step, watch = jax.jit(
            lambda: (jnp.zeros((), jnp.int32), Watch.start()), out_shardings=(state.step, state.watch)
        )()
        return TrainState(step, params, optimizer, rest, watch)

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
        """The state of a canonical form, placed as `canonical_abstract` says. The arrays are given away with it."""
        return self._canonical.put_together(dict(arrays))

    def module(self, state: TrainState) -> Any:
        """The user's module with the parameters of a state, for generation, export, or a look inside."""
        return self.functional.module(state.params, state.rest)

    # -- running -------------------------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> Compiled:
        """Compile the step for batches like `batch` (global shapes), and check that every request took effect."""
        from jaxscale.step.check import check_compiled, check_traced

        start = time.perf_counter()
        traced = self.step_fn.trace(self.layout.abstract, self.abstract_batch(batch))
        check_traced(self, traced.jaxpr, batch)
        executable = traced.lower().compile()
        seconds = time.perf_counter() - start
        check_compiled(self, executable)
        self._executable = executable
        memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
        assert memory is not None, "CPU, GPU and TPU all tell it"
        return Compiled(
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            flop=float(cost.get("flops", 0.0)),
        )

    def run(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, Metrics]:
        """One step. The state given is donated: use the one that comes back.

        Args:
            state: the train state.
            batch: device arrays, from `place`.

        Returns:
            The next state, and scalars: `loss` (nats per target), `grad_norm` before clipping, `learning_rate`,
            `weight` (targets), `skipped` (steps so far that were not applied), `skipped_in_row`.
        """
        return (self._executable or self.step_fn)(state, batch)

    def evaluate(self, state: TrainState, batch: Mapping[str, Array]) -> Loss:
        """Sums of the loss of a batch, without dropout, microbatch by microbatch as in training."""
        return self.evaluate_fn(state, batch)

    def accuracy(self, state: TrainState, batch: Mapping[str, Array]) -> tuple[Array, Array] | None:
        """Correct targets of a batch, and all, computed as the loss is but in a forward pass of its own.

        Returns:
            Two sums; `None` where the model cannot tell.
        """
        return None if getattr(self.experiment.model, "accuracy", None) is None else self.accuracy_fn(state, batch)

    # -- the step itself -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        matmul = None if self.plan.matmul == "default" else self.plan.matmul
        with (
            jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext(),
            place.layout(self.mesh, self.layout.rules),
            blocks.wrapping(wrapper(self.plan.memory), unroll=self.plan.unroll),
        ):
            yield

    def _context(self, key: Any, examples: Any = None) -> Context:
        return Context(
            key=key,
            examples=examples,
            dtype=None if self.plan.precision == "float32" else self.plan.precision,
            attention=self.plan.attention,
            loss_chunk=self.plan.loss_chunk,
        )

    def _compute_params(self, params: Params) -> Params:
        """The copy of the parameters that the forward and backward passes read, and that is differentiated."""
        if self.plan.precision == "float32":
            return params
        split, dtype = self.plan.zero in (1, 2), jnp.dtype(self.plan.precision)
        if self.plan.reduce == "float32" and not split:
            return params  # the layers cast at the point of use, and hand back float32 gradients

        def copy(param: Array, master: NamedSharding, compute: NamedSharding) -> Array:
            if not jnp.issubdtype(param.dtype, jnp.floating):
                return param
            low = param.astype(dtype)
            if split:
                low = jax.lax.with_sharding_constraint(low, master)
                # or XLA:GPU would gather first and cast then, at twice the bytes
                low = jax.lax.optimization_barrier(low)
                low = jax.lax.with_sharding_constraint(low, compute)
            return low.astype(param.dtype) if self.plan.reduce == "float32" else low

        return jax.tree.map(copy, params, self.layout.masters, self.layout.computes)

    def _loss(self, params: Params, rest: Params, batch: Batch, context: Context) -> tuple[Array, tuple[Loss, Params]]:
        """What is differentiated: the mean of a batch, or the sum of a microbatch, whose mean waits for the others."""
        module = self.functional.module(params, rest)
        loss = self.experiment.model.loss(module, batch, context)
        objective = loss.total + loss.penalty
        if self.plan.microbatches == 1:
            objective = objective / _positive(jax.lax.stop_gradient(loss.weight))
        return objective, (Loss(loss.total, loss.weight), self.functional.rest_of(module))

    def _place_gradients(self, gradients: Params) -> Params:
        return jax.tree.map(
            lambda g, sharding: jax.lax.with_sharding_constraint(g, sharding).astype(jnp.float32),
            gradients,
            self.layout.gradients,
        )

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Loss, Params, Params]:
        """Sums of the loss, mean gradients in float32, and the model's other state, of a global batch."""
        with self._tracing():
            params = self._compute_params(state.params)
            key = jax.random.fold_in(jax.random.key(self.experiment.seed), state.step)
            rows = next(iter(batch.values())).shape[0]
            examples = jnp.arange(rows, dtype=jnp.int32)
            grad = jax.value_and_grad(self._loss, has_aux=True)

            def of(rest: Params, batch: Batch, examples: Array) -> tuple[Loss, Params, Params]:
                (_, (loss, rest)), gradients = grad(params, rest, batch, self._context(key, examples))
                return loss, self._place_gradients(gradients), rest

            if self.plan.microbatches == 1:
                return of(state.rest, batch, examples)
            split = functools.partial(_microbatches, parts=self.plan.microbatches)

            def add(carry: Any, part: Any) -> tuple[Any, None]:
                loss, gradients, rest = of(carry[2], *part)
                return (*jax.tree.map(jnp.add, (carry[0], carry[1]), (loss, gradients)), rest), None

            zeros = jax.tree.map(
                lambda p, s: jax.lax.with_sharding_constraint(jnp.zeros(p.shape, jnp.float32), s),
                state.params,
                self.layout.gradients,
            )
            start = (Loss(jnp.zeros(()), jnp.zeros(())), zeros, state.rest)
            parts = (jax.tree.map(split, dict(batch)), split(examples))
            (loss, gradients, rest), _ = jax.lax.scan(add, start, parts)
            scale = 1.0 / _positive(loss.weight)
            return loss, jax.tree.map(lambda g: g * scale, gradients), rest

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, gradients, rest = self._gradients(state, batch)
        mean = loss.total / _positive(loss.weight)
        norm = optax.tree.norm(gradients)
        good, watch = state.watch.judge(mean, norm, self.experiment.guard)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        # a bad step leaves parameters, optimizer and batch statistics as they were
        kept = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
        rate = self.experiment.optimizer.schedule_fn(self.experiment.steps)(state.watch.good)
        metrics = {
            "loss": mean,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "weight": loss.weight,
            "skipped": watch.skipped,
            "skipped_in_row": watch.in_row,
        }
        after = TrainState(
            step=state.step + 1,
            params=kept(params, state.params),
            optimizer=kept(optimizer, state.optimizer),
            rest=kept(rest, state.rest),
            watch=watch,
        )
        return after, metrics

    def _evaluate(self, state: TrainState, batch: Batch) -> Loss:
        def of(module: Any, part: Batch) -> Loss:
            loss = self.experiment.model.loss(module, part, self._context(None))
            return Loss(loss.total, loss.weight)

        return self._sums(of, state, batch)

    def _accuracy(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        model: Any = self.experiment.model  # of the models, classifiers alone have it
        return self._sums(lambda module, part: model.accuracy(module, part, self._context(None)), state, batch)

    def _sums(self, of: Callable[[Any, Batch], Any], state: TrainState, batch: Batch) -> Any:
        """What `of` gives for the module and each microbatch, added up: no more activations than training has."""
        with self._tracing():
            params = self._compute_params(state.params)

            def part(batch: Batch) -> Any:
                return of(self.functional.module(params, state.rest), batch)

            if self.plan.microbatches == 1:
                return part(batch)
            split = functools.partial(_microbatches, parts=self.plan.microbatches)
            return jax.tree.map(lambda x: x.sum(0), jax.lax.map(part, jax.tree.map(split, dict(batch))))


def build(experiment: Experiment, plan: Plan | None = None, *, devices: Sequence[Any] | None = None) -> TrainStep:
    """The train step of an experiment under a plan. Everything is checked; nothing is compiled or allocated yet.

    Args:
        experiment: what to train.
        plan: how; the experiment's own by default.
        devices: to run on; all by default.

    Raises:
        UserError: the plan does not fit the model, the batch or the devices.
    """
    plan = experiment.plan if plan is None else plan
    plan, said = resolve_mesh(plan, experiment.batch, list(jax.devices() if devices is None else devices))
    layers = getattr(experiment.model, "layers", None)
    if isinstance(layers, int) and plan.unroll > layers:
        said += f"; unroll {plan.unroll}: the model has {layers} layers, all run in one iteration"
        plan = dataclasses.replace(plan, unroll=layers)
    assert plan.mesh is not None
    check_model(plan, experiment.model)
    functional = Functional.of(experiment.model, experiment.seed, vocab_multiple(plan))
    mask = jax.tree_util.tree_map_with_path(
        lambda path, leaf: decays(functional.names.get(path_name(path)), leaf.shape), functional.params
    )
    optimizer = experiment.optimizer.build(experiment.steps, mask)
    layout = Layout.of(functional, optimizer, plan, plan.mesh.build(devices))
    layout.check_axes_used(experiment.model)
    layout.check_zero_used(optimizer)
    return TrainStep(experiment, plan, functional, layout, optimizer, said)


def decays(names: tuple[str | None, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether weight decay is meant for a parameter: a matrix or a kernel, the stacked dim aside; no norm, no bias."""
    if names is None:
        return len(shape) > 1
    return sum(name != "layers" for name in names) > 1 and "norm" not in names


def _positive(weight: Float[Array, ""]) -> Float[Array, ""]:
    """A sum of weights to divide by: a batch without targets has a loss of zero and no gradient."""
    return jnp.where(weight > 0, weight, 1.0)


def span(where: Sequence[slice], rows: int) -> tuple[int, int]:
    """First row, and the one behind the last, of a part of an array of `rows`."""
    return where[0].start or 0, rows if where[0].stop is None else where[0].stop


def equal_part(spans: set[tuple[int, int]], rows: int) -> tuple[int, int]:
    """(index, count) of the one of `count` equal parts of `rows` that the spans make up; (0, 1) if they make up none.

    Example:
        >>> equal_part({(4, 6), (6, 8)}, 8), equal_part({(0, 2), (4, 6)}, 8)
        ((1, 2), (0, 1))
    """
    start, stop = min(a for a, _ in spans), max(b for _, b in spans)
    size = stop - start
    together = sum(b - a for a, b in spans) == size
    return (start // size, rows // size) if together and rows % size == 0 and start % size == 0 else (0, 1)


def _microbatches(x: Array, *, parts: int) -> Array:
    """(B, ...) to (parts, B / parts, ...): every parts-th row, so that no row changes its device, on any mesh."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def _place_host_array(array: Any, abstract: jax.ShapeDtypeStruct) -> Array:
    """A host array put on the devices shard by shard; dims that are padded in the model get zeros."""
    if array.shape != abstract.shape:
        array = np.pad(array, [(0, want - have) for have, want in zip(array.shape, abstract.shape, strict=True)])
    return jax.make_array_from_callback(
        abstract.shape, abstract.sharding, lambda index: np.asarray(array[index], abstract.dtype)
    )


__all__ = ["Compiled", "Metrics", "TrainStep", "build", "decays", "named_leaves"]
