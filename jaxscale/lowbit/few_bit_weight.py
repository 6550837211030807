r"""FewBitWeight: an untrained weight of a layer, quantized to 4 or 8 bits, and its matrix product.

    scale = max |w| over a block of consecutive inputs of one output
    code  = nearest code to w / scale
    y     = x (values[code] scale)

A block has a dim of its own: codes have the shape (I / block, bytes of a block, O), and scales (I / block, O). A mesh
axis that splits the inputs or the outputs therefore never splits a block. Two codes of 4 bits share a byte: the rows of
the first half of a block are in the low bits, and those of the second half in the high bits, so that joining the halves
moves whole tiles of a TPU. Under ZeRO 3, devices gather codes, not dequantized values.

The product keeps the codes for its backward pass, and dequantizes them a second time there. It returns no gradient of
the weight, and does not keep its input. Left out: scales in 8 bits (the "double quantization" of QLoRA saves 0.05 of
the 0.56 bytes per element in 4 bits), and kernels that dequantize within the product.

References:
    Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.errors import UserError, unknown
from jaxscale.lowbit.codebooks import MAPS, Map
from jaxscale.lowbit.quantize import compute_codes, compute_scales
from jaxscale.sharding.place import MeshAndRules, constrain, current, reopened_layout
from jaxscale.typing import Array, Float

LEAST_BLOCK = 8
"""Smallest number of elements with a common scale: in smaller blocks, float32 scales are larger than 4-bit codes."""


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A format in which the elements of a weight are stored.

    Args:
        name: key of the format in `FORMATS`.
        map: name of the codes' map, in `codebooks.MAPS`.
    """

    name: str
    map: str

    @property
    def code_map(self) -> Map:
        """The map between codes and values."""
        return MAPS[self.map]

    @property
    def codes_per_byte(self) -> int:
        """Number of codes in a byte."""
        return 8 // self.code_map.bits

    def block_of(self, in_size: int, block: int) -> int | None:
        """Return the largest block length, up to `block`, that divides the inputs of a weight; `None` if there is none.

        A block length is at least `LEAST_BLOCK`, and the codes of a block fill whole bytes.

        Example:
            >>> nf4 = FORMATS["nf4"]
            >>> nf4.block_of(4096, 64), nf4.block_of(100, 64), nf4.block_of(2 * 1009, 64)
            (64, 50, None)
        """
        block_lengths = range(min(in_size, block), LEAST_BLOCK - 1, -1)
        return next(
            (
                block_length
                for block_length in block_lengths
                if in_size % block_length == 0 and block_length % self.codes_per_byte == 0
            ),
            None,
        )

    def encode(self, weight: Float[Array, "*L I O"], block: int) -> tuple[Array, Array]:
        """Return the codes (*L, I / block, block / codes_per_byte, O) and the scales (*L, I / block, O) of a weight."""
        scale = compute_scales(weight, self.map, block)
        codes = compute_codes(weight, scale, self.map, block)
        *layer_shape, in_size, out_size = weight.shape
        blocked_codes = codes.reshape(*layer_shape, in_size // block, block, out_size)
        if self.codes_per_byte == 1:
            return blocked_codes, scale
        low_codes, high_codes = jnp.split(blocked_codes.astype(jnp.int32) & 15, 2, -2)
        return (low_codes | (high_codes << 4)).astype(jnp.uint8), scale

    def decode(self, codes: Array, scale: Array) -> Float[Array, "*L I O"]:
        """Return the float32 weight (*L, I, O) that codes and scales encode."""
        unpacked_codes = codes
        if self.codes_per_byte == 2:
            packed_bytes = codes.astype(jnp.int32)
            unpacked_codes = jnp.concatenate([packed_bytes & 15, packed_bytes >> 4], -2)
            if jnp.issubdtype(self.code_map.dtype, jnp.signedinteger):
                unpacked_codes = (unpacked_codes ^ 8) - 8
        blocked_weight = self.code_map.decode(unpacked_codes) * scale[..., None, :]
        *layer_shape, block_count, block, out_size = blocked_weight.shape
        return blocked_weight.reshape(*layer_shape, block_count * block, out_size)


FORMATS = {
    format.name: format
    for format in (WeightFormat("int8", "linear8"), WeightFormat("int4", "linear4"), WeightFormat("nf4", "nf4"))
}
"""Every format by name."""


class StoredParam(nnx.Param):
    """A parameter that keeps its own dtype: it is neither trained nor cast to the precision of the plan."""


class FewBitWeight(nnx.Module):
    """A quantized weight. In a stack of layers, its arrays have the layers along their first dim.

    Args:
        weight: the weight, [I, O].
        format: key of `FORMATS`.
        block: number of inputs that share a scale; it must divide I.
        axes: logical axes of the dims of the weight.

    Example:
        >>> weight = FewBitWeight(jnp.linspace(-1, 1, 256).reshape(128, 2), "nf4", 64, ("embed", "mlp"))
        >>> weight.codes.shape, weight.codes.dtype.name, weight.scale.shape, weight.shape
        ((2, 32, 2), 'uint8', (2, 2), (128, 2))
        >>> weight.multiply(jnp.ones((3, 128))).shape
        (3, 2)
    """

    def __init__(self, weight: Float[Array, "*L I O"], format: str, block: int, axes: Sequence[str | None]) -> None:
        codes, scale = FORMATS[format].encode(weight, block)
        *layer_axes, in_axis, out_axis = axes
        self.format = format
        self.axes = (in_axis, out_axis)
        self.codes = StoredParam(codes, out_sharding=(*layer_axes, in_axis, None, out_axis))
        self.scale = StoredParam(scale, out_sharding=(*layer_axes, in_axis, out_axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized weight."""
        return decoded_shape(self.codes.shape, FORMATS[self.format])

    @property
    def block(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[-2] // self.scale.shape[-2]

    @property
    def dtype(self) -> Any:
        """Dtype of the dequantized weight."""
        return jnp.dtype(jnp.float32)

    def __getitem__(self, index: Any) -> Array:
        """Return `w[index]` of the dequantized weight w."""
        return FORMATS[self.format].decode(self.codes[...], self.scale[...])[index]

    def multiply(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        """Return `x W` in the dtype of `x`; the dequantized weight is rounded to this dtype first."""
        return _multiply(current(), self.axes, self.format, x, self.codes[...], self.scale[...])


def decoded_shape(codes_shape: Sequence[int], format: WeightFormat) -> tuple[int, ...]:
    """Return the shape (*L, I, O) of the weight whose codes have this shape.

    Example:
        >>> decoded_shape((2, 32, 5), FORMATS["nf4"])
        (128, 5)
    """
    *layer_shape, block_count, block_bytes, out_size = codes_shape
    return (*layer_shape, block_count * block_bytes * format.codes_per_byte, out_size)


def few_bit_format(name: str, field: str) -> WeightFormat:
    """Return the format with this name.

    Raises:
        UserError: the name is unknown; the message begins with `field`.
    """
    if name not in FORMATS:
        raise UserError(f"{field}: {unknown('format', name, FORMATS)}")
    return FORMATS[name]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _multiply(mesh_and_rules: MeshAndRules | None, axes: Any, format: str, x: Any, codes: Any, scale: Any) -> Any:
    """Return `x W` for the weight W that these codes and scales encode."""
    return _product(mesh_and_rules, axes, format, x, 0, codes, scale)


def _product(mesh_and_rules: Any, axes: Any, format: str, x: Any, w_dim: int, codes: Any, scale: Any) -> Any:
    """Return the product of `x` and the dequantized weight, summed over the weight's `w_dim`, in the dtype of `x`."""
    with reopened_layout(mesh_and_rules):  # under ZeRO 3, the codes are gathered here
        codes, scale = constrain(codes, axes[0], None, axes[1]), constrain(scale, *axes)
    weight = FORMATS[format].decode(codes, scale).astype(x.dtype)
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (w_dim,)), ((), ())), preferred_element_type=x.dtype)


def _multiply_forward(mesh_and_rules: Any, axes: Any, format: str, x: Any, codes: Any, scale: Any) -> Any:
    return _multiply(mesh_and_rules, axes, format, x, codes, scale), (codes, scale)


def _multiply_backward(mesh_and_rules: Any, axes: Any, format: str, residuals: Any, dy: Any) -> Any:
    """Return (gradient of `x`, `None`, `None`); codes and scales get no gradient."""
    # because of the barrier, XLA dequantizes a second time instead of keeping the weight of every unrolled layer
    codes, scale, dy = jax.lax.optimization_barrier((*residuals, dy))
    return _product(mesh_and_rules, axes, format, dy, 1, codes, scale), None, None


_multiply.defvjp(_multiply_forward, _multiply_backward)
