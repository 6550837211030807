"""Functions that all Mosaic GPU kernels share: launching, tiles in shared memory, wgmma and a ring of TMA copies.

The functions hide the differences between JAX 0.10, 0.11 and 0.12. The kernels are written for Lane semantics, in which
the code of a warpgroup works on its own registers (since 0.11 the default is Warpgroup semantics). JAX's interpreter
has neither wgmma on registers nor `run_state`; with `is_interpreted`, `jnp.dot` computes the products instead.
Importing this module imports Mosaic GPU (and absl), so import the module inside the functions that use it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, interpret_params, supported_options, varying_like

WGMMA = plgpu.Layout.WGMMA
"""Layout of a wgmma result in a warpgroup's registers: a multiple of 64 rows and of 8 columns."""
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)
"""Layouts of an array with one value per row, and with one value per column, of a wgmma result."""

MAX_SHARED_BYTES = 232448
"""Bytes of shared memory that a block may take on H100 and H200 (CUDA C programming guide, table of capabilities)."""


def compiler_params(**options: Any) -> Any:
    """Return compiler parameters with Lane semantics.

    Args:
        options: options of `plgpu.CompilerParams`, such as `approx_math=True`.
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **options)


def launch(
    body: Callable[..., None],
    args: Sequence[Any],
    *,
    out_type: Any,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    name: str,
    scratch: Sequence[Any] = (),
    warpgroups: int | None = None,
    approx_math: bool = True,
    cost: pl.CostEstimate | None = None,
    interpret: Interpret = False,
) -> Any:
    """Run a kernel.

    Args:
        body: the kernel, a function of the references of `args`, of the results and of `scratch`.
        args: the operands, arrays.
        out_type: shapes and dtypes of the results (`compat.result_struct`).
        grid: number of blocks along each axis of the grid.
        grid_names: names of the axes of the grid, for `jax.lax.axis_index`.
        name: name of the kernel in profiles and in the compiled program.
        scratch: shared memory and barriers.
        warpgroups: number of warpgroups per block, along an axis named "wg"; by default one warpgroup, without an axis.
        approx_math: whether to use the fast versions of exp2, tanh, ...
        cost: FLOP and bytes, for JAX's and XLA's cost analysis.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        The results, in the structure of `out_type`.
    """
    thread_options: dict[str, Any] = {} if warpgroups is None else {"num_threads": warpgroups, "thread_name": "wg"}
    interpret_option = {"interpret": interpret_params("gpu", interpret)} if interpret else {}
    options = {"out_type": out_type, "compiler_params": compiler_params(approx_math=approx_math), **interpret_option}
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        grid=grid,
        grid_names=grid_names,
        scratch_types=list(scratch),
        kernel_name=name,
        **options,
        **thread_options,
        **supported_options(plgpu.kernel, cost_estimate=cost),
    )
    if cost is not None and "cost_estimate" not in inspect.signature(plgpu.kernel).parameters:
        mesh = plgpu.Mesh(grid=grid, grid_names=grid_names, **thread_options)
        kernel = _kernel_with_cost(body, kernel, mesh, name, scratch, cost, options)
    return jax.tree.map(lambda result: varying_like(result, *args), _guard_results(kernel(*args)))


def _guard_results(results: Any) -> Any:
    """Return a kernel's results behind a barrier on JAX 0.11, where XLA might otherwise run the kernel twice.

    If a loop both stacks a result and uses it (a scan that keeps residuals), XLA's dynamic-slice fusion copies the
    kernel into the fusion that writes the stack (openxla/xla pull request 45799). The fusion was off before JAX 0.11,
    and from 0.12 on it does not touch such results. The barrier prevents the copy, and costs nothing.
    """
    return lax.optimization_barrier(results) if jax.__version_info__[:2] == (0, 11) else results


def _kernel_with_cost(
    body: Callable[..., None],
    kernel_without_cost: Callable[..., Any],
    mesh: Any,
    name: str,
    scratch: Any,
    cost: Any,
    options: Any,
) -> Callable[..., Any]:
    """Build a kernel that has a cost estimate, for JAX up to 0.11, where only `pl.kernel` takes an estimate.

    Args:
        body, name, scratch, cost: as in `launch`.
        kernel_without_cost: the kernel that `plgpu.kernel` built, which supports `jax.vmap`.
        mesh: the grid and the warpgroups.
        options: the other options of `pl.kernel`.
    """
    axes = mesh.thread_name or ()

    def body_with_scratch(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes=axes)

    kernel = jax.custom_batching.custom_vmap(
        pl.kernel(body_with_scratch, mesh=mesh, name=name, cost_estimate=cost, **options)
    )

    @kernel.def_vmap
    def run_mapped(size: int, is_batched: Any, *args: Any) -> Any:
        results = jax.vmap(kernel_without_cost, [0 if is_arg_batched else None for is_arg_batched in is_batched])(*args)
        return results, jax.tree.map(lambda _: True, results)

    return kernel


def launch_in_place(
    body: Callable[..., None],
    args: Sequence[Any],
    state: Sequence[Any],
    *,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    name: str,
    scratch: Sequence[Any] = (),
    approx_math: bool = True,
    cost: pl.CostEstimate | None = None,
    interpret: Interpret = False,
) -> tuple[Any, ...]:
    """Run a kernel that reads `args` and changes `state` in place; nothing is copied if the state was donated.

    Args:
        body: the kernel, a function of the references of `args`, of `state` and of `scratch`.
        args: arrays that the kernel only reads.
        state: arrays that the kernel changes.
        grid, grid_names, name, scratch, approx_math, cost, interpret: as in `launch`.

    Returns:
        The changed state.
    """
    interpret_option = {"interpret": interpret_params("gpu", interpret)} if interpret else {}
    state_refs = [jax.new_ref(array) for array in state]

    def body_with_scratch(*operand_refs: Any) -> None:
        pl.run_scoped(lambda *scratch_refs: body(*operand_refs, *scratch_refs), *scratch, collective_axes=())

    pl.kernel(
        body_with_scratch,
        out_type=(),
        mesh=plgpu.Mesh(grid=grid, grid_names=grid_names),
        name=name,
        compiler_params=compiler_params(approx_math=approx_math),
        cost_estimate=cost,
        **interpret_option,
    )(*args, *state_refs)
    return tuple(jax.freeze(ref) for ref in state_refs)


def tiled_smem(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory in the layout that TMA and wgmma need: swizzled tiles of 8 rows.

    Args:
        shape, dtype: shape and dtype of the array; its last dim is a multiple of `swizzle` bytes.
        swizzle: bytes of a row that are swizzled together: 32, 64 or 128.
    """
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def load(ref: Any, layout: Any = WGMMA) -> Any:
    """Load the array of a reference into registers with this layout."""
    return plgpu.layout_cast(ref[...], layout)


def row_per_warp_layout(width: int, *, is_one_row: bool = False) -> Any:
    """Layout that spreads each row over the lanes of one warp, so that reductions along rows need no shared memory.

    Args:
        width: elements of a row, a multiple of 32 (of 128 to let a lane read 4 elements at once).
        is_one_row: whether the array is one row, which every warp stores; otherwise its rows are a multiple of 4.
    """
    vector_width = next(n for n in (4, 2, 1) if width % (32 * n) == 0)
    tile = (32 * vector_width,) if is_one_row else (4, 32 * vector_width)
    return plgpu.Layout.TILED(
        Tiling((tile, (vector_width,))),
        warp_dims=(Replicated(4) if is_one_row else -3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def load_rows(ref: Any, layout: Any) -> Any:
    """Load the array of a reference to global memory into registers with this layout (JAX 0.10 requires an index)."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    index_option: dict[str, Any] = {"idx": None} if index is not None and index.default is index.empty else {}
    return plgpu.load(ref, **index_option, layout=layout, optimized=False)


def store(ref: Any, value: Any) -> None:
    """Store registers to untiled shared memory, even with bank conflicts (JAX 0.11 and newer must be told to allow)."""
    plgpu_store: Any = getattr(plgpu, "store", None)
    if plgpu_store is None:
        ref[...] = value
    else:
        plgpu_store(ref, value, optimized=False)


def along_rows(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast an array with one value per row to `shape`, along the rows."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast an array with one value per column to `shape`, along the columns."""
    return lax.broadcast_in_dim(x, shape, (1,))


def full_registers(shape: tuple[int, ...], layout: Any = WGMMA, value: float = 0.0) -> Any:
    """A float32 array of equal elements in registers with this layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def sqrt(x: Any) -> Any:
    """The square root of x >= 0, and 0 for 0. Mosaic GPU of JAX 0.10 cannot lower `lax.sqrt`."""
    return x * lax.rsqrt(jnp.maximum(x, 2.0**-126))


def matmul(a: Any, b: Any, shape: tuple[int, int], *, is_interpreted: bool, flip: bool = False) -> Any:
    """Compute `a @ b`, or `a @ b.T` if `flip`, in float32.

    Args:
        a: an array in registers, or a reference to shared memory.
        b: a reference to shared memory.
        shape: shape of the result.
        is_interpreted: whether Pallas' interpreter runs the kernel.
        flip: whether to multiply by the transposed `b`.
    """
    if is_interpreted:
        a_array, b_array = a if isinstance(a, jax.Array) else a[...], b[...]
        return jnp.dot(a_array, b_array.T if flip else b_array, preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if flip else b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def matmul_add(c: Any, a: Any, b: Any, *, is_interpreted: bool) -> Any:
    """Compute `c + a @ b` in float32; `c` is in registers of the WGMMA layout, `a` and `b` are as in `matmul`."""
    if is_interpreted:
        return c + matmul(a, b, c.shape, is_interpreted=True)

    def multiply_add(acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    return pl.run_state(multiply_add)(plgpu.ACC.init(c))  # pyright: ignore[reportPrivateImportUsage]


CopyStream = tuple[Callable[[Any, Any], Sequence[tuple[Any, Any]]], Any, Any]
"""A ring of buffers that `feed` fills, as a triple (copies, full barriers, free barriers).

The first member is a function of (step, slot) that lists the copies of a step into a slot, as pairs of references
(from, to). Readers wait on the full barriers for a full slot, and `feed` waits on the free barriers for a free slot;
there is one barrier of each kind per slot.
"""


def feed(first: Any, end: Any, stages: int, streams: Sequence[CopyStream]) -> None:
    """Fill rings of buffers, step by step; this is the code of the copying warpgroup.

    Args:
        first: index of the first step.
        end: index of the last step, plus 1.
        stages: number of slots in a ring.
        streams: the rings; a barrier for a full slot expects one arrival per copy.
    """
    plgpu.set_max_registers(40, action="decrease")

    def copy_step(step: Any, _: None) -> None:
        slot = lax.rem(step - first, stages)
        for list_copies, ready, free in streams:

            @pl.when(step - first >= stages)
            def wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for source, destination in list_copies(step, slot):
                plgpu.copy_gmem_to_smem(source, destination, ready.at[slot])

    def wait_for_readers(step: Any, _: None) -> None:
        # the interpreter of JAX 0.11 requires that someone waits for every phase of a barrier
        for _list_copies, _ready, free in streams:
            plgpu.barrier_wait(free.at[lax.rem(step - first, stages)])

    lax.fori_loop(first, end, copy_step, None)
    lax.fori_loop(lax.max(first, end - stages), end, wait_for_readers, None)


def release(free: Any, *, was_loaded: bool) -> None:
    """Return a slot to the copying warpgroup.

    Args:
        free: the slot's barrier on which the copying warpgroup waits.
        was_loaded: whether ordinary loads, and not only wgmma, have read the slot: TMA must wait for such loads.
    """
    if was_loaded:
        plgpu.commit_smem()
    plgpu.barrier_arrive(free)
