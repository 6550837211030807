"""The blocks of modules that know nothing of blocks: found, rematerialized, left as they were."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.models.foreign import ForeignModel, classification, linen_model
from jaxscale.models.foreign_blocks import repeated_block_paths
from tests.models.foreign_nets import Block, LinenNet, Net, assert_close, data, numbers, pure, rngs


@pytest.mark.parametrize("rate", [0.5, pytest.param(0.0, marks=pytest.mark.variant)])
def test_remat_per_block_keeps_the_result_and_is_per_block(rate):
    params, rest, f = pure(ForeignModel(lambda rngs: Net(rngs, rate=rate, depth=4), classification()))
    batch, key = data(), jax.random.key(3)
    assert remats(f, params, rest, batch, key) == 0
    (loss, after), grads = value_and_grad(f, params, rest, batch, key)
    with rematerialized():
        assert remats(f, params, rest, batch, key) == 4
        (loss_treated, after_treated), grads_treated = value_and_grad(f, params, rest, batch, key)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    assert_close(numbers(after["layers"][0]), numbers(after_treated["layers"][0]), 1e-6)
    assert int(after_treated["layers"][3]["calls"]) == 1


def rematerialized():
    return blocks.wrapping(lambda block, rolled: jax.checkpoint(block))


def value_and_grad(f, *args):
    """Traced anew: a treatment of blocks is no part of jit's key."""
    return jax.jit(jax.value_and_grad(lambda *args: f(*args), has_aux=True))(*args)


def remats(f, *args):
    jaxpr = jax.make_jaxpr(lambda *args: f(*args))(*args)
    return sum(eqn.primitive.name in ("remat", "remat2", "checkpoint") for eqn in jaxpr.eqns)


def residual_bytes(f, params, *args):
    """Bytes that the backward pass keeps, arguments apart: the leaves of the transposed function."""
    vjp = jax.eval_shape(lambda params: jax.vjp(lambda p: f(p, *args)[0], params)[1], params)
    kept = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32)
    return kept - sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def test_remat_per_block_keeps_block_inputs_alone_and_recomputes_each_block_once():
    rows, width, depth = 256, 8, 6
    executed = []

    class Counting(Block):
        def __call__(self, x, scale, flag):
            jax.debug.callback(lambda: executed.append(1))
            return super().__call__(x, scale, flag)

    class CountingNet(Net):
        def __init__(self, rngs):
            super().__init__(rngs, depth=depth)
            self.layers = nnx.List([Counting(width, 0.0, rngs) for _ in range(depth)])

    params, rest, f = pure(ForeignModel(lambda rngs: CountingNet(rngs), classification()))
    batch, key = data(rows), jax.random.key(3)

    def treatments():
        executed.clear()
        jax.block_until_ready(value_and_grad(f, params, rest, batch, key))
        jax.effects_barrier()
        return len(executed), residual_bytes(f, params, rest, batch, key)

    runs, kept = treatments()
    with rematerialized():
        runs_treated, kept_treated = treatments()
    assert (runs, runs_treated) == (depth, 2 * depth)
    inputs = depth * rows * width * 4
    assert inputs <= kept_treated < 1.5 * inputs
    assert kept > 3 * kept_treated


def test_linen_is_one_block():
    model = linen_model(LinenNet(rate=0.5), np.ones((1, 4), np.float32), score=classification())
    params, rest, f = pure(model)
    assert repeated_block_paths(model.build(rngs())) == ()
    batch, key = data(), jax.random.key(3)
    (loss, after), grads = value_and_grad(f, params, rest, batch, key)
    with rematerialized():
        assert remats(f, params, rest, batch, key) == 1
        (loss_treated, after_treated), grads_treated = value_and_grad(f, params, rest, batch, key)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    assert_close(after["BatchNorm_1"], after_treated["BatchNorm_1"], 1e-6)


def test_losses_from_variables_that_a_block_creates_survive_remat():
    class Sower(Block):
        def __call__(self, x, scale, flag):
            x = super().__call__(x, scale, flag)
            self.penalty = nnx.Intermediate((x * x).mean())
            return x

    class SowerNet(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers = nnx.List([Sower(8, 0.0, rngs) for _ in range(3)])

    def score(module, batch):
        losses = classification()(module, batch)
        return losses + sum(jax.tree.leaves(nnx.pop(module, nnx.Intermediate))).reshape(1)

    params, rest, f = pure(ForeignModel(lambda rngs: SowerNet(rngs), score))
    args = (params, rest, data(), jax.random.key(0))
    (loss, _), grads = value_and_grad(f, *args)
    with rematerialized():
        assert remats(f, *args) == 3
        (loss_treated, _), grads_treated = value_and_grad(f, *args)
    np.testing.assert_allclose(loss, loss_treated, rtol=1e-6)
    assert_close(grads, grads_treated, 1e-6)
    without = pure(ForeignModel(lambda rngs: SowerNet(rngs), classification()))[2]
    assert float(loss) > float(without(*args)[0]) + 0.01


def test_the_class_is_as_before_after_tracing_also_after_an_error():
    class Inherits(Block):
        pass

    class Bad(Block):
        def __call__(self, x, scale, flag):
            raise KeyError("the user's own")

    def net(kind):
        def make(rngs):
            module = Net(rngs)
            module.layers = nnx.List([kind(8, 0.0, rngs) for _ in range(2)])
            return module

        return ForeignModel(make, classification())

    with rematerialized():
        before = Inherits.__call__
        model = net(Inherits)
        model.loss(model.build(rngs()), data(), Context())
        assert Inherits.__call__ is before
        assert "__call__" not in vars(Inherits)
        before = Bad.__call__
        model = net(Bad)
        with pytest.raises(KeyError, match="the user's own"):
            model.loss(model.build(rngs()), data(), Context())
        assert Bad.__call__ is before


def test_which_submodules_repeat():
    class Numbered(nnx.Module):
        def __init__(self, rngs):
            self.block0, self.block1, self.block10 = (Block(8, 0.0, rngs) for _ in range(3))
            self.query1, self.query2 = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
            self.alone = Block(8, 0.0, rngs)

    class Stages(nnx.Module):  # unlike stages of blocks, of which the first differs: a ResNet's shape
        def __init__(self, rngs):
            self.stages = nnx.List([nnx.List([Block(w, 0.0, rngs) for w in (2, n, n)]) for n in (4, 8)])

    class Sequences(nnx.Module):
        def __init__(self, rngs):
            layers = (nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), jax.nn.relu) for _ in range(3))
            self.body = nnx.Sequential(*layers, nnx.Linear(8, 2, rngs=rngs))

    class Nested(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Net(rngs, depth=2) for _ in range(2)])

    assert repeated_block_paths(Numbered(rngs())) == ("block0", "block1", "block10")
    assert repeated_block_paths(Stages(rngs())) == tuple(f"stages/{i}/{j}" for i in range(2) for j in range(3))
    assert repeated_block_paths(Sequences(rngs())) == ("body/layers/0", "body/layers/1", "body/layers/2")
    assert repeated_block_paths(Nested(rngs())) == ("layers/0", "layers/1")


class Silent(Net):
    """Runs its blocks by another name than `__call__`."""

    def __call__(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer.linear(x)
        return self.head(x)


def test_blocks_that_are_never_called_are_refused_only_where_a_plan_needs_them():
    model = ForeignModel(lambda rngs: Silent(rngs), classification())
    module = model.build(rngs())
    model.loss(module, data(), Context())
    with rematerialized():
        with pytest.raises(UserError, match="calls none of them"):
            model.loss(module, data(), Context())
        whole = ForeignModel(model.make, model.score, blocks=())
        assert remats(lambda x: whole.loss(module, data() | {"images": x}, Context()), data()["images"]) == 1
        wrong = ForeignModel(model.make, model.score, blocks=("layer/0",))
        with pytest.raises(UserError, match="did you mean 'layers/0'"):
            wrong.loss(module, data(), Context())
