"""The tiers of tests: by default, in CI as well (`variant`), at night (`slow`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(cases: Iterable[Any], default: int | Collection[Any] = 0) -> list[Any]:
    """Return cases of `pytest.mark.parametrize`, of which those that are not `default` are marked as variants.

    A variant is a further case of a property that another case, or another test, proves by default at less cost.
    `.ci/run` runs it with each change; `make test` does not.

    Args:
        cases: values of the parameters, or `pytest.param` with marks and an id of its own.
        default: the number of first cases that run by default, or these cases themselves; of `pytest.param` the values
            or the id.
    """
    marked = []
    for place, case in enumerate(cases):
        parameter = case if hasattr(case, "marks") else None
        values = case if parameter is None else parameter.values
        if isinstance(default, int):
            stays = place < default
        elif parameter is None:
            stays = case in default
        else:
            stays = parameter.id in default or values in default or (len(values) == 1 and values[0] in default)
        if stays or (parameter is not None and any(mark.name == "slow" for mark in parameter.marks)):
            marked.append(case)
        elif parameter is None:
            marked.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.variant))
        else:
            marked.append(pytest.param(*values, marks=(*parameter.marks, pytest.mark.variant), id=parameter.id))
    return marked
