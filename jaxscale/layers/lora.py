"""Low-rank adapters: a `Linear` with an adapter adds the adapter's output to the output of its own weight.

    y = x W + (α / r) (x A) B,    A in R^(I x r), B in R^(r x O)

`B` is zero at first, so the adapted model initially computes the same as the original model. `add_adapters` adds
adapters to the layers of a built module, and leaves the weights unchanged. `store_weights` quantizes these weights.

References:
    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
"""

import math
import re
import zlib

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.errors import UserError
from jaxscale.layers.linear import Linear, matmul
from jaxscale.layers.stack import in_one_stack
from jaxscale.lowbit.few_bit_weight import FORMATS, LEAST_BLOCK, FewBitWeight
from jaxscale.typing import Array, Float, Key


class Adapter(nnx.Module):
    """The function `scale (x A) B`; in a stack of layers, `A` and `B` have a leading dim of layers.

    Args:
        a: the matrix A, [I, r].
        b: the matrix B, [r, O].
        scale: factor of the product.
        axes: logical axes of the dims of the adapted weight.
    """

    def __init__(
        self, a: Float[Array, "*L I r"], b: Float[Array, "*L r O"], scale: float, axes: tuple[str | None, ...]
    ) -> None:
        *layer_axes, in_axis, out_axis = axes
        self.a = nnx.LoRAParam(a, out_sharding=(*layer_axes, in_axis, None))
        self.b = nnx.LoRAParam(b, out_sharding=(*layer_axes, None, out_axis))
        self.scale = scale

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        """Return `scale (x A) B` in the type of `x`."""
        return self.scale * matmul(matmul(x, self.a[...]), self.b[...])


def add_adapters(module: nnx.Module, rank: int, alpha: float, on: str, key: Key) -> None:
    """Add an adapter, in place, to each `Linear` whose path matches the pattern `on`.

    Args:
        module: the module.
        rank: rank r of the adapters.
        alpha: α of the formula; the adapters are scaled by α / r.
        on: regular expression that is searched for in the paths of layers.
        key: key from which every `A` is drawn. The draw for a layer of a stack does not depend on the number of layers
            or on their groups.

    Raises:
        UserError: the pattern matches no layer's path, or a layer is narrower than the rank.
    """
    for path, layer in _layers_on(module, on, "on").items():
        weight = layer.weight
        *stack_shape, in_size, out_size = weight.shape
        if rank > min(in_size, out_size):
            raise UserError(f"rank: got {rank}, but {path} is {in_size} x {out_size}: expected at most the smaller one")
        stack_path, first_layer = in_one_stack(path)
        stack_key = jax.random.fold_in(key, zlib.crc32(stack_path.encode()) & 0x7FFFFFFF)
        layer_count = math.prod(stack_shape)
        layer_keys = jax.vmap(lambda index, key=stack_key: jax.random.fold_in(key, index))(
            first_layer + jnp.arange(layer_count)
        )
        draw_a = jax.vmap(lambda key, shape=(in_size, rank): jax.random.normal(key, shape, jnp.float32))
        a = draw_a(layer_keys).reshape(*stack_shape, in_size, rank) / math.sqrt(in_size)
        b = jnp.zeros((*stack_shape, rank, out_size), jnp.float32)
        layer.lora = Adapter(a, b, alpha / rank, _axes_of(weight))


def store_weights(module: nnx.Module, format: str, block: int, on: str) -> None:
    """Quantize, in place, the weight of each `Linear` whose path matches the pattern `on`.

    Args:
        module: the module. Adapters, if any, must have been added already.
        format: key of `lowbit.few_bit_weight.FORMATS`.
        block: largest number of inputs that share a scale. A layer uses the largest divisor of its number of inputs
            that is not above `block`.
        on: regular expression that is searched for in the paths of layers.

    Raises:
        UserError: the pattern matches no layer's path, or the number of inputs of a layer has no suitable divisor.
    """
    for path, layer in _layers_on(module, on, "base_on").items():
        weight, in_size = layer.weight, layer.weight.shape[-2]
        layer_block = FORMATS[format].block_of(in_size, block)
        if layer_block is None:
            evenness_text = "an even number of " if FORMATS[format].codes_per_byte == 2 else ""
            raise UserError(
                f"base {format}: the {in_size} inputs of {path} cannot be split into equal blocks of {evenness_text}"
                f"{LEAST_BLOCK} to {block} numbers; choose layers without it by base_on, or leave base out"
            )
        layer.weight = FewBitWeight(weight[...], format, layer_block, _axes_of(weight))


def _layers_on(module: nnx.Module, on: str, field: str) -> dict[str, Linear]:
    """Return the `Linear` layers whose path matches the pattern `on`, by path; `field` names the pattern in errors."""
    layer_by_path = {
        "/".join(map(str, path)): node for path, node in nnx.iter_graph(module) if isinstance(node, Linear)
    }
    chosen_layer_by_path = {path: layer for path, layer in layer_by_path.items() if re.search(on, path)}
    if not chosen_layer_by_path:
        path_texts = ", ".join(sorted(layer_by_path)) or "none"
        raise UserError(f"{field}: {on!r} is found in no path of a Linear layer; the paths are {path_texts}")
    return chosen_layer_by_path


def _axes_of(weight: nnx.Param) -> tuple[str | None, ...]:
    """Return the logical axes of the dims of a weight."""
    return tuple(weight.get_metadata().get("out_sharding") or (None,) * len(weight.shape))
