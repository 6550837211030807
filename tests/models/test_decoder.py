"""Decoder against the references: Llama, GPT-2, Qwen3 and Gemma-2 as transformers computes them, in full float32.

One battery for all families, with few compiled programs of each: a train step, and one forward pass over plain, padded
and packed rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface import load, read_config, their_tensors
from tests.models.goldens import DECODERS, GOLDEN, golden
from tests.tiers import variants


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def close(found, wanted, atol=1e-5, rtol=0.0):
    np.testing.assert_allclose(np.asarray(found), wanted, atol=atol, rtol=rtol)


class Trained:
    """A golden's model, its parameters, and its programs, compiled once."""

    def __init__(self, name):
        self.name = name
        self.arrays, self.figures = golden(name)
        self.model, params = load(GOLDEN / name)
        self.params = jax.tree.map(jnp.asarray, params)
        self.graphdef = nnx.graphdef(nnx.eval_shape(lambda: self.model.build(nnx.Rngs(0))))
        tokens = jnp.asarray(self.arrays["input_ids"], jnp.int32)
        self.batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        self.step = jax.jit(jax.value_and_grad(self.mean_loss))
        self.forward = jax.jit(lambda params, **told: self.module(params).hidden(**told))

    def module(self, params):
        return nnx.merge(self.graphdef, params)

    def mean_loss(self, params):
        loss = self.model.loss(self.module(params), self.batch, Context())
        return loss.total / loss.weight

    def theirs(self, params):
        """Parameters, or their gradients, under the names of the reference."""
        family, model = read_config(GOLDEN / self.name)
        return {
            name: np.asarray(array)
            for name, array in their_tensors(family, model, params, np.dtype(np.float32)).items()
        }

    @functools.cached_property
    def rows(self):
        """Hidden states of five rows at once: two whole, two padded, one packed."""
        a = self.arrays
        whole = np.ones_like(a["input_ids"])
        arange = np.arange(16)[None, :] * whole
        tokens = [a["input_ids"], a["padded_input_ids"], a["input_ids"][:1]]
        segments = [whole, a["padded_attention_mask"], a["packed_segment_ids"]]
        positions = [arange, arange, a["packed_position_ids"]]
        told = zip(("tokens", "segments", "positions"), (tokens, segments, positions), strict=True)
        return self.forward(self.params, **{name: np.concatenate(rows).astype(np.int32) for name, rows in told})


@functools.cache
def trained(name):
    with jax.default_matmul_precision("highest"):
        return Trained(name)


each = pytest.mark.parametrize("name", DECODERS)


def those(*names):
    """These by default, the others as variants: by default, too, every model's logits are those of the reference."""
    return pytest.mark.parametrize("name", variants(DECODERS, default=names))


@each
def test_logits_of_whole_padded_and_packed_rows(name):
    t = trained(name)
    logits = t.module(t.params).logits(t.rows)
    assert logits.shape == (5, 16, 256)
    close(logits[:2], t.arrays["logits"])
    mask = t.arrays["padded_attention_mask"][:, :, None]
    close(logits[2:4] * mask, t.arrays["padded_logits"] * mask)
    close(logits[4:], t.arrays["packed_logits"])


@those("gemma2")
def test_every_hidden_state(name):
    t = trained(name)
    module = t.module(t.params)
    x = module.embed(t.batch["tokens"])
    close(x, t.arrays["hidden_states/0"][:, :-1])
    for layer in range(1, t.model.layers):
        cut = dataclasses.replace(t.model, layers=layer, windows=t.model.windows[:layer])
        params = {**t.params, "blocks": jax.tree.map(lambda leaf, layer=layer: leaf[:layer], t.params["blocks"])}
        blocks = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda cut=cut: cut.build(nnx.Rngs(0)))), params).blocks
        x = blocks(module.embed(t.batch["tokens"]), cycle=[{"window": window} for window in cut.windows])
        close(x, t.arrays[f"hidden_states/{layer}"][:, :-1])
    close(t.rows[:2], t.arrays[f"hidden_states/{t.model.layers}"])


@those("gemma2", "gpt2")
def test_greedy_tokens_through_the_cache(name):
    t = trained(name)
    prompt = t.arrays["greedy_prompt"].astype(np.int32)
    count = t.arrays["greedy_tokens"].shape[1]

    @jax.jit
    def generate(params, prompt):
        module = t.module(params)
        cache = t.model.init_cache(prompt.shape[0], prompt.shape[1] + count, jnp.float32)
        logits, cache = module(prompt, cache=cache)

        def step(carry, _):
            token, cache = carry
            logits, cache = module(token[:, None], cache=cache)
            return (jnp.argmax(logits[:, -1], -1), cache), token

        return jax.lax.scan(step, (jnp.argmax(logits[:, -1], -1), cache), length=count)[1]

    np.testing.assert_array_equal(generate(t.params, prompt).T, t.arrays["greedy_tokens"])


@those("llama", "gemma2", "gpt2")
def test_loss_and_gradient_norms(name):
    t = trained(name)
    loss, gradient = t.step(t.params)
    wanted = t.figures["train"]
    close(loss, wanted["loss"])
    close(optax.tree.norm(gradient), wanted["grad_norm"], rtol=1e-5)
    found = {name: np.linalg.norm(array) for name, array in t.theirs(gradient).items()}
    assert found.keys() == wanted["grad_norm_per_param"].keys()
    for name, norm in wanted["grad_norm_per_param"].items():
        close(found[name], norm, rtol=1e-5)


@those("llama")
@pytest.mark.parametrize(("run", "clip"), [("adamw", None), ("adamw_clip0.5", 0.5)])
def test_ten_steps_of_adamw(name, run, clip):
    t = trained(name)
    wanted = t.figures["train"][run]
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = adamw if clip is None else optax.chain(optax.clip_by_global_norm(clip), adamw)

    @jax.jit
    def update(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(gradient)

    params, state = t.params, optimizer.init(t.params)
    losses, norms = [], []
    for step in range(len(wanted["losses"])):
        loss, gradient = t.step(params)
        params, state, norm = update(params, state, gradient)
        losses.append(loss)
        norms.append(norm)
        if step == 0:
            after = t.theirs(params)
    close(losses, wanted["losses"])
    close(norms, wanted["grad_norms"], rtol=1e-5)
    for name, norm in wanted["param_norm_after_1_step"].items():
        # a bias of keys shifts all scores of a query alike: its gradient is rounding error, and Adam's step is the rate
        close(np.linalg.norm(after[name]), norm, atol=1e-4 if name.endswith("c_attn.bias") else 1e-5, rtol=1e-6)
    if run == "adamw":
        one = {
            key.removeprefix("adamw_step1/"): array for key, array in t.arrays.items() if key.startswith("adamw_step1/")
        }
        assert len(one) == (4 if t.name == "llama" else 0)
        for name, array in one.items():
            close(after[name], array)


def test_loss_of_padded_vocabulary_chunks_and_weights_is_the_same():
    """Rows padded to 300, the loss in chunks, weights of ones, positions and segments said: nothing changes."""
    t = trained("gemma2")
    wanted, gradient = t.step(t.params)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: t.model.build(nnx.Rngs(0), vocab_multiple=100)))
    table = t.params["embedding"]["weight"]
    params = {**t.params, "embedding": {"weight": jnp.pad(table, ((0, 44), (0, 0)))}}
    ones = jnp.ones_like(t.batch["tokens"])
    batch = {
        **t.batch,
        "weights": ones.astype(jnp.float32),
        "segments": ones,
        "positions": jnp.arange(15)[None, :] * ones,
    }

    @jax.jit
    @jax.value_and_grad
    def step(params):
        loss = t.model.loss(nnx.merge(graphdef, params), batch, Context(loss_chunk=4))
        return loss.total / loss.weight

    found, found_gradient = step(params)
    close(found, wanted, 1e-6)
    rows = found_gradient["embedding"]["weight"]
    assert not np.asarray(rows[256:]).any()
    close(rows[:256], gradient["embedding"]["weight"], 1e-6)
    logits = nnx.merge(graphdef, params)(t.batch["tokens"])
    assert np.isneginf(logits[:, :, 256:]).all()


def test_weights_of_zero_take_targets_out():
    """The loss of the last 5 targets alone, by weights, is that of the reference's logits there."""
    t = trained("llama")
    weights = jnp.arange(15)[None, :] >= jnp.full((2, 1), 10)
    batch = {**t.batch, "weights": weights.astype(jnp.float32)}
    loss = jax.jit(lambda params: t.model.loss(t.module(params), batch, Context()))(t.params)
    scores = jax.nn.log_softmax(t.arrays["logits"][:, :-1])
    nats = -jnp.take_along_axis(scores, t.batch["targets"][:, :, None], -1)[:, 10:]
    assert float(loss.weight) == 10
    close(loss.total, nats.sum(), 1e-4)


def test_dropout_is_drawn_where_there_is_a_key():
    t = trained("llama")
    model = dataclasses.replace(t.model, dropout=0.5)
    module = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))), t.params)
    whole_rows = {"positions": None, "segments": None}
    hidden = jax.jit(lambda context: module.hidden(t.batch["tokens"], context=context, **whole_rows))
    plain = hidden(Context())
    close(plain, t.rows[:2, :-1])
    drawn = [hidden(Context(key=jax.random.key(seed))) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 0.1
    assert np.abs(drawn[0] - plain).max() > 0.1


def test_initial_weights_have_the_said_spread():
    """GPT-2's: 0.02, and 0.02 / sqrt(2 layers) into the residual stream."""
    model = Decoder(vocab=300, context=64, layers=8, embed=128, heads=4, mlp=256)
    module = jax.jit(lambda: model.build(nnx.Rngs(0)))()

    def spread(param):
        return float(np.std(param[...]))

    block = module.blocks.layers
    for param in (module.embedding.weight, module.head.weight, block.attention.q.weight, block.mlp.gate.weight):
        assert abs(spread(param) - 0.02) < 0.0005
    for param in (block.attention.out.weight, block.mlp.down.weight):
        assert abs(spread(param) - 0.02 / 4) < 0.0002
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))) == model.parameters


def test_a_sequence_beyond_learned_positions_is_refused():
    model = Decoder(vocab=5, context=4, layers=1, embed=8, heads=2, positions="learned")
    with pytest.raises(UserError, match=r"sequence: got 5 tokens, expected at most 4 \(learned positions\)"):
        nnx.eval_shape(lambda: model.build(nnx.Rngs(0))(jnp.zeros((1, 5), jnp.int32)))
