import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import UserError
from jaxscale.generation import Sampling, generate, sample
from jaxscale.models import Decoder, ResNet

DECODER = Decoder(vocab=64, context=32, layers=1, heads=2, embed=16)


@functools.cache
def module():
    return DECODER.build(nnx.Rngs(0))


def logits_of(weights, tokens):
    return nnx.merge(nnx.graphdef(module()), weights)(tokens)


def successor(table, tokens):
    return table[tokens]


TABLE = jnp.eye(5)[jnp.array([1, 2, 3, 4, 0])]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(tokens=6, temperature=0), Sampling(tokens=6, temperature=1.0, seed=3, samples=2, top_k=8)],
)
def test_a_function_without_a_cache_draws_what_the_model_draws_with_its_cache(sampling):
    prompts = [[1, 2, 3], [4, 5]]
    with_cache = generate(DECODER, module(), prompts, sampling)
    without = generate(logits_of, nnx.state(module()), prompts, sampling)
    assert [ids.tolist() for ids in without] == [ids.tolist() for ids in with_cache]
    assert len(without) == 2 * sampling.samples


def test_a_stop_id_ends_its_text_alone():
    sampling = Sampling(tokens=6, temperature=0, stop_ids=(4,))
    texts = generate(successor, TABLE, [[0], [4, 0, 1], [3]], sampling)
    assert [text.tolist() for text in texts] == [[1, 2, 3], [2, 3], []]
    assert texts[0].dtype == np.int32


def test_draws_follow_the_probabilities():
    rows = jnp.log(jnp.broadcast_to(jnp.array([0.5, 0.3, 0.2]), (20_000, 3)))
    shares = np.bincount(sample(rows, jax.random.key(0)), minlength=3) / 20_000
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    assert set(np.unique(sample(rows, jax.random.key(0), top_p=0.8))) == {0, 1}
    assert set(np.unique(sample(rows, jax.random.key(0), min_p=0.5))) == {0, 1}


def test_logits_of_any_rank_are_drawn_inside_of_jit():
    draw = jax.jit(lambda logits, key: sample(logits, key, temperature=0))
    assert draw(TABLE[0], jax.random.key(0)) == 1
    assert draw(jnp.stack([TABLE, TABLE]), jax.random.key(0)).tolist() == [[1, 2, 3, 4, 0]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(jnp.zeros(3), jax.random.key(0), top_k=0), "top_k: got 0"),
        (lambda: sample(jnp.zeros(3), jax.random.key(0), temperature=-1.0), "temperature: got -1.0"),
        (lambda: sample(jnp.float32(0), jax.random.key(0)), r"logits of shape \(\), expected the tokens"),
        (lambda: sample(jnp.zeros((2, 0)), jax.random.key(0)), r"logits of shape \(2, 0\)"),
        (lambda: generate(successor, TABLE, [[0]], Sampling(stop=("x",))), "give the ids that end a text as stop_ids"),
        (lambda: generate(successor, TABLE, []), "prompts: got none"),
        (lambda: generate(successor, TABLE, [[0], []]), r"prompts\[1\]: got \[\], expected a list of at least one id"),
        (lambda: generate(successor, TABLE, ["abc"]), r"prompts\[0\]: got 'abc'.* encoded by a tokenizer"),
        (lambda: generate(successor, TABLE, [[0.5]]), r"prompts\[0\]: got \[0.5\]"),
        (lambda: generate(lambda table, tokens: table[0], TABLE, [[0]]), r"the function returns \(5,\) for tokens"),
        (lambda: generate(TABLE, TABLE, [[0]]), "expected a function logits"),
        (lambda: generate(ResNet(), module(), [[0]]), "ResNet with a module, expected one that decodes with a cache"),
        (lambda: generate(DECODER, module(), [[0] * 33]), "prompt: got 33 tokens, expected at most 32"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
