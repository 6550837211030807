"""What our Mosaic GPU kernels share: launching, tiles in shared memory, wgmma, a ring of TMA copies; and what differs
between JAX 0.10, 0.11 and 0.12.

All of them are written for Lane semantics, in which a warpgroup's code works on its own registers (the default became
Warpgroup in 0.11). JAX's interpreter lacks wgmma on registers and `run_state`: where it runs a kernel, `plain`
is True and products are `jnp.dot`. Importing this module imports Mosaic GPU (and absl): import it where it is used.
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
"""Layout of a wgmma result in a warpgroup's registers: 64 rows or a multiple, columns by 8."""
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)
"""Layouts of a value per row, and of a value per column, of such a result."""

MAX_SHARED = 232448
"""Bytes of shared memory that a block may take on H100 and H200 (CUDA C programming guide, table of capabilities)."""


def params(**options: Any) -> Any:
    """Compiler parameters, with Lane semantics.

    Args:
        options: of `plgpu.CompilerParams`, such as `approx_math=True`.
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
        body: of the references of `args`, of the results, of `scratch`.
        args: arrays.
        out_type: types of the results (`compat.result_struct`).
        grid, grid_names: blocks, and the names of their axes (`jax.lax.axis_index`).
        name: of the kernel, in profiles and in the compiled program.
        scratch: shared memory and barriers.
        warpgroups: per block, distinguished by the axis "wg"; one that has no name by default.
        approx_math: the fast versions of exp2, tanh, ...
        cost: FLOP and bytes, for who counts them.
        interpret: see `compat.interpret_params`.
    """
    more: dict[str, Any] = {} if warpgroups is None else {"num_threads": warpgroups, "thread_name": "wg"}
    interpreted = {"interpret": interpret_params("gpu", interpret)} if interpret else {}
    settings = {"out_type": out_type, "compiler_params": params(approx_math=approx_math), **interpreted}
    run: Callable[..., Any] = plgpu.kernel(
        body,
        grid=grid,
        grid_names=grid_names,
        scratch_types=list(scratch),
        kernel_name=name,
        **settings,
        **more,
        **supported_options(plgpu.kernel, cost_estimate=cost),
    )
    if cost is not None and "cost_estimate" not in inspect.signature(plgpu.kernel).parameters:
        mesh = plgpu.Mesh(grid=grid, grid_names=grid_names, **more)
        run = _estimated(body, run, mesh, name, scratch, cost, settings)
    return jax.tree.map(lambda made: varying_like(made, *args), _run_once(run(*args)))


def _run_once(made: Any) -> Any:
    """Results of a kernel that XLA is kept from running twice, on JAX 0.11.

    In a loop that stacks a result and uses it too (a scan that keeps residuals), XLA's dynamic-slice fusion takes a
    second copy of the kernel into the fusion that writes the stack (openxla/xla pull request 45799): before JAX 0.11
    it was off, from 0.12 on it leaves such results alone. A barrier keeps the two apart, and costs nothing.

    Args:
        made: the results.
    """
    return lax.optimization_barrier(made) if jax.__version_info__[:2] == (0, 11) else made


def _estimated(
    body: Callable[..., None], plain: Callable[..., Any], mesh: Any, name: str, scratch: Any, cost: Any, settings: Any
) -> Callable[..., Any]:
    """What `plgpu.kernel` does, with an estimate of the cost, which JAX up to 0.11 takes one floor below alone.

    Args:
        body, mesh, name, scratch, cost, settings: of the kernel.
        plain: the kernel without an estimate, which supports `jax.vmap`.
    """
    axes = mesh.thread_name or ()

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes=axes)

    run = jax.custom_batching.custom_vmap(pl.kernel(scoped, mesh=mesh, name=name, cost_estimate=cost, **settings))

    @run.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> Any:
        out = jax.vmap(plain, [0 if one else None for one in batched])(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run


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
    """Run a kernel that reads `args` and changes `state` where it lies, with nothing copied if it was donated.

    Args:
        body: of the references of `args`, of `state`, of `scratch`.
        args: arrays.
        state: arrays to change.
        grid, grid_names, name, scratch, approx_math, cost, interpret: as of `launch`.

    Returns:
        The changed state.
    """
    more = {"interpret": interpret_params("gpu", interpret)} if interpret else {}
    refs = [jax.new_ref(array) for array in state]

    def scoped(*operand_refs: Any) -> None:
        pl.run_scoped(lambda *scratch_refs: body(*operand_refs, *scratch_refs), *scratch, collective_axes=())

    pl.kernel(
        scoped,
        out_type=(),
        mesh=plgpu.Mesh(grid=grid, grid_names=grid_names),
        name=name,
        compiler_params=params(approx_math=approx_math),
        cost_estimate=cost,
        **more,
    )(*args, *refs)
    return tuple(jax.freeze(array) for array in refs)


def wide(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory as TMA and wgmma want it: tiles of 8 rows, swizzled.

    Args:
        shape, dtype: of the array; its last dim is a multiple of `swizzle` bytes.
        swizzle: bytes: 32, 64, 128.
    """
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def load(ref: Any, layout: Any = WGMMA) -> Any:
    """What a reference holds, in registers of a layout."""
    return plgpu.layout_cast(ref[...], layout)


def over_lanes(width: int, *, lone: bool = False) -> Any:
    """Layout of rows that lie in one warp each, over its lanes: what is reduced along them needs no shared memory.

    Args:
        width: of a row, a multiple of 32; of 128 where a lane is to read 4 numbers at once.
        lone: of one row, an array of one dim, which every warp has; else of 4 rows or a multiple.
    """
    vector = next(n for n in (4, 2, 1) if width % (32 * n) == 0)
    tile = (32 * vector,) if lone else (4, 32 * vector)
    return plgpu.Layout.TILED(
        Tiling((tile, (vector,))), warp_dims=(Replicated(4) if lone else -3,), lane_dims=(-2,), vector_dim=-1
    )


def load_rows(ref: Any, layout: Any) -> Any:
    """What a reference to HBM holds, in registers of a layout (JAX 0.10 requires an index)."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    more: dict[str, Any] = {"idx": None} if index is not None and index.default is index.empty else {}
    return plgpu.load(ref, **more, layout=layout, optimized=False)


def store(ref: Any, value: Any) -> None:
    """Registers to untiled shared memory, whatever bank conflicts that has (JAX 0.11 and newer require the flag)."""
    write: Any = getattr(plgpu, "store", None)
    if write is None:
        ref[...] = value
    else:
        write(ref, value, optimized=False)


def along_rows(x: Any, shape: tuple[int, ...]) -> Any:
    """A value per row, spread over the row."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Any, shape: tuple[int, ...]) -> Any:
    """A value per column, spread over the column."""
    return lax.broadcast_in_dim(x, shape, (1,))


def full(shape: tuple[int, ...], layout: Any = WGMMA, value: float = 0.0) -> Any:
    """Float32 registers of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def sqrt(x: Any) -> Any:
    """The root of x >= 0 (0 up to 2**-126): `lax.sqrt` has no rule in JAX 0.10's Mosaic GPU."""
    return x * lax.rsqrt(jnp.maximum(x, 2.0**-126))


def matmul(a: Any, b: Any, shape: tuple[int, int], *, plain: bool, flip: bool = False) -> Any:
    """`a @ b` (`a @ b.T` if `flip`) in float32.

    Args:
        a: registers, or a reference of shared memory.
        b: a reference of shared memory.
        shape: of the result.
        plain: the interpreter runs it.
        flip: multiply by the transposed `b`.
    """
    if plain:
        a = a if isinstance(a, jax.Array) else a[...]
        b = b[...]
        return jnp.dot(a, b.T if flip else b, preferred_element_type=jnp.float32)

    def run(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if flip else b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def matmul_add(c: Any, a: Any, b: Any, *, plain: bool) -> Any:
    """`c + a @ b`, as `matmul`; `c` lies in registers of the WGMMA layout."""
    if plain:
        return c + matmul(a, b, c.shape, plain=True)

    def run(acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    return pl.run_state(run)(plgpu.ACC.init(c))  # pyright: ignore[reportPrivateImportUsage]


Stream = tuple[Callable[[Any, Any], Sequence[tuple[Any, Any]]], Any, Any]
"""What is copied: pairs (from, to) of a step into a slot of the ring; the barriers ready and free, one per slot."""


def feed(first: Any, end: Any, stages: int, streams: Sequence[Stream]) -> None:
    """The copying warpgroup: keep rings of buffers full, step by step.

    Args:
        first, end: the steps.
        stages: slots of a ring.
        streams: what is copied; the barrier `ready` expects an arrival per pair.
    """
    plgpu.set_max_registers(40, action="decrease")

    def one(step: Any, _: None) -> None:
        slot = lax.rem(step - first, stages)
        for pairs, ready, free in streams:

            @pl.when(step - first >= stages)
            def wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for source, to in pairs(step, slot):
                plgpu.copy_gmem_to_smem(source, to, ready.at[slot])

    def drain(step: Any, _: None) -> None:
        # every phase must be waited for: the interpreter of JAX 0.11 insists
        for _pairs, _ready, free in streams:
            plgpu.barrier_wait(free.at[lax.rem(step - first, stages)])

    lax.fori_loop(first, end, one, None)
    lax.fori_loop(lax.max(first, end - stages), end, drain, None)


def release(free: Any, *, read: bool) -> None:
    """Give a slot back to the copying warpgroup.

    Args:
        free: the slot's barrier.
        read: the slot was read by ordinary loads, and not by wgmma alone: TMA must not write before they are done.
    """
    if read:
        plgpu.commit_smem()
    plgpu.barrier_arrive(free)
