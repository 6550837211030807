"""The text of a value: a constructor call without defaults, which makes the same value."""

import dataclasses

import numpy as np
import pytest

import jaxscale as jx
from jaxscale.values.short_repr import short_repr

MODEL = jx.models.Decoder(vocab=256, context=64, layers=4, heads=4, embed=128)


@pytest.mark.parametrize(
    "value",
    [
        jx.Plan(),
        jx.Plan(mesh="data:2,fsdp:4", zero=3, memory="full", kernels="loss_chunk=4", state=jx.StatePlan("int8")),
        jx.Plan(pipeline="1f1b:2x4"),
        jx.Optimizer("muon", learning_rate=1e-4, clip=None),
        MODEL,
        jx.Experiment("plays", MODEL, None, steps=5, optimizer=jx.Optimizer("lion"), plan=jx.Plan(mesh="1")),
        jx.Evaluation(every=3),
        jx.data.Text("a.txt", tokenizer="byte", context=8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_makes_the_value(value):
    names = {**vars(jx.data), "Decoder": jx.models.Decoder} | {name: getattr(jx, name) for name in jx.__all__}
    assert eval(repr(value), names) == value
    assert len(repr(value)) < 250


def test_arrays_stand_as_shapes_and_functions_as_names():
    experiment = jx.Experiment("sums", MODEL, {"x": np.ones((20, 3))}, optimizer="muon")
    assert experiment.optimizer == jx.Optimizer("muon")
    assert "Arrays({'x': float32[20,3]}), optimizer=Optimizer(name='muon'))" in repr(experiment)
    model = jx.models.ForeignModel(lambda rngs: None, jx.models.classification())
    assert repr(model).startswith("ForeignModel(test_arrays_stand_as_shapes_and_functions_as_names.<locals>.<lambda>, ")


def test_a_value_that_cannot_be_compared_is_shown():
    @dataclasses.dataclass(frozen=True)
    class Holder:
        array: object = dataclasses.field(default_factory=lambda: np.zeros(2))

    assert short_repr(Holder()).endswith("Holder(array=float64[2])")


def test_a_path_as_data_is_refused_with_the_data_that_reads_it():
    for path, kind in (("a.npz", "Images"), ("folder", "ImageFolder"), ("a.jsonl", "Text")):
        with pytest.raises(jx.UserError, match=rf"jaxscale.data.{kind}\('{path}'\) reads a path"):
            jx.Experiment("sums", MODEL, path)


def test_a_name_that_is_no_optimizer_is_refused():
    with pytest.raises(jx.UserError, match=r"name: got 'adam', .*did you mean 'adamw'"):
        jx.Experiment("sums", MODEL, None, optimizer="adam")
