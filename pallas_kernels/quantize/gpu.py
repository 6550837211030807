"""Quantization on Hopper (Mosaic GPU): a warpgroup copies a tile in by TMA, quantizes it in registers, copies it out.

In the kernel, names with `_s` are references to shared memory; x, codes and scales are references to global memory.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.mosaic_gpu import WGMMA, along_columns, along_rows, launch, load, store, tiled_smem
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.reference import FLOP, encode, inverse_step, pack_nibbles

COLS = 64
"""Columns of a tile if blocks lie down the columns."""
ROWS = 64
"""Rows of a tile if blocks lie along the rows."""


def _kernel(x: Any, codes: Any, scales: Any, x_s: Any, codes_s: Any, scales_s: Any, ready: Any, *, case: Case) -> None:
    """Quantize a tile: one block per column, or one block per row."""
    i, is_down = lax.axis_index("i"), case.axis == -2
    rows, cols = x_s.shape
    row_slice, column_slice = pl.ds(i * rows, rows), pl.ds(lax.axis_index("j") * cols, cols)
    plgpu.copy_gmem_to_smem(x.at[row_slice, column_slice], x_s, ready)
    plgpu.barrier_wait(ready)
    half_rows, half_cols = (rows // 2, cols) if is_down else (rows, cols // 2)
    if case.bits == 8:
        parts = [load(x_s, WGMMA).astype(jnp.float32)]
    else:  # the halves of each block, whose codes share bytes
        low = (pl.ds(0, half_rows), pl.ds(0, half_cols))
        high = (
            (pl.ds(half_rows, half_rows), pl.ds(0, cols)) if is_down else (pl.ds(0, rows), pl.ds(half_cols, half_cols))
        )
        parts = [load(x_s.at[index], WGMMA).astype(jnp.float32) for index in (low, high)]
    scale = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part), axis=0 if is_down else 1) for part in parts])
    along_blocks = along_columns if is_down else along_rows
    inverse = inverse_step(scale, case.bits)
    part_codes = [encode(part, along_blocks(inverse, part.shape), case.bits) for part in parts]
    codes_s[...] = (part_codes[0] if case.bits == 8 else pack_nibbles(*part_codes)).astype(jnp.int8)
    store(scales_s, scale)
    plgpu.commit_smem()
    code_rows, code_cols = codes_s.shape
    code_index = pl.ds(i * code_rows, code_rows), pl.ds(lax.axis_index("j") * code_cols, code_cols)
    plgpu.copy_smem_to_gmem(codes_s, codes.at[code_index])
    plgpu.copy_smem_to_gmem(scales_s, scales.at[i, column_slice] if is_down else scales.at[row_slice])
    plgpu.wait_smem_to_gmem(0)


def quantize(x: Array, *, case: Case, interpret: Interpret = False) -> tuple[Array, Array]:
    """Compute what `reference.quantize` computes.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        case: the shape of the matrix, and the options.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The codes and the scales.
    """
    R, C = x.shape
    is_down, codes_per_byte = case.axis == -2, 2 if case.bits == 4 else 1
    rows, cols = (case.block, COLS) if is_down else (ROWS, C)
    code_tile = (rows // codes_per_byte, cols) if is_down else (rows, cols // codes_per_byte)
    code_shape = (R // codes_per_byte, C) if is_down else (R, C // codes_per_byte)
    scale_shape = (R // case.block, C) if is_down else (R,)

    def tile_smem(shape: tuple[int, int], dtype: Any) -> Any:
        return tiled_smem(shape, dtype, min(128, shape[1] * jnp.dtype(dtype).itemsize))

    outs = [result_struct(code_shape, jnp.int8, x), result_struct(scale_shape, jnp.float32, x)]
    codes, scales = launch(
        functools.partial(_kernel, case=case),
        (x,),
        out_type=outs,
        grid=(R // rows, C // cols),
        grid_names=("i", "j"),
        name=f"quantize{case.bits}",
        scratch=[
            tile_smem((rows, cols), x.dtype),
            tile_smem(code_tile, jnp.int8),
            plgpu.SMEM((cols if is_down else rows,), jnp.float32),
            plgpu.Barrier(),
        ],
        cost=cost_estimate(FLOP * R * C, (x,), outs),
        interpret=interpret,
    )
    return codes, scales if is_down else scales[:, None]
