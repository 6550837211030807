"""RMS norm and layer norm over the last dim, of x or of x plus a residual, differentiable on every platform.

The backward pass needs only the sum h of x and the residual, and recomputes the statistics. With a residual, h has the
residual name "norm_sum", so that a rematerialization policy can save it.

The layers of jaxscale do not use these kernels. A norm alone moves half the bytes of XLA's program. Between matrix
products, however, XLA fuses the norm with its neighbors, and a kernel costs more than it saves (both in
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
"""Residual name of the sum of x and the residual."""

_KERNEL_NAMES = ("rms_norm", "layer_norm")
"""Names of the kernels; the index is `center`, which is True if the mean is subtracted."""


def _why_unsupported_on_tpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.norm import tpu

    return tpu.why_unsupported(target, case)


def _why_unsupported_on_gpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.norm import gpu

    return gpu.why_unsupported(target, case)


IMPLEMENTATIONS = (
    Implementation("tpu", "tpu", chips=("v4", *COMPILED_TPUS), why_unsupported=_why_unsupported_on_tpu),
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
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
    """Compute `h / sqrt(mean(h^2) + eps) * weight`, with `h = x + residual`, over the last dim.

    Args:
        x: (..., D) of any floating dtype; statistics and the product with the weight are computed in float32.
        weight: (D,).
        residual: an array of the shape and dtype of x, or None.
        eps: number that is added to the mean square.
        implementation: "tpu", "gpu" or "reference"; None for the best one that can run.
        platform: "gpu h200", "tpu v5e", ...; by default that of the mesh in force, or of the arrays.
        interpret: whether to run the named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        The norm in the dtype of x; with a residual, the norm and h.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        NotImplementedError: the named implementation cannot run this case on the platform.

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
    """Compute `(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`, with `h = x + residual`, over the last dim.

    Args:
        x: (..., D) of any floating dtype; statistics and the product with the weight are computed in float32.
        weight: (D,).
        bias: (D,), or None.
        residual: an array of the shape and dtype of x, or None.
        eps: number that is added to the variance.
        implementation: "tpu", "gpu" or "reference"; None for the best one that can run.
        platform: "gpu h200", "tpu v5e", ...; by default that of the mesh in force, or of the arrays.
        interpret: whether to run the named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        The norm in the dtype of x; with a residual, the norm and h.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    return _norm("layer_norm", x, weight, bias, residual, eps, True, implementation, platform, interpret)


def explain_rms(
    x: Any, weight: Any, residual: Any = None, *, eps: float = 1e-6, implementation: str | None = None, platform: str
) -> dispatch.Explanation:
    """Explain which implementation `rms_norm` would run on a platform, and why it would not run the others.

    Args:
        x, weight, residual, eps, implementation: as in `rms_norm`; arrays may be `jax.ShapeDtypeStruct`.
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
    """Explain which implementation `layer_norm` would run on a platform, and why the others do not.

    Args:
        x, weight, bias, residual, eps, implementation: as in `layer_norm`; arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> layer_norm.explain(jnp.ones((8, 384)), jnp.ones(384), platform="tpu v5e").chosen
        'tpu'
    """
    return explain(_case("layer_norm", x, weight, bias, residual, eps, True), platform, implementation)


rms_norm.explain = explain_rms  # pyright: ignore[reportFunctionMemberAccess]
layer_norm.explain = explain_layer  # pyright: ignore[reportFunctionMemberAccess]


def explain(case: Case, platform: str, implementation: str | None = None) -> dispatch.Explanation:
    """Explain which implementation would run a case on a platform, and why the others do not.

    Example:
        >>> print(explain(Case("wide", 8, 384), "gpu h200"))
        rms_norm on gpu h200: reference
          not tpu: it is for TPUs, and the target is gpu
          not gpu: it needs a width that is a multiple of 512 up to 8192, not 384
    """
    return dispatch.explain(_KERNEL_NAMES[case.center], IMPLEMENTATIONS, case, target_of(platform), implementation)


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
    """Run the kernel `name`, which has this `center`; return the norm or, with a residual, the norm and h."""
    case = _case(name, x, weight, bias, residual, eps, center)
    x_rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(-1, x.shape[-1])
    choice = dispatch.choose(
        name,
        IMPLEMENTATIONS,
        case,
        target_of(platform, x_rows, weight, bias, residual_rows),
        implementation=implementation,
        interpret=bool(interpret),
    )
    # TPUs cannot load float16; casting vectors is cheap, and JAX casts their gradients back
    wide_vectors = (None if vector is None else vector.astype(jnp.float32) for vector in (weight, bias))
    operands = align_varying(x_rows, *wide_vectors, residual_rows)
    y_rows, h_rows = _kernel(choice, float(eps), center, interpret, *operands)
    y, h = y_rows.reshape(x.shape), h_rows.reshape(x.shape)
    return y if residual is None else (y, h)


def _case(name: str, x: Any, weight: Any, bias: Any, residual: Any, eps: Any, center: bool) -> Case:
    """The shapes and options of a call; raises a ValueError if they do not fit."""
    arguments.check_arrays(name, x=x, weight=weight, bias=bias, residual=residual)
    arguments.check_static(name, eps=eps)
    _check_arguments(name, x, weight, bias, residual, eps)
    rows = math.prod(x.shape[:-1])
    return Case(name, rows, x.shape[-1], x.dtype.name, center, bias is not None, residual is not None)


def _check_arguments(name: str, x: Any, weight: Any, bias: Any, residual: Any, eps: float) -> None:
    """Refuse arguments that do not fit together."""
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"{name}: got x of shape {x.shape}, expected (..., D) without a dim of size 0")
    vectors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    for argument, vector in vectors.items():
        if vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: got a {argument} of shape {vector.shape}, expected {x.shape[-1:]}, the last dim of x"
            )
    arrays = vectors | {"x": x} | ({} if residual is None else {"residual": residual})
    for argument, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: got {argument} of type {array.dtype}, expected floating point")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        residual_text = f"{residual.dtype} {residual.shape}"
        raise ValueError(
            f"{name}: got a residual of {residual_text}, expected {x.dtype} {x.shape}, like x: cast one of them"
        )
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"{name}: got eps {eps}, expected at least 0, and finite")


def _branches(pass_name: str, interpret: Interpret, **options: Any) -> Any:
    """The functions that run a pass, "forward" or "backward", by implementation name."""

    def run_on_tpu(*args: Any) -> Any:
        from pallas_kernels.norm import tpu

        return getattr(tpu, pass_name)(*args, interpret=interpret, **options)

    def run_on_gpu(*args: Any) -> Any:
        from pallas_kernels.norm import gpu

        return getattr(gpu, pass_name)(*args, interpret=interpret, **options)

    kernel_name = _KERNEL_NAMES[options["center"]]
    return {
        "tpu": dispatch.without_derivatives(kernel_name, run_on_tpu),
        "gpu": dispatch.without_derivatives(kernel_name, run_on_gpu),
        "reference": functools.partial(getattr(reference, pass_name), **options),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(
    choice: Choice, eps: float, center: bool, interpret: Interpret, x: Any, weight: Any, bias: Any, residual: Any
) -> Any:
    """The norm of x + residual, and that sum; all arrays have one dim of rows, or none."""
    branches = _branches("forward", interpret, eps=eps, center=center)
    return dispatch.by_platform(choice, branches, x, weight, bias, residual)


def _forward(
    choice: Choice, eps: float, center: bool, interpret: Interpret, x: Any, weight: Any, bias: Any, residual: Any
) -> Any:
    """The results of `_kernel`, and the residuals: h, weight, bias and a mark, () if a residual is added, else None."""
    y, unnamed_h = _kernel(choice, eps, center, interpret, x, weight, bias, residual)
    h = x if residual is None else checkpoint_name(unnamed_h, NAMES[0])
    return (y, h), (h, weight, bias, None if residual is None else ())


def _backward(choice: Choice, eps: float, center: bool, interpret: Interpret, residuals: Any, gradients: Any) -> Any:
    """The gradients of x, weight, bias and the residual; None for a bias or a residual that is None."""
    h, weight, bias, residual_mark = residuals
    dy, dh = gradients
    branches = _branches("backward", interpret, eps=eps, center=center)
    used_dh = None if residual_mark is None else dh
    dx, d_weight, d_bias = dispatch.by_platform(choice, branches, h, weight, bias, dy, used_dh)
    return dx, d_weight, d_bias, None if residual_mark is None else dx


_kernel.defvjp(_forward, _backward)
