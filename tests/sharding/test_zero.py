import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.zero import Placement, placement, split_further, split_spec

MESH = MeshSpec(fsdp=4, tensor=2).build()


@pytest.mark.parametrize(
    ("shape", "names", "whole", "expected"),
    [
        ((64, 256), None, P(), P(None, "fsdp")),  # the largest dim
        ((64, 250), None, P(), P("fsdp")),  # the largest that divides
        ((3, 5), None, P(), P()),  # none divides: whole
        ((), None, P(), P()),
        ((8, 6), ("layers", "norm"), P(), P()),  # the stacked dim is never split
        ((64, 256), ("embed", "mlp"), P(None, "tensor"), P("fsdp", "tensor")),  # one that tensor does not split
        ((64, 8), ("embed", "mlp"), P(None, "tensor"), P("fsdp", "tensor")),
        ((2, 256, 64), ("layers", "mlp", "embed"), P(None, "tensor"), P(None, "tensor", "fsdp")),
        ((6, 256), ("embed", "mlp"), P(None, "tensor"), P(None, ("tensor", "fsdp"))),  # no other divides
        ((256, 64), ("vocab", "embed"), P("tensor"), P(("tensor", "fsdp"))),  # a table keeps whole rows
        ((64, 256), ("embed", "vocab"), P(None, "tensor"), P("fsdp", "tensor")),
        ((8, 64, 256), (None, "embed", "mlp"), P(None, None, "tensor"), P(None, None, ("tensor", "fsdp"))),  # experts
        ((64, 4), ("embed", "mlp"), P(None, "fsdp"), P(None, "fsdp")),  # already there
    ],
)
def test_split_takes_the_largest_dim_per_device_that_divides_and_that_tensor_leaves_whole(
    shape, names, whole, expected
):
    assert split_spec(shape, names, whole, MESH) == expected


@pytest.mark.parametrize("copied", [False, True])
def test_the_stages_of_zero(copied):
    whole, shard = P(None, "tensor"), P("fsdp", "tensor")
    tensors = {}
    for stage in (0, 1, 2, 3):
        p = placement((64, 8), ("embed", "mlp"), stage, copied, MESH, AxisRules())
        tensors[stage] = (p.master, p.state, p.gradient, p.compute)
    early = shard if copied else whole
    assert tensors == {
        0: (whole, whole, whole, whole),
        1: (early, shard, whole, whole),
        2: (early, shard, shard, whole),
        3: (shard, shard, shard, shard),
    }


@pytest.mark.parametrize(
    ("shape", "found", "expected"),
    [
        # the state's dim, whose rows fsdp has taken: the largest of the master's is another
        ((90, 32), Placement(P(), P("fsdp"), P(), P()), (P(None, "pipe"), P("fsdp", "pipe"), P(None, "pipe"))),
        ((64, 8), Placement(P(), P("fsdp"), P(), P()), (P("pipe"), P(("pipe", "fsdp")), P("pipe"))),  # before fsdp
        ((6, 3), Placement(P(), P("fsdp"), P(), P()), (P("pipe"), P("fsdp"), P("pipe"))),  # none divides the state's
    ],
)
def test_what_stages_share_nests(shape, found, expected):
    """A part of the finest placement lies within a part of each other, so that an update exchanges nothing."""
    mesh = MeshSpec(pipe=2, fsdp=2).build()
    after = split_further(found, "pipe", shape, mesh)
    assert (after.master, after.state, after.gradient) == expected
    assert after.compute == found.compute
