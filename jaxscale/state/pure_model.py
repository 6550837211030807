"""A model as pure functions of nested dicts, for jit, grad, optax and checkpoints. Users keep their NNX modules.

Parameters are one nested dict, all other state is another, and the functions close over the module's graph definition.
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
    """An array, or an array-like object that reads a part of a file when it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""
        ...

    def __getitem__(self, index: LayerIndex) -> "np.ndarray | Array":
        """A part of the array."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PureModel:
    """A model as pure functions, with the shapes of its parameters.

    Args:
        model: the model value from which the module is built.
        seed: seed of the initial parameters.
        vocab_multiple: number to whose multiple the vocabulary is padded.
        graphdef: structure of the module.
        params: abstract parameters (nested dict of `ShapeDtypeStruct`).
        names: logical axes of each parameter, by the parameter's name; a parameter without logical axes is absent.
        rest: abstract state that is not a parameter.
        groups: number of layers in each group of the model's stack; each group's parameters are a stack of their own.
            () for one group.
        rows: under a pipeline, the layer in each row of a stacked parameter, in the order of the devices; -1 for a row
            of zeros that pads a shorter stage. () if the rows are the layers in order.
        copies: under an asynchronous pipeline, what the copies of each shared parameter hold, by its name: 0 for the
            stage that reads the parameter, -1 for each other stage, whose copy is zero.
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
        """Trace the construction of a model's module, and return the model as pure functions; nothing is allocated.

        Args:
            model: the model value.
            seed: seed of the initial parameters.
            vocab_multiple: number to whose multiple the vocabulary is padded.
            groups: number of layers in each group of the model's stack; () for one group.
            rows: the layer in each row of a stacked parameter; () if the rows are the layers in order.

        Raises:
            UserError: a parameter has another number of axis names than dims.
        """
        nnx.use_eager_sharding(False)
        abstract = nnx.eval_shape(functools.partial(_build, model, seed, vocab_multiple, groups))
        graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
        names: dict[str, AxisNames] = {}
        for path, variable in nnx.to_flat_state(params):
            axes = variable.get_metadata().get("out_sharding")
            if axes is not None:
                if len(axes) != len(variable.shape):
                    raise UserError(
                        f"parameter {'/'.join(map(str, path))}: got {len(axes)} axis names {tuple(axes)} for "
                        f"shape {tuple(variable.shape)}; give each dim one name ('layers' for the dim of a stack)"
                    )
                names["/".join(map(str, path))] = tuple(axes)
        masters = jax.eval_shape(_float32, nnx.to_pure_dict(params))
        pure_model = cls(model, seed, vocab_multiple, graphdef, masters, names, nnx.to_pure_dict(rest), groups, rows)
        if not rows:
            return pure_model
        return dataclasses.replace(pure_model, params=jax.eval_shape(pure_model.in_rows, masters))

    def copied(self, copies: Mapping[str, tuple[int, ...]]) -> "PureModel":
        """This model with a copy of each shared parameter for every stage.

        Args:
            copies: what the copies of each shared parameter hold, by its name, as in the field `copies`.
        """
        if not copies:
            return self
        pure_model = dataclasses.replace(self, copies=copies)
        return dataclasses.replace(pure_model, params=jax.eval_shape(pure_model.in_rows, self.whole))

    @functools.cached_property
    def whole(self) -> Params:
        """Abstract parameters in the shapes that the module has, without padding rows and copies of a pipeline."""
        return jax.eval_shape(self.in_layers, self.params) if self.rows else self.params

    @property
    def parameters(self) -> int:
        """Number of trained numbers, the elements of all parameters."""
        return count(self.whole)

    def stacked(self, name: str) -> bool:
        """Whether the first dim of a parameter is the layers of a stack."""
        return (self.names.get(name) or ("",))[0] == "layers"

    def in_rows(self, params: Params) -> Params:
        """Parameters of the module with their layers in the order of `rows`, and with copies of shared ones."""

        def spread(path: KeyPath, leaf: Array | LazyArray) -> Array | LazyArray:
            name = path_name(path)
            rows = self.copies.get(name, self.rows if self.is_stacked(name) else ())
            if not rows:
                return leaf
            if name in self.copies:
                leaf = leaf[None] if isinstance(leaf, jax.Array) else Alone(leaf)
            if not isinstance(leaf, jax.Array):  # an array of a file, which is read when it is indexed
                return LayerRows(leaf, rows)
            layer_of_row = jnp.array(rows)
            is_layer = (layer_of_row >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(is_layer, leaf[jnp.maximum(layer_of_row, 0)], jnp.zeros((), leaf.dtype))

        return jax.tree_util.tree_map_with_path(spread, params)

    def in_layers(self, params: Params) -> Params:
        """The inverse of `in_rows`: parameters of the module."""
        if not self.rows:
            return params
        row_of_layer = jnp.array([self.rows.index(layer) for layer in range(max(self.rows) + 1)])

        def gather(path: KeyPath, leaf: Array) -> Array:
            name = path_name(path)
            if name in self.copies:
                return leaf[self.copies[name].index(0)]
            return leaf[row_of_layer] if self.is_stacked(name) else leaf

        return jax.tree_util.tree_map_with_path(gather, params)

    def create(self) -> tuple[Params, Params]:
        """Parameters and other state of a new module: a function to jit with `out_shardings`."""
        module = _build(self.model, self.seed, self.vocab_multiple, self.groups)
        _, params, rest = nnx.split(module, nnx.Param, ...)
        return self.in_rows(_float32(nnx.to_pure_dict(params))), nnx.to_pure_dict(rest)

    def module(self, params: Params, rest: Params) -> nnx.Module:
        """A new module with these parameters and other state; it may be created inside a transformation."""
        return nnx.merge(self.graphdef, params, rest, copy=True)

    def rest_of(self, module: nnx.Module) -> Params:
        """The state of a module that is not a parameter."""
        return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """Layers of an array in another order, with rows of zeros between them; they are read when they are indexed.

    Args:
        layers: array of all layers along its first dim.
        rows: the layer in each row; -1 for a row of zeros.

    Example:
        >>> import numpy as np
        >>> LayerRows(np.array([[1], [2]]), (1, -1, 0))[0:3].tolist()
        [[2], [0], [1]]
    """

    layers: LazyArray
    rows: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with all rows."""
        return (len(self.rows), *self.layers.shape[1:])

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        row_slice, *other_slices = index if isinstance(index, tuple) else (index,)
        numbers = self.rows[row_slice]
        if numbers and numbers[0] >= 0 and numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
            return np.asarray(self.layers[(slice(numbers[0], numbers[0] + len(numbers)), *other_slices)])
        layers = [np.asarray(self.layers[(slice(max(n, 0), max(n, 0) + 1), *other_slices)]) for n in numbers]
        return np.concatenate(
            [layer if number >= 0 else np.zeros_like(layer) for layer, number in zip(layers, numbers, strict=True)]
        )


@dataclasses.dataclass(frozen=True)
class Alone:
    """An array with a new first dim of 1, read when it is indexed.

    Args:
        whole: the array without that dim.
    """

    whole: LazyArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with the new first dim."""
        return (1, *self.whole.shape)

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        first_slice, *other_slices = index if isinstance(index, tuple) else (index,)
        return np.asarray(self.whole[tuple(other_slices)])[None][first_slice]


def in_groups(params: Params, groups: tuple[int, ...]) -> Params:
    """Divide the stack in a model's parameters into groups, as if it was built under `blocks.grouping(groups)`.

    Args:
        params: parameters of the model with one stack.
        groups: number of layers in each group; () for one group.

    Example:
        >>> import numpy as np
        >>> stacks = in_groups({"stack": {"layers": {"w": np.arange(3)}}}, (2, 1))["stack"]
        >>> {name: group["w"][:].tolist() for name, group in stacks.items()}
        {'layers': [0, 1], 'layers_from_2': [2]}
    """
    if not groups:
        return params
    grouped_params: dict[str, Params] = {}
    for name, subtree in params.items():
        if name == "layers" and all(leaf.shape[:1] == (sum(groups),) for leaf in jax.tree.leaves(subtree)):
            for start, layers in zip(itertools.accumulate((0, *groups)), groups, strict=False):
                select = functools.partial(LayerRows, rows=tuple(range(start, start + layers)))
                grouped_params[group_name(start)] = jax.tree.map(select, subtree)
        else:
            grouped_params[name] = in_groups(subtree, groups) if isinstance(subtree, dict) else subtree
    return grouped_params


def _build(model: Model, seed: int, vocab_multiple: int, groups: tuple[int, ...]) -> nnx.Module:
    """The module of a model, with its stack in groups."""
    with blocks.grouping(groups):
        return model.build(nnx.Rngs(params=seed, dropout=seed + 1), vocab_multiple=vocab_multiple)


def _float32(params: Params) -> Params:
    """Parameters with floating-point ones cast to float32."""
    return jax.tree.map(lambda p: p.astype(jnp.float32) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
