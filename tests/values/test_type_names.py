"""Every class that open fields of an experiment take has a public name, to which earlier files lead as well."""

import dataclasses
import importlib

import pytest

import jaxscale.data
import jaxscale.models
from jaxscale.data import Mixture, Text
from jaxscale.errors import UserError
from jaxscale.models import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.values import changes, from_json, to_json
from jaxscale.values.type_names import _EARLIER, _MODULE_BY_NAME, _PUBLIC, type_name, type_of

INNER = {"HeldOut", "Llama3Scaling", "Opened"}
"""Public dataclasses of which only fields of their own class, and results, are made."""


def test_every_public_class_has_a_name_and_every_name_a_class():
    for package in (jaxscale.models, jaxscale.data):
        for name in set(package.__all__) - INNER:
            item = getattr(package, name)
            if isinstance(item, type) and dataclasses.is_dataclass(item):
                public = f"{package.__name__.removeprefix('jaxscale.')}.{name}"
                assert type_of(public, "model") is item
                assert type_name(f"{item.__module__}:{name}") == public
    for name, module in _MODULE_BY_NAME.items():
        cls = getattr(importlib.import_module(module), name.rpartition(".")[2])
        assert cls.__module__ == module
        assert dataclasses.is_dataclass(cls)
    assert set(_EARLIER.values()) <= set(_PUBLIC.values()) == set(_MODULE_BY_NAME)


def test_an_experiment_of_an_earlier_version_is_the_same():
    experiment = Experiment(
        "named", Decoder(vocab=8, context=8, layers=1, embed=8, heads=1), Mixture((Text("a", context=8),), (1.0,))
    )
    data = to_json(experiment)
    assert (data["model"]["type"], data["data"]["type"]) == ("models.Decoder", "data.Mixture")
    assert from_json(Experiment, data) == experiment
    earlier = {**data, "model": {**data["model"], "type": "jaxscale.models.decoder:Decoder"}}
    earlier["data"] = {**data["data"], "type": "jaxscale.data.text:Mixture"}
    assert from_json(Experiment, earlier) == experiment
    assert not changes(experiment, earlier)
    earlier["model"]["type"] = "jaxscale.models.vit:ViT"
    assert [change.path for change in changes(experiment, earlier) if change.path.endswith("type")] == ["model.type"]


def test_a_name_without_class_names_the_near_miss():
    with pytest.raises(UserError, match=r"model\.type: got 'models\.Decodr', .*did you mean 'models\.Decoder'"):
        type_of("models.Decodr", "model")
