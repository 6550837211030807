"""Attention by JAX's splash kernel, on TPU: `jax.experimental.pallas.ops.tpu.splash_attention`.

The compiler does not partition Mosaic kernels, so under a layout the kernel runs in a `shard_map`: batch, heads and
query positions sharded by the rules, keys and values whole along the sequence. There must be as many queries as keys,
ordered by their index. A width of heads that is no multiple of 128 is padded with zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.visibility import Visibility
from jaxscale.sharding.partition import dim_axes, shard_count
from jaxscale.sharding.place import current, spec
from jaxscale.typing import Array, Float

LANES = 128
"""Width of a TPU vector register: the kernel's tiles are multiples of it."""
TILES = (512, 256, 128)
"""Tile lengths to choose from, the longest that divides the sequence."""


def why_not_splash(queries: int, keys: int, visibility: Visibility) -> str | None:
    """Why the kernel does not support this call, and what to do about it; `None` if it does."""
    if not visibility.ordered_by_index:
        return "got positions, expected queries and keys in the order of their index (no cache)"
    if visibility.window is not None and not isinstance(visibility.window, int | np.integer):
        return "got a traced window, expected a whole number: give windows by Stack's cycle"
    if queries != keys:
        return f"got {queries} queries and {keys} keys, expected as many"
    if queries // _query_shards(queries) % LANES:
        return f"got {queries} positions, expected a multiple of {LANES} on every device: pad the sequence"
    return None


def _query_shards(queries: int) -> int:
    """Devices along the query positions."""
    layout = current()
    if layout is None:
        return 1
    mesh, rules = layout
    return _parts(mesh, spec((queries,), ("inner_seq",), mesh, rules), 0)


def _parts(mesh: Any, partition: PartitionSpec, dim: int) -> int:
    """The number of shards of a dim."""
    return shard_count(mesh, dim_axes(partition, dim + 1)[dim])


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
    """`attend_plain`, by the TPU kernel.

    Args:
        q, k, v: queries, keys, values.
        visibility: which keys a query sees.
        scale: of the scores.
        soft_cap: of the scores.
        interpret: run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    reason = why_not_splash(q.shape[1], k.shape[1], visibility)
    if reason:
        raise UserError(f"attention 'splash': {reason}; or take attention 'chunked'")
    width, dtype = q.shape[-1], q.dtype
    q = (q.astype(jnp.float32) * scale).astype(dtype)
    q, k, v = (_padded(jnp.swapaxes(x, 1, 2)) for x in (q, k, v))
    segments = None if visibility.q_segments is None else (visibility.q_segments, visibility.kv_segments)
    run = functools.partial(_on_devices, visibility=visibility, soft_cap=soft_cap, interpret=interpret)
    out = jnp.swapaxes(run(q, k, v, segments), 1, 2)[..., :width]
    if visibility.q_segments is not None:
        # the kernel has no padding: its segment 0 is one more document
        out = jnp.where((visibility.q_segments != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))
    return out


def _padded(x: Any) -> Any:
    pad = -x.shape[-1] % LANES
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad))) if pad else x


def _kernel(
    visibility: Visibility,
    heads: int,
    queries: int,
    head_shards: int,
    q_shards: int,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """The kernel for these masks; built while tracing, from static values."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (queries, queries)
    if visibility.window is not None:
        mask: Any = splash.LocalMask(shape, (int(visibility.window) - 1, 0), 0, shard_count=q_shards)
    elif visibility.causal:
        mask = splash.CausalMask(shape, shard_count=q_shards)
    else:
        mask = splash.FullMask(shape)
    tile = next(tile for tile in TILES if queries // q_shards % tile == 0)
    tiles = splash.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=tiles,
        attn_logits_soft_cap=soft_cap,
        head_shards=head_shards,
        q_seq_shards=q_shards,
        residual_checkpoint_name="attention_out",
        interpret=interpret,
    )


def _rows(kernel: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
    """The kernel over the rows of a batch."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if segments is None:
        return jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    return jax.vmap(lambda q, k, v, s: kernel(q, k, v, splash.SegmentIds(*s)))(q, k, v, segments)


def _on_devices(
    q: Any, k: Any, v: Any, segments: Any, *, visibility: Visibility, soft_cap: float | None, interpret: bool
) -> Any:
    """(B, N, T, H) by the kernel, on every device of the current layout."""
    heads, queries = q.shape[1:3]
    layout = current()
    if layout is None or layout[0].size == 1:
        return _rows(_kernel(visibility, heads, queries, 1, 1, soft_cap, interpret), q, k, v, segments)
    mesh, rules = layout
    q_spec = spec(q.shape, ("batch", "heads", "inner_seq", "head_dim"), mesh, rules)
    q_spec = PartitionSpec(*q_spec, *(None,) * (4 - len(q_spec)))
    head_shards, q_shards = _parts(mesh, q_spec, 1), _parts(mesh, q_spec, 2)
    key_heads = k.shape[1]
    if key_heads % head_shards:
        # the key heads of a device's query heads must be on the same device
        copies = head_shards // key_heads if head_shards % key_heads == 0 else heads // key_heads
        k, v = jnp.repeat(k, copies, 1), jnp.repeat(v, copies, 1)
    kv_spec = PartitionSpec(q_spec[0], q_spec[1], None, None)
    kernel = _kernel(visibility, heads, queries, head_shards, q_shards, soft_cap, interpret)
    # within a region that is manual over some axes (a pipeline's), the kernel becomes manual over the others
    axis_names = set(mesh.axis_names) - set(mesh.manual_axes)
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    auto_mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto) if mesh.manual_axes else mesh
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(auto_mesh, PartitionSpec(q_spec[1], q_spec[2])))
    segments_spec = None if segments is None else (PartitionSpec(q_spec[0], q_spec[2]), PartitionSpec(q_spec[0], None))
    sharded = jax.shard_map(
        _rows,
        mesh=mesh,
        in_specs=(kernel_spec, q_spec, kv_spec, kv_spec, segments_spec),
        out_specs=q_spec,
        axis_names=axis_names,
        check_vma=False,
    )
    return sharded(kernel, q, k, v, segments)
