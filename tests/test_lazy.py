import dataclasses
import inspect
import pickle
import sys

import pytest

import jaxscale as jx
from jaxscale.errors import UserError
from jaxscale.lazy import lazy_names


def test_a_name_loads_once_and_stays(monkeypatch):
    package = type(sys)("package_of_a_test")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    load = lazy_names(package.__name__, {"sqrt": "math"})
    assert load("sqrt")(4) == 2
    assert package.sqrt is load("sqrt")
    with pytest.raises(AttributeError, match="module 'package_of_a_test' has no attribute 'cbrt'"):
        load("cbrt")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jx.Plan(zeros=3), "Plan has no argument 'zeros'; did you mean 'zero'?"),
        (lambda: jx.models.Decoder(vocab=8, contxt=8), "Decoder has no argument 'contxt'; did you mean 'context'?"),
        (lambda: jx.data.Text("a.txt", contxt=8), "Text has no argument 'contxt'; did you mean 'context'?"),
        (lambda: dataclasses.replace(jx.Plan(), zeros=3), "did you mean 'zero'?"),
        (lambda: jx.Evaluation(qqq=1), "Evaluation has no argument 'qqq'; there are every, "),
    ],
)
def test_an_unknown_argument_of_a_public_class_names_the_near_miss(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)


def test_other_errors_and_signatures_are_those_of_the_class():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        jx.data.Text()
    assert "zero" in inspect.signature(jx.Plan).parameters
    assert pickle.loads(pickle.dumps(jx.Plan(zero=1))) == jx.Plan(zero=1)


def test_a_class_that_takes_any_keyword_is_left_alone(monkeypatch):
    module = type(sys)("module_of_a_test")

    class Open:
        def __init__(self, **keywords):
            raise TypeError(f"not {', '.join(keywords)}")

    module.Open = Open
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TypeError, match="not anything"):
        lazy_names(module.__name__, {"Open": module.__name__})("Open")(anything=1)
