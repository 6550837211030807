"""What adapters of a model of a billion parameters take, as compilers of a TPU and of a GPU have it."""

import functools
import math

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


def experiment(adapted=True, base=None):
    model = LoRA(BASE, rank=16, base=base) if adapted else BASE
    return Experiment("one billion", model, Tokens(), Optimizer(), batch=8)


each_compiler = pytest.mark.parametrize(
    ("compiler", "platform", "mesh", "zero"),
    [("libtpu", "tpu v5e:2x4", "fsdp:8", "3"), ("jax_plugins.xla_cuda13", "gpu h200 x 1", "1", "0")],
)


@each_compiler
def test_arguments_are_the_base_in_bfloat16_and_three_float32_arrays_of_the_adapters(compiler, platform, mesh, zero):
    pytest.importorskip(compiler)
    plan = override(Plan(precision="bfloat16", memory="full"), grouped({"mesh": mesh, "zero": zero}))
    target = Platform.parse(platform)
    adapters = described_step(experiment(), target, plan).parameters
    base = described_step(experiment(adapted=False), target, plan).parameters
    report = compile_report(functools.partial(lowered_step, make=experiment, plan=plan), target)
    found = report.argument_bytes * target.devices
    assert found - 2 * base == pytest.approx(12 * adapters, rel=0.02)


@each_compiler
def test_a_base_in_four_bits_takes_at_most_0_6_bytes_a_number_and_no_more_temporaries(compiler, platform, mesh, zero):
    pytest.importorskip(compiler)
    plan = override(Plan(precision="bfloat16", memory="full"), grouped({"mesh": mesh, "zero": zero}))
    target = Platform.parse(platform)
    few_bits, floats = (functools.partial(experiment, base=base) for base in ("nf4", None))
    step = described_step(few_bits(), target, plan)
    stored = sum(math.prod(weight.shape) for weight in step.pure_model.few_bit_weights.values())
    assert stored == 16 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 8192)
    others = step.pure_model.frozen_parameters - stored  # embedding, head and norms, in bfloat16
    report, float_report = (
        compile_report(functools.partial(lowered_step, make=make, plan=plan), target) for make in (few_bits, floats)
    )
    argument_bytes = report.argument_bytes * target.devices
    assert argument_bytes - 2 * others - 12 * step.parameters <= 0.6 * stored
    assert argument_bytes - 2 * others - 0.5625 * stored == pytest.approx(12 * step.parameters, rel=0.02)
    layer_bytes = 2 * stored // 16
    assert report.temp_bytes <= float_report.temp_bytes + layer_bytes, "more than one layer is dequantized at a time"
    assert report.sent() <= float_report.sent()
    assert (target.devices == 1) or report.sent() < float_report.sent() / 2, "codes are gathered, not numbers"
