"""A traced function as one flat list of operations, for estimates of its memory.

Calls (`jit`, `checkpoint`, custom derivatives) are inlined, the body of a loop stays a program, and operations that no
result needs are dropped, as a compiler would. Values are numbered; their shapes and names are kept beside the list.

The `shard_map` of a pipelined step, and that of gradients per replica, are inlined too: an "enter" returns a device's
part of an array, a "leave" the array of these parts. Within a pipelined step a `cond` keeps a program for each branch;
elsewhere its longest branch represents it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxscale.compat import scan_counts

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the program of a call."""

LOOPS = ("scan", "while")

SLICING = ("slice", "dynamic_slice", "squeeze", "lt", "add", "select_n")
"""Operations that take a part of an array by index; a negative index counts from the end."""

PIPE = "pipe"
"""Mesh axis of a pipeline's stages."""

REPLICA = "replica"
"""Mesh axis over which a codec reduces gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One equation.

    Args:
        kind: its primitive.
        inputs: numbers of its operands; `None` for a literal.
        outputs: numbers of its results.
        params: of the primitive.
        backward: whether it belongs to the backward pass.
        equation: the traced equation, with its settings and source.
        literals: the operands that are literals, by their index among the inputs.
        loop: the body of a loop.
        branches: of a `cond` of a pipelined step.
        manual: mesh axes for which shapes are already per device, in an inlined `shard_map`.
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    backward: bool = False
    equation: Any = None
    literals: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    loop: "FlatProgram | None" = None
    branches: "tuple[FlatProgram, ...]" = ()
    manual: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """Its source line, as "file.py:12 (function)"."""
        from jax.extend.source_info_util import summarize

        return "" if self.equation is None else summarize(self.equation.source_info).rpartition("/")[2]


@dataclasses.dataclass(eq=False)
class FlatProgram:
    """Operations in the order they run.

    Args:
        inputs: numbers of the arguments, then of the constants.
        outputs: numbers of the results; `None` for a literal.
        operations: in order.
        shapes: abstract value of each number.
        names: the model's names of values (`checkpoint_name`).
    """

    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    operations: list[Operation]
    shapes: dict[int, Any]
    names: dict[int, str]


def flatten(jaxpr: Any, manual: frozenset[str] = frozenset()) -> FlatProgram:
    """The flat program of a jaxpr, open or closed.

    Args:
        jaxpr: the function.
        manual: mesh axes that are manual around it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) + 1))(1.0)
        >>> [operation.kind for operation in flatten(jaxpr).operations]
        ['sin', 'add']
    """
    return _Flattener(manual).program(jaxpr)


def carries(operation: Operation) -> tuple[int | None, ...]:
    """The initial state of a loop."""
    if operation.kind == "scan":
        consts, carries = scan_counts(operation.params)
        return operation.inputs[consts : consts + carries]
    return operation.inputs[operation.params["cond_nconsts"] + operation.params["body_nconsts"] :]


class _Flattener:
    def __init__(self, manual: frozenset[str]) -> None:
        self.manual = manual
        self.shapes: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.operations: list[Operation] = []
        self.constants: list[int | None] = []
        self.literals: dict[Any, Any] = {}  # by the variable that is bound to each

    def program(self, jaxpr: Any) -> FlatProgram:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, int | None] = {}
        for var in (*inner.constvars, *inner.invars):
            env[var] = self._new_value(var.aval)
        self.constants += (env[var] for var in inner.constvars)
        inputs = tuple(env[var] for var in inner.invars)
        self._append_equations(inner, env, False)
        outputs = tuple(self._read(env, var) for var in inner.outvars)
        operations = _live_operations(self.operations, outputs)
        all_inputs = tuple(value for value in (*inputs, *self.constants) if value is not None)
        return FlatProgram(all_inputs, outputs, operations, self.shapes, self.names)

    def _new_value(self, aval: Any) -> int:
        self.shapes[len(self.shapes)] = aval
        return len(self.shapes) - 1

    @staticmethod
    def _read(env: dict[Any, int | None], var: Any) -> int | None:
        return None if hasattr(var, "val") else env[var]

    def _bind(self, var: Any, atom: Any) -> None:
        """Record a variable's literal if it equals a literal or a variable bound to one."""
        if hasattr(atom, "val") or atom in self.literals:
            self.literals[var] = self._literal(atom)

    def _literal(self, var: Any) -> Any:
        return var.val if hasattr(var, "val") else self.literals[var]

    def _append_equations(self, jaxpr: Any, env: dict[Any, int | None], backward: bool) -> None:
        for eqn in jaxpr.eqns:
            inputs = tuple(self._read(env, var) for var in eqn.invars)
            in_backward = backward or "transpose" in str(eqn.source_info.name_stack)
            kind = eqn.primitive.name
            if kind == "name":
                if inputs[0] is not None:
                    self.names[inputs[0]] = eqn.params["name"]
                env[eqn.outvars[0]] = inputs[0]
                self._bind(eqn.outvars[0], eqn.invars[0])
                continue
            if kind == "shard_map" and _is_model_region(eqn.params["newly_manual_axes"]):
                self._add_region(eqn, inputs, env, in_backward)
                continue
            uninlined = (*LOOPS, "pallas_call", "shard_map", *(("cond",) if PIPE in self.manual else ()))
            callee = None if kind in uninlined else _callee(eqn)
            if callee is not None:
                callee_jaxpr = getattr(callee, "jaxpr", callee)
                callee_env: dict[Any, int | None] = {var: self._new_value(var.aval) for var in callee_jaxpr.constvars}
                self.constants += callee_env.values()
                first_argument = len(inputs) - len(callee_jaxpr.invars)
                callee_env |= dict(zip(callee_jaxpr.invars, inputs[first_argument:], strict=True))
                for var, argument in zip(callee_jaxpr.invars, eqn.invars[first_argument:], strict=True):
                    self._bind(var, argument)
                self._append_equations(callee_jaxpr, callee_env, in_backward)
                for var, result in zip(eqn.outvars, callee_jaxpr.outvars, strict=True):
                    env[var] = self._read(callee_env, result)
                    self._bind(var, result)
                continue
            loop = None
            if kind in LOOPS:
                loop = flatten(eqn.params["jaxpr" if kind == "scan" else "body_jaxpr"], self.manual)
            branches = ()
            if kind == "cond":
                branches = tuple(_with_late_slices(flatten(branch, self.manual)) for branch in eqn.params["branches"])
            outputs = tuple(self._new_value(var.aval) for var in eqn.outvars)
            env |= dict(zip(eqn.outvars, outputs, strict=True))
            literals = {i: self._literal(var) for i, var in enumerate(eqn.invars) if inputs[i] is None}
            self.operations.append(
                Operation(kind, inputs, outputs, eqn.params, in_backward, eqn, literals, loop, branches, self.manual)
            )

    def _add_region(self, eqn: Any, inputs: Sequence[int | None], env: dict[Any, int | None], backward: bool) -> None:
        """Inline a `shard_map`: its operations between "enter" and "leave" operations."""
        region = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        outer_manual, self.manual = self.manual, frozenset(eqn.params["newly_manual_axes"])
        region_env: dict[Any, int | None] = {var: self._new_value(var.aval) for var in region.constvars}
        self.constants += region_env.values()

        def append_crossing(kind: str, value: int, var: Any, spec: Any) -> int:
            output = self._new_value(var.aval)
            self.operations.append(
                Operation(kind, (value,), (output,), {"spec": spec}, backward, eqn, manual=self.manual)
            )
            return output

        for var, argument, value, spec in zip(region.invars, eqn.invars, inputs, eqn.params["in_specs"], strict=True):
            region_env[var] = None if value is None else append_crossing("enter", value, var, spec)
            self._bind(var, argument)
        self._append_equations(region, region_env, backward)
        for var, result, spec in zip(eqn.outvars, region.outvars, eqn.params["out_specs"], strict=True):
            value = self._read(region_env, result)
            env[var] = None if value is None else append_crossing("leave", value, var, spec)
            self._bind(var, result)
        self.manual = outer_manual


def _is_model_region(manual: Collection[str]) -> bool:
    """Whether a `shard_map` with these manual axes holds passes of a model, not only a kernel."""
    return PIPE in manual or set(manual) == {REPLICA}


def _with_late_slices(program: FlatProgram) -> FlatProgram:
    """The program with slices of its arguments (slots, weights) moved to where they are first read."""
    argument_slices = set(program.inputs)
    pending_slices: dict[int, Operation] = {}
    ordered: list[Operation] = []

    def append_with_slices(operation: Operation) -> None:
        for value in operation.inputs:
            if value in pending_slices:
                append_with_slices(pending_slices.pop(value))
        ordered.append(operation)

    for operation in program.operations:
        operands = {value for value in operation.inputs if value is not None}
        if operation.kind in SLICING and operands <= argument_slices:
            argument_slices.update(operation.outputs)
            pending_slices[operation.outputs[0]] = operation
        else:
            append_with_slices(operation)
    while pending_slices:  # slices that are returned
        append_with_slices(pending_slices.pop(next(iter(pending_slices))))
    return dataclasses.replace(program, operations=ordered)


def _callee(eqn: Any) -> Any:
    """The jaxpr that a call runs, or the longest branch of a `cond`; `None` if the equation is no call."""
    if eqn.primitive.name == "cond":
        return max(eqn.params["branches"], key=lambda branch: len(getattr(branch, "jaxpr", branch).eqns))
    for name in CALLS:
        jaxpr = eqn.params.get(name)
        open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if hasattr(open_jaxpr, "eqns") and len(open_jaxpr.outvars) == len(eqn.outvars):
            return jaxpr
    return None


def _live_operations(operations: Sequence[Operation], outputs: Sequence[int | None]) -> list[Operation]:
    live_values = {value for value in outputs if value is not None}
    live_operations = []
    for operation in reversed(operations):
        if any(value in live_values for value in operation.outputs):
            live_operations.append(operation)
            live_values.update(value for value in operation.inputs if value is not None)
    return live_operations[::-1]
