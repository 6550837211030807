"""The public function of block top-k: checks, and the choice of what runs."""

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
"""See `gpu.COLS`."""
GPU_BLOCKS = (64, 128, 256)
"""Rows of 64 columns that fit the registers of a warpgroup."""
GPU_LANES = 32
"""Along the rows a block lies over as many lanes."""
GPU_LONGEST = 2048
"""Numbers of a block along the rows that fit the registers of a warp."""
GPU_MOST = 128
"""Rounds, each of which looks at every number of the block that is left."""


def _why_unsupported_on_gpu(where: Target, case: Case) -> str | None:
    if case.k > GPU_MOST:
        return f"it needs k of at most {GPU_MOST}, not {case.k}"
    if case.axis == -1:
        if case.block % GPU_LANES or case.block > GPU_LONGEST:
            return f"it needs blocks that are a multiple of {GPU_LANES} up to {GPU_LONGEST}, not {case.block}"
        return None
    if case.block not in GPU_BLOCKS:
        return f"it needs blocks of {', '.join(map(str, GPU_BLOCKS))}, not {case.block}"
    return f"it needs columns that are a multiple of {GPU_COLS}, not {case.cols}" if case.cols % GPU_COLS else None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""Best first."""


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
    r"""The k numbers of largest magnitude of each block, the largest first, and where they lie in it.

    Among equal magnitudes the first in the block wins; a NaN is as large as an infinity. It is code of one device:
    under a mesh call it inside `jax.shard_map`. There is no gradient of its kernels.

    Args:
        x: (R, C), float32 or bfloat16.
        k: kept of each block, from 1 to the block.
        block: numbers of a block; divides the dim that blocks lie along.
        axis: the dim that blocks lie along: -2 or -1.
        implementation: "tpu", "gpu", "reference"; `None`: the best one that can.
        platform: "tpu v5e", "gpu h200", ...; by default what is being traced for.
        tiles: of the TPU's kernel; by default what was tuned, else a rule.
        interpret: interpret the named implementation; "races" also looks for races.

    Returns:
        Values in x's dtype, and places int32, both with k numbers in the place of each block.

    Raises:
        ValueError: shape, dtype, k, block or a name do not fit.
        NotImplementedError: the named implementation cannot run this.

    Example:
        >>> import jax.numpy as jnp
        >>> values, places = top_k(jnp.array([[1.0, -5.0, 0.5, 2.0]]), 2, block=4, axis=-1)
        >>> values.tolist(), places.tolist()
        ([[-5.0, 2.0]], [[1, 3]])

    References:
        Aji and Heafield, 2017, arXiv:1704.05021.
    """
    case = _case(x, k, block, axis)
    where = target(platform, x)
    choice = choose("top_k", IMPLEMENTATIONS, case, where, implementation=implementation, interpret=bool(interpret))
    if tiles is not None:
        files.check_tiles("top_k", tiles, implementation, tpu.candidates(case))

    def on_tpu(x: Array) -> Any:
        return tpu.top_k(x, case=case, tiles=tiles or _tiles(case, where), interpret=interpret)

    def on_gpu(x: Array) -> Any:
        from pallas_kernels.top_k import gpu

        return gpu.top_k(x, case=case, interpret=interpret)

    plain = functools.partial(reference.top_k, k=k, block=block, axis=axis)
    kernels = {
        name: without_derivatives("top_k", run, "derivatives") for name, run in (("tpu", on_tpu), ("gpu", on_gpu))
    }
    return by_platform(choice, kernels | {"reference": plain}, x)


def explain(case: Case, platform: str) -> Explanation:
    """What runs a case on a platform, and why each other implementation does not.

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
    """What tiles of a case are looked up by."""
    return {"dtype": case.dtype, "k": case.k, "axis": str(case.axis), "R": case.rows, "C": case.cols}


def _tiles(case: Case, where: Target) -> tpu.Tiles:
    allowed = tpu.candidates(case)
    return files.tiles("top_k", where.chip, tile_facts(case), tpu.Tiles, lambda: allowed[0], lambda found: found in allowed)


def _case(x: Array, k: int, block: int, axis: int) -> Case:
    """Shapes and options of a call that makes sense."""
    arguments.check_static("top_k", k=k, block=block, axis=axis)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"top_k: got an array of shape {x.shape}, expected (R, C), none of them 0")
    if x.dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"top_k: got {x.dtype.name}, expected float32 or bfloat16")
    if axis not in (-1, -2):
        raise ValueError(f"top_k: got axis {axis}, expected -2 (down the columns) or -1 (along the rows)")
    if block < 1 or x.shape[axis] % block:
        raise ValueError(
            f"top_k: blocks of {block} along dim {axis} of {x.shape}: expected a divisor of {x.shape[axis]}"
        )
    if not 1 <= k <= block:
        raise ValueError(f"top_k: got k {k}, expected 1 to {block}, the numbers of a block")
    dtype: Any = x.dtype.name
    along: Any = axis
    return Case("", x.shape[0], x.shape[1], k, block, along, dtype, tags=())
