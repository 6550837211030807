"""Attention that never holds T x S, in plain JAX: an online softmax over chunks of keys (Rabe and Staats,
arXiv 2112.05682), and a backward that recomputes the scores chunk by chunk (Dao et al., arXiv 2205.14135).

Chunks that positions hide from all queries of a chunk are not visited. It runs anywhere; memory grows with T + S.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import Options, visible
from pallas_kernels.compat import filled

CHUNK = 256
"""Queries and keys at a time."""

F32 = jnp.float32
UNSEEN = float(jnp.finfo(F32).min)
"""Stands for -inf: a row that has seen nothing yet never makes a NaN."""


def _chunks(x: Any, width: int, axis: int = 1, value: float = 0) -> Any:
    """Cut an axis into chunks (chunks, ...), the last filled up."""
    fill = [(0, 0)] * x.ndim
    fill[axis] = (0, -x.shape[axis] % width)
    x = jnp.pad(x, fill, constant_values=value)
    x = x.reshape(*x.shape[:axis], -1, width, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _whole(x: Any, length: int, axis: int = 1) -> Any:
    """The inverse of `_chunks`."""
    x = jnp.moveaxis(x, 0, axis)
    return lax.slice_in_dim(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), 0, length, axis=axis)


def _reach(options: Options, t0: Any, width: int, S: int, step: int) -> tuple[Any, Any]:
    """First and past-the-last chunk of keys that the queries at positions t0 .. t0 + width may see."""
    first, end = t0 * 0, t0 * 0 + -(-S // step)
    if options.causal:
        end = jnp.minimum(end, (t0 + width - 1) // step + 1)
    if options.window is not None:
        first = jnp.minimum(jnp.maximum(t0 - (options.window - 1), 0) // step, end)
    return first, end


def _starts(count: int, width: int, offset: Any) -> Any:
    """Positions of the chunks' first queries."""
    starts = jnp.arange(count) * width
    return starts if offset is None else starts + offset


class _Pair:
    """A chunk of queries against chunks of keys: scores, and who sees whom."""

    def __init__(self, q: Any, t0: Any, ids: Any, keys: tuple[Any, Any, int], options: Options) -> None:
        self.q, self.t0, self.ids, self.options = q, t0, ids, options
        self.k, self.key_ids, self.S = keys

    def scores(self, j: Any) -> tuple[Any, Any, Any]:
        """Scores (B,K,G,queries,keys) in float32, the cap's derivative, and which pairs are visible."""
        k = self.k[j]
        s = jnp.einsum("btkgh,bskh->bkgts", self.q, k, preferred_element_type=jnp.float32) * self.options.scale
        slope: Any = 1.0
        if self.options.soft_cap is not None:
            s = jnp.tanh(s / self.options.soft_cap)
            slope, s = 1 - jnp.square(s), self.options.soft_cap * s
        t = self.t0 + jnp.arange(self.q.shape[1])
        u = j * k.shape[1] + jnp.arange(k.shape[1])
        seen = visible(self.options, t, u, self.ids, None if self.ids is None else self.key_ids[j])
        return s, slope, (seen & (u < self.S)[None, None])[:, None, None]


def _split(q: Any, k: Any, q_ids: Any, kv_ids: Any) -> tuple[Any, Any, Any, Any, int, int]:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    width, step = min(CHUNK, T), min(CHUNK, S)
    ids = None if q_ids is None else _chunks(q_ids, width)
    key_ids = None if kv_ids is None else _chunks(kv_ids, step)
    return _chunks(q.reshape(B, T, K, N // K, H), width), _chunks(k, step), ids, key_ids, width, step


def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> tuple[Any, Any]:
    """As `reference.forward`."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    queries, keys, ids, key_ids, width, step = _split(q, k, q_ids, kv_ids)
    values = _chunks(v, step)

    def one(chunk: Any) -> tuple[Any, Any]:
        t0, q_i, ids_i = chunk
        pair = _Pair(q_i, t0, ids_i, (keys, key_ids, S), options)

        def add(j: Any, carry: Any) -> Any:
            some, top, total, out = carry
            s, _, seen = pair.scores(j)
            s = jnp.where(seen, s, UNSEEN)
            new = jnp.maximum(top, jnp.max(s, -1))
            p = jnp.where(seen, jnp.exp(s - new[..., None]), 0.0)
            fade = jnp.exp(top - new)
            more = jnp.einsum("bkgts,bskh->bkgth", p.astype(v.dtype), values[j], preferred_element_type=jnp.float32)
            return some | seen.any(-1), new, total * fade + jnp.sum(p, -1), out * fade[..., None] + more

        row = (B, K, N // K, width)
        wanted = ((row, UNSEEN), (row, 0.0), ((*row, H), 0.0))
        start = tuple(filled(shape, F32, value, q, k, v) for shape, value in wanted)
        none = filled((B, 1, 1, width), bool, False, q, k, v)
        some, top, total, out = lax.fori_loop(*_reach(options, t0, width, S, step), add, (none, *start))
        # where keys are seen and nothing adds up, all scores are -inf
        total = jnp.where(some, jnp.where(total == 0, jnp.nan, total), 1.0)
        broken = jnp.where(jnp.isfinite(q_i).all(-1), 0.0, jnp.nan)[..., None]
        out = jnp.einsum("bkgth->btkgh", out / total[..., None]) + broken
        return out.astype(q.dtype), jnp.where(some, top + jnp.log(total), -jnp.inf)

    out, lse = lax.map(one, (_starts(queries.shape[0], width, offset), queries, ids))
    return _whole(out, T).reshape(q.shape), _whole(lse, T, 3).reshape(B, N, T)


def backward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, out: Any, lse: Any, d_out: Any, options: Options
) -> tuple[Any, Any, Any]:
    """As `reference.backward`."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    queries, keys, ids, key_ids, width, step = _split(q, k, q_ids, kv_ids)
    values = _chunks(v, step)
    grouped = (B, T, K, N // K, H)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d_out.reshape(grouped), out.reshape(grouped), preferred_element_type=F32)
    rows = [_chunks(x.reshape(B, K, N // K, T), width, 3) for x in (jnp.where(jnp.isneginf(lse), 0.0, lse), delta)]
    starts = _starts(queries.shape[0], width, offset)
    by_query = (starts, queries, _chunks(d_out.reshape(grouped), width), ids, *rows)

    def one(carry: Any, chunk: Any) -> tuple[Any, Any]:
        t0, q_i, d_i, ids_i, lse_i, delta_i = chunk
        pair = _Pair(q_i, t0, ids_i, (keys, key_ids, S), options)

        def add(j: Any, carry: Any) -> Any:
            dq_i, dk, dv = carry
            s, slope, seen = pair.scores(j)
            p = jnp.where(seen, jnp.exp(s - lse_i[..., None]), 0.0)
            dp = jnp.einsum("btkgh,bskh->bkgts", d_i, values[j], preferred_element_type=F32)
            ds = (p * (dp - delta_i[..., None]) * slope * options.scale).astype(q.dtype)
            dk_j = jnp.einsum("bkgts,btkgh->bskh", ds, q_i, preferred_element_type=F32)
            dv_j = jnp.einsum("bkgts,btkgh->bskh", p.astype(q.dtype), d_i, preferred_element_type=F32)
            dq_i += jnp.einsum("bkgts,bskh->btkgh", ds, keys[j], preferred_element_type=F32)
            return dq_i, dk.at[j].add(dk_j), dv.at[j].add(dv_j)

        start = filled(q_i.shape, F32, 0.0, q, k, v, d_out), *carry
        dq_i, *carry = lax.fori_loop(*_reach(options, t0, width, S, step), add, start)
        return tuple(carry), dq_i.astype(q.dtype)

    zeros = tuple(filled(x.shape, F32, 0.0, q, k, v, d_out) for x in (keys, values))
    (dk, dv), dq = lax.scan(one, zeros, by_query)
    return _whole(dq, T).reshape(q.shape), _whole(dk, S).astype(k.dtype), _whole(dv, S).astype(v.dtype)
