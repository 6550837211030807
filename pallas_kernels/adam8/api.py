"""The public function of 8-bit AdamW: checks, and the choice of what runs."""

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
"""Columns that one block of threads takes, see `gpu.COLS`."""
GPU_BLOCKS = (64, 128, 256)
"""Rows that a warpgroup holds in registers; 256 with the dynamic map spill a few."""


def _why_unsupported_on_gpu(where: Target, case: Case) -> str | None:
    if case.block not in GPU_BLOCKS:
        return f"it needs blocks of {', '.join(map(str, GPU_BLOCKS))} rows, not {case.block}"
    if case.cols % GPU_COLS:
        return f"it needs columns that are a multiple of {GPU_COLS}, not {case.cols}"
    if case.varying and jax.__version_info__ >= (0, 11):
        return (
            f"kernels of JAX {jax.__version__} change no array in place whose type says that it varies over mesh "
            "axes: give jax.shard_map check_vma=False"
        )
    return None


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=tpu.why_unsupported),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("reference"),
)
"""Best first."""

Moment = tuple[Array, Array]
"""Codes and scales."""
DEFAULT = Settings()


def hyper(learning_rate: Any, count: Any, settings: Settings, *, factor: Any = 1.0, go: Any = True) -> Array:
    """The numbers that change from step to step, as `adam8` takes them.

    Args:
        learning_rate: of this step.
        count: updates made, this one included.
        settings: of `adam8`.
        factor: of the gradient, such as what clips it.
        go: false leaves everything as it is.

    Returns:
        float32 (5,).

    Example:
        >>> [round(one) for one in hyper(2.0, 1, Settings()).tolist()]
        [2, 10, 1000, 1, 1]
    """
    count = jnp.asarray(count, jnp.float32)
    numbers = (learning_rate, 1 / (1 - settings.b1**count), 1 / (1 - settings.b2**count), factor, go)
    return jnp.stack([jnp.asarray(one, jnp.float32) for one in numbers])


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
    r"""One step of AdamW whose moments are kept in 8 bits, in place where the arrays are donated.

    .. math:: m' = b_1 m + (1 - b_1) g, \quad v' = b_2 v + (1 - b_2) g^2, \quad
        p' = p - \eta \left(\frac{m' / (1 - b_1^t)}{\sqrt{v' / (1 - b_2^t)} + \epsilon} + \lambda p\right)

    It is code of one device: under a mesh call it inside `jax.shard_map`, where blocks divide the shards; on Hopper
    from JAX 0.11 on with `check_vma=False`, without which it is the reference. An element
    with a NaN or infinity in its gradient stays as it is. There is no gradient of its kernels. Give leading dims, or
    map it by `jax.vmap` (on Hopper from JAX 0.12 on).

    Args:
        p: parameters (..., R, C), float32.
        g: gradients of that shape, float32 or bfloat16.
        m: codes (..., R, C) in the dtype of the map, and scales (..., R / block, C), float32, of the first moment.
        v: codes uint8 and scales of the second moment.
        hyper: of `hyper`.
        settings: block, decays, map.
        implementation: "tpu", "gpu", "reference"; `None`: the best one that can.
        platform: "tpu v5e", "gpu h200", ...; by default what is being traced for.
        tiles: of the TPU's kernel; by default what was tuned, else a rule.
        interpret: interpret the named implementation; "races" also looks for races.

    Returns:
        Parameters and both moments after the step.

    Raises:
        ValueError: shapes, dtypes or names do not fit.
        NotImplementedError: the named implementation cannot run this.

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
    where = target(platform, p, g, m, v, hyper)
    choice = choose("adam8", IMPLEMENTATIONS, case, where, implementation=implementation, interpret=bool(interpret))
    if tiles is not None:
        files.check_tiles("adam8", tiles, implementation, tpu.candidates(case, where.chip))

    # of the arguments alone: what writes where they lie takes no rule around it
    refusing = without_derivatives("adam8", lambda *given: given, "derivatives")

    def on_tpu(p: Any, g: Any, m: Any, v: Any, hyper: Any) -> Any:
        p, g, m, v, hyper = refusing(p, g, m, v, hyper)
        return tpu.step(
            p, g, m, v, hyper, settings, case=case, tiles=tiles or tiles_for(case, where), interpret=interpret
        )

    def on_gpu(p: Any, g: Any, m: Any, v: Any, hyper: Any) -> Any:
        from pallas_kernels.adam8 import gpu

        p, g, m, v, hyper = refusing(p, g, m, v, hyper)
        return gpu.step(p, g, m, v, hyper, settings, case=case, interpret=interpret)

    branches = {"tpu": on_tpu, "gpu": on_gpu, "reference": functools.partial(reference.step, settings=settings)}
    flat = [one.reshape(case.layers, -1, case.cols) for one in (p, g, *m, *v)]
    new, new_m, new_v = by_platform(choice, branches, *flat[:2], tuple(flat[2:4]), tuple(flat[4:]), hyper)
    return (
        new.reshape(p.shape),
        (new_m[0].reshape(p.shape), new_m[1].reshape(m[1].shape)),
        (new_v[0].reshape(p.shape), new_v[1].reshape(v[1].shape)),
    )


def explain(case: Case, platform: str) -> Explanation:
    """What runs a case on a platform, and why each other implementation does not.

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


def runs(shape: tuple[int, ...], block: int, platform: str, map: Any = "soft8") -> bool:
    """Whether a kernel steps parameters of a shape on a platform; else it is the reference.

    Args:
        shape: of the parameters on one device, two dims or more.
        block: rows of a column that share a scale.
        platform: "tpu v5e", "gpu h200", "cpu".
        map: of the codes, a name of `maps.MAPS`.

    Example:
        >>> runs((4, 512, 64), 256, "tpu v5e"), runs((512, 64), 86, "tpu v5e")
        (True, False)
    """
    case = Case("", math.prod(shape[:-2]), shape[-2], shape[-1], block, map)
    return explain(case, platform).chosen != "reference"


def facts(case: Case) -> dict[str, int | str]:
    """What tiles of a case are looked up by."""
    return {"map": case.map, "block": case.block, "R": case.rows, "C": case.cols}


def tiles_for(case: Case, where: Target) -> tpu.Tiles:
    """Tiles of the TPU kernel for a case on a chip: the tuned ones, else the rule's."""
    allowed = tpu.candidates(case, where.chip)
    return files.tiles("adam8", where.chip, facts(case), tpu.Tiles, lambda: allowed[0], lambda found: found in allowed)


def _case(p: Array, g: Array, m: Moment, v: Moment, hyper: Array, settings: Settings) -> Case:
    """Shapes and options of a call that makes sense."""
    if p.ndim < 2 or not p.size:
        raise ValueError(f"adam8: got parameters of shape {p.shape}, expected (..., R, C), none of them 0")
    rows, cols = p.shape[-2:]
    if rows % settings.block:
        raise ValueError(f"adam8: blocks of {settings.block} rows do not divide R of {p.shape}: give another block")
    scale = (*p.shape[:-2], rows // settings.block, cols)
    f32, float_types = (jnp.float32,), (jnp.float32, jnp.bfloat16)
    expected = {
        "p": (p, p.shape, f32),
        "g": (g, p.shape, float_types),
        "codes of m": (m[0], p.shape, (MAPS[settings.map].m_dtype,)),
        "scales of m": (m[1], scale, f32),
        "codes of v": (v[0], p.shape, (jnp.uint8,)),
        "scales of v": (v[1], scale, f32),
        "hyper": (hyper, (HYPER,), f32),
    }
    for name, (array, shape, dtypes) in expected.items():
        names = [jnp.dtype(dtype).name for dtype in dtypes]
        if array.shape != shape or array.dtype.name not in names:
            raise ValueError(
                f"adam8: got {name} {array.dtype.name}{list(array.shape)}, expected {' or '.join(names)}{list(shape)}"
            )
    gradient: Any = g.dtype.name
    kind: Any = settings.map
    varying = any(is_varying(dtype) for dtype in (p, g, *m, *v, hyper))
    layers = math.prod(p.shape[:-2])
    return Case("", layers, rows, cols, settings.block, kind, gradient, settings.weight_decay, varying, tags=())
