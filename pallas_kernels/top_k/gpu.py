"""Block top-k on Hopper (Mosaic GPU), blocks down the columns: a warpgroup per block of 64 columns, in registers."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, like
from pallas_kernels.mosaic_gpu import WGMMA, along_columns, launch, load, store, wide
from pallas_kernels.top_k.cases import Case
from pallas_kernels.top_k.reference import magnitude

COLS = 64
"""Columns of a tile."""


def _kernel(x: Any, values: Any, places: Any, x_s: Any, values_s: Any, places_s: Any, ready: Any, *, k: int) -> None:
    i, cols = lax.axis_index("i"), pl.ds(lax.axis_index("j") * COLS, COLS)
    rows, shape = x_s.shape[0], x_s.shape
    plgpu.copy_gmem_to_smem(x.at[pl.ds(i * rows, rows), cols], x_s, ready)
    # as floats: maxima of columns are known of these
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA).astype(jnp.float32)
    plgpu.barrier_wait(ready)
    f = load(x_s, WGMMA).astype(jnp.float32)
    a = magnitude(f)
    for n in range(k):
        largest = along_columns(jnp.max(a, axis=0), shape)
        at = jnp.min(jnp.where(a == largest, row, float(rows)), axis=0)
        hit = row == along_columns(at, shape)
        store(values_s.at[n], jnp.sum(jnp.where(hit, f, 0.0), axis=0).astype(values.dtype))
        store(places_s.at[n], at.astype(jnp.int32))
        a = jnp.where(hit, -1.0, a)  # not 0: among zeros the next one must win
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(values_s, values.at[pl.ds(i * k, k), cols])
    plgpu.copy_smem_to_gmem(places_s, places.at[pl.ds(i * k, k), cols])
    plgpu.wait_smem_to_gmem(0)


def top_k(x: Array, *, case: Case, interpret: Interpret = False) -> tuple[Array, Array]:
    """As `reference.top_k`.

    Args:
        x: (R, C).
        case: of this shape.
        interpret: see `compat.interpreter`.
    """
    R, C = x.shape
    shape = (R // case.block * case.k, C)
    return tuple(
        launch(
            functools.partial(_kernel, k=case.k),
            (x,),
            out_type=[like(shape, x.dtype, x), like(shape, jnp.int32, x)],
            grid=(R // case.block, C // COLS),
            grid_names=("i", "j"),
            name="top_k",
            scratch=[
                wide((case.block, COLS), x.dtype, 128),
                plgpu.SMEM((case.k, COLS), x.dtype),
                plgpu.SMEM((case.k, COLS), jnp.int32),
                plgpu.Barrier(),
            ],
            interpret=interpret,
        )
    )
