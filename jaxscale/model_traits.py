"""Properties of a model that the checks of plans and data read."""

import dataclasses
from typing import Any, Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class ModelTraits:
    """Sizes and properties of a model that limit which plans and data suit it; a size that a model lacks is `None`.

    A model family reports its traits in a method `traits()`. Without that method, `ModelTraits.of` reads the fields of
    the model that have the names of traits, so a family whose fields have these names needs no method.

    Args:
        layers: number of blocks.
        context: largest number of positions in a row of tokens.
        vocab: number of different tokens.
        classes: number of classes of a classifier.
        image: height and width of the images, in pixels.
        channels: number of channels of the images.
        windows: attention windows of successive layers, repeated over the layers; with `None`, a layer sees all
            positions.
        foreign: whether the module has layers of its own, so that options of `jaxscale.layers` do not apply.
        over: "rows" if the loss is a sum over rows; "batch" if the loss couples the rows of a batch, as a contrastive
            loss does; `None` if that is unknown.
        generates: whether the model decodes with a cache, that is, has a method `init_cache`.

    Example:
        >>> from jaxscale.models import Decoder, ViT
        >>> traits = ModelTraits.of(Decoder(vocab=256, context=64, layers=2, embed=64, heads=4))
        >>> traits.layers, traits.context, traits.classes, traits.generates
        (2, 64, None, True)
        >>> ModelTraits.of(ViT(classes=10)).image
        224
    """

    layers: int | None = None
    context: int | None = None
    vocab: int | None = None
    classes: int | None = None
    image: int | None = None
    channels: int | None = None
    windows: tuple[int | None, ...] = ()
    foreign: bool = False
    over: Literal["rows", "batch"] | None = None
    generates: bool = False

    @classmethod
    def of(cls, model: Any) -> "ModelTraits":
        """Return the traits from `model.traits()`; without that method, from the model's fields with a trait's name."""
        report_traits = getattr(model, "traits", None)
        if report_traits is not None:
            return report_traits()
        trait_by_name: dict[str, Any] = {
            field.name: getattr(model, field.name, field.default)
            for field in dataclasses.fields(cls)
            if field.name != "generates"
        }
        return cls(**trait_by_name, generates=hasattr(model, "init_cache"))


class TensorDims(NamedTuple):
    """Numbers of dims of a parameter whose layer is known. The order is: stack dims, row dims, column dims.

    Args:
        stack: number of leading dims, along which tensors of one shape are stacked.
        rows: number of the following dims, which are the inputs of a projection or convolution. It is 0 for a gain or a
            bias, and `None` if only the stack is known.
    """

    stack: int
    rows: int | None
