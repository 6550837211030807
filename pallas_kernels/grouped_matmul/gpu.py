"""Grouped matmul on Hopper (Mosaic GPU): each row times the matrix of its group, and the gradient of the matrices.

After MegaBlocks (Gale et al., arXiv 2211.15841). Groups need no padding. In the product, a tile of 128 rows belongs to
one group, which a table specifies. Because a TMA copy into swizzled tiles starts at a multiple of 8 rows, the tile may
read rows before the start of its group, and it reads rows after the end. It stores only its own rows, in slices whose
lengths are powers of two, because a TMA copy has a static shape. In the gradient of the matrices, a block sums over the
rows of one group; in the first and the last chunk, the copying warpgroup clears the rows of other groups before the
product. One warpgroup copies by TMA into a ring of buffers, two multiply (wgmma) with one product in flight each.

In a kernel, names with `_g` are references to global memory and names with `_s` to shared memory; `ready` and `free`
are barriers, one per slot of the ring; wg is a warpgroup, t a tile of rows, i and j tiles of columns.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.grouped_matmul.cases import ROW_MULTIPLE, Case
from pallas_kernels.mosaic_gpu import MAX_SHARED_BYTES, WGMMA, feed, launch, load, store, tiled_smem
from pallas_kernels.target import Target

F32 = jnp.float32
WARPGROUPS = 2
"""Number of warpgroups in a block that multiply."""
ROWS = 64
"""Rows of the product of one warpgroup, the rows of one wgmma."""
TILE_ROWS = ROWS * WARPGROUPS
"""Rows of a tile."""
CHUNK = 64
"""Number of terms that one step of the loop adds up: 128 bytes of bfloat16, the widest swizzle."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Size of a tile, and of the ring of buffers.

    Args:
        columns: number of columns of a tile.
        stages: number of buffers in the ring.

    Raises:
        ValueError: the columns are not 64, 128 or 256, the ring has fewer than 2 buffers, or the ring and the tile of
            the result take more than the shared memory of a block.
    """

    columns: int = 128
    stages: int = 4

    def __post_init__(self):
        if self.columns not in (64, 128, 256) or self.stages < 2:
            raise ValueError(f"grouped_matmul: got {self}, expected 64, 128 or 256 columns and at least 2 stages")
        if self.shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(
                f"grouped_matmul: {self} takes {self.shared_bytes} bytes of shared memory, expected <= "
                f"{MAX_SHARED_BYTES}: take fewer columns or stages"
            )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of the ring of both operands and of the tile of the result."""
        return 2 * (self.stages * CHUNK * (TILE_ROWS + self.columns) + TILE_ROWS * self.columns)


def why_unsupported(target: Target, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case in both passes, or None if it can."""
    if case.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, not {case.dtype}"
    if case.inner % TILE_ROWS or case.outer % TILE_ROWS:
        return f"it needs D and F that are multiples of {TILE_ROWS}, not {case.inner} and {case.outer}"
    if case.rows < TILE_ROWS:
        return f"it needs at least {TILE_ROWS} rows, not {case.rows}"
    return None


def default_tiles(columns: int) -> Tiles:
    """Choose the widest tiles that divide the number of columns.

    Example:
        >>> default_tiles(384)
        Tiles(columns=128, stages=4)
    """
    widest = next(width for width in (256, 128, 64) if columns % width == 0)
    return Tiles(widest, 3 if widest == 256 else 4)


def align_down(rows: Any) -> Any:
    """Round indices of rows down to multiples of `ROW_MULTIPLE`."""
    return rows // ROW_MULTIPLE * ROW_MULTIPLE


def tile_table(sizes: Any, rows: int) -> Any:
    """List the tiles of rows.

    Args:
        sizes: number of rows of each group, (E,).
        rows: number of all rows.

    Returns:
        int32 (4, tiles): for each tile its group, the first row that it reads (a multiple of `ROW_MULTIPLE`), and the
        first row and the end (exclusive) of the rows that it stores. For rows of no group, the group is E. The number
        of tiles is the largest that groups may need; unused tiles have no rows.
    """
    group_count = sizes.shape[0]
    all_sizes = jnp.concatenate([sizes, rows - jnp.sum(sizes, keepdims=True)]).astype(jnp.int32)
    all_ends = jnp.cumsum(all_sizes)
    all_starts = all_ends - all_sizes
    read_rows = jnp.where(all_sizes > 0, all_ends - align_down(all_starts), 0)
    tile_counts = (read_rows + TILE_ROWS - 1) // TILE_ROWS
    end_tiles = jnp.cumsum(tile_counts)
    most_tiles = (rows + (group_count + 1) * (TILE_ROWS + ROW_MULTIPLE - 2)) // TILE_ROWS
    tiles = jnp.arange(most_tiles, dtype=jnp.int32)
    groups = jnp.minimum(jnp.searchsorted(end_tiles, tiles, side="right"), group_count)
    read_starts = align_down(all_starts[groups]) + (tiles - (end_tiles - tile_counts)[groups]) * TILE_ROWS
    store_starts = jnp.maximum(read_starts, all_starts[groups])
    store_ends = jnp.minimum(read_starts + TILE_ROWS, all_ends[groups])
    is_used = tiles < end_tiles[-1]
    rows_of_tiles = jnp.where(is_used, jnp.stack([read_starts, store_starts, store_ends]), 0)
    return jnp.concatenate([groups[None], rows_of_tiles]).astype(jnp.int32)


def _multiply(steps: Any, stages: int, shape: tuple[int, int], ready: Any, operands: Any, free: Any) -> Any:
    """Sum the products of the buffers of all steps, with one product in flight.

    Args:
        steps: number of steps.
        stages: number of slots of the ring.
        shape: shape of the result.
        ready, free: barriers of the slots; a slot is free after its product has finished.
        operands: a function of a slot that returns both operands.
    """

    def sum_products(total: Any) -> Any:
        def add_product(step: Any, _: None) -> None:
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wgmma(total, *operands(slot))
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)]))

        lax.fori_loop(0, steps, add_product, None)
        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(steps - 1, stages)]))
        return total[...]

    return pl.run_scoped(sum_products, plgpu.ACC(shape, F32))  # pyright: ignore[reportPrivateImportUsage]


def forward(
    x: Any, w: Any, sizes: Any, *, transposed: bool = False, tiles: Tiles | None = None, interpret: Interpret = False
) -> Any:
    """Compute what `reference.forward` computes, including zeros for rows of no group.

    Args:
        x, w, sizes, transposed: as in `reference.forward`.
        tiles: size of a tile, and of the ring of buffers.
        interpret: how to run the kernel, see `compat.interpret_params`.
    """
    rows, inner = x.shape
    group_count, columns = w.shape[0], w.shape[1 if transposed else 2]
    used_tiles = tiles or default_tiles(columns)
    width, stages = used_tiles.columns, used_tiles.stages
    table = tile_table(sizes, rows)

    def body(x_g: Any, w_g: Any, table_g: Any, y_g: Any, x_s: Any, w_s: Any, y_s: Any, ready: Any, free: Any) -> None:
        t, j, wg = lax.axis_index("t"), lax.axis_index("j"), lax.axis_index("wg")
        group, read_start, store_start, store_end = (table_g[row, t] for row in range(4))
        steps = jnp.where(group < group_count, jnp.int32(inner // CHUNK), 0)
        tile_columns = pl.ds(j * width, width)

        @pl.when((wg == WARPGROUPS) & (store_end > store_start))
        def _copy() -> None:
            def list_copies(step: Any, slot: Any) -> Any:
                chunk = pl.ds(step * CHUNK, CHUNK)
                matrix = w_g.at[group, tile_columns, chunk] if transposed else w_g.at[group, chunk, tile_columns]
                return [(x_g.at[pl.ds(read_start, TILE_ROWS), chunk], x_s.at[slot]), (matrix, w_s.at[slot])]

            feed(jnp.int32(0), steps, stages, [(list_copies, ready, free)])

        @pl.when((wg < WARPGROUPS) & (store_end > store_start))
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def operands(slot: Any) -> Any:
                matrix = w_s.at[slot]
                return x_s.at[slot, pl.ds(wg * ROWS, ROWS)], matrix.transpose((1, 0)) if transposed else matrix

            total = _multiply(steps, stages, (ROWS, width), ready, operands, free)
            store(y_s.at[wg], total.astype(x.dtype))
            plgpu.commit_smem()
            warpgroup_start = read_start + wg * ROWS
            first_stored = lax.max(store_start - warpgroup_start, 0)
            row_count = lax.max(lax.min(store_end - warpgroup_start, ROWS) - first_stored, 0)
            for bit in reversed(range(int(math.log2(ROWS)) + 1)):
                slice_rows = 1 << bit
                slice_start = first_stored + (row_count & ~(2 * slice_rows - 1))

                @pl.when((row_count & slice_rows) != 0)
                def _store_slice(slice_rows: int = slice_rows, slice_start: Any = slice_start) -> None:
                    source = y_s.at[wg, pl.ds(slice_start, slice_rows)]
                    rows_g = pl.ds(warpgroup_start + slice_start, slice_rows)
                    plgpu.copy_smem_to_gmem(source, y_g.at[rows_g, tile_columns])

            plgpu.wait_smem_to_gmem(0)

    matrix_tile = (width, CHUNK) if transposed else (CHUNK, width)
    out_type = result_struct((rows, columns), x.dtype, x, w, sizes)
    return launch(
        body,
        (x, w, table),
        out_type=out_type,
        grid=(table.shape[1], columns // width),
        grid_names=("t", "j"),
        warpgroups=WARPGROUPS + 1,
        scratch=[
            tiled_smem((stages, TILE_ROWS, CHUNK), x.dtype),
            tiled_smem((stages, *matrix_tile), w.dtype),
            plgpu.SMEM((WARPGROUPS, ROWS, width), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ],
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
        cost=cost_estimate(2 * rows * inner * columns, (x, w), (out_type,)),
        interpret=interpret,
    )


def _keep_rows(ref: Any, first_row: Any, end_row: Any) -> None:
    """Set the rows of a buffer (CHUNK, columns) outside of `first_row` to `end_row` to 0, 64 columns at a time."""
    for first_column in range(0, ref.shape[1], 64):
        part = ref.at[:, pl.ds(first_column, 64)]
        elements = load(part)
        row_index = plgpu.broadcasted_iota(jnp.int32, (CHUNK, 64), 0, layout=WGMMA)
        is_kept = (row_index >= first_row) & (row_index < end_row)
        part[...] = jnp.where(is_kept, elements.astype(F32), 0.0).astype(ref.dtype)


def gradient_of_weights(
    x: Any, dy: Any, sizes: Any, *, tiles: Tiles | None = None, interpret: Interpret = False
) -> Any:
    """Compute what `reference.gradient_of_weights` computes.

    Args:
        x, dy, sizes: as in `reference.gradient_of_weights`.
        tiles: size of a tile, and of the ring of buffers.
        interpret: how to run the kernel, see `compat.interpret_params`.
    """
    inner, columns, group_count = x.shape[1], dy.shape[1], sizes.shape[0]
    used_tiles = tiles or default_tiles(columns)
    width, stages = used_tiles.columns, used_tiles.stages
    group_ends = jnp.cumsum(sizes)
    group_ranges = jnp.stack([group_ends - sizes, group_ends]).astype(jnp.int32)

    def body(
        x_g: Any,
        dy_g: Any,
        ranges_g: Any,
        dw_g: Any,
        x_s: Any,
        dy_s: Any,
        dw_s: Any,
        ready: Any,
        partial_chunk_ready: Any,
        free: Any,
    ) -> None:
        group, i, j, wg = (lax.axis_index(name) for name in ("e", "i", "j", "wg"))
        first_row, end_row = ranges_g[0, group], ranges_g[1, group]
        read_start = align_down(first_row)
        steps = jnp.where(end_row > first_row, lax.div(end_row - read_start + CHUNK - 1, CHUNK), 0)

        @pl.when(wg == WARPGROUPS)
        def _copy() -> None:
            def copy_chunk(step: Any, _: None) -> None:
                slot, chunk_start = lax.rem(step, stages), read_start + step * CHUNK
                is_whole = (chunk_start >= first_row) & (chunk_start + CHUNK <= end_row)

                def start_copies(barrier: Any) -> None:
                    rows = pl.ds(chunk_start, CHUNK)
                    plgpu.copy_gmem_to_smem(x_g.at[rows, pl.ds(i * TILE_ROWS, TILE_ROWS)], x_s.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(dy_g.at[rows, pl.ds(j * width, width)], dy_s.at[slot], barrier)

                pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                pl.when(is_whole)(lambda: start_copies(ready.at[slot]))

                @pl.when(~is_whole)
                def _copy_partial_chunk() -> None:
                    start_copies(partial_chunk_ready)
                    plgpu.barrier_wait(partial_chunk_ready)
                    for buffer in (x_s.at[slot], dy_s.at[slot]):
                        _keep_rows(buffer, first_row - chunk_start, end_row - chunk_start)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(ready.at[slot])

            lax.fori_loop(0, steps, copy_chunk, None)

            def wait_for_readers(step: Any, _: None) -> None:
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(lax.max(steps - stages, 0), steps, wait_for_readers, None)

        @pl.when(wg < WARPGROUPS)
        def _compute() -> None:
            warpgroup_columns = pl.ds(wg * ROWS, ROWS)

            def operands(slot: Any) -> Any:
                return x_s.at[slot, :, warpgroup_columns].transpose((1, 0)), dy_s.at[slot]

            total = _multiply(steps, stages, (ROWS, width), ready, operands, free)
            dw_s.at[wg][...] = total.astype(x.dtype)
            plgpu.commit_smem()
            destination = dw_g.at[group, pl.ds(i * TILE_ROWS + wg * ROWS, ROWS), pl.ds(j * width, width)]
            plgpu.copy_smem_to_gmem(dw_s.at[wg], destination)
            plgpu.wait_smem_to_gmem(0)

    out_type = result_struct((group_count, inner, columns), x.dtype, x, dy, sizes)
    return launch(
        body,
        (x, dy, group_ranges),
        out_type=out_type,
        grid=(group_count, inner // TILE_ROWS, columns // width),
        grid_names=("e", "i", "j"),
        warpgroups=WARPGROUPS + 1,
        scratch=[
            tiled_smem((stages, CHUNK, TILE_ROWS), x.dtype),
            tiled_smem((stages, CHUNK, width), dy.dtype),
            tiled_smem((WARPGROUPS, ROWS, width), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ],
        name="grouped_matmul_dw",
        cost=cost_estimate(2 * x.shape[0] * inner * columns, (x, dy), (out_type,)),
        interpret=interpret,
    )
