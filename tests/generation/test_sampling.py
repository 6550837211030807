import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.generation.sampling import Sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": "5"}, "tokens: got '5', expected a whole number"),
        ({"temperature": "hot"}, "temperature: got 'hot', expected a number"),
        ({"stop": 3}, "stop: got 3, expected a list"),
        ({"stop_ids": {1}}, "stop_ids: got {1}"),
        ({"top_p": np.zeros(2)}, "top_p: got array"),
        ({"samples": 2**31}, "samples: got 2,147,483,648, expected at most 2,147,483,647"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_numbers_of_numpy_and_lists_are_accepted():
    sampling = Sampling(tokens=np.int64(5), temperature=np.float32(0.5), stop=["a"], stop_ids=[np.int32(3)])
    assert sampling == Sampling(tokens=5, temperature=0.5, stop=("a",), stop_ids=(3,))
