"""Attention by JAX's splash kernel, on TPU: `jax.experimental.pallas.ops.tpu.splash_attention`.

Under a layout, the axis rules shard rows, heads and query positions, and keys and values are whole along the
sequence. There must be as many queries as keys, in the order of their indices. The width of heads is padded with
zeros to a multiple of 128.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.attention_kernel import why_not_static
from jaxscale.layers.shards import axes_by_dim, map_over_devices, repeat_key_heads, shard_count
from jaxscale.sharding.place import current
from jaxscale.typing import Array, Float
from pallas_kernels.attention.visibility import Visibility

LANES = 128
"""Number of lanes of a TPU vector register; the lengths of the kernel's tiles are multiples of it."""
TILES = (512, 256, 128)
"""Tile lengths; the kernel gets the longest one that divides the number of queries on a device."""


def why_not_splash(query_count: int, key_count: int, visibility: Visibility) -> str | None:
    """Return why the kernel does not support this call, and what to do instead; `None` if it supports the call."""
    if reason := why_not_static(visibility):
        return reason
    if query_count != key_count:
        return f"got {query_count} queries and {key_count} keys, expected equal numbers"
    if query_count // shard_count(axes_by_dim((query_count,), "inner_seq")[0]) % LANES:
        return f"got {query_count} positions, expected a multiple of {LANES} on every device: pad the sequence"
    return None


def attend_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visibility: Visibility,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Compute attention by the TPU kernel.

    Args:
        q, k, v: queries, keys, values.
        visibility: mask of the keys that each query sees.
        scale: factor of the scores.
        soft_cap: cap of the scores; `None` for no cap.
        interpret: whether to run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    reason = why_not_splash(q.shape[1], k.shape[1], visibility)
    if reason:
        raise UserError(f"attention 'splash': {reason}; or use attention 'chunked'")
    head_dim = q.shape[-1]
    scaled_q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    padded_q, padded_k, padded_v = (_pad_heads(jnp.swapaxes(x, 1, 2)) for x in (scaled_q, k, v))
    q_and_kv_segments = None if visibility.q_segments is None else (visibility.q_segments, visibility.kv_segments)
    run_kernel = functools.partial(_run_on_devices, visibility=visibility, soft_cap=soft_cap, interpret=interpret)
    output = jnp.swapaxes(run_kernel(padded_q, padded_k, padded_v, q_and_kv_segments), 1, 2)[..., :head_dim]
    if visibility.q_segments is not None:
        # the kernel has no padding: it treats segment 0 as one more document
        output = jnp.where((visibility.q_segments != 0)[:, :, None, None], output, jnp.zeros((), output.dtype))
    return output


def _pad_heads(x: Any) -> Any:
    """Pad the last dim of `x` (B, N, T, H) with zeros to a multiple of LANES."""
    padding = -x.shape[-1] % LANES
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) if padding else x


def _make_kernel(
    visibility: Visibility,
    head_count: int,
    query_count: int,
    head_shard_count: int,
    q_shard_count: int,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """Build the kernel for all heads of a row, with the mask of `visibility`; all arguments are static values.

    Args:
        visibility: mask of the keys that each query sees.
        head_count, query_count: numbers of heads and of queries, on all devices together.
        head_shard_count, q_shard_count: numbers of shards of the heads and of the queries.
        soft_cap: cap of the scores; `None` for no cap.
        interpret: whether the kernel runs step by step in plain JAX.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask_shape = (query_count, query_count)
    if visibility.window is not None:
        mask: Any = splash.LocalMask(mask_shape, (int(visibility.window) - 1, 0), 0, shard_count=q_shard_count)
    elif visibility.causal:
        mask = splash.CausalMask(mask_shape, shard_count=q_shard_count)
    else:
        mask = splash.FullMask(mask_shape)
    tile = next(tile for tile in TILES if query_count // q_shard_count % tile == 0)
    array_names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    block_lengths: dict[str, Any] = {f"block_{array_name}": tile for array_name in array_names}
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * head_count),
        block_sizes=splash.BlockSizes(**block_lengths),
        attn_logits_soft_cap=soft_cap,
        head_shards=head_shard_count,
        q_seq_shards=q_shard_count,
        residual_checkpoint_name="attention_out",
        interpret=interpret,
    )


def _run_rows(kernel: Any, q: Any, k: Any, v: Any, q_and_kv_segments: Any) -> Any:
    """Run the kernel on every row of a batch, and return the attention output (B, N, T, H)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if q_and_kv_segments is None:
        return jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    return jax.vmap(lambda q, k, v, row_segments: kernel(q, k, v, splash.SegmentIds(*row_segments)))(
        q, k, v, q_and_kv_segments
    )


def _run_on_devices(
    q: Any, k: Any, v: Any, q_and_kv_segments: Any, *, visibility: Visibility, soft_cap: float | None, interpret: bool
) -> Any:
    """Run the kernel on every device of the current layout, and return the attention output (B, N, T, H)."""
    head_count, query_count = q.shape[1:3]
    layout = current()
    if layout is None or layout[0].size == 1:
        return _run_rows(
            _make_kernel(visibility, head_count, query_count, 1, 1, soft_cap, interpret), q, k, v, q_and_kv_segments
        )
    mesh = layout[0]
    row_axes, head_axes, position_axes, _ = axes_by_dim(q.shape, "batch", "heads", "inner_seq", "head_dim")
    head_shard_count, q_shard_count = shard_count(head_axes), shard_count(position_axes)
    k, v = repeat_key_heads(k, v, head_count, head_shard_count, dim=1)
    kernel = _make_kernel(visibility, head_count, query_count, head_shard_count, q_shard_count, soft_cap, interpret)
    auto_axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    auto_mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto_axis_types) if mesh.manual_axes else mesh
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(auto_mesh, PartitionSpec(head_axes, position_axes)))
    q_spec = PartitionSpec(row_axes, head_axes, position_axes, None)
    kv_spec = PartitionSpec(row_axes, head_axes, None, None)
    segments_spec = (
        None if q_and_kv_segments is None else (PartitionSpec(row_axes, position_axes), PartitionSpec(row_axes, None))
    )
    in_specs = (kernel_spec, q_spec, kv_spec, kv_spec, segments_spec)
    return map_over_devices(_run_rows, in_specs, q_spec)(kernel, q, k, v, q_and_kv_segments)
