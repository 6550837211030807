r"""Products of layers in 8 and 4 bits: fp8, int8, and Sun et al.'s 4-bit training.

A layer has three products, and each operand of each is rounded to a grid before it is multiplied:

    y  = Q(x) Q(w)            over the inputs
    dx = Q'(dy) Q(w)^T        over the outputs
    dw = Q(x)^T Q''(dy)       over the tokens

A `ProductGrids` names the grids; one engine computes every recipe. Scales are recomputed from the largest magnitude, of
the whole operand or of each of its channels, the lines along which a product sums, so that a sum has one scale.
Rounding is straight through: it is not differentiated. Codes are multiplied in their type; if a chip has no such
product, XLA widens the operands, and the result is the same.

    fp8    e4m3 forward, e5m2 gradients (Micikevicius et al. 2022), a scale for each operand
    int8   all three products, a scale for each channel
    int4   INT4 with a scale for each channel; gradients of a sign and three bits of exponent in radix 4, 0 and +-4^k,
           a scale for each layer, two-phase rounding: to 4^k for the gradient of the input, to 4^k / 2 for that of the
           weight, so that their errors differ (Sun et al. 2020)

No chip multiplies int4's operands: INT4 codes are multiplied in int8, or in e4m3 with gradients, which are powers of
two and exact in e5m2. Unchanged are embeddings, heads, norms, attention's scores and values; parameters and their
gradients keep their type. Left out: scales that are learned or remembered (PACT, SAWB, delayed scaling; Sun et al.
adjust each layer's gradient scale from step to step, here it follows from the maximum), stochastic rounding,
convolutions.

Why not qwix (0.1.8, tried on JAX 0.10.2 and 0.12): it replaces `jax.lax.dot_general` while a module is called, and the
backward pass of `linear.matmul` is traced later. Of the 63 products of a decoder's layers only the 21 forward ones
became int8, and also attention's and the head's. It does not pass on the accumulator's type, so that gradients of
float32 parameters would be bfloat16, and it has no radix 4 and no two phases.

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

SMALLEST = 2.0**-100
"""The least magnitude that a scale represents; with a much smaller one it would be a denormal, which XLA flushes."""
STEPS = 7
"""Magnitudes of a radix-4 number besides zero, encoded in three bits of exponent."""


def _rounded(x: Any, limit: float) -> Any:
    return jnp.clip(jnp.round(x), -limit, limit)


def _cast(x: Any, top: float) -> Any:
    return jnp.clip(x, -top, top)  # the cast rounds


def radix_4(x: Float[Array, "*B"], top: float) -> Float[Array, "*B"]:
    """The nearest of 0 and +-top / 4^k, k from 0 to 6; ties go to the greater magnitude.

    With `top` = 4^3 the values are 4^-3 ... 4^3, the even phase of two-phase rounding; with 4^3 / 2 the odd one.

    Example:
        >>> radix_4(jnp.array([0.6, 2.4, 2.5, -100.0, 0.001]), 64.0).tolist()
        [0.25, 1.0, 4.0, -64.0, 0.0]
    """
    magnitude, total, lower_level = jnp.abs(x), jnp.zeros_like(x), 0.0
    for k in reversed(range(STEPS)):
        level = top / 4.0**k
        total += jnp.where(magnitude >= (lower_level + level) / 2, level - lower_level, 0.0)
        lower_level = level
    return jnp.where(x < 0, -total, total)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values that an operand is rounded to, up to a scale.

    Args:
        dtype: type of the codes, which are multiplied.
        top: the greatest code.
        rounding: from float32 numbers and `top` to the nearest codes.
        channels: each channel has a scale, a line along the dims that the product sums over; else the operand has one.
        reach: scales are powers of two, by which the largest magnitude is brought to between this and its half; else
            it is brought to `top`.

    Example:
        >>> codes, scale = INT8.encode(jnp.array([[1.0, -2.0], [0.0, 0.0]]), (1,))
        >>> codes.tolist(), scale.shape
        ([[64, -127], [0, 0]], (2, 1))
    """

    dtype: str
    top: float
    rounding: Callable[[Any, float], Any]
    channels: bool = False
    reach: float | None = None

    def encode(self, x: Float[Array, "..."], summed: Sequence[int]) -> tuple[Array, Float[Array, "..."]]:
        """Codes of an operand, and its scale, of size 1 along the dims summed over: `x` is nearly `codes * scale`."""
        x = x.astype(jnp.float32)
        largest = jnp.max(jnp.abs(x), axis=tuple(summed) if self.channels else None, keepdims=True)
        scale = jnp.maximum(largest, SMALLEST) / (self.reach or self.top)
        if self.reach is not None:
            scale = jnp.exp2(jnp.ceil(jnp.log2(scale)))
        return self.rounding(x / scale, self.top).astype(self.dtype), scale


INT8 = Grid("int8", 127.0, _rounded, channels=True)
INT4 = Grid("int8", 7.0, _rounded, channels=True)  # XLA:CPU multiplies no 4-bit arguments (jaxlib 0.10.2)
E4M3 = Grid("float8_e4m3fn", 448.0, _cast)
E5M2 = Grid("float8_e5m2", 57344.0, _cast)
FP4_EVEN = Grid("float8_e5m2", 4.0**3, radix_4, reach=4.0**3)
FP4_ODD = Grid("float8_e5m2", 4.0**3 / 2, radix_4, reach=4.0**3)


ROLES = {
    "forward": "layers' outputs",
    "onward": "the gradients of their inputs",
    "inward": "the gradients of their weights",
}
"""The results of a layer's three products."""


@dataclasses.dataclass(frozen=True)
class ProductGrids:
    """The grids of the three products of a layer.

    Args:
        operands: grid of activations and weights.
        onward: grid of the gradient in the product for the input's gradient.
        inward: grid of the gradient in the product for the weight's gradient.
        emulated: no chip has these products: they are computed in wider types, with the same result.
    """

    operands: Grid
    onward: Grid
    inward: Grid
    emulated: bool = False

    def types(self, role: str) -> frozenset[str]:
        """The types of the operands in the product of a role."""
        gradient_grid = {"forward": self.operands, "onward": self.onward, "inward": self.inward}[role]
        return frozenset(_multiplied_types((self.operands.dtype, gradient_grid.dtype)))


RECIPES = {
    "fp8": ProductGrids(E4M3, E5M2, E5M2),
    "int8": ProductGrids(INT8, INT8, INT8),
    "int4": ProductGrids(INT4, FP4_EVEN, FP4_ODD, emulated=True),
}
"""Recipes by the name in a plan's `matmul`."""


def _multiplied_types(dtypes: tuple[str, str]) -> tuple[str, str]:
    """The types in which codes of two types are multiplied: integers are cast to e4m3, exact to 16, beside floats."""
    if len({jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes}) == 1:
        return dtypes
    first, second = ("float8_e4m3fn" if jnp.issubdtype(dtype, jnp.integer) else dtype for dtype in dtypes)
    return first, second


def _multiply(a: Any, b: Any, grids: tuple[Grid, Grid], dims: Any, result: Any) -> Any:
    """The product of two rounded operands, summed over `dims` of the first and of the second."""
    codes, scales = [], []
    for x, grid, summed in zip((a, b), grids, dims, strict=True):
        code, scale = grid.encode(x, summed)
        codes.append(code)
        scales.append(jnp.squeeze(scale, summed))
    first, second = (
        code.astype(t) for code, t in zip(codes, _multiplied_types((grids[0].dtype, grids[1].dtype)), strict=True)
    )
    is_integer = jnp.issubdtype(first.dtype, jnp.integer)
    y = jax.lax.dot_general(
        first, second, (dims, ((), ())), preferred_element_type=jnp.int32 if is_integer else jnp.float32
    ).astype(jnp.float32)
    first_scale, second_scale = scales
    y = (
        y
        * first_scale.reshape(first_scale.shape + (1,) * second_scale.ndim)
        * second_scale.reshape((1,) * first_scale.ndim + second_scale.shape)
    )
    return y.astype(result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Any, w: Any, recipe: ProductGrids) -> Any:
    grids = (recipe.operands, recipe.operands)
    return _multiply(x, w, grids, ((x.ndim - 1,), (0,)), x.dtype)


def _product_backward(recipe: ProductGrids, residuals: Any, dy: Any) -> Any:
    x, w = residuals
    tokens, last = tuple(range(x.ndim - 1)), (x.ndim - 1,)
    dx = _multiply(dy, w, (recipe.onward, recipe.operands), (last, (1,)), x.dtype)
    dw = _multiply(x, dy, (recipe.operands, recipe.inward), (tokens, tokens), w.dtype)
    return dx, dw


_product.defvjp(lambda x, w, recipe: (_product(x, w, recipe), (x, w)), _product_backward)


def product(x: Float[Array, "*B I"], w: Float[Array, "I O"], recipe: str) -> Float[Array, "*B O"]:
    """`x @ w` by a recipe; each gradient has the type of its operand.

    Args:
        x: activations (*B, I).
        w: parameters (I, O), in any float type.
        recipe: its name.

    Returns:
        (*B, O), in the type of `x`.

    Example:
        >>> x, w = jnp.array([[1.0, -0.5]]), jnp.array([[1.0], [0.25]])
        >>> [round(float(product(x, w, name)[0, 0]), 3) for name in ("fp8", "int8", "int4")]
        [0.875, 0.873, 0.878]
    """
    return _product(x, w, RECIPES[recipe])
