"""Weights by layer, for the steps of generation on a CPU.

A `Stack` scans over its layers, and XLA copies the weights of a layer out of the stacked array before it multiplies by
them. In training the products take much longer than the copies. A step of generation does little but read the weights,
and takes more than twice as long with the copies. So its program takes the weights of each layer as arrays of their
own, which costs memory for a second copy of the layers, and compile time in proportion to their number.
"""

from typing import Any

import jax
from flax import nnx

from jaxscale.layers.layer_group import restack, unstack
from jaxscale.layers.stack import Stack

MAX_LAYERS = 16
"""Largest number of layers that are compiled one after another; each takes about 0.2 seconds."""


def stack_paths(module: Any) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the stacked layers in the pure state of a module: of each group of each `Stack`.

    Returns `()` if the layers together are more than `MAX_LAYERS`.
    """
    stacks = [(path, part) for path, part in nnx.iter_modules(module) if isinstance(part, Stack)]
    if sum(stack.count for _, stack in stacks) > MAX_LAYERS:
        return ()
    return tuple((*path, name) for path, stack in stacks for name in stack.group_names)


@jax.jit(static_argnames="paths")
def split_layers(params: Any, paths: tuple[tuple[str, ...], ...]) -> Any:
    """Return parameters in which the layers at `paths` are tuples with a tree for each layer."""
    return _replaced(params, paths, lambda group: tuple(unstack(group, jax.tree.leaves(group)[0].shape[0])))


def merge_unrolled(graphdef: Any, params: Any, paths: tuple[tuple[str, ...], ...]) -> Any:
    """Return the module of split parameters, which runs its layers one after another, to be traced."""
    if not paths:
        return nnx.merge(graphdef, params, copy=True)
    module = nnx.merge(graphdef, _replaced(params, paths, restack), copy=True)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Stack):
            part.scan = False  # XLA reduces a layer of the stacked layers to that layer
    return module


def _replaced(tree: Any, paths: tuple[tuple[str, ...], ...], replace: Any) -> Any:
    """Return nested dicts in which the parts at `paths` are replaced by `replace(part)`."""
    for path in paths:
        tree = _replaced_part(tree, path, replace)
    return tree


def _replaced_part(tree: Any, path: tuple[str, ...], replace: Any) -> Any:
    """Return nested dicts in which one part is replaced by `replace(part)`."""
    if not path:
        return replace(tree)
    return {**tree, path[0]: _replaced_part(tree[path[0]], path[1:], replace)}
