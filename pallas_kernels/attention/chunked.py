"""Attention without T x S scores, in plain JAX: an online softmax over chunks of keys (Rabe and Staats,
arXiv 2112.05682), and FlashAttention's backward pass (Dao et al., arXiv 2205.14135), which recomputes the scores chunk
by chunk from the row's log-sum-exp.

Memory grows with T + S. Chunks that no query may see by the order of indices (causal, window) are skipped at run time;
segments do not skip chunks, since a skip must be the same for all rows of a sharded batch.

`attend` and `gradients` take any `Visibility` and a part of the queries, so that a caller may shard the queries and run
both on every shard. `forward` and `backward` are the interface of an implementation (see README.md).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import UNSEEN, Options, cap_slope, scores
from pallas_kernels.attention.visibility import Visibility
from pallas_kernels.compat import full_varying_like

CHUNK = 256
"""Queries and keys at a time."""

F32 = jnp.float32


class Chunking(NamedTuple):
    """The static parameters of a call.

    Args:
        queries, keys: lengths of the chunks.
        scale, soft_cap: as of `Options`.
        strict: a query whose visible scores are all -inf (or below `UNSEEN`) gives NaN; else 0, as one that sees none.
    """

    queries: int
    keys: int
    scale: float
    soft_cap: float | None
    strict: bool = False


def _chunks(x: Any, width: int) -> Any:
    """(B, T, ...) to (chunks, B, width, ...), padded with zeros."""
    count = -(-x.shape[1] // width)
    pad = count * width - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) if pad else x
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)


def _unchunked(chunks: Any, length: int) -> Any:
    """The inverse of `_chunks`."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _mask(chunking: Chunking, visibility: Visibility, q_first: Any, j: Any, keys: int) -> Any:
    """Mask of chunk j of the keys for the queries from `q_first` on: (B or 1, 1, 1, queries, keys) of a chunk."""
    q_index = q_first + jnp.arange(chunking.queries)
    kv_index = j * chunking.keys + jnp.arange(chunking.keys)
    visible = visibility.mask(q_index, kv_index)
    if keys % chunking.keys:
        visible = visible & (kv_index < keys)[None, None, :]
    return visible[:, None, None, :, :]


def _if_reachable(chunking: Chunking, visibility: Visibility, q_first: Any, j: Any, function: Any, operand: Any) -> Any:
    """`function(operand)`, or the operand unchanged if no query from `q_first` on may see a key of chunk j."""
    reachable = visibility.reachable(q_first, chunking.queries, j * chunking.keys, chunking.keys)
    if reachable is True:
        return function(operand)
    return lax.cond(reachable, function, lambda unchanged: unchanged, operand)


def _first_queries(chunking: Chunking, start: Any, queries: int) -> Any:
    """Index of the first query of every chunk, from that of all, (1,)."""
    return start + jnp.arange(-(-queries // chunking.queries)) * chunking.queries


def _depending_on(start: Any, q: Any) -> Any:
    """Both arguments, with a barrier that makes the masks depend on the queries.

    In a scan over layers JAX would hoist the masks of all chunks, which are equal in every layer, out of the loop. For
    every row and head they take as many numbers as the scores that chunks avoid.
    """
    return lax.optimization_barrier((start, q))


def attend(chunking: Chunking, start: Any, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    """Attention of some queries, and the log-sum-exp of their scores, float32 (B,T,K,G).

    Args:
        chunking: static parameters.
        start: index of the first query in the arrays of `visibility`, int32 (1,).
        q: queries (B,T,K,G,H).
        k, v: all keys and values (B,S,K,H).
        visibility: which keys a query sees.
    """
    keys = k.shape[1]
    start, q = _depending_on(start, q)
    k_chunks, v_chunks = _chunks(k, chunking.keys), _chunks(v, chunking.keys)

    def query_chunk(_: Any, chunk: Any) -> tuple[Any, Any]:
        first, q_i = chunk
        row_shape = (q_i.shape[0], *q_i.shape[2:4], q_i.shape[1])

        def step(carry: Any, chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j = chunk

            def add(carry: Any) -> Any:
                top, total, output, sees_key = carry
                visible = _mask(chunking, visibility, first, j, keys)
                chunk_scores = jnp.where(visible, scores(q_i, k_j, chunking.scale, chunking.soft_cap), UNSEEN)
                new_top = jnp.maximum(top, jnp.max(chunk_scores, -1))
                weights = jnp.where(visible, jnp.exp(chunk_scores - new_top[..., None]), 0.0)
                decay = jnp.exp(top - new_top)
                weighted_values = jnp.einsum(
                    "bkgts,bskh->bkgth", weights.astype(v_j.dtype), v_j, preferred_element_type=F32
                )
                total = total * decay + jnp.sum(weights, -1)
                output = output * decay[..., None] + weighted_values
                return new_top, total, output, None if sees_key is None else sees_key | visible.any(-1)

            return _if_reachable(chunking, visibility, first, j, add, carry), None

        start_of_row = (
            full_varying_like(row_shape, F32, UNSEEN, q, k, v),
            full_varying_like(row_shape, F32, 0.0, q, k, v),
            full_varying_like((*row_shape, v.shape[-1]), F32, 0.0, q, k, v),
            full_varying_like(row_shape, bool, False, q, k, v) if chunking.strict else None,
        )
        (top, total, output, sees_key), _ = lax.scan(
            step, start_of_row, (jnp.arange(k_chunks.shape[0]), k_chunks, v_chunks)
        )
        if sees_key is not None:
            top = jnp.where(sees_key, top, -jnp.inf)
            total = jnp.where(sees_key & (total == 0.0), jnp.nan, total)
        sees_no_key = total == 0.0
        total = jnp.where(sees_no_key, 1.0, total)
        output = jnp.einsum("bkgth->btkgh", output / total[..., None]).astype(q.dtype)
        return None, (output, jnp.einsum("bkgt->btkg", top + jnp.log(total)))

    queries = q.shape[1]
    firsts = _first_queries(chunking, start, queries)
    _, (output, lse) = lax.scan(query_chunk, None, (firsts, _chunks(q, chunking.queries)))
    return _unchunked(output, queries), _unchunked(lse, queries)


def gradients(
    chunking: Chunking, start: Any, q: Any, d_out: Any, out: Any, lse: Any, k: Any, v: Any, visibility: Visibility
) -> tuple[Any, Any, Any]:
    """Gradients of the queries, in their type, and the parts of these queries in those of keys and values, float32.

    Args:
        chunking, start, q, k, v, visibility: as of `attend`.
        d_out: the gradient of `out`.
        out, lse: what `attend` returned.
    """
    keys = k.shape[1]
    start, q = _depending_on(start, q)
    k_chunks, v_chunks = _chunks(k, chunking.keys), _chunks(v, chunking.keys)

    def query_chunk(carry: Any, chunk: Any) -> tuple[Any, Any]:
        first, q_i, d_out_i, out_i, lse_i = chunk
        lse_i = jnp.einsum("btkg->bkgt", lse_i)
        row_dots = jnp.einsum("btkgh,btkgh->bkgt", d_out_i, out_i, preferred_element_type=F32)

        def step(dq_i: Any, chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j, dk_j, dv_j = chunk

            def add(carry: Any) -> Any:
                dq_i, dk_j, dv_j = carry
                chunk_scores = scores(q_i, k_j, chunking.scale, chunking.soft_cap)
                visible = _mask(chunking, visibility, first, j, keys)
                weights = jnp.where(visible, jnp.exp(chunk_scores - lse_i[..., None]), 0.0)
                d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out_i, v_j, preferred_element_type=F32)
                d_scores = weights * (d_weights - row_dots[..., None])
                if chunking.soft_cap is not None:
                    d_scores = d_scores * cap_slope(chunk_scores, chunking.soft_cap)
                d_scores = (d_scores * chunking.scale).astype(q_i.dtype)
                narrow_weights = weights.astype(d_out_i.dtype)
                return (
                    dq_i + jnp.einsum("bkgts,bskh->btkgh", d_scores, k_j, preferred_element_type=F32),
                    dk_j + jnp.einsum("bkgts,btkgh->bskh", d_scores, q_i, preferred_element_type=F32),
                    dv_j + jnp.einsum("bkgts,btkgh->bskh", narrow_weights, d_out_i, preferred_element_type=F32),
                )

            dq_i, dk_j, dv_j = _if_reachable(chunking, visibility, first, j, add, (dq_i, dk_j, dv_j))
            return dq_i, (dk_j, dv_j)

        initial = full_varying_like(q_i.shape, F32, 0.0, q, k, v, d_out)
        chunks = (jnp.arange(k_chunks.shape[0]), k_chunks, v_chunks, *carry)
        dq_i, carry = lax.scan(step, initial, chunks)
        return carry, dq_i.astype(q.dtype)

    initial = tuple(full_varying_like(x.shape, F32, 0.0, q, k, v, d_out) for x in (k_chunks, v_chunks))
    rows = (_chunks(x, chunking.queries) for x in (q, d_out, out, lse))
    firsts = _first_queries(chunking, start, q.shape[1])
    (dk, dv), dq = lax.scan(query_chunk, initial, (firsts, *rows))
    return _unchunked(dq, q.shape[1]), _unchunked(dk, keys), _unchunked(dv, keys)


def _chunking(options: Options, T: int, S: int) -> Chunking:
    return Chunking(min(CHUNK, T), min(CHUNK, S), options.scale, options.soft_cap, strict=True)


def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> tuple[Any, Any]:
    """As `reference.forward`."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    visibility = options.visibility(q_ids, kv_ids, offset)
    start = jnp.zeros(1, jnp.int32)
    out, lse = attend(_chunking(options, T, S), start, q.reshape(B, T, K, N // K, H), k, v, visibility)
    broken = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), 0.0, jnp.nan)
    return out.reshape(q.shape) + broken.astype(q.dtype), jnp.moveaxis(lse, 1, 3).reshape(B, N, T)


def backward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, out: Any, lse: Any, d_out: Any, options: Options
) -> tuple[Any, Any, Any]:
    """As `reference.backward`."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    start, visibility = jnp.zeros(1, jnp.int32), options.visibility(q_ids, kv_ids, offset)
    queries, d_outs, outs = (x.reshape(B, T, K, N // K, H) for x in (q, d_out, out))
    lse = jnp.moveaxis(lse.reshape(B, K, N // K, T), 3, 1)
    dq, dk, dv = gradients(_chunking(options, T, S), start, queries, d_outs, outs, lse, k, v, visibility)
    return dq.reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype)
