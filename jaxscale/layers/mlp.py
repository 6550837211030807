"""MLP: the feed-forward layer, gated (GLU variants, Shazeer 2020) or plain."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import Context
from jaxscale.errors import unknown
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.linear import Initializer, Linear
from jaxscale.layers.traced_device import traced_device
from jaxscale.sharding.place import constrain, move
from jaxscale.typing import Array, Float

Nonlinearity = Literal[
    "swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "silu"
]


class _Kind(NamedTuple):
    """A kind of MLP.

    Args:
        activation: elementwise function of the values, or of the gate and the values for gated kinds.
        is_gated: whether the activation of a gate multiplies the values; otherwise it is applied to the values.
    """

    activation: Callable[..., Any]
    is_gated: bool


def _plain_kind(function: Callable[[Any], Any]) -> _Kind:
    """Return the kind that applies a function to the values."""
    return _Kind(with_kept_slope(function), False)


def _gated_kind(function: Callable[[Any], Any]) -> _Kind:
    """Return the kind in which a function of the gate multiplies the values."""
    return _Kind(gate_with_kept_slope(function), True)


def with_kept_slope(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function, but with a gradient for which only one array is kept: the derivative f'(x).

    By default, JAX keeps the operands of each step that computes f(x): three arrays for the GELU, and five for its tanh
    approximation. The values are the same, and the gradients are equal up to rounding.

    Args:
        function: an elementwise function of one array.

    Example:
        >>> import jax.numpy as jnp
        >>> float(jax.grad(with_kept_slope(jnp.square))(3.0))
        6.0
    """

    @jax.custom_jvp
    def activation(x: Any) -> Any:
        return function(x)

    @activation.defjvp
    def differentiate(inputs: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        (x,), (dx,) = inputs, tangents
        y, slope = jax.jvp(function, (x,), (jax.numpy.ones_like(x),))
        return y, slope * dx

    return activation


def gate_with_kept_slope(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the function `f(gate) * up`, for whose gradient only two arrays are kept: f'(gate) * up, and f(gate).

    Args:
        function: an elementwise function f of one array.

    Example:
        >>> import jax.numpy as jnp
        >>> multiply = gate_with_kept_slope(jnp.square)
        >>> [float(gradient) for gradient in jax.grad(multiply, (0, 1))(3.0, 2.0)]
        [12.0, 9.0]
    """

    @jax.custom_jvp
    def activation(gate: Any, up: Any) -> Any:
        return function(gate) * up

    @activation.defjvp
    def differentiate(inputs: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        (gate, up), (dgate, dup) = inputs, tangents
        y, slope = jax.jvp(function, (gate,), (jax.numpy.ones_like(gate),))
        return y * up, (slope * up) * dgate + y * dup

    return activation


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x * Phi(x), with the normal distribution function Phi.

    Example:
        >>> round(float(gelu(jax.numpy.float32(1.0))), 4)
        0.8413
    """
    # on a CPU erfc costs three times as much as erf; 1 + erf loses relative accuracy below -3, and is 0 below about
    # -5.5, but its absolute error stays within two roundings of x
    if x.dtype == "float32" and traced_device()[0] == "cpu":
        return x * (0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5))))
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=True)


_KINDS: dict[str, _Kind] = {
    "swiglu": _gated_kind(jax.nn.silu),
    "geglu": _gated_kind(gelu),
    "geglu_tanh": _gated_kind(_gelu_tanh),
    "reglu": _gated_kind(jax.nn.relu),
    "gelu": _plain_kind(gelu),
    "gelu_tanh": _plain_kind(_gelu_tanh),
    "quick_gelu": _plain_kind(lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "relu": _Kind(jax.nn.relu, False),
    "relu_squared": _plain_kind(lambda x: jax.numpy.square(jax.nn.relu(x))),
    "silu": _plain_kind(jax.nn.silu),
}
assert set(_KINDS) == set(get_args(Nonlinearity))


class MLP(nnx.Module):
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))` for the gated kinds.

    The names for remat ("mlp_gate", "mlp_up") refer to the matrix products before the activation. If only the values
    after the activation were saved, the matrix products would be recomputed.

    Args:
        embed: width of input and output.
        mlp: hidden width.
        kind: name of the activation. The gated kinds are swiglu, geglu (exact GELU), geglu_tanh and reglu.
        bias: whether the projections have biases.
        dropout: rate of the dropout of the output.
        init: initializer of `gate` and `up`.
        out_init: initializer of `down`.
        rngs: random streams; the weights are drawn from `params`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> MLP(4, 8, kind="swiglu", rngs=nnx.Rngs(0))(jnp.ones((1, 2, 4))).shape
        (1, 2, 4)
    """

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        kind: str = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        if kind not in _KINDS:
            raise unknown("kind of mlp", kind, _KINDS)
        self.kind = kind
        projection_settings: dict[str, Any] = {"axes": ("embed", "mlp"), "bias": bias, "init": init, "rngs": rngs}
        self.gate = Linear(embed, mlp, **projection_settings) if _KINDS[kind].is_gated else None
        self.up = Linear(embed, mlp, **projection_settings)
        self.down = Linear(mlp, embed, axes=("mlp", "embed"), bias=bias, init=out_init, rngs=rngs)
        self.dropout = Dropout(dropout, site="mlp")

    def __call__(self, x: Float[Array, "B T D"], *, context: Context = Context()) -> Float[Array, "B T D"]:
        """Return the layer's output, without the residual."""
        activation = _KINDS[self.kind].activation
        x = move(x, ("batch", "seq", "embed"), ("batch", "inner_seq", "embed"))
        up = constrain(checkpoint_name(self.up(x, context), "mlp_up"), "batch", "inner_seq", "mlp")
        if self.gate is None:
            hidden = activation(up)
        else:
            gate = constrain(checkpoint_name(self.gate(x, context), "mlp_gate"), "batch", "inner_seq", "mlp")
            hidden = activation(gate, up)
        return self.dropout(constrain(self.down(hidden, context), "batch", "seq", "embed"), context)
