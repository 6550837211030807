"""LoRA: a model of jaxscale's layers with adapters of low rank, which alone are trained."""

import dataclasses
import re
from typing import Any

from flax import nnx

from jaxscale.blocks import Context, Loss, Model
from jaxscale.errors import UserError
from jaxscale.layers.lora import add_adapters
from jaxscale.typing import Array, Batch
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr


@dataclasses.dataclass(frozen=True)
class LoRA:
    r"""A model with an adapter of low rank beside each chosen weight; the adapters alone are trained.

    \[ y = x W + \tfrac{\alpha}{r} (x A) B, \qquad A \in \mathbb{R}^{I \times r}, \; B \in \mathbb{R}^{r \times O} \]

    `B` is zero at first. `Optimizer(train="lora|head")` trains other parameters as well. `jaxscale export` adds the
    adapters to the weights.

    Args:
        model: the model, such as a `Decoder`, a `ViT` or a `Pretrained`.
        rank: rank r of the adapters.
        alpha: factor of the adapters times the rank; by default, twice the rank.
        on: regular expression that is searched for in the paths of the linear layers, such as "attention/(q|v)"; by
            default, those of attention and MLP.

    Raises:
        UserError: a number is not positive, or `on` is no regular expression; or, when the module is built, no layer's
            path has the pattern, or a layer is narrower than the rank.

    Example:
        >>> from jaxscale.models import Decoder
        >>> model = LoRA(Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), rank=2)
        >>> model.build(nnx.Rngs(0)).blocks.layers.attention.q.lora.a.shape
        (2, 8, 2)

    References:
        Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    model: Model
    rank: int = 8
    alpha: float | None = None
    on: str = "attention|mlp"

    train = "lora"
    """What `Experiment.train` is if the optimizer does not specify it."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        if self.rank < 1:
            raise UserError(f"rank: got {self.rank}, expected a whole number >= 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise UserError(f"alpha: got {self.alpha}, expected a positive number")
        try:
            re.compile(self.on)
        except re.error as error:
            raise UserError(f"on: got {self.on!r}, expected a regular expression: {error}") from None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        if name.startswith("_") or name == "model":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.model, name)

    @property
    def scale(self) -> float:
        """Factor of the adapters."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    def logical_sizes(self) -> dict[str, int]:
        """Return the logical sizes of the model."""
        return self.model.logical_sizes()

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> nnx.Module:
        """Build the model's module, with adapters."""
        module = self.model.build(rngs, vocab_multiple=vocab_multiple)
        add_adapters(module, self.rank, self.scale * self.rank, self.on, rngs.params())
        return module

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the loss of the model."""
        return self.model.loss(module, batch, context)

    def merged(self, params: dict[str, Array]) -> dict[str, Array]:
        """Return parameters in which each adapter is added to its weight.

        Args:
            params: parameters of single layers by name, such as "blocks.layers.0.attention.q.weight".
        """
        suffix = ".lora.a"
        merged_params = {name: array for name, array in params.items() if ".lora." not in name}
        for name in params:
            if name.endswith(suffix):
                layer_name = name.removesuffix(suffix)
                product = params[name] @ params[f"{layer_name}.lora.b"]
                merged_params[f"{layer_name}.weight"] = params[f"{layer_name}.weight"] + self.scale * product
        return merged_params
