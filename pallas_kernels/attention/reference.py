"""Softmax attention with grouped heads: the definition, in plain jax.numpy. It holds all T x S scores.

A query sees a key when both carry the same segment id, when the key is not in its future (causal), and when it is less
than `window` positions back. Positions count from 0 on both sides, also where S is not T; those of queries from an
offset where one is given. A query that sees no key gives 0, and its log-sum-exp is -inf; one with a value that is not
finite gives NaN, and so does one whose scores are all -inf, or one of them +inf or NaN.

Two exceptions: the kernels cannot tell scores that are all -inf (below -5e29 counts as that) from none where segment
ids or a window may leave a query no key, or where ids hide keys that fill up a length (causal is False, or T > S, and S
no multiple of 128): there they give 0. And a value (of `v`) that is not finite makes queries NaN from which it is
hidden: all of them here, with kernels and chunks those of its tiles.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


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


def visible(options: Options, t: Any, u: Any, q_ids: Any, kv_ids: Any) -> Any:
    """Whether queries see keys, (B or 1, queries, keys).

    Args:
        options: causal and window.
        t, u: positions of the queries and of the keys, 1-D.
        q_ids, kv_ids: segment ids (B, queries) and (B, keys), or None.
    """
    back = t[:, None] - u[None, :]
    seen = jnp.ones((1, *back.shape), bool)
    if options.causal:
        seen &= (back >= 0)[None]
    if options.window is not None:
        seen &= (back < options.window)[None]
    return seen if q_ids is None else seen & (q_ids[:, :, None] == kv_ids[:, None, :])


def _scores(q: Any, k: Any, options: Options) -> tuple[Any, Any]:
    """Scores (B,K,G,T,S) in float32, and the derivative of the cap."""
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k.astype(jnp.float32)) * options.scale
    if options.soft_cap is None:
        return s, 1.0
    capped = jnp.tanh(s / options.soft_cap)
    return options.soft_cap * capped, 1 - jnp.square(capped)


def _seen(q: Any, k: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> Any:
    t = jnp.arange(q.shape[1])
    t = t if offset is None else t + offset
    return visible(options, t, jnp.arange(k.shape[1]), q_ids, kv_ids)[:, None, None]


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
    s, _ = _scores(q, k, options)
    seen = _seen(q, k, q_ids, kv_ids, offset, options)
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
    s, slope = _scores(q, k, options)
    seen = _seen(q, k, q_ids, kv_ids, offset, options)
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
