"""Softmax cross-entropy of a linear layer, as this device's part of a weighted sum: the definition. It holds logits.

What every implementation shares is here too: which rows of the head are words, and the log-sum-exp over a vocabulary
that is sharded.
"""

import dataclasses
from typing import Any

import jax
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
        penalty = self.z_loss * jnp.square(lse) if self.z_loss else jnp.zeros_like(lse)
        return (lse - hit, penalty) if self.axis is None else (lse / self.shards - hit, penalty / self.shards)


def products(x: Any, head: Any) -> Any:
    """`x @ head.T` (..., V) of operands of one type, with a float32 sum."""
    return lax.dot_general(x, head, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=F32)


def logits(z: Any, terms: Terms) -> Any:
    """Logits from products (..., V): capped, and -inf where a row of the head is no word."""
    if terms.soft_cap is not None:
        z = terms.soft_cap * jnp.tanh(z / terms.soft_cap)
    rows = z.shape[-1]
    if terms.shards * rows == terms.vocab:
        return z
    is_word = terms.first(rows) + jnp.arange(rows) < terms.vocab
    return jnp.where(is_word.reshape((1,) * (z.ndim - 1) + is_word.shape), z, -jnp.inf)


def without_ignored(x: Any, labels: Any) -> Any:
    """x with the rows of ignored labels cleared: they may hold anything, and 0 * NaN is NaN.

    Example:
        >>> without_ignored(jnp.array([[jnp.nan], [2.0]]), jnp.array([-1, 0])).tolist()
        [[0.0], [2.0]]
    """
    return jnp.where((labels < 0)[:, None], jnp.zeros((), x.dtype), x)


def score(z: Any, labels: Any, terms: Terms, *, gather: bool = False) -> tuple[Any, Any]:
    """This device's parts of the loss and of the penalty of each row, unweighted.

    Args:
        z: products (..., V) with this device's rows of the head.
        labels: (...) integers.
        terms: see `Terms`.
        gather: look the label's logit up, where the vocabulary is whole; else a sum over all words finds it, since a
            gather along a sharded dim would gather the logits.
    """
    z = logits(z, terms)
    lse = jax.nn.logsumexp(z, -1)
    if gather:
        hit = jnp.take_along_axis(z, labels[..., None], -1, mode="clip")[..., 0]
    else:
        words = lax.broadcasted_iota(labels.dtype, z.shape, z.ndim - 1)
        words = words if terms.axis is None else words + terms.first(z.shape[-1])
        hit = jnp.sum(jnp.where(words == labels[..., None], z, 0.0), -1)
    return terms.part(*terms.over_shards(lse, hit))


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
    losses, penalties = score(products(without_ignored(x, labels), head), labels, terms)
    penalty = jnp.sum(weights * penalties)
    return jnp.sum(weights * losses) + penalty, lax.stop_gradient(penalty)
