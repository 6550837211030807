"""RMS norm and layer norm over the last dim, of x or of x plus a residual, differentiable on every platform.

The gradient comes from the sum alone: statistics are computed again in the backward. With a residual the sum carries
the residual name "norm_sum", so that a rematerialization policy may keep it.

The layers of jaxscale do not take these kernels by themselves. Alone they move half the bytes of XLA's program; between
products, where XLA fuses the norm with its neighbours, a kernel costs more than it saves (both in
`tests/kernels/test_norm_compiled.py`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import arguments, dispatch
from pallas_kernels.compat import Interpret, align_varying
from pallas_kernels.dispatch import Choice, Implementation
from pallas_kernels.norm import reference
from pallas_kernels.norm.cases import Case
from pallas_kernels.target import COMPILED_TPUS, Target
from pallas_kernels.target import target as target_of

NAMES = ("norm_sum",)
"""Names of residuals."""

_NAMES = ("rms_norm", "layer_norm")
"""Of the kernels, by whether the mean is subtracted."""


def _tpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.norm import tpu

    return tpu.why_unsupported(target, case)


def _gpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.norm import gpu

    return gpu.why_unsupported(target, case)


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=_tpu),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_gpu),
    Implementation("reference"),
)


def rms_norm(
    x: Any,
    weight: Any,
    residual: Any = None,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> Any:
    """`h / sqrt(mean(h^2) + eps) * weight`, with `h = x + residual`, over the last dim.

    Args:
        x: (..., D). Statistics and the gain are computed in float32, whatever its type.
        weight: (D,).
        residual: as x, or None.
        eps: added to the mean square.
        implementation: "tpu", "gpu", "reference", or None for the best that runs.
        platform: what it is traced for, such as "gpu h200"; by default what `target.target` finds.
        interpret: interpret the named kernel, for tests: True, or "races" to look for races too.

    Returns:
        The norm, in the type of x; with a residual (norm, h).

    Raises:
        ValueError: shapes, types or options that do not fit.
        NotImplementedError: the named implementation cannot run this.

    Example:
        >>> rms_norm(jnp.full((1, 4), 3.0), jnp.ones(4), eps=0.0).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
        >>> y, h = rms_norm(jnp.full((1, 4), 3.0), jnp.ones(4), jnp.ones((1, 4)), eps=0.0)
        >>> h.tolist()
        [[4.0, 4.0, 4.0, 4.0]]
    """
    return _norm("rms_norm", x, weight, None, residual, eps, False, implementation, platform, interpret)


def layer_norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> Any:
    """`(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`, with `h = x + residual`, over the last dim.

    Args:
        x: (..., D). Statistics and the gain are computed in float32, whatever its type.
        weight: (D,).
        bias: (D,), or None.
        residual: as x, or None.
        eps: added to the variance.
        implementation: "tpu", "gpu", "reference", or None for the best that runs.
        platform: what it is traced for, such as "gpu h200"; by default what `target.target` finds.
        interpret: interpret the named kernel, for tests: True, or "races" to look for races too.

    Returns:
        The norm, in the type of x; with a residual (norm, h).

    Raises:
        ValueError: shapes, types or options that do not fit.
        NotImplementedError: the named implementation cannot run this.

    Example:
        >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    return _norm("layer_norm", x, weight, bias, residual, eps, True, implementation, platform, interpret)


def explain_rms(
    x: Any, weight: Any, residual: Any = None, *, eps: float = 1e-6, implementation: str | None = None, platform: str
) -> dispatch.Explanation:
    """What `rms_norm` would run on a platform, and why each other implementation would not be taken.

    Args:
        x, weight, residual, eps, implementation: as of `rms_norm`; arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> rms_norm.explain(jnp.ones((8, 384)), jnp.ones(384), platform="gpu h200").reasons["gpu"]
        'it needs a width that is a multiple of 512 up to 8192, not 384'
    """
    return explain(_case("rms_norm", x, weight, None, residual, eps, False), platform, implementation)


def explain_layer(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
    platform: str,
) -> dispatch.Explanation:
    """What `layer_norm` would run on a platform, and why each other implementation would not be taken.

    Args:
        x, weight, bias, residual, eps, implementation: as of `layer_norm`; arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> layer_norm.explain(jnp.ones((8, 384)), jnp.ones(384), platform="tpu v5e").chosen
        'tpu'
    """
    return explain(_case("layer_norm", x, weight, bias, residual, eps, True), platform, implementation)


rms_norm.explain = explain_rms  # pyright: ignore[reportFunctionMemberAccess]
layer_norm.explain = explain_layer  # pyright: ignore[reportFunctionMemberAccess]


def explain(case: Case, platform: str, implementation: str | None = None) -> dispatch.Explanation:
    """What would run a case on a platform, and why each other implementation would not.

    Example:
        >>> print(explain(Case("wide", 8, 384), "gpu h200"))
        rms_norm on gpu h200: reference
          not tpu: it is for TPUs, and the target is gpu
          not gpu: it needs a width that is a multiple of 512 up to 8192, not 384
    """
    return dispatch.explain(_NAMES[case.center], IMPLEMENTATIONS, case, target_of(platform), implementation)


def _norm(
    name: str,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    eps: float,
    center: bool,
    implementation: str | None,
    platform: str | None,
    interpret: Interpret,
) -> Any:
    case = _case(name, x, weight, bias, residual, eps, center)
    shape = x.shape
    flat = None if residual is None else residual.reshape(-1, shape[-1])
    x = x.reshape(-1, shape[-1])
    choice = dispatch.choose(
        name,
        IMPLEMENTATIONS,
        case,
        target_of(platform, x, weight, bias, flat),
        implementation=implementation,
        interpret=bool(interpret),
    )
    # TPUs load no float16; a row costs nothing, and its gradient comes back in its type
    vectors = (None if one is None else one.astype(jnp.float32) for one in (weight, bias))
    x, weight, bias, flat = align_varying(x, *vectors, flat)
    y, h = _kernel(choice, float(eps), center, interpret, x, weight, bias, flat)
    y, h = y.reshape(shape), h.reshape(shape)
    return y if residual is None else (y, h)


def _case(name: str, x: Any, weight: Any, bias: Any, residual: Any, eps: Any, center: bool) -> Case:
    """Shapes and options of a call that makes sense."""
    arguments.check_arrays(name, x=x, weight=weight, bias=bias, residual=residual)
    arguments.check_static(name, eps=eps)
    _check(name, x, weight, bias, residual, eps)
    rows = math.prod(x.shape[:-1])
    return Case(name, rows, x.shape[-1], x.dtype.name, center, bias is not None, residual is not None)


def _check(name: str, x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> None:
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"{name}: got x of shape {x.shape}, expected (..., D) with nothing empty")
    vectors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    for what, one in vectors.items():
        if one.shape != x.shape[-1:]:
            raise ValueError(f"{name}: got a {what} of shape {one.shape}, expected {x.shape[-1:]}, the last dim of x")
    arrays = vectors | {"x": x} | ({} if residual is None else {"residual": residual})
    for what, one in arrays.items():
        if not jnp.issubdtype(one.dtype, jnp.floating):
            raise ValueError(f"{name}: got {what} of type {one.dtype}, expected floating point")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        got = f"{residual.dtype} {residual.shape}"
        raise ValueError(f"{name}: got a residual of {got}, expected {x.dtype} {x.shape}, as x: cast one of them")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"{name}: got eps {eps}, expected at least 0, and finite")


def _branches(what: str, interpret: Interpret, **options: Any) -> Any:
    """Implementations of "forward" or "backward", by name."""

    def tpu(*args: Any) -> Any:
        from pallas_kernels.norm import tpu

        return getattr(tpu, what)(*args, interpret=interpret, **options)

    def gpu(*args: Any) -> Any:
        from pallas_kernels.norm import gpu

        return getattr(gpu, what)(*args, interpret=interpret, **options)

    kernels = {
        way: dispatch.without_derivatives(_NAMES[options["center"]], run) for way, run in (("tpu", tpu), ("gpu", gpu))
    }
    return kernels | {"reference": functools.partial(getattr(reference, what), **options)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(
    choice: Choice, eps: float, center: bool, interpret: Interpret, x: Any, weight: Any, bias: Any, residual: Any
) -> Any:
    """The norm of x + residual, and the sum."""
    branches = _branches("forward", interpret, eps=eps, center=center)
    return dispatch.by_platform(choice, branches, x, weight, bias, residual)


def _forward(
    choice: Choice, eps: float, center: bool, interpret: Interpret, x: Any, weight: Any, bias: Any, residual: Any
) -> Any:
    y, h = _kernel(choice, eps, center, interpret, x, weight, bias, residual)
    h = x if residual is None else checkpoint_name(h, NAMES[0])
    return (y, h), (h, weight, bias, None if residual is None else ())


def _backward(choice: Choice, eps: float, center: bool, interpret: Interpret, saved: Any, gradients: Any) -> Any:
    h, weight, bias, residual = saved
    dy, dh = gradients
    branches = _branches("backward", interpret, eps=eps, center=center)
    dh = None if residual is None else dh
    dx, d_weight, d_bias = dispatch.by_platform(choice, branches, h, weight, bias, dy, dh)
    return dx, d_weight, d_bias, None if residual is None else dx


_kernel.defvjp(_forward, _backward)
