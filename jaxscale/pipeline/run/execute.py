"""The executor of all synchronous schedules. It follows the table of a schedule (`tables.py`).

The executor is a `lax.scan` over ticks. Each tick is a `lax.switch` over the kinds of actions and idle, followed by
messages to both neighbors (`ppermute`). The model is differentiated inside the actions, one stage and one microbatch at
a time; the scan itself is not differentiated. So only slots keep values from a forward to its backward, and the memory
of 1F1B does not grow with the number of microbatches. All devices run one program.

References:
    Huang et al., "GPipe", 2019 (https://arxiv.org/abs/1811.06965); Narayanan et al., "Efficient Large-Scale Language
    Model Training", 2021 (https://arxiv.org/abs/2104.04473) for 1F1B and interleaving.

Left to the caller: the `jax.shard_map` around the executor, all reductions over devices (the executor returns the sums
of each device), and updates. Left to the stage function: differences between stages. Updates inside a schedule are in
`asynchronous.py`.
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
from jaxscale.pipeline.run.tables import ORIGINS, Tables
from jaxscale.trees import named_leaves

__all__ = ["At", "DeviceSums", "Lowering", "StageFunction", "execute"]

Lowering = Literal["switch", "phased"]
"""How a table becomes a program: "switch" has branches in each tick; "phased", for lock-step tables, has none."""
_TickFunction: TypeAlias = Callable[[Any, Any, Mapping[str, Any], Sequence[int]], Any]
"""`run_tick(state, row, travel_flags, codes) -> state`, as `_tick_function` returns it."""


class DeviceSums(NamedTuple):
    """The sums of one device over its actions, not reduced over devices.

    Args:
        sums: the stages' `sums`, added up over the forwards of this device.
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
    message_shapes: Any,
    *,
    axis: str = "pipe",
    manual_axes: Sequence[str] = ("pipe",),
    lowering: Lowering = "switch",
    readers: Sequence[int] | None = None,
    hosted_names: Collection[str] = (),
    frozen: Any = None,
) -> DeviceSums:
    """Run a schedule inside a `jax.shard_map` that is manual over `manual_axes`.

    Args:
        tables: the schedule (`tables.tabulate`).
        stage: `stage(weights, shared, x, microbatch, at, key) -> (y, objective, sums)`. All devices run the same
            function, so `at.stage` and `at.microbatch` are traced. `x` is zeros on the first stage, and the `y` of the
            last stage is dropped. `objective` is a float32 scalar; `execute` computes the gradients of the sum of
            objectives over all stages and microbatches. `sums` is a tree of float32 scalars.
        weights: weights of this device's chunks, leaves (v, ...); `Schedule.place` maps each stage to its rank and
            chunk.
        shared: weights that every stage may read (embedding, head), gathered by the caller.
        batch: microbatches, leaves (m, ...); a stage gets the leaves of its microbatch.
        key: random key, which the stage gets unchanged. If the stage folds the microbatch and the layer into it, the
            random numbers are the same under every schedule.
        message_shapes: shapes and types of the message from stage to stage, a tree of `jax.ShapeDtypeStruct`.
        axis: name of the mesh axis along which the stages lie.
        manual_axes: all axes over which the surrounding `jax.shard_map` is manual.
        lowering: "switch": each tick has a branch for each kind of action, and idle devices do nothing. "phased", for
            lock-step tables only: the program has no branches; idle devices compute on zeros and drop the results.
        readers: stages that read any leaf of `shared`; only the backwards of these stages add to the gradients of
            `shared`. `None`: all stages.
        hosted_names: names (`checkpoint_name`) of residuals that stay in host memory between a forward and its
            backward.
        frozen: weights without gradients, leaves (v, ...), such as weights in host memory. A stage gets the frozen
            weights of its chunk as `at.frozen`, and they are not copied to another memory.

    Returns:
        This device's sums. The caller reduces them over the axes whose devices share the parameters.

    Raises:
        UserError: the batch does not have m microbatches; the weights have a wrong number of chunks; the stage's output
            does not have the shapes and types in `message_shapes`; or the lowering is "phased" and a tick of the table
            has several kinds of actions.
    """
    _check_arguments(tables, weights, batch, lowering)
    weights, shared, batch, key, frozen = vary((weights, shared, batch, key, frozen), manual_axes)
    actions = Actions(
        tables, stage, weights, shared, batch, key, message_shapes, manual_axes, readers, hosted_names, frozen
    )
    table = np.stack([tables.columns[name] for name in tables.columns], axis=1)
    rows = lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(axis), 2, keepdims=False)
    no_message = zeros(message_shapes)
    state = {
        "messages": empty_pool(message_shapes, tables.message_slot_count + 1),
        # messages that have arrived, by origin; they enter their slots in the next tick
        "boxes": {origin: no_message for origin in ORIGINS if tables.has_messages(origin)},
        "sums": actions.initial_state(),
    }
    run_table = _run_one_loop if lowering == "switch" else _run_phases
    run_tick = _tick_function(tables, actions, axis, manual_axes)
    sums = run_table(tables, run_tick, vary(rows, manual_axes), vary(state, manual_axes))["sums"]
    return DeviceSums(sums["sums"], sums.get("weights"), sums.get("shared"))


def _tick_function(tables: Tables, actions: Actions, axis: str, manual_axes: Sequence[str]) -> _TickFunction:
    """Return the function that runs one tick, `run_tick(state, row, travel_flags, codes) -> state`.

    `row` is a device's row of the table, int32 (columns,). `travel_flags` has, for each origin of messages from other
    ranks, whether a message travels at the end of the tick. `codes` are the codes of the kinds that the tick may have.
    """

    def send(message: Any, origin: str, is_sent: Any) -> Any:
        """Send a message to a neighbor and return the message that arrives; return `message` if `is_sent` is false.

        `is_sent` is the same on all devices, so either all devices exchange messages or none does.
        """
        exchange_tree = functools.partial(exchange, axis=axis, rank_count=tables.schedule.ranks, origin=origin)
        if isinstance(is_sent, bool):
            return exchange_tree(message) if is_sent else message
        return lax.cond(is_sent, exchange_tree, lambda tree: tree, message)

    def run_tick(state: Any, row: Any, travel_flags: Mapping[str, Any], codes: Sequence[int]) -> Any:
        """Run one tick: store the messages that have arrived, run the action, and send its message."""
        messages = state["messages"]
        named_row = {name: row[column] for column, name in enumerate(tables.columns)}
        for origin, box in state["boxes"].items():
            messages = write(messages, named_row[origin], box)
        if len(codes) == 1:
            # operands are read before the pool is written again; otherwise XLA would copy the pool in every tick
            x, g, messages = lax.optimization_barrier(
                (read(messages, named_row["x"]), read(messages, named_row["g"]), messages)
            )
            sums, message = actions.run_kind(codes[0], state["sums"], named_row, x, g)
        else:
            sums, message = actions.run_switch(codes, state["sums"], named_row, messages)
        boxes = {
            origin: send(message, origin, travel_flags[origin]) if origin in travel_flags else message
            for origin in state["boxes"]
        }
        return vary({"messages": messages, "boxes": boxes, "sums": sums}, manual_axes)

    return run_tick


def _run_one_loop(tables: Tables, run_tick: _TickFunction, rows: Any, state: Any) -> Any:
    """Run all ticks in one loop, with a branch for each kind, and return the last state."""
    # flags of the origins from which messages arrive in some ticks but not in all
    varying_flags = {o: jnp.asarray(flags) for o, flags in tables.travel_flags.items() if not flags.all()}

    def run_iteration(state: Any, xs: Any) -> tuple[Any, None]:
        """Run one tick; `xs` is a pair (row, varying flags) of the tick."""
        row, tick_flags = xs
        travel_flags = {origin: tick_flags.get(origin, True) for origin in tables.travel_flags}
        return run_tick(state, row, travel_flags, tables.kind_codes), None

    return lax.scan(run_iteration, state, (rows, varying_flags))[0]


def _run_phases(tables: Tables, run_tick: _TickFunction, rows: Any, state: Any) -> Any:
    """Run a lock-step table with a loop for each phase, whose body is the whole motif, and return the last state."""
    start_tick = 0
    for motif, repeat_count in phases(tables):
        tick_span = slice(start_tick, start_tick + repeat_count * len(motif))
        # for each tick of the motif, by origin, whether a message travels at its end in any repetition
        motif_flags = [
            {origin: bool(flags[tick_span][turn :: len(motif)].any()) for origin, flags in tables.travel_flags.items()}
            for turn in range(len(motif))
        ]

        def run_motif(state: Any, motif_rows: Any, motif: Any = motif, motif_flags: Any = motif_flags) -> Any:
            """Run one repetition of a motif on its rows of the table; return (state, None), as `lax.scan` requires."""
            for turn, code in enumerate(motif):
                state = run_tick(state, motif_rows[turn], motif_flags[turn], (code,))
            return state, None

        state, _ = lax.scan(run_motif, state, rows[tick_span].reshape(repeat_count, len(motif), -1))
        start_tick = tick_span.stop
    return state


def _check_arguments(tables: Tables, weights: Any, batch: Any, lowering: Lowering) -> None:
    """Raise UserError if a first dim does not fit the schedule, or if the lowering is not possible for the table."""
    schedule = tables.schedule
    for label, tree, count in (("batch", batch, schedule.microbatches), ("weights", weights, schedule.chunks)):
        for name, leaf in named_leaves(tree).items():
            if leaf.ndim < 1 or leaf.shape[0] != count:
                raise UserError(f"{label} {name} is {leaf.shape}, expected a first dim of {count} for {schedule.name}")
    if lowering == "phased" and not tables.is_lockstep:
        raise UserError(
            f"schedule {schedule.name} has ticks in which some devices run a forward and others a backward, but the "
            "lowering 'phased' needs one kind in each tick: use lockstep or gpipe, or the lowering 'switch'"
        )
