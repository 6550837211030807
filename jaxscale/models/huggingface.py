"""Folders of Hugging Face's transformers: read, written, and continued from.

One engine runs the tables of `huggingface_families.py` in both directions. What is expected of a file follows from its
config.json: the module that it describes is traced abstractly, and each of its parameters is looked for under the names of its
family. Files are mapped into memory; a parameter whose layers lie apart on disk is put together when, and as far as, it is
read, so that each process of a run reads its own shards alone.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.models import safetensors_folder
from jaxscale.models.huggingface_config import ConfigFile
from jaxscale.models.huggingface_families import FAMILIES, Family, Rule

if TYPE_CHECKING:
    from jaxscale.blocks import Context, Loss
    from jaxscale.typing import Batch

STACKED = ".layers."
"""Parameters below an attribute of this name (a `Stack`'s) have a leading dim of layers."""
TRAINING_ONLY = ("dropout", "z_loss", "init_std", "scaled_init")
"""Fields that do not change what a model computes once it is trained: a file may say otherwise about them."""
WRITTEN = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}
"""Types that `save` writes."""
SHARD_BYTES = 5_000_000_000
"""Most bytes of one file that `save` writes, as transformers does by default."""

Shapes = Mapping[str, tuple[int, ...]]


class Stacked:
    """Layers that lie apart in a file, seen as one array (layers, ...), of which no more is read than is asked for.

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
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice):
            return np.stack([layer[tuple(rest)] for layer in self.layers[first]])
        return self.layers[first][tuple(rest)] if isinstance(first, int) else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.layers).astype(dtype or self.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array that is put together when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        made = self.make()
        assert made.shape == self.shape, (made.shape, self.shape)
        return made.astype(dtype or self.dtype, copy=False)


def read_config(folder: str | Path, **said: Any) -> tuple[Family, Any]:
    """The family of a folder's model, and the model as a value of ours.

    Args:
        folder: holds config.json, of transformers 4 or 5.
        said: fields that the caller decides (dropout, z_loss).

    Raises:
        UserError: no file; an unknown architecture; a value that is wrong, or not supported, or not understood.
    """
    file = ConfigFile.open(Path(folder))
    named = file.values.get("architectures") or []
    of_type = [family for family in FAMILIES.values() if family.model_type == file.values.get("model_type")]
    families = [FAMILIES[name] for name in named if name in FAMILIES] or ([] if named else of_type)
    if not families:
        given = str((list(named) or [file.values.get("model_type", "(none)")])[0])
        raise UserError(f"{file.path}: {unknown('architecture', given, FAMILIES)}")
    family = families[0]
    if file.values.get("quantization_config"):
        raise UserError(f"{file.path}: quantization_config: quantized weights are not supported; save them dequantized")
    try:
        return family, _from_file(family, file, said)
    except UserError as error:
        if str(file.path) in str(error):
            raise
        raise UserError(f"{file.path}: {error}") from error


def _from_file(family: Family, file: ConfigFile, said: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = dict(family.settles)
    for piece in family.pieces:
        fields |= piece.read(file)
    file.refuse_unseen()
    return family.value(**fields | said)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Path and shape of every parameter of the module that `model` builds, without building it."""
    from flax import nnx

    state = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    return {path: tuple(leaf.shape) for path, leaf in _flat(nnx.to_pure_dict(state))}


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), above, tree)[last] = value
    return tree


def _rules(family: Family, shapes: Shapes) -> list[Rule]:
    """The rules in force for a module of these parameters: together they name each parameter once."""
    rules = [rule for rule in family.rules if all(path in shapes for path in rule.ours)]
    named = sorted(path for rule in rules for path in rule.ours)
    assert named == sorted(shapes), f"{family.architecture}: no rule, or two, for {set(named) ^ set(shapes)}"
    return rules


def _layers(rule: Rule, shapes: Shapes) -> int | None:
    """How many tensors a rule names; `None` where it names one, not in layers."""
    return shapes[rule.ours[0]][0] if "{layer}" in rule.theirs else None


def _one(rule: Rule, shapes: Shapes) -> list[tuple[int, ...]]:
    """Shapes of a rule's parameters, of one layer."""
    return [shapes[path] if _layers(rule, shapes) is None else shapes[path][1:] for path in rule.ours]


def _ordered_shape(rule: Rule, shapes: Shapes, model: Any) -> tuple[int, ...]:
    """Shape of a rule's tensor, its dims in our order."""
    if rule.shape is not None:
        return tuple(getattr(model, size) if isinstance(size, str) else size for size in rule.shape)
    parts = _one(rule, shapes)
    return (*parts[0][:-1], sum(part[-1] for part in parts))


def _their_shape(rule: Rule, shapes: Shapes, model: Any) -> tuple[int, ...]:
    ordered = _ordered_shape(rule, shapes, model)
    return ordered if rule.order is None else tuple(ordered[rule.order.index(dim)] for dim in range(len(ordered)))


def _expected(rules: list[Rule], shapes: Shapes, model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the family's form of a model."""
    return {
        rule.theirs.replace("{layer}", str(layer)): _their_shape(rule, shapes, model)
        for rule in rules
        for layer in range(_layers(rule, shapes) or 1)
    }


def open_params(folder: str | Path, family: Family, model: Any) -> dict[str, Any]:
    """Parameters of a folder as a nested dict of memory-mapped array-likes: numpy arrays, or `Stacked` ones.

    Raises:
        UserError: a tensor that is missing, too many, misshapen, or cut short, by its name.
    """
    folder = Path(folder)
    tensors = dict(safetensors_folder.read(folder))
    shapes = _shapes(model)
    rules = _rules(family, shapes)
    expected = _expected(rules, shapes, model)
    if family.prefix and not any(name.startswith(family.prefix) for name in tensors):
        bare = {name.removeprefix(family.prefix): name for name in expected}
        tensors = {bare.get(name, name): tensor for name, tensor in tensors.items()}
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
            _split(tensors[rule.theirs.replace("{layer}", str(layer))], rule, _one(rule, shapes))
            for layer in range(layers or 1)
        ]
        for path, arrays in zip(rule.ours, zip(*parts, strict=True), strict=True):
            params[path] = arrays[0] if layers is None else Stacked(list(arrays))
    return _nested({path: params[path] for path in shapes})


def _check_names(folder: Path, family: Family, expected: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing{_and_more(missing)}; {family.architecture} with this config.json has "
            f"{len(expected)} tensors, and there are {len(tensors)}{near_miss(missing[0], set(tensors) - set(expected))}"
        )
    extra = [name for name in tensors if name not in expected and not name.endswith(family.ignored or ("\0",))]
    for name in [name for name in extra if family.copies.get(name) in expected]:
        if not np.array_equal(tensors[name], tensors[family.copies[name]]):
            raise UserError(
                f"{folder}: config.json ties {name} to {family.copies[name]}, and the two differ; set tie_word_embeddings to "
                "false, or take one out"
            )
        extra.remove(name)
    if extra:
        raise UserError(
            f"{folder}: tensor {extra[0]}{_and_more(extra)} has no place in {family.architecture} with this config.json; check "
            "num_hidden_layers and the bias and tie settings"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _split(tensor: np.ndarray, rule: Rule, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """One of their tensors as parameters of ours: views wherever numpy can."""
    ordered = tensor if rule.order is None else tensor.transpose(rule.order)
    if rule.shape is not None:
        return [ordered.reshape(shapes[0])]
    ends = np.cumsum([shape[-1] for shape in shapes])[:-1].tolist()
    return np.split(ordered, ends, axis=-1)


def _join(arrays: list[np.ndarray], rule: Rule, ordered_shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_split`."""
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    joined = joined.reshape(ordered_shape)
    return joined if rule.order is None else joined.transpose(np.argsort(rule.order))


def load(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """The model of a folder of transformers, and its parameters.

    Args:
        folder: holds config.json and safetensors, in one file or sharded, in any floating-point type.

    Returns:
        A value of ours (`Decoder`), and a nested dict of numpy arrays in the file's type, as its module names them.

    Raises:
        UserError: what is wrong with the folder, by the name of the file, field or tensor.
    """
    family, model = read_config(folder)
    params = dict(_flat(open_params(folder, family, model)))
    return model, _nested({path: np.array(leaf) for path, leaf in params.items()})


def _comparable(model: Any) -> dict[str, Any]:
    """Fields of a model that decide what it computes, with what `None` implies put in."""
    fields = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.name not in TRAINING_ONLY
    }
    resolved = {"kv_heads": "kv_count", "head_dim": "head_width", "mlp": "mlp_width"}
    fields |= {name: getattr(model, implied) for name, implied in resolved.items() if hasattr(model, implied)}
    if "windows" in fields:
        fields["windows"] = tuple(
            fields["windows"][layer % len(fields["windows"])] for layer in range(fields["layers"])
        )
        fields["attention_scale"] = round(fields["attention_scale"] or fields["head_dim"] ** -0.5, 12)
    return fields


def describe(model: Any) -> tuple[Family, dict[str, Any], Any]:
    """The family that expresses a model of ours, its config.json, and the model that this config.json describes.

    Raises:
        UserError: none does; names the nearest one and what it lacks.
    """
    differences: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if not isinstance(model, family.value):
            continue
        config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
        config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # else transformers puts its own
        for piece in family.pieces:
            config |= piece.write(model)
        wanted = _comparable(model)
        try:
            back = _from_file(family, ConfigFile(Path("config.json"), config), {})
        except UserError:
            continue
        found = _comparable(back)
        differences[family.architecture] = [
            name
            for name in wanted
            if found[name] != wanted[name] and found[name] != family.zeros.get(name, wanted[name])
        ]
        if not differences[family.architecture]:
            return family, config, back
    if not differences:
        raise UserError(
            f"no architecture of transformers is known for {type(model).__name__}: {', '.join(FAMILIES)} are"
        )
    nearest = min(differences, key=lambda name: len(differences[name]))
    lacking = ", ".join(f"{name}={getattr(model, name)!r}" for name in differences[nearest])
    raise UserError(f"no known architecture of transformers has this model; the nearest, {nearest}, has no {lacking}")


def their_tensors(family: Family, model: Any, params: Mapping[str, Any], dtype: np.dtype) -> dict[str, Deferred]:
    """Parameters of `model` under their names, each put together when it is asked for.

    Args:
        family: whose names.
        model: a value of ours that the family expresses.
        params: nested or flat; see `save`. Biases that are not there are zeros.
        dtype: type of what is put together.
    """
    shapes = _shapes(model)
    leaves = dict(_flat(params))

    def parameter(path: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        one = path if layer is None else path.replace(STACKED, f"{STACKED}{layer}.", 1)
        if one in leaves:
            leaf = np.asarray(leaves[one])
        elif path in leaves:
            leaf = np.asarray(leaves[path][layer])
        else:
            assert path.endswith(".bias"), f"no parameter {path}"
            return np.zeros(shape, dtype)  # widened: `Family.zeros`
        leaf = leaf[tuple(slice(size) for size in shape)]  # without the padding of the vocabulary
        assert leaf.shape == shape, f"parameter {path}: got shape {leaf.shape}, the model has {shape}"
        return leaf.astype(dtype)

    def tensor(rule: Rule, layer: int | None) -> Deferred:
        def make() -> np.ndarray:
            parts = [parameter(path, layer, shape) for path, shape in zip(rule.ours, _one(rule, shapes), strict=True)]
            return _join(parts, rule, _ordered_shape(rule, shapes, model))

        return Deferred(_their_shape(rule, shapes, model), dtype, make)

    tensors: dict[str, Deferred] = {}
    for rule in _rules(family, shapes):
        layers = _layers(rule, shapes)
        for layer in range(layers or 1):
            tensors[rule.theirs.replace("{layer}", str(layer))] = tensor(rule, None if layers is None else layer)
    return tensors


def save(
    folder: str | Path,
    model: Any,
    params: Mapping[str, Any],
    dtype: str = "float32",
    *,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers reads: config.json, safetensors, and the tokenizer if there is one.

    Args:
        folder: made if need be; must not hold a model yet.
        model: a value of ours, such as a `Decoder`.
        params: its parameters as `load` gives them, or flat by path ("blocks.layers.0.mlp.up.weight", one array a layer);
            the vocabulary may be padded.
        dtype: type to write: "float32", "bfloat16" or "float16".
        tokenizer: a tokenizer.json to put beside the weights.
        shard_bytes: most bytes of one file.

    Raises:
        UserError: a model that no known architecture expresses; a folder that holds one already.
    """
    if dtype not in WRITTEN:
        raise unknown("dtype", dtype, WRITTEN)
    family, config, target = describe(model)
    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
    ):
        raise UserError(f"{folder}: holds a model already, or is no folder; give a new one")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = their_tensors(family, target, params, WRITTEN[dtype])
    safetensors_folder.write(folder, tensors, shard_bytes=shard_bytes)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    config |= {"dtype": dtype, "torch_dtype": dtype}  # of transformers 5 and of 4
    with safetensors_folder.whole(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """The model of a folder of transformers, to be trained on from its weights.

    Training starts from `initial_params` instead of random ones; everything else is the wrapped `model`'s.

    Args:
        folder: holds config.json and safetensors.
        dropout: rate to train with, as in `Decoder`; the file's rates are not taken.
        z_loss: as in `Decoder`.

    Raises:
        UserError: what is wrong with config.json. The weights are checked by `initial_params`.
    """

    folder: str
    dropout: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        _ = self.model

    @functools.cached_property
    def _read(self) -> tuple[Family, Any]:
        return read_config(self.folder, dropout=self.dropout, z_loss=self.z_loss)

    @property
    def model(self) -> Any:
        """The folder's model as a value of ours."""
        return self._read[1]

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.model.vocab

    @property
    def context(self) -> int:
        """Most positions of a sequence."""
        return self.model.context

    def initial_params(self) -> dict[str, Any]:
        """Nested dict of memory-mapped array-likes in the file's type, the vocabulary not padded.

        A leaf has `shape`, `dtype` and `[index]`, which reads that part alone: made for `jax.make_array_from_callback`.
        """
        family, model = self._read
        return open_params(self.folder, family, model)

    def logical_sizes(self) -> dict[str, int]:
        """As the wrapped model's."""
        return self.model.logical_sizes()

    def build(self, rngs: Any, *, vocab_multiple: int = 1) -> Any:
        """The module, with random weights: the train step puts `initial_params` in their place."""
        return self.model.build(rngs, vocab_multiple=vocab_multiple)

    def loss(self, module: Any, batch: "Batch", context: "Context") -> "Loss":
        """As the wrapped model's."""
        return self.model.loss(module, batch, context)

    def init_cache(self, batch: int, length: int, dtype: Any) -> Any:
        """As the wrapped model's."""
        return self.model.init_cache(batch, length, dtype)
