"""Weights as the steps of generation read them fastest on a CPU: layer by layer, and in large products.

XLA:CPU computes a product of one row on all cores if the weights have about 540,000 numbers or more, and otherwise on
one core. So queries, keys and values are projected by one product.

A `Stack` scans over its layers, and XLA copies the weights of a layer out of the stacked array before it multiplies by
them. In training the products take much longer than the copies. A step of generation does little but read the weights,
and takes more than twice as long with the copies. So its program takes the weights of each layer as arrays of their
own. They share the memory of the stacked array, and cost compile time in proportion to the number of layers. A model of
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
"""Paths of parts of nested dicts: names, and numbers of modules in lists."""


def stack_paths(module: Any) -> Paths:
    """Return the paths of the stacked layers in the pure state of a module: of each group of each `Stack`.

    Returns `()`, for a scan, if the layers are not in the memory of CPUs, or are sharded along the dim of layers.
    """
    stacks = [(path, part) for path, part in nnx.iter_modules(module) if isinstance(part, Stack)]
    leaves = [leaf for _, stack in stacks for leaf in jax.tree.leaves(nnx.state(stack))]
    if not all(map(_has_layer_views, leaves)):
        return ()
    return tuple((*path, name) for path, stack in stacks for name in stack.group_names)


def has_few_layers(module: Any) -> bool:
    """Return whether all layers of a module may be compiled one after another."""
    return sum(part.count for _, part in nnx.iter_modules(module) if isinstance(part, Stack)) <= MAX_LAYERS


def is_on_cpus(module: Any) -> bool:
    """Return whether all arrays of a module are in the memory of CPUs of this process."""
    return all(map(_is_on_cpus, jax.tree.leaves(nnx.state(module))))


def on_first_device(module: Any) -> Any:
    """Return a module with the arrays of another one on its first device; arrays that it holds whole are shared."""
    graphdef, state = nnx.split(module)
    device = jax.tree.leaves(state)[0].addressable_shards[0].device

    def placed(leaf: Any) -> Any:
        if not leaf.is_fully_replicated or device not in leaf.devices():
            return jax.device_put(leaf, device)
        return next(shard.data for shard in leaf.addressable_shards if shard.device == device)

    return nnx.merge(graphdef, jax.tree.map(placed, state))


def join_projections(module: Any) -> Any:
    """Return a module with the same weights, in which queries, keys and values are one product where that is possible.

    It is possible on CPUs whose devices hold all of the weights, and for projections without adapters and in plain
    arrays.
    """
    layers = [part for _, part in nnx.iter_modules(module) if isinstance(part, Attention)]
    projections = [part for layer in layers for part in (layer.q, layer.k, layer.v) if part]
    is_whole = is_on_cpus(module) and all(leaf.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(module)))
    if not is_whole or any(part.lora is not None or isinstance(part.weight, FewBitWeight) for part in projections):
        return module
    joined_module = nnx.merge(*nnx.split(module), copy=True)
    for _, part in nnx.iter_modules(joined_module):
        if isinstance(part, Attention):
            part.join_projections()
    return joined_module


def split_layers(params: Any, paths: Paths) -> Any:
    """Return parameters in which the layers at `paths` are tuples with a tree for each layer."""

    def split(group: Any) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(group)
        return tuple(structure.unflatten(layer_leaves) for layer_leaves in zip(*map(_layer_views, leaves), strict=True))

    return _replaced(params, paths, split)


def merge_unrolled(graphdef: Any, params: Any, paths: Paths) -> Any:
    """Return the module of split parameters, which runs its layers one after another, to be traced."""
    if not paths:
        return nnx.merge(graphdef, params, copy=True)
    module = nnx.merge(graphdef, _replaced(params, paths, restack), copy=True)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Stack):
            part.scan = False  # XLA reduces a layer of the stacked layers to that layer
    return module


def _is_on_cpus(leaf: Any) -> bool:
    """Return whether an array is in the memory of CPUs of this process."""
    if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in leaf.devices())


def _has_layer_views(leaf: Any) -> bool:
    """Return whether each device is a CPU and holds all layers of a stacked array."""
    if not _is_on_cpus(leaf) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0]


def _layer_views(leaf: Any) -> list[Any]:
    """Return the layers of a stacked array, as arrays that share its memory where the alignment allows it."""
    if not leaf.committed:  # such an array may still go to any device
        return [jax.device_put(layer) for layer in np.asarray(leaf)]
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))
    shards = [(np.asarray(shard.data), shard.device) for shard in leaf.addressable_shards]
    return [
        jax.make_array_from_single_device_arrays(
            leaf.shape[1:], sharding, [jax.device_put(layers[layer], device) for layers, device in shards]
        )
        for layer in range(leaf.shape[0])
    ]


def _replaced(tree: Any, paths: Paths, replace: Callable[[Any], Any]) -> Any:
    """Return nested dicts in which the parts at `paths` are replaced by `replace(part)`."""
    for path in paths:
        tree = _replaced_part(tree, path, replace)
    return tree


def _replaced_part(tree: Any, path: tuple[Any, ...], replace: Callable[[Any], Any]) -> Any:
    """Return nested dicts in which one part is replaced by `replace(part)`."""
    if not path:
        return replace(tree)
    return {**tree, path[0]: _replaced_part(tree[path[0]], path[1:], replace)}
