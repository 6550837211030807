"""Cross-entropy over a vocabulary, without all logits in memory at once.

With `chunk` the loss is scored some positions at a time, and their part of the gradients is computed at once, so that
logits are neither kept nor computed twice (as in Liger's fused linear cross-entropy, Hsu et al. 2024). Under a layout
every shard of the batch and of the sequence sums its gradient of the head, which is reduced over devices once, at the
end.
"""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.blocks import Loss
from jaxscale.errors import UserError, unknown
from jaxscale.layers.linear import matmul
from jaxscale.layers.taken import took
from jaxscale.sharding.partition import dim_axes, shard_count
from jaxscale.sharding.place import Layout, constrain, current, spec, under
from jaxscale.typing import Array, Float, Int

Implementation = Literal["auto", "tpu", "chunked", "reference"]
CHUNK = 256
"""Default positions of "chunked"."""


class _Terms(NamedTuple):
    """The parameters of the loss of a target, and its layout."""

    vocab: int
    z_loss: float
    soft_cap: float | None
    layout: Layout | None = None


def _product(hidden: Any, head: Any) -> Any:
    return matmul(hidden, head, transposed=True, result=jnp.float32)


def _shaped(scores: Any, vocab: int, soft_cap: float | None) -> Any:
    """Logits from scores: capped, and without the columns that pad the vocabulary."""
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if scores.shape[-1] == vocab:
        return scores
    real = jnp.arange(scores.shape[-1]) < vocab
    return jnp.where(real.reshape((1,) * (scores.ndim - 1) + real.shape), scores, -jnp.inf)


def logits(
    hidden: Float[Array, "*B D"], head: Float[Array, "V D"], *, vocab: int, soft_cap: float | None = None
) -> Float[Array, "*B V"]:
    """`hidden @ head.T` in float32, capped; minus infinity in the columns that pad the vocabulary.

    Args:
        hidden: last hidden states.
        head: a row per token, as in an `Embedding`; rows from `vocab` on are padding.
        vocab: number of tokens.
        soft_cap: c of `c tanh(logits / c)`; `None` leaves them unchanged.

    Example:
        >>> logits(jnp.ones((1, 2)), jnp.ones((4, 2)), vocab=3).tolist()
        [[2.0, 2.0, 2.0, -inf]]
    """
    return _shaped(_product(hidden, head), vocab, soft_cap)


def _score(terms: _Terms, scores: Any, targets: Any, sharded: bool) -> tuple[Any, Any]:
    """Loss and penalty of every target, unweighted."""
    scores = _shaped(scores, terms.vocab, terms.soft_cap)
    norms = jax.nn.logsumexp(scores, -1)
    if sharded:
        # a gather along a sharded dim would gather the logits
        columns = lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1)
        chosen = jnp.sum(jnp.where(columns == targets[..., None], scores, 0.0), -1)
    else:
        chosen = jnp.take_along_axis(scores, targets[..., None], -1, mode="clip")[..., 0]
    penalty = terms.z_loss * jnp.square(norms) if terms.z_loss else jnp.zeros_like(norms)
    return norms - chosen, penalty


def cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    vocab: int,
    chunk: int | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> Loss:
    """Weighted sums of `logsumexp(z) - z[target]` over targets, with `z = hidden @ head.T` in float32.

    `penalty` sums `weight * z_loss * logsumexp(z)^2` (PaLM, Chowdhery et al. 2022). Differentiate `total + penalty`:
    with a chunk and a z-loss, `total` alone carries the gradient of both.

    Args:
        hidden: last hidden states.
        head: a row per token; rows from `vocab` on pad the vocabulary and are ignored.
        targets: tokens to predict.
        weights: of the targets; all ones by default.
        vocab: number of tokens.
        chunk: positions of a row scored at a time (on every device, if the sequence is sharded); `None` scores all at
            once. It need not divide the sequence.
        z_loss: factor of the penalty.
        soft_cap: bound of the logits.
        implementation: "auto": by chunks if `chunk` is given and shorter than a row; "chunked": always by chunks, of
            256 positions by default; "reference": all at once; "tpu": a kernel that never stores logits and computes
            them three times. The last two ignore `chunk`.

    Returns:
        Sums in float32. The gradient of the head is summed in float32, and has the type of the head.

    Example:
        >>> loss = cross_entropy(jnp.zeros((1, 2, 3)), jnp.ones((4, 3)), jnp.zeros((1, 2), int), vocab=4)
        >>> round(float(loss.total / loss.weight), 4)  # log 4
        1.3863
    """
    if head.shape[0] < vocab:
        raise UserError(f"cross-entropy: got a head of {head.shape[0]} rows, expected at least the {vocab} tokens")
    if chunk is not None and chunk < 1:
        raise UserError(f"cross-entropy: got chunk {chunk}, expected at least 1, or None")
    if implementation not in get_args(Implementation):
        raise unknown("implementation of cross-entropy", implementation, get_args(Implementation))
    if implementation in ("reference", "tpu"):
        chunk = None
    elif implementation == "chunked":
        chunk = min(chunk or CHUNK, hidden.shape[1])
    layout = current()
    sharded = layout is not None and any(spec(head.shape, ("vocab", None), *layout))
    terms = _Terms(vocab, z_loss, soft_cap, layout)
    weights = None if weights is None else weights.astype(jnp.float32)
    weight = jnp.float32(targets.size) if weights is None else jnp.sum(weights)
    hidden = constrain(hidden, "batch", "inner_seq", "embed")
    if implementation == "tpu":
        from jaxscale.layers.loss_kernel import sums

        ones = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
        trained, penalty = sums(hidden, head, targets, ones, vocab=vocab, z_loss=z_loss, soft_cap=soft_cap)
        return Loss(trained - penalty, weight, penalty)
    if chunk is None or (chunk >= hidden.shape[1] and implementation == "auto"):
        took("cross_entropy", "reference", "no chunk: all logits at once" if chunk is None else "one chunk holds all")
        scores = constrain(_product(hidden, head), "batch", "inner_seq", "vocab")
        losses, penalties = _score(terms, scores, targets, sharded)
        if weights is not None:
            losses, penalties = losses * weights, penalties * weights
        return Loss(jnp.sum(losses), weight, jnp.sum(penalties) if z_loss else jnp.zeros(()))
    took("cross_entropy", "chunked")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    trained, penalty = _chunked(terms, chunk, sharded, hidden, head, targets, weights)
    penalty = lax.stop_gradient(penalty)
    return Loss(trained - penalty, weight, penalty)


class _Shards(NamedTuple):
    """The number of shards of rows and positions under the current layout."""

    rows: int
    positions: int


def _shards(hidden: Any) -> _Shards:
    layout = current()
    if layout is None:
        return _Shards(1, 1)
    mesh, rules = layout
    partition = spec(hidden.shape[:2], ("batch", "inner_seq"), mesh, rules)
    # by hand: a sharding on a mesh with manual axes, inside a pipeline, does not report its shards
    return _Shards(*(shard_count(mesh, axes) for axes in dim_axes(partition, 2)))


def _split(x: Any, shards: _Shards, chunk: int) -> Any:
    """(B, T, ...) to (chunks, row shards, rows, position shards, chunk, ...), without moving data between shards."""
    batch, length = x.shape[:2]
    x = x.reshape(shards.rows, batch // shards.rows, shards.positions, length // shards.positions, *x.shape[2:])
    pad = -x.shape[3] % chunk
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, pad),) + ((0, 0),) * (x.ndim - 4)) if pad else x
    x = x.reshape(*x.shape[:3], -1, chunk, *x.shape[4:])
    return jnp.moveaxis(x, 3, 0)


def _join(x: Any, batch: int, length: int, shards: _Shards) -> Any:
    """The inverse of `_split`."""
    x = jnp.moveaxis(x, 0, 3)
    x = x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : length // shards.positions]
    return x.reshape(batch, length, *x.shape[4:])


def _constrain_scores(scores: Any) -> Any:
    return constrain(scores, "batch", None, "inner_seq", None, "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(
    terms: _Terms, chunk: int, sharded: bool, hidden: Any, head: Any, targets: Any, weights: Any
) -> tuple[Any, Any]:
    """Total plus penalty, and penalty, a chunk at a time."""
    shards = _shards(hidden)
    narrow_head = head.astype(hidden.dtype)

    def step(sums: Any, chunk: Any) -> tuple[Any, None]:
        hidden, targets, weights = chunk
        losses, penalties = _score(terms, _constrain_scores(_product(hidden, narrow_head)), targets, sharded)
        penalty = jnp.sum(penalties * weights)
        return (sums[0] + jnp.sum(losses * weights) + penalty, sums[1] + penalty), None

    start = (jnp.zeros(()), jnp.zeros(()))
    return lax.scan(step, start, tuple(_split(x, shards, chunk) for x in (hidden, targets, weights)))[0]


def _chunked_forward(terms: _Terms, *arguments: Any) -> tuple[tuple[Any, Any], Any]:
    with under(terms.layout):
        return _sums_and_gradients(terms, *arguments)


def _sums_and_gradients(
    terms: _Terms, chunk: int, sharded: bool, hidden: Any, head: Any, targets: Any, weights: Any
) -> tuple[tuple[Any, Any], Any]:
    """The sums, and their gradients, which every shard sums separately."""
    shards = _shards(hidden)
    narrow_head = head.astype(hidden.dtype)

    def step(carry: Any, chunk: Any) -> tuple[Any, Any]:
        trained, penalized, d_head = carry
        hidden, targets, weights = chunk

        def sums(scores: Any) -> tuple[Any, Any]:
            losses, penalties = _score(terms, scores, targets, sharded)
            penalty = jnp.sum(penalties * weights)
            return jnp.sum(losses * weights) + penalty, (penalty, losses + penalties)

        scores = _constrain_scores(_product(hidden, narrow_head))
        (chunk_total, (penalty, d_weights)), d_scores = jax.value_and_grad(sums, has_aux=True)(scores)
        d_scores = d_scores.astype(hidden.dtype)
        d_head = d_head + jnp.einsum("rbptv,rbptd->rpvd", d_scores, hidden, preferred_element_type=jnp.float32)
        d_head = constrain(d_head, "batch", "inner_seq", "vocab", None)
        return (trained + chunk_total, penalized + penalty, d_head), (matmul(d_scores, narrow_head), d_weights)

    chunks = tuple(_split(x, shards, chunk) for x in (hidden, targets, weights))
    d_head = constrain(jnp.zeros((*shards, *head.shape), jnp.float32), "batch", "inner_seq", "vocab", None)
    (trained, penalty, d_head), chunk_gradients = lax.scan(step, (jnp.zeros(()), jnp.zeros(()), d_head), chunks)
    batch, length = targets.shape
    d_hidden, d_weights = (_join(x, batch, length, shards) for x in chunk_gradients)
    return (trained, penalty), (d_hidden, jnp.sum(d_head, (0, 1)).astype(head.dtype), d_weights)


def _chunked_backward(terms: _Terms, chunk: int, sharded: bool, gradients: Any, d_sums: Any) -> tuple[Any, ...]:
    d_hidden, d_head, d_weights = (
        (gradient.astype(jnp.float32) * d_sums[0]).astype(gradient.dtype) for gradient in gradients
    )
    return d_hidden, d_head, None, d_weights


_chunked.defvjp(_chunked_forward, _chunked_backward)
