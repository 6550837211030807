"""Attention without T x S scores, in plain JAX: an online softmax over chunks of keys (Rabe and Staats 2021), and
FlashAttention's backward pass (Dao et al. 2022), which recomputes the scores chunk by chunk from the row's log-sum-exp.

Memory grows with T + S. Chunks that no query may see by the order of indices (causal, window) are skipped at run time;
segments do not skip chunks, since a skip must be the same for all rows of a sharded batch.

Under a layout that shards the sequence every device loops over its queries and all keys, which are gathered once; their
gradient is reduced and scattered once, in float32. The loops are manual over those mesh axes alone, so a device skips
the chunks that its queries cannot see; the compiler partitions other axes (batch, heads). Left out: an order of
positions that balances causal work (the device of the last positions sees most keys), and rings of keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxscale.layers.attention_plain import UNSEEN, scale_exactly
from jaxscale.layers.visibility import Visibility
from jaxscale.sharding.partition import dim_axes, shard_count
from jaxscale.sharding.place import Layout, constrain, current, spec, under
from jaxscale.typing import Array, Float


class _Sizes(NamedTuple):
    """The static parameters of a call: chunk widths, unpadded lengths and placement."""

    q_chunk: int
    kv_chunk: int
    queries: int  # of one shard
    keys: int
    scale: float
    soft_cap: float | None
    layout: Layout | None
    axes: tuple[str, ...]  # of the mesh, along which the queries are sharded
    shards: int


def attend_chunked(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visibility: Visibility,
    *,
    scale: float,
    soft_cap: float | None,
    chunk: int,
) -> Float[Array, "B T N H"]:
    """`attend_plain` with at most (B, N, chunk, chunk) scores at a time.

    Args:
        q, k, v: queries, keys, values.
        visibility: which keys a query sees.
        scale: of the scores.
        soft_cap: of the scores.
        chunk: queries (of a device) and keys per chunk; the lengths need not be multiples.
    """
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    axes, shards = _query_axes(batch, queries)
    q, remaining_scale = scale_exactly(q, scale)
    shard_queries = queries // shards
    sizes = _Sizes(
        min(chunk, shard_queries),
        min(chunk, keys),
        shard_queries,
        keys,
        remaining_scale,
        soft_cap,
        current(),
        axes,
        shards,
    )
    q = q.reshape(batch, queries, groups, heads // groups, width)
    out: Any = _attend(sizes, q, k, v, visibility)
    return out.reshape(batch, queries, heads, width)


def _query_axes(batch: int, queries: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes that shard query positions, and the number of shards."""
    layout = current()
    if layout is None:
        return (), 1
    _, axes = dim_axes(spec((batch, queries), ("batch", "inner_seq"), *layout), 2)
    return axes, shard_count(layout[0], axes)


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


def _mask(sizes: _Sizes, visibility: Visibility, q_first: Any, j: Any) -> Any:
    """Mask of chunk j of the keys for the queries from `q_first` on: (B or 1, 1, 1, q_chunk, kv_chunk)."""
    q_index = q_first + jnp.arange(sizes.q_chunk)
    kv_index = j * sizes.kv_chunk + jnp.arange(sizes.kv_chunk)
    visible = visibility.mask(q_index, kv_index)
    if sizes.keys % sizes.kv_chunk:
        visible = visible & (kv_index < sizes.keys)[None, None, :]
    return visible[:, None, None, :, :]


def _reachable(sizes: _Sizes, visibility: Visibility, q_first: Any, j: Any) -> Any:
    """Whether, by their indices, the queries may see keys of chunk j; `True` if indices do not decide it."""
    if not visibility.ordered_by_index:
        return True
    reachable = True
    kv_first = j * sizes.kv_chunk
    if visibility.causal:
        reachable = kv_first <= q_first + sizes.q_chunk - 1
    if visibility.window is not None:
        reachable = reachable & (q_first - (kv_first + sizes.kv_chunk - 1) < visibility.window)
    return reachable


def _scores(sizes: _Sizes, q: Any, k: Any) -> Any:
    """Scores of a chunk, capped, float32 (B, K, G, q_chunk, kv_chunk)."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scores if sizes.scale == 1.0 else scores * sizes.scale
    return scores if sizes.soft_cap is None else sizes.soft_cap * jnp.tanh(scores / sizes.soft_cap)


def _first_queries(sizes: _Sizes, starts: Any) -> Any:
    """Index of the first query of every chunk of the shard whose queries start at `starts`, (1,)."""
    return starts + jnp.arange(-(-sizes.queries // sizes.q_chunk)) * sizes.q_chunk


def _depending_on(starts: Any, q: Any) -> Any:
    """Both arguments, with a barrier that makes the masks depend on the queries.

    In a scan over layers JAX would hoist the masks of all chunks, which are equal in every layer, out of the loop. For
    every row and head they take as many numbers as the scores that chunks avoid.
    """
    return lax.optimization_barrier((starts, q))


def _forward(sizes: _Sizes, starts: Any, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    """Outputs of a shard's queries, and the log-sum-exp of their scores (B, T, K, G)."""
    starts, q = _depending_on(starts, q)
    k, v = _chunks(k, sizes.kv_chunk), _chunks(v, sizes.kv_chunk)

    def query_chunk(_: Any, chunk: Any) -> tuple[Any, Any]:
        first, q_i = chunk
        row_shape = (q_i.shape[0], *q_i.shape[2:4], q_i.shape[1])

        def step(carry: Any, chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j = chunk

            def add(carry: Any) -> Any:
                top, total, output = carry
                visible = _mask(sizes, visibility, first, j)
                scores = jnp.where(visible, _scores(sizes, q_i, k_j), UNSEEN)
                new_top = jnp.maximum(top, jnp.max(scores, -1))
                weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
                decay = jnp.exp(top - new_top)
                weighted_values = jnp.einsum(
                    "bkgts,bskh->bkgth", weights.astype(v_j.dtype), v_j, preferred_element_type=jnp.float32
                )
                return new_top, total * decay + jnp.sum(weights, -1), output * decay[..., None] + weighted_values

            return _when(_reachable(sizes, visibility, first, j), add, carry), None

        start = (
            jnp.full(row_shape, UNSEEN, jnp.float32),
            jnp.zeros(row_shape, jnp.float32),
            jnp.zeros((*row_shape, v.shape[-1]), jnp.float32),
        )
        (top, total, output), _ = lax.scan(step, start, (jnp.arange(k.shape[0]), k, v))
        sees_no_key = total == 0.0
        total = jnp.where(sees_no_key, 1.0, total)
        output = jnp.einsum("bkgth->btkgh", output / total[..., None]).astype(q.dtype)
        return None, (output, jnp.einsum("bkgt->btkg", top + jnp.log(total)))

    _, chunk_results = lax.scan(query_chunk, None, (_first_queries(sizes, starts), _chunks(q, sizes.q_chunk)))
    return _unchunked(chunk_results[0], sizes.queries), _unchunked(chunk_results[1], sizes.queries)


def _when(reachable: Any, function: Any, operand: Any) -> Any:
    return (
        function(operand) if reachable is True else lax.cond(reachable, function, lambda unchanged: unchanged, operand)
    )


def _backward(
    sizes: _Sizes, starts: Any, q: Any, d_out: Any, output: Any, row_sums: Any, k: Any, v: Any, visibility: Visibility
) -> tuple[Any, Any, Any]:
    """Gradients of a shard's queries, and its part (1, B, S, K, H) of the sums for keys and values, float32."""
    starts, q = _depending_on(starts, q)
    k, v = _chunks(k, sizes.kv_chunk), _chunks(v, sizes.kv_chunk)

    def query_chunk(carry: Any, chunk: Any) -> tuple[Any, Any]:
        first, q_i, d_out_i, out_i, row_sums_i = chunk
        row_sums_i = jnp.einsum("btkg->bkgt", row_sums_i)
        row_dots = jnp.einsum("btkgh,btkgh->bkgt", d_out_i, out_i, preferred_element_type=jnp.float32)

        def step(dq_i: Any, chunk: Any) -> tuple[Any, Any]:
            j, k_j, v_j, dk_j, dv_j = chunk

            def add(carry: Any) -> Any:
                dq_i, dk_j, dv_j = carry
                scores = _scores(sizes, q_i, k_j)
                visible = _mask(sizes, visibility, first, j)
                weights = jnp.where(visible, jnp.exp(scores - row_sums_i[..., None]), 0.0)
                d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out_i, v_j, preferred_element_type=jnp.float32)
                d_scores = weights * (d_weights - row_dots[..., None])
                if sizes.soft_cap is not None:
                    d_scores = d_scores * (1 - jnp.square(scores / sizes.soft_cap))
                d_scores = (d_scores * sizes.scale).astype(q_i.dtype)
                narrow_weights = weights.astype(d_out_i.dtype)
                return (
                    dq_i + jnp.einsum("bkgts,bskh->btkgh", d_scores, k_j, preferred_element_type=jnp.float32),
                    dk_j + jnp.einsum("bkgts,btkgh->bskh", d_scores, q_i, preferred_element_type=jnp.float32),
                    dv_j + jnp.einsum("bkgts,btkgh->bskh", narrow_weights, d_out_i, preferred_element_type=jnp.float32),
                )

            dq_i, dk_j, dv_j = _when(_reachable(sizes, visibility, first, j), add, (dq_i, dk_j, dv_j))
            return dq_i, (dk_j, dv_j)

        initial = jnp.zeros(q_i.shape, jnp.float32)
        dq_i, carry = lax.scan(step, initial, (jnp.arange(k.shape[0]), k, v, *carry))
        return carry, dq_i.astype(q.dtype)

    initial = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    rows = (_chunks(x, sizes.q_chunk) for x in (q, d_out, output, row_sums))
    (dk, dv), dq = lax.scan(query_chunk, initial, (_first_queries(sizes, starts), *rows))
    return _unchunked(dq, sizes.queries), _unchunked(dk, sizes.keys)[None], _unchunked(dv, sizes.keys)[None]


def _on_shards(sizes: _Sizes, function: Any, by_query: Any, unsharded: Any, dims: tuple[int, ...]) -> Any:
    """`function(sizes, starts, *by_query, *unsharded)` on every shard of the queries.

    Args:
        sizes: of the call.
        function: `_forward` or `_backward`.
        by_query: arrays (B, T, ...), sharded along the queries.
        unsharded: arrays that every shard gets whole.
        dims: the dim of every result along which it is sharded.
    """
    function = functools.partial(function, sizes)
    starts = jnp.arange(sizes.shards) * sizes.queries
    if sizes.layout is None or not sizes.axes:
        return function(starts, *by_query, *unsharded)
    by_dim = PartitionSpec(sizes.axes), PartitionSpec(None, sizes.axes)
    sharded = jax.shard_map(
        function,
        mesh=sizes.layout[0],
        axis_names=frozenset(sizes.axes),
        in_specs=(by_dim[0], *(by_dim[1],) * len(by_query), *(PartitionSpec(),) * len(unsharded)),
        out_specs=tuple(by_dim[dim] for dim in dims),
        check_vma=False,
    )
    return sharded(starts, *by_query, *unsharded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: _Sizes, q: Any, k: Any, v: Any, visibility: Visibility) -> Any:
    return _on_shards(sizes, _forward, (q,), (k, v, visibility), (1, 1))[0]


def _attend_forward(sizes: _Sizes, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    out, row_sums = _on_shards(sizes, _forward, (q,), (k, v, visibility), (1, 1))
    out, row_sums = checkpoint_name(out, "attention_out"), checkpoint_name(row_sums, "attention_lse")
    return out, (q, k, v, visibility, out, row_sums)


def _attend_backward(sizes: _Sizes, residuals: Any, d_out: Any) -> Any:
    q, k, v, visibility, out, row_sums = residuals
    by_query, unsharded = (q, d_out, out, row_sums), (k, v, visibility)
    dq, dk, dv = _on_shards(sizes, _backward, by_query, unsharded, (1, 0, 0))
    with under(sizes.layout):
        return dq, _sum_of_shards(dk, k.dtype), _sum_of_shards(dv, v.dtype), None


def _sum_of_shards(parts: Any, dtype: Any) -> Any:
    """The sum of the shards' parts (shards, B, S, K, H), sharded like the queries: a reduce-scatter."""
    return constrain(jnp.sum(parts, 0), "batch", "inner_seq", "kv_heads", "head_dim").astype(dtype)


_attend.defvjp(_attend_forward, _attend_backward)
