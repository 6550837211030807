"""Pictures of values for notebooks, from the drawings of the report: a mesh, a plan, an experiment, a schedule, a step.

Nothing here traces, compiles, or imports JAX. A picture is a page in a frame, in light or dark mode. A page that is
higher than its frame, in a narrow window, scrolls.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.figures.markup import Markup, element, framed, joined, page, table
from jaxscale.optim.rate_curve import rate_curve
from jaxscale.report.charts import Series, line_chart
from jaxscale.report.pictures import mesh_picture, parameter_table
from jaxscale.report.sentences import axis_sizes_of_mesh, plan_in_words
from jaxscale.values import to_json
from jaxscale.values.short_repr import short_repr
from jaxscale.values.units import count

MAX_ACTIONS = 2000
"""Largest number of a schedule's actions that are drawn: more take too long, and would be too narrow."""
MAX_TEXT = 300
"""Largest number of characters that are shown of a value's text."""
USUAL_STEPS = 1000
"""Number of updates for which the rates of an optimizer are drawn that belongs to no experiment."""

_STYLE = (
    "main{padding:10px 12px 14px;max-width:960px;margin:0}h3{margin:14px 0 8px}main>:first-child h3,h3:first-child{"
    "margin-top:0}.wide{overflow-x:auto}.wide>svg{display:block;width:100%;min-width:640px;height:auto}"
    "p{margin:4px 0;overflow-wrap:anywhere}.facts td{white-space:pre-wrap}"
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """What a notebook shows of a value.

    Args:
        content: the HTML.
        height: height in pixels that the content takes in a wide window.
    """

    content: Markup
    height: int


def html_of(value: Any) -> str | None:
    """Return a value's picture as HTML in a frame; `None` if there is none, as of a schedule of too many actions.

    Args:
        value: a value of a class in `PICTURES`.

    Example:
        >>> from jaxscale.recipe.plan import Plan
        >>> "ZeRO 3" in html_of(Plan(mesh="fsdp:4", zero=3))
        True
    """
    picture = _picture(value)
    if picture is None:
        return None
    style = Path(__file__).with_name("report.css").read_text("utf-8") + _STYLE
    return framed(page(type(value).__name__, element("main", picture.content), style=style), picture.height + 24)


def _picture(value: Any) -> Picture | None:
    """Return the picture of a value, by the name of its class."""
    names = [cls.__name__ for cls in type(value).__mro__]
    return next((PICTURES[name](value) for name in names if name in PICTURES), None)


def _stacked(pictures: Sequence[tuple[str, Picture | None]]) -> Picture:
    """Return pictures below one another, each under its heading; one without a picture is left out."""
    shown = [(heading, picture) for heading, picture in pictures if picture is not None]
    content = [(element("h3", heading) if heading else None, picture.content) for heading, picture in shown]
    return Picture(joined(content), sum(picture.height + 36 * bool(heading) for heading, picture in shown))


def _mesh(sizes: Mapping[str, int]) -> Picture:
    """Return the grid of a mesh's devices, from the number of devices along each axis."""
    axis_sizes = {axis: length for axis, length in sizes.items() if length > 1}
    device_count = math.prod(axis_sizes.values())
    lengths = list(axis_sizes.values())
    row_count = min(lengths[-2], 8) if len(lengths) > 1 else 1
    groups_across = max(1, 860 // (38 * min(lengths[-1] if lengths else 1, 8) + 14))
    group_rows = math.ceil(min(math.prod(lengths[:-2]), 8) / groups_across)
    height = group_rows * (34 * row_count + 14 + 24 * (len(lengths) > 2)) + 36
    title = f"{device_count:,} device{'s' * (device_count != 1)}"
    return Picture(joined([element("h3", title), mesh_picture(axis_sizes, device_count)]), height + 36)


def _plan(plan: Any, experiment: Mapping[str, Any] | None = None) -> Picture:
    """Return a plan: what it does in words, its mesh, and its pipeline; `experiment` has the rows of a batch."""
    plan_json = to_json(plan)
    topics = plan_in_words(plan_json, {}, dict(experiment or {}))
    words = element("dl", [(element("dt", topic), element("dd", text)) for topic, text in topics], class_="words")
    line_count = sum(math.ceil(len(text) / 90) for _, text in topics)
    sizes = axis_sizes_of_mesh(plan_json.get("mesh"))
    return _stacked(
        [
            ("", Picture(words, 23 * line_count + 9 * len(topics))),
            ("", _mesh(sizes) if sizes else None),
            ("", None if plan.pipeline is None else _pipeline_plan(plan.pipeline)),
        ]
    )


def _experiment(experiment: Any) -> Picture:
    """Return an experiment: its fields, its learning rate, and its plan."""
    facts = {
        "Model": _text(experiment.model),
        "Data": _text(experiment.data),
        "Held-out sets": ", ".join(experiment.held_out),
        "Optimizer": _text(experiment.optimizer),
        "Steps": f"{experiment.steps:,} of {experiment.batch:,} rows",
        "Seed": str(experiment.seed),
    }
    rows = [(title, text) for title, text in facts.items() if text]
    line_count = sum(math.ceil(len(text) / 100) for _, text in rows)
    return _stacked(
        [
            (experiment.name, Picture(table(rows, class_="facts"), 22 * line_count + 14 * len(rows) + 14)),
            ("", _rates(experiment.optimizer, experiment.steps)),
            ("Plan", _plan(experiment.plan, {"batch": experiment.batch})),
        ]
    )


def _text(value: Any) -> str:
    """Return a field's value as text of at most `MAX_TEXT` characters."""
    if value is None:
        return ""
    text = short_repr(value) if dataclasses.is_dataclass(value) else repr(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _optimizer(optimizer: Any) -> Picture:
    """Return an optimizer: its text, and the learning rates of a run."""
    text = _text(optimizer)
    words = Picture(element("p", element("code", text)), 22 * math.ceil(len(text) / 110) + 8)
    return _stacked([("", words), ("", _rates(optimizer, max(USUAL_STEPS, 10 * optimizer.warmup)))])


def _rates(optimizer: Any, steps: int) -> Picture:
    """Return the learning rates of an optimizer and of its groups over a run of `steps` updates."""
    series, own_names = [], []
    for index, (pattern, member) in enumerate(zip(["", *optimizer.groups], optimizer.members().values(), strict=True)):
        curve = rate_curve(member, steps)
        label = pattern or ("the others" if optimizer.groups else "learning rate")
        if curve is None:
            own_names.append(f"{label}: {getattr(member.schedule, '__qualname__', 'a schedule')}, a function of yours")
        else:
            series.append(Series(label, curve[0], np.asarray(curve[1], np.float64), "line", index % 7 + 1))
    chart = line_chart(f"Learning rate of {steps:,} updates", series, from_zero=True)
    notes = [element("p", note, class_="faint") for note in own_names]
    return Picture(joined([chart, notes]), 250 * bool(chart) + 26 * len(notes))


def _schedule(schedule: Any) -> Picture | None:
    """Return the timeline of a schedule, in which each pass takes as long as any other."""
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.clock.simulate import simulate

    if sum(map(len, schedule.orders)) > MAX_ACTIONS:
        return None
    return _simulation(simulate(schedule, Costs.alike(schedule)))


def _simulation(simulation: Any) -> Picture | None:
    """Return the timeline of a simulated or measured schedule."""
    from jaxscale.pipeline.charts.draw import Chart

    schedule = simulation.schedule
    if sum(map(len, schedule.orders)) > MAX_ACTIONS:
        return None
    chart = Chart(((schedule.name, simulation),), timed=simulation.machine == "measured")
    row_height = 24 if schedule.ranks <= 8 else 16
    return Picture(element("div", chart.svg(), class_="wide"), row_height * schedule.ranks + 90)


def _pipeline_plan(plan: Any) -> Picture | None:
    """Return the timeline of the schedule that a plan asks for; `None` for one that is chosen or read later."""
    from jaxscale.pipeline.charts.draw import schedule_to_draw

    if plan.name in ("auto", "file") or (plan.ranks or 1) * (plan.microbatches or 1) > MAX_ACTIONS // 2:
        return None
    return _schedule(schedule_to_draw(plan))


def _step(step: Any) -> Picture:
    """Return a train step: what the plan does, the mesh, and where the largest parameters lie."""
    layout = step.layout.table()
    lines = [f"{count(step.parameters)} numbers are trained.", *step.describe()]
    words = Picture(joined([element("p", line) for line in lines]), 27 * sum(1 + len(line) // 120 for line in lines))
    parameters = layout["parameters"]
    grid = parameter_table(parameters, layout["mesh"])
    return _stacked(
        [
            (f"Train step of {step.experiment.name}", words),
            ("", _mesh(layout["mesh"])),
            ("Placement of the largest parameters", Picture(grid, 46 * min(len(parameters), 13) + 40)),
        ]
    )


PICTURES: Mapping[str, Callable[[Any], Picture | None]] = {
    "Experiment": _experiment,
    "MeshSpec": lambda mesh: _mesh(mesh.sizes),
    "Optimizer": _optimizer,
    "PipelinePlan": _pipeline_plan,
    "Plan": _plan,
    "Schedule": _schedule,
    "Simulation": _simulation,
    "TrainStep": _step,
}
"""The function that draws the values of each class, by the name of the class."""
