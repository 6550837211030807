"""The executor of asynchronous schedules: a pipeline that never drains, with the updates inside the schedule.

Like the executor in `execute.py`, this executor is one scan over the ticks of a table. The table has no end
(`stream.py`); a call runs the ticks in which the call's microbatches enter. A stage updates its own weights right after
the backward that completes a group of microbatches; slots keep the older weights that actions still need. A call
returns the state between ticks (`in_flight`). The next call gets it as an argument, so the pipe does not drain between
training steps. With a checkpoint of this state, a run continues exactly.

Every stage has its own copy of the shared weights (embedding, head) and updates it. Only the embedding of the first
stage and the head of the last stage matter. So tied weights and norms over all stages (clipping) have no meaning, and
the caller refuses them.

References:
    Harlap et al., "PipeDream", 2018 (https://arxiv.org/abs/1806.03377); Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training" (2BW), 2021 (https://arxiv.org/abs/2006.09503); Yang et al., "PipeMare", 2021
    (https://arxiv.org/abs/1910.05124).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import UserError
from jaxscale.pipeline.run.passes import At, FromInput, FromResiduals, StageContext, StageFunction
from jaxscale.pipeline.run.pipemare import Remedies, delay_of
from jaxscale.pipeline.run.pools import (
    STEP_FROM_ORIGIN,
    empty_pool,
    exchange,
    gradient_arrays,
    read,
    tree_or_zeros,
    vary,
    write,
    zeros,
)
from jaxscale.pipeline.run.stream import COLUMNS, Stream

InFlightArrays = dict[str, Any]
"""The state between ticks on one device: trees of arrays, by name. Every leaf has a first dim of 1.

`tick` is the index of the next tick. `messages`, `kept`, `batch`, `key` and `versions` are pools: of messages, stashes,
microbatches, random keys of the microbatches, and versions of the weights. `boxes` has the messages that have arrived,
`gradients` has the sums of gradients over the current group so far, and `change` is the moving average of PipeMare's
correction."""


class UpdateAt(NamedTuple):
    """The stage and the index of an update.

    Args:
        stage: index of the stage, int32, traced.
        index: number of earlier updates of the stage since the pipe was filled, int32, traced.
    """

    stage: Any
    index: Any


StageUpdate = Callable[[Any, Any, Any, UpdateAt], tuple[Any, Any]]
"""Function that updates one stage: `update(parameters, gradients, optimizer, at) -> (parameters, optimizer)`.

The gradients are float32 sums over the group of microbatches. The function may reduce over manual axes other than the
pipe axis."""


class AdvanceResult(NamedTuple):
    """The result of a call of `Asynchronous.advance` or `Asynchronous.drain`.

    Args:
        parameters: the newest parameters of this stage.
        optimizer: state of the stage's optimizer.
        in_flight: state between ticks, for the next call.
        sums: the stage's `sums`, added up over this device's forwards in the ticks of the call, including forwards of
            microbatches that entered in earlier calls.
    """

    parameters: Any
    optimizer: Any
    in_flight: InFlightArrays
    sums: Any


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """The executor of a stream. Call its methods inside a `jax.shard_map` that is manual over `manual_axes`.

    Parameters and gradients are pairs (weights, shared) of this device's stage, with leaves (1, ...). In the private
    methods, `row` is a device's row of the table: int32 scalars, by the names in `COLUMNS`. x is the message from the
    previous stage, and g is the gradient from the next stage. `passes` has the stage's forward and backward
    (`passes.py`).

    Args:
        stream: the schedule.
        stage: stage function, as in `execute`. The weights and shared weights that it gets have no first dim, and
            `at.microbatch` is the index of the microbatch within the batch of its call of `advance`.
        update: function that updates one stage.
        message_shapes: shapes and types of the message between stages.
        to_compute: function from parameters to the weights that stages compute with, such as a cast; `None`: stages
            compute with the parameters themselves.
        remedies: PipeMare's remedies against stale weights.
        axis: the mesh axis of the stages.
        manual_axes: all manual axes.

    Raises:
        UserError: the remedies have a correction, but the schedule's backwards use the weights of their forwards.
    """

    stream: Stream
    stage: StageFunction
    update: StageUpdate
    message_shapes: Any
    to_compute: Callable[[Any], Any] | None = None
    remedies: Remedies = dataclasses.field(default_factory=Remedies)
    axis: str = "pipe"
    manual_axes: tuple[str, ...] = ("pipe",)

    def __post_init__(self) -> None:
        if self.remedies.correction is not None and not self.stream.has_newest_backward:
            raise UserError(
                f"schedule {self.stream.name}: got a correction of the weights of backwards, expected none: its "
                "backwards use the weights of their forwards. Only pipemare takes a correction"
            )

    def empty_pipe(self, parameters: Any, batch: Any, key: Any) -> InFlightArrays:
        """Return the state of an empty pipe, for calls of `advance` with batches of the same shapes.

        Args:
            parameters: the initial parameters.
            batch: a batch with the shapes of later batches, leaves (n, ...) for n microbatches; its values do not
                matter.
            key: a key with the type of later keys; its value does not matter.
        """
        parameters, batch, key = self._vary((parameters, batch, key))
        microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
        slot_count = self.stream.carried_count + _microbatch_count(batch)
        state: InFlightArrays = {
            "tick": jnp.int32(0),
            "messages": empty_pool(self.message_shapes, self.stream.message_slot_count + 1),
            # messages that have arrived, by origin; they enter their slots in the next tick
            "boxes": {origin: zeros(self.message_shapes) for origin in STEP_FROM_ORIGIN},
            "kept": empty_pool(
                self._stage_passes(parameters, microbatch, key).stash_shapes, self.stream.stash_slot_count
            ),
            "batch": empty_pool(microbatch, slot_count),
            "key": jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slot_count, *leaf.shape)), key),
            "versions": self._version_pool(parameters),
            "gradients": zeros(parameters, jnp.float32) if self.stream.group_size > 1 else (),
            "change": () if self.remedies.correction is None else zeros(parameters, jnp.float32),
        }
        return jax.tree.map(lambda leaf: leaf[None], self._vary(state))

    def advance(
        self, parameters: Any, optimizer: Any, in_flight: InFlightArrays, batch: Any, key: Any
    ) -> AdvanceResult:
        """Let n microbatches enter, and run the ticks until the next microbatch can enter.

        Args:
            parameters: the newest parameters.
            optimizer: state of the optimizer, for `update`.
            in_flight: state from `empty_pipe`, or from the previous call.
            batch: the microbatches that enter, leaves (n, ...).
            key: random key for the stage with these microbatches.

        Raises:
            UserError: the number of microbatches differs from the number in the batch of `empty_pipe`.
        """
        entry_count, expected_count = _microbatch_count(batch), self._entry_count(in_flight)
        if entry_count != expected_count:
            raise UserError(
                f"got {entry_count} microbatches, expected {expected_count}, the number in the batch that `empty_pipe` "
                "was called with: pass as many in every call"
            )
        state = jax.tree.map(lambda leaf: leaf[0], in_flight)
        batch, key = self._vary((batch, key))
        microbatch_indices = state["tick"] // self.stream.pace + jnp.arange(entry_count)
        batch_slots = microbatch_indices % (self.stream.carried_count + entry_count)
        for name, entering_values in (("batch", batch), ("key", key)):
            state[name] = jax.tree.map(
                lambda pool, values: pool.at[batch_slots].set(values), state[name], entering_values
            )
        return self._run_ticks(
            parameters, optimizer, state, tick_count=self.stream.pace * entry_count, entry_count=entry_count
        )

    def drain(self, parameters: Any, optimizer: Any, in_flight: InFlightArrays) -> AdvanceResult:
        """Complete all microbatches that are in the pipe. The next call of `advance` needs a new `empty_pipe`.

        Args:
            parameters: the newest parameters.
            optimizer: state of the optimizer, for `update`.
            in_flight: state from the previous call.
        """
        state = jax.tree.map(lambda leaf: leaf[0], in_flight)
        tick_count = self.stream.tail_ticks - self.stream.pace
        return self._run_ticks(parameters, optimizer, state, tick_count=tick_count, entry_count=0)

    def _run_ticks(
        self, parameters: Any, optimizer: Any, state: InFlightArrays, *, tick_count: int, entry_count: int
    ) -> AdvanceResult:
        """Run `tick_count` ticks, in which `entry_count` microbatches enter. The state's pools already contain them."""
        stream = self.stream
        state = self._vary({**state, "parameters": parameters, "optimizer": optimizer})
        rows = lax.dynamic_index_in_dim(jnp.asarray(stream.rows), lax.axis_index(self.axis), 2, keepdims=False)
        # index of the first microbatch that does not exist yet
        microbatch_end = state["tick"] // stream.pace + entry_count
        period_ticks = len(stream.rows) - stream.ramp_ticks
        microbatch, key = (read(state[name], 0) for name in ("batch", "key"))
        passes = self._stage_passes(state["parameters"], microbatch, key)
        context = self._sample_context(state["parameters"], microbatch, key)
        sum_shapes = jax.eval_shape(passes.forward, context, self._vary(zeros(self.message_shapes)))[1]
        state["sums"] = self._vary(zeros(sum_shapes, jnp.float32))

        def run_tick(state: dict[str, Any], _: None) -> tuple[dict[str, Any], None]:
            """Run one tick: store the messages that have arrived, run the action, and exchange messages."""
            tick = state["tick"]
            steady_ticks = jnp.maximum(tick - stream.ramp_ticks, 0)
            row_index = jnp.where(tick < stream.ramp_ticks, tick, stream.ramp_ticks + steady_ticks % period_ticks)
            row: dict[str, Any] = dict(zip(COLUMNS, rows[row_index], strict=True))
            row["microbatch"] += stream.period_microbatches * (steady_ticks // period_ticks)
            code = jnp.where(row["microbatch"] < microbatch_end, row["kind"], 0)
            messages = state["messages"]
            for origin in STEP_FROM_ORIGIN:
                messages = write(messages, row[origin], state["boxes"][origin])
            action_state = {name: value for name, value in state.items() if name not in ("tick", "messages", "boxes")}

            def run_branch(action: Callable[..., tuple[Any, Any]], action_state: Any, messages: Any) -> Any:
                """Run an action, and return the new state and the message to send."""
                # each branch reads its own operands; otherwise a TPU would move the whole pool into its fast memory
                x = tree_or_zeros(lax.axis_index(self.axis) > 0, read(messages, row["x"]))
                g = tree_or_zeros(lax.axis_index(self.axis) < stream.ranks - 1, read(messages, row["g"]))
                return self._vary(action(passes, action_state, row, x, g))

            branches = [functools.partial(run_branch, action) for action in (_idle, self._forward, self._backward)]
            action_state, message = lax.switch(code, branches, action_state, messages)
            boxes = {origin: exchange(message, self.axis, stream.ranks, origin) for origin in STEP_FROM_ORIGIN}
            return self._vary({**action_state, "tick": tick + 1, "messages": messages, "boxes": boxes}), None

        last_state, _ = lax.scan(run_tick, state, None, length=tick_count)
        parameters, optimizer, sums = (last_state.pop(name) for name in ("parameters", "optimizer", "sums"))
        return AdvanceResult(parameters, optimizer, jax.tree.map(lambda leaf: leaf[None], last_state), sums)

    def _forward(self, passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
        """Run F. Return the state with the stash stored and the sums added, and the output: the message to send."""
        del g
        with jax.named_scope("pipeline_F"):
            y, sums, stash = passes.forward(self._row_context(state, row, self._weight_pair(state, row)), x)
        total_sums = jax.tree.map(lambda total, term: total + term.astype(total.dtype), state["sums"], sums)
        return {**state, "sums": total_sums, "kept": write(state["kept"], row["stash"], stash)}, y

    def _backward(self, passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
        """Run B. Return the state with the gradients added or applied, and the input's gradient, which is sent."""
        stage = lax.axis_index(self.axis)
        weight_pair = self._weight_pair(state, row)
        if self.remedies.correction is not None:
            delay = delay_of(self.stream.delays, stage)
            corrected_parameters = self.remedies.corrected(state["parameters"], state["change"], delay)
            weight_pair = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(corrected_parameters))
        with jax.named_scope("pipeline_B"):
            context = self._row_context(state, row, weight_pair)
            weight_gradients, shared_gradients, dx = passes.backward(context, x, read(state["kept"], row["stash"]), g)
        gradient_pair = gradient_arrays((weight_gradients, shared_gradients), weight_pair)
        gradient_increments = jax.tree.map(lambda leaf: leaf.astype(jnp.float32)[None], gradient_pair)
        if self.stream.group_size == 1:
            return self._updated_state(state, row, gradient_increments), dx
        summed_state = {**state, "gradients": jax.tree.map(jnp.add, state["gradients"], gradient_increments)}

        def apply_update(state: dict[str, Any]) -> dict[str, Any]:
            """Apply the update, and return the new state with its gradients set to zero."""
            new_state = self._updated_state(state, row, state["gradients"])
            return self._vary({**new_state, "gradients": jax.tree.map(jnp.zeros_like, new_state["gradients"])})

        return lax.cond(row["has_update"] == 1, apply_update, lambda state: self._vary(state), summed_state), dx

    def _updated_state(self, state: dict[str, Any], row: dict[str, Any], gradient_sums: Any) -> dict[str, Any]:
        """Update this stage with its gradients summed over the group, and return the new state."""
        at = UpdateAt(lax.axis_index(self.axis), row["microbatch"] // self.stream.group_size)
        old_parameters, delay = state["parameters"], delay_of(self.stream.delays, at.stage)
        with jax.named_scope("pipeline_U"):
            updated_parameters, optimizer = self.update(old_parameters, gradient_sums, state["optimizer"], at)
            new_parameters = self.remedies.rescheduled(old_parameters, updated_parameters, delay, at.index)
            new_state = {**state, "parameters": new_parameters, "optimizer": optimizer}
            if self.remedies.correction is not None:
                new_state["change"] = self.remedies.followed(state["change"], old_parameters, new_parameters, delay)
            if self._has_copies:
                weight_pair = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(new_parameters))
                new_state["versions"] = write(state["versions"], row["write_slot"], weight_pair)
        return new_state

    @property
    def _has_copies(self) -> bool:
        """Whether stages compute with copies of the parameters."""
        return self.stream.version_count > 1 or self.to_compute is not None

    def _compute_weights(self, parameters: Any) -> Any:
        """Return the weights that stages compute with, leaves (1, ...), for these parameters."""
        return parameters if self.to_compute is None else self.to_compute(parameters)

    def _version_pool(self, parameters: Any) -> Any:
        """Return a pool with a copy of the weights for each version, or `()` if stages need no copies."""
        if not self._has_copies:
            return ()
        weights = self._compute_weights(parameters)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, self.stream.version_count, 0), weights)

    def _weight_pair(self, state: dict[str, Any], row: dict[str, Any]) -> Any:
        """Return the pair (weights, shared) that the action of this row computes with. Its leaves have no first dim."""
        if self._has_copies:
            return read(state["versions"], row["read_slot"])
        return jax.tree.map(lambda leaf: leaf[0], state["parameters"])

    def _stage_passes(self, parameters: Any, microbatch: Any, key: Any) -> Any:
        """Return the stage's forward and backward: `FromInput` or `FromResiduals`, as the stream's stash requires."""
        if self.stream.stash == "input":
            return FromInput(self.stage, self._vary)
        context = self._sample_context(parameters, microbatch, key)
        return FromResiduals(self.stage, self._vary, context, self._vary(zeros(self.message_shapes)), is_split=False)

    def _sample_context(self, parameters: Any, microbatch: Any, key: Any) -> StageContext:
        """Return a context with arbitrary indices. It has the shapes of the contexts of all actions."""
        weights, shared = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(parameters))
        return self._vary(StageContext(weights, shared, microbatch, At(jnp.int32(0), jnp.int32(0)), key))

    def _row_context(self, state: dict[str, Any], row: dict[str, Any], weight_pair: Any) -> StageContext:
        """Return the context of this row's action, which computes with the pair `weight_pair` of (weights, shared)."""
        slot_count = jax.tree.leaves(state["batch"])[0].shape[0]
        microbatch, key = (read(state[name], row["microbatch"] % slot_count) for name in ("batch", "key"))
        at = At(lax.axis_index(self.axis), row["microbatch"] % (slot_count - self.stream.carried_count))
        weights, shared = weight_pair
        return self._vary(StageContext(weights, shared, microbatch, at, key))

    def _entry_count(self, in_flight: InFlightArrays) -> int:
        """Return the number of microbatches that enter in each call."""
        return jax.tree.leaves(in_flight["batch"])[0].shape[1] - self.stream.carried_count

    def _vary(self, tree: Any) -> Any:
        """Return a tree marked as varying over the manual axes."""
        return vary(tree, self.manual_axes)


def _idle(passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
    """Do nothing: return the state unchanged, and a message of zeros that no device reads."""
    del passes, row, g
    return state, jax.tree.map(jnp.zeros_like, x)


def _microbatch_count(batch: Any) -> int:
    """Return the number of microbatches of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]
