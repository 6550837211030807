"""Live bytes of a traced program from its first operation to its last, on one device.

A compiler fuses: what is computed element by element needs no memory of its own unless several products read it, or a
loop or a kernel, which take arrays. Until then whatever it is made of stays. The results of products, reductions,
gathers, loops and kernels are arrays, each alive from the operation that makes it to the last that needs it; what a
loop stacks is alive from its start. This is XLA's behaviour in outline; it leaves out the order in which XLA schedules
independent operations, its rematerialization, the padding of tiles, and how buffers are packed (`estimate.py` has
factors for what remains).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxscale.planning import regions
from jaxscale.planning.flat import Operation, Program, carries
from jaxscale.planning.late import outlasting
from jaxscale.planning.pieces import Piece
from jaxscale.planning.placements import Placements

COLLECTIVES = ("ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter")
"""What a pipelined step sends."""

HEAVY = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Operations that read their operands several times: what two of them read is made once."""

ARRAYS = (
    "scan", "while", "shard_map", "pallas_call", "custom_call", "gather", "scatter", "scatter-add", "scatter_add",
    "device_put", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "concatenate", "dynamic_update_slice", "fft",
    "triangular_solve", "random_bits", "threefry2x32", "argmax", "argmin", "split", "cond", *COLLECTIVES,
)  # fmt: skip
"""Operations whose results are arrays of their own, beside products and reductions."""

TAKERS = ("scan", "while", "shard_map", "pallas_call", "custom_call", "sort", "top_k", "fft", "cond", *COLLECTIVES)
"""Operations that take arrays, not expressions."""

SCATTERS = ("scatter-add", "scatter_add", "scatter")

VIEWS = (
    "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast",
    "enter", "leave",
)  # fmt: skip
"""Operations that change no bytes."""

RENAMED = (*VIEWS, "convert_element_type", "transpose")
"""Operations whose result goes by the name of what they read."""


@dataclasses.dataclass(frozen=True)
class Item:
    """An array that is alive.

    Args:
        name: the model's own name, or shape and line.
        kind: what it is for.
        bytes: on one device.
    """

    name: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Moment:
    """An operation, and what is alive while it runs.

    Args:
        label: the operation.
        total: live bytes, on one device.
        by_kind: the same, by kind.
        backward: it belongs to the backward pass.
        piece: the piece of the step that it belongs to.
    """

    label: str
    total: int
    by_kind: dict[str, int]
    backward: bool = False
    piece: Piece | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What is alive when.

    Args:
        moments: in the order they run; a loop is a moment for each of its body's, once.
        peak: number of the moment with the most live bytes; the first of them.
        items: what is alive at the peak, the biggest first.
    """

    moments: tuple[Moment, ...]
    peak: int
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        """Live bytes at the peak."""
        return self.moments[self.peak].total if self.moments else 0


Kinds = Callable[[Program], dict[int, str]]


@dataclasses.dataclass(frozen=True)
class Compiler:
    """How a platform's compiler treats the operands of products.

    Args:
        fuses: "no": operands are arrays (GPU, CPU); "all": expressions are computed inside the product (TPU); "local":
            so they are, except by a product that is computed around a ring of devices (TPUs whose slices are flat).
        scatters: gradients are scattered as they are summed (ZeRO 2 and 3).
        gather: share of a gathered weight that is there at a time.
    """

    fuses: Literal["no", "all", "local"] = "no"
    scatters: bool = False
    gather: float = 1.0


Pieces = Mapping[Piece, int | None]
"""Pieces of a step, and the bytes of temporaries that a compiler said each takes, where it was asked."""


def timeline(
    program: Program, placed: Placements, kinds: Kinds, compiler: Compiler, pieces: Pieces | None = None
) -> Timeline:
    """Live bytes of what a program makes; its arguments are its caller's.

    Args:
        program: what runs.
        placed: where its values lie.
        kinds: the kind of each value of a program; "transients" for those it leaves out.
        compiler: what it fuses.
        pieces: those of the program; one that was compiled is a single moment.
    """
    return _Sweep(program, placed, kinds, compiler, pieces=pieces or {}).run()


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Which values of a program are arrays.

    Args:
        bytes: of each of them.
        sources: the arrays that each value is made of; itself, where it is one.
    """

    bytes: Mapping[int, int]
    sources: Mapping[int, frozenset[int]]


def arrays_of(program: Program, placed: Placements, compiler: Compiler, path: Sequence[int]) -> Arrays:
    """The arrays of the program that loops, one in the other, run.

    Args:
        program: the outermost.
        placed: where its values lie.
        compiler: what it fuses.
        path: the place of each loop in the program it belongs to.
    """
    stacked = None
    for at in path:
        operation = program.operations[at]
        assert operation.loop is not None
        program, placed, stacked = operation.loop, placed.loops[at], len(carries(operation))
    sweep = _Sweep(program, placed, lambda _: {}, compiler, stacked)
    sweep.classify()
    return Arrays(sweep.arrays, sweep.sources)


@dataclasses.dataclass(eq=False)
class _Live:
    value: int
    bytes: int
    item: Item


class _Sweep:
    def __init__(
        self,
        program: Program,
        placed: Placements,
        kinds: Kinds,
        compiler: Compiler,
        stacked: int | None = None,
        *,
        pieces: Pieces | None = None,
        path: tuple[int, ...] = (),
        branch: bool = False,
    ):
        """`stacked`: outputs from this one on are written into the caller's stacks; `None` for a program of its own.
        `path`: the loops that the program is in.
        """
        self.path = path
        self.pieces = pieces or {}
        self.own = {at: piece for piece in self.pieces if piece.path == path for at in piece.places}
        self.program, self.placed, self.all_kinds, self.compiler = program, placed, kinds, compiler
        self.kinds = kinds(program)
        self.in_loop = stacked is not None
        self.stacks: dict[int, int] = {}
        if stacked is not None:
            self.stacks = {value: 0 for value in program.outputs[stacked:] if value is not None}
            self.stacks |= dict.fromkeys(regions.returned(program, RENAMED), 0) if branch else {}
        self.users: dict[int, list[int]] = {}
        for place, operation in enumerate(program.operations):
            for value in operation.inputs:
                if value is not None:
                    self.users.setdefault(value, []).append(place)
        self.returned = {value for value in program.outputs if value is not None}
        self.sources: dict[int, frozenset[int]] = {value: frozenset() for value in program.inputs}
        self.written = _written(program)
        self.arrays: dict[int, int] = {}
        self.given = set(program.inputs) if self.in_loop or regions.tick_loops(program) else set()

    def bytes_of(self, value: int) -> int:
        return self.placed.bytes_of(self.program.shapes[value], self.placed.dims[value])

    def _is_array(self, operation: Operation) -> bool:
        """Whether the results of an operation need memory, whoever reads them."""
        if operation.kind in SCATTERS and _one_of_each_row(operation, self.program):
            return False
        if operation.kind in ("sharding_constraint", "enter"):
            return self._gathers(operation)
        return operation.kind in (*HEAVY, *ARRAYS) or operation.kind.startswith("reduce_")

    def _gathers(self, operation: Operation) -> bool:
        """Whether a constraint brings together what was spread."""
        (read,), (made,) = operation.inputs, operation.outputs
        return read is not None and self.bytes_of(made) > self.bytes_of(read)

    def _taken(self, value: int) -> bool:
        """Whether an expression must become an array."""
        if value in self.returned and self.in_loop:
            return True
        if value in self.written and (self.compiler.fuses == "no" or not self._spread_over_all(value)):
            return True
        places = self._readers(value)
        if any(self.program.operations[place].kind in TAKERS for place in places):
            return True
        products = [place for place in places if self.program.operations[place].kind in HEAVY]
        if self.compiler.fuses == "no":
            return bool(products)
        return self.compiler.fuses == "local" and any(map(self._around_ring, products))

    def _readers(self, value: int) -> list[int]:
        """Places of the operations that read a value, through views of it."""
        found = []
        for place in self.users.get(value, ()):
            operation = self.program.operations[place]
            found += self._readers(operation.outputs[0]) if operation.kind in VIEWS else [place]
        return found

    def _spread_over_all(self, value: int) -> bool:
        """Whether every device holds a part of its own; XLA's partitioner keeps a scatter whose parts are copies."""
        sizes = self.placed.sizes.values()
        return math.prod(map(self.placed.ways, self.placed.dims[value])) == math.prod(sizes)

    def _around_ring(self, place: int) -> bool:
        """Whether a product is computed part by part while its operand, or its result, travels; not between two."""
        if self.placed.sizes.get("fsdp", 1) <= 2:
            return False
        return bool(self.placed.gathered.get(place)) or (self.compiler.scatters and place in self.placed.summed)

    def _narrowed(self, value: int) -> int:
        """Bytes of a product's result: those of the type that all its readers turn it into."""
        own = self.bytes_of(value)
        users = [self.program.operations[place] for place in self.users.get(value, ())]
        if value in self.returned or not users or any(user.kind != "convert_element_type" for user in users):
            return own
        return min(own, max(self.bytes_of(user.outputs[0]) for user in users))

    def classify(self) -> None:
        """Which values are arrays, their bytes, and of which arrays the others are made."""
        for operation in self.program.operations:
            read = [value for value in operation.inputs if value is not None]
            made_of = frozenset().union(*(self.sources[value] for value in read)) if read else frozenset()
            is_array = self._is_array(operation)
            gathers = is_array and operation.kind == "enter"
            within = set() if gathers else regions.within(operation, self.given, self.program)
            self.given |= within
            for value in operation.outputs:
                view = operation.kind in VIEWS and len(read) == 1 and len(made_of) <= 1
                if value in within:
                    self.sources[value] = frozenset()
                elif regions.whole(operation, self.program):
                    self.sources[value] = made_of
                elif is_array or (self._taken(value) and not view):
                    self.sources[value] = frozenset((value,))
                    size = self._narrowed(value) if operation.kind in HEAVY else self.bytes_of(value)
                    if value in self.stacks:
                        size = 0
                    self.arrays[value] = size
                else:
                    self.sources[value] = made_of

    def run(self) -> Timeline:
        self.classify()
        last: dict[int, int] = {}
        for place, operation in enumerate(self.program.operations):
            # an expression is computed where an array is made of it; what goes into a slot goes there at once
            if any(value in self.arrays for value in operation.outputs) or operation.loop or operation.branches:
                for value in operation.inputs:
                    for source in self.sources[value] if value is not None else ():
                        last[source] = place
        end = len(self.program.operations)
        for value in self.returned:
            for source in self.sources.get(value, ()):
                last[source] = end
        rings = [place for place in self.placed.summed if self._around_ring(place)]
        late = outlasting(self.program, rings, self._is_array) if self.compiler.fuses == "local" else {}
        live: dict[int, Item] = {}
        moments: list[Moment] = []
        best: tuple[int, tuple[Item, ...]] = (-1, ())
        at = 0
        before: dict[int, Item] = {}
        for place, operation in enumerate(self.program.operations):
            piece = self.own.get(place)
            temporaries = None if piece is None else self.pieces[piece]
            made = [value for value in operation.outputs if value in self.arrays]
            dying = [value for value in live if max(last.get(value, -1), late.get(value, -1)) <= place]
            reused = self._in_place(operation, made, dying, live)
            for value in reused:
                del live[value]
            if piece is not None and place == piece.start:
                before = dict(live)
            for value in made:
                if self.arrays[value]:
                    live[value] = self._item(operation, value)
            read = {value: item for value, item in live.items() if last.get(value, -1) > place}
            after = read | {value: item for value, item in live.items() if late.get(value, -1) > place}
            if piece is not None and temporaries is not None:
                extra = []
                if place == piece.stop - 1:
                    kind = "loss" if piece.name == "loss" else "transients"
                    extra = [_Inner(piece.name, (Item(f"{piece.name}, compiled", kind, temporaries),))]
                    live = before | read  # what else is late is among the temporaries
            else:
                extra = self._inside(operation, place) if made or operation.loop or operation.branches else []
            for inner in extra:
                total, by_kind = _sums([*live.values(), *inner.items])
                backward = operation.backward or inner.backward
                moments.append(Moment(inner.label, total, by_kind, backward, piece or inner.piece))
                if total > best[0]:
                    best, at = (total, (*live.values(), *inner.items)), len(moments) - 1
            if made or extra:
                live = after
        items = tuple(sorted(best[1], key=lambda item: -item.bytes))
        return Timeline(tuple(moments), at, items)

    def _in_place(
        self, operation: Operation, made: Sequence[int], dying: Sequence[int], live: dict[int, Item]
    ) -> list[int]:
        """Arrays whose place the results take: of an elementwise operation, or the state of a loop."""
        if operation.kind in (*HEAVY, *COLLECTIVES, "gather", "sort", "top_k", "shard_map", "pallas_call"):
            return []
        if operation.branches:
            pairs = [(made, old) for made, read in regions.handed_on(operation) for old in self.sources[read]]
            return [old for made, old in pairs if old in dying and live[old].bytes == self.arrays.get(made)]
        if operation.kind.startswith("reduce_") or (self.compiler.fuses == "no" and operation.loop is None):
            return []
        candidates = list(dying)
        if operation.kind in ("scan", "while"):
            state = carries(operation)
            made = operation.outputs[: len(state)]
            own = {source for value in state if value is not None for source in self.sources[value]}
            candidates = [value for value in candidates if value in own]
        found = []
        for value in made:
            if value in self.written:
                continue
            same = next((old for old in candidates if live[old].bytes == self.arrays.get(value, 0)), None)
            if same is not None:
                candidates.remove(same)
                found.append(same)
        return found

    def _inside(self, operation: Operation, place: int) -> list["_Inner"]:
        """What an operation needs while it runs, beside arguments and results."""
        label = operation.kind
        if operation.loop is not None:
            state = carries(operation)
            body = _Sweep(
                operation.loop,
                self.placed.loops[place],
                self.all_kinds,
                self.compiler,
                len(state),
                pieces=self.pieces,
                path=(*self.path, place),
            )
            found = body.moments_with_items() or [_Inner(label, ())]
            if all(self.kinds.get(value) == "loss" for value in operation.outputs):
                return [_renamed(inner) for inner in found]
            return found
        if operation.branches:
            found = []
            for branch, placed in zip(operation.branches, self.placed.branches[place], strict=True):
                inside = _Sweep(branch, placed, self.all_kinds, self.compiler, 0, branch=True)
                found += inside.moments_with_items()
            return found or [_Inner(label, ())]
        gathered = int(self.compiler.gather * self.placed.gathered.get(place, 0))
        if gathered and self.in_loop and self.compiler.fuses == "local" and self._around_ring(place):
            # around a ring the result is put together part by part: there are an old and a new one
            gathered = max(gathered, *(self.arrays.get(value, 0) for value in operation.outputs))
        if gathered:
            return [_Inner(label, (Item(f"gathered weight of {operation.line}", "gathered weights", gathered),))]
        return [_Inner(label, ())]

    def moments_with_items(self) -> list["_Inner"]:
        """Every moment of a loop's body; only the peak has its items told apart."""
        found = self.run()
        out = []
        for number, moment in enumerate(found.moments):
            if number == found.peak:
                items = found.items
            else:
                items = tuple(Item(kind, kind, n) for kind, n in moment.by_kind.items())
            out.append(_Inner(moment.label, items, moment.backward, moment.piece))
        return out

    def _item(self, operation: Operation, value: int) -> Item:
        shape = self.program.shapes[value]
        name, kind, line = _origin(operation, value, self.program)
        text = f"{shape.dtype}{list(shape.shape)}" if hasattr(shape, "dtype") else str(shape)
        label = f"{name} {text}" if name else f"{text} {kind}, {line}"
        other = "gathered weights" if operation.kind == "all_gather" else "transients"
        return Item(label, self.kinds.get(value, other), self.arrays[value])


def _origin(operation: Operation, value: int, program: Program) -> tuple[str, str, str]:
    """The model's name of a value, if it has one, and the operation and line that make it; through loops and views."""
    if value in program.names:
        return program.names[value], operation.kind, operation.line
    body = operation.loop
    if body is not None:
        inner = body.outputs[operation.outputs.index(value)]
        for step in body.operations:
            if inner is not None and inner in step.outputs:
                return _origin(step, inner, body)
    read = operation.inputs[0] if operation.inputs else None
    if read is not None and operation.kind in RENAMED:
        for step in program.operations:
            if read in step.outputs:
                return _origin(step, read, program)
        return program.names.get(read, ""), operation.kind, operation.line
    return "", operation.kind, operation.line


def _written(program: Program) -> set[int]:
    """Sums of an expression and a scatter of one element of each row: the scatter writes into the sum's array."""
    scattered = {
        value
        for operation in program.operations
        if operation.kind in SCATTERS and _one_of_each_row(operation, program)
        for value in operation.outputs
    }
    return {
        value
        for operation in program.operations
        if operation.kind in ("add", "add_any") and any(read in scattered for read in operation.inputs)
        for value in operation.outputs
    }


def _one_of_each_row(operation: Operation, program: Program) -> bool:
    """Whether a scatter changes one element of each row, which compilers write as a comparison with an iota."""
    numbers = operation.params["dimension_numbers"]
    batching, inserted = numbers.operand_batching_dims, numbers.inserted_window_dims
    made = program.shapes[operation.outputs[0]].shape
    return not numbers.update_window_dims and len(inserted) == 1 and len(batching) + 1 == len(made)


@dataclasses.dataclass(frozen=True)
class _Inner:
    label: str
    items: tuple[Item, ...]
    backward: bool = False
    piece: Piece | None = None


def _renamed(inner: _Inner) -> _Inner:
    """What is transient within the loss belongs to it."""
    items = (dataclasses.replace(one, kind="loss") if one.kind == "transients" else one for one in inner.items)
    return dataclasses.replace(inner, items=tuple(items))


def _sums(items: Sequence[Item]) -> tuple[int, dict[str, int]]:
    by_kind: dict[str, int] = {}
    for item in items:
        by_kind[item.kind] = by_kind.get(item.kind, 0) + item.bytes
    return sum(by_kind.values()), by_kind
