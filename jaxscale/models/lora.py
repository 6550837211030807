"""LoRA: a model of jaxscale's layers with low-rank adapters; by default, only the adapters are trained."""

import dataclasses
import re
from typing import Any

from flax import nnx

from jaxscale.blocks import Context, Loss, Model
from jaxscale.errors import UserError
from jaxscale.layers.lora import add_adapters, store_weights
from jaxscale.lowbit.few_bit_weight import FORMATS, LEAST_BLOCK, few_bit_format
from jaxscale.typing import Array, Batch
from jaxscale.values import check_types
from jaxscale.values.short_repr import short_repr


@dataclasses.dataclass(frozen=True)
class LoRA:
    r"""A model with a low-rank adapter beside each chosen weight; only the adapters are trained.

    \[ y = x W + \tfrac{\alpha}{r} (x A) B, \qquad A \in \mathbb{R}^{I \times r}, \; B \in \mathbb{R}^{r \times O} \]

    `B` is zero at first. `Optimizer(train="lora|head")` trains other parameters as well. `jaxscale export` adds the
    adapters to the weights.

    With `base`, the weights that are not trained are quantized (QLoRA): they are stored as a code for each element, and
    a float32 scale for each block of inputs. A layer dequantizes its weight when it multiplies, forward and backward.

    Args:
        model: the model, such as a `Decoder`, a `ViT` or a `Pretrained`.
        rank: rank r of the adapters.
        alpha: α of the formula; the adapters are scaled by α / r. By default, α = 2r.
        on: regular expression, such as "attention/(q|v)". Linear layers whose paths contain a match get adapters; by
            default, these are the layers of attention and MLP.
        base: format of the weights that are not trained: "nf4" (4 bits, quantiles of the normal distribution), "int4"
            or "int8" (equal steps); by default, these weights are stored in the precision of the plan.
        base_on: regular expression. Linear layers whose paths contain a match store their weights in the format `base`.
        base_block: number of inputs that share a scale. If it does not divide a layer's number of inputs, the layer
            uses the largest smaller divisor.

    Raises:
        UserError: a number is out of range, `base` is not a format, or `on` or `base_on` is not a regular expression.
            `build` raises if a pattern matches no layer's path, a layer is narrower than the rank, or a layer's number
            of inputs has no suitable divisor.

    Example:
        >>> from jaxscale.models import Decoder
        >>> model = LoRA(Decoder(vocab=8, context=8, layers=2, embed=8, heads=2), rank=2)
        >>> model.build(nnx.Rngs(0)).blocks.layers.attention.q.lora.a.shape
        (2, 8, 2)
        >>> nf4 = dataclasses.replace(model, base="nf4")
        >>> nf4.build(nnx.Rngs(0)).blocks.layers.mlp.down.weight.codes.shape  # layers, blocks, bytes, outputs
        (2, 1, 16, 8)

    References:
        Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
        Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
    """

    model: Model
    rank: int = 8
    alpha: float | None = None
    on: str = "attention|mlp"
    base: str | None = None
    base_on: str = "attention|mlp"
    base_block: int = 64

    train = "lora"
    """Pattern for the names of the trained parameters, unless the optimizer specifies one."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        if self.rank < 1:
            raise UserError(f"rank: got {self.rank}, expected a whole number >= 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise UserError(f"alpha: got {self.alpha}, expected a positive number")
        for field in ("on", "base_on"):
            try:
                re.compile(getattr(self, field))
            except re.error as error:
                raise UserError(
                    f"{field}: got {getattr(self, field)!r}, expected a regular expression: {error}"
                ) from None
        if self.base is not None:
            few_bit_format(self.base, "base")
        if self.base_block < LEAST_BLOCK:
            raise UserError(f"base_block: got {self.base_block}, expected a whole number >= {LEAST_BLOCK}")
        if self.base is None and (self.base_on, self.base_block) != (type(self).base_on, type(self).base_block):
            raise UserError(
                f"base_on and base_block are for a base in few bits: give base as well ({', '.join(FORMATS)})"
            )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model."""
        if name.startswith("_") or name == "model":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.model, name)

    @property
    def scale(self) -> float:
        """Factor of the adapters' products, α / r."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    @property
    def few_bits(self) -> str | None:
        """Format of the quantized weights; `None` if no weights are quantized."""
        return self.base

    def logical_sizes(self) -> dict[str, int]:
        """Return the size of each logical axis of the model."""
        return self.model.logical_sizes()

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> nnx.Module:
        """Build the model's module, with adapters."""
        module = self.model.build(rngs, vocab_multiple=vocab_multiple)
        add_adapters(module, self.rank, self.scale * self.rank, self.on, rngs.params())
        if self.base is not None:
            store_weights(module, self.base, self.base_block, self.base_on)
        return module

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the loss of the model."""
        return self.model.loss(module, batch, context)

    def merged(self, params: dict[str, Array]) -> dict[str, Array]:
        """Return float parameters in which each adapter is added to its weight.

        Args:
            params: parameters by name, with an entry for each layer, such as "blocks.layers.0.attention.q.weight". A
                quantized weight has two entries, whose names end in ".weight.codes" and ".weight.scale".
        """
        suffix = ".lora.a"
        merged_params = {name: array for name, array in params.items() if ".lora." not in name}
        for name in params:
            if self.base is not None and name.endswith(".weight.codes"):
                weight_name = name.removesuffix(".codes")
                codes, scale = (merged_params.pop(f"{weight_name}.{part_name}") for part_name in ("codes", "scale"))
                merged_params[weight_name] = FORMATS[self.base].decode(codes, scale)
        for name in params:
            if name.endswith(suffix):
                layer_name = name.removesuffix(suffix)
                adapter_product = params[name] @ params[f"{layer_name}.lora.b"]
                merged_params[f"{layer_name}.weight"] += self.scale * adapter_product
        return merged_params
