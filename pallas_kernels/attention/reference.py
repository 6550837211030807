"""Softmax attention with grouped heads: the definition, in plain jax.numpy. It holds all T x S scores.

A query sees a key when both carry the same segment id, when the key is not in its future (causal), and when it is less
than `window` positions back. Positions count from 0 on both sides, also where S is not T; those of queries from an
offset where one is given. A query that sees no key gives 0, and its log-sum-exp is -inf; one with a value that is not
finite gives NaN, and so does one whose scores are all -inf, or one of them +inf or NaN.

Two exceptions: the kernels cannot distinguish scores that are all -inf (or below -5e29) from no scores where segment
ids or a window may leave a query no key, or where ids hide keys that fill up a length (causal is False, or T > S, and S
no multiple of 128): there they give 0. And a value (of `v`) that is not finite makes queries NaN from which it is
hidden: all of them here, with kernels and chunks those of its tiles.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Options:
    """What attention computes, besides its arrays.

    Args:
        causal: a query sees no key of a later position.
        window: keys that a query sees, itself included; None for all.
        soft_cap: c of `c tanh(s / c)` on the scores; None for none.
        scale: of the scores.

    Raises:
        ValueError: a window that looks forward or is empty, a cap that is not positive, a scale that is 0 or NaN.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError(f"attention: window={self.window} looks back from a query, and causal is False: drop one")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window={self.window}, expected at least 1 (the query's own position)")
        if self.soft_cap is not None and not (self.soft_cap > 0 and math.isfinite(self.soft_cap)):
            raise ValueError(f"attention: logit_soft_cap={self.soft_cap}, expected a positive number, or None for none")
        if self.scale == 0 or not math.isfinite(self.scale):
            raise ValueError(f"attention: scale={self.scale}, expected a finite number that is not 0")

    def visibility(self, q_ids: Any, kv_ids: Any, offset: Any) -> Visibility:
        """Which keys a query sees.

        Args:
            q_ids, kv_ids: segment ids (B,T) and (B,S), or None; no id is padding.
            offset: position of the first query, an int32 scalar; None for 0.
        """
        return Visibility(None, None, q_ids, kv_ids, self.window, self.causal, offset, padding=None)

    def sighted(self, T: int, S: int, *, anywhere: bool = False) -> bool:
        """Whether the positions let every query see a key.

        Args:
            T, S: queries and keys.
            anywhere: the queries may start at any position.

        Example:
            >>> Options().sighted(9, 3), Options(window=2).sighted(4, 3), Options(window=2).sighted(5, 3)
            (True, True, False)
        """
        return self.window is None or (not anywhere and S + self.window >= T + 1)

    def pairs(self, T: int, S: int, *, anywhere: bool = False) -> int:
        """How many (query, key) pairs the positions let see each other.

        Args:
            T, S: queries and keys.
            anywhere: the queries are a part of a sequence, and which one is not known: the mean over the parts that
                start at 0, T, 2T, .. before S.

        Example:
            >>> Options(window=2).pairs(4, 4), Options(causal=False).pairs(3, 5), Options().pairs(3, 2)
            (7, 15, 5)
            >>> Options().pairs(2, 8, anywhere=True), Options().pairs(8, 8)
            (9, 36)
        """
        parts = -(-S // T) if anywhere else 1
        t = np.arange(parts * T)
        end = np.minimum(t + 1, S) if self.causal else np.full(t.shape, S)
        start = np.maximum(t + 1 - self.window, 0) if self.window else 0
        return int((end - start).clip(0).sum()) // parts


UNSEEN = -1e30
"""Score of an invisible key where implementations add up: finite, so that a query that sees none gives no NaN."""


def scores(q: Any, k: Any, scale: float, soft_cap: float | None) -> Any:
    """Capped scores in float32.

    Args:
        q: (B,T,K,G,H), or (B,T,K,H) with one query head for each key head: a dim of one head per group would cost
            XLA:CPU a transposed copy of all scores.
        k: (B,S,K,H).
        scale, soft_cap: as of `Options`.

    Returns:
        (B,K,G,T,S), or (B,K,T,S).
    """
    products = jnp.einsum(
        "btkgh,bskh->bkgts" if q.ndim == 5 else "btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32
    )
    products = products if scale == 1.0 else products * scale
    return products if soft_cap is None else soft_cap * jnp.tanh(products / soft_cap)


def cap_slope(capped: Any, soft_cap: float) -> Any:
    """The derivative of the cap, from capped scores."""
    return 1 - jnp.square(capped / soft_cap)


def _scores_and_mask(
    q: Any, k: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Scores (B,K,G,T,S) in float32, and which keys are visible (B or 1,1,1,T,S)."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    grouped = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    mask = options.visibility(q_ids, kv_ids, offset).mask(jnp.arange(T), jnp.arange(S))
    return scores(grouped, k.astype(jnp.float32), options.scale, options.soft_cap), mask[:, None, None]


def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> tuple[Any, Any]:
    """Attention, and the log-sum-exp of each query's visible scores.

    Args:
        q: queries (B,T,N,H).
        k, v: keys and values (B,S,K,H); query head n reads key head n // (N / K).
        q_ids, kv_ids: segment ids (B,T) and (B,S), int32, or None.
        offset: position of the first query, an int32 scalar; None for 0.
        options: what to compute.

    Returns:
        (B,T,N,H) in the type of `q`, and (B,N,T) in float32.
    """
    B, T, N, H = q.shape
    s, seen = _scores_and_mask(q, k, q_ids, kv_ids, offset, options)
    some = seen.any(-1)
    top = jnp.where(some, jnp.max(jnp.where(seen, s, -jnp.inf), -1), 0.0)
    p = jnp.where(seen, jnp.exp(s - top[..., None]), 0.0)
    total = jnp.sum(p, -1)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    p = p / jnp.where(some, total, 1.0)[..., None]
    out = jnp.einsum("bkgts,bskh->btkgh", p, v.astype(jnp.float32)).reshape(B, T, N, H)
    broken = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), 0.0, jnp.nan)
    return (out + broken).astype(q.dtype), lse.reshape(B, N, T)


def backward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, out: Any, lse: Any, d_out: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v, each in its type.

    Args:
        q, k, v, q_ids, kv_ids, offset, options: as of `forward`.
        out, lse: what it returned.
        d_out: the gradient of `out`, (B,T,N,H).
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    s, seen = _scores_and_mask(q, k, q_ids, kv_ids, offset, options)
    slope = 1.0 if options.soft_cap is None else cap_slope(s, options.soft_cap)
    lse = lse.reshape(B, K, N // K, T)
    p = jnp.where(seen, jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]), 0.0)
    d = d_out.reshape(B, T, K, N // K, H).astype(jnp.float32)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d, out.reshape(d.shape).astype(jnp.float32))
    dp = jnp.einsum("btkgh,bskh->bkgts", d, v.astype(jnp.float32))
    ds = p * (dp - delta[..., None]) * slope * options.scale
    dq = jnp.einsum("bkgts,bskh->btkgh", ds, k.astype(jnp.float32)).reshape(q.shape)
    dk = jnp.einsum("bkgts,btkgh->bskh", ds, q.reshape(d.shape).astype(jnp.float32))
    dv = jnp.einsum("bkgts,btkgh->bskh", p, d)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
