"""Codecs and schedules of one's own, by name."""

import dataclasses
from typing import ClassVar

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline import METHODS, Method
from jaxscale.pipeline import register as register_method
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import CODECS, Int8
from jaxscale.replicas import register as register_codec
from jaxscale.values import from_json, to_json


def test_a_codec_is_named_by_text_and_read_back(monkeypatch: pytest.MonkeyPatch):
    @dataclasses.dataclass(frozen=True)
    class Mine(Int8):
        name: ClassVar[str] = "mine"

    monkeypatch.setitem(CODECS, "mine", Mine)  # forgotten after the test
    assert register_codec(Mine) is Mine
    plan = Plan(mesh="replica:2", reduce="mine")
    assert isinstance(plan.reduce, Mine)
    assert from_json(Plan, to_json(plan)) == plan
    with pytest.raises(UserError, match=r"did you mean 'mine'\?; or set float32 or bfloat16"):
        Plan(mesh="replica:2", reduce="mien")


def test_a_schedule_is_named_by_text_and_read_back(monkeypatch: pytest.MonkeyPatch):
    method = dataclasses.replace(METHODS["gpipe"], name="mine")
    monkeypatch.setitem(METHODS, "mine", method)  # forgotten after the test
    assert register_method(method) is method
    plan = Plan(pipeline="mine:2x4")
    assert plan.pipeline is not None
    assert plan.pipeline.name == "mine"
    assert from_json(Plan, to_json(plan)) == plan
    assert plan.pipeline.schedule().live == (4, 4)
    # a file that is executed again may define the method otherwise: plans of the name then have the new schedule
    register_method(dataclasses.replace(METHODS["1f1b"], name="mine"))
    assert plan.pipeline.schedule().live == (2, 1)


def test_names_of_ours_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Other(Int8):
        name: ClassVar[str] = "int8"

    with pytest.raises(UserError, match="codec int8: jaxscale's Int8 has this name"):
        register_codec(Other)

    class Nameless(Int8):
        pass

    with pytest.raises(UserError, match="codec Nameless: expected a class variable name"):
        register_codec(Nameless)
    with pytest.raises(UserError, match="schedule gpipe: one of jaxscale's own schedules has this name"):
        register_method(Method("gpipe", "another", METHODS["1f1b"].make))
    assert CODECS["int8"] is Int8
