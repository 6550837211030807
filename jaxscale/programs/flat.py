"""A traced function as one flat list of operations, from which the function's memory is estimated.

Calls (`jit`, `checkpoint`, custom derivatives) are inlined, and operations that no result needs are dropped, as a
compiler would do. The body of a loop remains a separate program. Values are numbered; their abstract values and names
are stored beside the list.

The `shard_map` of a pipelined step, and the one that computes a gradient per replica, are inlined too. At its borders,
the operation "enter" returns one device's part of an array, and "leave" returns the whole array, made of the parts of
all devices. A `cond` of a pipelined step has a program for each branch; any other `cond` is replaced by its longest
branch.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from jaxscale.compat import scan_counts
from jaxscale.programs.walk import Constant, evaluate, live_steps, open_jaxpr

T = TypeVar("T")
Atom = int | Constant
"""The number of a value, or a literal."""

CALLEE_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the parameters that contain the program of a call."""

VIEWS = (
    "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast",
    "enter", "leave",
)  # fmt: skip
"""Operations that leave the bytes of their operand unchanged."""

LOOPS = ("scan", "while")
"""Primitives that run a loop."""

SLICING = ("slice", "dynamic_slice", "squeeze", "lt", "add", "select_n")
"""Operations into which JAX translates a slice by index; some of them convert a negative index."""

PIPE = "pipe"
"""Mesh axis over which a pipeline's stages are placed."""

REPLICA = "replica"
"""Mesh axis over which a gradient codec reduces gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a flat program.

    Args:
        kind: name of the primitive; "enter" or "leave" at the borders of an inlined `shard_map`.
        inputs: number of each operand; `None` for a literal.
        outputs: number of each result.
        params: parameters of the primitive.
        is_backward: whether the operation belongs to the backward pass.
        equation: the equation of the jaxpr, with its parameters and source.
        literals: operands that are literals, by their index among the inputs.
        loop_body: program of the loop's body; `None` if the operation is not a loop.
        branches: branches of a `cond` of a pipelined step.
        manual_axes: mesh axes along which shapes are those of one device, because a `shard_map` was inlined.
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    is_backward: bool = False
    equation: Any = None
    literals: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    loop_body: "FlatProgram | None" = None
    branches: "tuple[FlatProgram, ...]" = ()
    manual_axes: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """Source line of the operation, such as "file.py:12 (function)"."""
        from jax.extend.source_info_util import summarize

        return "" if self.equation is None else summarize(self.equation.source_info).rpartition("/")[2]


@dataclasses.dataclass(eq=False)
class FlatProgram:
    """A program as a list of operations.

    Args:
        inputs: numbers of the arguments, then of the constants.
        outputs: number of each result; `None` for a literal.
        operations: the operations, in the order in which they run.
        avals: abstract value (shape and type) of each value, by the value's number.
        names: the model's name (`checkpoint_name`) of each named value, by the value's number.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    operations: list[Operation]
    avals: dict[int, Any]
    names: dict[int, str]

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """The indices of the operations that read each value, in order; a value that nothing reads has no entry."""
        reader_indices_by_value: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for value in operation.inputs:
                if value is not None:
                    reader_indices_by_value.setdefault(value, []).append(index)
        return reader_indices_by_value


def flatten(jaxpr: Any, manual_axes: frozenset[str] = frozenset()) -> FlatProgram:
    """Return the flat program of a jaxpr, open or closed.

    Args:
        jaxpr: the jaxpr of a function.
        manual_axes: mesh axes that are already manual where the function is called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) + 1))(1.0)
        >>> [operation.kind for operation in flatten(jaxpr).operations]
        ['sin', 'add']
    """
    return _Flattener(manual_axes).program(jaxpr)


def loop_parts(operation: Operation, entries: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Split a sequence with one entry for each operand of a loop, such as the operands' placements.

    Args:
        operation: a scan or a while loop.
        entries: one entry for each operand.

    Returns:
        A tuple: the entries of the body's constants, of the initial state, and of the scanned arrays.
    """
    if operation.kind == "scan":
        const_count, carry_count = scan_counts(operation.params)
        scanned_start = const_count + carry_count
        return entries[:const_count], entries[const_count:scanned_start], entries[scanned_start:]
    # the operands of a while loop are the constants of its condition, those of its body, and the initial state
    cond_const_count, body_const_count = operation.params["cond_nconsts"], operation.params["body_nconsts"]
    state_start = cond_const_count + body_const_count
    return entries[cond_const_count:state_start], entries[state_start:], ()


def carries(operation: Operation) -> tuple[int | None, ...]:
    """Return the numbers of the values that are a loop's initial state; `None` for a literal."""
    return tuple(loop_parts(operation, operation.inputs)[1])


class _Flattener:
    """A collector of the operations of one flat program.

    Attributes:
        manual_axes: mesh axes along which the equations that are being appended have shapes of one device.
        avals, names, operations: the fields of the flat program, as far as they have been collected.
        constants: numbers of the constants of all inlined jaxprs.
    """

    def __init__(self, manual_axes: frozenset[str]) -> None:
        self.manual_axes = manual_axes
        self.avals: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.operations: list[Operation] = []
        self.constants: list[int] = []

    def program(self, jaxpr: Any) -> FlatProgram:
        """Return the flat program of a jaxpr."""
        opened_jaxpr = open_jaxpr(jaxpr)
        self.constants += self._new_values(opened_jaxpr.constvars)
        input_numbers = self._new_values(opened_jaxpr.invars)
        result_atoms = self._append_equations(opened_jaxpr, [*self.constants, *input_numbers], is_backward=False)
        output_numbers = tuple(_value_number(atom) for atom in result_atoms)
        # a kernel that writes to references has no results
        operations, _ = live_steps(self.operations, output_numbers, lambda operation: not operation.outputs)
        return FlatProgram((*input_numbers, *self.constants), output_numbers, operations, self.avals, self.names)

    def _new_values(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """Give numbers to the variables of a jaxpr; return the numbers."""
        first_number = len(self.avals)
        for value_number, var in enumerate(variables, first_number):
            self.avals[value_number] = var.aval
        return tuple(range(first_number, len(self.avals)))

    def _append_operation(
        self,
        kind: str,
        eqn: Any,
        operands: Sequence[Atom],
        result_vars: Sequence[Any],
        is_backward: bool,
        **fields: Any,
    ) -> tuple[int, ...]:
        """Append an operation for an equation; return the numbers of its results.

        Args:
            kind: kind of the operation.
            eqn: the equation.
            operands: operands of the operation.
            result_vars: a variable with the shape and type of each result.
            is_backward: whether the operation belongs to the backward pass.
            fields: further fields of the `Operation`; `params` are those of the equation by default.
        """
        inputs, outputs = tuple(map(_value_number, operands)), self._new_values(result_vars)
        literals = {index: atom.value for index, atom in enumerate(operands) if isinstance(atom, Constant)}
        params = fields.pop("params", eqn.params)
        operation = Operation(
            kind, inputs, outputs, params, is_backward, eqn, literals=literals, manual_axes=self.manual_axes, **fields
        )
        self.operations.append(operation)
        return outputs

    def _append_equations(self, jaxpr: Any, inputs: Sequence[Atom], is_backward: bool) -> list[Atom]:
        """Append the operations of an open jaxpr; return its results.

        `is_backward` is true if the jaxpr is called in the backward pass.
        """

        def append_equation(eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
            """Append the operations of an equation; return its results."""
            is_backward_eqn = is_backward or "transpose" in str(eqn.source_info.name_stack)
            kind = eqn.primitive.name
            if kind == "name":
                if isinstance(operands[0], int):
                    self.names[operands[0]] = eqn.params["name"]
                return operands
            if kind == "layout_constraint":
                return operands
            if kind == "shard_map" and _is_model_region(eqn.params["newly_manual_axes"]):
                return self._append_region(eqn, operands, is_backward_eqn)
            kept_primitives = ("pallas_call", "shard_map", *(("cond",) if PIPE in self.manual_axes else ()))
            callee_jaxpr = None if kind in (*LOOPS, *kept_primitives) else _callee_jaxpr(eqn)
            if callee_jaxpr is not None:
                constants = self._new_values(callee_jaxpr.constvars)
                self.constants += constants
                # without the first operand of a `cond`, which selects the branch
                arguments = operands[len(operands) - len(callee_jaxpr.invars) :]
                return self._append_equations(callee_jaxpr, [*constants, *arguments], is_backward_eqn)
            body_jaxpr = eqn.params.get("jaxpr" if kind == "scan" else "body_jaxpr") if kind in LOOPS else None
            loop_body = None if body_jaxpr is None else flatten(body_jaxpr, self.manual_axes)
            branch_jaxprs = eqn.params["branches"] if kind == "cond" else ()
            branches = tuple(_with_late_slices(flatten(branch, self.manual_axes)) for branch in branch_jaxprs)
            return self._append_operation(
                kind, eqn, operands, eqn.outvars, is_backward_eqn, loop_body=loop_body, branches=branches
            )

        return evaluate(jaxpr, inputs, append_equation)

    def _append_region(self, eqn: Any, operands: Sequence[Atom], is_backward: bool) -> list[Atom]:
        """Append the operations of a `shard_map`, between "enter" and "leave" operations; return its results."""
        region_jaxpr = open_jaxpr(eqn.params["jaxpr"])
        outer_manual_axes, self.manual_axes = self.manual_axes, frozenset(eqn.params["newly_manual_axes"])

        def append_each(kind: str, atoms: Sequence[Atom], result_vars: Sequence[Any], specs: Any) -> list[Atom]:
            """Append an operation of this kind for each value, with the value's spec; return the results.

            Literals are returned unchanged. `result_vars` has the variable of each result.
            """
            return [
                atom
                if isinstance(atom, Constant)
                else self._append_operation(kind, eqn, [atom], [var], is_backward, params={"spec": spec})[0]
                for atom, var, spec in zip(atoms, result_vars, specs, strict=True)
            ]

        constants = self._new_values(region_jaxpr.constvars)
        self.constants += constants
        arguments = append_each("enter", operands, region_jaxpr.invars, eqn.params["in_specs"])
        local_results = self._append_equations(region_jaxpr, [*constants, *arguments], is_backward)
        results = append_each("leave", local_results, eqn.outvars, eqn.params["out_specs"])
        self.manual_axes = outer_manual_axes
        return results


def _value_number(atom: Atom) -> int | None:
    """Return the number of a value; `None` for a literal."""
    return atom if isinstance(atom, int) else None


def _is_model_region(manual_axes: Collection[str]) -> bool:
    """Return whether a `shard_map` with these manual axes contains passes of a model, rather than only a kernel."""
    return PIPE in manual_axes or set(manual_axes) == {REPLICA}


def _with_late_slices(program: FlatProgram) -> FlatProgram:
    """Return the program with each slice of an argument (an activation, a weight) moved next to its first reader."""
    arguments_and_slices = set(program.inputs)
    pending_slices: dict[int, Operation] = {}
    ordered_operations: list[Operation] = []

    def append_with_slices(operation: Operation) -> None:
        """Append an operation, after the pending slices that it reads."""
        for value in operation.inputs:
            if value in pending_slices:
                append_with_slices(pending_slices.pop(value))
        ordered_operations.append(operation)

    for operation in program.operations:
        operands = {value for value in operation.inputs if value is not None}
        if operation.kind in SLICING and operands <= arguments_and_slices:
            arguments_and_slices.update(operation.outputs)
            pending_slices[operation.outputs[0]] = operation
        else:
            append_with_slices(operation)
    while pending_slices:  # slices that only the program's results read
        append_with_slices(pending_slices.pop(next(iter(pending_slices))))
    return dataclasses.replace(program, operations=ordered_operations)


def _callee_jaxpr(eqn: Any) -> Any:
    """Return the open jaxpr that a call runs, or a `cond`'s longest branch; `None` for any other equation."""
    if eqn.primitive.name == "cond":
        return max(map(open_jaxpr, eqn.params["branches"]), key=lambda branch: len(branch.eqns))
    for param_name in CALLEE_PARAMS:
        jaxpr = open_jaxpr(eqn.params.get(param_name))
        if hasattr(jaxpr, "eqns") and len(jaxpr.outvars) == len(eqn.outvars):
            return jaxpr
    return None
