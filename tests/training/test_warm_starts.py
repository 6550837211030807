"""Runs from a warm compile cache neither hang nor crash; the bare loop did, before the cache left such programs out."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.models.decoder import Decoder
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.training.loop import train

PROGRAM = Path(__file__).with_name("warm_starts.py")


def failures(*arguments: str) -> str:
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout


def test_a_run_says_that_its_step_is_not_kept(toy, tmp_path, capsys):
    plan = Plan(mesh=MeshSpec(fsdp=2), zero=3)
    two_layers = Decoder(vocab=256, context=16, layers=2, embed=8, heads=2, mlp=16)
    train(toy(model=two_layers, plan=plan, steps=1), out=tmp_path / "run")
    assert capsys.readouterr().out.count("the step is compiled at every start") == 1


@pytest.mark.slow
def test_the_smallest_program_that_failed():
    assert failures("--starts", "10", "--cold", "2", "bare loop").endswith("\n0 failed\n")


@pytest.mark.slow
def test_without_the_filter_it_fails():
    assert not failures("--unfiltered", "--starts", "5", "--cold", "0", "bare loop").endswith("\n0 failed\n")


@pytest.mark.slow
def test_a_loop_that_waits_for_nothing():
    assert failures("--starts", "1", "--cold", "2", "own loop").endswith("\n0 failed\n")


@pytest.mark.slow
def test_starts_of_every_layout():
    """The recorded one has 20 starts each: python tests/training/warm_starts.py"""
    assert failures("--starts", "2", "--cold", "1").endswith("\n0 failed\n")
