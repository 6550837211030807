import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from jaxscale.errors import UserError
from jaxscale.layers.mlp import MLP


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


GATED = {
    "swiglu": lambda x: x * _sigmoid(x),
    "geglu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "geglu_tanh": _gelu_tanh,
    "reglu": lambda x: np.maximum(x, 0),
}
PLAIN = {
    "gelu": GATED["geglu"],
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": GATED["reglu"],
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "silu": GATED["swiglu"],
}


@pytest.mark.parametrize("kind", [*GATED, *PLAIN])
def test_mlp_is_its_formula(kind):
    mlp = MLP(4, 8, kind=kind, bias=kind in PLAIN, rngs=nnx.Rngs(0))
    if kind in PLAIN:
        mlp.up.bias[...] = jnp.linspace(-1, 1, 8)
        mlp.down.bias[...] = jnp.linspace(1, 2, 4)
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    x64 = np.asarray(x, np.float64)
    if kind in GATED:
        hidden = GATED[kind](x64 @ np.asarray(mlp.gate.weight[...])) * (x64 @ np.asarray(mlp.up.weight[...]))
        expected = hidden @ np.asarray(mlp.down.weight[...])
    else:
        hidden = PLAIN[kind](x64 @ np.asarray(mlp.up.weight[...]) + np.linspace(-1, 1, 8))
        expected = hidden @ np.asarray(mlp.down.weight[...]) + np.linspace(1, 2, 4)
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_gelu_is_within_two_roundings_of_its_input():
    mlp = MLP(1, 1, kind="gelu", rngs=nnx.Rngs(0))
    mlp.up.weight[...] = mlp.down.weight[...] = jnp.ones((1, 1))
    x = np.linspace(-12, 12, 4001, dtype=np.float32)[None, :, None]
    x64 = np.float64(x)
    expected, slope = PLAIN["gelu"](x64), 0.5 * (1 + erf(x64 / np.sqrt(2)))
    expected_slope = slope + x64 * np.exp(-(x64**2) / 2) / np.sqrt(2 * np.pi)
    y, pull = jax.vjp(mlp, jnp.asarray(x))
    rounding = np.finfo(np.float32).eps
    assert np.all(np.abs(y - expected) <= 2 * rounding * np.abs(x))
    assert np.all(np.abs(pull(jnp.ones_like(y))[0] - expected_slope) <= rounding * (1 + np.abs(x)))


def test_saving_the_named_products_spares_recomputing_them():
    mlp = MLP(64, 256, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 32, 64))

    def flop(policy):
        def loss(mlp, x):
            def body(x, _):
                return jax.checkpoint(lambda m, x: x + m(x), policy=policy, prevent_cse=False)(mlp, x), None

            return jnp.sum(jax.lax.scan(body, x, length=2)[0])

        return jax.jit(jax.grad(loss)).lower(mlp, x).compile().cost_analysis()["flops"]

    policies = jax.checkpoint_policies
    everything, names, nothing = (
        flop(policies.everything_saveable),
        flop(policies.save_only_these_names("mlp_gate", "mlp_up")),
        flop(policies.nothing_saveable),
    )
    product = 2 * 32 * 64 * 256
    assert nothing - everything > 1.9 * product
    assert names - everything < 0.1 * product


def test_unknown_kind_names_the_near_miss():
    with pytest.raises(UserError, match="did you mean 'swiglu'"):
        MLP(4, 8, kind="swigl", rngs=nnx.Rngs(0))
