"""A function's program as one flat list of steps: what `jit` and the like only wrap is opened, dead steps are dropped.

Values are numbered, so that a step can be run again, a value tagged, a program compared with another, without touching
JAX's own data. What has a derivative of its own (`custom_vjp`, `custom_jvp`), loops, branches and kernels stay one
step each.

The fingerprint of a program is that of its steps, their shapes and parameters, and the names that the model gave. It
leaves out what does not change what may be kept: numbers in the program (a layer's index, an epsilon), the functions
that hold derivatives, and placements, so that it is the same on every mesh.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale.compat import rebind

OPENED = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Primitives that run the one program they hold, and nothing else."""
ALIASES = frozenset({"name", "sharding_constraint", "optimization_barrier", "pvary"})
"""Primitives that give back what they take."""


class Constant(NamedTuple):
    """A number written in the program."""

    value: Any


class Step(NamedTuple):
    """One equation.

    Args:
        eqn: of the jaxpr: primitive, params, source.
        inputs: number of each value read, or a constant.
        outputs: number of each value made; `None` where nobody reads it.
        scope: names of the functions it was called in, outermost first.
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
    def alias(self) -> bool:
        """Whether the results are the arguments under another name or placement."""
        if self.primitive.startswith("custom_vjp_call"):
            inner = self.eqn.params.get("call_jaxpr", self.eqn.params.get("fun_jaxpr"))
            inside = getattr(getattr(inner, "jaxpr", inner), "eqns", None)
            return len(self.inputs) == len(self.outputs) == 1 and bool(inside) and _all_aliases(inside)
        return self.primitive in ALIASES


class Program(NamedTuple):
    """Steps in the order they run.

    Args:
        steps: live ones only.
        inputs: numbers of the values given, what the function closes over first.
        outputs: numbers of the results, or constants.
        avals: shape and type of every value, by number.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    avals: tuple[Any, ...]

    def run(self, given: Sequence[Any], tag: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """The results for the values given; `tag(number, value)` stands for each value where it is made."""
        values: dict[int, Any] = dict(zip(self.inputs, given, strict=True))

        def read(atom: int | Constant) -> Any:
            return atom.value if isinstance(atom, Constant) else values[atom]

        for step in self.steps:
            arguments = [read(atom) for atom in step.inputs]
            made = arguments if step.primitive == "name" else rebind(step.eqn, arguments)
            for number, value in zip(step.outputs, made, strict=True):
                if number is not None:
                    values[number] = value if tag is None else tag(number, value)
        return [read(atom) for atom in self.outputs]

    def fingerprint(self) -> str:
        """16 hexadecimal digits, the same in every process with one version of JAX."""
        found = hashlib.sha256()
        roots = self.roots()
        renamed: dict[int, int] = {}

        def word(atom: int | Constant | None) -> str:
            if not isinstance(atom, int):
                return "_" if atom is None else "#"
            return str(renamed.setdefault(roots[atom], len(renamed)))

        for number in self.inputs:
            found.update(f"{word(number)}:{_shape(self.avals[number])};".encode())
        for step in self.steps:
            if step.primitive == "name":
                found.update(f"{word(step.inputs[0])}={step.eqn.params['name']};".encode())
            elif not step.alias:
                made = [f"{word(n)}:{_shape(v.aval)}" for n, v in zip(step.outputs, step.eqn.outvars, strict=True)]
                read = [word(atom) for atom in step.inputs]
                found.update(f"{step.primitive}{_text(step.eqn.params)}({read})->{made};".encode())
        found.update(str([word(atom) for atom in self.outputs]).encode())
        return found.hexdigest()[:16]

    def roots(self) -> dict[int, int]:
        """Of each value, the one it is an alias of, itself by default."""
        found = {number: number for number in range(len(self.avals))}
        for step in self.steps:
            if step.alias:
                for made, read in zip(step.outputs, step.inputs, strict=True):
                    if made is not None and isinstance(read, int):
                        found[made] = found[read]
        return found

    def names(self) -> dict[int, str]:
        """A name of every value that a step makes and no alias is: the model's own (`checkpoint_name`), or the
        primitive's with the functions it was called in and a number, such as "silu/logistic" or "dot_general.3".
        """
        roots, own = self.roots(), {}
        for step in self.steps:
            if step.primitive == "name" and isinstance(step.inputs[0], int):
                own.setdefault(roots[step.inputs[0]], step.eqn.params["name"])
        seen: Counter[str] = Counter()
        found: dict[int, str] = {}
        for step in self.steps:
            for number in step.outputs:
                if number is None or step.alias:
                    continue
                word = own.get(number) or "/".join((*step.scope, _function_name(step.eqn)))
                seen[word] += 1
                found[number] = word if seen[word] == 1 else f"{word}.{seen[word]}"
        assert len(set(found.values())) == len(found), "a name that the model gave is one that was made up"
        return found


def inline(closed: Any) -> Program:
    """The flat program of a closed jaxpr; its constants come first among the inputs."""
    avals: list[Any] = []
    steps: list[Step] = []

    def number(var: Any) -> int:
        avals.append(var.aval)
        return len(avals) - 1

    def walk(jaxpr: Any, env: dict[Any, int | Constant], scope: tuple[str, ...]) -> list[int | Constant]:
        def read(var: Any) -> int | Constant:
            return Constant(var.val) if hasattr(var, "val") else env[var]

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in OPENED else None
            given = tuple(read(var) for var in eqn.invars)
            if inner is not None and _only_wraps(eqn):
                body, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                inside: dict[Any, int | Constant] = dict(zip(body.constvars, map(Constant, consts), strict=True))
                inside |= dict(zip(body.invars, given, strict=True))
                made = walk(body, inside, (*scope, _function_name(eqn)))
                env.update(zip(eqn.outvars, made, strict=True))
            else:
                numbers = tuple(number(var) for var in eqn.outvars)
                env.update(zip(eqn.outvars, numbers, strict=True))
                steps.append(Step(eqn, given, numbers, scope))
        return [read(var) for var in jaxpr.outvars]

    jaxpr = closed.jaxpr
    inputs = tuple(number(var) for var in (*jaxpr.constvars, *jaxpr.invars))
    env: dict[Any, int | Constant] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    outputs = tuple(walk(jaxpr, env, ()))
    return Program(_live(steps, outputs), inputs, outputs, tuple(avals))


def _live(steps: Sequence[Step], outputs: Sequence[int | Constant]) -> tuple[Step, ...]:
    wanted = {atom for atom in outputs if isinstance(atom, int)}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.eqn.effects or any(number in wanted for number in step.outputs):
            wanted.update(atom for atom in step.inputs if isinstance(atom, int))
            kept.append(step._replace(outputs=tuple(n if n in wanted else None for n in step.outputs)))
    return tuple(reversed(kept))


def _all_aliases(eqns: Sequence[Any]) -> bool:
    return all(eqn.primitive.name in ALIASES for eqn in eqns)


def _only_wraps(eqn: Any) -> bool:
    """Whether a call has no placement of its own."""
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in placed)


def _function_name(eqn: Any) -> str:
    """Of a call, the function's name; else the primitive's."""
    name = eqn.params.get("name")
    if eqn.primitive.name.startswith("custom_"):
        inner = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
        name = getattr(getattr(getattr(inner, "jaxpr", inner), "debug_info", None), "func_name", name)
    return name.strip("<>_") if isinstance(name, str) and name.strip("<>_") else eqn.primitive.name


def _shape(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _text(value: Any) -> str:
    """A param as a text without addresses, functions, placements and numbers of layers."""
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        jaxpr = getattr(value, "jaxpr", value)
        lines = [
            f"{eqn.primitive.name}{_text(eqn.params)}{[_shape(v.aval) for v in eqn.outvars]}" for eqn in jaxpr.eqns
        ]
        return f"{{{';'.join(lines)}}}"
    if isinstance(value, dict):
        # a placement is there on a mesh and missing without one
        items = [(key, item) for key, item in sorted(value.items()) if "sharding" not in key]
        return f"{{{','.join(f'{key}={_text(item)}' for key, item in items)}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    kind = type(value)
    # a sharding, a mesh, a function and a context say where and how, not what
    places = kind.__module__.startswith("jax") and re.search("[Ss]harding|[Mm]esh|Context", kind.__name__)
    if callable(value) or places:
        return kind.__name__
    text = repr(value)
    return kind.__name__ if " at 0x" in text or "Mesh(" in text else text
