"""Streamed: the train step of an asynchronous pipeline, which updates each stage's weights on its way and never drains.

A step lets the microbatches of one batch enter and runs the ticks until the next batch may (`pipeline.asynchronous`).
Its loss is that of the forwards which reach the last stage in these ticks: in PipeDream and PipeMare, whose batch is
one microbatch, of batches that entered up to p - 1 steps before. Steps in which none gets there have no loss, a NaN.

What has a meaning over all stages is done per stage, on its own gradients: clipping by the norm, the watch over bad
steps (a non-finite or spiking gradient skips that stage's update), a codec, and the counts that a learning rate depends
on.
Gradients are means over the batch, so its weight is found before its loss is: it must not depend on the model.

What stages share is each one's own copy. A parameter is read before the blocks, by the first stage, or behind them, by
the last, which the traced model tells; the other copies are zeros and stay so. A parameter that is read in both places
(tied weights) or in the blocks would become several, and is refused.

Between steps the train state holds the newest weights, the optimizer's state, and what is in flight: messages, batches,
what forwards keep, older weights, sums of gradients, each stage's watch and counts. A checkpoint has it under a name
that is made of the plan, so a step with another plan, another pipeline or none leaves it behind: microbatches that were
under way are lost, some of whose updates have been made. Restored without it, a pipe is filled anew. The plan's
`synchronous_steps` come first: one synchronous step after another, clipped and watched as a whole.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.blocks import Loss
from jaxscale.compat import prune
from jaxscale.compression.codec import Codec
from jaxscale.compression.reduce import Leaf, Stage, squared_residuals
from jaxscale.errors import UserError
from jaxscale.optim.offloaded import plainly
from jaxscale.pipeline.asynchronous import Asynchronous, UpdateAt
from jaxscale.pipeline.passes import At
from jaxscale.pipeline.pipemare import Remedies
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.stream import stream
from jaxscale.pipeline.tables import Tables, tabulate
from jaxscale.step.layout import BATCH_AXES, PIPE_AXIS, REPLICA_AXIS, Layout
from jaxscale.step.objective import positive
from jaxscale.step.pipelined import Pipelined
from jaxscale.step.rows import batch_shapes
from jaxscale.step.stages import Stages
from jaxscale.step.state import TrainState, Watch
from jaxscale.typing import Array, Batch, Float, Params
from jaxscale.values import to_json

CORRECTION = 0.135
"""PipeMare's D, as its theory has it: exp(-2)."""
ANNEAL = 4
"""PipeMare's rescheduling fades over one of so many parts of a run, unless the plan says another number of updates."""


class Streamed(Pipelined):
    """What the train step of an asynchronous pipeline computes.

    Functional and layout given are those of a synchronous pipeline, by which evaluation runs; `held` and `places` are
    those of the train state.

    Args:
        stages: the layers of each stage.
        optimizer: clipping and all.
        given: those of `Objective`.

    Raises:
        UserError: tied weights, or a parameter that blocks share; a loss whose weight depends on the model.
    """

    def __init__(self, stages: Stages, optimizer: optax.GradientTransformation, *given: Any) -> None:
        super().__init__(stages, *given)
        assert self.plan.pipeline is not None
        self.method = METHODS[self.plan.pipeline.name]
        self.ranks, self.group = stages.schedule.ranks, stages.schedule.microbatches
        self.stream = stream(self.method, self.ranks, self.group, self.plan.stash)
        self.remedies = self._remedies()
        self.advance = plainly(optimizer)
        self.batch = batch_shapes(self.experiment)
        self.held = self.functional.copied(self._copies_of())
        places = Layout.of(self.held, optimizer, self.plan, self.layout.mesh)
        self.codes = self._codes_of()
        self._owners = places.owners(optimizer)
        self._optimizer = jax.tree.structure(places.abstract.optimizer)
        self._weight = self._weight_program()
        self.places = self._with_flight(places)

    @property
    def asked(self) -> str:
        """What the user asked for."""
        return f"pipeline {self.plan.pipeline}"

    def __str__(self) -> str:
        late = max(self.stream.delays)
        told = f"gradients are up to {late} updates old" if late else "gradients are of the newest weights"
        clips = "" if self.experiment.optimizer.clip is None else " clips by its own gradient's norm and"
        first = self.plan.synchronous_steps
        waits = f"the first {first} steps are synchronous, then " if first else ""
        whole = " x ".join(axis for axis in ("sequence", "tensor") if self.layout.mesh.shape[axis] > 1)
        copies = f"; what is in flight lies whole on every device along {whole}" if whole else ""
        if self.stream.newest and (self.plan.memory.rule != "none" or self.plan.stash == "input"):
            told += ", and what is recomputed reads newer weights than its forward did"
        return f"{self.asked}: {waits}{told}; each stage{clips} skips bad updates by itself{copies}"

    def _remedies(self) -> Remedies:
        """PipeMare's, as the plan says, or as published; others have none unless asked for."""
        plan, pipemare = self.plan, self.stream.newest
        anneal = self.experiment.steps // ANNEAL if pipemare else 0
        correction = CORRECTION if pipemare else 0.0
        anneal = anneal if plan.anneal is None else plan.anneal
        correction = correction if plan.correction is None else plan.correction
        return Remedies(anneal=anneal, correction=correction or None)

    @functools.cached_property
    def training(self) -> Tables:
        """Of a synchronous step."""
        return tabulate(METHODS["1f1b"].schedule(self.ranks, self.group, None, 1), self.plan.stash)

    @functools.cached_property
    def scoring(self) -> Tables:
        """A forward pass of the newest weights."""
        return tabulate(METHODS["1f1b"].schedule(self.ranks, self.group, None, 1), forward_only=True)

    # -- the model, looked at ------------------------------------------------------------------------------------------

    def _copies_of(self) -> dict[str, tuple[int, ...]]:
        """The copies of each parameter that is not of a layer: 0 for the stage that reads it, -1 for the others."""
        stacked, shared = self._split(self.functional.params)
        depth = self.stages.depth
        stacked = {name: jax.ShapeDtypeStruct((depth, *leaf.shape[1:]), leaf.dtype) for name, leaf in stacked.items()}
        rows = self.experiment.batch // self.group
        part = {name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in self.batch.items()}
        number, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
        given = (stacked, shared, (part, jax.ShapeDtypeStruct((rows,), jnp.int32)), key, number)
        names = jax.tree.leaves(({**dict.fromkeys(stacked, "")}, {name: name for name in shared}))
        parts = self._parts(self._loss_of)

        def read(of: Any, *x: Any) -> set[str]:
            program = jax.make_jaxpr(of)(*x, *given)
            _, used = prune(program, [True] * len(program.jaxpr.outvars))
            first = len(jax.tree.leaves(x))
            return {name for name, reads in zip(names, used[first:], strict=False) if name and reads}

        with self.tracing(plainly=True):  # a decision on what blocks keep is for a device's rows
            x = jax.eval_shape(parts.before, *given)
            before, inside, behind = read(parts.before), read(parts.inside, x), read(parts.behind, x)
        if inside:
            raise UserError(
                f"{self.asked}: all blocks of this model read {', '.join(sorted(inside))}, and each stage would update "
                "a copy of its own; give each block one, or take a synchronous pipeline"
            )
        if before & behind:
            raise UserError(
                f"{self.asked}: {', '.join(sorted(before & behind))} is read before the blocks and behind them (tied "
                "weights), and the first and the last stage would each update a copy of their own; untie them "
                "(tied=False), or take a synchronous pipeline"
            )
        last = self.ranks - 1
        homes = {name: last if name in behind else 0 for name in shared}
        return {name: tuple(0 if rank == home else -1 for rank in range(self.ranks)) for name, home in homes.items()}

    def _codes_of(self) -> Stage | None:
        """The codec at work on the gradients of one stage, whole on each of its devices; `None` where XLA reduces."""
        if not isinstance(self.plan.reduce, Codec):
            return None
        stacked, shared = self._split(self.functional.params)
        leaves = {
            name: Leaf((self.stages.depth, *leaf.shape[1:]), PartitionSpec(), layers=True)
            for name, leaf in stacked.items()
        }
        leaves |= {name: Leaf(leaf.shape, PartitionSpec()) for name, leaf in shared.items()}
        return Stage(self.plan.reduce, self.layout.mesh, leaves, REPLICA_AXIS, self.functional.seed)

    def _weight_program(self) -> Any:
        """From a batch to the weight of its targets."""

        def weight(params: Params, rest: Params, batch: Batch) -> Float[Array, ""]:
            loss = self.experiment.model.loss(self.functional.module(params, rest), batch, self.context(None))
            return jnp.asarray(loss.weight, jnp.float32)

        with self.tracing(plainly=True):
            program = jax.make_jaxpr(weight)(self.functional.whole, self.functional.rest, dict(self.batch))
        pruned, used = prune(program, [True])
        of_model = len(used) - len(self.batch)
        if any(used[:of_model]):
            raise UserError(
                f"{self.asked}: the weight of this model's loss depends on its parameters, and the first update of a "
                "batch needs it before the last forward; take a synchronous pipeline"
            )

        def run(batch: Batch) -> Float[Array, ""]:
            leaves = zip(jax.tree.leaves(dict(batch)), used[of_model:], strict=True)
            (sum_of_weights,) = jex.jaxpr_as_fun(pruned)(*[leaf for leaf, reads in leaves if reads])
            return jnp.asarray(sum_of_weights)  # a number of NumPy's, where it depends on shapes alone

        return run

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _computed(self, parameters: Any) -> Any:
        """Parameters in the type computed in."""
        dtype = jnp.dtype(self.plan.precision)
        return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, parameters)

    def _pipe(self, parameters: Any, batch: Any, key: Any) -> Asynchronous:
        """The executor, inside the manual region."""
        stage = self._stage(self._loss_of, lambda loss: loss.total + loss.penalty)

        def scaled(stacked: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
            part, scale = microbatch
            y, objective, sums = stage(stacked, shared, x, part, at, key)
            return y, objective * scale, sums

        stacked, shared = self._computed(jax.tree.map(lambda leaf: leaf[0], parameters))
        part, _ = jax.tree.map(lambda leaf: leaf[0], batch)
        x = jax.eval_shape(self._parts(self._loss_of).before, stacked, shared, part, key, jnp.int32(0))
        return Asynchronous(
            self.stream,
            scaled,
            self._update,
            x,
            compute=None if self.plan.precision == "float32" else self._computed,
            remedies=self.remedies,
            axis=PIPE_AXIS,
            manual=self.manual,
        )

    def _update(self, parameters: Any, gradients: Any, carry: dict[str, Any], at: UpdateAt) -> tuple[Any, Any]:
        """Of one stage: gradients added up over the data axes, judged, clipped and applied."""
        del at
        stacked, shared = jax.tree.map(lambda leaf: self._over_rows(leaf[0]), gradients)
        codec, codes, states = self.codes, carry["codes"], {}
        if codec is not None:
            sums = jax.tree.map(lambda leaf: leaf * codec.replicas, {**stacked, **shared})
            reduced, states = self._reduced(codec, sums, codes["states"], codes["updates"])
            stacked, shared = ({name: reduced[name] for name in part} for part in (stacked, shared))
        gradients = self._whole(stacked, shared)
        norm = optax.tree.norm(gradients)
        good, watch = carry["watch"].judge(norm, norm, self.experiment.guard)
        if codec is not None:
            states = jax.tree.map(lambda new, old: jnp.where(good, new, old), states, codes["states"])
            codes = {"states": states, "updates": codes["updates"] + 1}
            carry = {**carry, "sent": carry["sent"] + codec.wire_bytes_at(carry["codes"]["updates"])}
        leaves = [carry["owned" if owner else "free"][i] for i, owner in enumerate(self._owners)]
        params = self._whole(*jax.tree.map(lambda leaf: leaf[0], parameters))
        after, state = self.advance(gradients, self._optimizer.unflatten(leaves), params, norm, good)
        owned, free = self._divided(jax.tree.leaves(state))
        squares = carry["squares"] + jnp.square(norm)
        carry |= {"owned": owned, "free": free, "watch": watch, "codes": codes, "squares": squares}
        return jax.tree.map(lambda leaf: leaf[None], self._split(after)), carry

    def _reduced(self, codec: Stage, gradients: Any, states: Any, updates: Array) -> tuple[dict[str, Array], Any]:
        """One stage's gradients averaged over the replicas, manual over the axes that are left: kernels want all."""

        def inside(gradients: Any, states: Any, updates: Array) -> tuple[dict[str, Array], Any]:
            return codec.inside(gradients, states, updates, (REPLICA_AXIS,))

        return jax.shard_map(
            inside,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(self.layout.mesh.axis_names) - set(self.manual),
            check_vma=False,
        )(gradients, states, updates)

    def _over_rows(self, gradient: Array) -> Array:
        """One gradient, added up over the devices of this stage; a codec adds up those of replicas."""
        if self.plan.reduce == "bfloat16":
            gradient = gradient.astype(jnp.bfloat16)
        apart = {PIPE_AXIS} if self.codes is None else {PIPE_AXIS, REPLICA_AXIS}
        over = [axis for axis in self.manual if axis not in apart and self.layout.mesh.shape[axis] > 1]
        return (jax.lax.psum(gradient, over) if over else gradient).astype(jnp.float32)

    def _divided(self, leaves: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Leaves of the optimizer's state that have a parameter's shape, and the others, by their place."""
        owned = {i: leaf for i, leaf in enumerate(leaves) if self._owners[i]}
        return owned, {i: leaf for i, leaf in enumerate(leaves) if not self._owners[i]}

    # -- the state -----------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> PartitionSpec:
        """Of what each device has of its own, along the first dim."""
        return PartitionSpec(self.manual)

    def _with_flight(self, places: Layout) -> Layout:
        """Where the train state lies, with what is in flight."""
        sharding = NamedSharding(places.mesh, self._own)
        flight = jax.eval_shape(lambda state: self.filled(state).in_flight, places.abstract)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), flight)
        return replace(
            places,
            state=replace(places.state, in_flight=jax.tree.map(lambda _: sharding, flight)),
            abstract=replace(places.abstract, in_flight=abstract),
        )

    @functools.cached_property
    def pipe_name(self) -> str:
        """Of what is in flight: made of all that it depends on."""
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.places.abstract.in_flight)]
        told = [to_json(self.plan), self.stages.layers, self.experiment.batch, jax.__version__, shapes]
        return f"{self.method.name}-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]}"

    def filled(self, state: TrainState) -> TrainState:
        """A state whose pipe is empty, and whose stages have made as many updates as the state tells."""

        def body(stacked: Any, shared: Any, free: Any, watch: Watch, updates: Array) -> Any:
            parameters = jax.tree.map(lambda leaf: leaf[None], stacked), shared
            rows = self.experiment.batch // self.group // self._ways
            zeros = {
                name: jnp.zeros((self.group, rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in self.batch.items()
            }
            batch = ((zeros, jnp.zeros((self.group, rows), jnp.int32)), jnp.zeros((self.group,), jnp.float32))
            key = jax.random.key(self.experiment.seed)
            pipe = self._pipe(parameters, batch, key).fill(parameters, batch, key)
            # each stage's share of the norm, were they alike
            watch = replace(watch, norm=watch.norm / self.ranks**0.5)
            codes = {}
            if self.codes is not None:
                codes = {"states": self.codes.start(), "updates": updates}
            lasting = {"free": free, "watch": watch, "codes": codes}
            return {"pipe": pipe, **jax.tree.map(lambda leaf: leaf[None], lasting)}

        _, free = self._divided(jax.tree.leaves(state.optimizer))
        each, same = PartitionSpec(PIPE_AXIS), PartitionSpec()
        with self.tracing():
            flight = self._mapped(body, (each, each, same, same, same), self._own)(
                *self._split(state.params), free, state.watch, state.step
            )
        return replace(state, in_flight=flight)

    @property
    def _ways(self) -> int:
        """Parts that the rows of a microbatch are in."""
        return math.prod(self.layout.mesh.shape[axis] for axis in BATCH_AXES)

    # -- one batch -----------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, Array]]:
        """The state after a batch has entered, and `loss`, `grad_norm` and `weight` of the step's ticks.

        The norm is that of all gradients that stages have updated by, together; 0 where none has. With a codec
        `wire_bytes` too, of the device that sends most, and `residual_norm`, of all that stages owe.
        """
        first = self.plan.synchronous_steps
        if not first:
            return self._streamed(state, batch)
        return jax.lax.cond(state.step < first, self._waiting, self._streamed, state, dict(batch))

    def _waiting(self, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, Array]]:
        """A synchronous step, after which the pipe is empty."""
        loss, gradients, _ = super().gradients(self._newest(state), batch)
        gradients = self.held.in_rows(self.functional.in_layers(gradients))
        gradients = jax.lax.with_sharding_constraint(gradients, self.places.masters)
        mean, norm = loss.total / positive(loss.weight), optax.tree.norm(gradients)
        good, watch = state.watch.judge(mean, norm, self.experiment.guard)
        params, optimizer = self.advance(gradients, state.optimizer, state.params, norm, good)
        after = replace(state, step=state.step + 1, params=params, optimizer=optimizer, watch=watch)
        metrics = {"loss": mean, "grad_norm": norm, "weight": loss.weight}
        if self.codes is not None:  # which is not at work yet
            metrics |= {"residual_norm": jnp.zeros(()), "wire_bytes": jnp.float32(self.codes.exact_bytes)}
        return self.filled(after), metrics

    def _newest(self, state: TrainState) -> TrainState:
        """The state of a synchronous pipeline with these weights, its optimizer aside."""
        stacked, shared = self._split(state.params)
        newest = {name: leaf[self.held.copies[name].index(0)] for name, leaf in shared.items()}
        return replace(state, params=self._whole(stacked, newest), in_flight=())

    def _streamed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, Array]]:
        owned, _ = self._divided(jax.tree.leaves(state.optimizer))
        stacked = {i: not owner or self.functional.stacked(owner) for i, owner in enumerate(self._owners)}
        each, same, rows = PartitionSpec(PIPE_AXIS), PartitionSpec(), PartitionSpec(None, BATCH_AXES)

        def body(weights: Any, shared: Any, owned: Any, flight: Any, batch: Any, key: Any) -> Any:
            parameters = jax.tree.map(lambda leaf: leaf[None], weights), shared
            mine = jax.tree.map(lambda leaf: leaf[0], {name: flight[name] for name in ("free", "watch", "codes")})
            owned = {i: leaf if stacked[i] else leaf[0] for i, leaf in owned.items()}
            carry = {"owned": owned, **mine, "squares": jnp.zeros(()), "sent": jnp.zeros(())}
            pipe = self._pipe(parameters, batch, key)
            after = pipe.advance(parameters, carry, flight["pipe"], batch, key)
            weights, shared = after.parameters
            weights, carry = jax.tree.map(lambda leaf: leaf[0], weights), after.optimizer
            owned = {i: leaf if stacked[i] else leaf[None] for i, leaf in carry["owned"].items()}
            mine = jax.tree.map(lambda leaf: leaf[None], {name: carry[name] for name in ("free", "watch", "codes")})
            norm = jnp.sqrt(jax.lax.psum(carry["squares"], PIPE_AXIS))
            sums = jax.lax.psum(after.sums, self.manual)
            coded = {}
            if self.codes is not None:
                owed = jax.lax.psum(squared_residuals(carry["codes"]["states"]), self.manual) / self._ways
                sent = jax.lax.pmax(carry["sent"], self.manual)
                coded = {"residual_norm": jnp.sqrt(owed), "wire_bytes": sent}
            return weights, shared, owned, {"pipe": after.in_flight, **mine}, (sums, norm, coded)

        scale = jnp.broadcast_to(1.0 / positive(self._weight(batch)), (self.group,))
        with self.tracing():
            key = jax.random.fold_in(jax.random.key(self.experiment.seed), state.step)
            given = (each, each, each, self._own, (rows, same), same)
            weights, shared, owned, flight, (loss, norm, coded) = self._mapped(
                body, given, (each, each, each, self._own, same)
            )(*self._split(state.params), owned, state.in_flight, (self._microbatches(batch), scale), key)
        # of every stage, once
        free, watch = jax.tree.map(lambda leaf: leaf.reshape(self.ranks, -1)[:, 0], (flight["free"], flight["watch"]))
        leaves = {**owned, **jax.tree.map(lambda leaf: leaf[-1], free)}
        norms = jnp.sqrt(jnp.square(watch.norm).sum())
        after = TrainState(
            step=state.step + 1,
            params=self._whole(weights, shared),
            optimizer=self._optimizer.unflatten([leaves[i] for i in range(len(leaves))]),
            rest=state.rest,
            watch=replace(jax.tree.map(jnp.max, watch), norm=norms),
            in_flight=flight,
        )
        mean = jnp.where(loss.weight > 0, loss.total / positive(loss.weight), jnp.nan)
        return after, {"loss": mean, "grad_norm": norm, "weight": loss.weight, **coded}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Loss, Params, Params]:
        """There is no such thing.

        Raises:
            UserError: always.
        """
        raise UserError(f"{self.asked}: a step has no gradients of its own: each stage updates by others, on its way")

    def _sums(self, of: Any, state: TrainState, batch: Batch) -> Any:
        return super()._sums(of, self._newest(state), batch)
