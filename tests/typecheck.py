"""The run-time check of annotations that the tests switch on.

Constructors of values are left out: what a user gives them is checked by the values themselves, whose errors are
tested.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__qualname__.endswith("__init__"):
        return function
    return _beartype(function)
