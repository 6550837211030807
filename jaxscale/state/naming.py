"""Names of the arrays of a checkpoint, and how each leaf of a train state becomes one or several of these arrays.

The arrays of a checkpoint are the canonical form of the train state (`canonical.py`).
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
"""Ends of the names of a quantized array's codes and scales; the name of the codes' map follows `CODES`."""
SAVED_DTYPES = {"uint4": jnp.dtype(jnp.uint8), "int4": jnp.dtype(jnp.int8)}
"""Dtype of 4-bit codes in a checkpoint, where each code takes a byte, by the name of their dtype in the state."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one leaf of a train state becomes arrays of the canonical form.

    Args:
        names: names of the arrays: one for each layer if the leaf is stacked (has a dim for layers), otherwise one; ()
            if the leaf has no elements.
        layer_dim: the dim along which the leaf is split into layers; `None` if the leaf is not split.
        shape: shape of the leaf without padding.
        key_impl: name of the generator's implementation if the leaf is a PRNG key, otherwise `None`.
        group_rows: if the leaf is one group of a stack in groups, (start, stop) of its rows in the array of the whole
            stack; otherwise `None`.
        row_of_name: for each name, the index of the row of a stacked leaf that becomes its array; () if every row has a
            name. Rows without a name are zeros, which pad the shorter stages of a pipeline.
        dtype: dtype of the arrays; `None` for the dtype of the leaf.
        rows: indices of the leaf's rows that form its single array, in the order of that array; () for all rows in
            order. Other rows are zeros, which pad the shorter stages of a pipeline.
    """

    names: tuple[str, ...]
    layer_dim: int | None
    shape: tuple[int, ...]
    key_impl: str | None = None
    group_rows: tuple[int, int] | None = None
    row_of_name: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    rows: tuple[int, ...] = ()

    def rows_and_names(self) -> list[tuple[int, str]]:
        """Return (index of the row, name of the array) for each row of a stacked leaf that becomes an array."""
        return list(zip(self.row_of_name or range(len(self.names)), self.names, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Naming:
    """The `Part` of each leaf of a train state that is shaped like a parameter.

    Args:
        pure_model: the model as pure functions.
        is_split: whether weights are split into bfloat16 weights and corrections. If so, the optimizer's state is
            nested inside the state of the split weights.
    """

    pure_model: PureModel
    is_split: bool

    @functools.cached_property
    def shape_by_name(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter without padding, by name; parameters that are not trained are included."""
        padded_model = unpadded_model = self.pure_model
        if padded_model.vocab_multiple > 1:
            unpadded_model = PureModel.of(
                padded_model.model,
                padded_model.seed,
                1,
                padded_model.group_depths,
                padded_model.layer_of_row,
                padded_model.train,
            )
            unpadded_model = unpadded_model.with_copies(padded_model.copy_numbers)
        leaf_by_name = named_leaves(unpadded_model.abstract_params)
        other_leaf_by_name = named_leaves(unpadded_model.abstract_model_state)
        leaf_by_name |= {name: leaf for name, leaf in other_leaf_by_name.items() if name in unpadded_model.frozen}
        return {name: tuple(leaf.shape) for name, leaf in leaf_by_name.items()}

    def part_of_param(
        self, prefix: str, path: KeyPath, name: str | None, leaf: jax.ShapeDtypeStruct, role: str = ""
    ) -> Part:
        """Return the `Part` of a leaf that is treated like a parameter.

        Args:
            prefix: prefix of the names of the arrays.
            path: path of the leaf, which follows the prefix.
            name: name of the parameter whose shape the leaf has; `None` for a leaf that belongs to no parameter.
            leaf: shape and dtype of the leaf.
            role: if the leaf is the codes or the scales of a quantized array, the end of its name, from `roles`;
                otherwise "".
        """
        pure_model = self.pure_model
        array_path = path[:-1] if role else path
        if self.is_split:  # names are the same as without split weights
            array_path = tuple(key for key in array_path if getattr(key, "name", None) != "inner")
        full_name = f"{prefix}/{path_name(array_path)}" if array_path else prefix
        if name is None or len(leaf.shape) != len(self.shape_by_name[name]):
            return part_of_whole(full_name, leaf)
        shape, suffix = self.shape_by_name[name], f"/{role}" if role else ""
        if role == SCALE:  # blocks along the last dim but one, which is never padded
            shape = (*shape[:-2], leaf.shape[-2], shape[-1])
        dtype = SAVED_DTYPES.get(str(leaf.dtype)) if role else None
        if name in pure_model.copy_numbers:  # all copies but one are zeros
            read_copy_index = pure_model.copy_numbers[name].index(0)
            return Part((full_name + suffix,), 0, shape, row_of_name=(read_copy_index,), dtype=dtype)
        axis_names = pure_model.axis_names.get(name) or ()
        if "layers" not in axis_names:
            return Part((full_name + suffix,), None, shape, dtype=dtype)
        layer_dim, layer_of_row = axis_names.index("layers"), pure_model.layer_of_row
        row_of_name = tuple(row for row, layer_index in enumerate(layer_of_row) if layer_index >= 0)
        if name in pure_model.unnamed_stacks:
            rows = tuple(sorted(row_of_name, key=lambda row: layer_of_row[row]))
            shape = (len(rows), *shape[1:]) if rows else shape
            return Part((full_name + suffix,), None, shape, dtype=dtype, rows=rows)
        layer_indices = [layer_of_row[row] for row in row_of_name] if layer_of_row else range(leaf.shape[layer_dim])
        names = tuple(layer_name(full_name, layer_index) + suffix for layer_index in layer_indices)
        return Part(names, layer_dim, shape, row_of_name=row_of_name, dtype=dtype)

    def part_of_state(self, prefix: str, path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Part:
        """Return the `Part` of a leaf of the model's state. A frozen parameter is named like a trained one.

        Args:
            prefix: prefix of the names of the arrays that are not parameters.
            path: path of the leaf, which follows the prefix.
            leaf: shape and dtype of the leaf.
        """
        name = path_name(path)
        if name not in self.pure_model.frozen:
            return part_of_whole(f"{prefix}/{name}", leaf)
        dtype = np.dtype(np.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else None  # `None` keeps codes
        return dataclasses.replace(self.part_of_param("params", path, name, leaf), dtype=dtype)

    def with_replica_dim(
        self, has_replica_dim: bool, leaf: jax.ShapeDtypeStruct, part_of: Callable[[jax.ShapeDtypeStruct], Part]
    ) -> Part:
        """Return the `Part` of a leaf that may have a first dim for the replicas.

        Args:
            has_replica_dim: whether the leaf has a first dim for the replicas.
            leaf: shape and dtype of the leaf.
            part_of: function from the leaf of a single replica to the `Part` of that leaf.
        """
        replica_part = part_of(jax.ShapeDtypeStruct(leaf.shape[has_replica_dim:], leaf.dtype))
        layer_dim = None if replica_part.layer_dim is None else replica_part.layer_dim + has_replica_dim
        shape = (*leaf.shape[:has_replica_dim], *replica_part.shape)
        return dataclasses.replace(replica_part, layer_dim=layer_dim, shape=shape)


def part_of_whole(name: str, leaf: jax.ShapeDtypeStruct) -> Part:
    """Return the `Part` of a leaf that becomes a single array with this name."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # the leaf is abstract, and only a traced key shows its implementation
        implementation_names: list[str] = []
        jax.eval_shape(lambda key: implementation_names.append(str(jax.random.key_impl(key))), leaf)
        return Part((name,), None, tuple(leaf.shape), key_impl=implementation_names[0])
    return Part((name,), None, tuple(leaf.shape))


def roles(tree: PyTree) -> PyTree[str]:
    """Return a tree with the role of each array: for codes and scales, the end of the array's name; otherwise ""."""

    def role_of(leaf: jax.ShapeDtypeStruct | Quantized) -> PyTree[str]:
        """Return `CODES` with the name of the map for codes, `SCALE` for scales, and "" for a plain array."""
        return dataclasses.replace(leaf, codes=CODES + leaf.map, scale=SCALE) if isinstance(leaf, Quantized) else ""

    return jax.tree.map(role_of, tree, is_leaf=is_quantized)


def layer_name(name: str, layer: int) -> str:
    """Return the name of one layer of a stacked parameter, with the index of the layer after the last "layers".

    Args:
        name: name of the stacked parameter.
        layer: index of the layer within its stack, or within its group of a stack.

    Example:
        >>> layer_name("params/blocks/layers/mlp/up/kernel", 3)
        'params/blocks/layers/3/mlp/up/kernel'
        >>> layer_name("params/blocks/layers_from_25/mlp/up/kernel", 3)
        'params/blocks/layers/28/mlp/up/kernel'
    """
    stack_name, first_layer = in_one_stack(name)
    matches = list(re.finditer(r"(?:^|/)layers(?=/|$)", stack_name))
    if not matches:
        return f"{stack_name}/{layer}"
    end = matches[-1].end()
    return f"{stack_name[:end]}/{first_layer + layer}{stack_name[end:]}"
