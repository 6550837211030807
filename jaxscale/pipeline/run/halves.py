"""A program in two halves: the equations of each half, and the values that cross between them (see `split.py`).

The first half runs the equations that its results need. The second half runs the other equations. There is one
exception: the first half also computes a sum, such as the gradient of a bias, if the operands of the sum have more
bytes than the sum itself. The second half also repeats cheap equations (moves, casts, elementwise steps) if this does
not increase the bytes that cross or stay in memory. Few values cross, but not always the fewest possible.

A step is an equation of the program without nested calls (`programs/inline.py`). Each value of a program has a number,
which identifies it. Sets of values are sets of these numbers. An atom is an input of a step: the number of a value, or
a constant.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

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
"""The primitive whose result the first half may compute although only the second half needs it."""
Flags: TypeAlias = Sequence[bool]
"""A boolean for each output, or for each input, of a program or step."""


class Crossing(NamedTuple):
    """The shape and type of a value that crosses between the halves, and the manual axes over which it varies."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]


class Halves(NamedTuple):
    """A program with flat inputs and outputs, in two halves.

    Args:
        crossings: the `Crossing` of each value that crosses from the first half to the second.
        is_read_by_first: for each input, whether the first half reads it.
        is_read_by_second: for each input, whether the second half reads it.
        run_first: maps the inputs to (outputs, crossing values). Outputs that the second half computes are `None`.
        run_second: maps (inputs, crossing values) to the outputs. Outputs that the first half computes are `None`.
    """

    crossings: tuple[Crossing, ...]
    is_read_by_first: tuple[bool, ...]
    is_read_by_second: tuple[bool, ...]
    run_first: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    run_second: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class _Placement(NamedTuple):
    """The halves in which a step runs.

    Args:
        step: the step.
        is_in_first: whether the first half of the program runs the step or a half of the step.
        is_in_second: whether the second half of the program runs the step or a half of the step.
        halves: the two halves of the step; `None` if the step is not divided.
        crossing_numbers: numbers of the values that cross between the halves of the step.
    """

    step: Step
    is_in_first: bool
    is_in_second: bool
    halves: Halves | None = None
    crossing_numbers: tuple[int, ...] = ()


def program_halves(
    jaxpr: Any,
    first_flags: Flags,
    second_flags: Flags,
    hidden_flags: Flags | None = None,
    unready_flags: Flags | None = None,
) -> Halves:
    """Divide a jaxpr into two halves.

    Args:
        jaxpr: a closed jaxpr, or an open jaxpr without constants.
        first_flags: for each output, whether the first half computes it.
        second_flags: for each output, whether the second half computes it. If neither half does, the output is dropped.
        hidden_flags: for each input, whether it is hidden from the second half; `None`: no input is hidden.
        unready_flags: for each input, whether the first half cannot read it; `None`: it can read all inputs.
    """
    program = inline(jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ()))
    consts = list(getattr(jaxpr, "consts", ()))
    inputs = program.inputs[len(consts) :]
    hidden_inputs = _numbers(inputs, hidden_flags or [False] * len(inputs))
    unready_inputs = _numbers(inputs, unready_flags or [False] * len(inputs))
    first_outputs, second_outputs = (_numbers(program.outputs, flags) for flags in (first_flags, second_flags))
    # for each value that the second half can compute by cheap steps: the inputs from which it computes the value
    inputs_of_cheap = {number: {number} for number in set(program.inputs) - hidden_inputs}
    for step in program.steps:
        if step.primitive in CHEAP and _input_numbers(step) <= inputs_of_cheap.keys():
            read_inputs = set().union(*(inputs_of_cheap[number] for number in _input_numbers(step)))
            inputs_of_cheap |= dict.fromkeys(_output_numbers(step), read_inputs)
    first_values = _closure(program, first_outputs)
    if first_values:
        early_sums = _early_sums(program, first_values, second_outputs, set(inputs_of_cheap), unready_inputs)
        first_values |= _closure(program, early_sums)
    ready_values = first_values | set(program.inputs) - unready_inputs

    second_values, placements = set(second_outputs), []
    fresh_numbers = itertools.count(len(program.avals))
    crossing_of: dict[int, Crossing] = {}  # by the number of the value that crosses
    # from the last step to the first; an output is early if the first half computes it, late if the second needs it
    for step in reversed(program.steps):
        early_flags, late_flags = _membership(step.outputs, first_values), _membership(step.outputs, second_values)
        only_late_flags = [is_late and not is_early for is_late, is_early in zip(late_flags, early_flags, strict=True)]
        if not any(early_flags) and not any(only_late_flags):
            continue
        halves, crossing_numbers = None, ()
        if step.primitive in RULES and not all(early_flags) and not all(only_late_flags):
            not_ready_flags = [isinstance(atom, int) and atom not in ready_values for atom in step.inputs]
            halves = RULES[step.primitive](step, early_flags, only_late_flags, not_ready_flags)
        if halves is not None:
            crossing_numbers = tuple(next(fresh_numbers) for _ in halves.crossings)
            crossing_of |= zip(crossing_numbers, halves.crossings, strict=True)
            second_values |= _numbers(step.inputs, halves.is_read_by_second)
            is_in_second = any(only_late_flags)
        elif any(only_late_flags) and any(early_flags):
            is_in_second = False
            early_flags = [number is not None for number in step.outputs]
        elif any(only_late_flags):
            is_in_second = True
            second_values |= _input_numbers(step)
        else:
            needed_outputs = [number for number in _output_numbers(step) if number in second_values]
            # the bytes that would cross or stay in memory if the second half computed the needed outputs
            new_operands = _input_numbers(step) - second_values
            new_inputs = set().union(*(inputs_of_cheap.get(number, ()) for number in new_operands)) - second_values
            held_bytes = _byte_count(program, (new_operands - inputs_of_cheap.keys()) | new_inputs)
            is_cheap = step.primitive in CHEAP and held_bytes <= _byte_count(program, needed_outputs)
            if is_in_second := bool(needed_outputs) and is_cheap:
                second_values |= _input_numbers(step)
        if halves is not None or not is_in_second:
            for number, is_early in zip(step.outputs, early_flags, strict=True):
                if is_early and number is not None and number in second_values:
                    crossing_of[number] = _crossing(program.avals[number])
        placements.append(_Placement(step, any(early_flags), is_in_second, halves, crossing_numbers))
    crossing_of |= {n: _crossing(program.avals[n]) for n in inputs if n in hidden_inputs and n in second_values}
    placements.reverse()

    def run_half(
        half_index: int, arguments: Sequence[Any], crossing_values: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """Run half 0 or 1, and return its outputs and a dict of all its values by their numbers."""
        values = dict(zip(program.inputs, [*consts, *arguments], strict=True))
        values |= dict(zip(crossing_of if half_index else (), crossing_values, strict=True))
        for placement in placements:
            if not (placement.is_in_first, placement.is_in_second)[half_index]:
                continue
            step, operands = placement.step, [_read(values, atom) for atom in placement.step.inputs]
            if placement.halves is None:
                results = operands if step.primitive == "name" else rebind(step.eqn, operands)
            elif half_index == 0:
                results, step_crossing_values = placement.halves.run_first(operands)
                values.update(zip(placement.crossing_numbers, step_crossing_values, strict=True))
            else:
                step_crossing_values = [values[number] for number in placement.crossing_numbers]
                results = placement.halves.run_second(operands, step_crossing_values)
            values.update((n, v) for n, v in zip(step.outputs, results, strict=True) if n is not None and v is not None)
        outputs = _masked([_read(values, atom) for atom in program.outputs], (first_flags, second_flags)[half_index])
        return outputs, values

    def run_first(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first half, and return its outputs and the values that cross."""
        outputs, values = run_half(0, arguments, ())
        return outputs, [values[number] for number in crossing_of]

    def run_second(arguments: Sequence[Any], crossing_values: Sequence[Any]) -> list[Any]:
        """Run the second half, and return its outputs."""
        return run_half(1, arguments, crossing_values)[0]

    first_operands = set(crossing_of) | first_outputs
    for placement in placements:
        if placement.is_in_first:
            step, halves = placement.step, placement.halves
            first_operands |= _input_numbers(step) if halves is None else _numbers(step.inputs, halves.is_read_by_first)
    is_read_by_first = tuple(_membership(inputs, first_operands))
    is_read_by_second = tuple(_membership(inputs, second_values - hidden_inputs))
    return Halves(tuple(crossing_of.values()), is_read_by_first, is_read_by_second, run_first, run_second)


def _early_sums(
    program: InlinedProgram,
    first_values: set[int],
    second_outputs: set[int],
    cheap_values: set[int],
    unready_inputs: set[int],
) -> set[int]:
    """Return the sums that the first half should compute for the second half, so that fewer bytes cross.

    Args:
        program: the program.
        first_values: values that the first half computes.
        second_outputs: outputs of the second half.
        cheap_values: values that the second half can compute from its inputs by cheap steps.
        unready_inputs: inputs that the first half cannot read.
    """
    needed_values = _closure(program, second_outputs) - first_values
    # for each value that the first half can compute: what crosses if the second half computes it by cheap steps
    available_values = first_values | (set(program.inputs) - unready_inputs)
    sources_of = {number: set() if number in cheap_values else {number} for number in available_values}
    sources_of_sum: dict[int, set[int]] = {}
    other_crossing_values: set[int] = set()  # values that cross for other steps
    for step in program.steps:
        if not any(_membership(step.outputs, needed_values)) or any(_membership(step.outputs, first_values)):
            continue
        is_available = all(atom in sources_of for atom in _input_numbers(step))
        source_values: set[int] = set().union(*(sources_of.get(atom, ()) for atom in _input_numbers(step)))
        if is_available and step.primitive == SUM:
            sources_of[_output_numbers(step)[0]] = set()
            sources_of_sum[_output_numbers(step)[0]] = source_values
        elif is_available and step.primitive in CHEAP:
            sources_of |= dict.fromkeys(_output_numbers(step), source_values)
        else:
            other_crossing_values |= source_values
    other_crossing_values.update(*(sources_of.get(number, ()) for number in second_outputs))
    return {
        number
        for number, source_values in sources_of_sum.items()
        if _byte_count(program, source_values - other_crossing_values) > _byte_count(program, {number})
    }


def _closure(program: InlinedProgram, targets: Iterable[int]) -> set[int]:
    """Return the target values and all values on which they depend."""
    needed_values = set(targets)
    for step in reversed(program.steps):
        output_flags = _membership(step.outputs, needed_values)
        if not any(output_flags):
            continue
        halves = None
        if step.primitive in RULES and not all(output_flags):
            halves = RULES[step.primitive](step, output_flags, [False] * len(output_flags), [False] * len(step.inputs))
        needed_values |= _input_numbers(step) if halves is None else _numbers(step.inputs, halves.is_read_by_first)
    return needed_values


def _divide_scan(step: Step, first_flags: Flags, second_flags: Flags, unready_flags: Flags) -> Halves:
    """Divide a scan into two scans, each over a half of the body. Crossing values are stacked over the iterations."""
    params = step.eqn.params
    const_count, carry_count = scan_counts(params)
    body = params["jaxpr"]
    carry_end = const_count + carry_count  # the carries are the inputs const_count to carry_end - 1
    carry_span = slice(const_count, carry_end)
    no_output_flags = [False] * len(first_flags)
    # for each carry, whether the first scan has it (early) and whether the second scan has it (late)
    early_carries, late_carries = list(first_flags[:carry_count]), list(second_flags[:carry_count])
    # the first scan also needs every carry that its body reads; repeat this until the set no longer grows
    while True:
        body_first_flags = [*early_carries, *first_flags[carry_count:]]
        read_flags = program_halves(body, body_first_flags, no_output_flags).is_read_by_first[carry_span]
        if early_carries == (early_carries := [a or b for a, b in zip(early_carries, read_flags, strict=True)]):
            break
    # the carries of the second scan follow in the same way from the remaining carries
    while True:
        late_carries = [is_late and not is_early for is_late, is_early in zip(late_carries, early_carries, strict=True)]
        halves = program_halves(
            body,
            [*early_carries, *first_flags[carry_count:]],
            [*late_carries, *second_flags[carry_count:]],
            [*[False] * const_count, *early_carries, *[False] * (len(step.inputs) - carry_end)],
            [*unready_flags[:const_count], *(not flag for flag in early_carries), *unready_flags[carry_end:]],
        )
        read_flags = halves.is_read_by_second[carry_span]
        if late_carries == (late_carries := [a or b for a, b in zip(late_carries, read_flags, strict=True)]):
            break
    settings = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}

    def run_scan(
        run_half: Callable[[list[Any], Any], tuple[list[Any], list[Any]]],
        operand_flags: Flags,
        carry_flags: Flags,
        operands: Sequence[Any],
        stacked_inputs: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Run one of the two scans, and return its outputs and the stacked values that cross to the other scan.

        Args:
            run_half: function from (inputs of the body, values that cross to this half) to (outputs of the body, values
                that cross from this half).
            operand_flags: for each operand, whether this half reads it.
            carry_flags: for each carry, whether this half has it.
            operands: inputs of the scan.
            stacked_inputs: values that cross to this half, stacked over the iterations.
        """
        readable_operands = _masked(operands, operand_flags)

        def run_body(carry: list[Any], xs: Any) -> Any:
            """Run one iteration of a half of the body; `xs` is (slices of operands, values that cross to this half)."""
            slices, crossing_inputs = xs
            body_inputs = [*readable_operands[:const_count], *carry, *slices]
            outputs, crossing_outputs = run_half(body_inputs, crossing_inputs)
            return outputs[:carry_count], (outputs[carry_count:], crossing_outputs)

        first_carry = _masked(operands[carry_span], carry_flags)
        xs = readable_operands[carry_end:], list(stacked_inputs)
        last_carry, (stacked_outputs, stacked_crossings) = jax.lax.scan(run_body, first_carry, xs, **settings)
        return [*last_carry, *stacked_outputs], stacked_crossings

    def run_first(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first scan, and return its outputs and the stacked values that cross."""
        outputs, stacked_crossings = run_scan(
            lambda values, _: halves.run_first(values), halves.is_read_by_first, early_carries, operands, ()
        )
        return _masked(outputs, first_flags), stacked_crossings

    def run_second(operands: Sequence[Any], stacked_crossings: Sequence[Any]) -> list[Any]:
        """Run the second scan, and return its outputs."""
        outputs, _ = run_scan(
            lambda *args: (halves.run_second(*args), []),
            halves.is_read_by_second,
            late_carries,
            operands,
            stacked_crossings,
        )
        return _masked(outputs, second_flags)

    is_read_by_first = [*halves.is_read_by_first[:const_count], *early_carries, *halves.is_read_by_first[carry_end:]]
    is_read_by_second = [*halves.is_read_by_second[:const_count], *late_carries, *halves.is_read_by_second[carry_end:]]
    crossings = tuple(crossing._replace(shape=(params["length"], *crossing.shape)) for crossing in halves.crossings)
    return Halves(crossings, tuple(is_read_by_first), tuple(is_read_by_second), run_first, run_second)


def _divide_cond(step: Step, first_flags: Flags, second_flags: Flags, unready_flags: Flags) -> Halves | None:
    """Divide a `cond` into two with the same index. Return `None` if the branches are for different platforms."""
    params = step.eqn.params
    if params.get("branches_platforms") is not None:
        return None
    branch_halves = [
        program_halves(branch, first_flags, second_flags, None, unready_flags[1:]) for branch in params["branches"]
    ]
    crossings: list[Crossing] = []  # one for each slot; crossing values of different branches share slots
    slots_by_branch = []  # for each branch, the slot of each of its crossing values
    for halves in branch_halves:
        unused_slots = list(range(len(crossings)))
        slots = []
        for crossing in halves.crossings:
            slot = next((i for i in unused_slots if crossings[i][:2] == crossing[:2]), None)
            if slot is None:
                slot = len(crossings)
                crossings.append(crossing)
            else:
                unused_slots.remove(slot)
                crossings[slot] = crossings[slot]._replace(varying=crossings[slot].varying | crossing.varying)
            slots.append(slot)
        slots_by_branch.append(slots)
    is_read_by_first = tuple(map(any, zip(*(halves.is_read_by_first for halves in branch_halves), strict=True)))
    is_read_by_second = tuple(map(any, zip(*(halves.is_read_by_second for halves in branch_halves), strict=True)))

    def run_first(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first `cond`, and return its outputs and the values that cross."""

        def run_branch(halves: Halves, slots: list[int], values: list[Any]) -> tuple[list[Any], list[Any]]:
            """Run the first half of one branch.

            Return its outputs and its crossing values by slot, with zeros in the slots of other branches.
            """
            outputs, crossing_values = halves.run_first(values)
            value_of_slot = dict(zip(slots, crossing_values, strict=True))
            slot_arrays = [
                value_of_slot[slot] if slot in value_of_slot else jnp.zeros(*crossing[:2])
                for slot, crossing in enumerate(crossings)
            ]
            varying_axes_of_slots = [tuple(crossing.varying) for crossing in crossings]
            return outputs, list(map(vary, slot_arrays, varying_axes_of_slots))

        branches = [functools.partial(run_branch, *pair) for pair in zip(branch_halves, slots_by_branch, strict=True)]
        return jax.lax.switch(operands[0], branches, _masked(operands[1:], is_read_by_first))

    def run_second(operands: Sequence[Any], slot_arrays: Sequence[Any]) -> list[Any]:
        """Run the second `cond`, and return its outputs."""

        def run_branch(halves: Halves, slots: list[int], values: list[Any], slot_arrays: list[Any]) -> list[Any]:
            return halves.run_second(values, [slot_arrays[slot] for slot in slots])

        branches = [functools.partial(run_branch, *pair) for pair in zip(branch_halves, slots_by_branch, strict=True)]
        return jax.lax.switch(operands[0], branches, _masked(operands[1:], is_read_by_second), list(slot_arrays))

    # the first operand is the index of the branch
    read_flags_by_half = (any(first_flags), *is_read_by_first), (any(second_flags), *is_read_by_second)
    return Halves(tuple(crossings), *read_flags_by_half, run_first, run_second)


def _divide_checkpoint(step: Step, first_flags: Flags, second_flags: Flags, unready_flags: Flags) -> Halves:
    """Divide a checkpointed program into two checkpointed programs with the same policy."""
    halves = program_halves(step.eqn.params["jaxpr"], first_flags, second_flags, None, unready_flags)

    def run_checkpoint(
        run_half: Callable[..., Any], operands: Sequence[Any], read_flags: Flags, crossing_values: Sequence[Any]
    ) -> Any:
        """Run a half as a checkpointed program. Its inputs are the operands that it reads and the crossing values."""
        readable_operands = [operand for operand, is_read in zip(operands, read_flags, strict=True) if is_read]

        def run_on_arrays(*arrays: Any) -> Any:
            """Run the half; `arrays` are the operands that it reads, followed by the values that cross."""
            operand_iterator = iter(arrays[: len(readable_operands)])
            all_operands = [next(operand_iterator) if is_read else None for is_read in read_flags]
            return run_half(all_operands, arrays[len(readable_operands) :])

        return rebind_checkpoint(step.eqn, run_on_arrays, [*readable_operands, *crossing_values])

    def run_first(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return run_checkpoint(lambda values, _: halves.run_first(values), operands, halves.is_read_by_first, ())

    def run_second(operands: Sequence[Any], crossing_values: Sequence[Any]) -> list[Any]:
        return run_checkpoint(halves.run_second, operands, halves.is_read_by_second, crossing_values)

    return halves._replace(run_first=run_first, run_second=run_second)


def _divide_barrier(
    step: Step, first_output_flags: Flags, second_output_flags: Flags, unready_input_flags: Flags
) -> Halves:
    """Divide an optimization barrier into two barriers, each for the values of one half."""

    def barrier(operands: Sequence[Any], flags: Flags) -> list[Any]:
        """Pass the flagged operands through a barrier, and return them with `None` in place of the other operands."""
        values = iter(jax.lax.optimization_barrier([v for v, flag in zip(operands, flags, strict=True) if flag]))
        return [next(values) if flag else None for flag in flags]

    return Halves(
        crossings=(),
        is_read_by_first=tuple(first_output_flags),
        is_read_by_second=tuple(second_output_flags),
        run_first=lambda operands: (barrier(operands, first_output_flags), []),
        run_second=lambda operands, _: barrier(operands, second_output_flags),
    )


RULES = {
    "scan": _divide_scan,
    "cond": _divide_cond,
    "checkpoint": _divide_checkpoint,
    "remat": _divide_checkpoint,
    "remat2": _divide_checkpoint,
    "optimization_barrier": _divide_barrier,
}
"""For each primitive that can be divided, the function that divides a step.

The arguments of the function are the step and three sequences of flags: the outputs that the first half computes, the
outputs that the second half computes, and the inputs that the first half cannot read.
"""


def _read(values: dict[int, Any], atom: int | Constant) -> Any:
    """Return the value of an atom; `None` if it has not been computed."""
    return atom.value if isinstance(atom, Constant) else values.get(atom)


def _masked(values: Sequence[Any], flags: Flags) -> list[Any]:
    """Return the values, with `None` in place of each value whose flag is false."""
    return [value if flag else None for value, flag in zip(values, flags, strict=True)]


def _input_numbers(step: Step) -> set[int]:
    """Return the numbers of the values that a step reads."""
    return {atom for atom in step.inputs if isinstance(atom, int)}


def _output_numbers(step: Step) -> list[int]:
    """Return the numbers of a step's results, without the results that nothing reads."""
    return [number for number in step.outputs if number is not None]


def _membership(numbers: Sequence[int | None], members: set[int]) -> list[bool]:
    """Return, for each number, whether it is in the set `members`."""
    return [number in members for number in numbers]


def _numbers(atoms: Sequence[int | Constant], flags: Flags) -> set[int]:
    """Return the numbers of the flagged atoms, without constants."""
    return {atom for atom, flag in zip(atoms, flags, strict=True) if flag and isinstance(atom, int)}


def _byte_count(program: InlinedProgram, numbers: Iterable[int]) -> int:
    """Return the total bytes of the values with these numbers."""
    return sum(leaf_bytes(program.avals[number]) for number in numbers)


def _crossing(aval: Any) -> Crossing:
    """Return the `Crossing` of a value, from its abstract value `aval`."""
    return Crossing(aval.shape, aval.dtype, varying_axes(aval))
