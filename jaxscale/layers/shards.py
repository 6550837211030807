"""Kernels on a mesh: the shards of arrays under the layout in force, and code that runs on each device.

A kernel is code for one device, so under a layout it runs in a `shard_map`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.sharding import partition
from jaxscale.sharding.partition import dim_axes
from jaxscale.sharding.place import current, spec


def axes_by_dim(shape: Sequence[int], *names: str | None) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that shard each dim of an array under the layout in force; `()` for an unsharded dim.

    Args:
        shape: shape of the array.
        names: logical axis of each dim, `None` for a dim without a logical axis.
    """
    layout = current()
    return dim_axes(() if layout is None else spec(shape, names, *layout), len(shape))


def shard_count(axes: Sequence[str]) -> int:
    """Return the number of shards of a dim that is sharded over these mesh axes."""
    # on a mesh with manual axes (inside a pipeline), a JAX `Sharding` does not report its number of shards
    layout = current()
    return 1 if layout is None else partition.shard_count(layout[0], axes)


def batch_shard_count(shape: Sequence[int]) -> int:
    """Return the number of shards of the first dim, the batch, of an array of this shape under the layout in force."""
    return shard_count(axes_by_dim(shape, "batch", *(None for _ in shape[1:]))[0])


def map_over_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `function`, mapped by `shard_map` over the mesh of the layout in force.

    If some mesh axes are already manual, as in a pipeline, only the other axes become manual.
    """
    layout = current()
    assert layout is not None
    mesh = layout[0]
    axis_names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )


def repeat_key_heads(k: Any, v: Any, query_head_count: int, query_head_shard_count: int, dim: int) -> tuple[Any, Any]:
    """Return the keys and values, with heads repeated if a shard of the query heads would lack its key heads.

    Args:
        k, v: keys and values.
        query_head_count: number of query heads.
        query_head_shard_count: number of shards of the query heads.
        dim: dim of `k` and `v` that holds the heads.
    """
    key_head_count = k.shape[dim]
    if key_head_count % query_head_shard_count == 0:
        return k, v
    copies_per_head = (
        query_head_shard_count // key_head_count
        if query_head_shard_count % key_head_count == 0
        else query_head_count // key_head_count
    )
    return jnp.repeat(k, copies_per_head, dim), jnp.repeat(v, copies_per_head, dim)
