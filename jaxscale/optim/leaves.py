"""ParamInfo: facts about a parameter for update rules, derived from its logical axes.

Layers of a stack lie in one array, layers first. A rule that treats each number by itself can ignore this; one that
takes a norm, a row or a singular vector cannot (LARS and LAMB are "layer-wise", Muon and SOAP take matrices). The names
of axes also distinguish matrices from tables, gains and biases. A parameter without names, as in a foreign module, is
judged by its shape and its path.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxscale.trees import path_name
from jaxscale.typing import Params

LeafKind = Literal["matrix", "table", "vector"]

STACKED = ("layers", "expert")
"""Logical axes along which separate tensors of one shape are stacked."""

_TABLES = ("wte", "wpe", "head", "lm_head", "classifier", "logits")
"""Modules of foreign models whose matrices are embeddings or heads, besides all with "emb" in their name."""
_FUSED = ("qkv", "c_attn", "in_proj")
"""Modules of foreign models that hold the projections of queries, keys and values side by side."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Facts about a parameter for update rules.

    Args:
        shape: global shape.
        kind: "matrix" for projections and convolutions; "table" for embeddings, positions and the head; "vector" for
            gains, biases and all else of fewer than two dims.
        stack: leading dims along which tensors of one shape are stacked.
        decays: whether weight decay applies to it.
        parts: matrices that lie side by side along the last dim: 3 in a fused projection of queries, keys and values.
        sharding: `NamedSharding` of optimizer state of its shape; `None` on one device.

    Example:
        >>> leaf = leaf_of("blocks/layers/mlp/up/weight", ("layers", "embed", "mlp"), (2, 8, 24))
        >>> leaf.kind, leaf.tensors, leaf.rows, leaf.columns
        ('matrix', 2, 8, 24)
    """

    shape: tuple[int, ...]
    kind: LeafKind
    stack: int = 0
    decays: bool = True
    parts: int = 1
    sharding: Any = None

    @property
    def tensors(self) -> int:
        """Number of stacked tensors; 1 for an unstacked one."""
        return math.prod(self.shape[: self.stack])

    @property
    def rows(self) -> int:
        """Rows of one tensor as a matrix: (everything else, last dim)."""
        return math.prod(self.shape[self.stack : -1])

    @property
    def columns(self) -> int:
        """Columns of one tensor as a matrix."""
        return self.shape[-1] if len(self.shape) > self.stack else 1


def leaf_of(name: str, axes: Sequence[str | None] | None, shape: Sequence[int], sharding: Any = None) -> ParamInfo:
    """The `ParamInfo` of a parameter.

    Args:
        name: its path, joined by slashes.
        axes: logical axis of each dim; `None` for a parameter without names.
        shape: of the parameter.
        sharding: of optimizer state of its shape.
    """
    shape, modules = tuple(shape), name.lower().split("/")
    stack = 0
    if axes is not None:
        stack = next((dim for dim, axis in enumerate(axes) if axis not in STACKED), len(axes))
    inner = () if axes is None else axes[stack:]
    table = bool({"vocab", "position"} & set(inner)) or any(module in _TABLES for module in modules)
    if axes is None:
        table = table or any("emb" in module for module in modules)
    if len(shape) - stack < 2 or "norm" in inner:
        kind: LeafKind = "vector"
    else:
        kind = "table" if table else "matrix"
    fused = kind == "matrix" and shape[-1] % 3 == 0 and any(word in module for module in modules for word in _FUSED)
    return ParamInfo(shape, kind, stack, decays(axes, shape), 3 if fused else 1, sharding)


def leaves_of(params: Params) -> Any:
    """Tree of `ParamInfo` like the parameters, for parameters without logical axes.

    Example:
        >>> import jax.numpy as jnp
        >>> tree = leaves_of({"embedding": jnp.ones((5, 4)), "mlp": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}})
        >>> tree["embedding"].kind, tree["mlp"]["kernel"].kind, tree["mlp"]["bias"].kind
        ('table', 'matrix', 'vector')
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf_of(path_name(path), None, leaf.shape), params)


def facts_of(leaves: Any, tree: Any) -> list[ParamInfo]:
    """The `ParamInfo` of each array of a tree, in order.

    Args:
        leaves: tree of `ParamInfo` like it; `None` derives it from shapes and paths.
        tree: of arrays. An array of some of its leaf's layers has that kind; one of any other shape is a placeholder,
            and counts as a vector.
    """
    shapes = [tuple(array.shape) for array in jax.tree.leaves(tree)]
    if not shapes:  # a placeholder, of `optax.tree.map_params`
        return []
    leaf_list = jax.tree.structure(tree).flatten_up_to(leaves_of(tree) if leaves is None else leaves)

    def leaf_for(leaf: ParamInfo, shape: tuple[int, ...]) -> ParamInfo:
        if leaf.shape == shape:
            return leaf
        is_part = leaf.stack > 0 and leaf.shape[1:] == shape[1:] and len(leaf.shape) == len(shape)
        return dataclasses.replace(leaf, shape=shape) if is_part else ParamInfo(shape, "vector", decays=False)

    return [leaf_for(leaf, shape) for leaf, shape in zip(leaf_list, shapes, strict=True)]


def decays(axes: Sequence[str | None] | None, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter: to matrices and kernels, not to norms and biases."""
    if axes is None:
        return len(shape) > 1
    return sum(axis != "layers" for axis in axes) > 1 and "norm" not in axes
