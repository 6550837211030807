"""Which values of a traced program a compiler stores as arrays, and which it computes inside their readers.

The results of products, reductions, gathers, loops and kernels are stored as arrays. Every other value is an expression
of such arrays. The compiler computes an expression inside the operations that read it, so that the expression needs no
memory. It is stored only if a reader requires an array (a loop, a kernel, and on some platforms a product). This is
XLA's behavior in outline.

Values and arrays are represented by their numbers in a `FlatProgram`.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from jaxscale.programs import regions
from jaxscale.programs.flat import FlatProgram, Operation, carries
from jaxscale.programs.placements import Placements

COLLECTIVES = ("ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter")
"""Collectives of a pipelined step."""

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Matrix products and convolutions, which read every element of an operand several times."""

ARRAY_READERS = (
    "scan", "while", "shard_map", "pallas_call", "custom_call", "sort", "top_k", "fft", "cond", *COLLECTIVES,
)  # fmt: skip
"""Operations whose operands must be arrays, not expressions."""

SCATTERS = ("scatter-add", "scatter_add", "scatter")
"""Operations that write into some elements of an array."""

ARRAY_RESULTS = (
    *PRODUCTS, *ARRAY_READERS, *SCATTERS, "gather", "device_put", "cumsum", "cumlogsumexp", "cummax", "concatenate",
    "dynamic_update_slice", "triangular_solve", "random_bits", "threefry2x32", "argmax", "argmin", "split",
)  # fmt: skip
"""Operations whose results are arrays. The results of reductions (`reduce_...`) are arrays too."""

VIEWS = (
    "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast",
    "enter", "leave",
)  # fmt: skip
"""Operations that leave the bytes unchanged."""

RENAMED = (*VIEWS, "convert_element_type", "transpose")
"""Operations whose result is listed under the name of their operand."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """How a platform's compiler treats the operands of products.

    Args:
        fuses: with "no", operands of products are arrays (GPU, CPU). With "all", operands that are expressions are
            computed inside the product (TPU). "local" is like "all", except for a product that is computed around a
            ring of devices (TPUs whose slices are flat).
        scatters: whether gradients are scattered as they are summed (ZeRO 2 and 3).
        gather: share of a gathered weight that is in memory at any one time.
    """

    fuses: Literal["no", "all", "local"] = "no"
    scatters: bool = False
    gather: float = 1.0


class Arrays:
    """The arrays of a program.

    `bytes` has the bytes per device of each array. `sources` has, for each value, the arrays that it is computed from;
    the only source of an array is the array itself.

    Args:
        program: program of a step, of the body of a loop, or of a branch.
        placements: placements of the program's values.
        compiler: what the platform's compiler fuses.
        first_stacked: index of the first output that is written into an array of the caller (a scan's stacked outputs);
            `None` outside loops and branches.
        branch: whether the program is a branch, whose results may share their memory with a value of another shape or
            type.
    """

    def __init__(
        self,
        program: FlatProgram,
        placements: Placements,
        compiler: Compiler,
        first_stacked: int | None = None,
        *,
        branch: bool = False,
    ) -> None:
        self.program, self.placements, self.compiler = program, placements, compiler
        self.in_loop = first_stacked is not None
        self.outputs = {value for value in program.outputs if value is not None}
        self.scattered_sums = _scattered_sums(program)
        self.bytes: dict[int, int] = {}
        self.sources: dict[int, frozenset[int]] = {value: frozenset() for value in program.inputs}
        # the caller holds the memory of these values
        self._stacked_outputs = set() if first_stacked is None else set(program.outputs[first_stacked:])
        self._stacked_outputs |= regions.reshaped_outputs(program, RENAMED) if branch else set()
        self._caller_values = set(program.inputs) if self.in_loop or regions.tick_loops(program) else set()
        for operation in program.operations:
            self._add_results(operation)

    def of_loop(self, index: int) -> "Arrays":
        """The arrays of the body of a loop, by the loop's index among the operations."""
        operation = self.program.operations[index]
        assert operation.loop_body is not None
        return Arrays(
            operation.loop_body, self.placements.loop_placements[index], self.compiler, len(carries(operation))
        )

    def of_branches(self, index: int) -> "list[Arrays]":
        """The arrays of each branch of the `cond` with this index among the operations."""
        programs, placements = self.program.operations[index].branches, self.placements.branch_placements[index]
        return [
            Arrays(program, branch_placements, self.compiler, first_stacked=0, branch=True)
            for program, branch_placements in zip(programs, placements, strict=True)
        ]

    def sources_of(self, values: Iterable[int | None]) -> set[int]:
        """The arrays that the values are computed from, all together."""
        return {source for value in values if value is not None for source in self.sources[value]}

    def is_array(self, operation: Operation) -> bool:
        """Whether the results of an operation are arrays regardless of their readers."""
        if operation.kind in SCATTERS and _changes_one_per_row(operation, self.program):
            return False
        if operation.kind in ("sharding_constraint", "enter"):  # they may gather shards
            operand, output = operation.inputs[0], operation.outputs[0]
            return operand is not None and self._bytes_of(output) > self._bytes_of(operand)
        return operation.kind in ARRAY_RESULTS or operation.kind.startswith("reduce_")

    def is_around_ring(self, index: int) -> bool:
        """Whether a product is computed in steps while an operand or the result moves around more than two devices."""
        if self.placements.axis_sizes.get("fsdp", 1) <= 2:
            return False
        scatters_result = self.compiler.scatters and index in self.placements.summed_products
        return scatters_result or bool(self.placements.gathered_bytes.get(index))

    def _add_results(self, operation: Operation) -> None:
        """Record which results of an operation are arrays, and the sources of the others."""
        operands = [value for value in operation.inputs if value is not None]
        operand_sources = frozenset(self.sources_of(operands))
        are_arrays = self.is_array(operation)
        gathers = are_arrays and operation.kind == "enter"
        in_place_values = set() if gathers else regions.in_place_results(operation, self._caller_values, self.program)
        self._caller_values |= in_place_values
        is_view = operation.kind in VIEWS and len(operands) == 1 and len(operand_sources) <= 1
        is_whole_array = regions.is_whole_array(operation, self.program)
        for value in operation.outputs:
            if value in in_place_values:
                self.sources[value] = frozenset()
            elif not is_whole_array and (are_arrays or (not is_view and self._needs_array(value))):
                self.sources[value] = frozenset((value,))
                self.bytes[value] = 0 if value in self._stacked_outputs else self._result_bytes(operation, value)
            else:
                self.sources[value] = operand_sources

    def _bytes_of(self, value: int) -> int:
        """Bytes per device of a value as an array."""
        return self.placements.bytes_of(self.program.avals[value], self.placements.dims[value])

    def _result_bytes(self, operation: Operation, value: int) -> int:
        """Bytes of a result; a product's result is stored in the type to which all its readers convert it."""
        result_bytes = self._bytes_of(value)
        readers = [self.program.operations[index] for index in self.program.readers.get(value, ())]
        if operation.kind not in PRODUCTS or value in self.outputs or not readers:
            return result_bytes
        if any(reader.kind != "convert_element_type" for reader in readers):
            return result_bytes
        return min(result_bytes, max(self._bytes_of(reader.outputs[0]) for reader in readers))

    def _needs_array(self, value: int) -> bool:
        """Whether an expression must be stored as an array."""
        if value in self.outputs and self.in_loop:
            return True
        if value in self.scattered_sums and (self.compiler.fuses == "no" or not self._is_fully_sharded(value)):
            return True
        reader_indices = self._readers_through_views(value)
        if any(self.program.operations[index].kind in ARRAY_READERS for index in reader_indices):
            return True
        product_indices = [index for index in reader_indices if self.program.operations[index].kind in PRODUCTS]
        if self.compiler.fuses == "no":
            return bool(product_indices)
        return self.compiler.fuses == "local" and any(map(self.is_around_ring, product_indices))

    def _readers_through_views(self, value: int) -> list[int]:
        """Indices of the operations that read a value or a view of it."""
        reader_indices = []
        for index in self.program.readers.get(value, ()):
            operation = self.program.operations[index]
            reader_indices += self._readers_through_views(operation.outputs[0]) if operation.kind in VIEWS else [index]
        return reader_indices

    def _is_fully_sharded(self, value: int) -> bool:
        """Whether no two devices hold the same part of a value; if two do, XLA's partitioner keeps a scatter."""
        axis_sizes = self.placements.axis_sizes.values()
        return math.prod(map(self.placements.part_count, self.placements.dims[value])) == math.prod(axis_sizes)


def _scattered_sums(program: FlatProgram) -> set[int]:
    """Sums that add a scatter of one element per row; the scatter writes into the array of the sum."""
    scatter_results: set[int] = set()
    sums: set[int] = set()
    for operation in program.operations:
        if operation.kind in SCATTERS and _changes_one_per_row(operation, program):
            scatter_results.update(operation.outputs)
        elif operation.kind in ("add", "add_any") and not scatter_results.isdisjoint(operation.inputs):
            sums.update(operation.outputs)
    return sums


def _changes_one_per_row(operation: Operation, program: FlatProgram) -> bool:
    """Whether a scatter changes one element per row, which compilers turn into a comparison with an iota."""
    dimension_numbers = operation.params["dimension_numbers"]
    batching_dims, inserted_dims = dimension_numbers.operand_batching_dims, dimension_numbers.inserted_window_dims
    shape = program.avals[operation.outputs[0]].shape
    return not dimension_numbers.update_window_dims and len(inserted_dims) == 1 and len(batching_dims) + 1 == len(shape)
