"""Hugging Face's architectures as tables: a `Family` lists an architecture's config keys and tensor names.

In names, `theirs` refers to transformers and `ours` to jaxscale.

Sources: the files that transformers 4.57.6 and 5.23.0 write, and their `configuration_*.py` for the defaults of absent
keys. A new family is a new entry of `FAMILIES`: the fields that it fixes, the keys of the other fields, and the tensor
of each parameter. `huggingface_tensors.py` reads and writes tensors by these tables.
"""

import dataclasses
from typing import Any

from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface_config import (
    Activation,
    ConfigKey,
    ConfigPiece,
    DropoutRates,
    Labels,
    QueryScale,
    RestrictedKey,
    Rope,
    SlidingWindows,
)
from jaxscale.models.vit import ViT


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """A tensor of transformers, and our parameters that it contains.

    Args:
        theirs: name of the tensor, with `{layer}` if there is one tensor per layer.
        ours: paths of our parameters. Several parameters are joined along the last dim, with the dims in our order.
        order: permutation of the tensor's dims into our order, such as (1, 0) for torch's (out, in) matrices; `None` if
            the order is the same.
        shape: shape of the tensor with its dims in our order, if our parameter has another shape. A string names a
            field of the model; -1 is the remaining size.
    """

    theirs: str
    ours: tuple[str, ...]
    order: tuple[int, ...] | None = None
    shape: tuple[int | str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of transformers.

    Args:
        architecture: name of the architecture's class, as in `architectures` of config.json.
        model_type: name of the architecture's type, as in `model_type` of config.json.
        model_class: our dataclass for models of the architecture.
        pieces: translations of the keys of config.json.
        rules: rules for the tensors. A rule does not apply to a model that lacks its parameters (a bias, a head).
        fixed_fields: our fields that this architecture fixes to values other than the defaults.
        prefix: start of most tensor names, absent in files that were saved from the model without its head.
        ignored_endings: endings of the names of tensors that are not parameters.
        source_of_copy: for each tensor that may be a copy of another tensor (a tied head), the name of the latter.
        zero_fields: values of our fields that `save` may set, because these values add only zeros (biases of zero).
    """

    architecture: str
    model_type: str
    model_class: type
    pieces: tuple[ConfigPiece, ...]
    rules: tuple[TensorRule, ...]
    fixed_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    ignored_endings: tuple[str, ...] = ()
    source_of_copy: dict[str, str] = dataclasses.field(default_factory=dict)
    zero_fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def _weight_and_bias_rules(theirs: str, *ours: str, order: tuple[int, ...] | None = None) -> tuple[TensorRule, ...]:
    """Return the rules for the weight and the bias of a norm or of GPT-2's Conv1D, whose weight has dims (in, out)."""
    return (
        TensorRule(f"{theirs}.weight", tuple(f"{path}.weight" for path in ours), order),
        TensorRule(f"{theirs}.bias", tuple(f"{path}.bias" for path in ours)),
    )


def _linear_rules(theirs: str, ours: str) -> tuple[TensorRule, ...]:
    """Return the rules for a torch Linear: a weight (out, in) and a bias."""
    return _weight_and_bias_rules(theirs, ours, order=(1, 0))


_LLAMA_LAYER = "model.layers.{layer}."
_LLAMA_RULES = (
    TensorRule("model.embed_tokens.weight", ("embedding.weight",)),
    *_linear_rules(_LLAMA_LAYER + "self_attn.q_proj", "blocks.layers.attention.q"),
    *_linear_rules(_LLAMA_LAYER + "self_attn.k_proj", "blocks.layers.attention.k"),
    *_linear_rules(_LLAMA_LAYER + "self_attn.v_proj", "blocks.layers.attention.v"),
    *_linear_rules(_LLAMA_LAYER + "self_attn.o_proj", "blocks.layers.attention.out"),
    *_linear_rules(_LLAMA_LAYER + "mlp.gate_proj", "blocks.layers.mlp.gate"),
    *_linear_rules(_LLAMA_LAYER + "mlp.up_proj", "blocks.layers.mlp.up"),
    *_linear_rules(_LLAMA_LAYER + "mlp.down_proj", "blocks.layers.mlp.down"),
    *_weight_and_bias_rules(_LLAMA_LAYER + "input_layernorm", "blocks.layers.attention_norm"),
    *_weight_and_bias_rules("model.norm", "norm"),
    TensorRule("lm_head.weight", ("head.weight",)),
)
_SHARED_KEYS = (
    ConfigKey("vocab_size", "vocab"),
    ConfigKey("max_position_embeddings", "context"),
    ConfigKey("num_hidden_layers", "layers"),
    ConfigKey("hidden_size", "embed"),
    ConfigKey("intermediate_size", "mlp", resolved_name="mlp_width"),
    ConfigKey("num_attention_heads", "heads"),
    ConfigKey("initializer_range", "init_std", float, 0.02),
    DropoutRates(attention_keys=("attention_dropout",)),
    RestrictedKey("is_causal", (True,)),
    Rope(),
)
_LLAMA_KEYS = (*_SHARED_KEYS, ConfigKey("attention_bias", "attention_bias", bool, False))

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    model_class=Decoder,
    fixed_fields={"scaled_init": False},
    pieces=(
        *_LLAMA_KEYS,
        ConfigKey("num_key_value_heads", "kv_heads", int, None, "kv_count"),
        ConfigKey("head_dim", "head_dim", int, None, "head_width"),
        ConfigKey("rms_norm_eps", "norm_eps", float, 1e-6),
        ConfigKey("tie_word_embeddings", "tied", bool, False),
        ConfigKey("mlp_bias", "mlp_bias", bool, False),
        Activation("hidden_act", is_gated=True),
        RestrictedKey("pretraining_tp", (1,)),
    ),
    rules=(*_LLAMA_RULES, *_weight_and_bias_rules(_LLAMA_LAYER + "post_attention_layernorm", "blocks.layers.mlp_norm")),
    prefix="model.",
    ignored_endings=("rotary_emb.inv_freq",),
    source_of_copy={"lm_head.weight": "model.embed_tokens.weight"},
)

MISTRAL = dataclasses.replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    pieces=(
        *_SHARED_KEYS,
        ConfigKey("num_key_value_heads", "kv_heads", int, 8, "kv_count"),
        ConfigKey("head_dim", "head_dim", int, None, "head_width"),
        ConfigKey("rms_norm_eps", "norm_eps", float, 1e-6),
        ConfigKey("tie_word_embeddings", "tied", bool, False),
        Activation("hidden_act", is_gated=True),
        SlidingWindows(default_length=4096, is_everywhere=True),
    ),
)

QWEN2 = dataclasses.replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed_fields={"scaled_init": False, "attention_bias": "qkv"},
    pieces=(
        *_SHARED_KEYS,
        ConfigKey("num_key_value_heads", "kv_heads", int, 32, "kv_count"),
        ConfigKey("head_dim", "head_dim", int, None, "head_width"),
        ConfigKey("rms_norm_eps", "norm_eps", float, 1e-6),
        ConfigKey("tie_word_embeddings", "tied", bool, False),
        Activation("hidden_act", is_gated=True),
        SlidingWindows(),
    ),
)

QWEN3 = dataclasses.replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed_fields={"scaled_init": False, "qk_norm": True},
    pieces=(
        *_LLAMA_KEYS,
        ConfigKey("num_key_value_heads", "kv_heads", int, 32, "kv_count"),
        ConfigKey("head_dim", "head_dim", int, 128, "head_width"),
        ConfigKey("rms_norm_eps", "norm_eps", float, 1e-6),
        ConfigKey("tie_word_embeddings", "tied", bool, False),
        Activation("hidden_act", is_gated=True),
        SlidingWindows(),
    ),
    rules=(
        *_LLAMA_RULES,
        *_weight_and_bias_rules(_LLAMA_LAYER + "post_attention_layernorm", "blocks.layers.mlp_norm"),
        *_weight_and_bias_rules(_LLAMA_LAYER + "self_attn.q_norm", "blocks.layers.attention.q_norm"),
        *_weight_and_bias_rules(_LLAMA_LAYER + "self_attn.k_norm", "blocks.layers.attention.k_norm"),
    ),
)

GEMMA2 = dataclasses.replace(
    LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    fixed_fields={"scaled_init": False, "norm_plus_one": True, "post_norms": True, "embedding_scale": True},
    pieces=(
        *_LLAMA_KEYS,
        ConfigKey("num_key_value_heads", "kv_heads", int, 4, "kv_count"),
        ConfigKey("head_dim", "head_dim", int, 256, "head_width"),
        ConfigKey("rms_norm_eps", "norm_eps", float, 1e-6),
        ConfigKey("tie_word_embeddings", "tied", bool, True),
        ConfigKey("attn_logit_softcapping", "attention_soft_cap", float, 50.0, is_null_none=True),
        ConfigKey("final_logit_softcapping", "final_soft_cap", float, 30.0, is_null_none=True),
        Activation("hidden_activation", is_gated=True, older_key="hidden_act"),
        SlidingWindows(is_alternating=True, default_length=4096),
        QueryScale(),
        RestrictedKey("use_bidirectional_attention", (None, False)),
    ),
    rules=(
        *_LLAMA_RULES,
        *_weight_and_bias_rules(_LLAMA_LAYER + "post_attention_layernorm", "blocks.layers.attention_post_norm"),
        *_weight_and_bias_rules(_LLAMA_LAYER + "pre_feedforward_layernorm", "blocks.layers.mlp_norm"),
        *_weight_and_bias_rules(_LLAMA_LAYER + "post_feedforward_layernorm", "blocks.layers.mlp_post_norm"),
    ),
)

_GPT2_LAYER = "transformer.h.{layer}."
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    model_class=Decoder,
    fixed_fields={"norm": "layer", "positions": "learned", "attention_bias": True, "mlp_bias": True},
    pieces=(
        ConfigKey("vocab_size", "vocab"),
        ConfigKey("n_positions", "context"),
        ConfigKey("n_layer", "layers"),
        ConfigKey("n_embd", "embed"),
        ConfigKey("n_inner", "mlp", int, None, "mlp_width"),
        ConfigKey("n_head", "heads"),
        ConfigKey("layer_norm_epsilon", "norm_eps", float, 1e-5),
        ConfigKey("initializer_range", "init_std", float, 0.02),
        ConfigKey("tie_word_embeddings", "tied", bool, True),
        Activation("activation_function", is_gated=False, preferred_name="gelu_new"),
        DropoutRates(attention_keys=("attn_pdrop",), residual_keys=("embd_pdrop", "resid_pdrop")),
        RestrictedKey("scale_attn_weights", (True,)),
        RestrictedKey("scale_attn_by_inverse_layer_idx", (False,)),
        RestrictedKey("add_cross_attention", (False,)),
        RestrictedKey("is_causal", (True,)),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("embedding.weight",)),
        TensorRule("transformer.wpe.weight", ("positions.weight",)),
        *_weight_and_bias_rules(_GPT2_LAYER + "ln_1", "blocks.layers.attention_norm"),
        *_weight_and_bias_rules(_GPT2_LAYER + "attn.c_attn", *(f"blocks.layers.attention.{name}" for name in "qkv")),
        *_weight_and_bias_rules(_GPT2_LAYER + "attn.c_proj", "blocks.layers.attention.out"),
        *_weight_and_bias_rules(_GPT2_LAYER + "ln_2", "blocks.layers.mlp_norm"),
        *_weight_and_bias_rules(_GPT2_LAYER + "mlp.c_fc", "blocks.layers.mlp.up"),
        *_weight_and_bias_rules(_GPT2_LAYER + "mlp.c_proj", "blocks.layers.mlp.down"),
        *_weight_and_bias_rules("transformer.ln_f", "norm"),
        TensorRule("lm_head.weight", ("head.weight",)),
    ),
    prefix="transformer.",
    ignored_endings=(".attn.bias", ".attn.masked_bias"),
    source_of_copy={"lm_head.weight": "transformer.wte.weight"},
    zero_fields={"norm": "layer", "attention_bias": True, "mlp_bias": True},
)

_VIT_LAYER = "vit.encoder.layer.{layer}."
VIT = Family(
    architecture="ViTForImageClassification",
    model_type="vit",
    model_class=ViT,
    fixed_fields={"pooling": "token"},
    pieces=(
        Labels("classes"),
        ConfigKey("image_size", "image"),
        ConfigKey("patch_size", "patch"),
        ConfigKey("num_channels", "channels"),
        ConfigKey("num_hidden_layers", "layers"),
        ConfigKey("hidden_size", "embed"),
        ConfigKey("num_attention_heads", "heads"),
        ConfigKey("intermediate_size", "mlp", resolved_name="mlp_width"),
        ConfigKey("layer_norm_eps", "norm_eps", float, 1e-12),
        ConfigKey("qkv_bias", "attention_bias", bool, True),
        ConfigKey("initializer_range", "init_std", float, 0.02),
        Activation("hidden_act", is_gated=False),
        DropoutRates(attention_keys=("attention_probs_dropout_prob",), residual_keys=("hidden_dropout_prob",)),
    ),
    rules=(
        TensorRule("vit.embeddings.cls_token", ("token",), shape=(1, 1, "embed")),
        TensorRule("vit.embeddings.position_embeddings", ("positions.weight",), shape=(1, -1, "embed")),
        TensorRule(
            "vit.embeddings.patch_embeddings.projection.weight",
            ("patches.weight",),
            order=(2, 3, 1, 0),
            shape=("patch", "patch", "channels", "embed"),
        ),
        TensorRule("vit.embeddings.patch_embeddings.projection.bias", ("patches.bias",)),
        *_weight_and_bias_rules(_VIT_LAYER + "layernorm_before", "blocks.layers.attention_norm"),
        *_linear_rules(_VIT_LAYER + "attention.attention.query", "blocks.layers.attention.q"),
        *_linear_rules(_VIT_LAYER + "attention.attention.key", "blocks.layers.attention.k"),
        *_linear_rules(_VIT_LAYER + "attention.attention.value", "blocks.layers.attention.v"),
        *_linear_rules(_VIT_LAYER + "attention.output.dense", "blocks.layers.attention.out"),
        *_weight_and_bias_rules(_VIT_LAYER + "layernorm_after", "blocks.layers.mlp_norm"),
        *_linear_rules(_VIT_LAYER + "intermediate.dense", "blocks.layers.mlp.up"),
        *_linear_rules(_VIT_LAYER + "output.dense", "blocks.layers.mlp.down"),
        *_weight_and_bias_rules("vit.layernorm", "norm"),
        *_linear_rules("classifier", "head"),
    ),
    prefix="vit.",
)

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GPT2, VIT)}
