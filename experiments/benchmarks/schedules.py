"""Every pipeline schedule beside every other: one page with charts, seconds, bubbles and what waits in memory.

    python experiments/benchmarks/schedules.py [-o schedules.html] [--tiny]

Simulated, on paper: nothing is compiled, no device is needed. Three things to compare on: equal stages, F = I = W;
equal stages whose backward runs the forward again; and Llama 3.1 8B on a v5p:4x4x4, stages priced by roofline, with
head and loss on the last stage. Whatever stands in `jaxscale/pipeline/schedules/` is drawn. It takes 6 s on 2 cores
(AMD EPYC) and gives, of our executor's machine, in units of F:

    8 devices, 32 microbatches, F = I = W          4 devices, 16 microbatches, I = 2 F
                         time  bubble  live                             time  bubble  live
    zb-v:8x32            99.5    3.5%     8        lockstep:4x16,v=2      70    8.6%   5.5
    dualpipe-v:8x32       103    6.8%   8.5        dualpipe-v:4x16      71.5   10.5%   4.5
    zb-h1:8x32            103    6.8%     8        gpipe:4x16             76   15.8%    16
    zb-h2:8x32            103    6.8%    15        lockstep:4x16          76   15.8%     7
    lockstep:8x32,v=2   106.5    9.9%  11.5        zb-h2:4x16             77   16.9%     7
    gpipe:8x32            117   17.9%    32        zb-v:4x16              80   20.0%     4
    lockstep:8x32         117   17.9%    15        chimera:4x16           82   22.0%     4
    chimera:8x32          126   23.8%     8        zb-h1:4x16             85   24.7%     4
    interleaved:8x32      134   28.4%  11.5        interleaved:4x16       97   34.0%   5.5
    1f1b:8x32             148   35.1%     8        1f1b:4x16             106   39.6%     4

Where passes take equally long, zero bubble is ahead; where the forward runs again, what moves in step. 1F1B as it is in
the papers costs a third more than there, as everybody waits for the longest pass of a tick.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from jaxscale.figures.axes import ticks
from jaxscale.figures.frame import Frame, svg, svg_text
from jaxscale.figures.markup import element
from jaxscale.pipeline import METHODS, Costs, PipelinePlan, Schedule, Simulation, simulate
from jaxscale.pipeline.charts.draw import Chart, page, schedule_to_draw

Pricing = Callable[[PipelinePlan, Schedule], Costs]


@dataclasses.dataclass(frozen=True)
class Case:
    """What schedules are compared on.

    Args:
        title: in words.
        ranks: devices on the pipe axis.
        microbatches: of a step.
        price: costs of a schedule's stages.
        timed: whether they are seconds.
    """

    title: str
    ranks: int
    microbatches: int
    price: Pricing
    timed: bool = False


def texts(ranks: int, microbatches: int) -> list[str]:
    """The text form of every method, those that interleave with 2 stages a device too."""
    found = []
    for name, method in METHODS.items():
        size = f"{ranks}" if method.streams else f"{ranks}x{microbatches}"
        found += [f"{name}:{size}", *([f"{name}:{size},v=2"] if method.interleaves and method.chunks != 2 else [])]
    return found


def equal(again: float = 0.0) -> Pricing:
    """Stages of one unit a pass, of which the backward computes some again."""
    return lambda plan, schedule: Costs.alike(schedule, 1.0, 1.0 + again, 1.0)


def llama() -> Pricing:
    """Llama 3.1 8B on 64 chips of a v5p, a device's share of a stage and of a microbatch's rows."""
    from llama_8b import experiment

    from jaxscale import Platform
    from jaxscale.planning.stage_prices import costs_of, message_seconds_of, model_prices
    from jaxscale.state.stages import Stages

    platform = Platform.parse("tpu v5p:4x4x4")
    known = {}

    def price(plan: PipelinePlan, schedule: Schedule) -> Costs:
        count = plan.microbatches or 16
        if (schedule.ranks, count) not in known:
            known[schedule.ranks, count] = model_prices(experiment(), platform, schedule.ranks, count)
        model = known[schedule.ranks, count]
        layers = Stages.even(schedule, len(model.blocks)).layer_counts
        return costs_of(model, layers, (message_seconds_of(platform, model),) * schedule.ranks)

    return price


def simulations(case: Case, *, short: bool = False) -> list[tuple[str, Simulation]]:
    """Every schedule, the fastest first; asynchronous ones until they are steady, or as short as the others."""
    found = []
    for text in texts(case.ranks, case.microbatches):
        plan = PipelinePlan.parse(text)
        updates = math.ceil(case.microbatches / (plan.microbatches or 1)) if short and plan.asynchronous else None
        schedule = schedule_to_draw(plan, updates)
        found.append((text, simulate(schedule, case.price(plan, schedule))))
    return sorted(found, key=lambda one: one[1].seconds_per_microbatch)


def curves(ranks: int, counts: Sequence[int], price: Pricing) -> str:
    """Time of a microbatch beyond its work, over the number of microbatches: an SVG image."""
    bubbles: dict[str, list[float]] = {}
    for count in counts:
        for text_form, simulation in simulations(Case("", ranks, count, price)):
            name = text_form.partition(":")[0] + text_form.partition(",")[2]
            bubbles.setdefault(name, []).append(simulation.bubble)
    top = max(map(max, bubbles.values()))
    frame = Frame((math.log(counts[0]), math.log(counts[-1])), (0, top), right=180)
    places = [frame.x_of(math.log(count)) for count in counts]
    parts = [frame.grid(ticks(0, top, 5), "{:.0%}".format), frame.title("microbatches")]
    parts.append(frame.labels([math.log(count) for count in counts], lambda power: f"{math.exp(power):.0f}"))
    for number, (name, line) in enumerate(sorted(bubbles.items(), key=lambda entry: -entry[1][-1])):
        color = f"hsl({number * 360 // len(bubbles)} 65% 45%)"
        points = " ".join(f"{x:.1f},{frame.y_of(bubble):.1f}" for x, bubble in zip(places, line, strict=True))
        curve = element("polyline", points=points, fill="none", stroke=color, stroke_width=2)
        parts.append(element("g", element("title", name), curve))
        parts.append(svg_text(frame.width - 165, 30 + 18 * number, name, fill=color))
    return svg(frame.width, max(frame.height, 30 + 18 * len(bubbles)), "bubbles over microbatches", parts)


def section(case: Case) -> tuple[str, Chart]:
    """The part of the page for a case."""
    chart = Chart(tuple(simulations(case)), case.timed)
    drawn = Chart(tuple(simulations(case, short=True)), case.timed).svg()
    return f"<h2>{escape(case.title)}</h2>{chart.html_table()}{chart.html_legend()}{drawn}", chart


def main() -> None:
    """Simulate, print the tables, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few devices and microbatches, no model")
    parser.add_argument("-o", "--output", type=Path, default=Path("schedules.html"), help="where to write the page")
    arguments = parser.parse_args()
    ranks, count = (2, 4) if arguments.tiny else (4, 16)
    cases = [
        Case(f"{ranks} devices, {count} microbatches, F = I = W", ranks, count, equal()),
        Case(f"{ranks} devices, {count} microbatches, the forward runs again: I = 2 F", ranks, count, equal(1.0)),
    ]
    if not arguments.tiny:
        cases.insert(1, Case("8 devices, 32 microbatches, F = I = W", 8, 32, equal()))
        cases.append(Case("Llama 3.1 8B on a v5p:4x4x4, 4 stages, 16 microbatches", 4, 16, llama(), timed=True))
    body = []
    for case in cases:
        made, chart = section(case)
        body.append(made)
        print(f"{case.title}\n{chart.table()}\n")
    ranks, counts = (2, (4, 8)) if arguments.tiny else (8, (8, 16, 24, 32, 48, 64))
    body.insert(1, f"<h2>Bubble over microbatches, {ranks} devices, F = I = W</h2>{curves(ranks, counts, equal())}")
    arguments.output.write_text(page("Pipeline schedules", "".join(body)))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
