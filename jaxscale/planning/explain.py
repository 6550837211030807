"""explain: who takes a train step's memory, and when, in the model's own names; as text, HTML and SVG.

By estimate it shows the traced program (`timeline.py`); verified, the compiler's own listing of what is alive at the
peak, and its timeline.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

from jaxscale.costs import roofline
from jaxscale.errors import UserError
from jaxscale.memory.decide import decide
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.cheapest import MENU
from jaxscale.planning.estimate import estimate
from jaxscale.planning.fit import Fit, fit
from jaxscale.planning.pictures import Point, curve, framed, page, stacked, table, write_picture
from jaxscale.planning.program import described_step, lowered_step
from jaxscale.planning.timeline import Item
from jaxscale.platforms.platform import Platform
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.remember import traced_blocks
from jaxscale.values.units import size

SHARES = (0.5, 0.25, 0.125)
"""Budgets of the save sets on the curve, as shares of all activations."""
SHOWN = 20
"""Arrays that the text lists."""

HEURISTICS = ("greedy", "dtr_static", "offload:pofo", "offload:vdnn")
"""Rules on the curve of time against memory beside the menu, at the budget in its middle."""


@dataclasses.dataclass(frozen=True)
class Explained:
    """Who takes a step's memory, as a value that prints and draws itself.

    Args:
        fit: verdict and itemised bytes.
        alive: arrays that are alive when memory is fullest, arguments among them, the biggest first.
        moments: live bytes by kind, from the first operation to the last; a loop's body once.
        turn: number of the first moment of the backward pass.
        plans: bytes and cost of the step under several memory plans.
        timed: their cost is modelled seconds; else FLOP, for nothing says how fast the chip is.
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
        rest = self.alive[SHOWN:]
        if rest:
            lines.append(f"  {size(sum(item.bytes for item in rest)):>10}  {len(rest)} smaller ones")
        if self.plans:
            wide = max(len(point.name) for point in self.plans)
            lines += ["", f"{'memory plan':{wide}}{'bytes per device':>18}{self._cost:>9}"]
            lines += [f"{point.name:{wide}}{size(point.bytes):>18}{point.cost:>8.2f}x" for point in self.plans]
        return "\n".join(lines)

    @property
    def _cost(self) -> str:
        return "Time" if self.timed else "FLOP"

    def svg(self) -> str:
        """The timeline alone."""
        return stacked(self.moments, self.fit.limit, self.turn)

    def html(self) -> str:
        """A page that stands alone: verdict, timeline, who is alive at the peak, time against memory."""
        source = "as the compiler lists them" if self.fit.verified else "by estimate, from the traced program"
        parts = [
            ("", f"<pre>{escape(str(self.fit))}</pre>"),
            ("Live bytes per device through a step", self.svg()),
            (f"Alive at the peak, {source}", table(self.alive)),
        ]
        if self.plans:
            parts.append((f"{self._cost} against memory, by estimate", curve(self.plans, self.fit.limit)))
        return page(f"Memory of {self.fit.name} on {self.fit.platform}", parts)

    def _repr_html_(self) -> str:
        return framed(self.html(), 800)

    def write(self, path: str | Path) -> None:
        """Write the page, or the timeline alone where the name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_picture(path, self.svg, self.html)


def explain(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    limit: int | None = None,
    verify: bool = False,
    make: Callable[[], Experiment] | None = None,
) -> Explained:
    """Who takes the memory of an experiment's train step on a platform; arguments and errors are those of `fit`.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> found = explain(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> found.fit.fits, sum(item.bytes for item in found.alive) <= found.fit.device_bytes
        (True, True)
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    found = fit(experiment, platform, plan, limit=limit)
    guess = found.estimate
    alive, moments, turn = guess.alive, guess.moments, guess.turn
    if verify:
        from jaxscale.platforms.compile import compile_report

        recipe = partial(lowered_step, make=make or partial(_same, experiment), plan=guess.plan)
        report = compile_report(recipe, platform, explain=True)
        found = dataclasses.replace(found, report=report)
        if report.live is not None:
            alive = tuple(Item(f"{one.name} {one.shape}", one.kind, one.bytes) for one in report.live)
        if report.timeline is not None:
            moments = tuple(dict(moment.bytes) for moment in report.timeline)
            phases = [moment.phase for moment in report.timeline]
            turn = next((n for n, phase in enumerate(phases) if phase in ("backward", "recompute")), len(moments))
    return Explained(
        found,
        alive,
        moments,
        turn,
        tuple(compare(experiment, platform, guess.plan, _curve(experiment, platform, guess.plan))),
        roofline.rate(platform.chip, "bfloat16") is not None,
    )


def compare(experiment: Experiment, platform: Platform, plan: Plan, memory: Sequence[str]) -> list[Point]:
    """Bytes and cost of a step under each of several memory plans, the cost as a multiple of the least.

    The cost is modelled seconds, copies to the host that nothing hides among them; FLOP where no rates are known.

    Args:
        experiment: what to train.
        platform: where.
        plan: how; its memory plan is replaced, and is the first of those weighed.
        memory: text forms of memory plans.
    """
    weighed = {}
    for text in dict.fromkeys((str(plan.memory), *memory)):
        try:
            weighed[text] = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan.parse(text)))
        except UserError:  # a budget below the least, or a rule that this model does not take
            continue
    cost: Mapping[str, float] = {text: found.flop for text, found in weighed.items()}
    cost = _seconds(experiment, platform, plan, cost) or cost
    least = min(cost.values()) or 1
    return [
        Point(text, found.device_bytes, cost[text] / least, text == str(plan.memory)) for text, found in weighed.items()
    ]


def _seconds(
    experiment: Experiment, platform: Platform, plan: Plan, flop: Mapping[str, float]
) -> Mapping[str, float] | None:
    """Modelled seconds of a step under each memory plan, from FLOP of all devices; `None` where nothing tells them."""
    chip, parts = platform.chip, plan.microbatches
    if (rate := roofline.rate(chip, "bfloat16")) is None:
        return None
    step = described_step(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
    calls = traced_blocks(step.objective, chip)
    inside = 3 * parts * sum(call.count * call.graph.flop for call in calls)
    beside = max(0.0, min(flop.values()) / platform.devices - inside) / rate
    work = beside + 3 * parts * sum(call.count * call.graph.seconds for call in calls)
    if not calls:  # no plan changes anything
        return dict.fromkeys(flop, work)
    return {text: work + parts * decide(MemoryPlan.parse(text), calls, chip).seconds for text in flop}


def _curve(experiment: Experiment, platform: Platform, plan: Plan) -> tuple[str, ...]:
    """Memory plans on the curve: the menu, save sets, and the heuristics at the budget between them."""
    if getattr(experiment.model, "foreign", False) or plan.unroll > 1:
        return ("none", "dots", "full")
    everything = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
    kept = max((moment.by_kind.get("kept activations", 0) for moment in everything.timeline.moments), default=0)
    budgets = [f"{max(round(kept * share / 2**20), 1)}MiB" for share in SHARES]
    saves = [f"save:{budget}" for budget in budgets]
    return (*MENU, *saves, *(f"{rule}:{budgets[len(budgets) // 2]}" for rule in HEURISTICS))


def _same(experiment: Experiment) -> Experiment:
    return experiment
