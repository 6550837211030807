"""The smallest models that there are, of each kind, as an experiment file; the data lie beside its copy."""

import dataclasses
from pathlib import Path

import jax
from flax import linen, nnx

from jaxscale import Experiment
from jaxscale.data import Images, Text
from jaxscale.models import Decoder, ForeignModel, Pretrained, ResNet, ViT, classification, linen_model
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Checkpointing, Evaluation, Samples

HERE = Path(__file__).parent


class Net(nnx.Module):
    """None of our layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 12, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.dropout(jax.nn.relu(self.norm(self.stem(images.reshape(len(images), -1))))))


class Block(nnx.Module):
    """A block that repeats."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jax.nn.relu(self.linear(x)))


class Deep(nnx.Module):
    """None of our layers, and blocks in sequence."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.head = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 12, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images.reshape(len(images), -1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinenNet(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = linen.Dense(16)(images.reshape(len(images), -1))
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dense(12)(linen.Dropout(0.1, deterministic=not train)(linen.relu(x)))


def experiment() -> Experiment:
    """A decoder of bytes, whose wide mlp is large enough to have its state in few bits."""
    return Experiment(
        name="tiny",
        model=Decoder(vocab=256, context=8, layers=2, heads=4, embed=16, mlp=128),
        data=Text(HERE / "text.txt", tokenizer="byte", context=8),
        optimizer=Optimizer(learning_rate=0.01, warmup=2),
        steps=4,
        batch=16,
        evaluation=Evaluation(every=0, batches=1),
        samples=Samples(prompts=()),
        checkpoint=Checkpointing(every=2, minutes=None),
    )


def _images(model, data: str = "small.npz") -> Experiment:
    return dataclasses.replace(experiment(), model=model, data=Images(HERE / data))


def vit() -> Experiment:
    """Its classes and patches are few."""
    model = ViT(classes=12, image=8, patch=4, channels=1, layers=2, embed=16, heads=4)
    return _images(model)


def resnet() -> Experiment:
    """With the default stem."""
    return _images(ResNet(classes=12, channels=1, stages=(1, 1), width=8))


def foreign() -> Experiment:
    """A network of Flax NNX."""
    return _images(ForeignModel(make=lambda rngs: Net(rngs), score=classification()))


def foreign_blocks() -> Experiment:
    """A network of Flax NNX with blocks in sequence."""
    return _images(ForeignModel(make=lambda rngs: Deep(rngs), score=classification()))


def linen_net() -> Experiment:
    """A network of Flax Linen."""
    shape = jax.ShapeDtypeStruct((1, 8, 8, 1), "float32")
    return _images(linen_model(LinenNet(), shape, score=classification()))


def llama() -> Experiment:
    """A folder of transformers."""
    return dataclasses.replace(experiment(), model=Pretrained(str(HERE / "llama")))


def gpt2() -> Experiment:
    """The same of another family."""
    return dataclasses.replace(experiment(), model=Pretrained(str(HERE / "gpt2")))


def qwen3() -> Experiment:
    """The same of another family."""
    return dataclasses.replace(experiment(), model=Pretrained(str(HERE / "qwen3")))


def gemma2() -> Experiment:
    """The same of another family."""
    return dataclasses.replace(experiment(), model=Pretrained(str(HERE / "gemma2")))


def pretrained_vit() -> Experiment:
    """A folder of transformers that tells images."""
    return _images(Pretrained(str(HERE / "vit")), "large.npz")


VARIANTS = {
    made.__name__: made
    for made in (vit, resnet, foreign, foreign_blocks, linen_net, llama, gpt2, qwen3, gemma2, pretrained_vit)
}
