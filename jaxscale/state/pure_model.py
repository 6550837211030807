"""A model as pure functions of nested dicts, as jit, grad, optax and checkpoints need it. Users write NNX modules.

The parameters are one nested dict, and all other state is another nested dict. The functions close over the graph
definition of the module.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Hashable, Mapping
from typing import NoReturn, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import KeyPath

from jaxscale import blocks
from jaxscale.blocks import STACK_SHAPE, UNNAMED_LAYERS, Model
from jaxscale.errors import UserError, near_miss
from jaxscale.layers.stack import Chain, Stack, group_name, in_one_stack
from jaxscale.lowbit.few_bit_weight import FewBitWeight, StoredParam
from jaxscale.model_traits import TensorDims
from jaxscale.trees import count, named_leaves, path_name
from jaxscale.typing import Array, Params

AxisNames = tuple[str | None, ...]
"""The logical axis of each dim of a parameter; `None` for a dim without a logical axis."""
LayerIndex: TypeAlias = slice | tuple[slice, ...]
"""A slice of the first dim of an array, or a slice of each dim."""
_RANDOM_OR_PARAM = nnx.Any(nnx.Param, nnx.RngState)
"""Flax filter for parameters, and for the keys and counts of random streams."""


@runtime_checkable
class LazyArray(Protocol):
    """An array, or an array-like object that reads a part of a file when it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        ...

    def __getitem__(self, index: LayerIndex) -> "np.ndarray | Array":
        """Return the part of the array that the index selects."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PureModel:
    """A model as pure functions, with the shapes of its parameters.

    Args:
        model: the model value from which the module is built.
        seed: seed of the initial parameters.
        vocab_multiple: the size of the vocabulary is padded to a multiple of this number.
        graphdef: structure of the module.
        abstract_params: shapes and dtypes of the parameters, a nested dict of `ShapeDtypeStruct`.
        axis_names: logical axes of each parameter, by the parameter's name; a parameter without axis names is absent.
        abstract_model_state: shapes and dtypes of the model's other state, a nested dict of `ShapeDtypeStruct`.
        group_depths: number of layers in each group of the model's stack; each group's parameters are a stack of their
            own. () for one group.
        layer_of_row: under a pipeline, the layer in each row of a stacked parameter, in the order of the devices; -1
            for a row of zeros that pads a shorter stage. () if the rows are the layers in order.
        copy_numbers: under an asynchronous pipeline, one number per stage for each shared parameter, by name: 0 if the
            stage reads the parameter, -1 if the copy of the stage stays zero.
        ignored_axes: axis names of a foreign module's parameters that are not logical axes.
        train: pattern that selects the trained parameters, by name or type of variable; `None` if all are trained.
        frozen_dtype: dtype of the parameters that are not trained.
        frozen: names of the parameters that are not trained, which are a part of the model's other state.
        tensor_dims: the `TensorDims` of those trained parameters of a foreign model whose layers are known, by name.
        variable_type_names: name of the variable type of each trained parameter, by the parameter's name.
        unnamed_stacks: names of stacked parameters whose module did not name the dim for layers; a checkpoint keeps
            each of them as one array.
        block_param_names: names of the parameters of blocks that the plan runs: those of a `Stack` or a `Chain`, or of
            a scan over blocks in a foreign module.
        few_bit_weights: the quantized frozen weights, by name, as abstract modules; the names of their codes and scales
            are "NAME/codes" and "NAME/scale".
    """

    model: Model
    seed: int
    vocab_multiple: int
    graphdef: nnx.GraphDef[nnx.Module]
    abstract_params: Params
    axis_names: dict[str, AxisNames]
    abstract_model_state: Params
    group_depths: tuple[int, ...] = ()
    layer_of_row: tuple[int, ...] = ()
    copy_numbers: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ignored_axes: tuple[str, ...] = ()
    train: str | None = None
    frozen_dtype: str = "float32"
    frozen: frozenset[str] = frozenset()
    tensor_dims: Mapping[str, TensorDims] = dataclasses.field(default_factory=dict)
    variable_type_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unnamed_stacks: frozenset[str] = frozenset()
    block_param_names: frozenset[str] = frozenset()
    few_bit_weights: Mapping[str, FewBitWeight] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        seed: int,
        vocab_multiple: int = 1,
        group_depths: tuple[int, ...] = (),
        layer_of_row: tuple[int, ...] = (),
        train: str | None = None,
        frozen_dtype: str = "float32",
    ) -> "PureModel":
        """Trace the construction of a model's module, and return the model as pure functions; nothing is allocated.

        Args:
            model: the model value.
            seed: seed of the initial parameters.
            vocab_multiple: the size of the vocabulary is padded to a multiple of this number.
            group_depths: number of layers in each group of the model's stack; () for one group.
            layer_of_row: the layer in each row of a stacked parameter; () if the rows are the layers in order.
            train: which parameters are trained, as in `Optimizer`; `None` for all of them.
            frozen_dtype: dtype of the parameters that are not trained.

        Raises:
            UserError: no parameter is trained, the number of a parameter's axis names differs from the number of its
                dims, a parameter is not of a real floating-point type, or two variables have the same name.
        """
        abstract_module = nnx.eval_shape(functools.partial(_build, model, seed, vocab_multiple, group_depths))
        graphdef, param_state, frozen_state, rest_state = nnx.split(
            abstract_module, _trained_filter(train), nnx.Param, ...
        )
        _check_names_and_types(param_state, frozen_state, rest_state)
        if not param_state:
            _refuse_train(train, frozen_state)
        few_bit_weights = {
            "/".join(map(str, path)): node
            for path, node in nnx.iter_graph(abstract_module)
            if isinstance(node, FewBitWeight)
        }
        axis_names: dict[str, AxisNames] = {}
        ignored_axes: set[str] = set()
        stack_prefixes, chain_prefixes = _block_prefixes(abstract_module)
        unnamed_stacks, block_param_names = set[str](), set[str]()
        for path, variable in (*nnx.to_flat_state(param_state), *nnx.to_flat_state(frozen_state)):
            logical_axes, name = variable.get_metadata().get("out_sharding"), "/".join(map(str, path))
            if logical_axes is None and name.startswith(stack_prefixes):
                logical_axes = ("layers", *(None,) * (len(variable.shape) - 1))
                unnamed_stacks.add(name)
            if name.startswith((*stack_prefixes, *chain_prefixes)) or STACK_SHAPE in variable.get_metadata():
                block_param_names.add(name)
            if variable.get_metadata().get(UNNAMED_LAYERS):
                unnamed_stacks.add(name)
            ignored_axes.update(variable.get_metadata().get("ignored_axes", ()))
            if logical_axes is not None:
                if len(logical_axes) != len(variable.shape):
                    raise UserError(
                        f"parameter {name}: got {len(logical_axes)} axis names {tuple(logical_axes)} for "
                        f"shape {tuple(variable.shape)}; give each dim one name ('layers' for the dim of a stack)"
                    )
                axis_names[name] = tuple(logical_axes)
        abstract_params = jax.eval_shape(_as_float32, nnx.to_pure_dict(param_state))
        pure_model = cls(
            model,
            seed,
            vocab_multiple,
            graphdef,
            abstract_params,
            axis_names,
            jax.eval_shape(functools.partial(_other_state, frozen_dtype), frozen_state, rest_state),
            group_depths,
            layer_of_row,
            ignored_axes=tuple(sorted(ignored_axes)),
            train=train,
            frozen_dtype=frozen_dtype,
            frozen=frozenset("/".join(map(str, path)) for path, _ in nnx.to_flat_state(frozen_state)),
            tensor_dims={
                "/".join(map(str, path)): variable_dims
                for path, variable in nnx.to_flat_state(param_state)
                if (variable_dims := variable.get_metadata().get("tensor_dims")) is not None
            },
            variable_type_names={
                "/".join(map(str, path)): _variable_type(variable).__name__
                for path, variable in nnx.to_flat_state(param_state)
            },
            unnamed_stacks=frozenset(unnamed_stacks),
            block_param_names=frozenset(block_param_names),
            few_bit_weights=few_bit_weights,
        )
        if not layer_of_row:
            return pure_model
        return dataclasses.replace(pure_model, abstract_params=jax.eval_shape(pure_model.in_rows, abstract_params))

    def with_copies(self, copy_numbers: Mapping[str, tuple[int, ...]]) -> "PureModel":
        """Return this model with a copy of each shared parameter for every stage.

        Args:
            copy_numbers: a number for the copy of each stage, by the parameter's name, as in the field `copy_numbers`.
        """
        if not copy_numbers:
            return self
        pure_model = dataclasses.replace(self, copy_numbers=copy_numbers)
        abstract_params = jax.eval_shape(pure_model.in_rows, self.abstract_module_params)
        return dataclasses.replace(pure_model, abstract_params=abstract_params)

    @functools.cached_property
    def abstract_module_params(self) -> Params:
        """Abstract parameters in the shapes that the module has, without the padding rows and copies of a pipeline."""
        return jax.eval_shape(self.in_layers, self.abstract_params) if self.layer_of_row else self.abstract_params

    @property
    def parameters(self) -> int:
        """Number of elements of all trained parameters."""
        return count(self.abstract_module_params)

    @property
    def frozen_parameters(self) -> int:
        """Number of elements of the parameters that are not trained; a quantized weight counts its elements."""
        stored_names = {f"{name}/{part}" for name in self.few_bit_weights for part in ("codes", "scale")}
        leaf_by_name = named_leaves(self.abstract_model_state)
        return sum(math.prod(leaf_by_name[name].shape) for name in self.frozen - stored_names) + sum(
            math.prod(weight.shape) for weight in self.few_bit_weights.values()
        )

    @functools.cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the arrays that are neither parameters nor part of random streams, such as running statistics."""
        module = nnx.merge(self.graphdef, self.abstract_module_params, self.abstract_model_state)
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Not(_RANDOM_OR_PARAM)))]
        return tuple("/".join(map(str, path)) for path in paths)

    @functools.cached_property
    def has_foreign_layers(self) -> bool:
        """Whether a module that is not of this package has parameters of its own."""
        module = nnx.merge(self.graphdef, self.abstract_module_params, self.abstract_model_state)
        return any(
            isinstance(variable, nnx.Param) and not type(node).__module__.startswith("jaxscale.")
            for _, node in nnx.iter_graph(module)
            for variable in getattr(node, "__dict__", {}).values()
        )

    def random_state(self) -> Params:
        """Return the other state of a model without statistics, in which each random stream has a fixed key."""

        def fixed_leaf(leaf: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), leaf.shape)
            return jnp.zeros(leaf.shape, leaf.dtype)

        return jax.tree.map(fixed_leaf, self.abstract_model_state)

    def is_stacked(self, name: str) -> bool:
        """Return whether the first dim of a parameter is for the layers of a stack."""
        return (self.axis_names.get(name) or ("",))[0] == "layers"

    def in_rows(self, params: Params) -> Params:
        """Return the module's parameters, with layers ordered by `layer_of_row` and the copies of `copy_numbers`."""

        def spread(path: KeyPath, leaf: Array | LazyArray) -> Array | LazyArray:
            name = path_name(path)
            source_of_row = self.copy_numbers.get(name, self.layer_of_row if self.is_stacked(name) else ())
            if not source_of_row:
                return leaf
            if not isinstance(leaf, jax.Array):  # an array of a file, which is read when it is indexed
                return LayerRows(WithFirstDim(leaf) if name in self.copy_numbers else leaf, source_of_row)
            source_rows, index_of_row = leaf[None] if name in self.copy_numbers else leaf, jnp.array(source_of_row)
            is_filled = (index_of_row >= 0).reshape(-1, *(1,) * (source_rows.ndim - 1))
            return jnp.where(is_filled, source_rows[jnp.maximum(index_of_row, 0)], jnp.zeros((), leaf.dtype))

        return jax.tree_util.tree_map_with_path(spread, params)

    def in_layers(self, params: Params) -> Params:
        """Return the module's parameters, with layers in order and without copies: the inverse of `in_rows`."""
        if not self.layer_of_row:
            return params
        row_of_layer = jnp.array([self.layer_of_row.index(layer) for layer in range(max(self.layer_of_row) + 1)])

        def gather(path: KeyPath, leaf: Array | np.ndarray) -> Array | np.ndarray:
            name = path_name(path)
            if name in self.copy_numbers:
                return leaf[self.copy_numbers[name].index(0)]
            return leaf[row_of_layer] if self.is_stacked(name) else leaf

        return jax.tree_util.tree_map_with_path(gather, params)

    def create(self) -> tuple[Params, Params]:
        """Return the parameters and the other state of a new module. Callers jit this with `out_shardings`."""
        module = _build(self.model, self.seed, self.vocab_multiple, self.group_depths)
        _, param_state, frozen_state, rest_state = nnx.split(module, _trained_filter(self.train), nnx.Param, ...)
        model_state = _other_state(self.frozen_dtype, frozen_state, rest_state)
        return self.in_rows(_as_float32(nnx.to_pure_dict(param_state))), model_state

    def module(self, params: Params, model_state: Params) -> nnx.Module:
        """Return a new module with these parameters and this other state. JAX may trace this method."""
        return nnx.merge(self.graphdef, params, model_state, copy=True)

    def model_state_of(self, module: nnx.Module) -> Params:
        """Return the state of a module apart from its trained parameters, as a nested dict."""
        return nnx.to_pure_dict(nnx.state(module, nnx.Not(_trained_filter(self.train))))


def _block_prefixes(module: nnx.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples of name prefixes: of the parameters in a `layers.Stack`, and in a `layers.Chain`."""
    stack_prefixes, chain_prefixes = [], []
    for path, node in nnx.iter_graph(module):
        prefix = "".join(f"{word}/" for word in path)
        if isinstance(node, Stack):
            stack_prefixes += [f"{prefix}{name}/" for name in node.group_names]
        elif isinstance(node, Chain):
            chain_prefixes.append(f"{prefix}layers/")
    return tuple(stack_prefixes), tuple(chain_prefixes)


def _trained_filter(train: str | None) -> nnx.filterlib.Predicate:
    """Return a Flax filter for the variables that are trained.

    Args:
        train: a regular expression to search for in the names of parameters, or the name of a variable type; `None` for
            all parameters.
    """

    def is_trained(path: tuple[Hashable, ...], variable: nnx.Variable) -> bool:
        variable_type = _variable_type(variable)
        if train is None or not issubclass(variable_type, nnx.Param):
            return issubclass(variable_type, nnx.Param) if train is None else variable_type.__name__ == train
        return (
            variable_type.__name__ == train or re.search(train, in_one_stack("/".join(map(str, path)))[0]) is not None
        )

    return is_trained


def _variable_type(variable: nnx.Variable) -> type[nnx.Variable]:
    """Return the type of a variable; for an abstract value, the type of the variable that it stands for."""
    return getattr(variable, "type", type(variable))


def _other_state(frozen_dtype: str, frozen_state: nnx.State, rest_state: nnx.State) -> Params:
    """Return one nested dict with the frozen parameters, cast to `frozen_dtype`, and all other state."""
    stored_state, cast_state = nnx.split_state(frozen_state, StoredParam, ...)
    frozen_params = jax.tree.map(
        lambda p: p.astype(frozen_dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, cast_state
    )
    return nnx.to_pure_dict(nnx.merge_state(frozen_params, stored_state, rest_state))


def _refuse_train(train: str | None, frozen_state: nnx.State) -> NoReturn:
    """Raise UserError for a model without trained parameters."""
    names = sorted({"/".join(map(str, path)) for path, _ in nnx.to_flat_state(frozen_state)})
    if not names:
        raise UserError("the model has no parameter to train: expected an nnx.Param")
    raise UserError(
        f"optimizer.train: {train!r} is found in no name of a parameter; the parameters are {', '.join(names[:6])}"
        f"{', ...' if len(names) > 6 else ''}"
        f"{near_miss(train or '', [*names, *sorted({part for name in names for part in name.split('/')})])}"
    )


def _check_names_and_types(param_state: nnx.State, *other_states: nnx.State) -> None:
    """Refuse parameters that cannot be trained, and variables that have the same name.

    Args:
        param_state: the trained parameters of a module.
        other_states: the other variables of the module.
    """
    path_by_name: dict[str, tuple[object, ...]] = {}
    for path, _ in itertools.chain.from_iterable(map(nnx.to_flat_state, (param_state, *other_states))):
        name = "/".join(map(str, path))
        if name in path_by_name:
            raise UserError(
                f"variables {path_by_name[name]} and {path} of the model have one name, {name}: names are paths joined "
                "by '/'; rename one of them"
            )
        path_by_name[name] = path
    for path, variable in nnx.to_flat_state(param_state):
        if issubclass(getattr(variable, "type", type(variable)), StoredParam):
            raise UserError(
                f"optimizer.train: the pattern is found in {'/'.join(map(str, path))}, but a weight in few bits is not "
                "trained; name the adapters and other parameters alone, such as 'lora|head', or leave base out"
            )
        for leaf in jax.tree.leaves(variable):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            advice = (
                "store its real and imaginary parts as two parameters"
                if jnp.issubdtype(leaf.dtype, jnp.complexfloating)
                else "it has no gradient, so make it an nnx.Variable of another type than nnx.Param"
            )
            raise UserError(
                f"parameter {'/'.join(map(str, path))}: got type {leaf.dtype}, expected a real floating-point type, "
                f"which can be trained: {advice}"
            )


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """An array whose rows are zeros or layers of another array; the layers are read when this array is indexed.

    Args:
        layers: array with all layers along its first dim.
        layer_of_row: the layer in each row; -1 for a row of zeros.

    Example:
        >>> import numpy as np
        >>> LayerRows(np.array([[1], [2]]), (1, -1, 0))[0:3].tolist()
        [[2], [0], [1]]
    """

    layers: LazyArray
    layer_of_row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with all rows."""
        return (len(self.layer_of_row), *self.layers.shape[1:])

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        row_slice, *other_slices = index if isinstance(index, tuple) else (index,)
        selected_layers = self.layer_of_row[row_slice]  # the layer in each selected row
        if (
            selected_layers
            and selected_layers[0] >= 0
            and selected_layers == tuple(range(selected_layers[0], selected_layers[0] + len(selected_layers)))
        ):
            return np.asarray(
                self.layers[(slice(selected_layers[0], selected_layers[0] + len(selected_layers)), *other_slices)]
            )
        rows = []
        for layer_index in selected_layers:
            start = max(layer_index, 0)
            row = np.asarray(self.layers[(slice(start, start + 1), *other_slices)])
            rows.append(row if layer_index >= 0 else np.zeros_like(row))
        return np.concatenate(rows)


@dataclasses.dataclass(frozen=True)
class WithFirstDim:
    """An array with an additional first dim of size 1; the array is read when it is indexed.

    Args:
        array: the array without the additional dim.
    """

    array: LazyArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with the additional first dim."""
        return (1, *self.array.shape)

    def __getitem__(self, index: LayerIndex) -> np.ndarray:
        first_slice, *other_slices = index if isinstance(index, tuple) else (index,)
        return np.asarray(self.array[tuple(other_slices)])[None][first_slice]


def in_groups(params: Params, group_depths: tuple[int, ...]) -> Params:
    """Return a model's parameters with its stack divided into groups, as if built under `blocks.grouping`.

    Args:
        params: parameters of the model with one stack.
        group_depths: number of layers in each group; () for one group.

    Example:
        >>> import numpy as np
        >>> stacks = in_groups({"stack": {"layers": {"w": np.arange(3)}}}, (2, 1))["stack"]
        >>> {name: group["w"][:].tolist() for name, group in stacks.items()}
        {'layers': [0, 1], 'layers_from_2': [2]}
    """
    if not group_depths:
        return params
    grouped_params: dict[str, Params] = {}
    for name, subtree in params.items():
        if name == "layers" and all(leaf.shape[:1] == (sum(group_depths),) for leaf in jax.tree.leaves(subtree)):
            for start, depth in zip(itertools.accumulate((0, *group_depths)), group_depths, strict=False):
                select_layers = functools.partial(LayerRows, layer_of_row=tuple(range(start, start + depth)))
                grouped_params[group_name(start)] = jax.tree.map(select_layers, subtree)
        else:
            grouped_params[name] = in_groups(subtree, group_depths) if isinstance(subtree, dict) else subtree
    return grouped_params


def _build(model: Model, seed: int, vocab_multiple: int, group_depths: tuple[int, ...]) -> nnx.Module:
    """Build the module of a model, with its stack in groups, and return it."""
    with nnx.use_eager_sharding(False), blocks.grouping(group_depths):
        return model.build(nnx.Rngs(params=seed, dropout=seed + 1), vocab_multiple=vocab_multiple)


def _as_float32(params: Params) -> Params:
    """Return the parameters, with floating-point parameters cast to float32."""
    return jax.tree.map(lambda p: p.astype(jnp.float32) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
