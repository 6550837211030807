"""Grouped matmul: each row, sorted by group, times the matrix of its group, with both gradients on every platform.

On TPU `jax.lax.ragged_dot` runs, which already is a kernel there. On GPU `ragged_dot` is dense and does E times the
work, so on Hopper our kernel runs instead. Traced sizes of groups cannot be checked, so the result is defined for all
sizes: a negative size counts as 0, and if the sizes add up to more than M, the excess is ignored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_kernels import arguments, dispatch
from pallas_kernels.compat import Interpret, align_varying
from pallas_kernels.dispatch import Choice, Implementation
from pallas_kernels.grouped_matmul import ragged, reference
from pallas_kernels.grouped_matmul.cases import ROW_MULTIPLE, Case
from pallas_kernels.target import Target
from pallas_kernels.target import target as target_of


def _why_unsupported_on_gpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.grouped_matmul import gpu

    return gpu.why_unsupported(target, case)


IMPLEMENTATIONS = (
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_why_unsupported_on_gpu),
    Implementation("ragged"),
    Implementation("reference", needs_name=True),
)


def grouped_matmul(
    x: Any,
    w: Any,
    sizes: Any,
    *,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> Any:
    """Compute `y[m] = x[m] @ w[e]`, where e is the group of row m; rows after the last group give 0.

    Args:
        x: rows sorted by group (M, D).
        w: one matrix per group (E, D, F), in the dtype of x. Sums are float32.
        sizes: number of rows of each group, (E,) integers; a size may be 0, and their sum may be less than M.
        implementation: "gpu" (Hopper), "ragged" (`jax.lax.ragged_dot`) or "reference"; None for the best one that can
            run.
        platform: "gpu h200", "tpu v5e", ...; by default that of the mesh in force, or of the arrays.
        interpret: whether to run the named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        y (M, F) in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit; or the sizes are known during tracing, and one is negative or their sum
            is more than M.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> grouped_matmul(jnp.ones((3, 1)), jnp.array([[[2.0]], [[5.0]]]), jnp.array([1, 1])).tolist()
        [[2.0], [5.0], [0.0]]
    """
    case = _case(x, w, sizes)
    choice = dispatch.choose(
        "grouped_matmul",
        IMPLEMENTATIONS,
        case,
        target_of(platform, x, w, sizes),
        implementation=implementation,
        interpret=bool(interpret),
    )
    return _kernel(choice, interpret, *align_varying(x, w, _clip_sizes(sizes, case.rows)))


def explain_call(
    x: Any, w: Any, sizes: Any, *, implementation: str | None = None, platform: str
) -> dispatch.Explanation:
    """Explain which implementation `grouped_matmul` would run on a platform, and why the others do not.

    Args:
        x, w, sizes, implementation: as in `grouped_matmul`; arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> x, w = jnp.ones((128, 96), jnp.bfloat16), jnp.ones((2, 96, 128), jnp.bfloat16)
        >>> grouped_matmul.explain(x, w, jnp.array([64, 64]), platform="gpu h200").reasons["gpu"]
        'it needs D and F that are multiples of 128, not 96 and 128'
    """
    return explain(_case(x, w, sizes), platform, implementation)


grouped_matmul.explain = explain_call  # pyright: ignore[reportFunctionMemberAccess]


def explain(case: Case, platform: str, implementation: str | None = None) -> dispatch.Explanation:
    """Explain which implementation would run a case on a platform, and why the others do not.

    Example:
        >>> print(explain(Case("narrow", 512, 128, 96, (256, 256)), "gpu h200"))
        grouped_matmul on gpu h200: ragged
          not gpu: it needs D and F that are multiples of 128, not 128 and 96
          not reference: it runs only where it is named
    """
    return dispatch.explain("grouped_matmul", IMPLEMENTATIONS, case, target_of(platform), implementation)


def _clip_sizes(sizes: Any, rows: int) -> Any:
    """The sizes as int32, with negative sizes set to 0, and shortened so that their sum is at most `rows`.

    Example:
        >>> _clip_sizes(jnp.array([100, -3, 100], jnp.int8), 150).tolist()
        [100, 0, 50]
    """
    max_size = min(rows, jnp.iinfo(sizes.dtype).max)
    clipped_sizes = jnp.clip(sizes, 0, max_size).astype(jnp.int32)
    group_ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), clipped_sizes)
    return jnp.diff(group_ends, prepend=jnp.zeros_like(group_ends[:1]))


def _case(x: Any, w: Any, sizes: Any) -> Case:
    """The shapes of a call; raises a ValueError if the arguments do not match."""
    arguments.check_arrays("grouped_matmul", x=x, w=w, sizes=sizes)
    _check_arguments(x, w, sizes)
    groups, inner, outer = w.shape
    return Case("", x.shape[0], inner, outer, (0,) * groups, x.dtype.name)


def _check_arguments(x: Any, w: Any, sizes: Any) -> None:
    """Refuse arguments that do not fit together."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or 0 in (*x.shape, *w.shape):
        shapes_text = f"x {x.shape} and w {w.shape}"
        raise ValueError(f"grouped_matmul: got {shapes_text}, expected (M, D) and (E, D, F), none empty")
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        dtypes_text = f"x of type {x.dtype} and w of type {w.dtype}"
        raise ValueError(f"grouped_matmul: got {dtypes_text}, expected one floating-point type: cast one of them")
    if sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        sizes_text = f"sizes of type {sizes.dtype} and shape {sizes.shape}"
        raise ValueError(f"grouped_matmul: got {sizes_text}, expected integers of shape {w.shape[:1]}, one per matrix")
    if not isinstance(sizes, Tracer | jax.ShapeDtypeStruct):
        known_sizes = np.asarray(sizes).tolist()
        if min(known_sizes) < 0 or sum(known_sizes) > x.shape[0]:
            raise ValueError(
                f"grouped_matmul: got sizes {known_sizes}, expected none negative, and at most {x.shape[0]} in total"
            )


def _pad_rows(x: Any) -> Any:
    """Pad the rows of x with zeros to a multiple of ROW_MULTIPLE."""
    padding = -x.shape[0] % ROW_MULTIPLE
    return jnp.pad(x, ((0, padding), (0, 0))) if padding else x


def _branches(function_name: str, interpret: Interpret, **options: Any) -> Any:
    """The functions called `function_name` ("forward" or "gradient_of_weights"), by implementation name."""

    def run_on_gpu(*args: Any) -> Any:
        from pallas_kernels.grouped_matmul import gpu

        rows = args[0].shape[0]
        # padding rows belong to no group: their products are 0, and they add nothing to the gradient of the matrices
        padded_args = [_pad_rows(arg) if arg.ndim == 2 else arg for arg in args]
        result = getattr(gpu, function_name)(*padded_args, interpret=interpret, **options)
        return result[:rows] if function_name == "forward" else result

    return {
        "gpu": dispatch.without_derivatives("grouped_matmul", run_on_gpu),
        "ragged": functools.partial(getattr(ragged, function_name), **options),
        "reference": functools.partial(getattr(reference, function_name), **options),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel(choice: Choice, interpret: Interpret, x: Any, w: Any, sizes: Any) -> Any:
    """The products of the rows with the matrices of their groups."""
    return dispatch.by_platform(choice, _branches("forward", interpret), x, w, sizes)


def _forward(choice: Choice, interpret: Interpret, x: Any, w: Any, sizes: Any) -> Any:
    """The result of `_kernel`, and the residuals."""
    return _kernel(choice, interpret, x, w, sizes), (x, w, sizes)


def _backward(choice: Choice, interpret: Interpret, residuals: Any, dy: Any) -> Any:
    """The gradients of x, w and sizes (None)."""
    x, w, sizes = residuals
    dx = dispatch.by_platform(choice, _branches("forward", interpret, transposed=True), dy, w, sizes)
    dw = dispatch.by_platform(choice, _branches("gradient_of_weights", interpret), x, dy, sizes)
    return dx, dw, None


_kernel.defvjp(_forward, _backward)
