"""Attention in plain JAX that never materializes all T x S scores.

The forward pass is an online softmax over chunks of keys (Rabe and Staats, arXiv 2112.05682). The backward pass is that
of FlashAttention (Dao et al., arXiv 2205.14135): it recomputes the scores chunk by chunk from the log-sum-exp of each
query. Memory grows with T + S. Chunks of keys that are invisible because of their positions (causal, window) are
skipped at run time. Segment ids skip no chunks, because a skip must be the same for all rows of a sharded batch.

`attend` and `gradients` take any `Visibility` and a part of the queries, so that a caller can shard the queries and
call both functions on every shard. `forward` and `backward` are the interface of an implementation (see README.md).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import UNSEEN, Options, cap_slope, scores
from pallas_kernels.attention.visibility import Visibility
from pallas_kernels.compat import full_varying_like

CHUNK = 256
"""The number of queries in a chunk of queries, and of keys in a chunk of keys."""

F32 = jnp.float32


class Chunking(NamedTuple):
    """The static parameters of a call.

    Args:
        queries, keys: number of queries in a chunk of queries, and of keys in a chunk of keys.
        scale, soft_cap: as in `Options`.
        has_strict_softmax: whether a query whose visible scores are all -inf (or below `UNSEEN`) gives NaN, and not 0
            like a query that sees no key.
    """

    queries: int
    keys: int
    scale: float
    soft_cap: float | None
    has_strict_softmax: bool = False


def _split(x: Any, width: int) -> Any:
    """Split (B, T, ...) into (chunks, B, width, ...), padded with zeros."""
    count = -(-x.shape[1] // width)
    pad = count * width - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) if pad else x
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)


def _joined(chunks: Any, length: int) -> Any:
    """Join chunks (chunks, B, width, ...) into (B, length, ...), without the padding: the inverse of `_split`."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _mask(chunking: Chunking, visibility: Visibility, first_query: Any, j: Any, keys: int) -> Any:
    """The mask (B or 1, 1, 1, queries, keys) of the chunk of queries that starts at `first_query` and chunk j of keys.

    The mask hides the padding after `keys` keys, the number of keys in all chunks.
    """
    q_index = first_query + jnp.arange(chunking.queries)
    kv_index = j * chunking.keys + jnp.arange(chunking.keys)
    visible = visibility.mask(q_index, kv_index)
    if keys % chunking.keys:
        visible = visible & (kv_index < keys)[None, None, :]
    return visible[:, None, None, :, :]


def _if_reachable(
    chunking: Chunking, visibility: Visibility, first_query: Any, j: Any, function: Any, operand: Any
) -> Any:
    """Return `function(operand)`, or the operand unchanged if none of a chunk's queries may see a key of chunk j.

    The chunk of queries starts at the index `first_query`; j is the index of a chunk of keys.
    """
    is_reachable = visibility.is_reachable(first_query, chunking.queries, j * chunking.keys, chunking.keys)
    if is_reachable is True:
        return function(operand)
    return lax.cond(is_reachable, function, lambda unchanged: unchanged, operand)


def _first_queries(chunking: Chunking, start: Any, queries: int) -> Any:
    """Index of the first query of every chunk, int32 (chunks,), for `queries` queries from the index `start` on."""
    return start + jnp.arange(-(-queries // chunking.queries)) * chunking.queries


def _tie_to_queries(start: Any, q: Any) -> Any:
    """Return both arguments behind a barrier, which makes the masks, computed from `start`, depend on the queries.

    Without the barrier, JAX would hoist the masks of all chunks out of a scan over layers, because they are the same in
    every layer. The hoisted masks would be as large as the scores of a head, which chunks are meant to avoid.
    """
    return lax.optimization_barrier((start, q))


def attend(chunking: Chunking, start: Any, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    """Compute the attention of some queries over all keys.

    Args:
        chunking: the static parameters.
        start: index of the first query in the arrays of `visibility`, int32 (1,).
        q: queries (B,T,K,G,H).
        k, v: all keys and values (B,S,K,H).
        visibility: which keys a query sees.

    Returns:
        The output (B,T,K,G,H) in the dtype of `q`, and the log-sum-exp of each query's scores, float32 (B,T,K,G).
    """
    keys = k.shape[1]
    start, q = _tie_to_queries(start, q)
    k_chunks, v_chunks = _split(k, chunking.keys), _split(v, chunking.keys)

    def attend_query_chunk(_: Any, query_chunk: Any) -> tuple[Any, Any]:
        first_query, q_i = query_chunk
        row_shape = (q_i.shape[0], *q_i.shape[2:4], q_i.shape[1])

        def add_if_reachable(carry: Any, key_chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j = key_chunk

            def add_key_chunk(carry: Any) -> Any:
                max_score, total, output, sees_key = carry
                mask = _mask(chunking, visibility, first_query, j, keys)
                chunk_scores = jnp.where(mask, scores(q_i, k_j, chunking.scale, chunking.soft_cap), UNSEEN)
                new_max_score = jnp.maximum(max_score, jnp.max(chunk_scores, -1))
                weights = jnp.where(mask, jnp.exp(chunk_scores - new_max_score[..., None]), 0.0)
                decay = jnp.exp(max_score - new_max_score)
                weighted_values = jnp.einsum(
                    "bkgts,bskh->bkgth", weights.astype(v_j.dtype), v_j, preferred_element_type=F32
                )
                total = total * decay + jnp.sum(weights, -1)
                output = output * decay[..., None] + weighted_values
                return new_max_score, total, output, None if sees_key is None else sees_key | mask.any(-1)

            return _if_reachable(chunking, visibility, first_query, j, add_key_chunk, carry), None

        initial_carry = (
            full_varying_like(row_shape, F32, UNSEEN, q, k, v),
            full_varying_like(row_shape, F32, 0.0, q, k, v),
            full_varying_like((*row_shape, v.shape[-1]), F32, 0.0, q, k, v),
            full_varying_like(row_shape, bool, False, q, k, v) if chunking.has_strict_softmax else None,
        )
        (max_score, total, output, sees_key), _ = lax.scan(
            add_if_reachable, initial_carry, (jnp.arange(k_chunks.shape[0]), k_chunks, v_chunks)
        )
        if sees_key is not None:
            max_score = jnp.where(sees_key, max_score, -jnp.inf)
            total = jnp.where(sees_key & (total == 0.0), jnp.nan, total)
        is_blind = total == 0.0
        total = jnp.where(is_blind, 1.0, total)
        normalized_output = jnp.einsum("bkgth->btkgh", output / total[..., None]).astype(q.dtype)
        return None, (normalized_output, jnp.einsum("bkgt->btkg", max_score + jnp.log(total)))

    queries = q.shape[1]
    query_chunks = (_first_queries(chunking, start, queries), _split(q, chunking.queries))
    _, (output_chunks, lse_chunks) = lax.scan(attend_query_chunk, None, query_chunks)
    return _joined(output_chunks, queries), _joined(lse_chunks, queries)


def gradients(
    chunking: Chunking, start: Any, q: Any, d_out: Any, out: Any, lse: Any, k: Any, v: Any, visibility: Visibility
) -> tuple[Any, Any, Any]:
    """Compute the gradient of some queries, and these queries' terms in the gradients of all keys and values.

    Args:
        chunking, start, q, k, v, visibility: the arguments of `attend`.
        d_out: the gradient of `out`.
        out, lse: the results of `attend`.

    Returns:
        The gradient of `q`, in the dtype of `q`; and these queries' terms in the gradients of `k` and of `v`, float32.
    """
    keys = k.shape[1]
    start, q = _tie_to_queries(start, q)
    k_chunks, v_chunks = _split(k, chunking.keys), _split(v, chunking.keys)

    def add_query_chunk(key_gradients: Any, query_chunk: Any) -> tuple[Any, Any]:
        first_query, q_i, d_out_i, out_i, lse_i = query_chunk
        lse_rows = jnp.einsum("btkg->bkgt", lse_i)
        row_dots = jnp.einsum("btkgh,btkgh->bkgt", d_out_i, out_i, preferred_element_type=F32)

        def add_if_reachable(dq_i: Any, key_chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j, dk_j, dv_j = key_chunk

            def add_key_chunk(sums: Any) -> Any:
                dq_i, dk_j, dv_j = sums
                chunk_scores = scores(q_i, k_j, chunking.scale, chunking.soft_cap)
                mask = _mask(chunking, visibility, first_query, j, keys)
                weights = jnp.where(mask, jnp.exp(chunk_scores - lse_rows[..., None]), 0.0)
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

            sums = _if_reachable(chunking, visibility, first_query, j, add_key_chunk, (dq_i, dk_j, dv_j))
            return sums[0], sums[1:]

        zero_dq_i = full_varying_like(q_i.shape, F32, 0.0, q, k, v, d_out)
        key_chunks = (jnp.arange(k_chunks.shape[0]), k_chunks, v_chunks, *key_gradients)
        dq_i, new_key_gradients = lax.scan(add_if_reachable, zero_dq_i, key_chunks)
        return new_key_gradients, dq_i.astype(q.dtype)

    zero_key_gradients = tuple(full_varying_like(x.shape, F32, 0.0, q, k, v, d_out) for x in (k_chunks, v_chunks))
    array_chunks = (_split(x, chunking.queries) for x in (q, d_out, out, lse))
    query_chunks = (_first_queries(chunking, start, q.shape[1]), *array_chunks)
    (dk_chunks, dv_chunks), dq_chunks = lax.scan(add_query_chunk, zero_key_gradients, query_chunks)
    return _joined(dq_chunks, q.shape[1]), _joined(dk_chunks, keys), _joined(dv_chunks, keys)


def _chunking(options: Options, T: int, S: int) -> Chunking:
    """The chunking of a call with T queries and S keys."""
    return Chunking(min(CHUNK, T), min(CHUNK, S), options.scale, options.soft_cap, has_strict_softmax=True)


def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, options: Options) -> tuple[Any, Any]:
    """Compute what `reference.forward` computes, with the same arguments and results."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    visibility = options.visibility(q_ids, kv_ids, offset)
    start = jnp.zeros(1, jnp.int32)
    out, lse = attend(_chunking(options, T, S), start, q.reshape(B, T, K, N // K, H), k, v, visibility)
    nan_or_zero = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), 0.0, jnp.nan)
    return out.reshape(q.shape) + nan_or_zero.astype(q.dtype), jnp.moveaxis(lse, 1, 3).reshape(B, N, T)


def backward(
    q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, offset: Any, out: Any, lse: Any, d_out: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Compute what `reference.backward` computes, with the same arguments and results."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    start, visibility = jnp.zeros(1, jnp.int32), options.visibility(q_ids, kv_ids, offset)
    grouped_q, grouped_d_out, grouped_out = (x.reshape(B, T, K, N // K, H) for x in (q, d_out, out))
    grouped_lse = jnp.moveaxis(lse.reshape(B, K, N // K, T), 3, 1)
    chunking = _chunking(options, T, S)
    dq, dk, dv = gradients(chunking, start, grouped_q, grouped_d_out, grouped_out, grouped_lse, k, v, visibility)
    return dq.reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype)
