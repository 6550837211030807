"""Read and write model folders of Hugging Face's transformers, and continue training from them.

`huggingface_config.py` reads config.json, and `safetensors_folder.py` reads the weights. `huggingface_tensors.py`
matches the tensors of a folder with the parameters of our models, by the tables of `huggingface_families.py`. Left out:
pickled weights, quantized weights, architectures without a table.
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.models import safetensors_folder
from jaxscale.models.huggingface_config import ConfigFile
from jaxscale.models.huggingface_families import FAMILIES, Family
from jaxscale.models.huggingface_tensors import flat_leaves, nested_dict, open_params, their_tensors
from jaxscale.values import check_types
from jaxscale.values.read_files import is_regular
from jaxscale.values.short_repr import short_repr

if TYPE_CHECKING:
    from jaxscale.blocks import Context, Loss
    from jaxscale.typing import Batch

TRAINING_ONLY = ("dropout", "z_loss", "init_std", "scaled_init", "smoothing")
"""Fields that do not affect the outputs of a trained model; a config.json may lack or contradict their values."""
WRITABLE_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}
"""Types that `save` can write, by name."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json with the ids of special tokens."""
SHARD_BYTES = 5_000_000_000
"""Largest size in bytes of a file that `save` writes: the default of transformers."""


def read_config(folder: str | Path, **settings: Any) -> tuple[Family, Any]:
    """Read a folder's config.json, and return the pair (family of the model, model value).

    Args:
        folder: folder that contains a config.json of transformers 4 or 5.
        settings: values of fields that the file does not determine (dropout, z_loss); the value of a field that the
            model lacks must be 0.

    Raises:
        UserError: a file is missing, the architecture is unknown, or a value is wrong or not supported.
    """
    config_file = ConfigFile.open(Path(folder))
    architectures = config_file.values.get("architectures") or []
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise config_file.error("architectures", "a list of names of architectures")
    families = [FAMILIES[name] for name in architectures if name in FAMILIES]
    if not architectures:
        families = [family for family in FAMILIES.values() if family.model_type == config_file.values.get("model_type")]
    if not families:
        model_type = config_file.values.get("model_type", "(none)")
        architecture = str((list(architectures) or [model_type])[0])
        # a model of another type computes another function, so its name is not a misspelling of ours
        same_type_names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
        raise UserError(
            f"{config_file.path}: unknown architecture {architecture!r}: expected one of {', '.join(sorted(FAMILIES))}"
            f"{near_miss(architecture, same_type_names)}"
        )
    family = families[0]
    if config_file.values.get("quantization_config"):
        raise UserError(
            f"{config_file.path}: quantization_config: quantized weights are not supported; save them dequantized"
        )
    try:
        return family, _read_model(family, config_file, settings)
    except UserError as error:
        if str(config_file.path) in str(error):
            raise
        raise UserError(f"{config_file.path}: {error}") from error


def _read_model(family: Family, config_file: ConfigFile, settings: Mapping[str, Any]) -> Any:
    """Return the model value that a config.json describes, with its fields replaced by `settings`."""
    value_by_field: dict[str, Any] = dict(family.fixed_fields)
    for piece in family.pieces:
        value_by_field |= piece.read(config_file)
    config_file.check_unread_keys()
    field_names = {field.name for field in dataclasses.fields(family.model_class)}
    for name, value in settings.items():
        if name in field_names:
            value_by_field[name] = value
        elif value:
            raise UserError(f"{name}: got {value!r}, but {family.architecture} has no such field; leave it out")
    return family.model_class(**value_by_field)


def is_model_folder(folder: Any) -> bool:
    """Return whether a path is a folder with a config.json of transformers, and is not the folder of a run."""
    if not isinstance(folder, str | os.PathLike) or "://" in os.fspath(folder):
        return False
    return is_regular(Path(folder) / "config.json") and not is_regular(Path(folder) / "experiment.json")


def special_token_ids(folder: str | Path) -> dict[str, Any]:
    """Return the ids of special tokens in a folder's config.json, by key; `{}` if the folder is not a model folder.

    Example:
        >>> special_token_ids("no/such/folder")
        {}
    """
    if not is_model_folder(folder):
        return {}
    value_by_key = ConfigFile.open(Path(folder)).values
    return {key: value_by_key[key] for key in SPECIAL_IDS if value_by_key.get(key) is not None}


def load(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """Read a model and its parameters from a folder that transformers saved.

    Args:
        folder: folder that contains config.json and safetensors, in one file or sharded, in any floating-point type.

    Returns:
        The model value, and the parameters as a nested dict of numpy arrays. The arrays have the types of the files and
        the names of the module's parameters.

    Raises:
        UserError: the folder is invalid; the message names the file, field or tensor.
    """
    family, model = read_config(folder)
    leaf_by_path = dict(flat_leaves(open_params(folder, family, model)))
    return model, nested_dict({path: np.array(leaf) for path, leaf in leaf_by_path.items()})


def load_module(folder: str | Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Load a folder that transformers saved, and return a Flax NNX module, for code that uses no experiment.

    Args:
        folder: folder that contains config.json and safetensors, in one file or sharded, in any floating-point type.
        dtype: type of the module's parameters, "float32", "bfloat16" or "float16".

    Returns:
        The model value (a `Decoder` or `ViT`), and its module with the folder's weights on the default device. The
        module of a `Decoder` maps int32 tokens [B, T] to logits [B, T, V]. The module of a `ViT` maps images to logits.

    Raises:
        UserError: the folder is invalid; the message names the file, field or tensor.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxscale.models import Decoder
        >>> model = Decoder(vocab=32, context=8, layers=1, heads=1, embed=8)
        >>> folder = tempfile.mkdtemp()
        >>> save_module(folder, model, model.build(nnx.Rngs(0)))
        >>> loaded_model, module = load_module(folder)
        >>> module(jnp.zeros((1, 4), jnp.int32)).shape
        (1, 4, 32)
    """
    import jax.numpy as jnp
    from flax import nnx

    if dtype not in WRITABLE_DTYPES:
        raise unknown("dtype", dtype, WRITABLE_DTYPES)
    family, model = read_config(folder)
    graphdef, abstract_state = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    paths_and_leaves = flat_leaves(open_params(folder, family, model))
    array_by_path = {path: jnp.asarray(np.asarray(leaf), WRITABLE_DTYPES[dtype]) for path, leaf in paths_and_leaves}
    nnx.replace_by_pure_dict(abstract_state, nested_dict(array_by_path))
    return model, nnx.merge(graphdef, abstract_state)


def save_module(
    folder: str | Path,
    model: Any,
    module: Any,
    dtype: str = "float32",
    *,
    tokenizer: str | Path | None = None,
    token_ids: Mapping[str, Any] = {},
) -> None:
    """Write a module as a folder that transformers loads: config.json, safetensors, and a tokenizer if one is given.

    Args:
        folder: folder to write, created if needed; it must not contain a model.
        model: model value of the module, a `Decoder` or `ViT`.
        module: the module that `model.build` or `load_module` returned.
        dtype: type of the weights to write, "float32", "bfloat16" or "float16".
        tokenizer: path of a tokenizer.json to copy into the folder.
        token_ids: ids of special tokens for config.json, such as `{"eos_token_id": 2}`.

    Raises:
        UserError: no known architecture can express the model, `module` is not a module of this model, or the folder
            already contains a model.
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        raise UserError(
            f"save_module: got {type(module).__name__}, expected the module that model.build or load_module returned"
        )
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    expected_shapes = _shape_by_path(
        nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param))
    )
    if (given_shapes := _shape_by_path(params)) != expected_shapes:
        names = sorted(
            name for name in {*given_shapes, *expected_shapes} if given_shapes.get(name) != expected_shapes.get(name)
        )
        raise UserError(
            f"save_module: the module is not one of this {type(model).__name__}: {', '.join(names[:5])} differ; give "
            "the model value that built it"
        )
    save(folder, model, params, dtype, tokenizer=tokenizer, token_ids=token_ids)


def _shape_by_path(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return a dict from the path of each parameter to its shape."""
    return {path: tuple(leaf.shape) for path, leaf in flat_leaves(params)}


def _comparable_values(model: Any) -> dict[str, Any]:
    """Return the fields of a model that determine its outputs, with `None` replaced by the value that it implies."""
    value_by_field = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.name not in TRAINING_ONLY
    }
    property_by_field = {"kv_heads": "kv_count", "head_dim": "head_width", "mlp": "mlp_width"}
    value_by_field |= {
        field_name: getattr(model, property_name)
        for field_name, property_name in property_by_field.items()
        if hasattr(model, property_name)
    }
    if "windows" in value_by_field:
        window_pattern, layer_count = value_by_field["windows"], value_by_field["layers"]
        value_by_field["windows"] = tuple(window_pattern[layer % len(window_pattern)] for layer in range(layer_count))
        value_by_field["attention_scale"] = round(
            value_by_field["attention_scale"] or value_by_field["head_dim"] ** -0.5, 12
        )
    return value_by_field


def describe(model: Any) -> tuple[Family, dict[str, Any], Any]:
    """Return the family of a model, the entries of its config.json, and the model that this config.json describes.

    Raises:
        UserError: no family can express this model; the message names the nearest family and the fields that this
            family lacks.
    """
    lacking_fields_by_architecture: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if not isinstance(model, family.model_class):
            continue
        config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
        config |= dict.fromkeys(SPECIAL_IDS)  # otherwise transformers uses its default ids
        for piece in family.pieces:
            config |= piece.write(model)
        model_values = _comparable_values(model)
        try:
            config_model = _read_model(family, ConfigFile(Path("config.json"), config), {})
        except UserError:
            continue
        config_values = _comparable_values(config_model)
        lacking_fields_by_architecture[family.architecture] = [
            name
            for name in model_values
            if config_values[name] != model_values[name]
            and config_values[name] != family.zero_fields.get(name, model_values[name])
        ]
        if not lacking_fields_by_architecture[family.architecture]:
            return family, config, config_model
    if not lacking_fields_by_architecture:
        raise UserError(
            f"model: got {type(model).__name__}, expected a model of one of these architectures: {', '.join(FAMILIES)}"
        )
    nearest_architecture = min(
        lacking_fields_by_architecture, key=lambda name: len(lacking_fields_by_architecture[name])
    )
    lacking_text = ", ".join(
        f"{name}={getattr(model, name)!r}" for name in lacking_fields_by_architecture[nearest_architecture]
    )
    raise UserError(
        f"no known architecture of transformers fits this model; the nearest, {nearest_architecture}, lacks "
        f"{lacking_text}"
    )


def save(
    folder: str | Path,
    model: Any,
    params: Mapping[str, Any],
    dtype: str = "float32",
    *,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    token_ids: Mapping[str, Any] = {},
) -> None:
    """Write a folder that transformers can load: config.json, safetensors, and the tokenizer if one is given.

    Args:
        folder: folder to write, created if needed; it must not contain a model.
        model: model value, such as a `Decoder`.
        params: parameters of the model, as `load` returns them, or as a flat dict by path with one array per layer
            ("blocks.layers.0.mlp.up.weight"). The vocabulary may be padded.
        dtype: type of the weights to write, "float32", "bfloat16" or "float16".
        tokenizer: path of a tokenizer.json to copy into the folder.
        shard_bytes: largest number of bytes of one file.
        token_ids: ids of special tokens for config.json, such as `{"eos_token_id": 2}`.

    Raises:
        UserError: no known architecture can express the model, or the folder already contains a model.
    """
    if dtype not in WRITABLE_DTYPES:
        raise unknown("dtype", dtype, WRITABLE_DTYPES)
    family, config, config_model = describe(model)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder} is not a folder; give a new folder") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}; give another folder") from None
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: already contains a model; give a new folder")
    tensors = their_tensors(family, config_model, params, WRITABLE_DTYPES[dtype])
    safetensors_folder.write(folder, tensors, shard_bytes=shard_bytes)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    config |= token_ids
    config |= {"dtype": dtype, "torch_dtype": dtype}  # the keys of transformers 5 and 4
    with safetensors_folder.write_complete(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """The model of a folder that transformers saved, to be trained further.

    Training starts from `initial_params` instead of random parameters. All other attributes (`vocab`, `init_cache`,
    `accuracy`) come from the wrapped `model`.

    Args:
        folder: folder that contains config.json and safetensors; stored as an absolute path.
        dropout: dropout rate to train with, as in `Decoder` and `ViT`; the rates in the file are ignored.
        z_loss: weight of the z-loss, as in `Decoder`.

    Raises:
        UserError: config.json is invalid. `initial_params` checks the weights.
    """

    folder: str | Path = dataclasses.field(metadata={"place": "name"})
    dropout: float = 0.0
    z_loss: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "folder", os.path.abspath(os.path.expanduser(self.folder)))
        _ = self.model  # raises if config.json is invalid

    @functools.cached_property
    def _family_and_model(self) -> tuple[Family, Any]:
        """The family of the folder's model, and the model value."""
        return read_config(self.folder, dropout=self.dropout, z_loss=self.z_loss)

    @property
    def model(self) -> Any:
        """The folder's model value."""
        return self._family_and_model[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.__dataclass_fields__:  # the instance may not have its fields yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.model, name)

    def initial_params(self) -> dict[str, Any]:
        """Return a nested dict of memory-mapped array-likes in the file's type, without padding of the vocabulary.

        A leaf can be passed to `jax.make_array_from_callback`: the leaf has a `shape` and a `dtype`, and `leaf[index]`
        reads only the elements at this index.
        """
        family, model = self._family_and_model
        return open_params(self.folder, family, model)

    def logical_sizes(self) -> dict[str, int]:
        """Return the size of each logical axis of the wrapped model."""
        return self.model.logical_sizes()

    def build(self, rngs: Any, *, vocab_multiple: int = 1) -> Any:
        """Build the module with random weights, which the train step replaces by `initial_params`."""
        return self.model.build(rngs, vocab_multiple=vocab_multiple)

    def loss(self, module: Any, batch: "Batch", context: "Context") -> "Loss":
        """Return the loss of the wrapped model."""
        return self.model.loss(module, batch, context)
