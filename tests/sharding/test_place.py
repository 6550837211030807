import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.errors import UserError
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import constrain, layout, spec
from jaxscale.sharding.rules import AxisRules

MESH = MeshSpec(data=2, fsdp=2, tensor=2).build()


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((8, 16, 32), ("batch", "seq", "embed"), P(("data", "fsdp"))),
        ((32, 64), ("embed", "mlp"), P(None, "tensor")),
        ((32, 63), ("embed", "mlp"), P()),  # 63 does not divide: whole
        ((6, 4), ("batch", "mlp"), P(None, "tensor")),
        ((4, 4), ("heads", "mlp"), P("tensor")),  # an axis is used once, by the first dim that asks
        ((4, 3), (None, None), P()),
    ],
)
def test_spec(shape, names, expected):
    assert spec(shape, names, MESH, AxisRules()) == expected


def test_a_misspelt_logical_axis_names_the_near_miss():
    with pytest.raises(UserError, match="did you mean 'embed'"):
        spec((2, 2), ("batch", "embd"), MESH, AxisRules())


def test_a_rule_on_an_unknown_mesh_axis_is_refused():
    with pytest.raises(UserError, match="did you mean 'tensor'"):
        dataclasses.replace(AxisRules(), mlp=("tenser",))


def test_constrain_places_inside_a_layout_and_is_the_identity_outside():
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", "mlp") is x
    with layout(MESH, AxisRules()):
        y = jax.jit(lambda x: constrain(x, "batch", "mlp"))(x)
    assert y.sharding.spec == P(("data", "fsdp"), "tensor")
    with pytest.raises(ValueError, match="name each dim"), layout(MESH, AxisRules()):
        constrain(x, "batch")
