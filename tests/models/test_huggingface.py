"""Folders read, written, and bent: what comes back is equal in every byte, and what is wrong is named."""

import copy
import dataclasses
import json
import pickle
import shutil

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface import Pretrained, load, load_module, save, save_module
from jaxscale.models.huggingface_tensors import Stacked, flat_leaves
from jaxscale.models.vit import ViT
from tests.models.goldens import DECODERS, GOLDEN, golden

MODELS = (*DECODERS, "vit")


def tensors(folder):
    found = {}
    for path in folder.glob("model*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


def equal(found, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(dict(found), dict(wanted))
    chex.assert_trees_all_equal(dict(found), dict(wanted))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 100_000])
def test_round_trip_is_equal_in_every_byte(tmp_path, name, shard_bytes):
    model, params = load(GOLDEN / name)
    save(tmp_path / "out", model, params, shard_bytes=shard_bytes)
    equal(tensors(tmp_path / "out"), tensors(GOLDEN / name))
    again, params_again = load(tmp_path / "out")
    assert again == model
    equal(dict(flat_leaves(params_again)), dict(flat_leaves(params)))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("Qwen2ForCausalLM", {"attention_bias": "qkv"}), ("MistralForCausalLM", {"windows": (4,)})],
)
def test_folders_of_qwen2_and_mistral_are_those_of_llama_with_biases_or_a_window(tmp_path, architecture, fields):
    llama, params = load(GOLDEN / "llama")
    model = dataclasses.replace(llama, head_dim=None, **fields)
    attention, rng = params["blocks"]["layers"]["attention"], np.random.default_rng(0)
    for name in "qkv" if "attention_bias" in fields else "":
        width = attention[name]["weight"].shape[-1]
        attention[name]["bias"] = rng.normal(size=(llama.layers, width)).astype("float32")
    save(tmp_path / "out", model, params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    again, params_again = load(tmp_path / "out")
    assert dataclasses.replace(again, head_dim=None) == model
    equal(dict(flat_leaves(params_again)), dict(flat_leaves(params)))

    def logits(model, params):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
        tokens = jnp.asarray(golden("llama")[0]["input_ids"], jnp.int32)
        return jax.jit(lambda params: nnx.merge(graphdef, params)(tokens))(jax.tree.map(jnp.asarray, params))

    if "attention_bias" in fields:  # the golden of Llama has the biases of all four: this one has a zero
        full = copy.deepcopy(params)
        full["blocks"]["layers"]["attention"]["out"]["bias"] = np.zeros((llama.layers, llama.embed), "float32")
        expected = logits(dataclasses.replace(model, attention_bias=True), full)
    else:  # rows of a window's length do not feel the window
        expected = logits(llama, params)
        np.testing.assert_allclose(logits(model, params)[:, :4], expected[:, :4], rtol=1e-5, atol=1e-5)
        assert not np.allclose(logits(model, params)[:, 5:], expected[:, 5:], atol=1e-3)
        return
    np.testing.assert_allclose(logits(again, params_again), expected, rtol=1e-5, atol=1e-5)


def test_bf16_and_sharded_folders_hold_the_same_model(tmp_path):
    model, params = load(GOLDEN / "llama")
    sharded = load(GOLDEN / "llama" / "sharded")
    assert sharded[0] == model
    equal(dict(flat_leaves(sharded[1])), dict(flat_leaves(params)))
    narrow = load(GOLDEN / "llama" / "bf16")
    assert narrow[0] == model
    equal(dict(flat_leaves(narrow[1])), {path: leaf.astype(ml_dtypes.bfloat16) for path, leaf in flat_leaves(params)})
    save(tmp_path / "bf16", model, params, "bfloat16")
    equal(tensors(tmp_path / "bf16"), tensors(GOLDEN / "llama" / "bf16"))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_logits_of_a_bf16_folder_are_near():
    """bfloat16 keeps 8 bits: of logits up to 7 the weights' rounding leaves errors of hundredths."""
    model, params = load(GOLDEN / "llama" / "bf16")
    module = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))), jax.tree.map(jnp.asarray, params)
    )
    arrays = golden("llama")[0]
    logits = module(jnp.asarray(arrays["input_ids"], jnp.int32), context=Context(dtype="float32"))
    assert 1e-4 < np.abs(logits - arrays["logits"]).max() < 0.05


def test_vit_from_its_folder_is_the_reference():
    model, params = load(GOLDEN / "vit")
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    arrays = golden("vit")[0]
    images = jnp.asarray(arrays["pixel_values"].transpose(0, 2, 3, 1))
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda params: nnx.merge(graphdef, params)(images))(jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_folder_is_a_module_that_computes_the_reference_and_is_written_again(tmp_path, name):
    model, module = load_module(GOLDEN / name)
    arrays = golden(name)[0]
    is_vit = name == "vit"
    inputs = arrays["pixel_values"].transpose(0, 2, 3, 1) if is_vit else arrays["input_ids"].astype(np.int32)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda inputs: module(inputs))(jnp.asarray(inputs))
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-4)
    save_module(tmp_path / "out", model, module)
    equal(tensors(tmp_path / "out"), tensors(GOLDEN / name))


def test_a_module_is_loaded_in_another_type_and_saved_with_a_tokenizer(tmp_path):
    model, module = load_module(GOLDEN / "llama", "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(module))} == {jnp.dtype("bfloat16")}
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = tmp_path / "out"
    save_module(folder, model, module, "bfloat16", tokenizer=tmp_path / "tokenizer.json", token_ids={"eos_token_id": 2})
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert {array.dtype for array in tensors(folder).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_what_is_no_module_of_the_model_is_refused(tmp_path):
    model = Decoder(vocab=32, context=8, layers=1, heads=1, embed=8)
    module = model.build(nnx.Rngs(0))
    other = dataclasses.replace(model, embed=16)
    with pytest.raises(UserError, match=r"not one of this Decoder: .* differ; give the model value that built it"):
        save_module(tmp_path / "out", other, module)
    with pytest.raises(UserError, match="save_module: got dict, expected the module"):
        save_module(tmp_path / "out", model, {})
    with pytest.raises(UserError, match="unknown dtype 'float8'"):
        load_module(GOLDEN / "llama", "float8")
    assert not (tmp_path / "out").exists()


def test_names_and_order_of_dims_by_hand():
    """The engine against three tensors placed by hand, transposed, split and reshaped."""
    llama, their_llama = load(GOLDEN / "llama")[1], tensors(GOLDEN / "llama")
    key = their_llama["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(llama["blocks"]["layers"]["attention"]["k"]["weight"][1], key.T)
    gpt2, their_gpt2 = load(GOLDEN / "gpt2")[1], tensors(GOLDEN / "gpt2")
    fused = their_gpt2["transformer.h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(gpt2["blocks"]["layers"]["attention"]["v"]["weight"][1], fused[:, 128:])
    vit, their_vit = load(GOLDEN / "vit")[1], tensors(GOLDEN / "vit")
    kernel = their_vit["vit.embeddings.patch_embeddings.projection.weight"]  # (embed, channels, height, width)
    by_row = vit["patches"]["weight"].reshape(8, 8, 3, 64)
    np.testing.assert_array_equal(by_row[2, 5, 1], kernel[:, 1, 2, 5])


def test_padded_and_unstacked_parameters_are_written_alike(tmp_path):
    model, params = load(GOLDEN / "llama")
    leaves = {}
    for path, leaf in flat_leaves(params):
        if ".layers." in path:
            leaves |= {path.replace(".layers.", f".layers.{layer}."): leaf[layer] for layer in range(2)}
        else:
            leaves[path] = np.pad(leaf, ((0, 7), (0, 0))) if path in ("embedding.weight", "head.weight") else leaf
    save(tmp_path / "out", model, leaves)
    equal(tensors(tmp_path / "out"), tensors(GOLDEN / "llama"))


def test_a_gpt_without_biases_is_a_gpt2_whose_biases_are_zero(tmp_path):
    model = Decoder(
        vocab=11,
        context=8,
        layers=2,
        embed=8,
        heads=2,
        norm="layer_no_bias",
        positions="learned",
        mlp_kind="gelu",
        tied=True,
    )
    module = nnx.jit(lambda: model.build(nnx.Rngs(0)))()
    save(tmp_path / "out", model, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    wide, params = load(tmp_path / "out")
    assert (wide.norm, wide.attention_bias) == ("layer", True)
    biases = [leaf for path, leaf in flat_leaves(params) if path.endswith("bias")]
    assert len(biases) == 9
    assert not any(bias.any() for bias in biases)
    again = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: wide.build(nnx.Rngs(1)))), jax.tree.map(jnp.asarray, params))
    tokens = jnp.arange(8)[None, :]
    found, expected = (jax.jit(lambda tokens, made=made: made(tokens))(tokens) for made in (again, module))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_tokenizer_is_put_beside_the_weights(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    model, params = load(GOLDEN / "llama")
    save(tmp_path / "out", model, params, tokenizer=tmp_path / "mine.json")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_model_is_not_written_over(tmp_path):
    model, params = load(GOLDEN / "llama")
    save(tmp_path, model, params)
    with pytest.raises(UserError, match="already contains a model"):
        save(tmp_path, model, params)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        save(tmp_path / "file", model, params)
    with pytest.raises(UserError, match="unknown dtype 'float31'"):
        save(tmp_path / "new", model, params, "float31")


# What is wrong with a folder --------------------------------------------------------------------------------------


@pytest.fixture
def bend(tmp_path):
    """Makes a folder like a golden, its tensors and config changed."""

    def make(name, edit, **changes):
        folder = tmp_path / "bent"
        folder.mkdir()
        given = tensors(GOLDEN / name)
        edit(given)
        safetensors.numpy.save_file(given, folder / "model.safetensors")
        config = json.loads((GOLDEN / name / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "changes", "message"),
    [
        (
            lambda t: t.pop(LAYER),
            {},
            rf"tensor {LAYER} is missing; LlamaForCausalLM .* has 21 tensors, but the files have 20",
        ),
        (lambda t: t.update(lm_haed=t.pop("lm_head.weight")), {}, "tensor lm_head.weight is missing"),
        (lambda t: t.update({LAYER + "s": t.pop(LAYER)}), {}, rf"{LAYER} is missing.*did you mean '{LAYER}s'"),
        (lambda t: t.update(spare=t["lm_head.weight"]), {}, "tensor spare has no place in LlamaForCausalLM"),
        (
            lambda t: t.update({LAYER: t[LAYER][:-1]}),
            {},
            rf"{LAYER} has shape \(127, 64\), but config.json requires \(128, 64",
        ),
        (lambda t: t.update({LAYER: t[LAYER].astype(np.int32)}), {}, rf"{LAYER} has dtype int32, expected floating"),
        (lambda t: None, {"num_hidden_layers": 3}, r"tensor model.layers.2.\S+ is missing \(and 8 more\)"),
        (
            lambda t: None,
            {"num_hidden_layers": 1},
            r"tensor model.layers.1.\S+ \(and 8 more\) has no place .* num_hidden_layers",
        ),
        (
            lambda t: None,
            {"attention_bias": True},
            r"tensor model.layers.0.self_attn.q_proj.bias is missing \(and 7 more\)",
        ),
        (
            lambda t: None,
            {"vocab_size": 300},
            r"embed_tokens.weight has shape \(256, 64\), but config.json requires \(300, 64\)",
        ),
        (
            lambda t: None,
            {"tie_word_embeddings": True},
            "ties lm_head.weight to model.embed_tokens.weight, but the two differ",
        ),
    ],
)
def test_what_is_wrong_with_the_weights_is_named(bend, edit, changes, message):
    with pytest.raises(UserError, match=message):
        load(bend("llama", edit, **changes))


def test_a_truncated_tensor_is_named(bend):
    folder = bend("llama", lambda t: None)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight ends at byte .*: the file is cut short"):
        load(folder)


def test_what_older_files_also_hold_is_taken(bend):
    """A tied head repeated, buffers of masks, names without the prefix of the headed model (as in the first gpt2)."""

    def edit(t):
        t["lm_head.weight"] = t["transformer.wte.weight"].copy()
        t["transformer.h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.uint8)
        for name in [name for name in t if name.startswith("transformer.")]:
            t[name.removeprefix("transformer.")] = t.pop(name)

    _, params = load(bend("gpt2", edit))
    equal(dict(flat_leaves(params)), dict(flat_leaves(load(GOLDEN / "gpt2")[1])))


# Training on --------------------------------------------------------------------------------------------------------


def test_initial_params_are_read_no_further_than_asked():
    pretrained = Pretrained(str(GOLDEN / "llama"))
    leaves = dict(flat_leaves(pretrained.initial_params()))
    _, params = load(GOLDEN / "llama")
    wanted = dict(flat_leaves(params))
    assert leaves.keys() == wanted.keys()
    for path, leaf in leaves.items():
        assert leaf.shape == wanted[path].shape
        assert leaf.dtype == wanted[path].dtype
        parts = leaf.layers if isinstance(leaf, Stacked) else [leaf]
        assert all(isinstance(part.base, np.memmap | np.ndarray) and not part.flags.owndata for part in parts)
        indices = [slice(None), (slice(1, 2),), (0,), ..., (slice(0, 2), ...), (slice(None), slice(3, 8))]
        for index in indices[: 5 + (leaf.ndim > 1)]:
            np.testing.assert_array_equal(leaf[index], wanted[path][index])


def test_shards_are_placed_one_by_one():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    leaf = dict(flat_leaves(Pretrained(str(GOLDEN / "llama")).initial_params()))["blocks.layers.mlp.up.weight"]
    asked = []

    def read(index):
        asked.append(leaf[index].shape)
        return leaf[index]

    placed = jax.make_array_from_callback(leaf.shape, jax.NamedSharding(mesh, jax.P(None, "a", "b")), read)
    assert set(asked) == {(2, 32, 32)}
    np.testing.assert_array_equal(placed, np.asarray(leaf))


def test_pretrained_is_the_wrapped_model():
    pretrained = Pretrained(str(GOLDEN / "qwen3"), dropout=0.1, z_loss=1e-4)
    assert (pretrained.vocab, pretrained.context) == (256, 64)
    assert (pretrained.model.dropout, pretrained.model.z_loss) == (0.1, 1e-4)
    assert pretrained.logical_sizes() == {"heads": 4, "kv_heads": 2, "mlp": 128, "embed": 64}
    module = nnx.eval_shape(lambda: pretrained.build(nnx.Rngs(0), vocab_multiple=100))
    assert module.embedding.weight.shape == (300, 64)
    shapes = {path: leaf.shape for path, leaf in flat_leaves(nnx.to_pure_dict(nnx.state(module)))}
    assert shapes.keys() == dict(flat_leaves(pretrained.initial_params())).keys()
    assert hash(pretrained) == hash(Pretrained(str(GOLDEN / "qwen3"), dropout=0.1, z_loss=1e-4))


def test_pretrained_offers_what_the_wrapped_model_does_and_nothing_else():
    vit, gemma = Pretrained(str(GOLDEN / "vit"), dropout=0.1), Pretrained(str(GOLDEN / "gemma2"))
    assert isinstance(vit.model, ViT)
    assert (vit.model.dropout, vit.classes, vit.image, vit.channels) == (0.1, 10, 32, 3)
    assert gemma.windows == gemma.model.windows != ()
    for name in ("init_cache", "vocab", "context"):
        assert (hasattr(vit, name), hasattr(gemma, name)) == (False, True)
    assert (hasattr(vit, "accuracy"), hasattr(gemma, "accuracy")) == (True, False)
    assert copy.deepcopy(gemma) == pickle.loads(pickle.dumps(gemma)) == gemma
    with pytest.raises(
        UserError, match=r"z_loss: got 0\.1, but ViTForImageClassification has no such field; leave it out"
    ):
        Pretrained(str(GOLDEN / "vit"), z_loss=0.1)


def test_a_relative_folder_is_the_same_from_anywhere(monkeypatch):
    monkeypatch.chdir(GOLDEN)
    assert Pretrained("llama") == Pretrained(str(GOLDEN / "llama"))


def test_a_folder_that_is_none_is_refused_when_the_value_is_made(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        Pretrained(str(tmp_path / "absent"))
    shutil.copytree(
        GOLDEN / "llama", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors", "sharded", "bf16")
    )
    with pytest.raises(UserError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        Pretrained(str(tmp_path / "bare")).initial_params()
