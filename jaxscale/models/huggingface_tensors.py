"""Read and write the tensors of model folders by the tables of `huggingface_families.py`.

The expected tensors of a folder ("their" tensors below) follow from its config.json: the model's module is traced
abstractly, and the rules of its family name the tensor of each parameter ("our" parameters). Files are mapped into
memory. A parameter whose layers are separate tensors on disk is stacked when it is read. Only the requested part is
read, so that a process reads only its own shards.
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
"""Parameters below an attribute of this name (a `Stack`'s) have a leading dim of layers."""


class Stacked:
    """Separate arrays of layers as one lazily read array (layers, ...).

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
        first, *index_in_layer = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice):
            return np.stack([layer[tuple(index_in_layer)] for layer in self.layers[first]])
        return self.layers[first][tuple(index_in_layer)] if isinstance(first, int) else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.layers).astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array of known shape and type; `make` computes it when it is converted to a numpy array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.make()
        assert array.shape == self.shape, (array.shape, self.shape)
        return array.astype(dtype or self.dtype, copy=False)


def _param_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by path, of the module that `model` builds, without building it."""
    from flax import nnx

    state = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    return {path: tuple(leaf.shape) for path, leaf in flat(nnx.to_pure_dict(state))}


def flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of a nested dict; a path is "blocks.layers.mlp.up.weight"."""
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from flat(node, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict of these leaves by path: the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, leaf_name = path.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), parents, tree)[leaf_name] = leaf
    return tree


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """One of their tensors in the folder of a model, by a rule and the layer that the rule is applied to.

    Args:
        rule: rule for the tensor and its parameters.
        layer: number of the layer; `None` for a tensor outside layers.
        part_shapes: shape of each of the rule's parameters, in one layer.
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
        """Return our parameters in their tensor, as views if numpy can make them."""
        ordered_tensor = tensor if self.rule.order is None else tensor.transpose(self.rule.order)
        if self.rule.shape is not None:
            return [ordered_tensor.reshape(self.part_shapes[0])]
        split_points = np.cumsum([shape[-1] for shape in self.part_shapes])[:-1].tolist()
        return np.split(ordered_tensor, split_points, axis=-1)

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return their tensor with our parameters `parts` in it: the inverse of `split`."""
        tensor = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        tensor = tensor.reshape(self.ordered_shape)
        return tensor if self.rule.order is None else tensor.transpose(np.argsort(self.rule.order))


def _tensor_places(family: Family, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorPlace]:
    """Return every tensor of a model in the family's format, by name.

    Args:
        family: family whose rules apply if the model has their parameters. These rules name each parameter once.
        model: model value.
        shapes: shapes of the parameters of the model, by path.
    """
    rules = [rule for rule in family.rules if all(path in shapes for path in rule.ours)]
    paths = sorted(path for rule in rules for path in rule.ours)
    assert paths == sorted(shapes), f"{family.architecture}: no rule, or two, for {set(paths) ^ set(shapes)}"
    places = {}
    for rule in rules:
        is_per_layer = "{layer}" in rule.theirs
        part_shapes = [shapes[path][1:] if is_per_layer else shapes[path] for path in rule.ours]
        if rule.shape is None:
            ordered_shape = (*part_shapes[0][:-1], sum(shape[-1] for shape in part_shapes))
        else:
            sizes = [getattr(model, size) if isinstance(size, str) else size for size in rule.shape]
            remaining_size = math.prod(part_shapes[0]) // math.prod(size for size in sizes if size != -1)
            ordered_shape = tuple(remaining_size if size == -1 else size for size in sizes)
        for layer in range(shapes[rule.ours[0]][0]) if is_per_layer else (None,):
            name = rule.theirs.replace("{layer}", str(layer))
            places[name] = TensorPlace(rule, layer, part_shapes, ordered_shape)
    return places


def open_params(folder: str | Path, family: Family, model: Any) -> dict[str, Any]:
    """Open the parameters of a folder as a nested dict of memory-mapped array-likes: numpy arrays, or `Stacked` ones.

    Raises:
        UserError: a tensor is missing, unexpected, truncated or of another shape; the message names it.
    """
    folder = Path(folder)
    tensors = dict(safetensors_folder.read(folder))
    param_shapes = _param_shapes(model)
    places = _tensor_places(family, model, param_shapes)
    if family.prefix and not any(name.startswith(family.prefix) for name in tensors):
        full_names = {name.removeprefix(family.prefix): name for name in places}
        tensors = {full_names.get(name, name): tensor for name, tensor in tensors.items()}
    _check_names(folder, family, places, tensors)
    params: dict[str, list[np.ndarray]] = {path: [] for path in param_shapes}
    for name, place in places.items():
        tensor = tensors[name]
        if tensor.shape != place.shape:
            raise UserError(f"{folder}: tensor {name} has shape {tensor.shape}, but config.json requires {place.shape}")
        if not (tensor.dtype.name == "bfloat16" or np.issubdtype(tensor.dtype, np.floating)):
            raise UserError(f"{folder}: tensor {name} has dtype {tensor.dtype}, expected floating point numbers")
        for path, layer_param in zip(place.rule.ours, place.split(tensor), strict=True):
            params[path].append(layer_param)
    stacked_flags = {path: place.layer is not None for place in places.values() for path in place.rule.ours}
    return nested({path: Stacked(arrays) if stacked_flags[path] else arrays[0] for path, arrays in params.items()})


def _check_names(folder: Path, family: Family, places: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Raise UserError unless a folder has exactly the expected tensors, besides those that a family ignores."""
    missing_names = [name for name in places if name not in tensors]
    if missing_names:
        raise UserError(
            f"{folder}: tensor {missing_names[0]} is missing{_and_more(missing_names)}; {family.architecture} with "
            f"this config.json has {len(places)} tensors, but the files have {len(tensors)}"
            f"{near_miss(missing_names[0], set(tensors) - set(places))}"
        )
    extra_names = [name for name in tensors if name not in places and not name.endswith(family.ignored or ("\0",))]
    for name in [name for name in extra_names if family.copies.get(name) in places]:
        if not np.array_equal(tensors[name], tensors[family.copies[name]]):
            raise UserError(
                f"{folder}: config.json ties {name} to {family.copies[name]}, but the two differ; set "
                "tie_word_embeddings to false, or remove one"
            )
        extra_names.remove(name)
    if extra_names:
        raise UserError(
            f"{folder}: tensor {extra_names[0]}{_and_more(extra_names)} has no place in {family.architecture} with "
            "this config.json; check num_hidden_layers and the bias and tie settings"
        )


def _and_more(names: list[str]) -> str:
    """Return the number of names after the first as text, for an error message."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def their_tensors(family: Family, model: Any, params: Mapping[str, Any], dtype: np.dtype) -> dict[str, Deferred]:
    """Return the tensors of `model` by their names, each computed when it is converted to a numpy array.

    Args:
        family: family that defines the tensors.
        model: model value that the family expresses.
        params: parameters, nested or flat as in `save`. Missing biases are zeros.
        dtype: type of the tensors.
    """
    shapes = _param_shapes(model)
    leaves = dict(flat(params))

    def read_parameter(path: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        """Return a parameter, or that of one layer, without the padding of the vocabulary."""
        layer_path = path if layer is None else path.replace(STACKED, f"{STACKED}{layer}.", 1)
        if layer_path in leaves:
            leaf = np.asarray(leaves[layer_path])
        elif path in leaves:
            leaf = np.asarray(leaves[path][layer])
        else:
            assert path.endswith(".bias"), f"no parameter {path}"
            return np.zeros(shape, dtype)  # a bias that `Family.zeros` adds
        leaf = leaf[tuple(slice(size) for size in shape)]
        assert leaf.shape == shape, f"parameter {path}: got shape {leaf.shape}, the model has {shape}"
        return leaf.astype(dtype)

    def make_tensor(place: TensorPlace) -> np.ndarray:
        paths_and_shapes = zip(place.rule.ours, place.part_shapes, strict=True)
        return place.join([read_parameter(path, place.layer, shape) for path, shape in paths_and_shapes])

    return {
        name: Deferred(place.shape, dtype, functools.partial(make_tensor, place))
        for name, place in _tensor_places(family, model, shapes).items()
    }
