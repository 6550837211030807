"""The public functions of quantization: they check the arguments, and choose the implementation."""

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
"""Columns of a tile of the GPU kernel, see `gpu.COLS`."""
GPU_ROWS = 64
"""Rows of a tile of the GPU kernel, see `gpu.ROWS`."""
GPU_BLOCKS = (64, 128, 256)
"""Lengths of blocks, down the columns or along the rows, that fit the registers of a warpgroup."""


def _why_unsupported_on_gpu(_: Target, case: Case) -> str | None:
    """The reason why the GPU kernel cannot run a case, or None; defined here so that no GPU module is imported."""
    blocks = GPU_BLOCKS if case.bits == 8 else GPU_BLOCKS[1:]
    if case.block not in blocks:
        return f"it needs blocks of {', '.join(map(str, blocks))}, not {case.block}"
    if case.axis == -1 and case.cols != case.block:
        return f"it needs rows of one block, not {case.cols} columns in blocks of {case.block}"
    dim_name, length, multiple = ("columns", case.cols, GPU_COLS) if case.axis == -2 else ("rows", case.rows, GPU_ROWS)
    return f"it needs {dim_name} that are a multiple of {multiple}, not {length}" if length % multiple else None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""All implementations, best first."""


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
    r"""Quantize a matrix to integers of 8 or 4 bits, with a float32 scale for each block.

    .. math:: s = \max |x|, \quad code = \mathrm{round}(x L / s), \quad L = 2^{bits - 1} - 1

    This runs on one device: under a mesh, call it inside `jax.shard_map`. The kernels have no derivatives.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        bits: bits of a code, 8 or 4.
        block: number of consecutive elements that share a scale; a divisor of the dim `axis`, even for 4 bits.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).
        implementation: "tpu", "gpu" or "reference"; `None` for the best one that can run.
        platform: "tpu v5e", "gpu h200", ...; by default that of the mesh in force, or of the arrays.
        tiles: tiles of the TPU kernel; by default tuned ones, else those of a rule.
        interpret: whether to run the named implementation in Pallas' interpreter; "races" also looks for races.

    Returns:
        The codes, int8, and the scales, float32. Codes of 8 bits have the shape of `x`. For 4 bits the dim `axis` is
        halved, because a byte has two codes: the low nibbles have the first half of each block. The scales have the
        shape of `x` with the dim `axis` divided by the block.

    Raises:
        ValueError: the shape, the dtype, the bits, the block or a name is not supported.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> x = jnp.array([[7.0, -3.4, 0.0, 1.0]])
        >>> codes, scale = quantize(x, bits=4, block=4, axis=-1)
        >>> scale.tolist(), dequantize(codes, scale, bits=4, block=4, axis=-1).tolist()
        ([[7.0]], [[7.0, -3.0, 0.0, 1.0]])
    """
    case = _case(x, bits, block, axis)
    call_target = target(platform, x)
    choice = choose(
        "quantize", IMPLEMENTATIONS, case, call_target, implementation=implementation, interpret=bool(interpret)
    )
    if tiles is not None:
        files.check_tiles("quantize", tiles, implementation, tpu.candidates(case))

    def quantize_on_tpu(x: Array) -> Any:
        return tpu.quantize(x, case=case, tiles=tiles or _tiles(case, call_target), interpret=interpret)

    def quantize_on_gpu(x: Array) -> Any:
        from pallas_kernels.quantize import gpu

        return gpu.quantize(x, case=case, interpret=interpret)

    branches = {
        "tpu": without_derivatives("quantize", quantize_on_tpu, "derivatives"),
        "gpu": without_derivatives("quantize", quantize_on_gpu, "derivatives"),
        "reference": functools.partial(reference.quantize, bits=bits, block=block, axis=axis),
    }
    return by_platform(choice, branches, x)


def dequantize(codes: Array, scale: Array, *, bits: int = 8, block: int = 128, axis: int = -2) -> Array:
    """Compute the numbers for which codes stand; there is no kernel, because XLA fuses this into later operations.

    Args:
        codes, scale: the results of `quantize`.
        bits, block, axis: the arguments of `quantize`.

    Returns:
        The numbers, float32, in the shape of the matrix that was quantized.

    Raises:
        ValueError: the shapes of codes and scales do not fit each other or the arguments.
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
    """Explain which implementation runs a case on a platform, and why the others do not.

    Args:
        case: shapes and options.
        platform: "tpu v5e", "gpu h200", "cpu".

    Raises:
        ValueError: `quantize` would refuse the case, too.

    Example:
        >>> explain(Case("mine", 512, 4096), "tpu v6e").chosen
        'tpu'
    """
    _check_options((case.rows, case.cols), case.dtype, case.bits, case.block, case.axis)
    return explain_choice("quantize", IMPLEMENTATIONS, case, target(platform))


quantize.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def tile_facts(case: Case) -> dict[str, int | str]:
    """The facts of a case on which tiles depend, by which `tiles.tiles` looks up a tuned entry."""
    return {"dtype": case.dtype, "bits": str(case.bits), "axis": str(case.axis), "R": case.rows, "C": case.cols}


def _tiles(case: Case, target: Target) -> tpu.Tiles:
    """The TPU kernel's tiles for a case on a target: tuned tiles if there are any, else those of the rule."""
    allowed = tpu.candidates(case)
    return files.tiles(
        "quantize", target.chip, tile_facts(case), tpu.Tiles, lambda: allowed[0], lambda tiles: tiles in allowed
    )


def _case(x: Array, bits: Any, block: int, axis: Any) -> Case:
    """The shape and options of a call; raises a ValueError if they are not supported."""
    arguments.check_static("quantize", bits=bits, block=block, axis=axis)
    _check_options(x.shape, x.dtype.name, bits, block, axis)
    dtype: Any = x.dtype.name
    return Case("", x.shape[0], x.shape[1], bits, block, axis, dtype, tags=())


def _check_options(shape: tuple[int, ...], dtype: str, bits: int, block: int, axis: int) -> None:
    """Refuse shapes and options that no implementation supports."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"quantize: got an array of shape {shape}, expected (R, C) without a dim of size 0")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"quantize: got {dtype}, expected float32 or bfloat16")
    if bits not in (8, 4):
        raise ValueError(f"quantize: got {bits} bits, expected 8 or 4")
    if axis not in (-1, -2):
        raise ValueError(f"quantize: got axis {axis}, expected -2 (down the columns) or -1 (along the rows)")
    if block < 1 or shape[axis] % block or (bits == 4 and block % 2):
        article = "an even" if bits == 4 else "a"
        raise ValueError(
            f"quantize: got blocks of {block} along dim {axis} of {shape}, expected {article} divisor of {shape[axis]}"
        )
