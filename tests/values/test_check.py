import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.foreign import CrossEntropy, ForeignModel, FromLinen
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.plan import Plan


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2)), np.array(["a", None], dtype=object)])
def test_an_array_in_the_place_of_a_word_is_refused(array):
    """Arrays are compared item by item, which has no truth value."""
    with pytest.raises(UserError, match=r"name: got .* expected adamw or"):
        Optimizer(name=array)
    with pytest.raises(UserError, match="reduce: got"):
        Plan(reduce=array)


@pytest.mark.parametrize(
    "make",
    [
        lambda value: MemoryPlan(rule=value),
        lambda value: Plan(zero=value),
        lambda value: ForeignModel(make=value, score=print),
        lambda value: ForeignModel(make=print, score=print, over=value),
        lambda value: ForeignModel(make=print, score=print, axes=value),
        lambda value: CrossEntropy(inputs=value, labels="labels"),
        lambda value: FromLinen(module=None, inputs=value),
    ],
)
@pytest.mark.parametrize("value", [np.zeros(3), 10**5000, object(), {1: 2}], ids=["array", "digits", "object", "dict"])
def test_a_value_of_a_wrong_type_is_refused(make, value):
    with pytest.raises(UserError, match=": got "):
        make(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ForeignModel(make=lambda: None, score=print),
            r"make: got .* parameters \(\), .* 1 argument,",
        ),
        (
            lambda: ForeignModel(make=print, score=len),
            r"score: .* 2 arguments and, if it is random, a key, such as classification\(\)",
        ),
    ],
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
