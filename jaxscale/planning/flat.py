"""A traced function as one flat list of operations, ready to be weighed.

Calls (`jit`, `checkpoint`, custom derivatives) are written out in place, loops keep a program of their own, and what no
result needs is dropped, as a compiler would. Values are numbers; what is known of them lies beside the list.

The `shard_map` of a pipelined step, and that in which each replica has gradients of its own, are written out in place
too: an "enter" gives a device's part of an array, a "leave" the array of these parts. Within a pipelined step a `cond`
keeps a program for each branch; elsewhere its longest stands for it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxscale.compat import scan_counts

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the program of a call."""

LOOPS = ("scan", "while")

TAKES = ("slice", "dynamic_slice", "squeeze", "lt", "add", "select_n")
"""Operations that take a part of an array by its number; a negative number counts from the end."""

PIPE = "pipe"
"""Axis of the mesh along which a pipeline's stages lie."""

REPLICA = "replica"
"""Axis of the mesh over which a codec reduces gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One equation.

    Args:
        kind: its primitive.
        inputs: the values it reads; `None` for a literal.
        outputs: the values it makes.
        params: of the primitive.
        backward: it belongs to the backward pass.
        equation: as JAX traced it; its settings and its source are there.
        literals: what stands in place of the inputs that are `None`, by their place among the inputs.
        loop: the body of a loop.
        branches: of a `cond` of a pipelined step.
        manual: axes of the mesh that shapes know of already, within a region that is written out.
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    backward: bool = False
    equation: Any = None
    literals: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    loop: "Program | None" = None
    branches: "tuple[Program, ...]" = ()
    manual: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """The line that it comes from, as "file.py:12 (function)"."""
        from jax.extend.source_info_util import summarize

        return "" if self.equation is None else summarize(self.equation.source_info).rpartition("/")[2]


@dataclasses.dataclass(eq=False)
class Program:
    """Operations in the order they run.

    Args:
        inputs: values given, and behind them the constants.
        outputs: values returned; `None` for a literal.
        operations: in order.
        shapes: abstract value of each number.
        names: name that the model gave a value (`checkpoint_name`).
    """

    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    operations: list[Operation]
    shapes: dict[int, Any]
    names: dict[int, str]


def flatten(jaxpr: Any, manual: frozenset[str] = frozenset()) -> Program:
    """The flat program of a jaxpr, open or closed.

    Args:
        jaxpr: the function.
        manual: it is part of a pipelined step that is manual over these axes.

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
        self.literals: dict[Any, Any] = {}  # of variables that a call was given a literal for

    def program(self, jaxpr: Any) -> Program:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, int | None] = {}
        for var in (*inner.constvars, *inner.invars):
            env[var] = self._new(var.aval)
        self.constants += (env[var] for var in inner.constvars)
        inputs = tuple(env[var] for var in inner.invars)
        self._run(inner, env, False)
        outputs = tuple(self._read(env, var) for var in inner.outvars)
        operations = _needed(self.operations, outputs)
        given = tuple(value for value in (*inputs, *self.constants) if value is not None)
        return Program(given, outputs, operations, self.shapes, self.names)

    def _new(self, aval: Any) -> int:
        self.shapes[len(self.shapes)] = aval
        return len(self.shapes) - 1

    @staticmethod
    def _read(env: dict[Any, int | None], var: Any) -> int | None:
        return None if hasattr(var, "val") else env[var]

    def _same(self, var: Any, given: Any) -> None:
        """A variable is what another one, or a literal, is."""
        if hasattr(given, "val") or given in self.literals:
            self.literals[var] = self._literal(given)

    def _literal(self, var: Any) -> Any:
        return var.val if hasattr(var, "val") else self.literals[var]

    def _run(self, jaxpr: Any, env: dict[Any, int | None], backward: bool) -> None:
        for eqn in jaxpr.eqns:
            inputs = tuple(self._read(env, var) for var in eqn.invars)
            back = backward or "transpose" in str(eqn.source_info.name_stack)
            kind = eqn.primitive.name
            if kind == "name":
                if inputs[0] is not None:
                    self.names[inputs[0]] = eqn.params["name"]
                env[eqn.outvars[0]] = inputs[0]
                self._same(eqn.outvars[0], eqn.invars[0])
                continue
            if kind == "shard_map" and _written_out(eqn.params["newly_manual_axes"]):
                self._region(eqn, inputs, env, back)
                continue
            known = (*LOOPS, "pallas_call", "shard_map", *(("cond",) if PIPE in self.manual else ()))
            called = None if kind in known else _called(eqn)
            if called is not None:
                inner = getattr(called, "jaxpr", called)
                inside: dict[Any, int | None] = {var: self._new(var.aval) for var in inner.constvars}
                self.constants += inside.values()
                first = len(inputs) - len(inner.invars)
                inside |= dict(zip(inner.invars, inputs[first:], strict=True))
                for var, given in zip(inner.invars, eqn.invars[first:], strict=True):
                    self._same(var, given)
                self._run(inner, inside, back)
                for var, found in zip(eqn.outvars, inner.outvars, strict=True):
                    env[var] = self._read(inside, found)
                    self._same(var, found)
                continue
            loop = None
            if kind in LOOPS:
                loop = flatten(eqn.params["jaxpr" if kind == "scan" else "body_jaxpr"], self.manual)
            branches = ()
            if kind == "cond":
                branches = tuple(_late(flatten(branch, self.manual)) for branch in eqn.params["branches"])
            outputs = tuple(self._new(var.aval) for var in eqn.outvars)
            env |= dict(zip(eqn.outvars, outputs, strict=True))
            literals = {at: self._literal(var) for at, var in enumerate(eqn.invars) if inputs[at] is None}
            self.operations.append(
                Operation(kind, inputs, outputs, eqn.params, back, eqn, literals, loop, branches, self.manual)
            )

    def _region(self, eqn: Any, inputs: Sequence[int | None], env: dict[Any, int | None], back: bool) -> None:
        """A region's operations, between those that enter and those that leave."""
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        outside, self.manual = self.manual, frozenset(eqn.params["newly_manual_axes"])
        inside: dict[Any, int | None] = {var: self._new(var.aval) for var in inner.constvars}
        self.constants += inside.values()

        def cross(kind: str, value: int, var: Any, spec: Any) -> int:
            made = self._new(var.aval)
            self.operations.append(Operation(kind, (value,), (made,), {"spec": spec}, back, eqn, manual=self.manual))
            return made

        for var, given, value, spec in zip(inner.invars, eqn.invars, inputs, eqn.params["in_specs"], strict=True):
            inside[var] = None if value is None else cross("enter", value, var, spec)
            self._same(var, given)
        self._run(inner, inside, back)
        for var, found, spec in zip(eqn.outvars, inner.outvars, eqn.params["out_specs"], strict=True):
            value = self._read(inside, found)
            env[var] = None if value is None else cross("leave", value, var, spec)
            self._same(var, found)
        self.manual = outside


def _written_out(manual: Collection[str]) -> bool:
    """Whether a `shard_map` that makes these axes manual holds whole passes of a model, and no kernel alone."""
    return PIPE in manual or set(manual) == {REPLICA}


def _late(program: Program) -> Program:
    """The program with what it takes out of its arguments (slots, weights) taken out where it is first read."""
    taken = set(program.inputs)
    waiting: dict[int, Operation] = {}
    order: list[Operation] = []

    def append(operation: Operation) -> None:
        for value in operation.inputs:
            if value in waiting:
                append(waiting.pop(value))
        order.append(operation)

    for operation in program.operations:
        read = {value for value in operation.inputs if value is not None}
        if operation.kind in TAKES and read <= taken:
            taken.update(operation.outputs)
            waiting[operation.outputs[0]] = operation
        else:
            append(operation)
    while waiting:  # they are returned
        append(waiting.pop(next(iter(waiting))))
    return dataclasses.replace(program, operations=order)


def _called(eqn: Any) -> Any:
    """The program of a call; of a `cond`, its longest branch."""
    if eqn.primitive.name == "cond":
        return max(eqn.params["branches"], key=lambda branch: len(getattr(branch, "jaxpr", branch).eqns))
    for name in CALLS:
        found = eqn.params.get(name)
        inner = getattr(found, "jaxpr", found)
        if hasattr(inner, "eqns") and len(inner.outvars) == len(eqn.outvars):
            return found
    return None


def _needed(operations: Sequence[Operation], outputs: Sequence[int | None]) -> list[Operation]:
    live = {value for value in outputs if value is not None}
    kept = []
    for operation in reversed(operations):
        if any(value in live for value in operation.outputs):
            kept.append(operation)
            live.update(value for value in operation.inputs if value is not None)
    return kept[::-1]
