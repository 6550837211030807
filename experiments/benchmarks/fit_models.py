"""The models whose train steps `fit_accuracy.py` and `pipeline_fit.py` compile, as variants of one experiment file.

    jaxscale fit experiments/benchmarks/fit_models.py wide --platform "tpu v5e:2x2"

A dense decoder in three sizes, a vision transformer, and a mixture of experts with dense dispatch (GShard, Lepikhin et
al. 2020, arXiv:2006.16668): one-hot tensors bring each token to its experts and back, up to a capacity. All are scans
of 4 to 8 layers. A decoder that compiles soon is for pipelines alone.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale import Experiment, Plan
from jaxscale.blocks import Context, Loss
from jaxscale.data import Text
from jaxscale.layers.attention import Attention
from jaxscale.layers.embedding import Embedding
from jaxscale.layers.loss import cross_entropy
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.rotary import Rotary
from jaxscale.layers.stack import Stack
from jaxscale.models import Decoder, ViT
from jaxscale.sharding.place import constrain

PLAN = Plan(precision="bfloat16", zero=3)


class Experts(nnx.Module):
    """Feed-forward layers of which each token sees two."""

    def __init__(self, config: "Mixture", rngs: nnx.Rngs):
        def weight(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            init = nnx.initializers.normal(1 / math.sqrt(shape[-2]))
            return nnx.Param(init(rngs.params(), shape, jnp.float32), out_sharding=axes)

        self.config = config
        self.router = weight(config.embed, config.experts, axes=("embed", None))
        self.up = weight(config.experts, config.embed, config.mlp, axes=("expert", "embed", "mlp"))
        self.down = weight(config.experts, config.mlp, config.embed, axes=("expert", "mlp", "embed"))

    def __call__(self, x: Any) -> Any:
        """The weighted sum of the two best experts of each token, (B, T, D)."""
        experts = self.config.experts
        capacity = 2 * x.shape[1] // experts
        chances = jax.nn.softmax(x.astype(jnp.float32) @ self.router[...].astype(jnp.float32))
        weights, chosen = jax.lax.top_k(chances, 2)
        chosen = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
        place = jnp.cumsum(chosen.sum(2), axis=1)[:, :, None, :] - 1  # of the token in its expert's row of places
        place = jnp.einsum("btke,btoe->btk", chosen, place)
        slots = jax.nn.one_hot(place, capacity, dtype=x.dtype)
        chosen = chosen.astype(x.dtype)
        dispatch = jnp.einsum("btke,btkc->btec", chosen, slots)
        combine = jnp.einsum("btk,btke,btkc->btec", weights.astype(x.dtype), chosen, slots)
        inside = constrain(jnp.einsum("btec,btd->becd", dispatch, x), "batch", "expert", None, "embed")
        hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, self.up[...].astype(x.dtype)))
        outside = jnp.einsum("becf,efd->becd", hidden, self.down[...].astype(x.dtype))
        return constrain(jnp.einsum("btec,becd->btd", combine, outside), "batch", "seq", "embed")


class MixtureBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + experts(norm(x))`."""

    def __init__(self, config: "Mixture", rngs: nnx.Rngs):
        width = config.embed // config.heads
        self.attention_norm = RMSNorm(config.embed)
        self.attention = Attention(
            config.embed, config.heads, config.heads, width, rotary=Rotary(width, 10_000.0, None), rngs=rngs
        )
        self.experts_norm = RMSNorm(config.embed)
        self.experts = Experts(config, rngs)

    def __call__(self, x: Any, *, context: Context = Context()) -> Any:
        """The residual stream after the block."""
        x = constrain(x + self.attention(self.attention_norm(x), context=context), "batch", "seq", "embed")
        return constrain(x + self.experts(self.experts_norm(x)), "batch", "seq", "embed")


class MixtureModule(nnx.Module):
    """Tokens to hidden states."""

    def __init__(self, config: "Mixture", *, vocab_multiple: int, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab, config.embed, vocab_multiple=vocab_multiple, rngs=rngs)
        self.blocks = Stack(lambda rngs: MixtureBlock(config, rngs), config.layers, rngs=rngs)
        self.norm = RMSNorm(config.embed)

    def __call__(self, tokens: Any, context: Context) -> Any:
        """The normed residual stream after the last block, (B, T, D)."""
        x = constrain(self.embedding.lookup(tokens, context.dtype), "batch", "seq", "embed")
        return self.norm(self.blocks(x, context=context))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A decoder whose feed-forward layers are experts with dense dispatch; embedding and head are tied."""

    vocab: int = 32_000
    context: int = 1024
    layers: int = 6
    embed: int = 1024
    heads: int = 8
    experts: int = 8
    mlp: int = 2048

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> MixtureModule:
        """The NNX module."""
        return MixtureModule(self, vocab_multiple=vocab_multiple, rngs=rngs)

    def loss(self, module: MixtureModule, batch: Any, context: Context) -> Loss:
        """Sums of the cross-entropy of a batch's targets."""
        return cross_entropy(
            module(batch["tokens"], context),
            module.embedding.weight[...],
            batch["targets"],
            batch.get("weights"),
            vocab=self.vocab,
            chunk=context.loss_chunk,
        )

    def logical_sizes(self) -> dict[str, int]:
        """What a mesh axis must divide."""
        return {"heads": self.heads, "kv_heads": self.heads, "mlp": self.mlp, "expert": self.experts}


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Shapes of images and labels; there are none."""

    size: int

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each array of a batch."""
        return {"images": ((batch, self.size, self.size, 3), "float32"), "labels": ((batch,), "int32")}


def _text(name: str, model: Any, batch: int) -> Experiment:
    # no file is read for an estimate or a compilation
    data = Text(path="text.txt", tokenizer="byte", context=model.context)
    return Experiment(name=name, model=model, data=data, batch=batch, plan=PLAN)


def small() -> Experiment:
    """A dense decoder of 4 layers, 1,024 wide."""
    return _text("small", Decoder(vocab=32_000, context=2048, layers=4, embed=1024, heads=8, mlp=4096), 32)


def wide() -> Experiment:
    """A dense decoder of 8 layers, 2,048 wide, four key heads."""
    model = Decoder(vocab=32_000, context=2048, layers=8, embed=2048, heads=16, kv_heads=4, mlp=5632)
    return _text("wide", model, 16)


def middle() -> Experiment:
    """A dense decoder of 6 layers, 1,024 wide, with a vocabulary so small that its blocks need more than its loss."""
    return _text("middle", Decoder(vocab=4096, context=1024, layers=6, embed=1024, heads=8, mlp=4096), 64)


def mixture() -> Experiment:
    """Six layers of eight experts."""
    return _text("mixture", Mixture(), 32)


def vit() -> Experiment:
    """A vision transformer of 8 layers on 224 pixels."""
    model = ViT(classes=1000, image=224, patch=14, layers=8, embed=1024, heads=16, mlp=4096)
    return Experiment(name="vit", model=model, data=Pixels(model.image), batch=256, plan=PLAN)


def little() -> Experiment:
    """A dense decoder of 4 layers, 512 wide."""
    return _text("little", Decoder(vocab=8192, context=512, layers=4, embed=512, heads=4, mlp=2048), 64)


def experiment() -> Experiment:
    """The smallest of them."""
    return small()


VARIANTS = {"small": small, "middle": middle, "wide": wide, "mixture": mixture, "vit": vit, "little": little}
