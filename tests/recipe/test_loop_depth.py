"""Loops around collectives: the bound for an experiment, beside the compiled steps."""

import dataclasses
import os

import numpy as np
import pytest

from jaxscale.cli.experiment_commands import Train
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
from jaxscale.training.loop import train

TOKENS = np.random.default_rng(0).integers(0, 32, (16, 65), dtype=np.int32)
TEXT = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
IMAGES = {"images": np.ones((16, 8, 8, 3), np.float32), "labels": np.arange(16, dtype=np.int32) % 4}
DECODER = Decoder(vocab=32, context=64, layers=4, embed=16, heads=2)
VIT = ViT(classes=4, image=8, patch=2, layers=4, embed=16, heads=2)
RESNET = ResNet(classes=4, stages=(1, 1), width=8, stem="small")


class OwnModel(ResNet):
    """A model of the user's own."""


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
        {"plan": Plan(mesh="pipe:2", pipeline="1f1b:2x4")},  # neither field is valid alone
        {"plan": Plan(mesh="replica:2", diloco="every=2")},
        {"optimizer": Optimizer("muon")},
        {"optimizer": Optimizer(groups={"mlp": Optimizer("muon")})},
    ],
    ids=str,
)
def test_others_may_need_the_default(fields):
    experiment = dataclasses.replace(experiment_of(DECODER), **fields)
    assert loop_depth_of(experiment) == cpu_threads.DEFAULT_LOOP_DEPTH


@pytest.fixture
def declared(monkeypatch):
    """Declare a depth for one test, with a number of threads."""
    token = cpu_threads._loop_depth.set(cpu_threads.DEFAULT_LOOP_DEPTH)

    def declare(depth, threads):
        limit_loop_depth(depth)
        monkeypatch.setenv("NPROC", str(threads))

    yield declare
    cpu_threads._loop_depth.reset(token)


def test_a_deeper_program_than_declared_is_refused_if_it_lacks_threads(declared):
    check_loop_depth(lambda: pytest.fail("nothing was declared"))
    declared(depth=1, threads=16)
    check_loop_depth(lambda: 1)
    with pytest.raises(UserError, match=r"2 nested loops, for which 8 devices need 24 .* there are 16: set NPROC=24"):
        check_loop_depth(lambda: 2)
    declared(depth=1, threads=24)
    check_loop_depth(lambda: 2)


def test_a_run_checks_the_loops_of_its_step(declared, tmp_path):
    declared(depth=0, threads=8)
    experiment = experiment_of(DECODER, Plan(mesh="data:8"), steps=1)
    with pytest.raises(UserError, match=r"1 nested loops, for which 8 devices need 16"):
        train(experiment, out=tmp_path / "run", quiet=True)


PIPELINE = Plan(mesh="pipe:2", pipeline="1f1b:2x4")


@pytest.mark.parametrize(
    ("model", "plan", "threads"),
    [(RESNET, Plan(), "8"), (DECODER, Plan(), "16"), (DECODER, PIPELINE, "24"), (OwnModel(classes=4), Plan(), "24")],
    ids=str,
)
def test_the_train_command_declares_the_depth(declared, model, plan, threads, monkeypatch):
    declared(depth=2, threads=24)
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(cpu_threads, "is_backend_started", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(Train, "check", lambda self: None)
    monkeypatch.setattr(
        "jaxscale.cli.experiment_commands.load_experiment", lambda *_: (experiment_of(model, plan), None)
    )
    monkeypatch.setattr("jaxscale.training.loop.train", lambda *_, **options: cpu_threads.provide_threads())
    Train("file.py").run({})
    assert os.environ.get("NPROC") == threads
