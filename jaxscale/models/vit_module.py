"""The module of a `ViT`: patches and positions, a `Stack` of blocks, and a classifier."""

import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.attention import Attention
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.embedding import PositionTable
from jaxscale.layers.linear import Linear
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import LayerNorm
from jaxscale.layers.stack import Stack
from jaxscale.models.vit import ViT
from jaxscale.sharding.place import constrain
from jaxscale.typing import Array, Float


class ViTBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ViT, *, rngs: nnx.Rngs):
        init = nnx.initializers.truncated_normal(config.init_std)
        head_dim = config.embed // config.heads
        self.attention_norm = LayerNorm(config.embed, eps=config.norm_eps, rngs=rngs)
        self.attention = Attention(
            config.embed,
            config.heads,
            config.heads,
            head_dim,
            bias=config.attention_bias,
            out_bias=True,
            dropout=config.dropout,
            init=init,
            out_init=init,
            rngs=rngs,
        )
        self.mlp_norm = LayerNorm(config.embed, eps=config.norm_eps, rngs=rngs)
        self.mlp = MLP(
            config.embed,
            config.mlp_width,
            kind=config.mlp_kind,
            bias=True,
            dropout=config.dropout,
            init=init,
            out_init=init,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "B T D"], *, context: Context = Context()) -> Float[Array, "B T D"]:
        """Return the residual stream after the block."""
        x = x + self.attention(self.attention_norm(x), context=context, causal=False)
        x = x + self.mlp(self.mlp_norm(x), context=context)
        return constrain(x, "batch", "seq", "embed")


class ViTModule(nnx.Module):
    """Maps images to the logits of the classes.

    Args:
        config: the model value.
        rngs: random streams; the weights are drawn from `params`.

    Attributes:
        patches: projection of the pixels of a patch to the residual stream.
        token: learned input of the classifier, (D,); `None` if the classifier pools patches.
        positions: table of learned positions.
    """

    def __init__(self, config: ViT, *, rngs: nnx.Rngs):
        init = nnx.initializers.truncated_normal(config.init_std)
        self.config = config
        patch_value_count = config.patch * config.patch * config.channels
        self.patches = Linear(patch_value_count, config.embed, axes=(None, "embed"), bias=True, init=init, rngs=rngs)
        token = init(rngs.params(), (config.embed,), jnp.float32) if config.pooling == "token" else None
        self.token = None if token is None else nnx.Param(token, out_sharding=("embed",))
        position_count = config.patches if token is None else config.patches + 1
        self.positions = PositionTable(position_count, config.embed, init=init, rngs=rngs)
        self.dropout = Dropout(config.dropout, site="positions")
        self.blocks = Stack(lambda rngs: ViTBlock(config, rngs=rngs), config.layers, rngs=rngs)
        self.norm = LayerNorm(config.embed, eps=config.norm_eps, rngs=rngs)
        # zeros: the first loss is log(classes) for any features
        zeros_init = nnx.initializers.zeros_init()
        self.head = Linear(config.embed, config.classes, axes=("embed", None), bias=True, init=zeros_init, rngs=rngs)

    def embed(self, images: Float[Array, "B I I C"], *, context: Context = Context()) -> Float[Array, "B T D"]:
        """Return the input of the first block: the learned token (if any) and the projected patches, plus positions."""
        image_size, patch_size = self.config.image, self.config.patch
        if images.shape[1:] != (image_size, image_size, self.config.channels):
            raise UserError(
                f"images: got shape {images.shape}, expected (B, {image_size}, {image_size}, {self.config.channels}): "
                "set image and channels of the ViT to those of the data"
            )
        dtype = self.patches.weight[...].dtype if context.dtype is None else context.dtype
        batch_size, patches_per_side = images.shape[0], image_size // patch_size
        x = images.astype(dtype).reshape(
            batch_size, patches_per_side, patch_size, patches_per_side, patch_size, self.config.channels
        )
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch_size, patches_per_side * patches_per_side, -1)
        x = self.patches(x)
        if self.token is not None:
            token_rows = jnp.broadcast_to(
                self.token[...].astype(x.dtype).reshape(1, 1, -1), (batch_size, 1, x.shape[-1])
            )
            x = jnp.concatenate([token_rows, x], axis=1)
        x = x + self.positions.lookup(jnp.arange(x.shape[1])[None, :], x.dtype)
        return constrain(self.dropout(x, context), "batch", "seq", "embed")

    def __call__(self, images: Float[Array, "B I I C"], *, context: Context = Context()) -> Float[Array, "B V"]:
        """Return the logits of the classes.

        Args:
            images: float pixels, on the same scale as in training.
            context: context of the forward pass.
        """
        x = self.blocks(self.embed(images, context=context), context=context)
        if self.token is not None:
            return self.head(self.norm(x[:, 0]))
        return self.head(self.norm(x).mean(1))
