"""A function's program as one flat list of steps. Calls such as `jit` are inlined and dead steps are dropped.

Values are numbered, so that a step can run again, a value can be tagged and programs can be compared without changing
JAX's own data. Functions with custom derivatives (`custom_vjp`, `custom_jvp`), loops, branches and kernels stay one
step each.

The fingerprint of a program covers its steps, their shapes and parameters, and the model's names. It leaves out what
does not affect which values may be kept: numbers in the program (a layer's index, an epsilon), functions that hold
derivatives, and placements, so that it is the same on every mesh.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale.compat import rebind
from jaxscale.programs.walk import Constant, evaluate, is_jaxpr, live_steps, opened

OPENED = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Primitives that only call the program they hold."""
ALIASES = frozenset({"name", "sharding_constraint", "optimization_barrier", "pvary"})
"""Primitives that return their operands unchanged."""


class Step(NamedTuple):
    """One step of a program.

    Args:
        eqn: equation of the jaxpr, with primitive, params and source.
        inputs: number of each operand, or a constant.
        outputs: number of each result; `None` if nothing reads it.
        scope: names of the calling functions, outermost first.
    """

    eqn: Any
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int | None, ...]
    scope: tuple[str, ...]

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def is_alias(self) -> bool:
        """Whether the results are the operands under another name or placement."""
        if self.primitive.startswith("custom_vjp_call"):
            eqns = getattr(_custom_callee(self.eqn), "eqns", ())
            has_only_aliases = all(eqn.primitive.name in ALIASES for eqn in eqns)
            return len(self.inputs) == len(self.outputs) == 1 and bool(eqns) and has_only_aliases
        return self.primitive in ALIASES


class InlinedProgram(NamedTuple):
    """A program as a list of steps.

    Args:
        steps: the live steps, in the order they run.
        inputs: numbers of the values that the function closes over, then of its arguments.
        outputs: number of each result, or a constant.
        avals: abstract value (shape and type) of every value, indexed by its number.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    avals: tuple[Any, ...]

    def run(self, arguments: Sequence[Any], tag: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """Run the program; return its results.

        Args:
            arguments: values of the inputs.
            tag: called with the number and the value of each computed value; returns the value to use instead.
        """
        values: dict[int, Any] = dict(zip(self.inputs, arguments, strict=True))

        def read(atom: int | Constant) -> Any:
            """Return the value of a constant, or of the value with this number."""
            return atom.value if isinstance(atom, Constant) else values[atom]

        for step in self.steps:
            operands = [read(atom) for atom in step.inputs]
            results = operands if step.primitive == "name" else rebind(step.eqn, operands)
            for number, value in zip(step.outputs, results, strict=True):
                if number is not None:
                    values[number] = value if tag is None else tag(number, value)
        return [read(atom) for atom in self.outputs]

    def fingerprint(self) -> str:
        """Return the program's fingerprint: 16 hexadecimal digits, equal in all processes with one version of JAX."""
        digest = hashlib.sha256()
        roots = self.roots()
        positions: dict[int, int] = {}  # in the order of first use, by the number of the value

        def token_of(atom: int | Constant | None) -> str:
            """Return a value as text: its position in the order of first use, "#" for a constant, "_" for `None`."""
            if not isinstance(atom, int):
                return "_" if atom is None else "#"
            return str(positions.setdefault(roots[atom], len(positions)))

        for number in self.inputs:
            digest.update(f"{token_of(number)}:{_shape_text(self.avals[number])};".encode())
        for step in self.steps:
            if step.primitive == "name":
                digest.update(f"{token_of(step.inputs[0])}={step.eqn.params['name']};".encode())
            elif not step.is_alias:
                numbers_and_vars = zip(step.outputs, step.eqn.outvars, strict=True)
                results = [f"{token_of(number)}:{_shape_text(var.aval)}" for number, var in numbers_and_vars]
                operands = [token_of(atom) for atom in step.inputs]
                digest.update(f"{step.primitive}{_param_text(step.eqn.params)}({operands})->{results};".encode())
        digest.update(str([token_of(atom) for atom in self.outputs]).encode())
        return digest.hexdigest()[:16]

    def roots(self) -> dict[int, int]:
        """Map the number of each value to that of the value that it is an alias of, or to itself if it is no alias."""
        roots = {number: number for number in range(len(self.avals))}
        for step in self.steps:
            if step.is_alias:
                for result, operand in zip(step.outputs, step.inputs, strict=True):
                    if result is not None and isinstance(operand, int):
                        roots[result] = roots[operand]
        return roots

    def names(self) -> dict[int, str]:
        """Return a unique name for the number of each computed value that is not an alias.

        This is the name that the model gives (`checkpoint_name`). Without one, it is the name of the primitive with
        those of the calling functions and a counter, such as "silu/logistic" or "dot_general.3".
        """
        roots, model_names = self.roots(), {}
        for step in self.steps:
            if step.primitive == "name" and isinstance(step.inputs[0], int):
                model_names.setdefault(roots[step.inputs[0]], step.eqn.params["name"])
        name_counts: Counter[str] = Counter()
        names: dict[int, str] = {}
        for step in self.steps:
            for number in step.outputs:
                if number is None or step.is_alias:
                    continue
                name = model_names.get(number) or "/".join((*step.scope, _function_name(step.eqn)))
                name_counts[name] += 1
                names[number] = name if name_counts[name] == 1 else f"{name}.{name_counts[name]}"
        assert len(set(names.values())) == len(names), "a name from the model equals a generated name"
        return names


def inline(closed_jaxpr: Any) -> InlinedProgram:
    """Return the flat program of a closed jaxpr; the jaxpr's constants are the first inputs."""
    avals: list[Any] = []
    steps: list[Step] = []

    def new_numbers(variables: Sequence[Any]) -> tuple[int, ...]:
        """Give numbers to the variables of a jaxpr; return the numbers."""
        avals.extend(var.aval for var in variables)
        return tuple(range(len(avals) - len(variables), len(avals)))

    def append_steps(jaxpr: Any, inputs: Sequence[int | Constant], scope: tuple[str, ...]) -> list[int | Constant]:
        """Append the steps of a jaxpr, and return its results."""

        def append(eqn: Any, operands: list[int | Constant]) -> Sequence[int | Constant]:
            """Append an equation as a step, or the steps of the program that it calls; return its results."""
            callee = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in OPENED else None
            if callee is not None and _specifies_no_shardings(eqn):
                constants = map(Constant, getattr(callee, "consts", ()))
                return append_steps(opened(callee), [*constants, *operands], (*scope, _function_name(eqn)))
            results = new_numbers(eqn.outvars)
            steps.append(Step(eqn, tuple(operands), results, scope))
            return results

        return evaluate(jaxpr, inputs, append)

    jaxpr = closed_jaxpr.jaxpr
    inputs = new_numbers((*jaxpr.constvars, *jaxpr.invars))
    outputs = tuple(append_steps(jaxpr, inputs, ()))
    needed_steps, read_numbers = live_steps(steps, outputs, lambda step: bool(step.eqn.effects))
    read_outputs = [tuple(n if n in read_numbers else None for n in step.outputs) for step in needed_steps]
    needed_steps = [step._replace(outputs=numbers) for step, numbers in zip(needed_steps, read_outputs, strict=True)]
    return InlinedProgram(tuple(needed_steps), inputs, outputs, tuple(avals))


def _specifies_no_shardings(eqn: Any) -> bool:
    """Return whether a call specifies no shardings."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


def _function_name(eqn: Any) -> str:
    """Return the name of the function that an equation calls; without a name, that of the equation's primitive."""
    name = eqn.params.get("name")
    if eqn.primitive.name.startswith("custom_"):
        name = getattr(getattr(_custom_callee(eqn), "debug_info", None), "func_name", name)
    return name.strip("<>_") if isinstance(name, str) and name.strip("<>_") else eqn.primitive.name


def _custom_callee(eqn: Any) -> Any:
    """Return the open jaxpr of a function with a custom derivative."""
    return opened(eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))


def _shape_text(aval: Any) -> str:
    """Return the type and shape of an abstract value as text."""
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _param_text(value: Any) -> str:
    """Return a parameter of an equation as text, without addresses, functions and placements."""
    if is_jaxpr(value):
        lines = [
            f"{eqn.primitive.name}{_param_text(eqn.params)}{[_shape_text(var.aval) for var in eqn.outvars]}"
            for eqn in opened(value).eqns
        ]
        return f"{{{';'.join(lines)}}}"
    if isinstance(value, dict):
        # placements exist only on a mesh
        entries = [(key, entry) for key, entry in sorted(value.items()) if "sharding" not in key]
        return f"{{{','.join(f'{key}={_param_text(entry)}' for key, entry in entries)}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_param_text, value))})"
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    cls = type(value)
    # shardings, meshes, functions and contexts do not affect the computed values
    is_placement = cls.__module__.startswith("jax") and re.search("[Ss]harding|[Mm]esh|Context", cls.__name__)
    if callable(value) or is_placement:
        return cls.__name__
    text = repr(value)
    return cls.__name__ if " at 0x" in text or "Mesh(" in text else text
