"""The public function of block top-k: it checks the arguments and chooses the implementation."""

import functools
from typing import Any

from jax import Array

from pallas_kernels import arguments
from pallas_kernels import tiles as files
from pallas_kernels.compat import Interpret
from pallas_kernels.dispatch import Explanation, Implementation, by_platform, choose, without_derivatives
from pallas_kernels.dispatch import explain as explain_choice
from pallas_kernels.target import COMPILED_TPUS, Target, target
from pallas_kernels.top_k import reference, tpu
from pallas_kernels.top_k.cases import Case

GPU_COLS = 64
"""Columns of a tile of the GPU kernel, see `gpu.COLS`."""
GPU_BLOCKS = (64, 128, 256)
"""Lengths of blocks down 64 columns that fit the registers of a warpgroup."""
GPU_LANES = 32
"""Lanes of a warp, over which a block along the rows is spread."""
GPU_MAX_ROW_LENGTH = 2048
"""The largest block along the rows that fits the registers of a warp."""
GPU_MAX_K = 128
"""The largest k: the kernel takes k rounds over all elements."""


def _why_unsupported_on_gpu(_: Target, case: Case) -> str | None:
    """The reason why the GPU kernel cannot run a case, or None; defined here so that no GPU module is imported."""
    if case.k > GPU_MAX_K:
        return f"it needs k of at most {GPU_MAX_K}, not {case.k}"
    if case.axis == -1:
        if case.block % GPU_LANES or case.block > GPU_MAX_ROW_LENGTH:
            return f"it needs blocks that are a multiple of {GPU_LANES} up to {GPU_MAX_ROW_LENGTH}, not {case.block}"
        return None
    if case.block not in GPU_BLOCKS:
        return f"it needs blocks of {', '.join(map(str, GPU_BLOCKS))}, not {case.block}"
    return f"it needs columns that are a multiple of {GPU_COLS}, not {case.cols}" if case.cols % GPU_COLS else None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""All implementations, best first."""


def top_k(
    x: Array,
    k: int,
    *,
    block: int = 128,
    axis: int = -2,
    implementation: str | None = None,
    platform: str | None = None,
    tiles: tpu.Tiles | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Array]:
    r"""Select the k elements of largest magnitude from each block of a matrix.

    Of equal magnitudes, the first in the block is taken first; NaN is as large as infinity. This runs on one device:
    under a mesh, call it inside `jax.shard_map`. The kernels have no derivatives.

    Args:
        x: the matrix (R, C), float32 or bfloat16.
        k: number of elements to select from each block, from 1 to `block`.
        block: number of elements of a block; a divisor of the dim `axis`.
        axis: the dim along which blocks lie: -2 (down the columns) or -1 (along the rows).
        implementation: "tpu", "gpu" or "reference"; `None` for the best one that can run.
        platform: "tpu v5e", "gpu h200", ...; by default that of the mesh in force, or of the arrays.
        tiles: tiles of the TPU kernel; by default tuned ones, else those of a rule.
        interpret: whether to run the named implementation in Pallas' interpreter; "races" also looks for races.

    Returns:
        The values in the dtype of `x`, and their indices in the block, int32. Both have the shape of `x`, except that
        along the dim `axis` each block is replaced by k elements, the largest first.

    Raises:
        ValueError: the shape, the dtype, k, the block or a name is not supported.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> import jax.numpy as jnp
        >>> values, indices = top_k(jnp.array([[1.0, -5.0, 0.5, 2.0]]), 2, block=4, axis=-1)
        >>> values.tolist(), indices.tolist()
        ([[-5.0, 2.0]], [[1, 3]])

    References:
        Aji and Heafield, 2017, arXiv:1704.05021.
    """
    case = _case(x, k, block, axis)
    call_target = target(platform, x)
    choice = choose(
        "top_k", IMPLEMENTATIONS, case, call_target, implementation=implementation, interpret=bool(interpret)
    )
    if tiles is not None:
        files.check_tiles("top_k", tiles, implementation, tpu.candidates(case))

    def top_k_on_tpu(x: Array) -> Any:
        return tpu.top_k(x, case=case, tiles=tiles or _tiles(case, call_target), interpret=interpret)

    def top_k_on_gpu(x: Array) -> Any:
        from pallas_kernels.top_k import gpu

        return gpu.top_k(x, case=case, interpret=interpret)

    branches = {
        "tpu": without_derivatives("top_k", top_k_on_tpu, "derivatives"),
        "gpu": without_derivatives("top_k", top_k_on_gpu, "derivatives"),
        "reference": functools.partial(reference.top_k, k=k, block=block, axis=axis),
    }
    return by_platform(choice, branches, x)


def explain(case: Case, platform: str) -> Explanation:
    """Explain which implementation runs a case on a platform, and why the others do not.

    Args:
        case: shapes and options.
        platform: "tpu v5e", "gpu h200", "cpu".

    Example:
        >>> print(explain(Case("mine", 512, 1000, 10, block=1000, axis=-1), "gpu h200"))
        top_k on gpu h200: reference
          not tpu: it is for TPUs, and the target is gpu
          not gpu: it needs blocks that are a multiple of 32 up to 2048, not 1000
    """
    return explain_choice("top_k", IMPLEMENTATIONS, case, target(platform))


top_k.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def tile_facts(case: Case) -> dict[str, int | str]:
    """The facts of a case on which tiles depend, by which `tiles.tiles` looks up a tuned entry."""
    return {"dtype": case.dtype, "k": case.k, "axis": str(case.axis), "R": case.rows, "C": case.cols}


def _tiles(case: Case, target: Target) -> tpu.Tiles:
    """The TPU kernel's tiles for a case on a target: tuned tiles if there are any, else those of the rule."""
    allowed = tpu.candidates(case)
    return files.tiles(
        "top_k", target.chip, tile_facts(case), tpu.Tiles, lambda: allowed[0], lambda tiles: tiles in allowed
    )


def _case(x: Array, k: int, block: int, axis: Any) -> Case:
    """The shape and options of a call; raises a ValueError if they are not supported."""
    arguments.check_static("top_k", k=k, block=block, axis=axis)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"top_k: got an array of shape {x.shape}, expected (R, C) without a dim of size 0")
    if x.dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"top_k: got {x.dtype.name}, expected float32 or bfloat16")
    if axis not in (-1, -2):
        raise ValueError(f"top_k: got axis {axis}, expected -2 (down the columns) or -1 (along the rows)")
    if block < 1 or x.shape[axis] % block:
        raise ValueError(
            f"top_k: got blocks of {block} along dim {axis} of {x.shape}, expected a divisor of {x.shape[axis]}"
        )
    if not 1 <= k <= block:
        raise ValueError(f"top_k: got k={k}, expected 1 to {block}, the number of elements of a block")
    dtype: Any = x.dtype.name
    return Case("", x.shape[0], x.shape[1], k, block, axis, dtype, tags=())
