"""The models whose train steps the benchmarks of estimates compile, as variants of one experiment file.

    jaxscale fit experiments/benchmarks/fit_models.py wide --platform "tpu v5e:2x2"

A dense decoder in three sizes, a vision transformer, and a mixture of experts with dense dispatch (GShard, Lepikhin et
al. 2020, arXiv:2006.16668): one-hot tensors bring each token to its experts and back, up to a capacity. The models of
`fit_cases.py` are small ones of 2 to 6 layers, and others from a ResNet-50 to a Llama of 3 billion parameters.
"""

import dataclasses
import math
from functools import partial
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
from jaxscale.models import Decoder, ResNet, ViT
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
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
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


def _images(name: str, model: Any, size: int, batch: int) -> Experiment:
    return Experiment(name=name, model=model, data=Pixels(size), batch=batch, plan=PLAN)


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
    return _images("vit", model, model.image, 256)


def _heads(width: int) -> Experiment:
    """A dense decoder of 4 layers whose heads have this width."""
    heads = {64: 16, 80: 8, 96: 8, 128: 8, 256: 4}[width]
    model = Decoder(
        vocab=8192, context=1024, layers=4, embed=1024, heads=heads, kv_heads=heads, head_dim=width, mlp=3072
    )
    return _text(f"heads{width}", model, 64)


def grouped() -> Experiment:
    """A GPT-2 with learned positions, LayerNorm and biases, and two key heads to eight query heads."""
    model = Decoder(
        vocab=16_000, context=512, layers=3, embed=768, heads=8, kv_heads=2, norm="layer", mlp_kind="gelu",
        positions="learned", tied=True, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return _text("grouped", model, 64)


class PlainBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, of Flax's own layers."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """The residual stream after the block, (B, T, D)."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class PlainModule(nnx.Module):
    """Tokens to logits, with nothing of jaxscale."""

    def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([PlainBlock(width, 8, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        """The logits, (B, T, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _plain(name: str, context: int, layers: int, batch: int, vocab: int = 8192, width: int = 768) -> Experiment:
    """A foreign model of Flax's own layers."""
    from jaxscale.models.foreign import ForeignModel, language_model

    model = ForeignModel(make=lambda rngs: PlainModule(vocab, width, layers, rngs), score=language_model())
    data = Text(path="text.txt", tokenizer="byte", context=context)
    return Experiment(name=name, model=model, data=data, batch=batch, plan=PLAN)


def plain() -> Experiment:
    """A foreign decoder of 4 layers of Flax's own."""
    return _plain("plain", 512, 4, 32)


def unrolled() -> Experiment:
    """A foreign decoder of 2 layers of Flax's own, on longer texts."""
    return _plain("unrolled", 1024, 2, 32)


def image() -> Experiment:
    """A vision transformer of 6 layers on 128 pixels."""
    model = ViT(classes=1000, image=128, patch=8, layers=6, embed=768, heads=12, mlp=3072)
    return _images("image", model, model.image, 128)


def convolutions() -> Experiment:
    """A ResNet of bottlenecks on 128 pixels."""
    model = ResNet(classes=1000, stages=(2, 2, 2, 2), bottleneck=True)
    return _images("convolutions", model, 128, 256)


def experts() -> Experiment:
    """Four layers of four experts."""
    return _text("experts", Mixture(vocab=8192, context=512, layers=4, embed=768, experts=4, mlp=1536), 64)


def gpt2_medium() -> Experiment:
    """A GPT-2 of 24 layers, 1,024 wide (355M parameters), with a padded vocabulary."""
    model = Decoder(
        vocab=50_304, context=1024, layers=24, embed=1024, heads=16, kv_heads=16, norm="layer", mlp_kind="gelu",
        positions="learned", tied=True, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return _text("gpt2_medium", model, 64)


def llama_1b() -> Experiment:
    """A Llama of 16 layers, 2,048 wide, heads of 64 lanes, a vocabulary of 128,256."""
    model = Decoder(vocab=128_256, context=4096, layers=16, embed=2048, heads=32, kv_heads=8, mlp=8192, tied=True)
    return _text("llama_1b", model, 16)


def llama_3b() -> Experiment:
    """A Llama of 28 layers, 3,072 wide, heads of 128 lanes, a vocabulary of 128,256."""
    model = Decoder(vocab=128_256, context=2048, layers=28, embed=3072, heads=24, kv_heads=8, mlp=8192, tied=True)
    return _text("llama_3b", model, 16)


def vit_large() -> Experiment:
    """A vision transformer of 24 layers on 224 pixels."""
    model = ViT(classes=1000, image=224, patch=16, layers=24, embed=1024, heads=16, mlp=4096)
    return _images("vit_large", model, model.image, 256)


def resnet50() -> Experiment:
    """A ResNet-50 on 224 pixels."""
    model = ResNet(classes=1000, stages=(3, 4, 6, 3), bottleneck=True)
    return _images("resnet50", model, 224, 512)


def plain_large() -> Experiment:
    """A foreign decoder of 12 layers of Flax's own, 1,024 wide."""
    return _plain("plain_large", 1024, 12, 64, vocab=32_000, width=1024)


def experts_large() -> Experiment:
    """Twelve layers of eight experts."""
    model = Mixture(context=2048, layers=12, embed=1536, heads=12, experts=8, mlp=4096)
    return _text("experts_large", model, 32)


def gemma_2b() -> Experiment:
    """A Gemma of 26 layers, 2,304 wide, heads of 256 lanes, windows in every other layer, and soft caps."""
    model = Decoder(
        vocab=256_000, context=4096, layers=26, embed=2304, heads=8, kv_heads=4, head_dim=256, mlp=9216,
        mlp_kind="geglu", norm_plus_one=True, post_norms=True, tied=True, embedding_scale=True,
        windows=(2048, None), attention_soft_cap=50.0, final_soft_cap=30.0,
    )  # fmt: skip
    return _text("gemma_2b", model, 8)


def qwen_7b() -> Experiment:
    """A Qwen of 28 layers, 3,584 wide, biases of queries, keys and values, a head of its own."""
    model = Decoder(
        vocab=152_064, context=2048, layers=28, embed=3584, heads=28, kv_heads=4, mlp=18_944, attention_bias="qkv"
    )
    return _text("qwen_7b", model, 16)


def gpt2_xl() -> Experiment:
    """A GPT-2 of 48 layers, 1,600 wide (1.6B parameters)."""
    model = Decoder(
        vocab=50_304, context=1024, layers=48, embed=1600, heads=25, kv_heads=25, norm="layer", mlp_kind="gelu",
        positions="learned", tied=True, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return _text("gpt2_xl", model, 32)


def vit_huge() -> Experiment:
    """A vision transformer of 32 layers, 1,280 wide, heads of 80 lanes, patches of 14 pixels."""
    model = ViT(classes=1000, image=224, patch=14, layers=32, embed=1280, heads=16, mlp=5120)
    return _images("vit_huge", model, model.image, 256)


def resnet152() -> Experiment:
    """A ResNet-152 on 256 pixels."""
    model = ResNet(classes=1000, stages=(3, 8, 36, 3), bottleneck=True)
    return _images("resnet152", model, 256, 256)


def plain_wide() -> Experiment:
    """A foreign decoder of 20 layers of Flax's own, 1,536 wide."""
    return _plain("plain_wide", 2048, 20, 32, vocab=50_304, width=1536)


def experts_many() -> Experiment:
    """Sixteen layers of 16 experts."""
    model = Mixture(vocab=50_304, context=1024, layers=16, embed=1024, heads=16, experts=16, mlp=3584)
    return _text("experts_many", model, 64)


def llama_8b() -> Experiment:
    """A Llama of 32 layers, 4,096 wide, a context of 8,192, a head of its own."""
    model = Decoder(vocab=128_256, context=8192, layers=32, embed=4096, heads=32, kv_heads=8, mlp=14_336)
    return _text("llama_8b", model, 8)


def phi_3b() -> Experiment:
    """A decoder of 32 layers, 2,560 wide, heads of 80 lanes, LayerNorm and biases, a head of its own."""
    model = Decoder(
        vocab=51_200, context=2048, layers=32, embed=2560, heads=32, kv_heads=32, mlp=10_240, norm="layer",
        mlp_kind="gelu", attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return _text("phi_3b", model, 16)


def qwen_4b() -> Experiment:
    """A decoder of 36 layers, 2,560 wide, normed queries and keys, heads that are wider together than the model."""
    model = Decoder(
        vocab=151_936, context=4096, layers=36, embed=2560, heads=32, kv_heads=8, head_dim=128, mlp=9728,
        qk_norm=True, tied=True,
    )  # fmt: skip
    return _text("qwen_4b", model, 8)


def smol_360m() -> Experiment:
    """A decoder of 32 layers, 960 wide, 15 heads and 5 key heads of 64 lanes."""
    model = Decoder(vocab=49_152, context=2048, layers=32, embed=960, heads=15, kv_heads=5, mlp=2560, tied=True)
    return _text("smol_360m", model, 32)


def windows_1b() -> Experiment:
    """A decoder of 26 layers, 1,152 wide, one key head of 256 lanes, windows in five of six layers."""
    model = Decoder(
        vocab=262_144, context=4096, layers=26, embed=1152, heads=4, kv_heads=1, head_dim=256, mlp=6912,
        mlp_kind="geglu", norm_plus_one=True, post_norms=True, qk_norm=True, tied=True, embedding_scale=True,
        windows=(512, 512, 512, 512, 512, None),
    )  # fmt: skip
    return _text("windows_1b", model, 16)


def vit_base_384() -> Experiment:
    """A vision transformer of 12 layers, 768 wide, on 384 pixels."""
    model = ViT(classes=1000, image=384, patch=16, layers=12, embed=768, heads=12, mlp=3072)
    return _images("vit_base_384", model, model.image, 256)


def resnet101() -> Experiment:
    """A ResNet-101 on 224 pixels."""
    model = ResNet(classes=1000, stages=(3, 4, 23, 3), bottleneck=True)
    return _images("resnet101", model, 224, 256)


def plain_deep() -> Experiment:
    """A foreign decoder of 28 layers of Flax's own, 1,280 wide."""
    return _plain("plain_deep", 1024, 28, 64, vocab=32_000, width=1280)


def experts_few() -> Experiment:
    """Twenty layers of four experts, 2,048 wide."""
    model = Mixture(vocab=32_000, context=2048, layers=20, embed=2048, heads=16, experts=4, mlp=5632)
    return _text("experts_few", model, 16)


def experiment() -> Experiment:
    """The smallest of them."""
    return small()


VARIANTS = {
    "small": small,
    "middle": middle,
    "wide": wide,
    "mixture": mixture,
    "vit": vit,
    # of `fit_cases.py`
    **{f"heads{width}": partial(_heads, width) for width in (64, 80, 96, 128, 256)},
    "grouped": grouped,
    "plain": plain,
    "unrolled": unrolled,
    "image": image,
    "convolutions": convolutions,
    "experts": experts,
    # of its design "sized"
    "gpt2_medium": gpt2_medium,
    "llama_1b": llama_1b,
    "llama_3b": llama_3b,
    "vit_large": vit_large,
    "resnet50": resnet50,
    "plain_large": plain_large,
    "experts_large": experts_large,
    # of its design "other models"
    "gemma_2b": gemma_2b,
    "qwen_7b": qwen_7b,
    "gpt2_xl": gpt2_xl,
    "vit_huge": vit_huge,
    "resnet152": resnet152,
    "plain_wide": plain_wide,
    "experts_many": experts_many,
    # of its design "outside"
    "llama_8b": llama_8b,
    "phi_3b": phi_3b,
    "qwen_4b": qwen_4b,
    "smol_360m": smol_360m,
    "windows_1b": windows_1b,
    "vit_base_384": vit_base_384,
    "resnet101": resnet101,
    "plain_deep": plain_deep,
    "experts_few": experts_few,
}
