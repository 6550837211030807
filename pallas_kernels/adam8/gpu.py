"""8-bit AdamW on Hopper (Mosaic GPU): one pass over memory, in place.

A block of threads (one warpgroup) updates `block` rows of 32 columns. TMA copies them into shared memory; they are
loaded into registers in the WGMMA layout, because Mosaic can reduce its columns, and stored back to the same shared
memory. Three such blocks fit a multiprocessor, so their copies overlap without a software pipeline. References make the
update in place: with ordinary results, XLA would copy the whole state first.

In the kernel, g, p, mc, ms, vc and vs are references to the gradients, the parameters, and the codes and scales of both
moments in global memory; names with `_s` are their copies in shared memory.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.adam8.cases import Case
from pallas_kernels.adam8.maps import MAPS
from pallas_kernels.adam8.reference import FLOP, HYPER, MAX_SQUARE, MIN_SCALE, Settings
from pallas_kernels.compat import Interpret, cost_estimate
from pallas_kernels.mosaic_gpu import COL, WGMMA, along_columns, launch_in_place, load, sqrt, tiled_smem

COLS = 32
"""Columns that a block of threads updates."""


def _kernel(hyper: Any, *refs: Any, settings: Settings) -> None:
    """Update a block of parameters and moments; `refs` are global memory, then shared memory and its barrier."""
    g, p, mc, ms, vc, vs, g_s, p_s, mc_s, ms_s, vc_s, vs_s, ready = refs
    s, code_map, f32 = settings, MAPS[settings.map], jnp.float32
    shape = (s.block, COLS)
    i, j = lax.axis_index("i"), lax.axis_index("j")
    block_index = pl.ds(i * s.block, s.block), pl.ds(j * COLS, COLS)
    scale_index = i, pl.ds(j * COLS, COLS)
    lr, correct_m, correct_v, factor, is_applied = (hyper[index] for index in range(HYPER))

    @pl.when(is_applied > 0)
    def _() -> None:
        state_copies = (
            (p, p_s, block_index),
            (mc, mc_s, block_index),
            (ms, ms_s, scale_index),
            (vc, vc_s, block_index),
            (vs, vs_s, scale_index),
        )
        for array_g, array_s, index in ((g, g_s, block_index), *state_copies):
            plgpu.copy_gmem_to_smem(array_g.at[index], array_s, ready)
        plgpu.barrier_wait(ready)

        def per_column(x: Any) -> Any:
            return along_columns(x, shape)

        grad = load(g_s, WGMMA).astype(f32)
        square = grad * grad
        is_usable = square < MAX_SQUARE
        old_m = code_map.decode_m(load(mc_s, WGMMA).astype(jnp.int32)) * per_column(load(ms_s, COL))
        old_v = code_map.decode_v(load(vc_s, WGMMA).astype(jnp.int32)) * per_column(load(vs_s, COL))
        m = jnp.where(is_usable, s.b1 * old_m + (1 - s.b1) * factor * grad, old_m)
        v = jnp.where(is_usable, s.b2 * old_v + (1 - s.b2) * factor * factor * square, old_v)
        weight = load(p_s, WGMMA)
        new_weight = weight * (1 - lr * s.weight_decay) - lr * correct_m * m / (sqrt(v * correct_v) + s.eps)
        p_s[...] = jnp.where(is_usable, new_weight, weight)
        max_m, max_v = jnp.max(jnp.abs(m), axis=0), jnp.max(v, axis=0)
        ms_s[...], vs_s[...] = max_m, max_v
        mc_s[...] = code_map.encode_m(m * per_column(1 / jnp.maximum(max_m, MIN_SCALE))).astype(mc_s.dtype)
        vc_s[...] = code_map.encode_v(v * per_column(1 / jnp.maximum(max_v, MIN_SCALE)), sqrt).astype(vc_s.dtype)
        plgpu.commit_smem()
        for array_g, array_s, index in state_copies:
            plgpu.copy_smem_to_gmem(array_s, array_g.at[index])
        plgpu.wait_smem_to_gmem(0)


def step(
    p: Array, g: Array, m: tuple[Array, Array], v: tuple[Array, Array], hyper: Array, settings: Settings,
    *, case: Case, interpret: Interpret = False,
) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:  # fmt: skip
    """Compute what `reference.step` computes; the results take the memory of p, m and v if these are donated.

    Args:
        p, g, m, v, hyper, settings: as in `reference.step`.
        case: the shapes and options of the arrays.
        interpret: how to run the kernel, see `compat.interpret_params`.

    Returns:
        p, m and v after the step.
    """
    row_count = case.layers * case.rows
    state = [array.reshape(-1, case.cols) for array in (p, *m, *v)]

    def block_smem(array: Array) -> Any:
        return tiled_smem((case.block, COLS), array.dtype, COLS * array.dtype.itemsize)

    scale_smem = plgpu.SMEM((COLS,), jnp.float32)
    moment_smem = [block_smem(m[0]), scale_smem, block_smem(v[0]), scale_smem]
    scratch = [block_smem(g), block_smem(p), *moment_smem, plgpu.Barrier(num_arrivals=6)]
    outputs = launch_in_place(
        functools.partial(_kernel, settings=settings),
        (hyper, g.reshape(-1, case.cols)),
        state,
        grid=(row_count // case.block, case.cols // COLS),
        grid_names=("i", "j"),
        name="adam8",
        scratch=scratch,
        cost=cost_estimate(FLOP * p.size, (g, *state), state, 2 * p.size),
        interpret=interpret,
    )
    new_p, m_codes, m_scales, v_codes, v_scales = (
        output.reshape(array.shape) for output, array in zip(outputs, (p, *m, *v), strict=True)
    )
    return new_p, (m_codes, m_scales), (v_codes, v_scales)
