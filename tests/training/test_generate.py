import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.data.tokenizer import Bytes
from jaxscale.errors import UserError
from jaxscale.generation.generator import Generator
from jaxscale.generation.sampling import Sampling
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.training.generate import continuations, decode, generate
from jaxscale.training.loop import train
from jaxscale.training.run import Run

pytestmark = pytest.mark.usefixtures("shared_steps")
MODEL = Decoder(vocab=23, context=24, layers=2, embed=16, heads=2, kv_heads=1, mlp=16, init_std=0.3)


@pytest.fixture(scope="module")
def module():
    return MODEL.build(nnx.Rngs(0), vocab_multiple=8)


@pytest.fixture(scope="module")
def by_hand(module):
    """Greedy tokens without a cache: the whole text again for every token, by the rule of the windows."""
    # what comes after a token does not change it: one shape, compiled once
    logits = jax.jit(lambda tokens: module(tokens)[0])

    def greedy(prompt, tokens):
        text, half = list(prompt), MODEL.context // 2
        window = list(text)
        for _ in range(tokens):
            padded = np.zeros((1, MODEL.context), np.int32)
            padded[0, : len(window)] = window
            new = int(np.argmax(logits(padded)[len(window) - 1]))
            window = (window[1 - half :] if len(window) == MODEL.context else window) + [new]
            text.append(new)
        return text[len(prompt) :]

    return greedy


@pytest.mark.parametrize(("length", "tokens"), [(1, 5), (3, 33), (20, 5), (24, 3)])
def test_greedy_tokens_are_those_of_the_model_without_a_cache(module, by_hand, length, tokens):
    prompt = np.random.default_rng(length).integers(0, 23, length)
    drawn_ids = decode(Generator(module, MODEL), [prompt], Sampling(tokens, temperature=0.0))[0]
    assert drawn_ids.tolist() == by_hand(prompt, tokens)


def test_prompts_of_several_lengths_together_are_as_alone(module):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 23, n) for n in (1, 4, 19)]
    together = decode(Generator(module, MODEL), prompts, Sampling(5, temperature=0.0))
    alone = [decode(Generator(module, MODEL), [prompt], Sampling(5, temperature=0.0))[0] for prompt in prompts]
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_beyond_the_positions_the_newer_half_goes_on(module):
    prompt = np.array([3, 1, 4])
    first = decode(Generator(module, MODEL), [prompt], Sampling(22, temperature=0.0))[0]  # 24 fed: the window is full
    text = np.concatenate([prompt, first])
    drawn_ids = decode(Generator(module, MODEL), [prompt], Sampling(60, temperature=0.0))[0]
    assert len(drawn_ids) == 60
    assert drawn_ids[:22].tolist() == first.tolist()
    half = decode(Generator(module, MODEL), [text[-12:]], Sampling(13, temperature=0.0))[0]
    assert drawn_ids[22:35].tolist() == half.tolist(), "what follows sees the newest half of the window alone"


def test_a_prompt_beyond_the_positions_is_refused(module):
    prompt = np.random.default_rng(5).integers(0, 23, 25)
    with pytest.raises(UserError, match="got 25 tokens, expected at most 24, the positions of the model"):
        decode(Generator(module, MODEL), [prompt], Sampling(4, temperature=0.0))


def test_draws_follow_the_distribution_and_the_seed(module):
    prompt = np.array([3, 1, 4])
    logits = jax.jit(module)(jnp.asarray([prompt]))[0, -1]
    expected = np.asarray(jax.nn.softmax(logits[:23] / 1.5))
    drawn = np.concatenate(decode(Generator(module, MODEL), [prompt] * 4000, Sampling(1, temperature=1.5, seed=1)))
    share = np.bincount(drawn, minlength=23) / 4000
    np.testing.assert_allclose(share, expected, atol=5 * np.sqrt(expected.max() / 4000))
    assert (
        decode(Generator(module, MODEL), [prompt], Sampling(6, seed=1))[0]
        == decode(Generator(module, MODEL), [prompt], Sampling(6, seed=1))[0]
    ).all()
    different = [
        decode(Generator(module, MODEL), [prompt], Sampling(6, temperature=2.0, seed=s))[0].tolist() for s in range(5)
    ]
    assert len({tuple(row) for row in different}) > 1


def test_only_tokens_that_can_be_read_are_drawn(module):
    drawn = decode(Generator(module, MODEL), [np.array([1])] * 64, Sampling(5, temperature=5.0), id_limit=7)
    assert max(row.max() for row in drawn) == 6


def test_texts(module):
    class Letters:
        size = 23

        def encode(self, text):
            return np.array([ord(c) - ord("a") for c in text], np.int32)

        def decode(self, ids):
            return "".join(chr(ord("a") + i) for i in ids)

    texts = continuations(Generator(module, MODEL), Letters(), ["ab", "cde"], Sampling(4, temperature=0.0))
    assert [len(text) for text in texts] == [4, 4]
    with pytest.raises(UserError, match="prompt '' has no token"):
        continuations(Generator(module, MODEL), Letters(), [""], Sampling(4))


def test_from_a_run_directory(toy, whole):
    run = Run.open(whole)
    live = run.generate("the ", 12, temperature=0.0)
    assert generate(whole, "the ", 12, temperature=0.0) == live
    assert generate(whole, "the ", 12, temperature=0.0, best=True) == live, "the last is the only one evaluated"
    assert len(generate(whole, ["the ", "c"], 3)) == 2
    for wrong, message in (({"tokens": 0}, "tokens"), ({"temperature": -1.0}, "temperature")):
        with pytest.raises(UserError, match=message):
            generate(whole, "the ", **wrong)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(mesh=MeshSpec(data=2)), marks=pytest.mark.variant, id="data"),
        pytest.param(Plan(mesh=MeshSpec(fsdp=2), zero=3), id="fsdp"),
    ],
)
def test_the_cpus_of_a_process_decode_as_one_device(toy, tmp_path, plan):
    run = train(toy(steps=1, plan=plan), out=tmp_path / "run", quiet=True)
    assert len(jax.tree.leaves(run.state.params)[0].devices()) == 2
    text = run.generate("the ", 5, temperature=0.0)
    generator = run._generator
    assert generator.layout is None
    assert {leaf.devices() == {jax.local_devices()[0]} for leaf in jax.tree.leaves(generator.params)} == {True}
    on_mesh = Generator(
        run._train_step.module(run.state),
        generator.model,
        generator.context,
        (run._train_step.layout.mesh, AxisRules()),
    )
    assert continuations(on_mesh, Bytes(), "the ", Sampling(5, temperature=0.0)) == text


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        generate(tmp_path, "a")


def test_a_run_without_a_checkpoint(whole):
    for item in (whole / "checkpoints").iterdir():
        item.rename(whole / item.name)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        generate(whole, "a")


def test_the_data_need_not_be_there(whole):
    text = Path(json.loads((whole / "experiment.json").read_text())["data"]["path"])
    elsewhere = text.rename(text.with_name("elsewhere.txt"))
    try:
        assert len(generate(whole, "the ", 3, temperature=0.0)) == 3
    finally:
        elsewhere.rename(text)
