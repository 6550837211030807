"""Softmax cross-entropy of a linear layer, as a weighted sum over rows, differentiable on every platform.

Where nothing is named it goes by chunks: their gradients are made in the forward, with each logit computed once. The
TPU kernel never holds logits and computes them three times: it is run by name, where memory is short. With `axis` the
rows of the head are sharded over a mesh axis (inside `jax.shard_map`): what crosses devices is a number per row, and
the gradient of x.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import arguments, dispatch
from pallas_kernels.compat import Interpret, align_varying
from pallas_kernels.cross_entropy import chunked, reference
from pallas_kernels.cross_entropy.cases import Case
from pallas_kernels.cross_entropy.chunked import Chunking
from pallas_kernels.cross_entropy.reference import F32, Terms
from pallas_kernels.dispatch import Implementation
from pallas_kernels.target import Target
from pallas_kernels.target import target as target_of

NAMES = ("cross_entropy_gradients", "cross_entropy_lse")
"""Names of residuals: of chunks, and of the TPU kernel."""


def _tpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.cross_entropy import tpu

    return tpu.why_unsupported(target, case)


IMPLEMENTATIONS = (
    Implementation("chunked"),
    Implementation("tpu", "tpu", needs_name=True, why_unsupported=_tpu),
    Implementation("reference", needs_name=True),
)


def cross_entropy(
    x: Any,
    head: Any,
    labels: Any,
    weights: Any = None,
    *,
    vocab: int | None = None,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    axis: str | None = None,
    chunk: int = 2048,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> tuple[Any, Any]:
    """`sum(weights * (logsumexp(z) - z[label] + z_loss logsumexp(z)^2))`, `z = x @ head.T` in float32, capped.

    Args:
        x: (M, D). Products are of its type, sums float32.
        head: (V, D), a row per word, in the type of x; with `axis` this device's rows.
        labels: (M,) integers. A negative one is ignored, whatever its row of x holds; one past the vocabulary makes the
            result NaN.
        weights: (M,) floating point, or None for ones. Known in the forward: hence the sum.
        vocab: number of words; rows of the head from there on take no part. All by default.
        soft_cap: logits are `c tanh(z / c)`.
        z_loss: factor of the penalty (PaLM, Chowdhery et al. 2022).
        axis: mesh axis over which the head's rows are sharded, in order.
        chunk: rows whose logits "chunked" holds at once.
        implementation: "chunked", "tpu" (no logits in memory), "reference" (all of them), or None for "chunked".
        platform: what it is traced for, such as "tpu v5e"; by default what `target.target` finds.
        interpret: interpret the named kernel, for tests: True, or "races" to look for races too.

    Returns:
        The sum, penalty included; and the penalty alone, which carries no gradient. Float32 scalars.

    Raises:
        ValueError: shapes, types or options that do not fit.
        NotImplementedError: the named implementation cannot run this.

    Example:
        >>> total, _ = cross_entropy(jnp.zeros((2, 3)), jnp.ones((4, 3)), jnp.array([0, -1]))
        >>> round(float(total), 4)  # log 4, once
        1.3863
    """
    case, count = _case(x, head, labels, weights, vocab, soft_cap, z_loss, axis, chunk)
    choice = dispatch.choose(
        "cross_entropy",
        IMPLEMENTATIONS,
        case,
        target_of(platform, x, head, labels, weights),
        implementation=implementation,
        interpret=bool(interpret),
    )
    labels = labels.astype(jnp.int32)
    weights = jnp.ones(labels.shape, F32) if weights is None else weights.astype(F32)
    weights = jnp.where(labels < 0, 0.0, jnp.where(labels < count, weights, jnp.nan))
    terms = Terms(count, soft_cap, float(z_loss), axis)
    # every operand varies over the axis: so does the part of each device, and its gradients add up by themselves
    x, head, labels, weights = align_varying(x, head, labels, weights)
    if choice.default == "reference":
        total, penalty = reference.loss(x, head, labels, weights, terms)
    elif choice.default == "tpu":
        total, penalty = _kernel(terms, case, interpret, x, head, labels, weights)
    else:
        total, penalty = _chunked(terms, min(chunk, case.rows), x.dtype.name, x, head, labels, weights)
    if axis is not None:
        total, penalty = lax.psum(total, axis), lax.psum(penalty, axis)
    return total, lax.stop_gradient(penalty)


def explain_call(
    x: Any,
    head: Any,
    labels: Any,
    weights: Any = None,
    *,
    vocab: int | None = None,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    axis: str | None = None,
    chunk: int = 2048,
    implementation: str | None = None,
    platform: str,
) -> dispatch.Explanation:
    """What `cross_entropy` would run on a platform, and why each other implementation would not be taken.

    Args:
        x, head, labels, weights, vocab, soft_cap, z_loss, axis, chunk, implementation: as of `cross_entropy`; arrays
            may be `jax.ShapeDtypeStruct`.
        platform: "gpu h200", "tpu v5e", "cpu".

    Example:
        >>> x = jnp.ones((128, 128))
        >>> cross_entropy.explain(x, x, jnp.zeros(128, int), platform="tpu v5e", implementation="tpu").chosen
        'tpu'
    """
    case, _ = _case(x, head, labels, weights, vocab, soft_cap, z_loss, axis, chunk)
    return explain(case, platform, implementation)


cross_entropy.explain = explain_call  # pyright: ignore[reportFunctionMemberAccess]


def explain(case: Case, platform: str, implementation: str | None = None) -> dispatch.Explanation:
    """What would run a case on a platform, and why each other implementation would not.

    Example:
        >>> print(explain(Case("small", 128, 128, 512), "tpu v5e"))
        cross_entropy on tpu v5e: chunked
          not tpu: it runs only where it is named
          not reference: it runs only where it is named
    """
    return dispatch.explain("cross_entropy", IMPLEMENTATIONS, case, target_of(platform), implementation)


def _case(
    x: Any, head: Any, labels: Any, weights: Any, vocab: Any, soft_cap: Any, z_loss: Any, axis: str | None, chunk: Any
) -> tuple[Case, int]:
    """Shapes and options of a call that makes sense, and the number of words."""
    arguments.check_arrays("cross_entropy", x=x, head=head, labels=labels, weights=weights)
    arguments.check_static("cross_entropy", vocab=vocab, soft_cap=soft_cap, z_loss=z_loss, chunk=chunk)
    _check(x, head, labels, weights, soft_cap, z_loss, chunk)
    words = (1 if axis is None else lax.axis_size(axis)) * head.shape[0]
    count = words if vocab is None else vocab
    if not 0 < count <= words:
        raise ValueError(f"cross_entropy: got vocab {count}, expected 1 to {words}, the rows of the head")
    rows, width = x.shape
    return Case("", rows, width, head.shape[0], count, x.dtype.name, soft_cap, z_loss), count


def _check(x: Any, head: Any, labels: Any, weights: Any, soft_cap: float | None, z_loss: float, chunk: int) -> None:
    if x.ndim != 2 or head.ndim != 2 or x.shape[1] != head.shape[1] or 0 in (*x.shape, *head.shape):
        raise ValueError(
            f"cross_entropy: got x {x.shape} and head {head.shape}, expected (M, D) and (V, D), none empty"
        )
    if x.dtype != head.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        got = f"x of type {x.dtype} and a head of type {head.dtype}"
        raise ValueError(f"cross_entropy: got {got}, expected one floating-point type: cast one of them")
    if labels.shape != x.shape[:1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        got = f"labels of type {labels.dtype} and shape {labels.shape}"
        raise ValueError(f"cross_entropy: got {got}, expected integers of shape {x.shape[:1]}")
    if weights is not None and (weights.shape != labels.shape or not jnp.issubdtype(weights.dtype, jnp.floating)):
        got = f"weights of type {weights.dtype} and shape {weights.shape}"
        raise ValueError(f"cross_entropy: got {got}, expected floating point of shape {labels.shape}")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"cross_entropy: got soft_cap {soft_cap}, expected more than 0 and finite, or None for no cap")
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"cross_entropy: got z_loss {z_loss}, expected at least 0, and finite")
    if chunk < 1:
        raise ValueError(f"cross_entropy: got chunk {chunk}, expected at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(terms: Terms, chunk: int, dtype: str, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    return chunked.loss(*_as_one_row(x, head, labels, weights), terms, Chunking(chunk))


def _chunked_forward(terms: Terms, chunk: int, dtype: str, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    sums, gradients = chunked.with_gradients(*_as_one_row(x, head, labels, weights), terms, Chunking(chunk))
    return sums, checkpoint_name(gradients, NAMES[0])


def _chunked_backward(terms: Terms, chunk: int, dtype: str, gradients: Any, d_sums: Any) -> Any:
    # in float32 until they are scaled: rounded once
    dx, d_head, d_weights = (gradient * d_sums[0] for gradient in gradients)
    return dx[0].astype(dtype), d_head.astype(dtype), None, d_weights[0]


def _as_one_row(x: Any, head: Any, labels: Any, weights: Any) -> tuple[Any, Any, Any, Any]:
    """Operands of `chunked`, whose rows are (B, T), with B of 1 and ignored rows cleared."""
    return reference.without_ignored(x, labels)[None], head, labels[None], weights[None]


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _local(terms: Terms, head: Any, labels: Any) -> tuple[Any, Any, bool]:
    """Labels as rows of this device's head, -1 for another's, the kernel's mark for an ignored one; how many rows are
    words; whether that may be fewer.
    """
    from pallas_kernels.cross_entropy import tpu

    rows = head.shape[0]
    first = terms.first(rows)
    mine = labels - first
    # the kernel's last tile may go on past the head, where another device's label must find nothing
    mine = jnp.where(labels < 0, tpu.IGNORED, jnp.where(mine < rows, mine, -1))
    words = jnp.clip(jnp.asarray(terms.vocab - first, jnp.int32), 0, rows)
    return mine, words.reshape(1), terms.shards * rows != terms.vocab


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(terms: Terms, case: Case, interpret: Interpret, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    return _kernel_forward(terms, case, interpret, x, head, labels, weights)[0]


def _options(terms: Terms, case: Case, masked: bool, interpret: Interpret) -> Any:
    from pallas_kernels.cross_entropy import tpu

    options = {"masked": masked, "soft_cap": terms.soft_cap, "tiles": tpu.default_tiles(case), "interpret": interpret}
    return tpu, options


def _kernel_forward(
    terms: Terms, case: Case, interpret: Interpret, x: Any, head: Any, labels: Any, weights: Any
) -> Any:
    mine, words, masked = _local(terms, head, labels)
    tpu, options = _options(terms, case, masked, interpret)
    run = dispatch.without_derivatives("cross_entropy", functools.partial(tpu.forward, **options))
    lse, hit = terms.over_shards(*run(x, head, mine, words))
    # rows of ignored labels may hold anything, and 0 * NaN is NaN
    lse, hit = (jnp.where(labels < 0, 0.0, score) for score in (lse, hit))
    losses, penalties = terms.part(lse, hit)
    losses = losses + penalties
    sums = jnp.sum(weights * losses), jnp.sum(weights * penalties)
    lse = checkpoint_name(lse, NAMES[1])
    return sums, (x, head, labels, weights, lse, losses)


def _kernel_backward(terms: Terms, case: Case, interpret: Interpret, saved: Any, d_sums: Any) -> Any:
    x, head, labels, weights, lse, losses = saved
    mine, words, masked = _local(terms, head, labels)
    tpu, options = _options(terms, case, masked, interpret)
    weighted = weights * d_sums[0]
    share = weighted * (1 + 2 * terms.z_loss * lse)
    run = dispatch.without_derivatives("cross_entropy", functools.partial(tpu.backward, **options))
    dx, d_head = run(x, head, mine, words, lse, share, weighted)
    return dx, d_head, None, losses * d_sums[0]


_kernel.defvjp(_kernel_forward, _kernel_backward)
