"""Models in the shapes of public ones, written afresh and tiny: Flax's examples, bonsai, big_vision and the like.

None of them uses jaxscale. `PUBLIC_MODELS` has for each a model value, a batch of 8 rows, and what a pipeline answers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxscale.models import ForeignModel, classification, language_model, linen_model

nnx.use_eager_sharding(False)
ROWS, LENGTH, VOCAB, WIDTH, HEADS = 8, 6, 12, 8, 2


# -- data --------------------------------------------------------------------------------------------------------------


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def integers(high, *shape, seed=1):
    return np.random.default_rng(seed).integers(0, high, (ROWS, *shape)).astype("int32")


def pictures(size=8, channels=3):
    return {"images": numbers(size, size, channels), "labels": integers(5)}


def text():
    return {"tokens": integers(VOCAB, LENGTH), "targets": integers(VOCAB, LENGTH, seed=2)}


# -- parts -------------------------------------------------------------------------------------------------------------


def causal(length=LENGTH):
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


class Mlp(nnx.Module):
    def __init__(self, width, rngs, act=nnx.gelu):
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.act = act

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


class EncoderBlock(nnx.Module):
    """Pre-norm attention and MLP with dropout, as in ViT and lm1b."""

    def __init__(self, rngs, rate=0.0, mlp=Mlp, reads_memory=False):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp, self.dropout = mlp(WIDTH, rngs), nnx.Dropout(rate, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs) if reads_memory else None

    def __call__(self, x, mask=None, memory=None):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.dropout(self.mlp(self.norm2(x)))


# -- language ----------------------------------------------------------------------------------------------------------


class Lm1b(nnx.Module):
    """Flax's lm1b: numbered blocks, padding mask, learned positions, tied logits."""

    def __init__(self, rngs, depth=4):
        self.embed, self.depth = nnx.Embed(VOCAB, WIDTH, rngs=rngs), depth
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, LENGTH, WIDTH)))
        for index in range(depth):
            setattr(self, f"encoderdecoderblock_{index}", EncoderBlock(rngs))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.combine_masks(causal(), nnx.make_attention_mask(tokens >= 0, tokens >= 0))
        x = self.embed(tokens) + self.positions[...]
        for index in range(self.depth):
            x = getattr(self, f"encoderdecoderblock_{index}")(x, mask)
        return self.embed.attend(self.norm(x))


class GemmaBlock(nnx.Module):
    """RMS norms, rotary positions, one head of keys and values, a gated MLP, and a sown value."""

    def __init__(self, rngs):
        self.pre, self.post = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = nnx.Einsum("bsd,dnh->bsnh", (WIDTH, HEADS, 4), rngs=rngs)
        self.kv = nnx.Einsum("bsd,cdh->cbsh", (2, WIDTH, 4), rngs=rngs)
        self.out = nnx.Einsum("bsnh,nhd->bsd", (HEADS, 4, WIDTH), rngs=rngs)
        self.gate, self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, angles, mask):
        h = self.pre(x)
        (k, v), q = self.kv(h), rotate(self.q(h), angles[:, :, None])
        logits = jnp.einsum("bsnh,bth->bnst", q, rotate(k, angles))
        probabilities = jax.nn.softmax(jnp.where(mask, logits, -1e30))
        self.sow(nnx.Intermediate, "probabilities", probabilities)
        x = x + self.out(jnp.einsum("bnst,bth->bsnh", probabilities, v))
        h = self.post(x)
        return x + nnx.gelu(self.gate(h)) * self.mlp(h)


def rotate(x, angles):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)], -1
    )


class Gemma(nnx.Module):
    def __init__(self, rngs, depth=4):
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([GemmaBlock(rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        angles = jnp.arange(LENGTH, dtype="float32")[None, :, None] * jnp.array([1.0, 0.1])[None, None]
        x = self.embedder(tokens) * jnp.sqrt(float(WIDTH))
        for layer in self.layers:
            x = layer(x, angles, causal())
        return 30.0 * jnp.tanh(self.embedder.attend(self.norm(x)) / 30.0)


class Experts(nnx.Module):
    """The two best of four experts for each token, all computed."""

    def __init__(self, width, rngs):
        self.router = nnx.Linear(width, 4, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, width, 2 * width)))
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 2 * width, width)))

    def __call__(self, x):
        gates, experts = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)
        weights = jnp.sum(jax.nn.one_hot(experts, 4) * gates[..., None], axis=-2)
        hidden = jax.nn.relu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        return jnp.einsum("bsef,efd,bse->bsd", hidden, self.down[...], weights)


class Mixtral(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.layers = nnx.List([EncoderBlock(rngs, mlp=Experts) for _ in range(4)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, causal())
        return self.head(x)


class Scanned(nnx.Module):
    """Blocks whose parameters are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs, depth=3):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        make = nnx.vmap(lambda rngs: Mlp(WIDTH, rngs))
        self.layers = nnx.split_rngs(splits=depth)(make)(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + layer(x)

        return self.head(run(self.embed(tokens), self.layers))


class Wmt(nnx.Module):
    """An encoder and a decoder that reads the encoder's result in each block."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(rngs) for _ in range(2)])
        self.decoder = nnx.List([EncoderBlock(rngs, reads_memory=True) for _ in range(2)])

    def __call__(self, tokens):
        memory = self.embed(tokens[:, ::-1])
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(tokens)
        for layer in self.decoder:
            x = layer(x, causal(), memory)
        return self.embed.attend(x)


class CharRnn(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


class LinearRecurrence(nnx.Module):
    """A state-space block: a diagonal recurrence by an associative scan."""

    def __init__(self, rngs):
        self.norm, self.inputs = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.decay = nnx.Param(jnp.linspace(0.0, 2.0, WIDTH))

    def __call__(self, x):
        h = self.inputs(self.norm(x))
        decay = jnp.broadcast_to(jax.nn.sigmoid(self.decay[...]), h.shape)
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, h), axis=1)
        return x + nnx.silu(states)


class StateSpace(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.layers = nnx.Sequential(*[LinearRecurrence(rngs) for _ in range(4)])

    def __call__(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


class NanoDo(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(2):
            x = x + linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x), mask=causal())
            x = x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))))
        return linen.Dense(VOCAB)(x)


class Sst2(nnx.Module):
    """A classifier of texts of several lengths, by a bidirectional LSTM."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.forward, self.backward = (nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs)) for _ in range(2))
        self.head = nnx.Linear(2 * WIDTH, 2, rngs=rngs)

    def __call__(self, tokens, lengths):
        x = self.embed(tokens)
        is_token = (jnp.arange(LENGTH)[None] < lengths[:, None])[..., None]
        h = jnp.concatenate([self.forward(x), self.backward(x[:, ::-1])[:, ::-1]], -1) * is_token
        return self.head(h.sum(1) / lengths[:, None].astype(h.dtype))


class Bert(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(rngs) for _ in range(4)])
        self.bias = nnx.Param(jnp.zeros((1, 1, VOCAB)))

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.encoder:
            x = layer(x)
        return self.embed.attend(x) + self.bias[...]


# -- images ------------------------------------------------------------------------------------------------------------


class MnistCnn(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.conv2 = (nnx.Conv(n, 8, (3, 3), rngs=rngs) for n in (3, 8))
        self.norm, self.head = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.head(x.reshape(len(x), -1))


class ResidualBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.conv2 = (nnx.Conv(8, 8, (3, 3), use_bias=False, rngs=rngs) for _ in range(2))
        self.norm1, self.norm2 = (nnx.BatchNorm(8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return nnx.relu(x + self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x))))))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem, self.head = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
        self.blocks = nnx.List([ResidualBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class LinenResNet(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        for stride in (1, 2):
            y = linen.Conv(8, (3, 3), (stride, stride))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(y))
        return linen.Dense(5)(x.mean((1, 2)))


class Vit(nnx.Module):
    """bonsai's ViT: a token for the class, and blocks in an `nnx.Sequential`."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), (4, 4), rngs=rngs)
        self.token, self.positions = nnx.Param(jnp.zeros((1, 1, WIDTH))), nnx.Param(jnp.zeros((1, 5, WIDTH)))
        self.layers = nnx.Sequential(*[EncoderBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), 4, WIDTH)
        x = jnp.concatenate([jnp.tile(self.token[...], (len(x), 1, 1)), x], 1) + self.positions[...]
        return self.head(self.layers(x)[:, 0])


class MixerBlock(nnx.Module):
    def __init__(self, rngs):
        self.tokens, self.channels = Mlp(4, rngs), Mlp(WIDTH, rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.tokens(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), (4, 4), rngs=rngs)
        self.blocks = nnx.List([MixerBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), 4, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNextBlock(nnx.Module):
    def __init__(self, rngs):
        self.depthwise = nnx.Conv(WIDTH, WIDTH, (3, 3), feature_group_count=WIDTH, rngs=rngs)
        self.norm, self.mlp = nnx.LayerNorm(WIDTH, rngs=rngs), Mlp(WIDTH, rngs)
        self.scale = nnx.Param(jnp.full((1, 1, 1, WIDTH), 0.5))

    def __call__(self, x):
        return x + self.scale[...] * self.mlp(self.norm(self.depthwise(x)))


class ConvNext(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, WIDTH, (2, 2), (2, 2), rngs=rngs)
        self.stage = nnx.List([ConvNextBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.stage:
            x = block(x)
        return self.head(x.mean((1, 2)))


# -- generative models -------------------------------------------------------------------------------------------------


class Vae(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.decoder = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(4, 16, rngs=rngs)

    def __call__(self, x, rngs):
        mean, log_variance = jnp.split(self.encoder(x), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(rngs.noise(), mean.shape)
        return self.decoder(z), mean, log_variance


def evidence_bound(module, batch):
    reconstruction, mean, log_variance = module(batch["x"])
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
    return jnp.sum((reconstruction - batch["x"]) ** 2, -1) + divergence


class Conditioned(nnx.Module):
    def __init__(self, inputs, rngs):
        self.conv, self.time = nnx.Conv(inputs, 8, (3, 3), rngs=rngs), nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)

    def __call__(self, x, time):
        return nnx.silu(self.norm(self.conv(x) + self.time(time)[:, None, None]))


class UNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down = nnx.List([Conditioned(8, rngs) for _ in range(2)])
        self.up = nnx.List([Conditioned(16, rngs) for _ in range(2)])
        self.head = nnx.Conv(8, 3, (3, 3), rngs=rngs)

    def __call__(self, x, time):
        features = jnp.stack([jnp.sin(time), jnp.cos(time), jnp.sin(2 * time), jnp.cos(2 * time)], -1)
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x, features)
            skips.append(x)
        for block in self.up:
            x = block(jnp.concatenate([x, skips.pop()], -1), features)
        return self.head(x)


def denoising(module, batch):
    noisy = batch["images"] + batch["time"][:, None, None, None] * batch["noise"]
    return jnp.mean((module(noisy, batch["time"]) - batch["noise"]) ** 2, (1, 2, 3))


class DitBlock(nnx.Module):
    """Attention and MLP whose norms are modulated by the condition."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.attention, self.mlp = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs), Mlp(WIDTH, rngs)
        self.modulation = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)

    def __call__(self, x, condition):
        shift1, scale1, shift2, scale2 = jnp.split(self.modulation(nnx.silu(condition))[:, None], 4, -1)
        x = x + self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Dit(nnx.Module):
    def __init__(self, rngs):
        self.patches, self.time = nnx.Linear(48, WIDTH, rngs=rngs), nnx.Linear(2, WIDTH, rngs=rngs)
        self.blocks = nnx.List([DitBlock(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 48, rngs=rngs)

    def __call__(self, images, time):
        x = images.reshape(len(images), 2, 4, 2, 4, 3).swapaxes(2, 3).reshape(len(images), 4, 48)
        condition = self.time(jnp.stack([jnp.sin(time), jnp.cos(time)], -1))
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(x).reshape(len(images), 2, 2, 4, 4, 3).swapaxes(2, 3)
        return x.reshape(images.shape)


# -- others ------------------------------------------------------------------------------------------------------------


class TwoTowers(nnx.Module):
    """Embeddings of images and texts, compared within the batch."""

    def __init__(self, rngs):
        self.image, self.text = nnx.Linear(16, 8, rngs=rngs), nnx.Embed(VOCAB, 8, rngs=rngs)
        self.temperature = nnx.Param(jnp.zeros(()))

    def __call__(self, images, tokens):
        a, b = self.image(images), self.text(tokens).mean(1)
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        return a @ b.T * jnp.exp(self.temperature[...])


def contrastive(module, batch):
    logits = module(batch["x"], batch["tokens"])
    return -jnp.diag(jax.nn.log_softmax(logits) + jax.nn.log_softmax(logits.T)) / 2


class GraphNet(nnx.Module):
    def __init__(self, rngs):
        self.nodes, self.head = nnx.Linear(4, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 5, rngs=rngs)
        self.rounds = nnx.List([Mlp(WIDTH, rngs, nnx.relu) for _ in range(4)])

    def __call__(self, nodes, adjacency):
        x = self.nodes(nodes)
        for update in self.rounds:
            x = update(x + adjacency @ x)
        return self.head(x.mean(1))


class ActorCritic(nnx.Module):
    def __init__(self, rngs):
        self.torso = nnx.Sequential(nnx.Linear(16, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 8, rngs=rngs), nnx.tanh)
        self.policy, self.value = nnx.Linear(8, 3, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        h = self.torso(x)
        return jax.nn.log_softmax(self.policy(h)), self.value(h)[:, 0]


def clipped_objective(module, batch):
    log_probabilities, values = module(batch["x"])
    chosen = jnp.take_along_axis(log_probabilities, batch["actions"][:, None], 1)[:, 0]
    ratio, advantage = jnp.exp(chosen + 1.1), batch["returns"] - jax.lax.stop_gradient(values)
    clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -clipped + 0.5 * (values - batch["returns"]) ** 2


class Nerf(nnx.Module):
    """A network of coordinates whose input enters again in the middle."""

    def __init__(self, rngs):
        self.first = nnx.Linear(12, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8 + 12 * (n == 2), 8, rngs=rngs) for n in range(4)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        features = jnp.concatenate([jnp.sin(x), jnp.cos(x), x, x**2], -1)
        h = self.first(features)
        for index, layer in enumerate(self.layers):
            h = nnx.relu(layer(jnp.concatenate([h, features], -1) if index == 2 else h))
        return self.head(h)


class WaveNet(nnx.Module):
    """Dilated causal convolutions whose results are summed: each block passes on (x, sum)."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.layers = nnx.List([GatedConv(2**n, rngs) for n in range(4)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        total = jnp.zeros_like(x)
        for layer in self.layers:
            x, total = layer(x, total)
        return self.head(nnx.relu(total))


class GatedConv(nnx.Module):
    def __init__(self, dilation, rngs):
        options = {"kernel_dilation": dilation, "padding": "CAUSAL", "rngs": rngs}
        self.filter, self.gate = (nnx.Conv(WIDTH, WIDTH, (2,), **options) for _ in range(2))
        self.skip = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, total):
        h = jnp.tanh(self.filter(x)) * nnx.sigmoid(self.gate(x))
        return x + h, total + self.skip(h)


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A model, a batch, and what a pipeline of two stages answers: "" if it trains, or words of the refusal."""

    model: ForeignModel
    batch: Callable[[], dict[str, Any]]
    refusal: str = "no blocks to cut into stages"


def foreign(make, score, batch, refusal="no blocks to cut into stages", **fields):
    return PublicModel(ForeignModel(make, score, **fields), batch, refusal)


def from_linen(module, score, batch):
    name = next(iter(batch()))
    return PublicModel(linen_model(module, batch()[name], score=score), batch)


LM = language_model()
PUBLIC_MODELS = {
    "lm1b (flax/examples/lm1b_nnx)": foreign(Lm1b, LM, text, ""),
    "Gemma (flax/examples/gemma)": foreign(Gemma, LM, text, ""),
    "Mixtral (experts)": foreign(Mixtral, LM, text, ""),
    "scanned blocks (nnx.scan)": foreign(Scanned, LM, text),
    "WMT encoder-decoder (flax/examples/wmt)": foreign(
        Wmt, LM, text, "a chain of 2 blocks (decoder/0, ...) and a chain of 2 blocks (encoder/0, ...)"
    ),
    "LSTM (flax/examples/seq2seq)": foreign(CharRnn, LM, text),
    "state space (S5, LRU)": foreign(StateSpace, LM, text, ""),
    "NanoDO (Linen)": from_linen(NanoDo(), LM, text),
    "SST-2 (flax/examples/sst2)": foreign(
        Sst2,
        lambda module, batch: -jax.nn.log_softmax(module(batch["tokens"], batch["lengths"]))[:, 1] * batch["label"],
        lambda: {"tokens": integers(VOCAB, LENGTH), "lengths": 1 + integers(LENGTH), "label": numbers() ** 2},
    ),
    "BERT": foreign(Bert, LM, text, ""),
    "MNIST CNN (flax/examples/mnist)": foreign(MnistCnn, classification(), pictures),
    "ResNet (bonsai)": foreign(ResNet, classification(), pictures, "running statistics"),
    "ResNet (flax/examples/imagenet, Linen)": from_linen(LinenResNet(), classification(), pictures),
    "ViT (bonsai)": foreign(Vit, classification(), pictures, ""),
    "MLP-Mixer (big_vision)": foreign(Mixer, classification(), pictures, ""),
    "ConvNeXt (bonsai)": foreign(ConvNext, classification(), pictures, ""),
    "VAE (flax/examples/vae)": foreign(Vae, evidence_bound, lambda: {"x": numbers(16)}),
    "U-Net (diffusion)": foreign(
        UNet,
        denoising,
        lambda: {"images": numbers(8, 8, 3), "noise": numbers(8, 8, 3, seed=3), "time": numbers() ** 2},
        "a chain of 2 blocks (down/0, ...) and a chain of 2 blocks (up/0, ...)",
    ),
    "DiT (diffusion transformer)": foreign(
        Dit,
        denoising,
        lambda: {"images": numbers(8, 8, 3), "noise": numbers(8, 8, 3, seed=3), "time": numbers() ** 2},
        "",
    ),
    "two towers (CLIP)": foreign(
        TwoTowers,
        contrastive,
        lambda: {"x": numbers(16), "tokens": integers(VOCAB, 3)},
        "a loss over the whole batch",
        over="batch",
    ),
    "graph network (flax/examples/ogbg_molpcba)": foreign(
        GraphNet,
        lambda module, batch: -jax.nn.log_softmax(module(batch["nodes"], batch["adjacency"]))[:, 0],
        lambda: {"nodes": numbers(3, 4), "adjacency": np.abs(numbers(3, 3)) / 3},
        "",
    ),
    "actor and critic (flax/examples/ppo)": foreign(
        ActorCritic, clipped_objective, lambda: {"x": numbers(16), "actions": integers(3), "returns": numbers(seed=4)}
    ),
    "NeRF": foreign(
        Nerf,
        lambda module, batch: jnp.mean((module(batch["x"]) - batch["y"]) ** 2, -1),
        lambda: {"x": numbers(3), "y": numbers(4, seed=5)},
    ),
    "WaveNet": foreign(WaveNet, LM, text, ""),
}
