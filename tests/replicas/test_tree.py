"""The exchange of a tree of gradients in a loop of one's own: conservation, exact small leaves, bad numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.errors import UserError
from jaxscale.replicas.tree import reduce_gradients, start_reduction

REPLICAS = 2


def exchange(codec, gradients, states):
    """Mean and new states; leaves of both arguments are (replicas, ...)."""
    mesh = Mesh(np.array(jax.devices()[:REPLICAS]), ("slow",), axis_types=(AxisType.Auto,))

    def run_on_device(gradients, states):
        gradients, states = jax.tree.map(lambda leaf: leaf[0], (gradients, states))
        mean, states = reduce_gradients(codec, gradients, states, "slow", jnp.int32(0))
        return mean, jax.tree.map(lambda leaf: leaf[None], states)

    specs = {"in_specs": (P("slow"), P("slow")), "out_specs": (P(), P("slow"))}
    return jax.jit(jax.shard_map(run_on_device, mesh=mesh, check_vma=False, **specs))(gradients, states)


def gradients_of_replicas():
    keys = jax.random.split(jax.random.key(3))
    kernel, bias = jax.random.normal(keys[0], (REPLICAS, 64, 64)), jax.random.normal(keys[1], (REPLICAS, 64))
    return {"layer": {"kernel": kernel, "bias": bias}}


def states_of_replicas(codec, gradients):
    states = start_reduction(codec, jax.tree.map(lambda leaf: leaf[0], gradients), REPLICAS)
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * REPLICAS), states)


@pytest.mark.parametrize("codec", ["powersgd:4", "topk:0.25", "int8"])
def test_nothing_is_lost(codec):
    gradients = gradients_of_replicas()
    mean, states = exchange(codec, gradients, states_of_replicas(codec, gradients))
    kernel, state = gradients["layer"]["kernel"], states["layer/kernel"]
    kept = state["residual"].sum(0)
    if "server" in state:  # chunk i of the leaf is that of device i
        kept += REPLICAS * state["server"].reshape(-1)[: kept.size].reshape(kept.shape)
    expected = kernel.sum(0)
    np.testing.assert_allclose(kept + REPLICAS * mean["layer"]["kernel"], expected, atol=1e-5)
    np.testing.assert_allclose(mean["layer"]["bias"], gradients["layer"]["bias"].mean(0), rtol=1e-6)


def test_a_bad_number_changes_no_state():
    gradients = gradients_of_replicas()
    states = states_of_replicas("powersgd:4", gradients)
    gradients["layer"]["kernel"] = gradients["layer"]["kernel"].at[0, 0, 0].set(jnp.nan)
    mean, new_states = exchange("powersgd:4", gradients, states)
    assert bool(jnp.isnan(mean["layer"]["kernel"]).all())
    chex.assert_trees_all_equal(new_states, states)


def test_refusals():
    with pytest.raises(UserError, match="supports none of this model's gradients"):
        start_reduction("int8", {"bias": jnp.ones(8)}, REPLICAS)
    with pytest.raises(UserError, match="did you mean 'int8'"):
        start_reduction("int9", {"kernel": jnp.ones((64, 64))}, REPLICAS)
