"""Pipelined: the loss of a global batch and its gradients, computed by a pipeline of stages.

The model is one function of its module, and stays so: traced with its stack cut (`blocks.cutting`), it shows what
enters the first block, what one stage's blocks make of it, and what loss comes of the last block's output. A stage of
the pipeline is these three, the first and the last behind a `cond` on the stage's number, and `pipeline.execute` runs
it as the schedule says.

All of it stands in one `shard_map`, manual over the pipe axis and over the axes that rows lie on, so that gradients are
added up in the loop and reduced once, after it (those of ZeRO 3 are scattered by each backward, as its weights are
gathered by each pass); tensor and sequence axes stay with the compiler. What all stages share (embedding, head, norms
outside the blocks) is split over the pipe axis between steps, gathered once before the loop, and its gradients are
scattered once after it.

Weights on the host stay there: each block of a stage fetches its own when it runs, in every tick, under any stage of
ZeRO the part that this device has, which is then gathered as under the third.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.blocks import Context, Cut, Loss
from jaxscale.compat import prune
from jaxscale.memory.offload import offloading_later
from jaxscale.pipeline.execute import execute
from jaxscale.pipeline.passes import At
from jaxscale.pipeline.tables import Tables, tabulate
from jaxscale.sharding.memory_space import to_device
from jaxscale.sharding.zero import placed_axes, without
from jaxscale.step.host import streamed_weight
from jaxscale.step.layout import BATCH_AXES, PIPE_AXIS, REPLICA_AXIS
from jaxscale.step.objective import Objective, positive
from jaxscale.step.rows import microbatches
from jaxscale.step.stages import Stages
from jaxscale.step.state import TrainState
from jaxscale.trees import path_name
from jaxscale.typing import Array, Batch, Params


class Reached(Exception):
    """Carries a traced value out of the model, which need not run on."""

    def __init__(self, value: Any) -> None:
        super().__init__("a traced value, on its way out of the model")
        self.value = value


class Pipelined(Objective):
    """What a pipelined train step computes.

    Args:
        stages: the layers of each stage.
        given: those of `Objective`.
    """

    def __init__(self, stages: Stages, *given: Any) -> None:
        super().__init__(*given)
        self.stages = stages

    @functools.cached_property
    def training(self) -> Tables:
        """What is done in which tick of a step."""
        return tabulate(self.stages.schedule, self.plan.stash)

    @functools.cached_property
    def scoring(self) -> Tables:
        """The same of a forward pass alone."""
        return tabulate(self.stages.schedule, forward_only=True)

    @property
    def stage_depth(self) -> int | None:
        """Blocks that run one after the other on a device: those of the deepest stage."""
        return self.stages.depth

    @property
    def stages_here(self) -> int:
        """Stages of a pipeline on one device."""
        return self.stages.schedule.chunks

    def _treatment(self, plainly: bool) -> blocks.Treatment:
        treatment = super()._treatment(plainly)
        return offloading_later(treatment) if self.plan.stash == "residuals" else treatment

    # -- the mesh ------------------------------------------------------------------------------------------------------

    @property
    def manual(self) -> tuple[str, ...]:
        """Axes that are manual inside: the pipe's, and those of rows."""
        return (PIPE_AXIS, *BATCH_AXES)

    def _kept(self, spec: PartitionSpec) -> PartitionSpec:
        """The manual axes of a placement: what `shard_map` is told."""
        entries = []
        for entry in spec:
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            kept = tuple(axis for axis in axes if axis in self.manual)
            entries.append(kept if len(kept) > 1 else kept[0] if kept else None)
        return PartitionSpec(*entries)

    def _mapped(self, body: Callable[..., Any], given: Any, out: Any) -> Callable[..., Any]:
        """`body` on every device, manual over `manual`: all that is traced in it, backward passes too, is placed by the
        axes that are left.

        Args:
            body: a function of this device's parts.
            given, out: placements of its arguments and results, by the manual axes.
        """

        def inside(*parts: Any) -> Any:
            with self._within(self.manual):
                return body(*parts)

        return jax.shard_map(
            inside,
            mesh=self.layout.mesh,
            in_specs=given,
            out_specs=out,
            axis_names=set(self.manual),
            check_vma=False,
        )

    # -- the model in parts --------------------------------------------------------------------------------------------

    def _split(self, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
        """Stacked parameters and shared ones, by name."""
        named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        stacked = {name: leaf for name, leaf in named.items() if self._of_a_stage(name)}
        return stacked, {name: leaf for name, leaf in named.items() if name not in stacked}

    def _of_a_stage(self, name: str) -> bool:
        """Whether a parameter is read by one stage alone."""
        return self.functional.stacked(name)

    def _whole(self, stacked: Params, shared: Params) -> Params:
        """The inverse of `_split`."""
        named = {**stacked, **shared}
        return jax.tree_util.tree_map_with_path(lambda path, _: named[path_name(path)], self.functional.params)

    def _parts(self, of: Callable[[Any, Batch, Context], Any]) -> "Parts":
        """The model as what stands before its blocks, its blocks, and what stands behind them."""
        numbers = jnp.asarray(self.stages.numbers)
        gather = self._gather if self.plan.zero == 3 or (self.plan.zero and self._streams) else None

        def traced(between: blocks.Between, stacked: Any, shared: Any, microbatch: Any, key: Any, stage: Any) -> Any:
            batch, examples = microbatch
            module = self.functional.module(self._whole(stacked, shared), {})
            cut = Cut(numbers[stage], self.stages.starts, self.stages.padded, between, gather)
            try:
                with blocks.cutting(cut):
                    return of(module, batch, self.context(key, examples))
            except Reached as reached:
                return reached.value

        def stop(run: Any, x: Any) -> Any:
            raise Reached(x)

        def before(*given: Any) -> Any:
            return traced(stop, *given)

        def inside(x: Any, *given: Any) -> Any:
            def between(run: Callable[[Any], Any], _: Any) -> Any:
                raise Reached(run(x))

            return traced(between, *given)

        def behind(x: Any, *given: Any) -> Any:
            return traced(lambda run, _: x, *given)

        return Parts(before, inside, behind)

    def _gather(self, params: Params) -> Params:
        """A block's parameters, whole: ZeRO 3 gathers them when it runs, and again in the backward pass."""
        names = [name.split("/") for name in self.layout.placements if self.functional.stacked(name)]
        alike = next((n for n in range(min(map(len, names))) if len({name[n] for name in names}) > 1), None)
        parts = names[0][:alike] if alike is not None else names[0]
        start = len(parts) - parts[::-1].index("layers")
        specs = {"/".join(name[start:]): self._reads("/".join(name)) for name in names}

        def whole(path: Any, leaf: Array) -> Array:
            for dim, entry in enumerate(specs[path_name(path)]):
                if "fsdp" in ((entry,) if isinstance(entry, str) else entry or ()):
                    # the first dim of a placement is the layers', which a block has no more
                    leaf = jax.lax.all_gather(leaf, "fsdp", axis=dim - 1, tiled=True)
            return leaf

        return jax.tree_util.tree_map_with_path(whole, params)

    def _stage(self, of: Callable[[Any, Batch, Context], Any], objective: Callable[[Any], Any]) -> Callable[..., Any]:
        """One stage, as `pipeline.execute` calls it; `of` gives sums, `objective` what of them is differentiated."""
        parts, last = self._parts(of), self.stages.schedule.stages - 1

        def stage(stacked: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
            if at.frozen is not None:
                stacked = {name: streamed_weight(self.plan, at.frozen[name], tie) for name, tie in stacked.items()}
            given = (stacked, shared, microbatch, key, at.stage)
            # recomputed in the backward pass: their residuals would lie in every stage's slots
            before, behind = jax.checkpoint(parts.before), jax.checkpoint(parts.behind)
            x = jax.lax.cond(at.stage == 0, lambda x, *given: before(*given), lambda x, *given: x, x, *given)
            y = parts.inside(x, *given)
            nothing = jax.eval_shape(parts.behind, y, *given)
            sums = jax.lax.cond(
                at.stage == last,
                behind,
                lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), nothing),
                y,
                *given,
            )
            return y, objective(sums), sums

        return stage

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _microbatches(self, batch: Batch) -> Any:
        """Every array of a batch as (microbatches, rows, ...), and the index of every row."""
        rows = next(iter(batch.values())).shape[0]
        examples = jnp.arange(rows, dtype=jnp.int32)
        split = functools.partial(microbatches, parts=self.stages.schedule.microbatches)
        return jax.tree.map(split, dict(batch)), split(examples)

    def _run(
        self,
        tables: Tables,
        stage: Any,
        state: TrainState,
        batch: Batch,
        finish: Any,
        out: Any,
        weights: Params | None = None,
    ) -> Any:
        """`pipeline.execute` in its `shard_map`: `finish` gives, of what it gives, what `out` places.

        Of `weights` each replica has its own, along a first dim; by default all read the state's.
        """
        own, spec = weights is not None, self._specs("compute")
        if weights is None:
            copies = self._copies(state.params)
        else:
            copies, spec = jax.vmap(self._copies, spmd_axis_name=REPLICA_AXIS)(weights), _of_replicas(spec)
        stacked, shared = self._split(copies)
        frozen = self._split(state.params)[0] if self._streams else None
        batch = self._microbatches(batch)
        rows = PartitionSpec(None, tuple(axis for axis in BATCH_AXES if axis in self.manual))
        key = jax.random.fold_in(jax.random.key(self.experiment.seed), state.step)

        def body(stacked: Any, frozen: Any, shared: Any, batch: Any, key: Any) -> Any:
            if own:
                stacked, shared = jax.tree.map(lambda leaf: leaf[0], (stacked, shared))
            chunks = self._chunks(stacked)
            frozen = None if frozen is None else self._chunks(frozen)
            one = jax.tree.map(lambda leaf: leaf[0], (chunks, batch))
            x = jax.eval_shape(self._parts(self._loss_of).before, one[0], shared, one[1], key, jnp.int32(0))
            readers = self._readers(x, one[0], shared, one[1], key) if tables.backward else None
            done = execute(
                tables,
                stage,
                chunks,
                shared,
                batch,
                key,
                x,
                axis=PIPE_AXIS,
                manual=self.manual,
                lowering=self.plan.lowering,
                readers=readers,
                hosted=blocks.treatment().hosted,
                frozen=frozen,
            )
            return finish(done)

        specs = (spec[0], None if frozen is None else spec[0], spec[1], rows, PartitionSpec())
        return self._mapped(body, specs, out)(stacked, frozen, shared, batch, key)

    def _readers(self, x: Any, stacked: Any, shared: Any, microbatch: Any, key: Any) -> tuple[int, ...] | None:
        """The stages that read what stages share: the first and the last, where blocks read none of it; else `None`."""
        inside = self._parts(self._loss_of).inside
        program = jax.make_jaxpr(inside)(x, stacked, shared, microbatch, key, jnp.int32(0))
        _, used = prune(program, [True] * len(program.jaxpr.outvars))
        before = len(jax.tree.leaves((x, stacked)))
        return None if any(used[before : before + len(shared)]) else (0, self.stages.schedule.stages - 1)

    def _loss_of(self, module: Any, batch: Batch, context: Context) -> Loss:
        loss = self.experiment.model.loss(module, batch, context)
        return Loss(loss.total, loss.weight, jnp.asarray(loss.penalty, jnp.float32))

    def loss_of_masters(self, params: Params, rest: Params, batch: Batch, key: Any, examples: Array) -> Array:
        """The objective of one microbatch on one stage, as a device sees it: to trace, not to run."""
        stacked, shared = self._split(self._copies(self.functional.in_rows(params)))
        parts, spec = self._parts(self._loss_of), self._specs("compute")
        rows = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in self.manual))

        def body(stacked: Any, shared: Any, batch: Any, examples: Any, key: Any) -> Any:
            one = jax.tree.map(lambda leaf: leaf[0], self._chunks(stacked))
            given = (one, shared, (batch, examples), key, jnp.int32(0))
            return parts.behind(parts.inside(parts.before(*given), *given), *given).total

        given = (spec[0], spec[1], rows, rows, PartitionSpec())
        return self._mapped(body, given, PartitionSpec())(stacked, shared, batch, examples, key)

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Loss, Params, Params]:
        """Sums of the loss, mean gradients in float32, and the model's other state, of a global batch."""
        loss, gradients = self._pipelined(state, batch)
        return loss, self._place_gradients(gradients), state.rest

    def gradients_apart(
        self, state: TrainState, batch: Batch, weights: Params | None = None
    ) -> tuple[Loss, Params, Params]:
        """The same with the gradients of each replica apart, along a first dim, whose mean is that of the global batch.

        Nothing of the size of a parameter crosses the replica axis.

        Args:
            state: the train state.
            batch: the global batch.
            weights: float32, each replica's own along a first dim; the state's, which they share, by default.
        """
        return *self._pipelined(state, batch, apart=True, weights=weights), state.rest

    def _pipelined(
        self, state: TrainState, batch: Batch, *, apart: bool = False, weights: Params | None = None
    ) -> tuple[Loss, Params]:
        """Sums of the loss and the gradients: mean ones, or those of each replica, whose mean they are."""
        stage = self._stage(self._loss_of, lambda loss: loss.total + loss.penalty)
        specs = self._specs("gradient")
        replicas, kept = (self.layout.mesh.shape[REPLICA_AXIS], (REPLICA_AXIS,)) if apart else (1.0, ())

        def finish(done: Any) -> Any:
            loss = jax.lax.psum(done.sums, self.manual)
            stacked = self._home(done.weight_gradients)
            reduced = [
                {name: self._reduce(leaf, name, spec[name], kept) for name, leaf in part.items()}
                for part, spec in zip((stacked, done.shared_gradients), specs, strict=True)
            ]
            scale = replicas / positive(loss.weight)
            return loss, *jax.tree.map(lambda g: (g * scale)[None] if apart else g * scale, reduced)

        out = (PartitionSpec(), *specs)
        if apart:
            out = (out[0], *_of_replicas(specs))
        with self.tracing():
            loss, stacked, shared = self._run(self.training, stage, state, batch, finish, out, weights)
            gradients = self._whole(stacked, shared)
        return Loss(loss.total, loss.weight), gradients

    def _sums(self, of: Callable[[Any, Batch], Any], state: TrainState, batch: Batch) -> Any:
        """What `of` gives for the module and each microbatch, added up."""
        stage = self._stage(lambda module, part, context: of(module, part), lambda sums: jnp.zeros(()))

        def finish(done: Any) -> Any:
            return jax.lax.psum(done.sums, self.manual)

        with self.tracing(plainly=True):
            return self._run(self.scoring, stage, state, batch, finish, PartitionSpec())

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        """Whether the weights of stages come from the host."""
        return self.plan.weights == "host"

    def _copies(self, params: Params) -> Params:
        """The weights that stages read: in the type computed in, and what they share gathered over the pipe axis.

        Of weights that come from the host, zeros, which their gradients go to.
        """
        dtype = jnp.dtype(self.plan.precision)

        def copy(path: Any, param: Array, master: NamedSharding) -> Array:
            master = NamedSharding(master.mesh, master.spec)  # which may lie on the host
            compute = NamedSharding(self.layout.mesh, self._reads(path_name(path)))
            if self._streams and self._of_a_stage(path_name(path)):
                return jax.lax.with_sharding_constraint(jnp.zeros(param.shape, param.dtype), compute)
            if jnp.issubdtype(param.dtype, jnp.floating) and dtype != param.dtype:
                # cast first, so that half the bytes are gathered
                param = jax.lax.with_sharding_constraint(param.astype(dtype), master)
                param = jax.lax.optimization_barrier(param)
            return jax.lax.with_sharding_constraint(param, compute)

        return jax.tree_util.tree_map_with_path(copy, to_device(params), self.layout.masters)

    def _reads(self, name: str) -> PartitionSpec:
        """The placement that a step's loop reads a parameter in: what stages share is whole."""
        place = self.layout.placements[name]
        if not self.functional.stacked(name):
            return without(place.compute, "fsdp")
        return place.master if self._streams else place.compute

    def _specs(self, kind: str) -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
        """The manual axes of the placements of stacked and of shared parameters."""
        placed = self.layout.placements
        # gradients of weights from the host are scattered as they are made
        whole = {name: kind == "compute" or (self._streams and self._of_a_stage(name)) for name in placed}
        specs = {n: self._kept(self._reads(n) if whole[n] else getattr(p, kind)) for n, p in placed.items()}
        stacked = {name: spec for name, spec in specs.items() if self._of_a_stage(name)}
        return stacked, {name: spec for name, spec in specs.items() if name not in stacked}

    def _chunks(self, stacked: dict[str, Array]) -> dict[str, Array]:
        """Rows of this rank as (chunks, depth, ...), with copies of other ranks' stages where the schedule has two."""
        depth = self.stages.depth
        return self._with_copies(jax.tree.map(lambda leaf: leaf.reshape(-1, depth, *leaf.shape[1:]), stacked))

    def _with_copies(self, own: dict[str, Array]) -> dict[str, Array]:
        """This rank's chunks, and behind them copies of other ranks' where the schedule has two of a stage."""
        for sent, pairs in self.stages.copies:
            copy = jax.tree.map(lambda leaf, s=sent, p=pairs: jax.lax.ppermute(leaf[s], PIPE_AXIS, p)[None], own)
            own = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), own, copy)
        return own

    def _home(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `_chunks` for gradients."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self._added_home(gradients))

    def _added_home(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """Gradients of this rank's chunks; those of copies are sent home and added."""
        own = len(self.stages.homes[0])

        def home(leaf: Array) -> Array:
            mine = leaf[:own]
            for chunk, (sent, pairs) in enumerate(self.stages.copies, own):
                back = jax.lax.ppermute(leaf[chunk], PIPE_AXIS, [(there, here) for here, there in pairs])
                mine = mine.at[sent].add(back)
            return mine

        return jax.tree.map(home, gradients)

    def _reduce(self, gradient: Array, name: str, spec: PartitionSpec, kept: Sequence[str] = ()) -> Array:
        """One gradient, added up over the devices that computed parts of it, and scattered as it is placed.

        Over the axes `kept` it is left as it is.
        """
        if self.plan.reduce == "bfloat16":
            gradient = gradient.astype(jnp.bfloat16)
        done = {PIPE_AXIS, *({"fsdp"} & placed_axes(self._reads(name)))} if self.functional.stacked(name) else set()
        over = [axis for axis in self.manual if axis not in done and axis not in kept]
        for dim, entry in enumerate(spec):
            for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                if axis in over:
                    over.remove(axis)
                    gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        over = [axis for axis in over if self.layout.mesh.shape[axis] > 1]
        return (jax.lax.psum(gradient, over) if over else gradient).astype(jnp.float32)


def _of_replicas(specs: Any) -> Any:
    """Placements of arrays that have a first dim for the replicas."""
    return jax.tree.map(lambda spec: PartitionSpec(REPLICA_AXIS, *spec), specs, is_leaf=_is_spec)


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, PartitionSpec)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model in three functions; each takes (stacked, shared, microbatch, key, stage), two of them `x` before.

    Args:
        before: what enters the first block.
        inside: what a stage's blocks make of `x`.
        behind: what comes of the last block's output: sums.
    """

    before: Callable[..., Any]
    inside: Callable[..., Any]
    behind: Callable[..., Any]
