"""The executor of asynchronous schedules: a pipeline that never drains, with the updates inside.

Like `execute.py`, it is one scan over the ticks of a table. This table has no end (`stream.py`); each call runs the
ticks in which its microbatches enter. A stage updates its own weights right after the backward that completes a group
of microbatches; slots keep the older weights that actions still need. A call returns the state between ticks
(`in_flight`) and the next call takes it, so nothing drains between training steps. A checkpoint of that state restores
the run exactly.

Every stage has its own copy of the shared weights (embedding, head) and updates it: only the first stage's embedding
and the last stage's head matter. So tied weights and norms over all stages (clipping) have no meaning, and the caller
refuses them.

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
from jaxscale.pipeline.run.pools import WAYS, empty_pool, exchange, gradients, read, vary, where, write, zeros
from jaxscale.pipeline.run.stream import COLUMNS, Stream

InFlightArrays = dict[str, Any]
"""The state between ticks on one device, every leaf with a first dim of 1: messages, batches, versions, sums."""


class UpdateAt(NamedTuple):
    """The stage and number of an update.

    Args:
        stage: number of the stage, int32, traced.
        number: number of earlier updates of the stage since the pipe was filled, int32, traced.
    """

    stage: Any
    number: Any


StageUpdate = Callable[[Any, Any, Any, UpdateAt], tuple[Any, Any]]
"""`update(parameters, gradients, optimizer, at) -> (parameters, optimizer)` of one stage; gradients are float32 sums
over the group of microbatches. It may reduce over manual axes other than the pipe's."""


class Advanced(NamedTuple):
    """The result of a call of `Asynchronous.advance` or `Asynchronous.drain`.

    Args:
        parameters: the newest parameters of this stage.
        optimizer: state of the stage's optimizer.
        in_flight: state between ticks, for the next call.
        sums: the stage's `sums`, added over this device's forwards in these ticks, of earlier calls' microbatches too.
    """

    parameters: Any
    optimizer: Any
    in_flight: InFlightArrays
    sums: Any


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """A stream, ready to run; its methods are called inside a `jax.shard_map` that is manual over `manual`.

    Parameters are a pair (weights, shared) of this device's stage, leaves (1, ...), and so are gradients. In the
    private methods, `row` is a device's row of the table, int32 scalars by names in `COLUMNS`; x is the message from
    the previous stage, and g the gradient from the next one.

    Args:
        stream: the schedule.
        stage: stage function, as in `execute`; its weights and shared weights have no first dim, and `at.microbatch`
            counts within a call.
        update: update of one stage.
        x: shapes and types of the message between stages.
        compute: function from parameters to the weights that stages compute with, such as a cast; `None`: stages
            compute with the parameters themselves.
        remedies: PipeMare's remedies against stale weights.
        axis: the mesh axis of the stages.
        manual: all manual axes.

    Raises:
        UserError: the remedies have a correction, but the schedule's backwards use the weights of their forwards.
    """

    stream: Stream
    stage: StageFunction
    update: StageUpdate
    x: Any
    compute: Callable[[Any], Any] | None = None
    remedies: Remedies = dataclasses.field(default_factory=Remedies)
    axis: str = "pipe"
    manual: tuple[str, ...] = ("pipe",)

    def __post_init__(self) -> None:
        if self.remedies.correction is not None and not self.stream.newest:
            raise UserError(
                f"schedule {self.stream.name}: got a correction of the weights of backwards, expected none: its "
                "backwards use the weights of their forwards. Only pipemare takes a correction"
            )

    def fill(self, parameters: Any, batch: Any, key: Any) -> InFlightArrays:
        """Make the state of an empty pipe, for calls with batches like this one.

        Args:
            parameters: the initial parameters.
            batch: a batch like those of the calls, leaves (n, ...) for n microbatches; only its shapes are read.
            key: a key like those of the calls; only its type is read.
        """
        parameters, batch, key = self._vary((parameters, batch, key))
        microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
        slot_count = self.stream.carried + _microbatches(batch)
        state: InFlightArrays = {
            "tick": jnp.int32(0),
            "messages": empty_pool(self.x, self.stream.messages + 1),
            # messages that have arrived, and enter their slots in the next tick
            "boxes": {way: zeros(self.x) for way in WAYS},
            "kept": empty_pool(self._stage_passes(parameters, microbatch, key).kept, self.stream.kept),
            "batch": empty_pool(microbatch, slot_count),
            "key": jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slot_count, *leaf.shape)), key),
            "versions": self._copies(parameters),
            "gradients": zeros(parameters, jnp.float32) if self.stream.group > 1 else (),
            "change": () if self.remedies.correction is None else zeros(parameters, jnp.float32),
        }
        return jax.tree.map(lambda leaf: leaf[None], self._vary(state))

    def advance(self, parameters: Any, optimizer: Any, in_flight: InFlightArrays, batch: Any, key: Any) -> Advanced:
        """Let n microbatches enter, and run the ticks until the next may enter.

        Args:
            parameters: the newest parameters.
            optimizer: state of the optimizer, for `update`.
            in_flight: state from `fill`, or from the previous call.
            batch: the microbatches that enter, leaves (n, ...).
            key: random key for the stage with these microbatches.

        Raises:
            UserError: the number of microbatches differs from that of `fill`.
        """
        microbatches, expected_count = _microbatches(batch), self._microbatches(in_flight)
        if microbatches != expected_count:
            raise UserError(f"got {microbatches} microbatches, expected {expected_count}, as when the pipe was filled")
        state = jax.tree.map(lambda leaf: leaf[0], in_flight)
        batch, key = self._vary((batch, key))
        microbatch_numbers = state["tick"] // self.stream.pace + jnp.arange(microbatches)
        batch_slots = microbatch_numbers % (self.stream.carried + microbatches)
        for name, arrivals in (("batch", batch), ("key", key)):
            state[name] = jax.tree.map(lambda pool, new: pool.at[batch_slots].set(new), state[name], arrivals)
        return self._run(parameters, optimizer, state, microbatches, ticks=self.stream.pace * microbatches, enters=True)

    def drain(self, parameters: Any, optimizer: Any, in_flight: InFlightArrays) -> Advanced:
        """Run all microbatches in the pipe to their end; `fill` it again before the next `advance`.

        The arguments are those of `advance`.
        """
        state = jax.tree.map(lambda leaf: leaf[0], in_flight)
        ticks = self.stream.tail - self.stream.pace
        return self._run(parameters, optimizer, state, self._microbatches(in_flight), ticks=ticks, enters=False)

    def _run(
        self, parameters: Any, optimizer: Any, state: InFlightArrays, microbatches: int, *, ticks: int, enters: bool
    ) -> Advanced:
        """Run `ticks` ticks; if `enters`, a call's `microbatches` new microbatches are already in the state."""
        stream = self.stream
        state = self._vary({**state, "parameters": parameters, "optimizer": optimizer})
        rows = lax.dynamic_index_in_dim(jnp.asarray(stream.rows), lax.axis_index(self.axis), 2, keepdims=False)
        # number of the first microbatch that does not exist yet
        microbatch_end = state["tick"] // stream.pace + (microbatches if enters else 0)
        period = len(stream.rows) - stream.beginning
        microbatch, key = (read(state[name], 0) for name in ("batch", "key"))
        passes = self._stage_passes(state["parameters"], microbatch, key)
        context = self._sample_context(state["parameters"], microbatch, key)
        sums = jax.eval_shape(passes.forward, context, self._vary(zeros(self.x)))[1]
        state["sums"] = self._vary(zeros(sums, jnp.float32))

        def tick(state: dict[str, Any], _: None) -> tuple[dict[str, Any], None]:
            """Run one tick: store the messages that arrived, run the action, and exchange messages."""
            now = state["tick"]
            steady_ticks = jnp.maximum(now - stream.beginning, 0)
            row_index = jnp.where(now < stream.beginning, now, stream.beginning + steady_ticks % period)
            row: dict[str, Any] = dict(zip(COLUMNS, rows[row_index], strict=True))
            row["microbatch"] += stream.turns * (steady_ticks // period)
            kind = jnp.where(row["microbatch"] < microbatch_end, row["kind"], 0)
            messages = state["messages"]
            for way in WAYS:
                messages = write(messages, row[way], state["boxes"][way])
            carry = {name: value for name, value in state.items() if name not in ("tick", "messages", "boxes")}

            def branch(action: Callable[..., tuple[Any, Any]], state: Any, messages: Any) -> Any:
                """Run an action, and return the new state and the message to send."""
                # each branch reads its own operands, or a TPU moves the pool into its fast memory for all of them
                x = where(lax.axis_index(self.axis) > 0, read(messages, row["x"]))
                g = where(lax.axis_index(self.axis) < stream.ranks - 1, read(messages, row["g"]))
                return self._vary(action(passes, state, row, x, g))

            branches = [functools.partial(branch, action) for action in (_idle, self._forward, self._backward)]
            carry, message = lax.switch(kind, branches, carry, messages)
            boxes = {way: exchange(message, self.axis, stream.ranks, way) for way in WAYS}
            return self._vary({**carry, "tick": now + 1, "messages": messages, "boxes": boxes}), None

        state, _ = lax.scan(tick, state, None, length=ticks)
        parameters, optimizer, sums = (state.pop(name) for name in ("parameters", "optimizer", "sums"))
        return Advanced(parameters, optimizer, jax.tree.map(lambda leaf: leaf[None], state), sums)

    def _forward(self, passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
        """F: return the state with the stash kept and the sums added, and the output, which is the message to send."""
        del g
        with jax.named_scope("pipeline_F"):
            y, sums, stash = passes.forward(self._row_context(state, row, self._weights_of(state, row)), x)
        total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), state["sums"], sums)
        return {**state, "sums": total, "kept": write(state["kept"], row["kept"], stash)}, y

    def _backward(self, passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
        """B: return the state with this stage's gradients added or applied, and the input's gradient as the message."""
        stage = lax.axis_index(self.axis)
        weights = self._weights_of(state, row)
        if self.remedies.correction is not None:
            delay = delay_of(self.stream.delays, stage)
            corrected = self.remedies.corrected(state["parameters"], state["change"], delay)
            weights = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(corrected))
        with jax.named_scope("pipeline_B"):
            context = self._row_context(state, row, weights)
            weight_gradients, shared_gradients, dx = passes.backward(context, x, read(state["kept"], row["kept"]), g)
        gradient_pair = gradients((weight_gradients, shared_gradients), weights)
        increments = jax.tree.map(lambda leaf: leaf.astype(jnp.float32)[None], gradient_pair)
        if self.stream.group == 1:
            return self._apply_update(state, row, increments), dx
        state = {**state, "gradients": jax.tree.map(jnp.add, state["gradients"], increments)}

        def update(state: dict[str, Any]) -> dict[str, Any]:
            """Apply the update, and return the new state, with zero gradients."""
            new_state = self._apply_update(state, row, state["gradients"])
            return self._vary({**new_state, "gradients": jax.tree.map(jnp.zeros_like, new_state["gradients"])})

        return lax.cond(row["updates"] == 1, update, lambda state: self._vary(state), state), dx

    def _apply_update(self, state: dict[str, Any], row: dict[str, Any], totals: Any) -> dict[str, Any]:
        """Update this stage by the totals of its gradients, and return the new state."""
        stage, number = lax.axis_index(self.axis), row["microbatch"] // self.stream.group
        old_parameters, delay = state["parameters"], delay_of(self.stream.delays, stage)
        with jax.named_scope("pipeline_U"):
            new_parameters, optimizer = self.update(old_parameters, totals, state["optimizer"], UpdateAt(stage, number))
            new_parameters = self.remedies.rescheduled(old_parameters, new_parameters, delay, number)
            state = {**state, "parameters": new_parameters, "optimizer": optimizer}
            if self.remedies.correction is not None:
                state["change"] = self.remedies.followed(state["change"], old_parameters, new_parameters, delay)
            if self._has_copies:
                copy = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(new_parameters))
                state["versions"] = write(state["versions"], row["writes"], copy)
        return state

    @property
    def _has_copies(self) -> bool:
        """Whether stages compute with copies of the parameters."""
        return self.stream.versions > 1 or self.compute is not None

    def _compute_weights(self, parameters: Any) -> Any:
        """Return the weights that stages compute with, made from these parameters."""
        return parameters if self.compute is None else self.compute(parameters)

    def _copies(self, parameters: Any) -> Any:
        """Make a pool with as many copies of the weights as there are versions; empty if stages need no copies."""
        if not self._has_copies:
            return ()
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, self.stream.versions, 0), self._compute_weights(parameters))

    def _weights_of(self, state: dict[str, Any], row: dict[str, Any]) -> Any:
        """Return the pair (weights, shared) for the action of this row."""
        if self._has_copies:
            return read(state["versions"], row["reads"])
        return jax.tree.map(lambda leaf: leaf[0], state["parameters"])

    def _stage_passes(self, parameters: Any, microbatch: Any, key: Any) -> Any:
        """Make the forward and backward of the stage for the stream's stash, `FromInput` or `FromResiduals`."""
        if self.stream.stash == "input":
            return FromInput(self.stage, self._vary)
        context = self._sample_context(parameters, microbatch, key)
        return FromResiduals(self.stage, self._vary, context, self._vary(zeros(self.x)), split=False)

    def _sample_context(self, parameters: Any, microbatch: Any, key: Any) -> StageContext:
        """Return the context of a sample action, for its shapes."""
        weights, shared = jax.tree.map(lambda leaf: leaf[0], self._compute_weights(parameters))
        return self._vary(StageContext(weights, shared, microbatch, At(jnp.int32(0), jnp.int32(0)), key))

    def _row_context(self, state: dict[str, Any], row: dict[str, Any], weight_pair: Any) -> StageContext:
        """Return the context of the action of this row, from its pair (weights, shared)."""
        slot_count = jax.tree.leaves(state["batch"])[0].shape[0]
        microbatch, key = (read(state[name], row["microbatch"] % slot_count) for name in ("batch", "key"))
        at = At(lax.axis_index(self.axis), row["microbatch"] % (slot_count - self.stream.carried))
        weights, shared = weight_pair
        return self._vary(StageContext(weights, shared, microbatch, at, key))

    def _microbatches(self, in_flight: InFlightArrays) -> int:
        """Return the number of microbatches that enter with each call."""
        return jax.tree.leaves(in_flight["batch"])[0].shape[1] - self.stream.carried

    def _vary(self, tree: Any) -> Any:
        """Mark a tree as varying over the manual axes."""
        return vary(tree, self.manual)


def _idle(passes: Any, state: dict[str, Any], row: dict[str, Any], x: Any, g: Any) -> tuple[Any, Any]:
    """Idle: return the state unchanged, and a message of zeros, which no device reads."""
    del passes, row, g
    return state, jax.tree.map(jnp.zeros_like, x)


def _microbatches(batch: Any) -> int:
    """Return the number of microbatches of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]
