"""Replicas on one device: a codec under `jax.vmap`, for as many steps as there are gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.replicas import Codec

AXIS = "replica"
VALUES = {None: "", "rank": ":2", "fraction": ":0.1", "bits": ":4"}
"""What stands behind the colon, by the field it sets: a line for a codec with another."""


def example(codec: type[Codec]) -> Codec:
    """A codec of each class for tiny leaves, without a warm-up; DGC without momentum: it sums up what it is given."""
    options = ",warmup=0" * codec.late + ",momentum=0" * (codec.name == "dgc")
    return Codec.parse(f"{codec.name}{VALUES[codec.value]}{options}")


def init(codec: Codec, shape: tuple[int, ...], n: int, key=None, layers: bool = False):
    """The state of n replicas, which start alike."""
    state = _init(codec, shape, n, layers)(jax.random.key(7) if key is None else key)
    return jax.tree.map(lambda part: np.broadcast_to(part, (n, *part.shape)), state)


@functools.cache
def _init(codec, shape, n, layers):
    return jax.jit(lambda key: codec.init(shape, key, n, layers=layers))


def steps(codec: Codec, state, gradients, key, layers: bool = False):
    """Means (steps, n, ...) and the state after gradients (steps, n, ...), in one program."""
    means, after = _steps(codec, state, gradients, key, layers=layers)
    return np.asarray(means), jax.tree.map(np.asarray, after)


@functools.partial(jax.jit, static_argnums=0, static_argnames="layers")
def _steps(codec, state, gradients, key, layers):

    def one(state, given):
        step, gradient = given
        reduce = functools.partial(codec.reduce, axis=AXIS, key=key, step=step, layers=layers)
        mean, state = jax.vmap(reduce, axis_name=AXIS)(gradient, state)
        return state, mean

    state, means = jax.lax.scan(one, state, (jnp.arange(len(gradients)), gradients))
    return means, state


def owed(state, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """The sum of what workers and servers still owe, of one layer."""
    if "residual" not in state:
        return np.zeros(shape)
    total = np.sum(np.asarray(state["residual"], np.float64), 0)
    if "server" in state:
        total = total + n * np.asarray(state["server"], np.float64).reshape(-1)[: math.prod(shape)].reshape(shape)
    return total


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed numbers: a few are far larger than most."""
    rng = np.random.default_rng(seed)
    return np.float32(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)))


def conserves(n: int, gradients, state, means, after) -> None:
    """What was owed and given is what was told and is owed, to 1e-6 of the largest input a step and replica."""
    shape = gradients.shape[2:]
    given = np.sum(np.asarray(gradients, np.float64), (0, 1)) + owed(state, n, shape)
    told = n * np.sum(np.asarray(means[:, 0], np.float64), 0) + owed(after, n, shape)
    np.testing.assert_allclose(told, given, rtol=0, atol=1e-6 * n * len(means) * np.abs(gradients).max())


def sent(codec: Codec, shape: tuple[int, ...], n: int, layers: bool = False) -> int:
    """Bytes that one device sends, counted in the collectives of the traced program; rings send the least."""
    state = jax.eval_shape(lambda: codec.init(shape, jax.random.key(0), n, layers=layers))
    reduce = functools.partial(codec.reduce, axis=AXIS, key=jax.random.key(0), layers=layers)
    traced = jax.make_jaxpr(reduce, axis_env=[(AXIS, n)])(jax.ShapeDtypeStruct(shape, jnp.float32), state)
    factors = {"psum": 2 * (n - 1) / n, "all_gather": n - 1, "all_to_all": (n - 1) / n}
    return math.ceil(sum(factors[name] * payload for name, payload in _collectives(traced)))


def _collectives(jaxpr):
    """(kind, bytes of the operands) of each collective."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        over = "axis_name" in eqn.params or AXIS in eqn.params.get("axes", ())
        if over and eqn.primitive.name != "axis_index":
            yield eqn.primitive.name, sum(var.aval.size * var.aval.dtype.itemsize for var in eqn.invars)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                yield from _collectives(inner)
