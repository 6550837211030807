"""One piece of a train step compiled by itself, for the bytes of its temporaries.

The piece is cut out of the traced step: its operations, with inputs placed as in the step. A loop over blocks holds one
block, whatever the number of layers, so that it compiles in a fraction of the step's time.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxscale.compat import rebind
from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.planning.pieces import Piece
from jaxscale.planning.timeline import arrays_of, carries
from jaxscale.planning.traced import traced_step
from jaxscale.platforms.platform import Platform
from jaxscale.programs.dims import Dims
from jaxscale.programs.flat import FlatProgram
from jaxscale.programs.placements import in_host_memory
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build


def piece_bytes(make: Callable[[], Experiment], platform: Platform, plan: Plan, piece: Piece) -> int:
    """Bytes per device of a piece's temporaries, from the platform's compiler; the report is cached.

    Args:
        make: makes the experiment in the process that compiles; it must pickle.
        platform: for which to compile.
        plan: of the step.
        piece: of the step.

    Raises:
        UserError: there is no compiler for the platform, or it cannot compile the piece.
    """
    report = compile_report(partial(lowered_piece, make=make, platform=platform, plan=plan, piece=piece), platform)
    if report.temp_bytes is None:
        raise UserError(f"{piece.name} of {platform} cannot be compiled alone: {report.crashed or report.oom}")
    return report.temp_bytes


def lowered_piece(
    devices: Sequence[Any], make: Callable[[], Experiment], platform: Platform, plan: Plan, piece: Piece
) -> Any:
    """A piece of a train step lowered for devices: with `functools.partial`, a recipe of `compile_report`.

    Args:
        devices: of the platform.
        make: makes the experiment.
        platform: for which to compile.
        plan: of the step.
        piece: of the step.
    """
    import jax
    from jax.experimental.layout import Format, Layout

    experiment = make()
    step = build(experiment, plan, devices=devices)
    traced = traced_step(step, batch_shapes(experiment), platform)
    arrays = arrays_of(traced.program, traced.placements, traced.compiler, piece.path)
    program, placements = traced.program, traced.placements
    for index in piece.path:
        body = program.operations[index].loop
        assert body is not None
        program, placements = body, placements.loops[index]
    places = _with_expressions(program, piece, arrays.bytes)
    operations = [program.operations[index] for index in places]
    results = {value for operation in operations for value in operation.outputs}
    read_values = {value for operation in operations for value in operation.inputs if value is not None}
    inputs = sorted(read_values - results)
    outputs = _outputs(program, piece, arrays.sources)

    def run(*arguments: Any) -> list[Any]:
        values = dict(zip(inputs, arguments, strict=True))
        for operation in operations:
            literals = operation.literals
            operands = [literals[i] if value is None else values[value] for i, value in enumerate(operation.inputs)]
            values |= zip(operation.outputs, rebind(operation.equation, operands), strict=True)
        return [values[value] for value in outputs]

    def sharding(value: int) -> Any:
        return _sharding(step.mesh, program.shapes[value], placements.dims[value])

    def with_free_layout(value: int) -> Any:
        # the compiler chooses the layout of values computed in the step, not of its arguments
        placement = sharding(value)
        return placement if value in program.inputs and not piece.path else Format(Layout.AUTO, placement)

    state = {value for value in _loop_state(program, piece) if value in arrays.bytes}
    read_later = _read_later(program, piece)
    input_shapes = [jax.ShapeDtypeStruct(program.shapes[value].shape, program.shapes[value].dtype) for value in inputs]
    piece_fn = jax.jit(
        run,
        in_shardings=[with_free_layout(value) for value in inputs],
        out_shardings=[with_free_layout(value) for value in outputs],
        donate_argnums=[index for index, value in enumerate(inputs) if value in state - read_later],
    )
    return piece_fn.lower(*input_shapes)


def _with_expressions(program: FlatProgram, piece: Piece, arrays: Any) -> list[int]:
    """Indices of a piece's operations, and of the earlier operations that compute expressions for it."""
    producer = {value: index for index, operation in enumerate(program.operations) for value in operation.outputs}
    places = set(piece.places)
    pending = [value for index in piece.places for value in program.operations[index].inputs]
    while pending:
        value = pending.pop()
        if value is None or value in arrays or value not in producer or producer[value] in places:
            continue
        places.add(producer[value])
        pending += program.operations[producer[value]].inputs
    return sorted(places)


def _outputs(program: FlatProgram, piece: Piece, sources: Any) -> list[int]:
    """The arrays computed in a piece that are read after it."""
    results = {value for index in piece.places for value in program.operations[index].outputs}
    outputs: set[int] = set()
    for value in results & _read_later(program, piece):
        outputs |= (sources[value] & results) or {value}
    return sorted(outputs)


def _read_later(program: FlatProgram, piece: Piece) -> set[int | None]:
    later = program.operations[piece.stop :]
    return {value for operation in later for value in operation.inputs} | set(program.outputs)


def _loop_state(program: FlatProgram, piece: Piece) -> tuple[int | None, ...]:
    """The initial state of a piece that is one loop; its results reuse this memory."""
    operation = program.operations[piece.start]
    return carries(operation) if len(piece.places) == 1 and operation.loop is not None else ()


def _sharding(mesh: Any, shape: Any, dims: Dims) -> Any:
    """Sharding of an array; a dim that does not divide is not sharded."""
    from jax.sharding import NamedSharding, PartitionSpec

    spec = [
        axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None
        for size, axes in zip(shape.shape, dims, strict=True)
    ]
    memory_kind = "pinned_host" if in_host_memory(shape) else "device"
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)), memory_kind=memory_kind)
