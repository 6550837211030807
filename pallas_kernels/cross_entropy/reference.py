"""Softmax cross-entropy of a linear layer, as this device's share of a weighted sum: the definition, with all logits.

The functions that every implementation shares are here, too: which rows of the head are words, and the log-sum-exp over
a sharded vocabulary. If the head is sharded, the shares of all devices add up to the sum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Terms:
    """The options of the loss.

    Args:
        vocab: number of words; later rows of the head are padding.
        soft_cap: the logits z become `c tanh(z / c)`, where c is this number; None for no cap.
        z_loss: factor of the penalty `logsumexp(z)^2`.
        axis: mesh axis over which the rows of the head are sharded; None if they are not.
    """

    vocab: int
    soft_cap: float | None = None
    z_loss: float = 0.0
    axis: str | None = None

    @property
    def shard_count(self) -> Any:
        """Number of shards of the head."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

    def first_word(self, rows: int) -> Any:
        """The word that belongs to the first row of this device's shard of the head; the shard has `rows` rows."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * rows

    def lse_over_shards(self, lse: Any) -> Any:
        """The log-sum-exp over all words, from this device's log-sum-exp over the words of its shard."""
        if self.axis is None:
            return lse
        max_lse = lax.pmax(lax.stop_gradient(lse), self.axis)
        return max_lse + jnp.log(lax.psum(jnp.exp(lse - max_lse), self.axis))

    def loss_share(self, lse: Any, label_logit: Any) -> tuple[Any, Any]:
        """This device's shares of each row's loss (without the penalty) and of each row's penalty.

        Args:
            lse: the log-sum-exp over all words.
            label_logit: the logit of the label if its word is in this device's shard of the head, else 0.
        """
        penalty = self.z_loss * jnp.square(lse) if self.z_loss else jnp.zeros_like(lse)
        if self.axis is None:
            return lse - label_logit, penalty
        return lse / self.shard_count - label_logit, penalty / self.shard_count


def head_products(x: Any, head: Any) -> Any:
    """Compute `x @ head.T` (..., V) with float32 sums, from operands of one dtype."""
    return lax.dot_general(x, head, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=F32)


def logits(products: Any, terms: Terms) -> Any:
    """Compute logits from products (..., V): they are capped, and -inf where a row of the head is padding."""
    z = products if terms.soft_cap is None else terms.soft_cap * jnp.tanh(products / terms.soft_cap)
    rows = z.shape[-1]
    if terms.shard_count * rows == terms.vocab:
        return z
    is_word = terms.first_word(rows) + jnp.arange(rows) < terms.vocab
    return jnp.where(is_word.reshape((1,) * (z.ndim - 1) + is_word.shape), z, -jnp.inf)


def without_ignored(x: Any, labels: Any) -> Any:
    """Set the rows of x with ignored labels to 0: they may contain anything, and 0 * NaN is NaN.

    Example:
        >>> without_ignored(jnp.array([[jnp.nan], [2.0]]), jnp.array([-1, 0])).tolist()
        [[0.0], [2.0]]
    """
    return jnp.where((labels < 0)[:, None], jnp.zeros((), x.dtype), x)


def row_losses(products: Any, labels: Any, terms: Terms, *, gather: bool = False) -> tuple[Any, Any]:
    """Compute this device's shares of each row's loss (without the penalty) and of each row's penalty, both unweighted.

    Args:
        products: products (..., V) of x with this device's rows of the head.
        labels: the labels (...), integers.
        terms: the options of the loss.
        gather: whether to gather the label's logit. This requires that the vocabulary is not sharded, because a gather
            along a sharded dim would gather all logits; by default the logit is found by a sum over all words.
    """
    z = logits(products, terms)
    lse = jax.nn.logsumexp(z, -1)
    first_word = 0 if terms.axis is None else terms.first_word(z.shape[-1])
    label_logit = values_at(z, labels, first_word, gather=gather)
    return terms.loss_share(terms.lse_over_shards(lse), label_logit)


def values_at(x: Any, indices: Any, first_index: Any = 0, *, gather: bool = False) -> Any:
    """Return the element of each row of x (..., V) at the row's index, or 0 if x does not hold that index.

    Args:
        x: values (..., V).
        indices: one index per row (...), integers.
        first_index: index of the first of the V elements.
        gather: whether to gather the elements. Then x must hold all elements, and an index that is not one of them
            gives any element. By default, the other elements are set to 0, and each row is summed: the gradient is then
            an expression of the indices, which needs no array of its own.

    Example:
        >>> values_at(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
        [2.0, 3.0]
    """
    indices = indices.astype(jnp.int32)[..., None]  # 8 bits may not hold all V indices
    if gather:
        return jnp.take_along_axis(x, indices, -1, mode="clip")[..., 0]
    held_indices = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) + first_index
    return jnp.sum(jnp.where(held_indices == indices, x, 0.0), -1)


def loss(x: Any, head: Any, labels: Any, weights: Any, terms: Terms) -> tuple[Any, Any]:
    """Compute this device's share of `sum(weights * (logsumexp(z) - z[label] + z_loss logsumexp(z)^2))`.

    Args:
        x: the inputs of the linear layer (M, D).
        head: this device's rows of the head (V, D).
        labels: (M,) int32. Rows with negative labels give 0, whatever they contain.
        weights: (M,) float32, 0 for rows with negative labels.
        terms: the options of the loss.

    Returns:
        This device's share of the sum; and its share of the sum of the last terms, the penalty, which has no gradient.

    Example:
        >>> total, _ = loss(jnp.zeros((1, 2)), jnp.ones((4, 2)), jnp.array([3]), jnp.ones(1), Terms(4))
        >>> round(float(total), 4)  # log 4
        1.3863
    """
    losses, penalties = row_losses(head_products(without_ignored(x, labels), head), labels, terms)
    penalty = jnp.sum(weights * penalties)
    return jnp.sum(weights * losses) + penalty, lax.stop_gradient(penalty)
