"""Pictures of values for notebooks, in the style of the report: of a mesh, plan, experiment, schedule or train step.

This module does not trace, compile, or import JAX. A picture is an HTML page in a frame, in light or dark mode. If the
page is higher than its frame, as in a narrow window, it scrolls.
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
"""Largest number of actions of a schedule that is drawn. Drawing more takes too long, and they would be too narrow."""
MAX_TEXT = 300
"""Largest number of characters of a value's text that are shown."""
USUAL_STEPS = 1000
"""Number of updates over which an optimizer's learning rates are drawn if no experiment gives the number."""

_STYLE = (
    "main{padding:10px 12px 14px;max-width:960px;margin:0}h3{margin:14px 0 8px}main>:first-child h3,h3:first-child{"
    "margin-top:0}.wide{overflow-x:auto}.wide>svg{display:block;width:100%;min-width:640px;height:auto}"
    "p{margin:4px 0;overflow-wrap:anywhere}.facts td{white-space:pre-wrap}"
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """The picture of a value in a notebook.

    Args:
        content: the HTML.
        height: height in pixels that the content takes in a wide window.
    """

    content: Markup
    height: int


def html_of(value: Any) -> str | None:
    """Return a value's picture as HTML in a frame; `None` without a picture, as for a schedule with too many actions.

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
    """Return the picture of a value, drawn by the function in `PICTURES` for its class; `None` without a picture."""
    class_names = [cls.__name__ for cls in type(value).__mro__]
    return next((PICTURES[class_name](value) for class_name in class_names if class_name in PICTURES), None)


def _stack(headings_and_pictures: Sequence[tuple[str, Picture | None]]) -> Picture:
    """Return one picture that stacks pictures vertically, each under its heading. A picture may be `None`: skip it."""
    shown_headings_and_pictures = [
        (heading, picture) for heading, picture in headings_and_pictures if picture is not None
    ]
    content = [
        (element("h3", heading) if heading else None, picture.content)
        for heading, picture in shown_headings_and_pictures
    ]
    return Picture(
        joined(content), sum(picture.height + 36 * bool(heading) for heading, picture in shown_headings_and_pictures)
    )


def _mesh_grid(size_by_axis: Mapping[str, int]) -> Picture:
    """Return the picture of a mesh as a grid of devices, given the number of devices along each axis."""
    axis_sizes = {axis: length for axis, length in size_by_axis.items() if length > 1}
    device_count = math.prod(axis_sizes.values())
    lengths = list(axis_sizes.values())
    row_count = min(lengths[-2], 8) if len(lengths) > 1 else 1
    groups_per_row = max(1, 860 // (38 * min(lengths[-1] if lengths else 1, 8) + 14))
    group_row_count = math.ceil(min(math.prod(lengths[:-2]), 8) / groups_per_row)
    height = group_row_count * (34 * row_count + 14 + 24 * (len(lengths) > 2)) + 36
    title = f"{device_count:,} device{'s' * (device_count != 1)}"
    return Picture(joined([element("h3", title), mesh_picture(axis_sizes, device_count)]), height + 36)


def _plan_picture(plan: Any, experiment: Mapping[str, Any] | None = None) -> Picture:
    """Return the picture of a plan: its effects in words, its mesh, and its pipeline.

    `experiment` is the JSON of an experiment, which has the batch size; `None` for a plan alone.
    """
    plan_json = to_json(plan)
    topics_and_sentences = plan_in_words(plan_json, {}, dict(experiment or {}))
    topic_list = element(
        "dl", [(element("dt", topic), element("dd", text)) for topic, text in topics_and_sentences], class_="words"
    )
    line_count = sum(math.ceil(len(text) / 90) for _, text in topics_and_sentences)
    axis_sizes = axis_sizes_of_mesh(plan_json.get("mesh"))
    return _stack(
        [
            ("", Picture(topic_list, 23 * line_count + 9 * len(topics_and_sentences))),
            ("", _mesh_grid(axis_sizes) if axis_sizes else None),
            ("", None if plan.pipeline is None else _pipeline_picture(plan.pipeline)),
        ]
    )


def _experiment_picture(experiment: Any) -> Picture:
    """Return the picture of an experiment: its fields, its learning rate, and its plan."""
    text_by_title = {
        "Model": _text(experiment.model),
        "Data": _text(experiment.data),
        "Held-out sets": ", ".join(experiment.held_out),
        "Optimizer": _text(experiment.optimizer),
        "Steps": f"{experiment.steps:,} of {experiment.batch:,} rows",
        "Seed": str(experiment.seed),
    }
    rows = [(title, text) for title, text in text_by_title.items() if text]
    line_count = sum(math.ceil(len(text) / 100) for _, text in rows)
    return _stack(
        [
            (experiment.name, Picture(table(rows, class_="facts"), 22 * line_count + 14 * len(rows) + 14)),
            ("", _rate_picture(experiment.optimizer, experiment.steps)),
            ("Plan", _plan_picture(experiment.plan, {"batch": experiment.batch})),
        ]
    )


def _text(value: Any) -> str:
    """Return a field's value as text of at most `MAX_TEXT` characters."""
    if value is None:
        return ""
    text = short_repr(value) if dataclasses.is_dataclass(value) else repr(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _optimizer_picture(optimizer: Any) -> Picture:
    """Return the picture of an optimizer: its text, and the learning rates of a run."""
    text = _text(optimizer)
    text_picture = Picture(element("p", element("code", text)), 22 * math.ceil(len(text) / 110) + 8)
    return _stack([("", text_picture), ("", _rate_picture(optimizer, max(USUAL_STEPS, 10 * optimizer.warmup)))])


def _rate_picture(optimizer: Any, steps: int) -> Picture:
    """Return the chart of the learning rates of an optimizer and of its groups over a run of `steps` updates."""
    curves, note_texts = [], []
    for index, (pattern, member) in enumerate(zip(["", *optimizer.groups], optimizer.members().values(), strict=True)):
        steps_and_rates = rate_curve(member, steps)
        label = pattern or ("the others" if optimizer.groups else "learning rate")
        if steps_and_rates is None:
            note_texts.append(f"{label}: {getattr(member.schedule, '__qualname__', 'a schedule')}, a function of yours")
        else:
            curves.append(
                Series(label, steps_and_rates[0], np.asarray(steps_and_rates[1], np.float64), "line", index % 7 + 1)
            )
    chart = line_chart(f"Learning rate of {steps:,} updates", curves, from_zero=True)
    note_elements = [element("p", note_text, class_="faint") for note_text in note_texts]
    return Picture(joined([chart, note_elements]), 250 * bool(chart) + 26 * len(note_elements))


def _schedule_picture(schedule: Any) -> Picture | None:
    """Return the timeline of a schedule, with equal times for all passes; `None` if it has too many actions."""
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.clock.simulate import simulate

    if sum(map(len, schedule.orders)) > MAX_ACTIONS:
        return None
    return _simulation_picture(simulate(schedule, Costs.alike(schedule)))


def _simulation_picture(simulation: Any) -> Picture | None:
    """Return the timeline of a simulated or measured schedule; `None` if it has too many actions."""
    from jaxscale.pipeline.charts.draw import Chart

    schedule = simulation.schedule
    if sum(map(len, schedule.orders)) > MAX_ACTIONS:
        return None
    chart = Chart(((schedule.name, simulation),), timed=simulation.machine == "measured")
    row_height = 24 if schedule.ranks <= 8 else 16
    return Picture(element("div", chart.svg(), class_="wide"), row_height * schedule.ranks + 90)


def _pipeline_picture(plan: Any) -> Picture | None:
    """Return the timeline of a plan's schedule; `None` if the schedule is still unknown, or has too many actions."""
    from jaxscale.pipeline.charts.draw import schedule_to_draw

    if plan.name in ("auto", "file") or (plan.ranks or 1) * (plan.microbatches or 1) > MAX_ACTIONS // 2:
        return None
    return _schedule_picture(schedule_to_draw(plan))


def _step_picture(step: Any) -> Picture:
    """Return the picture of a train step: its description, its mesh, and the placement of the largest parameters."""
    layout = step.layout.table()
    description_lines = [f"{count(step.parameters)} numbers are trained.", *step.describe()]
    description = Picture(
        joined([element("p", line) for line in description_lines]),
        27 * sum(1 + len(line) // 120 for line in description_lines),
    )
    parameter_entries = layout["parameters"]
    parameter_grid = parameter_table(parameter_entries, layout["mesh"])
    return _stack(
        [
            (f"Train step of {step.experiment.name}", description),
            ("", _mesh_grid(layout["mesh"])),
            ("Placement of the largest parameters", Picture(parameter_grid, 46 * min(len(parameter_entries), 13) + 40)),
        ]
    )


PICTURES: Mapping[str, Callable[[Any], Picture | None]] = {
    "Experiment": _experiment_picture,
    "MeshSpec": lambda mesh: _mesh_grid(mesh.sizes),
    "Optimizer": _optimizer_picture,
    "PipelinePlan": _pipeline_picture,
    "Plan": _plan_picture,
    "Schedule": _schedule_picture,
    "Simulation": _simulation_picture,
    "TrainStep": _step_picture,
}
"""The function that draws values of each class, by the name of the class."""
