"""`value_and_grad` of stages against `jax.value_and_grad` of the same function on one device."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxscale.errors import UserError
from jaxscale.pipeline.run.gradients import value_and_grad
from jaxscale.pipeline.schedules import METHODS

STAGES, MICROBATCHES = 4, 4


def stage(weights, shared, x, target, number):
    y = jnp.tanh(x @ weights["up"]) @ weights["down"] + x
    y = jnp.where(number == 0, y + shared["bias"][None], y)
    return y, jnp.where(number == STAGES - 1, jnp.square(y - target).mean(), 0.0)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    weights = {"up": jax.random.normal(keys[0], (STAGES, 8, 16)), "down": jax.random.normal(keys[1], (STAGES, 16, 8))}
    x, target = (jax.random.normal(key, (MICROBATCHES, 2, 8)) for key in keys[2:4])
    return jax.tree.map(lambda leaf: 0.3 * leaf, weights), {"bias": jax.random.normal(keys[4], (8,))}, x, target


@functools.cache
def reference():
    """Loss and gradients on one device."""
    weights, shared, x, target = arguments()

    def total(weights, shared):
        loss = jnp.zeros(())
        for microbatch in range(MICROBATCHES):
            y = x[microbatch]
            for number in range(STAGES):
                own = jax.tree.map(lambda leaf, n=number: leaf[n], weights)
                y, term = stage(own, shared, y, target[microbatch], number)
                loss += term
        return loss

    return jax.jit(jax.value_and_grad(total, (0, 1)))(weights, shared)


def pipe(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), ("pipe",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("name", "ranks", "stash"), [("zb-h1", 4, "residuals"), ("chimera", 4, "input"), ("interleaved", 2, "residuals")]
)
def test_gradients_equal_those_of_one_device(name, ranks, stash):
    schedule = METHODS[name].schedule(ranks, MICROBATCHES)
    assert schedule.stages == STAGES
    result = jax.jit(value_and_grad(stage, schedule, pipe(ranks), stash=stash))(*arguments())
    chex.assert_trees_all_close(result, reference(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks", "first_dim", "message"),
    [
        ("1f1b", 2, STAGES, "expected a mesh axis pipe:4, got pipe:2"),
        ("1f1b", 4, 3, "expected a first dim of 4, the stages of 1f1b"),
        ("pipedream", 4, STAGES, "updates weights inside the schedule"),
    ],
)
def test_refusals(name, ranks, first_dim, message):
    schedule = METHODS[name].schedule(4, 1 if name == "pipedream" else MICROBATCHES)
    weights, *others = arguments()
    with pytest.raises(UserError, match=message):
        jax.eval_shape(
            value_and_grad(stage, schedule, pipe(ranks)), jax.tree.map(lambda leaf: leaf[:first_dim], weights), *others
        )


def test_a_schedule_by_its_text():
    result = jax.jit(value_and_grad(stage, f"gpipe:{STAGES}x{MICROBATCHES}", pipe(STAGES)))(*arguments())
    chex.assert_trees_all_close(result, reference(), rtol=1e-4, atol=1e-6)


def test_a_typo_names_the_near_miss():
    with pytest.raises(UserError, match="did you mean 'residuals'"):
        inspect.unwrap(value_and_grad)(stage, "gpipe:4x4", pipe(4), stash="residual")  # as without run-time type checks
    with pytest.raises(UserError, match="did you mean 'gpipe'"):
        value_and_grad(stage, "gpip:4x4", pipe(4))


def test_a_stage_that_returns_no_pair_is_refused():
    with pytest.raises(UserError, match=r"expected \(y, loss\)"):
        jax.eval_shape(value_and_grad(lambda *given: given[2], "gpipe:4x4", pipe(4)), *arguments())
