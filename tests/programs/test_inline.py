"""A flat program computes what the function does, and is known again in another process."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from programs.blocks import decoder_block, drawn

from jaxscale.programs.inline import inline


def program(fn, *args):
    return inline(jax.make_jaxpr(fn)(*args))


def test_the_program_run_again_gives_the_same_results_and_gradients():
    block, params, x = decoder_block()
    closed = jax.make_jaxpr(block)(params, x)
    flat = inline(closed)
    params, x = drawn(params), drawn(x, 1)
    leaves = jax.tree.leaves((params, x))

    def run(*leaves):
        return flat.run((*closed.consts, *leaves))[0]

    np.testing.assert_array_equal(run(*leaves), block(params, x))
    found = jax.grad(lambda *leaves: jnp.sum(run(*leaves)), argnums=tuple(range(len(leaves))))(*leaves)
    expected = jax.tree.leaves(jax.grad(lambda p, x: jnp.sum(block(p, x)), argnums=(0, 1))(params, x))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_values_carry_the_names_of_the_model_and_else_those_of_operations():
    def fn(w, x):
        y = checkpoint_name(x @ w, "up")
        return jax.nn.silu(y) @ w @ w

    found = program(fn, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert list(found.name_by_number().values()) == ["up", "silu/logistic", "silu/mul", "dot_general", "dot_general.2"]


def test_steps_that_no_result_depends_on_are_dropped():
    found = program(lambda x: (jnp.sin(x), x + 1)[1], jnp.ones(3))
    assert [step.primitive for step in found.steps] == ["add"]


def fingerprint(fn, *args):
    return program(fn, *args).fingerprint()


def test_the_fingerprint_is_that_of_operations_shapes_and_names():
    x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    plain = fingerprint(lambda x, w: jnp.tanh(x @ w), x, w)
    assert plain == fingerprint(lambda a, b: jnp.tanh(a @ b), x, w)
    assert plain == fingerprint(jax.jit(lambda x, w: jnp.tanh(x @ w)), x, w)
    assert plain != fingerprint(lambda x, w: jnp.sin(x @ w), x, w)
    assert plain != fingerprint(lambda x, w: jnp.tanh(x @ w.T), x, w)
    assert plain != fingerprint(lambda x, w: jnp.tanh(x @ w), jnp.ones((3, 4)), w)
    assert plain != fingerprint(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "up")), x, w)
    wide = fingerprint(lambda x, w: jnp.tanh(x @ w), x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert plain != wide


def test_the_fingerprint_tells_neither_numbers_nor_placements_nor_layers_apart():
    x = jnp.ones((8, 4))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert fingerprint(lambda x: x * 2.0, x) == fingerprint(lambda x: x * 3.0, x)
    placed = fingerprint(lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), place) * 2.0, x)
    assert placed == fingerprint(lambda x: jnp.tanh(x) * 2.0, x)


PRINT = """
import sys
sys.path.insert(0, {tests!r})
import jax
from programs.blocks import decoder_block
from jaxscale.programs.block import block_graph
block, params, x = decoder_block(attention="chunked")
{before}
graph = block_graph(block, params, x)
print(graph.fingerprint, [value.name for value in graph.values])
"""


@pytest.mark.slow
def test_fingerprint_and_names_are_those_of_every_process():
    tests = str(Path(__file__).parents[1])
    found = []
    for seed, before in (("1", ""), ("2", "jax.nn.silu(x.shape[0] * 1.0); jax.nn.softmax(jax.numpy.ones(3))")):
        code = PRINT.format(tests=tests, before=before)
        environment = {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert ended.returncode == 0, ended.stderr
        found.append(ended.stdout)
    assert found[0] == found[1]
