"""The run-time check of annotations that the tests switch on.

Left out are constructors of values, for what a user gives them is checked by the values themselves, whose errors are
tested; and functions inside functions, whose check would be written anew each time the outer one runs: a fifth of the
suite.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__qualname__.endswith("__init__") or "<locals>" in function.__qualname__:
        return function
    return _beartype(function)
