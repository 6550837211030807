"""A function's program as one flat list of steps. Calls such as `jit` are inlined and dead steps are dropped.

Values are numbered. A step can therefore run again, a value can get a name, and programs can be compared, without
changes to JAX's data. A function with a custom derivative (`custom_vjp`, `custom_jvp`), a loop, a branch or a kernel is
a single step.

The fingerprint of a program covers its steps, their shapes and parameters, and the names that the model gives to
values. It leaves out everything that does not affect which values may be kept: constants in the program (a layer's
index, an epsilon), functions that compute derivatives, and placements. It is therefore the same on every mesh.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale.compat import rebind
from jaxscale.programs.walk import Constant, evaluate, is_jaxpr, live_steps, open_jaxpr

INLINED_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Primitives that only call a program, which is one of their parameters."""
ALIASES = frozenset({"name", "sharding_constraint", "layout_constraint", "reshard", "optimization_barrier", "pvary"})
"""Primitives that return their operands unchanged."""


class Step(NamedTuple):
    """One step of a program.

    Args:
        eqn: equation of the jaxpr, with primitive, params and source.
        inputs: for each operand, the operand's number or a constant.
        outputs: for each result, the result's number; `None` if nothing reads the result.
        scope: names of the calling functions, outermost first.
    """

    eqn: Any
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int | None, ...]
    scope: tuple[str, ...]

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
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
        steps: the steps that a result depends on, in the order in which they run.
        inputs: numbers of the values that the function closes over, then of its arguments.
        outputs: for each result, the result's number or a constant.
        avals: abstract value (shape and type) of every value, indexed by the value's number.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    avals: tuple[Any, ...]

    def run(self, arguments: Sequence[Any], replace: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """Run the program; return its results.

        Args:
            arguments: a JAX array for each input.
            replace: function that takes the number and the array of a computed value, and returns the array that
                replaces it; by default no array is replaced.
        """
        array_by_number: dict[int, Any] = dict(zip(self.inputs, arguments, strict=True))

        def array_of(atom: int | Constant) -> Any:
            """Return a constant, or the array of the value with this number."""
            return atom.value if isinstance(atom, Constant) else array_by_number[atom]

        for step in self.steps:
            operands = [array_of(atom) for atom in step.inputs]
            results = operands if step.primitive == "name" else rebind(step.eqn, operands)
            for value_number, array in zip(step.outputs, results, strict=True):
                if value_number is not None:
                    array_by_number[value_number] = array if replace is None else replace(value_number, array)
        return [array_of(atom) for atom in self.outputs]

    def fingerprint(self) -> str:
        """Return the program's fingerprint: 16 hexadecimal digits, equal in all processes with one version of JAX."""
        digest = hashlib.sha256()
        root_by_number = self.root_by_number()
        # a constant is placed only where there is a mesh, so its placement is not part of the block
        placed_constants = {
            result
            for step in self.steps
            if step.is_alias
            for result, operand in zip(step.outputs, step.inputs, strict=True)
            if result is not None and not isinstance(operand, int)
        }
        position_by_root: dict[int, int] = {}  # position of a value in the order of first use

        def token_of(atom: int | Constant | None) -> str:
            """Return a value's text: its position in the order of first use, "#" for a constant, "_" for `None`."""
            if not isinstance(atom, int):
                return "_" if atom is None else "#"
            if root_by_number[atom] in placed_constants:
                return "#"
            return str(position_by_root.setdefault(root_by_number[atom], len(position_by_root)))

        for value_number in self.inputs:
            digest.update(f"{token_of(value_number)}:{_shape_text(self.avals[value_number])};".encode())
        for step in self.steps:
            if step.primitive == "name":
                digest.update(f"{token_of(step.inputs[0])}={step.eqn.params['name']};".encode())
            elif not step.is_alias:
                numbers_and_vars = zip(step.outputs, step.eqn.outvars, strict=True)
                result_texts = [
                    f"{token_of(value_number)}:{_shape_text(var.aval)}" for value_number, var in numbers_and_vars
                ]
                operand_texts = [token_of(atom) for atom in step.inputs]
                params_text = _param_text(step.eqn.params)
                digest.update(f"{step.primitive}{params_text}({operand_texts})->{result_texts};".encode())
        digest.update(str([token_of(atom) for atom in self.outputs]).encode())
        return digest.hexdigest()[:16]

    def root_by_number(self) -> dict[int, int]:
        """Return the number of the root of each value, by the value's number.

        The root of an alias is the value that the alias stands for. The root of any other value is the value itself.
        """
        root_by_number = {value_number: value_number for value_number in range(len(self.avals))}
        for step in self.steps:
            if step.is_alias:
                for result, operand in zip(step.outputs, step.inputs, strict=True):
                    if result is not None and isinstance(operand, int):
                        root_by_number[result] = root_by_number[operand]
        return root_by_number

    def name_by_number(self) -> dict[int, str]:
        """Return a unique name of each computed value that is not an alias, by the value's number.

        If the model names the value (`checkpoint_name`), the unique name begins with the model's name. Otherwise it
        begins with the names of the calling functions and of the primitive, as in "silu/logistic". A counter makes the
        name unique.
        """
        root_by_number, model_name_by_number = self.root_by_number(), {}
        for step in self.steps:
            if step.primitive == "name" and isinstance(step.inputs[0], int):
                model_name_by_number.setdefault(root_by_number[step.inputs[0]], step.eqn.params["name"])
        name_counts: Counter[str] = Counter()
        name_by_number: dict[int, str] = {}
        for step in self.steps:
            for value_number in step.outputs:
                if value_number is None or step.is_alias:
                    continue
                name = model_name_by_number.get(value_number) or "/".join((*step.scope, _function_name(step.eqn)))
                name_counts[name] += 1
                name_by_number[value_number] = name if name_counts[name] == 1 else f"{name}.{name_counts[name]}"
        assert len(set(name_by_number.values())) == len(name_by_number), "a model's name equals a generated name"
        return name_by_number


def inline(closed_jaxpr: Any) -> InlinedProgram:
    """Return the program of a closed jaxpr as a list of steps; the jaxpr's constants are the first inputs."""
    avals: list[Any] = []
    steps: list[Step] = []

    def new_numbers(variables: Sequence[Any]) -> tuple[int, ...]:
        """Give numbers to the variables of a jaxpr; return the numbers."""
        avals.extend(var.aval for var in variables)
        return tuple(range(len(avals) - len(variables), len(avals)))

    def append_steps(jaxpr: Any, inputs: Sequence[int | Constant], scope: tuple[str, ...]) -> list[int | Constant]:
        """Append the steps of a jaxpr called from the functions named in `scope`; return its results."""

        def append_equation(eqn: Any, operands: list[int | Constant]) -> Sequence[int | Constant]:
            """Append an equation as a step, or the steps of the program that it calls; return its results."""
            is_call = eqn.primitive.name in INLINED_CALLS
            callee_jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if is_call else None
            if callee_jaxpr is not None and _has_no_shardings(eqn):
                constants = map(Constant, getattr(callee_jaxpr, "consts", ()))
                return append_steps(open_jaxpr(callee_jaxpr), [*constants, *operands], (*scope, _function_name(eqn)))
            results = new_numbers(eqn.outvars)
            steps.append(Step(eqn, tuple(operands), results, scope))
            return results

        return evaluate(jaxpr, inputs, append_equation)

    jaxpr = closed_jaxpr.jaxpr
    inputs = new_numbers((*jaxpr.constvars, *jaxpr.invars))
    outputs = tuple(append_steps(jaxpr, inputs, ()))
    needed_steps, read_numbers = live_steps(steps, outputs, lambda step: bool(step.eqn.effects))
    final_steps = [
        step._replace(outputs=tuple(number if number in read_numbers else None for number in step.outputs))
        for step in needed_steps
    ]
    return InlinedProgram(tuple(final_steps), inputs, outputs, tuple(avals))


def _has_no_shardings(eqn: Any) -> bool:
    """Return whether a call specifies no shardings."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


def _function_name(eqn: Any) -> str:
    """Return the name of the function that an equation calls; without such a name, the name of the primitive."""
    name = eqn.params.get("name")
    if eqn.primitive.name.startswith("custom_"):
        name = getattr(getattr(_custom_callee(eqn), "debug_info", None), "func_name", name)
    return name.strip("<>_") if isinstance(name, str) and name.strip("<>_") else eqn.primitive.name


def _custom_callee(eqn: Any) -> Any:
    """Return the open jaxpr of a function with a custom derivative."""
    return open_jaxpr(eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))


def _shape_text(aval: Any) -> str:
    """Return the type and shape of an abstract value as text."""
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _param_text(value: Any) -> str:
    """Return a parameter of an equation as text, without addresses, functions and placements."""
    if is_jaxpr(value):
        eqn_texts = [
            f"{eqn.primitive.name}{_param_text(eqn.params)}{[_shape_text(var.aval) for var in eqn.outvars]}"
            for eqn in open_jaxpr(value).eqns
        ]
        return f"{{{';'.join(eqn_texts)}}}"
    if isinstance(value, dict):
        # placements exist only on a mesh
        keys_and_entries = [(key, entry) for key, entry in sorted(value.items()) if "sharding" not in key]
        return f"{{{','.join(f'{key}={_param_text(entry)}' for key, entry in keys_and_entries)}}}"
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
