"""Cross-entropy over chunks of rows, on any platform (after Liger Kernel, Hsu et al., arXiv 2410.10989).

The forward makes both gradients of a chunk while its logits are at hand, so that no product is done twice: 3 products
of M*D*V where a kernel that makes the logits again needs 4 or 5. Logits live as (chunk, V). The weight of each row must
be known in the forward, hence the result is a sum.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import varying_alike
from pallas_kernels.cross_entropy import reference
from pallas_kernels.cross_entropy.reference import F32, Terms


def _chunks(a: Any, chunk: int) -> Any:
    """(M, ...) to (chunks, chunk, ...), with zeros behind."""
    pad = -a.shape[0] % chunk
    a = jnp.pad(a, ((0, pad),) + ((0, 0),) * (a.ndim - 1)) if pad else a
    return a.reshape(-1, chunk, *a.shape[1:])


def loss(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunk: int) -> tuple[Any, Any]:
    """As `reference.loss`, with (chunk, V) logits at a time.

    Args:
        x, head, labels, weights, terms: as there.
        chunk: rows.
    """

    def one(sums: Any, rows: Any) -> tuple[Any, None]:
        x, labels, weights = rows
        found = reference.loss(x, head, labels, weights, terms)
        return (sums[0] + found[0], sums[1] + found[1]), None

    zero = varying_alike(jnp.zeros((), F32), x, head, labels, weights)[0]
    # the penalty is the same on every shard, and yet counted as varying: as the total
    return lax.scan(one, (zero, zero), tuple(_chunks(a, chunk) for a in (x, labels, weights)))[0]


def with_gradients(x: Any, head: Any, labels: Any, weights: Any, terms: Terms, chunk: int) -> tuple[Any, Any]:
    """The parts of `loss`, and their gradients of x, head and weights in float32: whoever scales them rounds once."""

    def one(carry: Any, rows: Any) -> tuple[Any, Any]:
        total, penalty, d_head = carry
        x, labels, weights = rows
        x = reference.without_ignored(x, labels)
        z, word = reference.logits(x, head, terms)
        top = jnp.maximum(jnp.max(z, -1, keepdims=True), -1e30)
        lse = (top + jnp.log(jnp.sum(jnp.exp(z - top), -1, keepdims=True)))[:, 0]
        label = word == labels[:, None]
        lse, hit = terms.over_shards(lse, jnp.sum(jnp.where(label, z, 0.0), -1))
        losses, penalties = terms.part(lse, hit)
        slope = 1 + 2 * terms.z_loss * lse
        d = weights[:, None] * (slope[:, None] * jnp.exp(z - lse[:, None]) - label)
        if terms.soft_cap is not None:
            inside = jnp.where(z > -jnp.inf, z / terms.soft_cap, 0.0)
            d = d * (1 - inside * inside)
        d = d.astype(x.dtype)
        d_x = lax.dot_general(d, head, (((1,), (0,)), ((), ())), preferred_element_type=F32)
        d_head = d_head + lax.dot_general(d, x, (((0,), (0,)), ((), ())), preferred_element_type=F32)
        sums = total + jnp.sum(weights * losses), penalty + jnp.sum(weights * penalties)
        return (*sums, d_head), (d_x, losses)

    zero, d_head = varying_alike(jnp.zeros((), F32), jnp.zeros(head.shape, F32), x, head, labels, weights)[:2]
    rows = tuple(_chunks(a, chunk) for a in (x, labels, weights))
    (total, penalty, d_head), (d_x, d_weights) = lax.scan(one, (zero, zero, d_head), rows)
    count = x.shape[0]
    d_x, d_weights = d_x.reshape(-1, x.shape[1])[:count], d_weights.reshape(-1)[:count]
    return (total, penalty), (d_x, d_head, d_weights)
