"""Plans of tests, by short names: `weights="host"` for `offload.weights`, `stash="input"` for the pipeline's option."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.pipeline.plan import OPTIONS, PipelinePlan
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.values import override

GROUPS = {"offload": OffloadPlan, "state": StatePlan}
SHORT = {field.name: f"{group}.{field.name}" for group, cls in GROUPS.items() for field in dataclasses.fields(cls)}
SHORT["state"] = "state.moments"


def grouped(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by dotted path, of changes by short names; texts of options follow those of pipeline and kernels.

    Example:
        >>> grouped({"weights": "host", "pipeline": "1f1b:2x4", "stages": "3,1", "loss_chunk": "4"})
        {'pipeline': '1f1b:2x4,stages=3+1', 'offload.weights': 'host', 'kernels': 'loss_chunk=4'}
    """
    options = {name: changes[name] for name in OPTIONS if name in changes}
    kernels = {name: changes[name] for name in ("attention", "loss_chunk") if changes.get(name) is not None}
    beside = (*OPTIONS, "attention", "loss_chunk", *SHORT)
    paths = {name: text for name, text in changes.items() if name not in beside}
    if options:
        words = [f"{name}={str(text).replace(',', '+')}" for name, text in options.items()]
        paths["pipeline"] = ",".join([paths["pipeline"], *words])
    paths |= {SHORT[name]: text for name, text in changes.items() if name in SHORT}
    if kernels:
        words = [f"{name}={text}" for name, text in kernels.items()]
        paths["kernels"] = ",".join([paths["kernels"], *words] if "kernels" in paths else words)
    return paths


def plan_of(plan: Plan = Plan(), **fields: Any) -> Plan:
    """A plan with some fields, values or texts, by short names.

    Example:
        >>> plan_of(zero=3, weights="host", attention="chunked").kernels.attends
        'chunked'
    """
    own = {field.name for field in dataclasses.fields(Plan)}
    values = {name: value for name, value in fields.items() if name in own and not isinstance(value, str)}
    texts = {name: value for name, value in fields.items() if name not in values}
    pipeline = values.get("pipeline", plan.pipeline)
    options = {name: texts.pop(name) for name in OPTIONS if name in texts and "pipeline" not in texts}
    if options:
        assert isinstance(pipeline, PipelinePlan)
        values["pipeline"] = dataclasses.replace(pipeline, **options)
    return override(dataclasses.replace(plan, **values), {path: str(text) for path, text in grouped(texts).items()})
