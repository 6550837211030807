from contextvars import ContextVar

import pytest

from jaxscale.scoped import scoped


def test_the_variable_is_restored_after_an_error_too():
    variable = ContextVar("variable", default=0)
    with scoped(variable, 1), scoped(variable, 2):
        assert variable.get() == 2
    with pytest.raises(RuntimeError), scoped(variable, 3):
        raise RuntimeError
    assert variable.get() == 0
