"""Pipeline parallelism: every schedule as data, one checker, one simulator, one drawing, one executor.

| subject | files |
|---|---|
| schedules | action.py (one pass), orders.py (the actions of each rank), check.py (validity), ticks.py, versions.py |
| named schedules | schedules/ (one file for each), method.py, builders.py |
| plans, which specify a schedule in a text form such as `1f1b:4x8` | plan.py |
| files of schedules in PyTorch's CSV format | csv.py, messages.py, infer_routes.py |
| seconds and bubbles of a schedule | clock/: simulate.py, table.py, clock.py, many_orders.py, costs.py, measured.py |
| choice of partition and schedule | choose/: partition.py (blocks of each stage), search.py (orders), auto.py |
| execution in JAX | run/: execute.py, asynchronous.py, tables.py, actions.py, passes.py, split.py |
| charts | charts/ |
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "Action": "jaxscale.pipeline.action",
    "Costs": "jaxscale.pipeline.clock.costs",
    "Kind": "jaxscale.pipeline.action",
    "METHODS": "jaxscale.pipeline.schedules",
    "Method": "jaxscale.pipeline.method",
    "ModelPrices": "jaxscale.pipeline.choose.partition",
    "PipelineDevice": "jaxscale.pipeline.choose.price",
    "PipelinePlan": "jaxscale.pipeline.plan",
    "Price": "jaxscale.pipeline.choose.price",
    "Remedies": "jaxscale.pipeline.run.pipemare",
    "Schedule": "jaxscale.pipeline.orders",
    "Simulation": "jaxscale.pipeline.clock.simulate",
    "choose_pipeline": "jaxscale.pipeline.choose.auto",
    "draw": "jaxscale.pipeline.by_name",
    "parse_csv": "jaxscale.pipeline.csv",
    "partition": "jaxscale.pipeline.choose.partition",
    "read_csv": "jaxscale.pipeline.csv",
    "register": "jaxscale.pipeline.schedules",
    "schedule": "jaxscale.pipeline.by_name",
    "search": "jaxscale.pipeline.choose.search",
    "simulate": "jaxscale.pipeline.clock.simulate",
    "to_csv": "jaxscale.pipeline.csv",
    "uses": "jaxscale.pipeline.versions",
    "value_and_grad": "jaxscale.pipeline.run.gradients",
    "virtual_workers": "jaxscale.pipeline.choose.virtual_workers",
}
"""For each public name, the module that defines it. The module is imported when the name is first used."""

if TYPE_CHECKING:
    from jaxscale.pipeline.action import Action, Kind
    from jaxscale.pipeline.by_name import draw, schedule
    from jaxscale.pipeline.choose.auto import choose_pipeline
    from jaxscale.pipeline.choose.partition import ModelPrices, partition
    from jaxscale.pipeline.choose.price import PipelineDevice, Price
    from jaxscale.pipeline.choose.search import search
    from jaxscale.pipeline.choose.virtual_workers import virtual_workers
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.clock.simulate import Simulation, simulate
    from jaxscale.pipeline.csv import parse_csv, read_csv, to_csv
    from jaxscale.pipeline.method import Method
    from jaxscale.pipeline.orders import Schedule
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.pipeline.run.gradients import value_and_grad
    from jaxscale.pipeline.run.pipemare import Remedies
    from jaxscale.pipeline.schedules import METHODS, register
    from jaxscale.pipeline.versions import uses

__all__ = [
    "METHODS",
    "Action",
    "Costs",
    "Kind",
    "Method",
    "ModelPrices",
    "PipelineDevice",
    "PipelinePlan",
    "Price",
    "Remedies",
    "Schedule",
    "Simulation",
    "choose_pipeline",
    "draw",
    "parse_csv",
    "partition",
    "read_csv",
    "register", "schedule",
    "search",
    "simulate",
    "to_csv",
    "uses",
    "value_and_grad",
    "virtual_workers",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
