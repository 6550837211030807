"""Block top-k on TPU (Mosaic), one pass over HBM: k rounds, each of which finds the maximum and removes it.

For blocks down the columns, the maxima of a round are a row, which is stored at once. For blocks along the rows they
are a column, and a tile of 128 lanes collects the columns of all rounds.

In the kernels, x, values and indices are references to the matrix and to the results.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import Interpret, interpret_params, result_struct
from pallas_kernels.tiles import Tiles
from pallas_kernels.top_k.cases import Case
from pallas_kernels.top_k.reference import FLOP, magnitude

LANES = 128
"""Lanes of a vector register."""
SUBLANES = 16
"""Rows of a tile of 16-bit numbers."""
MAX_ELEMENTS = 2**18
"""The largest number of elements of a step of the grid."""
MAX_ROW_LENGTH = 2048
"""The largest number of elements of a row: 8 such rows fill a quarter of the registers."""


def why_unsupported(target: Any, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case, or None if it can."""
    if case.k > LANES:
        return f"it needs k of at most {LANES}, not {case.k}"
    if case.axis == -2:
        if case.block % SUBLANES or case.block * LANES > MAX_ELEMENTS:
            return f"it needs blocks that are a multiple of {SUBLANES} up to {MAX_ELEMENTS // LANES}, not {case.block}"
        if not candidates(case):
            given_text = f"{case.rows // case.block} blocks of {case.k}"
            return f"it needs columns that split into tiles of a multiple of {SUBLANES} results, not {given_text}"
        return None
    if case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    if case.block % LANES or case.block > MAX_ROW_LENGTH:
        return f"it needs blocks that are a multiple of {LANES} up to {MAX_ROW_LENGTH}, not {case.block}"
    return None


def candidates(case: Case) -> list[Tiles]:
    """List the tiles worth trying; the first are those of the rule: as many elements as fit.

    If blocks lie down the columns, a tile has all blocks, or a number of blocks whose results fill tiles of 16 rows.

    Example:
        >>> candidates(Case("x", 8192, 4096, 4))[0], candidates(Case("x", 8192, 1024, 4, block=1024, axis=-1))[0]
        (Tiles(rows=1024, cols=256), Tiles(rows=256, cols=1024))
    """
    if case.axis == -1:
        max_rows = MAX_ELEMENTS // case.cols // SUBLANES * SUBLANES
        return [Tiles(min(max_rows, pl.cdiv(case.rows, SUBLANES) * SUBLANES), case.cols)]
    block_count = case.rows // case.block
    divisors = [blocks for blocks in range(block_count, 0, -1) if block_count % blocks == 0]
    tile_blocks = [blocks for blocks in divisors if blocks * case.k % SUBLANES == 0 or blocks == block_count]
    widths = [case.cols] if case.cols < LANES else [width for width in (256, 128, 512) if width <= case.cols]
    tilings = [Tiles(blocks * case.block, cols) for cols in widths for blocks in tile_blocks]
    fitting_tilings = [tiles for tiles in tilings if tiles.rows * max(tiles.cols, LANES) <= MAX_ELEMENTS]
    return sorted(fitting_tilings, key=lambda tiles: -tiles.rows * tiles.cols)


def _take_largest(elements: Any, magnitudes: Any, positions: Any, axis: int) -> tuple[Any, Any, Any]:
    """One round: find the largest element of each block.

    Args:
        elements: the elements of some blocks, float32.
        magnitudes: their magnitudes, -1 where an element was taken.
        positions: index of each element in its block.
        axis: the dim along which blocks lie.

    Returns:
        The largest element of each block, its index in the block, and the magnitudes after it was taken.
    """
    largest = jnp.max(magnitudes, axis, keepdims=True)
    index = jnp.min(jnp.where(magnitudes == largest, positions, magnitudes.shape[axis]), axis, keepdims=True)
    is_taken = positions == index
    value = jnp.sum(jnp.where(is_taken, elements, 0.0), axis, keepdims=True)
    # not 0: if all are zeros, the next one must win
    return value, index, jnp.where(is_taken, -1.0, magnitudes)


def _down_columns(x: Any, values: Any, indices: Any, *scratch: Any, block: int, k: int) -> None:
    """Select from blocks of rows.

    Values that are not float32 are collected in a float32 scratch: Mosaic stores single rows of 32-bit elements only.
    """
    positions = lax.broadcasted_iota(jnp.int32, (block, x.shape[1]), 0)
    value_rows = scratch[0] if scratch else values

    def select_from_block(i: Any, _: None) -> None:
        elements = x[pl.ds(pl.multiple_of(i * block, block), block), :].astype(jnp.float32)

        def run_round(n: Any, magnitudes: Any) -> Any:
            value, index, new_magnitudes = _take_largest(elements, magnitudes, positions, 0)
            # Mosaic refuses an index into a single row
            row = slice(0, 1) if values.shape[0] == 1 else pl.ds(i * k + n, 1)
            value_rows[row, :], indices[row, :] = value, index
            return new_magnitudes

        lax.fori_loop(0, k, run_round, magnitude(elements))

    lax.fori_loop(0, x.shape[0] // block, select_from_block, None)
    if scratch:
        values[...] = value_rows[...].astype(values.dtype)


def _along_rows(x: Any, values: Any, indices: Any, *, k: int) -> None:
    """Select from rows that are one block each, a few rows at a time."""
    positions = lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 1)
    lanes = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def select_from_rows(i: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES)
        elements = x[rows, :].astype(jnp.float32)

        def run_round(n: Any, carry: Any) -> Any:
            magnitudes, row_values, row_indices = carry
            value, index, new_magnitudes = _take_largest(elements, magnitudes, positions, 1)
            return new_magnitudes, jnp.where(lanes == n, value, row_values), jnp.where(lanes == n, index, row_indices)

        initial = (magnitude(elements), jnp.zeros(lanes.shape, jnp.float32), jnp.zeros(lanes.shape, jnp.int32))
        _, row_values, row_indices = lax.fori_loop(0, k, run_round, initial)
        values[rows, :], indices[rows, :] = row_values[:, :k].astype(values.dtype), row_indices[:, :k]

    lax.fori_loop(0, x.shape[0] // SUBLANES, select_from_rows, None)


def cost(case: Case) -> pl.CostEstimate:
    """Estimate the cost: the kernel reads the matrix, and writes values and indices."""
    elements, itemsize = case.rows * case.cols, jnp.dtype(case.dtype).itemsize
    results = elements // case.block * case.k
    bytes_accessed = elements * itemsize + results * (itemsize + 4)
    return pl.CostEstimate(flops=FLOP * case.k * elements, transcendentals=0, bytes_accessed=bytes_accessed)


def top_k(x: Array, *, case: Case, tiles: Tiles, interpret: Interpret = False) -> tuple[Array, Array]:
    """Compute what `reference.top_k` computes.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        case: the shape of the matrix, and the options.
        tiles: the rows and columns that one step of the grid works on.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The values and their indices in the block.
    """
    R, C = x.shape
    if case.axis == -2:
        body = functools.partial(_down_columns, block=case.block, k=case.k)
        shape, out_tile = (R // case.block * case.k, C), (tiles.rows // case.block * case.k, tiles.cols)
        scratch = [] if x.dtype == jnp.float32 else [pltpu.VMEM(out_tile, jnp.float32)]
    else:
        body = functools.partial(_along_rows, k=case.k)
        shape, out_tile, scratch = (R, case.k), (tiles.rows, case.k), []
    values, indices = pl.pallas_call(
        body,
        grid=(pl.cdiv(R, tiles.rows), pl.cdiv(C, tiles.cols)),
        in_specs=[pl.BlockSpec((tiles.rows, tiles.cols), lambda i, j: (i, j))],
        out_specs=[pl.BlockSpec(out_tile, lambda i, j: (i, j))] * 2,
        out_shape=[result_struct(shape, x.dtype, x), result_struct(shape, jnp.int32, x)],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=cost(case),
        interpret=interpret_params("tpu", interpret),
        name="top_k",
    )(x)
    return values, indices
