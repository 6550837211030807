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

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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

    Returns:
        What this device summed; reduce it over the axes that share the parameters.

    Raises:
        UserError: a batch without m microbatches, weights of another number of chunks, a stage that returns another
            message than `x`, "phased" with a table whose ticks mix kinds.
    """
    _check(tables, weights, batch, lowering)
    weights, shared, batch, key = vary((weights, shared, batch, key), manual)
    actions = Actions(tables, stage, weights, shared, batch, key, x, manual)
    names = tuple(tables.columns)
    rows = jnp.asarray(np.stack([tables.columns[name] for name in names], axis=1))
    # (ticks, columns): what this device does
    rows = vary(lax.dynamic_index_in_dim(rows, lax.axis_index(axis), 2, keepdims=False), manual)
    ways = {way: steps for way, steps in (("from_left", 1), ("from_right", -1)) if tables.meets(way)}
    flags = {"from_left": tables.right, "from_right": tables.left}
    ranks = tables.schedule.ranks

    def send(way: str, message: Any, flag: Any) -> Any:
        """To the neighbour; `flag` is the same on all devices, so they exchange together or not at all."""
        route = [(rank, (rank + ways[way]) % ranks) for rank in range(ranks)]

        def shift(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, route), tree)

        if isinstance(flag, (bool, np.bool_)):
            return shift(message) if flag else message
        return lax.cond(flag, shift, lambda tree: tree, message)

    def tick(state: dict[str, Any], row: dict[str, Any], travels: dict[str, Any], kinds: Sequence[int]) -> Any:
        messages, boxes = state["messages"], state["boxes"]
        for way in boxes:
            messages = write(messages, row[way], boxes[way])
        # operands leave the pool before anything is put into it again, or XLA copies it in every tick (hazard 2)
        operands, messages = lax.optimization_barrier(
            ({"x": read(messages, row["x"]), "g": read(messages, row["g"])}, messages)
        )
        sums, message = actions.run(kinds, state["sums"], row, operands["x"], operands["g"])
        made = {way: send(way, message, travels[way]) for way in ways}
        if "to_self" in boxes:
            made["to_self"] = message
        return vary({"messages": messages, "boxes": made, "sums": sums}, manual)

    state = vary(
        {
            "messages": empty(x, tables.messages + 1),
            "boxes": {way: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x) for way in _boxes(tables)},
            "sums": actions.start(),
        },
        manual,
    )
    if lowering == "switch":
        gates = {way: True if flags[way].all() else jnp.asarray(flags[way]) for way in ways}

        def step(state: Any, over: Any) -> tuple[Any, None]:
            row, gate = over
            travels = {way: gate.get(way, True) for way in ways}
            return tick(state, {name: row[place] for place, name in enumerate(names)}, travels, tables.kinds), None

        varied = {way: gate for way, gate in gates.items() if gate is not True}
        state, _ = lax.scan(step, state, (rows, varied))
    else:
        start = 0
        for motif, repeats in phases(tables):
            part = slice(start, start + repeats * len(motif))
            start = part.stop
            travels = [{way: flags[way][part][turn :: len(motif)].any() for way in ways} for turn in range(len(motif))]

            def step(state: Any, turns: Any, motif: Any = motif, travels: Any = travels) -> tuple[Any, None]:
                for turn, (kind, travel) in enumerate(zip(motif, travels, strict=True)):
                    row = {name: turns[turn, place] for place, name in enumerate(names)}
                    state = tick(state, row, travel, (kind,))
                return state, None

            state, _ = lax.scan(step, state, rows[part].reshape(repeats, len(motif), len(names)))
    found = state["sums"]
    return Executed(found["sums"], found.get("weights"), found.get("shared"))


def _boxes(tables: Tables) -> tuple[str, ...]:
    return tuple(way for way in MESSAGES if tables.meets(way))


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
