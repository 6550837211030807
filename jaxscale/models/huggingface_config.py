"""Translations between the config.json of transformers 4 and 5 and the fields of our models.

A `ConfigPiece` reads and writes some keys; a family (`huggingface_families.py`) is a list of these pieces. `theirs` is
a name in transformers, and `ours` is a name in jaxscale. A key that no piece reads may change the mathematics, so the
key is rejected by name, unless its value is empty or the key is in `HARMLESS`. The values false and 0
count as empty only for the keys in `HARMLESS_IF_OFF`.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxscale.errors import UserError, unknown
from jaxscale.models.decoder import Llama3Scaling
from jaxscale.values.limits import MAX_INT64, MAX_LAYERS
from jaxscale.values.read_files import is_folder, is_regular, parse_json, read_bytes

REQUIRED: Any = object()
"""Default that marks a key as required."""

_BOOKKEEPING = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
_BOOKKEEPING += ("auto_map", "tokenizer_class", "label2id", "problem_type", "finetuning_task", "task_specific_params")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")
_GENERATION = ("prefix", "do_sample", "max_length", "min_length", "temperature", "top_k", "top_p", "num_beams")
_GENERATION += ("repetition_penalty", "use_cache", "cache_implementation", "keys_to_ignore_at_inference")
_RUNTIME = ("return_dict", "output_hidden_states", "output_attentions", "torchscript", "chunk_size_feed_forward")
_RUNTIME += ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "gradient_checkpointing")
_RUNTIME += ("transformers.js_config", "unsloth_version", "unsloth_fixed", "is_llama_config")
_GPT2 = ("n_ctx", "reorder_and_upcast_attn", "initializer_factor", "summary_activation", "summary_first_dropout")
_GPT2 += ("summary_proj_to_labels", "summary_type", "summary_use_proj")
_VIT = ("encoder_stride", "pooler_act", "pooler_output_size")
HARMLESS = frozenset((*_BOOKKEEPING, *_TOKENS, *_GENERATION, *_RUNTIME, *_GPT2, *_VIT))
"""Keys that do not affect the outputs of the network."""

HARMLESS_IF_OFF = frozenset(
    (
        *("is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "add_cross_attention", "tf_legacy_loss"),
        *("use_bfloat16", "output_scores", "return_dict_in_generate", "remove_invalid_values", "early_stopping"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty", "num_beam_groups"),
        *("rope_interleaved", "is_composition", "use_mrope", "use_sliding_window", "mlp_bias", "attention_bias"),
        *("embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout", "layerdrop"),
    )
)
"""Keys that do not affect the outputs of the network if their value is false or 0."""

ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
"""Fields of `Llama3Scaling` by their keys in transformers."""

ACTIVATIONS = {
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
    "quick_gelu": ("quick_gelu", "no gated form"),
    "gelu_pytorch_tanh": ("gelu_tanh", "geglu_tanh"),
    "gelu_new": ("gelu_tanh", "geglu_tanh"),
    "gelu": ("gelu", "geglu"),
    "relu": ("relu", "reglu"),
}
"""Our `mlp_kind` of a plain and of a gated feed-forward layer, by the name of the activation in transformers."""


_TYPES_AND_NOUNS: dict[type, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    list: (list, "a list"),
    dict: (dict, "a JSON object"),
}
"""For each type that `ConfigFile.convert` returns, the types that it accepts and the noun for them in messages."""


class ConfigFile:
    """A config.json that records which of its keys were read.

    Args:
        path: path of the file, for messages.
        values: values of the file by key.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values
        self.read_keys: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> "ConfigFile":
        """Read the config.json of `folder`.

        Raises:
            UserError: the folder or file is missing, or the file does not contain a JSON object.
        """
        path = folder / "config.json"
        if not is_folder(folder):
            raise UserError(f"{folder}: no such folder; expected one that holds config.json and model.safetensors")
        if not is_regular(path):
            raise UserError(f"{path}: no such file; expected the config.json that transformers saves with the weights")
        try:
            values = parse_json(read_bytes(path), "the file")
        except UserError as error:
            raise UserError(f"{path}: expected JSON, got invalid JSON ({error}); copy the file again") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected a JSON object, got {type(values).__name__}; copy the file again")
        return cls(path, values)

    def error(self, key: str, expected: str) -> UserError:
        """Return the error for a key whose value is not as expected."""
        return UserError(f"{self.path}: {key}: got {self.values.get(key)!r:.200}, expected {expected}")

    def get(self, key: str, default: Any = REQUIRED, kind: type | None = None) -> Any:
        """Return the value of `key`, converted to `kind` if that is given; `default` if the key is null or absent."""
        self.read_keys.add(key)
        value = self.values.get(key)
        if value is not None:
            return value if kind is None else self.convert(key, value, kind)
        if default is REQUIRED:
            raise UserError(f"{self.path}: {key} is missing; copy the file again")
        return default

    def convert(self, key: str, value: Any, kind: type) -> Any:
        """Return `value`, the value of `key`, converted to the type `kind`; raise UserError if its type is wrong."""
        accepted_types, expected_noun = _TYPES_AND_NOUNS[kind]
        if not isinstance(value, accepted_types) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, expected_noun)
        if kind in (int, float) and isinstance(value, int) and abs(value) > MAX_INT64:
            raise self.error(key, f"{expected_noun} of at most {MAX_INT64:,}")
        return kind(value)

    def check_unread_keys(self) -> None:
        """Raise UserError for a key that no piece has read, unless its value is empty or the key is harmless."""
        for key, value in self.values.items():
            is_off = value in (False, 0) and key in HARMLESS_IF_OFF
            is_harmless = is_off or key in self.read_keys | HARMLESS or value in (None, "", [], {})
            if not is_harmless:
                raise UserError(
                    f"{self.path}: {key}: {value!r:.200} is not supported, and may change the outputs of the model. "
                    "Remove the key if it does not"
                )


@runtime_checkable
class ConfigPiece(Protocol):
    """Some keys of a config.json, and the equivalent fields of our models."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our fields by name, with the values that the file specifies."""
        ...

    def write(self, model: Any) -> dict[str, Any]:
        """Return their keys and values for a model; if these cannot express it, `read` returns a different model."""
        ...


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """A key whose value is the value of one of our fields.

    Args:
        theirs: name of the key.
        ours: name of our field.
        kind: type of the value.
        default: value if the key is absent or null, as in transformers.
        resolved_name: for a field that may be `None`, the property of the model that is written instead.
        is_null_none: whether null in the file means `None`, and not the default.
    """

    theirs: str
    ours: str
    kind: type = int
    default: Any = REQUIRED
    resolved_name: str | None = None
    is_null_none: bool = False

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our field and its value."""
        default = None if self.is_null_none and self.theirs in file.values else self.default
        return {self.ours: file.get(self.theirs, default, self.kind)}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their key and its value."""
        return {self.theirs: getattr(model, self.resolved_name or self.ours)}


@dataclasses.dataclass(frozen=True)
class RestrictedKey:
    """A key that does not determine a field. It must have one of the supported `values`; the first is the default."""

    theirs: str
    values: tuple[Any, ...]

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return no fields, or raise UserError if the value is not supported."""
        if file.get(self.theirs, self.values[0]) not in self.values:
            raise file.error(self.theirs, f"{' or '.join(map(repr, self.values))}: nothing else is supported")
        return {}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their key with the first value."""
        return {self.theirs: self.values[0]}


@dataclasses.dataclass(frozen=True)
class Activation:
    """The activation of the feed-forward layers.

    Args:
        theirs: name of the key.
        is_gated: whether the feed-forward layers of this architecture are gated.
        preferred_name: activation name to write if several names mean the same activation.
        older_key: name of the key in older files, which lack `theirs`.
    """

    theirs: str
    is_gated: bool
    preferred_name: str = "gelu_pytorch_tanh"
    older_key: str | None = None

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our field `mlp_kind` and its value."""
        older_name = file.get(self.older_key, None) if self.older_key else None
        name = file.get(self.theirs, REQUIRED if older_name is None else older_name)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UserError(f"{file.path}: {self.theirs}: {unknown('activation', str(name), ACTIVATIONS)}")
        return {"mlp_kind": ACTIVATIONS[name][self.is_gated]}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their key and its value: the activation's name, or `None` if transformers has no such activation."""
        names = [name for name, kinds in ACTIVATIONS.items() if kinds[self.is_gated] == model.mlp_kind]
        return {self.theirs: self.preferred_name if self.preferred_name in names else names[0] if names else None}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary frequencies: `rope_parameters` in transformers 5, `rope_theta` and `rope_scaling` in transformers 4."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our fields `rotary_base` and `rotary_scaling`."""
        rope_parameters, rope_scaling = (
            file.get(source_key, None, dict) for source_key in ("rope_parameters", "rope_scaling")
        )
        default_base = file.get("rope_theta", 10_000.0, float)
        source_key = "rope_parameters" if rope_parameters else "rope_scaling"
        rope_settings = dict(rope_parameters or rope_scaling or {})
        rope_base = rope_settings.pop("rope_theta", default_base)
        rope_type = rope_settings.pop("rope_type", rope_settings.pop("type", "default"))
        rope_settings.pop("type", None)
        if isinstance(rope_type, dict) or any(isinstance(value, dict) for value in rope_settings.values()):
            raise file.error(
                source_key,
                "the same frequencies for all layers: frequencies that depend on the kind of layer are not supported",
            )
        if rope_type not in ("default", "llama3"):
            raise file.error(
                source_key, f"rope_type default or llama3, got {rope_type!r}: other types are not supported"
            )
        if rope_settings.pop("partial_rotary_factor", 1.0) != 1.0:
            raise file.error(source_key, "partial_rotary_factor 1.0: rotating a part of each head is not supported")
        if rope_type == "default":
            rope_settings.pop("factor", None)
        expected_keys = set(ROPE_KEYS) if rope_type == "llama3" else set()
        rope_numbers = [rope_base, *rope_settings.values()]
        if not all(
            isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= MAX_INT64
            for number in rope_numbers
        ):
            raise file.error(source_key, "a number for each of rope_theta, " + ", ".join(ROPE_KEYS))
        if set(rope_settings) != expected_keys:
            key_text = ", ".join(sorted(expected_keys)) or "(none)"
            raise file.error(source_key, f"the keys {key_text} for rope_type {rope_type}, got {sorted(rope_settings)}")
        llama3_fields = {ROPE_KEYS[key]: number for key, number in rope_settings.items()}
        llama3_scaling = Llama3Scaling(**llama3_fields) if rope_settings else None
        return {"rotary_base": float(rope_base), "rotary_scaling": llama3_scaling}

    def write(self, model: Any) -> dict[str, Any]:
        """Return the keys of transformers 4 and of transformers 5, so that either version can read the file."""
        llama3_scaling = model.rotary_scaling
        rope_scaling = None
        if llama3_scaling is not None:
            rope_scaling = {"rope_type": "llama3"} | {
                theirs: getattr(llama3_scaling, ours) for theirs, ours in ROPE_KEYS.items()
            }
        base_entry = {"rope_theta": model.rotary_base}
        rope_parameters = (rope_scaling or {"rope_type": "default"}) | base_entry
        return {"rope_parameters": rope_parameters, "rope_scaling": rope_scaling} | base_entry


@dataclasses.dataclass(frozen=True)
class SlidingWindows:
    """The layers with a sliding window, as `layer_types` lists them or as older files imply them.

    Args:
        is_alternating: whether older files imply a window in every other layer, starting with the first (Gemma-2).
        default_length: length of the window in positions if the file does not specify it.
        is_everywhere: whether all layers have the file's window, or no window if its length is null (Mistral).
    """

    is_alternating: bool = False
    default_length: int | None = None
    is_everywhere: bool = False

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our field `windows`, as the shortest tuple that repeats over the layers."""
        layer_count = file.get("num_hidden_layers", kind=int)
        if not 1 <= layer_count <= MAX_LAYERS:
            raise file.error("num_hidden_layers", f"a whole number from 1 to {MAX_LAYERS:,}")
        default_length = None if self.is_everywhere and "sliding_window" in file.values else self.default_length
        window_length = file.get("sliding_window", default_length, int)
        if self.is_everywhere:
            return {"windows": (window_length,)}
        uses_windows = file.get("use_sliding_window", self.is_alternating, bool)
        first_window_layer = file.get("max_window_layers", 0, int)
        if self.is_alternating:
            window_flags = [layer % 2 == 0 for layer in range(layer_count)]
        else:
            window_flags = [uses_windows and layer >= first_window_layer for layer in range(layer_count)]
        default_layer_types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in window_flags]
        layer_types = file.get("layer_types", default_layer_types, list)
        if len(layer_types) != layer_count or not all(
            layer_type in ("full_attention", "sliding_attention") for layer_type in layer_types
        ):
            raise file.error("layer_types", f"full_attention or sliding_attention for each of the {layer_count} layers")
        if "sliding_attention" in layer_types and not isinstance(window_length, int):
            raise file.error("sliding_window", "a number of positions: layer_types has sliding_attention")
        return {
            "windows": shortest_pattern(
                tuple(window_length if layer_type == "sliding_attention" else None for layer_type in layer_types)
            )
        }

    def write(self, model: Any) -> dict[str, Any]:
        """Return `layer_types`, the length of the sliding window, and the keys of older files."""
        windows = [model.windows[layer % len(model.windows)] for layer in range(model.layers)]
        window_length = next((window for window in windows if window is not None), None)
        if self.is_everywhere:
            return {"sliding_window": window_length}
        layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        config_entries = {"layer_types": layer_types, "sliding_window": window_length}
        if not self.is_alternating:
            config_entries |= {"use_sliding_window": window_length is not None, "max_window_layers": model.layers}
        return config_entries


def shortest_pattern(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shortest tuple whose repetition gives `values`.

    Example:
        >>> shortest_pattern((6, None, 6, None)), shortest_pattern((None, None, 4))
        ((6, None), (None, None, 4))
    """
    pattern_lengths = (
        pattern_length for pattern_length in range(1, len(values) + 1) if len(values) % pattern_length == 0
    )
    return next(
        values[:pattern_length]
        for pattern_length in pattern_lengths
        if values[:pattern_length] * (len(values) // pattern_length) == values
    )


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Gemma-2's `query_pre_attn_scalar`: scores are divided by its square root."""

    default: float = 256.0  # transformers, configuration_gemma2.py

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our field `attention_scale`."""
        scalar = file.get("query_pre_attn_scalar", self.default, float)
        if not 0 < scalar <= MAX_INT64:
            raise file.error("query_pre_attn_scalar", f"a number > 0, at most {MAX_INT64:,}")
        return {"attention_scale": scalar**-0.5}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their key and its value, rounded if it is a whole number up to rounding errors."""
        scalar = model.head_width if model.attention_scale is None else model.attention_scale**-2
        nearest_integer = round(scalar)
        return {
            "query_pre_attn_scalar": nearest_integer if math.isclose(scalar, nearest_integer, rel_tol=1e-9) else scalar
        }


@dataclasses.dataclass(frozen=True)
class DropoutRates:
    """Rates of dropout. `read` ignores the rates of the file, because `Pretrained.dropout` sets the rate instead.

    Args:
        attention_keys: keys of the dropout rate of attention weights; our models never drop attention weights.
        residual_keys: keys of the dropout rates after the embedding and the layers, where our models also drop values.
    """

    attention_keys: tuple[str, ...]
    residual_keys: tuple[str, ...] = ()

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return no fields, and mark the keys as read."""
        file.read_keys.update(self.attention_keys, self.residual_keys)
        return {}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their keys and rates."""
        return dict.fromkeys(self.attention_keys, 0.0) | dict.fromkeys(self.residual_keys, model.dropout)


@dataclasses.dataclass(frozen=True)
class Labels:
    """The number of classes, which is the number of entries of `id2label`; the names of the classes are not kept."""

    ours: str

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """Return our field and the number of classes."""
        return {self.ours: len(file.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"}, dict))}

    def write(self, model: Any) -> dict[str, Any]:
        """Return their keys, with the names LABEL_0, LABEL_1, ... for the classes."""
        label_names = [f"LABEL_{index}" for index in range(getattr(model, self.ours))]
        return {"id2label": {str(index): name for index, name in enumerate(label_names)}} | {
            "label2id": {name: index for index, name in enumerate(label_names)}
        }
