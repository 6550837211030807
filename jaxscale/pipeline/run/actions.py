"""The actions of a device in a tick: a forward, a backward or half of a backward, on its weights, slots and sums."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import UserError
from jaxscale.pipeline.action import KINDS, Kind
from jaxscale.pipeline.run.passes import At, FromInput, FromResiduals, StageContext, StageFunction
from jaxscale.pipeline.run.pools import empty_pool, is_differentiable, read, read_in_place, vary, where, write, zeros
from jaxscale.pipeline.run.tables import IDLE, Tables

TableRow = dict[str, Any]
"""A device's row of the table: int32 scalars by name of the column, which is one of `Tables.columns`."""
CarriedState = dict[str, Any]
"""The values that actions change, by name: `kept` and `cut` (pools), `weights` and `shared` (gradients), `sums`."""


@dataclasses.dataclass(eq=False)
class Actions:
    """The actions of a table for one stage function.

    In the methods, x is the message to the stage from the previous one, and g the gradient from the next one. `is_live`
    is a traced boolean, whether the device works in this tick; `None`: it always works.

    Args:
        tables: the schedule, with the number of slots.
        stage: stage function, as in `execute`.
        weights: weights of this device's chunks, leaves (v, ...), marked as varying over the manual axes.
        shared: weights that every stage may read, marked as varying.
        batch: microbatches, leaves (m, ...), marked as varying.
        key: random key for the stage, marked as varying.
        x: shapes and types of the message between stages.
        manual: the manual axes.
        readers: stages that read `shared`; `None`: all may.
        hosted: names of residuals whose slots are in host memory.
        frozen: weights without gradients, leaves (v, ...), as in `execute`.
    """

    tables: Tables
    stage: StageFunction
    weights: Any
    shared: Any
    batch: Any
    key: Any
    x: Any
    manual: Sequence[str]
    readers: Sequence[int] | None = None
    hosted: Collection[str] = ()
    frozen: Any = None

    def __post_init__(self) -> None:
        stages = range(self.tables.schedule.stages)
        self._reads_shared = [self.readers is None or stage in self.readers for stage in stages]
        first_row = {name: jnp.int32(0) for name in ("stage", "microbatch", "chunk")}
        context, x = self._vary((self._context(first_row), zeros(self.x)))
        message, objective, self._sums = jax.eval_shape(lambda: self.stage(context[0], context[1], x, *context[2:]))
        _check(message, objective, self.x)
        if self.tables.stash == "residuals" and self.tables.backward:
            split = self.tables.cuts > 0
            self._passes: Any = FromResiduals(self.stage, self._vary, context, x, split=split, hosted=self.hosted)
        else:
            self._passes = FromInput(self.stage, self._vary)

    def start(self) -> CarriedState:
        """Return the state with empty pools and zero sums."""
        state: CarriedState = {"sums": zeros(self._sums, jnp.float32)}
        if self.tables.backward:
            state["weights"] = zeros(self.weights, jnp.float32)
            state["shared"] = zeros(self.shared, jnp.float32)
            state["kept"] = empty_pool(self._passes.kept, self.tables.residuals, self._passes.hosted)
            state["cut"] = empty_pool(self._passes.cut, self.tables.cuts)
        return state

    def run_kind(self, kind: int, state: CarriedState, row: TableRow, x: Any, g: Any) -> tuple[CarriedState, Any]:
        """Run the action of a tick of one kind, without a branch: an idle device drops its results.

        Args:
            kind: code of the tick's kind.
            state: state of this device.
            row: row of this device.
            x: the message in the slot of column `x`.
            g: the message in the slot of column `g`.

        Returns:
            The state, and the message to send.
        """
        # the inputs of idle devices are zeros, so that their results are finite where possible
        is_live = row["kind"] != IDLE
        return self._action(kind, state, row, where(is_live, x), where(is_live, g), is_live)

    def run_switch(
        self, kinds: Sequence[int], state: CarriedState, row: TableRow, messages: Any
    ) -> tuple[CarriedState, Any]:
        """Run the action of a tick, by a branch for each kind; each branch reads its own operands.

        Args:
            kinds: codes of the kinds that occur in the table.
            state: state of this device.
            row: row of this device.
            messages: the pool of messages.

        Returns:
            The state, and the message to send.
        """

        def branch(kind: int, state: CarriedState, messages: Any) -> tuple[CarriedState, Any]:
            """Run the action of one kind, and return the state and the message to send."""
            x, g = (read(messages, row[name]) for name in ("x", "g"))
            return self._vary(self._action(kind, state, row, x, g, None))

        branches = [functools.partial(branch, kind) for kind in kinds]
        branch_of_kind = [kinds.index(kind) if kind in kinds else 0 for kind in range(1 + max(kinds))]
        return lax.switch(jnp.asarray(branch_of_kind)[row["kind"]], branches, state, messages)

    def _action(
        self, code: int, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any
    ) -> tuple[CarriedState, Any]:
        """Run an action of the kind with this code, and return the state and the message to send."""
        if code == IDLE:
            return state, jax.tree.map(jnp.zeros_like, x)
        kind, last_stage = KINDS[code - 1], self.tables.schedule.stages - 1
        run = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._i_half, Kind.W: self._w_half}[kind]
        with jax.named_scope(f"pipeline_{kind.value}"):
            return run(state, row, where(row["stage"] > 0, x), where(row["stage"] < last_stage, g), is_live)

    def _forward(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """F: return the state with the stash kept and the sums added, and the output, which is the message to send."""
        del g
        y, sums, stash = self._passes.forward(self._context(row), x)
        new_state = {**state, "sums": jax.tree.map(_add, state["sums"], _masked(is_live, sums))}
        if "kept" in state:
            new_state["kept"] = self._write(state["kept"], row["residual"], stash, is_live)
        return new_state, y

    def _backward(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """B: return the state with the gradients of all weights added, and the input's gradient as the message."""
        stash = read(state["kept"], row["residual"])

        def run(sums: CarriedState, reads: bool) -> tuple[CarriedState, Any]:
            """Return sums with gradients added, those of `shared` only if `reads`, and the gradient of the input."""
            weight_gradients, shared_gradients, dx = self._passes.backward(self._context(row), x, stash, g)
            sums = self._add_weights(sums, row, weight_gradients, is_live)
            return (self._add_shared(sums, shared_gradients, is_live) if reads else sums), dx

        sums, dx = self._with_shared(run, {name: state[name] for name in ("weights", "shared")}, row, is_live)
        return {**state, **sums}, dx

    def _i_half(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """I: return the state with the values for W kept and gradients of `shared` added, and the input's gradient."""
        stash = read(state["kept"], row["residual"])

        def run(sums: CarriedState, reads: bool) -> tuple[CarriedState, Any]:
            """Return sums, with gradients of `shared` added only if `reads`, and (gradient of the input, cut)."""
            shared_gradients, dx, cut = self._passes.input_half(self._context(row), x, stash, g)
            return (self._add_shared(sums, shared_gradients, is_live) if reads else sums), (dx, cut)

        sums, (dx, cut) = self._with_shared(run, {"shared": state["shared"]}, row, is_live)
        return {**state, **sums, "cut": self._write(state["cut"], row["cut"], cut, is_live)}, dx

    def _with_shared(
        self, run: Callable[[CarriedState, bool], Any], sums: CarriedState, row: TableRow, is_live: Any
    ) -> Any:
        """Call `run(sums, reads)` with `reads` true only on stages that read `shared`, and return its result.

        On other stages the gradients of `shared` are zeros as large as embedding and head, which would take longer to
        make and add than the stage. In a program without branches (`run_kind`) `reads` is true on every stage.
        """
        if all(self._reads_shared) or is_live is not None:
            return run(sums, True)
        branches = [lambda sums, reads=reads: self._vary(run(sums, reads)) for reads in (True, False)]
        return lax.cond(jnp.asarray(self._reads_shared)[row["stage"]], *branches, sums)

    def _w_half(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """W: return the state with the gradients of the weights added, and zeros, a message that no device reads."""
        stash, cut = read(state["kept"], row["residual"]), read(state["cut"], row["cut"])
        weight_gradients = self._passes.weight_half(self._context(row), x, stash, g, cut)
        return self._add_weights(state, row, weight_gradients, is_live), jax.tree.map(jnp.zeros_like, x)

    def _add_weights(self, state: CarriedState, row: TableRow, gradients: Any, is_live: Any) -> CarriedState:
        """Return the state with gradients of the weights added to the sums of their chunk."""

        def add(total: Any, gradient: Any, primal: Any) -> Any:
            """Return a leaf of the sums with a gradient added at the chunk, if the weight `primal` has gradients."""
            if not is_differentiable(primal):
                return total
            if total.shape[0] == 1:
                return _add(total, gradient[None])
            return write(total, row["chunk"], _add(read(total, row["chunk"]), gradient))

        return {**state, "weights": jax.tree.map(add, state["weights"], _masked(is_live, gradients), self.weights)}

    def _add_shared(self, state: CarriedState, gradients: Any, is_live: Any) -> CarriedState:
        """Return the state with gradients of the shared weights added to their sums."""

        def add(total: Any, gradient: Any, primal: Any) -> Any:
            return _add(total, gradient) if is_differentiable(primal) else total

        return {**state, "shared": jax.tree.map(add, state["shared"], _masked(is_live, gradients), self.shared)}

    def _write(self, pool: Any, slot: Any, value: Any, is_live: Any) -> Any:
        """Return the pool with a value in a slot; an idle device writes back the old value."""
        if is_live is not None:
            value = jax.tree.map(lambda new, old: jnp.where(is_live, new, old), value, read(pool, slot))
        return write(pool, slot, value)

    def _context(self, row: TableRow) -> StageContext:
        """Return the arguments of the stage in this row."""
        at = At(row["stage"], row["microbatch"], read_in_place(self.frozen, row["chunk"]))
        microbatch, weights = read(self.batch, row["microbatch"]), read(self.weights, row["chunk"])
        return StageContext(weights, self.shared, microbatch, at, self.key)

    def _vary(self, tree: Any) -> Any:
        """Mark a tree as varying over the manual axes."""
        return vary(tree, self.manual)


def _add(total: Any, value: Any) -> Any:
    """Add a value of any type to a sum, in the type of the sum."""
    return total + value.astype(total.dtype)


def _masked(is_live: Any, tree: Any) -> Any:
    """Return the tree, or zeros if the device is idle; with `is_live` `None` it is never idle."""
    if is_live is None:
        return tree
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jax.dtypes.float0 else jnp.where(is_live, leaf, 0), tree)


def _check(message: Any, objective: Any, x: Any) -> None:
    """Raise an error if a stage's message or objective has another shape or type than expected."""

    def describe(tree: Any) -> Any:
        """Return the tree with a text for each leaf, such as float32[2, 8]."""
        return jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tree)

    if describe(message) != describe(x):
        raise UserError(
            f"the stage sends {describe(message)}, but messages between stages are {describe(x)}: a stage must return "
            "the shapes and types that it takes; cast inside the stage"
        )
    if objective.shape or objective.dtype != jnp.float32:
        raise UserError(
            f"the stage's objective is {describe(objective)}, expected a float32 scalar, to be summed over microbatches"
        )
