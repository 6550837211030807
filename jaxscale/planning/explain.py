"""explain: which arrays of a train step take memory at which point of the step, as text, HTML and SVG.

Arrays have the model's names. An estimate shows the arrays of the traced program (`timeline.py`). With `verify`, the
step is compiled, and the compiler reports both the arrays alive at the peak and the timeline.
"""

import dataclasses
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from jaxscale.compiler.compile import compile_report
from jaxscale.errors import UserError
from jaxscale.figures.markup import framed, write_figure
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.fit import Fit, fit
from jaxscale.planning.memory_costs import MemoryCosts
from jaxscale.planning.memory_search import menu_of, searched_rules
from jaxscale.planning.menu import HEURISTICS
from jaxscale.planning.pictures import Point, items_table, live_bytes_svg, page, plans_svg
from jaxscale.planning.program import step_recipe
from jaxscale.planning.timeline import Item
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values.byte_sizes import bytes_text, short_budget
from jaxscale.values.units import size

SHARES = (0.5, 0.25, 0.125)
"""Budgets of the compared memory plans, as shares of the bytes of all kept activations."""
MAX_ITEMS = 20
"""Maximum number of arrays that the text lists one by one."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The arrays that take a step's memory, for display as text, SVG and HTML.

    Args:
        fit: whether the step fits, and the bytes of each kind of tensor.
        live_items: arrays alive at the peak, including arguments, the largest first.
        moments: live bytes by kind at each moment of the step; a loop's body appears once.
        backward_start: index of the first moment of the backward pass.
        points: bytes and cost of the step under several memory plans.
        is_timed: whether costs are modeled seconds; they are FLOP if the chip's rates are unknown.
    """

    fit: Fit
    live_items: tuple[Item, ...]
    moments: tuple[dict[str, int], ...]
    backward_start: int
    points: tuple[Point, ...] = ()
    is_timed: bool = False

    def __str__(self) -> str:
        source = "the compiler's listing" if self.fit.verified else "by estimate"
        lines = [str(self.fit), "", f"alive at the peak, {source}:"]
        lines += [f"  {size(item.bytes):>10}  {item.kind:17} {item.name}" for item in self.live_items[:MAX_ITEMS]]
        smaller_items = self.live_items[MAX_ITEMS:]
        if smaller_items:
            lines.append(f"  {size(sum(item.bytes for item in smaller_items)):>10}  {len(smaller_items)} smaller ones")
        if self.points:
            name_width = max(len(point.name) for point in self.points)
            headings = ("per device", "kept", "a block", self._cost_name)
            lines += ["", f"{'memory plan':{name_width}}" + "".join(f"{heading:>12}" for heading in headings)]
            for point in self.points:
                kept_cells = map(_size_cell, (point.kept_bytes, point.block_kept_bytes))
                cells = (size(point.bytes), *kept_cells, f"{point.cost:.2f}x")
                lines.append(f"{point.name:{name_width}}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _cost_name(self) -> str:
        """The column heading of the costs, "Time" or "FLOP"."""
        return "Time" if self.is_timed else "FLOP"

    def svg(self) -> str:
        """Return the timeline as an SVG image."""
        return live_bytes_svg(self.moments, self.fit.limit, self.backward_start)

    def html(self) -> str:
        """Return a self-contained HTML page: verdict, timeline, arrays at the peak, and plans by bytes and cost."""
        source = "as the compiler lists them" if self.fit.verified else "by estimate, from the traced program"
        headings_and_contents = [
            ("", f"<pre>{escape(str(self.fit))}</pre>"),
            ("Live bytes per device through a step", self.svg()),
            (f"Alive at the peak, {source}", items_table(self.live_items)),
        ]
        if self.points:
            headings_and_contents.append(
                (f"{self._cost_name} against memory, by estimate", plans_svg(self.points, self.fit.limit))
            )
        return page(f"Memory of {self.fit.name} on {self.fit.platform}", headings_and_contents)

    def _repr_html_(self) -> str:
        return framed(self.html(), 800)

    def write(self, path: str | Path) -> None:
        """Write the page to a file, or only the timeline if the file's name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_figure(path, self.svg, self.html)


def explain(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    limit: int | str | None = None,
    verify: bool = False,
    make: Callable[[], Experiment] | None = None,
) -> Explanation:
    """Explain which arrays of an experiment's train step take the memory.

    Args:
        experiment: the experiment to plan for.
        platform: platform to run on, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan of the step; the experiment's plan by default.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB"; by default the bytes that the
            platform's programs may use.
        verify: whether to compile the step for the platform, and to explain the compiler's bytes instead of the
            estimate.
        make: function that returns the experiment, called in the process that compiles; required if the experiment
            is not picklable.

    Raises:
        UserError: the plan is not valid for the model, the batch or the platform; or `verify` is set, but the platform
            has no compiler.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> explanation = explain(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> live_bytes = sum(item.bytes for item in explanation.live_items)
        >>> explanation.fit.fits, round(live_bytes / explanation.fit.device_bytes)
        (True, 1)
    """
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step_fit = fit(experiment, parsed_platform, plan, limit=limit)
    step_estimate = step_fit.estimate
    live_items, moments, backward_start = step_estimate.live_items, step_estimate.moments, step_estimate.backward_start
    costs = MemoryCosts.of(experiment, parsed_platform, step_estimate.plan)
    if verify:
        report = compile_report(step_recipe(experiment, step_estimate.plan, make), parsed_platform, explain=True)
        step_fit = dataclasses.replace(step_fit, report=report)
        if report.live is not None:
            live_items = tuple(Item(f"{array.name} {array.shape}", array.kind, array.bytes) for array in report.live)
        if report.timeline is not None:
            moments = tuple(dict(moment.bytes) for moment in report.timeline)
            backward_flags = [moment.phase in ("backward", "recompute") for moment in report.timeline]
            backward_start = backward_flags.index(True) if any(backward_flags) else len(moments)
    plan_texts = _plan_texts(experiment, parsed_platform, step_estimate.plan, costs)
    return Explanation(
        fit=step_fit,
        live_items=live_items,
        moments=moments,
        backward_start=backward_start,
        points=tuple(plan_points(experiment, parsed_platform, step_estimate.plan, plan_texts, costs)),
        is_timed=costs.models_steps,
    )


def plan_points(
    experiment: Experiment, platform: Platform, plan: Plan, plan_texts: Sequence[str], costs: MemoryCosts
) -> list[Point]:
    """Return a point for each memory plan: the step's bytes, and its cost as a multiple of the lowest cost.

    The cost is the modeled seconds of a step, including copies to the host that do not overlap with computation. It is
    FLOP if the chip's rates are unknown or the model exposes no blocks. Memory plans that are not valid for the model
    are left out.

    Args:
        experiment: the experiment to plan for.
        platform: platform to train on.
        plan: plan of the step; its memory plan is the first to be compared.
        plan_texts: text forms of the memory plans that replace the one in `plan`.
        costs: costs of memory plans for the model's blocks.
    """
    # each dict is keyed by the text form of the memory plan
    estimate_by_text: dict[str, Estimate] = {}
    for text in dict.fromkeys((str(plan.memory), *plan_texts)):
        try:
            estimate_by_text[text] = estimate(
                experiment, platform, dataclasses.replace(plan, memory=MemoryPlan.parse(text))
            )
        except UserError:  # the budget is too small, or the rule is not valid for this model
            continue
    decision_by_text = {text: _decision_of_text(costs, text) for text in estimate_by_text}
    cost_by_text: dict[str, float] = {text: plan_estimate.flop for text, plan_estimate in estimate_by_text.items()}
    if costs.models_steps:
        for text, decision in decision_by_text.items():
            assert decision is not None, "the model exposes blocks"
            seconds = costs.step_seconds(MemoryPlan.parse(text), decision)
            assert seconds is not None
            cost_by_text[text] = seconds
    least_cost = min(cost_by_text.values()) or 1
    points = []
    for text, decision in decision_by_text.items():
        kept_bytes = None if decision is None else decision.bytes * costs.stage_count
        block_kept_bytes = None if decision is None else round(decision.bytes_of_a_block)
        relative_cost, is_current = cost_by_text[text] / least_cost, text == str(plan.memory)
        points.append(
            Point(text, estimate_by_text[text].device_bytes, relative_cost, is_current, kept_bytes, block_kept_bytes)
        )
    return points


def _plan_texts(experiment: Experiment, platform: Platform, plan: Plan, costs: MemoryCosts) -> tuple[str, ...]:
    """Return the text forms of the memory plans to compare: plans without a budget, optimal plans and heuristics."""
    keep_all_estimate = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
    kept_bytes = costs.kept_bytes(keep_all_estimate.kept_bytes)
    budget_texts = [bytes_text(short_budget(round(kept_bytes * share))) for share in SHARES]
    optimal_texts = [f"{rule}:{budget_text}" for rule in searched_rules(plan, costs) for budget_text in budget_texts]
    # without known rates, copies to a host would seem to cost nothing
    other_rules = [rule for rule in HEURISTICS if optimal_texts and (costs.is_timed or not rule.startswith("offload"))]
    other_texts = [f"{rule}:{budget_texts[len(budget_texts) // 2]}" for rule in other_rules]
    return (*menu_of(plan), *optimal_texts, *other_texts)


def _decision_of_text(costs: MemoryCosts, text: str) -> Decision | None:
    """Return the decision of a memory plan.

    Return `None` if the model exposes no blocks, or if the plan needs rates of the chip that are unknown.
    """
    try:
        return costs.decision(MemoryPlan.parse(text)) if costs.calls else None
    except UserError:
        if costs.is_timed:
            raise
        return None  # the plan copies to the host, which needs the chip's rates


def _size_cell(byte_count: int | None) -> str:
    """Return the text of a table cell with a number of bytes; "" if the number is unknown."""
    return "" if byte_count is None else size(byte_count)
