import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.linear import Linear
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.stack import Chain, Stack, restack, unstack


class Block(nnx.Module):
    def __init__(self, size, *, dropout=0.0, rngs):
        self.norm = RMSNorm(size, rngs=rngs)
        self.mlp = MLP(size, 2 * size, dropout=dropout, rngs=rngs)

    def __call__(self, x, *, context=Context(), shift=0.0, scale=1.0, extra=None):
        x = x + scale * self.mlp(self.norm(x), context=context) + shift
        return x if extra is None else (x, extra + jnp.mean(x))


class Counted(nnx.Module):
    """Holds a statistic that every call changes, as batch norm does."""

    def __init__(self, *, rngs):
        self.linear = Linear(4, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x, *, context=Context()):
        self.mean[...] = jnp.mean(x, (0, 1))
        return self.linear(x)


def _stack(layers=3, *, scan=True, dropout=0.0, size=4):
    return Stack(lambda rngs: Block(size, dropout=dropout, rngs=rngs), layers, rngs=nnx.Rngs(0), scan=scan)


def _x(batch=2, length=3, size=4):
    return jax.random.normal(jax.random.key(9), (batch, length, size))


def _by_hand(stack, x, settings=({},)):
    """The blocks one after the other, each an ordinary module."""
    graphdef, state = nnx.split(stack.layers)
    for layer, params in enumerate(unstack(nnx.to_pure_dict(state), stack.count)):
        x = nnx.merge(graphdef, params)(x, **settings[layer % len(settings)])
    return x


def _gradient(stack, x, **call):
    """As the train step takes it: plain nested dict in, structure closed over."""
    graphdef, state = nnx.split(stack)

    def loss(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x, **call)))

    return jax.grad(loss)(nnx.to_pure_dict(state))


def _close(one, other, tolerance=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


def test_parameters_are_stacked_named_and_independent_of_the_number_of_layers():
    stack = _stack(3)
    assert stack.layers.mlp.up.weight.shape == (3, 4, 8)
    assert stack.layers.mlp.up.weight.out_sharding == ("layers", "embed", "mlp")
    assert stack.layers.norm.weight.out_sharding == ("layers", "norm")
    np.testing.assert_array_equal(stack.layers.mlp.up.weight[:2], _stack(2).layers.mlp.up.weight[...])
    assert not np.allclose(stack.layers.mlp.up.weight[0], stack.layers.mlp.up.weight[1])
    state = nnx.to_pure_dict(nnx.state(stack.layers))
    _close(restack(unstack(state, 3)), state, 0)


@pytest.mark.parametrize("scan", [True, False])
def test_a_stack_is_its_blocks_in_sequence(scan):
    stack, x = _stack(scan=scan), _x()
    _close(stack(x), _by_hand(stack, x))


def test_scanned_and_unrolled_have_the_same_gradients_with_dropout():
    x, context = _x(), Context(key=jax.random.key(3))
    scanned = _gradient(_stack(dropout=0.5), x, context=context)
    _close(scanned, _gradient(_stack(dropout=0.5, scan=False), x, context=context))
    without = _gradient(_stack(), x)
    assert not np.allclose(scanned["layers"]["mlp"]["up"]["weight"], without["layers"]["mlp"]["up"]["weight"])


@pytest.mark.parametrize("layers", [4, 5, 1])
def test_a_cycle_of_settings_stays_static_and_reaches_its_layers(layers):
    seen = []

    class Watching(Block):
        def __call__(self, x, *, window, **settings):
            seen.append(window)
            return super().__call__(x, scale=window, **settings)

    stack = Stack(lambda rngs: Watching(4, rngs=rngs), layers, rngs=nnx.Rngs(0))
    cycle = ({"window": 2}, {"window": 5})
    y = jax.jit(lambda x: stack(x, cycle=cycle))(_x())
    assert set(seen) == ({2, 5} if layers > 1 else {2})
    assert len(seen) <= 3 + layers % 2
    _close(y, _by_hand(stack, _x(), cycle), 1e-4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("cycle", [({},), ({"scale": 1.0}, {"scale": 2.0})])
def test_per_layer_inputs_and_outputs(scan, cycle):
    stack, x = _stack(scan=scan), _x()
    shifts, extras = jnp.arange(3.0), 10 * jnp.arange(3.0)
    y, found = stack(x, per_layer={"shift": shifts, "extra": extras}, cycle=cycle, outputs=True)
    graphdef, state = nnx.split(stack.layers)
    expected = []
    for layer, params in enumerate(unstack(nnx.to_pure_dict(state), 3)):
        settings = cycle[layer % len(cycle)]
        x, out = nnx.merge(graphdef, params)(x, shift=shifts[layer], extra=extras[layer], **settings)
        expected.append(out)
    _close(y, x, 1e-4)
    _close(found, jnp.stack(expected), 1e-4)


@pytest.mark.parametrize("scan", [True, False])
def test_what_blocks_mutate_is_kept(scan):
    stack = Stack(lambda rngs: Counted(rngs=rngs), 2, rngs=nnx.Rngs(0), scan=scan)
    chain = Chain([Counted(rngs=nnx.Rngs(seed)) for seed in (1, 2)])
    x = _x()
    stack(x)
    chain(x)
    _close(stack.layers.mean[0], jnp.mean(x, (0, 1)))
    _close(stack.layers.mean[1], jnp.mean(x @ stack.layers.linear.weight[0], (0, 1)))
    _close(chain.layers[0].mean[...], jnp.mean(x, (0, 1)))
    _close(chain.layers[1].mean[...], jnp.mean(x @ chain.layers[0].linear.weight[...], (0, 1)))


@pytest.mark.parametrize("scan", [True, False])
def test_every_block_goes_through_wrap_with_its_parameters_as_arguments(scan):
    calls = []

    def wrapper(block, rolled):
        def run(*arguments):
            calls.append((rolled, sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))))
            return jax.checkpoint(block, prevent_cse=not rolled)(*arguments)

        return run

    stack, x = _stack(scan=scan), _x()
    with blocks.wrapping(wrapper):
        wrapped = _gradient(stack, x)
    per_block = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(stack.layers))) // 3
    assert set(calls) == {(scan, per_block)}
    assert len(calls) == (1 if scan else 3)
    _close(wrapped, _gradient(stack, x))


def test_a_chain_is_its_blocks_in_sequence_each_with_its_own_masks():
    chain = Chain([Block(4, rngs=nnx.Rngs(1)), MLP(4, 8, kind="relu", rngs=nnx.Rngs(2)), Linearly()])
    x = _x()
    _close(chain(x), chain.layers[2](chain.layers[1](chain.layers[0](x))))

    twice = Chain([Dropping(), Dropping()])
    kept = twice(jnp.ones((4, 64)), context=Context(key=jax.random.key(0)))
    assert 0.15 < np.mean(np.asarray(kept) == 4.0) < 0.35


class Linearly(nnx.Module):
    def __call__(self, x, *, context=Context()):
        return 2 * x


class Dropping(nnx.Module):
    def __init__(self):
        self.dropout = Dropout(0.5, site="here")

    def __call__(self, x, *, context=Context()):
        return self.dropout(x, context)


def test_remat_in_a_chain_keeps_gradients():
    chain, x = Chain([Block(4, rngs=nnx.Rngs(1)), Block(4, rngs=nnx.Rngs(2))]), _x()
    plain = _gradient(chain, x)
    with blocks.wrapping(lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)):
        _close(_gradient(chain, x), plain)


@pytest.mark.parametrize("remat", [False, True])
def test_compiled_cost_is_at_most_that_of_a_scan_written_by_hand(remat):
    size, x = 32, _x(4, 16, 32)
    stack = _stack(4, size=size)
    graphdef, state = nnx.split(stack)
    params = nnx.to_pure_dict(state)

    def ours(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x)))

    def by_hand(params):
        def body(x, p):
            wide = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
            h = wide * p["norm"]["weight"].reshape(1, 1, -1)
            gate, up = h @ p["mlp"]["gate"]["weight"], h @ p["mlp"]["up"]["weight"]
            return x + (jax.nn.silu(gate) * up) @ p["mlp"]["down"]["weight"], None

        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        return jnp.sum(jnp.square(jax.lax.scan(body, x, params["layers"])[0]))

    def facts(loss):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    wrapper = (lambda block, rolled: jax.checkpoint(block, prevent_cse=not rolled)) if remat else lambda b, _: b
    with blocks.wrapping(wrapper):
        found = facts(ours)
    flop, temp_bytes = facts(by_hand)
    assert 0.98 * flop < found[0] <= 1.005 * flop
    assert found[1] <= 1.005 * temp_bytes


def test_unrolled_iterations_keep_the_result():
    stack, x = _stack(4), _x()
    with blocks.wrapping(lambda block, rolled: block, unroll=2):
        _close(stack(x), _by_hand(stack, x))


def test_no_layers_is_refused():
    with pytest.raises(UserError, match="at least 1"):
        _stack(0)
