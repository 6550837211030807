"""The run-time check of annotations that the tests switch on.

Left out are constructors of values, for what a user gives them is checked by the values themselves, whose errors are
tested. Functions inside functions are checked where CHECK_NESTED is set, as `.ci/run --nightly` does: their check is
written anew each time the outer one runs, which is a sixth of the suite's time.
"""

import os
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

NESTED = bool(os.environ.get("CHECK_NESTED"))
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__qualname__.endswith("__init__") or ("<locals>" in function.__qualname__ and not NESTED):
        return function
    return _beartype(function)
