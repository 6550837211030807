"""Block top-k on Hopper (Mosaic GPU), in registers: k rounds of a maximum, and what it found is taken out.

Down the columns a warpgroup has a block of 64 columns, which TMA copies in and its results out. Along the rows a warp
has whole blocks, spread over its lanes, so that no round waits for another warp: it reads them from HBM, and writes
each round's results there.
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
"""Columns of a tile of blocks that lie down the columns."""
HELD = 32
"""Numbers that a lane holds of a tile of blocks along the rows; more where one block has more."""


def _down_columns(
    x: Any, values: Any, places: Any, x_s: Any, values_s: Any, places_s: Any, ready: Any, *, k: int
) -> None:
    i, cols = lax.axis_index("i"), pl.ds(lax.axis_index("j") * COLS, COLS)
    rows, shape = x_s.shape[0], x_s.shape
    plgpu.copy_gmem_to_smem(x.at[pl.ds(i * rows, rows), cols], x_s, ready)
    # as floats: maxima of columns are known of these
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA).astype(jnp.float32)
    plgpu.barrier_wait(ready)

    def one(n: Any, a: Any) -> Any:
        largest = along_columns(jnp.max(a, axis=0), shape)
        at = jnp.min(jnp.where(a == largest, row, float(rows)), axis=0)
        store(places_s.at[n], at.astype(jnp.int32))
        hit = row == along_columns(at, shape)
        a = jnp.where(hit, -1.0, a)  # not 0: among zeros the next one must win
        f = load(x_s, WGMMA).astype(jnp.float32)  # again: registers have room for one such array
        store(values_s.at[n], jnp.sum(jnp.where(hit, f, 0.0), axis=0).astype(values.dtype))
        return a

    lax.fori_loop(0, k, one, magnitude(load(x_s, WGMMA).astype(jnp.float32)))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(values_s, values.at[pl.ds(i * k, k), cols])
    plgpu.copy_smem_to_gmem(places_s, places.at[pl.ds(i * k, k), cols])
    plgpu.wait_smem_to_gmem(0)


def _along_rows(x: Any, values: Any, places: Any, *, k: int, rows: int) -> None:
    """A tile of the grid: `rows` blocks, of four warps; after the last whole one a block, of all warps alike."""
    i, (R, block) = lax.axis_index("i"), x.shape
    whole = R // rows

    def tile(at: Any, shape: tuple[int, ...]) -> None:
        axis, layout = len(shape) - 1, row_per_warp_layout(block, is_one_row=len(shape) == 1)

        def spread(v: Any) -> Any:
            return plgpu.layout_cast(lax.broadcast_in_dim(v, shape, tuple(range(axis))), layout)

        f = load_rows(x.at[at], layout).astype(jnp.float32)
        place = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout).astype(jnp.float32)
        # a place, the sign, and whether it is NaN, as one float: a round looks for nothing else
        code = 4 * place + jnp.where(f < 0, 1.0, 0.0) + jnp.where(f != f, 2.0, 0.0)

        def one(n: Any, a: Any) -> Any:
            largest = jnp.max(a, axis=axis)
            found = jnp.min(jnp.where(a == spread(largest), code, 4.0 * block), axis=axis)
            bits = found.astype(jnp.int32)
            value = jnp.where((bits & 1) == 0, largest, -largest)
            value = jnp.where((bits & 2) == 0, value, jnp.nan)
            store(values.at[at, n], value.astype(values.dtype))
            store(places.at[at, n], lax.shift_right_logical(bits, jnp.full_like(bits, 2)))
            return jnp.where(code == spread(found), -1.0, a)  # not 0: among zeros the next one must win

        lax.fori_loop(0, k, one, magnitude(f))

    if whole:
        pl.when(i < whole)(lambda: tile(pl.ds(i * rows, rows), (rows, block)))
    if R % rows:
        pl.when(i >= whole)(lambda: tile(whole * rows + i - whole, (block,)))


def top_k(x: Array, *, case: Case, interpret: Interpret = False) -> tuple[Array, Array]:
    """As `reference.top_k`.

    Args:
        x: (R, C).
        case: of this shape.
        interpret: see `compat.interpret_params`.
    """
    R, C = x.shape
    if case.axis == -1:
        blocks = R * C // case.block
        rows = 4 * max(1, 32 * HELD // case.block)
        outs = [result_struct((blocks, case.k), dtype, x) for dtype in (x.dtype, jnp.int32)]
        outputs = launch(
            functools.partial(_along_rows, k=case.k, rows=rows),
            (x.reshape(blocks, case.block),),
            out_type=outs,
            grid=(blocks // rows + blocks % rows,),
            grid_names=("i",),
            name="top_k",
            cost=cost_estimate(FLOP * case.k * R * C, (x,), outs),
            interpret=interpret,
        )
        return tuple(array.reshape(R, C // case.block * case.k) for array in outputs)
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
