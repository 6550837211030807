"""8-bit AdamW on TPU (Mosaic): one pass over HBM, in place.

Blocks lie along sublanes, so a block's maximum is a tree of elementwise maxima, and scales are rows. A step of the grid
has some blocks of some columns; the scales of all blocks of a column stay in VMEM while the grid walks down it, so that
their number need not fill tiles of 8.

The vector unit binds before HBM does, so arithmetic is saved: one root of v serves the update and the codes, the soft
map divides by scales and compands at once, and no division looks for zeros and infinities, which none of them meets.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.adam8 import decades
from pallas_kernels.adam8.cases import Case
from pallas_kernels.adam8.maps import MAPS
from pallas_kernels.adam8.reference import FLOP, MIN_SCALE, MAX_SQUARE, Settings
from pallas_kernels.compat import Interpret, align_varying, finite_inverse, interpret_params, result_struct

LANES = 128
SUBLANES = 32
"""Rows of a tile of 8-bit numbers."""
ELEMENTS = 17 * 2**14
"""Of a step of the grid, at most, scales counted as elements: 32 bytes each with both buffers, half of the 16 MiB that
Mosaic takes by default."""
ROOMY = {"v5e": 2, "v5p": 2, "v6e": 2}
"""Times as many on chips with 64 MiB of VMEM or more: what a step takes besides its blocks, more of them share."""
VMEM = 32 << 20
"""Bytes that a step may take there."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one step of the grid works on.

    Args:
        blocks: of one column.
        cols: columns, a multiple of 128 or all.
    """

    blocks: int
    cols: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.cols < 1:
            raise ValueError(
                f"adam8: got tiles of {self.blocks} blocks by {self.cols} columns, expected 1 or more of each; "
                "or leave tiles out"
            )


def why_unsupported(target: Any, case: Case) -> str | None:
    """Why this kernel cannot run a case; `None` if it can."""
    if case.block % SUBLANES:
        return f"it needs blocks that are a multiple of {SUBLANES} rows, not {case.block}"
    count, most = case.rows // case.block, ELEMENTS // LANES
    if case.block + count > most:
        return f"it needs at most {most} rows of a block and blocks of a column together, not {case.block} and {count}"
    if target.chip == "v4" and case.map == "dynamic8" and case.cols >= LANES:
        return f"of {LANES} columns or more it looks up the map dynamic8 along sublanes, which a v4 cannot: take soft8"
    return None


def candidates(case: Case, chip: str | None = None) -> list[Tiles]:
    """Tiles worth trying, the first by rule: as much as fits, in few columns.

    Args:
        case: shapes and options.
        chip: "v5e", ..; None: any.

    Example:
        >>> candidates(Case("x", 1, 8192, 4096))[0], candidates(Case("x", 1, 8192, 4096), "v5p")[0]
        (Tiles(blocks=16, cols=128), Tiles(blocks=32, cols=128))
    """
    most = ELEMENTS * ROOMY.get(chip or "", 1)
    count = case.rows // case.block
    widths = [case.cols] if case.cols < LANES else [n for n in (128, 256) if n <= case.cols]
    tilings = []
    for cols in widths:
        fit = most // max(cols, LANES) - count
        tilings += [Tiles(n, cols) for n in range(count, 0, -1) if count % n == 0 and n * case.block <= fit]
    return sorted(tilings, key=lambda tiles: -tiles.blocks * min(tiles.cols, case.cols))


def _root(x: Array) -> Array:
    """Of a finite number; what is below `MIN_SCALE` counts as 0."""
    return x * lax.rsqrt(jnp.maximum(x, MIN_SCALE))


def _turned(codes: Array, bits: int) -> Array:
    """Codes of uint8 as int8, which unpack without a mask; a word holds four, and the same bits of each are turned."""
    four = int.from_bytes(bytes([bits] * 4), "little", signed=True)
    return pltpu.bitcast(pltpu.bitcast(codes, jnp.int32) ^ jnp.int32(four), jnp.int8).astype(jnp.int32)


def _less_128(codes: Array) -> Array:
    return _turned(codes, 0x80)


def _decode_m(codes: Array, map: str, tables: Any) -> Array:
    if tables:
        return decades.decode_m(_turned(codes, 0x7F), tables[0])  # 127 less codes
    if map != "soft8":
        return MAPS[map].decode_m(codes.astype(jnp.int32))
    t = codes.astype(jnp.int32).astype(jnp.float32)
    return t * finite_inverse(254 - jnp.abs(t))


def _decode_v(codes: Array, map: str, tables: Any) -> Array:
    if tables:
        return decades.decode_v(_less_128(codes), tables[1])
    if map != "soft8":
        return MAPS[map].decode_v(codes.astype(jnp.int32))
    # the bits of a float32 from 2^15 to 2^16 count its 256ths
    counted = lax.bitcast_convert_type(_less_128(codes) + 0x47000080, jnp.float32)
    return jnp.square(counted - (2**15 - 1 / 256))


def _encode_m(m: Array, size: Array, top: Array, map: str, tables: Any) -> Array:
    """Codes of m, whose size is `size`, in blocks of which the largest is `top`."""
    if tables:
        return decades.encode_m(size * (decades.M.unit / top), m, tables[0])
    if map != "soft8":
        return MAPS[map].encode_m(m * (1 / top))
    return jnp.round(m * 254 * finite_inverse(top + size)).astype(jnp.int32)


def _encode_v(v: Array, root: Array, top: Array, map: str, tables: Any) -> Array:
    """Codes of v, whose root is `root`."""
    if tables:
        return decades.encode_v(v * (decades.V.unit / top), tables[1])
    if map != "soft8":
        return MAPS[map].encode_v(v * (1 / top), _root)
    return jnp.round(jnp.maximum(root * (256 * lax.rsqrt(top)), 1)).astype(jnp.int32) - 1


def _kernel(hyper: Any, *refs: Any, settings: Settings, tiles: Tiles) -> None:
    p, g, mc, ms, vc, vs, *table, po, mco, mso, vco, vso = refs
    tables = [[one[pl.ds(8 * (i + k), 8), :] for k in range(decades.ROWS)] for one in table for i in (0, decades.ROWS)]
    s, f32 = settings, jnp.float32
    lr, correct_m, correct_v, factor = hyper[0], hyper[1], hyper[2], hyper[3]
    first = pl.program_id(2) * tiles.blocks

    def rows(block: Any) -> Any:
        return pl.ds(pl.multiple_of(block * s.block, s.block), s.block), slice(None)

    def one(block: Any, correct_root: Array) -> Array:
        at = rows(block)
        # Mosaic refuses an index into one row
        row = slice(0, 1) if ms.shape[0] == 1 else pl.ds(first + block, 1), slice(None)
        weight, grad = p[at], g[at].astype(f32)
        square = grad * grad
        ok = square < MAX_SQUARE
        old_m = _decode_m(mc[at], s.map, tables) * ms[row]
        old_v = _decode_v(vc[at], s.map, tables) * vs[row]
        m = jnp.where(ok, s.b1 * old_m + (1 - s.b1) * factor * grad, old_m)
        v = jnp.where(ok, s.b2 * old_v + (1 - s.b2) * factor * factor * square, old_v)
        root, size = _root(v), jnp.abs(m)
        moved = weight * (1 - lr * s.weight_decay) - lr * correct_m * m * finite_inverse(root * correct_root + s.eps)
        po[at] = jnp.where(ok, moved, weight)
        top_m, top_v = jnp.max(size, 0, keepdims=True), jnp.max(v, 0, keepdims=True)
        mso[row], vso[row] = top_m, top_v
        mco[at] = _encode_m(m, size, jnp.maximum(top_m, MIN_SCALE), s.map, tables).astype(mco.dtype)
        vco[at] = _encode_v(v, root, jnp.maximum(top_v, MIN_SCALE), s.map, tables).astype(vco.dtype)
        return correct_root

    def keep(block: Any, _: None) -> None:
        at = rows(block)
        for old, new in ((p, po), (mc, mco), (vc, vco)):
            new[at] = old[at]

    @pl.when(hyper[4] > 0)
    def _() -> None:
        lax.fori_loop(0, tiles.blocks, one, jnp.sqrt(jnp.full((1, p.shape[1]), correct_v)))

    @pl.when(hyper[4] <= 0)
    def _() -> None:
        lax.fori_loop(0, tiles.blocks, keep, None)
        for old, new in ((ms, mso), (vs, vso)):
            new[...] = old[...]


def cost(case: Case) -> pl.CostEstimate:
    """What a step takes: float32 weights read and written, gradients read, 2 bytes of codes and 8 / block of scales."""
    elements = case.layers * case.rows * case.cols
    bytes_per_element = 8 + jnp.dtype(case.gradient).itemsize + 2 * (2 + 8 / case.block)
    return pl.CostEstimate(
        flops=FLOP * elements, transcendentals=2 * elements, bytes_accessed=int(elements * bytes_per_element)
    )


def step(
    p: Array, g: Array, m: tuple[Array, Array], v: tuple[Array, Array], hyper: Array, settings: Settings,
    *, case: Case, tiles: Tiles, interpret: Interpret = False,
) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:  # fmt: skip
    """As `reference.step`, in place of what it is given.

    Args:
        p: with all other arrays as in `reference.step`.
        g: as there.
        m: as there.
        v: as there.
        hyper: as there.
        settings: as there.
        case: of these shapes.
        tiles: what one step of the grid works on.
        interpret: see `compat.interpret_params`.
    """
    L, R, C = p.shape
    count = R // settings.block
    big = pl.BlockSpec((None, tiles.blocks * settings.block, tiles.cols), lambda n, j, i: (n, i, j))
    small = pl.BlockSpec((None, count, tiles.cols), lambda n, j, i: (n, 0, j))
    table = pl.BlockSpec((16 * decades.ROWS, LANES), lambda n, j, i: (0, 0))
    state = (p, *m, *v)
    roomy = (tiles.blocks * settings.block + count) * max(tiles.cols, LANES) > ELEMENTS
    looked_up = settings.map == "dynamic8" and tiles.cols % LANES == 0
    operands = (hyper, p, g, *m, *v, *[jnp.asarray(decades.tables())] * looked_up)
    p, *rest = pl.pallas_call(
        functools.partial(_kernel, settings=settings, tiles=tiles),
        grid=(L, pl.cdiv(C, tiles.cols), count // tiles.blocks),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), big, big, big, small, big, small, *[table] * looked_up],
        out_specs=[big, big, small, big, small],
        out_shape=[result_struct(array.shape, array.dtype, *operands) for array in state],
        input_output_aliases={1: 0, 3: 1, 4: 2, 5: 3, 6: 4},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM if roomy else None
        ),
        cost_estimate=cost(case),
        interpret=interpret_params("tpu", interpret),
        name="adam8",
    )(*align_varying(*operands))
    return p, (rest[0], rest[1]), (rest[2], rest[3])
