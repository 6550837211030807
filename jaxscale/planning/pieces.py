"""The pieces of a train step that can be compiled by themselves: loops over blocks, and the loss between them."""

import dataclasses
from collections.abc import Sequence

from jaxscale.programs.flat import FlatProgram
from jaxscale.programs.kinds import both_passes, loss_range


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring operations of a step's program.

    Args:
        name: "forward blocks", "loss" or "backward blocks", with a number for the second and later loops.
        path: index of each loop around it (over microbatches), from the outside in.
        start: index of its first operation.
        stop: index after its last operation.
    """

    name: str
    path: tuple[int, ...]
    start: int
    stop: int

    @property
    def places(self) -> range:
        """Indices of its operations."""
        return range(self.start, self.stop)


def pieces_of(program: FlatProgram, path: tuple[int, ...] = ()) -> tuple[Piece, ...]:
    """The pieces of a step's program, in order; none if its blocks are in no loop.

    Args:
        program: of a step.
        path: index of each loop around it.
    """
    operations = program.operations
    microbatches = [i for i, o in enumerate(operations) if o.loop is not None and both_passes(o.loop)]
    if microbatches and not any(operation.params.get("reverse") for operation in operations):
        return tuple(piece for index in microbatches for piece in _pieces_of_loop(program, index, path))
    if not both_passes(program):
        return ()
    forward_end, backward_start = loss_range(operations)
    if operations[forward_end].loop is None or operations[backward_start].loop is None:
        return ()
    loops = [i for i, o in enumerate(operations) if o.loop is not None and not forward_end < i < backward_start]
    pieces = [
        Piece("forward blocks" if index <= forward_end else "backward blocks", path, index, index + 1)
        for index in loops
        if index <= forward_end or operations[index].params.get("reverse")
    ]
    if forward_end + 1 < backward_start:
        pieces.append(Piece("loss", path, forward_end + 1, backward_start))
    return _numbered(sorted(pieces, key=lambda piece: piece.start))


def _numbered(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces, with numbers that make their names unique."""
    numbered: list[Piece] = []
    for piece in pieces:
        count = sum(previous.name.startswith(piece.name) for previous in numbered)
        numbered.append(dataclasses.replace(piece, name=f"{piece.name} {count + 1}") if count else piece)
    return tuple(numbered)


def _pieces_of_loop(program: FlatProgram, index: int, path: tuple[int, ...]) -> tuple[Piece, ...]:
    body = program.operations[index].loop
    assert body is not None
    return pieces_of(body, (*path, index))
