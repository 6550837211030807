"""Loops around collectives: the bound for an experiment, beside the compiled steps."""

import dataclasses

import numpy as np
import pytest

from jaxscale.compiler.collectives import collective_loop_depth
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.errors import UserError
from jaxscale.models import Decoder, ResNet, ViT
from jaxscale.optim.optimizer import Optimizer
from jaxscale.platforms import cpu_threads
from jaxscale.platforms.cpu_threads import check_loop_depth, limit_loop_depth
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.loop_depth import loop_depth_of
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build

TOKENS = np.random.default_rng(0).integers(0, 32, (16, 65), dtype=np.int32)
TEXT = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
IMAGES = {"images": np.ones((16, 8, 8, 3), np.float32), "labels": np.arange(16, dtype=np.int32) % 4}
DECODER = Decoder(vocab=32, context=64, layers=4, embed=16, heads=2)
VIT = ViT(classes=4, image=8, patch=2, layers=4, embed=16, heads=2)
RESNET = ResNet(classes=4, stages=(1, 1), width=8, stem="small")


def experiment_of(model, plan=Plan(), **fields):
    return Experiment("loops", model, TEXT if isinstance(model, Decoder) else IMAGES, batch=16, plan=plan, **fields)


def compiled_depth(experiment):
    step = build(experiment)
    step.compile(step.place(TEXT if isinstance(experiment.model, Decoder) else IMAGES))
    return collective_loop_depth(HloProgram(step.program))


@pytest.mark.parametrize(
    ("model", "plan", "optimizer"),
    [
        (RESNET, Plan(mesh="data:8"), Optimizer()),
        (dataclasses.replace(RESNET, bottleneck=True), Plan(mesh="data:2", memory="full"), Optimizer("sgd")),
        (DECODER, Plan(mesh="data:8"), Optimizer(ema=0.9)),
        (DECODER, Plan(mesh="data:2", kernels="attention=chunked,loss_chunk=16", memory="full"), Optimizer("lion")),
        (dataclasses.replace(DECODER, windows=(8, None), tied=True), Plan(mesh="data:2", memory="dots"), Optimizer()),
        (dataclasses.replace(DECODER, dropout=0.1), Plan(memory="save:1MiB", precision="bfloat16"), Optimizer("sgd")),
        (VIT, Plan(mesh="data:4", unroll=2), Optimizer()),
        (VIT, Plan(mesh="data:2", unroll=4), Optimizer()),
        (VIT, Plan(), Optimizer("lion")),
    ],
    ids=str,
)
def test_collectives_are_in_no_more_loops_than_the_bound(model, plan, optimizer):
    experiment = experiment_of(model, plan, optimizer=optimizer)
    assert compiled_depth(experiment) <= loop_depth_of(experiment) < cpu_threads.DEFAULT_LOOP_DEPTH
    assert (loop_depth_of(experiment) == 0) == (isinstance(model, ResNet) or plan.unroll == 4)


def test_loops_over_microbatches_and_layers_count_both():
    experiment = experiment_of(DECODER, Plan(mesh="fsdp:2", zero=3, microbatches=2))
    assert compiled_depth(experiment) == 2 == loop_depth_of(experiment)


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": Plan(mesh="data:2,fsdp:2", zero=1)},
        {"plan": Plan(memory="sqrt")},
        {"plan": Plan(mesh="data:2", microbatches=2)},
        {"plan": Plan(mesh="data:2,tensor:2")},
        {"optimizer": Optimizer("muon")},
        {"optimizer": Optimizer(groups={"mlp": Optimizer("muon")})},
    ],
    ids=str,
)
def test_others_may_need_the_default(fields):
    experiment = dataclasses.replace(experiment_of(DECODER), **fields)
    assert loop_depth_of(experiment) == cpu_threads.DEFAULT_LOOP_DEPTH


def test_a_deeper_program_than_declared_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_loop_depths", [cpu_threads.DEFAULT_LOOP_DEPTH])
    check_loop_depth(3)  # nothing was declared
    limit_loop_depth(1)
    check_loop_depth(1)
    with pytest.raises(UserError, match=r"in 2 nested loops, .* suffice for 1: set NPROC=24"):
        check_loop_depth(2)
