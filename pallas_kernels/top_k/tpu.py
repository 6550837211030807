"""Block top-k on TPU (Mosaic), one pass over HBM: k rounds of a maximum, and what it found is taken out.

Down the columns a round's maxima are a row, written where it belongs. Along the rows they lie one below another, and a
tile of 128 lanes collects them.
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
SUBLANES = 16
"""Rows of a tile of 16-bit numbers."""
ELEMENTS = 2**18
"""Of a step of the grid, at most."""
LONGEST = 2048
"""Numbers of a row at most: a tile of 8 rows of them fills a quarter of the registers."""


def why_unsupported(target: Any, case: Case) -> str | None:
    """Why this kernel cannot run a case; `None` if it can."""
    if case.k > LANES:
        return f"it needs k of at most {LANES}, not {case.k}"
    if case.axis == -2:
        if case.block % SUBLANES or case.block * LANES > ELEMENTS:
            return f"it needs blocks that are a multiple of {SUBLANES} up to {ELEMENTS // LANES}, not {case.block}"
        if not candidates(case):
            count = case.rows // case.block
            return f"it needs some blocks of a column whose results fill tiles of {SUBLANES}, not {case.k} of {count}"
        return None
    if case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    if case.block % LANES or case.block > LONGEST:
        return f"it needs blocks that are a multiple of {LANES} up to {LONGEST}, not {case.block}"
    return None


def candidates(case: Case) -> list[Tiles]:
    """Tiles worth trying, the first by rule: as much as fits.

    Down the columns a tile has 8 blocks or a multiple, or all, for the rows of its results fill tiles of 8.

    Example:
        >>> candidates(Case("x", 8192, 4096, 4))[0], candidates(Case("x", 8192, 1024, 4, block=1024, axis=-1))[0]
        (Tiles(rows=1024, cols=256), Tiles(rows=256, cols=1024))
    """
    if case.axis == -1:
        fit = ELEMENTS // case.cols // SUBLANES * SUBLANES
        return [Tiles(min(fit, pl.cdiv(case.rows, SUBLANES) * SUBLANES), case.cols)]
    count = case.rows // case.block
    counts = [n for n in range(1, count + 1) if count % n == 0 and (n * case.k % SUBLANES == 0 or n == count)]
    widths = [case.cols] if case.cols < LANES else [n for n in (256, 128, 512) if n <= case.cols]
    every = [Tiles(n * case.block, cols) for cols in widths for n in reversed(counts)]
    fits = [tiles for tiles in every if tiles.rows * max(tiles.cols, LANES) <= ELEMENTS]
    return sorted(fits, key=lambda tiles: -tiles.rows * tiles.cols)


def _round(f: Any, a: Any, place: Any, axis: int) -> tuple[Any, Any, Any]:
    """Value and place of the largest, and the magnitudes without it."""
    largest = jnp.max(a, axis, keepdims=True)
    at = jnp.min(jnp.where(a == largest, place, a.shape[axis]), axis, keepdims=True)
    hit = place == at
    # not 0: among zeros the next one must win
    return jnp.sum(jnp.where(hit, f, 0.0), axis, keepdims=True), at, jnp.where(hit, -1.0, a)


def _down_columns(x: Any, values: Any, places: Any, *found: Any, block: int, k: int) -> None:
    """`found` holds values in float32 until all are known: Mosaic writes single rows of 32-bit numbers alone."""
    place = lax.broadcasted_iota(jnp.int32, (block, x.shape[1]), 0)
    held = found[0] if found else values

    def one(i: Any, _: None) -> None:
        f = x[pl.ds(pl.multiple_of(i * block, block), block), :].astype(jnp.float32)

        def round_(n: Any, a: Any) -> Any:
            value, at, a = _round(f, a, place, 0)
            row = slice(0, 1) if values.shape[0] == 1 else pl.ds(i * k + n, 1)  # Mosaic refuses an index into one row
            held[row, :], places[row, :] = value, at
            return a

        lax.fori_loop(0, k, round_, magnitude(f))

    lax.fori_loop(0, x.shape[0] // block, one, None)
    if found:
        values[...] = held[...].astype(values.dtype)


def _along_rows(x: Any, values: Any, places: Any, *, k: int) -> None:
    place = lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 1)
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def one(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES)
        f = x[at, :].astype(jnp.float32)

        def round_(n: Any, carry: Any) -> Any:
            a, found, where = carry
            value, there, a = _round(f, a, place, 1)
            return a, jnp.where(lane == n, value, found), jnp.where(lane == n, there, where)

        start = (magnitude(f), jnp.zeros(lane.shape, jnp.float32), jnp.zeros(lane.shape, jnp.int32))
        _, found, where = lax.fori_loop(0, k, round_, start)
        values[at, :], places[at, :] = found[:, :k].astype(values.dtype), where[:, :k]

    lax.fori_loop(0, x.shape[0] // SUBLANES, one, None)


def cost(case: Case) -> pl.CostEstimate:
    """What it takes: the array read, values and places written."""
    elements, size = case.rows * case.cols, jnp.dtype(case.dtype).itemsize
    kept_elements = elements // case.block * case.k
    return pl.CostEstimate(
        flops=FLOP * case.k * elements, transcendentals=0, bytes_accessed=elements * size + kept_elements * (size + 4)
    )


def top_k(x: Array, *, case: Case, tiles: Tiles, interpret: Interpret = False) -> tuple[Array, Array]:
    """As `reference.top_k`.

    Args:
        x: (R, C).
        case: of this shape.
        tiles: what one step of the grid works on.
        interpret: see `compat.interpret_params`.
    """
    R, C = x.shape
    if case.axis == -2:
        body = functools.partial(_down_columns, block=case.block, k=case.k)
        shape, out_tile = (R // case.block * case.k, C), (tiles.rows // case.block * case.k, tiles.cols)
        scratch = [] if x.dtype == jnp.float32 else [pltpu.VMEM(out_tile, jnp.float32)]
    else:
        body = functools.partial(_along_rows, k=case.k)
        shape, out_tile, scratch = (R, case.k), (tiles.rows, case.k), []
    values, places = pl.pallas_call(
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
    return values, places
