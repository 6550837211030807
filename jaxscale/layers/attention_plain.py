"""Attention as it is defined: all scores at once, softmax in float32. The reference of the other implementations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.layers.visibility import Visibility
from jaxscale.typing import Array, Float

UNSEEN = -1e30
"""Score of a key that is not seen: finite, so that a query that sees none gives no NaN."""


def scale_exactly(q: Any, scale: float) -> tuple[Any, float]:
    """`q` scaled, and what is left to scale the scores by: a narrow `q` is scaled only where that rounds nothing."""
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def attend_plain(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visibility: Visibility,
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    """`softmax(cap(scale * q k^T)) v` over the visible keys; zeros for a query that sees none."""
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    q, left = scale_exactly(q.reshape(batch, queries, groups, heads // groups, width), scale)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scores if left == 1.0 else scores * left
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if visibility.trivial:
        chances = jax.nn.softmax(scores, -1)
    else:
        seen = visibility.mask(jnp.arange(queries), jnp.arange(keys))[:, None, None, :, :]
        chances = jax.nn.softmax(jnp.where(seen, scores, UNSEEN), -1)
        if visibility.may_be_blind(queries, keys):
            chances = jnp.where(jnp.any(seen, -1, keepdims=True), chances, 0.0)
    out = jnp.einsum("bkgts,bskh->btkgh", chances.astype(v.dtype), v)
    return checkpoint_name(out.reshape(batch, queries, heads, width), "attention_out")
