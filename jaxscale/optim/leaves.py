"""ParamInfo: the metadata of a parameter that update rules need, derived from the parameter's logical axes.

The layers of a stack lie in one array, along its first dim. A rule that treats each number separately ignores stacks.
A rule that takes a norm, a row or a singular vector must separate the layers: LARS and LAMB are "layer-wise", Muon and
SOAP take matrices. The names of logical axes also distinguish matrices from tables, gains and biases. A parameter
without named axes, such as one of a foreign module, is classified by its path and by its shape without stacked dims.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxscale.model_traits import TensorDims
from jaxscale.trees import path_name
from jaxscale.typing import Params

LeafKind = Literal["matrix", "table", "vector"]

STACKED = ("layers", "expert")
"""Logical axes along which separate tensors of one shape are stacked."""

_TABLE_MODULES = ("wte", "wpe", "head", "lm_head", "classifier", "logits")
"""Names of modules in foreign models whose matrices are embeddings or heads; names that contain "emb" count, too."""
_FUSED_MODULES = ("qkv", "c_attn", "in_proj")
"""Fragments of module names in foreign models. One matrix of such a module holds the projections of queries, keys and
values."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """The metadata of a parameter that update rules need.

    Args:
        shape: global shape.
        kind: "matrix" for projections and convolutions; "table" for embeddings, positions and the head; "vector" for
            gains, biases and all other tensors of fewer than two dims.
        stack: number of leading dims along which tensors of one shape are stacked.
        decays: whether weight decay applies to the parameter.
        parts: number of matrices that lie side by side along the last dim: 3 in a fused projection of queries, keys
            and values, otherwise 1.
        column_dims: number of the last dims that are the columns of a matrix, such as 2 for a projection of shape
            (embed, heads, head).
        sharding: `NamedSharding` of the optimizer state that has the parameter's shape; `None` on one device.
        name: path of the parameter, joined by slashes; patterns of groups are searched for in this name.
        variable: name of the parameter's type of variable, such as "Param" or "LoRAParam"; "" if it is unknown.

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
    column_dims: int = 1
    name: str = ""
    variable: str = ""

    @property
    def tensors(self) -> int:
        """Number of stacked tensors; 1 for a parameter that is not stacked."""
        return math.prod(self.shape[: self.stack])

    @property
    def rows(self) -> int:
        """Number of rows of one tensor as a matrix: the product of the sizes of all dims but those of the columns."""
        return math.prod(self.shape[self.stack : len(self.shape) - self.column_dims])

    @property
    def columns(self) -> int:
        """Number of columns of one tensor as a matrix: the product of the sizes of the last `column_dims` dims."""
        return math.prod(self.shape[max(self.stack, len(self.shape) - self.column_dims) :])

    def has(self, pattern: str) -> bool:
        """Return whether a pattern is found in the parameter's name, or is the name of its type of variable."""
        return self.variable == pattern or re.search(pattern, self.name) is not None


def leaf_of(
    name: str,
    axes: Sequence[str | None] | None,
    shape: Sequence[int],
    sharding: Any = None,
    variable: str = "",
    dims: TensorDims | None = None,
) -> ParamInfo:
    """Return the `ParamInfo` of a parameter.

    Args:
        name: path of the parameter, joined by slashes.
        axes: logical axis of each dim; `None` for a parameter without named axes.
        shape: global shape of the parameter.
        sharding: `NamedSharding` of the optimizer state that has the parameter's shape; `None` on one device.
        variable: name of the parameter's type of variable.
        dims: dims of the parameter, if its layer is known; `None` derives them from names and shape.

    Example:
        >>> from jaxscale.model_traits import TensorDims
        >>> leaf_of("query/kernel", None, (64, 4, 16), dims=TensorDims(0, 1)).columns
        64
        >>> leaf_of("layers/norm/scale", None, (12, 64), dims=TensorDims(1, 0)).decays
        False
    """
    path_words = name.lower().split("/")
    stacked_dim_count = 0 if dims is None else dims.stack
    if axes is not None:
        named_stack_count = next((dim for dim, axis in enumerate(axes) if axis not in STACKED), len(axes))
        stacked_dim_count = max(stacked_dim_count, named_stack_count)
    tensor_axes = () if axes is None else axes[stacked_dim_count:]
    is_table = bool({"vocab", "position"} & set(tensor_axes)) or any(word in _TABLE_MODULES for word in path_words)
    if axes is None or (stacked_dim_count and not any(tensor_axes)):
        is_table = is_table or any("emb" in word for word in path_words)
    row_dim_count = None if dims is None else dims.rows
    if len(shape) - stacked_dim_count < 2 or "norm" in tensor_axes or row_dim_count == 0:
        kind: LeafKind = "vector"
    else:
        kind = "table" if is_table else "matrix"
    has_fused_name = any(fragment in word for word in path_words for fragment in _FUSED_MODULES)
    part_count = 3 if kind == "matrix" and shape[-1] % 3 == 0 and has_fused_name else 1
    has_decay = is_decayed(axes, shape) if dims is None else kind != "vector"
    column_dim_count = 1 if dims is None or not row_dim_count else len(shape) - dims.stack - row_dim_count
    return ParamInfo(
        tuple(shape), kind, stacked_dim_count, has_decay, part_count, sharding, column_dim_count, name, variable
    )


def leaves_of(params: Params) -> Any:
    """Return a tree of `ParamInfo` like the parameters, for parameters without logical axes.

    Example:
        >>> import jax.numpy as jnp
        >>> tree = leaves_of({"embedding": jnp.ones((5, 4)), "mlp": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}})
        >>> tree["embedding"].kind, tree["mlp"]["kernel"].kind, tree["mlp"]["bias"].kind
        ('table', 'matrix', 'vector')
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf_of(path_name(path), None, leaf.shape), params)


def param_infos_of(param_info_tree: Any, tree: Any) -> list[ParamInfo]:
    """Return the `ParamInfo` of each array of a tree, in the order of the tree's leaves.

    Args:
        param_info_tree: tree of `ParamInfo` like `tree`; `None` derives the infos from shapes and paths.
        tree: tree of arrays. An array that holds only some layers of a parameter has the parameter's kind. An array of
            any other shape is a placeholder for a parameter, and counts as a vector.
    """
    shapes = [tuple(array.shape) for array in jax.tree.leaves(tree)]
    if not shapes:  # the placeholder of `optax.tree.map_params`
        return []
    param_infos = jax.tree.structure(tree).flatten_up_to(
        leaves_of(tree) if param_info_tree is None else param_info_tree
    )

    def adapt(param_info: ParamInfo, shape: tuple[int, ...]) -> ParamInfo:
        """Return the `ParamInfo` of an array of this shape: a parameter, some of its layers, or a placeholder."""
        if param_info.shape == shape:
            return param_info
        has_some_layers = (
            param_info.stack > 0 and param_info.shape[1:] == shape[1:] and len(param_info.shape) == len(shape)
        )
        return (
            dataclasses.replace(param_info, shape=shape)
            if has_some_layers
            else ParamInfo(shape, "vector", decays=False)
        )

    return [adapt(param_info, shape) for param_info, shape in zip(param_infos, shapes, strict=True)]


def is_decayed(axes: Sequence[str | None] | None, shape: Sequence[int]) -> bool:
    """Return whether weight decay applies to a parameter: true for matrices and kernels, false for norms and biases."""
    if axes is None:
        return len(shape) > 1
    return sum(axis != "layers" for axis in axes) > 1 and "norm" not in axes
