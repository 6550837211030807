"""Attention by JAX's splash kernel, on TPU: `jax.experimental.pallas.ops.tpu.splash_attention`.

Under a layout, rows, heads and query positions are sharded by the rules, and keys and values are whole along the
sequence. There must be as many queries as keys, ordered by their index. Heads are padded with zeros to a width that is
a multiple of 128.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.attention_kernel import why_not_static
from jaxscale.layers.shards import axes_by_dim, key_heads_for_shards, map_over_devices, shard_count
from jaxscale.sharding.place import current
from jaxscale.typing import Array, Float
from pallas_kernels.attention.visibility import Visibility

LANES = 128
"""Width of a TPU vector register: the kernel's tiles are multiples of it."""
TILES = (512, 256, 128)
"""Tile lengths; the kernel gets the longest that divides a device's queries."""


def why_not_splash(queries: int, keys: int, visibility: Visibility) -> str | None:
    """Return why the kernel does not support this call, and what to do about it; `None` if it does."""
    if reason := why_not_static(visibility):
        return reason
    if queries != keys:
        return f"got {queries} queries and {keys} keys, expected equal numbers"
    if queries // shard_count(axes_by_dim((queries,), "inner_seq")[0]) % LANES:
        return f"got {queries} positions, expected a multiple of {LANES} on every device: pad the sequence"
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
        soft_cap: bound of the scores; `None` for no bound.
        interpret: whether to run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    reason = why_not_splash(q.shape[1], k.shape[1], visibility)
    if reason:
        raise UserError(f"attention 'splash': {reason}; or use attention 'chunked'")
    width, dtype = q.shape[-1], q.dtype
    q = (q.astype(jnp.float32) * scale).astype(dtype)
    q, k, v = (_pad_heads(jnp.swapaxes(x, 1, 2)) for x in (q, k, v))
    segments = None if visibility.q_segments is None else (visibility.q_segments, visibility.kv_segments)
    run = functools.partial(_run_on_devices, visibility=visibility, soft_cap=soft_cap, interpret=interpret)
    output = jnp.swapaxes(run(q, k, v, segments), 1, 2)[..., :width]
    if visibility.q_segments is not None:
        # the kernel does not know padding: to it, segment 0 is one more document
        output = jnp.where((visibility.q_segments != 0)[:, :, None, None], output, jnp.zeros((), output.dtype))
    return output


def _pad_heads(x: Any) -> Any:
    """Pad the last dim of `x` (B, N, T, H) with zeros to a multiple of LANES."""
    padding = -x.shape[-1] % LANES
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding))) if padding else x


def _kernel(
    visibility: Visibility,
    heads: int,
    queries: int,
    head_shards: int,
    q_shards: int,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """Build the kernel for all heads of a row, with the mask of `visibility`, while tracing, from static values.

    Args:
        visibility: mask of the keys that each query sees.
        heads, queries: numbers of heads and of queries, on all devices.
        head_shards, q_shards: numbers of shards of the heads and of the queries.
        soft_cap: bound of the scores; `None` for no bound.
        interpret: whether the kernel runs step by step in plain JAX.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (queries, queries)
    if visibility.window is not None:
        mask: Any = splash.LocalMask(shape, (int(visibility.window) - 1, 0), 0, shard_count=q_shards)
    elif visibility.causal:
        mask = splash.CausalMask(shape, shard_count=q_shards)
    else:
        mask = splash.FullMask(shape)
    tile = next(tile for tile in TILES if queries // q_shards % tile == 0)
    array_names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    block_lengths: dict[str, Any] = {f"block_{array}": tile for array in array_names}
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**block_lengths),
        attn_logits_soft_cap=soft_cap,
        head_shards=head_shards,
        q_seq_shards=q_shards,
        residual_checkpoint_name="attention_out",
        interpret=interpret,
    )


def _run_rows(kernel: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Run the kernel on every row of a batch, and return the attention output (B, N, T, H)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if segments is None:
        return jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    return jax.vmap(lambda q, k, v, row_segments: kernel(q, k, v, splash.SegmentIds(*row_segments)))(q, k, v, segments)


def _run_on_devices(
    q: Any, k: Any, v: Any, segments: Any, *, visibility: Visibility, soft_cap: float | None, interpret: bool
) -> Any:
    """Run the kernel on every device of the current layout; returns the attention output (B, N, T, H)."""
    heads, queries = q.shape[1:3]
    layout = current()
    if layout is None or layout[0].size == 1:
        return _run_rows(_kernel(visibility, heads, queries, 1, 1, soft_cap, interpret), q, k, v, segments)
    mesh = layout[0]
    row_axes, head_axes, position_axes, _ = axes_by_dim(q.shape, "batch", "heads", "inner_seq", "head_dim")
    head_shards, q_shards = shard_count(head_axes), shard_count(position_axes)
    k, v = key_heads_for_shards(k, v, heads, head_shards, dim=1)
    kernel = _kernel(visibility, heads, queries, head_shards, q_shards, soft_cap, interpret)
    auto_axes = (AxisType.Auto,) * len(mesh.axis_names)
    auto_mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto_axes) if mesh.manual_axes else mesh
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(auto_mesh, PartitionSpec(head_axes, position_axes)))
    q_spec = PartitionSpec(row_axes, head_axes, position_axes, None)
    kv_spec = PartitionSpec(row_axes, head_axes, None, None)
    segments_spec = (
        None if segments is None else (PartitionSpec(row_axes, position_axes), PartitionSpec(row_axes, None))
    )
    in_specs = (kernel_spec, q_spec, kv_spec, kv_spec, segments_spec)
    return map_over_devices(_run_rows, in_specs, q_spec)(kernel, q, k, v, segments)
