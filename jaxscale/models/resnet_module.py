"""The module of a `ResNet`: a stem, a `Chain` of residual blocks, and a classifier."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.conv import BatchNorm, Conv, max_pool
from jaxscale.layers.linear import Linear
from jaxscale.layers.stack import Chain
from jaxscale.models.resnet import ResNet
from jaxscale.typing import Array, Float


class ConvNorm(nnx.Module):
    """A convolution, then a batch norm. Padding is the same on both sides, as in torchvision.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        window: height and width of the kernel.
        stride: step between output positions.
        momentum: decay of the running statistics of the batch norm.
        gain: initial gain of the batch norm.
        rngs: random streams; the weights are drawn from `params`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        window: int,
        stride: int = 1,
        momentum: float,
        gain: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(in_channels, out_channels, window=window, stride=stride, padding=window // 2, rngs=rngs)
        self.norm = BatchNorm(out_channels, momentum=momentum, gain=gain)

    def __call__(self, x: Float[Array, "B I J C"], *, context: Context = Context()) -> Float[Array, "B P Q O"]:
        """Return `norm(conv(x))`."""
        return self.norm(self.conv(x), context=context)


class ResidualBlock(nnx.Module):
    """`relu(shortcut(x) + branch(x))`; the shortcut is `x`, or a 1x1 convolution if input and output differ in shape.

    Args:
        in_channels: channels of the input.
        width: channels inside the branch; a bottleneck outputs 4 times as many.
        stride: step between output positions of the block.
        bottleneck: whether the branch has three convolutions instead of two.
        momentum: decay of the running statistics of the batch norms.
        rngs: random streams; the weights are drawn from `params`.
    """

    def __init__(self, in_channels: int, width: int, *, stride: int, bottleneck: bool, momentum: float, rngs: nnx.Rngs):
        def make_conv_norm(conv_in: int, conv_out: int, window: int, stride: int = 1, gain: float = 1.0) -> ConvNorm:
            """Make a convolution followed by a batch norm."""
            return ConvNorm(conv_in, conv_out, window=window, stride=stride, momentum=momentum, gain=gain, rngs=rngs)

        if bottleneck:
            out_channels = 4 * width
            conv_norms = [
                make_conv_norm(in_channels, width, 1),
                make_conv_norm(width, width, 3, stride),
                make_conv_norm(width, out_channels, 1, gain=0.0),
            ]
        else:
            out_channels = width
            conv_norms = [make_conv_norm(in_channels, width, 3, stride), make_conv_norm(width, width, 3, gain=0.0)]
        self.branch = nnx.List(conv_norms)
        is_identity = in_channels == out_channels and stride == 1
        self.shortcut = None if is_identity else make_conv_norm(in_channels, out_channels, 1, stride)

    def __call__(self, x: Float[Array, "B I J C"], *, context: Context = Context()) -> Float[Array, "B P Q O"]:
        """Return the activations after the block."""
        y = x
        for layer_index, layer in enumerate(self.branch):
            y = layer(jax.nn.relu(y) if layer_index else y, context=context)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x, context=context)))


class ResNetModule(nnx.Module):
    """Maps images to the logits of the classes.

    Args:
        config: the model value.
        rngs: random streams; the weights are drawn from `params`.
    """

    def __init__(self, config: ResNet, *, rngs: nnx.Rngs):
        self.config = config
        stem_window, stem_stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.stem = ConvNorm(
            config.channels, config.width, window=stem_window, stride=stem_stride, momentum=config.momentum, rngs=rngs
        )
        blocks, channel_count = [], config.width
        for stage_index, block_count in enumerate(config.stages):
            width = config.width * 2**stage_index
            for block_index in range(block_count):
                block_stride = 2 if stage_index and not block_index else 1
                blocks.append(
                    ResidualBlock(
                        channel_count,
                        width,
                        stride=block_stride,
                        bottleneck=config.bottleneck,
                        momentum=config.momentum,
                        rngs=rngs,
                    )
                )
                channel_count = width * (4 if config.bottleneck else 1)
        self.blocks = Chain(blocks)
        # zeros: the first loss is log(classes) for any features
        zeros_init = nnx.initializers.zeros_init()
        self.head = Linear(
            channel_count, config.classes, axes=("channels", None), bias=True, init=zeros_init, rngs=rngs
        )

    def __call__(self, images: Float[Array, "B I J C"], *, context: Context = Context()) -> Float[Array, "B V"]:
        """Return the logits of the classes.

        Args:
            images: float pixels, on the same scale as in training.
            context: context of the forward pass.
        """
        if images.shape[-1] != self.config.channels:
            raise UserError(
                f"images: got shape {images.shape}, expected (B, height, width, {self.config.channels}): "
                "set channels of the ResNet to those of the data"
            )
        dtype = self.head.weight[...].dtype if context.dtype is None else jnp.dtype(context.dtype)
        x = jax.nn.relu(self.stem(images.astype(dtype), context=context))
        if self.config.stem == "imagenet":
            x = max_pool(x, window=3, stride=2, padding=1)
        x = self.blocks(x, context=context)
        return self.head(x.astype(jnp.float32).mean((1, 2)).astype(dtype))
