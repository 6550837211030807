"""Cross-entropy over chunks of rows, on any platform (after Liger Kernel, Hsu et al., arXiv 2410.10989).

The forward makes both gradients of a chunk while its logits are at hand, so that no product is done twice: 3 products
of M*D*V where a kernel that makes the logits again needs 4 or 5. Logits live as (chunk, V). The weight of each row must
be known in the forward, hence the result is a sum.

Rows are (B, T): a caller whose compiler shards them names the shards, and every shard sums its gradient of the head,
which is added up once, at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import full_varying_like
from pallas_kernels.cross_entropy.reference import F32, Terms, products, score


def _unchanged(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How rows (B, T) are cut, and where the arrays of a chunk are placed.

    Args:
        length: positions of a chunk, in each shard.
        row_shards, position_shards: the numbers of shards of B and of T.
        gather: as of `reference.score`.
        dtype: of the gradient of x.
        place_logits: places (row shards, rows, position shards, positions, V).
        place_head: places the shards' gradients of the head (row shards, position shards, V, D).
    """

    length: int
    row_shards: int = 1
    position_shards: int = 1
    gather: bool = False
    dtype: Any = F32
    place_logits: Callable[[Any], Any] = _unchanged
    place_head: Callable[[Any], Any] = _unchanged

    def split(self, x: Any) -> Any:
        """(B, T, ...) to (chunks, row shards, rows, position shards, length, ...), within shards; padded with zeros."""
        batch, length = x.shape[:2]
        rows, positions = batch // self.row_shards, length // self.position_shards
        x = x.reshape(self.row_shards, rows, self.position_shards, positions, *x.shape[2:])
        pad = -x.shape[3] % self.length
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, pad),) + ((0, 0),) * (x.ndim - 4)) if pad else x
        x = x.reshape(*x.shape[:3], -1, self.length, *x.shape[4:])
        return jnp.moveaxis(x, 3, 0)

    def join(self, x: Any, batch: int, length: int) -> Any:
        """The inverse of `split`."""
        x = jnp.moveaxis(x, 0, 3)
        x = x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : length // self.position_shards]
        return x.reshape(batch, length, *x.shape[4:])


def loss(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunking: Chunking) -> tuple[Any, Any]:
    """As `reference.loss`, with the logits of one chunk at a time; no label is ignored.

    Args:
        x: (B, T, D).
        head: (V, D), this device's rows, in the type of x.
        labels, weights: (B, T), integers and float32.
        terms: see `Terms`.
        chunking: see `Chunking`.
    """

    def step(sums: Any, chunk: Any) -> tuple[Any, None]:
        x, labels, weights = chunk
        z = chunking.place_logits(products(x, head))
        losses, penalties = score(z, labels, terms, gather=chunking.gather)
        penalty = jnp.sum(penalties * weights)
        return (sums[0] + jnp.sum(losses * weights) + penalty, sums[1] + penalty), None

    zero = full_varying_like((), F32, 0.0, x, head, labels, weights)
    return lax.scan(step, (zero, zero), tuple(map(chunking.split, (x, labels, weights))))[0]


def with_gradients(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunking: Chunking) -> tuple[Any, Any]:
    """The sums of `loss`, and the gradients of the first of x, head and weights; the last two are float32."""

    def step(carry: Any, chunk: Any) -> tuple[Any, Any]:
        total, total_penalty, d_head = carry
        x, labels, weights = chunk

        def sums(z: Any) -> tuple[Any, Any]:
            losses, penalties = score(z, labels, terms, gather=chunking.gather)
            penalty = jnp.sum(penalties * weights)
            return jnp.sum(losses * weights) + penalty, (penalty, losses + penalties)

        z = chunking.place_logits(products(x, head))
        (chunk_total, (penalty, d_weights)), d_z = jax.value_and_grad(sums, has_aux=True)(z)
        d_z = d_z.astype(x.dtype)
        d_head = d_head + jnp.einsum("rbptv,rbptd->rpvd", d_z, x, preferred_element_type=F32)
        d_head = chunking.place_head(d_head)
        d_x = lax.dot_general(d_z, head, (((4,), (0,)), ((), ())), preferred_element_type=chunking.dtype)
        return (total + chunk_total, total_penalty + penalty, d_head), (d_x, d_weights)

    chunks = tuple(map(chunking.split, (x, labels, weights)))
    d_head = full_varying_like(
        (chunking.row_shards, chunking.position_shards, *head.shape), F32, 0.0, x, head, labels, weights
    )
    d_head = chunking.place_head(d_head)
    zero = full_varying_like((), F32, 0.0, x, head, labels, weights)
    (total, penalty, d_head), gradients = lax.scan(step, (zero, zero, d_head), chunks)
    d_x, d_weights = (chunking.join(gradient, *labels.shape) for gradient in gradients)
    return (total, penalty), (d_x, jnp.sum(d_head, (0, 1)), d_weights)
