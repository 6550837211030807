"""Grouped matmul: rows sorted by group, times their group's matrix, with both gradients on every platform.

On TPU `jax.lax.ragged_dot` is a kernel already, and is what runs; on GPU it is dense (E times the work), and on Hopper
our kernel runs. Sizes of groups are data: what cannot be checked before it runs is defined instead. A negative size
counts as 0, and groups end with the rows.
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
from pallas_kernels.grouped_matmul.cases import Case
from pallas_kernels.target import Target
from pallas_kernels.target import target as target_of


def _gpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.grouped_matmul import gpu

    return gpu.why_unsupported(target, case)


ROWS = 8
"""Hopper's kernel takes multiples of it: rows of a TMA copy's tile, as Mosaic has them in shared memory."""

IMPLEMENTATIONS = (
    Implementation("gpu", "gpu", needs_hopper=True, why_unsupported=_gpu),
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
    """`y[m] = x[m] @ w[e]`, for the e whose rows m is among; 0 in rows past the last group.

    Args:
        x: (M, D), sorted by group.
        w: (E, D, F), in the type of x. Sums are float32.
        sizes: (E,) integers: rows of each group, which may be 0, and need not add up to M.
        implementation: "gpu" (Hopper), "ragged" (`jax.lax.ragged_dot`), "reference", or None for the best that runs.
        platform: what it is traced for, such as "gpu h200"; by default what `target.target` finds.
        interpret: interpret the named kernel, for tests: True, or "races" to look for races too.

    Returns:
        (M, F), in the type of x.

    Raises:
        ValueError: shapes or types that do not fit; sizes known while tracing that are negative or more than M in sum.
        NotImplementedError: the named implementation cannot run this.

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
    x, w, sizes = align_varying(x, w, _within(sizes, case.rows))
    return _kernel(choice, interpret, x, w, sizes)


def explain_call(
    x: Any, w: Any, sizes: Any, *, implementation: str | None = None, platform: str
) -> dispatch.Explanation:
    """What `grouped_matmul` would run on a platform, and why each other implementation would not be taken.

    Args:
        x, w, sizes, implementation: as of `grouped_matmul`; arrays may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> x, w = jnp.ones((128, 96), jnp.bfloat16), jnp.ones((2, 96, 128), jnp.bfloat16)
        >>> grouped_matmul.explain(x, w, jnp.array([64, 64]), platform="gpu h200").reasons["gpu"]
        'it needs D and F that are multiples of 128, not 96 and 128'
    """
    return explain(_case(x, w, sizes), platform, implementation)


grouped_matmul.explain = explain_call  # pyright: ignore[reportFunctionMemberAccess]


def explain(case: Case, platform: str, implementation: str | None = None) -> dispatch.Explanation:
    """What would run a case on a platform, and why each other implementation would not.

    Example:
        >>> print(explain(Case("narrow", 512, 128, 96, (256, 256)), "gpu h200"))
        grouped_matmul on gpu h200: ragged
          not gpu: it needs D and F that are multiples of 128, not 128 and 96
          not reference: it runs only where it is named
    """
    return dispatch.explain("grouped_matmul", IMPLEMENTATIONS, case, target_of(platform), implementation)


def _within(sizes: Any, rows: int) -> Any:
    """Sizes as int32, none negative, that end with the rows: their sum saturates, whatever their type holds.

    Example:
        >>> _within(jnp.array([100, -3, 100], jnp.int8), 150).tolist()
        [100, 0, 50]
    """
    most = min(rows, jnp.iinfo(sizes.dtype).max)
    sizes = jnp.clip(sizes, 0, most).astype(jnp.int32)
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))


def _case(x: Any, w: Any, sizes: Any) -> Case:
    """Shapes of a call that makes sense."""
    arguments.check_arrays("grouped_matmul", x=x, w=w, sizes=sizes)
    _check(x, w, sizes)
    groups, inner, outer = w.shape
    return Case("", x.shape[0], inner, outer, (0,) * groups, x.dtype.name)


def _check(x: Any, w: Any, sizes: Any) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or 0 in (*x.shape, *w.shape):
        got = f"x {x.shape} and w {w.shape}"
        raise ValueError(f"grouped_matmul: got {got}, expected (M, D) and (E, D, F), none empty")
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        got = f"x of type {x.dtype} and w of type {w.dtype}"
        raise ValueError(f"grouped_matmul: got {got}, expected one floating-point type: cast one of them")
    if sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        got = f"sizes of type {sizes.dtype} and shape {sizes.shape}"
        raise ValueError(f"grouped_matmul: got {got}, expected integers of shape {w.shape[:1]}, one per matrix")
    if not isinstance(sizes, Tracer | jax.ShapeDtypeStruct):
        values = np.asarray(sizes)
        if values.min() < 0 or sum(values.tolist()) > x.shape[0]:
            got = f"sizes {values.tolist()}"
            raise ValueError(f"grouped_matmul: got {got}, expected none negative, and at most {x.shape[0]} rows in sum")


def _padded(x: Any) -> Any:
    """Rows, and zeros below them up to a multiple of ROWS."""
    more = -x.shape[0] % ROWS
    return jnp.pad(x, ((0, more), (0, 0))) if more else x


def _branches(what: str, interpret: Interpret, **options: Any) -> Any:
    """Implementations of "forward" or "gradient_of_weights", by name."""

    def gpu(*args: Any) -> Any:
        from pallas_kernels.grouped_matmul import gpu

        rows = args[0].shape[0]
        # rows that fill up are of no group: their products are 0, and no gradient has a part of them
        padded = [_padded(array) if array.ndim == 2 else array for array in args]
        product = getattr(gpu, what)(*padded, interpret=interpret, **options)
        return product[:rows] if what == "forward" else product

    plain = {"ragged": ragged, "reference": reference}
    kernels = {"gpu": dispatch.without_derivatives("grouped_matmul", gpu)}
    return kernels | {name: functools.partial(getattr(array, what), **options) for name, array in plain.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel(choice: Choice, interpret: Interpret, x: Any, w: Any, sizes: Any) -> Any:
    return dispatch.by_platform(choice, _branches("forward", interpret), x, w, sizes)


def _forward(choice: Choice, interpret: Interpret, x: Any, w: Any, sizes: Any) -> Any:
    return _kernel(choice, interpret, x, w, sizes), (x, w, sizes)


def _backward(choice: Choice, interpret: Interpret, saved: Any, dy: Any) -> Any:
    x, w, sizes = saved
    dx = dispatch.by_platform(choice, _branches("forward", interpret, transposed=True), dy, w, sizes)
    dw = dispatch.by_platform(choice, _branches("gradient_of_weights", interpret), x, dy, sizes)
    return dx, dw, None


_kernel.defvjp(_forward, _backward)
