"""explain: who takes a train step's memory, and when, in the model's own names; as text, HTML and SVG.

By estimate it shows the traced program (`timeline.py`); verified, the compiler's own listing of what is alive at the
peak, and its timeline.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.selectors import SELECTORS
from jaxscale.planning.cheapest import menu_of, searched
from jaxscale.planning.estimate import estimate
from jaxscale.planning.fit import Fit, fit
from jaxscale.planning.pictures import Point, curve, framed, page, stacked, table, write_picture
from jaxscale.planning.prices import Prices
from jaxscale.planning.program import lowered_step
from jaxscale.planning.timeline import Item
from jaxscale.platforms.platform import Platform
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.values.byte_sizes import bytes_text, short_budget
from jaxscale.values.units import size

SHARES = (0.5, 0.25, 0.125)
"""Budgets of the save sets on the curve, as shares of all activations."""
SHOWN = 20
"""Arrays that the text lists."""

RULES = ("greedy", "dtr_static", *(f"offload:{selector}" for selector in SELECTORS))
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
            heads = ("per device", "kept", "a block", self._cost)
            lines += ["", f"{'memory plan':{wide}}" + "".join(f"{head:>12}" for head in heads)]
            for point in self.plans:
                cells = (size(point.bytes), *map(_size, (point.kept, point.kept_of_a_block)), f"{point.cost:.2f}x")
                lines.append(f"{point.name:{wide}}" + "".join(f"{cell:>12}" for cell in cells))
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
        >>> found.fit.fits, round(sum(item.bytes for item in found.alive) / found.fit.device_bytes)
        (True, 1)
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    found = fit(experiment, platform, plan, limit=limit)
    guess = found.estimate
    alive, moments, turn = guess.alive, guess.moments, guess.turn
    prices = Prices.of(experiment, platform, guess.plan)
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
        tuple(compare(experiment, platform, guess.plan, _curve(experiment, platform, guess.plan, prices), prices)),
        prices.timed,
    )


def compare(
    experiment: Experiment, platform: Platform, plan: Plan, memory: Sequence[str], prices: Prices
) -> list[Point]:
    """Bytes and cost of a step under each of several memory plans, the cost as a multiple of the least.

    The cost is modelled seconds, copies to the host that nothing hides among them; FLOP where no rates are known.

    Args:
        experiment: what to train.
        platform: where.
        plan: how; its memory plan is replaced, and is the first of those weighed.
        memory: text forms of memory plans.
        prices: of the model's blocks.
    """
    weighed = {}
    for text in dict.fromkeys((str(plan.memory), *memory)):
        try:
            weighed[text] = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan.parse(text)))
        except UserError:  # a budget below the least, or a rule that this model does not take
            continue
    cost: Mapping[str, float] = {text: found.flop for text, found in weighed.items()}
    cost = prices.steps(cost) if prices.timed else cost
    least = min(cost.values()) or 1
    points = []
    for text, found in weighed.items():
        kept = _decision(prices, text)
        points.append(
            Point(
                text,
                found.device_bytes,
                cost[text] / least,
                text == str(plan.memory),
                None if kept is None else kept.bytes * prices.stages,
                None if kept is None else round(kept.bytes_of_a_block),
            )
        )
    return points


def _curve(experiment: Experiment, platform: Platform, plan: Plan, prices: Prices) -> tuple[str, ...]:
    """Memory plans on the curve: the menu, optimal plans, and every other rule at the budget between them."""
    everything = estimate(experiment, platform, dataclasses.replace(plan, memory=MemoryPlan("none")))
    kept = max((moment.by_kind.get("kept activations", 0) for moment in everything.timeline.moments), default=0)
    budgets = [bytes_text(short_budget(round(kept * share))) for share in SHARES]
    optimal = [f"{rule}:{budget}" for rule in searched(experiment, plan, prices) for budget in budgets]
    # where nothing tells time, copies to a host would look free
    others = [rule for rule in RULES if optimal and (prices.timed or not rule.startswith("offload"))]
    others = [f"{rule}:{budgets[len(budgets) // 2]}" for rule in others]
    return (*menu_of(experiment, plan), *optimal, *others)


def _decision(prices: Prices, text: str) -> Decision | None:
    try:
        return prices.decision(MemoryPlan.parse(text)) if prices.calls else None
    except UserError:  # offload on a CPU, which plans it as for another chip
        return None


def _size(count: int | None) -> str:
    return "" if count is None else size(count)


def _same(experiment: Experiment) -> Experiment:
    return experiment
