"""Attention by the kernels of `pallas_kernels.attention`: on TPU, and on GPUs of compute capability 9.0.

A kernel is code of one device, so under a layout it runs in a `shard_map`: batch, heads and query positions sharded by
the rules, keys and values whole along the sequence. Each device passes the index of its first query to the kernel; the
gradients of keys and values are summed over the devices of a sequence in their type. Queries and keys must be in the
order of their indices. Left out: an order of positions that balances causal work. The device of the last positions
sees most keys: of n devices it works 2 - 1 / n times as long as the mean, and the others wait.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxscale.errors import UserError
from jaxscale.layers.visibility import Visibility
from jaxscale.sharding.partition import dim_axes, shard_count
from jaxscale.sharding.place import current, spec
from jaxscale.typing import Array, Float

KERNELS = ("tpu", "gpu", "cudnn")
"""Implementations of `pallas_kernels.attention` that are kernels."""


def place() -> tuple[str, str]:
    """Platform ("cpu", "gpu", "tpu") and kind of the device being traced for: the layout's, or the default one."""
    layout = current()
    if layout is None:
        device: Any = jax.devices()[0]
    else:
        abstract = getattr(layout[0], "abstract_device", None)  # of a mesh without devices
        device = layout[0].devices.flat[0] if abstract is None else abstract
    return device.platform, device.device_kind


def why_not_kernel(
    name: str, q: Any, k: Any, v: Any, visibility: Visibility, *, scale: float, soft_cap: float | None
) -> str | None:
    """Why a kernel does not support this call, and what to do about it; `None` if it does.

    Args:
        name: one of KERNELS.
        q, k, v: queries, keys, values, or their types.
        visibility: which keys a query sees.
        scale, soft_cap: of the scores.
    """
    if not visibility.ordered_by_index:
        return "got positions, expected queries and keys in the order of their index (no cache)"
    if visibility.window is not None and not isinstance(visibility.window, int | np.integer):
        return "got a traced window, expected a whole number: give windows by Stack's cycle"
    from pallas_kernels.attention.api import explain

    layout = current()
    shards = 1 if layout is None else _parts(layout[0], _partition(q, *layout)[1])
    q = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] // shards, *q.shape[2:]), q.dtype)
    ids = None if visibility.q_segments is None else (_shape_of(q), _shape_of(k))
    settings = _settings(visibility, scale, soft_cap)
    if shards > 1:
        settings["query_offset"] = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        platform = " ".join(place())
        explain(q, k, v, segment_ids=ids, implementation=name, platform=platform, **settings)
    except (NotImplementedError, ValueError) as error:
        return str(error).removesuffix(" Pass implementation=None to take one that can.")
    return None


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)


def _settings(visibility: Visibility, scale: float, soft_cap: float | None) -> dict[str, Any]:
    window = None if visibility.window is None else int(visibility.window)
    return {"causal": visibility.causal, "window": window, "logit_soft_cap": soft_cap, "scale": scale}


def _partition(q: Any, mesh: Any, rules: Any) -> tuple[Any, Any, Any]:
    """Mesh axes of rows, positions and heads of queries."""
    partition = spec(q.shape, ("batch", "inner_seq", "heads", "head_dim"), mesh, rules)
    rows, positions, heads, _ = (*partition, *(None,) * (4 - len(partition)))
    return rows, positions, heads


def _parts(mesh: Any, axes: Any) -> int:
    """The number of shards of a dim over these mesh axes."""
    return shard_count(mesh, dim_axes((axes,))[0])


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
    """`attend_plain`, by a kernel.

    Args:
        q, k, v: queries, keys, values.
        visibility: which keys a query sees.
        scale: of the scores.
        soft_cap: of the scores.
        implementation: "tpu", "gpu" or "cudnn".
        interpret: run the kernel step by step in plain JAX, for tests.

    Raises:
        UserError: the kernel does not support the call.
    """
    why_not = functools.partial(why_not_kernel, scale=scale, soft_cap=soft_cap)
    reason = None if interpret else why_not(implementation, q, k, v, visibility)
    if reason:
        raise UserError(f"attention {implementation!r}: {reason}; or take attention 'auto'")
    from pallas_kernels.attention.api import attention

    ids = None
    if visibility.q_segments is not None:
        rows = q.shape[0]
        # padding, segment 0, gets ids that differ between queries and keys, so it sees none and is seen by none
        segments_and_padding = ((visibility.q_segments, -1), (visibility.kv_segments, -2))
        ids = tuple(
            jnp.broadcast_to(
                jnp.where(segments == 0, padding_id, segments).astype(jnp.int32), (rows, segments.shape[1])
            )
            for segments, padding_id in segments_and_padding
        )
    settings = _settings(visibility, scale, soft_cap)
    settings |= {"implementation": implementation, "platform": " ".join(place()), "interpret": interpret}

    def run(starts: Any, q: Any, k: Any, v: Any, ids: Any) -> Any:
        return attention(q, k, v, segment_ids=ids, query_offset=0 if starts is None else starts[0], **settings)

    return _on_devices(run, q, k, v, ids)


def _on_devices(run: Any, q: Any, k: Any, v: Any, ids: Any) -> Any:
    """`run` on every device of the current layout, on its shard of rows, query positions and heads."""
    layout = current()
    if layout is None:
        return run(None, q, k, v, ids)
    mesh, rules = layout
    rows, positions, heads = _partition(q, mesh, rules)
    shards, key_heads, position_shards = _parts(mesh, heads), k.shape[2], _parts(mesh, positions)
    if key_heads % shards:
        # the key heads of a device's query heads must be on the same device
        copies = shards // key_heads if shards % key_heads == 0 else q.shape[2] // key_heads
        k, v = jnp.repeat(k, copies, 2), jnp.repeat(v, copies, 2)
    starts = (
        None if position_shards == 1 else jnp.arange(position_shards, dtype=jnp.int32) * (q.shape[1] // position_shards)
    )
    query_spec, key_spec = PartitionSpec(rows, positions, heads), PartitionSpec(rows, None, heads)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(
            None if starts is None else PartitionSpec(positions),
            query_spec,
            key_spec,
            key_spec,
            None if ids is None else (PartitionSpec(rows, positions), PartitionSpec(rows)),
        ),
        out_specs=query_spec,
        # within a region that is manual over some axes (a pipeline's), the kernel becomes manual over the others
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(starts, q, k, v, ids)
