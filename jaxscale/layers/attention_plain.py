"""Attention by its definition: all scores at once, softmax in float32. The reference of the other implementations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.layers.visibility import Visibility
from jaxscale.typing import Array, Float

UNSEEN = -1e30
"""Score of an invisible key: finite, so that a query that sees none gives no NaN."""

_SINGLE = ("btnh,bsnh->bnts", "bnts,bsnh->btnh")
_GROUPED = ("btkgh,bskh->bkgts", "bkgts,bskh->btkgh")


def scale_exactly(q: Any, scale: float) -> tuple[Any, float]:
    """`q` scaled, and the remaining scale of the scores: a narrow `q` is scaled only if that rounds nothing."""
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
    # a dim of one head per group would cost XLA:CPU a transposed copy of all scores
    grouped = heads != groups
    per_head = (groups, heads // groups) if grouped else (heads,)
    to_scores, to_values = _GROUPED if grouped else _SINGLE
    q, remaining_scale = scale_exactly(q.reshape(batch, queries, *per_head, width), scale)
    scores = jnp.einsum(to_scores, q, k, preferred_element_type=jnp.float32)
    scores = scores if remaining_scale == 1.0 else scores * remaining_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if visibility.trivial:
        probabilities = jax.nn.softmax(scores, -1)
    else:
        visible = visibility.mask(jnp.arange(queries), jnp.arange(keys))
        visible = jnp.expand_dims(visible, (1, 2) if grouped else 1)
        probabilities = jax.nn.softmax(jnp.where(visible, scores, UNSEEN), -1)
        if visibility.may_be_blind(queries, keys):
            probabilities = jnp.where(jnp.any(visible, -1, keepdims=True), probabilities, 0.0)
    out = jnp.einsum(to_values, probabilities.astype(v.dtype), v)
    return checkpoint_name(out.reshape(batch, queries, heads, width), "attention_out")
