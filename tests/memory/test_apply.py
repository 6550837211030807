"""Rematerialization changes memory and work, and not one bit of a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.stack import Chain, Stack
from jaxscale.memory.apply import wrapper
from jaxscale.memory.plan import MemoryPlan
from jaxscale.programs.flop import count_flop

KEEPS = ("none", "dots", "full")
SIZE, LAYERS = 16, 8


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = RMSNorm(SIZE, rngs=rngs)
        self.mlp = MLP(SIZE, 4 * SIZE, dropout=0.3, rngs=rngs)

    def __call__(self, x, *, context=Context()):
        return x + self.mlp(self.norm(x), context=context)


def stack(layers=LAYERS, scan=True):
    return Stack(Block, layers, rngs=nnx.Rngs(0), scan=scan)


def chain():
    return Chain([Block(nnx.Rngs(seed)) for seed in range(3)])


def gradient_of(module, keep, unroll=1):
    """Gradient of a scalar of the module's output as a function of its parameters, under a plan; and parameters."""
    graphdef, params = nnx.split(module)

    def loss(params, x):
        context = Context(key=jax.random.key(1))
        with blocks.wrapping(wrapper(MemoryPlan(keep)), unroll=unroll):
            return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x, context=context)))

    return jax.grad(loss), nnx.to_pure_dict(params)


def x(rows=4):
    return jax.random.normal(jax.random.key(9), (rows, 8, SIZE))


@pytest.fixture(scope="module")
def compiled():
    """Of each plan: the compiled gradient of a deep scanned stack, and its parameters."""
    found = {}
    for keep in KEEPS:
        fn, params = gradient_of(stack(), keep)
        found[keep] = (jax.jit(fn).lower(params, x(32)).compile(), params)
    return found


@pytest.mark.parametrize("keep", ["dots", "full"])
def test_gradients_are_bitwise_those_that_keep_everything(compiled, keep):
    expected = compiled["none"][0](compiled["none"][1], x(32))
    found = compiled[keep][0](compiled[keep][1], x(32))
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.1
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_temporary_bytes_fall_with_what_is_kept(compiled):
    none, dots, full = (compiled[keep][0].memory_analysis().temp_size_in_bytes for keep in KEEPS)
    inputs = 32 * 8 * SIZE * 4  # what "full" keeps of a block
    assert none > dots > full
    assert none - full > LAYERS * 4 * inputs  # gate, up, their product and the mask are each four times as wide
    assert full > LAYERS * inputs


@pytest.mark.parametrize(("make", "layers"), [(stack, LAYERS), (lambda: stack(2, scan=False), 2), (chain, 3)])
def test_full_runs_every_block_once_more_and_dots_no_matrix_product(make, layers):
    flop = {}
    for keep in KEEPS:
        fn, params = gradient_of(make(), keep)
        flop[keep] = count_flop(fn, params, x()).total
    product = 2 * 4 * 8 * SIZE * 4 * SIZE
    assert flop["none"] == flop["dots"] == layers * 3 * 3 * product
    # gate and up once more; the result of the third product, down, is not needed to differentiate it
    assert flop["full"] - flop["none"] == layers * 2 * product


@pytest.mark.parametrize(("module", "layers", "unroll"), [("scan", 1, 1), ("scan", 2, 2), ("chain", 3, 1)])
@pytest.mark.parametrize("keep", KEEPS)
def test_every_block_is_wrapped_once_where_it_is_traced(module, layers, unroll, keep):
    fn, params = gradient_of(chain() if module == "chain" else stack(4), keep, unroll)
    found = list(remats(jax.make_jaxpr(fn)(params, x()).jaxpr))
    assert len(found) == (0 if keep == "none" else layers if module == "chain" else 1)
    # only in a rolled scan can XLA not merge the recomputation with the forward pass
    rolled = module == "scan" and unroll == 1
    assert all(eqn.params["prevent_cse"] == (not rolled) for eqn in found)


def remats(jaxpr):
    for eqn in jaxpr.eqns:
        if "policy" in eqn.params and eqn.params.get("differentiated"):
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from remats(inner)


def test_none_leaves_a_block_as_it_is():
    with blocks.wrapping(wrapper(MemoryPlan())):
        assert blocks.wrap(remats, rolled=False) is remats
