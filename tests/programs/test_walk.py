"""Walks over jaxprs visit what runs, as often as it runs, and compute what the program computes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.compat import rebind
from jaxscale.programs.walk import Constant, equations_with_runs, evaluate, inner_jaxprs


def test_equations_in_loops_count_as_often_as_they_run():
    def fn(x):
        def body(x, _):
            y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, length=4)
            return jax.jit(jnp.cos)(y), None

        return jnp.tanh(jax.lax.scan(body, x, length=3)[0])

    runs: Counter[str] = Counter()
    for eqn, times in equations_with_runs(jax.make_jaxpr(fn)(1.0)):
        runs[eqn.primitive.name] += times
    assert (runs["sin"], runs["cos"], runs["tanh"]) == (12, 3, 1)


def test_every_branch_is_visited():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    names = [eqn.primitive.name for eqn, _ in equations_with_runs(jaxpr)]
    assert {"sin", "cos"} <= set(names)
    (cond,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(inner_jaxprs(cond)) == 2


def test_an_evaluation_with_each_primitive_gives_the_results():
    weights = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(3, 4)

    def fn(x):
        return jnp.tanh(x @ weights) * 2.0, x, 3.0

    def run(eqn, operands):
        return rebind(eqn, [atom.value if isinstance(atom, Constant) else atom for atom in operands])

    x = jnp.ones((2, 3))
    closed = jax.make_jaxpr(fn)(x)
    *results, literal = evaluate(closed.jaxpr, [*closed.consts, x], run)
    for result, expected in zip(results, fn(x), strict=False):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert literal == Constant(3.0)
