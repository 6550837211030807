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
from tests.models.public_language_models import (
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    Bert,
    CharRnn,
    EncoderBlock,
    Gemma,
    LinenLoop,
    LinenScan,
    Lm1b,
    Mamba,
    Mixtral,
    Mlp,
    NanoDo,
    Scanned,
    ScannedPytree,
    ScannedRemat,
    Sst2,
    StateSpace,
    Wmt,
    integers,
    numbers,
    pictures,
    text,
)

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


class Coupling(nnx.Module):
    def __init__(self, flipped, rngs):
        self.flipped, self.first = flipped, nnx.Linear(2, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, 4, kernel_init=nnx.initializers.normal(0.1), rngs=rngs)

    def __call__(self, x, log_volume):
        kept, changed = jnp.split(x[:, ::-1] if self.flipped else x, 2, axis=-1)
        log_scale, shift = jnp.split(self.second(jnp.tanh(self.first(kept))), 2, axis=-1)
        x = jnp.concatenate([kept, changed * jnp.exp(jnp.tanh(log_scale)) + shift], -1)
        return (x[:, ::-1] if self.flipped else x), log_volume + jnp.tanh(log_scale).sum(-1)


class RealNvp(nnx.Module):
    """A flow: each block passes on (x, log of the volume), and every second one is mirrored."""

    def __init__(self, rngs):
        self.couplings = nnx.List([Coupling(bool(n % 2), rngs) for n in range(4)])

    def __call__(self, x):
        log_volume = jnp.zeros(len(x))
        for coupling in self.couplings:
            x, log_volume = coupling(x, log_volume)
        return log_volume - (x**2).sum(-1) / 2


class Dlrm(nnx.Module):
    """Tables of several sizes, whose rows and the dense features meet in products of pairs."""

    def __init__(self, rngs):
        self.tables = nnx.List([nnx.Embed(size, WIDTH, rngs=rngs) for size in (11, 5, 7)])
        self.bottom = nnx.Sequential(nnx.Linear(4, WIDTH, rngs=rngs), nnx.relu)
        self.top = nnx.Sequential(nnx.Linear(WIDTH + 6, WIDTH, rngs=rngs), nnx.relu, nnx.Linear(WIDTH, 1, rngs=rngs))

    def __call__(self, dense, sparse):
        dense = self.bottom(dense)
        vectors = jnp.stack([dense, *(table(sparse[:, n]) for n, table in enumerate(self.tables))], axis=1)
        rows, columns = np.tril_indices(4, -1)
        pairs = jnp.einsum("bid,bjd->bij", vectors, vectors)[:, rows, columns]
        return self.top(jnp.concatenate([dense, pairs], -1))[:, 0]


class ScoreNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(5, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x, time):
        return self.last(nnx.silu(self.first(jnp.concatenate([x, time[:, None]], -1))))


def score_matching(module, batch, key):
    time_key, noise_key = jax.random.split(key)
    time = jax.random.uniform(time_key, (len(batch["x"]),))
    noise = jax.random.normal(noise_key, batch["x"].shape)
    return ((module(batch["x"] + time[:, None] * noise, time) + noise) ** 2).sum(-1)


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A model, a batch, and what a pipeline of two stages answers: "" if it trains, or words of the refusal."""

    model: ForeignModel
    batch: Callable[[], dict[str, Any]]
    refusal: str = "no blocks to cut into stages"


def foreign(make, score, batch, refusal="no blocks to cut into stages", **fields):
    return PublicModel(ForeignModel(make, score, **fields), batch, refusal)


def from_linen(module, score, batch, refusal="no blocks to cut into stages"):
    name = next(iter(batch()))
    return PublicModel(linen_model(module, batch()[name], score=score), batch, refusal)


LM = language_model()
PUBLIC_MODELS = {
    "lm1b (flax/examples/lm1b_nnx)": foreign(Lm1b, LM, text, ""),
    "Gemma (flax/examples/gemma)": foreign(Gemma, LM, text, ""),
    "Mixtral (experts)": foreign(Mixtral, LM, text, ""),
    "scanned blocks (nnx.scan)": foreign(Scanned, LM, text, ""),
    "scanned blocks, recomputed and with axis names (nnx.scan, nnx.remat)": foreign(ScannedRemat, LM, text, ""),
    "scanned blocks, with a rate for each (jax.lax.scan)": foreign(ScannedPytree, LM, text, ""),
    "WMT encoder-decoder (flax/examples/wmt)": foreign(
        Wmt, LM, text, "a chain of 2 blocks (decoder/0, ...) and a chain of 2 blocks (encoder/0, ...)"
    ),
    "LSTM (flax/examples/seq2seq)": foreign(CharRnn, LM, text),
    "state space (S5, LRU)": foreign(StateSpace, LM, text, ""),
    "NanoDO (Linen)": from_linen(NanoDo(), LM, text),
    "blocks in a loop (Linen)": from_linen(LinenLoop(), LM, text, ""),
    "blocks in a scan (linen.scan, linen.remat)": from_linen(LinenScan(), LM, text, ""),
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
    "Mamba (two lists, residuals added outside)": foreign(Mamba, LM, text, "", blocks="layers"),
    "RealNVP (flow)": foreign(RealNvp, lambda module, batch: -module(batch["x"]), lambda: {"x": numbers(4)}, ""),
    "DLRM (tables of several sizes)": foreign(
        Dlrm,
        lambda module, batch: jax.nn.softplus(-module(batch["dense"], batch["sparse"]) * batch["click"]),
        lambda: {"dense": numbers(4), "sparse": integers(5, 3), "click": np.sign(numbers(seed=6))},
    ),
    "score matching (a random score)": foreign(ScoreNet, score_matching, lambda: {"x": numbers(4)}),
}
