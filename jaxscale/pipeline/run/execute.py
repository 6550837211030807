"""The executor of all synchronous schedules: it follows tables (`tables.py`).

It is a `lax.scan` over ticks. Each tick is a `lax.switch` over the kinds of actions, with idle as one of them, followed
by messages to both neighbours (`ppermute`). The model is differentiated inside the actions, per stage and microbatch,
and no `jax.grad` goes through the scan. So only slots keep values from a forward to its backward, and the memory of
1F1B stays flat as the number of microbatches grows. All devices run one program.

References:
    Huang et al., "GPipe", 2019 (https://arxiv.org/abs/1811.06965); Narayanan et al., "Efficient Large-Scale Language
    Model Training", 2021 (https://arxiv.org/abs/2104.04473) for 1F1B and interleaving.

Left to its caller: the `jax.shard_map` around it, every reduction over devices (it returns this device's own sums),
unequal stages (inside the stage function), updates (`asynchronous.py` has those inside a schedule).
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.errors import UserError
from jaxscale.pipeline.run.actions import Actions
from jaxscale.pipeline.run.passes import At, StageFunction
from jaxscale.pipeline.run.phases import phases
from jaxscale.pipeline.run.pools import empty_pool, exchange, read, vary, write, zeros
from jaxscale.pipeline.run.tables import MESSAGES, Tables
from jaxscale.trees import named_leaves

__all__ = ["At", "Executed", "Lowering", "StageFunction", "execute"]

Lowering = Literal["switch", "phased"]
"""How a table becomes a program: a branch per tick, or the kinds of a lock-step table written out without branches."""
_Tick: TypeAlias = Callable[[Any, Any, Mapping[str, Any], Sequence[int]], Any]


class Executed(NamedTuple):
    """This device's own sums over its actions, without any reduction.

    Args:
        sums: the stages' `sums`, summed over the forwards of this device.
        weight_gradients: gradients of the weights, float32 (v, ...); `None` if no backward ran.
        shared_gradients: gradients of the shared weights, float32; `None` if no backward ran.
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
        tables: the schedule (`tables.tabulate`).
        stage: `stage(weights, shared, x, microbatch, at, key) -> (y, objective, sums)`, the same function on every
            device: `at.stage` and `at.microbatch` are traced. `x` is zeros on the first stage, and the last stage's `y`
            goes nowhere. `objective` is a float32 scalar, differentiated with cotangent 1 and summed over all stages
            and microbatches; `sums` a tree of float32 scalars.
        weights: weights of this device's chunks, leaves (v, ...); `Schedule.place` maps each stage to its rank and
            chunk.
        shared: weights that every stage may read (embedding, head), gathered by the caller.
        batch: microbatches, leaves (m, ...); a stage gets the leaves of its microbatch.
        key: random key, handed to the stage unchanged; if the stage folds microbatch and layer into it, every schedule
            draws the same numbers.
        x: shapes and types of the message from stage to stage, a tree of `jax.ShapeDtypeStruct`.
        axis: name of the mesh axis along which the stages lie.
        manual: all axes over which the surrounding `jax.shard_map` is manual.
        lowering: "phased", for lock-step tables only: no branches, idle devices compute on zeros and drop the results.
        readers: stages that read any leaf of `shared`; only their backwards add to its gradients. `None`: all may.
        hosted: names (`checkpoint_name`) of residuals that stay in host memory between a forward and its backward.
        frozen: weights without gradients, leaves (v, ...), such as weights on the host; a stage gets those of its chunk
            as `at.frozen`, in the memory where they are.

    Returns:
        This device's sums; reduce them over the axes that share the parameters.

    Raises:
        UserError: the batch does not have m microbatches, the weights have a wrong number of chunks, the stage returns
            a message unlike `x`, or the lowering is "phased" and a tick of the table has several kinds.
    """
    _check(tables, weights, batch, lowering)
    weights, shared, batch, key, frozen = vary((weights, shared, batch, key, frozen), manual)
    actions = Actions(tables, stage, weights, shared, batch, key, x, manual, readers, hosted, frozen)
    table = np.stack([tables.columns[name] for name in tables.columns], axis=1)
    rows = lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(axis), 2, keepdims=False)
    no_message = zeros(x)
    state = {
        "messages": empty_pool(x, tables.messages + 1),
        # messages that have arrived, and enter their slots in the next tick
        "boxes": {way: no_message for way in MESSAGES if tables.meets(way)},
        "sums": actions.start(),
    }
    run_ticks = _one_loop if lowering == "switch" else _few_loops
    sums = run_ticks(tables, _tick(tables, actions, axis, manual), vary(rows, manual), vary(state, manual))["sums"]
    return Executed(sums["sums"], sums.get("weights"), sums.get("shared"))


def _tick(tables: Tables, actions: Actions, axis: str, manual: Sequence[str]) -> _Tick:
    """Make the function of one tick, `tick(state, row, travels, kinds) -> state`.

    `travels` has, for each direction with messages, whether a message travels at the end of the tick. `kinds` has the
    codes of the kinds that the tick may have.
    """

    def send(message: Any, way: str, travels: Any) -> Any:
        """Send a message to a neighbour if `travels`, and return the one that arrives; otherwise return `message`.

        `travels` is the same on all devices, so that they exchange messages together or not at all.
        """
        exchange_tree = functools.partial(exchange, axis=axis, ranks=tables.schedule.ranks, way=way)
        if isinstance(travels, bool):
            return exchange_tree(message) if travels else message
        return lax.cond(travels, exchange_tree, lambda tree: tree, message)

    def tick(state: Any, row: Any, travels: Mapping[str, Any], kinds: Sequence[int]) -> Any:
        """Run one tick: store the messages that arrived, run the action, and send its message."""
        messages = state["messages"]
        row = {name: row[column] for column, name in enumerate(tables.columns)}
        for way, box in state["boxes"].items():
            messages = write(messages, row[way], box)
        if len(kinds) == 1:
            # operands are read before the pool is written again, or XLA copies the pool in every tick
            x, g, messages = lax.optimization_barrier((read(messages, row["x"]), read(messages, row["g"]), messages))
            sums, message = actions.run_kind(kinds[0], state["sums"], row, x, g)
        else:
            sums, message = actions.run_switch(kinds, state["sums"], row, messages)
        boxes = {way: send(message, way, travels[way]) if way in travels else message for way in state["boxes"]}
        return vary({"messages": messages, "boxes": boxes, "sums": sums}, manual)

    return tick


def _one_loop(tables: Tables, tick: _Tick, rows: Any, state: Any) -> Any:
    """Run all ticks in one loop, with a branch for each kind, and return the last state.

    A gate has, for each tick, whether messages of a direction travel; a direction used in every tick needs none.
    """
    gates = {way: jnp.asarray(flags) for way, flags in tables.travels.items() if not flags.all()}

    def step(state: Any, xs: Any) -> tuple[Any, None]:
        """Run one tick; `xs` is its (row, gate)."""
        row, gate = xs
        return tick(state, row, {way: gate.get(way, True) for way in tables.travels}, tables.kinds), None

    return lax.scan(step, state, (rows, gates))[0]


def _few_loops(tables: Tables, tick: _Tick, rows: Any, state: Any) -> Any:
    """Run a loop for each phase of a lock-step table, its motif's kinds unrolled, and return the last state."""
    start = 0
    for motif, repeats in phases(tables):
        span = slice(start, start + repeats * len(motif))
        # for each tick of the motif, whether messages of a direction travel at its end
        gates = [
            {way: bool(flags[span][turn :: len(motif)].any()) for way, flags in tables.travels.items()}
            for turn in range(len(motif))
        ]

        def step(state: Any, motif_rows: Any, motif: Any = motif, gates: Any = gates) -> tuple[Any, None]:
            """Run the ticks of one repetition of a motif; `motif_rows` has the row of each."""
            for turn, kind in enumerate(motif):
                state = tick(state, motif_rows[turn], gates[turn], (kind,))
            return state, None

        state, _ = lax.scan(step, state, rows[span].reshape(repeats, len(motif), -1))
        start = span.stop
    return state


def _check(tables: Tables, weights: Any, batch: Any, lowering: Lowering) -> None:
    """Raise an error if first dims do not fit the schedule, or the table cannot have this lowering."""
    schedule = tables.schedule
    for label, tree, count in (("batch", batch, schedule.microbatches), ("weights", weights, schedule.chunks)):
        for name, leaf in named_leaves(tree).items():
            if leaf.ndim < 1 or leaf.shape[0] != count:
                raise UserError(f"{label} {name} is {leaf.shape}, expected a first dim of {count} for {schedule.name}")
    if lowering == "phased" and not tables.lockstep:
        raise UserError(
            f"schedule {schedule.name} has ticks in which some devices go forward and others backward, but the "
            "lowering 'phased' needs one kind in each tick: use lockstep or gpipe, or the lowering 'switch'"
        )
