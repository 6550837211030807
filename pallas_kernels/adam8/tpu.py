"""8-bit AdamW on TPU (Mosaic): one pass over HBM, in place.

Blocks lie along sublanes, so a block's maximum is a tree of elementwise maxima, and scales are rows. A step of the grid
updates some blocks of some columns. The scales of all blocks of these columns stay in VMEM while the grid walks down
the columns, so that the number of blocks need not be a multiple of 8.

The vector unit is the bottleneck, not HBM, so the kernel saves arithmetic: the update and the codes share one square
root of v; the soft map divides by scales and encodes in one step; and divisions omit the code for zeros and infinities,
which cannot occur.

In the kernel, p, g, mc, ms, vc and vs are references to the parameters, the gradients, and the codes and scales of both
moments; po, mco, mso, vco and vso are references to the results.
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
from pallas_kernels.adam8.reference import FLOP, MAX_SQUARE, MIN_SCALE, Settings
from pallas_kernels.compat import Interpret, align_varying, finite_inverse, interpret_params, result_struct

LANES = 128
"""Lanes of a vector register."""
SUBLANES = 32
"""Rows of a tile of 8-bit numbers."""
MAX_ELEMENTS = 17 * 2**14
"""The largest number of elements, plus scales, of a step of the grid.

With both buffers, each element takes 32 bytes, so all of them take half of the 16 MiB that Mosaic allows by default.
"""
LARGE_VMEM = {"v5e": 2, "v5p": 2, "v6e": 2}
"""Factor of MAX_ELEMENTS on each chip with 64 MiB of VMEM or more: larger steps have less overhead."""
LARGE_VMEM_BYTES = 32 << 20
"""Bytes of VMEM that a step of more than MAX_ELEMENTS may take."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The part of the arrays that one step of the grid works on.

    Args:
        blocks: number of blocks in each column.
        cols: number of columns: a multiple of 128, or all columns.

    Raises:
        ValueError: a number is less than 1.
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
    """Return the reason why this kernel cannot run a case, or None if it can."""
    if case.block % SUBLANES:
        return f"it needs blocks that are a multiple of {SUBLANES} rows, not {case.block}"
    block_count, limit = case.rows // case.block, MAX_ELEMENTS // LANES
    if case.block + block_count > limit:
        return (
            f"it needs the rows of a block plus the blocks of a column to be at most {limit}, not "
            f"{case.block} + {block_count}"
        )
    if target.chip == "v4" and case.map == "dynamic8" and case.cols >= LANES:
        return f"for {LANES} columns or more it looks up the map dynamic8 along sublanes, which a v4 cannot: take soft8"
    return None


def candidates(case: Case, chip: str | None = None) -> list[Tiles]:
    """List the tiles worth trying; the first are those of the rule: as many elements as fit, in few columns.

    Args:
        case: shapes and options.
        chip: "v5e", ..; None if it is unknown.

    Example:
        >>> candidates(Case("x", 1, 8192, 4096))[0], candidates(Case("x", 1, 8192, 4096), "v5p")[0]
        (Tiles(blocks=16, cols=128), Tiles(blocks=32, cols=128))
    """
    max_elements = MAX_ELEMENTS * LARGE_VMEM.get(chip or "", 1)
    block_count = case.rows // case.block
    widths = [case.cols] if case.cols < LANES else [width for width in (128, 256) if width <= case.cols]
    tilings = []
    for cols in widths:
        max_rows = max_elements // max(cols, LANES) - block_count
        divisors = [blocks for blocks in range(block_count, 0, -1) if block_count % blocks == 0]
        tilings += [Tiles(blocks, cols) for blocks in divisors if blocks * case.block <= max_rows]
    return sorted(tilings, key=lambda tiles: -tiles.blocks * min(tiles.cols, case.cols))


def _root(x: Array) -> Array:
    """The square root of finite numbers; those below `MIN_SCALE` count as 0."""
    return x * lax.rsqrt(jnp.maximum(x, MIN_SCALE))


def _flip_bits(codes: Array, bits: int) -> Array:
    """Flip the same bits of every uint8 code, and reinterpret it as int8, which unpacks to int32 without a mask."""
    word = int.from_bytes(bytes([bits] * 4), "little", signed=True)  # a word has four codes
    return pltpu.bitcast(pltpu.bitcast(codes, jnp.int32) ^ jnp.int32(word), jnp.int8).astype(jnp.int32)


def _subtract_128(codes: Array) -> Array:
    """Codes (uint8) minus 128, int32."""
    return _flip_bits(codes, 0x80)


def _subtract_from_127(codes: Array) -> Array:
    """127 minus codes (uint8), int32."""
    return _flip_bits(codes, 0x7F)


def _decode_m(codes: Array, map: str, tables: Any) -> Array:
    """First moments, divided by their scale, from codes; `tables` is empty unless the map is looked up."""
    if tables:
        return decades.decode_m(_subtract_from_127(codes), tables[0])
    if map != "soft8":
        return MAPS[map].decode_m(codes.astype(jnp.int32))
    float_codes = codes.astype(jnp.int32).astype(jnp.float32)
    return float_codes * finite_inverse(254 - jnp.abs(float_codes))


def _decode_v(codes: Array, map: str, tables: Any) -> Array:
    """Second moments, divided by their scale, from codes; `tables` is empty unless the map is looked up."""
    if tables:
        return decades.decode_v(_subtract_128(codes), tables[1])
    if map != "soft8":
        return MAPS[map].decode_v(codes.astype(jnp.int32))
    # from 2^15 to 2^16, the last bits of a float32 count 256ths
    shifted_root = lax.bitcast_convert_type(_subtract_128(codes) + 0x47000080, jnp.float32)
    return jnp.square(shifted_root - (2**15 - 1 / 256))


def _encode_m(m: Array, magnitude: Array, scale: Array, map: str, tables: Any) -> Array:
    """Codes of first moments; `magnitude` is |m|, `scale` the largest magnitude in the block."""
    if tables:
        return decades.encode_m(magnitude * (decades.M.unit / scale), m, tables[0])
    if map != "soft8":
        return MAPS[map].encode_m(m * (1 / scale))
    return jnp.round(m * 254 * finite_inverse(scale + magnitude)).astype(jnp.int32)


def _encode_v(v: Array, root: Array, scale: Array, map: str, tables: Any) -> Array:
    """Codes of second moments; `root` is the square root of the moments, `scale` the largest moment in the block."""
    if tables:
        return decades.encode_v(v * (decades.V.unit / scale), tables[1])
    if map != "soft8":
        return MAPS[map].encode_v(v * (1 / scale), _root)
    return jnp.round(jnp.maximum(root * (256 * lax.rsqrt(scale)), 1)).astype(jnp.int32) - 1


def _kernel(hyper: Any, *refs: Any, settings: Settings, tiles: Tiles) -> None:
    """Update the blocks of one step of the grid."""
    p, g, mc, ms, vc, vs, *table_refs, po, mco, mso, vco, vso = refs
    tables = [
        [table_ref[pl.ds(8 * (first_row + row), 8), :] for row in range(decades.ROWS)]
        for table_ref in table_refs
        for first_row in (0, decades.ROWS)
    ]
    s, f32 = settings, jnp.float32
    lr, correct_m, correct_v, factor = hyper[0], hyper[1], hyper[2], hyper[3]
    first_block = pl.program_id(2) * tiles.blocks

    def block_index(block: Any) -> Any:
        return pl.ds(pl.multiple_of(block * s.block, s.block), s.block), slice(None)

    def update_block(block: Any, sqrt_correct_v: Array) -> Array:
        index = block_index(block)
        # Mosaic refuses an index into a single row
        scale_index = slice(0, 1) if ms.shape[0] == 1 else pl.ds(first_block + block, 1), slice(None)
        weight, grad = p[index], g[index].astype(f32)
        square = grad * grad
        is_usable = square < MAX_SQUARE
        old_m = _decode_m(mc[index], s.map, tables) * ms[scale_index]
        old_v = _decode_v(vc[index], s.map, tables) * vs[scale_index]
        m = jnp.where(is_usable, s.b1 * old_m + (1 - s.b1) * factor * grad, old_m)
        v = jnp.where(is_usable, s.b2 * old_v + (1 - s.b2) * factor * factor * square, old_v)
        root, magnitude = _root(v), jnp.abs(m)
        decayed_weight = weight * (1 - lr * s.weight_decay)
        new_weight = decayed_weight - lr * correct_m * m * finite_inverse(root * sqrt_correct_v + s.eps)
        po[index] = jnp.where(is_usable, new_weight, weight)
        max_m, max_v = jnp.max(magnitude, 0, keepdims=True), jnp.max(v, 0, keepdims=True)
        mso[scale_index], vso[scale_index] = max_m, max_v
        mco[index] = _encode_m(m, magnitude, jnp.maximum(max_m, MIN_SCALE), s.map, tables).astype(mco.dtype)
        vco[index] = _encode_v(v, root, jnp.maximum(max_v, MIN_SCALE), s.map, tables).astype(vco.dtype)
        return sqrt_correct_v

    def copy_block(block: Any, _: None) -> None:
        index = block_index(block)
        for old_ref, new_ref in ((p, po), (mc, mco), (vc, vco)):
            new_ref[index] = old_ref[index]

    @pl.when(hyper[4] > 0)
    def _() -> None:
        lax.fori_loop(0, tiles.blocks, update_block, jnp.sqrt(jnp.full((1, p.shape[1]), correct_v)))

    @pl.when(hyper[4] <= 0)
    def _() -> None:
        lax.fori_loop(0, tiles.blocks, copy_block, None)
        for old_ref, new_ref in ((ms, mso), (vs, vso)):
            new_ref[...] = old_ref[...]


def cost(case: Case) -> pl.CostEstimate:
    """Estimate the cost of a step.

    For each parameter, a step reads the gradient, and reads and writes 4 bytes of weight, 2 bytes of codes and
    8 / block bytes of scales.
    """
    elements = case.layers * case.rows * case.cols
    bytes_per_element = 8 + jnp.dtype(case.gradient).itemsize + 2 * (2 + 8 / case.block)
    return pl.CostEstimate(
        flops=FLOP * elements, transcendentals=2 * elements, bytes_accessed=int(elements * bytes_per_element)
    )


def step(
    p: Array, g: Array, m: tuple[Array, Array], v: tuple[Array, Array], hyper: Array, settings: Settings,
    *, case: Case, tiles: Tiles, interpret: Interpret = False,
) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:  # fmt: skip
    """Compute what `reference.step` computes; the results take the memory of p, m and v if these are donated.

    Args:
        p, g, m, v, hyper, settings: as in `reference.step`.
        case: the shapes and options of the arrays.
        tiles: the part of the arrays that one step of the grid works on.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        p, m and v after the step.
    """
    L, R, C = p.shape
    block_count = R // settings.block
    hyper_spec = pl.BlockSpec(memory_space=pltpu.SMEM)
    block_spec = pl.BlockSpec((None, tiles.blocks * settings.block, tiles.cols), lambda n, j, i: (n, i, j))
    scale_spec = pl.BlockSpec((None, block_count, tiles.cols), lambda n, j, i: (n, 0, j))
    table_spec = pl.BlockSpec((16 * decades.ROWS, LANES), lambda n, j, i: (0, 0))
    moment_specs = [block_spec, scale_spec, block_spec, scale_spec]
    state = (p, *m, *v)
    needs_large_vmem = (tiles.blocks * settings.block + block_count) * max(tiles.cols, LANES) > MAX_ELEMENTS
    has_tables = settings.map == "dynamic8" and tiles.cols % LANES == 0
    operands = (hyper, p, g, *m, *v, *[jnp.asarray(decades.tables())] * has_tables)
    new_p, m_codes, m_scales, v_codes, v_scales = pl.pallas_call(
        functools.partial(_kernel, settings=settings, tiles=tiles),
        grid=(L, pl.cdiv(C, tiles.cols), block_count // tiles.blocks),
        in_specs=[hyper_spec, block_spec, block_spec, *moment_specs, *[table_spec] * has_tables],
        out_specs=[block_spec, *moment_specs],
        out_shape=[result_struct(array.shape, array.dtype, *operands) for array in state],
        input_output_aliases={1: 0, 3: 1, 4: 2, 5: 3, 6: 4},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=LARGE_VMEM_BYTES if needs_large_vmem else None,
        ),
        cost_estimate=cost(case),
        interpret=interpret_params("tpu", interpret),
        name="adam8",
    )(*align_varying(*operands))
    return new_p, (m_codes, m_scales), (v_codes, v_scales)
