"""A program in two halves: the equations of each half, and the values that cross between them (see `split.py`).

The first half runs the equations that its results need. The second half runs the other equations, except sums, such as
the gradient of a bias, whose operands would take more bytes across than the sum. It also runs cheap equations again
(moves, casts, comparisons) if that takes no more bytes across. The values that cross are a small cut, not always the
smallest.

A step is an equation of the program without nested calls (`programs/inline.py`). An atom is an input of a step: the
number of a value, or a constant. Sets of values are sets of their numbers. The functions in `RULES` take the flags
`first`, `second` and `unready` of `program_halves`, for the outputs and inputs of one step.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxscale.compat import rebind, rebind_checkpoint, scan_counts, varying_axes
from jaxscale.pipeline.run.pools import vary
from jaxscale.programs.inline import Constant, InlinedProgram, Step, inline
from jaxscale.trees import leaf_bytes

ARITHMETIC = {"add", "add_any", "max", "min", "mul", "neg", "sign", "sub"}
COMPARISON = {"and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"}
SHAPE = {"broadcast_in_dim", "concatenate", "expand_dims", "iota", "reshape", "rev", "slice", "squeeze", "transpose"}
ALIAS = {"convert_element_type", "copy", "dynamic_slice", "name", "pvary", "sharding_constraint"}
KEYS = {"random_fold_in", "random_split", "random_unwrap", "random_wrap"}
CHEAP = frozenset(ARITHMETIC | COMPARISON | SHAPE | ALIAS | KEYS)
"""Primitives that may run in either half, or in both."""
SUM = "reduce_sum"
"""The primitive whose result may be made by the first half although only the second half needs it."""


class Crossing(NamedTuple):
    """An array that crosses between the halves: its shape, its type and the manual axes that it varies over."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]


class Halves(NamedTuple):
    """A program of flat inputs and outputs in two halves.

    Args:
        cut: the arrays that cross.
        reads_first: for each input, whether the first half reads it.
        reads_second: for each input, whether the second half reads it.
        first: function from the inputs to (outputs, crossing values); an output that the second half makes is `None`.
        second: function from the inputs and the crossing values to the outputs; one that the first half makes is
            `None`.
    """

    cut: tuple[Crossing, ...]
    reads_first: tuple[bool, ...]
    reads_second: tuple[bool, ...]
    first: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    second: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class _Placement(NamedTuple):
    """A step, whether each half runs it and, if it is divided, its halves and the numbers of its crossing values."""

    step: Step
    in_first: bool
    in_second: bool
    halves: Halves | None = None
    cut: tuple[int, ...] = ()


def program_halves(
    jaxpr: Any,
    first: Sequence[bool],
    second: Sequence[bool],
    hidden: Sequence[bool] | None = None,
    unready: Sequence[bool] | None = None,
) -> Halves:
    """Divide a jaxpr into two halves.

    Args:
        jaxpr: a closed jaxpr, or an open one without constants.
        first: for each output, whether the first half makes it.
        second: for each output, whether the second half makes it. If neither does, the output is not computed.
        hidden: for each input, whether the second half cannot read it.
        unready: for each input, whether the first half cannot read it.
    """
    program = inline(jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ()))
    consts = list(getattr(jaxpr, "consts", ()))
    inputs = program.inputs[len(consts) :]
    hidden_inputs = _selected(inputs, hidden or [False] * len(inputs))
    unready_inputs = _selected(inputs, unready or [False] * len(inputs))
    first_outputs, second_outputs = _selected(program.outputs, first), _selected(program.outputs, second)
    # values that the second half can make from its inputs by cheap steps
    cheap_values = set(program.inputs) - hidden_inputs
    for step in program.steps:
        if step.primitive in CHEAP and _inputs(step) <= cheap_values:
            cheap_values.update(_outputs(step))
    first_values = _closure(program, first_outputs)
    if first_values:
        early_sums = _early_sums(program, first_values, second_outputs, cheap_values, unready_inputs)
        first_values |= _closure(program, early_sums)
    ready_values = first_values | set(program.inputs) - unready_inputs

    second_values, placements = set(second_outputs), []
    fresh_numbers = itertools.count(len(program.avals))
    cut: dict[int, Crossing] = {}
    # from the last step to the first; flags per output: early, made by the first half; late, needed by the second
    for step in reversed(program.steps):
        early_flags, late_flags = _membership(step.outputs, first_values), _membership(step.outputs, second_values)
        only_late_flags = [needed and not made for needed, made in zip(late_flags, early_flags, strict=True)]
        if not any(early_flags) and not any(only_late_flags):
            continue
        halves, step_cut = None, ()
        if step.primitive in RULES and not all(early_flags) and not all(only_late_flags):
            unready_flags = [isinstance(atom, int) and atom not in ready_values for atom in step.inputs]
            halves = RULES[step.primitive](step, early_flags, only_late_flags, unready_flags)
        if halves is not None:
            step_cut = tuple(next(fresh_numbers) for _ in halves.cut)
            cut |= zip(step_cut, halves.cut, strict=True)
            second_values |= _selected(step.inputs, halves.reads_second)
            in_second = any(only_late_flags)
        elif any(only_late_flags) and any(early_flags):
            in_second = False
            early_flags = [number is not None for number in step.outputs]
        elif any(only_late_flags):
            in_second = True
            second_values |= _inputs(step)
        else:
            # outputs that the second half needs, and operands that would cross if it makes them
            needed = [number for number in _outputs(step) if number in second_values]
            missing = _inputs(step) - cheap_values - second_values
            in_second = bool(needed) and step.primitive in CHEAP and _bytes(program, missing) <= _bytes(program, needed)
            if in_second:
                second_values |= _inputs(step)
        if halves is not None or not in_second:
            for number, early in zip(step.outputs, early_flags, strict=True):
                if early and number is not None and number in second_values:
                    cut[number] = _crossing(program.avals[number])
        placements.append(_Placement(step, any(early_flags), in_second, halves, step_cut))
    hidden_reads = (number for number in inputs if number in hidden_inputs and number in second_values)
    cut |= {number: _crossing(program.avals[number]) for number in hidden_reads}
    placements.reverse()

    def run(half: int, arguments: Sequence[Any], crossed: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Run half 0 or 1, and return its outputs and all its values by number."""
        values = dict(zip(program.inputs, [*consts, *arguments], strict=True))
        values |= dict(zip(cut if half else (), crossed, strict=True))
        for placement in placements:
            if not (placement.in_first, placement.in_second)[half]:
                continue
            step, operands = placement.step, [_read(values, atom) for atom in placement.step.inputs]
            if placement.halves is None:
                results = operands if step.primitive == "name" else rebind(step.eqn, operands)
            elif half == 0:
                results, step_crossed = placement.halves.first(operands)
                values.update(zip(placement.cut, step_crossed, strict=True))
            else:
                results = placement.halves.second(operands, [values[number] for number in placement.cut])
            values.update((n, v) for n, v in zip(step.outputs, results, strict=True) if n is not None and v is not None)
        outputs = _masked([_read(values, atom) for atom in program.outputs], (first, second)[half])
        return outputs, values

    def run_first(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first half, and return its outputs and the values that cross."""
        outputs, values = run(0, arguments, ())
        return outputs, [values[number] for number in cut]

    first_reads = set(cut) | first_outputs
    for placement in placements:
        if placement.in_first:
            step, halves = placement.step, placement.halves
            first_reads |= _inputs(step) if halves is None else _selected(step.inputs, halves.reads_first)
    reads_first = tuple(number in first_reads for number in inputs)
    reads_second = tuple(number in second_values and number not in hidden_inputs for number in inputs)
    return Halves(tuple(cut.values()), reads_first, reads_second, run_first, lambda *operands: run(1, *operands)[0])


def _early_sums(
    program: InlinedProgram, first_values: set[int], second_values: set[int], cheap: set[int], unready: set[int]
) -> set[int]:
    """Return the sums of the second half that the first half should make, because more bytes would cross for them.

    Args:
        program: the program.
        first_values: values that the first half makes.
        second_values: outputs of the second half.
        cheap: values that the second half can make from its inputs by cheap steps.
        unready: inputs that the first half cannot read.
    """
    needed_values = _closure(program, second_values) - first_values
    # for each value the first half can make: the values that cross if the second half makes it by cheap steps
    base_of = {
        number: set() if number in cheap else {number} for number in first_values | (set(program.inputs) - unready)
    }
    base_of_sum: dict[int, set[int]] = {}
    other_cut: set[int] = set()  # values that cross for other steps
    for step in program.steps:
        if not any(_membership(step.outputs, needed_values)) or any(_membership(step.outputs, first_values)):
            continue
        is_available = all(atom in base_of for atom in _inputs(step))
        base: set[int] = set().union(*(base_of.get(atom, ()) for atom in _inputs(step)))
        if is_available and step.primitive == SUM:
            base_of[_outputs(step)[0]] = set()
            base_of_sum[_outputs(step)[0]] = base
        elif is_available and step.primitive in CHEAP:
            base_of |= dict.fromkeys(_outputs(step), base)
        else:
            other_cut |= base
    other_cut = other_cut.union(*(base_of.get(number, ()) for number in second_values))
    return {
        number for number, base in base_of_sum.items() if _bytes(program, base - other_cut) > _bytes(program, {number})
    }


def _closure(program: InlinedProgram, targets: Iterable[int]) -> set[int]:
    """Return the target values and every value that they depend on."""
    needed_values = set(targets)
    for step in reversed(program.steps):
        output_flags = _membership(step.outputs, needed_values)
        if not any(output_flags):
            continue
        halves = None
        if step.primitive in RULES and not all(output_flags):
            halves = RULES[step.primitive](step, output_flags, [False] * len(output_flags), [False] * len(step.inputs))
        needed_values |= _inputs(step) if halves is None else _selected(step.inputs, halves.reads_first)
    return needed_values


def _divide_scan(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """Divide a scan into two scans over the halves of its body; crossing values are stacked over the iterations."""
    params = step.eqn.params
    consts, carried = scan_counts(params)
    body = params["jaxpr"]
    carry_span = consts, consts + carried
    no_outputs = [False] * len(first)
    early_carry, late_carry = list(first[:carried]), list(second[:carried])
    # carries of the first half: those of its outputs, and, until no new one is found, those that it reads for others
    while True:
        reads = program_halves(body, [*early_carry, *first[carried:]], no_outputs).reads_first[slice(*carry_span)]
        if early_carry == (early_carry := [a or b for a, b in zip(early_carry, reads, strict=True)]):
            break
    # carries of the second half, found the same way among the other carries
    while True:
        late_carry = [a and not b for a, b in zip(late_carry, early_carry, strict=True)]
        halves = program_halves(
            body,
            [*early_carry, *first[carried:]],
            [*late_carry, *second[carried:]],
            [*[False] * consts, *early_carry, *[False] * (len(step.inputs) - carry_span[1])],
            [*unready[:consts], *(not flag for flag in early_carry), *unready[carry_span[1] :]],
        )
        if late_carry == (
            late_carry := [a or b for a, b in zip(late_carry, halves.reads_second[slice(*carry_span)], strict=True)]
        ):
            break
    settings = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}

    def loop(
        half: Callable[[list[Any], Any], tuple[list[Any], list[Any]]],
        reads: Sequence[bool],
        carry: Sequence[bool],
        operands: Sequence[Any],
        crossed: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Run one of the two scans, and return its outputs and the stacked values that cross.

        Args:
            half: function from (inputs of the body, values that cross) to (outputs of the body, values that cross).
            reads: for each operand, whether the half reads it.
            carry: for each carry, whether the half has it.
            operands: inputs of the scan.
            crossed: values that cross to this half, stacked.
        """
        readable = _masked(operands, reads)

        def run_body(state: list[Any], xs: Any) -> Any:
            """Run one iteration of a half of the body."""
            slices, crossed_slices = xs
            outputs, cut = half([*readable[:consts], *state, *slices], crossed_slices)
            return outputs[:carried], (outputs[carried:], cut)

        start = _masked(operands[slice(*carry_span)], carry)
        end, (stacked, cut) = jax.lax.scan(run_body, start, (readable[carry_span[1] :], list(crossed)), **settings)
        return [*end, *stacked], cut

    def run_first(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first scan, and return its outputs and the stacked values that cross."""
        outputs, cut = loop(lambda values, _: halves.first(values), halves.reads_first, early_carry, operands, ())
        return _masked(outputs, first), cut

    def run_second(operands: Sequence[Any], cut: Sequence[Any]) -> list[Any]:
        """Run the second scan, and return its outputs."""
        outputs, _ = loop(lambda *args: (halves.second(*args), []), halves.reads_second, late_carry, operands, cut)
        return _masked(outputs, second)

    reads_first = [*halves.reads_first[:consts], *early_carry, *halves.reads_first[carry_span[1] :]]
    reads_second = [*halves.reads_second[:consts], *late_carry, *halves.reads_second[carry_span[1] :]]
    cut = tuple(crossing._replace(shape=(params["length"], *crossing.shape)) for crossing in halves.cut)
    return Halves(cut, tuple(reads_first), tuple(reads_second), run_first, run_second)


def _divide_cond(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves | None:
    """Divide a `cond` into two with the same index; crossing values of different branches share slots.

    Return `None`, for a step that is not divided, if its branches are of different platforms.
    """
    params = step.eqn.params
    if params.get("branches_platforms") is not None:
        return None
    branch_halves = [program_halves(branch, first, second, None, unready[1:]) for branch in params["branches"]]
    cut: list[Crossing] = []
    slot_lists = []  # for each branch, the index in `cut` of each of its crossing values
    for halves in branch_halves:
        unused_slots = list(range(len(cut)))
        slots = []
        for crossing in halves.cut:
            slot = next((i for i in unused_slots if cut[i][:2] == crossing[:2]), None)
            if slot is None:
                slot = len(cut)
                cut.append(crossing)
            else:
                unused_slots.remove(slot)
                cut[slot] = cut[slot]._replace(varying=cut[slot].varying | crossing.varying)
            slots.append(slot)
        slot_lists.append(slots)
    reads_first = tuple(map(any, zip(*(halves.reads_first for halves in branch_halves), strict=True)))
    reads_second = tuple(map(any, zip(*(halves.reads_second for halves in branch_halves), strict=True)))

    def run_first(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first `cond`, and return its outputs and the values that cross."""

        def branch(halves: Halves, slots: list[int], values: list[Any]) -> tuple[list[Any], list[Any]]:
            """Run the first half of one branch, and return its outputs and an array for every slot of `cut`."""
            outputs, crossed = halves.first(values)
            crossed_of = dict(zip(slots, crossed, strict=True))
            # other branches' slots are filled with zeros
            arrays = [crossed_of[i] if i in crossed_of else jnp.zeros(*crossing[:2]) for i, crossing in enumerate(cut)]
            return outputs, [vary(array, tuple(crossing.varying)) for array, crossing in zip(arrays, cut, strict=True)]

        branches = [functools.partial(branch, *pair) for pair in zip(branch_halves, slot_lists, strict=True)]
        return jax.lax.switch(operands[0], branches, _masked(operands[1:], reads_first))

    def run_second(operands: Sequence[Any], crossed: Sequence[Any]) -> list[Any]:
        """Run the second `cond`, and return its outputs."""

        def branch(halves: Halves, slots: list[int], values: list[Any], crossed: list[Any]) -> list[Any]:
            return halves.second(values, [crossed[slot] for slot in slots])

        branches = [functools.partial(branch, *pair) for pair in zip(branch_halves, slot_lists, strict=True)]
        return jax.lax.switch(operands[0], branches, _masked(operands[1:], reads_second), list(crossed))

    reads = (any(first), *reads_first), (any(second), *reads_second)
    return Halves(tuple(cut), *reads, run_first, run_second)


def _divide_checkpoint(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """Divide a checkpointed program into two checkpointed programs with the same policy."""
    halves = program_halves(step.eqn.params["jaxpr"], first, second, None, unready)

    def run(half: Callable[..., Any], operands: Sequence[Any], reads: Sequence[bool], crossed: Sequence[Any]) -> Any:
        """Run a half as a checkpointed program of the operands that it reads and the values that cross."""
        readable = [value for value, flag in zip(operands, reads, strict=True) if flag]

        def run_half(*arrays: Any) -> Any:
            """Run the half on the operands that it reads, followed by the values that cross."""
            values = iter(arrays[: len(readable)])
            return half([next(values) if flag else None for flag in reads], arrays[len(readable) :])

        return rebind_checkpoint(step.eqn, run_half, [*readable, *crossed])

    return halves._replace(
        first=lambda operands: run(lambda values, _: halves.first(values), operands, halves.reads_first, ()),
        second=lambda operands, cut: run(halves.second, operands, halves.reads_second, cut),
    )


def _divide_barrier(step: Step, first: Sequence[bool], second: Sequence[bool], unready: Sequence[bool]) -> Halves:
    """Divide an optimization barrier into two, around the values of each half."""

    def run(operands: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
        """Return the flagged operands behind a barrier, `None` for the others."""
        values = iter(jax.lax.optimization_barrier([v for v, flag in zip(operands, flags, strict=True) if flag]))
        return [next(values) if flag else None for flag in flags]

    return Halves((), tuple(first), tuple(second), lambda ins: (run(ins, first), []), lambda ins, _: run(ins, second))


RULES = {
    "scan": _divide_scan,
    "cond": _divide_cond,
    "checkpoint": _divide_checkpoint,
    "remat": _divide_checkpoint,
    "remat2": _divide_checkpoint,
    "optimization_barrier": _divide_barrier,
}
"""For each primitive that is divided, the function that divides a step, with the arguments

(step, outputs of the first half, outputs of the second half, inputs that the first half cannot read), all flags.
"""


def _read(values: dict[int, Any], atom: int | Constant) -> Any:
    """Return the value of an atom; `None` if it has not been computed."""
    return atom.value if isinstance(atom, Constant) else values.get(atom)


def _masked(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """Return the flagged values, `None` for the others."""
    return [value if flag else None for value, flag in zip(values, flags, strict=True)]


def _inputs(step: Step) -> set[int]:
    """Return the numbers of the values that a step reads."""
    return {atom for atom in step.inputs if isinstance(atom, int)}


def _outputs(step: Step) -> list[int]:
    """Return the numbers of the results of a step that are read later."""
    return [number for number in step.outputs if number is not None]


def _membership(numbers: Sequence[int | None], members: set[int]) -> list[bool]:
    """Return, for each number, whether it is among the members."""
    return [number in members for number in numbers]


def _selected(atoms: Sequence[int | Constant], flags: Sequence[bool]) -> set[int]:
    """Return the numbers of the flagged atoms, without constants."""
    return {atom for atom, flag in zip(atoms, flags, strict=True) if flag and isinstance(atom, int)}


def _bytes(program: InlinedProgram, numbers: Iterable[int]) -> int:
    """Return the bytes of the values with these numbers."""
    return sum(leaf_bytes(program.avals[number]) for number in numbers)


def _crossing(aval: Any) -> Crossing:
    """Return the `Crossing` of a value with this shape and type."""
    return Crossing(aval.shape, aval.dtype, varying_axes(aval))
