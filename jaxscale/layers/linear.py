"""Linear, and its matrix product, which has a custom backward pass for two reasons.

Mixed precision needs no setting: `matmul` computes in the type of `x` and returns the gradient of `w` in the type of
`w`. With float32 parameters and bfloat16 activations the gradient leaves the product's float32 accumulator unrounded,
and is reduced across devices in float32; with bfloat16 parameters the gradient is bfloat16.

The gradient of `w` is the product of two activations, one of which must be transposed. Autodiff always transposes the
gradient of the output; here the narrower of the two is transposed. XLA:CPU recomputes the elementwise work that leads
to a transposed operand, with strided memory access. For the wide operand in an MLP, that took a quarter of the time of
a training step of `experiments/shakespeare.py` (measured by `experiments/benchmarks/peer.py`).

Left out: forward-mode differentiation (`jax.jvp`, `jax.linearize`), which a custom backward pass excludes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.layers.traced_device import traced_device
from jaxscale.lowbit.few_bit_weight import FewBitWeight
from jaxscale.lowbit.products import product
from jaxscale.typing import Array, Float

Initializer = Callable[..., Any]
"""A function `init(key, shape, dtype) -> array`, such as those in `nnx.initializers`."""


def _contract(x: Any, w: Any, w_dim: int, result_type: Any) -> Any:
    """Contract the last dim of `x` with dim `w_dim` of `w`, in the type of `x`; the result has type `result_type`."""
    return jax.lax.dot_general(
        x, w.astype(x.dtype), (((x.ndim - 1,), (w_dim,)), ((), ())), preferred_element_type=jnp.dtype(result_type)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Any, w: Any, w_dim: int, result_type: Any) -> Any:
    """Compute `_contract`, with the backward pass that the module's docstring describes."""
    return _contract(x, w, w_dim, result_type)


def _product_forward(x: Any, w: Any, w_dim: int, result_type: Any) -> Any:
    return _contract(x, w, w_dim, result_type), (x, w)


def _product_backward(w_dim: int, result_type: Any, residuals: Any, dy: Any) -> Any:
    """Return the gradients of `x` and `w`; `residuals` is the pair (x, w), and `dy` is the gradient of the product."""
    x, w = residuals
    dy = dy.astype(x.dtype)
    dx = _contract(dy, w, 1 - w_dim, x.dtype)
    batch_dims = tuple(range(x.ndim - 1))
    if x.dtype == w.dtype:
        is_x_left = x.shape[-1] <= dy.shape[-1]
    else:
        is_x_left = w_dim == 0  # XLA:CPU cannot transpose the wide result of a product of narrow types
    left_operand, right_operand = (x, dy) if is_x_left else (dy, x)
    dw = jax.lax.dot_general(
        left_operand, right_operand, ((batch_dims, batch_dims), ((), ())), preferred_element_type=w.dtype
    )
    if is_x_left != (w_dim == 0):
        # XLA:CPU would fold the transposition into a product of two transposed operands, at up to twice the time
        # (docs/choosing/speed.md)
        dw = (jax.lax.optimization_barrier(dw) if traced_device()[0] == "cpu" else dw).T
    return dx, dw.astype(w.dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul(
    x: Float[Array, "*B I"], w: Float[Array, "_ _"], *, transposed: bool = False, result: Any = None
) -> Float[Array, "*B O"]:
    """Compute `x @ w` in the type of `x`; the gradient of `w` is accumulated and returned in the type of `w`.

    Args:
        x: activations (*B, I).
        w: parameters (I, O), in any float type.
        transposed: whether `w` is (O, I); the product is then `x @ w.T`, without a transposed copy.
        result: type of the product, the type of `x` by default; float32 returns the accumulator unrounded.

    Returns:
        The product (*B, O).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))
        >>> matmul(x, w).dtype, jax.grad(lambda w: matmul(x, w).sum())(w).dtype
        (dtype(bfloat16), dtype('float32'))
    """
    w_dim = 1 if transposed else 0
    return _product(x, w, w_dim, jnp.dtype(x.dtype if result is None else result))


@jax.custom_vjp
def _add_narrow(x: Any, b: Any) -> Any:
    """Compute `x + b` in the type of `x`, for `x` and `b` of different types."""
    return x + b.astype(x.dtype).reshape((1,) * (x.ndim - 1) + b.shape)


def _add_narrow_backward(typed_zero: Any, dy: Any) -> Any:
    """Return the gradients of `x` and `b`; `typed_zero` is a zero in the type of `b`."""
    return dy, jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=typed_zero.dtype)


_add_narrow.defvjp(lambda x, b: (_add_narrow(x, b), jnp.zeros((), b.dtype)), _add_narrow_backward)


def add_bias(x: Float[Array, "*B O"], b: Float[Array, "O"]) -> Float[Array, "*B O"]:
    """Compute `x + b` in the type of `x`; the gradient of `b` is summed in the type of `b`."""
    if x.dtype == b.dtype:
        return x + b.reshape((1,) * (x.ndim - 1) + b.shape)
    return _add_narrow(x, b)


class Linear(nnx.Module):
    """`y = x W + b`.

    Args:
        in_size: width of the input.
        out_size: width of the output.
        axes: logical axes of the dims of `W`; the bias has the second axis.
        bias: whether the layer has a `b`, initially zeros.
        init: initializer of `W`; by default normal with variance 1 / in_size.
        rngs: random streams; `W` is drawn from `params`.

    Example:
        >>> from flax import nnx
        >>> Linear(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
        (2, 4)
    """

    lora: Any = None
    """The layer's `layers.lora.Adapter`, which is a function of `x`; `None` if the layer has no adapter."""
    weight: Any
    """The matrix `W`, which may be a `FewBitWeight`."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        axes: tuple[str | None, str | None] = ("embed", "mlp"),
        bias: bool = False,
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(1 / math.sqrt(in_size)) if init is None else init
        self.weight = nnx.Param(init(rngs.params(), (in_size, out_size), jnp.float32), out_sharding=axes)
        self.bias = nnx.Param(jnp.zeros((out_size,), jnp.float32), out_sharding=(axes[1],)) if bias else None

    def __call__(self, x: Float[Array, "*B I"], context: Context = Context()) -> Float[Array, "*B O"]:
        """Return `x W + b` in the type of `x`. If the context has a low-bit recipe, the recipe rounds the operands."""
        if isinstance(self.weight, FewBitWeight):
            y = self.weight.multiply(x)
        else:
            w = self.weight[...]
            y = matmul(x, w) if context.matmul is None else product(x, w, context.matmul)
        if self.lora is not None:
            y = y + self.lora(x)
        return y if self.bias is None else add_bias(y, self.bias[...])
