"""Attention in chunks, by `pallas_kernels.attention.chunked`, under any layout.

Under a layout that shards the sequence, every device loops over its queries and all keys, which are gathered once; the
gradients of the keys and values are reduced and scattered once, in float32. Only the mesh axes of the sequence are
manual in the loops, so a device skips the chunks that its queries cannot see; the compiler partitions batch and heads.
Left out: ring attention, and an order of positions that balances causal work (the device with the last positions sees
the most keys).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxscale.layers.shards import axes_by_dim, shard_count
from jaxscale.sharding.place import MeshAndRules, constrain, current, reopened_layout
from jaxscale.typing import Array, Float
from pallas_kernels.attention import chunked
from pallas_kernels.attention.chunked import Chunking
from pallas_kernels.attention.visibility import Visibility


class _Call(NamedTuple):
    """The static parameters of a call of `attend_chunked`."""

    chunking: Chunking
    layout: MeshAndRules | None  # the layout in force, which the backward pass also uses
    query_axes: tuple[str, ...]  # mesh axes that shard the positions of the queries
    query_shard_count: int  # number of shards of the positions of the queries


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
    """Compute attention with at most (B, N, chunk, chunk) scores at a time.

    Args:
        q, k, v: queries, keys, values.
        visibility: mask of the keys that each query sees.
        scale: factor of the scores.
        soft_cap: cap of the scores; `None` for no cap.
        chunk: number of queries (of a device) and of keys in a chunk; the lengths T and S need not be multiples of
            this number.
    """
    batch_size, query_count, head_count, head_dim = q.shape
    key_count, kv_head_count = k.shape[1:3]
    query_axes = axes_by_dim((batch_size, query_count), "batch", "inner_seq")[1]
    query_shard_count = shard_count(query_axes)
    chunking = Chunking(min(chunk, query_count // query_shard_count), min(chunk, key_count), scale, soft_cap)
    grouped_q = q.reshape(batch_size, query_count, kv_head_count, head_count // kv_head_count, head_dim)
    output: Any = _attend(_Call(chunking, current(), query_axes, query_shard_count), grouped_q, k, v, visibility)
    return output.reshape(batch_size, query_count, head_count, head_dim)


def _map_shards(
    call: _Call, function: Any, sharded_arrays: Any, whole_arrays: Any, concatenation_dims: tuple[int, ...]
) -> Any:
    """Call `function(chunking, start, *sharded_arrays, *whole_arrays)` on every shard of the queries.

    `start` (1,) holds the index of the shard's first query. Returns the results, concatenated over shards.

    Args:
        call: static parameters.
        function: `chunked.attend` or `_gradients`.
        sharded_arrays: arrays (B, T, ...), sharded along the queries.
        whole_arrays: arrays that every shard gets whole.
        concatenation_dims: for each result, the dim along which its shards are concatenated.
    """
    shard_function = functools.partial(function, call.chunking)
    starts = jnp.arange(call.query_shard_count) * (sharded_arrays[0].shape[1] // call.query_shard_count)
    if call.layout is None or not call.query_axes:
        return shard_function(starts, *sharded_arrays, *whole_arrays)
    spec_by_dim = PartitionSpec(call.query_axes), PartitionSpec(None, call.query_axes)
    mapped_function = jax.shard_map(
        shard_function,
        mesh=call.layout[0],
        axis_names=frozenset(call.query_axes),
        in_specs=(spec_by_dim[0], *(spec_by_dim[1],) * len(sharded_arrays), *(PartitionSpec(),) * len(whole_arrays)),
        out_specs=tuple(spec_by_dim[dim] for dim in concatenation_dims),
        check_vma=False,
    )
    return mapped_function(starts, *sharded_arrays, *whole_arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Any, k: Any, v: Any, visibility: Visibility) -> Any:
    """Compute attention of grouped queries (B, T, K, N / K, H), with a backward pass that is also chunked."""
    return _map_shards(call, chunked.attend, (q,), (k, v, visibility), (1, 1))[0]


def _attend_forward(call: _Call, q: Any, k: Any, v: Any, visibility: Visibility) -> tuple[Any, Any]:
    """Return the output and the residuals: inputs, output and each query's log-sum-exp of scores (`lse`)."""
    output, lse = _map_shards(call, chunked.attend, (q,), (k, v, visibility), (1, 1))
    output, lse = checkpoint_name(output, "attention_out"), checkpoint_name(lse, "attention_lse")
    return output, (q, k, v, visibility, output, lse)


def _attend_backward(call: _Call, residuals: Any, d_output: Any) -> Any:
    """Return the gradients of queries, keys, values and visibility from the gradient of the output."""
    q, k, v, visibility, output, lse = residuals
    dq, dk, dv = _map_shards(call, _gradients, (q, d_output, output, lse), (k, v, visibility), (1, 0, 0))
    with reopened_layout(call.layout):
        return dq, _sum_of_shards(dk, k.dtype), _sum_of_shards(dv, v.dtype), None


def _gradients(*arguments: Any) -> tuple[Any, Any, Any]:
    """Call `chunked.gradients`, and add to `dk` and `dv` a leading dim of size 1, along which shards are stacked."""
    dq, dk, dv = chunked.gradients(*arguments)
    return dq, dk[None], dv[None]


def _sum_of_shards(shard_gradients: Any, dtype: Any) -> Any:
    """Sum gradients (shards, B, S, K, H) over shards; the sum is sharded like the queries (a reduce-scatter)."""
    return constrain(jnp.sum(shard_gradients, 0), "batch", "inner_seq", "kv_heads", "head_dim").astype(dtype)


_attend.defvjp(_attend_forward, _attend_backward)
