"""Names and bytes of the leaves of pytrees."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

SEPARATOR = "/"


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as one name, its parts joined by "/"."""
    return SEPARATOR.join(_part(key) for key in path)


def _part(key: Any) -> str:
    match key:
        case DictKey(key=part) | FlattenedIndexKey(key=part):
            return str(part)
        case GetAttrKey(name=part):
            return part
        case SequenceKey(idx=part):
            return str(part)
        case _:
            return str(key)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name.

    Example:
        >>> named_leaves({"mlp": {"up": 1}, "norm": [2, 3]})
        {'mlp/up': 1, 'norm/0': 2, 'norm/1': 3}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def filled(tree: Any, by_name: Mapping[str, Any]) -> Any:
    """A tree of the same structure with the leaf of each name.

    Example:
        >>> filled({"mlp": {"up": 1}, "norm": [2, 3]}, {"mlp/up": "a", "norm/0": "b", "norm/1": "c"})
        {'mlp': {'up': 'a'}, 'norm': ['b', 'c']}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: by_name[path_name(path)], tree)


def leaf_bytes(leaf: Any) -> int:
    """Bytes of an array or of its abstract shape on a device; int4 counts half a byte per element."""
    dtype = jnp.dtype(leaf.dtype) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None
    if dtype is None:
        return math.prod(leaf.shape) * 8
    if jnp.issubdtype(dtype, jnp.integer):
        return math.ceil(math.prod(leaf.shape) * jnp.iinfo(dtype).bits / 8)
    if jnp.issubdtype(dtype, jnp.floating):
        return math.ceil(math.prod(leaf.shape) * jnp.finfo(dtype).bits / 8)
    return math.prod(leaf.shape) * dtype.itemsize


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a tree."""
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def count(tree: Any) -> int:
    """Elements of all leaves of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
