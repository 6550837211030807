"""Quantization on TPU (Mosaic), one pass over HBM.

Down the columns, blocks lie along sublanes: maxima are elementwise, and scales are rows. Along the rows, maxima go over
lanes and come out one below another; a diagonal turns 128 of them into a row, so that scales leave without padding.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import Interpret, interpret_params, result_struct
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.reference import FLOP, coded, inverse, packed
from pallas_kernels.tiles import Tiles

LANES = 128
SUBLANES = 32
"""Rows of a tile of 8-bit numbers."""
ELEMENTS = 17 * 2**14
"""Of a step of the grid, at most, scales counted as elements: 9 bytes each at most, twice for both buffers."""
LONGEST = 512
"""Numbers of a row at most: 128 rows of them fill the registers twice."""


def why_unsupported(target: Any, case: Case) -> str | None:
    """Why this kernel cannot run a case; `None` if it can."""
    halves = 2 if case.bits == 4 else 1
    if case.axis == -2:
        if case.block % (SUBLANES * halves):
            return f"it needs blocks that are a multiple of {SUBLANES * halves} rows, not {case.block}"
        count, most = case.rows // case.block, ELEMENTS // LANES
        if case.block + count > most:
            return (
                f"it needs at most {most} rows of a block and blocks of a column together, not {case.block} and {count}"
            )
        return None
    if case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    if case.block % (LANES * halves) or case.block > LONGEST:
        return f"it needs blocks that are a multiple of {LANES * halves} up to {LONGEST}, not {case.block}"
    return None


def candidates(case: Case) -> list[Tiles]:
    """Tiles worth trying, the first by rule.

    Example:
        >>> candidates(Case("x", 8192, 4096))[0], candidates(Case("x", 8192, 256, block=256, axis=-1))
        (Tiles(rows=1024, cols=256), [Tiles(rows=1024, cols=256)])
    """
    if case.axis == -1:
        return [Tiles(min(8 * LANES, pl.cdiv(case.rows, LANES) * LANES), case.cols)]
    count = case.rows // case.block
    widths = [case.cols] if case.cols < LANES else [n for n in (256, 128, 512) if n <= case.cols]
    tilings = []
    for cols in widths:
        fit = ELEMENTS // max(cols, LANES) - count
        tilings += [
            Tiles(n * case.block, cols) for n in range(count, 0, -1) if count % n == 0 and n * case.block <= fit
        ]
    return sorted(tilings, key=lambda tiles: -tiles.rows * tiles.cols)


def _down_columns(x: Any, codes: Any, scales: Any, *, block: int, bits: int) -> None:
    count = x.shape[0] // block
    first, held = pl.program_id(1) * count, block // 2 if bits == 4 else block

    def one(i: Any, _: None) -> None:
        f = x[pl.ds(pl.multiple_of(i * block, block), block), :].astype(jnp.float32)
        top = jnp.max(jnp.abs(f), 0, keepdims=True)
        row = slice(0, 1) if scales.shape[0] == 1 else pl.ds(first + i, 1)  # Mosaic refuses an index into one row
        scales[row, :] = top
        code = coded(f, inverse(top, bits), bits)
        code = packed(code[:held], code[held:]) if bits == 4 else code
        codes[pl.ds(pl.multiple_of(i * held, held), held), :] = code.astype(jnp.int8)

    lax.fori_loop(0, count, one, None)


def _along_rows(x: Any, codes: Any, scales: Any, *, bits: int) -> None:
    width = codes.shape[1]
    shape = (LANES, LANES)
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)

    def one(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        f = x[at, :].astype(jnp.float32)
        top = jnp.max(jnp.abs(f), 1, keepdims=True)
        scales[pl.ds(i, 1), :] = jnp.sum(jnp.where(diagonal, top, 0.0), 0, keepdims=True)
        code = coded(f, inverse(top, bits), bits)
        code = packed(code[:, :width], code[:, width:]) if bits == 4 else code
        codes[at, :] = code.astype(jnp.int8)

    lax.fori_loop(0, x.shape[0] // LANES, one, None)


def cost(case: Case) -> pl.CostEstimate:
    """What it takes: the array read, codes and scales written."""
    elements = case.rows * case.cols
    bytes_per_element = jnp.dtype(case.dtype).itemsize + case.bits / 8 + 4 / case.block
    return pl.CostEstimate(flops=FLOP * elements, transcendentals=0, bytes_accessed=int(elements * bytes_per_element))


def quantize(x: Array, *, case: Case, tiles: Tiles, interpret: Interpret = False) -> tuple[Array, Array]:
    """As `reference.quantize`.

    Args:
        x: (R, C).
        case: of this shape.
        tiles: what one step of the grid works on.
        interpret: see `compat.interpret_params`.
    """
    R, C = x.shape
    halves = 2 if case.bits == 4 else 1
    if case.axis == -2:
        count = R // case.block
        body = functools.partial(_down_columns, block=case.block, bits=case.bits)
        grid = (pl.cdiv(C, tiles.cols), R // tiles.rows)
        in_spec = pl.BlockSpec((tiles.rows, tiles.cols), lambda j, i: (i, j))
        out_specs = [
            pl.BlockSpec((tiles.rows // halves, tiles.cols), lambda j, i: (i, j)),
            pl.BlockSpec((count, tiles.cols), lambda j, i: (0, j)),
        ]
        shapes = ((R // halves, C), (count, C))
        semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    else:
        body = functools.partial(_along_rows, bits=case.bits)
        grid = (pl.cdiv(R, tiles.rows),)
        in_spec = pl.BlockSpec((tiles.rows, C), lambda i: (i, 0))
        out_specs = [
            pl.BlockSpec((tiles.rows, C // halves), lambda i: (i, 0)),
            pl.BlockSpec((tiles.rows // LANES, LANES), lambda i: (i, 0)),
        ]
        shapes = ((R, C // halves), (pl.cdiv(R, LANES), LANES))
        semantics = pltpu.CompilerParams(dimension_semantics=("parallel",))
    codes, scales = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[in_spec],
        out_specs=out_specs,
        out_shape=[result_struct(shapes[0], jnp.int8, x), result_struct(shapes[1], jnp.float32, x)],
        compiler_params=semantics,
        cost_estimate=cost(case),
        interpret=interpret_params("tpu", interpret),
        name=f"quantize{case.bits}",
    )(x)
    return codes, scales if case.axis == -2 else scales.reshape(-1)[:R, None]
