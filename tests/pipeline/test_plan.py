"""The text form of a pipeline, and what it refuses."""

import dataclasses
import pickle

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.csv import to_csv
from jaxscale.pipeline.plan import PipelinePlan, forms
from jaxscale.pipeline.schedules import METHODS
from jaxscale.values.as_json import from_json, to_json

GOOD = {
    "1f1b:4x8": ("1f1b", 4, 8, None, None),
    "interleaved:4x8,v=3": ("interleaved", 4, 8, 3, None),
    "lockstep:2x5": ("lockstep", 2, 5, None, None),
    "pipedream:4": ("pipedream", 4, None, None, None),
    "pipemare:8": ("pipemare", 8, None, None, None),
    "2bw:4x8": ("2bw", 4, 8, None, None),
    "auto:4": ("auto", 4, None, None, None),
    "file:some/where:else.csv": ("file", None, None, None, "some/where:else.csv"),
    "file:some,where.csv,stash=input": ("file", None, None, None, "some,where.csv"),
}


@pytest.mark.parametrize("text", GOOD)
def test_text_form(text):
    plan = PipelinePlan.parse(text)
    assert dataclasses.astuple(plan)[:5] == GOOD[text]
    assert str(plan) == text
    assert PipelinePlan.parse(str(plan)) == plan
    assert from_json(PipelinePlan, to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_text_form(name):
    size = "4" if METHODS[name].streams else "4x8"
    plan = PipelinePlan.parse(f"{name}:{size}")
    assert plan.asynchronous == METHODS[name].steps
    schedule = plan.schedule()
    assert (schedule.name, schedule.ranks) == (name, 4)
    assert name in forms()


def test_case_and_blanks_do_not_matter():
    assert PipelinePlan.parse(" ZB-V:4X8 ") == PipelinePlan.parse("zb-v:4x8")
    assert PipelinePlan.parse("interleaved:4x8, v=2") == PipelinePlan.parse("interleaved:4x8,v=2")


BAD = {
    "1f1b": "'1f1b': got no numbers, expected 1f1b:PxM: P devices, M microbatches",
    "1f1b:4": "1f1b needs microbatches: write 1f1b:PxM",
    "1f1b:4*8": r"got '4\*8', expected 1f1b:PxM",
    "1f1b:-4x8": "got '-4x8', expected 1f1b:PxM",
    "1f1b:0x8": "got 0 devices, expected 1 or more",
    "1f1b:4x0": "got 0 microbatches, expected 1 or more",
    "1f1b:4x8,v=2": "got v=2, but a device holds one stage; only interleaved and lockstep take v",
    "zb-v:4x8,v=4": "got v=4, but each device holds 2 stages",
    "interleaved:4x8,v=1": "got v=1, expected 2 or more; 1f1b has one stage for each device",
    "interleaved:4x8,v=0": "got 0 stages per device",
    "interleaved:4x8,v=two": "v: got 'two', expected a whole number",
    "interleaved:4x8,w=2": "got 'w=2', expected interleaved",
    "interleaved:4x8,v=2,v=3": r"got 'v=3', expected interleaved:PxM\[,v=V\], with stages, .* each once$",
    "pipedream:4x8": (
        "pipedream takes no microbatches: write pipedream:P. Each microbatch is an update; only 2bw takes several"
    ),
    "2bw:4": "2bw needs microbatches: write 2bw:PxM",
    "2bw:4x3": "got 3 microbatches per update, expected at least 4, the number of devices",
    "chimera:3x6": "got 3 devices, expected an even number",
    "chimera:4x6": "got 6 microbatches, expected a multiple of 4, the number of devices",
    "auto:4x8": "auto takes no microbatches: write auto:P",
    "auto:4,v=2": "auto takes no v: write auto:P",
    "auto:0": "auto: got 0 devices",
    "auto": "got no numbers, expected auto:P",
    "file:": "file needs path: write file:PATH",
    "zbv:4x8": "unknown pipeline schedule 'zbv'.*did you mean 'zb-v'",
    "lock-step:4x8": "did you mean 'lockstep'",
    "zb_h1:4x8": "did you mean 'zb-h1'",
    "1b1f:4x8": "did you mean '1f1b'",
    "dualpipe:4x8": "did you mean 'dualpipe-v'",
    "": "unknown pipeline schedule ''",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_refused(text):
    with pytest.raises(UserError, match=BAD[text]):
        PipelinePlan.parse(text)


def test_fields_of_a_wrong_type_and_fields_that_do_not_go_together():
    with pytest.raises(UserError, match="ranks"):
        PipelinePlan("1f1b", "4", 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="1f1b takes no path"):
        PipelinePlan("1f1b", 4, 8, path="x.csv")
    with pytest.raises(UserError, match="file takes no ranks"):
        PipelinePlan("file", 4, path="x.csv")


def test_schedules_of_updates_and_of_files(tmp_path):
    assert PipelinePlan.parse("2bw:4x8").schedule(updates=3).microbatches == 24
    assert PipelinePlan.parse("pipedream:4").schedule(updates=5).microbatches == 5
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(METHODS["zb-h1"].schedule(4, 8)))
    plan = PipelinePlan.parse(f"file:{path}")
    assert plan.schedule().orders == METHODS["zb-h1"].schedule(4, 8).orders
    assert plan.schedule(ranks=4).name == "mine.csv"
    for request in (plan, PipelinePlan.parse("1f1b:4x8")):
        with pytest.raises(UserError, match="a schedule for 4 devices, but the pipe axis has 8"):
            request.schedule(ranks=8)
    with pytest.raises(UserError, match="there is no file"):
        PipelinePlan.parse("file:nowhere.csv").schedule()
    with pytest.raises(UserError, match="auto:4: its schedule is not chosen yet"):
        PipelinePlan.parse("auto:4").schedule()
