"""Rules of optax that hold parameters back, as `custom`: the numbers of a plain loop under ZeRO and on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import Experiment, Optimizer, build
from jaxscale.errors import UserError
from jaxscale.trees import named_leaves
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch
from tests.tiers import variants

MODEL, STEPS = Residual(), 3


def is_up(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "up" in jax.tree_util.keystr(path), tree)


def labels(tree):
    return jax.tree.map(lambda chosen: "up" if chosen else "other", is_up(tree))


RULES = {
    "masked": lambda rate: optax.chain(optax.masked(optax.adam(rate), is_up), optax.scale(0.5)),
    "multi_transform": lambda rate: optax.multi_transform(
        {"up": optax.adam(rate), "other": optax.sgd(rate, momentum=0.9)}, labels
    ),
    "partition": lambda rate: optax.partition({"up": optax.adam(rate), "other": optax.set_to_zero()}, labels),
    "selective_transform": lambda rate: optax.transforms.selective_transform(optax.adam(rate), freeze_mask=is_up),
    "frozen by zeros": lambda rate: optax.chain(optax.adam(rate), optax.masked(optax.set_to_zero(), is_up)),
}


def batches():
    return [random_batch(8, seed) for seed in range(STEPS)]


def step_of(name, mesh="1", **fields):
    optimizer = Optimizer(custom=RULES[name], learning_rate=1e-2, clip=None)
    return build(Experiment("custom", MODEL, None, optimizer, steps=STEPS, batch=8), plan_of(mesh=mesh, **fields))


@functools.cache
def plain(name):
    """Parameters after the steps of a plain loop."""
    step = step_of(name)
    state, rule = step.init(), RULES[name](step.experiment.optimizer.schedule_fn(STEPS))
    update = jax.jit(rule.update)
    params = jax.tree.map(jnp.array, state.params)
    rule_state = rule.init(params)
    for batch in batches():
        gradients = step.gradients_fn(state, step.place(batch))
        updates, rule_state = update(gradients, rule_state, params)
        params = optax.apply_updates(params, updates)
        state = step.init()
        state.params.clear()
        state.params.update(jax.tree.map(jnp.array, params))
    return named_leaves(params)


SHARDED, ON_HOST = {"mesh": "fsdp:2", "zero": 2}, {"optimizer_state": "host"}


CASES = [*((name, SHARDED) for name in RULES), ("partition", ON_HOST)]


@pytest.mark.parametrize(("name", "fields"), variants(CASES, 1))
def test_a_rule_trains_as_in_a_plain_loop_and_its_state_is_restored(name, fields):
    step = step_of(name, **fields)
    state = step.init()
    for batch in batches():
        state, _ = step(state, step.place(batch))
    expected = plain(name)
    for path, leaf in named_leaves(step.from_canonical(step.to_canonical(state)).params).items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected[path]), rtol=1e-4, atol=1e-5)


def test_a_rule_that_needs_the_loss_gets_that_of_the_step():
    def descend(rate):
        def update(updates, state, params=None, *, value, **extra):
            return jax.tree.map(lambda gradient: -1e-2 * value * gradient, updates), state + value

        return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)

    def step_by(rule, **fields):
        optimizer = Optimizer(custom=rule, clip=None)
        return build(Experiment("value", MODEL, None, optimizer, steps=STEPS, batch=8), plan_of(**fields))

    step = step_by(descend, mesh="fsdp:2", zero=2, microbatches=2)
    state, total = step.init(), 0.0
    for batch in batches():
        before, gradients = named_leaves(state.params), named_leaves(step.gradients_fn(state, step.place(batch)))
        expected = {path: np.asarray(leaf) for path, leaf in before.items()}
        gradients = {path: np.asarray(leaf) for path, leaf in gradients.items()}
        state, metrics = step(state, step.place(batch))
        total += float(metrics["loss"])
        for path, leaf in named_leaves(state.params).items():
            change = -1e-2 * float(metrics["loss"]) * gradients[path]
            np.testing.assert_allclose(np.asarray(leaf), expected[path] + change, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(state.optimizer)[-1], total, rtol=1e-6)
    plateau = step_by(lambda rate: optax.chain(optax.adam(rate), optax.contrib.reduce_on_plateau()), mesh="1")
    state, metrics = plateau(plateau.init(), plateau.place(batches()[0]))
    assert np.isfinite(float(metrics["loss"]))
    with pytest.raises(UserError, match="this rule needs the loss of the step, which is unknown where a stage"):
        step_by(descend, optimizer_state="streamed")
