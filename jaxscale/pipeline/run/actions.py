"""The action of a device in a tick: a forward, a backward or half a backward, with the device's weights and slots."""

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
from jaxscale.pipeline.run.pools import (
    empty_pool,
    is_differentiable,
    read,
    read_in_place,
    tree_or_zeros,
    vary,
    write,
    zeros,
)
from jaxscale.pipeline.run.tables import IDLE, Tables

TableRow = dict[str, Any]
"""A device's row of the table: int32 scalars, by the names of the columns (`Tables.columns`)."""
CarriedState = dict[str, Any]
"""The values that actions change, by name.

`kept` is the pool of stashes, and `cut` is the pool of the values that are kept from I to W. `weights` and `shared` are
sums of gradients. `sums` adds up the stages' `sums`. In evaluation, the state has only `sums`."""


@dataclasses.dataclass(eq=False)
class Actions:
    """The actions of a table for one stage function.

    In the methods, x is the message from the previous stage, and g is the gradient from the next stage. `is_live` is a
    traced boolean: whether the device runs an action in this tick. `None` means that the device runs one.

    Args:
        tables: the schedule in ticks and slots.
        stage: stage function, as in `execute`.
        weights: weights of this device's chunks, leaves (v, ...), marked as varying over the manual axes.
        shared: weights that every stage may read, marked as varying.
        batch: microbatches, leaves (m, ...), marked as varying.
        key: random key for the stage, marked as varying.
        message_shapes: shapes and types of the message between stages.
        manual_axes: the manual axes of the surrounding `jax.shard_map`.
        readers: stages that read `shared`; `None`: all stages.
        hosted_names: names (`checkpoint_name`) of the residuals whose slots are in host memory.
        frozen: weights without gradients, leaves (v, ...), as in `execute`.
    """

    tables: Tables
    stage: StageFunction
    weights: Any
    shared: Any
    batch: Any
    key: Any
    message_shapes: Any
    manual_axes: Sequence[str]
    readers: Sequence[int] | None = None
    hosted_names: Collection[str] = ()
    frozen: Any = None

    def __post_init__(self) -> None:
        stages = range(self.tables.schedule.stages)
        self._is_reader = [self.readers is None or stage in self.readers for stage in stages]
        sample_row = {name: jnp.int32(0) for name in ("stage", "microbatch", "chunk")}
        context, x = self._vary((self._context(sample_row), zeros(self.message_shapes)))
        abstract_results = jax.eval_shape(lambda: self.stage(context[0], context[1], x, *context[2:]))
        abstract_output, abstract_objective, self._abstract_sums = abstract_results
        _check_stage(abstract_output, abstract_objective, self.message_shapes)
        if self.tables.stash == "residuals" and self.tables.has_backward:
            self._passes: Any = FromResiduals(
                self.stage,
                self._vary,
                context,
                x,
                is_split=self.tables.cut_slot_count > 0,
                hosted_names=self.hosted_names,
            )
        else:
            self._passes = FromInput(self.stage, self._vary)

    def initial_state(self) -> CarriedState:
        """Return the state before the first tick, with empty pools and zero sums."""
        state: CarriedState = {"sums": zeros(self._abstract_sums, jnp.float32)}
        if self.tables.has_backward:
            state["weights"] = zeros(self.weights, jnp.float32)
            state["shared"] = zeros(self.shared, jnp.float32)
            state["kept"] = empty_pool(self._passes.stash_shapes, self.tables.stash_slot_count, self._passes.is_hosted)
            state["cut"] = empty_pool(self._passes.cut_shapes, self.tables.cut_slot_count)
        return state

    def run_kind(self, code: int, state: CarriedState, row: TableRow, x: Any, g: Any) -> tuple[CarriedState, Any]:
        """Run the action of a tick that has only one kind, without branches. An idle device drops its results.

        Args:
            code: code of the tick's kind.
            state: state of this device.
            row: row of this device.
            x: the message in the slot of column `x`.
            g: the gradient in the slot of column `g`.

        Returns:
            (state, message): the new state, and the message to send.
        """
        # the inputs of idle devices are zeros, so that their results are finite where possible
        is_live = row["kind"] != IDLE
        return self._action(code, state, row, tree_or_zeros(is_live, x), tree_or_zeros(is_live, g), is_live)

    def run_switch(
        self, codes: Sequence[int], state: CarriedState, row: TableRow, messages: Any
    ) -> tuple[CarriedState, Any]:
        """Run the action of a tick with a branch for each kind. Each branch reads its own operands.

        Args:
            codes: codes of the kinds that occur in the table.
            state: state of this device.
            row: row of this device.
            messages: the pool of messages.

        Returns:
            (state, message): the new state, and the message to send.
        """

        def run_branch(code: int, state: CarriedState, messages: Any) -> tuple[CarriedState, Any]:
            """Run the action of kind `code`, and return the new state and the message to send."""
            x, g = (read(messages, row[name]) for name in ("x", "g"))
            return self._vary(self._action(code, state, row, x, g, None))

        branches = [functools.partial(run_branch, code) for code in codes]
        branch_of_code = [codes.index(code) if code in codes else 0 for code in range(1 + max(codes))]
        return lax.switch(jnp.asarray(branch_of_code)[row["kind"]], branches, state, messages)

    def _action(
        self, code: int, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any
    ) -> tuple[CarriedState, Any]:
        """Run an action of kind `code`, and return the new state and the message to send."""
        if code == IDLE:
            return state, jax.tree.map(jnp.zeros_like, x)
        kind, last_stage = KINDS[code - 1], self.tables.schedule.stages - 1
        run_action = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_half,
            Kind.W: self._weight_half,
        }[kind]
        with jax.named_scope(f"pipeline_{kind.value}"):
            x, g = tree_or_zeros(row["stage"] > 0, x), tree_or_zeros(row["stage"] < last_stage, g)
            return run_action(state, row, x, g, is_live)

    def _forward(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """Run F. Return the state with the stash stored and the sums added, and the output: the message to send."""
        del g
        y, sums, stash = self._passes.forward(self._context(row), x)
        new_state = {**state, "sums": jax.tree.map(_add, state["sums"], _zeros_if_idle(is_live, sums))}
        if "kept" in state:
            new_state["kept"] = self._write(state["kept"], row["residual"], stash, is_live)
        return new_state, y

    def _backward(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """Run B. Return the state with the gradients added, and the input's gradient: the message to send."""
        stash = read(state["kept"], row["residual"])

        def run_backward(sums: CarriedState, is_reader: bool) -> tuple[CarriedState, Any]:
            """Run the backward and return the new sums and the input's gradient; skip `shared` if not `is_reader`."""
            weight_gradients, shared_gradients, dx = self._passes.backward(self._context(row), x, stash, g)
            new_sums = self._add_weight_gradients(sums, row, weight_gradients, is_live)
            return (self._add_shared_gradients(new_sums, shared_gradients, is_live) if is_reader else new_sums), dx

        sums, dx = self._run_by_reader(
            run_backward, {name: state[name] for name in ("weights", "shared")}, row, is_live
        )
        return {**state, **sums}, dx

    def _input_half(self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any) -> tuple[CarriedState, Any]:
        """Run I. Return the state with the values for W stored, and the input's gradient: the message to send.

        The gradients of `shared` are added in I too.
        """
        stash = read(state["kept"], row["residual"])

        def run_half(sums: CarriedState, is_reader: bool) -> tuple[CarriedState, Any]:
            """Run I and return the new sums, and (input's gradient, values for W); skip `shared` if not `is_reader`."""
            shared_gradients, dx, cut = self._passes.input_half(self._context(row), x, stash, g)
            return (self._add_shared_gradients(sums, shared_gradients, is_live) if is_reader else sums), (dx, cut)

        sums, (dx, cut) = self._run_by_reader(run_half, {"shared": state["shared"]}, row, is_live)
        return {**state, **sums, "cut": self._write(state["cut"], row["cut"], cut, is_live)}, dx

    def _run_by_reader(
        self, run_pass: Callable[[CarriedState, bool], Any], sums: CarriedState, row: TableRow, is_live: Any
    ) -> Any:
        """Return `run_pass(sums, is_reader)`, where `is_reader` specifies whether the stage of the row reads `shared`.

        On stages that do not read `shared`, the gradients of `shared` are zeros as large as embedding and head. Making
        and adding these zeros would take longer than the stage. In a program without branches (`run_kind`), `is_reader`
        is always true.
        """
        if all(self._is_reader) or is_live is not None:
            return run_pass(sums, True)
        branches = [
            lambda sums, is_reader=is_reader: self._vary(run_pass(sums, is_reader)) for is_reader in (True, False)
        ]
        return lax.cond(jnp.asarray(self._is_reader)[row["stage"]], *branches, sums)

    def _weight_half(
        self, state: CarriedState, row: TableRow, x: Any, g: Any, is_live: Any
    ) -> tuple[CarriedState, Any]:
        """Run W. Return the state with the weight gradients added, and a message of zeros that no device reads."""
        stash, cut = read(state["kept"], row["residual"]), read(state["cut"], row["cut"])
        weight_gradients = self._passes.weight_half(self._context(row), x, stash, g, cut)
        return self._add_weight_gradients(state, row, weight_gradients, is_live), jax.tree.map(jnp.zeros_like, x)

    def _add_weight_gradients(self, state: CarriedState, row: TableRow, gradients: Any, is_live: Any) -> CarriedState:
        """Return the state with the gradients of a chunk's weights added to their sums."""

        def add(total: Any, gradient: Any, primal: Any) -> Any:
            """Return the leaf `total` of the sums with a gradient added to its chunk if `primal` is differentiable."""
            if not is_differentiable(primal):
                return total
            if total.shape[0] == 1:
                return _add(total, gradient[None])
            return write(total, row["chunk"], _add(read(total, row["chunk"]), gradient))

        return {
            **state,
            "weights": jax.tree.map(add, state["weights"], _zeros_if_idle(is_live, gradients), self.weights),
        }

    def _add_shared_gradients(self, state: CarriedState, gradients: Any, is_live: Any) -> CarriedState:
        """Return the state with the gradients of the shared weights added to their sums."""

        def add(total: Any, gradient: Any, primal: Any) -> Any:
            """Return the leaf `total` of the sums with a gradient added if the weight `primal` is differentiable."""
            return _add(total, gradient) if is_differentiable(primal) else total

        return {**state, "shared": jax.tree.map(add, state["shared"], _zeros_if_idle(is_live, gradients), self.shared)}

    def _write(self, pool: Any, slot: Any, value: Any, is_live: Any) -> Any:
        """Return the pool with a value written to a slot. An idle device writes back the old value."""
        if is_live is None:
            return write(pool, slot, value)
        return write(pool, slot, jax.tree.map(lambda new, old: jnp.where(is_live, new, old), value, read(pool, slot)))

    def _context(self, row: TableRow) -> StageContext:
        """Return the arguments of the stage function for this row, except the input."""
        at = At(row["stage"], row["microbatch"], read_in_place(self.frozen, row["chunk"]))
        microbatch, weights = read(self.batch, row["microbatch"]), read(self.weights, row["chunk"])
        return StageContext(weights, self.shared, microbatch, at, self.key)

    def _vary(self, tree: Any) -> Any:
        """Return a tree marked as varying over the manual axes."""
        return vary(tree, self.manual_axes)


def _add(total: Any, value: Any) -> Any:
    """Return the sum of `total` and `value`, in the dtype of `total`."""
    return total + value.astype(total.dtype)


def _zeros_if_idle(is_live: Any, tree: Any) -> Any:
    """Return the tree or, if the device is idle, zeros; `is_live` is as in `Actions`."""
    if is_live is None:
        return tree
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == jax.dtypes.float0 else jnp.where(is_live, leaf, 0), tree)


def _check_stage(abstract_output: Any, abstract_objective: Any, message_shapes: Any) -> None:
    """Raise UserError if a stage's message or objective has unexpected shapes or types.

    Args:
        abstract_output: shapes and types of the stage's output.
        abstract_objective: shape and type of the stage's objective.
        message_shapes: shapes and types of the messages between stages.
    """

    def describe(tree: Any) -> Any:
        """Return the tree with each leaf replaced by a text such as float32[2, 8]."""
        return jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tree)

    if describe(abstract_output) != describe(message_shapes):
        raise UserError(
            f"the stage sends {describe(abstract_output)}, but messages between stages are {describe(message_shapes)}: "
            "the output of a stage must have the shapes and types of its input; cast inside the stage"
        )
    if abstract_objective.shape or abstract_objective.dtype != jnp.float32:
        raise UserError(
            f"the stage's objective is {describe(abstract_objective)}, expected a float32 scalar, to be summed over "
            "microbatches"
        )
