"""Earlier plans are read, and earlier flags are refused with the new ones named."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.recipe.kernels import Kernels
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan, ignoring_moved_fields, read_plan, version_1_fields
from jaxscale.recipe.plan_json import MOVED_FIELDS
from jaxscale.values import changes, from_json, override, to_json

PIPELINES = ("1f1b:2x4", "gpipe:2x4,stash=input,lowering=phased", "2bw:2x4,stages=3+1,synchronous_steps=4")
PIPELINES += ("pipemare:2,anneal=10,correction=0.25", "auto:4", "interleaved:2x4,v=2,stages=1+2+1+1")
KERNELS = ("auto", "reference", "attention=chunked", "attention=plain,loss_chunk=8", "reference,loss_chunk=4")
KERNELS += ("cross_entropy=chunked,attention=splash", "attention=tpu,quantize=reference", "loss_chunk=128")
OFFLOADS = (OffloadPlan(), OffloadPlan("host", "device", "host"), OffloadPlan(optimizer_state="streamed"))


@given(
    st.none() | st.sampled_from(PIPELINES),
    st.sampled_from(OFFLOADS),
    st.sampled_from(("float32", "int8", "int4")),
    st.sampled_from(KERNELS),
)
def test_a_plan_of_version_1_is_the_plan_of_today(pipeline, offload, moments, kernels):
    asynchronous = pipeline is not None and PipelinePlan.parse(pipeline).asynchronous
    plan = Plan(
        pipeline=None if pipeline is None else PipelinePlan.parse(pipeline),
        offload=OffloadPlan() if asynchronous else offload,
        state=StatePlan(moments),
        kernels=Kernels.parse(kernels),
    )
    earlier = json.loads(json.dumps(version_1_fields(plan)))
    assert set(MOVED_FIELDS) <= set(earlier)
    assert from_json(Plan, earlier) == plan
    assert changes(plan, earlier) == []


@pytest.mark.parametrize("text", PIPELINES)
def test_options_of_a_pipeline_have_a_text(text):
    assert str(PipelinePlan.parse(text)) == text
    fields = {"pipeline": text.partition(",")[0]} | dict(word.split("=") for word in text.split(",")[1:])
    if "v" in fields:
        fields["pipeline"] += f",v={fields.pop('v')}"
    if "stages" in fields:
        fields["stages"] = [int(count) for count in fields["stages"].split("+")]  # as JSON of version 1 had them
    earlier = {**version_1_fields(Plan()), **fields}
    assert PipelinePlan.parse(text) == from_json(Plan, earlier).pipeline


def test_a_file_of_version_1_is_read(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "state": "int8", "weights": "host", "zero": 0}))
    expected = Plan(state=StatePlan("int8"), offload=OffloadPlan(weights="host"))
    assert read_plan(tmp_path / "plan.json") == expected
    (tmp_path / "plan.json").write_text(json.dumps({"version": 2, **to_json(expected)}))
    assert read_plan(tmp_path / "plan.json") == expected


@pytest.mark.parametrize("name", MOVED_FIELDS)
def test_an_earlier_flag_is_refused_with_the_new_one(name):
    with pytest.raises(UserError, match=re.escape(f"plan.{name} has moved: set plan.{MOVED_FIELDS[name]}")):
        override(_job(), {f"plan.{name}": "1"})
    with pytest.raises(UserError, match="has moved"):
        override(Plan(), {name.replace("_", "-"): "1"})
    with pytest.raises(UserError, match=f"plan.{name} has moved"):
        Plan(**{name: "int8"})
    with ignoring_moved_fields():
        assert Plan(zero=1, **{name: "int8"}) == Plan(zero=1)


def _job() -> Any:
    from jaxscale.models import Decoder
    from jaxscale.recipe.experiment import Experiment

    return Experiment("moved", Decoder(vocab=8, context=8, layers=1, embed=8, heads=1), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b:2x4,stsh=input", "got 'stsh=input', expected 1f1b:PxM, .*did you mean 'stash'"),
        ("1f1b:2x4,stash=inputs", "stash: got 'inputs', expected .*did you mean 'input'"),
        ("1f1b:2x4,stash=input,stash=input", "each once"),
        ("1f1b:2x4,stages=3+x", r"stages\[1\]: got 'x'"),
        ("pipemare:2,correction=1", "correction: got 1.0, expected 0"),
        ("pipemare:2,anneal=-1", "anneal: got -1, expected 0 or more"),
    ],
)
def test_a_wrong_option_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        PipelinePlan.parse(text)
