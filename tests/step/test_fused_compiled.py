"""A train step with its state in 8 bits has the kernel of the chip that it is compiled for, whole and sharded."""

import functools

import pytest

from jaxscale.models.decoder import Decoder
from jaxscale.planning.program import lowered_step
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan, StatePlan
from jaxscale.values import override
from tests.kernels.aot import compiled, gpu_compiler, tpu_compiler
from tests.plans import grouped

pytestmark = pytest.mark.slow


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 128), "int32"))


def experiment():
    return Experiment("fused", Decoder(vocab=512, context=128, layers=2, embed=256, heads=2), Tokens(), batch=8)


def steps(sharded):
    """With and without the kernel: of all matrices of the blocks, stacked."""
    changes = {"whole": {}, "sharded": {"mesh": sharded, "zero": "3"}, "dynamic": {"state": "dynamic8"}}
    base = Plan(precision="bfloat16", state=StatePlan("int8"))
    return {
        name: functools.partial(lowered_step, make=experiment, plan=override(base, grouped(change)))
        for name, change in changes.items()
    } | {"float32": functools.partial(lowered_step, make=experiment, plan=Plan(precision="bfloat16"))}


def proved(found):
    assert {name: one.error for name, one in found.items()} == dict.fromkeys(found)
    assert "adam8" not in found["float32"].hlo
    for name in ("whole", "sharded", "dynamic"):
        assert found[name].kernels > found["float32"].kernels, name


@tpu_compiler
def test_tpu():
    found = compiled("tpu v5e:2x2", steps("fsdp:2,tensor:2"))
    proved(found)
    assert 'op_name="' in found["whole"].hlo
    assert found["whole"].hlo.count("adam8") > 0


@gpu_compiler
def test_hopper():
    proved(compiled("gpu h200 x 4", steps("fsdp:4")))
