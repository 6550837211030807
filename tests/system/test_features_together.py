"""Adapters over a base in few bits, chats, groups, averages, held-out sets and a warm start, in one run."""

import dataclasses
import json

import numpy as np
import pytest

import jaxscale as jx
from jaxscale.cli.main import main
from jaxscale.data import Chats
from jaxscale.models import LoRA, Pretrained
from jaxscale.training.evaluate import evaluate
from tests.chat_folders import chat_file, model_folder, turns

ONE, SHARDED = jx.Plan(mesh="1"), jx.Plan(mesh="fsdp:4", zero=3, microbatches=2, memory="full")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the model "tiny", and files of chats."""
    place = tmp_path_factory.mktemp("together")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(place / "cache"))
        model_folder(place / "tiny", "llama3")
        chat_file(place / "chats.jsonl", [turns(f"What is {i}?", f"It is {i}, my lord.") for i in range(40)])
        chat_file(place / "news.jsonl", [turns(f"What is {i}?", f"It is {i}.") for i in range(8)])
        yield place


def experiment_of(place, name, steps=4):
    """An experiment that uses all of these features."""
    return jx.Experiment(
        name,
        LoRA(Pretrained(place / "tiny"), rank=2, base="nf4", base_block=16),
        Chats(place / "chats.jsonl", place / "tiny", context=64, held_out=0.2),
        jx.Optimizer(
            learning_rate=1e-2, ema=0.5, groups={"attention": jx.Optimizer("lion", 1e-3, weight_decay=0.1)}, clip=1.0
        ),
        steps=steps,
        batch=8,
        evaluation=jx.Evaluation(every=2, at_start=True, best="news/loss"),
        held_out={"news": place / "news.jsonl"},
    )


def losses(run):
    return np.array([row["loss"] for row in run.metrics])


@pytest.mark.slow
def test_one_device_and_shards_agree_and_the_run_goes_on_elsewhere(place, capsys):
    whole = jx.train(experiment_of(place, "whole"), ONE, out=place / "whole", quiet=True)
    sharded = jx.train(experiment_of(place, "sharded"), SHARDED, out=place / "sharded", quiet=True)
    np.testing.assert_allclose(losses(sharded), losses(whole), rtol=1e-5)
    figures = [[(row["step"], row["loss"], row["news/loss"]) for row in run.evaluations] for run in (whole, sharded)]
    np.testing.assert_allclose(figures[1], figures[0], rtol=1e-5)
    assert [step for step, *_ in figures[0]] == [0, 2, 4]

    stop = [lambda event: event.kind == "step" and event.step == 2]
    jx.train(experiment_of(place, "cut"), SHARDED, out=place / "cut", quiet=True, callbacks=stop)
    continued = jx.train(experiment_of(place, "cut"), ONE, out=place / "cut", quiet=True)
    np.testing.assert_allclose(losses(continued), losses(whole), rtol=1e-5)

    assert evaluate(whole.dir, data=place / "news.jsonl")["loss"] == pytest.approx(figures[0][-1][2], rel=1e-5)
    warm = dataclasses.replace(experiment_of(place, "warm", steps=2), optimizer=jx.Optimizer("muon", 1e-3))
    warm_run = jx.train(warm, SHARDED, out=place / "warm", init_from=whole.dir, quiet=True)
    first = warm_run.evaluations[0]
    assert first["loss"] == pytest.approx(figures[0][-1][1], rel=1e-5), "the average of the source's weights"
    assert main(["report", str(whole.dir), str(warm_run.dir), "--out", str(place / "both.html")]) == 0
    assert "warm" in (place / "both.html").read_text()
    assert main(["export", str(warm_run.dir), str(place / "merged")]) == 0
    assert json.loads((place / "merged" / "config.json").read_text())
    merged = evaluate(place / "merged", data=place / "news.jsonl")
    assert merged["loss"] == pytest.approx(warm_run.evaluations[-1]["news/loss"], rel=1e-4)
