"""Cross-entropy over a vocabulary, without all logits in memory at once.

With a `chunk`, the loss is computed by `pallas_kernels.cross_entropy.chunked`, which scores some positions at a time
and immediately computes what these positions add to the gradients. So logits are neither kept nor computed twice. Under
a layout, every shard of the batch and of the sequence sums its own gradient of the head; these gradients are reduced
over devices once, at the end.
"""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.blocks import Loss
from jaxscale.errors import UserError, unknown
from jaxscale.layers.linear import matmul
from jaxscale.layers.shards import axes_by_dim, shard_count
from jaxscale.layers.targets import gathers_label_logits, zero_ignored_targets
from jaxscale.layers.traced_device import note_selection
from jaxscale.sharding.place import MeshAndRules, constrain, current, reopened_layout
from jaxscale.typing import Array, Float, Integer
from pallas_kernels.cross_entropy import chunked, reference
from pallas_kernels.cross_entropy.chunked import Chunking
from pallas_kernels.cross_entropy.reference import Terms

LossImplementation = Literal["auto", "tpu", "chunked", "reference"]
CHUNK = 256
"""Default number of positions in a chunk of "chunked"."""


class _Call(NamedTuple):
    """The static parameters of the loss by chunks."""

    terms: Terms
    chunking: Chunking
    layout: MeshAndRules | None  # the layout in force


def logits(
    hidden: Float[Array, "*B D"], head: Float[Array, "V D"], *, vocab: int, soft_cap: float | None = None
) -> Float[Array, "*B V"]:
    """Compute `hidden @ head.T` in float32, and cap it. Columns that pad the vocabulary get minus infinity.

    Args:
        hidden: last hidden states.
        head: output projection with a row per token, as in an `Embedding`; rows from `vocab` on are padding.
        vocab: number of tokens.
        soft_cap: c of `c tanh(logits / c)`; `None` leaves the logits unchanged.

    Example:
        >>> logits(jnp.ones((1, 2)), jnp.ones((4, 2)), vocab=3).tolist()
        [[2.0, 2.0, 2.0, -inf]]
    """
    return reference.logits(_product(hidden, head), Terms(vocab, soft_cap))


def _product(hidden: Any, head: Any) -> Any:
    """Compute `hidden @ head.T` in float32."""
    return matmul(hidden, head, transposed=True, result=jnp.float32)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Integer[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    vocab: int,
    chunk: int | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> Loss:
    """Sum `weight * (logsumexp(z) - z[target])` over targets, with `z = hidden @ head.T` in float32.

    The `penalty` of the result sums `weight * z_loss * logsumexp(z)^2` (PaLM, Chowdhery et al. 2022). Differentiate
    `total + penalty`: with a chunk and a z-loss, `total` alone already has the gradient of `total + penalty`.

    Args:
        hidden: last hidden states.
        head: output projection with a row per token; rows from `vocab` on pad the vocabulary and are ignored.
        targets: tokens to predict; a target that is not a token, such as -100, has weight 0.
        weights: weights of the targets; all ones by default.
        vocab: number of tokens.
        chunk: number of positions of a row to score at a time (on every device, if the sequence is sharded); `None`
            scores all positions at once. The number need not divide the length of the sequence.
        z_loss: factor of the penalty.
        soft_cap: cap of the logits; `None` for no cap.
        implementation: "auto" scores by chunks if `chunk` is set and shorter than a row. "chunked" always scores by
            chunks, of 256 positions if `chunk` is `None`. "reference" scores all positions at once. "tpu" is a kernel
            that never stores logits and computes them three times. "reference" and "tpu" ignore `chunk`.

    Returns:
        The weighted sums of losses and penalties, and the sum of the weights, in float32. The gradient of the head is
        summed in float32 and returned in the type of the head.

    Example:
        >>> loss = cross_entropy(jnp.zeros((1, 2, 3)), jnp.ones((4, 3)), jnp.zeros((1, 2), int), vocab=4)
        >>> round(float(loss.total / loss.weight), 4)  # log 4
        1.3863
    """
    if head.shape[0] < vocab:
        raise UserError(f"cross-entropy: got a head of {head.shape[0]} rows, expected at least {vocab}, one per token")
    if chunk is not None and chunk < 1:
        raise UserError(f"cross-entropy: got chunk {chunk}, expected at least 1 position, or None")
    if implementation not in get_args(LossImplementation):
        raise unknown("implementation of cross-entropy", implementation, get_args(LossImplementation))
    if implementation in ("reference", "tpu"):
        chunk = None
    elif implementation == "chunked":
        chunk = min(chunk or CHUNK, hidden.shape[1])
    terms = Terms(vocab, soft_cap, z_loss)
    can_gather = gathers_label_logits() and not axes_by_dim(head.shape, "vocab", None)[0]
    targets, weights = zero_ignored_targets(targets, vocab, weights)
    weight_sum = jnp.sum(weights)
    hidden = constrain(hidden, "batch", "inner_seq", "embed")
    if implementation == "tpu":
        from jaxscale.layers.loss_kernel import kernel_sums

        total_and_penalty, penalty = kernel_sums(
            hidden, head, targets, weights, vocab=vocab, z_loss=z_loss, soft_cap=soft_cap
        )
        return Loss(total_and_penalty - penalty, weight_sum, penalty)
    if chunk is None or (chunk >= hidden.shape[1] and implementation == "auto"):
        reason = "no chunk: all logits at once" if chunk is None else "one chunk holds all"
        note_selection("cross_entropy", "reference", reason)
        float_logits = constrain(_product(hidden, head), "batch", "inner_seq", "vocab")
        losses, penalties = reference.row_losses(float_logits, targets, terms, gather=can_gather)
        penalty = jnp.sum(penalties * weights) if z_loss else jnp.zeros(())
        return Loss(jnp.sum(losses * weights), weight_sum, penalty)
    note_selection("cross_entropy", "chunked")
    row_shard_count, position_shard_count = map(shard_count, axes_by_dim(targets.shape, "batch", "inner_seq"))
    chunking = Chunking(
        chunk, row_shard_count, position_shard_count, can_gather, hidden.dtype, _place_logits, _place_head_gradients
    )
    total_and_penalty, penalty = _chunked_sums(_Call(terms, chunking, current()), hidden, head, targets, weights)
    penalty = lax.stop_gradient(penalty)
    return Loss(total_and_penalty - penalty, weight_sum, penalty)


def _place_logits(chunk_logits: Any) -> Any:
    """Constrain the logits of a chunk, (row shards, rows, position shards, positions, V), to the layout."""
    return constrain(chunk_logits, "batch", None, "inner_seq", None, "vocab")


def _place_head_gradients(head_gradients: Any) -> Any:
    """Constrain the head's gradients of all shards, (row shards, position shards, V, D), to the layout."""
    return constrain(head_gradients, "batch", "inner_seq", "vocab", None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_sums(call: _Call, hidden: Any, head: Any, targets: Any, weights: Any) -> tuple[Any, Any]:
    """Return the pair (total + penalty, penalty), computed by chunks."""
    return chunked.loss(hidden, head.astype(hidden.dtype), targets, weights, call.terms, call.chunking)


def _chunked_forward(call: _Call, hidden: Any, head: Any, targets: Any, weights: Any) -> tuple[tuple[Any, Any], Any]:
    """Return (the two sums, residuals), where the residuals are the gradients of the first sum."""
    inputs = (hidden, head.astype(hidden.dtype), targets, weights)
    with reopened_layout(call.layout):
        sums, (d_hidden, d_head, d_weights) = chunked.with_gradients(*inputs, call.terms, call.chunking)
    return sums, (d_hidden, d_head.astype(head.dtype), d_weights)


def _chunked_backward(call: _Call, first_sum_gradients: Any, d_sums: Any) -> tuple[Any, ...]:
    """Scale the residuals (the gradients of the first sum) by the gradient of the loss with respect to that sum."""
    d_hidden, d_head, d_weights = (
        (gradient.astype(jnp.float32) * d_sums[0]).astype(gradient.dtype) for gradient in first_sum_gradients
    )
    return d_hidden, d_head, None, d_weights


_chunked_sums.defvjp(_chunked_forward, _chunked_backward)
