"""A model as pure functions of nested dicts: what jit, grad, optax and checkpoints want; users keep their modules.

The graph definition of the NNX module is closed over; parameters are one nested dict, all other state another.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import KeyPath

from jaxscale import blocks
from jaxscale.blocks import Model
from jaxscale.errors import UserError
from jaxscale.layers.stack import group_name
from jaxscale.trees import count, path_name
from jaxscale.typing import Array, Params

AxisNames = tuple[str | None, ...]
LayerIndex: TypeAlias = slice | tuple[slice, ...]


@runtime_checkable
class LazyArray(Protocol):
    """An array, or an array-like of a file, of which a part is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""
        ...

    def __getitem__(self, index: LayerIndex) -> "np.ndarray | Array":
        """A part of it."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PureModel:
    """The parts of a model's module.

    Args:
        model: the value it was built from.
        seed: of its parameters.
        vocab_multiple: to which the vocabulary is padded.
        graphdef: structure of the module.
        params: abstract parameters (nested dict of `ShapeDtypeStruct`).
        names: logical axes of each parameter by name; a parameter without is absent.
        rest: abstract state that is not a parameter.
        groups: layers in each group of the model's stack, which keeps each group's parameters as a stack of its own.
        rows: under a pipeline, the layer that each row of a stacked parameter is, in the order of the devices; -1 for a
            row that pads a shorter stage, which is zero. Empty: the layers in order.
        copies: under an asynchronous pipeline, of each parameter that is not of a layer, the same of its copies: 0 for
            the stage that reads it, and -1 for all others, whose copy is zero.
    """

    model: Model
    seed: int
    vocab_multiple: int
    graphdef: nnx.GraphDef[nnx.Module]
    params: Params
    names: dict[str, AxisNames]
    rest: Params
    groups: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    copies: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        seed: int,
        vocab_multiple: int = 1,
        groups: tuple[int, ...] = (),
        rows: tuple[int, ...] = (),
    ) -> "PureModel":
        """Trace the construction of the module; nothing is allocated."""
        nnx.use_eager_sharding(False)
        abstract = nnx.eval_shape(functools.partial(_build, model, seed, vocab_multiple, groups))
        graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
        names: dict[str, AxisNames] = {}
        for path, variable in nnx.to_flat_state(params):
            logical = variable.get_metadata().get("out_sharding")
            if logical is not None:
                if len(logical) != len(variable.shape):
                    raise UserError(
                        f"parameter {'/'.join(map(str, path))}: got {len(logical)} axis names {tuple(logical)} "
                        f"for shape {tuple(variable.shape)}; name each dim (a stacked one is named 'layers')"
                    )
                names["/".join(map(str, path))] = tuple(logical)
        masters = jax.eval_shape(_float32, nnx.to_pure_dict(params))
        pure_model = cls(model, seed, vocab_multiple, graphdef, masters, names, nnx.to_pure_dict(rest), groups, rows)
        if not rows:
            return pure_model
        return dataclasses.replace(pure_model, params=jax.eval_shape(pure_model.in_rows, masters))

    def copied(self, copies: Mapping[str, tuple[int, ...]]) -> "PureModel":
        """The same with a copy for each stage of what is not of a layer."""
        if not copies:
            return self
        pure_model = dataclasses.replace(self, copies=copies)
        return dataclasses.replace(pure_model, params=jax.eval_shape(pure_model.in_rows, self.whole))

    @functools.cached_property
    def whole(self) -> Params:
        """Abstract parameters as the module has them, whatever their rows."""
        return jax.eval_shape(self.in_layers, self.params) if self.rows else self.params

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return count(self.whole)

    def stacked(self, name: str) -> bool:
        """Whether the first dim of a parameter is the layers of a stack."""
        return (self.names.get(name) or ("",))[0] == "layers"

    def in_rows(self, params: Params) -> Params:
        """Parameters of the module, its layers in the rows that they have under a pipeline."""

        def spread(path: KeyPath, leaf: Array | LazyArray) -> Array | LazyArray:
            name = path_name(path)
            rows = self.copies.get(name, self.rows if self.stacked(name) else ())
            if not rows:
                return leaf
            if name in self.copies:
                leaf = leaf[None] if isinstance(leaf, jax.Array) else Alone(leaf)
            if not isinstance(leaf, jax.Array):  # of a file: read when it is asked for
                return LayerRows(leaf, rows)
            index = jnp.array(rows)
            alive = (index >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(alive, leaf[jnp.maximum(index, 0)], jnp.zeros((), leaf.dtype))

        return jax.tree_util.tree_map_with_path(spread, params)

    def in_layers(self, params: Params) -> Params:
        """The inverse of `in_rows`: parameters of the module."""
        if not self.rows:
            return params
        order = jnp.array([self.rows.index(layer) for layer in range(max(self.rows) + 1)])

        def gathered(path: KeyPath, leaf: Array) -> Array:
            name = path_name(path)
            if name in self.copies:
                return leaf[self.copies[name].index(0)]
            return leaf[order] if self.stacked(name) else leaf

        return jax.tree_util.tree_map_with_path(gathered, params)

    def create(self) -> tuple[Params, Params]:
        """Parameters and other state of a new module: a function to jit with `out_shardings`."""
        module = _build(self.model, self.seed, self.vocab_multiple, self.groups)
        _, params, rest = nnx.split(module, nnx.Param, ...)
        return self.in_rows(_float32(nnx.to_pure_dict(params))), nnx.to_pure_dict(rest)

    def module(self, params: Params, rest: Params) -> nnx.Module:
        """The module with these values; its variables are its own, so it may be made inside a transformation."""
        return nnx.merge(self.graphdef, params, rest, copy=True)

    def rest_of(self, module: nnx.Module) -> Params:
        """The state of a module that is not a parameter."""
        return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """Some layers of an array-like whose first dim is the layers, in any order, zeros among them, read when asked for.

    Args:
        layers: all of them.
        rows: the layer of each row; -1 for zeros.

    Example:
        >>> import numpy as np
        >>> LayerRows(np.array([[1], [2]]), (1, -1, 0))[0:3].tolist()
        [[2], [0], [1]]
    """

    layers: LazyArray
    rows: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows."""
        return (len(self.rows), *self.layers.shape[1:])

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        rows = self.rows[first]
        if rows and rows[0] >= 0 and rows == tuple(range(rows[0], rows[0] + len(rows))):
            return np.asarray(self.layers[(slice(rows[0], rows[0] + len(rows)), *rest)])
        layers = [np.asarray(self.layers[(slice(max(row, 0), max(row, 0) + 1), *rest)]) for row in rows]
        return np.concatenate(
            [part if row >= 0 else np.zeros_like(part) for part, row in zip(layers, rows, strict=True)]
        )


@dataclasses.dataclass(frozen=True)
class Alone:
    """An array-like with a first dim of 1 before those of another one, read when asked for."""

    whole: LazyArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, with its first dim."""
        return (1, *self.whole.shape)

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        return np.asarray(self.whole[tuple(rest)])[None][first]


def in_groups(params: Params, groups: tuple[int, ...]) -> Params:
    """Parameters of a model built with one stack, as those of the same model built under `blocks.grouping(groups)`.

    Example:
        >>> import numpy as np
        >>> stacks = in_groups({"stack": {"layers": {"w": np.arange(3)}}}, (2, 1))["stack"]
        >>> {name: part["w"][:].tolist() for name, part in stacks.items()}
        {'layers': [0, 1], 'layers_from_2': [2]}
    """
    if not groups:
        return params
    grouped: dict[str, Params] = {}
    for name, inner in params.items():
        if name == "layers" and all(leaf.shape[:1] == (sum(groups),) for leaf in jax.tree.leaves(inner)):
            for start, layers in zip(itertools.accumulate((0, *groups)), groups, strict=False):
                part = functools.partial(LayerRows, rows=tuple(range(start, start + layers)))
                grouped[group_name(start)] = jax.tree.map(part, inner)
        else:
            grouped[name] = in_groups(inner, groups) if isinstance(inner, dict) else inner
    return grouped


def _build(model: Model, seed: int, vocab_multiple: int, groups: tuple[int, ...]) -> nnx.Module:
    with blocks.grouping(groups):
        return model.build(nnx.Rngs(params=seed, dropout=seed + 1), vocab_multiple=vocab_multiple)


def _float32(params: Params) -> Params:
    return jax.tree.map(lambda p: p.astype(jnp.float32) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
