"""The public function of 8-bit AdamW: it checks the arguments and chooses the implementation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import tiles as files
from pallas_kernels.adam8 import reference, tpu
from pallas_kernels.adam8.cases import Case
from pallas_kernels.adam8.maps import MAPS
from pallas_kernels.adam8.reference import HYPER, Settings
from pallas_kernels.compat import Interpret, is_varying
from pallas_kernels.dispatch import Explanation, Implementation, by_platform, choose, without_derivatives
from pallas_kernels.dispatch import explain as explain_choice
from pallas_kernels.target import COMPILED_TPUS, Target, target

GPU_COLS = 32
"""Columns that one block of threads updates, see `gpu.COLS`."""
GPU_BLOCKS = (64, 128, 256)
"""Lengths of blocks, in rows, that fit a warpgroup's registers; with the dynamic map, 256 rows spill a few."""


def _why_unsupported_on_gpu(_: Target, case: Case) -> str | None:
    """The reason why the GPU kernel cannot run a case, or None; defined here so that no GPU module is imported."""
    if case.block not in GPU_BLOCKS:
        return f"it needs blocks of {', '.join(map(str, GPU_BLOCKS))} rows, not {case.block}"
    if case.cols % GPU_COLS:
        return f"it needs columns that are a multiple of {GPU_COLS}, not {case.cols}"
    if case.varying and jax.__version_info__ >= (0, 11):
        return (
            f"kernels of JAX {jax.__version__} cannot change an array in place if its type varies over mesh axes: "
            "give jax.shard_map check_vma=False"
        )
    return None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""All implementations, best first."""

Moment = tuple[Array, Array]
"""The codes and the scales of a moment."""
DEFAULT = Settings()
"""The default hyperparameters."""


def hyper(learning_rate: Any, count: Any, settings: Settings, *, factor: Any = 1.0, is_applied: Any = True) -> Array:
    """Compute the hyperparameters that change from step to step, for `adam8`.

    Args:
        learning_rate: learning rate of this step.
        count: number of updates, this one included.
        settings: the settings that `adam8` gets.
        factor: factor of the gradient, such as one that clips its norm.
        is_applied: whether to update anything; False leaves the parameters and moments unchanged.

    Returns:
        An array of the five numbers that `reference.HYPER` lists, float32 (5,).

    Example:
        >>> [round(number) for number in hyper(2.0, 1, Settings()).tolist()]
        [2, 10, 1000, 1, 1]
    """
    t = jnp.asarray(count, jnp.float32)
    numbers = (learning_rate, 1 / (1 - settings.b1**t), 1 / (1 - settings.b2**t), factor, is_applied)
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def adam8(
    p: Array,
    g: Array,
    m: Moment,
    v: Moment,
    hyper: Array,
    settings: Settings = DEFAULT,
    *,
    implementation: str | None = None,
    platform: str | None = None,
    tiles: tpu.Tiles | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Moment, Moment]:
    r"""Take one step of AdamW with moments in 8 bits, in place if the arrays are donated.

    .. math:: m' = b_1 m + (1 - b_1) g, \quad v' = b_2 v + (1 - b_2) g^2, \quad
        p' = p - \eta \left(\frac{m' / (1 - b_1^t)}{\sqrt{v' / (1 - b_2^t)} + \epsilon} + \lambda p\right)

    The step runs on one device: under a mesh, call it inside `jax.shard_map`; blocks must divide the shards. On Hopper
    with JAX 0.11 or newer, pass `check_vma=False` to `jax.shard_map`; otherwise the reference runs. An element whose
    gradient is NaN or infinite is not updated. The kernels have no derivatives. Matrices may be stacked along leading
    dims of the arrays, or along a dim that `jax.vmap` maps (on Hopper from JAX 0.12 on).

    Args:
        p: parameters (..., R, C), float32.
        g: gradients (..., R, C), float32 or bfloat16.
        m: codes (..., R, C) in the dtype of the map, and scales (..., R / block, C), float32, of the first moment.
        v: codes (..., R, C), uint8, and scales (..., R / block, C), float32, of the second moment.
        hyper: hyperparameters that change from step to step, the result of `hyper`.
        settings: hyperparameters that do not change: block, decays, eps, weight decay, map.
        implementation: "tpu", "gpu" or "reference"; `None` for the best one that can run.
        platform: "tpu v5e", "gpu h200", ...; by default that of the mesh in force, or of the arrays.
        tiles: tiles of the TPU kernel; by default tuned ones, else those of a rule.
        interpret: whether to run the named implementation in Pallas' interpreter; "races" also looks for races.

    Returns:
        Parameters and both moments after the step.

    Raises:
        ValueError: shapes or dtypes do not fit, or a name is unknown.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> settings = Settings(block=2)
        >>> codes, scale = jnp.zeros((2, 1), jnp.int8), jnp.zeros((1, 1))
        >>> p, m, v = adam8(jnp.ones((2, 1)), jnp.ones((2, 1)), (codes, scale), (codes.astype("uint8"), scale),
        ...                 hyper(0.5, 1, settings), settings)
        >>> p.round(3).tolist(), m[0].tolist()
        ([[0.5], [0.5]], [[127], [127]])

    References:
        Dettmers et al. 2021, arXiv 2110.02861; Gonzalez Ortiz et al. 2026, arXiv 2602.23349.
    """
    case = _case(p, g, m, v, hyper, settings)
    call_target = target(platform, p, g, m, v, hyper)
    choice = choose(
        "adam8", IMPLEMENTATIONS, case, call_target, implementation=implementation, interpret=bool(interpret)
    )
    if tiles is not None:
        files.check_tiles("adam8", tiles, implementation, tpu.candidates(case, call_target.chip))

    # wrap the identity, since a custom rule cannot surround a kernel that works in place
    refuse_derivatives = without_derivatives("adam8", lambda *args: args, "derivatives")

    def step_on_tpu(*args: Any) -> Any:
        tpu_tiles = tiles or tiles_for(case, call_target)
        return tpu.step(*refuse_derivatives(*args), settings=settings, case=case, tiles=tpu_tiles, interpret=interpret)

    def step_on_gpu(*args: Any) -> Any:
        from pallas_kernels.adam8 import gpu

        return gpu.step(*refuse_derivatives(*args), settings=settings, case=case, interpret=interpret)

    branches = {
        "tpu": step_on_tpu,
        "gpu": step_on_gpu,
        "reference": functools.partial(reference.step, settings=settings),
    }
    stacked_p, stacked_g, *stacked_moments = (array.reshape(case.layers, -1, case.cols) for array in (p, g, *m, *v))
    stacked_m, stacked_v = tuple(stacked_moments[:2]), tuple(stacked_moments[2:])
    new_p, new_m, new_v = by_platform(choice, branches, stacked_p, stacked_g, stacked_m, stacked_v, hyper)
    return (
        new_p.reshape(p.shape),
        (new_m[0].reshape(p.shape), new_m[1].reshape(m[1].shape)),
        (new_v[0].reshape(p.shape), new_v[1].reshape(v[1].shape)),
    )


def explain(case: Case, platform: str) -> Explanation:
    """Explain which implementation runs a case on a platform, and why the others do not.

    Args:
        case: shapes and options.
        platform: "tpu v5e", "gpu h200", "cpu".

    Example:
        >>> print(explain(Case("mine", 1, 512, 100), "gpu h200"))
        adam8 on gpu h200: reference
          not tpu: it is for TPUs, and the target is gpu
          not gpu: it needs columns that are a multiple of 32, not 100
    """
    return explain_choice("adam8", IMPLEMENTATIONS, case, target(platform))


adam8.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


def has_kernel(shape: tuple[int, ...], block: int, platform: str, map: Any = "soft8") -> bool:
    """Whether a kernel, and not the reference, updates parameters of a shape on a platform.

    Args:
        shape: shape of the parameters on one device, with two dims or more.
        block: number of consecutive elements of a column that share a scale.
        platform: "tpu v5e", "gpu h200", "cpu".
        map: name of the map between moments and codes, in `maps.MAPS`.

    Example:
        >>> has_kernel((4, 512, 64), 256, "tpu v5e"), has_kernel((512, 64), 86, "tpu v5e")
        (True, False)
    """
    case = Case("", math.prod(shape[:-2]), shape[-2], shape[-1], block, map)
    return explain(case, platform).chosen != "reference"


def tile_facts(case: Case) -> dict[str, int | str]:
    """The facts of a case on which tiles depend, by which `tiles.tiles` looks up a tuned entry."""
    return {"map": case.map, "block": case.block, "R": case.rows, "C": case.cols}


def tiles_for(case: Case, target: Target) -> tpu.Tiles:
    """The TPU kernel's tiles for a case on a target: tuned tiles if there are any, else those of the rule."""
    allowed = tpu.candidates(case, target.chip)
    return files.tiles(
        "adam8", target.chip, tile_facts(case), tpu.Tiles, lambda: allowed[0], lambda tiles: tiles in allowed
    )


def _case(p: Array, g: Array, m: Moment, v: Moment, hyper: Array, settings: Settings) -> Case:
    """The shapes and options of a call; raises a ValueError if the arrays do not fit together."""
    if p.ndim < 2 or not p.size:
        raise ValueError(f"adam8: got parameters of shape {p.shape}, expected (..., R, C) without a dim of size 0")
    rows, cols = p.shape[-2:]
    if rows % settings.block:
        raise ValueError(f"adam8: blocks of {settings.block} rows do not divide R of {p.shape}: give another block")
    scale_shape = (*p.shape[:-2], rows // settings.block, cols)
    f32, grad_dtypes = (jnp.float32,), (jnp.float32, jnp.bfloat16)
    expected_by_name = {
        "p": (p, p.shape, f32),
        "g": (g, p.shape, grad_dtypes),
        "codes of m": (m[0], p.shape, (MAPS[settings.map].m_dtype,)),
        "scales of m": (m[1], scale_shape, f32),
        "codes of v": (v[0], p.shape, (jnp.uint8,)),
        "scales of v": (v[1], scale_shape, f32),
        "hyper": (hyper, (HYPER,), f32),
    }
    for name, (array, shape, dtypes) in expected_by_name.items():
        dtype_names = [jnp.dtype(dtype).name for dtype in dtypes]
        if array.shape != shape or array.dtype.name not in dtype_names:
            expected_text = f"{' or '.join(dtype_names)}{list(shape)}"
            raise ValueError(f"adam8: got {name} {array.dtype.name}{list(array.shape)}, expected {expected_text}")
    gradient_dtype: Any = g.dtype.name
    map_name: Any = settings.map
    has_varying = any(is_varying(array) for array in (p, g, *m, *v, hyper))
    layers = math.prod(p.shape[:-2])
    return Case(
        "", layers, rows, cols, settings.block, map_name, gradient_dtype, settings.weight_decay, has_varying, tags=()
    )
