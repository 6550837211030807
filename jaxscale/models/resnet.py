"""ResNet: a residual convolutional network as a value (He et al. 2016, arXiv:1512.03385), for small or large images.

Strides are in the 3x3 convolution of a bottleneck (torchvision's "v1.5"), and the last norm of each block starts at
zero (Goyal et al. 2017, arXiv:1706.02677). Left out: wide and grouped variants, squeeze and excitation, stochastic
depth. The module that a ResNet builds is in `resnet_module.py`; this file imports neither JAX nor Flax.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from jaxscale.errors import UserError
from jaxscale.models.field_checks import check_counts, check_rates
from jaxscale.values import check_types
from jaxscale.values.limits import MAX_LAYERS, check_at_most
from jaxscale.values.short_repr import short_repr

if TYPE_CHECKING:
    from flax import nnx

    from jaxscale.blocks import Context, Loss
    from jaxscale.models.resnet_module import ResNetModule
    from jaxscale.typing import Batch

Stem = Literal["small", "imagenet"]


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A residual network that classifies images: ResNet-18 by default.

    With `bottleneck` and the stages (3, 4, 6, 3), the network is ResNet-50.

    Args:
        classes: number of classes.
        channels: channels of an image.
        stages: number of blocks of each stage. Each stage after the first halves the height and width of the images
            and doubles the channels.
        width: channels inside the blocks of the first stage. With bottlenecks, the stage outputs 4 times as many.
        bottleneck: whether blocks have three convolutions (1x1, 3x3, 1x1) instead of two (3x3).
        stem: "small" is one 3x3 convolution; "imagenet" is a 7x7 convolution of stride 2, then a max pooling of stride
            2.
        momentum: decay of the running statistics of batch norms, applied once per microbatch.
        smoothing: share of the target distribution that is spread evenly over all classes (label smoothing).

    Raises:
        UserError: a field is out of range.

    Example:
        >>> ResNet(classes=10, channels=1, stages=(1, 1), width=16, stem="small").features
        32
        >>> ResNet(stages=(3, 4, 6, 3), bottleneck=True).features
        2048
    """

    classes: int = 1000
    channels: int = 3
    stages: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    bottleneck: bool = False
    stem: Stem = "imagenet"
    momentum: float = 0.9
    smoothing: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, ("classes", "channels", "width"))
        for stage_index, block_count in enumerate(self.stages):
            if block_count < 1:
                raise UserError(f"stages[{stage_index}]: got {block_count!r}, expected a whole number >= 1")
        check_at_most("stages: number of stages", len(self.stages), 16)  # each halves the image and doubles the width
        check_at_most("stages: number of blocks", sum(self.stages), MAX_LAYERS)
        if not self.stages:
            raise UserError("stages: got (), expected the number of blocks of each stage, such as (2, 2, 2, 2)")
        check_rates(self, ("momentum", "smoothing"))

    @property
    def features(self) -> int:
        """Number of channels of the last stage, which are the inputs of the classifier."""
        return self.width * 2 ** (len(self.stages) - 1) * (4 if self.bottleneck else 1)

    def logical_sizes(self) -> dict[str, int]:
        """Return the size of the axis "channels": the first stage's width, which divides every stage's channels."""
        return {"channels": self.width}

    def build(self, rngs: "nnx.Rngs", *, vocab_multiple: int = 1) -> "ResNetModule":
        """Build the NNX module. There is no vocabulary to pad."""
        from jaxscale.models.resnet_module import ResNetModule

        return ResNetModule(self, rngs=rngs)

    def loss(self, module: "ResNetModule", batch: "Batch", context: "Context") -> "Loss":
        """Return the summed cross-entropy of a batch; training updates the running statistics of `module`.

        Args:
            module: the result of `build`, or a copy with other parameters.
            batch: float `images` [B, height, width, channels], int `labels` [B]; optionally float
                `weights` [B].
            context: context of the forward pass, with the key and the compute dtype.
        """
        from jaxscale.models.classify import image_loss

        return image_loss(module, batch, context, self.smoothing)

    def accuracy(self, module: "ResNetModule", batch: "Batch", context: "Context") -> tuple[Any, Any]:
        """Return (summed weights of the correctly classified rows, summed weights of all rows)."""
        from jaxscale.models.classify import image_accuracy

        return image_accuracy(module, batch, context)
