"""Softmax attention with grouped heads: the definition, in plain jax.numpy. It materializes all T x S scores.

A query sees a key if both have the same segment id, if the key is not at a later position (causal), and if it is less
than `window` positions back. Positions of keys count from 0, even if S is not T; positions of queries count from 0 or
from an offset. The output for a query that sees no key is 0, and its log-sum-exp is -inf. The output is NaN for a query
that has an element that is not finite, for one whose visible scores are all -inf, and for one that has a visible score
of +inf or NaN.

There are two exceptions. First, the kernels cannot distinguish scores that are all -inf (or below -5e29) from the
absence of scores, in two cases: segment ids or a window may leave a query without a key; or segment ids hide the keys
that pad S to a multiple of 128 (causal is False, or T > S). In these cases the kernels return 0. Second, an element of
`v` that is not finite makes the output NaN even for queries that do not see it: in this module for all queries, in
kernels and in chunks for the queries of the same tiles.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of attention.

    Args:
        causal: whether a query sees no key at a later position.
        window: number of positions that a query sees, ending with its own; None for no limit. Only with `causal`.
        soft_cap: the scores s become `c tanh(s / c)`, where c is this number; None for no cap.
        scale: factor of the scores.

    Raises:
        ValueError: the window is less than 1 or comes without `causal`, the cap is not a positive finite number, or the
            scale is 0 or not finite.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError(
                f"attention: got window={self.window} and causal=False, expected a window with causal=True only: "
                "drop one of the two"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window={self.window}, expected at least 1 (the query's own position)")
        if self.soft_cap is not None and not (self.soft_cap > 0 and math.isfinite(self.soft_cap)):
            raise ValueError(f"attention: logit_soft_cap={self.soft_cap}, expected a positive number, or None for none")
        if self.scale == 0 or not math.isfinite(self.scale):
            raise ValueError(f"attention: scale={self.scale}, expected a finite number that is not 0")

    def visibility(self, q_ids: Any, kv_ids: Any, offset: Any) -> Visibility:
        """Define which keys a query sees.

        Args:
            q_ids, kv_ids: segment ids (B,T) and (B,S), or None; no id stands for padding.
            offset: position of the first query, an int32 scalar; None for 0.
        """
        return Visibility(None, None, q_ids, kv_ids, self.window, self.causal, offset, padding=None)

    def is_never_blind(self, T: int, S: int, *, any_offset: bool = False) -> bool:
        """Whether positions let every query see at least one key.

        Args:
            T, S: numbers of queries and keys.
            any_offset: whether the first query may be at any position, instead of at 0.

        Example:
            >>> Options().is_never_blind(9, 3), [Options(window=2).is_never_blind(T, 3) for T in (4, 5)]
            (True, [True, False])
        """
        return self.window is None or (not any_offset and S + self.window >= T + 1)

    def count_pairs(self, T: int, S: int, *, any_offset: bool = False) -> int:
        """Count the pairs of a query and a key that positions make visible.

        Args:
            T, S: numbers of queries and keys.
            any_offset: whether the queries are some part of a sequence, at an unknown offset; if so, the result is the
                mean over the parts that start at 0, T, 2T, .. below S.

        Example:
            >>> Options(window=2).count_pairs(4, 4), Options(causal=False).count_pairs(3, 5)
            (7, 15)
            >>> Options().count_pairs(2, 8, any_offset=True), Options().count_pairs(8, 8)
            (9, 36)
        """
        part_count = -(-S // T) if any_offset else 1
        q_positions = np.arange(part_count * T)
        end_keys = np.minimum(q_positions + 1, S) if self.causal else np.full(q_positions.shape, S)
        first_keys = np.maximum(q_positions + 1 - self.window, 0) if self.window else 0
        return int((end_keys - first_keys).clip(0).sum()) // part_count


UNSEEN = -1e30
"""Score of an invisible key in an online softmax; it is finite, so that a query that sees no key gives no NaN."""


def scores(q: Any, k: Any, scale: float, soft_cap: float | None) -> Any:
    """Compute the scaled and capped scores in float32.

    Args:
        q: queries (B,T,K,G,H) with G query heads per key head; or (B,T,K,H) with one query head per key head, because
            XLA:CPU would make a transposed copy of all scores for a dim G of size 1.
        k: keys (B,S,K,H).
        scale, soft_cap: as in `Options`.

    Returns:
        The scores (B,K,G,T,S), or (B,K,T,S) if `q` has no dim G.
    """
    products = jnp.einsum(
        "btkgh,bskh->bkgts" if q.ndim == 5 else "btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32
    )
    products = products if scale == 1.0 else products * scale
    return products if soft_cap is None else soft_cap * jnp.tanh(products / soft_cap)


def cap_slope(capped: Any, soft_cap: float) -> Any:
    """Derivative of the cap, `1 - (capped / soft_cap)**2`, from the capped scores."""
    return 1 - jnp.square(capped / soft_cap)


def _scores_and_mask(
    q: Any, k: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Scores (B,K,G,T,S) in float32, and the mask (B or 1,1,1,T,S) of visible keys."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    grouped_q = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    mask = options.visibility(q_ids, kv_ids, offset).mask(jnp.arange(T), jnp.arange(S))
    return scores(grouped_q, k.astype(jnp.float32), options.scale, options.soft_cap), mask[:, None, None]


def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> tuple[Any, Any]:
    """Compute attention, and the log-sum-exp of each query's visible scores.

    Args:
        q: queries (B,T,N,H).
        k, v: keys and values (B,S,K,H); query head n reads key head n // (N / K).
        q_ids, kv_ids: segment ids (B,T) and (B,S), int32, or None.
        offset: position of the first query, an int32 scalar; None for 0.
        options: what to compute.

    Returns:
        The output (B,T,N,H) in the dtype of `q`, and the log-sum-exp (B,N,T) in float32.
    """
    B, T, N, H = q.shape
    s, mask = _scores_and_mask(q, k, q_ids, kv_ids, offset, options)
    sees_key = mask.any(-1)
    max_score = jnp.where(sees_key, jnp.max(jnp.where(mask, s, -jnp.inf), -1), 0.0)
    exp_scores = jnp.where(mask, jnp.exp(s - max_score[..., None]), 0.0)
    exp_sum = jnp.sum(exp_scores, -1)
    lse = jnp.where(sees_key, max_score + jnp.log(jnp.where(sees_key, exp_sum, 1.0)), -jnp.inf)
    probabilities = exp_scores / jnp.where(sees_key, exp_sum, 1.0)[..., None]
    out = jnp.einsum("bkgts,bskh->btkgh", probabilities, v.astype(jnp.float32)).reshape(B, T, N, H)
    nan_or_zero = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), 0.0, jnp.nan)
    return (out + nan_or_zero).astype(q.dtype), lse.reshape(B, N, T)


def backward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, out: Any, lse: Any, d_out: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Compute the gradients of q, k and v.

    Args:
        q, k, v, q_ids, kv_ids, offset, options: the arguments of `forward`.
        out, lse: the results of `forward`.
        d_out: the gradient of `out`, (B,T,N,H).

    Returns:
        The gradients of q, k and v, each with the shape and dtype of its array.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    s, mask = _scores_and_mask(q, k, q_ids, kv_ids, offset, options)
    slope = 1.0 if options.soft_cap is None else cap_slope(s, options.soft_cap)
    grouped_lse = lse.reshape(B, K, N // K, T)
    p = jnp.where(mask, jnp.exp(s - jnp.where(jnp.isneginf(grouped_lse), 0.0, grouped_lse)[..., None]), 0.0)
    grouped_d_out = d_out.reshape(B, T, K, N // K, H).astype(jnp.float32)
    grouped_out = out.reshape(grouped_d_out.shape).astype(jnp.float32)
    delta = jnp.einsum("btkgh,btkgh->bkgt", grouped_d_out, grouped_out)
    dp = jnp.einsum("btkgh,bskh->bkgts", grouped_d_out, v.astype(jnp.float32))
    ds = p * (dp - delta[..., None]) * slope * options.scale
    dq = jnp.einsum("bkgts,bskh->btkgh", ds, k.astype(jnp.float32)).reshape(q.shape)
    dk = jnp.einsum("bkgts,btkgh->bskh", ds, q.reshape(grouped_d_out.shape).astype(jnp.float32))
    dv = jnp.einsum("bkgts,btkgh->bskh", p, grouped_d_out)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
