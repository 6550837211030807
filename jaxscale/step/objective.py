"""Objective: the loss of a global batch and its gradients, as a plan wants them computed.

Loss and gradients are means over all targets of the global batch, whatever the mesh, the packing and the number of
microbatches: every part gives sums, which are divided once. ZeRO is expressed by sharding constraints in Auto mode, in
the form that XLA turns into the collectives one expects (`sharding/zero.py` has the table).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Context, Loss
from jaxscale.compression.named import NamedCodec
from jaxscale.layers.low_precision import RECIPES
from jaxscale.memory.offload import streaming
from jaxscale.sharding import place
from jaxscale.sharding.memory_space import on_host, to_device
from jaxscale.sharding.rules import AxisRules
from jaxscale.step.experiment import Experiment
from jaxscale.step.functional import Functional
from jaxscale.step.host import streamed_weights
from jaxscale.step.layout import REPLICA_AXIS, Layout
from jaxscale.step.plan import Plan
from jaxscale.step.rows import microbatches
from jaxscale.step.state import TrainState
from jaxscale.typing import Array, Batch, Float, Params


class Objective:
    """What a train step differentiates, and what evaluation computes.

    Args:
        experiment: what is trained.
        plan: how, with the mesh settled.
        functional: the model as pure functions.
        layout: the mesh and every placement.
        treatment: how blocks run where gradients are taken; as they are by default.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        functional: Functional,
        layout: Layout,
        treatment: blocks.Treatment | None = None,
    ) -> None:
        self.experiment = experiment
        self.plan = plan
        self.functional = functional
        self.layout = layout
        self.treatment = blocks.Treatment(unroll=plan.unroll) if treatment is None else treatment

    pipe_name = ""
    """Of what an asynchronous pipeline has in it between steps."""

    @property
    def stage_depth(self) -> int | None:
        """Blocks that run one after the other on a device; `None` for all of the model's."""
        return None

    @property
    def stages_here(self) -> int:
        """Stages of a pipeline on one device."""
        return 1

    @contextlib.contextmanager
    def tracing(self, *, plainly: bool = False) -> Iterator[None]:
        """The plan in force: placements, blocks and the precision of matrix products, while the model is traced.

        Args:
            plainly: nothing is differentiated, so blocks need no plan for what they keep.
        """
        matmul = self.plan.matmul if self.plan.matmul in ("high", "highest") else None
        with (
            jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext(),
            place.layout(self.layout.mesh, self.layout.rules),
            blocks.treating(self._treatment(plainly)),
        ):
            yield

    def _treatment(self, plainly: bool) -> blocks.Treatment:
        treatment = blocks.Treatment(unroll=self.plan.unroll) if plainly else self.treatment
        return streaming(treatment) if self.plan.weights == "host" else treatment

    def context(self, key: Any, examples: Any = None) -> Context:
        """What the model is told: `key` is that of the step, `None` where nothing is random."""
        return Context(
            key=key,
            examples=examples,
            dtype=None if self.plan.precision == "float32" else self.plan.precision,
            matmul=self.plan.matmul if self.plan.matmul in RECIPES else None,
            attention=self.plan.attends,
            loss_chunk=self.plan.loss_chunk,
            loss=self.plan.scores,
        )

    def _compute_params(self, params: Params) -> Params:
        """The copy of the parameters that the forward and backward passes read, and that is differentiated."""
        if self.plan.precision == "float32":
            return params
        split, dtype = self.plan.zero in (1, 2), jnp.dtype(self.plan.precision)
        if self.plan.reduce == "float32" and not split:
            return params  # the layers cast at the point of use, and hand back float32 gradients

        def copy(param: Array, master: NamedSharding, compute: NamedSharding) -> Array:
            master = NamedSharding(master.mesh, master.spec)  # which may lie on the host
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

    def _weights(self, params: Params) -> tuple[Params, Callable[[Params], Params]]:
        """What is differentiated, and the map from it to the weights that the module is given."""
        return self._reached(params, self._compute_params(to_device(params)))

    def _reached(
        self, params: Params, copies: Params, *, apart: bool = False
    ) -> tuple[Params, Callable[[Params], Params]]:
        """The differentiated leaves, and a function from them to the module's parameters.

        Args:
            params: masters, where they lie.
            copies: of each, as a pass on the device reads it.
            apart: in a region that is manual over replicas.
        """
        if self.plan.weights == "device":
            return copies, _as_it_is
        shardings = self.layout.gradients
        if apart:
            mesh = jax.sharding.get_abstract_mesh()
            shardings = jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), shardings)
        return streamed_weights(self.plan, params, copies, shardings)

    def _loss(
        self, params: Params, rest: Params, batch: Batch, context: Context, replicas: int = 1
    ) -> tuple[Array, tuple[Loss, Params]]:
        """What is differentiated: the mean of a batch, or the sum of a microbatch, whose mean waits for the others."""
        module = self.functional.module(params, rest)
        loss = self.experiment.model.loss(module, batch, context)
        objective = loss.total + loss.penalty
        if self.plan.microbatches == 1:
            objective = objective / _divisor(jax.lax.stop_gradient(loss.weight), replicas)
        return objective, (Loss(loss.total, loss.weight), self.functional.rest_of(module))

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Any, examples: Array) -> Array:
        """The objective of one microbatch, from float32 masters on the device: to trace, not to run."""
        copies = self._compute_params(params)
        if not self.manual:
            return self._loss(copies, rest, batch, self.context(key, examples))[0]
        mesh = self.layout.mesh
        whole, rows = PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def body(copies: Params, rest: Params, batch: Batch, key: Any, examples: Array) -> Array:
            with self._within((REPLICA_AXIS,)):
                return self._loss(copies, rest, batch, self.context(key, examples), mesh.shape[REPLICA_AXIS])[0]

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(whole, whole, rows, whole, rows),
            out_specs=whole,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )(copies, rest, dict(batch), key, examples)

    @property
    def manual(self) -> tuple[str, ...]:
        """Axes that are manual where blocks run: the replicas', where a step takes the gradients of each apart."""
        apart = isinstance(self.plan.reduce, NamedCodec) or self.plan.diloco is not None
        return (REPLICA_AXIS,) if apart else ()

    def _place_gradients(self, gradients: Params, *, apart: bool = False) -> Params:
        def place(gradient: Array, sharding: NamedSharding) -> Array:
            if on_host(gradient):
                return gradient
            mesh = jax.sharding.get_abstract_mesh() if apart else sharding.mesh
            return jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, sharding.spec)).astype(jnp.float32)

        return jax.tree.map(place, gradients, self.layout.gradients)

    def _key_and_examples(self, state: TrainState, batch: Batch) -> tuple[Any, Array]:
        """The key of a step, and the index of every row of its batch."""
        rows = next(iter(batch.values())).shape[0]
        key = jax.random.fold_in(jax.random.key(self.experiment.seed), state.step)
        return key, jnp.arange(rows, dtype=jnp.int32)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Loss, Params, Params]:
        """Sums of the loss, mean gradients in float32, and the model's other state, of a global batch."""
        with self.tracing():
            weights, given = self._weights(state.params)
            key, examples = self._key_and_examples(state, batch)
            return self._gradients(weights, given, state.rest, batch, key, examples)

    def gradients_apart(
        self, state: TrainState, batch: Batch, weights: Params | None = None
    ) -> tuple[Loss, Params, Params]:
        """The same with the gradients of each replica apart, along a first dim, whose mean is that of the global batch.

        Nothing of the size of a parameter crosses the replica axis: it is manual here, all others are the compiler's.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32, each replica's own along a first dim; the state's, which they share, by default.
        """
        mesh = self.layout.mesh
        replicas, whole, rows = mesh.shape[REPLICA_AXIS], PartitionSpec(), PartitionSpec(REPLICA_AXIS)

        def body(weights: Any, rest: Params, batch: Batch, key: Any, examples: Array) -> Any:
            with self._within((REPLICA_AXIS,)):
                if own:
                    moving, given = jax.tree.map(lambda w: w[0], weights), _as_it_is
                else:
                    moving, given = self._reached(*weights, apart=True)
                mine = (moving, given, rest, batch, key, examples, replicas)
                loss, gradients, rest = self._gradients(*mine)
            loss = jax.tree.map(lambda part: jax.lax.psum(part, REPLICA_AXIS), loss)
            return loss, jax.tree.map(lambda g: g[None], gradients), rest

        own = weights is not None
        with self.tracing():
            if weights is None:
                copies: Any = (state.params, self._compute_params(to_device(state.params)))
            else:
                copies = jax.vmap(self._compute_params, spmd_axis_name=REPLICA_AXIS)(weights)
            given = (copies, state.rest, dict(batch))
            return jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(rows if own else whole, whole, rows, whole, rows),
                out_specs=(whole, rows, whole),
                axis_names={REPLICA_AXIS},
                check_vma=False,  # weights count as each replica's own: their gradients are not added up
            )(*given, *self._key_and_examples(state, batch))

    def _within(self, manual: Sequence[str]) -> Any:
        """The layout in force within a manual region: the axes that are left, by the rules without the others."""
        rules = self.layout.rules
        left = {
            field.name: tuple(axis for axis in getattr(rules, field.name) if axis not in manual)
            for field in dataclasses.fields(AxisRules)
        }
        return place.layout(jax.sharding.get_abstract_mesh(), AxisRules(**left))

    def _gradients(
        self,
        weights: Params,
        given: Callable[[Params], Params],
        rest: Params,
        batch: Batch,
        key: Any,
        examples: Array,
        replicas: int = 1,
    ) -> tuple[Loss, Params, Params]:
        """Of a global batch, or, in a region that is manual over so many replicas, of one of them."""
        apart = replicas > 1

        def objective(weights: Params, *args: Any) -> Any:
            return self._loss(given(weights), *args, replicas=replicas)

        grad = jax.value_and_grad(objective, has_aux=True)

        def of(rest: Params, batch: Batch, examples: Array) -> tuple[Loss, Params, Params]:
            (_, (loss, rest)), gradients = grad(weights, rest, batch, self.context(key, examples))
            return loss, self._place_gradients(gradients, apart=apart), rest

        if self.plan.microbatches == 1:
            return of(rest, batch, examples)
        split = functools.partial(microbatches, parts=self.plan.microbatches)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            loss, gradients, rest = of(carry[2], *part)
            return (*jax.tree.map(jnp.add, (carry[0], carry[1]), (loss, gradients)), rest), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.functional.params)
        start = (Loss(jnp.zeros(()), jnp.zeros(())), self._place_gradients(zeros, apart=apart), rest)
        parts = (jax.tree.map(split, dict(batch)), split(examples))
        (loss, gradients, rest), _ = jax.lax.scan(add, start, parts)
        scale = 1.0 / _divisor(loss.weight, replicas)
        return loss, jax.tree.map(lambda g: g * scale, gradients), rest

    def evaluate(self, state: TrainState, batch: Batch) -> Loss:
        """Sums of the loss of a batch, nothing random."""

        def of(module: Any, part: Batch) -> Loss:
            loss = self.experiment.model.loss(module, part, self.context(None))
            return Loss(loss.total, loss.weight)

        return self._sums(of, state, batch)

    def accuracy(self, state: TrainState, batch: Batch) -> tuple[Array, Array]:
        """Correct targets of a batch, and all."""
        model: Any = self.experiment.model  # of the models, classifiers alone have it
        return self._sums(lambda module, part: model.accuracy(module, part, self.context(None)), state, batch)

    def _sums(self, of: Callable[[Any, Batch], Any], state: TrainState, batch: Batch) -> Any:
        """What `of` gives for the module and each microbatch, added up: no more activations than training has."""
        with self.tracing(plainly=True):
            weights, given = self._weights(state.params)
            params = given(weights)

            def part(batch: Batch) -> Any:
                return of(self.functional.module(params, state.rest), batch)

            if self.plan.microbatches == 1:
                return part(batch)
            split = functools.partial(microbatches, parts=self.plan.microbatches)
            return jax.tree.map(lambda x: x.sum(0), jax.lax.map(part, jax.tree.map(split, dict(batch))))


def _divisor(weight: Float[Array, ""], replicas: int) -> Float[Array, ""]:
    """What sums are divided by, so that the mean over replicas is that over all targets, however many each has."""
    return positive(weight) if replicas == 1 else positive(jax.lax.psum(weight, REPLICA_AXIS)) / replicas


def _as_it_is(weights: Params) -> Params:
    return weights


def positive(weight: Float[Array, ""]) -> Float[Array, ""]:
    """A sum of weights to divide by: a batch without targets has a loss of zero and no gradient."""
    return jnp.where(weight > 0, weight, 1.0)
