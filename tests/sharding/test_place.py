import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.layers.attention_chunked import attend_chunked
from jaxscale.layers.loss import cross_entropy
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.place import constrain, layout, move, spec
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.attention.visibility import Visibility

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


def test_a_move_sends_the_array_itself_and_not_what_it_is_computed_from():
    """The input has four times the bytes of the result that is moved."""
    mesh = MeshSpec(tensor=8).build()
    rules = dataclasses.replace(AxisRules(), seq=("tensor",))
    names = ("batch", "seq", "embed"), ("batch", "inner_seq", "embed")

    def moved(x):
        with layout(mesh, rules):
            return move(jnp.abs(x).astype(jnp.int8), *names)

    x = jax.ShapeDtypeStruct((2, 64, 32), jnp.int32, sharding=NamedSharding(mesh, P(None, "tensor")))
    text = jax.jit(moved, out_shardings=NamedSharding(mesh, P())).lower(x).compile().as_text()
    assert [(each.kind, each.bytes) for each in collectives(text, mesh)] == [("all-gather", 2 * 64 * 32)]


@pytest.mark.parametrize("called", ["move", "chunked attention", "chunked loss"])
def test_a_backward_pass_is_placed_by_the_layout_of_its_call(called):
    """It is traced when it is asked for: in a pipeline, under a layout whose axes of rows are manual there."""
    inner = AxisRules(batch=("fsdp",), seq=("tensor",))

    def compute(x):
        if called == "move":
            return move(x, ("batch", "seq", "embed"), ("batch", "inner_seq", "mlp"))
        if called == "chunked loss":
            return cross_entropy(x, jnp.ones((4, 4)), jnp.zeros((4, 4), int), vocab=4, chunk=2).total
        heads = x[..., None, :]
        return attend_chunked(heads, heads, heads, Visibility(), scale=1.0, soft_cap=None, chunk=2)

    def body(x):
        with layout(jax.sharding.get_abstract_mesh(), inner):
            y, pull = jax.vjp(jax.checkpoint(compute), x)
        return pull(jnp.ones_like(y))[0]

    with layout(MESH, AxisRules()):
        manual = jax.shard_map(
            body, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        jax.jit(manual).lower(jnp.ones((8, 4, 4)))
