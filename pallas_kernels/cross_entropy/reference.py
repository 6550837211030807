"""Softmax cross-entropy of a linear layer, as this device's part of a weighted sum: the definition. It holds logits.

What every implementation shares is here too: which rows of the head are words, and the log-sum-exp over a vocabulary
that is sharded.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Terms:
    """What shapes the loss.

    Args:
        vocab: number of words; rows of the head from there on take no part.
        soft_cap: logits are `c tanh(z / c)`; None leaves them.
        z_loss: factor of `logsumexp(z)^2`.
        axis: mesh axis over which the rows of the head are sharded, or None.
    """

    vocab: int
    soft_cap: float | None = None
    z_loss: float = 0.0
    axis: str | None = None

    @property
    def shards(self) -> Any:
        """Into how many parts the head is split."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

    def first(self, rows: int) -> Any:
        """The word of this device's first row of the head, of which it has `rows`."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * rows

    def over_shards(self, lse: Any, hit: Any) -> tuple[Any, Any]:
        """The log-sum-exp of all words from that of this device's; and this device's part of the label's logit."""
        if self.axis is None:
            return lse, hit
        top = lax.pmax(lax.stop_gradient(lse), self.axis)
        return top + jnp.log(lax.psum(jnp.exp(lse - top), self.axis)), hit

    def part(self, lse: Any, hit: Any) -> tuple[Any, Any]:
        """This device's part of the loss of each row, and of its penalty; parts add up over the axis."""
        penalty = self.z_loss * lse * lse / self.shards
        return lse / self.shards - hit + penalty, penalty


def logits(x: Any, head: Any, terms: Terms) -> tuple[Any, Any]:
    """Logits (M, V) in float32, capped, -inf where a row of the head is no word; and the words (1, V)."""
    z = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=F32)
    if terms.soft_cap is not None:
        z = terms.soft_cap * jnp.tanh(z / terms.soft_cap)
    rows = head.shape[0]
    word = terms.first(rows) + jnp.arange(rows, dtype=jnp.int32)[None]
    if terms.shards * rows != terms.vocab:
        z = jnp.where(word < terms.vocab, z, -jnp.inf)
    return z, word


def without_ignored(x: Any, labels: Any) -> Any:
    """x with the rows of ignored labels cleared: they may hold anything, and 0 * NaN is NaN.

    Example:
        >>> without_ignored(jnp.array([[jnp.nan], [2.0]]), jnp.array([-1, 0])).tolist()
        [[0.0], [2.0]]
    """
    return jnp.where((labels < 0)[:, None], jnp.zeros((), x.dtype), x)


def scores(x: Any, head: Any, labels: Any, terms: Terms) -> tuple[Any, Any]:
    """Log-sum-exp (M,) over all words, and this device's part of the label's logit.

    Args:
        x: (M, D).
        head: (V, D), this device's rows; the product has the operands' types, and a float32 sum.
        labels: (M,) int32.
        terms: see `Terms`.
    """
    z, word = logits(x, head, terms)
    top = jnp.maximum(jnp.max(lax.stop_gradient(z), -1, keepdims=True), -1e30)
    lse = (top + jnp.log(jnp.sum(jnp.exp(z - top), -1, keepdims=True)))[:, 0]
    # a sum and no gather: a row of the head lies on one device
    return terms.over_shards(lse, jnp.sum(jnp.where(word == labels[:, None], z, 0.0), -1))


def loss(x: Any, head: Any, labels: Any, weights: Any, terms: Terms) -> tuple[Any, Any]:
    """This device's part of `sum(weights * (logsumexp(z) - z[label] + z_loss logsumexp(z)^2))`, and of its last term.

    Args:
        x: (M, D).
        head: (V, D), this device's rows.
        labels: (M,) int32; one that is no word of this device hits nothing here; rows of negative ones give 0, whatever
            they hold.
        weights: (M,) float32, 0 of negative labels.
        terms: see `Terms`.

    Example:
        >>> whole, _ = loss(jnp.zeros((1, 2)), jnp.ones((4, 2)), jnp.array([3]), jnp.ones(1), Terms(4))
        >>> round(float(whole), 4)  # log 4
        1.3863
    """
    losses, penalties = terms.part(*scores(without_ignored(x, labels), head, labels, terms))
    return jnp.sum(weights * losses), lax.stop_gradient(jnp.sum(weights * penalties))
