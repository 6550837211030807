"""Every way to apply a rule gives the same weights and state, on one device and sharded, good steps and bad."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import UserError
from jaxscale.optim.elementwise import first_mixing
from jaxscale.optim.offloaded import global_norm, on_host, plainly, streamed
from jaxscale.optim.slices import Cut, cut

SHAPES = {"blocks": {"w": (6, 8, 16), "norm": (6, 8)}, "table": (24, 8), "bias": (8,)}
MASK = jax.tree.map(lambda shape: len(shape) > 2, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
RATE = optax.join_schedules([optax.linear_schedule(0.01, 0.1, 2), optax.cosine_decay_schedule(0.1, 5)], [2])
RULES = {
    "adamw": optax.adamw(RATE, 0.9, 0.95, weight_decay=0.1, mask=MASK),
    "lion": optax.lion(RATE, mask=MASK),
    "momentum": optax.sgd(RATE, momentum=0.9),
    "sgd": optax.sgd(RATE),
    "amsgrad": optax.amsgrad(RATE),
    "by label": optax.partition(
        {"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"blocks": "a", "table": "b", "bias": "b"}
    ),
}


def trees(places):
    rng = np.random.default_rng(0)

    def tree():
        return jax.tree.map(
            lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
            SHAPES,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    return jax.device_put(tree(), places), [jax.device_put(tree(), places) for _ in range(3)]


def sharded(kind=None):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"blocks": {"w": (None, None, "fsdp"), "norm": ()}, "table": ("fsdp",), "bias": ()}
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind),
        specs,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def run(advance, optimizer, places, *, hosted, weights, clip=None):
    """Three steps, the second of them bad, with the state (and the weights) in host memory where asked."""
    params, gradients = trees(places)
    state = optimizer.init(params)
    host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), places)
    whole = jax.tree.leaves(places)[0].mesh
    scalar = NamedSharding(whole, PartitionSpec())
    put = optax.tree.map_params(
        optimizer,
        lambda leaf, s: leaf if isinstance(leaf, optax.MaskedNode) else s,
        state,
        host if hosted else places,
        transform_non_params=lambda _: scalar,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    state = jax.device_put(state, put)
    masters = host if weights else places
    params = jax.device_put(params, masters)
    step = jax.jit(advance, donate_argnums=(1, 2), out_shardings=(masters, put))
    for number, gradient in enumerate(gradients):
        norm = global_norm(gradient)
        params, state = step(gradient, state, params, norm, jnp.array(number != 1))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)}
    assert kinds == ({"pinned_host"} if weights else {"device"})
    return jax.tree.map(np.asarray, (params, state))


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("weights", [False, True], ids=["weights on the device", "weights on the host"])
def test_every_way_gives_the_same(name, weights):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), RULES[name])
    expected = run(plainly(optimizer), optimizer, sharded(), hosted=False, weights=False)
    shapes = jax.tree.map(
        lambda shape, s: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s),
        SHAPES,
        sharded(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    for advance in (streamed(RULES[name], shapes, clip=1.0, slice_bytes=64), on_host(RULES[name], clip=1.0)):
        found = run(advance, optimizer, sharded(), hosted=True, weights=weights)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), found, expected)


@pytest.mark.parametrize(
    ("rule", "culprit"),
    [
        (optax.adamw(1e-3), None),
        (optax.chain(optax.clip(1.0), optax.nadam(1e-3)), None),
        (optax.lamb(1e-3), "reduce_sum"),
        (optax.clip_by_global_norm(1.0), "reduce_sum"),
        (optax.adafactor(1e-3, min_dim_size_to_factor=4), "reduce_sum"),
        (optax.centralize(), "reduce_sum"),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p: (jax.tree.map(jnp.sort, u), s)), "sort"),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p: (jax.tree.map(jnp.cumsum, u), s)), "cumsum"),
    ],
)
def test_a_rule_that_mixes_elements_is_known_by_its_program(rule, culprit):
    params = {"w": jnp.ones((8, 8))}
    found = first_mixing(rule, params)
    assert (found is None) == (culprit is None), found
    if culprit is not None:
        with pytest.raises(UserError, match="mixes elements"):
            streamed(rule, params)


def test_slices_are_cut_along_a_dim_that_is_whole_on_each_device():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    first, last = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), (None, "fsdp")))
    assert cut((64, 32), 4, None, 1024) == Cut(0, 8)
    assert cut((64, 32), 4, last, 256) == Cut(0, 4)
    assert cut((64, 32), 4, first, 256) == Cut(1, 4)
    assert cut((7, 1024), 4, None, 4096) == Cut(0, 7)
    assert cut((64,), 4, first, 4) == Cut()  # nothing is whole, so nothing is cut
    assert cut((3, 1024), 4, None, 64) == Cut(1, 256), "the dim that gives slices so small"


def test_the_norm_of_gradients_on_the_host_is_that_on_the_device():
    params, _ = trees(sharded())
    hosted = jax.device_put(params, sharded("pinned_host"))
    found = jax.jit(functools.partial(global_norm, shardings=sharded()))(hosted)
    np.testing.assert_allclose(found, optax.tree.norm(params), rtol=1e-6)
