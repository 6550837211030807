"""Attention by the kernels of `pallas_kernels.attention`: on TPU, and on GPUs of compute capability 9.0.

Under a layout, the axis rules shard rows, heads and query positions, and keys and values are whole along the sequence.
Each device passes the index of its first query to the kernel; the gradients of keys and values are summed over the
devices that share a sequence, in the type of keys and values. Queries and keys must be in the order of their indices.
Left out: an order of positions that balances causal work. The device of the last positions sees the most keys. With n
devices, it works 2 - 1 / n times as long as the average device, and the other devices wait for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.shards import axes_by_dim, map_over_devices, repeat_key_heads, shard_count
from jaxscale.layers.traced_device import traced_device
from jaxscale.sharding.place import current
from jaxscale.typing import Array, Float
from pallas_kernels.attention.visibility import Visibility

KERNELS = ("tpu", "gpu", "cudnn")
"""Implementations of `pallas_kernels.attention` that are kernels."""
_QUERY_AXES = ("batch", "inner_seq", "heads", "head_dim")
"""Logical axes of the dims of queries."""


def why_not_static(visibility: Visibility) -> str | None:
    """Return why kernels, which need static masks, do not support this visibility; `None` if they support it."""
    if not visibility.is_ordered_by_index:
        return "got positions, expected queries and keys in the order of their index (no cache)"
    if visibility.window is not None and not isinstance(visibility.window, int | np.integer):
        return "got a traced window, expected a whole number: pass windows as the argument `cycle` of a Stack"
    return None


def why_not_kernel(
    name: str, q: Any, k: Any, v: Any, visibility: Visibility, *, scale: float, soft_cap: float | None
) -> str | None:
    """Return why a kernel does not support this call, and what to do instead; `None` if the kernel supports the call.

    Args:
        name: name of the kernel, one of KERNELS.
        q, k, v: queries, keys, values, as arrays or as `jax.ShapeDtypeStruct`.
        visibility: mask of the keys that each query sees.
        scale: factor of the scores.
        soft_cap: cap of the scores; `None` for no cap.
    """
    if reason := why_not_static(visibility):
        return reason
    from pallas_kernels.attention.api import explain

    query_shard_count = shard_count(axes_by_dim(q.shape, *_QUERY_AXES)[1])
    abstract_q = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // query_shard_count, *q.shape[2:]), q.dtype)
    abstract_segment_ids = None
    if visibility.q_segments is not None:
        abstract_segment_ids = tuple(jax.ShapeDtypeStruct(array.shape[:2], jnp.int32) for array in (abstract_q, k))
    settings = _kernel_settings(visibility, scale, soft_cap)
    if query_shard_count > 1:
        settings["query_offset"] = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        platform = " ".join(traced_device())
        explain(abstract_q, k, v, segment_ids=abstract_segment_ids, implementation=name, platform=platform, **settings)
    except (NotImplementedError, ValueError) as error:
        return str(error).removesuffix(" Pass implementation=None to take one that can.")
    return None


def _kernel_settings(visibility: Visibility, scale: float, soft_cap: float | None) -> dict[str, Any]:
    """Return the keyword arguments of `pallas_kernels.attention` that describe the mask and the scores."""
    window = None if visibility.window is None else int(visibility.window)
    return {"causal": visibility.causal, "window": window, "logit_soft_cap": soft_cap, "scale": scale}


def attend_kernel(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visibility: Visibility,
    *,
    scale: float,
    soft_cap: float | None,
    implementation: str,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Compute attention by a kernel.

    Args:
        q, k, v: queries, keys, values.
        visibility: mask of the keys that each query sees.
        scale: factor of the scores.
        soft_cap: cap of the scores; `None` for no cap.
        implementation: "tpu", "gpu" or "cudnn".
        interpret: whether to run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    score_settings: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    if not interpret and (reason := why_not_kernel(implementation, q, k, v, visibility, **score_settings)):
        raise UserError(f"attention {implementation!r}: {reason}; or use attention 'auto'")
    from pallas_kernels.attention.api import attention

    segment_ids = None
    if visibility.q_segments is not None:
        row_count = q.shape[0]
        # padding (segment 0) gets ids that differ between queries and keys: it sees no key and is seen by no query
        segments_and_padding_ids = ((visibility.q_segments, -1), (visibility.kv_segments, -2))
        segment_ids = tuple(
            jnp.broadcast_to(
                jnp.where(segments == 0, padding_id, segments).astype(jnp.int32), (row_count, segments.shape[1])
            )
            for segments, padding_id in segments_and_padding_ids
        )
    settings = _kernel_settings(visibility, **score_settings)
    settings |= {"implementation": implementation, "platform": " ".join(traced_device()), "interpret": interpret}

    def run_shard(starts: Any, q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        """Run the kernel on one device. `starts` (1,) holds the index of the device's first query; `None` means 0."""
        return attention(q, k, v, segment_ids=segment_ids, query_offset=0 if starts is None else starts[0], **settings)

    return _run_on_devices(run_shard, q, k, v, segment_ids)


def _run_on_devices(run_shard: Any, q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    """Call `run_shard` on every device of the current layout, with its shard of rows, query positions and heads."""
    if current() is None:
        return run_shard(None, q, k, v, segment_ids)
    row_axes, position_axes, head_axes, _ = axes_by_dim(q.shape, *_QUERY_AXES)
    k, v = repeat_key_heads(k, v, q.shape[2], shard_count(head_axes), dim=2)
    query_shard_count, starts = shard_count(position_axes), None
    if query_shard_count > 1:
        starts = jnp.arange(query_shard_count, dtype=jnp.int32) * (q.shape[1] // query_shard_count)
    query_spec = PartitionSpec(row_axes, position_axes, head_axes)
    key_spec = PartitionSpec(row_axes, None, head_axes)
    in_specs = (
        None if starts is None else PartitionSpec(position_axes),
        query_spec,
        key_spec,
        key_spec,
        None if segment_ids is None else (PartitionSpec(row_axes, position_axes), PartitionSpec(row_axes)),
    )
    return map_over_devices(run_shard, in_specs, query_spec)(starts, q, k, v, segment_ids)
