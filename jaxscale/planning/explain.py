"""explain: which arrays of a train step take memory at which moment, as text, HTML and SVG.

Arrays have the model's names. An estimate shows the arrays of the traced program (`timeline.py`). With `verify`, the
step is compiled, and the arrays alive at the peak and the timeline are those that the compiler reports.
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
from jaxscale.planning.memory_search import searched_rules, valid_menu
from jaxscale.planning.menu import HEURISTICS
from jaxscale.planning.pictures import Point, curve, page, stacked, table
from jaxscale.planning.program import step_recipe
from jaxscale.planning.timeline import Item
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values.byte_sizes import bytes_text, short_budget
from jaxscale.values.units import size

SHARES = (0.5, 0.25, 0.125)
"""Budgets of the memory plans on the curve, as shares of the bytes of all kept activations."""
SHOWN = 20
"""Number of arrays that the text lists one by one."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which arrays take a step's memory; prints as text, draws as SVG and HTML.

    Args:
        fit: verdict and itemised bytes.
        alive: arrays alive at the peak, arguments included, the largest first.
        moments: live bytes by kind at each moment of the step; a loop's body appears once.
        turn: index of the first moment of the backward pass.
        plans: bytes and cost of the step under several memory plans.
        timed: whether costs are modeled seconds; they are FLOP if the chip's rates are unknown.
    """

    fit: Fit
    alive: tuple[Item, ...]
    moments: tuple[dict[str, int], ...]
    turn: int
    plans: tuple[Point, ...] = ()
    timed: bool = False

    def __str__(self) -> str:
        source = "the compiler's listing" if self.fit.verified else "by estimate"
        lines = [str(self.fit), "", f"alive at the peak, {source}:"]
        lines += [f"  {size(item.bytes):>10}  {item.kind:17} {item.name}" for item in self.alive[:SHOWN]]
        smaller_items = self.alive[SHOWN:]
        if smaller_items:
            lines.append(f"  {size(sum(item.bytes for item in smaller_items)):>10}  {len(smaller_items)} smaller ones")
        if self.plans:
            name_width = max(len(point.name) for point in self.plans)
            headings = ("per device", "kept", "a block", self._cost_name)
            lines += ["", f"{'memory plan':{name_width}}" + "".join(f"{heading:>12}" for heading in headings)]
            for point in self.plans:
                cells = (size(point.bytes), *map(_cell, (point.kept, point.kept_of_a_block)), f"{point.cost:.2f}x")
                lines.append(f"{point.name:{name_width}}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)

    @property
    def _cost_name(self) -> str:
        """Column heading of the costs, "Time" or "FLOP"."""
        return "Time" if self.timed else "FLOP"

    def svg(self) -> str:
        """The timeline as an SVG image."""
        return stacked(self.moments, self.fit.limit, self.turn)

    def html(self) -> str:
        """A self-contained page: verdict, timeline, arrays alive at the peak, time against memory."""
        source = "as the compiler lists them" if self.fit.verified else "by estimate, from the traced program"
        sections = [
            ("", f"<pre>{escape(str(self.fit))}</pre>"),
            ("Live bytes per device through a step", self.svg()),
            (f"Alive at the peak, {source}", table(self.alive)),
        ]
        if self.plans:
            sections.append((f"{self._cost_name} against memory, by estimate", curve(self.plans, self.fit.limit)))
        return page(f"Memory of {self.fit.name} on {self.fit.platform}", sections)

    def _repr_html_(self) -> str:
        return framed(self.html(), 800)

    def write(self, path: str | Path) -> None:
        """Write the page, or only the timeline if the name ends in .svg.

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
    """Explain which arrays take the memory of an experiment's train step; arguments and errors are those of `fit`.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> explained = explain(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> explained.fit.fits, round(sum(item.bytes for item in explained.alive) / explained.fit.device_bytes)
        (True, 1)
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    step_fit = fit(experiment, platform, plan, limit=limit)
    step_estimate = step_fit.estimate
    live_items, moments, turn = step_estimate.alive, step_estimate.moments, step_estimate.turn
    costs = MemoryCosts.of(experiment, platform, step_estimate.plan)
    if verify:
        report = compile_report(step_recipe(experiment, step_estimate.plan, make), platform, explain=True)
        step_fit = dataclasses.replace(step_fit, report=report)
        if report.live is not None:
            live_items = tuple(Item(f"{array.name} {array.shape}", array.kind, array.bytes) for array in report.live)
        if report.timeline is not None:
            moments = tuple(dict(moment.bytes) for moment in report.timeline)
            phases = [moment.phase for moment in report.timeline]
            turn = next((i for i, phase in enumerate(phases) if phase in ("backward", "recompute")), len(moments))
    memory_plans = _plans_of_curve(experiment, platform, step_estimate.plan, costs)
    return Explanation(
        fit=step_fit,
        alive=live_items,
        moments=moments,
        turn=turn,
        plans=tuple(compare(experiment, platform, step_estimate.plan, memory_plans, costs)),
        timed=costs.timed,
    )


def compare(
    experiment: Experiment, platform: Platform, plan: Plan, memory_plans: Sequence[str], costs: MemoryCosts
) -> list[Point]:
    """Bytes and cost of a step under each of several memory plans, the cost as a multiple of the lowest.

    The cost is modeled seconds, including copies to the host that do not overlap with computation. It is FLOP if the
    chip's rates are unknown. Memory plans that are not valid for the model are left out.

    Args:
        experiment: what to train.
        platform: platform to train on.
        plan: plan of the step; its own memory plan is compared first.
        memory_plans: text forms of the memory plans that replace it.
        costs: costs of memory plans for the model's blocks.
    """
    estimate_of: dict[str, Estimate] = {}
    for text in dict.fromkeys((str(plan.memory), *memory_plans)):
        try:
            estimate_of[text] = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan.parse(text)))
        except UserError:  # the budget is too small, or the rule is not valid for this model
            continue
    decision_of = {text: _decision(costs, text) for text in estimate_of}
    cost_of: dict[str, float] = {text: plan_estimate.flop for text, plan_estimate in estimate_of.items()}
    if costs.timed:
        keep_all_seconds = costs.step_seconds(min(cost_of.values()))
        for text, decision in decision_of.items():
            cost_of[text] = keep_all_seconds + (0.0 if decision is None else costs.seconds(decision))
    least_cost = min(cost_of.values()) or 1
    points = []
    for text, decision in decision_of.items():
        point = Point(text, estimate_of[text].device_bytes, cost_of[text] / least_cost, text == str(plan.memory))
        if decision is not None:
            kept_fields = {"kept": decision.bytes * costs.stages, "kept_of_a_block": round(decision.bytes_of_a_block)}
            point = dataclasses.replace(point, **kept_fields)
        points.append(point)
    return points


def _plans_of_curve(experiment: Experiment, platform: Platform, plan: Plan, costs: MemoryCosts) -> tuple[str, ...]:
    """Text forms of the memory plans on the curve: the menu, optimal plans, and other rules with the middle budget."""
    kept_bytes = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none"))).kept_bytes
    budgets = [bytes_text(short_budget(round(kept_bytes * share))) for share in SHARES]
    optimal_plans = [f"{rule}:{budget}" for rule in searched_rules(experiment, plan, costs) for budget in budgets]
    # without known rates, copies to a host would appear free
    other_rules = [rule for rule in HEURISTICS if optimal_plans and (costs.timed or not rule.startswith("offload"))]
    other_plans = [f"{rule}:{budgets[len(budgets) // 2]}" for rule in other_rules]
    return (*valid_menu(experiment, plan), *optimal_plans, *other_plans)


def _decision(costs: MemoryCosts, text: str) -> Decision | None:
    """The decision of a memory plan; `None` if the model exposes no blocks."""
    try:
        return costs.decision(MemoryPlan.parse(text)) if costs.calls else None
    except UserError:
        if costs.timed:
            raise
        return None  # offload is planned with rates, which are unknown here


def _cell(byte_count: int | None) -> str:
    """Bytes as text; empty if unknown."""
    return "" if byte_count is None else size(byte_count)
