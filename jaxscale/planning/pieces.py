"""The pieces of a train step that can be compiled by themselves: loops over blocks, and the loss between them."""

import dataclasses
from collections.abc import Sequence

from jaxscale.planning.flat import Program
from jaxscale.planning.kinds import both_passes, loss_range


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring operations of a step's program.

    Args:
        name: "forward blocks", "loss" or "backward blocks"; of several loops the later ones have a number behind it.
        path: the loops that it is in (over microbatches), each by its place in the one around it.
        start: place of its first operation.
        stop: place behind its last.
    """

    name: str
    path: tuple[int, ...]
    start: int
    stop: int

    @property
    def places(self) -> range:
        """Those of its operations."""
        return range(self.start, self.stop)


def pieces_of(program: Program, path: tuple[int, ...] = ()) -> tuple[Piece, ...]:
    """The pieces of a step's program, in order; none where its blocks are in no loop.

    Args:
        program: of a step.
        path: the loops that it is in.
    """
    operations = program.operations
    parts = [at for at, one in enumerate(operations) if one.loop is not None and both_passes(one.loop)]
    if parts and not any(one.params.get("reverse") for one in operations):
        return tuple(piece for at in parts for piece in _inside(program, at, path))
    if not both_passes(program):
        return ()
    head, tail = loss_range(operations)
    if operations[head].loop is None or operations[tail].loop is None:
        return ()
    loops = [at for at, one in enumerate(operations) if one.loop is not None and not head < at < tail]
    found = [
        Piece("forward blocks" if at <= head else "backward blocks", path, at, at + 1)
        for at in loops
        if at <= head or operations[at].params.get("reverse")
    ]
    if head + 1 < tail:
        found.append(Piece("loss", path, head + 1, tail))
    return _numbered(sorted(found, key=lambda piece: piece.start))


def _numbered(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces whose names are their own."""
    found: list[Piece] = []
    for piece in pieces:
        earlier = sum(other.name.startswith(piece.name) for other in found)
        found.append(dataclasses.replace(piece, name=f"{piece.name} {earlier + 1}") if earlier else piece)
    return tuple(found)


def _inside(program: Program, at: int, path: tuple[int, ...]) -> tuple[Piece, ...]:
    body = program.operations[at].loop
    assert body is not None
    return pieces_of(body, (*path, at))
