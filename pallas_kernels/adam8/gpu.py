"""8-bit AdamW on Hopper (Mosaic GPU): one pass over memory, in place.

A block of threads (one warpgroup) owns the `block` rows of 32 columns: copied in by TMA, held in registers in the WGMMA
layout (whose maximum over a column Mosaic knows), written back over the same shared memory. Three such blocks fit a
multiprocessor, so their copies overlap without a software pipeline. References make it in place: with plain results
XLA copies the whole state first.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.adam8.cases import Case
from pallas_kernels.adam8.maps import MAPS
from pallas_kernels.adam8.reference import FLOP, LEAST, MOST, Settings
from pallas_kernels.compat import Interpret, cost_estimate
from pallas_kernels.mosaic_gpu import COL, WGMMA, along_columns, launch_in_place, load, sqrt, wide

COLS = 32
"""Columns of a block of threads."""


def _kernel(hyper: Any, *refs: Any, settings: Settings) -> None:
    g, p, mc, ms, vc, vs, g_s, p_s, mc_s, ms_s, vc_s, vs_s, ready = refs
    s, maps, f32 = settings, MAPS[settings.map], jnp.float32
    shape = (s.block, COLS)
    i, j = lax.axis_index("i"), lax.axis_index("j")
    at = pl.ds(i * s.block, s.block), pl.ds(j * COLS, COLS)
    row = i, pl.ds(j * COLS, COLS)
    lr, correct_m, correct_v, factor = hyper[0], hyper[1], hyper[2], hyper[3]

    @pl.when(hyper[4] > 0)
    def _() -> None:
        state = ((p, p_s, at), (mc, mc_s, at), (ms, ms_s, row), (vc, vc_s, at), (vs, vs_s, row))
        for there, here, place in ((g, g_s, at), *state):
            plgpu.copy_gmem_to_smem(there.at[place], here, ready)
        plgpu.barrier_wait(ready)

        def per_column(x: Any) -> Any:
            return along_columns(x, shape)

        grad = load(g_s, WGMMA).astype(f32)
        square = grad * grad
        ok = square < MOST
        old_m = maps.decode_m(load(mc_s, WGMMA).astype(jnp.int32)) * per_column(load(ms_s, COL))
        old_v = maps.decode_v(load(vc_s, WGMMA).astype(jnp.int32)) * per_column(load(vs_s, COL))
        m = jnp.where(ok, s.b1 * old_m + (1 - s.b1) * factor * grad, old_m)
        v = jnp.where(ok, s.b2 * old_v + (1 - s.b2) * factor * factor * square, old_v)
        weight = load(p_s, WGMMA)
        moved = weight * (1 - lr * s.weight_decay) - lr * correct_m * m / (sqrt(v * correct_v) + s.eps)
        p_s[...] = jnp.where(ok, moved, weight)
        top_m, top_v = jnp.max(jnp.abs(m), axis=0), jnp.max(v, axis=0)
        ms_s[...], vs_s[...] = top_m, top_v
        mc_s[...] = maps.encode_m(m * per_column(1 / jnp.maximum(top_m, LEAST))).astype(mc_s.dtype)
        vc_s[...] = maps.encode_v(v * per_column(1 / jnp.maximum(top_v, LEAST)), sqrt).astype(vc_s.dtype)
        plgpu.commit_smem()
        for there, here, place in state:
            plgpu.copy_smem_to_gmem(here, there.at[place])
        plgpu.wait_smem_to_gmem(0)


def step(
    p: Array, g: Array, m: tuple[Array, Array], v: tuple[Array, Array], hyper: Array, settings: Settings,
    *, case: Case, interpret: Interpret = False,
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
        interpret: see `compat.interpret_params`.
    """
    rows = case.layers * case.rows
    state = [array.reshape(-1, case.cols) for array in (p, *m, *v)]

    def tile(array: Array) -> Any:
        return wide((case.block, COLS), array.dtype, COLS * array.dtype.itemsize)

    scale = plgpu.SMEM((COLS,), jnp.float32)
    scratch = [tile(g), tile(p), tile(m[0]), scale, tile(v[0]), scale, plgpu.Barrier(num_arrivals=6)]
    outputs = launch_in_place(
        functools.partial(_kernel, settings=settings),
        (hyper, g.reshape(-1, case.cols)),
        state,
        grid=(rows // case.block, case.cols // COLS),
        grid_names=("i", "j"),
        name="adam8",
        scratch=scratch,
        cost=cost_estimate(FLOP * p.size, (g, *state), state, 2 * p.size),
        interpret=interpret,
    )
    new_p, *rest = (array.reshape(like.shape) for array, like in zip(outputs, (p, *m, *v), strict=True))
    return new_p, (rest[0], rest[1]), (rest[2], rest[3])
