"""Names of the arrays of a checkpoint, and how each leaf of a train state becomes one or several of these arrays.

The canonical form is the set of arrays in a checkpoint (`canonical.py`).
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jaxscale.layers.stack import in_one_stack
from jaxscale.lowbit.quantize import Quantized, is_quantized
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import named_leaves, path_name
from jaxscale.typing import PyTree

CODES, SCALE = "codes.", "scale"
"""Ends of the names of the two arrays that hold a quantized array. The name of its map of codes follows `CODES`."""
WIDE = {"uint4": jnp.dtype(jnp.uint8), "int4": jnp.dtype(jnp.int8)}
"""The dtype in which a checkpoint holds 4-bit codes, one byte for each code, by the name of the codes' dtype."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one leaf of a train state becomes arrays of the canonical form.

    Args:
        names: names of its arrays: one per layer if the leaf is stacked (has a dim for layers), otherwise one; () if
            the leaf has no elements.
        layer_dim: the dim along which the leaf is split into layers; `None` if it is not split.
        shape: shape of the leaf without padding.
        key: name of the generator's implementation if the leaf is a PRNG key.
        rows: (start, stop) of the array's rows that the leaf is, for the layers of one group of a stack in groups;
            `None` if the leaf is not such a group.
        order: the row of a stacked leaf that each name is for; empty if there is a name for every row. The other rows
            are zeros, which pad a pipeline's shorter stages.
        dtype: dtype of the arrays; `None` for that of the leaf.
    """

    names: tuple[str, ...]
    layer_dim: int | None
    shape: tuple[int, ...]
    key: str | None = None
    rows: tuple[int, int] | None = None
    order: tuple[int, ...] = ()
    dtype: np.dtype | None = None

    def rows_of(self) -> list[tuple[int, str]]:
        """(index of its row, name) of each array of a stacked leaf."""
        return list(zip(self.order or range(len(self.names)), self.names, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Naming:
    """Names and parts of the leaves of a train state that are shaped like parameters.

    Args:
        pure_model: the model as pure functions.
        split: whether weights are kept split, so that the optimizer's state is nested in that of the split weights.
    """

    pure_model: PureModel
    split: bool

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter without padding, by name."""
        pure_model = self.pure_model
        if pure_model.vocab_multiple > 1:
            unpadded = PureModel.of(
                pure_model.model, pure_model.seed, 1, pure_model.group_depths, pure_model.layer_of_row
            )
            pure_model = unpadded.copied(pure_model.copies)
        return {name: tuple(leaf.shape) for name, leaf in named_leaves(pure_model.abstract_params).items()}

    def of_param(
        self, prefix: str, path: KeyPath, name: str | None, leaf: jax.ShapeDtypeStruct, role: str = ""
    ) -> Part:
        """The part of a leaf that is treated like a parameter.

        Args:
            prefix: prefix of the names of its arrays.
            path: path of the leaf, which follows the prefix.
            name: name of the parameter; `None` for a leaf that belongs to none.
            leaf: shape and dtype of the leaf.
            role: end of the name, from `roles`, if the leaf is one of the arrays of a quantized array; otherwise "".
        """
        pure_model = self.pure_model
        if role:
            path = path[:-1]
        if self.split:  # names are the same as without split weights
            path = tuple(key for key in path if getattr(key, "name", None) != "inner")
        full_name = f"{prefix}/{path_name(path)}" if path else prefix
        if name is None or len(leaf.shape) != len(self.shapes[name]):
            return plain(full_name, leaf)
        shape, suffix = self.shapes[name], f"/{role}" if role else ""
        if role == SCALE:  # blocks along the last dim but one, which is never padded
            shape = (*shape[:-2], leaf.shape[-2], shape[-1])
        dtype = WIDE.get(str(leaf.dtype)) if role else None
        if name in pure_model.copies:  # all copies but one are zeros
            return Part((full_name + suffix,), 0, shape, order=(pure_model.copies[name].index(0),), dtype=dtype)
        axis_names = pure_model.axis_names.get(name) or ()
        if "layers" not in axis_names:
            return Part((full_name + suffix,), None, shape, dtype=dtype)
        dim, layer_of_row = axis_names.index("layers"), pure_model.layer_of_row
        if layer_of_row:
            real_rows = tuple(row for row, layer in enumerate(layer_of_row) if layer >= 0)
            names = tuple(layer_name(full_name, layer_of_row[row]) + suffix for row in real_rows)
            return Part(names, dim, shape, order=real_rows, dtype=dtype)
        return Part(tuple(layer_name(full_name, i) + suffix for i in range(leaf.shape[dim])), dim, shape, dtype=dtype)

    def with_replica_dim(
        self, has_replicas: bool, leaf: jax.ShapeDtypeStruct, part_of: Callable[[jax.ShapeDtypeStruct], Part]
    ) -> Part:
        """The part of a leaf that may have a first dim for the replicas.

        Args:
            has_replicas: whether the leaf has that dim.
            leaf: shape and dtype of the leaf.
            part_of: function from the leaf of a single replica to its part.
        """
        part = part_of(jax.ShapeDtypeStruct(leaf.shape[has_replicas:], leaf.dtype))
        dim = None if part.layer_dim is None else part.layer_dim + has_replicas
        return dataclasses.replace(part, layer_dim=dim, shape=(*leaf.shape[:has_replicas], *part.shape))


def plain(name: str, leaf: jax.ShapeDtypeStruct) -> Part:
    """The part of a leaf that is one array under its own name."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # the leaf is abstract, and only a traced key shows its implementation
        implementations: list[str] = []
        jax.eval_shape(lambda key: implementations.append(str(jax.random.key_impl(key))), leaf)
        return Part((name,), None, tuple(leaf.shape), key=implementations[0])
    return Part((name,), None, tuple(leaf.shape))


def roles(tree: PyTree) -> PyTree[str]:
    """A tree with the end of each array's name: `CODES` and the map, or `SCALE`, if it is quantized; otherwise ""."""

    def role(leaf: jax.ShapeDtypeStruct | Quantized) -> PyTree[str]:
        return dataclasses.replace(leaf, codes=CODES + leaf.map, scale=SCALE) if isinstance(leaf, Quantized) else ""

    return jax.tree.map(role, tree, is_leaf=is_quantized)


def layer_name(name: str, layer: int) -> str:
    """Name of one layer of a stacked parameter, with the number of the layer behind the last "layers" in the name.

    Args:
        name: name of the stacked parameter.
        layer: number of the layer within its stack, or within its group of a stack.

    Example:
        >>> layer_name("params/blocks/layers/mlp/up/kernel", 3)
        'params/blocks/layers/3/mlp/up/kernel'
        >>> layer_name("params/blocks/layers_from_25/mlp/up/kernel", 3)
        'params/blocks/layers/28/mlp/up/kernel'
    """
    name, start = in_one_stack(name)
    matches = list(re.finditer(r"(?:^|/)layers(?=/|$)", name))
    if not matches:
        return f"{name}/{layer}"
    end = matches[-1].end()
    return f"{name[:end]}/{start + layer}{name[end:]}"
