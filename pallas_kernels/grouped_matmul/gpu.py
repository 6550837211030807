"""Grouped matmul on Hopper (Mosaic GPU): rows times their group's matrix, and the matrices' gradients.

After MegaBlocks (Gale et al., arXiv 2211.15841). Groups need no padding. In the product of rows, a tile of 128 rows
belongs to one group, and a table lists the groups; it reads past its group's end and stores its own rows only,
as a sum of power-of-two slices, since a TMA copy has a static shape. In the gradient of the matrices a program sums
over the rows of one group; the copying warpgroup clears what the last chunk has of the next group before it is
multiplied. A warpgroup copies by TMA into a ring of buffers, two multiply (wgmma), one product in flight each.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.grouped_matmul.cases import Case
from pallas_kernels.mosaic_gpu import MAX_SHARED_BYTES, WGMMA, feed, launch, load, store, tiled_smem
from pallas_kernels.target import Target

F32 = jnp.float32
GROUPS = 2
"""Multiplying warpgroups."""
ROWS = 64
"""Rows of a warpgroup's product: those of one wgmma."""
TILE = ROWS * GROUPS
CHUNK = 64
"""Summed over in one step: 128 bytes of bfloat16, the widest swizzle."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of a tile, and buffers of the ring.

    Raises:
        ValueError: not 64, 128 or 256 columns; a ring of less than 2; more than the shared memory of a block.
    """

    columns: int = 128
    stages: int = 4

    def __post_init__(self):
        if self.columns not in (64, 128, 256) or self.stages < 2:
            raise ValueError(f"grouped_matmul: got {self}, expected 64, 128 or 256 columns and at least 2 stages")
        if self.shared > MAX_SHARED_BYTES:
            raise ValueError(
                f"grouped_matmul: {self} takes {self.shared} bytes of shared memory, expected <= {MAX_SHARED_BYTES}"
            )

    @property
    def shared(self) -> int:
        """Bytes: the ring of both operands, and the tile that goes out."""
        return 2 * (self.stages * CHUNK * (TILE + self.columns) + TILE * self.columns)


def why_unsupported(target: Target, case: Case) -> str | None:
    """Why this cannot run a case, forward or backward; None if it can."""
    if case.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, not {case.dtype}"
    if case.inner % TILE or case.outer % TILE:
        return f"it needs D and F that are multiples of {TILE}, not {case.inner} and {case.outer}"
    if case.rows < TILE:
        return f"it needs at least {TILE} rows, not {case.rows}"
    return None


def default_tiles(columns: int) -> Tiles:
    """The widest that divides the columns.

    Example:
        >>> default_tiles(384)
        Tiles(columns=128, stages=4)
    """
    widest = next(width for width in (256, 128, 64) if columns % width == 0)
    return Tiles(widest, 3 if widest == 256 else 4)


def table(sizes: Any, rows: int) -> Any:
    """(3, tiles): the group, first row and past-the-last row of each tile of rows; group E is the rows of no group.

    Tiles without rows are as many as the groups may need at worst.
    """
    groups = sizes.shape[0]
    sizes = jnp.concatenate([sizes, rows - jnp.sum(sizes, keepdims=True)]).astype(jnp.int32)
    count = (sizes + TILE - 1) // TILE
    last = jnp.cumsum(count)
    t = jnp.arange((rows + (groups + 1) * (TILE - 1)) // TILE, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, t, side="right"), groups)
    end = jnp.cumsum(sizes)[group]
    first = end - sizes[group] + (t - (last - count)[group]) * TILE
    live = t < last[-1]
    found = [group, jnp.where(live, first, 0), jnp.where(live, jnp.minimum(first + TILE, end), 0)]
    return jnp.stack(found).astype(jnp.int32)


def _multiply(steps: Any, stages: int, shape: tuple[int, int], ready: Any, operands: Any, free: Any) -> Any:
    """The sum over steps of a product of two buffers, one of them in flight; a buffer is free after its own."""

    def run(total: Any) -> Any:
        def one(step: Any, _: None) -> None:
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wgmma(total, *operands(slot))
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)]))

        lax.fori_loop(0, steps, one, None)
        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(steps - 1, stages)]))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC(shape, F32))  # pyright: ignore[reportPrivateImportUsage]


def forward(
    x: Any, w: Any, sizes: Any, *, transposed: bool = False, tiles: Tiles | None = None, interpret: Interpret = False
) -> Any:
    """As `reference.forward`, and the same result: rows of no group are stored as zeros."""
    rows, inner = x.shape
    groups, columns = w.shape[0], w.shape[1 if transposed else 2]
    chosen = tiles or default_tiles(columns)
    width, stages = chosen.columns, chosen.stages
    tiles_of_rows = table(sizes, rows)

    def body(x_g: Any, w_g: Any, t_g: Any, y_g: Any, x_s: Any, w_s: Any, y_s: Any, ready: Any, free: Any) -> None:
        t, j, wg = lax.axis_index("t"), lax.axis_index("j"), lax.axis_index("wg")
        group, first, last = t_g[0, t], t_g[1, t], t_g[2, t]
        steps = jnp.where(group < groups, jnp.int32(inner // CHUNK), 0)
        mine = pl.ds(j * width, width)

        @pl.when((wg == GROUPS) & (last > first))
        def _copy() -> None:
            def pairs(step: Any, slot: Any) -> Any:
                chunk = pl.ds(step * CHUNK, CHUNK)
                matrix = w_g.at[group, mine, chunk] if transposed else w_g.at[group, chunk, mine]
                return [(x_g.at[pl.ds(first, TILE), chunk], x_s.at[slot]), (matrix, w_s.at[slot])]

            feed(jnp.int32(0), steps, stages, [(pairs, ready, free)])

        @pl.when((wg < GROUPS) & (last > first))
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def operands(slot: Any) -> Any:
                matrix = w_s.at[slot]
                return x_s.at[slot, pl.ds(wg * ROWS, ROWS)], matrix.transpose((1, 0)) if transposed else matrix

            total = _multiply(steps, stages, (ROWS, width), ready, operands, free)
            store(y_s.at[wg], total.astype(x.dtype))
            plgpu.commit_smem()
            start = first + wg * ROWS
            count = lax.min(lax.max(last - start, 0), ROWS)
            for bit in reversed(range(int(math.log2(ROWS)) + 1)):
                size = 1 << bit
                done = count & ~(2 * size - 1)

                @pl.when((count & size) != 0)
                def _slice(size: int = size, done: Any = done) -> None:
                    source = y_s.at[wg, pl.ds(done, size)]
                    plgpu.copy_smem_to_gmem(source, y_g.at[pl.ds(start + done, size), mine])

            plgpu.wait_smem_to_gmem(0)

    buffer = (width, CHUNK) if transposed else (CHUNK, width)
    out = result_struct((rows, columns), x.dtype, x, w, sizes)
    return launch(
        body,
        (x, w, tiles_of_rows),
        out_type=out,
        grid=(tiles_of_rows.shape[1], columns // width),
        grid_names=("t", "j"),
        warpgroups=GROUPS + 1,
        scratch=[
            tiled_smem((stages, TILE, CHUNK), x.dtype),
            tiled_smem((stages, *buffer), w.dtype),
            plgpu.SMEM((GROUPS, ROWS, width), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        ],
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
        cost=cost_estimate(2 * rows * inner * columns, (x, w), (out,)),
        interpret=interpret,
    )


def _clear(ref: Any, rows: Any) -> None:
    """Zeros in the rows of a buffer (CHUNK, columns) from `rows` on, 64 columns at a time."""
    for at in range(0, ref.shape[1], 64):
        part = ref.at[:, pl.ds(at, 64)]
        value = load(part)
        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, 64), 0, layout=WGMMA)
        part[...] = jnp.where(row < rows, value.astype(F32), 0.0).astype(ref.dtype)


def gradient_of_weights(
    x: Any, dy: Any, sizes: Any, *, tiles: Tiles | None = None, interpret: Interpret = False
) -> Any:
    """As `reference.gradient_of_weights`."""
    inner, columns, groups = x.shape[1], dy.shape[1], sizes.shape[0]
    chosen = tiles or default_tiles(columns)
    width, stages = chosen.columns, chosen.stages
    end = jnp.cumsum(sizes)
    bounds = jnp.stack([end - sizes, end]).astype(jnp.int32)

    def body(
        x_g: Any, dy_g: Any, b_g: Any, dw_g: Any, x_s: Any, dy_s: Any, dw_s: Any, ready: Any, edge: Any, free: Any
    ) -> None:
        group, i, j, wg = (lax.axis_index(name) for name in ("e", "i", "j", "wg"))
        first, last = b_g[0, group], b_g[1, group]
        count = last - first
        steps, left = lax.div(count + CHUNK - 1, CHUNK), lax.rem(count, CHUNK)

        @pl.when(wg == GROUPS)
        def _copy() -> None:
            def copy(step: Any, slot: Any, arrived: Any) -> None:
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                some = pl.ds(first + step * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(x_g.at[some, pl.ds(i * TILE, TILE)], x_s.at[slot], arrived)
                plgpu.copy_gmem_to_smem(dy_g.at[some, pl.ds(j * width, width)], dy_s.at[slot], arrived)

            def whole(step: Any, _: None) -> None:
                slot = lax.rem(step, stages)
                copy(step, slot, ready.at[slot])

            lax.fori_loop(0, lax.div(count, CHUNK), whole, None)

            @pl.when(left != 0)
            def _end_of_group() -> None:
                slot = lax.rem(steps - 1, stages)
                copy(steps - 1, slot, edge)
                plgpu.barrier_wait(edge)
                for buffer in (x_s.at[slot], dy_s.at[slot]):
                    _clear(buffer, left)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready.at[slot])

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(lax.max(steps - stages, 0), steps, drain, None)

        @pl.when(wg < GROUPS)
        def _compute() -> None:
            mine = pl.ds(wg * ROWS, ROWS)

            def operands(slot: Any) -> Any:
                return x_s.at[slot, :, mine].transpose((1, 0)), dy_s.at[slot]

            total = _multiply(steps, stages, (ROWS, width), ready, operands, free)
            dw_s.at[wg][...] = total.astype(x.dtype)
            plgpu.commit_smem()
            target = dw_g.at[group, pl.ds(i * TILE + wg * ROWS, ROWS), pl.ds(j * width, width)]
            plgpu.copy_smem_to_gmem(dw_s.at[wg], target)
            plgpu.wait_smem_to_gmem(0)

    out = result_struct((groups, inner, columns), x.dtype, x, dy, sizes)
    return launch(
        body,
        (x, dy, bounds),
        out_type=out,
        grid=(groups, inner // TILE, columns // width),
        grid_names=("e", "i", "j"),
        warpgroups=GROUPS + 1,
        scratch=[
            tiled_smem((stages, CHUNK, TILE), x.dtype),
            tiled_smem((stages, CHUNK, width), dy.dtype),
            tiled_smem((GROUPS, ROWS, width), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        ],
        name="grouped_matmul_dw",
        cost=cost_estimate(2 * x.shape[0] * inner * columns, (x, dy), (out,)),
        interpret=interpret,
    )
