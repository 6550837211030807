"""Softmax cross-entropy of a linear layer, as a weighted sum over rows, differentiable on every platform.

By default the loss is computed in chunks of rows. The forward pass also computes the gradients of each chunk, so each
logit is computed only once. The TPU kernel never stores logits in HBM, but computes them three times; it runs only if
named, and is meant for programs that are short of memory. With `axis`, the rows of the head are sharded over a mesh
axis (inside `jax.shard_map`); devices then exchange only numbers per row, and the gradient of x.
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
"""Residual names: of the gradients that chunks save, and of the log-sum-exp that the TPU kernel saves."""


def _why_unsupported_on_tpu(target: Target, case: Case) -> str | None:
    from pallas_kernels.cross_entropy import tpu

    return tpu.why_unsupported(target, case)


IMPLEMENTATIONS = (
    Implementation("chunked"),
    Implementation("tpu", "tpu", needs_name=True, why_unsupported=_why_unsupported_on_tpu),
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
    """Compute `sum(weights * (logsumexp(z) - z[label] + z_loss logsumexp(z)^2))`, `z = x @ head.T`, capped.

    Args:
        x: the inputs of the linear layer (M, D). Products have its dtype, sums are float32.
        head: the weights of the linear layer (V, D), one row per word, in the dtype of x; with `axis`, this device's
            rows.
        labels: (M,) integers. A row with a negative label is ignored, whatever the row contains. A label that is
            neither negative nor the index of a word makes the result NaN.
        weights: weights of the rows (M,), floating point; None for ones.
        vocab: number of words; later rows of the head are padding. By default every row is a word.
        soft_cap: the logits z become `c tanh(z / c)`, where c is this number; None for no cap.
        z_loss: factor of the penalty (PaLM, Chowdhery et al. 2022).
        axis: mesh axis over which the rows of the head are sharded, in order.
        chunk: number of rows for which "chunked" stores logits at a time.
        implementation: "chunked", "tpu" (stores no logits) or "reference" (stores all logits); None for "chunked".
        platform: "gpu h200", "tpu v5e", ...; by default that of the mesh in force, or of the arrays.
        interpret: whether to run the named kernel in Pallas' interpreter; "races" also looks for races.

    Returns:
        The sum, penalty included; and the penalty alone, which has no gradient. Both are float32 scalars.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        NotImplementedError: the named implementation cannot run this case on the platform.

    Example:
        >>> total, _ = cross_entropy(jnp.zeros((2, 3)), jnp.ones((4, 3)), jnp.array([0, -1]))
        >>> round(float(total), 4)  # log 4, once
        1.3863
    """
    case, word_count = _case(x, head, labels, weights, vocab, soft_cap, z_loss, axis, chunk)
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
    weights = jnp.where(labels < 0, 0.0, jnp.where(labels < word_count, weights, jnp.nan))
    terms = Terms(word_count, soft_cap, float(z_loss), axis)
    # if all operands vary over the axis, so do the devices' shares, and JAX sums their gradients
    operands = align_varying(x, head, labels, weights)
    if choice.default == "reference":
        total, penalty = reference.loss(*operands, terms=terms)
    elif choice.default == "tpu":
        total, penalty = _kernel(terms, case, interpret, *operands)
    else:
        total, penalty = _chunked(terms, min(chunk, case.rows), x.dtype.name, *operands)
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
    """Explain which implementation `cross_entropy` would run on a platform, and why the others do not.

    Args:
        x, head, labels, weights, vocab, soft_cap, z_loss, axis, chunk, implementation: as in `cross_entropy`; arrays
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
    """Explain which implementation would run a case on a platform, and why the others do not.

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
    """The shapes and options of a call, and the number of words; raises a ValueError if they do not fit."""
    arguments.check_arrays("cross_entropy", x=x, head=head, labels=labels, weights=weights)
    arguments.check_static("cross_entropy", vocab=vocab, soft_cap=soft_cap, z_loss=z_loss, chunk=chunk)
    _check_arguments(x, head, labels, weights, soft_cap, z_loss, chunk)
    head_rows = (1 if axis is None else lax.axis_size(axis)) * head.shape[0]
    word_count = head_rows if vocab is None else vocab
    if not 0 < word_count <= head_rows:
        raise ValueError(f"cross_entropy: got vocab {word_count}, expected 1 to {head_rows}, the rows of the head")
    rows, width = x.shape
    return Case("", rows, width, head.shape[0], word_count, x.dtype.name, soft_cap, z_loss), word_count


def _check_arguments(
    x: Any, head: Any, labels: Any, weights: Any, soft_cap: float | None, z_loss: float, chunk: int
) -> None:
    """Refuse arguments that do not fit together."""
    if x.ndim != 2 or head.ndim != 2 or x.shape[1] != head.shape[1] or 0 in (*x.shape, *head.shape):
        raise ValueError(
            f"cross_entropy: got x {x.shape} and head {head.shape}, expected (M, D) and (V, D), none empty"
        )
    if x.dtype != head.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        dtypes_text = f"x of type {x.dtype} and a head of type {head.dtype}"
        raise ValueError(f"cross_entropy: got {dtypes_text}, expected one floating-point type: cast one of them")
    if labels.shape != x.shape[:1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        labels_text = f"labels of type {labels.dtype} and shape {labels.shape}"
        raise ValueError(f"cross_entropy: got {labels_text}, expected integers of shape {x.shape[:1]}")
    if weights is not None and (weights.shape != labels.shape or not jnp.issubdtype(weights.dtype, jnp.floating)):
        weights_text = f"weights of type {weights.dtype} and shape {weights.shape}"
        raise ValueError(f"cross_entropy: got {weights_text}, expected floating point of shape {labels.shape}")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"cross_entropy: got soft_cap {soft_cap}, expected more than 0 and finite, or None for no cap")
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"cross_entropy: got z_loss {z_loss}, expected at least 0, and finite")
    if chunk < 1:
        raise ValueError(f"cross_entropy: got chunk {chunk}, expected at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(terms: Terms, chunk: int, dtype: str, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    """This device's shares of the sum and of the penalty, in chunks of rows; `dtype` is that of x and the head."""
    return chunked.loss(*_as_one_row(x, head, labels, weights), terms, Chunking(chunk))


def _chunked_forward(terms: Terms, chunk: int, dtype: str, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    """The results of `_chunked`, and as residuals the gradients of the sum with respect to x, head and weights."""
    sums, gradients = chunked.with_gradients(*_as_one_row(x, head, labels, weights), terms, Chunking(chunk))
    return sums, checkpoint_name(gradients, NAMES[0])


def _chunked_backward(terms: Terms, chunk: int, dtype: str, gradients: Any, d_sums: Any) -> Any:
    """The gradients of x, head, labels (None) and weights; those of x and head are rounded only after scaling."""
    dx, d_head, d_weights = (gradient * d_sums[0] for gradient in gradients)
    return dx[0].astype(dtype), d_head.astype(dtype), None, d_weights[0]


def _as_one_row(x: Any, head: Any, labels: Any, weights: Any) -> tuple[Any, Any, Any, Any]:
    """The operands as `chunked` takes them: rows are (B, T) with B = 1, and ignored rows of x are 0."""
    return reference.without_ignored(x, labels)[None], head, labels[None], weights[None]


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _local(terms: Terms, head: Any, labels: Any) -> tuple[Any, Any, bool]:
    """What the TPU kernel needs for this device's shard of the head.

    Returns:
        The labels as row indices of the shard, -1 for a label in another shard, `tpu.IGNORED` for a negative label; the
        number of rows that are words, int32 (1,); and whether some rows of the head are not words.
    """
    from pallas_kernels.cross_entropy import tpu

    rows = head.shape[0]
    first_word = terms.first_word(rows)
    local_labels = labels - first_word
    # the kernel's last tile may extend past the shard, where a label of another shard must not match
    local_labels = jnp.where(labels < 0, tpu.IGNORED, jnp.where(local_labels < rows, local_labels, -1))
    word_count = jnp.clip(jnp.asarray(terms.vocab - first_word, jnp.int32), 0, rows)
    return local_labels, word_count.reshape(1), terms.shard_count * rows != terms.vocab


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(terms: Terms, case: Case, interpret: Interpret, x: Any, head: Any, labels: Any, weights: Any) -> Any:
    """This device's shares of the sum and of the penalty, from the TPU kernel."""
    return _kernel_forward(terms, case, interpret, x, head, labels, weights)[0]


def _kernel_pass(pass_name: str, terms: Terms, case: Case, has_padding: bool, interpret: Interpret) -> Any:
    """The function of the TPU kernel's module that runs a pass, "forward" or "backward", with its options."""
    from pallas_kernels.cross_entropy import tpu

    function = functools.partial(
        getattr(tpu, pass_name),
        has_padding=has_padding,
        soft_cap=terms.soft_cap,
        tiles=tpu.default_tiles(case),
        interpret=interpret,
    )
    return dispatch.without_derivatives("cross_entropy", function)


def _kernel_forward(
    terms: Terms, case: Case, interpret: Interpret, x: Any, head: Any, labels: Any, weights: Any
) -> Any:
    """The results of `_kernel`, and the residuals."""
    local_labels, word_count, has_padding = _local(terms, head, labels)
    local_lse, label_logit = _kernel_pass("forward", terms, case, has_padding, interpret)(
        x, head, local_labels, word_count
    )
    lse = terms.lse_over_shards(local_lse)
    # rows with ignored labels may contain anything, and 0 * NaN is NaN
    lse, label_logit = (jnp.where(labels < 0, 0.0, array) for array in (lse, label_logit))
    losses, penalties = terms.loss_share(lse, label_logit)
    total_losses = losses + penalties
    sums = jnp.sum(weights * total_losses), jnp.sum(weights * penalties)
    named_lse = checkpoint_name(lse, NAMES[1])
    return sums, (x, head, labels, weights, named_lse, total_losses)


def _kernel_backward(terms: Terms, case: Case, interpret: Interpret, residuals: Any, d_sums: Any) -> Any:
    """The gradients of x, head, labels (None) and weights."""
    x, head, labels, weights, lse, total_losses = residuals
    local_labels, word_count, has_padding = _local(terms, head, labels)
    label_factors = weights * d_sums[0]
    softmax_factors = label_factors * (1 + 2 * terms.z_loss * lse)
    dx, d_head = _kernel_pass("backward", terms, case, has_padding, interpret)(
        x, head, local_labels, word_count, lse, softmax_factors, label_factors
    )
    return dx, d_head, None, total_losses * d_sums[0]


_kernel.defvjp(_kernel_forward, _kernel_backward)
