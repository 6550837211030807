"""Names of the arrays of a checkpoint, and how each leaf of a train state becomes some of them."""

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
"""The last part of the names of a quantized array's two: the map follows the first."""
WIDE = {"uint4": jnp.dtype(jnp.uint8), "int4": jnp.dtype(jnp.int8)}
"""Types of codes that checkpoints hold a byte each of."""


@dataclasses.dataclass(frozen=True)
class Part:
    """How one leaf of a train state becomes arrays of the canonical form.

    Args:
        names: of its arrays: one per layer for a stacked leaf, else one; none for a leaf without elements.
        stacked: the dim that is taken apart; `None` if none is.
        shape: of the leaf without padding.
        key: name of the generator's implementation if the leaf is a PRNG key.
        rows: of the array, along its first dim, which the leaf is: one group's layers of a stack in groups.
        order: rows of a stacked leaf that have the names, in their order; empty: all. The others are zeros, which pad
            a pipeline's shorter stages.
        dtype: of the arrays, where it is not the leaf's.
    """

    names: tuple[str, ...]
    stacked: int | None
    shape: tuple[int, ...]
    key: str | None = None
    rows: tuple[int, int] | None = None
    order: tuple[int, ...] = ()
    dtype: np.dtype | None = None

    def rows_of(self) -> list[tuple[int, str]]:
        """Row and name of each array of a stacked leaf."""
        return list(zip(self.order or range(len(self.names)), self.names, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Naming:
    """Names and parts of the leaves of a train state that are shaped as parameters.

    Args:
        pure_model: the model as pure functions.
        split: weights are kept split, so that the optimizer's state is inside another one.
    """

    pure_model: PureModel
    split: bool

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters without padding, by name."""
        pure_model = self.pure_model
        if pure_model.vocab_multiple > 1:
            unpadded = PureModel.of(pure_model.model, pure_model.seed, 1, pure_model.groups, pure_model.rows)
            pure_model = unpadded.copied(pure_model.copies)
        return {name: tuple(leaf.shape) for name, leaf in named_leaves(pure_model.params).items()}

    def of_param(
        self, prefix: str, path: KeyPath, name: str | None, leaf: jax.ShapeDtypeStruct, role: str = ""
    ) -> Part:
        """The part of a leaf that is treated as a parameter is.

        Args:
            prefix: of its name.
            path: of the leaf, which follows the prefix.
            name: of the parameter; `None` for a leaf that belongs to none.
            leaf: shape and dtype.
            role: of an array of a quantized one, as `roles` gives it.
        """
        pure_model = self.pure_model
        if role:
            path = path[:-1]
        if self.split:  # a rule's state has the names that it has without
            path = tuple(key for key in path if getattr(key, "name", None) != "inner")
        full = f"{prefix}/{path_name(path)}" if path else prefix
        if name is None or len(leaf.shape) != len(self.shapes[name]):
            return plain(full, leaf)
        shape, end = self.shapes[name], f"/{role}" if role else ""
        if role == SCALE:  # blocks along the last dim but one, which is never padded
            shape = (*shape[:-2], leaf.shape[-2], shape[-1])
        dtype = WIDE.get(str(leaf.dtype)) if role else None
        if name in pure_model.copies:  # the others are zeros
            return Part((full + end,), 0, shape, order=(pure_model.copies[name].index(0),), dtype=dtype)
        axes = pure_model.names.get(name) or ()
        if "layers" not in axes:
            return Part((full + end,), None, shape, dtype=dtype)
        dim, order = axes.index("layers"), pure_model.rows
        if order:
            alive = tuple(row for row, layer in enumerate(order) if layer >= 0)
            names = tuple(layer_name(full, order[row]) + end for row in alive)
            return Part(names, dim, shape, order=alive, dtype=dtype)
        return Part(tuple(layer_name(full, i) + end for i in range(leaf.shape[dim])), dim, shape, dtype=dtype)

    def behind_replicas(
        self, every: bool, leaf: jax.ShapeDtypeStruct, of_one: Callable[[jax.ShapeDtypeStruct], Part]
    ) -> Part:
        """The part of a leaf that may have a dim of replicas before those of one's.

        Args:
            every: whether it has.
            leaf: shape and dtype.
            of_one: from the leaf of one replica to its part.
        """
        part = of_one(jax.ShapeDtypeStruct(leaf.shape[every:], leaf.dtype))
        stacked = None if part.stacked is None else part.stacked + every
        return dataclasses.replace(part, stacked=stacked, shape=(*leaf.shape[:every], *part.shape))


def plain(name: str, leaf: jax.ShapeDtypeStruct) -> Part:
    """The part of a leaf that is one array under its own name."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # the leaf is abstract, and only a key can tell its implementation: ask a traced one
        implementations: list[str] = []
        jax.eval_shape(lambda key: implementations.append(str(jax.random.key_impl(key))), leaf)
        return Part((name,), None, tuple(leaf.shape), key=implementations[0])
    return Part((name,), None, tuple(leaf.shape))


def roles(tree: PyTree) -> PyTree[str]:
    """The last part of the name of each array of a quantized one; "" for any other array."""

    def role(leaf: jax.ShapeDtypeStruct | Quantized) -> PyTree[str]:
        return dataclasses.replace(leaf, codes=CODES + leaf.map, scale=SCALE) if isinstance(leaf, Quantized) else ""

    return jax.tree.map(role, tree, is_leaf=is_quantized)


def layer_name(name: str, layer: int) -> str:
    """Name of one layer of a stacked parameter: its number goes behind the last "layers" of the name.

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
