"""Read and write the tensors of model folders by the tables of `huggingface_families.py`.

The expected tensors of a folder ("their" tensors below) follow from its config.json: the model's module is traced
abstractly, and the rules of the model's family name the tensor of each parameter ("our" parameters). Files are mapped
into memory. If the layers of a parameter are separate tensors on disk, they are stacked when the parameter is read.
Only the requested part of a parameter is read, so a process reads only its own shards.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import UserError, near_miss
from jaxscale.models import safetensors_folder
from jaxscale.models.huggingface_families import Family, TensorRule

STACKED = ".layers."
"""Part of the path of every parameter that a `Stack` holds; such a parameter has a leading dim of layers."""


class Stacked:
    """The arrays of separate layers as one array (layers, ...), which is read on demand.

    Args:
        layers: one array per layer, of equal shapes and types.

    Example:
        >>> stacked = Stacked([np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)])
        >>> stacked.shape, stacked[1, 0].tolist(), np.asarray(stacked).shape
        ((2, 2, 3), [1.0, 1.0, 1.0], (2, 2, 3))
    """

    def __init__(self, layers: list[np.ndarray]):
        self.layers = layers
        self.shape = (len(layers), *layers[0].shape)
        self.dtype, self.ndim = layers[0].dtype, len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        layer_index, *index_in_layer = index if isinstance(index, tuple) else (index,)
        if isinstance(layer_index, slice):
            return np.stack([layer[tuple(index_in_layer)] for layer in self.layers[layer_index]])
        return (
            self.layers[layer_index][tuple(index_in_layer)] if isinstance(layer_index, int) else np.asarray(self)[index]
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.layers).astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array of known shape and type, which `make` computes when numpy converts this object to an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.make()
        assert array.shape == self.shape, (array.shape, self.shape)
        return array.astype(dtype or self.dtype, copy=False)


def _param_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the model's module, by path. The module is only traced, not built."""
    from flax import nnx

    abstract_params = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    return {path: tuple(param.shape) for path, param in flat_leaves(nnx.to_pure_dict(abstract_params))}


def flat_leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of a nested dict, with paths such as "blocks.layers.mlp.up.weight"."""
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from flat_leaves(node, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node


def nested_dict(leaf_by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict of the leaves in `leaf_by_path`: the inverse of `flat_leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaf_by_path.items():
        *parent_names, leaf_name = path.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), parent_names, tree)[leaf_name] = leaf
    return tree


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The layout of one of their tensors: a tensor rule, applied to one layer or to a tensor outside of the layers.

    Args:
        rule: rule for the tensor and its parameters.
        layer: index of the layer; `None` for a tensor outside layers.
        part_shapes: shape of each of the rule's parameters, within one layer.
        ordered_shape: shape of the tensor with its dims in our order.
    """

    rule: TensorRule
    layer: int | None
    part_shapes: list[tuple[int, ...]]
    ordered_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        order = self.rule.order or range(len(self.ordered_shape))
        return tuple(self.ordered_shape[order.index(dim)] for dim in range(len(order)))

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Split their tensor into our parameters, which are views if numpy can make them."""
        ordered_tensor = tensor if self.rule.order is None else tensor.transpose(self.rule.order)
        if self.rule.shape is not None:
            return [ordered_tensor.reshape(self.part_shapes[0])]
        split_points = np.cumsum([shape[-1] for shape in self.part_shapes])[:-1].tolist()
        return np.split(ordered_tensor, split_points, axis=-1)

    def join(self, params: list[np.ndarray]) -> np.ndarray:
        """Join our parameters `params` into their tensor: the inverse of `split`."""
        joined_params = params[0] if len(params) == 1 else np.concatenate(params, axis=-1)
        ordered_tensor = joined_params.reshape(self.ordered_shape)
        return ordered_tensor if self.rule.order is None else ordered_tensor.transpose(np.argsort(self.rule.order))


def _tensor_layouts(
    family: Family, model: Any, shape_by_path: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorLayout]:
    """Return the layout of every tensor of a model in the family's format, by the tensor's name.

    Args:
        family: family of the model. The rules that apply must name each parameter of the model exactly once.
        model: model value.
        shape_by_path: shapes of the parameters of the model, by path.
    """
    rules = [rule for rule in family.rules if all(path in shape_by_path for path in rule.ours)]
    rule_paths = sorted(path for rule in rules for path in rule.ours)
    assert rule_paths == sorted(shape_by_path), (
        f"{family.architecture}: no rule, or more than one, for {set(rule_paths) ^ set(shape_by_path)}"
    )
    layout_by_name = {}
    for rule in rules:
        is_per_layer = "{layer}" in rule.theirs
        part_shapes = [shape_by_path[path][1:] if is_per_layer else shape_by_path[path] for path in rule.ours]
        if rule.shape is None:
            ordered_shape = (*part_shapes[0][:-1], sum(shape[-1] for shape in part_shapes))
        else:
            dim_sizes = [getattr(model, dim_size) if isinstance(dim_size, str) else dim_size for dim_size in rule.shape]
            remaining_dim_size = math.prod(part_shapes[0]) // math.prod(
                dim_size for dim_size in dim_sizes if dim_size != -1
            )
            ordered_shape = tuple(remaining_dim_size if dim_size == -1 else dim_size for dim_size in dim_sizes)
        for layer in range(shape_by_path[rule.ours[0]][0]) if is_per_layer else (None,):
            name = rule.theirs.replace("{layer}", str(layer))
            layout_by_name[name] = TensorLayout(rule, layer, part_shapes, ordered_shape)
    return layout_by_name


def open_params(folder: str | Path, family: Family, model: Any) -> dict[str, Any]:
    """Open the parameters of a folder as a nested dict of memory-mapped array-likes: numpy arrays, or `Stacked` ones.

    Raises:
        UserError: a tensor is missing, unexpected, truncated or of the wrong shape; the message names the tensor.
    """
    folder = Path(folder)
    tensor_by_name = dict(safetensors_folder.read(folder))
    shape_by_path = _param_shapes(model)
    layout_by_name = _tensor_layouts(family, model, shape_by_path)
    if family.prefix and not any(name.startswith(family.prefix) for name in tensor_by_name):
        full_name_by_short_name = {name.removeprefix(family.prefix): name for name in layout_by_name}
        tensor_by_name = {full_name_by_short_name.get(name, name): tensor for name, tensor in tensor_by_name.items()}
    _check_names(folder, family, layout_by_name, tensor_by_name)
    arrays_by_path: dict[str, list[np.ndarray]] = {path: [] for path in shape_by_path}
    for name, layout in layout_by_name.items():
        tensor = tensor_by_name[name]
        if tensor.shape != layout.shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {tensor.shape}, but config.json requires {layout.shape}"
            )
        if not (tensor.dtype.name == "bfloat16" or np.issubdtype(tensor.dtype, np.floating)):
            raise UserError(f"{folder}: tensor {name} has dtype {tensor.dtype}, expected floating point numbers")
        for path, param in zip(layout.rule.ours, layout.split(tensor), strict=True):
            arrays_by_path[path].append(param)
    is_stacked_by_path = {
        path: layout.layer is not None for layout in layout_by_name.values() for path in layout.rule.ours
    }
    return nested_dict(
        {path: Stacked(arrays) if is_stacked_by_path[path] else arrays[0] for path, arrays in arrays_by_path.items()}
    )


def _check_names(
    folder: Path, family: Family, layout_by_name: Mapping[str, Any], tensor_by_name: Mapping[str, np.ndarray]
) -> None:
    """Raise UserError unless a folder has exactly the expected tensors, apart from those that the family ignores."""
    missing_names = [name for name in layout_by_name if name not in tensor_by_name]
    if missing_names:
        raise UserError(
            f"{folder}: tensor {missing_names[0]} is missing{_more_names_text(missing_names)}; {family.architecture} "
            f"with this config.json has {len(layout_by_name)} tensors, but the files have {len(tensor_by_name)}"
            f"{near_miss(missing_names[0], set(tensor_by_name) - set(layout_by_name))}"
        )
    extra_names = [
        name
        for name in tensor_by_name
        if name not in layout_by_name and not name.endswith(family.ignored_endings or ("\0",))
    ]
    for name in [name for name in extra_names if family.source_of_copy.get(name) in layout_by_name]:
        if not np.array_equal(tensor_by_name[name], tensor_by_name[family.source_of_copy[name]]):
            raise UserError(
                f"{folder}: config.json ties {name} to {family.source_of_copy[name]}, but the two differ; set "
                "tie_word_embeddings to false, or remove one"
            )
        extra_names.remove(name)
    if extra_names:
        raise UserError(
            f"{folder}: tensor {extra_names[0]}{_more_names_text(extra_names)} has no place in {family.architecture} "
            "with this config.json; check num_hidden_layers and the bias and tie settings"
        )


def _more_names_text(names: list[str]) -> str:
    """Return text on the number of names after the first, for an error message; empty if there is one name."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def their_tensors(family: Family, model: Any, params: Mapping[str, Any], dtype: np.dtype) -> dict[str, Deferred]:
    """Return the tensors of `model` in the family's format, by name; each is computed on conversion to an array.

    Args:
        family: family that defines the tensors.
        model: model value that the family expresses.
        params: parameters as a nested or a flat dict, as in `save`. Missing biases are zeros.
        dtype: type of the tensors.
    """
    shape_by_path = _param_shapes(model)
    leaf_by_path = dict(flat_leaves(params))

    def read_parameter(path: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        """Return a parameter, or its layer with the index `layer`, without the padding of the vocabulary."""
        layer_path = path if layer is None else path.replace(STACKED, f"{STACKED}{layer}.", 1)
        if layer_path in leaf_by_path:
            leaf = np.asarray(leaf_by_path[layer_path])
        elif path in leaf_by_path:
            leaf = np.asarray(leaf_by_path[path][layer])
        else:
            assert path.endswith(".bias"), f"no parameter {path}"
            return np.zeros(shape, dtype)  # a bias that `Family.zero_fields` adds
        leaf = leaf[tuple(slice(dim_size) for dim_size in shape)]
        assert leaf.shape == shape, f"parameter {path}: got shape {leaf.shape}, the model has {shape}"
        return leaf.astype(dtype)

    def make_tensor(layout: TensorLayout) -> np.ndarray:
        """Return the tensor that the layout describes."""
        paths_and_shapes = zip(layout.rule.ours, layout.part_shapes, strict=True)
        return layout.join([read_parameter(path, layout.layer, shape) for path, shape in paths_and_shapes])

    return {
        name: Deferred(layout.shape, dtype, functools.partial(make_tensor, layout))
        for name, layout in _tensor_layouts(family, model, shape_by_path).items()
    }
