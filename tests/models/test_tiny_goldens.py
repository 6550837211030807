"""Mistral with a window, Qwen2 with biases, SmolLM2 with its published settings: the logits of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxscale.models.huggingface import describe, load, save
from tests.models.goldens import GOLDEN


@pytest.mark.parametrize(
    ("name", "architecture", "fields"),
    [
        ("mistral", "MistralForCausalLM", {"windows": (5,), "tied": False}),
        ("qwen2", "Qwen2ForCausalLM", {"attention_bias": "qkv", "tied": True}),
        ("smollm2", "LlamaForCausalLM", {"rotary_base": 100_000.0, "tied": True}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, name, architecture, fields):
    folder = GOLDEN / "tiny" / name
    model, params = load(folder)
    assert {field: getattr(model, field) for field in fields} == fields
    assert describe(model)[0].architecture == architecture
    arrays = safetensors.numpy.load_file(folder / "golden.safetensors")
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))
    tokens = jnp.asarray(arrays["input_ids"], jnp.int32)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        logits = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens))(wide)
    np.testing.assert_allclose(logits, arrays["logits"], atol=2e-5)
    assert np.abs(arrays["logits"]).max() > 1, "logits that a missing part would change"
    save(tmp_path / "out", model, params, "bfloat16" if name == "smollm2" else "float32", token_ids={"eos_token_id": 2})
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    expected = safetensors.numpy.load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for tensor, array in expected.items():
        np.testing.assert_array_equal(written[tensor], array)
    assert '"eos_token_id": 2' in (tmp_path / "out" / "config.json").read_text()
