"""Which equations of a program run in its first half, which in its second, and what crosses: see `split.py`.

The first half runs what its results need. Of the rest, the second half runs everything but sums (of a bias, of a gain)
for which alone something larger would cross; and it runs again what only moves, casts or compares numbers, where that
takes no more bytes across. So what crosses is a small cut, not always the smallest.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxscale.compat import rebind, rebind_checkpoint, scan_counts, varying_axes
from jaxscale.costs.inline import Constant, Program, Step, inline
from jaxscale.trees import leaf_bytes

ARITHMETIC = {"add", "add_any", "max", "min", "mul", "neg", "sign", "sub"}
COMPARISON = {"and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"}
SHAPE = {"broadcast_in_dim", "concatenate", "expand_dims", "iota", "reshape", "rev", "slice", "squeeze", "transpose"}
ALIAS = {"convert_element_type", "copy", "dynamic_slice", "name", "pvary", "sharding_constraint"}
KEYS = {"random_fold_in", "random_split", "random_unwrap", "random_wrap"}
CHEAP = frozenset(ARITHMETIC | COMPARISON | SHAPE | ALIAS | KEYS)
"""Primitives that may run in either half, or in both."""
SUM = "reduce_sum"


class Crossing(NamedTuple):
    """Shape, type and manual axes that it varies over, of an array that crosses."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]


class Halves(NamedTuple):
    """A program of flat inputs and outputs in two halves.

    Args:
        cut: what crosses.
        reads_first: of each input, whether the first half reads it; the second: `reads_second`.
        first: from the inputs to all outputs (`None` where the second half makes it) and what crosses.
        second: from the inputs and what crossed to all outputs (`None` where the first half makes it).
    """

    cut: tuple[Crossing, ...]
    reads_first: tuple[bool, ...]
    reads_second: tuple[bool, ...]
    first: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    second: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class _Move(NamedTuple):
    """A step, where it runs, and where it is divided itself, how; `cut` are the numbers of what crosses inside."""

    step: Step
    first: bool
    second: bool
    halves: Halves | None = None
    cut: tuple[int, ...] = ()


def program_halves(
    closed: Any,
    first: Sequence[bool],
    second: Sequence[bool],
    hidden: Sequence[bool] | None = None,
    unready: Sequence[bool] | None = None,
) -> Halves:
    """The halves of a jaxpr.

    Args:
        closed: a closed jaxpr, or an open one without constants.
        first: of each output, whether the first half makes it.
        second: of each output, whether the second half makes it; one that neither makes is not made.
        hidden: of each input, whether the second half cannot read it.
        unready: of each input, whether the first half cannot.
    """
    program, consts = inline(_closed(closed)), list(getattr(closed, "consts", ()))
    inputs = program.inputs[len(consts) :]
    shut = _taken(inputs, hidden or [False] * len(inputs))
    missing = _taken(inputs, unready or [False] * len(inputs))
    results = _taken(program.outputs, first), _taken(program.outputs, second)
    free = set(program.inputs) - shut
    for step in program.steps:
        if step.primitive in CHEAP and _atoms(step) <= free:
            free.update(_made(step))
    early = _closure(program, results[0])
    if early:
        early |= _closure(program, _sums(program, early, results[1], free, missing))
    ready = early | set(program.inputs) - missing

    late, cut, moves = set(results[1]), [], []
    numbers = itertools.count(len(program.avals))
    crossings: list[Crossing] = []
    for step in reversed(program.steps):
        ours, theirs = _flags(step.outputs, early), _flags(step.outputs, late)
        only = [later and not sooner for later, sooner in zip(theirs, ours, strict=True)]
        if not any(ours) and not any(only):
            continue
        halves, inside = None, ()
        if step.primitive in RULES and not all(ours) and not all(only):
            halves = RULES[step.primitive](step, ours, only, _unready(step, ready))
        if halves is not None:
            inside = tuple(next(numbers) for _ in halves.cut)
            cut += inside
            crossings += halves.cut
            late |= _chosen(step, halves.reads_second)
            again = any(only)
        elif any(only) and any(ours):
            again = False
            ours = [number is not None for number in step.outputs]
        elif any(only):
            again = True
            late |= _atoms(step)
        else:
            shared = [number for number in _made(step) if number in late]
            rest = _atoms(step) - free - late
            again = bool(shared) and step.primitive in CHEAP and _bytes(program, rest) <= _bytes(program, shared)
            if again:
                late |= _atoms(step)
        if halves is not None or not again:
            crossing = [number for number, ok in zip(step.outputs, ours, strict=True) if ok and number in late]
            cut += crossing
            crossings += [_crossing(program.avals[number]) for number in crossing if number is not None]
        moves.append(_Move(step, any(ours), again, halves, inside))
    for number in inputs:
        if number in shut and number in late:
            cut.append(number)
            crossings.append(_crossing(program.avals[number]))
    moves.reverse()

    def run(values: dict[int, Any], half: int) -> None:
        def read(atom: int | Constant) -> Any:
            return atom.value if isinstance(atom, Constant) else values.get(atom)

        for move in moves:
            step, given = move.step, [read(atom) for atom in move.step.inputs]
            if not (move.first, move.second)[half]:
                continue
            if move.halves is None:
                made = given if step.primitive == "name" else rebind(step.eqn, given)
            elif half == 0:
                made, crossed = move.halves.first(given)
                values.update(zip(move.cut, crossed, strict=True))
            else:
                made = move.halves.second(given, [values[number] for number in move.cut])
            values.update((n, v) for n, v in zip(step.outputs, made, strict=True) if n is not None and v is not None)

    def outputs(values: dict[int, Any], wanted: Sequence[bool]) -> list[Any]:
        return [
            (atom.value if isinstance(atom, Constant) else values[atom]) if flag else None
            for atom, flag in zip(program.outputs, wanted, strict=True)
        ]

    def run_first(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = dict(zip(program.inputs, [*consts, *given], strict=True))
        run(values, 0)
        return outputs(values, first), [values[number] for number in cut]

    def run_second(given: Sequence[Any], crossed: Sequence[Any]) -> list[Any]:
        values = dict(zip(program.inputs, [*consts, *given], strict=True)) | dict(zip(cut, crossed, strict=True))
        run(values, 1)
        return outputs(values, second)

    needed = set(cut) | results[0]
    for move in moves:
        if move.first:
            needed |= _atoms(move.step) if move.halves is None else _chosen(move.step, move.halves.reads_first)
    reads_first = tuple(number in needed for number in inputs)
    reads_second = tuple(number in late and number not in shut for number in inputs)
    return Halves(tuple(crossings), reads_first, reads_second, run_first, run_second)


def _sums(program: Program, early: set[int], late: set[int], free: set[int], missing: set[int]) -> set[int]:
    """Sums that only the second half needs, and that the first should make: it has all they take, by cheap steps, and
    more bytes would cross for them alone than they have.
    """
    wanted = _closure(program, late) - early
    # of each value the first half could make, what would cross if the second half made it, cheap steps between them
    across = {number: set() if number in free else {number} for number in early | (set(program.inputs) - missing)}
    candidates: dict[int, set[int]] = {}
    held: set[int] = set()
    for step in program.steps:
        if not any(_flags(step.outputs, wanted)) or any(_flags(step.outputs, early)):
            continue
        ready = all(atom in across for atom in _atoms(step))
        found: set[int] = set().union(*(across.get(atom, ()) for atom in _atoms(step)))
        if ready and step.primitive == SUM:
            across[_made(step)[0]] = set()
            candidates[_made(step)[0]] = found
        elif ready and step.primitive in CHEAP:
            across |= dict.fromkeys(_made(step), found)
        else:
            held |= found
    held = held.union(*(across.get(number, ()) for number in late))
    return {number for number, base in candidates.items() if _bytes(program, base - held) > _bytes(program, {number})}


def _closure(program: Program, wanted: Iterable[int]) -> set[int]:
    """Every value that the wanted ones are made of, themselves included."""
    found = set(wanted)
    for step in reversed(program.steps):
        made = _flags(step.outputs, found)
        if not any(made):
            continue
        halves = None
        if step.primitive in RULES and not all(made):
            halves = RULES[step.primitive](step, made, [False] * len(made), [False] * len(step.inputs))
        found |= _atoms(step) if halves is None else _chosen(step, halves.reads_first)
    return found


def _scan(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """A scan as two, over the halves of its body: what crosses is stacked over the iterations."""
    params = step.eqn.params
    consts, carried = scan_counts(params)
    body = params["jaxpr"]
    split = consts, consts + carried
    none = [False] * len(first)
    early, late = list(first[:carried]), list(second[:carried])
    while True:
        reads = program_halves(body, [*early, *first[carried:]], none).reads_first[slice(*split)]
        if early == (early := [a or b for a, b in zip(early, reads, strict=True)]):
            break
    while True:
        late = [a and not b for a, b in zip(late, early, strict=True)]
        halves = program_halves(
            body,
            [*early, *first[carried:]],
            [*late, *second[carried:]],
            [*[False] * consts, *early, *[False] * (len(step.inputs) - split[1])],
            [*unready[:consts], *(not flag for flag in early), *unready[split[1] :]],
        )
        if late == (late := [a or b for a, b in zip(late, halves.reads_second[slice(*split)], strict=True)]):
            break
    made_first, made_second = [*early, *first[carried:]], [*late, *second[carried:]]
    settings = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}

    def loop(given: Sequence[Any], reads: Sequence[bool], carry: Sequence[bool], made: Sequence[bool], run: Any) -> Any:
        """One of the two scans; `crossed` are stacked values for the body."""
        values, crossed = given
        kept = [value if flag else None for value, flag in zip(values, reads, strict=True)]
        kept[consts : split[1]] = [None] * carried

        def one(state: list[Any], x: Any) -> Any:
            slices, own = x
            outs, cut = run([*kept[:consts], *state, *slices], own)
            outs = [value if flag else None for value, flag in zip(outs, made, strict=True)]
            return outs[:carried], (outs[carried:], cut)

        start = [value if flag else None for value, flag in zip(values[slice(*split)], carry, strict=True)]
        end, (stacked, cut) = jax.lax.scan(one, start, (kept[split[1] :], crossed), **settings)
        return [*end, *stacked], cut

    def run_first(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs, cut = loop((given, []), halves.reads_first, early, made_first, lambda values, _: halves.first(values))
        return [value if flag else None for value, flag in zip(outs, first, strict=True)], cut

    def run_second(given: Sequence[Any], cut: Sequence[Any]) -> list[Any]:
        def run(values: Any, own: Any) -> tuple[list[Any], list[Any]]:
            return halves.second(values, own), []

        outs, _ = loop((given, list(cut)), halves.reads_second, late, made_second, run)
        return [value if flag else None for value, flag in zip(outs, second, strict=True)]

    reads_first = [*halves.reads_first[:consts], *early, *halves.reads_first[split[1] :]]
    reads_second = [*halves.reads_second[:consts], *late, *halves.reads_second[split[1] :]]
    cut = tuple(crossing._replace(shape=(params["length"], *crossing.shape)) for crossing in halves.cut)
    return Halves(cut, tuple(reads_first), tuple(reads_second), run_first, run_second)


def _cond(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves | None:
    """A branch as two, on the same index: what crosses shares places between the branches."""
    params = step.eqn.params
    if params.get("branches_platforms") is not None:
        return None
    parts = [program_halves(branch, first, second, None, unready[1:]) for branch in params["branches"]]
    cut: list[Crossing] = []
    places = []
    for part in parts:
        left = list(range(len(cut)))
        own = []
        for crossing in part.cut:
            place = next((i for i in left if cut[i][:2] == crossing[:2]), None)
            if place is None:
                place = len(cut)
                cut.append(crossing)
            else:
                left.remove(place)
                cut[place] = cut[place]._replace(varying=cut[place].varying | crossing.varying)
            own.append(place)
        places.append(own)
    reads = [
        list(map(any, zip(*(getattr(part, name) for part in parts), strict=True)))
        for name in ("reads_first", "reads_second")
    ]

    def run_first(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def branch(part: Halves, own: list[int]) -> Callable[[list[Any]], Any]:
            def run(values: list[Any]) -> Any:
                outs, crossed = part.first(values)
                by_place = dict(zip(own, crossed, strict=True))
                return outs, [
                    _vary(by_place[i] if i in by_place else jnp.zeros(*crossing[:2]), crossing.varying)
                    for i, crossing in enumerate(cut)
                ]

            return run

        kept = [value if flag else None for value, flag in zip(given[1:], reads[0], strict=True)]
        return jax.lax.switch(given[0], [branch(*one) for one in zip(parts, places, strict=True)], kept)

    def run_second(given: Sequence[Any], crossed: Sequence[Any]) -> list[Any]:
        def branch(part: Halves, own: list[int]) -> Callable[[list[Any], list[Any]], Any]:
            return lambda values, crossed: part.second(values, [crossed[place] for place in own])

        kept = [value if flag else None for value, flag in zip(given[1:], reads[1], strict=True)]
        runs = [branch(*one) for one in zip(parts, places, strict=True)]
        return jax.lax.switch(given[0], runs, kept, list(crossed))

    return Halves(tuple(cut), (any(first), *reads[0]), (any(second), *reads[1]), run_first, run_second)


def _checkpoint(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """A checkpointed program as two: each is computed again as the whole would be, under the same policy."""
    halves = program_halves(step.eqn.params["jaxpr"], first, second, None, unready)

    def run(half: Callable[..., Any], given: Sequence[Any], reads: Sequence[bool], crossed: Sequence[Any]) -> Any:
        read = [value for value, flag in zip(given, reads, strict=True) if flag]

        def part(*arrays: Any) -> Any:
            own = iter(arrays[: len(read)])
            return half([next(own) if flag else None for flag in reads], arrays[len(read) :])

        return rebind_checkpoint(step.eqn, part, [*read, *crossed])

    return halves._replace(
        first=lambda given: run(lambda values, _: halves.first(values), given, halves.reads_first, ()),
        second=lambda given, cut: run(halves.second, given, halves.reads_second, cut),
    )


def _barrier(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """A barrier around what is of one half, and one around what is of the other."""

    def run(given: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
        passed = iter(jax.lax.optimization_barrier([v for v, flag in zip(given, flags, strict=True) if flag]))
        return [next(passed) if flag else None for flag in flags]

    return Halves(
        (), tuple(first), tuple(second), lambda given: (run(given, first), []), lambda given, _: run(given, second)
    )


RULES = {
    "scan": _scan,
    "cond": _cond,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
    "optimization_barrier": _barrier,
}
"""Of the primitives that can be divided: (step, results of the first half, of the second, inputs not ready) -> Halves.
"""


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())


def _atoms(step: Step) -> set[int]:
    return {atom for atom in step.inputs if isinstance(atom, int)}


def _made(step: Step) -> list[int]:
    return [number for number in step.outputs if number is not None]


def _flags(numbers: Sequence[int | None], chosen: set[int]) -> list[bool]:
    return [number in chosen for number in numbers]


def _taken(atoms: Sequence[int | Constant], flags: Sequence[bool]) -> set[int]:
    return {atom for atom, flag in zip(atoms, flags, strict=True) if flag and isinstance(atom, int)}


def _chosen(step: Step, flags: Sequence[bool]) -> set[int]:
    return _taken(step.inputs, flags)


def _unready(step: Step, ready: set[int]) -> list[bool]:
    return [isinstance(atom, int) and atom not in ready for atom in step.inputs]


def _bytes(program: Program, numbers: Iterable[int]) -> int:
    return sum(leaf_bytes(program.avals[number]) for number in numbers)


def _crossing(aval: Any) -> Crossing:
    return Crossing(aval.shape, aval.dtype, varying_axes(aval))


def _vary(value: Any, axes: frozenset[str]) -> Any:
    missing = tuple(axes - varying_axes(value))
    return jax.lax.pcast(value, missing, to="varying") if missing else value
