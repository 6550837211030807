"""One piece of a train step compiled by itself, for the temporaries that the platform's compiler needs for it.

The piece is cut out of the traced step: its operations, with what they are given placed as in the step. A loop over
blocks holds one block, whatever the number of layers: it is compiled in a fraction of the time of the step.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxscale.compat import rebind
from jaxscale.errors import UserError
from jaxscale.planning.flat import Program
from jaxscale.planning.pieces import Piece
from jaxscale.planning.placements import Dims, in_host_memory
from jaxscale.planning.timeline import arrays_of, carries
from jaxscale.planning.traced import traced_step
from jaxscale.platforms.compile import compile_report
from jaxscale.platforms.platform import Platform
from jaxscale.step.build import build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes


def piece_bytes(make: Callable[[], Experiment], platform: Platform, plan: Plan, piece: Piece) -> int:
    """Bytes per device of the temporaries of a piece, as the platform's compiler says; asked once, then remembered.

    Args:
        make: makes the experiment in the process that compiles; it must pickle.
        platform: where.
        plan: how.
        piece: of the step.

    Raises:
        UserError: there is no compiler for the platform, or it finds no program.
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
        platform: where.
        plan: how.
        piece: of the step.
    """
    import jax
    from jax.experimental.layout import Format, Layout

    experiment = make()
    step = build(experiment, plan, devices=devices)
    traced = traced_step(step, batch_shapes(experiment), platform)
    arrays = arrays_of(traced.program, traced.placements, traced.compiler, piece.path)
    program, placements = traced.program, traced.placements
    for at in piece.path:
        inner = program.operations[at].loop
        assert inner is not None
        program, placements = inner, placements.loops[at]
    chosen = _with_expressions(program, piece, arrays.bytes)
    operations = [program.operations[at] for at in chosen]
    made = {value for one in operations for value in one.outputs}
    read = {value for one in operations for value in one.inputs if value is not None}
    inputs = sorted(read - made)
    outputs = _outputs(program, piece, arrays.sources)

    def run(*given: Any) -> list[Any]:
        values = dict(zip(inputs, given, strict=True))
        for one in operations:
            found = [one.literals[at] if value is None else values[value] for at, value in enumerate(one.inputs)]
            values |= zip(one.outputs, rebind(one.equation, found), strict=True)
        return [values[value] for value in outputs]

    def sharding(value: int) -> Any:
        return _sharding(step.mesh, program.shapes[value], placements.dims[value])

    def free(value: int) -> Any:
        # the layout of what the step makes is the compiler's choice, that of its arguments is not
        own = sharding(value)
        return own if value in program.inputs and not piece.path else Format(Layout.AUTO, own)

    own = {value for value in _state(program, piece) if value in arrays.bytes}
    later = {value for one in program.operations[piece.stop :] for value in one.inputs} | set(program.outputs)
    given = [jax.ShapeDtypeStruct(program.shapes[value].shape, program.shapes[value].dtype) for value in inputs]
    compiled = jax.jit(
        run,
        in_shardings=[free(value) for value in inputs],
        out_shardings=[free(value) for value in outputs],
        donate_argnums=[at for at, value in enumerate(inputs) if value in own - later],
    )
    return compiled.lower(*given)


def _with_expressions(program: Program, piece: Piece, arrays: Any) -> list[int]:
    """Places of a piece's operations, and of those before it that only its own operations compute."""
    maker = {value: at for at, one in enumerate(program.operations) for value in one.outputs}
    chosen = set(piece.places)
    wanted = [value for at in piece.places for value in program.operations[at].inputs]
    while wanted:
        value = wanted.pop()
        if value is None or value in arrays or value not in maker or maker[value] in chosen:
            continue
        chosen.add(maker[value])
        wanted += program.operations[maker[value]].inputs
    return sorted(chosen)


def _outputs(program: Program, piece: Piece, sources: Any) -> list[int]:
    """The arrays of a piece that are read behind it."""
    made = {value for at in piece.places for value in program.operations[at].outputs}
    read = {value for one in program.operations[piece.stop :] for value in one.inputs} | set(program.outputs)
    found: set[int] = set()
    for value in made & read:
        found |= (sources[value] & made) or {value}
    return sorted(found)


def _state(program: Program, piece: Piece) -> tuple[int | None, ...]:
    """What a piece that is one loop starts from: its results take the place of it."""
    first = program.operations[piece.start]
    return carries(first) if len(piece.places) == 1 and first.loop is not None else ()


def _sharding(mesh: Any, shape: Any, dims: Dims) -> Any:
    """Placement of an array; a dim that does not divide stays whole."""
    from jax.sharding import NamedSharding, PartitionSpec

    spec = [
        axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None
        for size, axes in zip(shape.shape, dims, strict=True)
    ]
    kind = "pinned_host" if in_host_memory(shape) else "device"
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)), memory_kind=kind)
