"""Linear, and its matrix product, which has a custom backward pass, for two reasons.

Mixed precision needs no setting: `matmul` computes in the type of `x` and returns the gradient of `w` in the type of
`w`. With float32 parameters and bfloat16 activations the gradient leaves the product's float32 accumulator unrounded,
and is reduced across devices in float32; with bfloat16 parameters it is bfloat16.

The gradient of `w` is the product of two activations, one of which must be transposed. Autodiff always transposes that
of the output; here it is the narrower one. XLA:CPU recomputes the elementwise work that leads to a transposed operand,
with strided memory access: with the wide one, an MLP's, that took a quarter of a step of `experiments/shakespeare.py`
(`experiments/benchmarks/peer.py`).

Left out: forward-mode differentiation (`jax.jvp`, `jax.linearize`), which functions with a custom backward pass lack.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.lowbit.products import product
from jaxscale.typing import Array, Float

Initializer = Callable[..., Any]
"""`init(key, shape, dtype) -> array`, such as those of `nnx.initializers`."""


def _contract(x: Any, w: Any, dim: int, result: Any) -> Any:
    """`x` times `w` over the last dim of `x` and dim `dim` of `w`, computed in the type of `x`."""
    return jax.lax.dot_general(
        x, w.astype(x.dtype), (((x.ndim - 1,), (dim,)), ((), ())), preferred_element_type=jnp.dtype(result)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Any, w: Any, dim: int, result: Any) -> Any:
    return _contract(x, w, dim, result)


def _product_forward(x: Any, w: Any, dim: int, result: Any) -> Any:
    return _contract(x, w, dim, result), (x, w)


def _product_backward(dim: int, result: Any, residuals: Any, dy: Any) -> Any:
    x, w = residuals
    dy = dy.astype(x.dtype)
    dx = _contract(dy, w, 1 - dim, x.dtype)
    leading = tuple(range(x.ndim - 1))
    if x.dtype == w.dtype:
        x_first = x.shape[-1] <= dy.shape[-1]
    else:
        x_first = dim == 0  # XLA:CPU has no product of narrow types whose wide result is transposed
    first, second = (x, dy) if x_first else (dy, x)
    dw = jax.lax.dot_general(first, second, ((leading, leading), ((), ())), preferred_element_type=w.dtype)
    return dx, (dw if x_first == (dim == 0) else dw.T).astype(w.dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul(
    x: Float[Array, "*B I"], w: Float[Array, "_ _"], *, transposed: bool = False, result: Any = None
) -> Float[Array, "*B O"]:
    """`x @ w` in the type of `x`; the gradient of `w` has the type of `w`, accumulated in it.

    Args:
        x: activations (*B, I).
        w: parameters (I, O), in any float type.
        transposed: `w` is (O, I), and the product is `x @ w.T` without a transposed copy.
        result: type of the product, which is its accumulator's when float32; the type of `x` by default.

    Returns:
        (*B, O).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))
        >>> matmul(x, w).dtype, jax.grad(lambda w: matmul(x, w).sum())(w).dtype
        (dtype(bfloat16), dtype('float32'))
    """
    result = jnp.dtype(x.dtype if result is None else result)
    dim = 1 if transposed else 0
    return _product(x, w, dim, result)


@jax.custom_vjp
def _add_narrow(x: Any, b: Any) -> Any:
    return x + b.astype(x.dtype).reshape((1,) * (x.ndim - 1) + b.shape)


def _add_narrow_backward(b: Any, dy: Any) -> Any:
    return dy, jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=b.dtype)


_add_narrow.defvjp(lambda x, b: (_add_narrow(x, b), jnp.zeros((), b.dtype)), _add_narrow_backward)


def add_bias(x: Float[Array, "*B O"], b: Float[Array, "O"]) -> Float[Array, "*B O"]:
    """`x + b` in the type of `x`; the gradient of `b` is summed in the type of `b`."""
    if x.dtype == b.dtype:
        return x + b.reshape((1,) * (x.ndim - 1) + b.shape)
    return _add_narrow(x, b)


class Linear(nnx.Module):
    """`y = x W + b`.

    Args:
        in_size: width of the input.
        out_size: width of the output.
        axes: logical axes of `W`'s dims; the bias carries the second.
        bias: whether there is a `b`, zeros at first.
        init: initializer of `W`; variance 1 / in_size by default.
        rngs: random streams; `params` is drawn from.

    Example:
        >>> from flax import nnx
        >>> Linear(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
        (2, 4)
    """

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
        """`x` projected, in the type of `x`; the product is rounded by the context's recipe, if any."""
        w = self.weight[...]
        y = matmul(x, w) if context.matmul is None else product(x, w, context.matmul)
        return y if self.bias is None else add_bias(y, self.bias[...])
