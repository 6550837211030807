"""A traced function as a flat list: calls opened, loops kept, dead operations dropped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxscale.compat import rebind
from jaxscale.programs.flat import flatten


def kinds(fn, *args):
    return [operation.kind for operation in flatten(jax.make_jaxpr(fn)(*args)).operations]


def test_calls_are_opened():
    def inner(x):
        return jax.checkpoint(jnp.sin)(x)

    assert kinds(lambda x: jax.jit(inner)(x) + 1, 1.0) == ["sin", "add"]


def test_what_no_result_needs_is_dropped():
    def fn(x):
        jnp.exp(x)
        return jnp.sin(x)

    assert kinds(fn, 1.0) == ["sin"]


def test_a_custom_derivative_is_opened():
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (double(x), None), lambda _, d: (d * 2,))
    assert kinds(double, 1.0) == ["mul"]
    assert "mul" in kinds(jax.grad(double), 1.0)


def test_a_loop_keeps_its_body():
    program = flatten(
        jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c + y, None), jnp.float32(0), x))(jnp.ones(3))
    )
    (loop,) = program.operations
    assert loop.kind == "scan"
    assert [operation.kind for operation in loop.loop_body.operations] == ["add"]


def test_names_of_the_model_are_kept():
    program = flatten(jax.make_jaxpr(lambda x: checkpoint_name(jnp.sin(x), "mine") + 1)(1.0))
    assert list(program.names.values()) == ["mine"]
    assert [operation.kind for operation in program.operations] == ["sin", "add"]


def test_the_backward_pass_is_told_apart():
    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    program = flatten(jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 2)), jnp.ones((4, 3))))
    products = [operation for operation in program.operations if operation.kind == "dot_general"]
    assert [operation.is_backward for operation in products] == [False, True]


def test_an_operation_knows_its_line():
    program = flatten(jax.make_jaxpr(lambda x: jnp.sin(x))(1.0))
    assert program.operations[0].line.startswith("test_flat.py:")


def test_of_a_branch_the_longest_counts():
    def fn(x):
        return jax.lax.cond(x > 0, lambda x: x, lambda x: jnp.sin(jnp.cos(x)), x)

    assert [kind for kind in kinds(fn, 1.0) if kind in ("sin", "cos")] == ["cos", "sin"]


def test_it_computes_what_was_traced():
    """Literals that calls are given, and constants inside of them, are kept."""

    @jax.jit
    def scaled(x, by, add):
        return x * by + add

    def fn(x):
        y = scaled(x, 2.0, 1.0)
        z = scaled(y, x.sum(), 3.0)
        z = scaled(z, 0.5, x.mean())
        return jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry), z[0], z)

    x = jnp.linspace(0.0, 1.0, 12).reshape(3, 4)
    program = flatten(jax.make_jaxpr(fn)(x))
    values = dict(zip(program.inputs, [x], strict=True))
    for one in program.operations:
        given = [one.literals[at] if value is None else values[value] for at, value in enumerate(one.inputs)]
        values |= zip(one.outputs, rebind(one.equation, given), strict=True)
    found = [values[value] for value in program.outputs if value is not None]
    for mine, theirs in zip(found, jax.tree.leaves(fn(x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
