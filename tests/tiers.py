"""The tiers of tests: by default, in CI as well (`variant`), at night (`slow`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variants(cases: Iterable[Any], default: int | Collection[Any] = 0) -> list[Any]:
    """Return cases of `pytest.mark.parametrize`, of which those that are not `default` are marked as variants.

    A variant is a further case of a property that another case, or another test, proves by default at less cost.
    `.ci/run` runs it with each change; `make test` does not. Slow cases stay as they are.

    Args:
        cases: values of the parameters, or `pytest.param` with marks and an id.
        default: the number of first cases that run by default, or these cases themselves: values, or ids.

    Raises:
        ValueError: `default` has something that is no case.
    """
    parameters = [
        case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    if isinstance(default, int):
        is_default = [place < default for place in range(len(parameters))]
    else:
        names = list(default)
        is_default = [any(form in names for form in _forms(one)) for one in parameters]
        if missing := [name for name in names if not any(name in _forms(one) for one in parameters)]:
            raise ValueError(f"default: {missing} are none of the cases")
    return [
        one
        if by_default or any(mark.name == "slow" for mark in one.marks)
        else pytest.param(*one.values, marks=[*one.marks, pytest.mark.variant], id=one.id)
        for one, by_default in zip(parameters, is_default, strict=True)
    ]


def _forms(parameter: Any) -> list[Any]:
    """Return the forms in which a case can be chosen: its values, its only value, its id."""
    return [
        parameter.values,
        *(parameter.values if len(parameter.values) == 1 else ()),
        *([] if parameter.id is None else [parameter.id]),
    ]
