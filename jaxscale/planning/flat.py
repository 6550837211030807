"""A traced function as one flat list of operations, ready to be weighed.

Calls (`jit`, `checkpoint`, custom derivatives) are written out in place, loops keep a program of their own, and what no
result needs is dropped, as a compiler would. Values are numbers; what is known of them lies beside the list.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the program of a call."""

LOOPS = ("scan", "while")


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
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    backward: bool = False
    equation: Any = None
    literals: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    loop: "Program | None" = None

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


def flatten(jaxpr: Any) -> Program:
    """The flat program of a jaxpr, open or closed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) + 1))(1.0)
        >>> [operation.kind for operation in flatten(jaxpr).operations]
        ['sin', 'add']
    """
    return _Flattener().program(jaxpr)


class _Flattener:
    def __init__(self) -> None:
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
            called = None if kind in (*LOOPS, "pallas_call", "shard_map") else _called(eqn)
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
                loop = flatten(eqn.params["jaxpr" if kind == "scan" else "body_jaxpr"])
            outputs = tuple(self._new(var.aval) for var in eqn.outvars)
            env |= dict(zip(eqn.outvars, outputs, strict=True))
            literals = {at: self._literal(var) for at, var in enumerate(eqn.invars) if inputs[at] is None}
            self.operations.append(Operation(kind, inputs, outputs, eqn.params, back, eqn, literals, loop))


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
