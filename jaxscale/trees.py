"""Names and bytes of the leaves of pytrees."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: the parts of its key path, joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, by name.

    Example:
        >>> named_leaves({"mlp": {"up": 1}, "norm": [2, 3]})
        {'mlp/up': 1, 'norm/0': 2, 'norm/1': 3}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def filled(tree: Any, leaf_by_name: Mapping[str, Any]) -> Any:
    """Return a tree with the structure of `tree`, whose leaves are taken from `leaf_by_name` by their names.

    Example:
        >>> filled({"mlp": {"up": 1}, "norm": [2, 3]}, {"mlp/up": "a", "norm/0": "b", "norm/1": "c"})
        {'mlp': {'up': 'a'}, 'norm': ['b', 'c']}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_by_name[path_name(path)], tree)


def shapes_of(tree: Any) -> Any:
    """Return a tree with the shape and dtype (`jax.ShapeDtypeStruct`) of each array of a tree, without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def leaf_bytes(leaf: Any) -> int:
    """Return the number of bytes of an array or `jax.ShapeDtypeStruct`; an int4 element takes half a byte."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        element_bits = 64
    else:  # the gradient of an integer has no bits
        element_bits = 0 if leaf.dtype == jax.dtypes.float0 else jax.dtypes.itemsize_bits(leaf.dtype)
    return math.ceil(math.prod(leaf.shape) * element_bits / 8)


def tree_bytes(tree: Any) -> int:
    """Return the number of bytes of all leaves of a tree together."""
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def count(tree: Any) -> int:
    """Return the number of elements of all leaves of a tree together."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
