"""ViT: a vision transformer as a value (Dosovitskiy et al. 2021, arXiv:2010.11929); its fields cover Hugging Face's
`ViTForImageClassification`.

The model has pre-norm blocks over the patches of an image, and learned positions. Left out: distillation tokens,
relative positions, images of a size other than the model's. The module that a ViT builds is in `vit_module.py`; this
file imports neither JAX nor Flax.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from jaxscale.errors import UserError
from jaxscale.models.field_checks import check_counts, check_positive, check_rates
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr

if TYPE_CHECKING:
    from flax import nnx

    from jaxscale.blocks import Context, Loss
    from jaxscale.models.vit_module import ViTModule
    from jaxscale.typing import Batch

PlainMlpKind = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Pooling = Literal["token", "mean"]


@dataclasses.dataclass(frozen=True)
class ViT:
    """A vision transformer that classifies images.

    Args:
        classes: number of classes.
        image: height and width of an image, in pixels.
        patch: height and width of a patch, in pixels.
        channels: channels of an image.
        layers: number of blocks.
        embed: width of the residual stream.
        heads: number of attention heads.
        mlp: hidden width of the feed-forward layers; `None` means 4 * embed.
        mlp_kind: activation of the feed-forward layers, "gelu" (exact), "gelu_tanh", "quick_gelu", "relu" or "silu".
        pooling: input of the classifier, "token" (a learned token before the patches) or "mean" (of the patches).
        attention_bias: whether the projections to queries, keys and values have biases. All other projections have one.
        norm_eps: constant added to the variance in LayerNorms.
        dropout: rate of dropout after the positions are added and where attention and mlp are added to the residual
            stream.
        smoothing: share of the target distribution that is spread evenly over all classes (label smoothing).
        init_std: standard deviation of the initial weights.

    Raises:
        UserError: a field is out of range, or two fields are incompatible.

    Example:
        >>> ViT(classes=10, image=28, patch=7, channels=1, layers=2, embed=64, heads=4).patches
        16
        >>> ViT(image=30, patch=16)
        Traceback (most recent call last):
        jaxscale.errors.UserError: patch: got 16, expected a divisor of image 30
    """

    classes: int = 1000
    image: int = 224
    patch: int = 16
    channels: int = 3
    layers: int = 12
    embed: int = 768
    heads: int = 12
    mlp: int | None = None
    mlp_kind: PlainMlpKind = "gelu"
    pooling: Pooling = "token"
    attention_bias: bool = True
    norm_eps: float = 1e-6
    dropout: float = 0.0
    smoothing: float = 0.0
    init_std: float = 0.02

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, ("classes", "image", "patch", "channels", "layers", "embed", "heads", "mlp"))
        if self.image % self.patch:
            raise UserError(f"patch: got {self.patch}, expected a divisor of image {self.image}")
        if self.embed % self.heads:
            raise UserError(f"heads: got {self.heads}, expected a divisor of embed {self.embed}")
        check_rates(self, ("dropout", "smoothing"))
        check_positive(self, ("norm_eps", "init_std"))

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def mlp_width(self) -> int:
        """Hidden width of a feed-forward layer: `mlp`, or 4 * embed if `mlp` is `None`."""
        return self.mlp or 4 * self.embed

    def logical_sizes(self) -> dict[str, int]:
        """Return the sizes that mesh axes must divide, by logical axis."""
        return {"heads": self.heads, "kv_heads": self.heads, "mlp": self.mlp_width, "embed": self.embed}

    def build(self, rngs: "nnx.Rngs", *, vocab_multiple: int = 1) -> "ViTModule":
        """Build the NNX module. There is no vocabulary to pad."""
        from jaxscale.models.vit_module import ViTModule

        return ViTModule(self, rngs=rngs)

    def loss(self, module: "ViTModule", batch: "Batch", context: "Context") -> "Loss":
        """Return the summed cross-entropy of a batch.

        Args:
            module: the result of `build`, or a copy with other parameters.
            batch: float `images` [B, image, image, channels], int `labels` [B]; optionally float `weights` [B].
            context: context of the forward pass, with the key, the compute dtype and the implementation of attention.
        """
        from jaxscale.models.classify import image_loss

        return image_loss(module, batch, context, self.smoothing)

    def accuracy(self, module: "ViTModule", batch: "Batch", context: "Context") -> tuple[Any, Any]:
        """Return (summed weights of the correctly classified rows, summed weights of all rows)."""
        from jaxscale.models.classify import image_accuracy

        return image_accuracy(module, batch, context)
