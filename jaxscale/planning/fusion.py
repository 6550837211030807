"""Which values of a traced program a compiler stores as arrays, and which it computes inside other operations.

The results of products, reductions, gathers, loops and kernels are stored as arrays. Every other value is an expression
of such arrays. The compiler computes an expression inside the operations that read it, so the expression needs no
memory. An expression is stored only if a reader requires an array (a loop, a kernel, and on some platforms a product).
This module approximates what XLA does.

Values and arrays are represented by their numbers in a `FlatProgram`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxscale.programs import regions, tiles
from jaxscale.programs.elementwise import ELEMENTWISE
from jaxscale.programs.flat import PIPE, VIEWS, FlatProgram, Operation, carries, loop_parts
from jaxscale.programs.placements import Placements
from jaxscale.programs.rounded import is_rounded

COLLECTIVES = ("ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter")
"""Collectives of a pipelined step."""

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Matrix products and convolutions, which read every element of an operand several times."""

ARRAY_READERS = (
    "scan", "while", "shard_map", "pallas_call", "custom_call", "sort", "top_k", "fft", "cond",
    "select_and_scatter_add", *COLLECTIVES,
)  # fmt: skip
"""Operations that require arrays, not expressions, as operands."""

SCATTERS = ("scatter-add", "scatter_add", "scatter")
"""Operations that write into some elements of an array."""

ARRAY_PRODUCERS = (
    *PRODUCTS, *ARRAY_READERS, *SCATTERS, "gather", "device_put", "cumsum", "cumlogsumexp", "cummax", "concatenate",
    "dynamic_update_slice", "triangular_solve", "random_bits", "threefry2x32", "argmax", "argmin", "split",
    tiles.RETILE,
)  # fmt: skip
"""Operations that store their results as arrays. Reductions (`reduce_...`), which are not listed, do so too."""

_SAME_MEMORY = (*VIEWS, "enter", "sharding_constraint")
"""Operations whose result takes the memory of their operand, if they gather no shards."""
NAME_KEEPERS = (*VIEWS, "convert_element_type", "transpose", tiles.RETILE)
"""Operations whose result keeps the operand's name in listings of arrays."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Properties of a platform's compiler, and of the plan, that affect which values are stored.

    Args:
        product_fusion: matrix products inside which operands that are expressions are computed. "no": no products; all
            operands are stored as arrays (GPU, CPU). "all": all products (TPU). "local": all products except those
            that are computed around a ring of devices (TPU slices with a two-dimensional topology).
        has_scattered_gradients: whether gradients are summed by a reduce-scatter (ZeRO 2 and 3).
        has_whole_gradients: whether every device has whole gradients and updates all weights (ZeRO 0).
        gathered_share: share of a gathered weight that is in memory at any one time.
        rounds_operands: whether a float32 array is stored in bfloat16 if only matrix products of the default precision
            read it. A TPU does so, because it rounds the operands of such products to bfloat16.
        adds_in_place: whether a matrix product is accumulated in the array of another product, if an addition of the
            two is its only use. On TPU and GPU, this applies to the products of LoRA's adapters.
        stores_split_operands: whether an expression of a two-byte type is stored if several matrix products read it and
            its elements are split over the tensor axis or the step is pipelined, such as the gradient of the logits.
            TPU 7x does so; this was inferred from two compiled steps with a tensor axis and one with a pipeline.
        stores_gathered_expressions: whether an expression from which a gather picks elements is stored. XLA does so for
            v5e, which has no sparse cores that could gather; this was inferred from one compiled step.
        stores_exponentials: whether an expression that contains an exponential of its own size is stored if a matrix
            product with batch dims reads it, such as the probabilities of attention. XLA does so for v4 and v5p, but
            not for v6e; this was inferred from one step that was compiled for all three.
        zeroes_stacks_early: whether the largest stacks of gradients that a loop over layers fills are in memory from
            the end of the forward pass on. XLA writes the zeros of stacks of one shape at once, and those of the
            largest stacks before the gradient of the logits, if it schedules operations to hide messages; this was
            inferred from five steps on H100, H200 and B200.
    """

    product_fusion: Literal["no", "all", "local"] = "no"
    has_scattered_gradients: bool = False
    has_whole_gradients: bool = False
    gathered_share: float = 1.0
    rounds_operands: bool = False
    adds_in_place: bool = False
    stores_split_operands: bool = False
    stores_gathered_expressions: bool = False
    stores_exponentials: bool = False
    zeroes_stacks_early: bool = False


class Arrays:
    """The values of a program that are stored as arrays.

    Args:
        program: program of a step, of a loop body, or of a branch.
        placements: placements of the program's values.
        compiler: properties of the platform's compiler.
        first_stacked_index: index of the first of a scan's stacked outputs, which are written into arrays of the
            caller; `None` outside loops and branches.
        is_branch: whether the program is a branch. A value of a branch shares the memory of a result if only its shape
            or type is changed.

    Attributes:
        array_bytes: bytes per device of each array.
        sources_by_value: for each value, the arrays that it is computed from; the only source of an array is the array
            itself.
        output_values: values that the program returns.
        scattered_sums: sums into which a scatter writes one element per row (`_scattered_sums`).
        is_inner: whether the program is a loop body or a branch.
    """

    def __init__(
        self,
        program: FlatProgram,
        placements: Placements,
        compiler: Compiler,
        first_stacked_index: int | None = None,
        *,
        is_branch: bool = False,
    ) -> None:
        self.program, self.placements, self.compiler = program, placements, compiler
        self.is_inner = first_stacked_index is not None
        self.output_values = {value for value in program.outputs if value is not None}
        self.scattered_sums = _scattered_sums(program)
        self.array_bytes: dict[int, int] = {}
        self.sources_by_value: dict[int, frozenset[int]] = {value: frozenset() for value in program.inputs}
        # stacked outputs are written into the caller's arrays; caller values are stored in the caller's memory
        self._stacked_outputs = set() if first_stacked_index is None else set(program.outputs[first_stacked_index:])
        self._stacked_outputs |= regions.reshaped_outputs(program, NAME_KEEPERS) if is_branch else set()
        self._literals: set[int] = set()
        self._zeros: set[int] = set()
        self._summands: dict[int, frozenset[int]] = {}  # sources of each array that `jax.checkpoint` keeps
        self._caller_values = set(program.inputs) if self.is_inner or regions.tick_loops(program) else set()
        self._producer_by_value = {value: operation for operation in program.operations for value in operation.outputs}
        for operation in program.operations:
            self._add_results(operation)

    def loop_arrays(self, index: int) -> "Arrays":
        """Return the arrays in the body of the loop that is the operation at `index`."""
        operation = self.program.operations[index]
        body, initial_state = operation.loop_body, carries(operation)
        assert body is not None
        arrays = Arrays(body, self.placements.loop_placements[index], self.compiler, len(initial_state))
        const_count = len(loop_parts(operation, operation.inputs)[0])
        for value, next_value in zip(body.inputs[const_count:], body.outputs[: len(initial_state)], strict=False):
            if next_value in arrays.array_bytes and arrays._overwrites(value, next_value):
                # the next state is computed in the memory of the state, whose bytes the caller counts
                arrays.array_bytes[next_value] = 0
        return arrays

    def _overwrites(self, value: int, next_value: int) -> bool:
        """Return whether a loop body's next state can overwrite the state, because nothing reads the state later."""
        if value in self.output_values or self._bytes_of(value) != self._bytes_of(next_value):
            return False
        operations = self.program.operations
        producer_index = next(index for index, op in enumerate(operations) if next_value in op.outputs)
        return operations[producer_index].kind in ELEMENTWISE and self._last_read_index(value) <= producer_index

    def _last_read_index(self, value: int) -> int:
        """Return the index of the last operation that reads a value, directly or through expressions; -1 if none."""
        last_index = -1
        for index in self.program.readers.get(value, ()):
            operation = self.program.operations[index]
            expressions = [] if operation.loop_body else [v for v in operation.outputs if v not in self.array_bytes]
            last_index = max(last_index, index, *map(self._last_read_index, expressions))
        return last_index

    def branch_arrays(self, index: int) -> "list[Arrays]":
        """Return the arrays of each branch of the `cond` that is the operation at `index`."""
        programs, placements_of_branches = (
            self.program.operations[index].branches,
            self.placements.branch_placements[index],
        )
        return [
            Arrays(program, branch_placements, self.compiler, first_stacked_index=0, is_branch=True)
            for program, branch_placements in zip(programs, placements_of_branches, strict=True)
        ]

    def sources_of(self, values: Iterable[int | None]) -> set[int]:
        """Return the set of arrays from which the values are computed."""
        return {source for value in values if value is not None for source in self.sources_by_value[value]}

    def has_array_results(self, operation: Operation) -> bool:
        """Return whether the results of an operation are stored as arrays, whatever reads them."""
        if operation.kind in SCATTERS and _changes_one_per_row(operation, self.program):
            return False
        if self._is_update_of_zeros(operation):
            return False
        if operation.kind in ("sharding_constraint", "enter"):  # they may gather shards
            operand, result = operation.inputs[0], operation.outputs[0]
            return operand is not None and self._bytes_of(result) > self._bytes_of(operand)
        return operation.kind in ARRAY_PRODUCERS or operation.kind.startswith("reduce_")

    def _is_update_of_zeros(self, operation: Operation) -> bool:
        """Return whether an operation writes into zeros only to add the result, such as a layer's gradient in a cycle.

        XLA for TPUs writes the gradient into the sum.
        """
        is_update = operation.kind == "dynamic_update_slice" and operation.inputs[0] in self._zeros
        if not is_update or self.compiler.product_fusion == "no":
            return False
        readers = [self.program.operations[index] for index in self.program.readers.get(operation.outputs[0], ())]
        return bool(readers) and all(reader.kind in ("add", "add_any") for reader in readers)

    def is_ring_product(self, index: int) -> bool:
        """Return whether the matrix product at `index` is computed around a ring of devices.

        Such a product is computed in steps. Between two steps, an operand or the partial result moves to the next
        device.
        """
        if not has_rings(self.placements.axis_sizes):
            return False
        is_scattered = self.compiler.has_scattered_gradients and index in self.placements.summed_products
        return is_scattered or bool(self.placements.gathered_bytes.get(index))

    def _add_results(self, operation: Operation) -> None:
        """Record which results of an operation are stored as arrays, and from which arrays each result is computed."""
        operands = [value for value in operation.inputs if value is not None]
        operand_sources = frozenset(self.sources_of(operands))
        is_stored = self.has_array_results(operation)
        is_gathered = is_stored and operation.kind == "enter"
        in_place_values: set[int] = set()
        if not is_gathered:
            in_place_values = regions.in_place_results(operation, self._caller_values, self.program)
        if not self.is_inner:
            in_place_values |= self._aliased_results(operation)
        self._caller_values |= in_place_values
        if operation.kind == "broadcast_in_dim" and operation.literals.get(0, 1) == 0:
            self._zeros.update(operation.outputs)
        if operation.kind == "broadcast_in_dim" or operation.kind in ELEMENTWISE:
            self._literals.update(operation.outputs if self._literals.issuperset(operands) else ())
        if operation.kind == "reduce_precision":
            self._summands[operation.outputs[0]] = operand_sources
        is_view = operation.kind in VIEWS and len(operands) == 1 and len(operand_sources) <= 1
        is_whole_array = regions.is_whole_array(operation, self.program)
        for value in operation.outputs:
            self.sources_by_value[value] = operand_sources
            if value in in_place_values or self._is_sunk_constant(value):
                self.sources_by_value[value] = frozenset()
            elif not is_whole_array and (is_stored or (not is_view and self._needs_array(value))):
                self.sources_by_value[value] = frozenset((value,))
                self.array_bytes[value] = 0 if value in self._stacked_outputs else self._result_bytes(operation, value)

    def _aliased_results(self, operation: Operation) -> set[int]:
        """Return the results of a kernel that take the memory of an input of the step.

        These are results that are aliased to an input, in whatever shape, which nothing else needs later. All such
        inputs are taken as donated, as the state is.
        """
        results: set[int] = set()
        for operand_index, result_index in operation.params.get("input_output_aliases", ()):
            value, next_operation = operation.inputs[operand_index], operation
            while value is not None and self._is_read_last_by(value, next_operation, operation):
                if value in self.program.inputs:
                    results.add(operation.outputs[result_index])
                    break
                next_operation = self._producer_by_value[value]
                is_same_array = next_operation.kind in _SAME_MEMORY and not self.has_array_results(next_operation)
                value = next_operation.inputs[0] if is_same_array else None
        return results

    def _is_read_last_by(self, value: int, reader: Operation, kernel: Operation) -> bool:
        """Return whether only `reader`, which leads to a kernel, reads a value after it, directly or by expressions."""
        operations = self.program.operations
        kernel_index = next(index for index, operation in enumerate(operations) if operation is kernel)
        last_indices = [
            max([index, *(self._last_read_index(v) for v in operations[index].outputs if v not in self.array_bytes)])
            for index in self.program.readers.get(value, ())
            if operations[index] is not reader and operations[index] is not kernel
        ]
        has_one_use = kernel.inputs.count(value) <= 1
        return has_one_use and value not in self.output_values and max(last_indices, default=-1) < kernel_index

    def _bytes_of(self, value: int) -> int:
        """Return the bytes per device of a value if it is stored as an array."""
        return self.placements.value_bytes(value)

    def _result_bytes(self, operation: Operation, value: int) -> int:
        """Return the bytes of a result as an array. A product is stored in the type to which its readers convert it."""
        result_bytes = self._bytes_of(value)
        if self.compiler.rounds_operands and is_rounded(value, self.program):
            # a loop over microbatches reads a weight in bfloat16, and the update reads it in float32
            return result_bytes * 3 // 2 if operation.kind == tiles.RETILE else result_bytes // 2
        if (
            self.compiler.adds_in_place
            and operation.kind == "dot_general"
            and self._is_added_in_place(value, result_bytes)
        ):
            return 0
        readers = [self.program.operations[index] for index in self.program.readers.get(value, ())]
        if operation.kind not in PRODUCTS or value in self.output_values or not readers:
            return result_bytes
        if any(reader.kind != "convert_element_type" for reader in readers):
            return result_bytes
        return min(result_bytes, max(self._bytes_of(reader.outputs[0]) for reader in readers))

    def _is_added_in_place(self, value: int, result_bytes: int) -> bool:
        """Return whether the only use of a product is its addition to an earlier product.

        The earlier product must be at least as large, and nothing else may read it.
        """
        addition, operand = self._addition_of(value)
        if addition is None:
            return False
        sources = self.sources_of(
            other for other in addition.inputs if other not in (operand, None) and self._is_known(other)
        )
        if len(sources) != 1:
            return False
        (source,) = sources
        producer = next((op for op in self.program.operations if source in op.outputs), None)
        is_product = (
            producer is not None and producer.kind == "dot_general" and self.array_bytes[source] >= result_bytes
        )
        return is_product and self._addition_of(source)[0] is addition

    def _is_known(self, value: int | None) -> bool:
        """Return whether the sources of a value have been recorded."""
        return value in self.sources_by_value

    def _addition_of(self, value: int) -> tuple[Operation | None, int]:
        """Return the addition that is the only use of a value, and the operand through which the addition reads it.

        Views, conversions and constant factors may lie between the value and the addition, each the only reader of the
        one before it. The addition is `None` if there is no such chain of operations.
        """
        while value not in self.output_values:
            reader_indices = self.program.readers.get(value, ())
            if len(reader_indices) != 1:
                break
            operation = self.program.operations[next(iter(reader_indices))]
            if operation.kind in ("add", "add_any"):
                return operation, value
            other_operands = {other for other in operation.inputs if other not in (value, None)}
            is_factor = operation.kind == "mul" and not any(
                self.sources_by_value.get(other, {other}) for other in other_operands
            )
            if operation.kind not in NAME_KEEPERS and not is_factor:
                break
            value = operation.outputs[0]
        return None, value

    def _needs_array(self, value: int) -> bool:
        """Return whether an expression must be stored as an array."""
        if value in self.output_values and self.is_inner:
            return True
        if self._is_backward_sum(value):
            return True
        if value in self.scattered_sums and (self.compiler.product_fusion == "no" or not self._is_fully_sharded(value)):
            return True
        reader_indices = self._reader_indices(value)
        if any(self.program.operations[index].kind in ARRAY_READERS for index in reader_indices):
            return True
        product_indices = [index for index in reader_indices if self.program.operations[index].kind in PRODUCTS]
        if self.compiler.product_fusion == "no":
            return bool(product_indices)
        if self._is_convolved_sum(value, product_indices) or self._is_split_operand(value, product_indices):
            return True
        if self.compiler.stores_gathered_expressions and self._is_gathered_expression(value, reader_indices):
            return True
        if self.compiler.stores_exponentials and self._is_batched_exponential(value, product_indices):
            return True
        return self.compiler.product_fusion == "local" and any(map(self.is_ring_product, product_indices))

    def _is_backward_sum(self, value: int) -> bool:
        """Return whether several operations of the backward pass read a sum of at least three arrays of its shape.

        Examples are the gradient of a residual stream, and a stream that is computed again. To store it once moves
        fewer bytes than to read all its arrays for each reader. A sum behind a mask, such as ReLU's, counts too. Sums
        of the forward pass are left out, because the backward pass reads their arrays anyway.
        """
        producer = self._producer_by_value.get(value)
        if producer is None or not producer.is_backward or producer.kind not in ("add", "add_any", "select_n"):
            return False
        avals = self.program.avals
        shapes = [getattr(avals[source], "shape", None) for source in self.sources_by_value[value]]
        return shapes.count(avals[value].shape) >= 3 and len(self.program.readers.get(value, ())) > 1

    def _is_gathered_expression(self, value: int, reader_indices: Iterable[int]) -> bool:
        """Return whether a gather reads a large computed value, such as all log-probabilities for those of targets."""
        producer = self._producer_by_value.get(value)
        is_computed = producer is not None and producer.kind in ELEMENTWISE and producer.kind not in NAME_KEEPERS
        readers = [self.program.operations[index] for index in reader_indices]
        is_gathered = any(reader.kind == "gather" and reader.inputs[0] == value for reader in readers)
        return is_computed and is_gathered and self.program.avals[value].size >= tiles.SMALL_COUNT

    def _is_split_operand(self, value: int, product_indices: Iterable[int]) -> bool:
        """Return whether several products read a value of a two-byte type that is split over tensor, or pipelined."""
        if not self.compiler.stores_split_operands or len(set(product_indices)) < 2:
            return False
        is_split = any("tensor" in axes for axes in self.placements.by_value[value])
        is_split = is_split and self.placements.axis_sizes["tensor"] > 1
        producer = self._producer_by_value.get(value)
        is_pipelined = producer is not None and PIPE in producer.manual_axes and value not in self._literals
        return (is_split or is_pipelined) and self.program.avals[value].dtype.itemsize == 2

    def _is_batched_exponential(self, value: int, product_indices: Iterable[int]) -> bool:
        """Return whether a product with batch dims reads an expression that contains an exponential of its own size."""
        products = [self.program.operations[index] for index in product_indices]
        if not any(op.kind == "dot_general" and op.params["dimension_numbers"][1][0] for op in products):
            return False
        avals = self.program.avals
        pending_values, expressions = [value], {value}
        while pending_values:
            producer = self._producer_by_value.get(pending_values.pop())
            if producer is None:
                continue
            if producer.kind in ("exp", "exp2") and avals[producer.outputs[0]].size >= avals[value].size:
                return True
            operands = {operand for operand in producer.inputs if operand is not None} - self.array_bytes.keys()
            pending_values += operands - expressions
            expressions |= operands
        return False

    def _is_convolved_sum(self, value: int, product_indices: Iterable[int]) -> bool:
        """Return whether a convolution reads a sum of several arrays of the same shape, such as a residual stream."""
        if all(self.program.operations[index].kind != "conv_general_dilated" for index in product_indices):
            return False
        shape = self.program.avals[value].shape
        # a sum that is kept for the backward pass is an array of its own
        summands = {
            array
            for source in self.sources_by_value[value]
            for array in self._summands.get(source, frozenset((source,)))
        }
        return sum(self.program.avals[array].shape == shape for array in summands) > 1

    def _is_sunk_constant(self, value: int) -> bool:
        """Return whether XLA moves a constant into loop bodies: only loops read it, unchanged and unsliced."""
        if value not in self._literals or value in self.output_values:
            return False
        readers = [self.program.operations[index] for index in self.program.readers.get(value, ())]
        if not readers or any(reader.loop_body is None for reader in readers):
            return False
        return all(
            value not in loop_operands for reader in readers for loop_operands in loop_parts(reader, reader.inputs)[1:]
        )

    def _reader_indices(self, value: int) -> list[int]:
        """Return the indices of the operations that read a value, directly or through views."""
        reader_indices = []
        for index in self.program.readers.get(value, ()):
            operation = self.program.operations[index]
            reader_indices += self._reader_indices(operation.outputs[0]) if operation.kind in VIEWS else [index]
        return reader_indices

    def _is_fully_sharded(self, value: int) -> bool:
        """Return whether each device holds a different part of a value.

        Otherwise, XLA's partitioner keeps the scatter that is added to the value.
        """
        device_count = math.prod(self.placements.axis_sizes.values())
        return math.prod(map(self.placements.part_count, self.placements.by_value[value])) == device_count


def has_rings(axis_sizes: Mapping[str, int]) -> bool:
    """Return whether products may run around a ring of devices: along fsdp, if only it splits a batch.

    With an axis data or replica beside fsdp, or with 2 devices along fsdp, compiled steps had no rings.

    Example:
        >>> has_rings({"fsdp": 4}), has_rings({"data": 2, "fsdp": 4})
        (True, False)
    """
    return axis_sizes.get("fsdp", 1) > 2 and max(axis_sizes.get(axis, 1) for axis in ("data", "replica")) == 1


def _scattered_sums(program: FlatProgram) -> set[int]:
    """Return the sums to which a scatter of one element per row is added. The scatter writes into the sum's array."""
    scatter_results: set[int] = set()
    sum_values: set[int] = set()
    for operation in program.operations:
        if operation.kind in SCATTERS and _changes_one_per_row(operation, program):
            scatter_results.update(operation.outputs)
        elif operation.kind in ("add", "add_any") and not scatter_results.isdisjoint(operation.inputs):
            sum_values.update(operation.outputs)
    return sum_values


def _changes_one_per_row(operation: Operation, program: FlatProgram) -> bool:
    """Return whether a scatter changes one element per row. Compilers turn it into a comparison with an iota."""
    dimension_numbers = operation.params["dimension_numbers"]
    batching_dims, inserted_dims = dimension_numbers.operand_batching_dims, dimension_numbers.inserted_window_dims
    shape = program.avals[operation.outputs[0]].shape
    return not dimension_numbers.update_window_dims and len(inserted_dims) == 1 and len(batching_dims) + 1 == len(shape)
