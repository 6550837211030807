"""Quantization on TPU (Mosaic), one pass over HBM.

Blocks down the columns lie along sublanes: maxima are elementwise, and scales are rows. For blocks along the rows,
maxima are taken over lanes and give a column of scales; a diagonal mask turns 128 of them into a row, so that they are
stored without padding.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import Interpret, interpret_params, result_struct
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.reference import FLOP, encode, inverse_step, pack_nibbles
from pallas_kernels.tiles import Tiles

LANES = 128
"""Lanes of a vector register."""
SUBLANES = 32
"""Rows of a tile of 8-bit numbers."""
MAX_ELEMENTS = 17 * 2**14
"""The largest number of elements, plus scales, of a step of the grid; each takes at most 9 bytes in each buffer."""
MAX_ROW_LENGTH = 512
"""The largest number of elements of a row; 128 rows of this length take twice the registers that there are."""


def why_unsupported(target: Any, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case, or None if it can."""
    codes_per_byte = 2 if case.bits == 4 else 1
    if case.axis == -2:
        if case.block % (SUBLANES * codes_per_byte):
            return f"it needs blocks that are a multiple of {SUBLANES * codes_per_byte} rows, not {case.block}"
        block_count, limit = case.rows // case.block, MAX_ELEMENTS // LANES
        if case.block + block_count > limit:
            return (
                f"it needs the rows of a block plus the blocks of a column to be at most {limit}, not "
                f"{case.block} + {block_count}"
            )
        return None
    if case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    multiple = LANES * codes_per_byte
    if case.block % multiple or case.block > MAX_ROW_LENGTH:
        return f"it needs blocks that are a multiple of {multiple} up to {MAX_ROW_LENGTH}, not {case.block}"
    return None


def candidates(case: Case) -> list[Tiles]:
    """List the tiles worth trying; the first are those of the rule.

    Example:
        >>> candidates(Case("x", 8192, 4096))[0], candidates(Case("x", 8192, 256, block=256, axis=-1))
        (Tiles(rows=1024, cols=256), [Tiles(rows=1024, cols=256)])
    """
    if case.axis == -1:
        return [Tiles(min(8 * LANES, pl.cdiv(case.rows, LANES) * LANES), case.cols)]
    block_count = case.rows // case.block
    divisors = [blocks for blocks in range(block_count, 0, -1) if block_count % blocks == 0]
    widths = [case.cols] if case.cols < LANES else [width for width in (256, 128, 512) if width <= case.cols]
    tilings = []
    for cols in widths:
        max_rows = MAX_ELEMENTS // max(cols, LANES) - block_count
        tilings += [Tiles(blocks * case.block, cols) for blocks in divisors if blocks * case.block <= max_rows]
    return sorted(tilings, key=lambda tiles: -tiles.rows * tiles.cols)


def _down_columns(x: Any, codes: Any, scales: Any, *, block: int, bits: int) -> None:
    """Quantize a tile in blocks of rows; `scales` has the rows of all blocks of these columns."""
    block_count = x.shape[0] // block
    first_block, bytes_per_block = pl.program_id(1) * block_count, block // 2 if bits == 4 else block

    def quantize_block(i: Any, _: None) -> None:
        elements = x[pl.ds(pl.multiple_of(i * block, block), block), :].astype(jnp.float32)
        scale = jnp.max(jnp.abs(elements), 0, keepdims=True)
        # Mosaic refuses an index into a single row
        scale_row = slice(0, 1) if scales.shape[0] == 1 else pl.ds(first_block + i, 1)
        scales[scale_row, :] = scale
        block_codes = encode(elements, inverse_step(scale, bits), bits)
        if bits == 4:
            block_codes = pack_nibbles(block_codes[:bytes_per_block], block_codes[bytes_per_block:])
        narrow_codes = block_codes.astype(jnp.int8)
        codes[pl.ds(pl.multiple_of(i * bytes_per_block, bytes_per_block), bytes_per_block), :] = narrow_codes

    lax.fori_loop(0, block_count, quantize_block, None)


def _along_rows(x: Any, codes: Any, scales: Any, *, bits: int) -> None:
    """Quantize a tile whose rows are one block each, 128 rows at a time; `scales` has one row for each 128 blocks."""
    bytes_per_block = codes.shape[1]
    shape = (LANES, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)

    def quantize_rows(i: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        elements = x[rows, :].astype(jnp.float32)
        scale_column = jnp.max(jnp.abs(elements), 1, keepdims=True)
        scales[pl.ds(i, 1), :] = jnp.sum(jnp.where(diagonal, scale_column, 0.0), 0, keepdims=True)
        row_codes = encode(elements, inverse_step(scale_column, bits), bits)
        if bits == 4:
            row_codes = pack_nibbles(row_codes[:, :bytes_per_block], row_codes[:, bytes_per_block:])
        codes[rows, :] = row_codes.astype(jnp.int8)

    lax.fori_loop(0, x.shape[0] // LANES, quantize_rows, None)


def cost(case: Case) -> pl.CostEstimate:
    """Estimate the cost: the kernel reads the matrix, and writes codes and scales."""
    elements = case.rows * case.cols
    bytes_per_element = jnp.dtype(case.dtype).itemsize + case.bits / 8 + 4 / case.block
    return pl.CostEstimate(flops=FLOP * elements, transcendentals=0, bytes_accessed=int(elements * bytes_per_element))


def quantize(x: Array, *, case: Case, tiles: Tiles, interpret: Interpret = False) -> tuple[Array, Array]:
    """Compute what `reference.quantize` computes.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        case: the shape of the matrix, and the options.
        tiles: the rows and columns that one step of the grid works on.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The codes and the scales.
    """
    R, C = x.shape
    codes_per_byte = 2 if case.bits == 4 else 1
    if case.axis == -2:
        block_count = R // case.block
        body = functools.partial(_down_columns, block=case.block, bits=case.bits)
        grid = (pl.cdiv(C, tiles.cols), R // tiles.rows)
        in_spec = pl.BlockSpec((tiles.rows, tiles.cols), lambda j, i: (i, j))
        out_specs = [
            pl.BlockSpec((tiles.rows // codes_per_byte, tiles.cols), lambda j, i: (i, j)),
            pl.BlockSpec((block_count, tiles.cols), lambda j, i: (0, j)),
        ]
        code_shape, scale_shape = (R // codes_per_byte, C), (block_count, C)
        compiler_params = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    else:
        body = functools.partial(_along_rows, bits=case.bits)
        grid = (pl.cdiv(R, tiles.rows),)
        in_spec = pl.BlockSpec((tiles.rows, C), lambda i: (i, 0))
        out_specs = [
            pl.BlockSpec((tiles.rows, C // codes_per_byte), lambda i: (i, 0)),
            pl.BlockSpec((tiles.rows // LANES, LANES), lambda i: (i, 0)),
        ]
        code_shape, scale_shape = (R, C // codes_per_byte), (pl.cdiv(R, LANES), LANES)
        compiler_params = pltpu.CompilerParams(dimension_semantics=("parallel",))
    codes, scales = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[in_spec],
        out_specs=out_specs,
        out_shape=[result_struct(code_shape, jnp.int8, x), result_struct(scale_shape, jnp.float32, x)],
        compiler_params=compiler_params,
        cost_estimate=cost(case),
        interpret=interpret_params("tpu", interpret),
        name=f"quantize{case.bits}",
    )(x)
    return codes, scales if case.axis == -2 else scales.reshape(-1)[:R, None]
