"""Read and write tensors by the tables of their names.

The expected tensors of a folder follow from its config.json: its module is traced abstractly, and each of its
parameters is looked up under the names of its family. Files are mapped into memory; a parameter whose layers are
separate on disk is stacked on reading, only the part that is read, so that each process reads its shards alone.
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

Shapes = Mapping[str, tuple[int, ...]]


class Stacked:
    """Separate arrays of layers as one lazily read array (layers, ...).

    Example:
        >>> both = Stacked([np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)])
        >>> both.shape, both[1, 0].tolist(), np.asarray(both).shape
        ((2, 2, 3), [1.0, 1.0, 1.0], (2, 2, 3))
    """

    def __init__(self, layers: list[np.ndarray]):
        self.layers = layers
        self.shape = (len(layers), *layers[0].shape)
        self.dtype, self.ndim = layers[0].dtype, len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *inner_index = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice):
            return np.stack([layer[tuple(inner_index)] for layer in self.layers[first]])
        return self.layers[first][tuple(inner_index)] if isinstance(first, int) else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.layers).astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array that is computed when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.make()
        assert array.shape == self.shape, (array.shape, self.shape)
        return array.astype(dtype or self.dtype, copy=False)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Path and shape of every parameter of the module that `model` builds, without building it."""
    from flax import nnx

    state = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    return {path: tuple(leaf.shape) for path, leaf in flat(nnx.to_pure_dict(state))}


def flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path ("blocks.layers.mlp.up.weight") and leaf of every leaf of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, leaf_name = path.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), parents, tree)[leaf_name] = value
    return tree


def _rules(family: Family, shapes: Shapes) -> list[TensorRule]:
    """The rules that apply to these parameters; together they name each parameter once."""
    rules = [rule for rule in family.rules if all(path in shapes for path in rule.ours)]
    covered = sorted(path for rule in rules for path in rule.ours)
    assert covered == sorted(shapes), f"{family.architecture}: no rule, or two, for {set(covered) ^ set(shapes)}"
    return rules


def _layers(rule: TensorRule, shapes: Shapes) -> int | None:
    """The number of tensors that a rule names, one per layer; `None` if it names one, not in layers."""
    return shapes[rule.ours[0]][0] if "{layer}" in rule.theirs else None


def _layer_shapes(rule: TensorRule, shapes: Shapes) -> list[tuple[int, ...]]:
    """Shapes of a rule's parameters, of one layer."""
    return [shapes[path] if _layers(rule, shapes) is None else shapes[path][1:] for path in rule.ours]


def _ordered_shape(rule: TensorRule, shapes: Shapes, model: Any) -> tuple[int, ...]:
    """Shape of a rule's tensor, its dims in our order."""
    if rule.shape is not None:
        sizes = [getattr(model, size) if isinstance(size, str) else size for size in rule.shape]
        known_size = math.prod(size for size in sizes if size != -1)
        return tuple(math.prod(_layer_shapes(rule, shapes)[0]) // known_size if size == -1 else size for size in sizes)
    parts = _layer_shapes(rule, shapes)
    return (*parts[0][:-1], sum(part[-1] for part in parts))


def _their_shape(rule: TensorRule, shapes: Shapes, model: Any) -> tuple[int, ...]:
    ordered = _ordered_shape(rule, shapes, model)
    return ordered if rule.order is None else tuple(ordered[rule.order.index(dim)] for dim in range(len(ordered)))


def _expected(rules: list[TensorRule], shapes: Shapes, model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model in the family's format."""
    return {
        rule.theirs.replace("{layer}", str(layer)): _their_shape(rule, shapes, model)
        for rule in rules
        for layer in range(_layers(rule, shapes) or 1)
    }


def open_params(folder: str | Path, family: Family, model: Any) -> dict[str, Any]:
    """Parameters of a folder as a nested dict of memory-mapped array-likes: numpy arrays, or `Stacked` ones.

    Raises:
        UserError: a missing, surplus, misshapen or truncated tensor; the message names it.
    """
    folder = Path(folder)
    tensors = dict(safetensors_folder.read(folder))
    shapes = _shapes(model)
    rules = _rules(family, shapes)
    expected = _expected(rules, shapes, model)
    if family.prefix and not any(name.startswith(family.prefix) for name in tensors):
        full_names = {name.removeprefix(family.prefix): name for name in expected}
        tensors = {full_names.get(name, name): tensor for name, tensor in tensors.items()}
    _check_names(folder, family, expected, tensors)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {tensors[name].shape}, and config.json asks for {shape}"
            )
        if not (tensors[name].dtype.name == "bfloat16" or np.issubdtype(tensors[name].dtype, np.floating)):
            raise UserError(f"{folder}: tensor {name} has dtype {tensors[name].dtype}, expected floating point numbers")
    params: dict[str, Any] = {}
    for rule in rules:
        layers = _layers(rule, shapes)
        parts = [
            _split(tensors[rule.theirs.replace("{layer}", str(layer))], rule, _layer_shapes(rule, shapes))
            for layer in range(layers or 1)
        ]
        for path, arrays in zip(rule.ours, zip(*parts, strict=True), strict=True):
            params[path] = arrays[0] if layers is None else Stacked(list(arrays))
    return nested({path: params[path] for path in shapes})


def _check_names(folder: Path, family: Family, expected: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing{_and_more(missing)}; {family.architecture} with this "
            f"config.json has {len(expected)} tensors, and there are {len(tensors)}"
            f"{near_miss(missing[0], set(tensors) - set(expected))}"
        )
    extra = [name for name in tensors if name not in expected and not name.endswith(family.ignored or ("\0",))]
    for name in [name for name in extra if family.copies.get(name) in expected]:
        if not np.array_equal(tensors[name], tensors[family.copies[name]]):
            raise UserError(
                f"{folder}: config.json ties {name} to {family.copies[name]}, and the two differ; set "
                "tie_word_embeddings to false, or take one out"
            )
        extra.remove(name)
    if extra:
        raise UserError(
            f"{folder}: tensor {extra[0]}{_and_more(extra)} has no place in {family.architecture} with this "
            "config.json; check num_hidden_layers and the bias and tie settings"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _split(tensor: np.ndarray, rule: TensorRule, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """One of their tensors as our parameters, as views if numpy can."""
    ordered = tensor if rule.order is None else tensor.transpose(rule.order)
    if rule.shape is not None:
        return [ordered.reshape(shapes[0])]
    ends = np.cumsum([shape[-1] for shape in shapes])[:-1].tolist()
    return np.split(ordered, ends, axis=-1)


def _join(arrays: list[np.ndarray], rule: TensorRule, ordered_shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_split`."""
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    joined = joined.reshape(ordered_shape)
    return joined if rule.order is None else joined.transpose(np.argsort(rule.order))


def their_tensors(family: Family, model: Any, params: Mapping[str, Any], dtype: np.dtype) -> dict[str, Deferred]:
    """Parameters of `model` under their names, each computed on access.

    Args:
        family: the family of the names.
        model: a model value that the family expresses.
        params: nested or flat; see `save`. Missing biases are zeros.
        dtype: type of the tensors.
    """
    shapes = _shapes(model)
    leaves = dict(flat(params))

    def parameter(path: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        layer_path = path if layer is None else path.replace(STACKED, f"{STACKED}{layer}.", 1)
        if layer_path in leaves:
            leaf = np.asarray(leaves[layer_path])
        elif path in leaves:
            leaf = np.asarray(leaves[path][layer])
        else:
            assert path.endswith(".bias"), f"no parameter {path}"
            return np.zeros(shape, dtype)  # widened: `Family.zeros`
        leaf = leaf[tuple(slice(size) for size in shape)]  # without the padding of the vocabulary
        assert leaf.shape == shape, f"parameter {path}: got shape {leaf.shape}, the model has {shape}"
        return leaf.astype(dtype)

    def tensor(rule: TensorRule, layer: int | None) -> Deferred:
        def make() -> np.ndarray:
            parts = [
                parameter(path, layer, shape)
                for path, shape in zip(rule.ours, _layer_shapes(rule, shapes), strict=True)
            ]
            return _join(parts, rule, _ordered_shape(rule, shapes, model))

        return Deferred(_their_shape(rule, shapes, model), dtype, make)

    tensors: dict[str, Deferred] = {}
    for rule in _rules(family, shapes):
        layers = _layers(rule, shapes)
        for layer in range(layers or 1):
            tensors[rule.theirs.replace("{layer}", str(layer))] = tensor(rule, None if layers is None else layer)
    return tensors
