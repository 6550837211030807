"""Pieces of a train step that are compiled separately, to obtain the bytes of their temporaries.

The pieces are the loops over blocks and the loss between them. A piece consists of operations of the traced step. Its
inputs have the same placements as in the step. The body of a loop over blocks is one block, however many layers there
are, so the loop compiles in a fraction of the step's time. Values are represented by their numbers in a `FlatProgram`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from jaxscale.compat import rebind
from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.planning.fusion import Arrays
from jaxscale.planning.program import traced_step
from jaxscale.platforms.platform import Platform
from jaxscale.programs.dims import Placement, in_host_memory
from jaxscale.programs.flat import FlatProgram, carries
from jaxscale.programs.kinds import has_both_passes, loss_range
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive operations of a step's program.

    Args:
        name: "forward blocks", "loss" or "backward blocks". If several pieces have the same name, the second has the
            suffix " 2", the third " 3", and so on.
        path: operation indices of the loops over microbatches that contain the piece, the outermost first.
        start: index of the first operation of the piece.
        stop: index after the last operation of the piece.
    """

    name: str
    path: tuple[int, ...]
    start: int
    stop: int

    @property
    def indices(self) -> range:
        """The indices of the piece's operations."""
        return range(self.start, self.stop)


def pieces_of(program: FlatProgram, path: tuple[int, ...] = ()) -> tuple[Piece, ...]:
    """Return the pieces of a step's program, in order; `()` if the blocks do not run in a loop.

    Args:
        program: program of a step, or the body of its loop over microbatches.
        path: operation indices of the loops that contain the program, the outermost first.
    """
    operations = program.operations
    indices_and_bodies = [
        (i, op.loop_body) for i, op in enumerate(operations) if op.loop_body and has_both_passes(op.loop_body)
    ]
    if indices_and_bodies and not any(operation.params.get("reverse") for operation in operations):
        return tuple(piece for index, loop_body in indices_and_bodies for piece in pieces_of(loop_body, (*path, index)))
    if not has_both_passes(program):
        return ()
    # the last loop of the forward pass, and the first of the backward pass
    forward_end, backward_start = loss_range(operations)
    if operations[forward_end].loop_body is None or operations[backward_start].loop_body is None:
        return ()
    pieces: list[Piece] = []

    def append_piece(name: str, start: int, stop: int) -> None:
        """Append the piece of operations `start` to `stop` - 1; number its name if earlier pieces share it."""
        earlier_count = sum(piece.name.startswith(name) for piece in pieces)
        pieces.append(Piece(f"{name} {earlier_count + 1}" if earlier_count else name, path, start, stop))

    loop_indices = [index for index, operation in enumerate(operations) if operation.loop_body is not None]
    for index in loop_indices:
        if index <= forward_end:
            append_piece("forward blocks", index, index + 1)
    if forward_end + 1 < backward_start:
        append_piece("loss", forward_end + 1, backward_start)
    for index in loop_indices:
        if index >= backward_start and operations[index].params.get("reverse"):
            append_piece("backward blocks", index, index + 1)
    return tuple(pieces)


def piece_bytes(make: Callable[[], Experiment], platform: Platform, plan: Plan, piece: Piece) -> int:
    """Compile a piece and return the bytes of its temporaries per device. The compiler's report is cached.

    Args:
        make: function that returns the experiment, called in the process that compiles; it must be picklable.
        platform: platform to compile for.
        plan: plan of the step.
        piece: piece of the step to compile.

    Raises:
        UserError: the platform has no compiler, or the compiler cannot compile the piece.
    """
    report = compile_report(partial(lowered_piece, make=make, platform=platform, plan=plan, piece=piece), platform)
    if report.temp_bytes is None:
        cause = report.crashed or report.oom
        raise UserError(f"{platform} cannot compile {piece.name!r} alone: {cause}; leave out --compile-block")
    return report.temp_bytes


def lowered_piece(
    devices: Sequence[Any], make: Callable[[], Experiment], platform: Platform, plan: Plan, piece: Piece
) -> Any:
    """Lower a piece of a train step for the given devices. `piece_bytes` binds all arguments except `devices`.

    Args:
        devices: devices of the platform.
        make: function that returns the experiment.
        platform: platform to compile for.
        plan: plan of the step.
        piece: piece of the step to lower.

    Returns:
        The lowered piece, as `jax.jit(...).lower` returns it.

    Raises:
        UserError: the piece contains a part of a `jax.shard_map`, which cannot be lowered alone.
    """
    import jax
    from jax.experimental.layout import Format, Layout

    experiment = make()
    step = build(experiment, plan, devices=devices)
    trace = traced_step(step, batch_shapes(experiment), platform)
    step_arrays = Arrays(trace.program, trace.placements, trace.compiler)
    # the arrays of the loop body that contains the piece
    arrays = reduce(Arrays.loop_arrays, piece.path, step_arrays)
    program = arrays.program
    piece_operations = [program.operations[index] for index in _indices_with_expressions(arrays, piece)]
    if any(operation.kind in ("enter", "leave") for operation in piece_operations):
        raise UserError(
            f"{platform} cannot compile {piece.name!r} alone: a part of it is written for one device (jax.shard_map); "
            "leave out --compile-block"
        )
    computed_values = {value for operation in piece_operations for value in operation.outputs}
    read_values = {value for operation in piece_operations for value in operation.inputs if value is not None}
    input_values = sorted(read_values - computed_values)
    values_read_later = _values_read_later(program, piece)
    output_values = _output_values(arrays, piece, values_read_later)

    def run_piece(*arguments: Any) -> list[Any]:
        """Run the piece's operations on the arrays of `input_values`; return the arrays of `output_values`."""
        array_by_value = dict(zip(input_values, arguments, strict=True))
        for operation in piece_operations:
            literals = operation.literals
            operands = [
                literals[index] if value is None else array_by_value[value]
                for index, value in enumerate(operation.inputs)
            ]
            array_by_value |= zip(operation.outputs, rebind(operation.equation, operands), strict=True)
        return [array_by_value[value] for value in output_values]

    def sharding_or_format(value: int) -> Any:
        """Return the sharding of a step's argument; for other values, a format whose layout the compiler chooses."""
        sharding = _sharding(step.mesh, program.avals[value], arrays.placements.by_value[value])
        return sharding if value in program.inputs and not piece.path else Format(Layout.AUTO, sharding)

    state_arrays = {value for value in _loop_state(program, piece) if value in arrays.array_bytes}
    input_avals = [program.avals[value] for value in input_values]
    piece_fn = jax.jit(
        run_piece,
        in_shardings=[sharding_or_format(value) for value in input_values],
        out_shardings=[sharding_or_format(value) for value in output_values],
        donate_argnums=[index for index, value in enumerate(input_values) if value in state_arrays - values_read_later],
    )
    return piece_fn.lower(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in input_avals))


def _indices_with_expressions(arrays: Arrays, piece: Piece) -> list[int]:
    """Return the sorted indices of a piece's operations, and of earlier operations whose expressions it reads."""
    operations = arrays.program.operations
    producer_by_value = {value: index for index, operation in enumerate(operations) for value in operation.outputs}
    piece_indices = set(piece.indices)
    pending_values = [value for index in piece.indices for value in operations[index].inputs]
    while pending_values:
        value = pending_values.pop()
        producer_index = None if value is None else producer_by_value.get(value)
        if producer_index is None or value in arrays.array_bytes or producer_index in piece_indices:
            continue
        piece_indices.add(producer_index)
        pending_values += operations[producer_index].inputs
    return sorted(piece_indices)


def _output_values(arrays: Arrays, piece: Piece, values_read_later: set[int | None]) -> list[int]:
    """Return the arrays that a piece computes and later operations read, directly or through expressions; sorted."""
    computed_values = {value for index in piece.indices for value in arrays.program.operations[index].outputs}
    output_arrays: set[int] = set()
    for value in computed_values & values_read_later:
        output_arrays |= (arrays.sources_by_value[value] & computed_values) or {value}
    return sorted(output_arrays)


def _values_read_later(program: FlatProgram, piece: Piece) -> set[int | None]:
    """Return the values that operations after a piece read, and those that the program returns."""
    later_operations = program.operations[piece.stop :]
    return {value for operation in later_operations for value in operation.inputs} | set(program.outputs)


def _loop_state(program: FlatProgram, piece: Piece) -> tuple[int | None, ...]:
    """Return the initial state of a piece that is one loop, whose results reuse its memory; `()` for other pieces."""
    operation = program.operations[piece.start]
    return carries(operation) if len(piece.indices) == 1 and operation.loop_body is not None else ()


def _sharding(mesh: Any, aval: Any, placement: Placement) -> Any:
    """Return the sharding of an array with this placement; axes that cannot split a dim evenly are left out."""
    from jax.sharding import NamedSharding, PartitionSpec

    axes_by_dim = [
        axes if axes and dim_size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None
        for dim_size, axes in zip(aval.shape, placement, strict=True)
    ]
    memory_kind = "pinned_host" if in_host_memory(aval) else "device"
    return NamedSharding(mesh, PartitionSpec(*axes_by_dim), memory_kind=memory_kind)
