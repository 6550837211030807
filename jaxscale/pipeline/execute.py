"""The executor: one for all synchronous schedules, which follows tables (`tables.py`) and knows no schedule.

`lax.scan` over ticks; in each, `lax.switch` on what this device does (nothing where it is idle), then messages to both
neighbours (`ppermute`). The model is differentiated inside the actions, per stage and microbatch, and no `jax.grad`
goes through the scan: so nothing lives from a forward to its backward but what stands in a slot, and 1F1B's memory
stays flat as microbatches grow, in one program for all devices.

    Huang et al., "GPipe", 2019 (https://arxiv.org/abs/1811.06965); Narayanan et al., "Efficient Large-Scale Language
    Model Training", 2021 (https://arxiv.org/abs/2104.04473) for 1F1B and interleaving.

What it leaves to its caller: the `jax.shard_map` around it, every reduction over devices (what comes back are this
device's own sums), unequal stages (inside the stage function), updates (`asynchronous.py` has those inside a schedule).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.errors import UserError
from jaxscale.pipeline.actions import Actions
from jaxscale.pipeline.passes import At, StageFunction
from jaxscale.pipeline.phases import phases
from jaxscale.pipeline.pools import empty, read, vary, write
from jaxscale.pipeline.tables import MESSAGES, Tables
from jaxscale.trees import named_leaves

__all__ = ["At", "Executed", "Lowering", "StageFunction", "execute"]

Lowering = Literal["switch", "phased"]
"""How a table becomes a program: a branch per tick, or the kinds of a lock-step table written out without branches."""
_Tick: TypeAlias = Callable[[Any, Any, Mapping[str, Any], Sequence[int]], Any]


class Executed(NamedTuple):
    """This device's own sums over its actions, not reduced over anything.

    Args:
        sums: what the stages returned as such, summed over the forwards of this device.
        weight_gradients: of the weights, float32 (v, ...); `None` where no backward ran.
        shared_gradients: of what stages share, float32; `None` where no backward ran.
    """

    sums: Any
    weight_gradients: Any
    shared_gradients: Any


def execute(
    tables: Tables,
    stage: StageFunction,
    weights: Any,
    shared: Any,
    batch: Any,
    key: Any,
    x: Any,
    *,
    axis: str = "pipe",
    manual: Sequence[str] = ("pipe",),
    lowering: Lowering = "switch",
    readers: Sequence[int] | None = None,
    hosted: Collection[str] = (),
    frozen: Any = None,
) -> Executed:
    """Run a schedule inside a `jax.shard_map` that is manual over `manual`.

    Args:
        tables: what to do (`tables.tabulate`).
        stage: `stage(weights, shared, x, microbatch, at, key) -> (y, objective, sums)`, the same function on every
            device: `at.stage` and `at.microbatch` are traced. `x` is zeros on the first stage, and the last stage's `y`
            goes nowhere. `objective` is a float32 scalar, differentiated with cotangent 1 and summed over all stages
            and microbatches; `sums` a tree of float32 scalars.
        weights: of this device's chunks, leaves (v, ...); chunk c holds the stage that `Schedule.place` puts there.
        shared: what every stage may read (embedding, head), gathered by the caller.
        batch: leaves (m, ...), of which a stage gets those of its microbatch.
        key: handed to the stage as it is; fold the microbatch and the layer into it, and every schedule draws the same.
        x: the message from stage to stage, a tree of `jax.ShapeDtypeStruct`.
        axis: of the mesh, along which the stages lie.
        manual: all axes over which the surrounding `jax.shard_map` is manual.
        lowering: "phased" for lock-step tables alone: no branch at all, idle devices compute on zeros and drop it.
        readers: stages that read anything of `shared`; gradients of it are added up by their backwards alone. `None`:
            all may.
        hosted: names (`checkpoint_name`) of residuals that lie on the host between a forward and its backward.
        frozen: leaves (v, ...) that a stage finds as `at.frozen`, of its chunk and in the memory that they lie in, and
            that no gradient goes to: weights on the host.

    Returns:
        What this device summed; reduce it over the axes that share the parameters.

    Raises:
        UserError: a batch without m microbatches, weights of another number of chunks, a stage that returns another
            message than `x`, "phased" with a table whose ticks mix kinds.
    """
    _check(tables, weights, batch, lowering)
    weights, shared, batch, key, frozen = vary((weights, shared, batch, key, frozen), manual)
    actions = Actions(tables, stage, weights, shared, batch, key, x, manual, readers, hosted, frozen)
    table = np.stack([tables.columns[name] for name in tables.columns], axis=1)
    own = lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(axis), 2, keepdims=False)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)
    state = {
        "messages": empty(x, tables.messages + 1),
        "boxes": {way: nothing for way in MESSAGES if tables.meets(way)},
        "sums": actions.start(),
    }
    run = _one_loop if lowering == "switch" else _few_loops
    sums = run(tables, _tick(tables, actions, axis, manual), vary(own, manual), vary(state, manual))["sums"]
    return Executed(sums["sums"], sums.get("weights"), sums.get("shared"))


def _tick(tables: Tables, actions: Actions, axis: str, manual: Sequence[str]) -> _Tick:
    """One tick: `tick(state, row, travels, kinds)`."""
    ranks = tables.schedule.ranks
    routes = {
        way: [(rank, (rank + step) % ranks) for rank in range(ranks)]
        for way, step in (("from_left", 1), ("from_right", -1))
    }

    def send(message: Any, way: str, travels: Any) -> Any:
        """To the neighbour; `travels` is the same on all devices, so they exchange together or not at all."""

        def shift(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, routes[way]), tree)

        if isinstance(travels, bool):
            return shift(message) if travels else message
        return lax.cond(travels, shift, lambda tree: tree, message)

    def tick(state: Any, row: Any, travels: Mapping[str, Any], kinds: Sequence[int]) -> Any:
        messages = state["messages"]
        row = {name: row[place] for place, name in enumerate(tables.columns)}
        for way, box in state["boxes"].items():
            messages = write(messages, row[way], box)
        if len(kinds) == 1:
            # operands leave the pool before anything is put into it again, or XLA copies it in every tick (hazard 2)
            x, g, messages = lax.optimization_barrier((read(messages, row["x"]), read(messages, row["g"]), messages))
            sums, message = actions.alone(kinds[0], state["sums"], row, x, g)
        else:
            sums, message = actions.one_of(kinds, state["sums"], row, messages)
        boxes = {way: send(message, way, travels[way]) if way in travels else message for way in state["boxes"]}
        return vary({"messages": messages, "boxes": boxes, "sums": sums}, manual)

    return tick


def _travels(tables: Tables) -> dict[str, np.ndarray]:
    """For each direction that is used, in which ticks."""
    flags = {"from_left": tables.right, "from_right": tables.left}
    return {way: flag for way, flag in flags.items() if flag.any()}


def _one_loop(tables: Tables, tick: _Tick, rows: Any, state: Any) -> Any:
    """All ticks alike, with a branch for each kind; a direction that is used in every tick needs no gate."""
    flags = _travels(tables)
    gates = {way: jnp.asarray(flag) for way, flag in flags.items() if not flag.all()}

    def step(state: Any, over: Any) -> tuple[Any, None]:
        row, gate = over
        return tick(state, row, {way: gate.get(way, True) for way in flags}, tables.kinds), None

    return lax.scan(step, state, (rows, gates))[0]


def _few_loops(tables: Tables, tick: _Tick, rows: Any, state: Any) -> Any:
    """A loop for each phase of a lock-step table, the kinds of its motif written out."""
    flags, start = _travels(tables), 0
    for motif, repeats in phases(tables):
        part = slice(start, start + repeats * len(motif))
        gates = [
            {way: bool(flag[part][turn :: len(motif)].any()) for way, flag in flags.items()}
            for turn in range(len(motif))
        ]

        def step(state: Any, turns: Any, motif: Any = motif, gates: Any = gates) -> tuple[Any, None]:
            for turn, kind in enumerate(motif):
                state = tick(state, turns[turn], gates[turn], (kind,))
            return state, None

        state, _ = lax.scan(step, state, rows[part].reshape(repeats, len(motif), -1))
        start = part.stop
    return state


def _check(tables: Tables, weights: Any, batch: Any, lowering: Lowering) -> None:
    schedule = tables.schedule
    for what, tree, count in (("batch", batch, schedule.microbatches), ("weights", weights, schedule.chunks)):
        for name, leaf in named_leaves(tree).items():
            if leaf.ndim < 1 or leaf.shape[0] != count:
                raise UserError(f"{what} {name} is {leaf.shape}, expected a first dim of {count} for {schedule.name}")
    if lowering == "phased" and not tables.lockstep:
        raise UserError(
            f"schedule {schedule.name} has ticks in which some devices go forward and others backward: expected one "
            "kind a tick for the lowering 'phased'; take lockstep or gpipe, or the lowering 'switch'"
        )
