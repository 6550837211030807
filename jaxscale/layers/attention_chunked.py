"""Attention by the chunks of `pallas_kernels.attention.chunked`, under any layout.

Under a layout that shards the sequence every device loops over its queries and all keys, which are gathered once; their
gradient is reduced and scattered once, in float32. The loops are manual over those mesh axes alone, so a device skips
the chunks that its queries cannot see; the compiler partitions other axes (batch, heads). Left out: an order of
positions that balances causal work (the device of the last positions sees most keys), and rings of keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxscale.layers.shards import axes_by_dim, shard_count
from jaxscale.sharding.place import MeshAndRules, constrain, current, under
from jaxscale.typing import Array, Float
from pallas_kernels.attention import chunked
from pallas_kernels.attention.chunked import Chunking
from pallas_kernels.attention.visibility import Visibility


class _Call(NamedTuple):
    """The static parameters of a call."""

    chunking: Chunking
    layout: MeshAndRules | None
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
    """Attention with at most (B, N, chunk, chunk) scores at a time.

    Args:
        q, k, v: queries, keys, values.
        visibility: which keys a query sees.
        scale: of the scores.
        soft_cap: of the scores.
        chunk: queries (of a device) and keys per chunk; the lengths need not be multiples.
    """
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    axes = axes_by_dim((batch, queries), "batch", "inner_seq")[1]
    shards = shard_count(axes)
    chunking = Chunking(min(chunk, queries // shards), min(chunk, keys), scale, soft_cap)
    q = q.reshape(batch, queries, groups, heads // groups, width)
    out: Any = _attend(_Call(chunking, current(), axes, shards), q, k, v, visibility)
    return out.reshape(batch, queries, heads, width)


def _on_shards(call: _Call, function: Any, by_query: Any, unsharded: Any, dims: tuple[int, ...]) -> Any:
    """`function(chunking, start, *by_query, *unsharded)` on every shard of the queries.

    Args:
        call: static parameters.
        function: `chunked.attend` or `_gradients`.
        by_query: arrays (B, T, ...), sharded along the queries.
        unsharded: arrays that every shard gets whole.
        dims: the dim of every result along which it is sharded.
    """
    function = functools.partial(function, call.chunking)
    starts = jnp.arange(call.shards) * (by_query[0].shape[1] // call.shards)
    if call.layout is None or not call.axes:
        return function(starts, *by_query, *unsharded)
    by_dim = PartitionSpec(call.axes), PartitionSpec(None, call.axes)
    sharded = jax.shard_map(
        function,
        mesh=call.layout[0],
        axis_names=frozenset(call.axes),
        in_specs=(by_dim[0], *(by_dim[1],) * len(by_query), *(PartitionSpec(),) * len(unsharded)),
        out_specs=tuple(by_dim[dim] for dim in dims),
        check_vma=False,
    )
    return sharded(starts, *by_query, *unsharded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Any, k: Any, v: Any, visibility: Visibility) -> Any:
    return _on_shards(call, chunked.attend, (q,), (k, v, visibility), (1, 1))[0]


def _attend_forward(call: _Call, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    out, lse = _on_shards(call, chunked.attend, (q,), (k, v, visibility), (1, 1))
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, visibility, out, lse)


def _attend_backward(call: _Call, residuals: Any, d_out: Any) -> Any:
    q, k, v, visibility, out, lse = residuals
    dq, dk, dv = _on_shards(call, _gradients, (q, d_out, out, lse), (k, v, visibility), (1, 0, 0))
    with under(call.layout):
        return dq, _sum_of_shards(dk, k.dtype), _sum_of_shards(dv, v.dtype), None


def _gradients(*arguments: Any) -> tuple[Any, Any, Any]:
    """`chunked.gradients`, with a dim of shards, of length 1, for the parts in the gradients of keys and values."""
    dq, dk, dv = chunked.gradients(*arguments)
    return dq, dk[None], dv[None]


def _sum_of_shards(parts: Any, dtype: Any) -> Any:
    """The sum of the shards' parts (shards, B, S, K, H), sharded like the queries: a reduce-scatter."""
    return constrain(jnp.sum(parts, 0), "batch", "inner_seq", "kv_heads", "head_dim").astype(dtype)


_attend.defvjp(_attend_forward, _attend_backward)
