import sys

import pytest

from jaxscale.lazy import lazy_names


def test_a_name_loads_once_and_stays(monkeypatch):
    package = type(sys)("package_of_a_test")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    load = lazy_names(package.__name__, {"sqrt": "math"})
    assert load("sqrt")(4) == 2
    assert package.sqrt is load("sqrt")
    with pytest.raises(AttributeError, match="module 'package_of_a_test' has no attribute 'cbrt'"):
        load("cbrt")
