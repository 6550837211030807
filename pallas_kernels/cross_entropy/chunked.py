"""Cross-entropy over chunks of rows, on any platform (after Liger Kernel, Hsu et al., arXiv 2410.10989).

The forward pass computes the gradients of a chunk while its logits exist, so that no product is computed twice: in
total this takes 3 products of M*D*V. A kernel that recomputes the logits takes 4 or 5. Only the logits (chunk, V) of
one chunk exist at a time. The weight of each row must be known in the forward pass, so the result is a weighted sum.

Rows are (B, T). A caller whose compiler shards B and T specifies the numbers of shards. Every shard then sums its own
gradient of the head, and the sums are added up once, at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import full_varying_like
from pallas_kernels.cross_entropy.reference import F32, Terms, head_products, row_losses


def _unchanged(x: Any) -> Any:
    """Return the array without constraining its sharding."""
    return x


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How rows (B, T) are split into chunks, and how the arrays of a chunk are sharded.

    Args:
        length: number of positions of a chunk in each shard.
        row_shards, position_shards: numbers of shards of B and of T.
        gather: as in `reference.row_losses`.
        dtype: dtype of the gradient of x.
        place_logits: constrains the sharding of logits (row shards, rows, position shards, positions, V).
        place_head: constrains the sharding of the shards' gradients of the head (row shards, position shards, V, D).
    """

    length: int
    row_shards: int = 1
    position_shards: int = 1
    gather: bool = False
    dtype: Any = F32
    place_logits: Callable[[Any], Any] = _unchanged
    place_head: Callable[[Any], Any] = _unchanged

    def split(self, x: Any) -> Any:
        """Split (B, T, ...) into (chunks, row shards, rows, position shards, length, ...), with zeros as padding."""
        batch, length = x.shape[:2]
        rows, positions = batch // self.row_shards, length // self.position_shards
        shards = x.reshape(self.row_shards, rows, self.position_shards, positions, *x.shape[2:])
        padding = -positions % self.length
        if padding:
            shards = jnp.pad(shards, ((0, 0),) * 3 + ((0, padding),) + ((0, 0),) * (shards.ndim - 4))
        chunks = shards.reshape(*shards.shape[:3], -1, self.length, *shards.shape[4:])
        return jnp.moveaxis(chunks, 3, 0)

    def join(self, chunks: Any, batch: int, length: int) -> Any:
        """Join the chunks that `split` returns into (batch, length, ...), without the padding."""
        x = jnp.moveaxis(chunks, 0, 3)
        shards = x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : length // self.position_shards]
        return shards.reshape(batch, length, *shards.shape[4:])


def loss(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunking: Chunking) -> tuple[Any, Any]:
    """Compute what `reference.loss` computes, with the logits of one chunk at a time; negative labels are not ignored.

    Args:
        x: the inputs of the linear layer (B, T, D).
        head: this device's rows of the head (V, D), in the dtype of x.
        labels, weights: (B, T), integers and float32.
        terms: the options of the loss.
        chunking: how rows are split into chunks.

    Returns:
        This device's share of the sum, penalty included; and its share of the penalty alone.
    """

    def add_chunk(sums: Any, chunk: Any) -> tuple[Any, None]:
        total, total_penalty = sums
        x, labels, weights = chunk
        products = chunking.place_logits(head_products(x, head))
        losses, penalties = row_losses(products, labels, terms, gather=chunking.gather)
        penalty = jnp.sum(penalties * weights)
        return (total + jnp.sum(losses * weights) + penalty, total_penalty + penalty), None

    zero = full_varying_like((), F32, 0.0, x, head, labels, weights)
    return lax.scan(add_chunk, (zero, zero), tuple(map(chunking.split, (x, labels, weights))))[0]


def with_gradients(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunking: Chunking) -> tuple[Any, Any]:
    """Compute the sums of `loss`, and the gradients of the first sum.

    Returns:
        The results of `loss`; and the gradients of the sum with respect to x (in the dtype of `chunking`), the head and
        the weights (both float32).
    """

    def add_chunk(carry: Any, chunk: Any) -> tuple[Any, Any]:
        total, total_penalty, d_head = carry
        x, labels, weights = chunk

        def chunk_sums(products: Any) -> tuple[Any, Any]:
            losses, penalties = row_losses(products, labels, terms, gather=chunking.gather)
            penalty = jnp.sum(penalties * weights)
            return jnp.sum(losses * weights) + penalty, (penalty, losses + penalties)

        products = chunking.place_logits(head_products(x, head))
        (chunk_total, (penalty, d_weights)), d_products = jax.value_and_grad(chunk_sums, has_aux=True)(products)
        narrow_d_products = d_products.astype(x.dtype)
        new_d_head = d_head + jnp.einsum("rbptv,rbptd->rpvd", narrow_d_products, x, preferred_element_type=F32)
        new_d_head = chunking.place_head(new_d_head)
        d_x = lax.dot_general(narrow_d_products, head, (((4,), (0,)), ((), ())), preferred_element_type=chunking.dtype)
        return (total + chunk_total, total_penalty + penalty, new_d_head), (d_x, d_weights)

    chunks = tuple(map(chunking.split, (x, labels, weights)))
    d_head_shape = (chunking.row_shards, chunking.position_shards, *head.shape)
    zero_d_head = full_varying_like(d_head_shape, F32, 0.0, x, head, labels, weights)
    zero_d_head = chunking.place_head(zero_d_head)
    zero = full_varying_like((), F32, 0.0, x, head, labels, weights)
    (total, penalty, d_head_shards), gradient_chunks = lax.scan(add_chunk, (zero, zero, zero_d_head), chunks)
    d_x, d_weights = (chunking.join(gradient, *labels.shape) for gradient in gradient_chunks)
    return (total, penalty), (d_x, jnp.sum(d_head_shards, (0, 1)), d_weights)
