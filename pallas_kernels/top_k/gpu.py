"""Block top-k on Hopper (Mosaic GPU), in registers: k rounds, each of which finds the maximum and removes it.

For blocks down the columns, a warpgroup selects from one block of 64 columns; TMA copies the block in and the results
out. For blocks along the rows, a warp has whole blocks, spread over its lanes, so that no round waits for another warp.
The warp reads the blocks from HBM, and writes the results of each round to HBM.

In the kernels, x, values and indices are references to global memory; names with `_s` are references to shared memory.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.mosaic_gpu import (
    WGMMA,
    along_columns,
    launch,
    load,
    load_rows,
    row_per_warp_layout,
    store,
    tiled_smem,
)
from pallas_kernels.top_k.cases import Case
from pallas_kernels.top_k.reference import FLOP, magnitude

COLS = 64
"""Columns of a tile if blocks lie down the columns."""
LANE_ELEMENTS = 32
"""Elements per lane of a tile if blocks lie along the rows; a lane has more only if a single block needs more."""


def _down_columns(
    x: Any, values: Any, indices: Any, x_s: Any, values_s: Any, indices_s: Any, ready: Any, *, k: int
) -> None:
    """Select from one block of rows, `k` rounds; `ready` is the barrier of the copy into `x_s`."""
    i, cols = lax.axis_index("i"), pl.ds(lax.axis_index("j") * COLS, COLS)
    rows, shape = x_s.shape[0], x_s.shape
    plgpu.copy_gmem_to_smem(x.at[pl.ds(i * rows, rows), cols], x_s, ready)
    # floats, because Mosaic reduces columns of floats only
    positions = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA).astype(jnp.float32)
    plgpu.barrier_wait(ready)

    def run_round(n: Any, magnitudes: Any) -> Any:
        largest = along_columns(jnp.max(magnitudes, axis=0), shape)
        index = jnp.min(jnp.where(magnitudes == largest, positions, float(rows)), axis=0)
        store(indices_s.at[n], index.astype(jnp.int32))
        is_taken = positions == along_columns(index, shape)
        new_magnitudes = jnp.where(is_taken, -1.0, magnitudes)  # not 0: if all are zeros, the next one must win
        elements = load(x_s, WGMMA).astype(jnp.float32)  # loaded in every round, because registers hold one such array
        store(values_s.at[n], jnp.sum(jnp.where(is_taken, elements, 0.0), axis=0).astype(values.dtype))
        return new_magnitudes

    lax.fori_loop(0, k, run_round, magnitude(load(x_s, WGMMA).astype(jnp.float32)))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(values_s, values.at[pl.ds(i * k, k), cols])
    plgpu.copy_smem_to_gmem(indices_s, indices.at[pl.ds(i * k, k), cols])
    plgpu.wait_smem_to_gmem(0)


def _along_rows(x: Any, values: Any, indices: Any, *, k: int, tile_rows: int) -> None:
    """Select from rows that are one block each: from `tile_rows` rows, or from one row after the last whole tile."""
    i, (R, block) = lax.axis_index("i"), x.shape
    tile_count = R // tile_rows

    def select(rows: Any, shape: tuple[int, ...]) -> None:
        axis, layout = len(shape) - 1, row_per_warp_layout(block, is_one_row=len(shape) == 1)

        def along_blocks(v: Any) -> Any:
            return plgpu.layout_cast(lax.broadcast_in_dim(v, shape, tuple(range(axis))), layout)

        elements = load_rows(x.at[rows], layout).astype(jnp.float32)
        positions = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout).astype(jnp.float32)
        # position, sign and whether it is NaN in one float, so that a round needs a single minimum
        keys = 4 * positions + jnp.where(elements < 0, 1.0, 0.0) + jnp.where(elements != elements, 2.0, 0.0)

        def run_round(n: Any, magnitudes: Any) -> Any:
            largest = jnp.max(magnitudes, axis=axis)
            key = jnp.min(jnp.where(magnitudes == along_blocks(largest), keys, 4.0 * block), axis=axis)
            key_bits = key.astype(jnp.int32)
            signed_value = jnp.where((key_bits & 1) == 0, largest, -largest)
            value = jnp.where((key_bits & 2) == 0, signed_value, jnp.nan)
            store(values.at[rows, n], value.astype(values.dtype))
            store(indices.at[rows, n], lax.shift_right_logical(key_bits, jnp.full_like(key_bits, 2)))
            return jnp.where(keys == along_blocks(key), -1.0, magnitudes)  # not 0: of zeros, the next one must win

        lax.fori_loop(0, k, run_round, magnitude(elements))

    if tile_count:
        pl.when(i < tile_count)(lambda: select(pl.ds(i * tile_rows, tile_rows), (tile_rows, block)))
    if R % tile_rows:
        pl.when(i >= tile_count)(lambda: select(tile_count * tile_rows + i - tile_count, (block,)))


def top_k(x: Array, *, case: Case, interpret: Interpret = False) -> tuple[Array, Array]:
    """Compute what `reference.top_k` computes.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        case: the shape of the matrix, and the options.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The values and their indices in the block.
    """
    R, C = x.shape
    if case.axis == -1:
        block_count = R * C // case.block
        tile_rows = 4 * max(1, 32 * LANE_ELEMENTS // case.block)
        outs = [result_struct((block_count, case.k), dtype, x) for dtype in (x.dtype, jnp.int32)]
        outputs = launch(
            functools.partial(_along_rows, k=case.k, tile_rows=tile_rows),
            (x.reshape(block_count, case.block),),
            out_type=outs,
            grid=(block_count // tile_rows + block_count % tile_rows,),
            grid_names=("i",),
            name="top_k",
            cost=cost_estimate(FLOP * case.k * R * C, (x,), outs),
            interpret=interpret,
        )
        return tuple(output.reshape(R, C // case.block * case.k) for output in outputs)
    shape = (R // case.block * case.k, C)
    outs = [result_struct(shape, x.dtype, x), result_struct(shape, jnp.int32, x)]
    return tuple(
        launch(
            functools.partial(_down_columns, k=case.k),
            (x,),
            out_type=outs,
            grid=(R // case.block, C // COLS),
            grid_names=("i", "j"),
            name="top_k",
            scratch=[
                tiled_smem((case.block, COLS), x.dtype, 128),
                plgpu.SMEM((case.k, COLS), x.dtype),
                plgpu.SMEM((case.k, COLS), jnp.int32),
                plgpu.Barrier(),
            ],
            cost=cost_estimate(FLOP * case.k * R * C, (x,), outs),
            interpret=interpret,
        )
    )
