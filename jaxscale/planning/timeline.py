"""Live bytes of a traced program from its first operation to its last, on one device.

Each array (`fusion.py`) is alive from the operation that computes it to the last operation that needs it. Values that
are not stored are expressions of arrays, and these arrays stay alive until the expression is computed. An array that a
loop fills slice by slice is alive from the start of the loop. Values and arrays are represented by their numbers in a
`FlatProgram`.

Left out: the order in which XLA schedules independent operations, XLA's rematerialization, and the packing of buffers
(`estimate.py` multiplies by fitted factors instead).
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxscale.planning.compile_pieces import Piece
from jaxscale.planning.fusion import COLLECTIVES, NAME_KEEPERS, PRODUCTS, Arrays, Compiler
from jaxscale.programs.flat import FlatProgram, Operation, carries
from jaxscale.programs.kinds import has_both_passes, kinds_of, loss_range
from jaxscale.programs.late import gradient_product_indices, late_arrays
from jaxscale.programs.placements import Placements
from jaxscale.programs.regions import results_and_unchanged_operands

OPERATIONS_WITHOUT_REUSE = (*PRODUCTS, *COLLECTIVES, "gather", "sort", "top_k", "shard_map", "pallas_call")
"""Operations whose results cannot reuse an operand's memory; those of reductions (`reduce_...`) cannot either."""

PieceBytes = Mapping[Piece, int | None]
"""Bytes of the temporaries of each piece of a step; `None` if no compiler has reported them."""


@dataclasses.dataclass(frozen=True)
class Item:
    """An array that is alive.

    Args:
        name: the array's name in the model, with type and shape. An array without a name is described by its type,
            shape, operation and source line.
        kind: purpose of the array, such as "gradients".
        bytes: bytes per device.
    """

    name: str
    kind: str
    bytes: int


def bytes_by_kind(items: Iterable[Item]) -> dict[str, int]:
    """Return the total bytes of the arrays of each kind."""
    total_by_kind: dict[str, int] = {}
    for item in items:
        total_by_kind[item.kind] = total_by_kind.get(item.kind, 0) + item.bytes
    return total_by_kind


@dataclasses.dataclass(frozen=True)
class Moment:
    """The arrays that are alive while an operation runs.

    Args:
        items: the arrays, in the order in which they were computed.
        is_backward: whether the operation belongs to the backward pass.
        piece: the piece of the step that contains the operation; `None` if there is none.
    """

    items: tuple[Item, ...] = ()
    is_backward: bool = False
    piece: Piece | None = None

    @functools.cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """The live bytes per device, by kind."""
        return bytes_by_kind(self.items)

    @functools.cached_property
    def total_bytes(self) -> int:
        """The live bytes per device."""
        return sum(self.bytes_by_kind.values())


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes through a program.

    Args:
        moments: moments in the order in which they run; a loop contributes the moments of its body once.
    """

    moments: tuple[Moment, ...]

    @functools.cached_property
    def peak(self) -> Moment:
        """The first moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.total_bytes, default=Moment())

    @property
    def peak_bytes(self) -> int:
        """The live bytes at the peak."""
        return self.peak.total_bytes

    @property
    def peak_items(self) -> tuple[Item, ...]:
        """The arrays alive at the peak, the largest first."""
        return tuple(sorted(self.peak.items, key=lambda item: -item.bytes))


def timeline(
    program: FlatProgram,
    placements: Placements,
    compiler: Compiler,
    bytes_by_piece: PieceBytes | None = None,
    end_items: Sequence[Item] = (),
) -> Timeline:
    """Return the live bytes of the values that a program computes. Arguments are not counted: the caller owns them.

    Args:
        program: a flat program.
        placements: placements of the program's values.
        compiler: properties of the platform's compiler.
        bytes_by_piece: bytes of the temporaries of each piece of the program. A piece with known bytes becomes a
            single moment.
        end_items: arrays that are alive when the program ends, and that the program does not contain.
    """
    moments = _Sweep(Arrays(program, placements, compiler), bytes_by_piece or {}).moments()
    return Timeline((*moments, Moment(tuple(end_items))) if end_items else tuple(moments))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sweep:
    """A walk through the operations of a program that lists the arrays alive at each operation.

    Args:
        arrays: arrays of the program.
        bytes_by_piece: bytes of the temporaries of each piece of the step.
        path: operation indices of the loops that contain the program, the outermost first.
        default_kind: kind of the values for which `kinds_of` returns no kind.
    """

    arrays: Arrays
    bytes_by_piece: PieceBytes
    path: tuple[int, ...] = ()
    default_kind: str = "transients"

    @functools.cached_property
    def kind_by_value(self) -> dict[int, str]:
        """The kind of each value, by the value's number; transients are omitted."""
        return kinds_of(self.arrays.program)

    def moments(self) -> list[Moment]:
        """Return the moments of the program's operations, including those inside loops and branches."""
        piece_by_index = {
            index: piece for piece in self.bytes_by_piece if piece.path == self.path for index in piece.indices
        }
        # by array, the index of the last operation that reads it, and of the last operation during which it is alive
        last_read_by_array = self._last_read_by_array()
        last_use_by_array = last_read_by_array | self._late_read_by_array(last_read_by_array)
        live_item_by_array: dict[int, Item] = {}
        early_index, early_stacks = self._early_stacks()
        earlier_item_by_array: dict[int, Item] = {}
        moments: list[Moment] = []
        array_bytes = self.arrays.array_bytes
        for index, operation in enumerate(self.arrays.program.operations):
            piece = piece_by_index.get(index)
            if index == early_index:
                live_item_by_array |= early_stacks
            new_arrays = [value for value in operation.outputs if value in array_bytes]
            dying_arrays = [value for value in live_item_by_array if last_use_by_array.get(value, -1) <= index]
            for value in self._reused_arrays(operation, new_arrays, dying_arrays, live_item_by_array):
                del live_item_by_array[value]
            if piece is not None and index == piece.start:
                earlier_item_by_array = dict(live_item_by_array)
            live_item_by_array |= {value: self._item(operation, value) for value in new_arrays if array_bytes[value]}
            next_item_by_array = {
                value: item for value, item in live_item_by_array.items() if last_use_by_array.get(value, -1) > index
            }
            inner_moments: list[Moment] = []
            if piece is not None and (temporaries_bytes := self.bytes_by_piece[piece]) is not None:
                if index == piece.stop - 1:
                    kind = "loss" if piece.name == "loss" else self.default_kind
                    inner_moments = [Moment((Item(f"{piece.name}, compiled", kind, temporaries_bytes),))]
                    # arrays that a gradient's product reads late are among the temporaries of the piece
                    later_item_by_array = {
                        value: item
                        for value, item in live_item_by_array.items()
                        if last_read_by_array.get(value, -1) > index
                    }
                    live_item_by_array = earlier_item_by_array | later_item_by_array
            elif new_arrays or operation.loop_body or operation.branches:
                inner_moments = self._inner_moments(operation, index)
            for moment in inner_moments:
                items = (*live_item_by_array.values(), *moment.items)
                moments.append(Moment(items, operation.is_backward or moment.is_backward, piece or moment.piece))
            if new_arrays or inner_moments:
                live_item_by_array = next_item_by_array
        return moments

    def _early_stacks(self) -> tuple[int, dict[int, Item]]:
        """Return the index of the first operation after the forward pass, and the stacks that are in memory from it on.

        These are the gradient stacks of the shape whose stacks take the most bytes in total; each has its item.
        """
        arrays = self.arrays
        operations = arrays.program.operations
        if not arrays.compiler.zeroes_stacks_early or not has_both_passes(arrays.program):
            return -1, {}
        forward_end, backward_start = loss_range(operations)
        loop = operations[backward_start]
        if forward_end >= backward_start or loop.loop_body is None or operations[forward_end].loop_body is None:
            return -1, {}
        stacks_by_shape: dict[Any, list[int]] = {}
        for value in loop.outputs[len(carries(loop)) :]:
            aval = arrays.program.avals[value]
            if arrays.array_bytes.get(value):
                stacks_by_shape.setdefault((aval.shape, aval.dtype), []).append(value)
        bytes_by_shape = {
            shape: sum(map(arrays.array_bytes.__getitem__, stacks)) for shape, stacks in stacks_by_shape.items()
        }
        most_bytes = max(bytes_by_shape.values(), default=0)
        largest_stacks = [
            value
            for shape, stacks in stacks_by_shape.items()
            if bytes_by_shape[shape] == most_bytes
            for value in stacks
        ]
        return forward_end + 1, {value: self._item(loop, value) for value in largest_stacks}

    def _last_read_by_array(self) -> dict[int, int]:
        """Return, for each array, the index of the last operation that reads it, directly or through an expression."""
        arrays, program = self.arrays, self.arrays.program
        last_read_by_array: dict[int, int] = {}
        for index, operation in enumerate(program.operations):
            # an expression is computed where an array is computed from it; a stacked output is written at once
            if (
                any(value in arrays.array_bytes for value in operation.outputs)
                or operation.loop_body
                or operation.branches
            ):
                last_read_by_array |= dict.fromkeys(arrays.sources_of(operation.inputs), index)
        return last_read_by_array | dict.fromkeys(arrays.sources_of(program.outputs), len(program.operations))

    def _late_read_by_array(self, last_read_by_array: Mapping[int, int]) -> dict[int, int]:
        """Return, for each array that gradient products read late, the index of the last operation that needs it."""
        arrays = self.arrays
        if arrays.compiler.product_fusion == "no":
            return {}
        late_product_indices = [index for index in arrays.placements.summed_products if arrays.is_ring_product(index)]
        if arrays.compiler.product_fusion == "all":
            has_early_products = arrays.is_inner or arrays.compiler.has_whole_gradients
            late_product_indices = [] if has_early_products else gradient_product_indices(arrays.program)
        late_read_by_array = late_arrays(arrays.program, late_product_indices, arrays.has_array_results)
        return {value: max(index, last_read_by_array.get(value, -1)) for value, index in late_read_by_array.items()}

    def _reused_arrays(
        self,
        operation: Operation,
        new_arrays: Sequence[int],
        dying_arrays: Sequence[int],
        item_by_array: Mapping[int, Item],
    ) -> list[int]:
        """Return the dying arrays whose memory is reused for results of an operation.

        Args:
            operation: the operation.
            new_arrays: results of the operation that are arrays.
            dying_arrays: arrays that no later operation needs.
            item_by_array: item of each array that is alive, by the array's number.
        """
        if operation.kind in OPERATIONS_WITHOUT_REUSE:
            return []
        array_bytes = self.arrays.array_bytes
        if operation.branches:
            results_and_sources = [
                (result, source)
                for result, operand in results_and_unchanged_operands(operation)
                for source in self.arrays.sources_by_value[operand]
            ]
            return [
                source
                for result, source in results_and_sources
                if source in dying_arrays and item_by_array[source].bytes == array_bytes.get(result)
            ]
        if operation.kind.startswith("reduce_"):
            return []
        candidates, results = list(dying_arrays), new_arrays
        if self.arrays.compiler.product_fusion == "no" and operation.loop_body is None:
            # seen in one step on a GPU, whose gradient of capped logits is computed in the array of a scatter
            candidates = [value for value in dying_arrays if value in self.arrays.scattered_sums]
        elif operation.loop_body is not None:
            initial_state = carries(operation)
            results = operation.outputs[: len(initial_state)]
            state_sources = self.arrays.sources_of(initial_state)
            candidates = [value for value in candidates if value in state_sources]
        reused_arrays = []
        for result in results:
            if result in self.arrays.scattered_sums:
                continue
            result_bytes = array_bytes.get(result, 0)
            reused_array = next((array for array in candidates if item_by_array[array].bytes == result_bytes), None)
            if reused_array is not None:
                candidates.remove(reused_array)
                reused_arrays.append(reused_array)
        return reused_arrays

    def _inner_moments(self, operation: Operation, index: int) -> list[Moment]:
        """Return the moments of the operation at `index`; they leave out the operation's operands and results."""
        moments: list[Moment] = []
        if operation.loop_body is not None:
            is_loss = all(self.kind_by_value.get(value) == "loss" for value in operation.outputs)
            default_kind = "loss" if is_loss else self.default_kind
            moments = _Sweep(
                self.arrays.loop_arrays(index), self.bytes_by_piece, (*self.path, index), default_kind
            ).moments()
        elif operation.branches:
            for branch_arrays in self.arrays.branch_arrays(index):
                moments += _Sweep(branch_arrays, {}, (), self.default_kind).moments()
        elif gathered_bytes := self._gathered_bytes(operation, index):
            weight_item = Item(f"gathered weight of {operation.line}", "gathered weights", gathered_bytes)
            moments = [Moment((weight_item,))]
        return moments or [Moment()]

    def _gathered_bytes(self, operation: Operation, index: int) -> int:
        """Return the bytes of the weights that are gathered for the operation at `index`."""
        arrays = self.arrays
        gathered_bytes = int(arrays.compiler.gathered_share * arrays.placements.gathered_bytes.get(index, 0))
        if (
            gathered_bytes
            and arrays.is_inner
            and arrays.compiler.product_fusion == "local"
            and arrays.is_ring_product(index)
        ):
            # a ring assembles the result in steps, with an old and a new copy alive at once
            return max(gathered_bytes, *(arrays.array_bytes.get(value, 0) for value in operation.outputs))
        return gathered_bytes

    def _item(self, operation: Operation, value: int) -> Item:
        """Return the item of an array that an operation computes."""
        aval = self.arrays.program.avals[value]
        name, origin = _name_and_origin(operation, value, self.arrays.program)
        shape_text = f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else str(aval)
        label = f"{name} {shape_text}" if name else f"{shape_text} {origin.kind}, {origin.line}"
        default_kind = "gathered weights" if operation.kind == "all_gather" else self.default_kind
        return Item(label, self.kind_by_value.get(value, default_kind), self.arrays.array_bytes[value])


def _name_and_origin(operation: Operation, value: int, program: FlatProgram) -> tuple[str, Operation]:
    """Return the model's name of a value ("" if it has none), and the operation that computes the value.

    Both are looked up through views and loops.

    Args:
        operation: the operation that returns the value in `program`.
        value: number of the value.
        program: a flat program.
    """
    if value in program.names:
        return program.names[value], operation
    operand, operand_program = None, program
    if operation.loop_body is not None:
        operand_program = operation.loop_body
        operand = operand_program.outputs[operation.outputs.index(value)]
    elif operation.kind in NAME_KEEPERS:
        operand = operation.inputs[0]
    if operand is None:
        return "", operation
    for producer in operand_program.operations:
        if operand in producer.outputs:
            return _name_and_origin(producer, operand, operand_program)
    return operand_program.names.get(operand, ""), operation
