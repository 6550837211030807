"""Recomputation that waits for its gradient: fewer bytes, the same bits, outside any loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import blocks
from jaxscale.compat import runs_recomputation_early
from jaxscale.compiler.collectives import collectives
from jaxscale.held_back import held_back

LAYERS, ROWS, WIDTH = 4, 8, 64


def block(weights, x):
    return x + jnp.tanh(jax.nn.gelu(x @ weights[0])) @ weights[1]


def compiled(wrapped, mesh=None):
    key = jax.random.key(0)
    weights = [
        [0.1 * jax.random.normal(jax.random.fold_in(key, 2 * i + j), shape) for j, shape in enumerate(SHAPES)]
        for i in range(LAYERS)
    ]
    x = jax.random.normal(key, (ROWS, 64, WIDTH))

    def loss(weights, x):
        for layer in weights:
            x = wrapped(layer, x)
        return jnp.square(x).mean()

    places = {}
    if mesh is not None:
        places = {"in_shardings": tuple(NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))}
    program = jax.jit(jax.grad(loss), **places).lower(weights, x).compile()
    return program, (weights, x)


SHAPES = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))


def test_what_is_held_back_takes_less_and_changes_no_bit():
    plain, inputs = compiled(block)
    held, _ = compiled(held_back(jax.checkpoint(block)))
    taken = [one.memory_analysis().temp_size_in_bytes for one in (plain, held)]
    assert taken[1] < 0.5 * taken[0]
    jax.tree.map(np.testing.assert_array_equal, plain(*inputs), held(*inputs))
    if runs_recomputation_early():  # the control: what the barrier of `jax.checkpoint` alone spares
        alone, _ = compiled(jax.checkpoint(block))
        assert alone.memory_analysis().temp_size_in_bytes > 0.9 * taken[0]


def test_rows_stay_on_their_devices():
    mesh = jax.make_mesh((4,), ("data",))
    plain, held = (compiled(one, mesh)[0] for one in (block, held_back(jax.checkpoint(block))))
    sent = [sum(c.bytes for c in collectives(one.as_text(), mesh)) for one in (plain, held)]
    assert sent[0] == sent[1] > 0
    assert held.memory_analysis().temp_size_in_bytes < 0.7 * plain.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", [blocks.keep_nothing, jax.checkpoint_policies.dots_saveable])
def test_trees_whole_numbers_keys_and_what_is_closed_over_keep_their_gradients(policy):
    scale = jnp.arange(1.0, 4.0)

    def gradients(wrap):
        def of(scale, weights, x, count, key):
            def run(weights, state):
                y, number = state
                noise = jax.random.normal(key, y.shape)
                return (jnp.sin(y * weights["w"] * scale[None]) + noise, number + 1), None

            run = wrap(jax.checkpoint(run, policy=policy))
            (y, number), left = run(weights, (x, count))
            assert left is None
            return (y * number).sum()

        arguments = (scale, {"w": jnp.float32(0.5)}, jnp.ones((2, 3)), jnp.int32(2), jax.random.key(3))
        return jax.jit(jax.grad(of, argnums=(0, 1, 2)))(*arguments)

    jax.tree.map(np.testing.assert_array_equal, gradients(held_back), gradients(lambda function: function))


def test_a_treatment_holds_back_outside_loops_alone():
    def held(rolled, **treatment):
        with blocks.treating(blocks.Treatment(**treatment)):
            run = blocks.run_again(lambda x: jnp.sin(x), rolled=rolled)
        return "custom_vjp" in str(jax.make_jaxpr(run)(jnp.ones(3)))

    assert held(False, is_held_back=True)
    assert not held(True, is_held_back=True)
    assert not held(False)
