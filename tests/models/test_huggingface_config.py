"""config.json of transformers 4 and 5 as models of ours and back; what is refused, and how."""

import dataclasses
import json
import shutil

import jax
import pytest
from flax import nnx

from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder, Llama3Scaling
from jaxscale.models.huggingface import describe, read_config
from jaxscale.models.huggingface_config import shortest_pattern
from tests.models.goldens import DECODERS, GOLDEN, golden


def write(folder, config, **changes):
    """A config.json like that of a golden, changed; `...` takes a key out."""
    values = json.loads((GOLDEN / config).read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


@pytest.mark.parametrize("name", DECODERS)
def test_transformers_4_and_5_say_the_same(tmp_path, name):
    family, model = read_config(GOLDEN / name)
    shutil.copy(GOLDEN / name / "config_v4.json", tmp_path / "config.json")
    assert read_config(tmp_path) == (family, model)
    assert model.parameters == golden(name)[1]["train"]["param_count"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("version", [4, 5])
def test_what_is_written_can_be_read_as_either_version(tmp_path, name, version):
    family, model = read_config(GOLDEN / name)
    found, config, back = describe(model)
    assert (found, back) == (
        family,
        dataclasses.replace(model, kv_heads=model.kv_count, head_dim=model.head_width) if model.kv_heads else model,
    )
    dropped = {4: ("rope_parameters", "dtype"), 5: ("rope_theta", "rope_scaling", "torch_dtype")}[version]
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in dropped})
    )
    assert read_config(tmp_path)[1] == model


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"sliding_window": 6}, {"windows": (6,)}),
        ({"sliding_window": None}, {}),
        ({}, {"windows": (4096,)}),
        ({"num_key_value_heads": ..., "num_attention_heads": 8, "head_dim": ...}, {"kv_heads": 8, "heads": 8}),
    ],
)
def test_mistral_is_llama_with_a_window_in_every_layer(tmp_path, changes, fields):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "pretraining_tp": ..., "mlp_bias": ...}
    model = read_config(write(tmp_path, "llama/config.json", **mistral, **changes))[1]
    expected = dataclasses.replace(read_config(GOLDEN / "llama")[1], windows=(4096,) if changes else (None,))
    if "sliding_window" in changes:
        expected = dataclasses.replace(expected, windows=(None,))
    assert dataclasses.replace(model, head_dim=None) == dataclasses.replace(expected, head_dim=None, **fields)
    if model.windows != (None,):  # without a window, the file of a Llama is the same model
        assert describe(model)[0].architecture == "MistralForCausalLM"
        assert describe(model)[1]["sliding_window"] == model.windows[0]


def test_qwen2_has_biases_of_queries_keys_and_values_alone(tmp_path):
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    dropped = dict.fromkeys(("pretraining_tp", "mlp_bias", "attention_bias"), ...)
    family, model = read_config(write(tmp_path, "llama/config.json", **changes, **dropped))
    assert (model.attention_bias, model.head_dim) == ("qkv", 16)
    assert describe(model)[0] == family
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    layer = "blocks/layers/attention"
    assert {f"{layer}/q/bias", f"{layer}/k/bias", f"{layer}/v/bias"} <= names
    assert f"{layer}/out/bias" not in names
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))]
    assert model.parameters == sum(sizes)


def test_fields_of_each_family():
    """What each architecture is, from its paper and transformers' modeling file, not from the tables."""
    assert read_config(GOLDEN / "gemma2")[1] == Decoder(
        vocab=256,
        context=64,
        layers=2,
        embed=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=128,
        norm_plus_one=True,
        norm_eps=1e-6,
        post_norms=True,
        mlp_kind="geglu_tanh",
        tied=True,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
        windows=(6, None),
        embedding_scale=True,
        attention_scale=0.25,
        scaled_init=False,
    )
    assert read_config(GOLDEN / "gpt2")[1] == Decoder(
        vocab=256,
        context=64,
        layers=2,
        embed=64,
        heads=4,
        mlp=128,
        norm="layer",
        mlp_kind="gelu_tanh",
        positions="learned",
        tied=True,
        attention_bias=True,
        mlp_bias=True,
    )
    assert read_config(GOLDEN / "llama31_rope_tied")[1] == Decoder(
        vocab=256,
        context=64,
        layers=2,
        embed=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=128,
        tied=True,
        rotary_base=500_000.0,
        rotary_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16),
        scaled_init=False,
    )
    assert read_config(GOLDEN / "qwen3")[1] == Decoder(
        vocab=256,
        context=64,
        layers=2,
        embed=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=128,
        norm_eps=1e-6,
        tied=True,
        qk_norm=True,
        scaled_init=False,
    )


def test_defaults_of_absent_keys_are_those_of_transformers(tmp_path):
    model = read_config(
        write(tmp_path, "llama/config_v4.json", num_key_value_heads=..., head_dim=None, rope_theta=...)
    )[1]
    assert (model.kv_count, model.head_width, model.rotary_base) == (4, 16, 10_000.0)
    model = read_config(write(tmp_path, "gpt2/config_v4.json", n_inner=None))[1]
    assert (model.mlp_width, model.tied) == (256, True)
    older = write(
        tmp_path, "gemma2/config_v4.json", layer_types=..., hidden_activation=..., hidden_act="gelu_pytorch_tanh"
    )
    assert read_config(older)[1].windows == (6, None)
    uncapped = write(tmp_path, "gemma2/config.json", final_logit_softcapping=None, attn_logit_softcapping=...)
    assert (read_config(uncapped)[1].final_soft_cap, read_config(uncapped)[1].attention_soft_cap) == (None, 50.0)


def test_qwen3_windows_by_the_rule_of_older_files(tmp_path):
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": ...}
    assert read_config(write(tmp_path, "qwen3/config.json", **changes))[1].windows == (None, 8)
    assert read_config(write(tmp_path, "qwen3/config.json", **changes | {"use_sliding_window": False}))[1].windows == (
        None,
    )


def test_patterns():
    assert shortest_pattern((1, None, 1, None)) == (1, None)
    assert shortest_pattern((None,) * 6) == (None,)
    assert shortest_pattern((1, None, 1)) == (1, None, 1)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["LlamaForCausaLM"]},
            "unknown architecture 'LlamaForCausaLM'.*did you mean 'LlamaForCausalLM'",
        ),
        (
            "llama",
            {"architectures": ["MambaForCausalLM"]},
            "unknown architecture 'MambaForCausalLM': expected one of .*GPT2",
        ),
        (
            "llama",
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            "unknown architecture 'MixtralForCausalLM': expected one of [^;]*$",
        ),
        ("llama", {"is_causal": False}, "is_causal: got False, expected True: nothing else is supported"),
        ("gpt2", {"is_causal": False}, "is_causal: got False, expected True"),
        ("llama", {"use_parallel_residual": False}, "use_parallel_residual: False is not supported"),
        ("llama", {"logit_offset": 0}, "logit_offset: 0 is not supported"),
        ("llama", {"architectures": ..., "model_type": ...}, r"unknown architecture '\(none\)'"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size: got '64', expected a whole number"),
        ("llama", {"hidden_size": -64}, "embed: got -64"),
        ("llama", {"num_attention_heads": 3}, "kv_heads: got 2, expected a divisor of heads 3"),
        ("llama", {"hidden_act": "selu"}, "hidden_act: unknown activation 'selu'.*did you mean 'silu'"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: got 1, expected true or false"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps: got True, expected a number"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp: got 2, expected 1: nothing else is supported"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier: 0.5 is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters: .*got 'yarn': other types",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
            "the keys factor, high_freq_factor, low_freq",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotating a part of each head is not supported"),
        (
            "llama",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
            "the same frequencies for all layers",
        ),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_parameters: .*a number for each of rope_theta"),
        ("llama", {"rope_parameters": [10000.0]}, "rope_parameters: got .*expected a JSON object"),
        (
            "gemma2",
            {"layer_types": ["sliding_attention", "chunked_attention"]},
            "layer_types: .*expected full_attention or",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: .*for each of the 2 layers"),
        ("gemma2", {"layer_types": 3}, "layer_types: got 3, expected a list"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar: got -1, expected a number > 0"),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: got True, expected None or False",
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2},
            "sliding_window: got None, expected a number of positions",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: got True, expected False",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: got True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, config, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read_config(write(tmp_path, f"{config}/config.json", **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_dropout_is_the_callers_choice(tmp_path):
    write(tmp_path, "gpt2/config.json", attn_pdrop=0.2, resid_pdrop=0.1)
    assert read_config(tmp_path)[1].dropout == 0.0
    model = read_config(tmp_path, dropout=0.3)[1]
    assert model.dropout == 0.3
    written = describe(model)[1]
    assert (written["resid_pdrop"], written["embd_pdrop"], written["attn_pdrop"]) == (0.3, 0.3, 0.0)


def test_no_folder_no_file_no_json(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    for text, message in [("{", "expected JSON"), ("[]", "expected a JSON object, got list")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)


def test_a_model_of_no_family_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"nearest, LlamaForCausalLM, lacks final_soft_cap=30\.0"):
        describe(Decoder(vocab=8, final_soft_cap=30.0))
    with pytest.raises(UserError, match="nearest, GPT2LMHeadModel, lacks qk_norm=True"):
        describe(Decoder(vocab=8, norm="layer", positions="learned", mlp_kind="gelu", qk_norm=True))


def test_a_gpt_without_biases_fits_in_a_gpt2():
    model = Decoder(vocab=8, norm="layer_no_bias", positions="learned", mlp_kind="gelu", tied=True)
    family, config, back = describe(model)
    assert (family.architecture, config["activation_function"]) == ("GPT2LMHeadModel", "gelu")
    assert (back.norm, back.attention_bias, back.mlp_bias) == ("layer", True, True)
