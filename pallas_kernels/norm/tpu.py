"""Norm with residual on TPU: one read and one write of each array; gradients of vectors add up over the grid."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import Interpret, cost_estimate, interpret_params, result_struct
from pallas_kernels.norm.cases import Case
from pallas_kernels.norm.reference import FLOP
from pallas_kernels.target import Target

F32 = jnp.float32
LANES = 128
WIDEST = 16384
"""Width up to which tiles of 16 rows fit the default 16 MiB of VMEM, backward included."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of one grid step, a multiple of 16 (the sublanes of a bfloat16 tile)."""

    forward: int
    backward: int

    def __post_init__(self):
        if self.forward % 16 or self.backward % 16 or min(self.forward, self.backward) < 16:
            raise ValueError(f"norm: got tiles of {self.forward} and {self.backward} rows, expected multiples of 16")


def default_tiles(width: int) -> Tiles:
    """What lets 4 (forward) or 6 (backward) double-buffered float32 tiles fit 8 MiB.

    Example:
        >>> default_tiles(4096)
        Tiles(forward=64, backward=32)
    """
    forward, backward = (max(16, min(1024, (8 << 20) // (width * 8 * arrays) // 16 * 16)) for arrays in (4, 6))
    return Tiles(forward, backward)


def why_unsupported(target: Target, case: Case) -> str | None:
    """Why this cannot run a case; None if it can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {case.dtype}"
    if case.width % LANES or case.width > WIDEST:
        return f"it needs a width that is a multiple of {LANES} up to {WIDEST}, not {case.width}"
    return None


def _forward_kernel(*refs: Any, eps: float, center: bool, bias: bool, residual: bool) -> None:
    ins = refs[: 2 + bias + residual]
    y, *h = refs[len(ins) :]
    f = ins[0][...].astype(F32)
    if residual:
        h[0][...] = (f + ins[-1][...].astype(F32)).astype(h[0].dtype)
        f = h[0][...].astype(F32)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    out = f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps) * ins[1][...].astype(F32)
    if bias:
        out = out + ins[2][...].astype(F32)
    y[...] = out.astype(y.dtype)


def _backward_kernel(*refs: Any, eps: float, center: bool, bias: bool, residual: bool, rows: int, tile: int) -> None:
    h, weight, dy = refs[:3]
    dx, *sums = refs[3 + residual :]
    outs, accumulators = sums[: 1 + bias], sums[1 + bias :]
    i = pl.program_id(0)

    @pl.when(i == 0)
    def _start() -> None:
        for accumulator in accumulators:
            accumulator[...] = jnp.zeros_like(accumulator)

    f, g = h[...].astype(F32), dy[...].astype(F32)
    if rows % tile:  # rows past the end are garbage, and 0 * NaN is NaN
        real = lax.broadcasted_iota(jnp.int32, f.shape, 0) + i * tile < rows
        f, g = jnp.where(real, f, 0.0), jnp.where(real, g, 0.0)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)
    unit = f * scale
    accumulators[0][...] += jnp.sum(g * unit, 0, keepdims=True)
    if bias:
        accumulators[1][...] += jnp.sum(g, 0, keepdims=True)
    g = g * weight[...].astype(F32)
    d = g - unit * jnp.mean(g * unit, -1, keepdims=True)
    if center:
        d = d - jnp.mean(g, -1, keepdims=True)
    d = d * scale
    if residual:
        d = d + refs[3][...].astype(F32)
    dx[...] = d.astype(dx.dtype)

    @pl.when(i == pl.num_programs(0) - 1)
    def _end() -> None:
        for out, accumulator in zip(outs, accumulators, strict=True):
            out[...] = accumulator[...]


def _call(kernel: Any, tile: int, ins: Any, outs: Any, sums: int, name: str, interpret: Interpret) -> Any:
    """The kernel over tiles of rows; vectors are whole in every step, as one row. `sums` vectors add up over steps."""
    rows, width = ins[0].shape
    matrix, vector = pl.BlockSpec((tile, width), lambda i: (i, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))
    outputs = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tile),),
        in_specs=[matrix if a.ndim == 2 else vector for a in ins],
        out_specs=[matrix if a.ndim == 2 else vector for a in outs],
        out_shape=[a if a.ndim == 2 else result_struct((1, width), a.dtype, *ins) for a in outs],
        scratch_shapes=[pltpu.VMEM((1, width), F32)] * sums,
        cost_estimate=cost_estimate(FLOP * rows * width, ins, outs, rows),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name=name,
        interpret=interpret_params("tpu", interpret),
    )(*(a if a.ndim == 2 else a[None] for a in ins))
    return [a if like.ndim == 2 else a[0] for a, like in zip(outputs, outs, strict=True)]


def forward(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float,
    center: bool,
    tiles: Tiles | None = None,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """As `reference.forward`."""
    tile = (tiles or default_tiles(x.shape[1])).forward
    ins = [a for a in (x, weight, bias, residual) if a is not None]
    options = {"bias": bias is not None, "residual": residual is not None}
    kernel = functools.partial(_forward_kernel, eps=eps, center=center, **options)
    outputs = _call(
        kernel, tile, ins, [result_struct(x.shape, x.dtype, *ins)] * (1 + options["residual"]), 0, "norm", interpret
    )
    return outputs[0], outputs[-1] if options["residual"] else x


def backward(
    h: Any,
    weight: Any,
    bias: Any,
    dy: Any,
    dh: Any = None,
    *,
    eps: float,
    center: bool,
    tiles: Tiles | None = None,
    interpret: Interpret = False,
) -> tuple[Any, Any, Any]:
    """As `reference.backward`."""
    rows, width = h.shape
    tile = (tiles or default_tiles(width)).backward
    ins = [a for a in (h, weight, dy, dh) if a is not None]
    sums = 1 + (bias is not None)
    options = {"bias": bias is not None, "residual": dh is not None, "rows": rows, "tile": tile}
    kernel = functools.partial(_backward_kernel, eps=eps, center=center, **options)
    outs = [result_struct(h.shape, h.dtype, *ins), *[result_struct((width,), F32, *ins)] * sums]
    dx, *vector_sums = _call(kernel, tile, ins, outs, sums, "norm_backward", interpret)
    d_bias = None if bias is None else vector_sums[1].astype(bias.dtype)
    return dx, vector_sums[0].astype(weight.dtype), d_bias
