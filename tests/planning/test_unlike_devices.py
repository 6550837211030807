"""Blocks dealt out to unlike devices, against every way to deal them out."""

import dataclasses
import itertools

import pytest

from jaxscale.cli import main
from jaxscale.errors import UserError
from jaxscale.models import Decoder
from jaxscale.pipeline.choose.partition import ModelPrices
from jaxscale.pipeline.choose.price import Price
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning import unlike_devices
from jaxscale.planning.unlike_devices import assign, parse_groups
from jaxscale.recipe.experiment import Experiment

SLOWER = {"h100": 1.0, "a100-80": 2.5}
EXPERIMENT = Experiment("unlike", Decoder(vocab=8, context=8, layers=7, embed=8, heads=2), None)


@pytest.fixture(autouse=True)
def _priced(monkeypatch):
    """Block i takes 1 + i / 8 on the faster chip."""

    def prices(experiment, platform, ranks, microbatches):
        model = ModelPrices(tuple(Price(1 + i / 8, 1 + i / 8, 1.0) for i in range(7)), last=Price(0.5, 0.5, 0.5))
        taken.append((platform.devices, ranks, microbatches))
        return ModelPrices(
            tuple(block.times(SLOWER[platform.chip.name]) for block in model.blocks),
            last=model.last.times(SLOWER[platform.chip.name]),
        )

    taken: list[tuple[int, int, int]] = []
    monkeypatch.setattr(unlike_devices, "model_prices", prices)
    monkeypatch.setattr(unlike_devices, "taken", taken, raising=False)


def every_way(schedule, slowness):
    """Seconds of the fastest of all partitions."""
    best = float("inf")
    for inner in itertools.combinations(range(1, 7), schedule.stages - 1):
        costs = []
        for begin, end, slow in zip((0, *inner), (*inner, 7), slowness, strict=True):
            head = 0.5 * (end == 7)
            passes = [sum(1 + i / 8 for i in range(begin, end)) + head] * 2 + [end - begin + head]
            costs.append([slow * seconds for seconds in passes])
        best = min(best, simulate(schedule, Costs(*map(tuple, zip(*costs, strict=True)))).seconds)
    return best


@pytest.mark.parametrize("text", ["1f1b:3x4", "gpipe:3x6"])
def test_it_is_the_fastest_of_all(text):
    plan = PipelinePlan.parse(text)
    groups = parse_groups("gpu a100-80, gpu h100 x 2", 3)
    assignment = assign(EXPERIMENT, groups, plan, plan.schedule())
    assert assignment.chip_names == ("a100-80", "h100", "h100")
    assert assignment.pipeline.stages[0] < min(assignment.pipeline.stages[1:])
    assert sum(assignment.pipeline.stages) == 7
    # messages take a moment, which the count of all partitions leaves out
    assert assignment.partition.seconds == pytest.approx(every_way(plan.schedule(), (2.5, 1.0, 1.0)), rel=1e-6)
    stages = "+".join(map(str, assignment.pipeline.stages))
    assert str(assignment).startswith(f"ranks on a100-80, h100, h100: --plan.pipeline {text},stages={stages}")
    assert PipelinePlan.parse(str(assignment).split()[-1]) == assignment.pipeline


def test_the_printed_plan_can_be_pasted_whatever_else_is_printed():
    plan = PipelinePlan.parse("interleaved:2x4,v=2,stash=input")
    assignment = assign(EXPERIMENT, parse_groups("gpu h100, gpu a100-80", 2), plan, plan.schedule())
    partition = dataclasses.replace(assignment.partition, bound=assignment.partition.seconds / 1.25)
    text = str(dataclasses.replace(assignment, partition=partition))
    assert text.endswith(" (at most 25.0% slower than the fastest)")
    pasted = PipelinePlan.parse(text.partition("--plan.pipeline ")[2].partition(" ")[0])
    assert pasted == assignment.pipeline
    assert dataclasses.replace(pasted, stages=None) == plan


def test_virtual_workers_are_alike_and_share_the_rows():
    plan = PipelinePlan.parse("1f1b:2x4")
    assignment = assign(EXPERIMENT, parse_groups("gpu a100-80 x 2, gpu h100 x 2", 2), plan, plan.schedule())
    assert (assignment.worker_count, assignment.chip_names) == (2, ("h100", "a100-80"))
    assert assignment.pipeline.stages[0] > assignment.pipeline.stages[1]
    assert "2 virtual workers side by side" in str(assignment)
    assert unlike_devices.taken == [(4, 2, 4)] * 2


def test_turns_of_unlike_attention_stay_whole():
    model = dataclasses.replace(EXPERIMENT.model, windows=(4, None))
    plan = PipelinePlan.parse("1f1b:2x4")
    experiment = dataclasses.replace(EXPERIMENT, model=model)
    assignment = assign(experiment, parse_groups("gpu h100, gpu a100-80", 2), plan, plan.schedule())
    assert assignment.pipeline.stages[0] % 2 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu h100 x 2", "expected two kinds of chips or more; for one kind, use --platform"),
        ("gpu h100 x 2, gpu a100-80", "3 devices for 2 ranks"),
        ("gpu h100, gpu b1000", "b1000"),
    ],
)
def test_devices_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        parse_groups(text, 2)


def test_the_command_line_says_what_goes_together(capsys):
    assert main(["draw", "pipeline", "1f1b:2x4", "--devices", "gpu h100, gpu a100-80"]) == 2
    assert "--devices needs --experiment FILE" in capsys.readouterr().err
