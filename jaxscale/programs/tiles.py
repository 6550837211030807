"""Bytes of padding to tiles in a TPU's memory: XLA chooses an array's layout, but not freely around some operations.

A TPU stores an array in tiles of 8 x 128 elements along two of its dims. XLA takes the dims that waste least, but the
operands and results of a Pallas kernel are tiled along their last two dims, so heads of width 64 take twice their
bytes. Transposes and copies before and after a kernel cost nothing, because XLA gives the array on their other side the
same layout. The same holds for the arrays that a loop keeps for a kernel in its body. A matrix product's result, such
as queries, keys and values to which no rotation is applied, has a layout of its own, and is copied for the kernel.
What waits in a pipeline is an exception: the slots have the layout of the branch that reads them with a kernel.

The activations of a convolution are tiled along the batch and the features, in the order that wastes less. Elementwise
operations and pooling keep that layout. The result of a product with batch dims, such as attention's scores, is tiled
along its other dims. The values computed from it elementwise, and the stack of it that a loop returns, are tiled in the
same way.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jaxscale.programs.elementwise import ELEMENTWISE
from jaxscale.programs.flat import FlatProgram, Operation, flatten, loop_parts

TileDimPairs = tuple[tuple[int, int], ...]
"""Pairs of dims of which XLA chooses one: the dims along which an array is divided into 8 and into 128 elements."""

SMALL_COUNT = 2**16
"""Number of elements below which padding to whole tiles is ignored."""

RETILE = "retile"
"""Kind of the operations that copy an argument, for example to tiles of another shape."""

SAME_LAYOUT = (
    "sharding_constraint", "optimization_barrier", "copy", "pvary", "pcast", "enter", "leave", "reduce_precision",
    "convert_element_type",
)  # fmt: skip
"""Operations whose operand and result have the same layout."""

POOLING = ("reduce_window_max", "reduce_window_sum", "reduce_window", "select_and_scatter_add", "pad")
"""Operations that keep the layout of a convolution's activations, as elementwise operations do."""


def padding_factor(shape: Sequence[int], tile_dim_pairs: TileDimPairs | None = None) -> float:
    """Return the factor by which padding to tiles of 8 x 128 elements enlarges an array.

    Args:
        shape: shape of the array on one device.
        tile_dim_pairs: pairs of dims, of which the pair with the least factor counts; `None` for all pairs of the last
            four dims. If the first dim of a pair has at most 4 elements, its tiles have 1, 2 or 4 elements.

    Example:
        >>> padding_factor((8, 2048, 1024)), round(padding_factor((16, 257, 257)), 3), padding_factor((2,))
        (1.0, 1.494, 1.0)
        >>> padding_factor((16, 12, 512, 64)), padding_factor((16, 12, 512, 64), ((2, 3),))
        (1.0, 2.0)
    """
    if len(shape) < 2 or math.prod(shape) < SMALL_COUNT:
        return 1.0
    last_dims = range(max(len(shape) - 4, 0), len(shape))
    dim_pairs = (
        tuple((i, j) for i in last_dims for j in last_dims if i != j) if tile_dim_pairs is None else tile_dim_pairs
    )
    return min(
        _rounding_factor(shape[i], min(8, _power_of_2(shape[i]))) * _rounding_factor(shape[j], 128)
        for i, j in dim_pairs
    )


def pads_less_in_other_layout(shape: Sequence[int]) -> bool:
    """Return whether an array of several matrices takes fewer bytes in a layout that is not row-major.

    Example:
        >>> pads_less_in_other_layout((48, 1600, 100)), pads_less_in_other_layout((48, 1600, 128))
        (True, False)
    """
    row_major_dims = ((len(shape) - 2, len(shape) - 1),)
    return len(shape) > 2 and padding_factor(shape, row_major_dims) > padding_factor(shape)


def _power_of_2(size: int) -> int:
    """Return the least power of two that is not less than a size."""
    return 1 << max(size - 1, 0).bit_length()


def _rounding_factor(size: int, multiple: int) -> float:
    """Return the factor by which rounding up to a multiple enlarges a dim."""
    return -(-size // multiple) * multiple / size


@dataclasses.dataclass(eq=False)
class Tiles:
    """The tiled dims of each value whose layout a kernel, a convolution or a batched matrix product prescribes.

    Args:
        program: a flat program.
        dim_pairs_by_value: pairs of dims of the tiles, by the value's number.
        loop_tiles: tiles in the body of each loop, by the loop's index among the operations.
        branch_tiles: tiles in the branches of each `cond`, by the `cond`'s index among the operations.
        batched_results: the results of products with batch dims, the values computed elementwise from them, and the
            stacks of them that loops return, unless a kernel or a convolution prescribes their layout.
    """

    program: FlatProgram
    dim_pairs_by_value: dict[int, TileDimPairs] = dataclasses.field(default_factory=dict)
    loop_tiles: "dict[int, Tiles]" = dataclasses.field(default_factory=dict)
    branch_tiles: "dict[int, tuple[Tiles, ...]]" = dataclasses.field(default_factory=dict)
    batched_results: set[int] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def product_results(self) -> frozenset[int]:
        """The results of matrix products, values computed elementwise from them, and stacks of these from loops."""
        result_values: set[int] = set()
        for index, operation in enumerate(self.program.operations):
            if operation.kind == "dot_general":
                result_values.update(operation.outputs)
            elif operation.kind in ELEMENTWISE or operation.kind in (*SAME_LAYOUT, "reshape"):
                if not result_values.isdisjoint(operation.inputs):  # a bias is added by the product
                    result_values.update(operation.outputs)
            elif operation.loop_body is not None:
                body_results, body_outputs = self.loop_tiles[index].product_results, operation.loop_body.outputs
                outer_and_inner_values = zip(operation.outputs, body_outputs, strict=True)
                result_values.update(
                    value for value, inner_value in outer_and_inner_values if inner_value in body_results
                )
        return frozenset(result_values)


def prescribed_tiles(program: FlatProgram) -> Tiles:
    """Return the tiled dims of each value whose layout a kernel, a convolution or a batched matrix product prescribes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.experimental import pallas as pl
        >>> from jaxscale.programs.flat import flatten
        >>> x = jnp.ones((4, 8, 2))
        >>> def copy(x_ref, y_ref):
        ...     y_ref[...] = x_ref[...]
        >>> kernel = pl.pallas_call(copy, out_shape=x)
        >>> program = flatten(jax.make_jaxpr(lambda x: kernel(x.transpose(0, 2, 1).reshape(x.shape)))(x))
        >>> sorted(prescribed_tiles(program).dim_pairs_by_value.values())
        [((1, 2),), ((1, 2),)]
    """
    tiles = Tiles(program)
    for index, operation in enumerate(program.operations):
        if operation.loop_body is not None:
            tiles.loop_tiles[index] = prescribed_tiles(operation.loop_body)
        elif operation.branches:
            tiles.branch_tiles[index] = tuple(map(prescribed_tiles, operation.branches))
        elif operation.kind == "pallas_call":
            operands = [value for value in operation.inputs if value is not None]
            for value in (*operands, *operation.outputs):
                rank = len(getattr(program.avals[value], "shape", ()))
                if rank >= 2:
                    tiles.dim_pairs_by_value[value] = ((rank - 2, rank - 1),)
        elif operation.kind == "shard_map":
            _prescribe_outside_region(operation, tiles)
    for index, body_tiles in tiles.loop_tiles.items():
        _prescribe_outside_loop(program.operations[index], body_tiles, tiles)
    for index, branches_tiles in tiles.branch_tiles.items():
        _prescribe_outside_branches(program.operations[index], branches_tiles, tiles)
    for operation in program.operations:  # from kernels to the readers of their results
        _prescribe_neighbor(operation, tiles, is_forward=True)
    for operation in reversed(program.operations):  # from kernels to the producers of their operands
        _prescribe_neighbor(operation, tiles, is_forward=False)
    _prescribe_around_convolutions(tiles)
    _prescribe_batched_products(tiles)
    return tiles


def _prescribe_around_convolutions(tiles: Tiles) -> None:
    """Tile the activations of convolutions along batch and features."""
    operations, dim_pairs_by_value = tiles.program.operations, tiles.dim_pairs_by_value
    convolutions = [operation for operation in operations if operation.kind == "conv_general_dilated"]
    for operation in convolutions:
        dim_numbers = operation.params["dimension_numbers"]
        values = (*operation.inputs[:2], operation.outputs[0])
        for value, (first_dim, second_dim, *_) in zip(
            values, (dim_numbers.lhs_spec, dim_numbers.rhs_spec, dim_numbers.out_spec), strict=True
        ):
            if value is not None:
                dim_pairs_by_value.setdefault(value, ((first_dim, second_dim), (second_dim, first_dim)))
    if not convolutions:
        return
    for ordered_operations in (operations, operations[::-1]):
        for operation in ordered_operations:
            if operation.kind not in ELEMENTWISE and operation.kind not in (*SAME_LAYOUT, *POOLING):
                continue
            values = [value for value in (*operation.inputs, *operation.outputs) if value is not None]
            rank = len(getattr(tiles.program.avals[operation.outputs[0]], "shape", ()))
            equal_rank_values = [v for v in values if len(getattr(tiles.program.avals[v], "shape", ())) == rank]
            source_value = next((value for value in equal_rank_values if value in dim_pairs_by_value), None)
            if source_value is not None:
                for value in equal_rank_values:
                    dim_pairs_by_value.setdefault(value, dim_pairs_by_value[source_value])


def _prescribe_batched_products(tiles: Tiles) -> None:
    """Tile results of products with batch dims, and values computed elementwise from them, along their other dims."""
    operations, avals, dim_pairs_by_value = tiles.program.operations, tiles.program.avals, tiles.dim_pairs_by_value
    for index, operation in enumerate(operations):
        if operation.loop_body is not None:
            _stack_batched_products(operation, tiles.loop_tiles[index], tiles)
            continue
        for position, result in enumerate(operation.outputs):
            if result is None or result in dim_pairs_by_value:
                continue
            shape = tuple(getattr(avals[result], "shape", ()))
            if operation.kind == "dot_general":
                batch_dim_count = len(operation.params["dimension_numbers"][1][0])
                other_dims = range(batch_dim_count, len(shape))
                if batch_dim_count and len(other_dims) > 1:
                    tiles.batched_results.add(result)
                    dim_pairs_by_value[result] = tuple((i, j) for i in other_dims for j in other_dims if i != j)
            elif operation.kind in ELEMENTWISE or operation.kind in SAME_LAYOUT:
                # if there are several results, as in a barrier, each is the operand at the same position
                has_several_results = len(operation.outputs) > 1
                inputs = operation.inputs[position : position + 1] if has_several_results else operation.inputs
                operands = tiles.batched_results.intersection(inputs)
                source_value = next((value for value in operands if tuple(avals[value].shape) == shape), None)
                if source_value is not None:
                    tiles.batched_results.add(result)
                    dim_pairs_by_value[result] = dim_pairs_by_value[source_value]


def _stack_batched_products(operation: Operation, body_tiles: Tiles, tiles: Tiles) -> None:
    """Tile each stack of batched products' results that a loop returns like the results in the loop's body."""
    body = operation.loop_body
    assert body is not None
    state_count = len(loop_parts(operation, operation.inputs)[1])
    for value, inner_value in zip(operation.outputs[state_count:], body.outputs[state_count:], strict=True):
        if value is not None and inner_value in body_tiles.batched_results and value not in tiles.dim_pairs_by_value:
            tile_dim_pairs = body_tiles.dim_pairs_by_value[inner_value]
            tiles.batched_results.add(value)
            tiles.dim_pairs_by_value[value] = tuple((first + 1, second + 1) for first, second in tile_dim_pairs)


def _prescribe_outside_loop(operation: Operation, body_tiles: Tiles, tiles: Tiles) -> None:
    """Give the arrays that enter or leave a loop the layout that they, or their slices, have in the loop's body."""
    body = operation.loop_body
    assert body is not None
    const_values, state_values, stacked_values = loop_parts(operation, operation.inputs)
    slice_start = len(const_values) + len(state_values)
    # each: a value outside, the value inside, and the number of dims that only the value outside has
    value_pairs_and_added_dim_counts = [
        *((value, body.inputs[index], 0) for index, value in enumerate((*const_values, *state_values))),
        *((value, body.inputs[slice_start + index], 1) for index, value in enumerate(stacked_values)),
        *(
            (value, body.outputs[index], int(index >= len(state_values)))
            for index, value in enumerate(operation.outputs)
        ),
    ]
    for value, inner_value, added_dim_count in value_pairs_and_added_dim_counts:
        if value is not None and inner_value in body_tiles.dim_pairs_by_value and value not in tiles.product_results:
            tile_dim_pairs = body_tiles.dim_pairs_by_value[inner_value]
            if len(tile_dim_pairs) > 1:  # operands of a convolution or batched product are copied from the outer array
                continue
            shifted_dim_pairs = tuple(
                (first + added_dim_count, second + added_dim_count) for first, second in tile_dim_pairs
            )
            tiles.dim_pairs_by_value.setdefault(value, shifted_dim_pairs)


def _prescribe_outside_region(operation: Operation, tiles: Tiles) -> None:
    """Give the operands and results of a `shard_map`, such as one around a kernel, the layout that they have inside."""
    region_tiles = prescribed_tiles(flatten(operation.params["jaxpr"]))
    region = region_tiles.program
    value_pairs = (
        *zip(operation.inputs, region.inputs, strict=False),  # constants follow the arguments
        *zip(operation.outputs, region.outputs, strict=True),
    )
    for value, inner_value in value_pairs:
        tile_dim_pairs = () if inner_value is None else region_tiles.dim_pairs_by_value.get(inner_value, ())
        if value is not None and len(tile_dim_pairs) == 1:
            tiles.dim_pairs_by_value.setdefault(value, tile_dim_pairs)


def _prescribe_outside_branches(operation: Operation, branches_tiles: Sequence[Tiles], tiles: Tiles) -> None:
    """Give the operands of a `cond` the layout in which one of its branches reads them.

    A result that a branch passes on unchanged has the layout of the operand, such as the waiting activations of a
    pipeline that a backward pass reads. XLA gives them the layout of their reader, even if products computed them.
    """
    operands = operation.inputs[1:]  # the first operand selects the branch
    for branch_tiles in branches_tiles:
        branch = branch_tiles.program
        result_by_inner_value = dict(zip(branch.outputs, operation.outputs, strict=True))
        for operand, inner_value in zip(operands, branch.inputs, strict=False):  # constants follow the arguments
            tile_dim_pairs = branch_tiles.dim_pairs_by_value.get(inner_value, ())
            if len(tile_dim_pairs) == 1:
                for value in (operand, result_by_inner_value.get(inner_value)):
                    if value is not None:
                        tiles.dim_pairs_by_value.setdefault(value, tile_dim_pairs)


def _prescribe_pool(operation: Operation, tiles: Tiles) -> None:
    """Give an array the layout of the entry of its first dim that is read from it, unless a product computes it."""
    source_value, target_value = operation.outputs[0], operation.inputs[0]
    tile_dim_pairs = tiles.dim_pairs_by_value.get(source_value)
    if target_value is None or tile_dim_pairs is None:
        return
    if target_value in tiles.dim_pairs_by_value or target_value in tiles.product_results:
        return
    shape, target_shape = (tuple(getattr(tiles.program.avals[v], "shape", ())) for v in (source_value, target_value))
    added_dim_count = len(target_shape) - len(shape)
    if added_dim_count in (0, 1) and target_shape[1:] == shape[1 - added_dim_count :]:
        tiles.dim_pairs_by_value[target_value] = tuple(
            (first + added_dim_count, second + added_dim_count) for first, second in tile_dim_pairs
        )


def _prescribe_neighbor(operation: Operation, tiles: Tiles, *, is_forward: bool) -> None:
    """Give the result of a transpose, copy, pad or slice the operand's layout, or vice versa if not `is_forward`.

    An entry that is read from a pool gives the pool its layout, but takes none from it.
    """
    if operation.kind in ("dynamic_slice", "squeeze") and not is_forward:
        _prescribe_pool(operation, tiles)
    if operation.kind not in ("transpose", "pad", "slice", *SAME_LAYOUT) or operation.inputs[0] is None:
        return
    operand, result = operation.inputs[0], operation.outputs[0]
    source_value, target_value = (operand, result) if is_forward else (result, operand)
    if (
        source_value not in tiles.dim_pairs_by_value
        or target_value in tiles.dim_pairs_by_value
        or target_value in tiles.product_results
    ):
        return
    tile_dim_pairs = tiles.dim_pairs_by_value[source_value]
    if operation.kind == "transpose":
        permutation: Sequence[int] = operation.params["permutation"]
        position_by_dim: Mapping[int, int] = {dim: position for position, dim in enumerate(permutation)}
        target_dim_of = position_by_dim.__getitem__ if is_forward else permutation.__getitem__
        tile_dim_pairs = tuple((target_dim_of(first), target_dim_of(second)) for first, second in tile_dim_pairs)
    tiles.dim_pairs_by_value[target_value] = tile_dim_pairs
