"""What adapters of a model of a billion parameters take, as compilers of a TPU and of a GPU have it."""

import functools

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.models import LoRA
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.planning.program import described_step, lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values import override
from tests.plans import grouped

pytestmark = pytest.mark.slow

BASE = Decoder(vocab=32_000, context=1024, layers=16, embed=2048, heads=16, kv_heads=8, mlp=8192)


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 1024), "int32"))


def experiment(adapted=True):
    return Experiment("one billion", LoRA(BASE, rank=16) if adapted else BASE, Tokens(), Optimizer(), batch=8)


@pytest.mark.parametrize(
    ("compiler", "platform", "mesh", "zero"),
    [("libtpu", "tpu v5e:2x4", "fsdp:8", "3"), ("jax_plugins.xla_cuda13", "gpu h200 x 1", "1", "0")],
)
def test_arguments_are_the_base_in_bfloat16_and_three_float32_arrays_of_the_adapters(compiler, platform, mesh, zero):
    pytest.importorskip(compiler)
    plan = override(Plan(precision="bfloat16", memory="full"), grouped({"mesh": mesh, "zero": zero}))
    target = Platform.parse(platform)
    adapters = described_step(experiment(), target, plan).parameters
    base = described_step(experiment(adapted=False), target, plan).parameters
    report = compile_report(functools.partial(lowered_step, make=experiment, plan=plan), target)
    found = report.argument_bytes * target.devices
    assert found - 2 * base == pytest.approx(12 * adapters, rel=0.02)
