"""Which kernels a plan asks for."""

import jax
import pytest

from jaxscale.errors import UserError
from jaxscale.step.kernels import Kernels
from jaxscale.step.layout import resolve_mesh
from jaxscale.step.plan import Plan
from jaxscale.values import override, to_json


@pytest.mark.parametrize("text", ["auto", "reference", "attention=chunked", "attention=gpu"])
def test_the_text_form_and_json_are_the_value(text):
    kernels = Kernels.parse(text)
    assert str(kernels) == text
    plan = override(Plan(), {"kernels": text})
    assert plan.kernels == kernels
    assert to_json(plan)["kernels"] == text


@pytest.mark.parametrize(
    ("text", "told"),
    [("auto", "auto"), ("reference", "plain"), ("attention=reference", "plain"), ("attention=tpu", "tpu")],
)
def test_layers_are_told_of_attention(text, told):
    assert Plan(kernels=Kernels.parse(text)).attends == told
    assert Plan(attention="chunked").attends == "chunked"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("refrence", "did you mean 'reference'"),
        ("atention=tpu", "unknown kernel 'atention'.*did you mean 'attention'"),
        ("attention=chnked", "unknown implementation of attention 'chnked'.*did you mean 'chunked'"),
        ("attention=tpu,attention=gpu", "a kernel twice"),
        ("", "expected auto, reference, or"),
    ],
)
def test_mistakes_are_told_before_anything_is_traced(text, said):
    with pytest.raises(UserError, match=said):
        Kernels.parse(text)


@pytest.mark.parametrize(("name", "where"), [("tpu", "TPU"), ("gpu", "GPU"), ("cudnn", "GPU")])
def test_a_kernel_of_another_platform_is_refused(name, where):
    with pytest.raises(UserError, match=f"{name} is a {where} kernel, and this runs on cpu"):
        resolve_mesh(Plan(kernels=Kernels.parse(f"attention={name}")), 8, jax.devices())


def test_one_field_says_it():
    with pytest.raises(UserError, match="attention chunked with kernels attention=tpu, which says it too"):
        Plan(attention="chunked", kernels=Kernels.parse("attention=tpu"))
