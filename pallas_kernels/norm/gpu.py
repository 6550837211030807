"""Norm with residual on Hopper (Mosaic GPU): a warpgroup per row, straight from memory to registers.

A row of 4096 is 32 values a thread; several small blocks per multiprocessor hide the latency. Gradients of vectors: a
block sums its rows in registers and writes one partial row, and XLA adds those. It leaves out rows that do not fit the
registers of one warpgroup.
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
VECTOR = 4
"""Neighbouring values of a thread: 8 bytes of bfloat16, 16 of float32."""
STEP = 128 * VECTOR
"""Widths are multiples of it: threads of a warpgroup times their neighbouring values."""
WIDEST = 8192
"""64 values of a row a thread, whose backward spills a few registers where a residual is added."""
WIDEST_CENTERED = 5120
"""The same of rows whose mean is taken off: with two sums per column, wider ones spill as much as they read."""
KEPT = 4096
"""Width up to which the backward holds the gain in registers; from wider rows on it is read again for each."""
BLOCKS = 1056
"""Blocks of the backward at most, 8 for each of 132 multiprocessors: every one writes a row of partial sums."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of one block."""

    forward: int = 4
    backward: int = 16

    def __post_init__(self):
        if min(self.forward, self.backward) < 1:
            raise ValueError(f"norm: got tiles of {self.forward} and {self.backward} rows, expected at least 1")


def default_tiles(rows: int) -> Tiles:
    """Few rows a block in the forward; in the backward as many as keep the partial sums few.

    Example:
        >>> default_tiles(8192), default_tiles(65536)
        (Tiles(forward=4, backward=16), Tiles(forward=4, backward=63))
    """
    return Tiles(4, max(16, pl.cdiv(rows, BLOCKS)))


def why_unsupported(target: Target, case: Case) -> str | None:
    """Why this cannot run a case; None if it can."""
    if case.dtype not in ("bfloat16", "float16", "float32"):
        return f"it needs bfloat16, float16 or float32, not {case.dtype}"
    most = WIDEST_CENTERED if case.center else WIDEST
    if case.width % STEP or case.width > most:
        rows = "a layer norm's width" if case.center else "a width"
        return f"it needs {rows} that is a multiple of {STEP} up to {most}, not {case.width}"
    return None


def _layout(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), VECTOR)


def _load(ref: Any, width: int) -> Any:
    return load_as(ref, _layout(width)).astype(F32)


def _rows_of_block(rows: int, tile: int) -> tuple[Any, Any]:
    """First row of this block, and how many it has."""
    first = lax.axis_index("i") * tile
    return first, tile if rows % tile == 0 else lax.min(jnp.int32(tile), rows - first)


def _statistics(f: Any, width: int, eps: float, center: bool) -> tuple[Any, Any]:
    """The row less its mean (if so), and the factor that normalises it."""
    if center:
        f = f - jnp.sum(f) * (1 / width)
    return f, lax.rsqrt(jnp.sum(f * f) * (1 / width) + eps)


def _forward_kernel(*refs: Any, eps: float, center: bool, bias: bool, residual: bool, tile: int) -> None:
    ins = refs[: 2 + bias + residual]
    y, *h = refs[len(ins) :]
    rows, width = y.shape
    first, count = _rows_of_block(rows, tile)
    weight = _load(ins[1], width)
    added = _load(ins[2], width) if bias else None

    def one(k: Any, _: None) -> None:
        r = first + k
        f = _load(ins[0].at[r], width)
        if residual:
            total = (f + _load(ins[-1].at[r], width)).astype(y.dtype)
            h[0].at[r][...] = total
            f = total.astype(F32)
        f, scale = _statistics(f, width, eps, center)
        out = f * scale * weight
        y.at[r][...] = (out if added is None else out + added).astype(y.dtype)

    lax.fori_loop(0, count, one, None)


def _backward_kernel(*refs: Any, eps: float, center: bool, bias: bool, residual: bool, tile: int) -> None:
    h, weight, dy = refs[:3]
    dx, *sums = refs[3 + residual :]
    rows, width = h.shape
    i = lax.axis_index("i")
    first, count = _rows_of_block(rows, tile)
    loaded_weight = _load(weight, width) if width <= KEPT else None

    def one(k: Any, totals: Any) -> Any:
        r = first + k
        f, scale = _statistics(_load(h.at[r], width), width, eps, center)
        g = _load(dy.at[r], width)
        unit = f * scale
        totals = (totals[0] + g * unit, *([totals[1] + g] if bias else []))
        g = g * (_load(weight, width) if loaded_weight is None else loaded_weight)
        d = g - unit * (jnp.sum(g * unit) * (1 / width))
        if center:
            d = d - jnp.sum(g) * (1 / width)
        d = d * scale
        if residual:
            d = d + _load(refs[3].at[r], width)
        dx.at[r][...] = d.astype(dx.dtype)
        return totals

    zero = full_registers((width,), _layout(width))
    for out, total in zip(sums, lax.fori_loop(0, count, one, (zero,) * len(sums)), strict=True):
        out.at[i][...] = total


def _call(kernel: Any, tile: int, ins: Any, outs: Any, name: str, interpret: Interpret) -> Any:
    rows, width = ins[0].shape
    cost = cost_estimate(FLOP * rows * width, ins, outs, rows)
    grid = (pl.cdiv(rows, tile),)
    return launch(kernel, ins, out_type=outs, grid=grid, grid_names=("i",), name=name, cost=cost, interpret=interpret)


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
    tile = (tiles or default_tiles(x.shape[0])).forward
    ins = [a for a in (x, weight, bias, residual) if a is not None]
    options = {"bias": bias is not None, "residual": residual is not None, "tile": tile}
    kernel = functools.partial(_forward_kernel, eps=eps, center=center, **options)
    outputs = _call(
        kernel, tile, ins, [result_struct(x.shape, x.dtype, *ins)] * (1 + options["residual"]), "norm", interpret
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
    tile = (tiles or default_tiles(rows)).backward
    ins = [a for a in (h, weight, dy, dh) if a is not None]
    options = {"bias": bias is not None, "residual": dh is not None, "tile": tile}
    kernel = functools.partial(_backward_kernel, eps=eps, center=center, **options)
    partial = result_struct((pl.cdiv(rows, tile), width), F32, *ins)
    outs = [result_struct(h.shape, h.dtype, *ins), *[partial] * (1 + options["bias"])]
    dx, *parts = _call(kernel, tile, ins, outs, "norm_backward", interpret)
    sums = [jnp.sum(part, 0) for part in parts]
    return dx, sums[0].astype(weight.dtype), None if bias is None else sums[1].astype(bias.dtype)
