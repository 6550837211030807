"""Equal steps are traced once for all tests of a process: estimates of memory, and costs of a model's split."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

import jaxscale.planning.estimate
from jaxscale.planning import explain, fit, pipeline_choice
from jaxscale.planning.search import advice, model_costs, search, step_seconds


def memoized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a memory of its results for arguments that can be hashed."""
    cached = functools.lru_cache(maxsize=None, typed=True)(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            hash((*arguments, *keywords.values()))
        except TypeError:
            return function(*arguments, **keywords)
        return cached(*arguments, **keywords)

    return call


estimate = memoized(jaxscale.planning.estimate.estimate)
split_costs = memoized(model_costs.split_costs)


def share_traces(patch: pytest.MonkeyPatch) -> None:
    """Have the planner share traces, for the time of a test."""
    for module in (search, advice, fit, pipeline_choice, explain):
        patch.setattr(module, "estimate", estimate)
    for module in (search, step_seconds, model_costs):
        patch.setattr(module, "split_costs", split_costs)
