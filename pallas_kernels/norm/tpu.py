"""Norms on TPU: each array is read or written once; gradients of weight and bias are summed over the grid.

In the kernels, names of arrays are references to tiles in VMEM; f, u and g are as in `reference.py`.
"""

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
"""Lanes of a vector register."""
MAX_WIDTH = 16384
"""The largest width for which tiles of 16 rows fit the default 16 MiB of VMEM in both passes."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Numbers of rows of one step of the grid: multiples of 16, the sublanes of a bfloat16 tile.

    Args:
        forward: rows of a step of the forward pass.
        backward: rows of a step of the backward pass.

    Raises:
        ValueError: a number is not a positive multiple of 16.
    """

    forward: int
    backward: int

    def __post_init__(self):
        if self.forward % 16 or self.backward % 16 or min(self.forward, self.backward) < 16:
            raise ValueError(f"norm: got tiles of {self.forward} and {self.backward} rows, expected multiples of 16")


def default_tiles(width: int) -> Tiles:
    """Choose the tiles for a width, so that 4 (forward) or 6 (backward) double-buffered float32 tiles fit 8 MiB.

    Example:
        >>> default_tiles(4096)
        Tiles(forward=64, backward=32)
    """
    forward, backward = (max(16, min(1024, (8 << 20) // (width * 8 * arrays) // 16 * 16)) for arrays in (4, 6))
    return Tiles(forward, backward)


def why_unsupported(target: Target, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case, or None if it can."""
    if case.dtype not in ("bfloat16", "float32"):
        return f"it needs bfloat16 or float32, not {case.dtype}"
    if case.width % LANES or case.width > MAX_WIDTH:
        return f"it needs a width that is a multiple of {LANES} up to {MAX_WIDTH}, not {case.width}"
    return None


def _forward_kernel(*refs: Any, eps: float, center: bool, has_bias: bool, has_residual: bool) -> None:
    """Compute a tile of y and h; `refs` are x, weight, the bias and the residual if any, y, and h if there is one."""
    x, weight, *optional_refs = refs[: 2 + has_bias + has_residual]
    y, *h_refs = refs[2 + has_bias + has_residual :]
    f = x[...].astype(F32)
    if has_residual:
        (h,) = h_refs
        h[...] = (f + optional_refs[-1][...].astype(F32)).astype(h.dtype)
        f = h[...].astype(F32)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    y_tile = f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps) * weight[...].astype(F32)
    if has_bias:
        y_tile = y_tile + optional_refs[0][...].astype(F32)
    y[...] = y_tile.astype(y.dtype)


def _backward_kernel(*refs: Any, eps: float, center: bool, has_bias: bool, has_dh: bool, rows: int, tile: int) -> None:
    """Compute a tile of dx, and add to the gradients of weight and bias.

    `refs` are h, weight, dy, dh if there is one, dx, the gradients of weight and (if any) bias, and a scratch for each
    of these two. `rows` is the number of all rows, `tile` the number of rows of a step.
    """
    h, weight, dy, *dh_refs = refs[: 3 + has_dh]
    dx, *vector_refs = refs[3 + has_dh :]
    vector_gradients, accumulators = vector_refs[: 1 + has_bias], vector_refs[1 + has_bias :]
    i = pl.program_id(0)

    @pl.when(i == 0)
    def _start() -> None:
        for accumulator in accumulators:
            accumulator[...] = jnp.zeros_like(accumulator)

    f, dy_wide = h[...].astype(F32), dy[...].astype(F32)
    if rows % tile:  # rows past the end are garbage, and 0 * NaN is NaN
        is_row = lax.broadcasted_iota(jnp.int32, f.shape, 0) + i * tile < rows
        f, dy_wide = jnp.where(is_row, f, 0.0), jnp.where(is_row, dy_wide, 0.0)
    if center:
        f = f - jnp.mean(f, -1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)
    u = f * scale
    accumulators[0][...] += jnp.sum(dy_wide * u, 0, keepdims=True)
    if has_bias:
        accumulators[1][...] += jnp.sum(dy_wide, 0, keepdims=True)
    g = dy_wide * weight[...].astype(F32)
    dx_wide = g - u * jnp.mean(g * u, -1, keepdims=True)
    if center:
        dx_wide = dx_wide - jnp.mean(g, -1, keepdims=True)
    dx_wide = dx_wide * scale
    if has_dh:
        dx_wide = dx_wide + dh_refs[0][...].astype(F32)
    dx[...] = dx_wide.astype(dx.dtype)

    @pl.when(i == pl.num_programs(0) - 1)
    def _end() -> None:
        for vector_gradient, accumulator in zip(vector_gradients, accumulators, strict=True):
            vector_gradient[...] = accumulator[...]


def _call(
    kernel: Any, tile: int, ins: Any, out_types: Any, scratch_count: int, name: str, interpret: Interpret
) -> list[Any]:
    """Run a kernel over tiles of rows; return its results.

    Every step gets whole vectors, such as the weight, as one row. The kernel has `scratch_count` scratch rows.
    """
    rows, width = ins[0].shape
    row_spec, vector_spec = pl.BlockSpec((tile, width), lambda i: (i, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))
    outputs = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tile),),
        in_specs=[row_spec if array.ndim == 2 else vector_spec for array in ins],
        out_specs=[row_spec if out.ndim == 2 else vector_spec for out in out_types],
        out_shape=[out if out.ndim == 2 else result_struct((1, width), out.dtype, *ins) for out in out_types],
        scratch_shapes=[pltpu.VMEM((1, width), F32)] * scratch_count,
        cost_estimate=cost_estimate(FLOP * rows * width, ins, out_types, rows),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name=name,
        interpret=interpret_params("tpu", interpret),
    )(*(array if array.ndim == 2 else array[None] for array in ins))
    return [output if out.ndim == 2 else output[0] for output, out in zip(outputs, out_types, strict=True)]


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
    """Compute what `reference.forward` computes, with the same arguments and results."""
    tile = (tiles or default_tiles(x.shape[1])).forward
    ins = [array for array in (x, weight, bias, residual) if array is not None]
    has_residual = residual is not None
    kernel = functools.partial(
        _forward_kernel, eps=eps, center=center, has_bias=bias is not None, has_residual=has_residual
    )
    out_types = [result_struct(x.shape, x.dtype, *ins)] * (1 + has_residual)
    y, *h_outputs = _call(kernel, tile, ins, out_types, 0, "norm", interpret)
    return y, h_outputs[0] if has_residual else x


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
    """Compute what `reference.backward` computes, with the same arguments and results."""
    rows, width = h.shape
    tile = (tiles or default_tiles(width)).backward
    ins = [array for array in (h, weight, dy, dh) if array is not None]
    vector_count = 1 + (bias is not None)
    options = {"has_bias": bias is not None, "has_dh": dh is not None, "rows": rows, "tile": tile}
    kernel = functools.partial(_backward_kernel, eps=eps, center=center, **options)
    out_types = [result_struct(h.shape, h.dtype, *ins), *[result_struct((width,), F32, *ins)] * vector_count]
    dx, d_weight, *d_biases = _call(kernel, tile, ins, out_types, vector_count, "norm_backward", interpret)
    return dx, d_weight.astype(weight.dtype), None if bias is None else d_biases[0].astype(bias.dtype)
