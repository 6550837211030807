"""Charts of schedules, as text, as SVG or as an HTML page. Several schedules share one time scale and one table."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.figures import markup
from jaxscale.figures.markup import Markup, element, joined, write_figure, write_text
from jaxscale.pipeline.charts.svg import svg_chart
from jaxscale.pipeline.charts.text import PLAIN, columns_per_second, text_chart
from jaxscale.pipeline.clock.simulate import Simulation, simulate
from jaxscale.pipeline.csv import to_csv
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.ticks import ticks
from jaxscale.pipeline.versions import ring_slot_count, version_lifetimes
from jaxscale.values.read_files import is_folder
from jaxscale.values.units import duration, size

ENDINGS = (".svg", ".html", ".csv")
"""Suffixes of the files to which a chart can be written."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """The charts and numbers of simulated schedules.

    Args:
        simulations: (name, simulation) of each schedule.
        timed: whether the costs are in seconds. Otherwise their unit is unknown, and times are shown without a unit.

    Example:
        >>> from jaxscale.pipeline.clock.costs import Costs
        >>> from jaxscale.pipeline.schedules import METHODS
        >>> schedule = METHODS["zb-h1"].schedule(4, 8)
        >>> chart = Chart((("zb-h1:4x8", simulate(schedule, Costs.alike(schedule))),))
        >>> print(chart.table())
                   time   each  bubble  own span  live  weights  apart
        zb-h1:4x8    27  3.375   11.1%      5.9%     4        1     27
    """

    simulations: tuple[tuple[str, Simulation], ...]
    timed: bool = False

    @property
    def format_time(self) -> Callable[[float], str]:
        """The function that formats a time as text."""
        return duration if self.timed else "{:.5g}".format

    def text(self, width: int = 100, *, color: bool = False, unicode: bool = True) -> str:
        """Return charts and numbers as text, for a terminal.

        Args:
            width: columns of the terminal.
            color: whether the terminal shows colors.
            unicode: whether the terminal shows characters beyond ASCII.
        """
        scale = columns_per_second([simulation for _, simulation in self.simulations], width)
        sections = []
        for name, simulation in self.simulations:
            chart_text = text_chart(simulation, time_scale=scale, color=color, format_time=self.format_time)
            sections.append(f"{name}\n{chart_text}" if len(self.simulations) > 1 else chart_text)
        sections.append(f"{self.table()}\n\n{self.legend()}")
        text = "\n\n".join(sections)
        return text if unicode else text.translate(PLAIN)

    def table(self) -> str:
        """Return a table of text with one row for each schedule: its times, bubble, activations and weights."""
        heads, rows = self._heads_and_rows()
        table = [heads, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table
        )

    def legend(self) -> str:
        """Return the meanings of the table's columns, one per line."""
        has_steady_state = any(simulation.period is not None for _, simulation in self.simulations)
        suffix = "; asynchronous: in the steady state" if has_steady_state else ""
        return "\n".join(
            (
                f"each: time per microbatch{suffix}",
                f"bubble: share of all devices' time that is idle{suffix}",
                "own span: share of the time between each device's first and last action that is idle",
                "live: activations that the fullest device holds, in microbatches of its part of the model",
                "weights: copies of its part of the model that the fullest device holds",
                "apart: time if each device runs its own program and waits only for its own inputs",
            )
        )

    def svg(self) -> Markup:
        """Return the chart alone, as an SVG image."""
        panels = [(self._heading(name, simulation), simulation) for name, simulation in self.simulations]
        return svg_chart(panels, format_time=self.format_time)

    def html(self) -> str:
        """Return an HTML page with the chart and the numbers.

        The page shows a description of the action under the pointer and highlights the action's microbatch.
        """
        title = ", ".join(name for name, _ in self.simulations)
        return page(title, joined([self.svg(), self.html_table(), self.html_legend()]))

    def _repr_html_(self) -> str:
        return joined([self.svg(), self.html_table()])

    def html_table(self) -> Markup:
        """Return the same table as `table` in HTML."""
        heads, rows = self._heads_and_rows()
        return markup.table(rows, heads, numeric=range(1, len(heads)))

    def html_legend(self) -> Markup:
        """Return the legend as HTML paragraphs."""
        return joined([element("p", line) for line in self.legend().splitlines()])

    def write(self, path: str | Path) -> None:
        """Write the chart to a file. The file's suffix selects the format.

        Raises:
            UserError: the suffix is not .svg, .html or .csv; a CSV is to hold several schedules or an asynchronous one;
                or the file cannot be written.
        """
        check_file(path, [simulation.schedule for _, simulation in self.simulations])
        if Path(path).suffix == ".csv":
            write_text(path, to_csv(self.simulations[0][1].schedule))
        else:
            write_figure(path, lambda: self.svg() + "\n", self.html)

    def _heading(self, name: str, simulation: Simulation) -> str:
        """Return the heading of a schedule's panel."""
        suffix = "" if simulation.period is None else " in the steady state"
        max_live_share = max(simulation.live_shares)
        return (
            f"{name}: {self.format_time(simulation.seconds)}, bubble {simulation.bubble:.1%}{suffix}, "
            f"{max_live_share:g} live"
        )

    def _heads_and_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return (heads, rows): the heads of the table's columns, and the cells of each schedule's row."""
        number_text_dicts = [self._number_texts(simulation) for _, simulation in self.simulations]
        rows = [
            [name, *text_by_head.values()]
            for (name, _), text_by_head in zip(self.simulations, number_text_dicts, strict=True)
        ]
        return ["", *number_text_dicts[0]], rows

    def _number_texts(self, simulation: Simulation) -> dict[str, str]:
        """Return the cells of a schedule's row: the text of each number, by the head of its column."""
        has_bytes = any(any(other_simulation.live_bytes) for _, other_simulation in self.simulations)
        return {
            "time": self.format_time(simulation.seconds),
            "each": self.format_time(simulation.seconds_per_microbatch),
            "bubble": f"{simulation.bubble:.1%}",
            "own span": f"{abs(simulation.bubble_own_span):.1%}",
            "live": f"{max(simulation.live_shares):g}",
            **({"live bytes": size(max(simulation.live_bytes))} if has_bytes else {}),
            "weights": f"{_weight_copies(simulation.schedule):g}",
            "apart": self.format_time(simulate(simulation.schedule, simulation.costs, "dataflow").seconds),
        }


def schedule_to_draw(plan: PipelinePlan, updates: int | None = None) -> Schedule:
    """Make the schedule of a plan for a drawing. An asynchronous schedule is made long enough to show its steady state.

    Args:
        plan: the plan of the schedule.
        updates: number of updates of an asynchronous schedule; `None`: enough updates for most of the schedule to be in
            the steady state.

    Example:
        >>> schedule_to_draw(PipelinePlan.parse("pipedream:4")).microbatches
        16
    """
    if not plan.asynchronous:
        return plan.schedule()
    assert plan.ranks is not None
    return plan.schedule(updates or max(3, math.ceil(4 * plan.ranks / (plan.microbatches or 1))))


def page(title: str, body: str) -> str:
    """Return a self-contained HTML page. Its first paragraph describes the action under the pointer.

    Args:
        title: title of the page, plain text.
        body: HTML of the page's content, with charts from `Chart.svg`.
    """
    description = element("p", "Point at an action.", id="action")
    return markup.page(title, element("h1", title), description, Markup(body), style=_STYLE, script=_SCRIPT)


def check_file(path: str | Path, schedules: Sequence[Schedule]) -> None:
    """Check, before anything is drawn, that a chart can be written to a file.

    Args:
        path: path of the file.
        schedules: the schedules to be drawn.

    Raises:
        UserError: the suffix is not .svg, .html or .csv; a CSV is to hold several schedules or an asynchronous one; or
            the folder does not exist.
    """
    if not is_folder(Path(path).parent):
        raise UserError(
            f"{path} cannot be written: there is no folder {Path(path).parent}; make the folder, or give another name"
        )
    suffix = Path(path).suffix
    if suffix not in ENDINGS:
        raise UserError(f"{path}: expected a name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if suffix == ".csv":
        if len(schedules) > 1:
            raise UserError(f"{path}: a CSV holds one schedule, not {len(schedules)}; draw the schedules one by one")
        for schedule in schedules:
            to_csv(schedule)  # refuses asynchronous schedules


def _weight_copies(schedule: Schedule) -> float:
    """Return how many copies of a rank's share of the model the fullest rank holds, with all versions of the weights.

    A rank's share is the number of stages divided by the number of ranks.
    """
    # by stage, the lifetimes of the versions of its weights
    lifetimes = version_lifetimes(schedule, ticks(schedule)) if schedule.versions else {}
    rank_copy_counts = (  # for each rank, its copies of stages' weights
        sum(ring_slot_count(lifetimes[stage]) if lifetimes else 1 for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    )
    return max(rank_copy_counts) * schedule.ranks / schedule.stages


_STYLE = markup.STYLE + (
    "h1{font-size:1.3rem}#action{font-weight:600;position:sticky;top:0;background:Canvas;padding:.3rem 0}"
    "svg.on g[data-m]{opacity:.25}svg.on g.on{opacity:1}"
)
_SCRIPT = (
    "const action=document.getElementById('action');document.addEventListener('mouseover',e=>{"
    "const g=e.target.closest('g[data-m]'),s=e.target.closest('svg');"
    "document.querySelectorAll('.on').forEach(o=>o.classList.remove('on'));if(!g)return;s.classList.add('on');"
    "action.textContent=g.querySelector('title').textContent;"
    "s.querySelectorAll(`g[data-m=\"${g.dataset.m}\"]`).forEach(o=>o.classList.add('on'))})"
)
