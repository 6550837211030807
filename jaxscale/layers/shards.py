"""Kernels on a mesh: the shards of arrays under the layout in force, and code that runs on each device.

A kernel is code of one device, so under a layout it runs in a `shard_map`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.sharding import partition
from jaxscale.sharding.partition import dim_axes
from jaxscale.sharding.place import current, spec


def axes_by_dim(shape: Sequence[int], *names: str | None) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that shard each dim of an array under the layout in force, `()` for a dim that is whole.

    Args:
        shape: shape of the array.
        names: logical axis of each dim, `None` for a dim without one.
    """
    layout = current()
    return dim_axes(() if layout is None else spec(shape, names, *layout), len(shape))


def shard_count(axes: Sequence[str]) -> int:
    """Return the number of shards of a dim over these mesh axes."""
    # on a mesh with manual axes (inside a pipeline), a JAX `Sharding` does not report its number of shards
    layout = current()
    return 1 if layout is None else partition.shard_count(layout[0], axes)


def map_over_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `function` in a `shard_map` over the mesh of the layout in force.

    Within a region that is manual over some axes (a pipeline's), the function becomes manual over all other axes.
    """
    layout = current()
    assert layout is not None
    mesh = layout[0]
    axis_names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )


def key_heads_for_shards(k: Any, v: Any, query_heads: int, shards: int, dim: int) -> tuple[Any, Any]:
    """Repeat keys and values until each shard of the query heads has its key heads on the same device.

    Args:
        k, v: keys and values.
        query_heads: number of query heads.
        shards: number of shards of the query heads.
        dim: dim of `k` and `v` that holds the heads.
    """
    key_heads = k.shape[dim]
    if key_heads % shards == 0:
        return k, v
    copies = shards // key_heads if shards % key_heads == 0 else query_heads // key_heads
    return jnp.repeat(k, copies, dim), jnp.repeat(v, copies, dim)
