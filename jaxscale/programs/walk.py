"""Functions that walk through a jaxpr: list its equations, evaluate it with other operations, drop its dead steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Constant(NamedTuple):
    """A literal: a constant that is written in the program itself.

    Args:
        value: the constant, a Python scalar or an array.
    """

    value: Any


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    return hasattr(open_jaxpr(value), "eqns")


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants; an open jaxpr is returned unchanged."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation: the program of a call, the body of a loop, branches."""
    return [
        jaxpr
        for param in eqn.params.values()
        for jaxpr in (param if isinstance(param, tuple | list) else (param,))
        if is_jaxpr(jaxpr)
    ]


def equations_with_runs(jaxpr: Any, run_count: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield every equation of a jaxpr and of the jaxprs inside it, each with the number of times that it runs.

    The body of a `while` is counted as running once.

    Args:
        jaxpr: a jaxpr, open or closed.
        run_count: number of times that the jaxpr runs.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jax.numpy.sin(c), None), x, length=3)[0])(1.0)
        >>> [(eqn.primitive.name, run_count) for eqn, run_count in equations_with_runs(jaxpr)]
        [('scan', 1), ('sin', 3)]
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn, run_count
        inner_run_count = run_count * eqn.params["length"] if eqn.primitive.name == "scan" else run_count
        for inner_jaxpr in inner_jaxprs(eqn):
            yield from equations_with_runs(inner_jaxpr, inner_run_count)


def evaluate(jaxpr: Any, inputs: Sequence[Any], run_equation: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Evaluate an open jaxpr with a function in place of its primitives, and return the results.

    Args:
        jaxpr: an open jaxpr.
        inputs: a value for each constant of the jaxpr, then for each argument.
        run_equation: function of an equation and its operands that returns the equation's results; an operand that is a
            literal is passed as a `Constant`.
    """
    value_by_var = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def value_of(atom: Any) -> Any:
        """Return the value of a variable, or a literal as a `Constant`."""
        return Constant(atom.val) if hasattr(atom, "val") else value_by_var[atom]

    for eqn in jaxpr.eqns:
        results = run_equation(eqn, [value_of(atom) for atom in eqn.invars])
        value_by_var.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def live_steps(
    steps: Sequence[Any], results: Sequence[Any], has_effect: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], set[int]]:
    """Return the steps that the results depend on, in order, and the numbers of all values that these steps read.

    Args:
        steps: steps in the order in which they run; the `inputs` and `outputs` of a step are numbers of values (of type
            `int`) or literals (of another type).
        results: numbers of the results, or literals.
        has_effect: function that returns whether a step must run even if nothing reads its outputs.

    Returns:
        A tuple: the steps, and the set of numbers. The set includes the numbers of the results.
    """
    read_numbers = {atom for atom in results if isinstance(atom, int)}
    reversed_steps: list[Any] = []
    for step in reversed(steps):
        if has_effect(step) or not read_numbers.isdisjoint(step.outputs):
            read_numbers.update(atom for atom in step.inputs if isinstance(atom, int))
            reversed_steps.append(step)
    return reversed_steps[::-1], read_numbers
