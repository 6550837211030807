"""Functions that walk over a jaxpr: list its equations, evaluate it with other operations, drop its dead steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Constant(NamedTuple):
    """A literal, a number written in the program."""

    value: Any


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    return hasattr(opened(value), "eqns")


def opened(jaxpr: Any) -> Any:
    """Return the open jaxpr of an open or closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation: a call's program, a loop's body, branches."""
    return [
        jaxpr
        for param in eqn.params.values()
        for jaxpr in (param if isinstance(param, tuple | list) else (param,))
        if is_jaxpr(jaxpr)
    ]


def equations(jaxpr: Any, runs: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield every equation of a jaxpr and of the jaxprs inside it, each with the number of times that it runs.

    The body of a `while` is counted as running once.

    Args:
        jaxpr: a jaxpr, open or closed.
        runs: number of times that the jaxpr runs.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jax.numpy.sin(c), None), x, length=3)[0])(1.0)
        >>> [(eqn.primitive.name, runs) for eqn, runs in equations(jaxpr)]
        [('scan', 1), ('sin', 3)]
    """
    for eqn in opened(jaxpr).eqns:
        yield eqn, runs
        inner_runs = runs * eqn.params["length"] if eqn.primitive.name == "scan" else runs
        for inner_jaxpr in inner_jaxprs(eqn):
            yield from equations(inner_jaxpr, inner_runs)


def evaluate(jaxpr: Any, inputs: Sequence[Any], run: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Evaluate an open jaxpr with a function instead of its primitives, and return its results.

    Args:
        jaxpr: an open jaxpr.
        inputs: a value for each constant of the jaxpr, then for each argument.
        run: function that returns the results of an equation, called with the equation and its operands; an operand
            that is a literal is a `Constant`.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(atom: Any) -> Any:
        """Return the value of a variable, or a literal as a `Constant`."""
        return Constant(atom.val) if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, run(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def live_steps(
    steps: Sequence[Any], results: Sequence[Any], has_effect: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], set[int]]:
    """Return the steps that results depend on, in order, and the numbers of all values that are read.

    Args:
        steps: steps in the order they run; `inputs` and `outputs` of a step are the numbers of values, as `int`, or
            literals of another type.
        results: numbers of the results, or literals.
        has_effect: function that returns whether a step must run even if nothing reads its outputs.
    """
    read_values = {atom for atom in results if isinstance(atom, int)}
    needed_steps: list[Any] = []
    for step in reversed(steps):
        if has_effect(step) or not read_values.isdisjoint(step.outputs):
            read_values.update(atom for atom in step.inputs if isinstance(atom, int))
            needed_steps.append(step)
    return needed_steps[::-1], read_values
