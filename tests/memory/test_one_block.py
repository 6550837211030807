"""`remat` of one function against the function itself: gradients, kept bytes, and refusals."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.keep_named import StaleGraph
from jaxscale.memory.one_block import remat

WEIGHT, X = 0.1 * jnp.eye(64), jnp.ones((32, 64))
ROW_BYTES = 32 * 64 * 4


def block(weight, x):
    return jnp.tanh(jnp.sin(jnp.tanh(x @ weight) @ weight) @ weight)


def kept_bytes(function):
    """Bytes of the residuals of `function` besides its arguments."""
    _, pullback = jax.eval_shape(lambda w, x: jax.vjp(function, w, x), WEIGHT, X)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback)]
    return sum(sizes) - WEIGHT.nbytes - X.nbytes


@pytest.mark.parametrize("plan", ["none", "full", "dots", "jax:dots_saveable", "save:24KiB", "greedy:24KiB"])
def test_gradients_are_those_of_the_function(plan):
    gradient = jax.jit(jax.grad(lambda w: remat(block, plan, WEIGHT, X)(w, X).sum()))(WEIGHT)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: block(w, X).sum())(WEIGHT), rtol=1e-6)


def test_the_budget_bounds_what_is_kept():
    assert kept_bytes(block) > 2 * ROW_BYTES
    kept = [kept_bytes(remat(block, f"save:{ROW_BYTES * rows}B", WEIGHT, X)) for rows in (1, 2, 3)]
    assert kept == [0, ROW_BYTES, 2 * ROW_BYTES]


def test_offload_is_traced_for_a_platform():
    lean = remat(block, "offload:vdnn:16KiB", WEIGHT, X, platform="tpu v5e:1x1")
    assert "offload=frozenset({'jaxscale:" in str(jax.make_jaxpr(jax.grad(lambda w: lean(w, X).sum()))(WEIGHT))


@pytest.mark.parametrize(
    ("plan", "args", "message"),
    [
        ("revolve:3", (WEIGHT, X), "is for a sequence of blocks"),
        ("fit", (WEIGHT, X), "is for a whole model"),
        ("save:24KiB", (), "give them, as in"),
        ("save:1B", (WEIGHT, X), "below the least possible"),
        ("offload:pofo:24KiB", (WEIGHT, X), "give a platform"),
        ("sve:24KiB", (WEIGHT, X), "did you mean 'save'"),
    ],
)
def test_refusals(plan, args, message):
    with pytest.raises(UserError, match=message):
        remat(block, plan, *args)


def test_another_shape_is_refused():
    with pytest.raises(StaleGraph, match="make the plan again"):
        remat(block, "save:24KiB", WEIGHT, X)(WEIGHT, X[:3])


def test_calls_in_a_row_keep_less_than_the_function():
    """A compiler that recomputed early would keep the values of every call."""

    def temporary_bytes(function):
        def loss(weight):
            x = jnp.ones((512, 64))
            for _ in range(8):
                x = function(weight, x)
            return x.sum()

        return jax.jit(jax.grad(loss)).lower(WEIGHT).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(remat(block, "full")) < 0.8 * temporary_bytes(block)


@pytest.mark.parametrize("plan", ["full", "save:24KiB"])
def test_scanned_and_mapped_gradients_are_those_of_the_function(plan):
    lean = remat(block, plan, WEIGHT, X)

    def loss(function, weight):
        y = jax.lax.scan(lambda x, _: (function(weight, x), None), X, length=3)[0]
        return y.sum() + jax.vmap(function, (None, 0))(weight, jnp.stack([X, 2 * X])).sum()

    result, expected = (jax.jit(jax.grad(lambda w, f=f: loss(f, w)))(WEIGHT) for f in (lean, block))
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("block", "plan", "message"),
    [("full", "full", "expected a function of arrays"), (block, X, "expected a memory plan such as 'full'")],
)
def test_arguments_of_another_type_are_refused(block, plan, message):
    with pytest.raises(UserError, match=message):
        inspect.unwrap(remat)(block, plan)  # as without run-time type checks
