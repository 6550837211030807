r"""Matrix products of layers in 8 and 4 bits: fp8, int8, and Sun et al.'s 4-bit training.

A layer has three matrix products, and the operands of each are rounded to grids before they are multiplied:

    y  = Q(x) Q(w)            summed over the inputs
    dx = Q'(dy) Q(w)^T        summed over the outputs
    dw = Q(x)^T Q''(dy)       summed over the tokens

Q, Q' and Q'' round to three grids, which a `ProductGrids` specifies; one engine computes every recipe. In each
product, scales are recomputed from the largest magnitude, either of the whole operand or of each of its channels. A
channel is a line along the dims that the product sums over, so that all terms of a sum have one scale. Gradients pass
the rounding unchanged. Codes are multiplied in their dtype. If a chip cannot multiply this dtype, XLA widens the
operands, and the result is the same.

    fp8    e4m3 forward, e5m2 gradients (Micikevicius et al. 2022), a scale for each operand
    int8   all three products in int8, a scale for each channel
    int4   activations and weights in INT4, a scale for each channel; gradients in radix 4 (a sign and three bits of
           exponent: 0 and +-4^k), a scale for each operand. Rounding has two phases: to 4^k in the product that gives
           the input's gradient, and to 4^k / 2 in the product that gives the weight's gradient, so that the rounding
           errors of the two products differ (Sun et al. 2020)

No chip multiplies the operands of int4. Instead, two INT4 operands are multiplied in int8, and an INT4 operand and a
gradient in e4m3 and e5m2, where gradients are exact because they are powers of two. Embeddings, heads, norms and
attention's scores and values are unchanged; parameters and their gradients keep their type. Left out: scales that are
learned or remembered (PACT, SAWB, delayed scaling; Sun et al. adjust the gradient scale of each layer from step to
step), stochastic rounding, convolutions.

The library qwix is not used (0.1.8, tried on JAX 0.10.2 and 0.12): it replaces `jax.lax.dot_general` while a module is
called, but the backward pass of `linear.matmul` is traced later. Of the 63 products of a decoder's layers, qwix
converted only the 21 forward products to int8, and it also converted the products of attention and of the head. It does
not pass on the type of the accumulator, so that gradients of float32 parameters would be bfloat16. It has neither radix
4 nor two phases.

References:
    Sun et al. 2020, "Ultra-Low Precision 4-bit Training of Deep Neural Networks", NeurIPS.
    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.typing import Array, Float

LEAST_MAGNITUDE = 2.0**-100
"""Least magnitude from which a scale is computed: a smaller scale may be a denormal, which XLA flushes to zero."""
RADIX_4_LEVELS = 7
"""Number of nonzero magnitudes of a radix-4 number, which three bits of exponent encode."""


def _round_and_clip(x: Any, limit: float) -> Any:
    """Return the nearest integers, clipped to +-limit."""
    return jnp.clip(jnp.round(x), -limit, limit)


def _clip(x: Any, top: float) -> Any:
    """Return values clipped to +-top; a later cast to a floating-point dtype rounds them."""
    return jnp.clip(x, -top, top)


def radix_4(x: Float[Array, "*B"], top: float) -> Float[Array, "*B"]:
    """Round each element to the nearest of 0 and +-top / 4^k for k from 0 to 6; ties go to the greater magnitude.

    With `top` = 4^3 the magnitudes are 4^-3 ... 4^3, as in the first phase of two-phase rounding; `top` = 4^3 / 2 gives
    the magnitudes of the second phase.

    Example:
        >>> radix_4(jnp.array([0.6, 2.4, 2.5, -100.0, 0.001]), 64.0).tolist()
        [0.25, 1.0, 4.0, -64.0, 0.0]
    """
    magnitude, rounded_magnitude, lower_level = jnp.abs(x), jnp.zeros_like(x), 0.0
    for k in reversed(range(RADIX_4_LEVELS)):
        level = top / 4.0**k
        rounded_magnitude += jnp.where(magnitude >= (lower_level + level) / 2, level - lower_level, 0.0)
        lower_level = level
    return jnp.where(x < 0, -rounded_magnitude, rounded_magnitude)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values that an operand is rounded to, up to a scale.

    Args:
        dtype: dtype of the codes, in which they are multiplied.
        top: the greatest code.
        rounding: function from float32 values and `top` to the nearest codes.
        by_channel: whether each channel (a line along the dims that the product sums over) has its own scale; otherwise
            the operand has one scale.
        reach: if a number, scales are powers of two that bring the largest magnitude to between half of `reach` and
            `reach`; if `None`, scales bring the largest magnitude to `top`.

    Example:
        >>> codes, scale = INT8.encode(jnp.array([[1.0, -2.0], [0.0, 0.0]]), (1,))
        >>> codes.tolist(), scale.shape
        ([[64, -127], [0, 0]], (2, 1))
    """

    dtype: str
    top: float
    rounding: Callable[[Any, float], Any]
    by_channel: bool = False
    reach: float | None = None

    def encode(self, x: Float[Array, "..."], summed_dims: Sequence[int]) -> tuple[Array, Float[Array, "..."]]:
        """Return the codes and the scales of an operand, so that `x` is nearly `codes * scales`.

        Args:
            x: an operand of a product.
            summed_dims: dims that the product sums over; the scales have size 1 along them.
        """
        numbers = x.astype(jnp.float32)
        largest_magnitude = jnp.max(
            jnp.abs(numbers), axis=tuple(summed_dims) if self.by_channel else None, keepdims=True
        )
        scale = jnp.maximum(largest_magnitude, LEAST_MAGNITUDE) / (self.reach or self.top)
        if self.reach is not None:
            scale = jnp.exp2(jnp.ceil(jnp.log2(scale)))
        return self.rounding(numbers / scale, self.top).astype(self.dtype), scale


INT8 = Grid("int8", 127.0, _round_and_clip, by_channel=True)
INT4 = Grid("int8", 7.0, _round_and_clip, by_channel=True)  # XLA:CPU multiplies no 4-bit arguments (jaxlib 0.10.2)
E4M3 = Grid("float8_e4m3fn", 448.0, _clip)
E5M2 = Grid("float8_e5m2", 57344.0, _clip)
FP4_EVEN = Grid("float8_e5m2", 4.0**3, radix_4, reach=4.0**3)
FP4_ODD = Grid("float8_e5m2", 4.0**3 / 2, radix_4, reach=4.0**3)


ROLES = {
    "forward": "layers' outputs",
    "onward": "the gradients of their inputs",
    "inward": "the gradients of their weights",
}
"""What each of a layer's three products computes, by the role of the product."""


@dataclasses.dataclass(frozen=True)
class ProductGrids:
    """The grids of the three products of a layer.

    Args:
        operands: grid of the activations and the weights.
        onward: grid of the output's gradient in the product that computes the input's gradient.
        inward: grid of the output's gradient in the product that computes the weight's gradient.
        is_emulated: whether the operands are multiplied in wider dtypes, with the same results, because no chip
            multiplies them directly.
    """

    operands: Grid
    onward: Grid
    inward: Grid
    is_emulated: bool = False

    def dtypes_of(self, role: str) -> frozenset[str]:
        """Return the dtypes of the operands in the product with this role, a key of `ROLES`."""
        second_grid = {"forward": self.operands, "onward": self.onward, "inward": self.inward}[role]
        return frozenset(_multiplied_types((self.operands.dtype, second_grid.dtype)))


RECIPES = {
    "fp8": ProductGrids(E4M3, E5M2, E5M2),
    "int8": ProductGrids(INT8, INT8, INT8),
    "int4": ProductGrids(INT4, FP4_EVEN, FP4_ODD, is_emulated=True),
}
"""Recipes for products, by their names in a plan's `matmul`."""


def _multiplied_types(dtypes: tuple[str, str]) -> tuple[str, str]:
    """Return the pair of dtypes in which two operands with codes of these dtypes are multiplied.

    If only one of the dtypes is an integer dtype, its codes (of magnitude at most 16) are cast to e4m3.
    """
    if len({jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes}) == 1:
        return dtypes
    first_dtype, second_dtype = ("float8_e4m3fn" if jnp.issubdtype(dtype, jnp.integer) else dtype for dtype in dtypes)
    return first_dtype, second_dtype


def _multiply(a: Any, b: Any, grids: tuple[Grid, Grid], dims_of_operands: Any, dtype: Any) -> Any:
    """Round two operands to their grids, and return their product.

    Args:
        a, b: the operands, of any float dtype.
        grids: grid of each operand.
        dims_of_operands: (dims of `a`, dims of `b`) that the product sums over, as two tuples.
        dtype: dtype of the product.
    """
    operand_codes, operand_scales = [], []
    for x, grid, summed_dims in zip((a, b), grids, dims_of_operands, strict=True):
        x_codes, x_scale = grid.encode(x, summed_dims)
        operand_codes.append(x_codes)
        operand_scales.append(jnp.squeeze(x_scale, summed_dims))
    code_dtypes = _multiplied_types((grids[0].dtype, grids[1].dtype))
    first_codes, second_codes = (
        x_codes.astype(code_dtype) for x_codes, code_dtype in zip(operand_codes, code_dtypes, strict=True)
    )
    is_integer = jnp.issubdtype(first_codes.dtype, jnp.integer)
    code_product = jax.lax.dot_general(
        first_codes,
        second_codes,
        (dims_of_operands, ((), ())),
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    ).astype(jnp.float32)
    first_scale, second_scale = operand_scales
    scaled_product = (
        code_product
        * first_scale.reshape(first_scale.shape + (1,) * second_scale.ndim)
        * second_scale.reshape((1,) * first_scale.ndim + second_scale.shape)
    )
    return scaled_product.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Any, w: Any, grids: ProductGrids) -> Any:
    """Compute `x @ w` on the grids of a recipe."""
    operand_grids = (grids.operands, grids.operands)
    return _multiply(x, w, operand_grids, ((x.ndim - 1,), (0,)), x.dtype)


def _product_backward(grids: ProductGrids, residuals: Any, dy: Any) -> Any:
    """Return the gradients of `x` and `w` from the gradient of the product; `residuals` is the pair (x, w)."""
    x, w = residuals
    token_dims, last_dims = tuple(range(x.ndim - 1)), (x.ndim - 1,)
    dx = _multiply(dy, w, (grids.onward, grids.operands), (last_dims, (1,)), x.dtype)
    dw = _multiply(x, dy, (grids.operands, grids.inward), (token_dims, token_dims), w.dtype)
    return dx, dw


_product.defvjp(lambda x, w, grids: (_product(x, w, grids), (x, w)), _product_backward)


def product(x: Float[Array, "*B I"], w: Float[Array, "I O"], recipe: str) -> Float[Array, "*B O"]:
    """Compute the matrix product `x @ w` with quantized operands; gradients have the dtypes of `x` and `w`.

    Args:
        x: activations (*B, I).
        w: parameters (I, O), in any float dtype.
        recipe: name of the recipe, a key of `RECIPES`.

    Returns:
        The product (*B, O), in the dtype of `x`.

    Example:
        >>> x, w = jnp.array([[1.0, -0.5]]), jnp.array([[1.0], [0.25]])
        >>> [round(float(product(x, w, name)[0, 0]), 3) for name in ("fp8", "int8", "int4")]
        [0.875, 0.873, 0.878]
    """
    return _product(x, w, RECIPES[recipe])
