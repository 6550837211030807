"""Weights in the layout that a generation step reads fastest on a CPU: layer by layer, and in large matrix products.

XLA:CPU computes the matrix product of one row on all cores if the weights have about 540,000 elements or more, and
otherwise on one core. So one product projects to queries, keys and values.

A `Stack` scans over its layers, and XLA copies the weights of a layer out of the stacked array before it multiplies by
them. In training the products take much longer than the copies. A step of generation does little but read the weights,
and takes more than twice as long with the copies. So its program takes the weights of each layer as separate arrays.
They share the memory of the stacked array, but compile time grows in proportion to the number of layers. A model of
many layers is called layer by layer instead (`layer_programs.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.layers.attention import Attention
from jaxscale.layers.layer_group import restack
from jaxscale.layers.stack import Stack
from jaxscale.lowbit.few_bit_weight import FewBitWeight

MAX_LAYERS = 16
"""Largest number of layers that are compiled one after another; more would take long to compile."""
Paths = tuple[tuple[Any, ...], ...]
"""Paths in nested dicts. A path consists of names and, for modules in lists, indices."""


def layer_group_paths(module: Any) -> Paths:
    """Return the path of each group of layers of each `Stack` in the module's pure state.

    If the layers are not in CPU memory, or are sharded along the layer dim, return `()`, so that a scan runs them.
    """
    paths_and_stacks = [(path, node) for path, node in nnx.iter_modules(module) if isinstance(node, Stack)]
    arrays = [leaf for _, stack in paths_and_stacks for leaf in jax.tree.leaves(nnx.state(stack))]
    if not all(map(_has_layer_views, arrays)):
        return ()
    return tuple((*path, name) for path, stack in paths_and_stacks for name in stack.group_names)


def has_few_layers(module: Any) -> bool:
    """Return whether a module has at most `MAX_LAYERS` layers, so that all of them may be unrolled."""
    return sum(part.count for _, part in nnx.iter_modules(module) if isinstance(part, Stack)) <= MAX_LAYERS


def is_on_cpus(module: Any) -> bool:
    """Return whether all arrays of a module are in the memory of CPUs of this process."""
    return all(map(_is_on_cpus, jax.tree.leaves(nnx.state(module))))


def copy_to_first_device(module: Any) -> Any:
    """Return a copy of a module with all arrays on its first device. Arrays that are whole there are not copied."""
    graphdef, state = nnx.split(module)
    device = jax.tree.leaves(state)[0].addressable_shards[0].device

    def place(array: Any) -> Any:
        if not array.is_fully_replicated or device not in array.devices():
            return jax.device_put(array, device)
        return next(shard.data for shard in array.addressable_shards if shard.device == device)

    return nnx.merge(graphdef, jax.tree.map(place, state))


def join_projections(module: Any) -> Any:
    """Return a module with the same weights that projects to queries, keys and values by one product.

    The module is returned unchanged unless its devices are CPUs that each hold all of the weights, and every projection
    has a plain array as its weight and no adapter.
    """
    attention_layers = [part for _, part in nnx.iter_modules(module) if isinstance(part, Attention)]
    projections = [part for layer in attention_layers for part in (layer.q, layer.k, layer.v) if part]
    is_whole_on_cpus = is_on_cpus(module) and all(
        leaf.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(module))
    )
    if not is_whole_on_cpus or any(
        part.lora is not None or isinstance(part.weight, FewBitWeight) for part in projections
    ):
        return module
    joined_module = nnx.merge(*nnx.split(module), copy=True)
    for _, part in nnx.iter_modules(joined_module):
        if isinstance(part, Attention):
            part.join_projections()
    return joined_module


def split_layers(params: Any, paths: Paths) -> Any:
    """Return the parameters with each group of stacked layers, at `paths`, split into a tuple of trees, one a layer."""

    def split(group: Any) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(group)
        return tuple(structure.unflatten(layer_leaves) for layer_leaves in zip(*map(_layer_views, leaves), strict=True))

    return _replace_parts(params, paths, split)


def merge_unrolled(graphdef: Any, params: Any, paths: Paths) -> Any:
    """Return a module with split parameters that runs its layers one after another. Call this inside a trace."""
    if not paths:
        return nnx.merge(graphdef, params, copy=True)
    module = nnx.merge(graphdef, _replace_parts(params, paths, restack), copy=True)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Stack):
            part.scan = False  # XLA simplifies an index into the restacked layers to the layer itself
    return module


def _is_on_cpus(array: Any) -> bool:
    """Return whether an array is in the memory of CPUs of this process."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.devices())


def _has_layer_views(array: Any) -> bool:
    """Return whether each device is a CPU and holds all layers of a stacked array."""
    if not _is_on_cpus(array) or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return array.sharding.shard_shape(array.shape)[0] == array.shape[0]


def _layer_views(array: Any) -> list[Any]:
    """Return the layers of a stacked array as separate arrays, which share its memory if the alignment allows that."""
    if not array.committed:  # JAX may still move such an array to any device
        return [jax.device_put(layer) for layer in np.asarray(array)]
    sharding = array.sharding
    layer_sharding = (
        jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
        if isinstance(sharding, jax.sharding.NamedSharding)
        else sharding
    )
    shard_arrays_and_devices = [(np.asarray(shard.data), shard.device) for shard in array.addressable_shards]
    return [
        jax.make_array_from_single_device_arrays(
            array.shape[1:],
            layer_sharding,
            [jax.device_put(shard_array[layer_index], device) for shard_array, device in shard_arrays_and_devices],
        )
        for layer_index in range(array.shape[0])
    ]


def _replace_parts(tree: Any, paths: Paths, replace: Callable[[Any], Any]) -> Any:
    """Return nested dicts in which the parts at `paths` are replaced by `replace(part)`."""
    for path in paths:
        tree = _replace_part(tree, path, replace)
    return tree


def _replace_part(tree: Any, path: tuple[Any, ...], replace: Callable[[Any], Any]) -> Any:
    """Return nested dicts in which one part is replaced by `replace(part)`."""
    if not path:
        return replace(tree)
    return {**tree, path[0]: _replace_part(tree[path[0]], path[1:], replace)}
