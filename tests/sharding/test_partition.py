import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxscale.sharding.partition import axes_of, dim_axes, divisible_spec, shard_count, spec_of

MESH = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("spec", "rank", "expected"),
    [
        (P(), 0, ()),
        (P(), 2, ((), ())),
        (P("data"), 1, (("data",),)),
        (P(("data",), None), 3, (("data",), (), ())),
        (P(None, ("data", "fsdp"), "tensor"), 0, ((), ("data", "fsdp"), ("tensor",))),
        (P(P.UNCONSTRAINED, "tensor"), 2, ((), ("tensor",))),
    ],
)
def test_the_axes_of_each_dim_and_back(spec, rank, expected):
    assert dim_axes(spec, rank) == expected
    assert dim_axes(spec_of(expected), len(expected)) == expected
    assert axes_of(spec) == tuple(axis for axes in expected for axis in axes)


def test_a_spec_has_no_whole_dims_at_its_end():
    assert spec_of([("data",), (), ()]) == P("data")
    assert spec_of([(), ()]) == P()


def test_dims_that_do_not_divide_are_whole():
    assert shard_count(MESH, ("data", "fsdp")) == 8
    assert shard_count(MESH, ()) == 1
    spec = P(("data", "fsdp"), "tensor")
    assert divisible_spec(spec, (16, 6), MESH) == spec
    assert divisible_spec(spec, (12, 6), MESH) == P(None, "tensor")
    assert divisible_spec(spec, (16, 5, 3), MESH) == P(("data", "fsdp"))
    assert divisible_spec(spec, (16,), MESH) == P(("data", "fsdp"))
