"""Quantization on Hopper (Mosaic GPU): a warpgroup per tile, in registers between one TMA copy in and one out."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.mosaic_gpu import WGMMA, along_columns, along_rows, launch, load, store, tiled_smem
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.reference import FLOP, coded, inverse, packed

COLS = 64
"""Columns of a tile of blocks that lie down the columns."""
ROWS = 64
"""Rows of a tile of blocks that lie along the rows."""


def _kernel(x: Any, codes: Any, scales: Any, x_s: Any, codes_s: Any, scales_s: Any, ready: Any, *, case: Case) -> None:
    i, down = lax.axis_index("i"), case.axis == -2
    rows, cols = x_s.shape
    at = (pl.ds(i * rows, rows), pl.ds(lax.axis_index("j") * cols, cols))
    plgpu.copy_gmem_to_smem(x.at[at], x_s, ready)
    plgpu.barrier_wait(ready)
    half = (rows // 2, cols) if down else (rows, cols // 2)
    if case.bits == 8:
        parts = [load(x_s, WGMMA).astype(jnp.float32)]
    else:
        second = (pl.ds(half[0], half[0]), pl.ds(0, cols)) if down else (pl.ds(0, rows), pl.ds(half[1], half[1]))
        first = (pl.ds(0, half[0]), pl.ds(0, half[1]))
        parts = [load(x_s.at[place], WGMMA).astype(jnp.float32) for place in (first, second)]
    tops = [jnp.max(jnp.abs(part), axis=0 if down else 1) for part in parts]
    top = functools.reduce(jnp.maximum, tops)
    spread = along_columns if down else along_rows
    factor = inverse(top, case.bits)
    part_codes = [coded(part, spread(factor, part.shape), case.bits) for part in parts]
    codes_s[...] = (part_codes[0] if case.bits == 8 else packed(*part_codes)).astype(jnp.int8)
    store(scales_s, top)
    plgpu.commit_smem()
    n, m = codes_s.shape
    plgpu.copy_smem_to_gmem(codes_s, codes.at[pl.ds(i * n, n), pl.ds(lax.axis_index("j") * m, m)])
    plgpu.copy_smem_to_gmem(scales_s, scales.at[i, at[1]] if down else scales.at[at[0]])
    plgpu.wait_smem_to_gmem(0)


def quantize(x: Array, *, case: Case, interpret: Interpret = False) -> tuple[Array, Array]:
    """As `reference.quantize`.

    Args:
        x: (R, C).
        case: of this shape.
        interpret: see `compat.interpret_params`.
    """
    R, C = x.shape
    down, halves = case.axis == -2, 2 if case.bits == 4 else 1
    rows, cols = (case.block, COLS) if down else (ROWS, C)
    held = (rows // halves, cols) if down else (rows, cols // halves)
    shapes = ((R // halves, C), (R // case.block, C)) if down else ((R, C // halves), (R,))

    def tile(shape: tuple[int, int], dtype: Any) -> Any:
        return tiled_smem(shape, dtype, min(128, shape[1] * jnp.dtype(dtype).itemsize))

    outs = [result_struct(shapes[0], jnp.int8, x), result_struct(shapes[1], jnp.float32, x)]
    codes, scales = launch(
        functools.partial(_kernel, case=case),
        (x,),
        out_type=outs,
        grid=(R // rows, C // cols),
        grid_names=("i", "j"),
        name=f"quantize{case.bits}",
        scratch=[
            tile((rows, cols), x.dtype),
            tile(held, jnp.int8),
            plgpu.SMEM((cols if down else rows,), jnp.float32),
            plgpu.Barrier(),
        ],
        cost=cost_estimate(FLOP * R * C, (x,), outs),
        interpret=interpret,
    )
    return codes, scales if down else scales[:, None]
