"""Norms on Hopper (Mosaic GPU): a warpgroup works on one row at a time, loaded from global memory into registers.

In a row of 4096 each thread has 32 elements; several small blocks per multiprocessor hide the latency. For the
gradients of weight and bias, a block sums over its rows in registers and stores one row of partial sums, and XLA adds
these rows. Left out: rows that do not fit the registers of one warpgroup.

In the kernels, names of arrays are references to global memory; f, u and g are as in `reference.py`.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Interpret, cost_estimate, result_struct
from pallas_kernels.mosaic_gpu import full_registers, launch
from pallas_kernels.mosaic_gpu import load as load_as
from pallas_kernels.norm.cases import Case
from pallas_kernels.norm.reference import FLOP
from pallas_kernels.target import Target

F32 = jnp.float32
THREAD_ELEMENTS = 4
"""Consecutive elements that a thread loads at once: 8 bytes of bfloat16, 16 of float32."""
WIDTH_MULTIPLE = 128 * THREAD_ELEMENTS
"""Widths must be multiples of this, the elements that the threads of a warpgroup load at once."""
MAX_WIDTH = 8192
"""The largest width: 64 elements per thread. With a residual, the backward pass then spills a few registers."""
MAX_CENTERED_WIDTH = 5120
"""The largest width of a layer norm: with two sums per column, wider rows would spill as many bytes as they read."""
MAX_LOADED_WIDTH = 4096
"""The largest width at which the backward pass keeps the weight in registers; at others it loads it for each row."""
MAX_BACKWARD_BLOCKS = 1056
"""Maximum number of blocks of the backward pass, 8 for each of 132 multiprocessors: every block stores partial sums."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Numbers of rows of one block of threads.

    Args:
        forward: rows of a block of the forward pass.
        backward: rows of a block of the backward pass.

    Raises:
        ValueError: a number is less than 1.
    """

    forward: int = 4
    backward: int = 16

    def __post_init__(self):
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"norm: got tiles of {self.forward} and {self.backward} rows, expected at least 1")


def default_tiles(rows: int) -> Tiles:
    """Choose the tiles for a number of rows: few rows per block, but at most `MAX_BACKWARD_BLOCKS` backward blocks.

    Example:
        >>> default_tiles(8192), default_tiles(65536)
        (Tiles(forward=4, backward=16), Tiles(forward=4, backward=63))
    """
    return Tiles(4, max(16, pl.cdiv(rows, MAX_BACKWARD_BLOCKS)))


def why_unsupported(target: Target, case: Case) -> str | None:
    """Return the reason why this kernel cannot run a case, or None if it can."""
    if case.dtype not in ("bfloat16", "float16", "float32"):
        return f"it needs bfloat16, float16 or float32, not {case.dtype}"
    max_width = MAX_CENTERED_WIDTH if case.center else MAX_WIDTH
    if case.width % WIDTH_MULTIPLE or case.width > max_width:
        width_text = "a layer norm's width" if case.center else "a width"
        return f"it needs {width_text} that is a multiple of {WIDTH_MULTIPLE} up to {max_width}, not {case.width}"
    return None


def _layout(width: int) -> Any:
    """The register layout of a row."""
    return plgpu.Layout.WG_STRIDED((width,), THREAD_ELEMENTS)


def _load(ref: Any, width: int) -> Any:
    """Load a row into registers, as float32."""
    return load_as(ref, _layout(width)).astype(F32)


def _block_rows(rows: int, tile: int) -> tuple[Any, Any]:
    """Index of the first row of this block, and the number of its rows."""
    first_row = lax.axis_index("i") * tile
    return first_row, tile if rows % tile == 0 else lax.min(jnp.int32(tile), rows - first_row)


def _statistics(row: Any, width: int, eps: float, center: bool) -> tuple[Any, Any]:
    """The row f (the given row, minus its mean if `center`), and the factor 1 / sqrt(mean(f^2) + eps)."""
    f = row - jnp.sum(row) * (1 / width) if center else row
    return f, lax.rsqrt(jnp.sum(f * f) * (1 / width) + eps)


def _forward_kernel(*refs: Any, eps: float, center: bool, has_bias: bool, has_residual: bool, tile: int) -> None:
    """Compute rows of y and h; `refs` are x, weight, the bias and the residual if any, y, and h if there is one."""
    x, weight_ref, *optional_refs = refs[: 2 + has_bias + has_residual]
    y, *h_refs = refs[2 + has_bias + has_residual :]
    rows, width = y.shape
    first_row, row_count = _block_rows(rows, tile)
    weight = _load(weight_ref, width)
    bias = _load(optional_refs[0], width) if has_bias else None
    residual_ref = optional_refs[-1] if has_residual else None

    def normalize_row(k: Any, _: None) -> None:
        r = first_row + k
        row = _load(x.at[r], width)
        if residual_ref is not None:
            h_row = (row + _load(residual_ref.at[r], width)).astype(y.dtype)
            h_refs[0].at[r][...] = h_row
            row = h_row.astype(F32)
        f, scale = _statistics(row, width, eps, center)
        y_row = f * scale * weight
        y.at[r][...] = (y_row if bias is None else y_row + bias).astype(y.dtype)

    lax.fori_loop(0, row_count, normalize_row, None)


def _backward_kernel(*refs: Any, eps: float, center: bool, has_bias: bool, has_dh: bool, tile: int) -> None:
    """Compute rows of dx, and a row of partial sums for the gradients of weight and bias.

    `refs` are h, weight, dy, dh if there is one, dx, and the partial sums for weight and (if any) bias.
    """
    h, weight_ref, dy, *dh_refs = refs[: 3 + has_dh]
    dx, *partial_sums = refs[3 + has_dh :]
    rows, width = h.shape
    i = lax.axis_index("i")
    first_row, row_count = _block_rows(rows, tile)
    loaded_weight = _load(weight_ref, width) if width <= MAX_LOADED_WIDTH else None

    def add_row(k: Any, sums: Any) -> Any:
        r = first_row + k
        f, scale = _statistics(_load(h.at[r], width), width, eps, center)
        dy_row = _load(dy.at[r], width)
        u = f * scale
        new_sums = (sums[0] + dy_row * u, *([sums[1] + dy_row] if has_bias else []))
        g = dy_row * (_load(weight_ref, width) if loaded_weight is None else loaded_weight)
        dx_row = g - u * (jnp.sum(g * u) * (1 / width))
        if center:
            dx_row = dx_row - jnp.sum(g) * (1 / width)
        dx_row = dx_row * scale
        if has_dh:
            dx_row = dx_row + _load(dh_refs[0].at[r], width)
        dx.at[r][...] = dx_row.astype(dx.dtype)
        return new_sums

    zeros = (full_registers((width,), _layout(width)),) * len(partial_sums)
    sums = lax.fori_loop(0, row_count, add_row, zeros)
    for partial_sum, block_sum in zip(partial_sums, sums, strict=True):
        partial_sum.at[i][...] = block_sum


def _call(kernel: Any, tile: int, ins: Any, out_types: Any, name: str, interpret: Interpret) -> Any:
    """Run a kernel over tiles of rows; return its results."""
    rows, width = ins[0].shape
    return launch(
        kernel,
        ins,
        out_type=out_types,
        grid=(pl.cdiv(rows, tile),),
        grid_names=("i",),
        name=name,
        cost=cost_estimate(FLOP * rows * width, ins, out_types, rows),
        interpret=interpret,
    )


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
    tile = (tiles or default_tiles(x.shape[0])).forward
    ins = [array for array in (x, weight, bias, residual) if array is not None]
    has_residual = residual is not None
    kernel = functools.partial(
        _forward_kernel, eps=eps, center=center, has_bias=bias is not None, has_residual=has_residual, tile=tile
    )
    out_types = [result_struct(x.shape, x.dtype, *ins)] * (1 + has_residual)
    y, *h_outputs = _call(kernel, tile, ins, out_types, "norm", interpret)
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
    tile = (tiles or default_tiles(rows)).backward
    ins = [array for array in (h, weight, dy, dh) if array is not None]
    options = {"has_bias": bias is not None, "has_dh": dh is not None, "tile": tile}
    kernel = functools.partial(_backward_kernel, eps=eps, center=center, **options)
    partial_type = result_struct((pl.cdiv(rows, tile), width), F32, *ins)
    out_types = [result_struct(h.shape, h.dtype, *ins), *[partial_type] * (1 + (bias is not None))]
    dx, *partial_sums = _call(kernel, tile, ins, out_types, "norm_backward", interpret)
    d_weight, *d_biases = (jnp.sum(partial_sum, 0) for partial_sum in partial_sums)
    return dx, d_weight.astype(weight.dtype), None if bias is None else d_biases[0].astype(bias.dtype)
