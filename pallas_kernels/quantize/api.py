"""The public functions of quantization: checks, and the choice of what runs."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import arguments
from pallas_kernels import tiles as files
from pallas_kernels.compat import Interpret
from pallas_kernels.dispatch import Explanation, Implementation, by_platform, choose, without_derivatives
from pallas_kernels.dispatch import explain as explain_choice
from pallas_kernels.quantize import reference, tpu
from pallas_kernels.quantize.cases import Case
from pallas_kernels.target import COMPILED_TPUS, Target, target

GPU_COLS = 64
"""See `gpu.COLS`."""
GPU_ROWS = 64
"""See `gpu.ROWS`."""
GPU_BLOCKS = (64, 128, 256)
"""Numbers of a block that fit the registers of a warpgroup, whichever way it lies."""


def _why_unsupported_on_gpu(where: Target, case: Case) -> str | None:
    blocks = GPU_BLOCKS if case.bits == 8 else GPU_BLOCKS[1:]
    if case.block not in blocks:
        return f"it needs blocks of {', '.join(map(str, blocks))}, not {case.block}"
    if case.axis == -1 and case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    lines, length, multiple = ("columns", case.cols, GPU_COLS) if case.axis == -2 else ("rows", case.rows, GPU_ROWS)
    return f"it needs {lines} that are a multiple of {multiple}, not {length}" if length % multiple else None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""Best first."""


def quantize(
    x: Array,
    *,
    bits: int = 8,
    block: int = 128,
    axis: int = -2,
    implementation: str | None = None,
    platform: str | None = None,
    tiles: tpu.Tiles | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Array]:
    r"""Floats as whole numbers of 8 or 4 bits, a float32 scale for each block.

    .. math:: s = \max |x|, \quad code = \mathrm{round}(x L / s), \quad L = 2^{bits - 1} - 1

    It is code of one device: under a mesh call it inside `jax.shard_map`. There is no gradient of its kernels.

    Args:
        x: (R, C), float32 or bfloat16.
        bits: of a code, 8 or 4.
        block: numbers that share a scale; divides the dim that blocks lie along, and is even where bits are 4.
        axis: the dim that blocks lie along: -2 or -1.
        implementation: "tpu", "gpu", "reference"; `None`: the best one that can.
        platform: "tpu v5e", "gpu h200", ...; by default what is being traced for.
        tiles: of the TPU's kernel; by default what was tuned, else a rule.
        interpret: interpret the named implementation; "races" also looks for races.

    Returns:
        Codes int8 in x's shape; of 4 bits two in a byte, that dim halved, the first half of each block in the low
        nibbles. Scales, float32, that dim divided by the block.

    Raises:
        ValueError: shape, dtype, bits, block or a name do not fit.
        NotImplementedError: the named implementation cannot run this.

    Example:
        >>> x = jnp.array([[7.0, -3.4, 0.0, 1.0]])
        >>> codes, scale = quantize(x, bits=4, block=4, axis=-1)
        >>> scale.tolist(), dequantize(codes, scale, bits=4, block=4, axis=-1).tolist()
        ([[7.0]], [[7.0, -3.0, 0.0, 1.0]])
    """
    case = _case(x, bits, block, axis)
    where = target(platform, x)
    choice = choose("quantize", IMPLEMENTATIONS, case, where, implementation=implementation, interpret=bool(interpret))
    if tiles is not None:
        files.check_tiles("quantize", tiles, implementation, tpu.candidates(case))

    def on_tpu(x: Array) -> Any:
        return tpu.quantize(x, case=case, tiles=tiles or _tiles(case, where), interpret=interpret)

    def on_gpu(x: Array) -> Any:
        from pallas_kernels.quantize import gpu

        return gpu.quantize(x, case=case, interpret=interpret)

    plain = functools.partial(reference.quantize, bits=bits, block=block, axis=axis)
    kernels = {
        name: without_derivatives("quantize", run, "derivatives") for name, run in (("tpu", on_tpu), ("gpu", on_gpu))
    }
    return by_platform(choice, kernels | {"reference": plain}, x)


def dequantize(codes: Array, scale: Array, *, bits: int = 8, block: int = 128, axis: int = -2) -> Array:
    """What codes stand for: no kernel, for XLA makes it part of whatever reads it.

    Args:
        codes: of `quantize`.
        scale: of `quantize`.
        bits: of a code.
        block: numbers that share a scale.
        axis: as there.

    Returns:
        float32, in the shape of what was quantized.

    Raises:
        ValueError: codes and scales are not of each other.
    """
    codes_per_block = block // 2 if bits == 4 else block
    scale_shape = list(codes.shape)
    if axis in (-1, -2) and codes.ndim == 2:
        scale_shape[axis] //= codes_per_block
    if codes.dtype != jnp.int8 or codes.ndim != 2 or scale.shape != tuple(scale_shape):
        raise ValueError(
            f"dequantize: got codes {codes.dtype.name}{list(codes.shape)} and scales {list(scale.shape)}, expected "
            f"int8 (R, C) and scales {scale_shape} for {bits} bits in blocks of {block} along dim {axis}"
        )
    return reference.dequantize(codes, scale, bits=bits, block=block, axis=axis)


def explain(case: Case, platform: str) -> Explanation:
    """What runs a case on a platform, and why each other implementation does not.

    Args:
        case: shapes and options.
        platform: "tpu v5e", "gpu h200", "cpu".

    Raises:
        ValueError: what `quantize` refuses, too.

    Example:
        >>> explain(Case("mine", 512, 4096), "tpu v6e").chosen
        'tpu'
    """
    _check((case.rows, case.cols), case.dtype, case.bits, case.block, case.axis)
    return explain_choice("quantize", IMPLEMENTATIONS, case, target(platform))


quantize.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def tile_facts(case: Case) -> dict[str, int | str]:
    """What tiles of a case are looked up by."""
    return {"dtype": case.dtype, "bits": str(case.bits), "axis": str(case.axis), "R": case.rows, "C": case.cols}


def _tiles(case: Case, where: Target) -> tpu.Tiles:
    allowed = tpu.candidates(case)
    return files.tiles(
        "quantize", where.chip, tile_facts(case), tpu.Tiles, lambda: allowed[0], lambda found: found in allowed
    )


def _case(x: Array, bits: int, block: int, axis: int) -> Case:
    """Shapes and options of a call that makes sense."""
    arguments.check_static("quantize", bits=bits, block=block, axis=axis)
    _check(x.shape, x.dtype.name, bits, block, axis)
    dtype: Any = x.dtype.name
    width: Any = bits
    along: Any = axis
    return Case("", x.shape[0], x.shape[1], width, block, along, dtype, tags=())


def _check(shape: tuple[int, ...], dtype: str, bits: int, block: int, axis: int) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"quantize: got an array of shape {shape}, expected (R, C), none of them 0")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"quantize: got {dtype}, expected float32 or bfloat16")
    if bits not in (8, 4):
        raise ValueError(f"quantize: got {bits} bits, expected 8 or 4")
    if axis not in (-1, -2):
        raise ValueError(f"quantize: got axis {axis}, expected -2 (down the columns) or -1 (along the rows)")
    if block < 1 or shape[axis] % block or (bits == 4 and block % 2):
        kind = "an even" if bits == 4 else "a"
        raise ValueError(
            f"quantize: blocks of {block} along dim {axis} of {shape}: expected {kind} divisor of {shape[axis]}"
        )
