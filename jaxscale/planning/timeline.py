"""Live bytes of a traced program from its first operation to its last, on one device.

A compiler fuses: an elementwise result needs no memory unless several products read it, or a loop or a kernel, which
take arrays. Until it is computed, its operands stay alive. The results of products, reductions, gathers, loops and
kernels are arrays, each alive from the operation that computes it to the last that needs it; an array that a loop
stacks is alive from the loop's start. This is XLA's behaviour in outline; it leaves out the order in which XLA
schedules independent operations, its rematerialization, the padding of tiles, and the packing of buffers
(`estimate.py` has fitted factors for the difference).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxscale.planning.pieces import Piece
from jaxscale.programs import regions
from jaxscale.programs.flat import FlatProgram, Operation, carries
from jaxscale.programs.late import late_arrays
from jaxscale.programs.placements import Placements

COLLECTIVES = ("ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter")
"""Collectives of a pipelined step."""

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Operations that read their operands several times: an operand of two of them is computed once."""

ARRAY_RESULTS = (
    "scan", "while", "shard_map", "pallas_call", "custom_call", "gather", "scatter", "scatter-add", "scatter_add",
    "device_put", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "concatenate", "dynamic_update_slice", "fft",
    "triangular_solve", "random_bits", "threefry2x32", "argmax", "argmin", "split", "cond", *COLLECTIVES,
)  # fmt: skip
"""Operations whose results are arrays, besides products and reductions."""

ARRAY_READERS = (
    "scan", "while", "shard_map", "pallas_call", "custom_call", "sort", "top_k", "fft", "cond", *COLLECTIVES,
)  # fmt: skip
"""Operations whose operands are arrays, not expressions."""

SCATTERS = ("scatter-add", "scatter_add", "scatter")

VIEWS = (
    "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast",
    "enter", "leave",
)  # fmt: skip
"""Operations that leave the bytes unchanged."""

RENAMED = (*VIEWS, "convert_element_type", "transpose")
"""Operations whose result has the name of their operand."""


@dataclasses.dataclass(frozen=True)
class Item:
    """An array that is alive.

    Args:
        name: the model's name for it, or shape and line.
        kind: its purpose, such as "gradients".
        bytes: per device.
    """

    name: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Moment:
    """The live bytes while an operation runs.

    Args:
        label: the operation.
        total: live bytes per device.
        by_kind: the same, by kind.
        backward: whether the operation belongs to the backward pass.
        piece: the piece of the step that the operation belongs to.
    """

    label: str
    total: int
    by_kind: dict[str, int]
    backward: bool = False
    piece: Piece | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes through a program.

    Args:
        moments: in the order they run; a loop contributes the moments of its body once.
        peak: index of the first moment with the most live bytes.
        items: arrays alive at the peak, the largest first.
    """

    moments: tuple[Moment, ...]
    peak: int
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        """Live bytes at the peak."""
        return self.moments[self.peak].total if self.moments else 0


Kinds = Callable[[FlatProgram], dict[int, str]]


@dataclasses.dataclass(frozen=True)
class Compiler:
    """How a platform's compiler treats the operands of products.

    Args:
        fuses: "no": operands are arrays (GPU, CPU); "all": expressions are computed inside the product (TPU); "local":
            likewise, except in a product that is computed around a ring of devices (TPUs whose slices are flat).
        scatters: gradients are scattered as they are summed (ZeRO 2 and 3).
        gather: share of a gathered weight that is in memory at a time.
    """

    fuses: Literal["no", "all", "local"] = "no"
    scatters: bool = False
    gather: float = 1.0


Pieces = Mapping[Piece, int | None]
"""Pieces of a step, each with the bytes of its temporaries if a compiler has reported them."""


def timeline(
    program: FlatProgram, placements: Placements, kinds: Kinds, compiler: Compiler, pieces: Pieces | None = None
) -> Timeline:
    """Live bytes of the values that a program computes; its arguments belong to the caller.

    Args:
        program: a flat program.
        placements: placements of its values.
        kinds: returns the kinds of a program's values; values that it omits are "transients".
        compiler: what the compiler fuses.
        pieces: those of the program; a compiled one is a single moment.
    """
    return _Sweep(program, placements, kinds, compiler, pieces=pieces or {}).run()


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Which values of a program are arrays.

    Args:
        bytes: per device, of each array.
        sources: the arrays that each value is computed from; itself if it is an array.
    """

    bytes: Mapping[int, int]
    sources: Mapping[int, frozenset[int]]


def arrays_of(program: FlatProgram, placements: Placements, compiler: Compiler, path: Sequence[int]) -> Arrays:
    """The arrays of the body of a nested loop.

    Args:
        program: the outermost.
        placements: placements of its values.
        compiler: what the compiler fuses.
        path: index of each loop in the program around it, from the outside in.
    """
    first_stacked = None
    for index in path:
        operation = program.operations[index]
        assert operation.loop is not None
        program, placements, first_stacked = operation.loop, placements.loops[index], len(carries(operation))
    sweep = _Sweep(program, placements, lambda _: {}, compiler, first_stacked)
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
        program: FlatProgram,
        placements: Placements,
        kinds: Kinds,
        compiler: Compiler,
        first_stacked: int | None = None,
        *,
        pieces: Pieces | None = None,
        path: tuple[int, ...] = (),
        branch: bool = False,
    ):
        """`first_stacked`: first output written into the caller's stacks, or `None`; `path`: the loops around it."""
        self.path = path
        self.pieces = pieces or {}
        self.piece_at = {place: piece for piece in self.pieces if piece.path == path for place in piece.places}
        self.program, self.placements, self.all_kinds, self.compiler = program, placements, kinds, compiler
        self.kinds = kinds(program)
        self.in_loop = first_stacked is not None
        self.stacks: dict[int, int] = {}
        if first_stacked is not None:
            self.stacks = {value: 0 for value in program.outputs[first_stacked:] if value is not None}
            self.stacks |= dict.fromkeys(regions.reshaped_outputs(program, RENAMED), 0) if branch else {}
        self.outputs = {value for value in program.outputs if value is not None}
        self.sources: dict[int, frozenset[int]] = {value: frozenset() for value in program.inputs}
        self.scattered_sums = _scattered_sums(program)
        self.arrays: dict[int, int] = {}
        self.caller_values = set(program.inputs) if self.in_loop or regions.tick_loops(program) else set()

    def bytes_of(self, value: int) -> int:
        return self.placements.bytes_of(self.program.shapes[value], self.placements.dims[value])

    def _is_array(self, operation: Operation) -> bool:
        """Whether the results of an operation are arrays regardless of their readers."""
        if operation.kind in SCATTERS and _one_per_row(operation, self.program):
            return False
        if operation.kind in ("sharding_constraint", "enter"):
            return self._gathers(operation)
        return operation.kind in (*PRODUCTS, *ARRAY_RESULTS) or operation.kind.startswith("reduce_")

    def _gathers(self, operation: Operation) -> bool:
        """Whether a sharding constraint gathers shards."""
        (operand,), (output,) = operation.inputs, operation.outputs
        return operand is not None and self.bytes_of(output) > self.bytes_of(operand)

    def _needs_array(self, value: int) -> bool:
        """Whether an expression must become an array."""
        if value in self.outputs and self.in_loop:
            return True
        if value in self.scattered_sums and (self.compiler.fuses == "no" or not self._fully_sharded(value)):
            return True
        places = self._readers(value)
        if any(self.program.operations[place].kind in ARRAY_READERS for place in places):
            return True
        products = [place for place in places if self.program.operations[place].kind in PRODUCTS]
        if self.compiler.fuses == "no":
            return bool(products)
        return self.compiler.fuses == "local" and any(map(self._around_ring, products))

    def _readers(self, value: int) -> list[int]:
        """Indices of the operations that read a value, through views of it."""
        readers = []
        for place in self.program.readers.get(value, ()):
            operation = self.program.operations[place]
            readers += self._readers(operation.outputs[0]) if operation.kind in VIEWS else [place]
        return readers

    def _fully_sharded(self, value: int) -> bool:
        """Whether no two devices hold the same part; XLA's partitioner keeps a scatter into copies."""
        sizes = self.placements.sizes.values()
        return math.prod(map(self.placements.ways, self.placements.dims[value])) == math.prod(sizes)

    def _around_ring(self, place: int) -> bool:
        """Whether a product is computed in steps while an operand or the result moves around more than two devices."""
        if self.placements.sizes.get("fsdp", 1) <= 2:
            return False
        return bool(self.placements.gathered.get(place)) or (self.compiler.scatters and place in self.placements.summed)

    def _product_bytes(self, value: int) -> int:
        """Bytes of a product's result, in the type to which all its readers convert it."""
        result_bytes = self.bytes_of(value)
        users = [self.program.operations[place] for place in self.program.readers.get(value, ())]
        if value in self.outputs or not users or any(user.kind != "convert_element_type" for user in users):
            return result_bytes
        return min(result_bytes, max(self.bytes_of(user.outputs[0]) for user in users))

    def classify(self) -> None:
        """Find the arrays, their bytes, and the arrays from which each other value is computed."""
        for operation in self.program.operations:
            operands = [value for value in operation.inputs if value is not None]
            sources = frozenset().union(*(self.sources[value] for value in operands)) if operands else frozenset()
            is_array = self._is_array(operation)
            gathers = is_array and operation.kind == "enter"
            caller_results = set() if gathers else regions.in_place_results(operation, self.caller_values, self.program)
            self.caller_values |= caller_results
            for value in operation.outputs:
                view = operation.kind in VIEWS and len(operands) == 1 and len(sources) <= 1
                if value in caller_results:
                    self.sources[value] = frozenset()
                elif regions.is_whole_array(operation, self.program):
                    self.sources[value] = sources
                elif is_array or (self._needs_array(value) and not view):
                    self.sources[value] = frozenset((value,))
                    size = self._product_bytes(value) if operation.kind in PRODUCTS else self.bytes_of(value)
                    if value in self.stacks:
                        size = 0
                    self.arrays[value] = size
                else:
                    self.sources[value] = sources

    def run(self) -> Timeline:
        self.classify()
        last_read: dict[int, int] = {}
        for place, operation in enumerate(self.program.operations):
            # an expression is computed with the array that reads it; a value written into a slot is written at once
            if any(value in self.arrays for value in operation.outputs) or operation.loop or operation.branches:
                for value in operation.inputs:
                    for source in self.sources[value] if value is not None else ():
                        last_read[source] = place
        end = len(self.program.operations)
        for value in self.outputs:
            for source in self.sources.get(value, ()):
                last_read[source] = end
        ring_products = [place for place in self.placements.summed if self._around_ring(place)]
        late_read = late_arrays(self.program, ring_products, self._is_array) if self.compiler.fuses == "local" else {}
        live: dict[int, Item] = {}
        moments: list[Moment] = []
        peak, peak_total = 0, -1
        peak_items: tuple[Item, ...] = ()
        live_before: dict[int, Item] = {}
        for place, operation in enumerate(self.program.operations):
            piece = self.piece_at.get(place)
            temporaries = None if piece is None else self.pieces[piece]
            new_arrays = [value for value in operation.outputs if value in self.arrays]
            dying = [value for value in live if max(last_read.get(value, -1), late_read.get(value, -1)) <= place]
            reused_arrays = self._reused_arrays(operation, new_arrays, dying, live)
            for value in reused_arrays:
                del live[value]
            if piece is not None and place == piece.start:
                live_before = dict(live)
            for value in new_arrays:
                if self.arrays[value]:
                    live[value] = self._item(operation, value)
            still_read = {value: item for value, item in live.items() if last_read.get(value, -1) > place}
            live_after = still_read | {value: item for value, item in live.items() if late_read.get(value, -1) > place}
            if piece is not None and temporaries is not None:
                nested = []
                if place == piece.stop - 1:
                    kind = "loss" if piece.name == "loss" else "transients"
                    nested = [_InnerMoment(piece.name, (Item(f"{piece.name}, compiled", kind, temporaries),))]
                    live = live_before | still_read  # other late arrays are among the temporaries
            else:
                has_moments = new_arrays or operation.loop or operation.branches
                nested = self._inner_moments(operation, place) if has_moments else []
            for inner in nested:
                total, by_kind = _total_and_kinds([*live.values(), *inner.items])
                backward = operation.backward or inner.backward
                moments.append(Moment(inner.label, total, by_kind, backward, piece or inner.piece))
                if total > peak_total:
                    peak, peak_total, peak_items = len(moments) - 1, total, (*live.values(), *inner.items)
            if new_arrays or nested:
                live = live_after
        items = tuple(sorted(peak_items, key=lambda item: -item.bytes))
        return Timeline(tuple(moments), peak, items)

    def _reused_arrays(
        self, operation: Operation, new_arrays: Sequence[int], dying: Sequence[int], live: dict[int, Item]
    ) -> list[int]:
        """Dying arrays whose memory the results reuse: operands of an elementwise operation, or a loop's state."""
        if operation.kind in (*PRODUCTS, *COLLECTIVES, "gather", "sort", "top_k", "shard_map", "pallas_call"):
            return []
        if operation.branches:
            pairs = [(new, old) for new, value in regions.unchanged_results(operation) for old in self.sources[value]]
            return [old for new, old in pairs if old in dying and live[old].bytes == self.arrays.get(new)]
        if operation.kind.startswith("reduce_") or (self.compiler.fuses == "no" and operation.loop is None):
            return []
        candidates = list(dying)
        if operation.kind in ("scan", "while"):
            state = carries(operation)
            new_arrays = operation.outputs[: len(state)]
            state_sources = {source for value in state if value is not None for source in self.sources[value]}
            candidates = [value for value in candidates if value in state_sources]
        reused = []
        for value in new_arrays:
            if value in self.scattered_sums:
                continue
            match = next((old for old in candidates if live[old].bytes == self.arrays.get(value, 0)), None)
            if match is not None:
                candidates.remove(match)
                reused.append(match)
        return reused

    def _inner_moments(self, operation: Operation, place: int) -> list["_InnerMoment"]:
        """The moments within an operation, with its memory beside operands and results."""
        label = operation.kind
        if operation.loop is not None:
            state = carries(operation)
            body = _Sweep(
                operation.loop,
                self.placements.loops[place],
                self.all_kinds,
                self.compiler,
                len(state),
                pieces=self.pieces,
                path=(*self.path, place),
            )
            moments = body.moments_with_items() or [_InnerMoment(label, ())]
            if all(self.kinds.get(value) == "loss" for value in operation.outputs):
                return [_as_loss(inner) for inner in moments]
            return moments
        if operation.branches:
            moments = []
            for branch, placements in zip(operation.branches, self.placements.branches[place], strict=True):
                branch_sweep = _Sweep(branch, placements, self.all_kinds, self.compiler, 0, branch=True)
                moments += branch_sweep.moments_with_items()
            return moments or [_InnerMoment(label, ())]
        gathered_bytes = int(self.compiler.gather * self.placements.gathered.get(place, 0))
        if gathered_bytes and self.in_loop and self.compiler.fuses == "local" and self._around_ring(place):
            # around a ring the result is assembled in steps: an old and a new copy are alive
            gathered_bytes = max(gathered_bytes, *(self.arrays.get(value, 0) for value in operation.outputs))
        if gathered_bytes:
            weight = Item(f"gathered weight of {operation.line}", "gathered weights", gathered_bytes)
            return [_InnerMoment(label, (weight,))]
        return [_InnerMoment(label, ())]

    def moments_with_items(self) -> list["_InnerMoment"]:
        """Every moment of a loop's body; only the peak lists its arrays, the others list sums by kind."""
        body = self.run()
        inner_moments = []
        for number, moment in enumerate(body.moments):
            if number == body.peak:
                items = body.items
            else:
                items = tuple(Item(kind, kind, size) for kind, size in moment.by_kind.items())
            inner_moments.append(_InnerMoment(moment.label, items, moment.backward, moment.piece))
        return inner_moments

    def _item(self, operation: Operation, value: int) -> Item:
        shape = self.program.shapes[value]
        name, kind, line = _name_and_origin(operation, value, self.program)
        text = f"{shape.dtype}{list(shape.shape)}" if hasattr(shape, "dtype") else str(shape)
        label = f"{name} {text}" if name else f"{text} {kind}, {line}"
        default_kind = "gathered weights" if operation.kind == "all_gather" else "transients"
        return Item(label, self.kinds.get(value, default_kind), self.arrays[value])


def _name_and_origin(operation: Operation, value: int, program: FlatProgram) -> tuple[str, str, str]:
    """The model's name of a value or "", and the operation and line that compute it; through loops and views."""
    if value in program.names:
        return program.names[value], operation.kind, operation.line
    body = operation.loop
    if body is not None:
        body_value = body.outputs[operation.outputs.index(value)]
        for maker in body.operations:
            if body_value is not None and body_value in maker.outputs:
                return _name_and_origin(maker, body_value, body)
    operand = operation.inputs[0] if operation.inputs else None
    if operand is not None and operation.kind in RENAMED:
        for maker in program.operations:
            if operand in maker.outputs:
                return _name_and_origin(maker, operand, program)
        return program.names.get(operand, ""), operation.kind, operation.line
    return "", operation.kind, operation.line


def _scattered_sums(program: FlatProgram) -> set[int]:
    """Sums that include a scatter of one element per row: the scatter writes into the sum's array."""
    scattered = {
        value
        for operation in program.operations
        if operation.kind in SCATTERS and _one_per_row(operation, program)
        for value in operation.outputs
    }
    return {
        value
        for operation in program.operations
        if operation.kind in ("add", "add_any") and any(operand in scattered for operand in operation.inputs)
        for value in operation.outputs
    }


def _one_per_row(operation: Operation, program: FlatProgram) -> bool:
    """Whether a scatter changes one element per row, which compilers turn into a comparison with an iota."""
    numbers = operation.params["dimension_numbers"]
    batching_dims, inserted_dims = numbers.operand_batching_dims, numbers.inserted_window_dims
    shape = program.shapes[operation.outputs[0]].shape
    return not numbers.update_window_dims and len(inserted_dims) == 1 and len(batching_dims) + 1 == len(shape)


@dataclasses.dataclass(frozen=True)
class _InnerMoment:
    label: str
    items: tuple[Item, ...]
    backward: bool = False
    piece: Piece | None = None


def _as_loss(inner: _InnerMoment) -> _InnerMoment:
    """The moment with its transients counted as loss."""
    items = (dataclasses.replace(item, kind="loss") if item.kind == "transients" else item for item in inner.items)
    return dataclasses.replace(inner, items=tuple(items))


def _total_and_kinds(items: Sequence[Item]) -> tuple[int, dict[str, int]]:
    by_kind: dict[str, int] = {}
    for item in items:
        by_kind[item.kind] = by_kind.get(item.kind, 0) + item.bytes
    return sum(by_kind.values()), by_kind
