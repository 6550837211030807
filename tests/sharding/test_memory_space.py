import types

import jax
import jax.numpy as jnp
import pytest

from jaxscale.errors import UserError
from jaxscale.sharding.memory_space import check_host_memory, is_rehearsal, on_host, to_device, to_host


def test_the_space_is_part_of_the_type_and_the_gradient_goes_back():
    seen = []

    def loss(x):
        seen.append(on_host(x))
        return (to_device(x) ** 2).sum()

    def run(x):
        hosted = to_host({"x": x})["x"]
        return jax.grad(loss)(hosted)

    gradient = jax.jit(run)(jnp.arange(3.0))
    assert seen == [True]
    assert gradient.sharding.memory_kind == "pinned_host"
    assert jax.device_get(gradient).tolist() == [0.0, 2.0, 4.0]


def test_devices_without_host_memory_are_refused():
    check_host_memory(jax.devices(), "weights host")
    assert is_rehearsal(jax.devices())
    memories = [types.SimpleNamespace(kind="device")]
    device = types.SimpleNamespace(device_kind="Abacus", platform="wood", addressable_memories=lambda: memories)
    says = r"weights host: Abacus \(wood\) has no memory of kind pinned_host \(it has device\)"
    with pytest.raises(UserError, match=says):
        check_host_memory([device], "weights host")
    memories.clear()
    with pytest.raises(UserError, match=r"weights host: Abacus is described, not attached.* use fit --verify"):
        check_host_memory([device], "weights host")
    assert not is_rehearsal([device])
