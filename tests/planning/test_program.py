"""The step as the compiler of a described device is given it."""

import functools

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.models.decoder import Decoder
from jaxscale.models.resnet import ResNet
from jaxscale.planning.program import described_step, lowered_step, traced_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import local_bytes

ON_HOST = {
    "state streamed": Plan(zero=3, offload=OffloadPlan(optimizer_state="streamed")),
    "state updated there": Plan(zero=3, offload=OffloadPlan(optimizer_state="host")),
    "weights too": Plan(zero=3, offload=OffloadPlan("host", "host", "streamed")),
}


class Tokens:
    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, 16), "int32"))


def tiny() -> Experiment:
    return Experiment("tiny", Decoder(vocab=64, context=16, heads=2, layers=2, embed=64), Tokens(), batch=4, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOST)
def test_what_lies_on_the_host_of_a_described_gpu_is_there(name, monkeypatch, tmp_path):
    """JAX lists no memories of such a GPU; its compiler has them."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level
    platform, plan = Platform.parse("gpu h100 x 2"), ON_HOST[name]
    report = compile_report(functools.partial(lowered_step, make=tiny, plan=plan), platform)
    assert report.crashed is None
    state = described_step(tiny(), platform, plan).layout.abstract
    assert report.host_argument_bytes == local_bytes(state, is_on_host=True) > 0


class Images:
    def shapes(self, batch):
        return {"images": ((batch, 16, 16, 3), "float32"), "labels": ((batch,), "int32")}


@pytest.mark.parametrize(
    ("platform", "plan", "late"),
    [
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=2), True),
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=1), False),  # the gradients are not summed around a ring
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=2, microbatches=2), False),
        ("tpu v5p:2x2x1", Plan(mesh="fsdp:4", zero=2), False),
        ("gpu h100 x 4", Plan(mesh="fsdp:4", zero=1), True),
    ],
)
def test_gradients_of_blocks_outside_of_loops_come_last_where_the_compiler_delays_them(platform, plan, late):
    model = ResNet(classes=8, stages=(2,), bottleneck=False)
    experiment = Experiment("images", model, Images(), batch=8, plan=plan)
    described = Platform.parse(platform)
    step = described_step(experiment, described)
    program = traced_step(step, batch_shapes(experiment), described).program
    loops = [operation.loop_body for operation in program.operations if operation.loop_body is not None]
    program = loops[0] if plan.microbatches > 1 else program
    shapes = [
        program.avals[operation.outputs[0]].shape
        for operation in program.operations
        if operation.is_backward and operation.kind == "conv_general_dilated"
    ]
    are_weights = [shape[0] in (3, 7) for shape in shapes]  # kernels of 3 x 3 or 7 x 7; activations have 8 or 4 rows
    assert are_weights.count(True) == 5
    assert (are_weights == sorted(are_weights)) == late
